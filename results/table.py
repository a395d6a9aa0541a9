"""Writes the tables of this folder's trainings to README.md, and draws them.

    python results/table.py

plan.md fixes the studies, arms, margins and tests. Runs of one seed have the same initial weights
and data, so they are compared in pairs. A study enters when two pairs have ended. Its runs on
different machines are in different rows.
"""
import math
from collections import Counter
from itertools import cycle
from pathlib import Path
from statistics import mean, median, stdev
from typing import Dict, List, NamedTuple, Optional

import numpy as np
import study
from gluon_amp.files import replace_text
from gluon_amp.reports.colors import color
from gluon_amp.reports.verdict import LEVEL, Difference, p_number, p_text, paired
from matplotlib.figure import Figure
from run import STUDIES, files_of
from scipy.stats import binomtest, mannwhitneyu

HERE = Path(__file__).parent
BEFORE_PLAN = ["cifar10"]  # reported, but not part of the plan
# arms that are reported, and not tested: the last two are mistakes (plan.md)
UNTESTED = "control", "cast-unclipped", "control-generator"
# the tables' names of machines by `machine` in the first line of a run, which the first runs lack
MACHINES = {None: "AMD EPYC, Zen 5", "AMD EPYC, family 25, model 1": "AMD EPYC, Zen 3",
            "Intel(R) Xeon(R) Processor": "Intel Xeon"}
# each study's network and task
SUBJECTS = {
    "digits": "three convolutions: digits of 8 by 8 pixels",
    "cifar10": "ResNet-20: 5,000 images of CIFAR-10, 6 epochs",
    "cifar10_replication": "ResNet-20: 5,000 images of CIFAR-10, 6 epochs, new seeds",
    "plateau": "ResNet-20: 10,000 images of CIFAR-10 to the plateau",
    "fine_tune_resnet20": "ResNet-20, pretrained: photos of 10 classes",
    "fine_tune_efficientnet": "EfficientNet-Lite0, pretrained: photos of 10 classes",
    "fine_tune_symbolic": "EfficientNet-Lite0, pretrained: the same, Symbolic API",
    "cifar10_symbolic": "ResNet-20: 10,000 images of CIFAR-10, Symbolic API",
    "gpt": "GPT, 2 layers: characters of English text",
    "unet": "U-Net: segmentation of shapes in noise",
    "lstm": "LSTM, 2 layers: characters of English text",
    "translate": "GRUs with attention: sorting of digits",
    "ssd": "SSD: detection of shapes in clutter",
    "ctc": "convolution, LSTM, CTC: speech of generated tones",
    "wgan": "WGAN-GP: points of eight Gaussians",
}
MARGIN = 0.5  # points of accuracy; of the tasks: a standard deviation of float32

STEP_ARMS = ("control", "float16", "bfloat16")
READERS_ARMS = ("float16", "bfloat16")


# Steps of an epoch, which the first logs lack: they have every 5th or 20th step.
STEPS = {"digits": 21, "fine_tune_symbolic": 19}
LAST = 5  # epochs, whose mean test accuracy shows a plateau
SHOWN = 4  # margins; what is farther is drawn there


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
    """The results of a study on a machine: of each arm by seed."""
    name: str
    machine: str
    measure: Measure
    values: Dict[str, Dict[int, float]]
    skipped: Dict[str, Dict[int, int]]
    hits: Dict[str, Dict[int, str]]  # 0 or 1 for each test image
    losses: Dict[str, Dict[int, Dict[int, float]]]  # of training, by step
    curves: Dict[str, Dict[int, List[float]]]  # test accuracy after each epoch

    @property
    def step(self):
        """The points of one test image; 0 if the logs do not have the images."""
        images = [len(line) for of_arm in self.hits.values() for line in of_arm.values()]
        return 100 / images[0] if images else 0.0

    @property
    def margin(self):
        if self.measure is MEASURES["err_top1"]:
            return MARGIN
        return stdev(self.values["float32"].values())

    def differences(self, arm):
        """Returns an arm's results minus those of float32 with the same seed."""
        float32 = self.values["float32"]
        return [value - float32[seed] for seed, value in sorted(self.values[arm].items())]


class Comparison(NamedTuple):
    """An arm of a study beside float32."""
    study: Results
    arm: str
    difference: Difference
    like_chance: Optional[float]  # p of Mann and Whitney's test; None for the control


def machine_of(line):
    """Returns the tables' name of the machine of a run's first line, or of a line of cost.py."""
    machine = line.get("machine")
    return MACHINES.get(machine, machine)


def logged(name):
    """Returns the completed runs of a study by machine: their lines by name."""
    of_machine = {}
    for file in files_of(name):
        for run, lines in study.runs(file).items():
            of_machine.setdefault(machine_of(lines[0]), {})[run] = lines
    return of_machine


def results(name):
    """Yields the results of a study on each machine with at least two pairs of runs."""
    for machine, runs in logged(name).items():
        pairs = {run: lines for run, lines in runs.items()
                 if f"float32-seed{run.rpartition('seed')[2]}" in runs}
        if all("failed" in lines[-1] for run, lines in pairs.items() if "float32" in run):
            continue
        lengths = {steps(lines) for lines in pairs.values()} - {None}
        if len(lengths) > 1:
            raise ValueError(f"{name} on {machine}: epochs of {sorted(lengths)} steps")
        of = read(name, machine, pairs)
        if any(len(of.values[arm]) > 1 for arm in of.values if arm != "float32"):
            yield of


def read(name, machine, runs):
    """Returns the results of runs: their lines by name."""
    measure = None
    values, skipped, hits, losses, curves = {}, {}, {}, {}, {}
    for run, lines in runs.items():
        arm, seed = run.rsplit("-seed", 1)
        seed = int(seed)
        if "failed" in lines[-1]:
            values.setdefault(arm, {})[seed], skipped.setdefault(arm, {})[seed] = math.nan, 0
            continue
        end = next(line for line in reversed(lines) if not MEASURES.keys().isdisjoint(line))
        key = next(key for key in MEASURES if key in end)
        measure, value = MEASURES[key], end[key]
        value = 100 * (1 - value) if key == "err_top1" else measure.factor * value
        values.setdefault(arm, {})[seed] = value
        skipped.setdefault(arm, {})[seed] = end["skipped"] + end.get("critic_skipped", 0)
        losses.setdefault(arm, {})[seed] = training_losses(
            lines, steps(lines) or STEPS.get(name, 0))
        curves.setdefault(arm, {})[seed] = [100 * (1 - line["err_top1"]) for line in lines
                                            if "err_top1" in line]
        if "hits" in lines[-1]:
            hits.setdefault(arm, {})[seed] = lines[-1]["hits"]
    finite = [v for of_arm in values.values() for v in of_arm.values() if math.isfinite(v)]
    for of_arm in values.values():
        for seed, value in of_arm.items():
            if not math.isfinite(value):
                of_arm[seed] = min(finite) if measure.higher_is_better else max(finite)
    return Results(name, machine, measure, values, skipped, hits, losses, curves)


def steps(lines):
    """Returns the steps of an epoch; None for tasks, the first logs, and without a whole epoch."""
    return next((line["steps"] for line in lines if "steps" in line), None)


def training_losses(lines, batches):
    """Returns the logged losses of training, by step. The lines of recipes have epoch and batch.

    Args:
        batches: at least so many steps are in an epoch.
    """
    batches = max(batches, 1 + max((line["batch"] for line in lines if "batch" in line), default=0))
    return {line["step"] if "step" in line else line["epoch"] * batches + line["batch"] + 1:
            line["loss"] for line in lines
            if "loss" in line and ("step" in line or "batch" in line)}


def comparisons(of):
    """Yields the comparisons of a study with float32, the control first."""
    chance = [abs(d) for d in of.differences("control")] if "control" in of.values else []
    for arm in sorted(of.values.keys() - {"float32"}, key=lambda arm: (arm != "control", arm)):
        differences = of.differences(arm)
        if len(differences) < 2:
            continue
        like_chance = None
        if arm not in UNTESTED and chance:
            like_chance = float(mannwhitneyu(np.abs(differences), chance).pvalue)
        yield Comparison(of, arm, paired(differences, [0] * len(differences), of.step), like_chance)


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
    of, margin = one.study, one.study.margin
    return [of.name, of.machine, one.arm, one.difference.seeds, spread(of, one.arm),
            skips(of, one.arm), interval(one), f"{margin:.2g}",
            f"{answer(one, p)}, {p_text(one.difference, margin)}",
            *("" if each is None else p_number(each) for each in (p, p_chance))]


def answer(one, p):
    """Returns whether a comparison shows the same mean; p is corrected."""
    same = one.difference.p_equivalent(one.study.margin) < LEVEL
    different = p is not None and p < LEVEL
    if one.difference.p is None:  # all pairs differ alike
        different = one.difference.mean != 0
    return {(True, False): "same", (False, True): "**different**", (False, False): "undecided",
            (True, True): "**different**, within the margin"}[same, different]


def interval(one):
    """Returns the mean difference and its 95 % interval as text."""
    low, high = (signed(one.study, end) for end in one.difference.interval())
    return f"{signed(one.study, one.difference.mean)} ({low} to {high})"


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


def corrected(found):
    """Returns the p values of comparisons, of difference and of chance, corrected over all of them;
    the control and mistakes have none."""
    tested = [one for one in found if one.arm not in UNTESTED]
    p_values = dict(zip(map(id, tested), zip(holm([one.difference.p for one in tested]),
                                             holm([one.like_chance for one in tested]))))
    return [p_values.get(id(one), (None, None)) for one in found]


def table(found):
    """Yields the lines of the table of all comparisons."""
    yield from head("study", "machine", "arm", "runs", "measure: mean ± standard deviation",
                    "skipped steps", "minus float32 (95 %)", "margin",
                    "within the margin?", "difference: p", "chance: p")
    last = None
    for one, p_values in zip(found, corrected(found)):
        if one.study is not last:
            last = one.study
            yield line(last.name, last.machine, "float32", len(last.values["float32"]),
                       f"{last.measure.name}: {spread(last, 'float32')}", skips(last, "float32"),
                       *[""] * 5)
        yield line(*row(one, *p_values))


def head(*names):
    """Returns the first two lines of a table."""
    return [line(*names), line(*["---"] * len(names))]


def line(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def evident(found):
    """Returns for each study the comparisons and corrected p values by arm: those of the machine
    with the most pairs in 16 bits, and of those with a control if there are several."""
    answers = {}
    for one, (p, _) in zip(found, corrected(found)):
        machines = answers.setdefault(one.study.name, {})
        machines.setdefault(one.study.machine, {})[one.arm] = one, p

    def evidence(arms):
        return (sum(arms[arm][0].difference.seeds for arm in READERS_ARMS if arm in arms),
                "control" in arms)

    return [max(machines.values(), key=evidence) for machines in answers.values()]


def subject(of):
    """Returns the name of a study with its network and task."""
    return f"`{of.name}`, {SUBJECTS[of.name]}"


def readers_table(found):
    """Yields the lines of the table for readers, a row for each study."""
    yield from head("network and task", "measure: float32",
                    *(f"{arm} minus float32" for arm in READERS_ARMS))
    for arms in evident(found):
        of = next(iter(arms.values()))[0].study
        cells = []
        for arm in READERS_ARMS:
            if arm in arms:
                one, p = arms[arm]
                cells.append(f"{answer(one, p)}: {interval(one)}, {one.difference.seeds} pairs")
            else:
                cells.append("not run")
        yield line(subject(of), f"{of.measure.name}: {spread(of, 'float32')}", *cells)


def costs_table(found):
    """Yields the lines of the table of machines, controls and costs, in the order of the first."""
    yield from head("network and task", "machine", "largest of the control",
                    *(f"{cost} / float32: float16, bfloat16" for cost in ("step", "memory")))
    costs = study.lines(HERE / "runs/costs.jsonl")
    for arms in evident(found):
        of = next(iter(arms.values()))[0].study
        control = "not run"
        if "control" in arms:
            control = signed(of, max(map(abs, of.differences("control")))).replace("+", "±")
        yield line(subject(of), of.machine, control,
                   *(cost(of, costs, of_step) for of_step in ("step_seconds", "bytes")))


def cost(of, costs, quantity):
    """Returns the costs of a step in the 16-bit types, divided by float32's, as text: medians over
    the rounds among these lines of cost.py."""
    rounds = {}
    for one in costs:
        if (one["study"], machine_of(one)) == (of.name, of.machine):
            rounds.setdefault(one["round"], {})[one["arm"]] = one[quantity]
    ratios = {arm: [its[arm] / its["float32"] for its in rounds.values()
                    if {arm, "float32"} <= its.keys()] for arm in READERS_ARMS}
    if not any(ratios.values()):
        return "not measured"
    return ", ".join(f"{median(of_arm):.2f}" if of_arm else "not measured"
                     for of_arm in ratios.values())


def summary(found):
    """Yields lines that count the answers, and name what speaks against an arm."""
    p_values = corrected(found)
    for arm in READERS_ARMS:
        answers = Counter(answer(one, p) for one, (p, _) in zip(found, p_values)
                          if one.arm == arm)
        if answers:
            machines = {one.study.machine for one in found if one.arm == arm}
            counts = ", ".join(f"{count} {word}" for word, count in sorted(answers.items()))
            yield (f"- **{arm}** ({'; '.join(sorted(machines))}), compared "
                   f"{sum(answers.values())} times: {counts}.")
    for title, number in (("A different mean", 0), ("Single differences unlike the control's", 1)):
        against = {}
        for one, tests in zip(found, p_values):
            if tests[number] is not None and tests[number] < LEVEL:
                against.setdefault((one.study.name, one.study.machine), []).append(
                    f"{one.arm} (p = {p_number(tests[number])})")
        named = [f"`{name}` on {machine} in {', '.join(arms)}"
                 for (name, machine), arms in against.items()]
        yield f"- **{title}**, after correction: {'; '.join(named) or 'none'}."


# ---- to the plateau


def plateau_table(studies):
    """Yields the lines of a table of the test accuracy at the end of each run: the mean of the last
    epochs, and its rise since as many epochs before."""
    yield from head("machine", "arm", "seed", "accuracy in the last 5 epochs, %",
                    "rise since the 5 before", "a plateau?")
    for of in studies:
        for arm, runs in sorted(of.curves.items()):
            for seed, curve in sorted(runs.items()):
                end, before = mean(curve[-LAST:]), mean(curve[-2 * LAST:-LAST])
                yield line(of.machine, arm, seed, f"{end:.2f}", f"{end - before:+.2f}",
                           "yes" if end - before <= MARGIN else "no")


def draw_curves(studies, path):
    """Draws the test accuracy of each run over the epochs, each machine with a line style."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for of, style in zip(studies, cycle(["-", "--", ":", "-."])):
        for arm, runs in sorted(of.curves.items()):
            for number, curve in enumerate(runs.values()):
                axes.plot(range(1, len(curve) + 1), curve, style, linewidth=1,
                          label="" if number else f"{arm}, {of.machine}",
                          color="0.6" if arm == "control" else color(arm))
    axes.set(xlabel="epoch", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


# ---- per image


def images(of, arm):
    """Returns how many test images both, only float32, only the arm, and neither classify
    correctly: sums over the pairs of runs."""
    counts = Counter()
    for seed in of.hits[arm].keys() & of.hits["float32"].keys():
        counts.update(zip(of.hits["float32"][seed], of.hits[arm][seed]))
    return [counts[pair] for pair in (("1", "1"), ("1", "0"), ("0", "1"), ("0", "0"))]


def image_table(studies):
    """Yields the lines of a table of images, with McNemar's exact test."""
    yield from head("study", "machine", "arm", "pairs", "both right", "only float32",
                    "only this arm", "neither", "McNemar: p")
    for of in studies:
        for arm in sorted(of.hits.keys() - {"float32"}, key=lambda arm: (arm != "control", arm)):
            both, float32, this, neither = images(of, arm)
            p = binomtest(this, float32 + this).pvalue if float32 + this else 1.0
            pairs = len(of.hits[arm].keys() & of.hits["float32"].keys())
            yield line(of.name, of.machine, arm, pairs, both, float32, this, neither, p_number(p))


# ---- over the steps


def until(losses, target):
    """Returns the first logged step with this loss; infinity without one."""
    return next((step for step, loss in sorted(losses.items()) if loss <= target), math.inf)


def step_table(studies):
    """Yields the lines of a table of steps until the loss that float32 reaches at 3/4 of its
    logged steps: medians over the seeds."""
    yield from head("study", "machine", "loss", "float32", *STEP_ARMS)
    for of in studies:
        if of.losses.keys().isdisjoint(STEP_ARMS):
            continue
        target = median(loss for run in of.losses["float32"].values()
                        for loss in [run[sorted(run)[math.ceil(len(run) * 3 / 4) - 1]]])
        cells = ["" if arm not in of.values else "{:g}".format(median(
            until(of.losses.get(arm, {}).get(seed, {}), target) for seed in of.values[arm]))
            for arm in ("float32", *STEP_ARMS)]
        yield line(of.name, of.machine, f"{target:.3g}", *cells)


def draw_losses(studies, path):
    """Draws the relative distance of each arm's loss to float32's over the steps: the mean over
    the pairs of runs, and the control's range as a band."""
    columns, rows = 2, math.ceil(len(studies) / 2)
    figure = Figure(figsize=(6.4, 0.8 + 1.6 * rows), layout="constrained")
    legend = {}
    for number, of in enumerate(studies, 1):
        axes = figure.add_subplot(rows, columns, number)
        for arm in STEP_ARMS:
            if arm not in of.losses:
                continue
            pairs = [(of.losses["float32"][seed], run) for seed, run in of.losses[arm].items()
                     if seed in of.losses["float32"]]
            steps = sorted(set.intersection(*(set(run) for pair in pairs for run in pair)))
            apart = np.array([[abs(run[step] / float32[step] - 1) for step in steps]
                              for float32, run in pairs])
            if arm == "control":
                axes.fill_between(steps, apart.min(0), apart.max(0), color="0.85", linewidth=0)
            legend[arm], = axes.plot(steps, apart.mean(0), linewidth=1.3,
                                     color="0.5" if arm == "control" else color(arm))
        axes.set_title(f"{of.name}\n{of.machine}", fontsize="small")
        axes.set(yscale="log")
        axes.tick_params(labelsize="small")
        axes.grid(alpha=0.3)
    figure.legend(legend.values(), legend, loc="outside upper center", ncols=3, frameon=False)
    figure.supxlabel("step")
    figure.supylabel("distance of the loss to float32's, relative")
    figure.savefig(path, dpi=150)


def draw(found, path):
    """Draws each comparison in margins: its pairs, mean and 90 % interval, over the range of the
    control's pairs. Each machine has a panel."""
    of_machine = {}
    for one in found:
        if one.arm not in UNTESTED:
            of_machine.setdefault(one.study.machine, []).append(one)
    heights = [len(shown) + 1 for shown in of_machine.values()]
    figure = Figure(figsize=(6.4, 0.6 + 0.28 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), squeeze=False, sharex=True,
                             gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (machine, shown) in zip(panels, of_machine.items()):
        axes.axvspan(-1, 1, color="0.94", linewidth=0)
        for x in (-1, 0, 1):
            axes.axvline(x, color="0.4", linewidth=0.8, linestyle="-" if x == 0 else ":")
        for y, one in enumerate(shown):
            draw_comparison(axes, y, one)
        axes.set_yticks(range(len(shown)),
                        [f"{one.study.name}, {one.arm} ({one.difference.seeds})" for one in shown])
        axes.set(ylim=(-0.6, len(shown) - 0.4))
        axes.set_title(machine, fontsize="medium", loc="left", weight="bold")
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    panels[-1].set(xlim=(-SHOWN, SHOWN), xlabel="minus float32, in margins")
    figure.savefig(path, dpi=150)


def draw_comparison(axes, y, one):
    """Draws a row. Values beyond the axes are drawn at their ends."""
    def at(differences):
        return np.clip(np.divide(differences, one.study.margin), -SHOWN, SHOWN)

    if "control" in one.study.values:
        control = at(one.study.differences("control"))
        axes.fill_betweenx([y - 0.38, y + 0.38], min(control), max(control), color="0.8",
                           linewidth=0)
    pairs = at(one.study.differences(one.arm))
    axes.plot(pairs, [y + 0.22] * len(pairs), "|", color=color(one.arm), alpha=0.6, markersize=6)
    axes.plot(at(one.difference.interval(1 - 2 * LEVEL)), [y, y], color=color(one.arm), linewidth=3)
    axes.plot(at(one.difference.mean), y, "o", color=color(one.arm), markersize=5)


def fill(path, texts):
    """Replaces the lines between `<!-- NAME -->` and `<!-- end -->` of a page, for each name."""
    page = path.read_text()
    for name, lines in texts.items():
        mark = f"<!-- {name} -->\n"
        begin = page.index(mark) + len(mark)
        end = page.index("<!-- end -->", begin)
        page = page[:begin] + "\n" + "\n".join(lines) + "\n\n" + page[end:]
    replace_text(str(path), page)


def main():
    studies = [of for name in STUDIES for of in results(name)]
    planned = [one for of in studies if of.name not in BEFORE_PLAN for one in comparisons(of)]
    before = [one for of in studies if of.name in BEFORE_PLAN for one in comparisons(of)]
    with_steps = [of for of in studies if all(of.losses["float32"].values()) and min(
        loss for arm in of.losses.values() for run in arm.values() for loss in run.values()) > 0]
    to_plateau = [read("plateau", *of) for of in sorted(logged("plateau").items())]
    with_hits = [of for of in studies if len(of.hits) > 1]
    fill(HERE / "README.md", {"summary": summary(planned), "readers": readers_table(planned),
                              "costs": costs_table(planned)})
    fill(HERE / "comparisons.md", {
        "planned": table(planned), "before": table(before), "images": image_table(with_hits),
        "steps": step_table(with_steps), "plateau": plateau_table(to_plateau)})
    draw(planned, HERE / "differences.png")
    draw_curves(to_plateau, HERE / "plateau.png")
    with_control = [of for of in with_steps if "control" in of.losses]
    if with_control:
        draw_losses(with_control, HERE / "losses.png")


if __name__ == "__main__":
    main()
