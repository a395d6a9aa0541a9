"""The pictures of a report: PNG and SVG of each, the same bytes from the same runs.

Runs that differ only in their seed share a color. Float32 is dashed, and kinds of float16 differ
in their dots, so that the color-blind and grey prints tell them apart. Lines are named at their
ends where there is room.
"""
import io
import re
import warnings
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .compare import recipe
from .runs import FLOAT32, Run, plain, unit_of_time

INK = "#1f2329"  # of text and axes
PALETTE = (INK, "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHED = (0, (4, 1.5))  # float32's line
LOW = ("-", (0, (8, 1.2, 1.2, 1.2)), (0, (1.2, 1.2)))  # those of lower precision, in turn
DRAWN = re.compile(r"(axes|figure|font|grid|legend|lines|path|savefig|svg|text|[xy]tick)\.")
STYLE = {  # whatever style the caller has set
    **{name: value for name, value in matplotlib.rcParamsDefault.items() if DRAWN.match(name)},
    "svg.hashsalt": "gluon_amp", "text.parse_math": False, "font.family": "DejaVu Sans",
    "font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#808080", "grid.alpha": 0.25, "lines.linewidth": 1.8,
    "path.simplify": False}
NAMED = 8  # so many lines can be named at their ends
LONGEST_NAME = 26
ROOM = 0.055  # of a name, as a share of the axes' height


@dataclass(frozen=True)
class Plot:
    name: str
    alt: str  # what it shows, in words
    png: bytes
    svg: str


class _Chart(NamedTuple):
    name: str
    title: str
    x: str
    y: str
    points: Callable[[Run], List[Tuple[float, float]]]


CHARTS = (
    _Chart("validation_error", "Validation error by epoch", "epoch", "top-1 error",
           lambda run: [(n, e.top1) for n, e in run.epochs.items() if e.top1 is not None]),
    _Chart("validation_error_by_hours", "Validation error by time of training",
           "hours", "top-1 error",
           lambda run: [(hours, e.top1) for hours, e in zip(run.hours, run.epochs.values())
                        if e.top1 is not None]),
    _Chart("throughput", "Throughput", "epoch", "images per second",
           lambda run: [(n, e.speed) for n, e in run.epochs.items() if e.speed]),
    _Chart("loss_scale", "Loss scale", "epoch", "loss scale",
           lambda run: _steps(run, [point[2] for point in run.trace])),
    _Chart("skipped_steps", "Skipped steps", "epoch", "steps skipped so far",
           lambda run: _steps(run, [point[3] for point in run.trace])),
    _Chart("learning_rate", "Learning rate", "epoch", "learning rate",
           lambda run: [(n, e.lr) for n, e in run.epochs.items() if e.lr is not None]))


STEPS = ("loss_scale", "skipped_steps")


def plots(runs: List[Run]) -> List[Plot]:
    """Those that the runs have something for."""
    kinds = _kinds(runs)
    return [plot for plot in (_draw(chart, kinds) for chart in CHARTS) if plot]


def _steps(run: Run, values: Sequence[Optional[float]]) -> List[Tuple[float, float]]:
    """The trace up to the run's end; nothing of a run that scales nothing."""
    if all(scale == 1 for _, _, scale, _ in run.trace):
        return []
    times = [epoch + (batch + 1) / run.batches for epoch, batch, _, _ in run.trace]
    known = [(time, value) for time, value in zip(times, values) if value is not None]
    return [*known, (max(max(run.epochs) + 1, known[-1][0]), known[-1][1])] if known else []


Kind = Tuple[str, List[Run]]


def _kinds(runs: List[Run]) -> List[Kind]:
    """Runs that differ in seed alone, under the shortest name that tells them from others."""
    groups: Dict[str, List[Run]] = {}
    for run in sorted(runs, key=lambda run: run.dtype != FLOAT32):
        parts = {**recipe(run), "seed": None, "name": None if run.arguments else run.name}
        groups.setdefault(repr((run.dtype, run.get("loss_scale"), run.batch_size,
                                sorted(parts.items(), key=str))), []).append(run)
    for namings in NAMINGS:
        names = [", ".join(filter(None, (part(of[0]) for part in namings)))
                 for of in groups.values()]
        if len(set(names)) == len(names):
            break
    else:
        names = [of[0].name + (f" and {len(of) - 1} more" if len(of) > 1 else "")
                 for of in groups.values()]
    return list(zip(names, groups.values()))


def _dtype(run: Run) -> str:
    return run.dtype


def _batch(run: Run) -> str:
    return f"batch {run.batch_size}" if run.batch_size else ""


def _scale(run: Run) -> str:
    scale = run.get("loss_scale")
    if run.dtype == FLOAT32 or scale is None:
        return ""
    return f"scale {scale:g}" if isinstance(scale, float) else f"scale {scale}"


def _model(run: Run) -> str:
    return run.model


NAMINGS: Sequence[Sequence[Callable[[Run], str]]] = (
    (_dtype,), (_dtype, _batch), (_dtype, _scale), (_model, _dtype), (_model, _dtype, _batch))


def _draw(chart: _Chart, kinds: List[Kind]) -> Optional[Plot]:
    unit, scale = chart.x, 1.0
    if unit == "hours":
        unit, scale = unit_of_time([run for _, runs in kinds for run in runs])
    lines = [(i, label, run, [(scale * x, y) for x, y in points])
             for i, (label, runs) in enumerate(kinds) for run in runs
             for points in [chart.points(run)] if points]
    if not lines:
        return None
    float32 = sum(of[0].dtype == FLOAT32 for _, of in kinds)
    several = len({label for _, label, *_ in lines})
    legend = 0.0 if several <= NAMED else 0.09 * several  # its height
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure = Figure(figsize=(7.2, 4.2 + legend), layout="constrained")
        axes = figure.add_subplot()
        ends: Dict[str, _End] = {}
        for i, label, run, line in lines:
            xs, ys = zip(*line)
            dashed, color = run.dtype == FLOAT32, PALETTE[i % len(PALETTE)]
            axes.plot(xs, ys, color=color, marker="o" if len(line) == 1 else None, alpha=0.9,
                      linestyle=DASHED if dashed else LOW[(i - float32) % len(LOW)],
                      zorder=3 if dashed else 2,  # what is beneath shows in the gaps
                      drawstyle="steps-post" if chart.name in STEPS else None,
                      label=None if label in ends else _short(label))
            value = f" {ys[-1]:.2%}" if "error" in chart.y and len(kinds[i][1]) == 1 else ""
            ends[label] = _End(xs[-1], ys[-1], color, _short(label) + value)
        axes.set_title(chart.title, loc="left", fontsize=11)
        axes.set_xlabel(unit)
        axes.set_ylabel(chart.y)
        axes.margins(x=0.02)
        _set_scales(axes, chart, [y for *_, line in lines for _, y in line])
        if not legend:
            _name_ends(figure, axes, list(ends.values()))
        else:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        return Plot(chart.name, _alt(chart, lines), *image(figure))


def _set_scales(axes: Any, chart: _Chart, values: List[float]) -> None:
    if chart.x == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, (low + high) / 2 - 0.5), max(high, (low + high) / 2 + 0.5))
    if "error" in chart.y:
        small = max(values) - min(values) < 0.1
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=int(small)))
    elif chart.name == "loss_scale":
        axes.set_yscale("log", base=2)
        axes.set_ylim(min(values) / 2, max(values) * 2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    else:
        axes.set_ylim(bottom=0)
        if chart.name == "skipped_steps":
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))


class _End(NamedTuple):
    x: float
    y: float
    color: str
    text: str


def _name_ends(figure: Figure, axes: Any, ends: List[_End]) -> None:
    """Names right of the axes, at the heights of the lines' ends, or else moved apart."""
    figure.draw_without_rendering()  # so that the transforms are those of the picture
    heights = axes.transAxes.inverted().transform(
        axes.transData.transform([(end.x, end.y) for end in ends]))[:, 1]
    order = sorted(range(len(ends)), key=lambda i: heights[i])
    places = [float(heights[i]) for i in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + ROOM)
    for place, (i, end) in zip(places, enumerate(ends[j] for j in order)):
        axes.annotate(end.text, (end.x, end.y),
                      (1.05, min(place, 1 - ROOM * (len(ends) - 1 - i))), color=end.color,
                      textcoords="axes fraction", va="center", fontsize=9, annotation_clip=False,
                      arrowprops={"arrowstyle": "-", "color": end.color, "lw": 0.8, "ls": ":",
                                  "shrinkA": 0, "shrinkB": 2, "relpos": (0, 0.5)})


def _short(label: str) -> str:
    """With its beginning and its end; legends leave out what begins with _."""
    label = plain(label)
    half = LONGEST_NAME // 2
    label = label if len(label) <= LONGEST_NAME else f"{label[:half]}…{label[1 - half:]}"
    return f" {label}" if label.startswith("_") else label


def _alt(chart: _Chart, lines: List[Any]) -> str:
    """The ends of the lines, in words."""
    ends: Dict[str, List[float]] = {}
    for _, label, _, line in lines:
        ends.setdefault(label, []).append(line[-1][1])

    def form(value: float) -> str:
        return f"{value:.2%}" if "error" in chart.y else f"{value:,.0f}" if value >= 1000 else \
            f"{value:.4g}"

    def words(label: str, values: List[float]) -> str:
        if len(values) == 1:
            return f"{label} {form(values[0])}"
        return f"{label} ({len(values)} runs) {form(min(values))} to {form(max(values))}"

    return f"{chart.title}. At the end: " + "; ".join(words(*end) for end in ends.items()) + "."


def image(figure: Figure) -> Tuple[bytes, str]:
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return png.getvalue(), svg.getvalue()
