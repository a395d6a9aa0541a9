"""Prints the table of this folder's trainings: python results/table.py results/*.jsonl

It also draws differences.png. Runs of one seed have the same initial weights and the same order of
images, so they are compared in pairs, as in `gluon-amp report`.
"""
import sys
from pathlib import Path
from statistics import mean, stdev

import study
from gluon_amp.reports.colors import color
from gluon_amp.reports.verdict import outcome, p_text, paired
from matplotlib.figure import Figure

HERE = Path(__file__).parent
MARGIN = 0.5  # points of accuracy


def results(path):
    """Returns the results of each kind of runs by seed: test accuracy after the last epoch, in
    percent, and the number of skipped steps."""
    found = {}
    for name, lines in study.runs(path).items():
        kind, seed = name.rsplit("-seed", 1)
        end = [line for line in lines if "err_top1" in line][-1]
        found.setdefault(kind, {})[int(seed)] = 100 * (1 - end["err_top1"]), end["skipped"]
    return dict(sorted(found.items(), key=lambda item: (item[0] != "float32", item[0])))


def rows(path):
    """Yields the table cells of each kind, and its paired differences to float32."""
    found = results(path)
    for kind, runs in found.items():
        accuracies = [accuracy for accuracy, _ in runs.values()]
        skipped = [skipped for _, skipped in runs.values()]
        cells = [path.stem, kind, len(runs), f"{mean(accuracies):.2f} ± {stdev(accuracies):.2f}",
                 " to ".join(map(str, sorted({min(skipped), max(skipped)}))), "", ""]
        pairs = sorted(runs.keys() & found["float32"].keys())
        if kind == "float32":
            yield cells, kind, None, []
            continue
        mine, reference = ([found[k][seed][0] for seed in pairs] for k in (kind, "float32"))
        difference = paired(mine, reference)
        low, high = difference.interval()
        cells[5:] = [f"{difference.mean:+.2f} ({low:+.2f} to {high:+.2f})",
                     f"{answer(difference)}; shown within {difference.shown_within}"]
        yield cells, kind, difference, [a - b for a, b in zip(mine, reference)]


def answer(difference):
    """Returns the verdict, with the p of its test."""
    word = outcome(difference, MARGIN)
    if word == "different":
        return f"different, p = {difference.p:.3f}"
    return f"{word}, {p_text(difference, MARGIN)}"


def draw(found, path):
    """Draws the differences of all pairs of seeds, their mean, and the interval of the tests."""
    shown = [row for row in found if row[2]]
    figure = Figure(figsize=(5.4, 0.9 + 0.55 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(-MARGIN, MARGIN, color="0.9")
    axes.axvline(0, color="0.4", linewidth=0.8)
    for y, (_, kind, difference, pairs) in enumerate(shown):
        axes.plot(pairs, [y + 0.22] * len(pairs), "|", color=color(kind), alpha=0.5, markersize=9)
        axes.plot(difference.interval(0.9), [y, y], color=color(kind), linewidth=3)
        axes.plot(difference.mean, y, "o", color=color(kind), markersize=7)
    axes.set_yticks(range(len(shown)),
                    [f"{cells[0]}\n{kind}, {len(pairs)} seeds" for cells, kind, _, pairs in shown])
    axes.set(ylim=(-0.5, len(shown) - 0.2), xlabel="points of test accuracy, minus float32's")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)


def main(paths):
    found = [row for path in paths for row in rows(path)]
    print("| study | runs | seeds | test accuracy: mean ± standard deviation | skipped steps | "
          f"minus float32 (95 %) | the same within {MARGIN:g} points? |\n|{' --- |' * 7}")
    for cells, *_ in found:
        print(f"| {' | '.join(map(str, cells))} |")
    draw(found, HERE / "differences.png")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
