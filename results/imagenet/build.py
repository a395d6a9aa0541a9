"""Draws and writes all of results/imagenet from the CSV files beside this script: `make results`.

The same versions of matplotlib and pillow (the extra "results") give the same bytes.
"""
import csv
import sys
from pathlib import Path

import matplotlib
from gluon_amp.report import report
from gluon_amp.report.plots import PALETTE, STYLE, image
from matplotlib.figure import Figure

HERE = Path(__file__).parent
README = """# ResNet-50 on ImageNet: float32 and float16

Published figures, restated from the CSV files in this folder. None of them was measured by this
project. `make results` draws and writes everything here but the CSV files.

## Apache MXNet's tutorial

ResNet-50 v1b, 90 epochs, 8 V100. [Report](published/report.md)

{ends}

![Top-1 error by epoch of float32 at batch 1024 and float16 at 1024 and 2048: the three lines fall \
together to 23.8, 23.7 and 23.7 %](published/validation_error.png)

{published_source}

## GluonCV's logs

ResNet-50 v1 and v1b, 120 epochs, batch 1024. **Not like for like**: the float16 runs have label
smoothing and no weight decay of biases and norms, the float32 runs neither. That float16 ends lower
says nothing of float16. [Report](gluoncv/report.md)

![Top-1 error by epoch of both networks in float32 and float16](gluoncv/validation_error.png)

{gluoncv_source}

## NVIDIA's tables

ResNet-50 v1.5 in MXNet, mixed precision against float32 (on A100: TF32).

![Images per second and GPU of V100 and A100, mixed precision about 3.2 to 3.6 times float32 or \
TF32](nvidia.png)

{nvidia}

{nvidia_source}
"""


def read(name):
    """The rows of a table, and where it is from."""
    lines = (HERE / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if line[0] != "#")), "\n".join(
        f"- {line[2:]}" for line in lines if line[0] == "#")


def table(rows):
    return "\n".join(["| " + " | ".join(row) + " |" for row in (
        rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows))])


def draw_nvidia(rows):
    """Images per second of one GPU: mixed precision beside float32."""
    rows = [row for row in rows if row["measure"] == "images/s"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for i, row in enumerate(rows):
            for shift, column, color in ((-0.2, "float32", PALETTE[0]), (0.2, "mixed", PALETTE[1])):
                speed = float(row[column]) / int(row["gpus"])
                axes.barh(i + shift, speed, 0.36, color=color,
                          label=None if i else {"float32": "float32 or TF32"}.get(column, "mixed"))
                axes.text(speed, i + shift, f" {speed:,.0f}", va="center", fontsize=8, color=color)
        axes.set_yticks(range(len(rows)),
                        [f"{row['hardware']}, {row['gpus']} used" for row in rows])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.08)
        axes.set_xlabel("images per second and GPU")
        axes.set_title("ResNet-50 v1.5 training, NVIDIA's figures", loc="left", fontsize=11)
        axes.legend(frameon=False, loc="upper right")
        return image(figure)


def build(folder):
    folder.mkdir(parents=True, exist_ok=True)
    report([HERE / "published.csv"], folder / "published", "ResNet-50 v1b as published", 0.76)
    report([HERE / "gluoncv.csv"], folder / "gluoncv", "ResNet-50 in GluonCV's logs", 0.76)
    ends, _ = read("published_ends.csv")
    nvidia, nvidia_source = read("nvidia.csv")
    png, svg = draw_nvidia(nvidia)
    (folder / "nvidia.png").write_bytes(png)
    (folder / "nvidia.svg").write_text(svg)
    (folder / "README.md").write_text(README.format(
        ends=table(ends), published_source=read("published.csv")[1],
        gluoncv_source=read("gluoncv.csv")[1], nvidia=table(nvidia), nvidia_source=nvidia_source))


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
