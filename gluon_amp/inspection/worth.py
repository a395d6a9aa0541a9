"""What a tensor's rounding is worth: by how much of the loss its own errors move it.

To first order the loss moves by each number's error times its gradient. Errors of a rounding are
independent of each other, so their squares add up. The histograms of a step hold the squares of
errors and those of gradients. Samples tell where large errors do not meet large gradients: those
of a mask are large, and their gradients 0. (As a measure for all others, products are taken as if
they met by chance.)
"""
import math
from typing import Iterable, List

from .._mxnet import np
from ..formats import Format
from ..graph.operators import LOSSES, PRODUCTS
from .statistics import Sample
from .tensors import Tensor
from .trial import Ran


def weigh(tensors: Iterable[Tensor], ran: Ran, scale: float) -> None:
    """Adds to each forward tensor that is rounded, and that there is a sample of, what this was
    worth in a step at a loss scale."""
    tensors, counted = list(tensors), ran.counts
    # No scale reaches what a loss begins with by itself.
    begin = {t.key for t in tensors if t.key.backward and t.op in LOSSES}
    squares = [s / (1.0 if key in begin else scale) ** 2
               for key, s in zip(counted, counted.all.squares.tolist())]
    errors, numbers = counted.all.error_squares.tolist(), counted.numbers().tolist()
    for tensor in tensors:
        row = counted.rows.get(tensor.key)
        if tensor.key.backward or not tensor.is_low or row is None or not ran.total \
                or not len(counted.samples[row]):
            continue
        gradients = [counted.rows[key] for key in tensor.gradients if key in counted.rows]
        moved = math.sqrt(_expected(errors[row], sum(squares[g] for g in gradients),
                                    numbers[row])) / ran.total
        if not math.isfinite(moved):
            continue
        if tensor.op in PRODUCTS:
            tensor.by_chance.append(moved)
        # half of what may be named at all: less needs no closer look
        if moved > 2.0 ** -(tensor.format.fraction + 2):
            moved *= math.sqrt(min(_meet(tensor.format, counted.samples[row],
                                         [counted.samples[g] for g in gradients]), 1.0))
        tensor.worths.append(moved)


def _expected(error_squares: float, gradient_squares: float, numbers: int) -> float:
    """The square of how far the sum of errors times gradients is expected to lie from 0, if large
    errors meet large gradients by chance only."""
    return error_squares * gradient_squares / max(numbers, 1)


def _meet(format_: Format, sample: Sample, gradients: List[Sample]) -> float:
    """How much more, or less, they meet than by chance, as the samples tell."""
    size = np.abs(sample.astype(np.float64))
    squares = sum(np.square(g.astype(np.float64)) for g in gradients if len(g) == len(size))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.square(np.maximum(np.ldexp(1.0, np.frexp(size)[1] - 1 - format_.fraction),
                                      format_.smallest)) * (size > 0)
        known = np.isfinite(size) & np.isfinite(squares)
        both = np.sum(errors * known) * np.sum(squares * known)
    return float(known.sum() * np.sum(np.where(known, errors * squares, 0.0)) / both) \
        if both > 0 and math.isfinite(both) else 1.0
