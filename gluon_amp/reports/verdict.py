"""Statistical tests of the difference between the final results of two groups of runs.

All numbers are points (hundredths), or percent of float32's mean. There are two independent
questions:

- Is there a difference? The p value of the t test.
- Is it small? Two one-sided tests against a margin (TOST): the means are equivalent if both
  "lower by the margin or more" and "higher by the margin or more" are rejected.

Small p values of both mean: different, by less than the margin.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple, Optional, Sequence, Tuple

import numpy as np
from scipy import stats

LEVEL = 0.05  # of both tests
POWER = 0.8  # of the number of seeds that a margin needs
MOST_SEEDS = 100_000
EXACT = 1e-9  # points: smaller variations of differences are rounding errors


@dataclass(frozen=True)
class Difference:
    """Mean of the low precision minus mean of float32.

    Attributes:
        mean: The difference.
        error: Its standard error.
        freedom: Degrees of freedom of Student's t.
        spread: The standard error of one seed: of a pair, or of one run of each group.
        seeds: The number of seeds of each group, or the lower of two numbers.
        paired: Whether runs with the same seed are compared in pairs.
        runs: The numbers of runs of two samples: low precision, float32.
        unit: "points", or "%" of float32's mean.
    """
    mean: float
    error: float
    freedom: float
    spread: float
    seeds: int
    paired: bool
    runs: Tuple[int, int] = (0, 0)
    unit: str = "points"

    @property
    def counted(self) -> str:
        """The number of seeds as text: "8", or "8 and 10" for samples of different sizes."""
        low, float32 = self.runs
        return f"{low} and {float32}" if low != float32 else str(self.seeds)

    @property
    def p(self) -> Optional[float]:
        """The p value of the test of no difference; None without variation."""
        if self.error < EXACT:
            return None
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.freedom))

    def interval(self, level: float = 0.95) -> Tuple[float, float]:
        if self.error < EXACT:
            return self.mean, self.mean
        low, high = stats.t.interval(level, self.freedom, self.mean, self.error)
        return float(low), float(high)

    def p_equivalent(self, margin: float) -> float:
        """Returns the p value of equivalence: the larger one of the two one-sided tests."""
        if self.error < EXACT:
            return 0.0 if abs(self.mean) < margin else 1.0
        return float(stats.t.sf((margin - abs(self.mean)) / self.error, self.freedom))

    @property
    def smallest_margin(self) -> float:
        """The smallest margin within which these seeds show equivalence."""
        return max(map(abs, self.interval(1 - 2 * LEVEL)))

    def seeds_for(self, margin: float) -> Optional[int]:
        """Returns the number of seeds that show equivalence with a power of 0.8 if the true means
        are equal; None if it exceeds MOST_SEEDS."""
        if self.spread < EXACT:
            return 2
        low, high = 1, MOST_SEEDS
        if self._power(high, margin) < POWER:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._power(middle, margin) >= POWER else (middle, high)
        return high

    def _power(self, seeds: int, margin: float) -> float:
        """Returns the power of both one-sided tests with this number of seeds and equal means."""
        if seeds < 2:
            return 0.0
        freedom = seeds - 1 if self.paired else 2 * seeds - 2
        distance = margin / (self.spread / math.sqrt(seeds))
        if distance > 20:
            return 1.0
        return float(2 * stats.nct.sf(stats.t.ppf(1 - LEVEL, freedom), freedom, distance) - 1)


def paired(low: Sequence[float], float32: Sequence[float], step: float = 0.0) -> Difference:
    """Returns the difference of pairs; runs with the same seed have the same index.

    Args:
        low: Results of the low precision.
        float32: Results of float32.
        step: The points of one image. It is the spread if the differences do not vary, because too
            few images may hide it.
    """
    differences = np.subtract(low, float32)
    spread, n = float(np.std(differences, ddof=1)), len(differences)
    spread = step if spread < EXACT else spread
    return Difference(float(np.mean(differences)), spread / math.sqrt(n), n - 1, spread, n, True)


class Sample(NamedTuple):
    """The statistics of runs in a published table."""
    n: int
    mean: float
    deviation: float  # standard deviation

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Sample":
        return cls(len(values), float(np.mean(values)), float(np.std(values, ddof=1)))


def unpaired(low: Sample, float32: Sample, step: float = 0.0) -> Difference:
    """Returns the difference of unpaired runs, by Welch's test; `step` as for pairs."""
    if max(low.deviation, float32.deviation) < EXACT:
        low, float32 = low._replace(deviation=step), float32._replace(deviation=step)
    a, b = low.deviation ** 2 / low.n, float32.deviation ** 2 / float32.n
    freedom = (a + b) ** 2 / (a ** 2 / (low.n - 1) + b ** 2 / (float32.n - 1)) if a + b else 1.0
    return Difference(low.mean - float32.mean, math.sqrt(a + b), freedom,
                      math.hypot(low.deviation, float32.deviation), min(low.n, float32.n), False,
                      (low.n, float32.n))


# ---- in words

def sentence(low: str, float32: str, difference: Difference, margin: float,
             measure: str = "") -> str:
    """Returns the result as a sentence for readers without statistics; the claim follows the colon.
    `measure` is the measure if it is not an accuracy."""
    which = f"The {measure} of " if measure else ""
    return f"{which}{low} ends {_ends(difference, float32)}: {conclusion(difference, margin)}."


def outcome(difference: Difference, margin: float) -> str:
    """Returns the same in one or two words."""
    p = difference.p
    different = difference.mean != 0 if p is None else p < LEVEL
    if difference.p_equivalent(margin) < LEVEL:
        return "different, within the margin" if different else "the same"
    return "different" if different else "undecided"


def conclusion(difference: Difference, margin: float) -> str:
    within = f"within {in_points(margin, difference.unit)}"
    tests = f"two one-sided tests, {p_text(difference, margin)}"
    word = outcome(difference, margin)
    if word == "the same":
        return f"the same {within} ({tests})"
    if word == "different, within the margin":
        return f"different, but equivalent {within} ({tests})"
    seeds = difference.seeds_for(margin)
    kind = "paired seeds" if difference.paired else "seeds of each"
    needed = f"{seeds:,} {kind} would show {margin:g}, were there no difference" if seeds else \
        f"more than {MOST_SEEDS:,} {kind} would be needed to show {margin:g}"
    if word == "different":
        return f"different, and not shown to be {within} ({tests})"
    shown = math.ceil(100 * difference.smallest_margin) / 100
    return f"the same within {shown:.2f} {difference.unit}, not shown {within} ({tests}); {needed}"


def _ends(difference: Difference, float32: str) -> str:
    low, high = difference.interval()
    seeds = f"{difference.counted} {'paired seeds' if difference.paired else 'seeds of each'}"
    seeds = f"{difference.counted} seeds" if " and " in difference.counted else seeds
    distance = from_float32(difference.mean, float32, difference.unit)
    if difference.p is None:
        return f"{distance} in each of {seeds}"
    return f"{distance} (95 % interval {low:.2f} to {high:.2f}, {seeds}, {_p(difference.p)})"


def from_float32(points: float, float32: str, unit: str = "points") -> str:
    """0.17 points below float32"""
    distance = f"{abs(points):.2f}"
    side = "from" if float(distance) == 0 else "below" if points < 0 else "above"
    return f"{distance} {unit} {side} {float32}"


def in_points(margin: float, unit: str = "points") -> str:
    return f"{margin:g} {'point' if margin == 1 and unit == 'points' else unit}"


def p_text(difference: Difference, margin: float) -> str:
    return _p(difference.p_equivalent(margin))


def p_number(p: float) -> str:
    """Formats a p value for a table."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _p(p: float) -> str:
    number = p_number(p)
    return f"p {number}" if number.startswith("<") else f"p = {number}"
