"""The lines of a plot: the means of the runs of a group, and their range."""
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from .compare import Group

MOST_POINTS = 200  # of one line


class Point(NamedTuple):
    """A value of a run; values of a group's runs with the same `at` are combined."""
    at: float
    x: float
    y: float


class Line(NamedTuple):
    """A line; `band` is the lowest and the highest run, or None for a single run."""
    group: Group
    runs: int
    x: "np.ndarray[Any, Any]"
    y: "np.ndarray[Any, Any]"
    band: Optional["np.ndarray[Any, Any]"]


def line(group: Group, points: Dict[int, List[Point]]) -> Optional[Line]:
    """Returns the line of a group; `points` are those of each run, by its id."""
    each = [points[id(run)] for run in group.runs if points[id(run)]]
    if not each:
        return None
    x, y = _table(each)
    counts = np.isfinite(y).sum(0)
    often = 2 * counts >= counts.max()  # the mean is not comparable after most runs have ended
    x, y = x[:, often], y[:, often]
    band = np.stack([np.nanmin(y, 0), np.nanmax(y, 0)]) if len(each) > 1 else None
    return Line(group, len(each), np.nanmean(x, 0), np.nanmean(y, 0), band)


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
