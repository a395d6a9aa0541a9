"""The step of a Trainer or a Module: its gradients, from the first backward pass to the update.

    stage     gradients                              leads to it
    EMPTY     no backward pass since the update      apply, reset
    SCALED    of backward passes, times `scale`      begin, end: around each pass
    SUMMED    summed over devices and workers        begin_sum

`apply` checks the gradients once:

    all finite   updates, with gradients * rescale_grad / scale, clipped
    otherwise    skips; accumulated gradients become 0; logs the reason

A step never writes to gradients; in SCALED and SUMMED, `unscale` and a sum may replace the arrays
that the update uses. One number unscales and clips all of them: the optimizer's `rescale_grad`, by
which it multiplies gradients in float32.
"""
import enum
import math
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence, Tuple

from ..annotations import Array, Updater
from ..checks import positive_number, whole_number
from ..cpu import arrays
from ..cpu.library import overflows, read, versions
from . import refusals
from .gradients import Gradient, Gradients, are_zero, set_to_zero
from .loss_scale import GivenLossScale, as_loss_scale
from .moving_averages import MovingAverages
from .optimizer import prepared


class Stage(enum.Enum):
    """What gradients are: see the head of this file."""
    EMPTY = 0
    SCALED = 1
    SUMMED = 2


class Step:
    """The steps of a Trainer or a Module.

    Args:
        gradients: the `Gradients`.
        workers: the `Workers` that sum gradients and exchange numbers.
        loss_scale: as for `Trainer`.
        max_norm: as `clip_norm` for `Trainer`.

    Attributes:
        loss_scale: the loss scale; a `LossScale` of 1 without scaling.
        max_norm: the norm to which each update is clipped; None for no clipping.
        skipped: the number of skipped steps.
        skipped_in_a_row: the number of those since the last update.
        updated: whether the last step updated.
        weights_replaced: whether rank 0's weights have replaced any worker's since the last step,
            so that gradients may belong to earlier weights.
        averages: the moving averages that the step keeps finite; None on a CPU.
        stage: what the gradients are.
        scale: the loss scale of the last backward pass; 1 before the first.
    """

    # `report_overflow` calls it with the Trainer or Module, and the result of `overflows`
    after_overflow: Optional[Callable[[Any, List[Tuple[str, str]]], None]] = None

    def __init__(self, gradients: Gradients, workers: Any, loss_scale: GivenLossScale,
                 max_norm: Optional[float]) -> None:
        self.gradients, self._workers = gradients, workers
        self.loss_scale = as_loss_scale(loss_scale)
        self.max_norm = None if max_norm is None else positive_number(max_norm, "clip_norm")
        self.skipped = self.skipped_in_a_row = 0
        self.updated, self._has_updated = True, False
        self.weights_replaced = False
        self.averages: Optional[MovingAverages] = None
        self._adding_at: Optional[float] = None  # the scale of accumulated gradients
        # the last step's norm, and the names of gradients that are not finite
        self._last: Tuple[Optional[float], Sequence[str]] = None, ()
        # or its gradients, their factor, and their counts of writes
        self._unchecked: Optional[Tuple[Sequence[Gradient], float, Optional[Array]]] = None
        overflows()  # forgets those of earlier passes, such as of a network that was given up
        self.scale = 1.0
        self.reset()

    def reset(self) -> None:
        """Clears the state of the backward passes since the last step."""
        self.stage, self._unscaled = Stage.EMPTY, False
        self._next_max_norm: Optional[float] = None  # of the next update only
        self._losses: List[Array] = []  # of the backward passes, without graphs
        self.gradients.forget()

    @property
    def checks_gradients(self) -> bool:
        """Whether each update checks gradients."""
        return self.loss_scale.scales or self.max_norm is not None

    # ---- gradients

    def find_new(self) -> List[Gradient]:
        """Returns the gradients of backward passes since the last step; without a loss scale also
        those of backward passes by other code."""
        return self.gradients.find_new(self.loss_scale.scales)

    def _read(self) -> Sequence[Gradient]:
        """Returns all gradients. Refuses a Trainer with a loss scale that has none."""
        gradients = self.gradients.read()
        if self.loss_scale.scales and self.gradients.marked and not gradients:
            refusals.nothing_to_train()
        return gradients

    def take(self, call: str, ignore_stale: bool = True) -> List[Gradient]:
        """Returns the gradients that an update uses, in the order of parameters. Refuses a call
        without new gradients of all parameters, or with those of another backward pass."""
        gradients, scaled = self._read(), self.loss_scale.scales
        if scaled and self.stage is Stage.EMPTY:
            refusals.no_gradients(call, self.gradients.marked)
        if scaled and self.gradients.marked:
            others = [g for g, is_marked in zip(gradients, self.gradients.marks()) if is_marked]
            if others:
                self._refuse(refusals.other_pass, [g.name for g in others])
        new = self.gradients.find_new(scaled)
        if len(new) < len(gradients) and not (ignore_stale and new):
            refusals.stale([gradient.name for gradient in gradients if not gradient.is_new])
        self.gradients.count_writes()
        return new

    def _refuse(self, refusal: Callable[..., NoReturn], *arguments: Any) -> NoReturn:
        """Refuses the gradients: another backward pass may begin."""
        self.reset()
        refusal(*arguments)

    def guard(self) -> None:
        """Refuses later writes of other code, if the update would not use or would unscale them."""
        if self.loss_scale.scales or self._unscaled:
            self.gradients.guard()

    def _check_unwritten(self) -> None:
        """Refuses gradients that other code has written since `guard`."""
        names = self.gradients.written()
        if names:
            self._refuse(refusals.written, names, self.scale, self._unscaled, self.gradients.marked)

    # ---- a backward pass

    def begin(self, scale: float) -> None:
        """Prepares a backward pass. The first of a step overwrites gradients of other passes,
        unless it adds to them. It rescales accumulated gradients at another scale."""
        if not self.loss_scale.scales and self.gradients.marked:
            self.reset()  # results of `unscale` and `clip_norm`
            return
        gradients = self._read()
        self.gradients.count_writes()
        if self.gradients.written() and are_zero(self.gradients.new()):  # as by zero_grad()
            self.reset()
        is_first, added = self.stage is Stage.EMPTY, self.gradients.added()
        others = [g for g, is_marked in zip(gradients, self.gradients.marks(clear=is_first))
                  if self.gradients.marked and is_marked and (g.adds or not is_first)]
        if others and not (is_first and are_zero(others)):
            self._refuse(refusals.other_pass, [g.name for g in others])
        if self.stage is Stage.SUMMED and added:
            self._refuse(refusals.summed, "update(batch_size), or zero_grad(), before backward()")
        if self.stage is not Stage.SCALED:  # after a pass that failed; or they were summed
            for gradient in gradients:
                gradient.is_new = False
        if self._adding_at is not None and self._adding_at != scale:
            arrays.multiply(added, scale / self._adding_at)
        self._adding_at = scale

    def end(self, scale: float, losses: Optional[Sequence[Array]]) -> None:
        """Records a backward pass from these losses, with this scale; None if it failed."""
        if self.loss_scale.scales or not self.gradients.marked:
            for gradient, is_marked in zip(self.gradients.all, self.gradients.marks(clear=True)):
                gradient.is_new |= bool(is_marked)
        if losses is None:
            return
        if self._unscaled or self.stage is Stage.SUMMED:
            for gradient in self.gradients.all:
                gradient.array = gradient.own
        self.stage, self.scale, self._unscaled = Stage.SCALED, scale, False
        self._next_max_norm = None
        self._losses += [loss.detach() for loss in losses]
        if self.loss_scale.scales:
            self.gradients.guard()

    # ---- between the backward pass and the update

    def begin_sum(self, several: bool) -> None:
        """Prepares a sum of gradients; `several`: over several devices or workers."""
        if not several:
            return
        # without a scale, loss.backward() may have written other gradients since
        if self.stage is Stage.SUMMED and self.loss_scale.scales or self._unscaled:
            self._refuse(refusals.summed, "update(batch_size), not step(), after it",
                         self._unscaled)
        self.stage = Stage.SUMMED

    def unscale(self) -> List[Gradient]:
        """Replaces the gradients by unscaled ones, 16-bit ones in float32."""
        gradients = self.take("unscale()")
        self._check_unwritten()
        if self._unscaled:
            refusals.unscaled_twice()
        for g in gradients:
            is_low = arrays.is_16bit(g.array.dtype)
            g.array = (arrays.to_float32(g.array) if is_low else g.array) / self.scale
        self._unscaled = True
        self.guard()
        return gradients

    def clip(self, max_norm: float, rescale_grad: float) -> float:
        """Clips the gradients of the next update. Returns their norm before."""
        gradients = self.take("clip_norm()")
        self._check_unwritten()
        self.guard()
        self._next_max_norm = max_norm
        norm, _ = self.gradients.check(gradients, self.averages, self._workers.sums)()
        return self._multiplier(rescale_grad) * norm

    # ---- the update

    def apply(self, updaters: Sequence[Updater]) -> None:
        """Updates with gradients that are summed over devices and workers; or checks them, and
        skips the update if one is not finite.

        Args:
            updaters: MXNet's updater of each device, or one for all. The optimizer's
                `rescale_grad` is the factor of unscaled gradients.
        """
        optimizer = updaters[0].optimizer
        rescale_grad = optimizer.rescale_grad
        multiplier = self._multiplier(rescale_grad)
        checks = self.checks_gradients or self.weights_replaced or self._next_max_norm is not None
        gradients = self.gradients.find_new(self.loss_scale.scales)
        checks = checks or any(gradient.array is not gradient.own for gradient in gradients)
        if checks:
            check = self.gradients.check(gradients, self.averages, self._workers.sums)
        else:
            self._unchecked = gradients, multiplier, versions([g.own for g in gradients])
        update = prepared(updaters, gradients)  # while a GPU computes the check
        updates, max_norm = True, self._next_max_norm or self.max_norm
        if checks:
            norm, overflowed = check()
            self._check_unwritten()
            self._last, self._unchecked = (norm * multiplier, overflowed), None
            if self._workers.exchange:
                norm = self._workers.largest_after_sum(norm)
            updates = math.isfinite(norm) and not self.weights_replaced
            if updates and max_norm is not None and norm * multiplier > max_norm:
                multiplier *= max_norm / (norm * multiplier)
        try:
            if not updates:
                self._skip(gradients, overflowed)
                return
            optimizer.rescale_grad = multiplier
            update()
            if self.averages is not None:
                self.averages.copy()
            if checks:
                self.loss_scale = self.loss_scale.update(self._multiplier(1) * norm, self.scale)
        finally:
            optimizer.rescale_grad = rescale_grad
            if not self.loss_scale.scales:
                self.gradients.marks(clear=True)
            self.finish(updates)

    def finish(self, updated: bool = True) -> None:
        """Ends the step."""
        self.updated, self.weights_replaced = updated, False
        if updated:
            self.skipped_in_a_row, self._has_updated = 0, True
        self.reset()

    def report_overflow(self, trained: Any) -> None:
        """Reports the operators of forward passes that have overflowed since the last step. If this
        step was skipped, the reason is logged already."""
        operators = overflows()
        if operators and self.updated and Step.after_overflow is not None:
            Step.after_overflow(trained, operators)

    def _multiplier(self, rescale_grad: float) -> float:
        """Returns the factor of gradients, from that of unscaled ones."""
        return rescale_grad if self._unscaled else rescale_grad / self.scale

    def _skip(self, gradients: Sequence[Gradient], overflowed: Sequence[str]) -> None:
        """Lowers the loss scale, and logs the reason. Raises LossScaleError if no scale helps."""
        set_to_zero(self.gradients.added())
        self.skipped += 1
        if self.weights_replaced:
            refusals.log_replaced_weights()
            return
        if self.averages is not None:
            self.averages.restore()
        self.skipped_in_a_row += 1
        # an overflow on one worker is an overflow on all, so all exchange this
        is_finite = arrays.all_finite([arrays.to_float32(loss) for loss in self._losses])
        self.loss_scale = refusals.skip(
            self.skipped_in_a_row, overflowed, not self._workers.any(not is_finite),
            self.loss_scale, self.scale, lambda: refusals.circumstances(
                gradients, self._losses, not self.gradients.marked, self._has_updated))

    # ---- the last step

    @property
    def gradient_norm(self) -> Optional[float]:
        """The norm of the last step's gradients, unscaled and averaged over the batch. It is
        computed now if the step has not, and the gradients have not been written since."""
        if self._unchecked is not None:
            gradients, multiplier, before = self._unchecked
            now = versions([gradient.own for gradient in gradients])
            if before is not None and now is not None and read(now) != read(before):
                refusals.overwritten()
            norm, overflowed = self.gradients.check(gradients, once=self._workers.sums)()
            self._last, self._unchecked = (norm * multiplier, overflowed), None
        return self._last[0]

    @property
    def overflowed(self) -> Tuple[str, ...]:
        """The names of parameters whose gradients are not finite, of the pending gradients or else
        of the last step."""
        pending = self.stage is not Stage.EMPTY
        return tuple(self.gradients.check(self.find_new())()[1] if pending else self._last[1])

    # ---- files

    def state(self) -> Dict[str, Any]:
        """Returns the state for files."""
        return {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row,
                "loss_scale": self.loss_scale.state_dict() or None}

    def load(self, state: Dict[str, Any]) -> None:
        """Loads a result of `state`, which is empty for a file of MXNet, and clears the state
        of backward passes. An error changes nothing."""
        skipped, in_a_row = (whole_number(state.get(key, 0), key, least=0)
                             for key in ("skipped", "skipped_in_a_row"))
        if state.get("loss_scale"):
            self.loss_scale = self.loss_scale.load_state_dict(state["loss_scale"])
        self.skipped, self.skipped_in_a_row, self._has_updated = skipped, in_a_row, True
        self.weights_replaced, self._last, self._unchecked = False, (None, ()), None
        self.reset()


@contextmanager
def backward_pass(steps: Sequence[Step], losses: Sequence[Array]) -> Iterator[float]:
    """Yields the scale of the backward pass in the `with` block, which belongs to these steps and
    starts at these losses. Autograd must not record when the block begins."""
    scale = scale_of_pass(steps)
    for step in steps:
        step.begin(scale)
    ended: Optional[Sequence[Array]] = None
    try:
        yield scale
        ended = losses
    finally:
        for step in steps:
            step.end(scale, ended)


def scale_of_pass(steps: Sequence[Step]) -> float:
    """Returns the scale of the next backward pass for these steps: that of earlier passes since the
    last update, or the smallest of the steps."""
    begun = {step.scale for step in steps if step.stage is not Stage.EMPTY}
    if len(begun) > 1:
        refusals.other_scales(begun)
    return min(begun or {step.loss_scale.scale for step in steps})
