"""The overflow check: sums of squares of gradients.

A sum of squares is finite only if all values are, and gives the norm. MXNet's `multi_all_finite`
refuses a mix of float16 and float32 arrays, checks the first 200 only, and is not vectorized for
float16 on a CPU.

A GPU accumulates in float32, so a norm above 1.8e19 counts as an overflow. Float16 gradients do not
reach it. Float32 gradients reach it if training diverges: at the largest loss scale, 2^24, it is an
unscaled norm of 1e12.
"""
import itertools
import math
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from .._mxnet import mx, np
from ..annotations import Array, Context
from . import library

ROUNDED_TO_INFINITY = 65520.0  # the smallest number that float16 rounds to infinity


def squares(arrays: Sequence[Any]) -> "np.ndarray[Any, Any]":
    """Returns the sum of squares of each array of floating numbers, dense or row_sparse.

    It accumulates in float64 on a CPU and in float32 on a GPU. It is infinite or NaN if the array
    has such a value, or if the sum on a GPU exceeds 3.4e38.
    """
    if arrays and library.on_one_cpu(arrays):  # the common case: grouping is slower than the sums
        return _squares_on(mx.cpu(), list(arrays)).asnumpy()
    groups: Dict[Any, List[int]] = {}
    for i, array in enumerate(arrays):
        groups.setdefault(array.ctx, []).append(i)
    pushed = []
    for context, group in groups.items():
        # a GPU's kernel requires arrays of one type
        group.sort(key=lambda i: str(arrays[i].dtype) if context.device_type == "gpu" else "")
        pushed.append((group, _squares_on(context, [_dense(arrays[i]) for i in group])))
    sums = np.zeros(len(arrays))
    for group, result in pushed:
        sums[group] = result.asnumpy()  # the only synchronization
    return sums


def beyond_float16(arrays: Sequence[Any]) -> "np.ndarray[Any, Any]":
    """Returns for each float32 array its largest finite magnitude that float16 rounds to infinity,
    or 0 if there is none."""
    found = np.zeros(len(arrays))
    # without the engine, reads all arrays
    sums = squares(arrays) if library.started() else np.full(len(arrays), np.inf)
    for i in np.flatnonzero(~(sums < ROUNDED_TO_INFINITY ** 2)):
        sizes = np.abs(arrays[i].asnumpy())
        largest = sizes[np.isfinite(sizes)].max(initial=0)
        found[i] = largest if largest >= ROUNDED_TO_INFINITY else 0
    return found


def all_finite(arrays: Sequence[Any]) -> bool:
    """Whether no array has an infinity or a NaN."""
    return bool(np.isfinite(squares(arrays)).all())


def not_finite(names: Iterable[str], sums: "np.ndarray[Any, Any]") -> Tuple[str, ...]:
    """Returns the names, each once, whose sums of squares are not finite."""
    if math.isfinite(sum(sums.tolist())):  # none is negative; numpy is slower for few values
        return ()
    finite = np.isfinite(sums)
    return tuple(dict.fromkeys(name for name, is_finite in zip(names, finite) if not is_finite))


def _dense(array: Array) -> Array:
    if array.stype != "row_sparse":
        return array
    return array.data if array.indices.size else mx.nd.zeros(1, array.ctx)


def _squares_on(context: Context, arrays: List[Any]) -> Array:
    if context.device_type != "gpu":
        return library.call("_gluon_amp_squares", arrays, num_arrays=len(arrays))
    sums, at = mx.nd.empty(len(arrays), context), 0  # one array for one copy to the host
    for _, group in itertools.groupby(arrays, key=lambda array: array.dtype):
        some = list(group)
        mx.nd.multi_sum_sq(*some, num_arrays=len(some), out=sums[at:at + len(some)])
        at += len(some)
    return sums
