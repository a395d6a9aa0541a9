"""Loads the engine: the library that runs MXNet's operators in float16 on a CPU.

`setup.py` compiles it from the C++ files of this folder, its kernels once for each entry of
`VARIANTS`. The import of gluon_amp, before MXNet runs any operator, replaces the CPU functions of
MXNet's operators by functions that dispatch on type (dispatch.cc). This depends on the binary
layout of MXNet 1.9.1's wheels (native.h). `start` first checks MXNet's version and the compiler's
name in its library, then the layout of three objects in memory. If a check fails, no operator is
replaced, and the first float16 use on a CPU raises the reason.

`GLUON_AMP_ISA` selects a variant by name. `GLUON_AMP_ENGINE` selects another library file
(`make sanitize`) or, as `off`, none.
"""
import contextlib
import ctypes
import functools
import importlib
import os
import struct
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int64,
    c_uint,
    c_void_p,
)
from pathlib import Path
from typing import Any, BinaryIO, Callable, FrozenSet, Iterator, List, Optional, Sequence

from mxnet._ctypes.ndarray import _imperative_invoke
from mxnet.ndarray.sparse import _ndarray_cls

from .._mxnet import mx, np
from .._numpy import CORE
from ..annotations import DType
from . import bfloat16

# the features of the processor and of the operating system
__cpu_features__ = importlib.import_module(f"{CORE}._multiarray_umath").__cpu_features__

PREFIX = "_gluon_amp_"  # prefix of operators that MXNet does not have

# Attributes with constants, which float16 kernels round to float16 as on a GPU; and operators whose
# "start" and "stop" are constants too (in others they are indices).
CONSTANTS = ("scalar", "value", "a_min", "a_max", "slope", "fill_value", "val", "constant_value",
             "on_value", "off_value", "nan", "posinf", "neginf", "to_begin_scalar", "to_end_scalar")
RANGES = ("_arange", "_npi_arange", "_linspace", "_npi_logspace")

VARIANTS = {  # best first: name -> the processor features that it requires
    "avx512": ("AVX512F", "AVX512BW", "AVX512VL", "AVX512DQ", "AVX2", "F16C", "FMA3"),
    "avx2": ("AVX2", "F16C", "FMA3"),
    "portable": (),
}
VERSION = "1.9.1"
COMPILER = b"GCC: (GNU) 4.8.5"
X86_64 = 62  # in an ELF header

PATH = Path(os.environ.get("GLUON_AMP_ENGINE") or Path(__file__).with_name("_engine.so"))
_REBUILD = "Install the wheel again, or build them in a checkout of gluon_amp, with a C++ " \
           "compiler: pip install --force-reinstall --no-deps . (make -B setup, if Python " \
           "imports the checkout's folder)"


class KernelError(RuntimeError):
    """The engine, which runs float16 on CPUs, does not load; the message has the reason.

    The first float16 use on a CPU raises it. Everything else works without the engine.
    """


class Counts(ctypes.Structure):
    """Counts of values by exponent; the same as in kernels/kernels.h."""
    _fields_ = [("bins", c_int64 * 256)] + [
        (name, c_int64) for name in ("zero", "infinite", "overflowed", "flushed")] + [
        (name, c_double) for name in ("squares", "error_squares")]


class Updates(ctypes.Structure):
    """Counts of updates of weights; the same as in kernels/kernels.h."""
    _fields_ = [("counts", Counts), ("changed", c_int64), ("lost", c_int64)]


class WatchedRow(ctypes.Structure):
    """Counts of a watched node; the same as in watch.h."""
    _fields_ = [("index", c_int64), ("backward", c_int64), ("counts", Counts),
                ("samples", c_int64), ("sample", c_float * 1024)]


class _Table(ctypes.Structure):
    """The library's function table; the same as in entry.cc."""
    _fields_ = [
        ("sizes", c_int64 * 4),  # of this structure, Counts, Updates and WatchedRow
        ("start", ctypes.CFUNCTYPE(c_int, c_char_p, c_int, POINTER(c_char_p), c_int,
                                   POINTER(c_char_p))),
        ("reason", ctypes.CFUNCTYPE(c_char_p)),
        ("probe", ctypes.CFUNCTYPE(c_char_p, c_void_p, c_void_p, c_int64)),
        ("inputs_fit", ctypes.CFUNCTYPE(c_int, c_char_p, c_void_p)),
        ("map_fits", ctypes.CFUNCTYPE(c_int, c_char_p, c_int64)),
        ("description_fits", ctypes.CFUNCTYPE(c_int, c_char_p)),
        ("dropout_fits", ctypes.CFUNCTYPE(c_int, c_char_p)),
        ("dispatched", ctypes.CFUNCTYPE(c_char_p)),
        ("use_generic_code", ctypes.CFUNCTYPE(None, c_int)),
        ("own_code", ctypes.CFUNCTYPE(c_char_p)),
        ("on_one_cpu", ctypes.CFUNCTYPE(c_int, POINTER(c_void_p), c_int64, c_int)),
        ("versions", ctypes.CFUNCTYPE(c_int, c_int, POINTER(c_void_p), c_void_p, c_int)),
        ("marks", ctypes.CFUNCTYPE(None, POINTER(c_void_p), c_int64, c_int, c_char_p)),
        ("free_graphs", ctypes.CFUNCTYPE(None, POINTER(c_void_p), c_int64)),
        ("other_gradients", ctypes.CFUNCTYPE(c_int64, POINTER(c_void_p), c_int64,
                                             POINTER(c_void_p), c_int64, POINTER(c_void_p))),
        ("copy_all", ctypes.CFUNCTYPE(c_int, POINTER(c_void_p), POINTER(c_void_p), c_int64)),
        ("watched", ctypes.CFUNCTYPE(c_int64)),
        ("watched_rows", ctypes.CFUNCTYPE(c_void_p)),
        ("watched_names", ctypes.CFUNCTYPE(c_void_p, POINTER(c_int64))),
        ("count", ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int, POINTER(Counts))),
        ("count_updates", ctypes.CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_void_p), c_int64,
                                           POINTER(c_void_p))),
        ("random_state", ctypes.CFUNCTYPE(c_int64, c_void_p, c_int)),
        ("scales", ctypes.CFUNCTYPE(c_char_p, c_int64)),
        ("set_scales", ctypes.CFUNCTYPE(None, c_int64, c_char_p)),
        ("forget_scales", ctypes.CFUNCTYPE(None, c_int64)),
        ("end_user_code", ctypes.CFUNCTYPE(None)),
        ("keeps_blocks", ctypes.CFUNCTYPE(c_int)),
    ]


def choose() -> str:
    """Returns the name of the variant to use."""
    fit = [name for name, needs in VARIANTS.items()
           if all(__cpu_features__.get(feature, False) for feature in needs)]
    wanted = os.environ.get("GLUON_AMP_ISA") or fit[0]
    if wanted not in fit:
        raise KernelError(f"GLUON_AMP_ISA must be one of {', '.join(fit)} on this processor. "
                          f"Received: {wanted!r}")
    return wanted


def compilers(library: Path) -> bytes:
    """Returns the compilers' names in an ELF library, its section .comment; empty without one."""
    try:
        with open(library, "rb") as file:
            return _comment(file, library)
    except (struct.error, IndexError, ValueError, OSError, OverflowError, MemoryError):
        return b""


def _comment(file: BinaryIO, library: Path) -> bytes:
    header = file.read(64)
    if header[:5] != b"\x7fELF\x02":
        raise KernelError(f"{library} is not a 64-bit ELF library")
    machine, = struct.unpack_from("<H", header, 18)
    if machine != X86_64:
        given = {183: "aarch64"}.get(machine, f"the ELF machine {machine}")
        raise KernelError("float16 on a CPU needs MXNet's wheel for x86-64. Received: "
                          f"{library}, for {given}")
    at, = struct.unpack_from("<Q", header, 40)
    size, count, names = struct.unpack_from("<HHH", header, 58)
    sections = []
    for i in range(count):
        file.seek(at + i * size)
        section = file.read(size)
        name, = struct.unpack_from("<I", section)
        offset, length = struct.unpack_from("<QQ", section, 24)
        sections.append((name, offset, length))
    _, offset, length = sections[names]
    file.seek(offset)
    strings = file.read(length)
    for name, offset, length in sections:
        if strings[name:name + 9] == b".comment\0":
            file.seek(offset)
            return file.read(length)
    return b""


def check_mxnet(version: str, compiler: bytes) -> None:
    """Refuses an MXNet whose binary layout differs from native.h."""
    if version != VERSION or COMPILER not in compiler:
        said = compiler.decode("ascii", "replace").replace("\0", " ").strip() or "no name"
        raise KernelError(
            f"float16 on a CPU needs the wheel mxnet {VERSION} (or mxnet-cu112 {VERSION}), as it "
            f"was compiled for PyPI by GCC 4.8.5. Received: MXNet {version}, compiled by {said}")


def _operator_names() -> List[str]:
    count, names = c_uint(), POINTER(c_char_p)()
    mx.base.check_call(mx.base._LIB.MXListAllOpNames(byref(count), byref(names)))
    return [names[i].decode() for i in range(count.value)]


@functools.lru_cache(maxsize=None)
def table() -> _Table:
    """Loads the library into the process and returns its function table."""
    if not PATH.exists():
        raise KernelError(f"gluon_amp's CPU kernels are missing: {PATH}. {_REBUILD}")
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        raise KernelError(f"gluon_amp's CPU kernels do not load: {error}. {_REBUILD}") from error
    if not hasattr(library, "gluon_amp_engine"):
        raise KernelError(f"gluon_amp's CPU kernels are not in {PATH}. {_REBUILD}")
    library.gluon_amp_engine.restype = POINTER(_Table)
    made: _Table = library.gluon_amp_engine().contents
    if list(made.sizes) != [ctypes.sizeof(s) for s in (_Table, Counts, Updates, WatchedRow)]:
        raise KernelError(f"gluon_amp's CPU kernels are of another version: {PATH}. {_REBUILD}")
    return made


def _start() -> str:
    if os.environ.get("GLUON_AMP_ENGINE") == "off":
        raise KernelError("GLUON_AMP_ENGINE=off leaves MXNet as it is: float16 does not run on a "
                          "CPU. Unset it")
    variant = choose()
    library = Path(mx.base._LIB._name)
    check_mxnet(mx.__version__, compilers(library))
    engine = table()
    names = _operator_names()
    variable = mx.sym.var("x")
    symbol = mx.sym.negative(variable)
    said = engine.probe(symbol.handle, variable.handle, len(names))
    if said:
        raise KernelError(f"this MXNet {VERSION} is laid out differently from PyPI's wheels, so "
                          f"float16 cannot run on a CPU: {said.decode()}")
    constants = [*CONSTANTS, *(f"{name}.{key}" for name in RANGES for key in ("start", "stop"))]
    if engine.start(variant.encode(), len(names), _encoded(names),
                    len(constants), _encoded(constants)) < 0:
        raise KernelError(f"gluon_amp's CPU kernels do not start: {engine.reason().decode()}")
    global _table
    _table = engine
    _end_after_user_code(engine)
    return variant


def _end_after_user_code(engine: _Table) -> None:
    """Delays exit until no thread runs the user's Python (CustomOp, autograd.Function).

    Otherwise MXNet would deadlock or abort. MXNet calls this function at exit.
    """
    notify = mx.base._LIB.MXNotifyShutdown

    def end_and_notify() -> int:
        engine.end_user_code()
        failed: int = notify()
        return failed

    mx.base._LIB.MXNotifyShutdown = end_and_notify


def _encoded(names: Sequence[str]) -> Any:
    return (c_char_p * len(names))(*(name.encode() for name in names))


_variant: Optional[str] = None
_error: Optional[KernelError] = None
_table: Optional[_Table] = None  # set by `start`


def start() -> None:
    """Replaces MXNet's operators, once; `load` raises the reason if that failed."""
    global _variant, _error
    if _variant is None:
        try:
            _variant, _error = _start(), None
            bfloat16.install()
        except KernelError as error:
            _error = error


def load() -> str:
    """Returns the name of the engine's variant, or raises KernelError if it does not run."""
    if _variant is None:
        raise _error or KernelError("gluon_amp's CPU kernels were not started")
    return _variant


def started() -> bool:
    """Whether the engine runs."""
    return _table is not None


def versions(arrays: Sequence["mx.nd.NDArray"],
             since: Optional["mx.nd.NDArray"] = None) -> Optional["mx.nd.NDArray"]:
    """Returns the number of writes to each array, on any device, by all earlier operations.

    Returns None if the engine does not run. The call is asynchronous; reading the result waits.

    Args:
        arrays: the arrays.
        since: an earlier result, which is overwritten with the number of writes since then.
    """
    if _table is None:
        return None
    into = mx.nd.empty(len(arrays), mx.cpu(), "int64") if since is None else since
    mx.base.check_call(_table.versions(len(arrays), _handles(arrays), into.handle,
                                       since is not None))
    return into


def marks(weights: Sequence["mx.nd.NDArray"], clear: bool = False) -> Sequence[int]:
    """Returns whether backward passes have written each weight's gradient since the marks were
    cleared. MXNet sets the marks; `clear` clears them."""
    if _table is None:
        marked = [weight._fresh_grad for weight in weights]
        for weight in weights if clear else ():
            weight._fresh_grad = False
        return marked
    into = ctypes.create_string_buffer(len(weights))
    _table.marks(_handles(weights), len(weights), clear, into)
    return into.raw


def free_graphs(arrays: Sequence["mx.nd.NDArray"]) -> bool:
    """Frees the graphs that autograd has recorded for these arrays, as a backward pass without
    retain_graph does. Returns False if the engine does not run."""
    if _table is None:
        return False
    _table.free_graphs(_handles(arrays), len(arrays))
    return True


def other_gradients(losses: Sequence["mx.nd.NDArray"],
                    own: Sequence["mx.nd.NDArray"]) -> List["mx.nd.NDArray"]:
    """Returns the gradients that a backward pass from these losses writes, besides `own`. Without
    the engine there are none."""
    if _table is None:
        return []
    given = _handles(losses), len(losses), _handles(own), len(own)
    into = (c_void_p * _table.other_gradients(*given, None))()
    _table.other_gradients(*given, into)
    return [_ndarray_cls(c_void_p(handle)) for handle in into]


def copy_all(arrays: Sequence["mx.nd.NDArray"], into: Sequence["mx.nd.NDArray"]) -> bool:
    """Copies arrays into others of the same type, or float16 into float32, after all pending
    operations. Returns False, without copying, if it cannot."""
    mx.nd.waitall()
    return _table is not None and bool(
        _table.copy_all(_handles(arrays), _handles(into), len(arrays)))


def count_updates(arrays: Sequence["mx.nd.NDArray"], before: Sequence["np.ndarray[Any, Any]"],
                  into: Sequence[Updates]) -> None:
    """Adds the counts of updates of float32 arrays since `before` to `into`.

    They include the numbers of values that changed, and of those that would not have changed in
    float16. `before` becomes the arrays' values.
    """
    load()
    mx.nd.waitall()
    addresses = c_void_p * len(arrays)
    table().count_updates(_handles(arrays), addresses(*(b.ctypes.data for b in before)),
                          len(arrays), addresses(*map(ctypes.addressof, into)))


def _handles(arrays: Sequence["mx.nd.NDArray"]) -> Any:
    return (c_void_p * len(arrays))(*[array.handle.value for array in arrays])


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[Callable[[], None]]:
    """Restores the state of MXNet's random numbers on CPUs at the end.

    It yields a function that restores the state at once, to draw the same numbers again.
    """
    load()
    state = ctypes.create_string_buffer(table().random_state(None, 0))
    mx.nd.waitall()  # MXNet's engine allocates a thread's state after the thread's first request
    table().random_state(state, 0)

    def put_back() -> None:
        try:
            mx.nd.waitall()
        finally:  # also after an operator's error
            table().random_state(state, 1)
    try:
        yield put_back
    finally:
        put_back()


@functools.lru_cache(maxsize=None)
def dispatched() -> FrozenSet[str]:
    """Returns the names in graphs of MXNet's operators that dispatch on type."""
    load()
    return frozenset(table().dispatched().decode().split())


def keeps_blocks() -> bool:
    """Whether bfloat16 convolutions read and write blocks of 16 channels on this processor."""
    return _table is not None and bool(_table.keeps_blocks())


@functools.lru_cache(maxsize=None)
def own_code() -> FrozenSet[str]:
    """Returns MXNet's operators with hand-written kernels in the engine."""
    return frozenset(table().own_code().decode().split())


@functools.lru_cache(maxsize=None)
def _operator(name: str) -> c_void_p:
    load()
    handle = c_void_p()
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(c_char_p(name.encode()), byref(handle)))
    return handle


def call(name: str, inputs: Sequence["mx.nd.NDArray"], out: Any = None, **attrs: Any) -> Any:
    """Runs an operator of the engine imperatively. Results have the class of the first input."""
    numpy_mode = isinstance(inputs[0], mx.np.ndarray)
    return _imperative_invoke(_operator(name).value, inputs, list(attrs), list(attrs.values()),
                              out, numpy_mode, False)


def on_one_cpu(arrays: Sequence["mx.nd.NDArray"], dtype: Optional[DType] = None) -> bool:
    """Whether these are dense arrays on one CPU, of one type if given. False without the engine."""
    if _variant is None:
        return False
    wanted = -1 if dtype is None else mx.nd.ndarray._DTYPE_NP_TO_MX[dtype]
    return bool(table().on_one_cpu(_handles(arrays), len(arrays), wanted))
