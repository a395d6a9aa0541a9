"""Draws validation error by epoch, float32 against float16, from training logs.

    python plot_imagenet.py float32.log float16.log -o imagenet.png

Reads what `gluon-amp report` reads, and is short, so that a figure of your own can start from it.
"""
import argparse

import command
from gluon_amp.report import read
from matplotlib.figure import Figure


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=command.Help)
    parser.add_argument("logs", nargs="+", help="of GluonCV, of a Module, log.jsonl, or CSV")
    parser.add_argument("-o", "--output", default="imagenet.png", help="a PNG, SVG or PDF file")
    args = parser.parse_args(arguments)
    runs = [run for run in read(args.logs) if run.best]

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    colors = iter(["#d55e00", "#0072b2", "#009e73", "#cc79a7"] * len(runs))
    for run in runs:
        epochs, errors = zip(*[(n, 100 * epoch.top1) for n, epoch in run.epochs.items()
                               if epoch.top1 is not None])
        name = ", ".join(str(part) for part in (
            run.dtype, run.batch_size and f"batch size {run.batch_size}",
            run.hours and f"{run.hours[-1]:.1f} h", f"{errors[-1]:.2f} %") if part)
        dashed = run.dtype == "float32"
        axes.plot(epochs, errors, "--" if dashed else "-", label=name, zorder=3 if dashed else 2,
                  color="#1f2329" if dashed else next(colors))
    axes.set_xlabel("epoch")
    axes.set_ylabel("top-1 validation error, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(args.output, dpi=150)
    print(args.output)


if __name__ == "__main__":
    command.run(main)
