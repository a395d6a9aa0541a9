"""The files of an X-ray: a page, a table, a line for each tensor and step, pictures.

The page loads nothing from other places. Its own script draws the heat maps: a row for each tensor,
a column for each exponent, the share of numbers as darkness. Bands mark the range of the format.
"""
import csv
import json
import math
import os
from contextlib import suppress
from html import escape
from string import Template
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

from .._mxnet import np
from ..files import new_folder, replace_text
from ..formats import FLOAT16, FLOAT32, Format
from ..reports.colors import COLORS, GREY, INK
from ..reports.style import SORTING, STYLE
from .statistics import Counts
from .tensors import Tensor

_COLUMNS = ("place", "tensor", "kind", "operator", "format", "numbers", "zero", "flushed",
            "subnormal", "overflowed", "not_finite", "smallest", "largest", "bits_below",
            "bits_above", "own_snr", "snr", "inherited_snr", "without_master")
VERSION = 2  # of xray.jsonl
_LOW, _HIGH = -45, 24  # the exponents that are drawn; on the page others stand at the edges


def save(view: Any, folder: Union[str, "os.PathLike[str]"]) -> str:
    """Writes the files into a new folder: whole, or not there. Returns the path of the page."""
    folder = os.fspath(folder)
    if os.path.exists(folder):
        raise FileExistsError(f"{folder} exists: xray writes into a new folder")
    with new_folder(folder) as beside:
        replace_text(os.path.join(beside, "xray.html"), page(view))
        replace_text(os.path.join(beside, "xray.jsonl"), "".join(
            json.dumps(line, allow_nan=False) + "\n" for line in lines(view)))
        with open(os.path.join(beside, "summary.csv"), "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows({key: _cell(value) for key, value in row.items()}
                             for row in rows(view))
        with suppress(ImportError):  # matplotlib is in the extra `tools`
            _draw(view, beside)
    return os.path.join(folder, "xray.html")


def _cell(value: object) -> Any:
    if isinstance(value, str) and value[:1] in "=+-@":
        return "'" + value  # a spreadsheet would take it for a formula
    return f"{value:.6g}" if isinstance(value, float) else value


def lines(view: Any) -> Iterable[Dict[str, Any]]:
    """The lines of xray.jsonl: one of the run; one for each tensor and step; then one for each
    parameter, and one for what all steps added to it. `bins` holds pairs of an exponent and how
    many numbers have it."""
    yield {"version": VERSION, "network": view.name, "said": str(view),
           "loss_scale": view.loss_scale, "keep": view.keep, "left_out": view.left_out,
           "lost": view.lost, "findings": [vars(f) for f in view.findings],
           "first_overflow": str(view.first_overflow) if view.first_overflow else None}
    for number, (scale, counted) in enumerate(view.steps):
        for tensor in view.tensors:
            counts = counted.get(tensor.key)
            if counts is None:
                continue
            yield {"step": number, "scale": scale, "node": tensor.key.node,
                   "backward": tensor.key.backward, "index": tensor.key.which,
                   "place": tensor.place, "kind": tensor.kind, "operator": tensor.op,
                   "parameter": tensor.parameter,
                   "format": tensor.format.name, "overflowed": counts.overflowed,
                   "flushed": counts.flushed, "own_snr": _as_number(counts.own_snr),
                   **_histogram(counts)}
    for weight in view.weights:
        yield {"kind": "weight", "parameter": weight.name, "format": weight.format.name,
               **_histogram(weight.counts)}
        if weight.updates is not None:
            yield {"kind": "update", "parameter": weight.name,
                   "without_master": weight.without_master, **_histogram(weight.updates)}


def _histogram(counts: Counts) -> Dict[str, Any]:
    return {"zero": counts.zero, "infinite": counts.infinite, "nan": counts.nan,
            "bins": [[int(i) - 127, int(counts.bins[i])] for i in counts.bins.nonzero()[0]]}


def rows(view: Any) -> List[Dict[str, Any]]:
    """What table and page say of each tensor, the worst first, then of the parameters and of what
    the steps added to them."""
    made = []
    for t in view.worst():
        own = t.counts.own_snr if t.is_low else None
        made.append(_row(t.name, t.kind, t.format, t.counts, t.format if t.is_low else FLOAT16,
                         t.is_low, place=t.place, operator=t.op, own_snr=_as_number(own),
                         snr=_as_number(t.snr), inherited_snr=_as_number(view.inherited(t)),
                         bad=t.is_low and (t.counts.overflowed > 0 or own < t.low_snr)))
    for weight in view.weights:
        made.append(_row(weight.name, "weight", weight.format, weight.counts))
        if weight.updates is not None:
            made.append(_row(weight.name, "update", FLOAT32, weight.updates,
                             without_master=weight.without_master))
    return made


def _row(name: str, kind: str, format_: Format, counts: Counts, asked: Format = FLOAT16,
         own: bool = False, **others: Any) -> Dict[str, Any]:
    """A row, with the shares of numbers from the lowest exponent that is drawn to the highest."""
    low, high = counts.range or (None, None)
    below, above = counts.headroom(asked) or (None, None)
    total, lost = max(counts.numbers, 1), counts.infinite + counts.nan
    inside = counts.bins[_LOW + 127:_HIGH + 128].astype(float)
    inside[0] += counts.bins[:_LOW + 127].sum()
    inside[-1] += counts.bins[_HIGH + 128:].sum()
    return {"tensor": name, "kind": kind, "format": format_.name, "numbers": counts.numbers,
            **counts.shares(asked, own), "not_finite": lost, "smallest": low, "largest": high,
            "bits_below": below, "bits_above": above,
            "broken": (counts.overflowed + lost) / total,
            "bins": [round(share, 5) for share in (inside / total).tolist()], **others}


def _as_number(value: Optional[float]) -> Optional[float]:
    """For tables: infinities and NaN are left out."""
    return None if value is None or not math.isfinite(value) else round(value, 1)


# ---- pictures, for papers -----------------------------------------------------------------------


def _draw(view: Any, folder: str) -> None:
    """Writes forward.png and backward.png."""
    from matplotlib.figure import Figure
    for name, backward in (("forward", False), ("backward", True)):
        tensors = [t for t in view.tensors if t.key.backward == backward]
        if tensors:
            figure = Figure(figsize=(7.5, 0.8 + min(0.16 * len(tensors), 12)), layout="constrained")
            _heat(figure.add_subplot(), sorted(tensors, key=lambda t: t.place))
            figure.savefig(os.path.join(folder, f"{name}.png"), dpi=200)


def _edges(tensors: List[Tensor]) -> Tuple[int, int, int]:
    """Where a heat map's bands end: below, numbers become 0, or have fewer digits; above, they
    overflow."""
    format_ = next((t.format for t in tensors if t.is_low), FLOAT16)
    return (round(math.log2(format_.smallest)), round(math.log2(format_.smallest_normal)),
            math.floor(math.log2(format_.largest)) + 1)


def _heat(axes: Any, tensors: List[Tensor]) -> None:
    shares = np.array([t.counts.bins[_LOW + 127:_HIGH + 128] / max(t.counts.numbers, 1)
                       for t in tensors])
    count = len(tensors)
    axes.imshow(np.sqrt(shares), aspect="auto", cmap="Blues", vmin=0, vmax=0.6,
                interpolation="nearest", extent=(_LOW, _HIGH + 1, count - 0.5, -0.5))
    for edge in _edges(tensors):
        axes.axvline(edge, color=COLORS["float8"], linewidth=0.8)
    if count <= 75:
        axes.set_yticks(range(count), [t.name for t in tensors], fontsize=5.5)
        for label, tensor in zip(axes.get_yticklabels(), tensors):
            label.set_color(INK if tensor.is_low else GREY)
    else:
        axes.set_ylabel("tensors, in order of computation")
    axes.set_xlabel("exponent, base 2")


# ---- the page -----------------------------------------------------------------------------------


def page(view: Any) -> str:
    """The text of xray.html."""
    data = {
        "low": _LOW, "high": _HIGH, "edges": _edges(view.tensors), "rows": rows(view),
        "windows": [None if w is None else [step, math.log2(w.low), math.log2(w.high)]
                    for step, w in enumerate(view.windows)],
        "scales": [math.log2(scale) for scale, _ in view.steps]}
    return _PAGE.substitute(
        title=escape(f"X-ray of {view.name}"), advice=_advice(view),
        data=json.dumps(data).replace("<", "\\u003c"), style=STYLE, sorting=SORTING)


_ORDER = ("verdict", "keep", "error", "warning", "good", "note")
_TAGGED = ("error", "warning", "note")


def _advice(view: Any) -> str:
    """The result as HTML: the verdict, what to keep, then the rest by severity, which stands as a
    word, too."""
    parts = []
    for kind, about, text in sorted(view.said(), key=lambda line: _ORDER.index(line[0])):
        if kind == "keep":
            parts.append(f"<p>{escape(about)}:</p>\n<pre>{escape(text)}</pre>")
            continue
        style = f"verdict {view.severity}" if kind == "verdict" else kind
        tag = f"<span class=tag>{kind.capitalize()}</span> " if kind in _TAGGED else ""
        head = f"<b>{escape(about)}:</b> " if about else ""
        said = text if about else text[:1].upper() + text[1:].rstrip(".")
        parts.append(f'<p class="{style}">{tag}{head}{escape(said)}.</p>')
    return "\n".join(parts)


_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$style
p, li { max-width: 60rem; overflow-wrap: anywhere; }
.good, .error, .warning, .note { --mark: var(--bfloat16); border-left: 4px solid var(--mark);
                                 padding-left: 0.8rem; }
.error { --mark: var(--float8); }
.warning { --mark: var(--other); }
.note { --mark: var(--grey); }
.verdict { font-size: 1.2rem; font-weight: 600; }
.tag { border: 1px solid var(--mark); border-radius: 4px; padding: 0 0.4rem; font-size: 0.8rem;
       font-weight: 600; }
pre { background: var(--shade); padding: 0.6rem 0.8rem; white-space: pre-wrap;
      overflow-wrap: anywhere; }
.small { color: var(--grey); font-size: 0.85rem; }
canvas { width: 100%; display: block; }
.tip { max-width: 20rem; overflow-wrap: anywhere; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
th, td { padding: 0.3rem 0.45rem; }
label { font-size: 0.85rem; margin-right: 1rem; }
summary { cursor: pointer; font-weight: 600; margin: 1rem 0 0.5rem; }
input[type=search] { font: inherit; font-size: 0.9rem; padding: 0.2rem 0.5rem; margin: 0.5rem 0; }
</style>
</head>
<body>
<h1>$title</h1>
$advice
<h2>Exponents</h2>
<p class=small>Each row is a tensor, each column a power of two. A darker cell holds more of the
tensor's values. Values left of the first line become 0. Values between the first two lines are
subnormal, with fewer digits. Values right of the last line overflow. Gradients are multiplied by
the loss scale. A name in orange: the format does not suit the tensor. A name in grey: the tensor is
float32.</p>
<label><input type="radio" name="order" value="place" checked> in order of computation</label>
<label><input type="radio" name="order" value="worst"> worst first</label>
<input type=search placeholder="Filter by name" aria-label="Filter the tensors by name">
<details><summary>Forward</summary><figure><canvas id="forward"></canvas></figure></details>
<details><summary>Backward: gradients</summary>
<figure><canvas id="backward"></canvas></figure></details>
<details class=weights><summary>Weights</summary>
<figure><canvas id="weights"></canvas></figure></details>
<h2 class=fits>Loss scales that fit, by step</h2>
<p class="small fits">Below the band, a gradient loses too much of its norm. Above it, a gradient
overflows. The line is the loss scale of the step.</p>
<figure class=fits><canvas id="window"></canvas></figure>
<details><summary>Table of tensors, the worst first</summary>
<p class=small>SNR is the signal-to-noise ratio in dB: of the tensor's own rounding, against the
float32 step, and against it without the tensor's own rounding. Smallest and largest are the powers
of two below the tensor's values.</p>
<div class=wide><table><thead><tr></tr></thead><tbody></tbody></table></div></details>
<script>
"use strict";
const data = $data;
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const count = data.high - data.low + 1;
const cut = (context, text, width) => {
  if (context.measureText(text).width <= width) return text;
  while (text && context.measureText("…" + text).width > width) text = text.slice(1);
  return "…" + text;
};
const canvas = (element, height) => {
  const width = element.parentNode.clientWidth;
  const ratio = Math.min(devicePixelRatio || 1, 16000 / height);  // browsers draw no more pixels
  element.width = width * ratio; element.height = height * ratio;
  element.style.height = height + "px";
  const context = element.getContext("2d");
  context.scale(ratio, ratio); context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle"; context.clearRect(0, 0, width, height);
  return [context, width];
};
const ticks = [-40, -32, -24, -14, -8, 0, 8, 15, 24];
const search = document.querySelector("input[type=search]");
const named = row => row.tensor.toLowerCase().includes(search.value.toLowerCase());
function heat(id, rows) {
  const element = document.getElementById(id);
  if (!element.closest("details").open) return;
  rows = rows.filter(named);
  if (document.querySelector("input:checked").value === "place")
    rows.sort((a, b) => a.place - b.place);
  const each = rows.length > 60 ? 12 : 16, top = 20;
  const [context, width] = canvas(element, top + rows.length * each + 4);
  const left = each < 16 ? Math.min(250, width * 0.36) : Math.min(320, width * 0.36);
  const extra = 26, cell = (width - left - 2 * extra) / count;
  const x = exponent => left + extra + (exponent - data.low) * cell;
  const ink = style("--float32"), blue = style("--float16"), red = style("--float8");
  const grey = style("--grey");
  context.font = (each < 16 ? 10 : 12) + "px system-ui, sans-serif";
  rows.forEach((row, r) => {
    const y = top + r * each;
    context.fillStyle = row.bad ? red : row.format === "float32" ? grey : ink;
    const name = row.tensor.replace(/^gradient of /, "") + (row.kind === "update" ? ", added" : "");
    context.fillText(cut(context, name, left - 8), 0, y + each / 2);
    const draw = (at, wide, share, color) => {
      if (!share) return;
      context.globalAlpha = Math.min(1, 0.12 + 1.6 * Math.sqrt(share));
      context.fillStyle = color;
      context.fillRect(at, y + 1, wide, each - 2);
      context.globalAlpha = 1;
    };
    draw(left, extra - 5, row.zero, grey);
    row.bins.forEach((share, i) => draw(x(data.low + i), cell + 0.3, share, blue));
    draw(width - extra + 5, extra - 5, row.broken, red);
  });
  context.strokeStyle = red;
  for (const at of data.edges) {
    context.beginPath(); context.moveTo(x(at), top - 3);
    context.lineTo(x(at), top + rows.length * each); context.stroke();
  }
  context.fillStyle = grey; context.textAlign = "center";
  context.font = "11px system-ui, sans-serif";
  context.fillText("0", left + (extra - 5) / 2, 8);
  let last = -1e9;
  for (const tick of ticks) {
    const at = x(tick) + cell / 2;
    if (at - last < 44 || at > width - extra - 8) continue;
    context.fillText("2^" + tick, at, 8); last = at;
  }
  context.fillText("inf", width - (extra - 5) / 2, 8);
  context.textAlign = "left";
  const tip = document.createElement("div"); tip.className = "tip";
  element.onpointerleave = () => tip.remove();
  element.onpointermove = event => {
    const box = element.getBoundingClientRect();
    const row = rows[Math.floor((event.clientY - box.top - top) / each)];
    if (!row) return tip.remove();
    const exponent = Math.floor((event.clientX - box.left - left - extra) / cell) + data.low;
    const share = row.bins[exponent - data.low];
    const said = [`$${row.tensor} ($${row.operator || row.kind}, $${row.format})`];
    if (share !== undefined) said.push(`2^$${exponent}: $${(100 * share).toPrecision(3)} %`);
    said.push(`0: $${(100 * row.zero).toPrecision(3)} %`);
    if (row.broken) said.push(`not finite: $${(100 * row.broken).toPrecision(3)} %`);
    if (typeof row.own_snr === "number") said.push(`rounding: $${row.own_snr} dB`);
    if (typeof row.snr === "number") said.push(`against float32: $${row.snr} dB`);
    if (typeof row.without_master === "number")
      said.push(`updates lost without a master: $${(100 * row.without_master).toPrecision(3)} %`);
    tip.textContent = "";
    for (const text of said) tip.append(text, document.createElement("br"));
    element.parentNode.append(tip);
    tip.style.left = Math.max(0, Math.min(event.clientX - box.left + 12,
                                          box.width - tip.offsetWidth)) + "px";
    tip.style.top = (event.clientY - box.top + 14) + "px";
  };
}
function windows() {
  const points = data.windows.filter(Boolean), left = 40, bottom = 145, top = 10;
  if (!points.length) {
    for (const part of document.querySelectorAll(".fits")) part.hidden = true;
    return;
  }
  const [context, width] = canvas(document.getElementById("window"), 170);
  const values = points.flatMap(p => [p[1], p[2]]).concat(data.scales);
  const least = Math.floor(Math.min(...values)) - 1, most = Math.ceil(Math.max(...values)) + 1;
  const steps = Math.max(data.windows.length, 1), wide = (width - left - 8) / steps;
  const y = v => bottom - (v - least) / (most - least) * (bottom - top);
  const grey = style("--grey"), blue = style("--float16"), red = style("--float8");
  context.strokeStyle = style("--line"); context.fillStyle = grey; context.textAlign = "right";
  const stride = Math.ceil((most - least) / 7);
  for (let v = least; v <= most; v += stride) {
    context.beginPath(); context.moveTo(left, y(v)); context.lineTo(width - 8, y(v));
    context.stroke();
    context.fillText("2^" + v, left - 5, y(v));
  }
  for (const [step, low, high] of points) {
    context.globalAlpha = 0.35; context.fillStyle = low <= high ? blue : red;
    context.fillRect(left + step * wide + 1, y(Math.max(low, high)), Math.max(wide - 2, 1),
                     Math.max(2, Math.abs(y(low) - y(high))));
    context.globalAlpha = 1;
  }
  context.strokeStyle = style("--float32"); context.lineWidth = 2; context.beginPath();
  data.scales.forEach((scale, i) => {
    context.lineTo(left + i * wide, y(scale)); context.lineTo(left + (i + 1) * wide, y(scale));
  });
  context.stroke();
  context.fillStyle = grey; context.textAlign = "center";
  const every = Math.max(1, Math.ceil(steps / Math.floor((width - left) / 40)));
  for (let i = 0; i < steps; i += every) context.fillText(i, left + (i + 0.5) * wide, bottom + 12);
}
const shown = {tensor: "tensor", format: "format", zero: "is 0", flushed: "becomes 0",
  subnormal: "subnormal", overflowed: "overflows", smallest: "smallest",
  largest: "largest", own_snr: "own SNR", snr: "SNR", inherited_snr: "inherited"};
const shares = ["zero", "flushed", "subnormal", "overflowed"];
const inCell = (key, value) => shares.includes(key) ? value ? (100 * value).toFixed(2) + "%" : ""
  : ["smallest", "largest"].includes(key) && typeof value === "number" ? "2^" + value : value;
const ofKind = kind => data.rows.filter(row => kind.test(row.kind));
const add = (parent, tag, text) => {
  const element = document.createElement(tag);
  element.textContent = text; parent.append(element);
  return element;
};
for (const name of Object.values(shown))
  add(add(document.querySelector("thead tr"), "th", ""), "button", name);
for (const row of ofKind(/output|gradient/)) {
  const cells = add(document.querySelector("tbody"), "tr", "");
  search.addEventListener("input", () => { cells.hidden = !named(row); });
  for (const key of Object.keys(shown))
    add(cells, "td", inCell(key, row[key]));
}
function draw() {
  heat("forward", ofKind(/^output$$/)); heat("backward", ofKind(/gradient/));
  const weights = ofKind(/^(weight|update)$$/);
  if (weights.length) heat("weights", weights);
  else for (const part of document.querySelectorAll(".weights")) part.hidden = true;
  windows();
}
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
for (const input of document.querySelectorAll("input")) input.addEventListener("input", draw);
for (const details of document.querySelectorAll("details")) {  // what is long is folded
  const canvas = details.querySelector("canvas");
  const kind = {forward: /^output$$/, backward: /gradient/, weights: /^(weight|update)$$/};
  details.open = ofKind(canvas ? kind[canvas.id] : /output|gradient/).length <= 60;
  details.addEventListener("toggle", draw);
}
draw();
$sorting
</script>
</body>
</html>
""")
