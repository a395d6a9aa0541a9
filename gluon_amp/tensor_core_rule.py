"""The rule of Tensor Core sums in plain numpy, and its parameters for each GPU.

docs/tensor_cores.md states the rule. The engine (cpu/tensor_core/kernels.cc) has a fast kernel for
float16 products with float32 sums; all other products run here.
"""
from typing import Any, NamedTuple, Optional

from ._mxnet import np
from .formats import FLOAT16, FLOAT32, Format

Array = Any  # a numpy array


class Sum(NamedTuple):
    """The parameters of one instruction's sum."""
    block: int           # the number of products
    fraction: int        # fraction bits of each addend below the largest exponent
    result: int = 23     # fraction bits of a float32 result
    halves: bool = False  # whether it sums even and odd products apart, and the accumulator last


class TensorCore(NamedTuple):
    """The parameters of a GPU's Tensor Cores."""
    block: int      # the number of float16 products that one instruction adds
    fraction: int   # fraction bits of each addend below the largest exponent
    measured: bool  # on that GPU; otherwise assumed equal to a similar GPU
    tf32: int = 0   # the number of TF32 products; 0: neither TF32 nor bfloat16
    float8: Optional[Sum] = None

    def sum_of(self, format_: str) -> Optional[Sum]:
        """Returns the rule for products of a format, or None."""
        if format_.startswith("float8"):
            return self.float8
        block = {"float16": self.block, "bfloat16": self.tf32 and self.block, "tf32": self.tf32}
        return Sum(block[format_], self.fraction) if block[format_] else None


_AMPERE = TensorCore(block=8, fraction=24, measured=False, tf32=4)
_HOPPER = TensorCore(block=16, fraction=25, measured=True, tf32=8,
                     float8=Sum(block=32, fraction=13, result=13))
GPUS = {
    "V100": TensorCore(block=4, fraction=23, measured=True),
    "T4": TensorCore(block=8, fraction=24, measured=False),
    "A2": _AMPERE._replace(measured=True),
    "A10": _AMPERE,
    "A100": _AMPERE._replace(measured=True),
    "RTX 30": _AMPERE,
    "Ada": _AMPERE._replace(measured=True, float8=Sum(block=16, fraction=13, result=13)),
    "H100": _HOPPER,
    "H200": _HOPPER,
    "B200": _HOPPER._replace(float8=Sum(block=32, fraction=25, halves=True)),
}
INPUTS = ("float16", "bfloat16", "tf32", "float8_e4m3", "float8_e5m2")


def of_gpu(gpu: str) -> TensorCore:
    """Returns the row of `GPUS` with a name, in any case and with or without blanks."""
    for name, core in GPUS.items():
        if isinstance(gpu, str) and gpu.replace(" ", "").lower() == name.replace(" ", "").lower():
            return core
    raise ValueError(f"unknown GPU. Valid: {', '.join(GPUS)}. Received: {gpu!r}")


def check_split(split: Optional[int]) -> int:
    """Returns the largest length of a chain; 0 for any length."""
    if split is None:
        return 0
    if isinstance(split, bool) or not isinstance(split, (int, np.integer)) or split < 1:
        raise ValueError("split must be a whole number of products, 1 or more, or None. "
                         f"Received: {split!r}")
    return int(split)


def product(a: Array, b: Array, c: Array, how: Sum, factors: Format = FLOAT16,
            sums: Format = FLOAT32, split: int = 0) -> Array:
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


def _instruction(a: Array, b: Array, c: Array, how: Sum, factors: Format, sums: Format) -> Array:
    """Returns c + the sum of a * b over the last axis."""
    with np.errstate(all="ignore"):
        if how.halves:
            even = _aligned_sum(a[..., ::2], b[..., ::2], np.zeros_like(c), how, factors, sums)
            return _aligned_sum(a[..., 1::2], b[..., 1::2], even, how, factors, sums) + c
        return _aligned_sum(a, b, c, how, factors, sums)


def _aligned_sum(a: Array, b: Array, c: Array, how: Sum, factors: Format, sums: Format) -> Array:
    start = c[..., None].astype("float64")
    addends = np.concatenate([a * b, start], -1)
    exponents = np.concatenate([_exponent(a, factors) + _exponent(b, factors),
                                _exponent(start, sums)], -1)
    unit = np.ldexp(1.0, np.max(exponents, -1, keepdims=True) - how.fraction)
    exact = np.sum(np.trunc(addends / unit) * unit, -1)
    exact = np.where(np.isfinite(addends).all(-1), exact, np.sum(addends, -1))
    return _cut(exact, how.result) if sums.fraction == 23 else exact.astype("float16")


def _exponent(x: Array, format_: Format) -> Array:
    """Returns floor(log2|x|), at least the format's smallest exponent; very small for zeros."""
    return np.where(x == 0, -400, np.maximum(np.frexp(x)[1], 2 - format_.bias) - 1)


def _cut(x: Array, fraction: int) -> Array:
    """Truncates float64 numbers to a number of fraction bits, as float32; zeros become +0."""
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1 - fraction, -149))
    kept = np.where(np.isfinite(x), np.trunc(x / step) * step, x)
    return kept.astype("float32") + np.float32(0)
