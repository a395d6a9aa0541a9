"""Float16 and bfloat16 arrays and their float32 masters, outside any graph.

By our kernels on a CPU, where MXNet takes halves one by one; by MXNet's operators on a GPU, many
arrays in one launch.
"""
import functools
from typing import Any, Iterable, List, Sequence

from .._mxnet import mx, np
from ..annotations import DType
from . import library
from .bfloat16 import BFLOAT16, is_bfloat16

HALVES = ("float16", "bfloat16")  # the 16-bit types


@functools.lru_cache(maxsize=None)
def dtype_name(dtype: DType) -> str:
    return "bfloat16" if is_bfloat16(dtype) else np.dtype(dtype).name


def array_type(name: str) -> DType:
    """What MXNet's Python calls a type of arrays."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name).type


def is_half(dtype: DType) -> bool:
    """Whether this is an array's `dtype` of 16 bits."""
    return dtype is np.float16 or dtype is BFLOAT16


def to_float32(array: "mx.nd.NDArray") -> "mx.nd.NDArray":
    """A 16-bit array in float32; a float32 array itself."""
    if is_half(array.dtype) and _on_cpu(array) and library.started():
        return library.call("_gluon_amp_widen", [array])
    return array.astype("float32", copy=False)


def to_half(array: "mx.nd.NDArray", dtype: str) -> "mx.nd.NDArray":
    """A float32 array in this 16-bit type; an array of that type itself."""
    if array.dtype is np.float32 and _on_cpu(array) and library.started():
        return library.call("_gluon_amp_narrow", [array], dtype=dtype)
    return array.astype(dtype, copy=False)


def copy_into(held: Sequence["mx.nd.NDArray"], arrays: Sequence["mx.nd.NDArray"]) -> None:
    """Copies arrays into some that are there, in the types that these have."""
    if not library.copy_all(arrays, held):
        for to, array in zip(held, arrays):
            array.astype(to.dtype, copy=False).copyto(to)


def widen_all(arrays: Sequence["mx.nd.NDArray"]) -> List["mx.nd.NDArray"]:
    """16-bit arrays, or float32 ones as they are, in float32."""
    if not on_gpu_in_float16(arrays):
        return [to_float32(array) for array in arrays]
    sizes = [array.size for array in arrays]
    flat, at = mx.nd.zeros(sum(sizes), arrays[0].context), 0
    wide = []
    for array, size in zip(arrays, sizes):
        wide.append(flat[at:at + size].reshape(array.shape))
        at += size
    # 0 - (-1) * array; as its weight, the operator writes each array into itself
    _descend(arrays, arrays, wide, -1.0, arrays)
    return wide


def narrow_all(masters: Sequence["mx.nd.NDArray"], weights: Sequence["mx.nd.NDArray"]) -> None:
    """Rounds masters into their 16-bit weights."""
    if on_gpu_in_float16(weights):
        # The weight stands in for its gradient. Clipped to 0, it adds nothing even where it is
        # infinite, which times the rate 0 would be NaN.
        _descend(weights, weights, masters, 0.0, weights, clip_gradient=0.0)
        return
    for master, weight in zip(masters, weights):
        narrow(master, weight)


_MOST_IN_A_LAUNCH = 60  # what MXNet's kernel takes


def _descend(weights: Sequence[Any], gradients: Sequence[Any], masters: Sequence[Any], rate: float,
             out: Sequence[Any], **kwargs: Any) -> None:
    """masters -= rate * gradients, and out = masters, rounded: MXNet's one operator that reads and
    writes many arrays of both types in one launch."""
    for i in range(0, len(weights), _MOST_IN_A_LAUNCH):
        part = slice(i, i + _MOST_IN_A_LAUNCH)
        some = [array for three in zip(weights[part], gradients[part], masters[part])
                for array in three]
        count = len(some) // 3
        mx.nd.multi_mp_sgd_update(*some, num_weights=count, lrs=[rate] * count, wds=[0.0] * count,
                                  out=list(out[part]), **kwargs)


def on_gpu_in_float16(arrays: Sequence["mx.nd.NDArray"]) -> bool:
    """Whether these are dense float16 arrays of one GPU."""
    first = arrays[0].context
    return first.device_type == "gpu" and all(
        a.dtype is np.float16 and a.stype == "default" and a.context == first for a in arrays)


def narrow(master: "mx.nd.NDArray", weight: "mx.nd.NDArray") -> None:
    """Rounds a master into its 16-bit weight."""
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
