"""Loads the engine: the library that runs MXNet's operators in float16 on a CPU.

`setup.py` compiles it from the C++ files of this folder, its kernels once for each set of
instructions in variants.json. The import of gluon_amp, before MXNet runs any operator, replaces the
CPU functions of MXNet's operators by functions that dispatch on type (dispatch.cc). This depends on
the binary layout of MXNet 1.9.1's wheels (native.h). `start` first checks MXNet's version and the
compiler's name in its library, then the layout of three objects in memory. If a check fails, no
operator is replaced, and the first float16 use on a CPU raises the reason.

`GLUON_AMP_ISA` selects a variant by name. `GLUON_AMP_ENGINE` selects another library file
(`make -C tests sanitize`) or, as `off`, none.
"""
import contextlib
import ctypes
import functools
import importlib
import json
import mmap
import os
import weakref
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from mxnet._ctypes.ndarray import _imperative_invoke
from mxnet.ndarray.sparse import _ndarray_cls

from .._mxnet import REPAIRS, mx, np, replace
from ..annotations import DType
from ..numpy_names import CORE
from . import bfloat16

# the features of the processor and of the operating system
__cpu_features__ = importlib.import_module(f"{CORE}._multiarray_umath").__cpu_features__

SETTINGS = "__gluon_amp__"  # the attribute of nodes with settings
_MOST_OPERATORS = 256  # of most graphs
PREFIX = "_gluon_amp_"  # prefix of operators that MXNet does not have

# best first: for each name the processor features that it requires
VARIANTS = {name: row["features"] for name, row in json.loads(
    Path(__file__).with_name("variants.json").read_text()).items()}
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


class _Function(ctypes.Structure):
    """A row of the library's list of functions; the same as in entry.cc."""
    _fields_ = [("name", c_char_p), ("types", c_char_p), ("address", c_void_p)]


_TYPES = {"v": None, "i": c_int, "l": c_int64, "s": c_char_p, "p": c_void_p}

# structures of the engine: of kernels/kernels.h and dispatch/watch.h
COUNTS = np.dtype([
    ("bins", "i8", 256), ("zero", "i8"), ("infinite", "i8"), ("overflowed", "i8"),
    ("flushed", "i8"), ("squares", "f8"), ("error_squares", "f8")])
WATCHED_ROW = np.dtype([("index", "i8"), ("backward", "i8"), ("counts", COUNTS), ("samples", "i8"),
                        ("sample", "f4", 1024)])


class _Functions:
    """The library's functions, as attributes. The last row of the list has no name."""

    def __init__(self, rows: Any) -> None:
        i = 0
        while rows[i].name is not None:
            types: List[Any] = [_TYPES[letter] for letter in rows[i].types.decode()]
            setattr(self, rows[i].name.decode(), ctypes.CFUNCTYPE(*types)(rows[i].address))
            i += 1

    def __getattr__(self, name: str) -> Any:
        raise KernelError(f"gluon_amp's CPU kernels are of another version: {PATH}. {_REBUILD}")


def choose() -> str:
    """Returns the name of the variant to use."""
    fit = [name for name, needs in VARIANTS.items()
           if all(__cpu_features__.get(feature, False) for feature in needs)]
    wanted = os.environ.get("GLUON_AMP_ISA") or fit[0]
    if wanted not in fit:
        raise KernelError(f"GLUON_AMP_ISA must be one of {', '.join(fit)} on this processor. "
                          f"Received: {wanted!r}")
    return wanted


def compiler_of(library: Path) -> bytes:
    """Returns the name of GCC in an ELF library, the last one there; empty without one."""
    try:
        with open(library, "rb") as file:
            header = file.read(20)
            if header[:5] != b"\x7fELF\x02":
                raise KernelError(f"{library} is not a 64-bit ELF library")
            machine = int.from_bytes(header[18:], "little")
            if machine != X86_64:
                name = {183: "aarch64"}.get(machine, f"the ELF machine {machine}")
                raise KernelError("float16 on a CPU needs MXNet's wheel for x86-64. Received: "
                                  f"{library}, for {name}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                at = data.rfind(b"GCC: (")  # 2 kB before the end
                return data[at:data.find(b"\0", at)] if at >= 0 else b""
    except OSError:
        return b""


def check_mxnet(version: str, compiler: bytes) -> None:
    """Refuses an MXNet whose binary layout differs from native.h."""
    if version != VERSION or COMPILER not in compiler:
        name = compiler.decode("ascii", "replace") or "no name"
        raise KernelError(
            f"float16 on a CPU needs the wheel mxnet {VERSION} (or mxnet-cu112 {VERSION}), as it "
            f"was compiled for PyPI by GCC 4.8.5. Received: MXNet {version}, compiled by {name}")


def _operator_names() -> List[str]:
    count, names = c_uint(), POINTER(c_char_p)()
    mx.base.check_call(mx.base._LIB.MXListAllOpNames(byref(count), byref(names)))
    return [names[i].decode() for i in range(count.value)]


@functools.lru_cache(maxsize=None)
def table() -> Any:
    """Loads the library into the process and returns its functions."""
    if not PATH.exists():
        raise KernelError(f"gluon_amp's CPU kernels are missing: {PATH}. {_REBUILD}")
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        raise KernelError(f"gluon_amp's CPU kernels do not load: {error}. {_REBUILD}") from error
    if not hasattr(library, "gluon_amp_functions"):
        raise KernelError(f"gluon_amp's CPU kernels are not in {PATH}. {_REBUILD}")
    library.gluon_amp_functions.restype = POINTER(_Function)
    return _Functions(library.gluon_amp_functions())


def _start(columns: str) -> Any:
    if os.environ.get("GLUON_AMP_ENGINE") == "off":
        raise KernelError("GLUON_AMP_ENGINE=off leaves MXNet as it is: float16 does not run on a "
                          "CPU. Unset it")
    variant = choose()
    library = Path(mx.base._LIB._name)
    check_mxnet(mx.__version__, compiler_of(library))
    engine = table()
    names = _operator_names()
    variable = mx.sym.var("x")
    symbol = mx.sym.negative(variable)
    difference = engine.probe(symbol.handle, variable.handle, len(names))
    if difference:
        raise KernelError(f"this MXNet {VERSION} is laid out differently from PyPI's wheels, so "
                          f"float16 cannot run on a CPU: {difference.decode()}")
    if engine.start(variant.encode(), len(names), _encoded(names), columns.encode(), REPAIRS) < 0:
        raise KernelError(f"gluon_amp's CPU kernels do not start: {engine.reason().decode()}")
    if REPAIRS:
        _end_after_user_code(engine)
    engine.variant = variant
    return engine


def _end_after_user_code(engine: Any) -> None:
    """Delays exit until no thread runs the user's Python (CustomOp, autograd.Function).

    Otherwise MXNet would deadlock or abort. MXNet calls this function at exit.
    """
    @replace(mx.base._LIB, "MXNotifyShutdown")
    def end_and_notify(*, original: Any) -> Any:
        engine.end_user_code()
        return original()


def repairs() -> List[Tuple[str, FrozenSet[str], str]]:
    """Returns the defects of MXNet that the engine repairs (dispatch/repairs.cc): what is wrong,
    the operators, and a test."""
    rows = (row.split("\t") for row in table().list_repairs().decode().splitlines())
    return [(defect, frozenset(names.split()), test) for defect, names, test in rows]


def _encoded(texts: Collection[str]) -> Any:
    return (c_char_p * len(texts))(*map(str.encode, texts))


_table: Any = None  # the functions of the engine that runs
_error: Optional[KernelError] = None


def start(columns: str) -> None:
    """Replaces MXNet's operators, once; `load` raises the reason if that failed. `columns` has what
    the engine reads of the table of operators (graph/operators.py)."""
    global _table, _error
    if _table is None:
        try:
            _table = _start(columns)
            bfloat16.install()
            _keep_symbols()
        except KernelError as error:
            _error = error


def load() -> str:
    """Returns the name of the engine's variant, or raises KernelError if it does not run."""
    if _table is None:
        raise _error or KernelError("gluon_amp's CPU kernels were not started")
    return str(_table.variant)


def started() -> bool:
    """Whether the engine runs."""
    return _table is not None


def overflows() -> List[Tuple[str, str]]:
    """Returns the operators that have rounded finite numbers above 65504 to float16's infinity in
    training since the last call: the operator, and the name of its node, "" if it has none."""
    if _table is None:
        return []
    rows = (row.partition(" ") for row in _table.overflows().decode().splitlines())
    return [(operator, node) for operator, _, node in rows]


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
    into = _vector(len(arrays)) if since is None else since
    mx.base.check_call(_table.versions(len(arrays), _handles(arrays), into.handle,
                                       since is not None))
    return into


def _vector(size: int) -> "mx.nd.NDArray":
    """Returns a vector of int64 numbers on the CPU, in half the time of `mx.nd.empty`."""
    handle = c_void_p()
    cpu, int64 = mx.cpu().device_typeid, mx.nd.ndarray._DTYPE_NP_TO_MX[np.int64]
    mx.base.check_call(mx.base._LIB.MXNDArrayCreateEx(byref(c_uint(size)), 1, cpu, 0, 0, int64,
                                                      byref(handle)))
    return _ndarray_cls(handle)


def read(vector: "mx.nd.NDArray", kind: Any = c_int64) -> List[Any]:
    """Returns the numbers of a vector of this type on the CPU, when they are there."""
    into = (kind * vector.size)()
    mx.base.check_call(mx.base._LIB.MXNDArraySyncCopyToCPU(vector.handle, into,
                                                           c_size_t(len(into))))
    return list(into)


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


def graph_operators(losses: Sequence["mx.nd.NDArray"]) -> FrozenSet[int]:
    """Returns numbers of the operators in the graphs that autograd has recorded for these losses.
    Each hybridized block is an operator; all operators of the user's Python have one of two
    numbers, by whether their gradients read the incoming one. Without the engine, all operators
    have one number."""
    if _table is None:
        return frozenset([0])
    most = _MOST_OPERATORS
    while True:
        into = (c_int64 * most)()
        count = _table.graph_operators(_handles(losses), len(losses), into, most)
        if count <= most:
            return frozenset(into[:count])
        most = count


class Facts(NamedTuple):
    """What the engine knows of the nodes of a symbol, by their names.

    Attributes:
        trained: variables whose gradients a backward pass writes; None without the engine.
        ignoring: operators of the user's Python whose gradients do not read the incoming one.
        blocks: the symbols of hybridized blocks.
    """
    trained: Optional[Set[str]]
    ignoring: Set[str]
    blocks: Dict[str, "mx.sym.Symbol"]


def facts_on_gradients(symbol: "mx.sym.Symbol",
                       gradients: Sequence["mx.nd.NDArray"] = ()) -> Facts:
    """Returns what the engine knows of a symbol's nodes. Variables are trained if their gradients
    are in these arrays."""
    if _table is None:
        return Facts(None, set(), {})
    trained: Set[str] = set()
    ignoring: Set[str] = set()
    blocks = {}
    text = _table.facts_on_gradients(symbol.handle, _handles(gradients), len(gradients))
    for word, _, name in (line.partition(" ") for line in text.decode().splitlines()):
        if word == "trained":
            trained.add(name)
        elif word == "ignores":
            ignoring.add(name)
        elif int(word) in _cached_ops:
            blocks[name] = _cached_ops[int(word)].symbol
    return Facts(trained, ignoring, blocks)


# the CachedOps of hybridized blocks, by their numbers in `graph_operators`
_cached_ops: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def _keep_symbols() -> None:
    """Keeps the symbol of each CachedOp, which MXNet's does not return."""
    class CachedOp(mx.nd.CachedOp):
        __slots__ = ("__weakref__", "symbol")

        def __init__(self, symbol: "mx.sym.Symbol", *args: Any, **kwargs: Any) -> None:
            super().__init__(symbol, *args, **kwargs)
            self.symbol = symbol
            _cached_ops[_table.cached_op_number(self.handle)] = self
    mx.nd.CachedOp = CachedOp


def copy_all(arrays: Sequence["mx.nd.NDArray"], into: Sequence["mx.nd.NDArray"]) -> bool:
    """Copies arrays into others of the same type, or float16 into float32, after all pending
    operations. Returns False, without copying, if it cannot."""
    mx.nd.waitall()
    return _table is not None and bool(
        _table.copy_all(_handles(arrays), _handles(into), len(arrays)))


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
def operators(word: str = "") -> FrozenSet[str]:
    """Returns the names in graphs of MXNet's operators that dispatch on type; those with this word
    in their row (`operator_rows` in dispatch.cc)."""
    load()
    rows = map(str.split, table().operators().decode().splitlines())
    return frozenset(name for name, *words in rows if not word or word in words)


def settings_attribute(settings: Mapping[str, str]) -> str:
    """Returns the attribute SETTINGS of a node with these settings (dispatch/settings.h)."""
    load()
    text = "".join(f"{key} {value}\n" for key, value in sorted(settings.items())
                   if value and key != "watch")
    number = table().settings(text.encode())
    if number < 0:
        raise ValueError(table().reason().decode())
    watched = settings.get("watch")
    return f"{number}\n{watched}" if watched else str(number)


def keeps_layout() -> bool:
    """Whether bfloat16 convolutions read and write the layout of layout.h on this processor."""
    return _table is not None and bool(_table.keeps_layout())


def _free_with(owner: object, free: Callable[[int], None], address: int) -> None:
    """Frees an object of the engine with its owner, but not at exit, when MXNet has ended."""
    weakref.finalize(owner, free, address).atexit = False


class Attributes:
    """The attributes of a call of an operator, which MXNet parses once."""

    def __init__(self, operator: str, **attrs: Any) -> None:
        self.texts = {name: str(value) for name, value in attrs.items()}
        self.parsed: Optional[int] = None
        if _table is not None:
            names, values = _encoded(self.texts), _encoded(self.texts.values())
            self.parsed = parsed = _table.new_attributes(
                _operator(operator), len(attrs), names, values)
            mx.base.check_call(0 if parsed else -1)
            _free_with(self, _table.free_attributes, parsed)


class Calls:
    """Calls of operators on a GPU. Their dense arrays are the same at each step, and are converted
    to C once; attributes may change. One task of MXNet's engine runs the calls in order.

    Args:
        calls: the operator, inputs and outputs of each.
    """

    def __init__(self, calls: Sequence[Tuple[str, Sequence["mx.nd.NDArray"],
                                             Sequence["mx.nd.NDArray"]]]) -> None:
        self._calls = calls
        self._address: Optional[int] = None
        if _table is not None:
            self._address = address = _table.new_calls()
            _free_with(self, _table.free_calls, address)
            for name, inputs, out in calls:
                _table.add_call(address, _operator(name), _handles(inputs), len(inputs),
                                _handles(out), len(out))

    def run(self, attributes: Sequence[Attributes]) -> None:
        """Runs the calls, each with its attributes."""
        if self._address is None:  # without the engine
            for (name, inputs, out), attrs in zip(self._calls, attributes):
                call(name, inputs, out, **attrs.texts)
        elif attributes:
            mx.base.check_call(_table.run_calls(self._address, (c_void_p * len(attributes))(
                *[attrs.parsed for attrs in attributes])))


@functools.lru_cache(maxsize=None)
def _operator(name: str) -> c_void_p:
    if name.startswith(PREFIX):
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
    wanted = -1 if dtype is None else mx.nd.ndarray._DTYPE_NP_TO_MX[dtype]
    return _table is not None and bool(
        _table.on_one_cpu(_handles(arrays), len(arrays), wanted))
