"""Draws this folder's figures: `python results/tensor_cores/draw.py FOLDER`, in minutes."""
import json
import math
import sys
from pathlib import Path

import matplotlib.patches
import numpy as np
from matplotlib.figure import Figure
from rule import dot

BLUE, SKY, GREEN, RED = "#0072b2", "#56b4e9", "#009e73", "#d55e00"
WIDTH = 5.4  # inches: legible on a phone
LENGTHS = [16, 64, 256, 1024, 2048, 4096, 12544, 25088, 50176]  # of sums


def draw(folder):
    """Writes the figures as PNG files."""
    matplotlib.rcdefaults()  # independent of the caller's style
    for name, figure in (("bits", one_instruction()), ("sums", long_sums()),
                         ("gradients", long_gradients())):
        figure.savefig(Path(folder) / f"{name}.png", dpi=150)


def one_instruction():
    """Draws the bits of five numbers that a V100 and an H100 keep, aligned to the largest."""
    pairs = ((1.337, 2.75), (-0.7, 0.9), (0.013, 0.11), (0.002, 0.003))
    largest, rows = 3, [("c = 12.3", 3, 3 - 23)]  # name, first and last bit
    for a, b in pairs:
        first, last = math.floor(math.log2(abs(a * b))), -20
        last += math.floor(math.log2(abs(a))) + math.floor(math.log2(b))  # 10 fraction bits of each
        rows.append((f"{a} x {b}", first, last))
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    axes = figure.add_subplot()
    for row, (name, first, last) in enumerate(rows):
        for bit in range(last, first + 1):
            kept = "all" if bit >= largest - 23 else "H100" if bit >= largest - 25 else "none"
            axes.add_patch(matplotlib.patches.Rectangle(
                (largest - bit, -row - 0.4), 0.9, 0.8, linewidth=0,
                color={"all": BLUE, "H100": SKY, "none": "0.8"}[kept]))
        axes.text(-0.6, -row, name, ha="right", va="center")
    for cut, name, side in ((24, "V100", "right"), (26, "H100", "left")):
        axes.plot([cut - 0.05] * 2, [-4.6, 1.35], color="0.2", linestyle="--", linewidth=1)
        axes.text(cut, 1.35, f" {name} cuts here ", va="top", ha=side)
    axes.set(xlim=(-11, 40), ylim=(-4.7, 1.5))
    axes.set_axis_off()
    return figure


def long_sums():
    """Draws the share of float16 results that a GPU's chains change, over the sum's length."""
    ways = (("V100", None, RED, "-"), ("A100", None, GREEN, "-"), ("H100", None, BLUE, "-"),
            ("V100", 4096, RED, ":"), ("A100", 4096, GREEN, ":"), ("H100", 4096, BLUE, ":"))
    random = np.random.RandomState(1)
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    for axes, positive in zip(figure.subplots(1, 2, sharey=True), (True, False)):
        shares = [[] for _ in ways]
        for length in LENGTHS:
            a, b = (random.randn(*s).astype("float16") for s in ((48, length), (length, 48)))
            if positive:
                a, b = abs(a), abs(b)
            small = np.float32(2.0 ** -8)  # keeps long sums in float16's range
            wanted = (a.astype("float64") @ b.astype("float64") * small).astype("float16")
            for (gpu, split, _, _), share in zip(ways, shares):
                result = (dot(a, b, gpu=gpu, split=split) * small).astype("float16")
                share.append(100 * np.mean(result != wanted))
        for (gpu, split, shade, style), share in zip(ways, shares):
            axes.plot(LENGTHS, share, color=shade, linestyle=style, linewidth=1.4,
                      label=f"{gpu}, pieces of {split:,}" if split else f"{gpu}, one chain")
        axes.set(xscale="log", xlabel="length of the sum")
        axes.set_title("positive factors" if positive else "factors of both signs", fontsize=10,
                       loc="left")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("% of float16 results that differ\nfrom the exact sum, rounded")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center",
                  ncols=2, fontsize=9, frameon=False)
    return figure


def long_gradients():
    """Draws the shortening of ResNet-20's weight gradients by one chain."""
    lines = Path(__file__).with_name("gradients.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if row["study"] == "cifar10"]
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="0.3", linewidth=0.8)
    for gpu, shade, aside in (("V100", RED, 0.97), ("A100", GREEN, 1.03)):
        axes.plot([aside * row["length"] for row in rows],
                  [100 * (row[gpu][0] - row[f"{gpu} in pieces"][0]) for row in rows], "o",
                  color=shade, markersize=5, alpha=0.7, label=gpu)
    lengths = sorted({row["length"] for row in rows})
    axes.set(xscale="log", xlabel="products in a sum", ylim=(-0.02, 0.01), xlim=(5000, 130000),
             ylabel="% by which a weight's gradient\nis longer in one chain than in pieces")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    return figure


if __name__ == "__main__":
    draw(*sys.argv[1:])
