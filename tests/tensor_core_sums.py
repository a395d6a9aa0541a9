"""Sums of Tensor Cores in numpy, to compare with the engine; docs/tensor_cores.md has the rule."""
import numpy as np
from gluon_amp.formats import FLOAT16, FLOAT32


def product(a, b, c, how, factors=FLOAT16, sums=FLOAT32, split=0):
    """Returns c + a @ b for stacks of matrices: a chain of instructions along K for each element.

    Args:
        a, b: values of the format `factors`.
        c: values of the format `sums`, float32 or float16, like the result.
        how: the rule of an instruction.
        split: the largest number of products in a chain; sums of chains are added. 0: any.
    """
    total = np.empty_like(c)
    depth, columns = a.shape[-1], b.shape[-1]
    split = min(split or depth, depth)
    rows = max(1, 2 ** 20 // (how.block * max(columns, 1)))  # at a time, to limit memory
    for stack in np.ndindex(*c.shape[:-2]):
        right = b[stack].T.astype("float64")
        for first in range(0, c.shape[-2], rows):
            here = (*stack, slice(first, first + rows))
            left = a[here].astype("float64")
            for piece in range(0, depth, split):
                chain = c[here] if piece == 0 else np.zeros_like(c[here])
                last = min(piece + split, depth)
                for k in range(piece, last, how.block):
                    some = slice(k, min(k + how.block, last))
                    chain = _instruction(left[:, None, some], right[None, :, some], chain, how,
                                         factors, sums)
                with np.errstate(over="ignore", invalid="ignore"):
                    total[here] = chain if piece == 0 else total[here] + chain
    return total


def _instruction(a, b, c, how, factors, sums):
    """Returns c + the sum of a * b over the last axis."""
    with np.errstate(all="ignore"):
        if how.halves:
            even = _aligned_sum(a[..., ::2], b[..., ::2], np.zeros_like(c), how, factors, sums)
            return _aligned_sum(a[..., 1::2], b[..., 1::2], even, how, factors, sums) + c
        return _aligned_sum(a, b, c, how, factors, sums)


def _aligned_sum(a, b, c, how, factors, sums):
    start = c[..., None].astype("float64")
    addends = np.concatenate([a * b, start], -1)
    exponents = np.concatenate([_exponent(a, factors) + _exponent(b, factors),
                                _exponent(start, sums)], -1)
    unit = np.ldexp(1.0, np.max(exponents, -1, keepdims=True) - how.fraction)
    exact = np.sum(np.trunc(addends / unit) * unit, -1)
    exact = np.where(np.isfinite(addends).all(-1), exact, np.sum(addends, -1))
    return _cut(exact, how.result) if sums.fraction == 23 else exact.astype("float16")


def _exponent(x, format_):
    """Returns floor(log2|x|), at least the format's smallest exponent; very small for zeros."""
    return np.where(x == 0, -400, np.maximum(np.frexp(x)[1], 2 - format_.bias) - 1)


def _cut(x, fraction):
    """Truncates float64 numbers to a number of fraction bits, as float32; zeros become +0."""
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1 - fraction, -149))
    kept = np.where(np.isfinite(x), np.trunc(x / step) * step, x)
    return kept.astype("float32") + np.float32(0)
