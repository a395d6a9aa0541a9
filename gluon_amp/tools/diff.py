"""`gluon-amp diff`: the first tensor in which two recordings of `Monitor` differ beyond rounding.

The difference of two tensors is the norm of the difference of their sketches, beyond the smallest
number of the coarser format, relative to the larger norm. A gradient that sums terms which cancel,
as that of a bias before a batch norm, is compared relative to the terms. Rounding explains
`ROUNDINGS` units of the coarser format, times the root of the number of tensors computed before,
and at most `MOST`.
"""
import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, NamedTuple, Optional, Set

from .._mxnet import np
from ..checks import aligned, counted, listed
from ..formats import FORMATS, Format
from ..inspection.lines import Line, recording

ROUNDINGS = 32  # units in the last place
MOST = 0.5
GREW = 4  # a difference of inputs that is smaller by less explains that of a result
SHOWN = 6  # tensors that precede the difference


class Name(NamedTuple):
    """A tensor of a step."""
    kind: str  # data, parameter, output or gradient
    node: str  # its place in the network
    tensor: str  # of a gradient, the place of what it belongs to


def _told(line: Line) -> str:
    """Names the tensor of a line."""
    if line["kind"] in ("data", "parameter"):
        return f"{line['kind']} {line['node']}"
    of = "gradient of " if line["kind"] == "gradient" else ""
    return f"{line['node']}, {of}{line['tensor']}"


@dataclass
class Recording:
    """A file of `Monitor(record="checksums")`.

    Attributes:
        head: its first line.
        steps: the tensors of each step, in the order of computation.
        cut: whether its last line is incomplete, as after a killed process.
    """
    head: Line
    steps: Dict[int, Dict[Name, Line]]
    cut: bool = False

    @property
    def coarsest(self) -> str:
        """The name of its coarsest format."""
        formats = {line["format"] for lines in self.steps.values() for line in lines.values()}
        return min([*self.head["formats"], *formats], key=lambda name: FORMATS[name].fraction)


@dataclass
class Compared:
    """A tensor in both recordings.

    Attributes:
        difference: relative to the larger norm; infinite if shapes or the numbers of values that
            are not finite differ.
        rounding: the difference that rounding explains; infinite for a parameter whose gradients
            cancel.
        a, b: the statistics.
    """
    name: Name
    step: int
    difference: float
    rounding: float
    a: Line
    b: Line

    def __str__(self) -> str:
        return _told(self.a)

    @property
    def parts(self) -> bool:
        return self.difference > self.rounding


@dataclass
class Difference:
    """The result of a comparison.

    Attributes:
        steps: the steps in both recordings; only_in_a and only_in_b those in one.
        tensors: the number of compared tensors.
        missing: tensors, without casts, of a compared step that one recording lacks.
        inexact: the first tensor that differs in a bit.
        parted: the first tensor that differs beyond rounding.
        before: what this tensor was computed from, the largest differences first.
        largest: the largest difference of the last compared step within rounding.
    """
    a: Line
    b: Line
    steps: List[int]
    only_in_a: List[int]
    only_in_b: List[int]
    tensors: int = 0
    missing: List[str] = field(default_factory=list)
    inexact: Optional[Compared] = None
    parted: Optional[Compared] = None
    before: List[Compared] = field(default_factory=list)
    largest: Optional[Compared] = None
    cut: List[str] = field(default_factory=list)


# ---- files --------------------------------------------------------------------------------------


def read(path: str) -> Recording:
    """Reads a recording."""
    first, lines = recording(
        path, "checksums", lambda line: line.keys() >= _NEEDED and line["format"] in FORMATS)
    steps: Dict[int, List[Line]] = {}
    for line in lines:
        steps.setdefault(line["step"], []).append(line)
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        is_cut = file.read() != b"\n"
    return Recording(first, {step: _named(some) for step, some in steps.items()}, is_cut)


def _named(lines: List[Line]) -> Dict[Name, Line]:
    """Returns the lines of a step by the places of their nodes."""
    place = {line["node"]: line["place"] for line in lines}
    named: Dict[Name, Line] = {}
    for line in lines:
        line["inputs"] = [place.get(name, name) for name in line.get("inputs", ())]
        name = Name(line["kind"], line["place"], place.get(line["tensor"], line["tensor"]))
        while name in named:  # an operator that reads a tensor twice has two gradients
            name = name._replace(tensor=f"{name.tensor} again")
        named[name] = line
    return named


_NEEDED = {"step", "node", "place", "tensor", "kind", "format", "numbers", "rms", "nan",
           "overflow", "checksum", "sketch"}


# ---- comparison ---------------------------------------------------------------------------------


def compare(path_a: str, path_b: str, tolerance: Optional[float] = None) -> Difference:
    """Compares two recordings.

    Args:
        tolerance: the relative difference that counts as rounding; None: by format and place.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a finite number >= 0. Received: {tolerance}")
    a, b = read(path_a), read(path_b)
    both = sorted(a.steps.keys() & b.steps.keys())
    made = Difference(a.head, b.head, both, sorted(a.steps.keys() - b.steps.keys()),
                      sorted(b.steps.keys() - a.steps.keys()),
                      cut=[path for path, of in ((path_a, a), (path_b, b)) if of.cut])
    if not both:
        raise ValueError(f"the recordings share no step. Received: {path_a} with "
                         f"{_described(a)}, {path_b} with {_described(b)}")
    _Comparison(a, b, made, tolerance).run()
    if not made.tensors:
        raise ValueError("the recordings share no tensor: the networks differ, or their nodes have "
                         f"other names. Received: {listed(made.missing)}")
    return made


def _described(recording: Recording) -> str:
    return f"steps {listed([str(step) for step in recording.steps])}" if recording.steps else \
        "no steps"


class _Comparison:
    """The comparison of two recordings, tensor by tensor."""

    def __init__(self, a: Recording, b: Recording, result: Difference,
                 tolerance: Optional[float]) -> None:
        self.a, self.b, self.result, self.tolerance = a, b, result, tolerance
        self.format = FORMATS[min((a.coarsest, b.coarsest), key=lambda n: FORMATS[n].fraction)]
        self.cancelled: Set[str] = set()  # parameters whose gradients cancel
        self.now: Dict[Name, Compared] = {}  # the tensors of a step
        self.last: Dict[Name, Compared] = {}  # those of the step before
        self.gradients: Dict[str, List[Compared]] = {}  # of a step, by what they belong to
        self.nodes: Dict[str, List[Compared]] = {}  # outputs and variables of a step, by node

    def run(self) -> None:
        for step in self.result.steps:
            self.last, self.now, self.gradients, self.nodes = self.now, {}, {}, {}
            self._step(step)
            if self.result.parted:
                self.result.before = sorted(self._before(self.result.parted),
                                            key=lambda c: -c.difference)
                return
        known = [one for one in self.now.values() if math.isfinite(one.rounding)]
        self.result.largest = max(known, key=lambda one: one.difference) if known else None

    def _step(self, step: int) -> None:
        a, b = self.a.steps[step], self.b.steps[step]
        self.result.missing += [f"step {step}: {_told(line)}"
                                for lines, other in ((a, b), (b, a)) for name, line in lines.items()
                                if name not in other and "amp_cast" not in name.node]
        for name in (name for name in a if name in b):
            self.result.tensors += 1
            one = self._compared(step, name, a[name], b[name])
            self.now[name] = one
            if name.kind == "gradient":
                self.gradients.setdefault(name.tensor, []).append(one)
            else:
                self.nodes.setdefault(name.node, []).append(one)
            if one.difference and self.result.inexact is None:
                self.result.inexact = one
            if one.parts and self.result.parted is None:
                self.result.parted = one

    def _compared(self, step: int, name: Name, a: Line, b: Line) -> Compared:
        rounding = self.tolerance
        if name.kind == "parameter" and name.node in self.cancelled:
            rounding = math.inf
        elif rounding is None:
            rounding = min(MOST, 2.0 ** -(1 + self.format.fraction) * ROUNDINGS
                           * math.sqrt(self.result.tensors))
        norm = max(_norm(a), _norm(b))
        summed = self._summed(name) if name.kind == "gradient" else 0.0
        size = difference(a, b, self.format)
        if size and norm < summed and rounding * norm < size:
            self.cancelled.add(name.tensor)
        relative = size / max(norm, summed) if size and math.isfinite(size) else size
        return Compared(name, step, relative, rounding, a, b)

    def _summed(self, name: Name) -> float:
        """Returns the norm that a gradient has if the terms that it sums do not cancel: that of the
        output's gradient, times the operator's inputs if they are smaller than 1."""
        inputs = [one for one in self._inputs(name) if one.name.kind != "parameter"]
        size = min([1.0, *(_rms(one.a) for one in inputs)])
        return max((size * _norm(one.a) for one in self.gradients.get(name.node, ())), default=0.0)

    def _inputs(self, name: Name) -> List[Compared]:
        """Returns the inputs of a tensor's operator."""
        read = dict.fromkeys(each for one in self.nodes.get(name.node, ())
                             for each in one.a["inputs"])
        return [one for each in read for one in self.nodes.get(each, ())]

    def _before(self, one: Compared) -> List[Compared]:
        """Returns what a tensor was computed from: a parameter from its gradient and its value of
        the step before."""
        name = one.name
        if name.kind == "parameter":
            return [other for other in self.last.values() if other.name == name
                    or other.name.kind == "gradient" and other.name.tensor == name.node]
        above = self.gradients.get(name.node, []) if name.kind == "gradient" else []
        return [*self._inputs(name), *above]


def difference(a: Line, b: Line, coarse: Format) -> float:
    """Returns the norm of the difference of two tensors, beyond the smallest number of a format.
    Gradients are compared without their loss scales."""
    if a["numbers"] != b["numbers"] or (a["nan"], a["overflow"]) != (b["nan"], b["overflow"]):
        return math.inf
    scales = [line.get("loss_scale", 1.0) for line in (a, b)]
    if a["checksum"] == b["checksum"] and scales[0] == scales[1]:
        return 0.0
    one, other = (np.array(line["sketch"]) / scale for line, scale in zip((a, b), scales))
    smallest = coarse.smallest / min(scales) * math.sqrt(a["numbers"])
    return max(float(np.linalg.norm(one - other)) - smallest, 0.0)


def _norm(line: Line) -> float:
    return _rms(line) * math.sqrt(line["numbers"])


def _rms(line: Line) -> float:
    """Returns the root of the mean square of finite values, without loss scale."""
    return (line["rms"] or 0.0) / line.get("loss_scale", 1.0)


# ---- text ---------------------------------------------------------------------------------------


def facts(found: Difference) -> Dict[str, Any]:
    """Returns the result as JSON-serializable values."""
    def of(one: Optional[Compared]) -> Optional[Dict[str, Any]]:
        if one is None:
            return None
        shown = {which: {key: value for key, value in line.items()
                         if key not in ("sketch", "inputs", "step", "node", "tensor", "kind")}
                 for which, line in (("a", one.a), ("b", one.b))}
        number = one.difference if math.isfinite(one.difference) else None
        names = {key: one.a[key] for key in ("kind", "node", "tensor")}
        return {"step": one.step, **names, "difference": number,
                "rounding": one.rounding, **shown}

    return {**{name: value for name, value in asdict(found).items()
               if name not in ("inexact", "parted", "before", "largest")},
            "inexact": of(found.inexact), "parted": of(found.parted), "largest": of(found.largest),
            "before": [of(one) for one in found.before]}


def describe(found: Difference) -> str:
    """Returns the result as text."""
    lines = [*(f"{which}: {_run(head)}" for which, head in (("a", found.a), ("b", found.b))),
             f"compared: {counted(len(found.steps), 'step')}, "
             f"{counted(found.tensors, 'tensor')}"]
    for which, steps in (("a", found.only_in_a), ("b", found.only_in_b)):
        if steps:
            lines.append(f"only in {which}: steps {listed([str(step) for step in steps])}")
    if found.missing:
        lines.append(f"only in one: {listed(found.missing)}")
    lines += [f"{path} ends within a line, which is left out" for path in found.cut]
    lines.append("")
    if found.inexact is None:
        return "\n".join([*lines, "equal bit for bit"])
    first = found.inexact
    lines.append(f"equal bit for bit before step {first.step}: {first} "
                 f"(difference {_number(first.difference)})")
    if found.parted is None:
        most = found.largest
        largest = "" if most is None else f"; the largest difference of step {most.step} is " \
                                          f"{_number(most.difference)}: {most}"
        return "\n".join([*lines, f"within rounding in all steps{largest}"])
    return "\n".join([*lines, *_parting(found, found.parted)])


def _parting(found: Difference, one: Compared) -> List[str]:
    rows = [("", "a", "b"), *((key, *(_shown(line.get(key)) for line in (one.a, one.b)))
                              for key in ("format", "numbers", "rms", "least", "largest", "nan",
                                          "overflow", "loss_scale")
                              if key in one.a or key in one.b)]
    lines = [f"parts beyond rounding in step {one.step}: {one}",
             f"  difference {_number(one.difference)}, of which rounding explains "
             f"{_number(one.rounding)}{_format_of(one.difference)}", "",
             *(f"  {row}" for row in aligned(rows)), ""]
    if not found.before:
        return [*lines, "nothing that was recorded precedes it"]
    more = len(found.before) - SHOWN
    return [*lines, "computed from:",
            *(f"  {row}" for row in aligned([("difference", "", ""), *(
                (_number(c.difference), f"step {c.step}", str(c))
                for c in found.before[:SHOWN])])),
            *([f"  and {counted(more, 'tensor')} more"] if more > 0 else []), "",
            "the difference grew over several operators" if GREW * found.before[0].difference
            >= one.difference else "the difference arises in this operator"]


def _format_of(size: float) -> str:
    """Names the finest format whose rounding is as large, for a run that rounds unnoticed."""
    for name in ("tf32", "bfloat16"):
        if size <= ROUNDINGS * 2.0 ** -(1 + FORMATS[name].fraction):
            return f"; {name} would explain it"
    return ""


def _run(head: Line) -> str:
    return f"{head['policy']} on {head['device']}, gluon_amp {head['gluon_amp']}, MXNet " \
           f"{head['mxnet']}, numpy {head['numpy']}"


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.2g}"


def _shown(value: object) -> str:
    if value is None:
        return "unknown"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
