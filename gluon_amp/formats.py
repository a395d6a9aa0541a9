"""The number formats of MXNet's arrays: what they can hold, and rounding to them."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

from ._mxnet import mx, np


@dataclass(frozen=True)
class Format:
    """A floating-point format with infinities.

    Attributes:
        name: the name of its arrays' type.
        exponent: exponent bits.
        fraction: fraction bits without the leading 1.
    """
    name: str
    exponent: int
    fraction: int

    @property
    def smallest_normal(self) -> float:
        """The smallest number with all fraction bits."""
        return 2.0 ** (2 - 2 ** (self.exponent - 1))

    @property
    def smallest(self) -> float:
        """The smallest number above 0."""
        return self.smallest_normal * 2.0 ** -self.fraction

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return 2.0 ** self.last_exponent * (2 - 2.0 ** -self.fraction)

    @property
    def last_exponent(self) -> int:
        """The binary exponent of the largest number."""
        return int(2 ** (self.exponent - 1) - 1)

    @property
    def counts_to(self) -> int:
        """The largest n such that all integers up to n are exact."""
        return 2 ** (self.fraction + 1)

    def keeps(self, numbers: object) -> bool:
        """Whether rounding makes no finite number infinite and no other number 0."""
        numbers = np.asarray(numbers, np.float32)
        rounded = self.round(numbers)
        return bool((np.isfinite(rounded) & ((rounded != 0) | (numbers == 0))
                     | ~np.isfinite(numbers)).all())

    def round(self, values: object) -> np.ndarray[Any, Any]:
        """Returns numbers rounded to this format, once, ties to even, as an array of float32.

        Args:
            values: numbers, or an array of numpy or MXNet: floats, or integers up to 2^53.
        """
        values = values.asnumpy() if isinstance(values, mx.nd.NDArray) else np.asarray(values)
        with np.errstate(over="ignore", invalid="ignore"):
            size = np.abs(values.astype(np.float64))
            exponents = np.maximum(np.frexp(size)[1] - 1, round(np.log2(self.smallest_normal)))
            step = np.ldexp(1.0, exponents - self.fraction)
            rounded = np.rint(size / step) * step
            rounded = np.where(rounded > self.largest, np.inf, rounded)
            return np.copysign(rounded, values).astype(np.float32)


FORMATS = {format_.name: format_ for format_ in (
    Format("float32", exponent=8, fraction=23),
    Format("float16", exponent=5, fraction=10),
    Format("bfloat16", exponent=8, fraction=7),
)}
FLOAT32, FLOAT16, BFLOAT16 = FORMATS.values()


def get_format(name: Union[str, Format], what: str) -> Format:
    """Returns the format of a name; a `Format` unchanged. `what` is the argument in errors."""
    if isinstance(name, Format):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"{what} must be {', '.join(FORMATS)}. Received: {name!r}")
    return FORMATS[name]
