"""The plots of a report as PNG and SVG, with the same bytes for the same runs.

The color is the number type, the line style the network, and markers distinguish recipes of one
color and style. Float32 is drawn wider and below the others, so that overlapping lines are visible.
"""
import io
import re
import warnings
from collections import Counter
from contextlib import contextmanager
from itertools import zip_longest
from typing import Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .colors import GREY, INK, color
from .compare import Comparison, Group
from .curves import Line, Point, line
from .runs import ACCURACY, FLOAT32, Run, headed, plain, unit_of_time
from .verdict import in_points

STYLES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.2, 1.2, 1.2)))  # of networks, in turn
MARKERS = ("", "o", "s", "^", "D", "v", "P", "X")  # of recipes
STYLE = {  # over matplotlib's defaults
    "svg.hashsalt": "gluon_amp", "text.parse_math": False, "font.family": "DejaVu Sans",
    "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": GREY, "grid.alpha": 0.25, "lines.linewidth": 1.6,
    "path.simplify": False}
if matplotlib.__version_info__ > (3, 8):  # newer versions measure text at the drawn size
    STYLE["figure.dpi"] = 150
WIDTH, HEIGHT = 4.4, 3.1  # inches: readable on a phone, and two fit side by side on a screen
LONGEST_NAME, LONGEST_ROW = 24, 34  # characters of a line's and of a difference's label
MOST_LINES = 8  # of a plot
FAR = 1000  # ratio of lines: a diverged one would flatten the others
FORESTED = 20  # comparisons in the plot of differences


class Plot(NamedTuple):
    """A plot."""
    name: str
    caption: str
    png: bytes
    svg: str


class Chart(NamedTuple):
    """What to draw of runs; `axis` is "linear", "percent", "powers" (of 2) or "whole"."""
    name: str
    title: str
    y: str
    points: Callable[[Run], List[Point]]
    axis: str = "linear"
    x: str = "epochs"

    def write(self, value: float) -> str:
        """Returns a value as text."""
        if self.axis == "percent":
            return f"{value:.2%}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# ---- what runs have for each chart; epochs count from the beginning, so epoch 0 ends at 1

def _epochs(name: str) -> Callable[[Run], List[Point]]:
    def points(run: Run) -> List[Point]:
        values = [(n + 1, epoch.get(name)) for n, epoch in run.epochs.items()]
        return [Point(n, n, value) for n, value in values if value is not None]
    return points


def _series(name: str) -> Callable[[Run], List[Point]]:
    """Returns the points of a quantity's steps, or else those of epochs."""
    def points(run: Run) -> List[Point]:
        times = [(epoch + (batch + 1) / max(run.batches, batch + 1), value)
                 for epoch, batch, value in run.steps.get(name, [])]
        return [Point(x, x, value) for x, value in times] or _epochs(name)(run)
    return points


def _scales(run: Run) -> List[Point]:
    """Returns the points of the loss scale; none without a scale."""
    points = _series("loss_scale")(run)
    return points if any(point.y != 1 for point in points) else []


def _measured(run: Run) -> List[Point]:
    """Returns the error after each epoch, or another measure."""
    points = _epochs("top1")(run)
    if run.measure == ACCURACY:
        return points
    return [point._replace(y=run.told(point.y) / (100 if run.is_share else 1)) for point in points]


def _by_hours(run: Run) -> List[Point]:
    hours = {n + 1.0: at for n, at in zip(run.epochs, run.hours)}
    return [Point(n, hours[n], y) for n, _, y in _measured(run) if n in hours]


CHARTS = (
    Chart("loss", "Training loss", "loss", _series("loss")),
    Chart("validation_loss", "Validation loss", "loss", _epochs("validation_loss")),
    Chart("gradient_norm", "Norm of the gradient", "norm", _series("gradient_norm")),
    Chart("loss_scale", "Loss scale", "loss scale", _scales, "powers"),
    Chart("skipped_steps", "Skipped steps", "steps skipped so far", _series("skipped"), "whole"))


def _of_metric(name: str) -> Chart:
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower())
    return Chart(f"validation_{slug}", f"Validation: {name}", headed(name), _epochs(name))


def charts(runs: Sequence[Run]) -> List[Chart]:
    """Returns the charts of runs of one measure: of that measure, those above, other metrics."""
    first = runs[0]
    if first.measure == ACCURACY:
        measure = Chart("validation_error", "Validation error", "top-1 error", _measured, "percent")
    else:
        measure = _of_metric(first.measure.replace("validation ", ""))._replace(
            points=_measured, axis="percent" if first.is_share else "linear")
    by_hours = measure._replace(name=f"{measure.name}_by_hours", x="hours", points=_by_hours,
                                title=f"{measure.title} by time of training")
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    return [measure, by_hours, *CHARTS, *map(_of_metric, metrics)]


def plots(groups: Sequence[Group]) -> List[Plot]:
    """Draws the charts of one section in which something varies."""
    by_type: Dict[str, List[Group]] = {}
    for group in groups:
        by_type.setdefault(group.dtype, []).append(group)
    in_turn = [group for of in zip_longest(*by_type.values()) for group in of if group]
    chosen = groups if len(groups) <= MOST_LINES else in_turn[:MOST_LINES]
    runs = [run for group in chosen for run in group.runs]
    drawn = []
    for chart in charts(runs):
        points = {id(run): chart.points(run) for run in runs}
        lines = [each for each in (line(group, points) for group in chosen) if each]
        if len({y for each in lines
                for y in (*each.y, *(() if each.band is None else each.band.flat))}) > 1:
            drawn.append(_draw(chart, lines, len(groups) - len(chosen)))
    return drawn


def _draw(chart: Chart, lines: Sequence[Line], left_out: int) -> Plot:
    unit, factor = chart.x, 1.0
    if chart.x == "hours":
        unit, factor = unit_of_time([run for each in lines for run in each.group.runs])
    models = list(dict.fromkeys(each.group.model for each in lines))
    marked: Counter[Tuple[str, str]] = Counter()
    with _style():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        handles = []
        for each in lines:
            place = color(each.group.dtype), each.group.model
            beneath = each.group.dtype == FLOAT32
            name = _shortened(each.group.name, LONGEST_NAME)
            if each.runs == 1 and chart.axis == "percent":
                name += f" {chart.write(each.y[-1])}"
            handles += axes.plot(
                each.x * factor, each.y, color=place[0], label=name,
                linestyle=STYLES[models.index(each.group.model) % len(STYLES)],
                marker=MARKERS[marked[place] % len(MARKERS)] or ("o" if len(each.x) == 1 else ""),
                markersize=4, markevery=max(1, len(each.x) // 8),
                linewidth=2.6 if beneath else 1.4, zorder=2 if beneath else 3)
            marked[place] += 1
            if each.band is not None:
                axes.fill_between(each.x * factor, *each.band, color=place[0], alpha=0.15,
                                  zorder=1, linewidth=0)
        axes.set_title(chart.title, loc="left", fontsize=10)
        axes.set_xlabel(unit)
        axes.set_ylabel(chart.y)
        axes.margins(x=0.02)
        _set_scales(axes, chart, lines)
        ends = [lines[i].y[-1] for i in range(len(lines))]
        order = sorted(range(len(lines)), key=ends.__getitem__, reverse=True)
        figure.legend(handles=[handles[i] for i in order], loc="outside right center", fontsize=8,
                      frameon=False, handlelength=1.6)
        png, svg = image(figure)
        return Plot(chart.name, _caption(chart, lines, left_out), png, svg)


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.style.context(STYLE, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def _set_scales(axes: Axes, chart: Chart, lines: Sequence[Line]) -> None:
    if chart.x == "epochs":
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        axes.set_xlim(left=0)
    values = np.concatenate([each.y for each in lines])
    if chart.axis == "percent":
        decimals = int(np.ptp(values) < 0.1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.{decimals}%}")
    elif chart.axis == "whole":
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    elif chart.axis == "powers":
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    elif values.min() > 0 and max(np.median(each.y) for each in lines) > FAR * min(
            each.y.max() for each in lines):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _shortened(label: str, longest: int) -> str:
    """Returns a label of one line without its middle if it is too long. (Legends skip labels that
    start with _.)"""
    label, half = plain(label), longest // 2
    short = label if len(label) <= longest else f"{label[:longest - half]}…{label[1 - half:]}"
    return f" {short}" if short.startswith("_") else short


def _caption(chart: Chart, lines: Sequence[Line], left_out: int) -> str:
    """Returns the caption: the meaning of bands, and the ends of the lines."""
    parts = [f"{chart.title}."]
    if any(each.runs > 1 for each in lines):
        parts.append("Means; bands: from the lowest to the highest run.")
    if left_out:
        parts.append(f"{len(lines)} of {len(lines) + left_out} groups.")
    ends = []
    for each in lines:
        runs = f" ({each.runs} runs)" if each.runs > 1 else ""
        band = "" if each.band is None else f" ({' to '.join(map(chart.write, each.band[:, -1]))})"
        ends.append(f"{each.group.name}{runs} {chart.write(each.y[-1])}{band}")
    return f"{' '.join(parts)} At the end: {'; '.join(ends)}."


# ---- differences

def forest(comparisons: Sequence[Comparison], margin: float) -> List[Plot]:
    """Draws each difference with its interval, and the margin of equivalence; returns no plot
    without differences."""
    shown = [(c, c.difference) for c in comparisons if c.difference][:FORESTED]
    if not shown:
        return []
    unit, measured = shown[0][1].unit, shown[0][0].low.first.measured
    with _style():
        figure = Figure(figsize=(WIDTH, 1.15 + 0.42 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        axes.axvspan(-margin, margin, color=GREY, alpha=0.15, linewidth=0)
        axes.axvline(0, color=GREY, linewidth=1)
        for row, (comparison, difference) in enumerate(shown):
            ink = color(comparison.low.dtype)
            for level, width in ((0.95, 1.2), (0.9, 3.5)):
                axes.plot(difference.interval(level), (row, row), color=ink, linewidth=width,
                          solid_capstyle="butt")
            each = [low - high for low, high in comparison.pairs] if difference.paired else []
            axes.plot(each, [row + 0.22] * len(each), "|", color=ink, alpha=0.6, markersize=5)
            axes.plot([difference.mean], [row], "o" if not comparison.differences else "x",
                      color=ink, markersize=6)
        axes.set_yticks(range(len(shown)), [_shortened(c.low.name, LONGEST_ROW) for c, _ in shown],
                        fontsize=8)
        axes.set_ylim(len(shown) - 0.5, -0.6)
        axes.set_title("Difference to float32", loc="left", fontsize=10)
        axes.set_xlabel(unit)
        axes.grid(axis="y", visible=False)
        png, svg = image(figure)
    words = "; ".join(f"{c.low.name} {d.mean:+.2f} {unit} ({d.interval()[0]:+.2f} to "
                      f"{d.interval()[1]:+.2f})" for c, d in shown)
    crosses = " Crosses: recipes differ." if any(c.differences for c, _ in shown) else ""
    caption = f"Difference to float32 in {measured}. Lines: 95 % intervals, thick: 90 %; small " \
              f"strokes: single seeds; shaded: within {in_points(margin, unit)}.{crosses} {words}."
    return [Plot("differences", caption, png, svg)]


def image(figure: Figure) -> Tuple[bytes, str]:
    png, svg = io.BytesIO(), io.StringIO()
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # all has its place: looking for it takes longer than drawing
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return png.getvalue(), svg.getvalue()
