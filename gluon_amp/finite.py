"""Are all gradients finite?

MXNet's `multi_all_finite` refuses float16 beside float32 arrays and, on a CPU, looks
at halves one by one. This asks once for each device, whatever the types.
"""
from typing import Any, Dict, List, Sequence

from ._mxnet import mx
from .cpu import library


def all_finite(arrays: Sequence[Any]) -> bool:
    """Whether no float16 or float32 array, on any device, holds an infinity or a NaN."""
    groups: Dict[Any, List[Any]] = {}
    for array in arrays:
        # a GPU's kernel takes arrays of one type
        on_gpu = array.context.device_type == "gpu"
        groups.setdefault((array.context, array.dtype if on_gpu else None), []).append(array)
    answers = [_ask(context, group) for (context, _), group in groups.items()]
    return all(answer.asscalar() for answer in answers)  # waits only here


def _ask(context: Any, arrays: List[Any]) -> Any:
    if context.device_type == "gpu":
        return mx.nd.multi_all_finite(*arrays, num_arrays=len(arrays))
    return library.call("_gluon_amp_all_finite", arrays, num_arrays=len(arrays))
