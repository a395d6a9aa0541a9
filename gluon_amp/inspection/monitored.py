"""The page of a Monitor's file: the tensors of a training, step by step."""
import os
import re
from collections import Counter
from dataclasses import replace
from typing import Dict, Iterator, List, Mapping, Optional, Set, Tuple

from ..files import errors_of_damage, replace_text
from ..formats import FLOAT16, FLOAT32, FORMATS, Format
from .lines import Line, lines_in
from .render import MOST_BY_STEP, page
from .saved import judge
from .tensors import Counts, Key, Tensor, from_pairs
from .view import View


def draw(path: str, format_: Optional[Format] = None) -> str:
    """Writes the page of a Monitor's file beside it: NAME.html, or NAME-FORMAT.html.

    Returns the page's results and its path.
    """
    with errors_of_damage(path):
        view = read(path, format_)
        text = page(view)
    end = f"-{format_.name}.html" if format_ else ".html"
    to = re.sub(r"\.jsonl?$", "", path) + end
    replace_text(to, text)
    return f"{view}\n{to}"


def read(path: str, format_: Optional[Format] = None) -> View:
    """Returns the last training in a Monitor's file, with at most MOST_BY_STEP tensors of steps.

    Args:
        path: a file of statistics.
        format_: the format of the tensors that are not float32, or of all if all are float32. None:
            the training's format; float16 if all tensors are float32.
    """
    begin, sizes, trainings = _last_training(path)
    stride = -(-sum(sizes.values()) // MOST_BY_STEP)
    scales = dict.fromkeys([*sizes][::stride], 1.0)
    counts: Dict[int, Dict[Key, Counts]] = {step: {} for step in scales}
    lines: Dict[Key, Line] = {}  # the last one of each tensor
    for at, line in enumerate(_lines(path)):
        if at >= begin and line["step"] in scales:
            lines[_key(line)] = line
            counts[line["step"]][_key(line)] = _counts(line)
            scales[line["step"]] = line.get("loss_scale", scales[line["step"]])
    formats = {key: _format(line) for key, line in lines.items()}
    low = [each for each in formats.values() if each != FLOAT32]
    judged = format_ or (low[0] if low else FLOAT16)
    if format_ or not low:
        formats = {key: judged if each != FLOAT32 or not low else each
                   for key, each in formats.items()}
        counts = {step: {key: each.as_in(formats[key]) for key, each in measured.items()}
                  for step, measured in counts.items()}
    numbers = [*scales]
    as_if = f", as if in {judged.name}" if format_ or not low else ""
    view = View(f"{os.path.basename(path)}, steps {numbers[0]} to {numbers[-1]}{as_if}",
                _tensors(lines, formats), numbers=numbers,
                steps=[(scales[step], counts[step]) for step in numbers], scale=scales[numbers[0]])
    if trainings > 1:
        view.notes.append(f"the file has {trainings} trainings, and this is the last one")
    if stride > 1:
        view.notes.append(f"the page has one of every {stride} steps of the file")
    _note_steps_that_are_not_finite(view)
    _add_up(view)
    judge(view, judged)
    return view


def _tensors(lines: Dict[Key, Line], formats: Dict[Key, Format]) -> List[Tensor]:
    """Returns the tensors in order of computation. A gradient has the name of what it is the
    gradient of, unless several operators read that."""
    order = sorted(lines, key=lambda key: key.backward)
    readers = Counter(lines[key]["tensor"] for key in lines if key.backward)
    return [Tensor(key, lines[key]["kind"], "", place, formats[key],
                   parameter=lines[key]["tensor"] if readers[lines[key]["tensor"]] == 1 else "")
            for place, key in enumerate(order)]


def _note_steps_that_are_not_finite(view: View) -> None:
    """Adds a note about overflow: the first step with it, and the first tensor there."""
    tensors = [(number, tensor.name) for number, (_, counts) in zip(view.numbers, view.steps)
             for tensor in view.tensors
             if tensor.key in counts and not counts[tensor.key].stay_finite]
    if tensors:
        (step, name), many = tensors[0], len(dict(tensors))
        view.notes.append(f"{many} of {len(view.steps)} steps {'is' if many == 1 else 'are'} not "
                          f"finite. The first is step {step}, from {name} on")


def _add_up(view: View) -> None:
    """Sums the counts of each tensor: of steps in which its values were finite before rounding, if
    there are any. An overflow elsewhere would hide the others."""
    view.add_up()
    steps: List[Tuple[float, Mapping[Key, Counts]]] = [
        (scale, {key: each for key, each in counts.items() if each.finite})
        for scale, counts in view.steps]
    sound = {key for _, counts in steps for key in counts}
    replace(view, steps=steps, tensors=[t for t in view.tensors if t.key in sound]).add_up()


# ---- lines --------------------------------------------------------------------------------------


def _last_training(path: str) -> Tuple[int, Dict[int, int], int]:
    """Returns the index of the first line of the last training, the number of lines of each of its
    steps, and the number of trainings."""
    begin, trainings, last = 0, 0, -1
    sizes: Dict[int, int] = {}
    seen: Set[Key] = set()
    for at, line in enumerate(_lines(path)):
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


def _lines(path: str) -> Iterator[Line]:
    """Yields the lines of a file of statistics."""
    for line in lines_in(path, lambda line: line.keys() >= _NEEDED and line["index"] >= 0):
        if line["bins"] is None:
            raise ValueError("the page needs histograms, which a Monitor writes on CPUs only. "
                             f"Received: {path}, of a GPU")
        yield line


def _key(line: Line) -> Key:
    return Key(line["node"], line["kind"] == "gradient", line["index"])


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
