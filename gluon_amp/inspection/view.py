"""`xray`: what float16 does to every tensor of a network, and what to do about it.

    each step   a float32 step on copies of the parameters, then the same in float16, counted by the
                engine, forward and backward: with a trainer, that is the user's own step
    at the end  counts become advice: a window of loss scales, findings, and a line for keep=,
                which is tried: nodes are added until nothing is found any more
"""
import math
import os
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Set, Tuple, Union

from ..annotations import Batch, LossFunction, Network, Trainer
from ..checks import positive_number, whole_number
from ..cpu.finite import all_finite
from ..cpu.library import random_numbers_kept
from ..policy import POLICIES
from .advice import Finding, Window, findings, left_in_format, window
from .lines import where
from .module_updates import ModuleUpdates
from .modules import ModuleBlock, looked_at
from .names import keep_for, kept_already
from .outliers import note
from .overflow import Overflow, first_overflow, goes_forward, is_finite
from .statistics import Counted, Counts, Key, at_scale, decibels
from .tensors import Layout, Tensor, compare, fill
from .trial import FIRST_SCALE, LEAST_SCALE, Ran, Trial, check, first_of
from .updates import Updates, Weight, check_trainer
from .worth import weigh

_ROUNDS = 12  # of trying what to keep
_DRAWS = 16  # of random numbers, to find an overflow that hangs on them


@dataclass
class View:
    """What an X-ray has found.

    Attributes:
        tensors: all that were watched, in order of computation.
        weights: the parameters.
        window: the loss scales that fit, with the tensor that sets each end.
        loss_scale: its (low, high); low is above high where no scale fits all gradients.
        findings: the nodes that float16 does not suit, the worst first.
        keep: for `convert(net, keep=view.keep)`: after it, nothing is found.
        first_overflow: the first tensor that is not finite; None where all are.
        losses: of each step.
        reference_losses: of each step in float32.
        steps: what each step counted: its loss scale, and counts by tensor.
        scale: the loss scale at which the counts of gradients stand: the first step's.
        left_out: the numbers of the batches whose data, or parameters, were not finite to begin
            with, or whose loss is not finite in float32 either: no advice is from them.
        notes: what else there is to know, in sentences.
        converts: how the line to paste begins.
        lost: the share of a gradient's norm that may be rounded away at the low end of a window.
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
    scale: float = 1.0
    left_out: List[int] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    converts: str = "amp.convert(net"
    lost: float = 0.01

    @property
    def windows(self) -> List[Optional[Window]]:
        """The loss scales that fit each step; None where its forward tensors overflow."""
        return [window([replace(t, counts=counts.get(t.key)) for t in self.tensors], scale,
                       self.lost) if goes_forward(self.tensors, counts) else None
                for scale, counts in self.steps]

    @property
    def loss_scale(self) -> Optional[Tuple[float, float]]:
        return None if self.window is None else (self.window.low, self.window.high)

    @property
    def keep_line(self) -> str:
        """To paste."""
        return f"{self.converts}, keep={self.keep!r})"

    def inherited(self, tensor: Tensor) -> Optional[float]:
        """A tensor's signal-to-noise ratio, in dB, without the error of its own rounding."""
        if tensor.snr is None or tensor.counts is None:
            return None
        total, own = 10 ** (-tensor.snr / 10), 10 ** (-tensor.counts.own_snr / 10)
        return decibels(1.0, max(total - own, 0.0))

    def worst(self) -> List[Tensor]:
        """The tensors, the worst first: those that overflow, then by what is left of them."""
        def order(tensor: Tensor) -> Tuple[int, float]:
            counts = tensor.counts
            assert counts is not None
            if not is_finite(counts):  # where infinities begin, and at the end those that follow
                return (0, tensor.place) if counts.overflowed else (2, tensor.place)
            own = counts.own_snr if tensor.is_low else math.inf
            return 1, min(own, math.inf if tensor.snr is None else tensor.snr)
        return sorted((t for t in self.tensors if t.counts is not None), key=order)

    def save(self, folder: Union[str, "os.PathLike[str]"]) -> str:
        """Writes xray.html, summary.csv and xray.jsonl into a new folder; with matplotlib, also
        pictures. Returns the path of the page."""
        from .files import save
        return save(self, folder)

    def __str__(self) -> str:
        lines = [*self.notes]
        if self.first_overflow:
            lines.append(f"First overflow: {self.first_overflow}")
        if self.window:
            lines.append(str(self.window))
        lines += [f"{f.node}: {f.reason}: {f.detail}" for f in self.findings[:10]]
        if self.keep:
            lines.append(f"To keep in float32: {self.keep_line}")
        elif self.tensors and not self.findings:
            lines.append("Nothing needs to stay in float32 beyond what does.")
        return "\n".join(lines)


def xray(net: Network, batches: Iterable[Any], loss_fn: Optional[LossFunction] = None,
         trainer: Optional[Trainer] = None,
         steps: int = 20, reference: bool = True, lost: float = 0.01,
         batch_size: Optional[int] = None) -> View:
    """Shows what float16 does to every tensor of a converted network, forward and backward.

    Every step runs on copies of the parameters: neither they nor statistics change, unless a
    trainer is given: then each step is its ordinary one, with the same bits. Float32 draws the
    same random numbers, and afterwards MXNet draws those that it would have drawn anyway.

    Args:
        net: a network that `convert` has converted, on a CPU; or a bound `gluon_amp.Module`.
        batches: tuples of arrays, data first and label last; several labels are a list there. Of a
            Module what its iterator gives.
        loss_fn: called with the network's output and the label; a Module needs none, since its
            symbol ends in losses.
        trainer: takes a step on each batch; None: the weights stay.
        steps: how many batches to look at.
        reference: whether each step is made in float32, too, to tell errors from that.
        lost: the share of a gradient's norm that may be rounded away at the low end of the
            loss scales.
        batch_size: what the trainer's steps are given; None: the length of the first array, on
            each worker.
    """
    whole_number(steps, "steps", least=1)
    if batch_size is not None:
        whole_number(batch_size, "batch_size", least=1)
    if positive_number(lost, "lost") >= 1:
        raise ValueError(f"lost is a share of a gradient's norm, below 1. Received: {lost}")
    if trainer is not None:
        check_trainer(trainer, net)
    net, batches, loss_fn = looked_at(net, batches, loss_fn)
    chosen = first_of(batches, steps, "xray")
    check(net, chosen[0])
    trial = Trial(net, net._amp.policy)
    with random_numbers_kept():
        trial.look(chosen[0])
    right = Trial(net, POLICIES["float32"], calls=trial.calls, samples=True) if reference else None
    layout = _layout(trial)
    if trainer is not None:  # whose steps are looked at: nothing runs on these copies
        trial.arrays.clear()
        trial.ops.clear()
    tensors = list(layout.tensors())
    if not any(t.is_low for t in tensors):
        raise ValueError("the network has no tensors of less than float32: all of it is kept, or "
                         "only products round what they read")
    view = View(net.name, tensors, lost=lost)
    if isinstance(net, ModuleBlock):
        view.converts = "amp.convert_symbol(symbol"
    scale = float(getattr(trainer, "loss_scale", FIRST_SCALE))
    updates = ModuleUpdates(net) if isinstance(net, ModuleBlock) \
        else Updates(net, trainer, batch_size)
    hopeless: List[str] = []
    for number, batch in enumerate(chosen):
        whole, at = None, scale
        if trainer is None or right is not None:
            with random_numbers_kept() as draw_again:
                if right is not None:
                    right.copy()
                    whole = right.run(batch, loss_fn, scale)
                if trainer is None:
                    draw_again()
                    trial.copy()
                    scale, ran = _run(trial, tensors, batch, loss_fn, scale, draw_again)
                    if isinstance(updates, ModuleUpdates) and ran.finite:
                        updates.look(trial, scale)
        if trainer is not None:
            scale, ran = updates.step(batch, loss_fn)
        if whole is not None:
            view.reference_losses.append(whole.loss)
            what = _not_finite_in_float32(right, whole, ran, batch, loss_fn)
            if what:
                hopeless.append(f"batch {number}: {what} not finite in float32 either: look "
                                "at the data, the learning rate and the loss first. No advice is "
                                "from this batch")
                view.left_out.append(number)
        known = trial.given(batch, (right or trial).arrays if right or trainer is None else {})
        _note(view, scale, ran, number, known,
              None if whole is None else at_scale(whole.counts, scale / at))
        if trainer is None and number in view.left_out:
            scale = at  # no lower one has helped
        if updates.gave_up:
            view.notes.append(f"batch {number} is the last that was looked at: the trainer has "
                              f"given up: {updates.gave_up}")
            chosen = chosen[:number + 1]
            break
    sound = [number for number in range(len(chosen)) if number not in view.left_out]
    fill(tensors, [view.steps[number] for number in sound], view.scale)
    view.notes[:0] = hopeless
    view.tensors = [t for t in tensors if t.counts is not None]
    if all(goes_forward(tensors, view.steps[number][1]) for number in sound):
        view.window = window(view.tensors, view.scale, lost)
    view.findings = findings(layout, tensors, view.scale)
    at_first = view.window
    if view.findings:
        updates.watched.ops.clear()  # its steps are over: their memory is for those that follow
        with random_numbers_kept() as draw_again:
            _try_keeping(trial, right, view, [chosen[i] for i in sound], loss_fn, draw_again)
    if at_first and view.keep and all(f.tensor.startswith("gradient") for f in view.findings):
        view.notes += [f"or with nothing kept: {said}" for said in at_first.notes]
    view.notes += view.window.notes if view.window else []
    view.weights = updates.weights()
    if view.first_overflow:
        trial = Trial(net, net._amp.policy, calls=trial.calls)
        view.first_overflow.where = where(trial, chosen[0], layout, view.first_overflow)
    return view


def explain(net: Network, batch: Batch, loss_fn: Optional[LossFunction] = None,
            loss_scale: float = 1.0) -> Optional[Overflow]:
    """The first tensor that is not finite in a step on this batch, at this loss scale, and what
    it is computed from; None where all are. A network that draws random numbers is tried with
    several draws. Changes nothing."""
    positive_number(loss_scale, "loss_scale")
    net, (batch,), loss_fn = looked_at(net, [batch], loss_fn)
    check(net, batch)
    trial = Trial(net, net._amp.policy)
    found, losses = None, set()  # type: Optional[Overflow], Set[float]
    with random_numbers_kept():
        while found is None and len(losses) < _DRAWS:
            trial.copy()
            ran = trial.run(batch, loss_fn, loss_scale)
            layout = _layout(trial)
            found = first_overflow(layout.tensors(), ran.counts, 0, loss_scale,
                                   trial.given(batch, trial.arrays))
            if ran.loss in losses:  # nothing is random
                break
            losses.add(ran.loss)
    if found:
        found.where = where(trial, batch, layout, found)
    return found


# ---- how it is done ---------------------------------------------------------------------------


def _layout(trial: Trial) -> Layout:
    return Layout(trial.graphs(), trial.policy, trial.parameters)


def _run(trial: Trial, tensors: List[Tensor], batch: Batch, loss_fn: LossFunction, scale: float,
         draw_again: Callable[[], None]) -> Tuple[float, Ran]:
    """A step at this loss scale, or at lower ones where only gradients overflow at it."""
    ran = trial.run(batch, loss_fn, scale)
    while not ran.finite and scale > LEAST_SCALE and goes_forward(tensors, ran.counts):
        scale /= 16
        trial.copy()
        draw_again()
        ran = trial.run(batch, loss_fn, scale)
    return scale, ran


def _not_finite_in_float32(right: Any, whole: Ran, ran: Ran, batch: Batch,
                           loss_fn: LossFunction) -> str:
    """What is not finite in float32, either; "" where nothing is."""
    if not math.isfinite(whole.loss):
        return "the loss is"
    if ran.finite or all_finite(right.gradients()):
        return ""
    with random_numbers_kept():
        right.copy()
        right.run(batch, loss_fn)  # without a loss scale
    return "" if all_finite(right.gradients()) else "gradients are"


def _note(view: View, scale: float, ran: Ran, number: int, known: Mapping[str, Any],
          reference: Optional[Counted]) -> None:
    """Notes a step. Its counts tell nothing of the format where data or parameters, of those that
    are known, were not finite to begin with."""
    if not view.steps:
        view.scale = scale
    overflow = first_overflow(view.tensors, ran.counts, number, scale, known)
    view.first_overflow = view.first_overflow or overflow
    if overflow is not None and not overflow.op:
        view.left_out = list(dict.fromkeys([*view.left_out, number]))
        view.notes.append(f"{overflow}: no advice is from this batch")
    if number not in view.left_out:
        if reference is not None:
            compare(view.tensors, ran.counts, reference)
        weigh(view.tensors, ran, scale)
        note(view.tensors, ran.counts)
    view.losses.append(ran.loss)
    view.steps.append((scale, _without_samples(ran.counts)))


def _without_samples(counted: Counted) -> Counted:
    """What is kept of each step."""
    return Counted(counted.rows, counted.all)


@dataclass
class _Again:
    """What some batches show with more nodes kept.

    Attributes:
        tensors: with their counts, gradients at the loss scale `scale`.
        found: what is still found.
        fits: whether no forward tensor overflows.
        failed: the place of the batch after which something was found, that is the last one looked
            at; 0 where nothing was.
    """
    tensors: List[Tensor]
    scale: float
    found: List[Finding]
    fits: bool = True
    failed: int = 0


def _look_again(trial: Trial, right: Optional[Trial], batches: List[Any], loss_fn: LossFunction,
                scale: float, draw_again: Callable[[], None]) -> _Again:
    """Looks at batches up to the first one after which something is found."""
    layout = _layout(trial)
    again, steps = _Again(list(layout.tensors()), 0.0, []), []
    for i, batch in enumerate(batches):
        whole = None
        if right is not None:
            draw_again()
            right.copy()
            whole = right.run(batch, loss_fn, scale)
        draw_again()
        at, ran = _run(trial, again.tensors, batch, loss_fn, scale, draw_again)
        again.scale = again.scale or at
        if whole is not None:
            compare(again.tensors, ran.counts, at_scale(whole.counts, at / scale))
        weigh(again.tensors, ran, at)
        note(again.tensors, ran.counts)
        steps.append((at, _without_samples(ran.counts)))
        fill(again.tensors, steps, again.scale)
        scale = at
        again.fits = again.fits and goes_forward(again.tensors, ran.counts)
        again.found = findings(layout, again.tensors, again.scale)
        if again.found:
            again.failed = i
            break
    return again


def _try_keeping(first: Trial, right: Optional[Trial], view: View, batches: List[Any],
                 loss_fn: LossFunction, draw_again: Callable[[], None]) -> None:
    """Keeps what is found, looks at all batches again, and goes on until nothing is found."""
    net, calls = first.net, first.calls
    names: Dict[str, None] = {}
    kept: Set[str] = set()
    again = _Again(view.tensors, view.scale, view.findings, fits=False)
    known_nodes = [n.name for call in calls.values() for n in call.clean.nodes_within()]
    for _ in range(_ROUNDS):
        wanted = [name for finding in again.found for name in finding.keep]
        new = {line: nodes for name in wanted
               for line, nodes in keep_for(net, name, known_nodes).items() if not nodes <= kept}
        if not new:
            break
        for line, nodes in new.items():
            names[line] = None
            kept |= nodes
        trial = Trial(net, net._amp.policy, kept, calls=calls)
        again = _look_again(trial, right, batches, loss_fn, view.scale, draw_again)
        # The batch that showed something is the first to be tried with what is kept next.
        batches = [*batches[again.failed:], *batches[:again.failed]]
        known = {f.node for f in view.findings}
        view.findings += [f for f in again.found if f.node not in known]
    if names:
        view.keep = [*(name for name in kept_already(net) if name not in names), *names]
    if again.fits and (view.window is None or not view.window.fits):
        view.window = window([t for t in again.tensors if t.counts], again.scale, view.lost)
        if view.window:
            view.notes.append("the loss scales are those of the network with these kept in float32")
    view.notes += left_in_format(view.tensors, again.tensors)
    if again.found:
        view.notes.append("with these kept, float16 still does not suit: "
                          + ", ".join(f.node for f in again.found[:5]))
