"""Counts of tensors' values by the engine, and the effect of any number format on them.

A `Counts` is a histogram of float32 exponents. From it follow the shares that underflow, become
subnormal, or overflow in a format, at any loss scale, without another run.
"""
import ctypes
import functools
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Container, Dict, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from .._mxnet import mx, np
from ..annotations import Array
from ..cpu import library
from ..formats import FLOAT16, Format

_BIAS = 127  # bin 127 holds numbers from 1 to below 2
_EXPONENTS = np.arange(256.0) - _BIAS  # the exponent of each bin
_SQUARE = 7 / 3  # the mean square of a number between 1 and 2
_COUNTS: Any = np.dtype(library.Counts)


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
    """
    bins: "np.ndarray[Any, Any]"
    zero: int = 0
    infinite: int = 0
    nan: int = 0
    overflowed: int = 0
    flushed: int = 0
    squares: float = 0.0
    error_squares: float = 0.0

    @classmethod
    def of_engine(cls, taken: Any) -> "Counts":
        """Returns the engine's counts of several tensors, with arrays as attributes. The engine's
        first bin includes zeros, and its last infinities and NaN."""
        bins, zero, infinite, *others = (taken[name].copy() for name in taken.dtype.names)
        nan = bins[:, 255] - infinite
        bins[:, 0] -= zero
        bins[:, 255] = 0
        return cls(bins, zero, infinite, nan, *others)

    @classmethod
    def of_structure(cls, counts: Any) -> "Counts":
        """Returns the counts in a structure of the engine."""
        return cls.of_engine(np.frombuffer(counts, _COUNTS)).row(0)

    def row(self, row: int) -> "Counts":
        """Returns the counts of one of several tensors."""
        bins, *columns = vars(self).values()
        return Counts(bins[row], *(column[row].item() for column in columns))

    @classmethod
    def of_array(cls, array: Array, half: bool = False) -> "Counts":
        """Counts the values of a float array; with `half`, as if they were rounded to float16."""
        numbers = np.ascontiguousarray(
            array.asnumpy() if isinstance(array, mx.nd.NDArray) else array, np.float32)
        counts = library.Counts()
        library.load()
        library.table().count(numbers.ctypes.data_as(ctypes.c_void_p), numbers.size, int(half),
                              ctypes.byref(counts))
        return cls.of_structure(counts)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def times(self, factor: float) -> "Counts":
        """Returns the counts of these values times a power of two, within float32's range."""
        by = round(math.log2(factor))
        if by == 0:
            return self
        bins = np.zeros_like(self.bins)
        into: Any = (..., np.clip(np.arange(256) + by, 0, 254))
        np.add.at(bins, into, self.bins)
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
        found = self.bins.nonzero()[0]
        return (int(found[0]) - _BIAS, int(found[-1]) - _BIAS) if found.size else None

    @property
    def middle(self) -> Optional[int]:
        """The median exponent of values other than 0."""
        total = int(self.bins.sum())
        return int(np.searchsorted(self.bins.cumsum(), (total + 1) // 2)) - _BIAS if total else None

    @property
    def own_snr(self) -> float:
        """The signal-to-noise ratio of the rounding, in dB."""
        return decibels(self.squares, self.error_squares)

    def shares(self, format_: Format = FLOAT16, own: bool = False) -> Dict[str, float]:
        """Returns the shares of values in a format that are 0 ("zero"), underflow to 0
        ("flushed"), become subnormal ("subnormal"), or exceed its range ("overflowed"). `own`: the
        values were rounded to this format, so that two of the shares are exact."""
        flushed = math.log2(format_.smallest) - 1 > _EXPONENTS
        above = _is_beyond(format_)
        subnormal = (math.log2(format_.smallest_normal) > _EXPONENTS) & ~flushed
        count, lost = max(self.numbers, 1), self.infinite + self.nan
        to_zero, beyond = (self.flushed, self.overflowed) if own else (
            int(self.bins[flushed].sum()), int(self.bins[above].sum()))
        return {"zero": self.zero / count, "flushed": to_zero / count,
                "subnormal": int(self.bins[subnormal].sum()) / count,
                "overflowed": (beyond + lost) / count}

    def headroom(self, format_: Format = FLOAT16) -> Optional[Tuple[int, int]]:
        """Returns the headroom in bits below the smallest value, to the format's smallest normal
        number, and above the largest. Negative if values exceed it."""
        if self.range is None:
            return None
        low, high = self.range
        return (low - round(math.log2(format_.smallest_normal)),
                math.floor(math.log2(format_.largest)) - high)

    def lost(self, format_: Format = FLOAT16, scale: float = 1.0) -> float:
        """Returns the share of the tensor's norm that underflow removes in a format, at a scale:
        the error of values that become 0 or subnormal."""
        return float(self.lost_at(format_, (round(math.log2(scale)),))[0])

    def lost_at(self, format_: Format, powers: Tuple[int, ...]) -> "np.ndarray[Any, Any]":
        """Returns the same at several powers of two."""
        error, squares = _small_end(format_, powers)
        total = squares @ self.bins
        return np.sqrt((error @ self.bins) / np.where(total, total, 1.0))

    def noise(self, format_: Format) -> float:
        """Returns the noise-to-signal ratio of rounding to a format; infinite if a value exceeds
        its range."""
        if self.shares(format_)["overflowed"]:
            return math.inf
        steps = np.maximum(4.0 ** (_EXPONENTS - format_.fraction), format_.smallest ** 2)
        error, total = (self.bins * steps).sum() / 12, self._estimated_squares()
        return float(min(error / total, 1.0)) if total else 0.0

    def _estimated_squares(self) -> float:
        return float((self.bins * _SQUARE * 4.0 ** _EXPONENTS).sum())

    def as_in(self, format_: Format) -> "Counts":
        """Returns the counts of these values rounded to a format, estimated from exponents."""
        count, shares, squares = self.numbers, self.shares(format_), self._estimated_squares()
        beyond = round(shares["overflowed"] * count) - self.infinite - self.nan
        inside = replace(self, bins=np.where(_is_beyond(format_), 0, self.bins), infinite=0, nan=0)
        return replace(self, overflowed=beyond, flushed=round(shares["flushed"] * count),
                       squares=squares, error_squares=inside.noise(format_) * squares)


@functools.lru_cache(maxsize=256)
def _small_end(format_: Format, powers: Tuple[int, ...]
               ) -> Tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Returns for each power of two and each bin the energy that underflow removes from a value,
    and the value's energy. Values are uniform within a bin."""
    exponents = _EXPONENTS + np.array(powers, np.float64)[:, None]
    squares = _SQUARE * 4.0 ** exponents
    smallest = math.log2(format_.smallest)
    error = np.where(exponents < smallest - 1, squares, 4.0 ** smallest / 12)
    return np.where(exponents < math.log2(format_.smallest_normal), error, 0.0), squares


def _is_beyond(format_: Format) -> "np.ndarray[Any, Any]":
    """Returns for each bin whether its values exceed a format's range."""
    beyond: np.ndarray[Any, Any] = math.floor(math.log2(format_.largest)) < _EXPONENTS
    return beyond


def decibels(signal: float, noise: float) -> float:
    """Returns the ratio of two energies in dB; infinite without noise, -infinite without a signal.
    """
    if noise == 0:
        return math.inf
    if noise == math.inf:
        return -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def compared(references: List["np.ndarray[Any, Any]"],
             found: List["np.ndarray[Any, Any]"]) -> List[Tuple[float, float]]:
    """Compares samples with references, none of them empty, in one pass.

    Returns:
        The largest absolute value of each reference, and the SNR in dB; NaN if a reference is not
        finite.
    """
    if not references:
        return []
    begins = np.cumsum([0, *(len(one) for one in references[:-1])])
    right = np.concatenate(references).astype(np.float64)
    with np.errstate(invalid="ignore"):
        largest = np.fmax.reduceat(np.abs(right), begins).tolist()
        signals, noises = (np.add.reduceat(np.square(part), begins).tolist()
                           for part in (right, np.concatenate(found) - right))
    return [(size, decibels(signal, noise if math.isfinite(noise) else math.inf)
             if math.isfinite(signal) else math.nan)
            for size, signal, noise in zip(largest, signals, noises)]


class Counted(Mapping[Key, Counts]):
    """The counts of many tensors, one row for each. A `Counts` is created on access.

    Attributes:
        rows: the row of each tensor; steps share it.
        all: a `Counts` with arrays of all rows as attributes.
        samples: for each row up to 1024 rounded values, evenly spaced in the tensor.
    """

    def __init__(self, rows: Dict[Key, int], all_: Any, samples: Any = ()) -> None:
        self.rows, self.all, self.samples = rows, all_, samples

    def __getitem__(self, key: Key) -> Counts:
        found: Counts = self.all.row(self.rows[key])
        return found

    def __contains__(self, key: object) -> bool:
        return key in self.rows

    def __iter__(self) -> Iterator[Key]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def numbers(self) -> "np.ndarray[Any, Any]":
        """Returns the number of counted values of each tensor."""
        return self.all.bins.sum(axis=1) + self.all.zero + self.all.infinite + self.all.nan

    def highest(self) -> "np.ndarray[Any, Any]":
        """Returns the exponent of each tensor's largest value; below all others if all are 0."""
        found = self.all.bins != 0
        last = 255 - found[:, ::-1].argmax(axis=1)
        return np.where(found.any(axis=1), last, -1) - _BIAS

    def sample(self, key: Key) -> Any:
        """Returns a tensor's sample; empty if there is none."""
        return self.samples[self.rows[key]] if key in self.rows else _NO_SAMPLE

    def broken(self) -> Set[Key]:
        """Returns the tensors that are not finite after rounding."""
        found = (self.all.infinite + self.all.nan + self.all.overflowed).tolist()
        return {key for key, count in zip(self.rows, found) if count}


_NO_SAMPLE = np.zeros(0, np.float32)


def both_ways(forward: Counted, backward: Counted) -> Counted:
    """Joins the forward pass of one run and the backward pass of another."""
    if forward is backward:
        return forward
    found = [(one, key) for one, back in ((forward, False), (backward, True)) for key in one
             if key.backward == back]
    columns = (np.stack([vars(one.all)[name][one.rows[key]] for one, key in found])
               for name in vars(forward.all))
    return Counted({key: row for row, (_, key) in enumerate(found)}, Counts(*columns),
                   [one.sample(key) for one, key in found])


def added_up(steps: List[Tuple[float, Counted]], stay: Container[Key] = ()) -> Counted:
    """Sums the counts of steps. Each step has a factor for its gradients, except those in `stay`.
    """
    rows = {key: row for row, key in enumerate(dict.fromkeys(
        key for _, counted in steps for key in counted))}
    total: Any = {name: np.zeros((len(rows), *column.shape[1:]), column.dtype)
                  for name, column in vars(steps[0][1].all).items()}
    for factor, counted in steps:
        for moves in (False, True):
            keys = [key for key in counted if (key.backward and key not in stay) == moves]
            which, into = [counted.rows[key] for key in keys], [rows[key] for key in keys]
            part = Counts(*(column[which] for column in vars(counted.all).values()))
            for name, column in vars(part.times(factor if moves else 1.0)).items():
                total[name][into] += column
    return Counted(rows, Counts(**total))


_ROW: Any = np.dtype(library.WatchedRow)


def read() -> Counted:
    """Returns the engine's counts since the last call, and resets them."""
    mx.nd.waitall()
    table = library.table()
    count = table.watched()
    taken: Any = np.frombuffer((ctypes.c_char * (_ROW.itemsize * count)).from_address(
        table.watched_rows()), _ROW) if count else np.zeros(0, _ROW)
    length = ctypes.c_int64()
    names = ctypes.string_at(table.watched_names(ctypes.byref(length)), length.value)
    rows = _rows(names, *(tuple(taken[column].tolist()) for column in ("backward", "index")))
    samples = [sample[:n] for sample, n in zip(taken["sample"].copy(), taken["samples"].tolist())]
    return Counted(rows, Counts.of_engine(taken["counts"]), samples)


_set_aside: List[Counted] = []  # by `set_aside`, for the next `read_all`


def read_all() -> List[Counted]:
    """Returns the counts since the last call, in their order, also those of before an X-ray."""
    found = [*_set_aside, read()]
    _set_aside.clear()
    return found


@contextmanager
def set_aside() -> Iterator[None]:
    """Keeps the counts of before for `read_all`, while an X-ray reads its own."""
    if library.started():
        _set_aside.append(read())
    try:
        yield
    finally:
        if library.started():
            read()


@functools.lru_cache(maxsize=4)
def _rows(names: bytes, backward: Tuple[int, ...], index: Tuple[int, ...]) -> Dict[Key, int]:
    """Returns the row of each tensor, cached for all steps of a graph."""
    keys = map(Key, names.decode().split("\0"), map(bool, backward), index)
    return {key: row for row, key in enumerate(keys)}
