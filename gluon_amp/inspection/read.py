"""Reads an X-ray's folder, as it was or as another format would have made it."""
import glob
import json
import os
from dataclasses import replace
from typing import Any, Dict, List, Optional

from .._mxnet import np
from ..files import replace_text
from ..formats import FLOAT16, FLOAT32, FORMATS, Format
from .advice import Finding, as_power, scales_that_fit, window
from .overflow import is_finite
from .page import page
from .statistics import Counts, Key
from .tensors import Tensor
from .updates import Weight
from .view import View


def redraw(folder: str, format_: Format) -> str:
    """Writes the page xray-FORMAT.html into an X-ray's folder: what the format would have done to
    the same numbers, where they were of less than float32. Returns what it says, and its path."""
    view = read(folder, format_)
    path = os.path.join(folder, f"xray-{format_.name}.html")
    replace_text(path, page(view))
    return f"{view}\n{path}"


def summary(folder: str) -> str:
    """What an X-ray said."""
    head = _lines(folder)[0]
    said = [f"First overflow: {head['first_overflow']}"] if head["first_overflow"] else []
    if head["loss_scale"]:
        low, high = head["loss_scale"]
        said.append(f"{scales_that_fit(low, high)}: from {as_power(low)} to {as_power(high)}")
    said += [f"{f['node']}: {f['reason']}: {f['detail']}" for f in head["findings"][:10]]
    if head["keep"]:
        said.append(f"To keep in float32: keep={head['keep']!r}")
    elif head["loss_scale"] or not head["first_overflow"]:
        said.append("Nothing needs to stay in float32 beyond what does.")
    return "\n".join(said)


def read(folder: str, format_: Format) -> View:
    """The run as it would have been in a format, as far as histograms tell: rounding errors do
    not add up from tensor to tensor, and nothing follows from an infinity."""
    head, *lines = _lines(folder)
    tensors: Dict[Key, Tensor] = {}
    view = View(f"{head['network']}, as if in {format_.name}", [],
                left_out=head.get("left_out", []), lost=head.get("lost", 0.01))
    for line in lines:
        if line["kind"] in ("weight", "update"):
            _read_weight(view.weights, line, format_)
            continue
        key = Key(line["node"], line["backward"], line["index"])
        was = FORMATS.get(line["format"], FLOAT16)
        given = format_ if was != FLOAT32 else FLOAT32
        counts = _counts(line).as_in(given)
        if line["step"] == len(view.steps):
            view.steps.append((line["scale"], {}))
        view.steps[line["step"]][1][key] = counts
        if line["step"] in view.left_out:
            continue
        tensor = tensors.setdefault(key, Tensor(key, line["kind"], line["operator"],
                                                line["place"], given))
        factor = view.steps[0][0] / line["scale"] if key.backward else 1.0
        added = counts.times(factor)
        tensor.counts = added if tensor.counts is None else tensor.counts + added
    view.tensors = sorted(tensors.values(), key=lambda t: t.place)
    view.scale = view.steps[0][0] if view.steps else 1.0
    view.window = window([t for t in view.tensors if t.counts and t.counts.finite], view.scale,
                         view.lost)
    best = view.window.high / view.scale if view.window else 1.0
    view.findings = [f for t in view.worst() for f in _findings(t, best)]
    view.findings += [f for w in view.weights for f in _findings(Tensor(
        Key(w.name, False, 0), "weight", "", 0, w.format, counts=w.counts), best)]
    unknown = sum(t.counts is not None and not t.counts.finite for t in view.tensors)
    if unknown:
        view.notes.append(f"of {unknown} tensors nothing is known: they read infinities that the "
                          "run itself made")
    return view


def _read_weight(weights: List[Weight], line: Dict[str, Any], format_: Format) -> None:
    """A parameter as it would have been in a format; or its updates, which are of float32."""
    if line["kind"] == "update":
        weights[-1].updates = _counts(line)
        return
    given = FLOAT32 if line["format"] == FLOAT32.name else format_
    weights.append(Weight(line["parameter"], _counts(line).as_in(given), format=given))


def _findings(tensor: Tensor, factor: float) -> List[Finding]:
    """Of one tensor alone; of a gradient at the highest loss scale that fits, which is so many
    times the run's."""
    counts = tensor.counts
    if counts is None or not tensor.is_low or not counts.finite:
        return []
    if tensor.key.backward:
        counts = replace(counts.times(factor), infinite=0, nan=0).as_in(tensor.format)
    shares = counts.shares(tensor.format)
    if not is_finite(counts):
        reason, detail = "range above", f"{shares['overflowed']:.2%} of {tensor.name} lies " \
                                        f"beyond {tensor.format.largest:g}"
    elif counts.squares and counts.own_snr < tensor.low_snr:
        reason, detail = "range below", f"{tensor.name} would be rounded to " \
                         f"{counts.own_snr:.0f} dB: {shares['flushed']:.1%} becomes 0, " \
                         f"{shares['subnormal']:.1%} subnormal"
    else:
        return []
    return [Finding(tensor.key.node, tensor.name, reason, detail, [])]


def _counts(line: Dict[str, Any]) -> Counts:
    bins = np.zeros(256, np.int64)
    for exponent, count in line["bins"]:
        bins[exponent + 127] = count
    return Counts(bins, line["zero"], line["infinite"], line["nan"])


def _lines(folder: str) -> List[Dict[str, Any]]:
    path = os.path.join(folder, "xray.jsonl")
    if not os.path.exists(path):
        inside = sorted(glob.glob(os.path.join(glob.escape(folder), "*", "xray.jsonl")))
        such = f", as {os.path.dirname(inside[0])} does" if inside else ""
        raise FileNotFoundError(f"an X-ray's folder holds xray.jsonl{such}. Received: {folder}")
    with open(path, encoding="utf-8") as file:
        try:
            found = [json.loads(line) for line in file]
            known: Optional[int] = found[0]["version"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f"{path} is no file that xray has written") from None
    if known != 1:
        raise ValueError(f"{path} is of version {known}; this gluon_amp reads version 1")
    return found
