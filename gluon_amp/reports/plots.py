"""The plots of a report as PNG and SVG, with the same bytes for the same runs.

The color is the number type, the line style the network, and markers distinguish recipes of one
color and style. Float32 is drawn wider and below the others, so that overlapping lines are visible.
Labels are right of the axes, in the order of the lines' ends.
"""
import io
import re
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .colors import GREY, INK, color
from .compare import Comparison, Group
from .curves import FEW_RUNS, FEW_SHARED, Line, Point, line, pool, reached
from .runs import ACCURACY, FLOAT32, Run, headed, plain, unit_of_time
from .verdict import in_points

STYLES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.2, 1.2, 1.2)))  # of networks, in turn
MARKERS = ("", "o", "s", "^", "D", "v", "P", "X")  # of recipes
DRAWN = re.compile(r"(axes|figure|font|grid|legend|lines|path|savefig|svg|text|[xy]tick)\.")
STYLE = {  # overrides the caller's style
    **{name: value for name, value in matplotlib.rcParamsDefault.items() if DRAWN.match(name)},
    "svg.hashsalt": "gluon_amp", "text.parse_math": False, "font.family": "DejaVu Sans",
    "font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": GREY, "grid.alpha": 0.25, "lines.linewidth": 1.6,
    "path.simplify": False}
if matplotlib.__version_info__ > (3, 8):  # newer versions measure text at the drawn size
    STYLE["figure.dpi"] = 150
WIDTH, HEIGHT = 4.4, 3.1  # inches: readable on a phone, and two fit side by side on a screen
LONGEST_NAME, LONGEST_ROW = 24, 34  # characters of a line's and of a difference's label
FAR_APART, FAR = ("loss", "validation_loss", "gradient_norm"), 1000  # charts; ratio of lines
ROOM = 0.07  # of a label, as a share of the axes' height
HOVERED = 100  # points of each line in tooltips
FORESTED = 20  # comparisons in the plot of differences
CAPTIONED = 5  # comparisons in its caption
BANDS = ("95 % intervals of the mean", f"the range of fewer than {FEW_RUNS} runs")


@dataclass(frozen=True)
class Plot:
    """A plot; `hover` has the page's tooltips: the position of the axes, and the lines' values as
    text."""
    name: str
    title: str
    caption: str
    png: bytes
    svg: str
    hover: Dict[str, Any] = field(default_factory=dict)


class Scale(NamedTuple):
    """The format of values, and the scale of the axis."""
    write: Callable[[float], str]
    from_zero: bool = True
    logarithmic: bool = False
    percent: bool = False
    whole: bool = False


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


ERROR = Scale("{:.2%}".format, from_zero=False, percent=True)
SHARE = Scale("{:.0%}".format, percent=True)
NUMBER = Scale(_number)
LOSS = Scale(_number, from_zero=False)
COUNT = Scale(_number, whole=True)
POWERS = Scale("{:,g}".format, logarithmic=True)


class Chart(NamedTuple):
    name: str
    title: str
    x: str
    y: str
    scale: Scale
    points: Callable[[Run], List[Point]]
    steps: bool = False  # a value holds until the next one
    always: bool = False  # drawn even if nothing in it varies


# ---- what runs have for each chart; epochs count from the beginning, so epoch 0 ends at 1

def _epochs(name: str) -> Callable[[Run], List[Point]]:
    def points(run: Run) -> List[Point]:
        values = [(n + 1, getattr(epoch, name)) for n, epoch in run.epochs.items()]
        return [Point(n, n, value) for n, value in values if value is not None]
    return points


def _measured(run: Run) -> List[Point]:
    """Returns the error after each epoch, or another measure."""
    if run.measure == ACCURACY:
        return _epochs("top1")(run)
    return [point._replace(y=run.told(point.y) / (100 if run.is_share else 1))
            for point in _epochs("top1")(run)]


def _by_hours(run: Run) -> List[Point]:
    hours = {n + 1.0: at for n, at in zip(run.epochs, run.hours)}
    return [Point(n, hours[n], y) for n, _, y in _measured(run) if n in hours]


def _within(run: Run, points: Sequence[Tuple[int, int, Optional[float]]]) -> List[Point]:
    times = [(epoch + (batch + 1) / max(run.batches, batch + 1), value)
             for epoch, batch, value in points]
    return [Point(x, x, value) for x, value in times if value is not None]


def _series(name: str, of_epochs: str = "") -> Callable[[Run], List[Point]]:
    def points(run: Run) -> List[Point]:
        within = _within(run, run.steps.get(name, []))
        return within or (_epochs(of_epochs)(run) if of_epochs else [])
    return points


def _trace(column: int) -> Callable[[Run], List[Point]]:
    """Returns points of the loss scale or of skipped steps until the run's end; none without a
    scale."""
    def points(run: Run) -> List[Point]:
        if all(scale == 1 for _, _, scale, _ in run.trace):
            return []
        within = _within(run, [(p[0], p[1], p[column]) for p in run.trace])
        end = max(run.done, within[-1].x) if within else 0
        return [*within, Point(end, end, within[-1].y)] if within else []
    return points


CHARTS = (
    Chart("validation_error", "Validation error", "epochs", "top-1 error", ERROR, _measured,
          always=True),
    Chart("validation_error_by_hours", "Validation error by time of training", "hours",
          "top-1 error", ERROR, _by_hours, always=True),
    Chart("loss", "Training loss", "epochs", "loss", LOSS, _series("loss", "loss")),
    Chart("validation_loss", "Validation loss", "epochs", "loss", LOSS,
          _epochs("validation_loss")),
    Chart("gradient_norm", "Norm of the gradient", "epochs", "norm", NUMBER,
          _series("gradient_norm")),
    Chart("throughput", "Throughput", "epochs", "samples per second", NUMBER, _epochs("speed")),
    Chart("loss_scale", "Loss scale", "epochs", "loss scale", POWERS, _trace(2), steps=True),
    Chart("skipped_steps", "Skipped steps", "epochs", "steps skipped so far", COUNT, _trace(3),
          steps=True),
    Chart("learning_rate", "Learning rate", "epochs", "learning rate", NUMBER,
          _series("lr", "lr")))
REACHED = Chart("share_reached", "Time to accuracy", "epochs", "share of runs", SHARE,
                _measured, steps=True)


def plots(groups: Sequence[Group], accuracy: Optional[float] = None,
          by_time: bool = False, charts: Sequence[Chart] = CHARTS) -> List[Plot]:
    """Draws the charts of one section for which the groups have data."""
    pooled, drawn = pool(groups), []
    runs = [run for group in groups for run in group.runs]
    for chart in [*charts, *(_metric_charts(runs) if charts is CHARTS else [])]:
        points = {id(run): chart.points(run) for run in runs}
        lines = [line(name, of, points, chart.steps) for name, of in pooled]
        if any(lines) and (chart.always or _varies(lines)):
            drawn.append(_draw(_worded(chart, groups[0].first), lines, runs))
    if accuracy and runs[0].is_share and charts is CHARTS \
            and max(len(group.runs) for group in groups) > 2:
        end = max([hours for run in runs for hours in run.hours[-1:]] if by_time else
                  [run.done for run in runs], default=0)
        chart = REACHED._replace(
            title=f"{REACHED.title}: {100 * accuracy:g} %", x="hours" if by_time else "epochs")
        lines = [reached(name, of, accuracy, by_time, end) for name, of in pooled]
        if any(lines):
            drawn.insert(1, _draw(chart, lines, runs))
    return drawn


def _varies(lines: Sequence[Optional[Line]]) -> bool:
    drawn = [y for one in lines if one for y in (one.y, one.band) if y is not None]
    return len(np.unique(np.concatenate(drawn, axis=None))) > 1


def _worded(chart: Chart, run: Run) -> Chart:
    if chart.y != "top-1 error" or run.measure == ACCURACY:
        return chart
    if run.is_share:
        return chart._replace(y=run.measure,
                              title=chart.title.replace("Validation error", run.measure))
    metric = run.measure.replace("validation ", "")
    return chart._replace(name=chart.name.replace("validation_error", _file_of(metric)),
                          title=chart.title.replace("Validation error", f"Validation: {metric}"),
                          y=headed(metric), scale=LOSS)


def _file_of(metric: str) -> str:
    return f"validation_{re.sub(r'[^a-z0-9]+', '_', metric.lower())}"


def _metric_charts(runs: Sequence[Run]) -> List[Chart]:
    """Returns charts of further metrics of the runs."""
    def points(name: str) -> Callable[[Run], List[Point]]:
        return lambda run: [Point(n + 1, n + 1, epoch.metrics[name])
                            for n, epoch in run.epochs.items() if name in epoch.metrics]
    return [Chart(_file_of(name), f"Validation: {name}", "epochs", headed(name), LOSS, points(name))
            for name in dict.fromkeys(name for run in runs for name in run.metrics)]


def _draw(chart: Chart, all_lines: Sequence[Optional[Line]], runs: Sequence[Run]) -> Plot:
    lines = [one for one in all_lines if one]
    unit, factor = unit_of_time(list(runs)) if chart.x == "hours" else (chart.x, 1.0)
    for one in lines:
        one.x = one.x * factor
        if chart.scale.percent and one.band is not None:
            one.band = np.clip(one.band, 0, 1)  # no error is below 0 %
    models = list(dict.fromkeys(one.model for one in lines))
    marked: Counter[Tuple[str, str]] = Counter()
    with _style():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        looks = []
        for one in lines:
            place = color(one.dtype), one.model
            look = {"color": place[0], "linestyle": STYLES[models.index(one.model) % len(STYLES)],
                    "marker": MARKERS[marked[place] % len(MARKERS)] or
                    ("o" if len(one.x) == 1 else ""), "markersize": 4,
                    "markevery": max(1, len(one.x) // 8)}
            marked[place] += 1
            looks.append(look)
            beneath = one.dtype == FLOAT32
            drawstyle = "steps-post" if chart.steps else "default"
            axes.plot(one.x, one.y, **look, linewidth=2.6 if beneath else 1.4,
                      zorder=2 if beneath else 3, drawstyle=drawstyle)
            if one.band is not None and not _is_too_wide(chart, one):
                axes.fill_between(one.x, *one.band, color=place[0], alpha=0.15, zorder=1,
                                  linewidth=0, step="post" if chart.steps else None)
        axes.set_title(chart.title, loc="left", fontsize=10)
        axes.set_xlabel(unit)
        axes.set_ylabel(chart.y)
        axes.margins(x=0.02)
        _set_scales(axes, chart, lines)
        _name_ends(figure, axes, lines, looks, chart)
        png, svg = image(figure)
        return Plot(chart.name, chart.title, _caption(chart, lines), png, svg,
                    _hover(figure, axes, chart, unit, lines))


def _is_too_wide(chart: Chart, one: Line) -> bool:
    """Whether the band of a line would fill the plot: the interval of a share of few runs."""
    return chart.name == REACHED.name and one.runs < FEW_SHARED


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def _set_scales(axes: Axes, chart: Chart, lines: List[Line]) -> None:
    values = np.concatenate([one.y for one in lines])
    banded = [one for one in lines if one.band is not None]
    bands = np.concatenate([values, *(one.band for one in banded)], axis=None)
    # a range's ends are values; an interval or quantile can be much wider than the values
    inside = np.concatenate([values, *(one.band for one in banded if one.is_range)], axis=None)
    room = 0.4 * np.ptp(inside)
    if chart.x == "epochs":
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        axes.set_xlim(left=0)
    if chart.scale.percent:
        small = np.ptp(values) < 0.1
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=int(small)))
    if chart.scale.logarithmic:
        axes.set_yscale("log", base=2)
        axes.set_ylim(values.min() / 2, values.max() * 2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    elif chart.name in FAR_APART and values.min() > 0 and max(
            np.median(one.y) for one in lines) > FAR * min(one.y.max() for one in lines):
        axes.set_yscale("log")  # a diverged run would flatten the others
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(values.min() / 2, values.max() * 2)
    elif room:
        low, high = max(bands.min(), inside.min() - room), min(bands.max(), inside.max() + room)
        edge = 0.04 * (high - low)
        axes.set_ylim(0 if chart.scale.from_zero else low - edge, high + edge)
    elif chart.scale.from_zero:
        axes.set_ylim(bottom=0)
    if chart.scale.whole:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _name_ends(figure: Figure, axes: Axes, lines: List[Line], looks: List[Dict[str, Any]],
               chart: Chart) -> None:
    """Draws labels right of the axes with a sample of their line, in the order of the lines' ends;
    a grey leader connects a line that ends at the right edge."""
    figure.draw_without_rendering()  # updates the transforms
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform((one.x[-1], one.y[-1])) for one in lines]
    order = sorted(range(len(lines)), key=lambda i: ends[i][1])
    for i, place in zip(order, _with_room([float(ends[i][1]) for i in order])):
        if ends[i][0] > 0.95:
            axes.plot([ends[i][0], 1.05], [ends[i][1], place], color=GREY, linewidth=0.6,
                      transform=axes.transAxes, clip_on=False, in_layout=False)
        look = {**looks[i], "markevery": None}
        axes.plot([1.06, 1.15], [place, place], transform=axes.transAxes, clip_on=False, **look,
                  in_layout=False)
        value = ""
        if lines[i].runs == 1 and chart.scale is ERROR:
            value = f" {chart.scale.write(lines[i].y[-1])}"
        name = re.sub(r": \d+ recipes$", "", lines[i].name)  # the caption has it
        axes.annotate(shortened(name) + value, (1.17, place), xycoords="axes fraction",
                      va="center", fontsize=8, annotation_clip=False)
    figure.draw_without_rendering()  # room for names makes the axes smaller, which moves the names


def _with_room(heights: List[float]) -> List[float]:
    """Returns these heights, from the lowest, moved so that labels do not overlap; adjacent labels
    are centered at the mean of their original heights."""
    blocks: List[List[float]] = []

    def bottom(block: List[float]) -> float:
        length = ROOM * (len(block) - 1)
        return min(max(sum(block) / len(block) - length / 2, 0), max(1 - length, 0))
    for height in heights:
        blocks.append([height])
        while len(blocks) > 1 and bottom(blocks[-2]) + ROOM * len(blocks[-2]) > bottom(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [bottom(block) + ROOM * i for block in blocks for i in range(len(block))]


def shortened(label: str, longest: int = LONGEST_NAME) -> str:
    """Shortens a long label: cuts the middles of its longest parts, so that all parts remain.
    (Legends skip labels that start with _.)"""
    parts = plain(label).split(", ")
    lengths = [len(part) for part in parts]
    while sum(lengths) + 2 * len(parts) - 2 > longest and max(lengths) > 6:
        lengths[lengths.index(max(lengths))] -= 1
    label = _cut(", ".join(map(_cut, parts, lengths)), longest)
    return f" {label}" if label.startswith("_") else label


def _cut(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:longest - half]}…{text[1 - half:]}"


def _words(chart: Chart, one: Line, i: int) -> str:
    """Returns a value and its uncertainty as text."""
    value = chart.scale.write(one.y[i])
    if one.band is None:
        return value
    return f"{value} ({' to '.join(map(chart.scale.write, one.band[:, i]))})"


def _caption(chart: Chart, lines: List[Line]) -> str:
    """Returns the caption: the meaning of bands, and the ends of the lines."""
    if chart.name == REACHED.name:
        where = "in brackets" if all(_is_too_wide(chart, one) for one in lines) else "bands"
        bands = f" The share of runs that had reached it by then; {where}: 95 % intervals (Wilson)."
    elif any(one.recipes > 1 for one in lines):
        bands = " Medians; bands: from 5 to 95 % of the runs."
    elif any(one.runs > 1 for one in lines) and chart.steps:
        bands = " Medians; bands: from the lowest to the highest."
    elif any(one.runs > 1 for one in lines):
        ranges = {one.is_range for one in lines if one.runs > 1}
        bands = f" Means; bands: {' or '.join(BANDS[is_range] for is_range in sorted(ranges))}."
    else:
        bands = ""
    ends = "; ".join(f"{one.name}{f' ({one.runs} runs)' if one.runs > 1 else ''} "
                     f"{_words(chart, one, -1)}" for one in lines)
    return f"{chart.title}.{bands} At the end: {ends}."


def _hover(figure: Figure, axes: Axes, chart: Chart, unit: str,
           lines: List[Line]) -> Dict[str, Any]:
    box, (low, high) = axes.get_position(), axes.get_xlim()

    def points(one: Line) -> List[List[Any]]:
        chosen = np.unique(np.linspace(0, len(one.x) - 1, min(HOVERED, len(one.x))).astype(int))
        return [[float(f"{one.x[i]:.5g}"), _words(chart, one, i)] for i in chosen]
    return {"left": round(box.x0, 4), "right": round(box.x1, 4), "from": round(low, 4),
            "to": round(high, 4), "unit": unit, "steps": chart.steps,
            "lines": [{"name": one.name, "points": points(one)} for one in lines]}


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
        axes.set_yticks(range(len(shown)), [shortened(c.low.name, LONGEST_ROW) for c, _ in shown],
                        fontsize=8)
        axes.set_ylim(len(shown) - 0.5, -0.6)
        axes.set_title("Difference to float32", loc="left", fontsize=10)
        axes.set_xlabel(unit)
        axes.grid(axis="y", visible=False)
        png, svg = image(figure)
    words = "; ".join(f"{c.low.name} {d.mean:+.2f} {unit} ({d.interval()[0]:+.2f} to "
                      f"{d.interval()[1]:+.2f})" for c, d in shown[:CAPTIONED])
    more = f"; and {len(shown) - CAPTIONED} more" if len(shown) > CAPTIONED else ""
    crosses = " Crosses: recipes differ." if any(c.differences for c, _ in shown) else ""
    return [Plot("differences", "Difference to float32",
                 f"Difference to float32 in {measured}. Lines: 95 % intervals, thick: 90 %; small "
                 f"strokes: single seeds; shaded: within {in_points(margin, unit)}.{crosses} "
                 f"{words}{more}.", png, svg)]


def image(figure: Figure) -> Tuple[bytes, str]:
    png, svg = io.BytesIO(), io.StringIO()
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # all has its place: looking for it takes longer than drawing
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return png.getvalue(), svg.getvalue()
