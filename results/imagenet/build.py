"""Writes results/imagenet from the CSV files in this folder: `make -C tests results`.

With the matplotlib and pillow of the extra "results" the files are identical byte for byte.
"""
import argparse
import csv
import os
from pathlib import Path

import matplotlib
from gluon_amp.reports import read_logs, report
from gluon_amp.reports.colors import GREY, color
from gluon_amp.reports.plots import STYLE, image
from gluon_amp.reports.verdict import Sample, conclusion, outcome, unpaired
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

HERE = Path(__file__).parent
MARGIN = 0.25  # points: detectable with NVIDIA's eight seeds
README = """# ResNet-50 on ImageNet: float32 and float16

Published results of ResNet-50 in MXNet: on GPUs, float16 trains faster and ends within 0.25 points
of float32, except in GluonCV's logs, whose recipes differ. This project measured none of them.

**Speed**: on eight V100, float16 trains 1.6 to 1.8 times as fast in MXNet's tutorial. In NVIDIA's
tables, mixed precision is 3.4 to 3.6 times as fast as float32 on V100 (on DGX-1, at twice the
batch size). On A100, it is 3.2 times as fast as TF32.

`make -C tests results` writes this folder from its CSV files.

## Apache MXNet's tutorial

ResNet-50 v1b, 90 epochs, 8 V100. [Report](published/report.md)

{ends}

<picture>
<source media="(max-width: 600px)" srcset="published_narrow.png">
<img src="published.png" alt="Top-1 error by hours of float32 at batch 1024 and float16 at 1024 \
and 2048: float16 ends after 7.3 and 6.5 instead of 11.8 hours; enlarged, the last ten epochs \
end at 23.8, 23.7 and 23.7 %">
</picture>

{published_source}

## GluonCV's logs

ResNet-50 v1 and v1b, 120 epochs, batch size 1024. **The recipes differ**: only the float16 runs
have label smoothing and no weight decay of biases and norms. So their lower error is not evidence
for float16. [Report](gluoncv/report.md)

![Top-1 error by epoch of both networks in float32 and float16](gluoncv/validation_error.png)

{gluoncv_source}

## NVIDIA's seeds

ResNet-50 v1.5 in MXNet, 8 seeds each of mixed precision and float32, trained for 50, 90 and 250
epochs. Accuracies are means of top-1 in percent. Welch's test tests for a difference, two one-sided
tests whether it is less than 0.25 points. **The batch sizes differ**: 192 images per GPU in mixed
precision, 96 in float32, so the differences include the effect of the batch size.

{seeds}

{conclusions}

![Difference of the means with 95 % intervals: -0.02 points at 50 epochs, -0.16 at 90, -0.02 at \
250, the 90 % intervals all within 0.25 points](nvidia_seeds.png)

{seeds_source}

## NVIDIA's tables

ResNet-50 v1.5 in MXNet, mixed precision and float32 (on A100: TF32).

![Images per second and GPU of V100 and A100, mixed precision about 3.2 to 3.6 times float32 or \
TF32](nvidia.png)

{nvidia}

{nvidia_source}
"""


def read_table(name):
    """Returns the rows of a table, and its source."""
    lines = (HERE / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if line[0] != "#")), "\n".join(
        f"- {line[2:]}" for line in lines if line[0] == "#")


HEADINGS = {"dtype": "type", "batch_size": "batch size", "top1_percent": "top-1 accuracy, %",
            "speedup": "times as fast", "gpus": "GPUs", "mixed": "mixed precision",
            "commit": "commit of the source"}


def table(rows):
    headings = [HEADINGS.get(name, name) for name in rows[0]]
    return "\n".join(["| " + " | ".join(row) + " |" for row in (
        headings, ["---"] * len(headings), *(row.values() for row in rows))])


def draw_published(runs, narrow=False):
    """Draws the error over hours, where float16 finishes earlier, and enlarged the last ten
    epochs, where runs may differ. On narrow screens one plot is above the other."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.6, 4.6) if narrow else (7.2, 4.2), layout="constrained")
        if narrow:
            axes, last = figure.subplots(2, 1, height_ratios=(3, 2))
        else:
            axes = figure.add_subplot()
            last = axes.inset_axes([0.46, 0.5, 0.53, 0.42])
        for run in runs:
            epochs, hours = [number + 1 for number in run.epochs], run.hours
            errors = [epoch.top1 for epoch in run.epochs.values()]
            beneath = run.dtype == "float32"
            for place, x, start in ((axes, hours, 0), (last, epochs, -10)):
                place.plot(x[start:], errors[start:], color=color(run.dtype),
                           linewidth=2.6 if beneath else 1.4, zorder=2 if beneath else 3,
                           linestyle="-" if run.batch_size == 1024 else (0, (4, 1.5)),
                           label=f"{run.dtype}, batch {run.batch_size:,}: {errors[-1]:.1%} "
                                 f"after {hours[-1]:.1f} h")
        last.set_title("the last ten epochs, by epoch", loc="left", fontsize=9)
        for place in (axes, last):
            place.yaxis.set_major_formatter(PercentFormatter(1, decimals=int(place is last)))
        axes.set_ylim(0, 1)
        axes.set_xlabel("hours of training")
        axes.set_ylabel("top-1 error")
        axes.set_title("ResNet-50 v1b on ImageNet, 8 V100" + " (AWS p3.16xlarge)" * (not narrow),
                       loc="left", fontsize=9.5 if narrow else 11)
        axes.legend(frameon=False, loc="upper right" if narrow else "lower left", fontsize=8)
        return image(figure)


def draw_nvidia(rows):
    """Draws images per second of one GPU in mixed precision and float32."""
    rows = [row for row in rows if row["measure"] == "images/s"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for i, row in enumerate(rows):
            tf32 = "TF32" in row["hardware"]
            for shift, column, ink in ((-0.2, "float32", color("tf32" if tf32 else "float32")),
                                       (0.2, "mixed", color("float16"))):
                speed = float(row[column]) / int(row["gpus"])
                axes.barh(i + shift, speed, 0.36, color=ink)
                axes.text(speed, i + shift, f" {speed:,.0f}", va="center", fontsize=8)
        axes.set_yticks(range(len(rows)),
                        [f"{row['hardware']}, {row['gpus']} used" for row in rows])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.08)
        axes.set_xlabel("images per second and GPU")
        axes.set_title("ResNet-50 v1.5 training, NVIDIA's figures", loc="left", fontsize=11)
        for name, ink in (("float32", "float32"), ("TF32", "tf32"), ("mixed", "float16")):
            axes.barh([0], [0], color=color(ink), label=name)
        axes.legend(frameon=False, loc="upper right")
        return image(figure)


def differences(rows):
    """Draws mixed precision minus float32 for each number of epochs."""
    return {row["epochs"]: unpaired(*(
        Sample(int(row["seeds"]), float(row[f"{kind}_mean"]), float(row[f"{kind}_sd"]))
        for kind in ("mixed", "float32"))) for row in rows}


def seeds_table(rows, found):
    made = []
    for row in rows:
        difference = found[row["epochs"]]
        low, high = difference.interval()
        made.append({"epochs": row["epochs"], "float32": row["float32_mean"],
                     "mixed": row["mixed_mean"], "difference, points": f"{difference.mean:+.3f}",
                     "95 % interval from": f"{low:+.3f}", "to": f"{high:+.3f}",
                     "p of a difference": _p(difference.p),
                     f"p of equivalence within {MARGIN}": _p(difference.p_equivalent(MARGIN)),
                     "verdict": outcome(difference, MARGIN)})
    return table(made)


def _p(p):
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def draw_seeds(found):
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 2.6), layout="constrained")
        axes = figure.add_subplot()
        axes.axvspan(-MARGIN, MARGIN, color=GREY, alpha=0.15, linewidth=0)
        axes.axvline(0, color=GREY, linewidth=1)
        for i, difference in enumerate(found.values()):
            for level, width in ((0.95, 1.2), (0.9, 3.5)):
                axes.plot(difference.interval(level), (i, i), color=color("float16"),
                          linewidth=width, solid_capstyle="butt")
            axes.plot([difference.mean], [i], "o", color=color("float16"))
        axes.set_yticks(range(len(found)), [f"{epochs} epochs" for epochs in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xlim(-0.35, 0.35)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"points of top-1 accuracy; lines: 95 % intervals, thick: 90 %; shaded: "
                        f"within {MARGIN}")
        axes.set_title("Mixed precision minus float32: ResNet-50 v1.5 on ImageNet, 8 V100, 8 seeds "
                       "each", loc="left", fontsize=10)
        return image(figure)


def build(folder):
    """Writes all files and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [report([HERE / "published.csv"], folder / "published", "ResNet-50 v1b as published",
                   0.76, claim_speed=True),
            report([HERE / "gluoncv.csv"], folder / "gluoncv", "ResNet-50 in GluonCV's logs", 0.76)]
    ends, _ = read_table("published_ends.csv")
    nvidia, nvidia_source = read_table("nvidia.csv")
    seeds, seeds_source = read_table("nvidia_seeds.csv")
    found = differences(seeds)
    published = read_logs([HERE / "published.csv"])
    for name, (png, svg) in (("published", draw_published(published)),
                             ("published_narrow", draw_published(published, narrow=True)),
                             ("nvidia", draw_nvidia(nvidia)), ("nvidia_seeds", draw_seeds(found))):
        (folder / f"{name}.png").write_bytes(png)
        (folder / f"{name}.svg").write_text(svg)
        made += [folder / f"{name}.png", folder / f"{name}.svg"]
    (folder / "README.md").write_text(README.format(
        ends=table(ends), published_source=read_table("published.csv")[1],
        gluoncv_source=read_table("gluoncv.csv")[1], nvidia=table(nvidia),
        nvidia_source=nvidia_source, seeds=seeds_table(seeds, found), seeds_source=seeds_source,
        conclusions="\n".join(f"- {epochs} epochs: {conclusion(difference, MARGIN)}."
                              for epochs, difference in found.items())))
    return [*made, folder / "README.md"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes the files of this folder.")
    parser.add_argument("folder", nargs="?", type=Path, default=HERE)
    for path in build(parser.parse_args().folder):
        print("wrote", os.path.relpath(path))
