"""The page of an X-ray."""
import json
import math
import re
from html import escape
from typing import Any, Dict, List, Optional, Tuple
from urllib.parse import quote

from ..formats import FLOAT16, FLOAT32, FORMATS, Format
from ..reports.page import page as page_of
from ..reports.page import part, table
from .tensors import Counts

# the columns of the page's table, and how it shows their values
_SHOWN = {"tensor": ("tensor", "{}"), "format": ("format", "{}"), "zero": ("is 0", "{:.2%}"),
          "flushed": ("becomes 0", "{:.2%}"), "subnormal": ("subnormal", "{:.2%}"),
          "overflowed": ("overflows", "{:.2%}"), "smallest": ("smallest", "2^{}"),
          "largest": ("largest", "2^{}"), "own_snr": ("own SNR", "{}"), "snr": ("SNR", "{}"),
          "inherited_snr": ("inherited", "{}")}
_LOW, _HIGH = -45, 24  # the exponents that are drawn; on the page others are at the edges
MOST_BY_STEP = 4000  # tensors of single steps on a page; further steps are left out evenly


def rows(view: Any) -> List[Dict[str, Any]]:
    """Returns the rows of the page: the tensors, the worst first; then the parameters."""
    rows = []
    for t in view.worst():
        own_snr = t.counts.own_snr if t.is_low else None
        rows.append(_row(t.name, t.kind, t.format, t.counts, t.format if t.is_low else FLOAT16,
                         t.is_low, node=t.key.node, place=t.place, operator=t.op,
                         own_snr=_as_number(own_snr), snr=_as_number(t.snr),
                         inherited_snr=_as_number(view.inherited(t)),
                         bad=t.is_low and (t.counts.overflowed > 0 or own_snr < t.low_snr)))
    return rows + [_row(weight.name, "weight", weight.format, weight.counts, node=weight.name)
                   for weight in view.weights]


def _row(name: str, kind: str, format_: Format, counts: Counts, judged_in: Format = FLOAT16,
         rounded: bool = False, **others: Any) -> Dict[str, Any]:
    """Returns a row. Its bins are shares, from the lowest drawn exponent to the highest."""
    low, high = counts.range or (None, None)
    return {"tensor": name, "kind": kind, "format": format_.name, "numbers": counts.numbers,
            **counts.shares(judged_in, rounded), "smallest": low, "largest": high,
            **_shares(counts), **others}


def _shares(counts: Counts) -> Dict[str, Any]:
    """Returns what a heat map draws: shares of the values by exponent, and of those that are not
    finite before ("infinite") and after rounding ("broken")."""
    total, lost = max(counts.numbers, 1), counts.infinite + counts.nan
    inside = counts.bins[_LOW + 127:_HIGH + 128].astype(float)
    inside[0] += counts.bins[:_LOW + 127].sum()
    inside[-1] += counts.bins[_HIGH + 128:].sum()
    return {"infinite": lost / total, "broken": (counts.overflowed + lost) / total,
            "bins": [round(share, 5) for share in (inside / total).tolist()]}


def _as_number(value: Optional[float]) -> Optional[float]:
    """Returns a rounded number for tables; None for infinities and NaN."""
    return None if value is None or not math.isfinite(value) else round(value, 1)


# ---- the page -----------------------------------------------------------------------------------


def _edges(format_: Format) -> Tuple[int, int, int]:
    """Returns the ends of a heat map's bands: below the first, numbers become 0; below the second,
    they have fewer digits; above the third, they overflow."""
    return (round(math.log2(format_.smallest)), round(math.log2(format_.smallest_normal)),
            format_.last_exponent + 1)


TAGGED = ("error", "warning", "note")  # kinds of lines that start with a word
_ORDER = ("verdict", "keep", "error", "warning", "good", "note")
_NAMES = re.compile(r"(?:gradient of )?\w+(?:\.\w+)*(?: input \d+|\[\d+\])?")  # of tensors


def page(view: Any) -> str:
    """Returns the text of xray.html. Its script draws the heat maps: a row for each tensor, a
    column for each exponent, the share of values as darkness, lines at the ends of the format."""
    every, numbers = rows(view), _steps_on_page(view)
    format_ = next((t.format for t in view.tensors if t.is_low), FLOAT16)
    data = {
        "low": _LOW, "high": _HIGH, "format": format_.name,
        "edges": {each.name: _edges(each) for each in (format_, *FORMATS.values())
                  if each != FLOAT32},
        "numbers": numbers,
        "states": [_state(view, every, numbers),
                   *([_state(view.after, rows(view.after), numbers)] if view.after else [])]}
    shown = [{title: _shown(row.get(key), form) for key, (title, form) in _SHOWN.items()}
             for row in every if row["kind"] != "weight"]
    body = part("xray.html", __package__).replace(
        "$table", table(shown, ("tensor", "format"), len(shown), "tensors"))
    script = "const data = " + json.dumps(data).replace("<", "\\u003c") + ";\n"
    return page_of(f"X-ray of {view.name}", f"{_advice(view)}\n{body}",
                   script + part("xray.js", __package__))


def _steps_on_page(view: Any) -> List[int]:
    """Returns the numbers of the steps that the page shows one by one, evenly spaced."""
    if len(view.steps) < 2:
        return []
    stride = -(-len(view.steps) * max(len(view.tensors), 1) // MOST_BY_STEP)
    return [*view.numbers[::stride]]


def _state(view: Any, every: List[Dict[str, Any]], numbers: List[int]) -> Dict[str, Any]:
    """Returns what the page shows of a View, which may be the one with `keep`, in these steps."""
    order = sorted(range(len(view.steps)), key=view.numbers.__getitem__)
    windows, counted = view.windows, {view.numbers[i]: view.steps[i][1] for i in order}
    return {"rows": every,
            "steps": {number: {t.name: _compact(counted[number][t.key]) for t in view.tensors
                               if t.key in counted[number]}
                      for number in numbers if number in counted},
            "numbers": [view.numbers[i] for i in order],
            "windows": [windows[i] and [math.log2(windows[i].low), math.log2(windows[i].high)]
                        for i in order],
            "scales": [math.log2(view.steps[i][0]) for i in order]}


def _compact(counts: Counts) -> List[Any]:
    """Returns the shares of a tensor in one step: [of 0, infinite, broken, first exponent, bins].
    """
    shares = _shares(counts)
    bins = shares["bins"]
    inside = [i for i, share in enumerate(bins) if share] or [0]
    return [round(counts.zero / max(counts.numbers, 1), 5), round(shares["infinite"], 5),
            round(shares["broken"], 5), inside[0], bins[inside[0]:inside[-1] + 1]]


def _shown(value: object, form: str) -> str:
    return "" if value is None or value == 0 and "%" in form else form.format(value)


def _advice(view: Any) -> str:
    """Returns the result as HTML: the verdict, what to keep, then the rest by severity, which is a
    word, too. Names of tensors are links to them."""
    names = {tensor.name for tensor in view.tensors}

    def linked(text: str) -> str:
        return _NAMES.sub(lambda match: f'<a href="#{quote(match[0])}">{match[0]}</a>'
                          if match[0] in names else match[0], escape(text))

    parts = []
    for kind, about, line in sorted(view.messages(), key=lambda each: _ORDER.index(each[0])):
        if kind == "keep":
            parts.append(f"<p>{escape(about)}:</p>\n<div class=code><pre>{escape(line)}</pre>"
                         "<button class=copy>Copy</button></div>")
            continue
        style = f"verdict {view.severity}" if kind == "verdict" else kind
        tag = f"<span class=tag>{kind.capitalize()}</span> " if kind in TAGGED else ""
        head = f"<b>{linked(about)}:</b> " if about else ""
        shown = line if about else line[:1].upper() + line[1:].rstrip(".")
        parts.append(f'<p class="{style}">{tag}{head}{linked(shown)}.</p>')
    return "\n".join(parts)
