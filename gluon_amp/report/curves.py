"""The lines of a plot: what the runs of a group have in common, and how far they spread."""
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from scipy import stats

from .compare import Group
from .runs import Run

MOST_LINES = 8  # of one plot: more groups are drawn as quantiles
MOST_POINTS = 200  # of one line


class Point(NamedTuple):
    """One value of one run: runs of a group are put together where `at` is the same."""
    at: float
    x: float
    y: float


@dataclass
class Line:
    """`low` and `high` are the band around `y`; None of a single run."""
    name: str
    dtype: str
    model: str
    runs: int
    x: "np.ndarray[Any, Any]"
    y: "np.ndarray[Any, Any]"
    low: Optional["np.ndarray[Any, Any]"] = None
    high: Optional["np.ndarray[Any, Any]"] = None
    recipes: int = 1  # more than one: y is a median


def pool(groups: Sequence[Group]) -> List[Tuple[str, List[Group]]]:
    """The groups one by one, or, where they are too many, those of one network and type."""
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
    """The line of these groups; `points` are those of each run, by its id.

    Of one group: the mean, and the 95 % interval of the mean. Of several: the median, and the
    quantiles from 5 to 95 %. `steps`: a value holds until the next point; the line is the median,
    and the band goes from the lowest to the highest.
    """
    each = [points[id(run)] for group in groups for run in group.runs if points[id(run)]]
    if not each:
        return None
    x, y = _steps(each) if steps else _table(each)
    known = np.isfinite(y).sum(0)
    often = 2 * known >= known.max()  # where most runs have ended, a mean is another one
    x, y, known = x[:, often], y[:, often], known[often]
    first = groups[0]
    made = Line(name, first.dtype, first.model, len(each), np.nanmean(x, 0), np.nanmean(y, 0),
                recipes=len(groups))
    if len(groups) > 1:
        made.low, made.y, made.high = np.nanquantile(y, [0.05, 0.5, 0.95], axis=0)
    elif steps and len(each) > 1:
        made.low, made.y, made.high = np.nanquantile(y, [0, 0.5, 1], axis=0)
    elif len(each) > 1:
        deviation = np.nanstd(y, 0) * np.sqrt(known / np.maximum(known - 1, 1))
        half = stats.t.ppf(0.975, np.maximum(known - 1, 1)) * deviation / np.sqrt(known)
        half = np.where(known > 1, half, 0)
        made.low, made.high = made.y - half, made.y + half
    return made


def _table(each: List[List[Point]]) -> Tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """x and y of each run (row) at each place (column); NaN where a run has none."""
    places = sorted({point.at for points in each for point in points})
    if len(places) > MOST_POINTS:
        edges = np.linspace(places[0], places[-1], MOST_POINTS + 1)[1:]
        column = {at: int(np.searchsorted(edges, at)) for at in places}
        count = MOST_POINTS
    else:
        column, count = {at: i for i, at in enumerate(places)}, len(places)
    x, y, n = (np.zeros((len(each), count)) for _ in range(3))
    for row, points in enumerate(each):
        for point in points:
            at = min(column[point.at], count - 1)
            x[row, at] += point.x
            y[row, at] += point.y
            n[row, at] += 1
    some = n.any(0)
    x, y, n = x[:, some], y[:, some], n[:, some]
    n[n == 0] = np.nan
    return x / n, y / n


def _steps(each: List[List[Point]]) -> Tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """The same, of values that hold until the next one."""
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
    """The share of runs that have reached an accuracy by then, with its 95 % interval (Wilson): of
    those that came to their end, since one that was killed might have reached it."""
    runs = [run for group in groups for run in group.finished or group.runs if run.best]
    if not runs:
        return None
    when = Counter(at for at in (reached_at(run, accuracy, by_time) for run in runs)
                   if at is not None)
    xs, counts = [0.0], [0]
    for at in sorted(when):
        xs.append(at)
        counts.append(counts[-1] + when[at])
    xs.append(max(end, xs[-1]))
    counts.append(counts[-1])
    each = [stats.binomtest(count, len(runs)).proportion_ci(method="wilson") for count in counts]
    first = groups[0]
    return Line(name, first.dtype, first.model, len(runs), np.array(xs),
                np.array(counts) / len(runs), np.array([ci.low for ci in each]),
                np.array([ci.high for ci in each]))


def reached_at(run: Run, accuracy: float, by_time: bool) -> Optional[float]:
    """After how many epochs, or hours, of training the run first reached it."""
    if by_time:
        return run.hours_to(accuracy)
    return next((number + 1 for number, epoch in run.epochs.items() if epoch.top1 is not None
                 and run.is_share and 1 - epoch.top1 >= accuracy - 1e-9), None)
