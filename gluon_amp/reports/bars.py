"""A plot of horizontal bars: parts of a whole, in several runs."""
from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from .colors import color
from .plots import LONGEST_ROW, STYLE, WIDTH, Plot, image, shortened

HEIGHT = 0.11  # inches of a bar
ALPHAS = (1.0, 0.55)  # of a bar's first part and of its second
CAPTIONED = 3  # bars in the caption


def bars(name: str, title: str, unit: str, rows: Sequence[str],
         runs: Mapping[str, Tuple[str, List[List[float]]]], parts: Sequence[str]) -> Plot:
    """Draws a row for each name, with a bar for each run.

    Args:
        runs: for each run its type, which is the color, and the two parts of each row's bar.
        parts: the names of the parts.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.1 + len(rows) * (0.12 + HEIGHT * len(runs))),
                        layout="constrained")
        axes = figure.add_subplot()
        thick = 0.8 / len(runs)
        for i, (run, (dtype, values)) in enumerate(runs.items()):
            left = np.zeros(len(rows))
            places = np.arange(len(rows)) + (i + 0.5) * thick - 0.4
            for part, widths, alpha in zip(parts, zip(*values), ALPHAS):
                axes.barh(places, widths, thick, left, color=color(dtype), alpha=alpha,
                          label=f"{run}, {part}")
                left += widths
        axes.set_yticks(range(len(rows)), [shortened(row, LONGEST_ROW) for row in rows], fontsize=7)
        axes.set_ylim(len(rows) - 0.5, -0.6)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel(unit)
        axes.grid(axis="y", visible=False)
        axes.legend(fontsize=7, frameon=False, loc="lower right")
        png, svg = image(figure)
    return Plot(name, title, _caption(title, unit, rows, runs), png, svg)


def _caption(title: str, unit: str, rows: Sequence[str],
             runs: Mapping[str, Tuple[str, List[List[float]]]]) -> str:
    totals: Dict[str, List[float]] = {run: [sum(one) for one in values]
                                      for run, (_, values) in runs.items()}
    first = next(iter(totals.values()))
    largest = sorted(range(len(rows)), key=lambda i: -first[i])[:CAPTIONED]
    told = "; ".join(f"{rows[i]} " + ", ".join(f"{run} {values[i]:.3g} {unit}"
                                               for run, values in totals.items())
                     for i in largest)
    return f"{title}. The largest: {told}."
