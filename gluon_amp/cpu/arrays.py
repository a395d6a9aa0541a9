"""Casts between 16-bit arrays and their float32 master weights, outside any graph.

A CPU uses our kernels, because MXNet's are not vectorized. A GPU uses MXNet's operators, with many
arrays in one launch.
"""
import functools
from typing import Any, Iterable, List, Mapping, Sequence

from .._mxnet import mx, np
from ..annotations import DType
from ..files import replace_file
from . import library
from .bfloat16 import BFLOAT16, is_bfloat16

HALVES = ("float16", "bfloat16")  # the 16-bit types


@functools.lru_cache(maxsize=None)
def dtype_name(dtype: DType) -> str:
    return "bfloat16" if is_bfloat16(dtype) else np.dtype(dtype).name


def array_type(name: str) -> DType:
    """Returns MXNet's dtype of a name."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name).type


def is_half(dtype: Any) -> bool:
    """Whether a dtype is a 16-bit type."""
    return dtype_name(dtype) in HALVES


def to_float32(array: "mx.nd.NDArray") -> "mx.nd.NDArray":
    """Returns an array in float32; a float32 array unchanged."""
    if is_half(array.dtype) and _on_cpu(array) and library.started():
        return library.call("_gluon_amp_widen", [array])
    return array.astype("float32", copy=False)


def to_half(array: "mx.nd.NDArray", dtype: str) -> "mx.nd.NDArray":
    """Returns an array in a 16-bit type; an array of that type unchanged."""
    if dtype_name(array.dtype) == "float32" and _on_cpu(array) and library.started():
        return library.call("_gluon_amp_narrow", [array], dtype=dtype)
    return array.astype(dtype, copy=False)


def on_device(array: Any, device: Any) -> Any:
    """Returns an array on a device; an array there unchanged. MXNet has no one method for arrays
    of `mx.nd` and `mx.np`."""
    return array if array.ctx == device else array.copyto(device)


def save_arrays(path: str, arrays: Mapping[str, "mx.nd.NDArray"]) -> None:
    """Writes arrays of `mx.nd` or `mx.np` to a file, atomically."""
    classic = {name: array.as_nd_ndarray() for name, array in arrays.items()}
    replace_file(path, lambda part: mx.nd.save(part, classic))


def copy_into(held: Sequence["mx.nd.NDArray"], arrays: Sequence["mx.nd.NDArray"]) -> None:
    """Copies arrays into existing ones, in the types of these."""
    if not library.copy_all(arrays, held):
        for to, array in zip(held, arrays):
            array.astype(to.dtype, copy=False).copyto(to)


def widen_all(arrays: Sequence["mx.nd.NDArray"]) -> List["mx.nd.NDArray"]:
    """Returns arrays in float32; float32 arrays unchanged."""
    if not on_gpu_in_float16(arrays):
        return [to_float32(array) for array in arrays]
    sizes = [array.size for array in arrays]
    flat, at = mx.nd.zeros(sum(sizes), arrays[0].ctx), 0
    wide = []
    for array, size in zip(arrays, sizes):
        wide.append(flat[at:at + size].reshape(array.shape))
        at += size
    # 0 - (-1) * array; each array is its own weight, which the operator does not change
    _descend(arrays, arrays, wide, -1.0, arrays)
    return wide


def narrow_all(masters: Sequence["mx.nd.NDArray"], weights: Sequence["mx.nd.NDArray"]) -> None:
    """Rounds master weights into their 16-bit weights."""
    if on_gpu_in_float16(weights):
        # The weight replaces the gradient. It is clipped to 0, because an infinite one times the
        # learning rate 0 would be NaN.
        _descend(weights, weights, masters, 0.0, weights, clip_gradient=0.0)
        return
    for master, weight in zip(masters, weights):
        narrow(master, weight)


_MOST_IN_A_LAUNCH = 60  # the limit of MXNet's kernel


def _descend(weights: Sequence[Any], gradients: Sequence[Any], masters: Sequence[Any], rate: float,
             out: Sequence[Any], **kwargs: Any) -> None:
    """Computes masters -= rate * gradients and out = masters, rounded, by the only operator of
    MXNet that reads and writes many arrays of both types in one launch."""
    for i in range(0, len(weights), _MOST_IN_A_LAUNCH):
        part = slice(i, i + _MOST_IN_A_LAUNCH)
        some = [array for three in zip(weights[part], gradients[part], masters[part])
                for array in three]
        count = len(some) // 3
        mx.nd.multi_mp_sgd_update(*some, num_weights=count, lrs=[rate] * count, wds=[0.0] * count,
                                  out=list(out[part]), **kwargs)


def on_gpu_in_float16(arrays: Sequence["mx.nd.NDArray"]) -> bool:
    """Whether these are dense float16 arrays on one GPU."""
    first = arrays[0].ctx
    return first.device_type == "gpu" and all(
        dtype_name(a.dtype) == "float16" and a.stype == "default" and a.ctx == first
        for a in arrays)


def narrow(master: "mx.nd.NDArray", weight: "mx.nd.NDArray") -> None:
    """Rounds a master weight into its 16-bit weight."""
    if _on_cpu(weight):
        library.call("_gluon_amp_narrow", [master], out=weight)
    else:
        mx.nd.cast(master, dtype="float16", out=weight)


def follow(master: "mx.nd.NDArray", weight: "mx.nd.NDArray") -> None:
    """Updates a master weight after a write to its weight: if the weight is no longer the rounded
    master weight, copies it."""
    if _on_cpu(weight):
        library.call("_gluon_amp_follow", [master, weight], out=master)
    else:
        unchanged = master.astype("float16") == weight
        mx.nd.where(unchanged, master, weight.astype("float32"), out=master)


def _on_cpu(array: "mx.nd.NDArray") -> bool:
    return array.ctx.device_type != "gpu" and array.stype == "default"


def multiply(arrays: Iterable[Any], factor: float) -> None:
    """Multiplies arrays by a factor, in place."""
    for array in arrays:
        (array * factor).copyto(array)
