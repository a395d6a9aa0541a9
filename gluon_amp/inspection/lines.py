"""The lines of files: of a Monitor's, and of an X-ray's xray.jsonl, which has further fields."""
import json
import math
from typing import Any, Callable, Dict, Iterator, Union

from ..formats import FORMATS
from .hooks import AfterRounding
from .tensors import Counts, Key, as_pairs

Line = Dict[str, Any]
VERSION = 3  # of xray.jsonl


def tensor_line(step: int, key: Key, tensor: str, dtype: str, scale: float,
                counts: Union[Counts, AfterRounding], before_rounding: bool = True) -> Line:
    """Returns the line of an output or a gradient of a node."""
    many = max(counts.numbers, 1)
    mean = counts.squares / max(many - counts.infinite - counts.nan, 1)
    line = {"step": step, "node": key.node, "tensor": tensor, "index": key.which,
            "kind": "gradient" if key.backward else "output", "format": dtype,
            "numbers": counts.numbers, "rms": math.sqrt(mean) if math.isfinite(mean) else None,
            "least": None, "largest": None, "zero": counts.zero / many, "underflow": None,
            "subnormal": 0.0, "overflow": counts.infinite / many, "nan": counts.nan, "bins": None}
    if isinstance(counts, AfterRounding):
        line.update(largest=counts.largest, subnormal=counts.subnormal / many)
    else:
        line["least"], line["largest"] = counts.range or (None, None)
        line["bins"] = as_pairs(counts.bins)
        if dtype in FORMATS:
            line["subnormal"] = counts.shares(FORMATS[dtype])["subnormal"]
        if before_rounding:
            line["underflow"] = counts.flushed / many
            line["overflow"] = (counts.overflowed + counts.infinite) / many
    if key.backward:
        line["loss_scale"] = scale
    return line


def xray_lines(view: Any) -> Iterator[Line]:
    """Yields the lines of xray.jsonl: the advice; each tensor of each step; then each parameter.
    `bins` has pairs of an exponent and the number of values with it."""
    yield {"version": VERSION, "network": view.name, "said": str(view),
           "loss_scale": view.loss_scale, "keep": list(map(str, view.keep)),
           "left_out": view.left_out, "findings": [vars(f) for f in view.findings],
           "first_overflow": str(view.first_overflow) if view.first_overflow else None}
    for number, (scale, counted) in enumerate(view.steps):
        for t in view.tensors:
            if t.key in counted:
                yield {**tensor_line(number, t.key, t.name, t.format.name, scale, counted[t.key]),
                       "place": t.place, "kind": t.kind, "operator": t.op, "parameter": t.parameter}
    for weight in view.weights:
        counts = weight.counts
        yield {"kind": "weight", "parameter": weight.name, "format": weight.format.name,
               "zero": counts.zero, "infinite": counts.infinite, "nan": counts.nan,
               "bins": as_pairs(counts.bins)}


def lines_in(path: str, fits: Callable[[Line], bool]) -> Iterator[Line]:
    """Yields the lines of a file, without an incomplete last one. `fits` returns whether a line
    has all it needs."""
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                line = json.loads(text)
                is_known = isinstance(line, dict) and fits(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                is_known = False
            if not is_known:
                raise ValueError(f"line {number} of {path} is no line of statistics: "
                                 f"{text[:60]!r}")
            yield line
