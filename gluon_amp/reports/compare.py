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
from functools import cached_property
from statistics import mean, median
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Set, Tuple

from .runs import FLOAT32, OFF, RESUMING, Run, average, plain
from .verdict import Difference, Sample, paired, unpaired

NO_RECIPE = {"dtype", "policy", "loss_scale", "amp", "seed", "claim_speed", "mlperf",
             "log_interval", "log_seconds", "disp_batches", "save_period", "use_rec", "kvstore",
             "kv_store", "num_workers", "data_nthreads", "xray", "xray_steps"}
PATHS = re.compile(r"(rec|data)_(train|val)(_idx)?|tensorboard|"
                   r"(\w+_|log|save|data|work|out|model)?(dir|file|path|prefix)")  # arguments
PATH = re.compile(r"(?=.*[/\\]).*[^\W\d].*|.*\.(params|states|rec|json|ya?ml)")  # a value
TWICE = "two files or more have the same results of the same seed; it counts once"
ROUNDED = 2e-6  # logs round results so
NOT_LOGGED = "not in the log"
MOST_NAMED, LONGEST_VALUE = 2, 40  # settings in a group's name; characters of a value


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
    def speedup(self) -> Optional[float]:
        """The speedup of the lower precision, by median images per second or else by the median
        training time; None if recipes differ, or a log does not state exclusive use of the machine.
        """
        if self.differences or not all(run.arguments.get("claim_speed") is True
                                       for group in (self.float32, self.low) for run in group.runs):
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
            if key not in NO_RECIPE and not key.startswith(options_of_off)
            and not PATHS.fullmatch(key) and not RESUMING.fullmatch(key)
            and not (isinstance(value, str) and PATH.fullmatch(value))}


# ---- groups

def groups(runs: Sequence[Run]) -> List[Group]:
    """Returns the groups of runs, float32 first, otherwise in the order of the runs.

    Their names have the arguments that differ within a section. A run with two files (its log and
    its log.jsonl, or a copy) counts once.
    """
    by_recipe: Dict[Any, List[Run]] = {}
    for run in sorted(runs, key=lambda run: run.dtype != FLOAT32):
        parts = sorted((name, repr(value)) for name, value in recipe(run).items())
        name = "" if run.arguments else re.sub(r"[-_ ]?seed[-_ ]?\d+( \[\d+\])?$", "", run.name)
        by_recipe.setdefault((run.dtype, bool(run.get("amp")), repr(run.get("loss_scale")),
                          run.batch_size, run.dataset, run.measure, run.model, name, *parts),
                         []).append(run)
    unnamed = [Group(tuple(_each_once(of))) for of in by_recipe.values()]
    return [group for section in sections(unnamed) for group in _named(section)]


def _each_once(runs: List[Run]) -> List[Run]:
    """Returns the runs without duplicates. Two files with the same results and seed are of one
    training; the first one stays."""
    by_results: Dict[Any, Run] = {}
    for run in runs:
        results = tuple((n, f"{epoch.top1:f}") for n, epoch in run.epochs.items()  # as in logs
                        if epoch.top1 is not None)
        few = not results or len(results) == 1 and run.seed is None  # may be alike by chance
        key = id(run) if few else (run.seed, results)
        first = by_results.setdefault(key, run)
        if first is not run and TWICE not in first.notes:
            first.notes.append(TWICE)
    return list(by_results.values())


def sections(all_groups: Sequence[Group]) -> List[List[Group]]:
    """Returns the groups of each dataset and measure."""
    each: Dict[Tuple[str, str], List[Group]] = {}
    for group in all_groups:
        each.setdefault(group.section, []).append(group)
    return list(each.values())


def _named(section: List[Group]) -> List[Group]:
    """Returns the groups with distinct names: the network if there are several, the type, and as
    many of the settings that differ as are needed. Otherwise the names are those of runs."""
    several = len({group.model for group in section}) > 1
    names = [", ".join(filter(None, [group.model if several else "",
                                     "" if group.dtype == "unknown" else group.dtype]))
             for group in section]
    settings = [_settings(group) for group in section]
    for setting in _differing(section, settings)[:MOST_NAMED]:
        if len({*names}) < len(names):
            names = [name + (f", {setting} {_show(of[setting])}" if setting in of else "")
                     for name, of in zip(names, settings)]
    if len({*names}) < len(names) or not all(names):
        names = [group.first.name + f" and {len(group.runs) - 1} more" * (len(group.runs) > 1)
                 for group in section]
    return [Group(group.runs, name) for group, name in zip(section, names)]


def _settings(group: Group) -> Dict[str, Any]:
    """Returns what may tell a group from others of its network and type."""
    batch, scale = group.first.batch_size, group.first.get("loss_scale")
    return {**({"batch": batch} if batch else {}),
            **({"scale": scale} if scale is not None and group.dtype != FLOAT32 else {}),
            **{name: value for name, value in recipe(group.first).items()
               if name not in ("model", "network", "batch_size")}}


def _differing(section: List[Group], settings: List[Dict[str, Any]]) -> List[str]:
    """Returns the settings that differ between groups of the same network and type."""
    values: Dict[Any, Set[str]] = {}
    for setting in dict.fromkeys(name for of in settings for name in of):
        for group, of in zip(section, settings):
            values.setdefault((setting, group.model, group.dtype), set()).add(repr(of.get(setting)))
    return list(dict.fromkeys(key[0] for key, of in values.items() if len(of) > 1))


# ---- comparisons

def compare(all_groups: Sequence[Group]) -> List[Comparison]:
    """Returns a comparison for each group of lower precision with a float32 counterpart, in the
    order of the groups."""
    high: Dict[Any, List[Group]] = {}
    for group in all_groups:
        if group.dtype == FLOAT32:
            high.setdefault((group.section, group.model), []).append(group)
    compared: List[Comparison] = []
    for low in all_groups:
        candidates = high.get((low.section, low.model))
        if candidates and low.dtype not in (FLOAT32, "unknown"):
            nearest = min(candidates, key=lambda group: len(group.items ^ low.items))
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
    """Returns a setting's value as text."""
    text = f"{value:g}" if isinstance(value, float) else plain(value)
    return "not given" if value is None else text[:LONGEST_VALUE]
