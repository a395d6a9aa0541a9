"""Imports MXNet, or raises an ImportError with the reason and the remedy.

MXNet 1.9.1 predates numpy 1.24, Python's CUDA wheels and GPUs of capability 9.0. `cuda/load.py`
loads CUDA libraries and kernels for the visible GPUs. This module sets `MXNET_SAFE_ACCUMULATION` to
1 (float16 sums in float32) and `MXNET_SUBGRAPH_VERBOSE` to 0 (no line on stderr for each executor),
unless the user has set them. MXNet gets the names that numpy has removed (`numpy_names.py`); numpy
itself does not change.
Modules of the core import `mx` and `np` from here.
"""
import functools
import multiprocessing
import numbers
import os
import re
import struct
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterator, Optional

import numpy as np

from . import numpy_names
from .checks import pip_install
from .cuda import load, wheel

# Held while a graph is recorded, and during a backward pass: MXNet has no locks for either, and
# graphs of different threads share the nodes of parameters.
GRAPH_LOCK = threading.RLock()

# Whether defects of MXNet are repaired, in float32 too (docs/import.md).
REPAIRS = os.environ.get("GLUON_AMP_REPAIRS") != "off"

# System libraries of MXNet's wheels, and their packages in Debian and Ubuntu.
_SYSTEM = {"libgomp": "libgomp1", "libquadmath": "libquadmath0"}
# MXNet's wheels require numpy below 2, and so Python below 3.13
_INSTALL = "pip install --no-deps mxnet==1.9.1 (or mxnet-cu112==1.9.1 for NVIDIA GPUs)" \
    if numpy_names.NUMPY_2 else f"{pip_install('cpu')} ('.[cu112]' for NVIDIA GPUs)"


def _import_mxnet() -> Any:
    builds = wheel.installed_builds()
    if len(builds) > 1:
        raise ImportError(
            f"two MXNet builds are installed over each other: {', '.join(builds)}. "
            f"Remove both and install one: pip uninstall -y {' '.join(builds)}; {_INSTALL}")
    numpy_names.install()
    os.environ.setdefault("MXNET_SAFE_ACCUMULATION", "1")
    os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
    load.prepare(builds)
    if "mxnet" not in sys.modules:  # a failed import leaves some of its modules
        for name in [n for n in sys.modules if n.startswith("mxnet.")]:
            del sys.modules[name]
    try:
        import mxnet
    except ImportError as error:
        if getattr(error, "name", None) not in (None, "mxnet"):
            # Python 3.12 has no distutils; setuptools includes it
            package = "setuptools" if error.name == "distutils" else error.name
            raise ImportError(f"MXNet needs the package {package}: pip install {package}") \
                from error
        raise ImportError(f"gluon_amp needs MXNet 1.9.1: {_INSTALL}") from error
    except OSError as error:
        if "libcuda.so" in str(error):
            raise ImportError("this MXNet is the CUDA build, and the NVIDIA driver (libcuda.so.1) "
                              "is not installed: install the driver, or the CPU build with "
                              f"pip uninstall -y {' '.join(builds)}; {pip_install('cpu')}"
                              ) from error
        missing = next((name for name in _SYSTEM if f"{name}.so" in str(error)), None)
        if missing is not None:
            raise ImportError(f"MXNet needs the system's {missing}: apt install "
                              f"{_SYSTEM[missing]}") from error
        problems = load.prepared.problems if load.prepared else []
        remedy = "; ".join(problems) or f"Its CUDA 11 libraries come with {pip_install('cu112')}"
        others = [build for build in builds if build != wheel.DISTRIBUTION]
        if others:
            remedy += f", for {wheel.DISTRIBUTION}: pip uninstall -y {' '.join(others)} first"
        raise ImportError(f"MXNet does not load: {error}. {remedy}") from error
    load.check()
    if numpy_names.NUMPY_2:
        _sum_in_float64(mxnet.metric.EvalMetric)
    if not hasattr(np.ndarray, "tostring"):
        _pack_labels(mxnet.recordio)
    _refuse_symbols(mxnet.autograd.Function, mxnet.sym.Symbol)
    if REPAIRS:
        _leave_batch_unknown(mxnet.gluon.rnn.rnn_layer._RNNLayer, mxnet)
    if sys.version_info >= (3, 14) or multiprocessing.get_start_method(True) == "forkserver":
        mxnet.gluon.data.dataloader.multiprocessing = _ForkedWorkers()
    _add_advice(mxnet.base, sys.modules["mxnet._ffi._ctypes.function"])
    return mxnet


def replace(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a function of MXNet by one that has the original as its argument `original`."""
    def decorate(function: Any) -> Callable[..., Any]:
        original = getattr(owner, name)
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "original": original}
        functools.update_wrapper(function, original)
        setattr(owner, name, function)
        return function
    return decorate


@contextmanager
def environment(name: str, value: Optional[str]) -> Iterator[None]:
    """Sets an environment variable for MXNet; None leaves it unchanged."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif value is not None:
            del os.environ[name]


def keeping_graphs(group2ctx: Any) -> ContextManager[None]:
    """Binds a symbol without MXNet's oneDNN subgraphs. The backend `default` creates none, but
    loses the devices of groups. `NONE` keeps these, and logs a message at each binding."""
    return environment("MXNET_SUBGRAPH_BACKEND", "NONE" if group2ctx else "default")


def _refuse_symbols(function: Any, symbol: Any) -> None:
    """Refuses symbols in an `autograd.Function`: MXNet would pass them to its library as arrays,
    which crashes."""
    @replace(function, "__call__")
    def call(self: Any, *inputs: Any, original: Any) -> Any:
        if any(isinstance(each, symbol) for each in inputs):
            raise TypeError(f"an autograd.Function takes arrays and cannot be part of a graph. "
                            f"{type(self).__name__} received: a Symbol")
        return original(self, *inputs)


class _ForkedWorkers:
    """The module `multiprocessing` for MXNet's DataLoader: forks workers where the start method is
    forkserver, the default since Python 3.14. MXNet and scripts written for it expect that: a
    worker of forkserver imports the script again, and MXNet without this module."""

    def __getattr__(self, name: str) -> Any:
        forks = multiprocessing.get_start_method() == "forkserver"
        context: Any = multiprocessing.get_context("fork") if forks else multiprocessing
        return getattr(context, name) if hasattr(context, name) else getattr(multiprocessing, name)


# Messages of MXNet about operands that differ in type or shape, and the advice for each.
_FLOAT = r"(?:data type |= |type = |')?(?:bfloat16|float16|float32)'?"
_ADVICE = (
    (rf"(?:[Ee]xpected|Provided) {_FLOAT}(?:,| v\.s\.) (?:got|given|inferred) {_FLOAT}"
     "|Operator where is missing FInferType",
     "one array has 16 bits and another 32, such as parameter.data() of a converted network and a "
     "float32 array. Cast it: parameter.data().astype('float32'). Or convert with the policy "
     "'mixed_float16' or 'mixed_bfloat16', which leaves parameters in float32 (docs/errors.md)"),
    (r"Incompatible attr in node (?!\S*_backward )\S+ at .*expected \[[\d,-]*\], got \[[\d,-]*\]",
     "+, -, *, / and comparisons of symbols take equal shapes, those of arrays broadcast. In "
     "hybrid_forward, use F.broadcast_mul(a, b), F.broadcast_add(a, b) and the like "
     "(docs/errors.md)"))


def _add_advice(base: Any, functions: Any) -> None:
    """Adds advice to some of MXNet's error messages. Both modules raise them."""
    @replace(base, "get_last_ffi_error")
    def get_last_ffi_error(*, original: Any) -> Any:
        error = original()
        said = next((advice for found, advice in _ADVICE if re.search(found, str(error))), "")
        return type(error)(f"{error}\ngluon_amp: {said}") if said else error

    functions.get_last_ffi_error = get_last_ffi_error


def _leave_batch_unknown(layer: Any, mxnet: Any) -> None:
    """Lets RNN layers in graphs create their states in numpy mode, where an unknown size is -1:
    MXNet writes 0, which is the size of an empty array."""
    @replace(layer, "begin_state")
    def begin_state(self: Any, batch_size: int = 0, func: Any = mxnet.nd.zeros, *, original: Any,
                    **kwargs: Any) -> Any:
        unknown = batch_size == 0 and func is mxnet.sym.zeros and mxnet.util.is_np_shape()
        return original(self, -1 if unknown else batch_size, func, **kwargs)


def _pack_labels(recordio: Any) -> None:
    """Lets MXNet pack records with several labels: it calls arrays' `tostring`, which numpy 2.3
    has removed."""
    @replace(recordio, "pack")
    def pack(header: Any, s: bytes, *, original: Any) -> bytes:
        _, label, number, more = header
        if isinstance(label, numbers.Number):
            return bytes(original(header, s))
        labels = np.asarray(label, np.float32)
        return struct.pack(recordio._IR_FORMAT, labels.size, 0, number, more) \
            + labels.tobytes() + s


def _sum_in_float64(metric: Any) -> None:
    """Makes MXNet's metrics accumulate in float64. A Python number plus a float32 number is float64
    in numpy 1, but float32 in numpy 2, where 2**24 + 1 is 2**24."""
    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name in ("sum_metric", "global_sum_metric") and isinstance(value, (float, np.floating)):
            value = np.float64(value)
        object.__setattr__(self, name, value)

    metric.__setattr__ = set_attribute


if TYPE_CHECKING:
    import mxnet as mx
else:
    mx = _import_mxnet()


def has_cudnn_9() -> bool:
    """Whether MXNet's CUDA build calls cuDNN 9."""
    return load.prepared is not None and load.prepared.choice.cuda >= 12
