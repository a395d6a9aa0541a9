"""What a tensor's rounding is worth: by how much of the loss its own errors move it.

To first order the loss moves by each number's error times its gradient. Errors of a rounding are
independent of each other, so their squares add up: the histograms of a step hold all that it takes.
"""
import math
from typing import Iterable

from ..graph.operators import LOSSES
from .statistics import Counts
from .tensors import Tensor
from .trial import Ran


def weigh(tensors: Iterable[Tensor], ran: Ran, scale: float) -> None:
    """Adds to each forward tensor that is rounded what this was worth in a step at a loss scale."""
    tensors = list(tensors)
    # No scale reaches what a loss begins with by itself.
    begin = {t.key for t in tensors if t.key.backward and t.op in LOSSES}
    for tensor in tensors:
        found = ran.counts.get(tensor.key)
        if tensor.key.backward or not tensor.is_low or found is None or not ran.total:
            continue
        squares = sum(ran.counts[key].squares / (1.0 if key in begin else scale) ** 2
                      for key in tensor.gradients if key in ran.counts)
        moved = _expected(found, squares) / ran.total
        if math.isfinite(moved):
            tensor.worths.append(moved)


def _expected(found: Counts, gradient_squares: float) -> float:
    """How far the sum of errors times gradients is expected to lie from 0."""
    return math.sqrt(found.error_squares * gradient_squares / max(found.numbers, 1))
