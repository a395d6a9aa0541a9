"""Plots the validation error of float32 and float16 over epochs, from training logs.

    python plot_imagenet.py float32.log float16.log -o imagenet.png

It reads the logs that `gluon-amp report` reads: a short starting point for other figures.
"""
import command_line as cli
from gluon_amp.reports import read_logs
from matplotlib.figure import Figure

# By a part of the type's name, as in reports: "mixed_bfloat16" has the color of bfloat16
COLORS = {"float32": "#1f2329", "bfloat16": "#009e73", "float16": "#0072b2",
          "tf32": "#cc79a7", "": "#e69f00"}
STYLES = ["-", "--", ":", "-."]  # of several runs in one type


def main(arguments=None):
    """Reads the logs, and writes the figure."""
    parser = cli.Parser(__doc__)
    parser.add_argument("logs", nargs="+", help="log of GluonCV or of a Module, log.jsonl, or CSV")
    parser.add_argument("-o", "--output", default="imagenet.png",
                        help="output file, PNG, SVG or PDF")
    args = parser.parse_args(arguments)
    runs = [run for run in read_logs(args.logs) if run.best]
    if not runs:
        parser.error("the logs have no validation results")
    measures = sorted({run.measure for run in runs if not run.is_share})
    if measures:
        parser.error(f"the plot is of errors in percent. Received: {', '.join(measures)}")

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, run in enumerate(runs):
        epochs, errors = [], []
        for epoch, results in run.epochs.items():
            if results.top1 is not None:
                epochs.append(epoch + 1)
                errors.append(100 * results.top1)
        parts = [run.dtype, run.batch_size and f"batch size {run.batch_size}",
                 run.hours and f"{run.hours[-1]:.1f} h", f"{errors[-1]:.2f} %"]
        color = next(color for part, color in COLORS.items() if part in run.dtype)
        earlier = sum(other.dtype == run.dtype for other in runs[:number])
        axes.plot(epochs, errors, STYLES[earlier % len(STYLES)], color=color,
                  linewidth=2.6 if run.dtype == "float32" else 1.4,
                  label=", ".join(part for part in parts if part))
    axes.set_xlabel("epochs")
    axes.set_ylabel(f"{', '.join(sorted({run.measure for run in runs}))} validation error, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(args.output, dpi=150)
    print(args.output)


if __name__ == "__main__":
    cli.run(main)
