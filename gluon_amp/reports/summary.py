"""The verdicts, tables and remarks of a report."""
from collections import Counter
from statistics import mean, median
from typing import Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from ..checks import counted, listed
from .compare import Comparison, Group
from .runs import Run, average, headed, unit_of_time
from .verdict import LEVEL, from_float32, outcome, p_number, sentence

MOST_SENTENCES = 5
# In the order of the headline, if there are many.
OUTCOMES = ("different", "different, within the margin", "undecided", "the same", "too few runs",
            "recipes differ", "recipe not known")
MOST_NAMES = 5  # the number of run names in a remark
Cells = Dict[str, str]  # column: text, empty if the logs lack it


# ---- the headline

class Verdict(NamedTuple):
    outcome: str  # one or two words; empty without a comparison
    text: str
    figure: str = ""  # such as "float16, top-1 accuracy +0.22 points (higher)"

    @property
    def title(self) -> str:
        """The outcome in capitals, and the figure."""
        return ": ".join(filter(None, [self.outcome.upper(), self.figure]))


def headline(comparisons: Sequence[Comparison], margin: float) -> List[Verdict]:
    """Returns the verdicts of the report. With many comparisons, the first counts the outcomes, and
    different ones follow."""
    outcomes = {id(comparison): _outcome(comparison, margin) for comparison in comparisons}
    if len(comparisons) > MOST_SENTENCES:
        comparisons = sorted(comparisons, key=lambda comparison: OUTCOMES.index(
            outcomes[id(comparison)]))
    verdicts = [Verdict(outcomes[id(comparison)], _verdict(comparison, margin), _figure(comparison))
             for comparison in comparisons[:MOST_SENTENCES]]
    if not comparisons:
        return [Verdict("", "No comparison: it needs float32 runs and runs of lower precision, "
                        "with the same network and dataset.")]
    if len(comparisons) > MOST_SENTENCES:
        counts = Counter(outcomes.values())
        tested = sum(comparison.difference is not None and not comparison.differences
                     for comparison in comparisons)
        chance = f" By chance alone, {tested * LEVEL:.2g} of {tested} tests find a difference." \
            if tested else ""
        verdicts.insert(0, Verdict("", f"{len(comparisons)} comparisons: " + ", ".join(
            f"{count} {word}" for word, count in counts.most_common())
            + f".{chance} The first {MOST_SENTENCES}:"))
    return verdicts


def _figure(comparison: Comparison) -> str:
    """Returns the difference as text; empty if nothing is claimed."""
    difference, low = comparison.difference, comparison.low
    if difference is None or comparison.differences:
        return ""
    shown = f"{difference.mean:+.2f}"
    direction = "equal" if float(shown) == 0 else "higher" if difference.mean > 0 else "lower"
    return f"{low.name}, {low.first.measured} {shown} {difference.unit} ({direction})"


def _verdict(comparison: Comparison, margin: float) -> str:
    low, difference = comparison.low.name, comparison.difference
    high = comparison.float32.name
    if comparison.low.model and high.startswith(f"{comparison.low.model}, "):
        high = high[len(f"{comparison.low.model}, "):]  # the name of low includes the model
    ends, ended = (comparison.low.ends, comparison.float32.ends), ""
    if all(ends):
        apart = comparison.factor * (mean(ends[0]) - mean(ends[1]))
        ended = f"The {comparison.low.first.measured} of {low} ends " \
                f"{from_float32(apart, high, comparison.unit)}"
    no_evidence = f" {ended}, which is no evidence about the type." if ended else ""
    if comparison.recipe_unknown:
        return f"The logs do not show whether {low} and {high} have the same recipe: no verdict." \
               f"{no_evidence}"
    if comparison.differences:
        return f"{low} and {high} have different recipes: no verdict. They differ " \
               f"in: {comparison.explain()}.{no_evidence}"
    if not ended:
        return f"{low} and {high}: no results to compare."
    if difference is None:
        few = [group.name for group in (comparison.low, comparison.float32)
               if len(group.finished) < 2]
        return f"{ended}. There is one finished run of {' and of '.join(few)}: the variance " \
               "between runs is unknown. Train both with three seeds or more."
    measured = comparison.low.first.measured
    return sentence(low, high, difference, margin, measured) + _speed(comparison)


def _speed(comparison: Comparison) -> str:
    if comparison.speedup is None:
        return ""
    spread = ""
    if len(comparison.low.speeds) > 1:
        spread = "; samples per second: " + ", ".join(
            f"{group.name} {group.speeds[0]:,.0f} to {group.speeds[-1]:,.0f}"
            for group in (comparison.float32, comparison.low) if group.speeds)
    return f" It trains {comparison.speedup:.2f} times as fast{spread}."


def _outcome(comparison: Comparison, margin: float) -> str:
    if comparison.differences:
        return "recipe not known" if comparison.recipe_unknown else "recipes differ"
    if comparison.difference is None:
        return "too few runs"
    return outcome(comparison.difference, margin)


# ---- tables

def verdict_rows(comparisons: Sequence[Comparison], margin: float) -> List[Cells]:
    """Returns one row for each comparison."""
    rows = []
    several = len({comparison.low.section for comparison in comparisons}) > 1
    for comparison in comparisons:
        difference = comparison.difference
        row = {"dataset": comparison.low.first.dataset if several else "",
               "runs": comparison.low.name,
               "against": comparison.float32.name,
               "verdict": _outcome(comparison, margin)}
        if difference:
            percent = " %" if difference.unit == "%" else ""
            row.update(seeds=difference.counted, paired="yes" if difference.paired else "no")
            for name, value in zip(("difference", "from", "to"),
                                   (difference.mean, *difference.interval())):
                row[name] = f"{value:+.2f}{percent}"
            row.update({
                "p of no difference": _text(difference.p, ".3g"),
                f"p within {margin:g}": p_number(difference.p_equivalent(margin)).replace(" ", ""),
                "seeds needed": _text(difference.seeds_for(margin), "d")})
        row["speedup"] = _text(comparison.speedup, ".2f")
        rows.append(row)
    return _table(rows)


def group_rows(groups: Sequence[Group], accuracy: Optional[float]) -> List[Cells]:
    """Returns one row for each group: means over its finished runs, median speeds over epochs, and
    times of training without validation."""
    runs = [run for group in groups for run in group.runs]
    unit, per_hour = unit_of_time(runs)
    several = len(runs) > len(groups)
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    rows = []
    for group in groups:
        first, tried = group.first, group.finished or group.runs
        last, best = (first.last, first.best) if len(group.runs) == 1 else (None, None)
        top5 = None if last is None or last.top5 is None else 1 - last.top5
        ends = [run.final for run in tried if run.final is not None]
        speed = average(median, group.speeds)
        row = {"runs" if several else "run": group.name, "dataset": first.dataset,
               "model": group.model, "dtype": group.dtype,
               "batch size": _text(first.batch_size, "d"),
               "n": str(len(group.runs)) if several else "",
               "epochs": str(max(run.done for run in group.runs)),
               first.heading: _value(first, float(np.mean(ends)) if ends else None),
               "standard deviation": _value(
                   first, float(np.std(ends, ddof=1)) if len(ends) > 1 else None),
               "top-5 %": _text(top5, ".2f", 100),
               "best %" if first.is_share else f"best {first.measure}":
                   _value(first, first.told(best[1]) if best else None),
               "after epochs": _text(best[0] + 1 if best else None, "d"),
               **{headed(name): _text(average(mean, (run.metric_at_end(name)
                                                     for run in group.runs)), ".4g")
                  for name in metrics},
               "skipped": _text(average(mean, (run.skipped for run in group.runs)), ".4g"),
               "samples/s": _text(speed, ".1f" if speed and speed < 100 else ".0f"),
               unit: _text(average(median, group.hours), ".3g", per_hour)}
        if accuracy and first.is_share:
            name = f"{100 * accuracy:g} %"
            epochs, hours = ([run.reached(accuracy, by_time) for run in tried]
                             for by_time in (False, True))
            row[f"reach {name}"] = f"{len(tried) - epochs.count(None)} of {len(tried)}" \
                if several else ""
            row[f"epochs to {name}"] = _text(average(median, epochs), "g")
            row[f"{unit} to {name}"] = _text(average(median, hours), ".3g", per_hour)
        rows.append(row)
    return _table(rows)


def run_rows(groups: Sequence[Group], accuracy: Optional[float]) -> List[Cells]:
    """Returns one row for each run."""
    return group_rows([Group((run,), run.name) for group in groups for run in group.runs], accuracy)


def _table(rows: List[Cells]) -> List[Cells]:
    """Returns the rows with the same columns, in the order of the longest row, without empty ones.
    """
    columns = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
    filled = [name for name in columns if any(row.get(name) for row in rows)]
    return [{name: row.get(name, "") for name in filled} for row in rows]


def _value(run: Run, value: Optional[float]) -> str:
    """Returns a measured value as text."""
    return _text(value, ".2f" if run.is_share else ".4g")


def _text(value: Optional[float], form: str, factor: float = 1) -> str:
    return "" if value is None else format(value * factor, form)


# ---- remarks

def remarks(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> List[str]:
    """Returns remarks on the comparability of runs; runs with the same remark share a line."""
    runs_of: Dict[str, List[str]] = {}
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        for remark in _remarks(run):
            runs_of.setdefault(remark, []).append(run.name)
    lines = [remark.replace("{}", _names(names, len(runs))) if "{}" in remark else
             (remark if len(names) == len(runs) else f"{_names(names, len(runs))}: {remark}")
             for remark, names in runs_of.items()]
    several = len({group.section for group in groups}) > 1
    for group in groups:
        never = sum(run.final is None for run in group.runs)
        missing = len(group.runs) - len(group.finished) - never
        for count, what in ((missing, "did not finish"),
                            (never, f"{_one(never, 'was', 'were')} never validated")):
            if count:
                lines.append(f"{group.named(several)}: {count} of {len(group.runs)} runs {what}, "
                             f"and {_one(count, 'is', 'are')} excluded from verdicts.")
    for comparison in comparisons:
        left = comparison.without_partner
        if left:
            lines.append(f"{comparison.low.named(several)} and {comparison.float32.name}: runs "
                         f"are paired by seed; {left} {_one(left, 'run has', 'runs have')} "
                         f"no partner, and {_one(left, 'is', 'are')} excluded from verdicts.")
    if any(comparison.speedup for comparison in comparisons):
        lines.append("Speedup over float32: the ratio of median samples per second, or else of "
                     "times. Logs or --claim-speed confirm that each run had its machine to "
                     "itself.")
    elif any(group.speeds for group in groups) and comparisons:
        lines.append("No speedup: it needs runs of one recipe, and logs or --claim-speed that "
                     "confirm that each run had its machine to itself. Times and speeds are those "
                     "of the logs.")
    return lines


def _one(count: int, singular: str, plural: str) -> str:
    return singular if count == 1 else plural


def _remarks(run: Run) -> List[str]:
    """Returns remarks on a run; {} is replaced by the names of runs."""
    lines = []
    lost = [number for number, epoch in run.epochs.items() if not epoch.finite]
    if lost:
        lines.append(f"{{}}: the loss is not finite in {len(lost)} of {len(run.epochs)} epochs, "
                     f"first in epoch {lost[0] + 1}.")
    if run.planned and run.epochs and run.done < run.planned:
        lines.append(f"{{}}: stopped after {run.done} of {run.planned} epochs.")
    if run.epochs and min(run.epochs) > 0 and not run.get("load_epoch", "resume_epoch"):
        lines.append(f"{{}}: started after {counted(min(run.epochs), 'epoch')}; times count "
                     "from there.")
    return lines + [note.replace("{}", "{ }") for note in run.notes]


def _names(names: List[str], all_runs: int) -> str:
    return "Each run" if len(names) == all_runs > MOST_NAMES else listed(names, MOST_NAMES)
