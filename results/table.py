"""Prints the tables of this folder's trainings, and draws them: python results/table.py

plan.md fixes the studies, arms, margins and tests. Runs of one seed have the same initial weights
and data, so they are compared in pairs. A study enters when float32 and another arm have ended.
"""
import math
from collections import Counter
from pathlib import Path
from statistics import mean, median, stdev
from typing import Dict, NamedTuple, Optional

import numpy as np
import study
from gluon_amp.reports.colors import color
from gluon_amp.reports.verdict import LEVEL, Difference, p_number, p_text, paired
from matplotlib.figure import Figure
from run import STUDIES, file_of
from scipy.stats import binomtest, mannwhitneyu

HERE = Path(__file__).parent
BEFORE_PLAN = ["cifar10"]  # reported, but not part of the plan
MARGIN = 0.5  # points of accuracy; of the tasks: a standard deviation of float32

STEP_ARMS = ("control", "float16", "bfloat16")


class Measure(NamedTuple):
    name: str
    factor: float = 1  # of the logged number
    higher_is_better: bool = True


MEASURES = {
    "err_top1": Measure("accuracy, %"),
    "validation_loss": Measure("validation loss", 1, False),
    "perplexity": Measure("perplexity", 1, False),
    "exact_match": Measure("exact match, %", 100),
    "mean_average_precision": Measure("mean average precision, %", 100),
    "intersection_over_union": Measure("intersection over union, %", 100),
    "label_error_rate": Measure("label error rate, %", 100, False),
    "distance": Measure("sliced Wasserstein distance", 1, False),
}


class Results(NamedTuple):
    """The results of a study: of each arm by seed."""
    name: str
    measure: Measure
    values: Dict[str, Dict[int, float]]
    skipped: Dict[str, Dict[int, int]]
    hits: Dict[str, Dict[int, str]]  # 0 or 1 for each test image
    losses: Dict[str, Dict[int, Dict[int, float]]]  # of training, by step

    @property
    def margin(self):
        if self.measure is MEASURES["err_top1"]:
            return MARGIN
        return stdev(self.values["float32"].values())

    def differences(self, arm):
        """Returns an arm's results minus those of float32 with the same seed."""
        float32 = self.values["float32"]
        return [value - float32[seed] for seed, value in sorted(self.values[arm].items())
                if seed in float32]


class Comparison(NamedTuple):
    """An arm of a study beside float32."""
    study: Results
    arm: str
    difference: Difference
    like_chance: Optional[float]  # p of Mann and Whitney's test; None for the control


def results(name):
    """Returns the completed runs of a study."""
    measure, values, skipped, hits, losses = None, {}, {}, {}, {}
    for run, lines in study.runs(file_of(name)).items():
        arm, seed = run.rsplit("-seed", 1)
        seed = int(seed)
        end = next(line for line in reversed(lines) if not MEASURES.keys().isdisjoint(line))
        key = next(key for key in MEASURES if key in end)
        measure, value = MEASURES[key], end[key]
        value = 100 * (1 - value) if key == "err_top1" else measure.factor * value
        values.setdefault(arm, {})[seed] = value
        skipped.setdefault(arm, {})[seed] = end["skipped"]
        losses.setdefault(arm, {})[seed] = {
            line["step"]: line["loss"] for line in lines if line.keys() >= {"step", "loss"}}
        if "hits" in lines[-1]:
            hits.setdefault(arm, {})[seed] = lines[-1]["hits"]
    finite = [v for of_arm in values.values() for v in of_arm.values() if math.isfinite(v)]
    for of_arm in values.values():
        for seed, value in of_arm.items():
            if not math.isfinite(value):
                of_arm[seed] = min(finite) if measure.higher_is_better else max(finite)
    return Results(name, measure, values, skipped, hits, losses)


def comparisons(of):
    """Yields the comparisons of a study with float32, the control first."""
    chance = [abs(d) for d in of.differences("control")] if "control" in of.values else []
    for arm in sorted(of.values.keys() - {"float32"}, key=lambda arm: (arm != "control", arm)):
        differences = of.differences(arm)
        if len(differences) < 2:
            continue
        like_chance = None
        if arm != "control" and chance:
            like_chance = float(mannwhitneyu(np.abs(differences), chance).pvalue)
        yield Comparison(of, arm, paired(differences, [0] * len(differences)), like_chance)


def holm(p_values):
    """Returns p values, None among them, corrected for their number by Holm's method."""
    order = sorted((i for i, p in enumerate(p_values) if p is not None), key=p_values.__getitem__)
    corrected, largest = list(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def row(one, p, p_chance):
    """Returns the cells of a comparison; the p values are corrected."""
    low, high = one.difference.interval()
    margin = one.study.margin
    same = "yes" if one.difference.p_equivalent(margin) < LEVEL else "not shown"
    if p is not None and p < LEVEL:
        same += ", different"
    return [one.study.name, one.arm, one.difference.seeds, spread(one.study, one.arm),
            skips(one.study, one.arm),
            " ".join([signed(one.study, one.difference.mean), f"({signed(one.study, low)} to",
                      f"{signed(one.study, high)})"]),
            f"{margin:.2g}", f"{same}, {p_text(one.difference, margin)}",
            *("" if each is None else p_number(each) for each in (p, p_chance))]


def signed(of, number):
    """Returns a difference as text."""
    return f"{number:+.2f}" if "%" in of.measure.name else f"{number:+.3g}"


def spread(of, arm):
    values = of.values[arm].values()
    digits = ".2f" if "%" in of.measure.name else ".3g"
    return f"{mean(values):{digits}} ± {stdev(values):{digits}}"


def skips(of, arm):
    counts = of.skipped[arm].values()
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def table(found):
    """Yields the lines of a table; p values are corrected over all comparisons of the table."""
    tested = [one for one in found if one.arm != "control"]
    corrected = dict(zip(map(id, tested), zip(holm([one.difference.p for one in tested]),
                                              holm([one.like_chance for one in tested]))))
    yield ("| study | arm | seeds | measure: mean ± standard deviation | skipped steps | minus "
           "float32 (95 %) | margin | the same within the margin? | difference: p | chance: p |")
    yield "|" + " --- |" * 10
    last = None
    for one in found:
        if one.study is not last:
            last = one.study
            cells = [last.name, "float32", len(last.values["float32"]),
                     f"{last.measure.name}: {spread(last, 'float32')}", skips(last, "float32"),
                     *[""] * 5]
            yield f"| {' | '.join(map(str, cells))} |"
        yield f"| {' | '.join(map(str, row(one, *corrected.get(id(one), (None, None)))))} |"


# ---- per image


def images(of, arm):
    """Returns how many test images both, only float32, only the arm, and neither classify
    correctly: sums over the pairs of runs."""
    counts = Counter()
    for seed, line in of.hits[arm].items():
        counts.update(zip(of.hits["float32"][seed], line))
    return [counts[pair] for pair in (("1", "1"), ("1", "0"), ("0", "1"), ("0", "0"))]


def image_table(studies):
    """Yields the lines of a table of images, with McNemar's exact test."""
    yield ("| study | arm | pairs of runs | both right | only float32 | only this arm | neither | "
           "McNemar: p |")
    yield "|" + " --- |" * 8
    for of in studies:
        for arm in sorted(of.hits.keys() - {"float32"}, key=lambda arm: (arm != "control", arm)):
            both, float32, this, neither = images(of, arm)
            p = binomtest(this, float32 + this).pvalue if float32 + this else 1.0
            yield (f"| {of.name} | {arm} | {len(of.hits[arm])} | {both} | {float32} | {this} | "
                   f"{neither} | {p_number(p)} |")


# ---- over the steps


def until(losses, target):
    """Returns the first logged step with this loss; infinity without one."""
    return next((step for step, loss in sorted(losses.items()) if loss <= target), math.inf)


def step_table(studies):
    """Yields the lines of a table of steps until the loss that float32 reaches at 3/4 of its
    steps: medians over the seeds."""
    yield "| study | loss | float32 | control | float16 | bfloat16 |"
    yield "|" + " --- |" * 6
    for of in studies:
        target = median(loss for run in of.losses["float32"].values()
                        for loss in [run[sorted(run)[len(run) * 3 // 4]]])
        cells = [f"{median(until(run, target) for run in of.losses[arm].values()):g}"
                 if arm in of.losses else "" for arm in ("float32", *STEP_ARMS)]
        yield f"| {of.name} | {target:.3g} | {' | '.join(cells)} |"


def draw_losses(studies, path):
    """Draws the relative distance of each arm's loss to float32's over the steps: the mean over
    the pairs of runs, and the control's range as a band."""
    columns = 2
    figure = Figure(figsize=(7.2, 1.9 * math.ceil(len(studies) / columns)), layout="constrained")
    for number, of in enumerate(studies):
        axes = figure.add_subplot(math.ceil(len(studies) / columns), columns, number + 1)
        for arm in STEP_ARMS:
            if arm not in of.losses:
                continue
            pairs = [(of.losses["float32"][seed], run) for seed, run in of.losses[arm].items()]
            steps = sorted(pairs[0][0])
            apart = np.array([[abs(run[step] / float32[step] - 1) for step in steps]
                              for float32, run in pairs])
            if arm == "control":
                axes.fill_between(steps, apart.min(0), apart.max(0), color="0.85", linewidth=0)
                axes.plot(steps, apart.mean(0), color="0.5", linewidth=1, label="control")
            else:
                axes.plot(steps, apart.mean(0), color=color(arm), linewidth=1.4, label=arm)
        axes.set(title=of.name, yscale="log")
        axes.grid(alpha=0.3)
        if number == 0:
            axes.legend(frameon=False, fontsize="small")
    figure.supxlabel("step")
    figure.supylabel("distance of the loss to float32's, relative")
    figure.savefig(path, dpi=150)


def draw(found, path):
    """Draws each comparison in margins: its pairs, mean and 90 % interval, over the range of the
    control's pairs."""
    shown = [one for one in found if one.arm != "control"]
    figure = Figure(figsize=(6.4, 1 + 0.48 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(-1, 1, color="0.93")
    for x in (-1, 0, 1):
        axes.axvline(x, color="0.4", linewidth=0.8, linestyle="-" if x == 0 else ":")
    for y, one in enumerate(shown):
        margin = one.study.margin
        if "control" in one.study.values:
            control = one.study.differences("control")
            axes.fill_betweenx([y - 0.38, y + 0.38], min(control) / margin, max(control) / margin,
                               color="0.8", linewidth=0)
        pairs = [d / margin for d in one.study.differences(one.arm)]
        ends = [end / margin for end in one.difference.interval(1 - 2 * LEVEL)]
        axes.plot(pairs, [y + 0.22] * len(pairs), "|", color=color(one.arm), alpha=0.6,
                  markersize=9)
        axes.plot(ends, [y, y], color=color(one.arm), linewidth=3)
        axes.plot(one.difference.mean / margin, y, "o", color=color(one.arm), markersize=6)
    axes.set_yticks(range(len(shown)), [f"{one.study.name}, {one.arm}" for one in shown])
    axes.set(ylim=(-0.6, len(shown) - 0.4), xlabel="minus float32, in margins")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)


def main():
    studies = {name: of for name in STUDIES if "float32" in (of := results(name)).values}
    planned = [one for name, of in studies.items() if name not in BEFORE_PLAN
               for one in comparisons(of)]
    with_steps = [of for of in studies.values() if all(of.losses["float32"].values())]
    for lines in (table(planned),
                  table([one for name in BEFORE_PLAN for one in comparisons(studies[name])]),
                  image_table([of for of in studies.values() if len(of.hits) > 1]),
                  step_table(with_steps)):
        text = list(lines)
        if len(text) > 2:  # more than the head
            print("\n".join(text), end="\n\n")
    draw(planned, HERE / "differences.png")
    if with_steps:
        draw_losses(with_steps, HERE / "losses.png")


if __name__ == "__main__":
    main()
