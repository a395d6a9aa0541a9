"""A saved X-ray, printed again or evaluated for another format."""
import glob
import json
import os
from dataclasses import replace
from typing import Any, Dict, List

from ..checks import counted
from ..files import errors_of_damage, replace_text
from ..formats import FLOAT32, Format
from .judge import Finding, said_above, said_below, window
from .render import VERSION, page
from .tensors import Counts, Key, Tensor, from_pairs
from .updates import Weight
from .view import View


def redraw(folder: str, format_: Format) -> str:
    """Writes the page xray-FORMAT.html into an X-ray's folder: the same tensors in another format.

    Tensors that were float32 stay so. Returns the page's results and its path.
    """
    path = os.path.join(folder, f"xray-{format_.name}.html")
    with errors_of_damage(folder):
        view = read(folder, format_)
        text = page(view)
    replace_text(path, text)
    return f"{view}\n{path}"


def summary(folder: str) -> str:
    """Returns the printed results of an X-ray's folder."""
    with errors_of_damage(folder):
        return str(_lines(folder)[0]["said"])


def read(folder: str, format_: Format) -> View:
    """Returns the run's View in another format, estimated from histograms.

    Rounding errors do not accumulate from tensor to tensor, and infinities do not propagate.
    """
    head, *lines = _lines(folder)
    tensors: Dict[Key, Tensor] = {}
    view = View(f"{head['network']}, as if in {format_.name}", [],
                left_out=head["left_out"])
    for line in lines:
        counts = Counts(from_pairs(line["bins"]), line["zero"], line["infinite"], line["nan"])
        if line["kind"] == "update":  # float32
            view.weights[-1].updates = counts
            continue
        given = FLOAT32 if line["format"] == FLOAT32.name else format_
        counts = counts.as_in(given)
        if line["kind"] == "weight":
            view.weights.append(Weight(line["parameter"], counts, format=given))
            continue
        key, number, scale = Key(line["node"], line["backward"], line["index"]), line["step"], \
            line["scale"]
        if number == len(view.steps):
            view.steps.append((scale, {}))
            view.numbers.append(number)
        view.steps[number][1][key] = counts
        if number not in view.left_out:
            tensors[key] = Tensor(key, line["kind"], line["operator"], line["place"], given,
                                  parameter=line.get("parameter", ""))
    view.tensors = sorted(tensors.values(), key=lambda t: t.place)
    view.scale = view.steps[0][0] if view.steps else 1.0
    view.add_up()
    judge(view, format_)
    return view


def judge(view: View, format_: Format) -> None:
    """Sets the window, the findings and the outcome from the counts of tensors and weights."""
    finite = [t for t in view.tensors if t.counts.finite]
    steps = [(scale, {key: each for key, each in counts.items() if each.finite})
             for scale, counts in view.advising]
    view.window = window(finite, steps)
    best = view.window.high / view.scale if view.window else 1.0
    weights = [Tensor(Key(w.name, False, 0), "weight", "", 0, w.format, counts=w.counts)
               for w in view.weights]
    view.findings = [f for t in [*view.worst(), *weights] for f in _findings(t, best)]
    view.outcome = f"{counted(len(view.findings), 'tensor')} of {len(finite)} " \
        f"{'does' if len(view.findings) == 1 else 'do'} not fit {format_.name}"
    if len(finite) < len(view.tensors):
        view.notes.append(f"left out: {counted(len(view.tensors) - len(finite), 'tensor')} with "
                          "infinite inputs in the run")


def _findings(tensor: Tensor, factor: float) -> List[Finding]:
    """Returns the finding of one tensor, if any. `factor` is the highest loss scale that fits over
    the run's, for gradients."""
    counts = tensor.counts
    if not tensor.is_low or not counts.finite:
        return []
    if tensor.key.backward:
        counts = replace(counts.times(factor), infinite=0, nan=0).as_in(tensor.format)
    reason, severity, detail = "range below", "warning", ""
    if tensor.is_below(counts):
        detail = f"{tensor.name} would be {said_below(counts, tensor)}"
    if not counts.stay_finite:
        reason, severity, detail = "range above", "error", said_above(counts, tensor)
    return [Finding(tensor.key.node, tensor.name, reason, detail, [],
                    severity=severity)] if detail else []


def _lines(folder: str) -> List[Dict[str, Any]]:
    path = os.path.join(folder, "xray.jsonl")
    if not os.path.exists(path):
        inside = sorted(glob.glob(os.path.join(glob.escape(folder), "*", "xray.jsonl")))
        such = f", as {os.path.dirname(inside[0])} does" if inside else ""
        raise FileNotFoundError(f"an X-ray's folder holds xray.jsonl{such}. Received: {folder}")
    with open(path, encoding="utf-8") as file:
        try:
            lines = [json.loads(line) for line in file]
            version = lines[0]["version"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f"{path} was not written by xray") from None
    if version != VERSION:
        raise ValueError(f"{path} is of version {version}; this gluon_amp reads version {VERSION}")
    return lines
