"""The tensors of a network: counts of their values, and how rounding them moves the loss.

A `Counts` is a histogram of float32 exponents. From it follow the shares that underflow, become
subnormal, or overflow in a format, at any loss scale, without another run.
"""
from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from ..annotations import Array
from ..formats import FLOAT16, FLOAT32, Format
from ..gluon.observe import counts_of
from ..graph.operators import LOSSES, PRODUCTS

_BIAS = 127  # bin 127 holds numbers from 1 to below 2
_EXPONENTS = np.arange(256.0) - _BIAS  # the exponent of each bin
_SQUARE = 7 / 3  # the mean square of a number between 1 and 2
_ADDED = ("bins", "zero", "infinite", "nan", "overflowed", "flushed", "squares", "error_squares")
# Of `low_snr` in dB: up to 26 and 40, results/xray/thresholds.csv has the same judgements.
_BELOW_ROUNDING, _LEAST_DECIBELS = 26, 10.0
_POWERS = tuple(range(-48, 49))  # of two, by which a tensor is scaled; float16 spans 2^40
# Bits below a format's largest exponent: smaller values do not overflow in another batch. From 2 to
# 15, results/xray/thresholds.csv has the same judgements.
_BITS = 4


class Key(NamedTuple):
    """A tensor: output `which` of a node, or the gradient of its input `which`."""
    node: str
    backward: bool
    which: int


@dataclass
class Counts:
    """Counts of a tensor's values before rounding.

    Attributes:
        bins: the number of values with each float32 exponent; bin 127 is from 1 to below 2. Bin 0
            holds float32's subnormal numbers, without zeros; bin 255 is empty.
        zero, infinite, nan: the numbers of such values.
        overflowed, flushed: the numbers of values that became infinite or 0 in the tensor's type.
        squares, error_squares: sums of squares of finite values, and of their rounding errors.
        sample: up to 1024 rounded values, evenly spaced in the tensor; None after its step.
    """
    bins: np.ndarray[Any, Any]
    zero: int = 0
    infinite: int = 0
    nan: int = 0
    overflowed: int = 0
    flushed: int = 0
    squares: float = 0.0
    error_squares: float = 0.0
    sample: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def of_engine(cls, taken: Any) -> List[Counts]:
        """Returns the engine's counts of several tensors. The engine's first bin includes zeros,
        and its last infinities and NaN."""
        bins = taken["bins"].copy()
        nan = bins[:, 255] - taken["infinite"]
        bins[:, 0] -= taken["zero"]
        bins[:, 255] = 0
        columns = [taken["zero"], taken["infinite"], nan,
                   *(taken[name] for name in taken.dtype.names[3:])]
        return [cls(*row) for row in zip(bins, *(column.tolist() for column in columns))]

    @classmethod
    def of_array(cls, array: Array, half: bool = False) -> Counts:
        """Counts the values of a float array; with `half`, as if they were rounded to float16."""
        numbers = np.ascontiguousarray(
            array.asnumpy() if isinstance(array, mx.nd.NDArray) else array, np.float32)
        return cls.of_engine(counts_of(numbers, half))[0]

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in _ADDED))

    def times(self, factor: float) -> Counts:
        """Returns the counts of these values times a power of two, within float32's range."""
        by = round(math.log2(factor))
        if by == 0:
            return self
        bins = np.zeros_like(self.bins)
        np.add.at(bins, np.clip(np.arange(256) + by, 0, 254), self.bins)
        return replace(self, bins=bins, squares=self.squares * factor ** 2,
                       error_squares=self.error_squares * factor ** 2)

    @property
    def numbers(self) -> int:
        """The number of counted values."""
        return int(self.bins.sum()) + self.zero + self.infinite + self.nan

    @property
    def finite(self) -> bool:
        """Whether all values were finite before rounding."""
        return self.infinite + self.nan == 0

    @property
    def stay_finite(self) -> bool:
        """Whether all values are finite after rounding too."""
        return self.finite and self.overflowed == 0

    @property
    def range(self) -> Optional[Tuple[int, int]]:
        """The exponents of the smallest and the largest value other than 0."""
        exponents = self.bins.nonzero()[0]
        return (int(exponents[0]) - _BIAS, int(exponents[-1]) - _BIAS) if exponents.size else None

    @property
    def middle(self) -> Optional[int]:
        """The median exponent of values other than 0."""
        total = int(self.bins.sum())
        return int(np.searchsorted(self.bins.cumsum(), (total + 1) // 2)) - _BIAS if total else None

    @property
    def own_snr(self) -> float:
        """The signal-to-noise ratio of the rounding, in dB."""
        return decibels(self.squares, self.error_squares)

    def shares(self, format_: Format = FLOAT16, rounded: bool = False) -> Dict[str, float]:
        """Returns the shares of values in a format that are 0 ("zero"), underflow to 0
        ("flushed"), become subnormal ("subnormal"), or exceed its range ("overflowed"). `rounded`:
        the values were rounded to this format, so that two of the shares are exact."""
        flushed = math.log2(format_.smallest) - 1 > _EXPONENTS
        above = _is_beyond(format_)
        subnormal = (math.log2(format_.smallest_normal) > _EXPONENTS) & ~flushed
        count, lost = max(self.numbers, 1), self.infinite + self.nan
        to_zero, beyond = (self.flushed, self.overflowed) if rounded else (
            int(self.bins[flushed].sum()), int(self.bins[above].sum()))
        return {"zero": self.zero / count, "flushed": to_zero / count,
                "subnormal": int(self.bins[subnormal].sum()) / count,
                "overflowed": (beyond + lost) / count}

    def underflow(self, format_: Format = FLOAT16, scale: float = 1.0) -> float:
        """Returns the share of the tensor's norm that underflow removes in a format, at a scale:
        the error of values that become 0 or subnormal."""
        return float(self.underflow_at(format_, (round(math.log2(scale)),))[0])

    def underflow_at(self, format_: Format, powers: Tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Returns the same at several powers of two."""
        error, squares = _small_end(format_, powers)
        total = squares @ self.bins
        return np.sqrt((error @ self.bins) / np.where(total, total, 1.0))

    def as_in(self, format_: Format) -> Counts:
        """Returns the counts of these values rounded to a format, estimated from exponents."""
        shares, inside = self.shares(format_), np.where(_is_beyond(format_), 0, self.bins)
        steps = np.maximum(4.0 ** (_EXPONENTS - format_.fraction), format_.smallest ** 2)
        energy = _SQUARE * 4.0 ** _EXPONENTS
        squares, left = float(self.bins @ energy), float(inside @ energy)
        noise = min(float(inside @ steps) / 12 / left, 1.0) if left else 0.0
        beyond = round(shares["overflowed"] * self.numbers) - self.infinite - self.nan
        return replace(self, overflowed=beyond, flushed=round(shares["flushed"] * self.numbers),
                       squares=squares, error_squares=noise * squares)


def add_counts(total: Dict[Key, Counts], counts: Mapping[Key, Counts]) -> None:
    """Adds counts to the total of each tensor."""
    for key, one in counts.items():
        total[key] = total[key] + one if key in total else one


def as_pairs(bins: np.ndarray[Any, Any]) -> List[List[int]]:
    """Returns a histogram as files have it: pairs of an exponent and the number of its values."""
    at = bins.nonzero()[0]
    return [[*pair] for pair in zip((at - _BIAS).tolist(), bins[at].tolist())]


def from_pairs(pairs: Iterable[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Returns the histogram of `as_pairs`. Raises TypeError for other pairs."""
    bins = np.zeros(256, np.int64)
    for pair in pairs:
        if len(pair) != 2 or pair[0] < -_BIAS:
            raise TypeError(f"bins has {pair!r:.100} instead of an exponent and a count")
        bins[pair[0] + _BIAS] = pair[1]
    return bins


@functools.lru_cache(maxsize=256)
def _small_end(format_: Format, powers: Tuple[int, ...]
               ) -> Tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns for each power of two and each bin the energy that underflow removes from a value,
    and the value's energy. Values are uniform within a bin."""
    exponents = _EXPONENTS + np.array(powers, np.float64)[:, None]
    squares = _SQUARE * 4.0 ** exponents
    smallest = math.log2(format_.smallest)
    error = np.where(exponents < smallest - 1, squares, 4.0 ** smallest / 12)
    return np.where(exponents < math.log2(format_.smallest_normal), error, 0.0), squares


def _is_beyond(format_: Format) -> np.ndarray[Any, Any]:
    """Returns for each bin whether its values exceed a format's range."""
    beyond: np.ndarray[Any, Any] = format_.last_exponent < _EXPONENTS
    return beyond


def decibels(signal: float, noise: float) -> float:
    """Returns the ratio of two energies in dB; infinite without noise, -infinite without a signal.
    """
    if noise == 0:
        return math.inf
    if noise == math.inf:
        return -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


@dataclass
class Tensor:
    """A tensor with its statistics.

    Attributes:
        key: its node's name, whether it is a gradient, and the index of the output or input.
        kind: "output", "gradient", or "weight gradient".
        op: the operator that computes it.
        format: its format.
        parameter: for a weight gradient, the parameter's name.
        counts: the counts of all steps; None before.
        snr: the SNR against float32 in dB, the lowest of all steps; None without a reference.
        loss_sensitivities: for each step, the share by which its rounding moves the loss, to first
            order: by each value's error times its gradient.
        by_chance: for products, the same share, if errors and gradients are uncorrelated: from
            their mean squares alone.
        largest: for each step, the exponent of its largest value; no entry for a step in which
            large values have no gradients, such as those of a mask.
        name: such as conv0_fwd, gradient of conv0_weight, gradient of relu0_fwd input 0.
        is_low: whether its format is not float32.
        low_snr: the SNR in dB below which the format does not suit it.

    Internal:
        place: its index in order of computation, forward before backward.
        reads: keys of its inputs.
        carried: keys of its inputs from a loop's previous iteration.
        gradients: for an output, keys of the tensors that sum to its gradient.
        variables: names of the data and parameters that its node reads.
        beyond: whether the float32 step has values beyond its format.
        peak: a value that the tensor reaches, if its exponent is the format's last; else 0.
        begins: whether it is a gradient that a loss operator starts without the loss scale.
    """
    key: Key
    kind: str
    op: str
    place: int
    format: Format
    reads: List[Key] = field(repr=False, default_factory=list)
    carried: List[Key] = field(repr=False, default_factory=list)
    gradients: List[Key] = field(repr=False, default_factory=list)
    variables: List[str] = field(repr=False, default_factory=list)
    parameter: str = field(repr=False, default="")
    counts: Any = field(repr=False, default=None)
    snr: Optional[float] = None
    beyond: bool = False
    loss_sensitivities: List[float] = field(repr=False, default_factory=list)
    by_chance: List[float] = field(repr=False, default_factory=list)
    largest: List[int] = field(repr=False, default_factory=list)
    peak: float = 0.0
    name: str = field(init=False)
    begins: bool = field(init=False, repr=False)
    is_low: bool = field(init=False, repr=False)
    low_snr: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        node, backward, which = self.key
        read = self.parameter or f"{node} input {which}"
        self.name = f"gradient of {read}" if backward else f"{node}[{which}]" if which else node
        self.begins = backward and self.op in LOSSES
        self.is_low = self.format != FLOAT32
        exact = 6.02 * (self.format.fraction + 1)  # the SNR of rounding without underflow
        self.low_snr = max(exact - _BELOW_ROUNDING, _LEAST_DECIBELS)

    def join(self, other: Tensor) -> None:
        """Adds the inputs and readers of another tensor with the same key."""
        for name in ("reads", "carried", "gradients", "variables"):
            setattr(self, name, list(dict.fromkeys(getattr(self, name) + getattr(other, name))))
        if other.is_low:
            self.format = other.format
            self.__post_init__()

    def is_below(self, counts: Optional[Counts] = None) -> bool:
        """Whether values are too small for the format."""
        held = counts or self.counts
        return self.is_low and bool(held.squares) and held.own_snr < self.low_snr

    def highest_factor(self, counts: Counts) -> float:
        """Returns the headroom of counts as a power of two; less than 1 if a number overflowed."""
        above = self.format.last_exponent - counts.range[1] if counts.range else 0
        return 2.0 ** (above if counts.stay_finite else min(above, -1))

    def lowest_factor(self, counts: Counts, underflow: float) -> float:
        """Returns the smallest power of two times which counts lose at most this share."""
        # monotonic in the powers
        fits = counts.underflow_at(self.format, _POWERS) <= underflow
        return 2.0 ** _POWERS[int(fits.argmax()) if fits.any() else -1]


# ---- what a step shows --------------------------------------------------------------------------


def compare(tensors: Iterable[Tensor], counts: Mapping[Key, Counts],
            reference: Mapping[Key, Counts], factor: float) -> None:
    """Updates the tensors' SNR of a step against the same step in float32, whose gradients are
    multiplied by a factor."""
    for tensor in tensors:
        here, there = counts.get(tensor.key), reference.get(tensor.key)
        if tensor.begins or here is None or there is None \
                or not 0 < len(there.sample) == len(here.sample):
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            values = there.sample * np.float32(factor if tensor.key.backward else 1)
            wide = values.astype(np.float64)
            signal = float(np.square(wide).sum())
            noise = float(np.square(here.sample - wide).sum())
            tensor.beyond |= bool(np.fmax.reduce(np.abs(wide)) > tensor.format.largest)
        if math.isfinite(signal):
            snr = decibels(signal, noise if math.isfinite(noise) else math.inf)
            tensor.snr = snr if tensor.snr is None else min(tensor.snr, snr)


def note_loss_sensitivity(tensors: Iterable[Tensor], counts: Mapping[Key, Counts], total: float,
                          scale: float) -> None:
    """Adds to each rounded forward tensor with a sample the share by which it moves the loss.

    To first order, the loss moves by the sum of each value's error times its gradient. Rounding
    errors are independent, so their squares add up; histograms have the squares of errors and of
    gradients. Samples correct for their correlation: the values of a mask have large errors, and
    their gradients are 0. `by_chance` has no such correction.
    """
    tensors = list(tensors)
    scales = {t.key: 1.0 for t in tensors if t.begins}
    for tensor in tensors:
        held = counts.get(tensor.key)
        if tensor.key.backward or not tensor.is_low or held is None or not total \
                or not len(held.sample):
            continue
        gradients = [key for key in tensor.gradients if key in counts]
        squares = sum(counts[key].squares / scales.get(key, scale) ** 2 for key in gradients)
        # the expected square of the sum of errors times gradients
        moved = math.sqrt(held.error_squares * squares / max(held.numbers, 1)) / total
        if not math.isfinite(moved):
            continue
        if tensor.op in PRODUCTS:
            tensor.by_chance.append(moved)
        # half of the threshold of a finding; less needs no correction
        if moved > 2.0 ** -(tensor.format.fraction + 2):
            moved *= math.sqrt(min(_correlation(tensor.format, held.sample, [
                counts[key].sample for key in gradients]), 1.0))
        tensor.loss_sensitivities.append(moved)


def _correlation(format_: Format, sample: Any, gradients: List[Any]) -> float:
    """Returns the correlation of squared errors and gradients in samples; 1 if they are
    independent."""
    size = np.abs(sample.astype(np.float64))
    squares = sum(np.square(g.astype(np.float64)) for g in gradients if len(g) == len(size))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.square(np.maximum(np.ldexp(1.0, np.frexp(size)[1] - 1 - format_.fraction),
                                      format_.smallest)) * (size > 0)
        finite = np.isfinite(size) & np.isfinite(squares)
        both = np.sum(errors * finite) * np.sum(squares * finite)
    return float(finite.sum() * np.sum(np.where(finite, errors * squares, 0.0)) / both) \
        if both > 0 and math.isfinite(both) else 1.0


def note_largest(tensors: Iterable[Tensor], counts: Mapping[Key, Counts]) -> None:
    """Adds the exponent of a step's largest value to each forward tensor. Values without gradients,
    such as those of a mask, are ignored."""
    for tensor in tensors:
        held = counts.get(tensor.key)
        if tensor.key.backward or held is None or not tensor.is_low:
            continue
        least, highest = tensor.format.last_exponent - _BITS, (held.range or (0, -_BIAS))[1]
        if highest <= least:
            tensor.largest.append(least)
        elif not _is_masked(held.sample, 2.0 ** least, [
                counts[key].sample for key in tensor.gradients if key in counts]):
            tensor.largest.append(highest)
            if highest == tensor.format.last_exponent:
                sampled = float(np.abs(held.sample).max(initial=0.0))
                tensor.peak = max(tensor.peak, 2.0 ** tensor.format.last_exponent, sampled)


def _is_masked(sample: Any, least: float, gradients: List[Any]) -> bool:
    """Whether the sample has values of at least `least`, all without gradients."""
    large = np.abs(sample) >= least
    return bool(large.any()) and bool(gradients) and not any(
        len(g) == len(large) and g[large].any() for g in gradients)


def varies_by(tensor: Tensor) -> Optional[int]:
    """Returns the max exponent minus the median exponent over batches, if it exceeds the headroom:
    another batch may overflow."""
    if len(tensor.largest) < 2:
        return None
    most = max(tensor.largest)
    by = most - statistics.median_low(tensor.largest)
    return by if tensor.format.last_exponent - most < by else None
