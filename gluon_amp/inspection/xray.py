"""`xray`: reports how a format rounds every tensor of a network, and what to keep in float32.

    each step   runs a float32 step on copies of the parameters, then the same in the policy's
                format (with a trainer, the user's step); the engine counts forward and backward
    at the end  derives a window of loss scales, findings, and a value of keep=; verifies keep=,
                and adds nodes until there are no findings
"""
from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

import mxnet as mx

from ..annotations import Batch as GivenBatch
from ..annotations import LossFunction, Network, Trainer
from ..checks import listed, positive_number, whole_number
from ..cpu.library import random_numbers_kept
from . import judge
from .judge import FIRST_SCALE, Overflow, Training
from .layout import Flow
from .network import call_again, keep_for, kept_already, line_of
from .notes import notes, remedy_of_data
from .session import Batch, NetworkCopy, Session, StepResult, scales_down
from .steps import TrainerSteps
from .tensors import Key, compare, note_largest, note_loss_sensitivity
from .view import View

_ROUNDS = 12  # trials of keep=; the faults of results/xray/planted.csv need at most 7
_DRAWS = 16  # random draws in which `explain` searches an overflow


def xray(net: Network, batches: Iterable[Any], loss_fn: Optional[LossFunction] = None,
         trainer: Optional[Trainer] = None, steps: int = 20, reference: bool = True,
         batch_size: Optional[int] = None) -> View:
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
        if trainer is None:
            raise ValueError("batch_size is for the steps of trainer=. Received: "
                             f"batch_size={batch_size}, trainer=None")
    if trainer is not None and isinstance(net, mx.mod.BaseModule):
        raise TypeError("trainer= is for Gluon: for a Module, the X-ray runs on copies")
    with Session(net, batches, loss_fn, steps, "xray") as session:
        low = NetworkCopy(session)
        if not any(tensor.is_low for tensor in low.layout.tensors):
            raise ValueError("the network has no tensors below float32: keep= keeps all of it, or "
                             "only products round their inputs")
        trainer_steps = None if trainer is None else TrainerSteps(session, trainer, batch_size)
        training = Training.of(session.net.module if session.is_module else trainer)
        in_float32 = NetworkCopy(session, is_float32=True) if reference else None
        run = XrayRun(session, in_float32, training)
        scale = float(getattr(trainer, "loss_scale", FIRST_SCALE))
        view = run.view(low, range(len(session.batches)), scale, trainer_steps, is_trial=False)
        if trainer_steps is not None:
            trainer_steps.observer.ops.clear()  # which count
        view.converts = session.converts
        at_first = view.window
        _advise(run, view)
        if at_first and not at_first.fits(training) and view.keep \
                and all(f.backward for f in view.findings):
            view.notes += [f"alternatively, without keep=: {note}: {at_first.remedy}"
                           for note in at_first.notes(training)]
        if view.window and not any(finding.remedy for finding in view.findings):
            view.notes += [f"{note}: {view.window.remedy}" for note in view.window.notes(training)]
        _find_line(low, session.batches[0], view.first_overflow)
    return view


def explain(net: Network, batch: GivenBatch, loss_fn: Optional[LossFunction] = None,
            loss_scale: float = 1.0) -> View:
    """Finds the first tensor that is not finite in a step on one batch.

    A network with random operators runs up to 16 times. The network does not change. The result has
    no findings and no `keep`.

    Args:
        net: as for `xray`.
        batch: a batch, as for `xray`.
        loss_fn: as for `xray`.
        loss_scale: the loss scale of the step.

    Returns:
        A `View` of this step. Its `first_overflow` is an `Overflow`, or None if all tensors are
        finite.

    Raises:
        TypeError, ValueError: as `xray`.
    """
    positive_number(loss_scale, "loss_scale")
    losses: Set[float] = set()
    with Session(net, [batch], loss_fn, 1, "explain") as session, random_numbers_kept():
        (first,), low = session.batches, NetworkCopy(session)
        while len(losses) < _DRAWS:
            low.restore()
            ran = low.run(first, loss_scale)
            overflow = judge.first_overflow(low.layout, ran.counts, 0, loss_scale,
                                            session.named_arrays(first, low))
            if overflow is not None or ran.loss in losses:  # the network is deterministic
                break
            losses.add(ran.loss)
        if overflow is not None and overflow.op:
            overflow.in_float32 = not NetworkCopy(session, is_float32=True).run(first).sound
        _find_line(low, first, overflow)
        view = View(session.net.name, low.layout.tensors, first_overflow=overflow,
                    scale=loss_scale, one_step=True)
        view.add(0, loss_scale, ran.counts, ran.loss)
        view.add_up()
        view.tensors = [t for t in view.tensors if t.counts is not None]
    return view


def _find_line(low: NetworkCopy, batch: Batch, overflow: Optional[Overflow]) -> None:
    """Sets the line of code that created the node of an overflow."""
    if overflow is not None and overflow.op:
        node = low.layout.blamed(Key(overflow.node, overflow.backward, 0))
        net = low.session.net
        overflow.where = line_of(net, node, lambda: call_again(net, batch.data, low.make))


# ---- steps --------------------------------------------------------------------------------------


class XrayRun(NamedTuple):
    """Steps of one network on batches, and what they show.

    Attributes:
        session: the network.
        reference: the network in float32; None compares with nothing.
        training: as in `View`.
    """
    session: Session
    reference: Optional[NetworkCopy]
    training: Training

    def view(self, low: NetworkCopy, numbers: Iterable[int], scale: float,
             trainer_steps: Optional[TrainerSteps] = None, is_trial: bool = True) -> View:
        """Runs a step on the batches with these numbers: of the trainer, if any. A trial of `keep=`
        ends with the first certain finding."""
        view = View(self.session.net.name, low.layout.tensors, training=self.training)
        for number in numbers:
            batch = self.session.batches[number]
            # the reference has no loss scale if its gradients overflow with one
            reference_step = self.reference.step(batch, (scale, 1.0)) if self.reference else None
            ran = trainer_steps.step(batch) if trainer_steps \
                else low.step(batch, scales_down(scale))
            arrays = self.session.named_arrays(batch, self.reference or low)
            _add(view, low, number, ran, reference_step, arrays)
            if ran.finite:
                scale = ran.scale
            if is_trial and any(finding.certain for finding in _conclude(view, low)[0]):
                break
            if trainer_steps and trainer_steps.stopped:
                view.notes.append(f"the X-ray ends with batch {number}, because the "
                                  f"trainer has stopped: {trainer_steps.stopped}")
                break
        view.findings, notes = _conclude(view, low)
        view.notes += notes
        fits = view.goes_forward and not judge.without_scale(view.findings)
        view.window = judge.window(view.tensors, view.advising) if fits else None
        view.outcome = judge.outcome(view)
        view.tensors = [t for t in view.tensors if t.counts is not None]
        trained = {p.name for p in self.session.parameters.values() if p.grad_req != "null"}
        view.weights = [weight for weight in low.weights() if weight.name in trained]
        return view

    def keep(self, view: View, numbers: List[int]) -> Tuple[View, Dict[str, None]]:
        """Keeps the nodes of the findings in float32 and runs again, until there are no findings.
        Returns the last view, and what `keep=` lists."""
        names: Dict[str, None] = {}
        kept: Set[str] = set()
        net, again, parameters = self.session.net, view, self.session.parameters
        all_nodes = [n.name for of in self.session.graphs.values() for n in of.clean.nodes_within()]
        for _ in range(_ROUNDS):
            wanted = [name for finding in again.findings for name in finding.keep]
            before = len(kept)
            for name in sorted(wanted, key=lambda name: name not in parameters):
                for line, nodes in keep_for(net, name, all_nodes).items():
                    if not nodes <= kept:
                        names[line] = None
                        kept |= nodes
            if len(kept) == before:
                break
            again = self.view(NetworkCopy(self.session, kept), numbers, view.scale)
            last = len(again.steps) - 1  # the batch with a finding runs first in the next trial
            numbers = [*numbers[last:], *numbers[:last]]
            nodes = {finding.node for finding in view.findings}
            view.findings += [f for f in again.findings if f.node not in nodes]
        return again, names


def _add(view: View, low: NetworkCopy, number: int, ran: StepResult,
         reference_step: Optional[StepResult], arrays: Dict[str, Any]) -> None:
    """Adds a step on the batch of this number, and the same step in float32.

    It ignores the counts if data, parameters, or the float32 loss or gradients are not finite.
    """
    if ran.finite and not view.scale:
        view.scale = ran.scale
    overflow = judge.first_overflow(low.layout, ran.counts, number, ran.scale, arrays)
    view.first_overflow = view.first_overflow or overflow
    is_left_out = False
    if reference_step is not None:
        view.reference_losses.append(reference_step.loss)
        if not reference_step.sound:
            what = "gradients are" if math.isfinite(reference_step.loss) else "the loss is"
            is_left_out = True
            view.notes.append(f"batch {number}: {what} not finite in float32 either: check the "
                              "data, the learning rate and the loss first. This batch is ignored")
    if overflow is not None and not overflow.op:
        is_left_out = True
        view.notes.append(f"{overflow}: no advice is from this batch")
    if is_left_out:
        view.left_out.append(len(view.steps))
    else:
        if reference_step is not None:
            compare(view.tensors, ran.counts, reference_step.counts,
                    ran.scale / reference_step.scale)
        note_loss_sensitivity(view.tensors, ran.counts, ran.total, ran.scale)
        note_largest(view.tensors, ran.counts)
    view.add(number, ran.scale, ran.counts, ran.loss)


def _conclude(view: View, low: NetworkCopy) -> Tuple[List[judge.Finding], List[str]]:
    """Sums the counts of the steps so far. Returns the findings and their notes."""
    view.scale = view.scale or FIRST_SCALE
    view.add_up()
    view.goes_forward = all(Flow(view.tensors, counts).goes_forward for _, counts in view.advising)
    return judge.findings(low.layout, view.scale, view.training,
                          [weight for weight in low.weights() if weight.is_low])


def _advise(run: XrayRun, view: View) -> None:
    """Tries `keep=` for the findings, and notes what may remove them at their source."""
    fits = view.window is None or view.window.fits(view.training) \
        and view.window.low <= view.training.largest
    batches = [number for number in view.numbers if number not in view.left_out]
    if not batches or fits and not view.findings:
        return
    layout, keys = NetworkCopy(run.session).layout, {t.name: t.key for t in view.tensors}
    for finding in view.findings:
        if finding.remedy and not finding.backward:  # of data
            finding.remedy = remedy_of_data(run.session, finding, batches)
            finding.keep = [] if finding.remedy else layout.kept_for(keys[finding.tensor])
    if view.findings:
        _try_keeping(run, view, batches)
    view.notes += notes(run.session, view, batches)


def _try_keeping(run: XrayRun, view: View, numbers: List[int]) -> None:
    """Sets `keep`, and what remains with it."""
    session = run.session
    again, names = run.keep(view, numbers)
    if names:
        view.after = again
        view.keep = [*(name for name in kept_already(session.net) if name not in names), *names]
    fits = view.window and view.window.fits(view.training)
    if again is not view and again.goes_forward and not fits:
        view.window = again.window
        if view.window:
            view.notes.append("the loss scales are those of the network after keep=")
    format_ = session.policy.compute
    view.notes += judge.left_in_format(format_, view.tensors, again.tensors)
    outermost = {f.tensor for f in again.findings} & session.parameters.keys()
    if outermost:
        view.notes.append("keep= does not list the outermost block, which has "
                          f"{listed(sorted(outermost))}: under the policy mixed_float16 "
                          "parameters stay float32")
    left = [finding.node for finding in again.findings if not finding.remedy]
    if left:
        view.notes.append(f"{'after keep=' if names else 'with nothing to keep'}, "
                          f"{format_.name} still does not suit: {', '.join(left[:5])}")
