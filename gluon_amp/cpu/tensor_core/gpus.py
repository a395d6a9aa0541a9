"""The parameters of Tensor Core sums for each GPU. rule.h has the rule."""
from typing import NamedTuple, Optional

from ..._mxnet import np


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
        raise ValueError(f"split must be an integer >= 1, or None. Received: {split!r}")
    return int(split)
