"""Which runs may be compared: pairs of a float32 run and one of lower precision.

A recipe is all arguments but the precision, paths, and how a run was resumed. An option that is
off equals one that is not there, and with it go the options named after it (mixup_alpha, where
mixup is off). A run of lower precision is paired with the float32 run of the same network whose
recipe differs least. Only where nothing differs is a speedup claimed.
"""
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from .runs import FLOAT32, RESUMING, Run, plain

PRECISION = {"dtype", "policy", "loss_scale"}
PATHS = re.compile(r"rec_\w+|data_(train|val)|\w*(dir|file|path|prefix|params|states)")


@dataclass(frozen=True)
class Pair:
    float32: Run
    low: Run
    differences: Dict[str, Tuple[Any, Any]]  # of the recipes: in float32, in low

    @property
    def speedup(self) -> Optional[float]:
        """Of images a second, or else of the time to train; None where recipes differ."""
        if self.differences:
            return None
        if self.float32.speed and self.low.speed:
            return self.low.speed / self.float32.speed
        high, low = self.float32.hours, self.low.hours
        same = self.float32.epochs.keys() == self.low.epochs.keys() and len(high) == len(low)
        return high[-1] / low[-1] if same and high and high[-1] and low[-1] else None

    def explain(self) -> str:
        """How the recipes differ, in words."""
        return ", ".join(f"{name} ({_show(a)} in {self.float32.dtype}, {_show(b)} in "
                         f"{self.low.dtype})" for name, (a, b) in self.differences.items())


def recipe(run: Run) -> Dict[str, Any]:
    off: Tuple[Any, ...] = (None, False, 0, "", [], "none", "None", "False")
    on = {key: value for key, value in run.arguments.items() if value not in off}
    return {key: value for key, value in on.items()
            if key not in PRECISION and not PATHS.fullmatch(key) and not RESUMING.fullmatch(key)
            and not (isinstance(value, str) and re.search(r"[/\\]", value))
            and not any(key.startswith(f"{other}_") and other not in on
                        for other in run.arguments)}


def pairs(runs: List[Run]) -> List[Pair]:
    """The pair of each run of lower precision that has one, in the order of runs."""
    high = [run for run in runs if run.dtype == FLOAT32]
    found: List[Pair] = []
    for low in (run for run in runs if run.dtype not in (FLOAT32, "unknown")):
        taken = [id(pair.float32) for pair in found]
        candidates = [Pair(run, low, _differences(run, low)) for run in high
                      if run.model == low.model]
        if candidates:
            found.append(min(candidates, key=lambda pair: (
                len(pair.differences), taken.count(id(pair.float32)))))
    return found


def _differences(a: Run, b: Run) -> Dict[str, Tuple[Any, Any]]:
    first, second = recipe(a), recipe(b)
    found = {key: (a.arguments.get(key), b.arguments.get(key)) for key in {**first, **second}
             if first.get(key) != second.get(key)}
    if a.dataset and b.dataset and a.dataset != b.dataset:  # wherever they lie
        found.setdefault("dataset", (a.dataset, b.dataset))
    if a.batch_size != b.batch_size:
        found.setdefault("batch_size", (a.batch_size, b.batch_size))
    if not set(first) - {"model"} or not set(second) - {"model"}:
        found["recipe"] = (None if set(first) - {"model"} else "not in the log",
                           None if set(second) - {"model"} else "not in the log")
    return found


def _show(value: Any) -> str:
    return "not given" if value is None else plain(value)
