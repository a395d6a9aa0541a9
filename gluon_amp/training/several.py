"""One backward pass for several Trainers, such as one of the layers and one of the embeddings."""
from contextlib import ExitStack
from typing import Any, List, Sequence, Tuple, Union

from .._mxnet import mx
from .backward import Backward, run_backward
from .following import weights_unwritten
from .gradients import Gradients
from .step import Gradient, Step
from .trainer import Trainer


class _Joined(Gradients):
    """The gradients of several Trainers for one backward pass."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self._parts = [trainer._gradients for trainer in trainers]
        self.parameters = [p for part in self._parts for p in part.parameters]

    def note_written(self) -> None:
        for part in self._parts:
            part.note_written()

    def waiting(self) -> List[Gradient]:
        return [gradient for part in self._parts for gradient in part.waiting()]

    def kept(self) -> List[Tuple["mx.nd.NDArray", "mx.nd.NDArray"]]:
        return [pair for part in self._parts for pair in part.kept()]


def backward(loss: Union["mx.nd.NDArray", Sequence["mx.nd.NDArray"]],
             trainers: Sequence[Trainer], retain_graph: bool = False) -> None:
    """Computes scaled gradients of one loss for several Trainers. Then call `step` of each.

    The Trainers share the smallest of their loss scales. A Trainer whose gradients overflow skips
    its own step. While the first scale is searched, all search.

    Args:
        loss: a loss, or a list with the loss of each device.
        trainers: Trainers of different parameters, all with or all without loss scales.
        retain_graph: keeps the graph for another backward pass.

    Raises:
        TypeError: `trainers` is not a list of Trainers.
        ValueError: Trainers share parameters, or some have a loss scale and some have none.
        LossScaleError: the gradients overflow at every scale.
    """
    trainers = _checked(trainers)
    if len(trainers) == 1:
        trainers[0].backward(loss, retain_graph)
        return
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    steps = [trainer._step for trainer in trainers]

    def after_pass(scale: float) -> None:
        for trainer in trainers:
            if trainer.after_pass is not None:
                trainer.after_pass(scale)

    with mx.autograd.pause(), ExitStack() as stack:
        for trainer in trainers:
            stack.enter_context(trainer._step.in_thread("gluon_amp.backward()"))
            stack.enter_context(weights_unwritten(trainer._optimizer))
        if not steps[0].scaling:
            run_backward(losses, retain_graph=retain_graph)
            after_pass(1.0)
            for step in steps:
                step.forget()
                step.end_backward(1.0, [array.detach() for array in losses])
            return
        scale = _begin(trainers, losses)
        one = Backward(losses, _Joined(trainers), scale, after_pass)
        searching = [step for step in steps if step.searching]
        checking = scale != 1 and not all(trainer._heads_checked for trainer in trainers)
        if searching:
            one.keep_gradients()
        one.run(scale, retain_graph or bool(searching) or checking)
        for step in steps:
            step.end_backward(scale, [array.detach() for array in losses])
        if checking:
            _check_heads(one, trainers)
        if searching:
            least = _least(searching)
            least.settle(one)
            for step in steps:
                step.follow(least)
        if searching or checking:
            one.finish(retain_graph)
        for trainer in trainers:
            trainer._step.record_versions(trainer._gradients.waiting())


def _begin(trainers: Sequence[Trainer], losses: List[Any]) -> float:
    """Returns the scale of the next backward pass, which is that of earlier ones in this step."""
    for trainer in trainers:
        trainer._broadcast_parameters()  # before the scales are read, which it sets to rank 0's
    steps = [trainer._step for trainer in trainers]
    begun = {step.backward_scale for step in steps if step.begun}
    if len(begun) > 1:
        raise RuntimeError("these Trainers have had backward passes at different loss scales since "
                           "their last steps: call gluon_amp.backward for all of them, or "
                           f"step before. Received: {', '.join(map(str, sorted(begun)))}")
    scale = min(begun or {step.backward_scale for step in steps})
    for trainer in trainers:
        trainer._begin_backward(losses, scale)
    return scale


def _least(steps: Sequence[Step]) -> Step:
    """Returns the step with the smallest loss scale."""
    return min(steps, key=lambda step: step.loss_scale.scale)


def _check_heads(one: Backward, trainers: Sequence[Trainer]) -> None:
    try:
        checked = one.check_heads()
    except (ValueError, mx.MXNetError):
        for trainer in trainers:
            trainer._step.forget()
        raise
    for trainer in trainers:
        trainer._heads_checked = checked
    if one.user_error:
        _least([trainer._step for trainer in trainers]).warn_of_one_pass(one.user_error)


def _checked(trainers: Sequence[Trainer]) -> List[Trainer]:
    found = list(trainers) if isinstance(trainers, (list, tuple)) else [trainers]
    wrong = [type(t).__module__ + "." + type(t).__name__ for t in found
             if not isinstance(t, Trainer)]
    if wrong or not found:
        raise TypeError("backward takes a loss and a list of gluon_amp.Trainers. "
                        f"Received: {', '.join(wrong) or 'an empty list'}")
    parameters = [p for trainer in found for p in trainer._params]
    shared = sorted({p.name for p in parameters if sum(p is q for q in parameters) > 1})
    if shared:
        raise ValueError("each Trainer has parameters of its own. Received in several: "
                         f"{', '.join(shared[:5])}")
    if len({trainer._step.scaling for trainer in found}) > 1:
        raise ValueError("one backward pass has one loss scale. Valid: all Trainers with a loss "
                         "scale, or all with loss_scale=None")
    return found
