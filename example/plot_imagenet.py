"""Plots the validation error of float32 and float16 over epochs, from training logs.

    python plot_imagenet.py float32.log float16.log -o imagenet.png

It reads the logs that `gluon-amp report` reads: a short starting point for other figures.
"""
import recipes
from gluon_amp.reports import read_logs
from matplotlib.figure import Figure

COLORS = {"float32": "#1f2329", "bfloat16": "#009e73", "float16": "#0072b2",
          "tf32": "#cc79a7", "": "#e69f00"}  # by a part of the type's name, as in reports


def main(arguments=None):
    parser = recipes.Parser(__doc__)
    parser.add_argument("logs", nargs="+", help="log of GluonCV or of a Module, log.jsonl, or CSV")
    parser.add_argument("-o", "--output", default="imagenet.png",
        help="output file, PNG, SVG or PDF")
    args = parser.parse_args(arguments)
    runs = [run for run in read_logs(args.logs) if run.best]
    if not runs:
        parser.error("the logs have no validation results")
    other = sorted({run.measure for run in runs if not run.is_share})
    if other:
        parser.error(f"the plot is of errors in percent. Received: {', '.join(other)}")

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    styles = {}  # one curve for each run of a type and network
    for run in runs:
        epochs, errors = zip(*[(n + 1, 100 * epoch.top1) for n, epoch in run.epochs.items()
                               if epoch.top1 is not None])
        name = ", ".join(str(part) for part in (
            run.dtype, run.batch_size and f"batch size {run.batch_size}",
            run.hours and f"{run.hours[-1]:.1f} h", f"{errors[-1]:.2f} %") if part)
        style = next(styles.setdefault(run.dtype, iter(["-", "--", ":", "-."] * len(runs))))
        color = next(color for part, color in COLORS.items() if part in run.dtype)
        axes.plot(epochs, errors, style, label=name, color=color,
                  linewidth=2.6 if run.dtype == "float32" else 1.4)
    axes.set_xlabel("epochs")
    axes.set_ylabel(f"{', '.join(sorted({run.measure for run in runs}))} validation error, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(args.output, dpi=150)
    print(args.output)


if __name__ == "__main__":
    recipes.run(main)
