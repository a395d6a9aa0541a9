"""`xray`: reports how a format rounds every tensor of a network, and what to keep in float32.

    each step   runs a float32 step on copies of the parameters, then the same in the policy's
                format (with a trainer, the user's step); the engine counts forward and backward
    at the end  derives a window of loss scales, findings, and a value of keep=; verifies keep=,
                and adds nodes until there are no findings
"""
import glob
import json
import math
import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Dict, Iterable, List, Mapping, Optional, Set, Tuple, Union

from .._mxnet import np
from ..annotations import Batch, LossFunction, Network, Trainer
from ..checks import counted, positive_number, whole_number
from ..cpu.library import random_numbers_kept
from ..files import replace_text
from ..formats import FLOAT32, Format
from .advice import (
    Finding,
    Overflow,
    Training,
    Window,
    as_power,
    findings,
    first_overflow,
    goes_forward,
    left_in_format,
    said_below,
    window,
)
from .files import VERSION, page, save
from .network import keep_for, kept_already, line_of
from .session import (
    FIRST_SCALE,
    Graphs,
    ModuleUpdates,
    Ran,
    Session,
    Updates,
    Weight,
    check_trainer,
    split,
)
from .statistics import Counted, Counts, Key, added_up, decibels, set_aside
from .tensors import Tensor, compare, note_largest, weigh

_ROUNDS = 12  # trials of keep=
_DRAWS = 16  # random draws in which `explain` searches an overflow
_MOST_SAID = 10  # printed findings


@dataclass
class View:
    """The result of an X-ray.

    Attributes:
        tensors: all tensors, in order of computation.
        weights: the parameters.
        window: the loss scales that fit, with the tensors that limit them.
        loss_scale: its (low, high); low is above high if no scale fits all gradients.
        findings: the nodes that the format does not suit: overflow first, gradients last.
        keep: the value for `convert(net, keep=view.keep)`, with which there are no findings.
        first_overflow: the first tensor that is not finite; None if all are finite.
        losses: the loss of each step.
        reference_losses: the loss of each float32 step.
        steps: for each step, its loss scale, and counts by tensor.
        scale: the loss scale of the gradients' counts: that of the first step with finite
            gradients, or 2^16.
        left_out: the indices of batches without advice, because data, parameters or the float32
            loss are not finite.
        notes: further results as sentences.
        converts: the start of `keep_line`.
        lost: the share of a gradient's norm that may underflow at the low end of a window.
        goes_forward: whether no forward tensor overflows.
        training: the training's loss scales, and whether it checks gradients.
        outcome: what the training does, the start of `verdict`.
    """
    name: str
    tensors: List[Tensor]
    weights: List[Weight] = field(default_factory=list)
    window: Optional[Window] = None
    findings: List[Finding] = field(default_factory=list)
    keep: List[str] = field(default_factory=list)
    first_overflow: Optional[Overflow] = None
    losses: List[float] = field(default_factory=list)
    reference_losses: List[float] = field(default_factory=list)
    steps: List[Tuple[float, Mapping[Key, Counts]]] = field(default_factory=list)
    scale: float = 0.0
    left_out: List[int] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    converts: str = "amp.convert(net"
    lost: float = 0.01
    goes_forward: bool = True
    training: Training = field(default_factory=Training)
    outcome: str = ""

    @property
    def windows(self) -> List[Optional[Window]]:
        """The loss scales that fit each step; None if a forward tensor overflows."""
        return [window([replace(t, counts=counts.get(t.key)) for t in self.tensors], scale,
                       self.lost) if goes_forward(self.tensors, counts) else None
                for scale, counts in self.steps]

    @property
    def loss_scale(self) -> Optional[Tuple[float, float]]:
        return None if self.window is None else (self.window.low, self.window.high)

    @property
    def keep_line(self) -> str:
        """The line of code that converts the network with `keep`."""
        return f"{self.converts}, keep={self.keep!r})"

    def inherited(self, tensor: Tensor) -> Optional[float]:
        """Returns a tensor's SNR in dB without its own rounding error."""
        if tensor.snr is None or tensor.counts is None:
            return None
        total, own = 10 ** (-tensor.snr / 10), 10 ** (-tensor.counts.own_snr / 10)
        return decibels(1.0, max(total - own, 0.0))

    def worst(self) -> List[Tensor]:
        """Returns the tensors, the worst first: those that overflow, then by SNR."""
        def order(tensor: Tensor) -> Tuple[int, float]:
            counts = tensor.counts
            if not counts.stay_finite:  # overflow first; infinities without overflow last
                return (0, tensor.place) if counts.overflowed else (2, tensor.place)
            own = counts.own_snr if tensor.is_low else math.inf
            return 1, min(own, math.inf if tensor.snr is None else tensor.snr)
        return sorted((t for t in self.tensors if t.counts is not None), key=order)

    def save(self, folder: Union[str, "os.PathLike[str]"]) -> str:
        """Writes xray.html, summary.csv and xray.jsonl into a new folder, and with matplotlib also
        pictures. Returns the path of the page."""
        return save(self, folder)

    def said(self) -> List[Tuple[str, str, str]]:
        """Returns the lines of the result as (kind, subject, text).

        Kinds are "verdict", "good", "error", "warning", "note" and "keep".
        """
        made = [("verdict", "", self.verdict)] if self.steps else []
        if self.first_overflow:
            kind = "error" if self.findings else "note"
            made.append((kind, "First overflow", str(self.first_overflow)))
        if self.window:
            about, text = str(self.window).split(": ", 1)
            made.append(("good" if self.window.low <= self.window.high else "error", about, text))
        made += [("note", "", note) for note in self.notes]
        made += [(f.severity, f.node, f"{f.reason}: {f.said}")
                 for f in self.findings[:_MOST_SAID]]
        if self.keep:
            made.append(("keep", "To keep in float32", self.keep_line))
        return made

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.steps and len(self.left_out) == len(self.steps):
            return "No verdict: no batch is finite in float32"
        nodes = len({finding.node for finding in self.findings if not finding.remedy})
        other = next((f for f in self.findings if f.remedy), None)
        if other is not None and (not nodes or not other.backward):  # the data, or all gradients
            return f"{self.outcome}: {other.remedy if other.backward else other.said}"
        operators = "1 operator needs" if nodes == 1 else f"{nodes or 'no'} operators need"
        where = f"; overflow begins in {self.first_overflow.node}" \
            if self.first_overflow and nodes else ""
        return f"{self.outcome}: {operators} float32 beyond those that the policy keeps{where}"

    @property
    def severity(self) -> str:
        """The worst severity of the findings."""
        found = {finding.severity for finding in self.findings}
        if self.window and self.window.low > self.window.high:
            found.add("error")
        elif self.window and self.window.low > self.training.largest:
            found.add("warning")
        if self.steps and len(self.left_out) == len(self.steps):
            return "note"
        return next((kind for kind in ("error", "warning") if kind in found), "good")

    def __str__(self) -> str:
        return "\n".join(
            (f"{kind}: " if kind in ("error", "warning", "note") else "")
            + (f"{about}: " if about else "") + text for kind, about, text in self.said())

    def add(self, low: Graphs, ran: Ran, whole: Optional[Ran], known: Mapping[str, Any]) -> None:
        """Adds a step and the same step in float32.

        It ignores the counts if data, parameters, or the float32 loss or gradients are not finite.
        """
        number = len(self.steps)
        if ran.finite and not self.scale:
            self.scale = ran.scale
        overflow = first_overflow(low.layout, self.tensors, ran.counts, number, ran.scale, known)
        self.first_overflow = self.first_overflow or overflow
        if whole is not None:
            self.reference_losses.append(whole.loss)
        if whole is not None and not whole.sound:
            what = "gradients are" if math.isfinite(whole.loss) else "the loss is"
            self.left_out.append(number)
            self.notes.append(f"batch {number}: {what} not finite in float32 either: check the "
                              "data, the learning rate and the loss first. This batch is ignored")
        if overflow is not None and not overflow.op:
            self.left_out = list(dict.fromkeys([*self.left_out, number]))
            self.notes.append(f"{overflow}: no advice is from this batch")
        if number not in self.left_out:
            if whole is not None:
                compare(self.tensors, ran.counts, whole.counts, ran.scale / whole.scale)
            weigh(self.tensors, ran.counts, ran.total, ran.scale)
            note_largest(self.tensors, ran.counts)
        self.losses.append(ran.loss)
        self.steps.append((ran.scale, Counted(ran.counts.rows, ran.counts.all)))

    def conclude(self, low: Graphs) -> None:
        """Sums the counts of all steps, with gradients at one scale, and derives the findings."""
        self.scale = self.scale or FIRST_SCALE
        sound: List[Any] = [step for i, step in enumerate(self.steps) if i not in self.left_out]
        total = added_up([(self.scale / at, counted) for at, counted in sound],
                         {t.key for t in self.tensors if t.begins}) if sound else {}
        for tensor in self.tensors:
            tensor.counts = total.get(tensor.key)
        self.goes_forward = all(goes_forward(self.tensors, counted) for _, counted in sound)
        self.window = window(self.tensors, self.scale, self.lost) if self.goes_forward else None
        self.findings, notes = findings(low.layout, self.tensors, self.scale,
                                        self.training)
        self.notes += notes
        self.outcome = self._outcome()

    def _outcome(self) -> str:
        """Returns what the training does on these batches."""
        losses = [loss for i, loss in enumerate(self.losses) if i not in self.left_out]
        lost = sum(not math.isfinite(loss) for loss in losses)
        smallest, fails = self.training.smallest, f"Training {self.training.fails}, because"
        if lost and lost < len(losses) and self.training.checks:
            return f"Training skips {lost} of {len(losses)} batches, because the loss is not finite"
        if lost:
            return f"{fails} the loss is not finite"
        if not self.goes_forward:
            return "Training runs with numbers that are not finite"
        if self.window and self.window.high < smallest:
            return f"{fails} gradients overflow at its smallest loss scale, {self.training.ends}"
        if self.window and self.window.low > self.window.high:
            return "Training runs and loses gradients, because no loss scale fits all of them"
        if self.window and self.window.low > self.training.largest:
            return "Training runs and loses gradients, because they need a loss scale of at " \
                f"least {as_power(self.window.low)}, and its largest is " \
                f"{as_power(self.training.largest)}"
        if any(finding.reason.startswith("range above") for finding in self.findings):
            return "Training runs on these batches, and may overflow on others"
        return "Training runs, with less accuracy than in float32" if self.findings \
            else "Training runs"


@set_aside()
def xray(net: Network, batches: Iterable[Any], loss_fn: Optional[LossFunction] = None,
         trainer: Optional[Trainer] = None, steps: int = 20, reference: bool = True,
         lost: float = 0.01, batch_size: Optional[int] = None) -> View:
    """Reports how a policy's format, such as float16, rounds every tensor of a converted network.

    Steps run on copies of the parameters, so that parameters and statistics do not change. With a
    trainer, each step is the trainer's ordinary one, with the same bits. MXNet's random numbers
    continue as without an X-ray.

    Args:
        net: a network that `convert` has converted, on a CPU; or a bound `gluon_amp.Module`.
        batches: tuples of arrays, data first, and last the label or a list of labels. For a Module,
            the batches of its iterator.
        loss_fn: called with the network's output and the label. A Module needs none.
        trainer: a Trainer that updates the weights on each batch. None: no updates.
        steps: the number of batches.
        reference: whether to run each step in float32 too and measure errors against it.
        lost: the share of a gradient's norm that may underflow at the lowest loss scale that fits.
        batch_size: the batch size of the trainer's steps; None: the length of the first array times
            the number of workers.

    Returns:
        A `View`.

    Raises:
        TypeError: `net` is not converted, or an argument has another type.
        ValueError: the network is float32 or on a GPU, or a batch or `loss_fn` does not fit.
    """
    whole_number(steps, "steps", least=1)
    if batch_size is not None:
        whole_number(batch_size, "batch_size", least=1)
    if positive_number(lost, "lost") >= 1:
        raise ValueError(f"lost is a share of a gradient's norm, below 1. Received: {lost}")
    if trainer is not None:
        check_trainer(trainer, net)
    session = Session(net, batches, loss_fn, steps, "xray")
    low = session.low()
    right = session.float32(samples=True) if reference else None
    if not any(t.is_low for t in low.tensors):
        raise ValueError("the network has no tensors below float32: keep= keeps all of it, or "
                         "only products round their inputs")
    updates = ModuleUpdates(session) if session.is_module else Updates(session, trainer, batch_size)
    training = Training.of(session.net.module if session.is_module else trainer)
    view = _look(low, right, session.batches, float(getattr(trainer, "loss_scale", FIRST_SCALE)),
                 lost, training, updates)
    view.converts = session.converts
    view.tensors = [t for t in view.tensors if t.counts is not None]
    at_first = view.window
    if view.findings:
        updates.watched.ops.clear()  # frees memory
        _try_keeping(session, right, view)
    if at_first and view.keep and all(f.backward for f in view.findings):
        view.notes += [f"alternatively, without keep=: {said}: {at_first.remedy}"
                       for said in at_first.notes(training)]
    if view.window and not any(finding.remedy for finding in view.findings):
        view.notes += [f"{said}: {view.window.remedy}" for said in view.window.notes(training)]
    view.weights = updates.weights()
    _find_line(low, session.batches[0], view.first_overflow)
    return view


@set_aside()
def explain(net: Network, batch: Batch, loss_fn: Optional[LossFunction] = None,
            loss_scale: float = 1.0) -> Optional[Overflow]:
    """Finds the first tensor that is not finite in a step on one batch.

    A network with random operators runs up to 16 times. The network does not change.

    Args:
        net: as for `xray`.
        batch: a batch, as for `xray`.
        loss_fn: as for `xray`.
        loss_scale: the loss scale of the step.

    Returns:
        An `Overflow`, or None if all tensors are finite.

    Raises:
        TypeError, ValueError: as `xray`.
    """
    positive_number(loss_scale, "loss_scale")
    session = Session(net, [batch], loss_fn, 1, "explain")
    (batch,), low = session.batches, session.low()
    found, losses = None, set()  # type: Optional[Overflow], Set[float]
    with random_numbers_kept():
        while found is None and len(losses) < _DRAWS:
            low.restore()
            ran = low.run(batch, loss_scale)
            found = first_overflow(low.layout, low.tensors, ran.counts, 0, loss_scale,
                                   session.known(batch, low))
            if ran.loss in losses:  # the network is deterministic
                break
            losses.add(ran.loss)
        if found is not None and found.op:
            found.in_float32 = not session.float32().run(batch).sound
    _find_line(low, batch, found)
    return found


# ---- steps and trials of keep= ----------------------------------------------------------------


def _find_line(low: Graphs, batch: Batch, found: Optional[Overflow]) -> None:
    """Sets the line of code that created the node of an overflow."""
    if found is not None and found.op:
        node = low.layout.blamed(Key(found.node, found.backward, 0))
        found.where = line_of(low.session.net, node, split(batch)[0], low.make)


def _look(low: Graphs, right: Optional[Graphs], batches: List[Any], scale: float, lost: float,
          training: Training, updates: Optional[Updates] = None) -> View:
    """Runs steps on batches and returns a View. Without `updates`, it stops at the first certain
    finding."""
    view = View(low.session.net.name, low.tensors, lost=lost, training=training)
    for number, batch in enumerate(batches):
        ran, whole = _step(low, right, batch, scale, updates)
        view.add(low, ran, whole, low.session.known(batch, right or low))
        if ran.finite:
            scale = ran.scale
        if updates is None:
            view.conclude(low)
            if any(finding.certain for finding in view.findings):
                return view
        elif updates.gave_up:
            view.notes.append(f"the X-ray ends with batch {number}, because the trainer has "
                              f"stopped: {updates.gave_up}")
            break
    if updates is not None:
        view.conclude(low)
    return view


def _step(low: Graphs, right: Optional[Graphs], batch: Batch, scale: float,
          updates: Optional[Updates]) -> Tuple[Ran, Optional[Ran]]:
    """Runs a step, and the same step in float32 with the same random numbers.

    The float32 step runs without a loss scale if its gradients overflow with one.
    """
    whole, by_trainer = None, updates is not None and updates.trainer is not None
    with ExitStack() as stack:
        if right is not None or not by_trainer:
            draw_again = stack.enter_context(random_numbers_kept())

        def prepare(graphs: Graphs = low) -> None:
            draw_again()
            graphs.restore()

        if right is not None:
            prepare(right)
            whole = right.run(batch, scale)
            if math.isfinite(whole.loss) and not whole.finite:
                prepare(right)
                whole = right.run(batch)
        if not by_trainer:
            ran = low.back_off(batch, scale, prepare,
                               lambda ran: goes_forward(low.tensors, ran.counts))
            if isinstance(updates, ModuleUpdates) and ran.finite:
                updates.would_add(low, ran.scale)
    if updates is not None and by_trainer:
        ran = updates.step(batch)
    return ran, whole


def _try_keeping(session: Session, right: Optional[Graphs], view: View) -> None:
    """Keeps the findings' nodes and runs all batches again, until there are no findings."""
    again, format_ = view, session.policy.between
    batches = [batch for i, batch in enumerate(session.batches[:len(view.steps)])
               if i not in view.left_out]
    names: Dict[str, None] = {}
    kept: Set[str] = set()
    known_nodes = [n.name for of in session.graphs.values() for n in of.clean.nodes_within()]
    for _ in range(_ROUNDS):
        wanted = [name for finding in again.findings for name in finding.keep]
        new = {line: nodes for name in wanted for line, nodes in
               keep_for(session.net, name, known_nodes).items() if not nodes <= kept}
        if not new:
            break
        names.update(dict.fromkeys(new))
        kept.update(*new.values())
        again = _look(session.low(kept), right, batches, view.scale, view.lost, view.training)
        # The batch with a finding runs first in the next trial.
        last = len(again.steps) - 1
        batches = [*batches[last:], *batches[:last]]
        known = {f.node for f in view.findings}
        view.findings += [f for f in again.findings if f.node not in known]
    if names:
        view.keep = [*(name for name in kept_already(session.net) if name not in names), *names]
    fits = view.window and view.window.fits(view.training)
    if again is not view and again.goes_forward and not fits:
        view.window = again.window
        if view.window:
            view.notes.append("the loss scales are those of the network after keep=")
    view.notes += left_in_format(format_, view.tensors, again.tensors)
    left = [finding.node for finding in again.findings if not finding.remedy]
    if left:
        view.notes.append(f"{'after keep=' if names else 'with nothing to keep'}, "
                          f"{format_.name} still does not suit: {', '.join(left[:5])}")


# ---- an X-ray's folder, evaluated for another format --------------------------------------------


def redraw(folder: str, format_: Format) -> str:
    """Writes the page xray-FORMAT.html into an X-ray's folder: the same tensors in another format.

    Tensors that were float32 stay so. Returns the page's results and its path.
    """
    view = read(folder, format_)
    path = os.path.join(folder, f"xray-{format_.name}.html")
    replace_text(path, page(view))
    return f"{view}\n{path}"


def summary(folder: str) -> str:
    """Returns the printed results of an X-ray's folder."""
    said: str = _lines(folder)[0]["said"]
    return said


def read(folder: str, format_: Format) -> View:
    """Returns the run's View in another format, estimated from histograms.

    Rounding errors do not accumulate from tensor to tensor, and infinities do not propagate.
    """
    head, *lines = _lines(folder)
    tensors: Dict[Key, Tensor] = {}
    view = View(f"{head['network']}, as if in {format_.name}", [],
                left_out=head["left_out"], lost=head["lost"])
    for line in lines:
        bins = np.zeros(256, np.int64)
        for exponent, count in line["bins"]:
            bins[exponent + 127] = count
        counts = Counts(bins, line["zero"], line["infinite"], line["nan"])
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
        view.steps[number][1][key] = counts
        if number not in view.left_out:
            tensor = tensors.setdefault(key, Tensor(key, line["kind"], line["operator"],
                                                    line["place"], given,
                                                    parameter=line.get("parameter", "")))
            added = counts.times(view.steps[0][0] / scale) if key.backward else counts
            tensor.counts = added if tensor.counts is None else tensor.counts + added
    view.tensors = sorted(tensors.values(), key=lambda t: t.place)
    view.scale = view.steps[0][0] if view.steps else 1.0
    finite = [t for t in view.tensors if t.counts.finite]
    view.window = window(finite, view.scale, view.lost)
    best = view.window.high / view.scale if view.window else 1.0
    weights = [Tensor(Key(w.name, False, 0), "weight", "", 0, w.format, counts=w.counts)
               for w in view.weights]
    view.findings = [f for t in [*view.worst(), *weights] for f in _findings(t, best)]
    view.outcome = f"{counted(len(view.findings), 'tensor')} of {len(finite)} " \
        f"{'does' if len(view.findings) == 1 else 'do'} not fit {format_.name}"
    if len(finite) < len(view.tensors):
        view.notes.append(f"left out: {counted(len(view.tensors) - len(finite), 'tensor')} with "
                          "infinite inputs in the run")
    return view


def _findings(tensor: Tensor, factor: float) -> List[Finding]:
    """Returns the finding of one tensor, if any. `factor` is the highest loss scale that fits over
    the run's, for gradients."""
    counts = tensor.counts
    if not tensor.is_low or not counts.finite:
        return []
    if tensor.key.backward:
        counts = replace(counts.times(factor), infinite=0, nan=0).as_in(tensor.format)
    reason, said = "range below", said_below(counts, tensor)
    said, severity = said and f"{tensor.name} would be {said}", "warning"
    if not counts.stay_finite:
        share = counts.shares(tensor.format, own=True)["overflowed"]
        reason, severity = "range above", "error"
        said = f"{share:.2%} of {tensor.name} lies beyond {tensor.format.largest:g}"
    return [Finding(tensor.key.node, tensor.name, reason, said, [],
                    severity=severity)] if said else []


def _lines(folder: str) -> List[Dict[str, Any]]:
    path = os.path.join(folder, "xray.jsonl")
    if not os.path.exists(path):
        inside = sorted(glob.glob(os.path.join(glob.escape(folder), "*", "xray.jsonl")))
        such = f", as {os.path.dirname(inside[0])} does" if inside else ""
        raise FileNotFoundError(f"an X-ray's folder holds xray.jsonl{such}. Received: {folder}")
    with open(path, encoding="utf-8") as file:
        try:
            found = [json.loads(line) for line in file]
            known = found[0]["version"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f"{path} was not written by xray") from None
    if known != VERSION:
        raise ValueError(f"{path} is of version {known}; this gluon_amp reads version {VERSION}")
    return found
