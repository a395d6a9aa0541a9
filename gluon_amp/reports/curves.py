"""The lines of a plot: the means or medians of the runs of a group, and their spread."""
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from scipy import stats

from .compare import Group

MOST_LINES = 8  # lines of a plot; more groups are drawn as quantiles
MOST_POINTS = 200  # of one line
FEW_RUNS = 5  # below it, intervals of the mean are far wider than the runs: the band is their range
FEW_SHARED = 10  # below it, the interval of a share would cover most of the plot: no band is drawn


class Point(NamedTuple):
    """A value of a run; values of a group's runs with the same `at` are combined."""
    at: float
    x: float
    y: float


@dataclass
class Line:
    """A line; `band` is the low and the high end of its spread, or None for a single run. With
    `is_range` they are the lowest and the highest run."""
    name: str
    dtype: str
    model: str
    runs: int
    x: "np.ndarray[Any, Any]"
    y: "np.ndarray[Any, Any]"
    band: Optional["np.ndarray[Any, Any]"] = None
    recipes: int = 1  # more than one: y is a median
    is_range: bool = False


def pool(groups: Sequence[Group]) -> List[Tuple[str, List[Group]]]:
    """Returns the groups one by one or, if there are too many, by network and type."""
    if len(groups) <= MOST_LINES:
        return [(group.name, [group]) for group in groups]
    models = {group.model for group in groups}
    types = {(group.model, group.dtype) for group in groups}
    pooled: Dict[str, List[Group]] = {}
    for group in groups:
        by_model = [group.model] if len(models) > 1 and len(types) <= MOST_LINES else []
        pooled.setdefault(", ".join([*by_model, group.dtype]), []).append(group)
    if len(pooled) > MOST_LINES:
        pooled = {"all": list(groups)}
    return [(f"{name}: {len(of)} recipes" if len(of) > 1 else name, of)
            for name, of in pooled.items()]


def line(name: str, groups: Sequence[Group], points: Dict[int, List[Point]],
         steps: bool = False) -> Optional[Line]:
    """Returns the line of these groups; `points` are those of each run, by its id.

    For one group: the mean, and the 95 % interval of the mean, or the range of fewer than FEW_RUNS
    runs. For several: the median, and the quantiles from 5 to 95 %. With `steps` a value holds
    until the next point; the line is the median, and the band is from the lowest to the highest
    value.
    """
    each = [points[id(run)] for group in groups for run in group.runs if points[id(run)]]
    if not each:
        return None
    x, y = _steps(each) if steps else _table(each)
    counts = np.isfinite(y).sum(0)
    often = 2 * counts >= counts.max()  # the mean is not comparable after most runs have ended
    x, y, counts = x[:, often], y[:, often], counts[often]
    first = groups[0]
    result = Line(name, first.dtype, first.model, len(each), np.nanmean(x, 0), np.nanmean(y, 0),
                recipes=len(groups))
    result.is_range = len(groups) == 1 and len(each) > 1 and (steps or len(each) < FEW_RUNS)
    if len(groups) > 1 or result.is_range:
        ends = [0.0, 1.0] if result.is_range else [0.05, 0.95]
        result.band = np.nanquantile(y, ends, axis=0)
        if steps or not result.is_range:
            result.y = np.nanquantile(y, 0.5, axis=0)
    elif len(each) > 1:
        deviation = np.nanstd(y, 0) * np.sqrt(counts / np.maximum(counts - 1, 1))
        half = stats.t.ppf(0.975, np.maximum(counts - 1, 1)) * deviation / np.sqrt(counts)
        half = np.where(counts > 1, half, 0)
        result.band = np.stack([result.y - half, result.y + half])
    return result


def _table(each: List[List[Point]]) -> Tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Returns x and y of each run (row) at each index (column); NaN if a run has none."""
    row = np.repeat(np.arange(len(each)), [len(points) for points in each])
    at, xs, ys = np.array([point for points in each for point in points]).T
    places, column = np.unique(at, return_inverse=True)
    if len(places) > MOST_POINTS:
        edges = np.linspace(places[0], places[-1], MOST_POINTS + 1)[1:]
        column = np.minimum(np.searchsorted(edges, at), MOST_POINTS - 1)
    x, y, n = (np.zeros((len(each), min(len(places), MOST_POINTS))) for _ in range(3))
    for sums, values in ((x, xs), (y, ys), (n, 1)):
        np.add.at(sums, (row, column), values)
    some = n.any(0)
    n[n == 0] = np.nan
    return (x / n)[:, some], (y / n)[:, some]


def _steps(each: List[List[Point]]) -> Tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Returns the same for values that hold until the next one."""
    places = np.array(sorted({point.x for points in each for point in points}))
    if len(places) > MOST_POINTS:
        places = np.unique(np.quantile(places, np.linspace(0, 1, MOST_POINTS)))
    y = np.full((len(each), len(places)), np.nan)
    for row, points in enumerate(each):
        xs = np.array([point.x for point in points])
        ys = np.array([np.nan, *(point.y for point in points)])
        y[row] = ys[np.searchsorted(xs, places, side="right")]
    some = np.isfinite(y).any(0)
    y = y[:, some]
    return np.where(np.isfinite(y), places[some], np.nan), y


# ---- time to accuracy

def reached(name: str, groups: Sequence[Group], accuracy: float, by_time: bool,
            end: float) -> Optional[Line]:
    """Returns the share of finished runs that have reached an accuracy, with its 95 % interval
    (Wilson). A run that was killed might have reached it, so it is left out."""
    runs = [run for group in groups for run in group.finished or group.runs if run.best]
    if not runs:
        return None
    when = Counter(at for at in (run.reached(accuracy, by_time) for run in runs)
                   if at is not None)
    xs = [0.0, *sorted(when)]
    xs.append(max(end, xs[-1]))
    counts = list(accumulate([0, *(when[at] for at in sorted(when)), 0]))
    each = [stats.binomtest(count, len(runs)).proportion_ci(method="wilson") for count in counts]
    first = groups[0]
    return Line(name, first.dtype, first.model, len(runs), np.array(xs),
                np.array(counts) / len(runs), np.array(each).T)
