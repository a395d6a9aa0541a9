"""Formats of floating numbers: what they can hold, and rounding to them.

float16, bfloat16 and float32 are types of MXNet's arrays. Other formats are float32 arrays whose
values are rounded to the format, by the engine on a CPU. The rounding in numpy here and the
engine's (cpu/kernels/passes.cc) use the same parameters.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Optional, Union

from ._mxnet import mx, np

ROUNDINGS = ("nearest", "zero", "stochastic")  # in the engine's order (GridRounding)
# MXNet's array types that are formats, by their bits; and the others
_ARRAY_TYPES = {(5, 10): "float16", (8, 7): "bfloat16", (8, 23): "float32"}
_OTHER_TYPES = frozenset("float64 uint8 int8 int32 int64 bool None".split())


@dataclass(frozen=True)
class Format:
    """A floating-point format.

    Attributes:
        name: the name in errors, logs and graphs.
        exponent: exponent bits, 2 to 8.
        fraction: fraction bits without the leading 1, 1 to 23.
        infinities: whether it has infinities. Without them the largest exponent holds numbers and
            one NaN, as in float8_e4m3, which ends at 448.
        saturate: whether numbers beyond the largest become the largest. Otherwise they become
            infinite or, without infinities, NaN.
        rounding: "nearest" (ties to even), "zero" (truncation) or "stochastic" (unbiased). In
            networks, `mx.random.seed` makes stochastic rounding repeatable.
    """
    name: str
    exponent: int
    fraction: int
    infinities: bool = True
    saturate: bool = False
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a format's name must be a string. Received: {self.name!r}")
        for what in ("infinities", "saturate"):
            if not isinstance(getattr(self, what), bool):
                raise ValueError(f"{what} must be True or False. Received: {getattr(self, what)!r}")
        for what, least, most in (("exponent", 2, 8), ("fraction", 1, 23)):
            bits = getattr(self, what)
            if isinstance(bits, bool) or not isinstance(bits, (int, np.integer)) \
                    or not least <= bits <= most:
                raise ValueError(f"{what} must be an integer from {least} to {most}. Received: "
                                 f"{bits!r}")
            object.__setattr__(self, what, int(bits))
        if self.exponent == 8 and not self.infinities:
            raise ValueError("a format of 8 exponent bits without infinities would go beyond "
                             "float32, whose arrays hold it. Received: exponent=8, "
                             "infinities=False")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}. "
                             f"Received: {self.rounding!r}")
        if self.name in {*_ARRAY_TYPES.values(), *_OTHER_TYPES} and self.name != self._array_type:
            raise ValueError(f"{self.name} is a type of MXNet's arrays: choose another name")

    @property
    def _array_type(self) -> Optional[str]:
        ieee = self.infinities and not self.saturate and self.rounding == "nearest"
        return _ARRAY_TYPES.get((self.exponent, self.fraction)) if ieee else None

    @cached_property
    def is_array_type(self) -> bool:
        """Whether MXNet has arrays of it: float16, bfloat16 and float32."""
        return self._array_type is not None

    @cached_property
    def type_name(self) -> str:
        """The name of the format in graphs."""
        return self._array_type or self.name

    @cached_property
    def bias(self) -> int:
        """What is subtracted from a stored exponent."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def bytes(self) -> float:
        """The bytes of a number in memory."""
        return (1 + self.exponent + self.fraction) / 8

    @cached_property
    def smallest_normal(self) -> float:
        """The smallest number with all fraction bits."""
        return 2.0 ** (1 - self.bias)

    @cached_property
    def smallest(self) -> float:
        """The smallest number above 0."""
        return self.smallest_normal * 2.0 ** -self.fraction

    @cached_property
    def largest(self) -> float:
        """The largest finite number."""
        if self.infinities:
            return 2.0 ** self.bias * (2 - 2.0 ** -self.fraction)
        return 2.0 ** (self.bias + 1) * (2 - 2 * 2.0 ** -self.fraction)

    @property
    def counts_to(self) -> int:
        """The largest n such that all integers up to n are exact."""
        return int(min(2 ** (self.fraction + 1), self.largest))

    def holds(self, other: Format) -> bool:
        """Whether it has all finite numbers of the other format."""
        return self.fraction >= other.fraction and self.largest >= other.largest \
            and self.smallest <= other.smallest

    def keeps(self, numbers: object) -> bool:
        """Whether rounding makes no finite number infinite and no other number 0."""
        numbers = np.asarray(numbers, np.float32)
        rounded = self.nearest.round(numbers)
        return bool((np.isfinite(rounded) & ((rounded != 0) | (numbers == 0))
                     | ~np.isfinite(numbers)).all())

    def round(self, values: object, key: Optional[int] = None) -> np.ndarray[Any, Any]:
        """Numbers rounded to this format, once, as an array of float32.

        Args:
            values: numbers, or an array of numpy or MXNet: floats, or integers up to 2^53.
                Stochastic rounding converts them to float32 first.
            key: the 64-bit key of stochastic rounding's random numbers.
        """
        if (self.rounding == "stochastic") != (key is not None):
            raise ValueError("stochastic rounding, and only that, takes a key. Received: "
                             f"rounding={self.rounding!r}, key={key}")
        if key is not None and (not isinstance(key, (int, np.integer)) or not 0 <= key < 2 ** 64):
            raise ValueError(f"key must be an integer of 64 bits. Received: {key!r}")
        given = values.asnumpy() if isinstance(values, mx.nd.NDArray) else np.asarray(values)
        if given.dtype.kind not in "fiub" or given.dtype.itemsize > 8:
            raise TypeError(f"round takes numbers of 64 bits at most. Received: {given.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            values = given if key is None else given.astype(np.float32)
            size = np.abs(values.astype(np.float64))
            exponent = np.frexp(size)[1] - 1
            step = np.ldexp(self.smallest, np.maximum(exponent + self.bias - 1, 0))
            if key is not None:
                steps = self._steps(size / step, size < self.smallest_normal, key)
            else:
                steps = (np.rint if self.rounding == "nearest" else np.floor)(size / step)
            made = steps * step
            made = np.where(made > self.largest, self._above_largest, made)
            made = np.where(np.isinf(size), self._of_infinity, made)
            return np.copysign(made, values).astype(np.float32)

    def _steps(self, exact: np.ndarray[Any, Any], small: np.ndarray[Any, Any],
               key: int) -> np.ndarray[Any, Any]:
        """Rounds multiples of the spacing stochastically to integers.

        Args:
            exact: each number over its spacing.
            small: which numbers are subnormal: they use 23 random bits, others as many bits as
                are dropped.
        """
        low = np.floor(exact)
        bits = random_bits(key, exact.size).reshape(exact.shape)
        dropped = 23 - self.fraction
        below = np.where(small, (bits >> np.uint32(9)) * 2.0 ** -23 + 2.0 ** -24,
                         1 - (bits % 2 ** dropped) * 2.0 ** -dropped)
        return low + (below <= exact - low)

    @property
    def nearest(self) -> Format:
        """The same format with rounding to nearest even."""
        return self if self.rounding == "nearest" else replace(self, rounding="nearest")

    @property
    def _above_largest(self) -> float:
        """The result of finite numbers beyond the largest."""
        return self.largest if self.rounding == "zero" else self._of_infinity

    @property
    def _of_infinity(self) -> float:
        if self.saturate:
            return self.largest
        return float("inf" if self.infinities else "nan")

    @property
    def _for_engine(self) -> str:
        """The format's parameters for the engine: `Grid` in cpu/kernels/kernels.h."""
        return (f"{self.fraction} {self.smallest_normal!r} {self.largest!r} "
                f"{self._above_largest!r} {self._of_infinity!r} {ROUNDINGS.index(self.rounding)}")


def random_bits(key: int, count: int) -> np.ndarray[Any, Any]:
    """Returns 32 random bits for each of `count` numbers, a function of the key and the index, so
    that they do not depend on threads. The engine computes the same."""
    def mixed(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7feb352d)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846ca68b)
        return x ^ (x >> np.uint32(16))
    places = np.arange(count, dtype=np.uint64)
    low, high = (places & np.uint64(0xffffffff)).astype(np.uint32), places >> np.uint64(32)
    upper = (high * np.uint64(0x9e3779b9) + np.uint64(key >> 32)).astype(np.uint32)
    return mixed(mixed(low ^ np.uint32(key & 0xffffffff)) ^ upper)


Format.__init__.__doc__ = "See the class for the arguments."
FORMATS = {format_.name: format_ for format_ in (
    Format("float32", exponent=8, fraction=23),
    Format("float16", exponent=5, fraction=10),
    Format("bfloat16", exponent=8, fraction=7),
    Format("tf32", exponent=8, fraction=10),
    Format("float8_e4m3", exponent=4, fraction=3, infinities=False),
    Format("float8_e5m2", exponent=5, fraction=2),
)}
FLOAT32, FLOAT16, BFLOAT16 = (FORMATS[name] for name in ("float32", "float16", "bfloat16"))


def get_format(given: Union[str, Format], what: str) -> Format:
    """Returns the format of a name; a `Format` unchanged. `what` is the argument in errors."""
    if isinstance(given, Format):
        return FORMATS[given.type_name] if given.is_array_type else given
    if not isinstance(given, str) or given not in FORMATS:
        raise ValueError(f"{what} takes a number format. Valid: {', '.join(FORMATS)}, or a "
                         f"gluon_amp.Format. Received: {given!r}")
    return FORMATS[given]
