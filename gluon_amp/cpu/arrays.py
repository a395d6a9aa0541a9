"""Float16 arrays and their float32 masters, outside any graph.

By our kernels on a CPU, where MXNet takes halves one by one; by MXNet's operators on a GPU.
"""
import functools
from typing import Any, Iterable, Sequence

from .._mxnet import mx, np
from . import library


@functools.lru_cache(maxsize=None)
def dtype_name(dtype: Any) -> str:
    return np.dtype(dtype).name


def to_float32(array: "mx.nd.NDArray") -> "mx.nd.NDArray":
    """A float16 array in float32; a float32 array itself."""
    if array.dtype is np.float16 and _on_cpu(array) and library.started():
        return library.call("_gluon_amp_widen", [array])
    return array.astype("float32", copy=False)


def to_float16(array: "mx.nd.NDArray") -> "mx.nd.NDArray":
    """A float32 array in float16; a float16 array itself."""
    if array.dtype is np.float32 and _on_cpu(array) and library.started():
        return library.call("_gluon_amp_narrow", [array])
    return array.astype("float16", copy=False)


def copy_into(held: Sequence["mx.nd.NDArray"], arrays: Sequence["mx.nd.NDArray"]) -> None:
    """Copies arrays into some that are there, in the types that these have."""
    if not library.copy_all(arrays, held):
        for to, array in zip(held, arrays):
            array.astype(to.dtype, copy=False).copyto(to)


def narrow(master: "mx.nd.NDArray", weight: "mx.nd.NDArray") -> None:
    """Rounds a master into its float16 weight."""
    if _on_cpu(weight):
        library.call("_gluon_amp_narrow", [master], out=weight)
    else:
        mx.nd.cast(master, dtype="float16", out=weight)


def follow(master: "mx.nd.NDArray", weight: "mx.nd.NDArray") -> None:
    """Takes over what somebody has written into a weight: where it is no longer its
    master rounded, the master becomes the weight."""
    if _on_cpu(weight):
        library.call("_gluon_amp_follow", [master, weight], out=master)
    else:
        unchanged = master.astype("float16") == weight
        mx.nd.where(unchanged, master, weight.astype("float32"), out=master)


def _on_cpu(array: "mx.nd.NDArray") -> bool:
    return array.context.device_type != "gpu" and array.stype == "default"


def multiply(arrays: Iterable[Any], factor: float) -> None:
    """In place."""
    for array in arrays:
        (array * factor).copyto(array)
