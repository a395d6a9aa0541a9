"""Groups runs, and selects the groups to compare.

A recipe is all arguments except the precision, paths, the seed, those of resuming, logging and data
loading. An option that is off equals a missing one, and so do the options of a flag that is False
(mixup_alpha without mixup). Runs with the same recipe and precision are a group. A group of lower
precision is compared with the float32 group of the same network and dataset whose recipe differs
least.
"""
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import mean, median
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

from .runs import FLOAT32, OFF, RESUMING, Run, average, plain
from .verdict import Difference, Sample, paired, unpaired

PRECISION = {"dtype", "policy", "loss_scale", "amp"}
NO_RECIPE = {"seed", "claim_speed", "mlperf", "log_interval", "log_seconds", "disp_batches",
             "save_period", "use_rec", "kvstore", "kv_store", "num_workers", "data_nthreads",
             "xray", "xray_steps"}
PATHS = re.compile(r"(rec|data)_(train|val)(_idx)?|tensorboard|"
                   r"(\w+_|log|save|data|work|out|model)?(dir|file|path|prefix)")  # arguments
PATH = re.compile(r"(?=.*[/\\]).*[^\W\d].*|.*\.(params|states|rec|json|ya?ml)")  # a value
TWICE = "two files or more have the same results of the same seed; it counts once"
ROUNDED = 2e-6  # logs round results so
NOT_LOGGED = "not in the log"
MOST_NAMED, LONGEST_ARGUMENT = 2, 40  # arguments in a group's name


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed and in paths."""
    runs: Tuple[Run, ...]
    name: str = ""

    @property
    def first(self) -> Run:
        return self.runs[0]

    @cached_property
    def dtype(self) -> str:
        return self.first.dtype

    @cached_property
    def model(self) -> str:
        return self.first.model

    @cached_property
    def section(self) -> Tuple[str, str]:
        """Its dataset and its measure; groups with the same section share plots."""
        return self.first.dataset, self.first.measure

    @cached_property
    def items(self) -> FrozenSet[Tuple[str, str]]:
        """Its recipe, in a form for fast comparison."""
        parts = {**recipe(self.first), "batch_size": self.first.batch_size,
                 "dataset": self.first.dataset}
        return frozenset((name, repr(value)) for name, value in parts.items())

    @cached_property
    def finished(self) -> Tuple[Run, ...]:
        """The runs that were trained and validated to the end: for all planned epochs, or else for
        as many as the longest run."""
        longest = max(run.done for run in self.runs)
        trained = [run for run in self.runs
                   if run.final is not None and run.done >= (run.planned or longest)]
        behind = [run.done - run.validated for run in trained]  # not 0 if every tenth is validated
        return tuple(run for run, epochs in zip(trained, behind) if epochs == min(behind))

    @property
    def ends(self) -> List[float]:
        """The final results of the finished runs."""
        return [run.final for run in self.finished if run.final is not None]

    def named(self, several: bool) -> str:
        """Returns its name, with that of its section if there are several."""
        return f"{self.first.dataset or self.first.measure}: {self.name}" if several else self.name

    @property
    def speeds(self) -> List[float]:
        return sorted(run.speed for run in self.runs if run.speed)

    @property
    def hours(self) -> List[float]:
        """The hours of training of the runs whose logs have all times."""
        return [run.hours[-1] for run in self.runs if run.hours]


@dataclass(frozen=True)
class Comparison:
    """A group of lower precision, and the float32 group to which it is compared."""
    float32: Group
    low: Group
    differences: Dict[str, Tuple[Any, Any]]  # of the recipes: in float32, in low

    @property
    def recipe_unknown(self) -> bool:
        """Whether the logs of both groups lack arguments, and have no differing ones."""
        return self.differences == {"recipe": (NOT_LOGGED, NOT_LOGGED)}

    @property
    def claims_speed(self) -> bool:
        """Whether all logs state exclusive use of the machine, and nothing else differs."""
        return not self.differences and all(
            run.arguments.get("claim_speed") is True
            for group in (self.float32, self.low) for run in group.runs)

    @property
    def speedup(self) -> Optional[float]:
        """The speedup of the lower precision, by median images per second or else by the median
        training time; None if no speed is claimed."""
        if not self.claims_speed:
            return None
        high, low = (average(median, group.speeds) for group in (self.float32, self.low))
        if high and low:
            return low / high
        high, low = (average(median, group.hours) for group in (self.float32, self.low))
        same = {run.done for run in self.float32.runs} == {run.done for run in self.low.runs}
        return high / low if same and high and low else None

    @property
    def unit(self) -> str:
        """The unit of the difference."""
        return "points" if self.low.first.is_share else "%"

    @cached_property
    def factor(self) -> float:
        """The factor from measured values to that unit."""
        if self.low.first.is_share or not self.float32.ends:
            return 1.0
        return 100 / (abs(mean(self.float32.ends)) or 1.0)

    @cached_property
    def difference(self) -> Optional[Difference]:
        """Low precision minus float32, in points, or in percent of float32's mean if the measure is
        not a share; None if one of the groups has a single run.

        Runs with the same seed are pairs. If pairs would leave out most runs, or a diverged one, it
        is the difference of two samples.
        """
        low, high = ([self.factor * end for end in group.ends]
                     for group in (self.low, self.float32))
        pairs = self.pairs
        if len(pairs) > 1 and 4 * len(pairs) >= len(low) + len(high) and not any(
                _far(end, [pair[i] for pair in pairs]) for i, ends in enumerate((low, high))
                for end in ends):
            lows, highs = zip(*pairs)
            return replace(paired(lows, highs, self._step), unit=self.unit)
        if len(low) < 2 or len(high) < 2:
            return None
        return replace(unpaired(Sample.from_values(low), Sample.from_values(high), self._step),
                       unit=self.unit)

    @property
    def _step(self) -> float:
        """The points of one image, the smallest difference between two results; 0 for measures that
        do not count images."""
        if not self.low.first.is_share:
            return 0.0
        results = sorted({epoch.top1 for group in (self.low, self.float32) for run in group.runs
                          for epoch in run.epochs.values() if epoch.top1 is not None})
        return 100 * min((b - a for a, b in zip(results, results[1:]) if b - a > ROUNDED),
                         default=0.0)

    @property
    def without_partner(self) -> int:
        """The number of finished runs without a pair, if pairs are compared."""
        if self.difference is None or not self.difference.paired:
            return 0
        return len(self.low.finished) + len(self.float32.finished) - 2 * len(self.pairs)

    @cached_property
    def pairs(self) -> List[Tuple[float, float]]:
        """The final results (low, float32) for each seed that both groups have once."""
        low, high = _by_seed(self.low), _by_seed(self.float32)
        return [(self.factor * low[seed], self.factor * high[seed]) for seed in low if seed in high]

    def explain(self) -> str:
        """Returns the differences of the recipes as text."""
        return ", ".join(f"{name} ({_show(a)} in {self.float32.dtype}, {_show(b)} in "
                         f"{self.low.dtype})" for name, (a, b) in self.differences.items())


def recipe(run: Run) -> Dict[str, Any]:
    on = {key: value for key, value in run.arguments.items() if value not in OFF}
    options_of_off = tuple(f"{key}_" for key, value in run.arguments.items()
                           if str(value) == "False")
    return {key: value for key, value in on.items()
            if not _is_of_no_recipe(key) and not key.startswith(options_of_off)
            and not (isinstance(value, str) and PATH.fullmatch(value))}


@lru_cache(maxsize=1000)
def _is_of_no_recipe(key: str) -> bool:
    return bool(key in PRECISION or key in NO_RECIPE or PATHS.fullmatch(key)
                or RESUMING.fullmatch(key))


# ---- groups

def groups(runs: Sequence[Run]) -> List[Group]:
    """Returns the groups of runs, float32 first, otherwise in the order of the runs.

    Their names have the arguments that differ within a section. A run with two files (its log and
    its log.jsonl, or a copy) counts once.
    """
    by_recipe: Dict[Any, List[Run]] = {}
    for run in sorted(runs, key=lambda run: run.dtype != FLOAT32):
        parts = sorted((name, repr(value)) for name, value in recipe(run).items())
        alone = re.sub(r"[-_ ]?seed[-_ ]?\d+( \[\d+\])?$", "", run.name)
        name = alone if not run.arguments else ""
        by_recipe.setdefault((run.dtype, bool(run.get("amp")), repr(run.get("loss_scale")),
                          run.batch_size, run.dataset, run.measure, run.model, name, *parts),
                         []).append(run)
    unnamed = [Group(tuple(_each_once(of))) for of in by_recipe.values()]
    return [group for section in sections(unnamed) for group in _named(section)]


def _each_once(runs: List[Run]) -> List[Run]:
    """Returns the runs without duplicates. Two files with the same results and seed are of one
    training; the one with the most information stays."""
    by_results: Dict[Any, Run] = {}
    for run in runs:
        results = tuple((n, f"{epoch.top1:f}") for n, epoch in run.epochs.items()  # as in logs
                        if epoch.top1 is not None)
        few = not results or len(results) == 1 and run.seed is None  # may be alike by chance
        key = id(run) if few else (run.seed, results)
        first = by_results.setdefault(key, run)
        if first is not run:
            by_results[key] = best = run if _told(run) > _told(first) else first
            if TWICE not in best.notes:
                best.notes.append(TWICE)
    return list(by_results.values())


def _told(run: Run) -> int:
    return len(run.steps) + sum(value is not None for epoch in run.epochs.values()
                                for value in vars(epoch).values())


def sections(all_groups: Sequence[Group]) -> List[List[Group]]:
    """Returns the groups of each dataset and measure."""
    each: Dict[Tuple[str, str], List[Group]] = {}
    for group in all_groups:
        each.setdefault(group.section, []).append(group)
    return list(each.values())


def _named(section: List[Group]) -> List[Group]:
    """Returns the groups with the shortest distinct names."""
    for names in (*([_name(group, parts) for group in section] for parts in NAMINGS),
                  _by_recipe(section)):
        if len(set(names)) == len(names) and all(names):
            return [Group(group.runs, name) for group, name in zip(section, names)]
    return [Group(group.runs, group.first.name + (
        f" and {len(group.runs) - 1} more" if len(group.runs) > 1 else "")) for group in section]


def _by_recipe(section: List[Group]) -> List[str]:
    """Returns names of the arguments in which the groups differ, if these are few: resnet18,
    float16, wd 0.1."""
    recipes = [recipe(group.first) for group in section]
    arguments = dict.fromkeys(argument for each in recipes for argument in each)
    differ = [argument for argument in arguments if argument not in ("model", "network")
              and len({repr(each.get(argument)) for each in recipes}) > 1]
    if not 0 < len(differ) <= MOST_NAMED:
        return [""] * len(section)
    several = len({group.model for group in section}) > 1
    return [", ".join([*([group.model] if several else []), group.dtype,
                       *(f"{argument} {_show(each.get(argument))}"[:LONGEST_ARGUMENT]
                         for argument in differ)])
            for group, each in zip(section, recipes)]


def _name(group: Group, parts: Sequence[str]) -> str:
    """Returns a name of these parts: "model", "dtype", "batch", "scale"."""
    size, scale = group.first.batch_size, group.first.get("loss_scale")
    words = {"model": group.model, "dtype": "" if group.dtype == "unknown" else group.dtype,
            "batch": f"batch {size}" if size else "",
            "scale": "" if group.dtype == FLOAT32 or scale is None else
            f"scale {scale:g}" if isinstance(scale, float) else f"scale {scale}"}
    return ", ".join(filter(None, map(words.get, parts)))


NAMINGS = (("dtype",), ("dtype", "batch"), ("dtype", "scale"), ("model", "dtype"),
           ("model", "dtype", "batch"), ("model", "dtype", "scale"))


# ---- comparisons

def compare(all_groups: Sequence[Group]) -> List[Comparison]:
    """Returns a comparison for each group of lower precision with a float32 counterpart, in the
    order of the groups."""
    high: Dict[Any, List[Group]] = {}  # by network, and also by recipe: most find theirs at once
    for group in all_groups:
        if group.dtype == FLOAT32:
            for key in ((group.section, group.model), (group.section, group.model, group.items)):
                high.setdefault(key, []).append(group)
    compared: List[Comparison] = []
    taken: Counter[int] = Counter()
    for low in all_groups:
        items = low.items
        candidates = high.get((low.section, low.model, items), high.get((low.section, low.model)))
        if low.dtype in (FLOAT32, "unknown") or not candidates:
            continue
        nearest = min(candidates, key=lambda group: (len(group.items ^ items), taken[id(group)]))
        taken[id(nearest)] += 1
        compared.append(Comparison(nearest, low, _differences(nearest, low)))
    return compared


def _differences(high: Group, low: Group) -> Dict[str, Tuple[Any, Any]]:
    a, b = high.first, low.first
    first, second = recipe(a), recipe(b)
    differences = {key: (a.arguments.get(key), b.arguments.get(key)) for key in {**first, **second}
             if first.get(key) != second.get(key)}
    if a.batch_size != b.batch_size:
        differences.setdefault("batch_size", (a.batch_size, b.batch_size))
    logged = [bool(set(arguments) - {"model"}) for arguments in (first, second)]
    if not all(logged):
        differences["recipe"] = (None if logged[0] else NOT_LOGGED,
                                 None if logged[1] else NOT_LOGGED)
    elif not differences:
        ends = [max((run.validated for run in group.finished), default=0) for group in (high, low)]
        if 0 not in ends and ends[0] != ends[1]:
            differences["epochs"] = (ends[0], ends[1])
    return differences


def _by_seed(group: Group) -> Dict[str, float]:
    seeds = Counter(run.seed for run in group.finished)
    return {run.seed: end for run, end in zip(group.finished, group.ends)
            if run.seed is not None and seeds[run.seed] == 1}


def _far(end: float, others: Sequence[float]) -> bool:
    """Whether its distance from all others exceeds the distances among these."""
    apart = max(others) - min(others)
    return not min(others) - apart <= end <= max(others) + apart


def _show(value: object) -> str:
    return "not given" if value is None else plain(value)
