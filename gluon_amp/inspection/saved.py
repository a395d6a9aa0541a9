"""Files as pages: a Monitor's, or an X-ray's folder, in their format or in another one."""
import glob
import json
import os
import re
from collections import Counter
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from ..checks import counted
from ..files import errors_of_damage, replace_text
from ..formats import FLOAT16, FLOAT32, FORMATS, Format
from .judge import Finding, said_above, said_below, window
from .lines import VERSION, Line, lines_in
from .render import MOST_BY_STEP, page
from .tensors import Counts, Key, Tensor, from_pairs
from .view import View


def draw(path: str, format_: Optional[Format] = None) -> str:
    """Writes the page of a Monitor's file, or of an X-ray's folder, beside the file: NAME.html, or
    NAME-FORMAT.html.

    Returns the page's results and its path.
    """
    with errors_of_damage(path):
        view = read(path, format_)
        text = page(view)
    end = f"-{format_.name}.html" if format_ else ".html"
    to = re.sub(r"\.jsonl?$", "", _file(path)) + end
    replace_text(to, text)
    return f"{view}\n{to}"


def summary(folder: str) -> str:
    """Returns the printed results of an X-ray's folder."""
    with errors_of_damage(folder):
        return str(_head(folder)["said"])


def read(path: str, format_: Optional[Format] = None) -> View:
    """Returns an X-ray, or the last training in a Monitor's file, estimated from histograms.

    Rounding errors do not accumulate from tensor to tensor, and infinities do not propagate. Of a
    training, there are at most MOST_BY_STEP tensors of steps.

    Args:
        path: a Monitor's file, or an X-ray's folder.
        format_: the format of the tensors that are not float32, or of all if all are float32. None:
            that of the run; float16 if all tensors are float32.
    """
    head, file = _head(path), _file(path)
    begin, sizes, trainings = _last_training(file)
    stride = 1 if head else -(-sum(sizes.values()) // MOST_BY_STEP)
    scales = dict.fromkeys([*sizes][::stride], 1.0)
    counts: Dict[int, Dict[Key, Counts]] = {step: {} for step in scales}
    lines: Dict[Key, Line] = {}  # the last one of each tensor
    for at, line in enumerate(_tensor_lines(file)):
        step, key = line["step"], _key(line)
        if at >= begin and step in scales:
            counts[step][key] = _counts(line)
            scales[step] = line.get("loss_scale", scales[step])
            if step not in head.get("left_out", ()):
                lines[key] = line
    formats = {key: _format(line) for key, line in lines.items()}
    low = [each for each in formats.values() if each != FLOAT32]
    judged = format_ or (low[0] if low else FLOAT16)
    if format_ or not low:
        formats = {key: judged if each != FLOAT32 or not low else each
                   for key, each in formats.items()}
        counts = {step: {key: each.as_in(formats.get(key, judged)) for key, each in some.items()}
                  for step, some in counts.items()}
    numbers = [*scales]
    name = head.get("network") or f"{os.path.basename(path)}, steps {numbers[0]} to {numbers[-1]}"
    as_if = f", as if in {judged.name}" if format_ or not low else ""
    view = View(name + as_if, _tensors(lines, formats), numbers=numbers,
                steps=[(scales[step], counts[step]) for step in numbers], scale=scales[numbers[0]],
                left_out=head.get("left_out", []), weights=_weights(file, judged) if head else [])
    if trainings > 1:
        view.notes.append(f"the file has {trainings} trainings, and this is the last one")
    if stride > 1:
        view.notes.append(f"the page has one of every {stride} steps of the file")
    _note_steps_that_are_not_finite(view)
    _judge(view, judged)
    return view


def _tensors(lines: Dict[Key, Line], formats: Dict[Key, Format]) -> List[Tensor]:
    """Returns the tensors in order of computation. In a Monitor's file, a gradient has the name of
    what it is the gradient of, unless several operators read that."""
    order = sorted(lines, key=lambda key: lines[key].get("place", key.backward))
    readers = Counter(lines[key]["tensor"] for key in lines if key.backward)

    def parameter(line: Line) -> str:
        return line.get("parameter", line["tensor"] if readers[line["tensor"]] == 1 else "")
    return [Tensor(key, lines[key]["kind"], lines[key].get("operator", ""), place, formats[key],
                   parameter=parameter(lines[key])) for place, key in enumerate(order)]


def _weights(file: str, format_: Format) -> List[Tensor]:
    weights = []
    for line in lines_in(file, _fits):
        if line.get("kind") == "weight":
            format_of_weight = FLOAT32 if _format(line) == FLOAT32 else format_
            counts = Counts(from_pairs(line["bins"]), line["zero"], line["infinite"], line["nan"])
            weights.append(Tensor(Key(line["parameter"], False, 0), "weight", "", 0,
                                  format_of_weight, counts=counts.as_in(format_of_weight)))
    return weights


def _note_steps_that_are_not_finite(view: View) -> None:
    """Adds a note about overflow: the first step with it, and the first tensor there."""
    tensors = [(view.numbers[i], tensor.name) for i, (_, counts) in enumerate(view.steps)
               if i not in view.left_out for tensor in view.tensors
               if tensor.key in counts and not counts[tensor.key].stay_finite]
    if tensors:
        (step, name), many = tensors[0], len(dict(tensors))
        view.notes.append(f"{many} of {len(view.steps)} steps {'is' if many == 1 else 'are'} not "
                          f"finite. The first is step {step}, from {name} on")


# ---- findings -----------------------------------------------------------------------------------


def _judge(view: View, format_: Format) -> None:
    """Sets the tensors' counts, the window, the findings and the outcome.

    Counts are of steps in which a tensor was finite before rounding, if there are any. An overflow
    elsewhere would hide the others.
    """
    view.add_up()
    finite = replace(view, steps=[
        (scale, {key: each for key, each in counts.items() if each.finite})
        for scale, counts in view.steps])
    sound = {key for _, counts in finite.steps for key in counts}
    finite.tensors = [t for t in view.tensors if t.key in sound]
    finite.add_up()
    finite.tensors = [t for t in view.tensors if t.counts.finite]
    view.window = window(finite.tensors, finite.advising)
    best = view.window.high / view.scale if view.window else 1.0
    view.findings = [f for t in [*view.worst(), *view.weights] for f in _findings(t, best)]
    view.outcome = f"{counted(len(view.findings), 'tensor')} of {len(finite.tensors)} " \
        f"{'does' if len(view.findings) == 1 else 'do'} not fit {format_.name}"
    lost = len(view.tensors) - len(finite.tensors)
    if lost:
        view.notes.append(f"left out: {counted(lost, 'tensor')} with infinite inputs in the run")


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


# ---- files --------------------------------------------------------------------------------------


def _file(path: str) -> str:
    return os.path.join(path, "xray.jsonl") if os.path.isdir(path) else path


def _head(path: str) -> Dict[str, Any]:
    """Returns the first line of an X-ray's file; of a Monitor's, which has none, an empty one."""
    file = _file(path)
    if file == path:
        return {}
    if not os.path.exists(file):
        inside = sorted(glob.glob(os.path.join(glob.escape(path), "*", "xray.jsonl")))
        such = f", as {os.path.dirname(inside[0])} does" if inside else ""
        raise FileNotFoundError(f"an X-ray's folder holds xray.jsonl{such}. Received: {path}")
    with open(file, encoding="utf-8") as opened:
        try:
            head: Dict[str, Any] = json.loads(opened.readline())
            version = head["version"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file} was not written by xray") from None
    if version != VERSION:
        raise ValueError(f"{file} is of version {version}; this gluon_amp reads version {VERSION}")
    return head


def _last_training(path: str) -> Tuple[int, Dict[int, int], int]:
    """Returns the index of the first line of the last training, the number of lines of each of its
    steps, and the number of trainings."""
    begin, trainings, last = 0, 0, -1
    sizes: Dict[int, int] = {}
    seen: Set[Key] = set()
    for at, line in enumerate(_tensor_lines(path)):
        step, key = line["step"], _key(line)
        if step < last or step == last and key in seen or not trainings:
            begin, trainings, sizes = at, trainings + 1, {}
        if step != last or not sizes:
            seen = set()
        seen.add(key)
        sizes[step] = sizes.get(step, 0) + 1
        last = step
    if not sizes:
        raise ValueError(f"{path} has no statistics yet: a Monitor writes them in every step of "
                         "its interval")
    return begin, sizes, trainings


_NEEDED = {"step", "node", "tensor", "index", "kind", "format", "numbers", "zero", "underflow",
           "overflow", "nan", "bins"}


def _fits(line: Line) -> bool:
    """Whether a line is that of a tensor or of a parameter, or the first one of an X-ray."""
    return "version" in line or line["kind"] == "weight" \
        or line.keys() >= _NEEDED and line["index"] >= 0


def _tensor_lines(path: str) -> Iterator[Line]:
    """Yields the lines of tensors."""
    for line in lines_in(path, _fits):
        if "version" in line or line["kind"] == "weight":
            continue
        if line["bins"] is None:
            raise ValueError("the page needs histograms, which a Monitor writes on CPUs only. "
                             f"Received: {path}, of a GPU")
        yield line


def _key(line: Line) -> Key:
    return Key(line["node"], line["kind"] != "output", line["index"])


def _format(line: Line) -> Format:
    return FORMATS.get(line["format"], FLOAT32)


def _counts(line: Line) -> Counts:
    """Returns the counts of a tensor in a step."""
    bins, many, nan = from_pairs(line["bins"]), line["numbers"], line["nan"]
    zero = round(line["zero"] * many)
    infinite = many - nan - zero - int(bins.sum())
    counts = Counts(bins, zero, infinite, nan).as_in(_format(line))
    return replace(counts, overflowed=round(line["overflow"] * many) - infinite,
                   flushed=round((line["underflow"] or 0) * many))
