"""How large are gradients, and are they finite?

A sum of squares answers both: it is finite where all its numbers are. MXNet's own
`multi_all_finite` refuses float16 beside float32 arrays, reads the first 200 only, and on a CPU
takes halves one by one.

A GPU adds in float32, where a norm above 1.8e19 counts as an overflow. Float16 gradients have none;
float32 ones have it only where training diverges: at the largest loss scale, 2^24, it is that of an
unscaled gradient of norm 1e12.
"""
import itertools
import math
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from .._mxnet import mx, np
from ..annotations import Array, Context
from . import library

ROUNDED_TO_INFINITY = 65520.0  # by float16, and all that is larger; its largest number is 65504


def squares(arrays: Sequence[Any]) -> "np.ndarray[Any, Any]":
    """The sum of squares of each float16 or float32 array, dense or row_sparse, on any device.

    Taken in float64 on a CPU, in float32 on a GPU; infinite or NaN where the array is, and on a GPU
    where the sum is above 3.4e38.
    """
    if arrays and library.on_one_cpu(arrays):  # as usual: groups take longer than the sums
        return _squares_on(mx.cpu(), list(arrays)).asnumpy()
    groups: Dict[Any, List[int]] = {}
    for i, array in enumerate(arrays):
        groups.setdefault(array.context, []).append(i)
    pushed = []
    for context, group in groups.items():
        # a GPU's kernel takes arrays of one type
        group.sort(key=lambda i: str(arrays[i].dtype) if context.device_type == "gpu" else "")
        pushed.append((group, _squares_on(context, [_dense(arrays[i]) for i in group])))
    sums = np.zeros(len(arrays))
    for group, result in pushed:
        sums[group] = result.asnumpy()  # waits only here
    return sums


def beyond_float16(arrays: Sequence[Any]) -> "np.ndarray[Any, Any]":
    """Of each float32 array the largest number, by size, that is finite and would be infinite in
    float16; 0 where there is none."""
    found = np.zeros(len(arrays))
    # without the engine, which float16 itself needs later, all arrays are read
    sums = squares(arrays) if library.started() else np.full(len(arrays), np.inf)
    for i in np.flatnonzero(~(sums < ROUNDED_TO_INFINITY ** 2)):
        sizes = np.abs(arrays[i].asnumpy())
        largest = sizes[np.isfinite(sizes)].max(initial=0)
        found[i] = largest if largest >= ROUNDED_TO_INFINITY else 0
    return found


def all_finite(arrays: Sequence[Any]) -> bool:
    """Whether no array holds an infinity or a NaN."""
    return bool(np.isfinite(squares(arrays)).all())


def not_finite(names: Iterable[str], sums: "np.ndarray[Any, Any]") -> Tuple[str, ...]:
    """The names, each once, whose sums of squares are not finite."""
    if math.isfinite(sum(sums.tolist())):  # none is negative; numpy takes longer for few
        return ()
    finite = np.isfinite(sums)
    return tuple(dict.fromkeys(name for name, is_finite in zip(names, finite) if not is_finite))


def _dense(array: Array) -> Array:
    if array.stype != "row_sparse":
        return array
    return array.data if array.indices.size else mx.nd.zeros(1, array.context)


def _squares_on(context: Context, arrays: List[Any]) -> Array:
    if context.device_type != "gpu":
        return library.call("_gluon_amp_squares", arrays, num_arrays=len(arrays))
    sums, at = mx.nd.empty(len(arrays), context), 0  # one array, and so one copy to the host
    for _, group in itertools.groupby(arrays, key=lambda array: array.dtype):
        some = list(group)
        mx.nd.multi_sum_sq(*some, num_arrays=len(some), out=sums[at:at + len(some)])
        at += len(some)
    return sums
