"""Forward tensors whose largest numbers differ so much from batch to batch that they may lie beyond
the format in batches that nobody has looked at."""
import math
import statistics
from typing import Iterable, Optional

from .._mxnet import np
from .statistics import Counted
from .tensors import Tensor

_BITS = 4  # below a format's end: smaller numbers are no matter


def note(tensors: Iterable[Tensor], counts: Counted) -> None:
    """Adds to each forward tensor of a format that ends in infinities how large its largest number
    was in a step. Numbers without gradients do not count: those of a mask are as large as it says,
    in whichever batch has one."""
    highest = counts.highest().tolist()
    for tensor in tensors:
        row, format_ = counts.rows.get(tensor.key), tensor.format
        if tensor.key.backward or row is None or not tensor.is_low \
                or format_.saturate or not format_.infinities:
            continue
        least = _last_exponent(tensor) - _BITS
        if highest[row] <= least:
            tensor.largest.append(least)
        elif not _is_masked(tensor, counts, 2.0 ** least):
            tensor.largest.append(highest[row])


def _last_exponent(tensor: Tensor) -> int:
    return math.floor(math.log2(tensor.format.largest))


def _is_masked(tensor: Tensor, counts: Counted, least: float) -> bool:
    """Whether the sample has numbers of that size, none of which has a gradient."""
    large = np.abs(counts.sample(tensor.key)) >= least
    gradients = [counts.sample(key) for key in tensor.gradients if key in counts]
    return bool(large.any()) and bool(gradients) and not any(
        len(g) == len(large) and g[large].any() for g in gradients)


def varies_by(tensor: Tensor) -> Optional[int]:
    """By how many bits the largest number of all batches is above that of half of them, if there is
    less room than that above it."""
    if len(tensor.largest) < 2:
        return None
    most = max(tensor.largest)
    by = most - statistics.median_low(tensor.largest)
    return by if _last_exponent(tensor) - most < by else None
