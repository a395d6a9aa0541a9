"""How Tensor Cores sum, in numpy: the rule that README.md states, and its parameters for each GPU.

    from rule import dot
    dot(a, b, gpu="A100")   # a @ b with the bits of an A100
"""
from typing import NamedTuple

import numpy as np


class Rule(NamedTuple):
    """The parameters of one instruction's sum."""
    block: int            # the number of products
    fraction: int         # fraction bits of each addend below the largest exponent
    result: int = 23      # fraction bits of a float32 result
    halves: bool = False  # whether it sums even and odd products apart, and the accumulator last


class Format(NamedTuple):
    """A number format of factors or sums."""
    fraction: int    # explicit bits
    smallest: int    # the exponent of the smallest normal number
    largest: float


FORMATS = {
    "float32": Format(23, -126, 2.0 ** 128 - 2.0 ** 104),
    "float16": Format(10, -14, 65504.0),
    "bfloat16": Format(7, -126, 2.0 ** 128 - 2.0 ** 120),
    "tf32": Format(10, -126, 2.0 ** 128 - 2.0 ** 117),
    "float8_e4m3": Format(3, -6, 448.0),
    "float8_e5m2": Format(2, -14, 57344.0),
}


def _rules(half, tf32=None, float8=None):
    """Returns the rules of a GPU by the format of the factors."""
    rules = {"float16": half}
    if tf32:
        rules.update(bfloat16=half, tf32=half._replace(block=tf32))
    if float8:
        rules.update(float8_e4m3=float8, float8_e5m2=float8)
    return rules


_AMPERE, _HOPPER = Rule(8, 24), Rule(16, 25)
RULES = {  # by GPU. T4 follows a published model; A10 and RTX 30 are assumed to sum as an Ada does
    "V100": _rules(Rule(4, 23)),
    "T4": _rules(_AMPERE),
    "A2": _rules(_AMPERE, 4),
    "A10": _rules(_AMPERE, 4),
    "A100": _rules(_AMPERE, 4),
    "RTX 30": _rules(_AMPERE, 4),
    "Ada": _rules(_AMPERE, 4, Rule(16, 13, result=13)),
    "H100": _rules(_HOPPER, 8, Rule(32, 13, result=13)),
    "H200": _rules(_HOPPER, 8, Rule(32, 13, result=13)),
    "B200": _rules(_HOPPER, 8, Rule(32, 25, halves=True)),
}


def dot(a, b, c=0.0, gpu="V100", factors="float16", sums="float32", split=None):
    """Returns c + a @ b with the bits of a GPU's Tensor Cores.

    Args:
        a, b: matrices, or stacks of as many matrices, with numbers of the format `factors`.
        c: the accumulator's initial value, with numbers of the format `sums`.
        gpu: a key of `RULES`.
        factors: "float16", "bfloat16", "tf32", "float8_e4m3" or "float8_e5m2".
        sums: "float32", or for float16 factors "float16".
        split: the largest number of products in a chain. Longer chains are split: only the first
            part starts with `c`, and the sums of all parts are added in order. None: one chain.

    Raises:
        ValueError: an argument has another value, or an array has numbers of another format.
    """
    rules = RULES.get(gpu)
    if rules is None:
        raise ValueError(f"gpu must be one of {', '.join(RULES)}. Received: {gpu!r}")
    if factors not in rules:
        raise ValueError(f"factors of a {gpu} must be one of {', '.join(rules)}. "
                         f"Received: {factors!r}")
    valid = ("float32", "float16") if factors == "float16" else ("float32",)
    if sums not in valid:
        raise ValueError(f"sums of {factors} products must be {' or '.join(valid)}. "
                         f"Received: {sums!r}")
    if split is not None and split < 1:
        raise ValueError(f"split must be a number from 1 on, or None. Received: {split!r}")
    left, right = _numbers("a", a, factors), _numbers("b", b, factors)
    shape = (*left.shape[:-1], right.shape[-1])
    start = np.broadcast_to(_numbers("c", c, sums), shape).astype(sums)
    return product(left, right, start, rules[factors], FORMATS[factors], split)


def product(a, b, c, rule, factors, split=None):
    """Returns c + a @ b by a rule, for factors of a `Format`. The sums have the type of c."""
    depth = a.shape[-1]
    left, right = a[..., :, None, :], b.swapaxes(-1, -2)[..., None, :, :]
    total = None
    with np.errstate(all="ignore"):
        for first in range(0, depth, split or max(depth, 1)):
            last = min(first + (split or depth), depth)
            chain = c if first == 0 else np.zeros_like(c)
            for k in range(first, last, rule.block):
                part = slice(k, min(k + rule.block, last))
                chain = _instruction(left[..., part], right[..., part], chain, rule, factors)
            total = chain if total is None else total + chain + c.dtype.type(0)  # no zero is -0
    total = c if total is None else total
    nan = np.uint16(0x7fff) if c.dtype == np.float16 else np.uint32(0x7fffffff)  # NVIDIA's
    return np.where(np.isnan(total), nan.view(c.dtype), total)


def _instruction(a, b, c, rule, factors):
    """Returns c + the sum of a * b over the last axis."""
    if rule.halves:
        even = _aligned_sum(a[..., ::2], b[..., ::2], np.zeros_like(c), rule, factors)
        return _aligned_sum(a[..., 1::2], b[..., 1::2], even, rule, factors) + c
    return _aligned_sum(a, b, c, rule, factors)


def _aligned_sum(a, b, c, rule, factors):
    start = c[..., None].astype("float64")
    addends = np.concatenate([a * b, start], -1)
    exponents = np.concatenate([_exponent(a, factors) + _exponent(b, factors),
                                _exponent(start, FORMATS[c.dtype.name])], -1)
    unit = np.ldexp(1.0, exponents.max(-1, keepdims=True) - rule.fraction)
    exact = (np.trunc(addends / unit) * unit).sum(-1)
    exact = np.where(np.isfinite(addends).all(-1), exact, addends.sum(-1)) + 0.0
    return exact.astype("float16") if c.dtype == np.float16 else _cut(exact, rule.result)


def _exponent(x, format_):
    """Returns floor(log2|x|), at least the format's smallest; very small for zeros."""
    return np.where(x == 0, -400, np.maximum(np.frexp(x)[1] - 1, format_.smallest))


def _cut(x, fraction):
    """Truncates float64 numbers to a number of fraction bits, as float32; zeros become +0."""
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1 - fraction, -149))
    return np.where(np.isfinite(x), np.trunc(x / step) * step, x).astype("float32") + np.float32(0)


def _numbers(name, array, format_):
    """Returns an array as float64 if all its numbers have a format."""
    x, (fraction, smallest, largest) = np.asarray(array, "float64"), FORMATS[format_]
    with np.errstate(invalid="ignore"):
        units = np.ldexp(x, fraction - np.maximum(np.frexp(x)[1] - 1, smallest))
        fits = ~np.isfinite(x) | (abs(x) <= largest) & (units == np.trunc(units))
    if not fits.all():
        raise ValueError(f"{name} must have numbers of {format_}. Received: {x[~fits][0]}")
    return x
