"""One step, for a Trainer and for a Module alike.

    begin_backward,     around each backward pass; `Pending` holds what the step needs
    end_backward
    settle              after it, while a dynamic scale is not settled: checks the gradients, and
                        where they overflow repeats the pass at lower scales, so that no step is
                        lost
    update_or_skip      checks the summed gradients, once:
                          all finite   updates, with gradients * rescale_grad / scale, clipped
                          not          does not; gradients that add up become 0; the log says why
                        updates the loss scale, and clears `Pending`

Nothing is written into a gradient. One number unscales and clips them all: the optimizer's
`rescale_grad`, by which it multiplies gradients in float32.
"""
import logging
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Optional, Protocol, Sequence, Set, Tuple

from .._mxnet import mx, np
from ..checks import in_names, positive_number, whole_number
from ..cpu.arrays import dtype_name, multiply, to_float32
from ..cpu.finite import all_finite, not_finite, squares
from ..cpu.library import started, versions
from ..formats import FORMATS
from ..parallel.sync import Workers
from .loss_scale import LossScaleError
from .static_pair import GivenLossScale, as_loss_scale

log = logging.getLogger("gluon_amp")

# Steps skipped in a row, before an error, where no scale can back off: as many as a
# dynamic scale takes from its first value down to its floor.
PATIENCE = 16
_SEVERAL = 3  # of which a warning tells, where the scale does back off

Place = Tuple[int, int]  # of a gradient: its parameter's number, its device's


@dataclass
class Gradient:
    """The gradient of one parameter on one device."""
    name: str
    place: Place
    weight: "mx.nd.NDArray"
    array: "mx.nd.NDArray"  # what the update uses: the gradient itself, or its replacement
    own: "mx.nd.NDArray"  # the gradient itself


@dataclass
class Pending:
    """What has been done since the last step.

    Attributes:
        scale: the loss scale of the backward passes; None before the first.
        losses: what they began at, without graphs.
        written: the gradients that they wrote.
        stale: names of the parameters whose gradients none of them wrote.
        unscaled: float32 gradients that the update uses instead: of `unscale`.
        summed: float32 sums over workers that it uses instead: of a float32 wire.
        are_summed: whether gradients have been summed over devices and workers.
        max_norm: the norm that the next update is clipped to.
        versions: gradients that nobody else may write, and how often each had been written.
        writes: earlier ones, and how often each was written since.
        checked: gradients as `settle` has checked them, and their sums of squares.
    """
    scale: Optional[float] = None
    losses: List["mx.nd.NDArray"] = field(default_factory=list)
    written: Dict[Place, Gradient] = field(default_factory=dict)
    stale: List[str] = field(default_factory=list)
    unscaled: Optional[Dict[Place, "mx.nd.NDArray"]] = None
    summed: Dict[Place, "mx.nd.NDArray"] = field(default_factory=dict)
    are_summed: bool = False
    max_norm: Optional[float] = None
    versions: Optional[Tuple[Sequence[Gradient], Optional["mx.nd.NDArray"]]] = None
    writes: List[Tuple[Sequence[Gradient], "mx.nd.NDArray"]] = field(default_factory=list)
    checked: Optional[Tuple[Sequence[Gradient], "np.ndarray[Any, Any]"]] = None


class Repeatable(Protocol):
    """A backward pass that `settle` may repeat."""

    def gradients(self) -> Sequence[Gradient]:
        """Those written since the last step."""

    def can_repeat(self) -> bool:
        """Whether another pass gives the same gradients."""

    def repeat(self, scale: float) -> None:
        """Makes the pass again, at this loss scale."""


class Step:
    """The steps of a Trainer or a Module: their loss scale, and what became of them.

    Attributes:
        loss_scale: also where there is none.
        workers: how gradients are summed.
        max_norm: what each update is clipped to; None for no clipping.
        skipped: how many steps were skipped.
        skipped_in_a_row: how many of them since the last update.
        updated: whether the last step updated.
        weights_replaced: whether rank 0's weights have replaced any worker's since the last step,
            so that gradients may be of those before.
        pending: what has been done since.
    """

    def __init__(self, loss_scale: GivenLossScale, max_norm: Optional[float],
                 workers: Workers) -> None:
        self.loss_scale = as_loss_scale(loss_scale)
        self.workers = workers
        self.max_norm = None if max_norm is None else positive_number(max_norm, "clip_norm")
        self.skipped = self.skipped_in_a_row = 0
        self.updated = True
        self.weights_replaced = False
        self.pending = Pending()
        self._last_overflowed: Tuple[str, ...] = ()  # names, of the last step
        self._adding_at: Optional[float] = None  # the scale of gradients that add up
        self._warned: Set[str] = set()  # which warnings of searches have been logged

    @property
    def scaling(self) -> bool:
        """Whether gradients are scaled."""
        return self.loss_scale.scales

    @property
    def checks_gradients(self) -> bool:
        """Whether gradients are read before each update."""
        return self.scaling or self.max_norm is not None

    @property
    def searching(self) -> bool:
        """Whether `settle` is to be called after each backward pass."""
        return not self.loss_scale.settled

    @property
    def backward_scale(self) -> float:
        """The scale of the next backward pass: that of those before in this step."""
        return self.loss_scale.scale if self.pending.scale is None else self.pending.scale

    @property
    def update_scale(self) -> float:
        """The loss scale of the gradients that the next update uses."""
        return 1.0 if self.pending.unscaled is not None else self.pending.scale or 1.0

    @property
    def begun(self) -> bool:
        """Whether there has been a backward pass since the last step."""
        return self.pending.scale is not None

    @property
    def replacements(self) -> Dict[Place, "mx.nd.NDArray"]:
        """What the update uses in place of parameters' own gradients."""
        return {**self.pending.summed, **(self.pending.unscaled or {})}

    def forget(self) -> None:
        """Nothing has been done since the last step."""
        self.pending = Pending()

    # ---- a backward pass

    def begin_backward(self, adding_up: Sequence["mx.nd.NDArray"],
                       scale: Optional[float] = None) -> float:
        """Before a backward pass: gives its scale. Gradients that add up, and stand at another
        scale since an earlier step, are brought to this one."""
        self.count_writes()
        self.pending.checked = None
        scale = self.backward_scale if scale is None else scale
        if self._adding_at is not None and self._adding_at != scale:
            multiply(adding_up, scale / self._adding_at)
        self._adding_at = scale
        return scale

    def end_backward(self, scale: float, losses: Sequence["mx.nd.NDArray"]) -> None:
        """After a backward pass that began at these losses, with this scale."""
        self.pending.scale = scale
        self.pending.losses += losses
        self.pending.unscaled = self.pending.max_norm = None

    def settle(self, backward: Repeatable) -> None:
        """Checks the gradients of a backward pass at once; where they overflow, repeats it at
        lower scales, and keeps the scale that fits."""
        if self.weights_replaced:  # the step will be skipped
            return
        if not self._overflow_anywhere(backward.gradients()) or self._loss_is_to_blame():
            return
        if self.workers.any(not backward.can_repeat()):
            self._warn_once("no second pass", "no second backward pass goes through this graph (a "
                           "loop, or MXNet's own Dropout): steps are skipped until the loss scale "
                           "fits")
            return

        def overflows(scale: float) -> bool:
            self.pending.scale = self._adding_at = scale
            backward.repeat(scale)
            return self._overflow_anywhere(backward.gradients())

        before, passes = self.loss_scale.scale, self.loss_scale.search(overflows)
        if passes:
            found = _power(self.loss_scale.scale)
            log.info("loss scale %s found in %d backward passes", found, passes)
        elif self.loss_scale.scale == before:  # and all were tried
            names = self.overflowed(backward.gradients)
            self._warn_once("nothing fits", self.loss_scale.nothing_fits(names))

    def follow(self, other: "Step") -> None:
        """Takes over the scale that another step over the same backward pass has settled."""
        if self is other:
            return
        self.pending.scale = self._adding_at = other.pending.scale
        if self.searching and other.pending.scale == other.loss_scale.scale:
            self.loss_scale.lower_to(other.loss_scale.scale)

    def _warn_once(self, what: str, text: str) -> None:
        """Warns; what has been warned of before is an info."""
        log.log(logging.INFO if what in self._warned else logging.WARNING, text)
        self._warned.add(what)

    def _overflow_anywhere(self, gradients: Sequence[Gradient]) -> bool:
        """Whether gradients overflow on any worker, or may once they are summed over devices and
        workers."""
        sums = _sums_of_squares(gradients)
        overflow = bool(_not_finite(gradients, sums))
        devices = {g.place[1] for g in gradients} if self.workers.sums else {0}
        summed = len(devices) * self.workers.count
        if summed > 1:
            # a float32 sum over Horovod could be larger: there this takes a lower scale than needed
            largest = [FORMATS[dtype_name(g.array.dtype)].largest / summed for g in gradients]
            overflow = overflow or any(
                math.sqrt(s) > most  # no number is above the norm, which is there already
                and np.abs(g.array.asnumpy()).max() > most
                for g, s, most in zip(gradients, sums, largest))
        # `update_or_skip` uses these sums again where nothing changes the gradients in between: no
        # sum over devices and workers, and no write by others, which the engine would find.
        unchanged = started() and self.workers.count == len({g.place[1] for g in gradients}) == 1
        self.pending.checked = (gradients, sums) if unchanged and not overflow else None
        return self.workers.any(overflow)

    def _loss_is_to_blame(self) -> bool:
        """Whether a loss is infinite or NaN on any worker. All workers have to call it, and do:
        where gradients overflow on one of them, all take it so."""
        return self.workers.any(
            not all_finite([to_float32(loss) for loss in self.pending.losses]))

    # ---- writes by others between the backward pass and the update

    def record_versions(self, gradients: Sequence[Gradient]) -> None:
        """From here on nobody is to write into these gradients: they are scaled, or the update
        does not use them, but what `unscale` made of them."""
        if (self.scaling or self.pending.unscaled is not None) and gradients:
            self.pending.versions = gradients, versions([g.own for g in gradients])

    def count_writes(self) -> None:
        """Before this package writes into those gradients, or uses them: counts how often others
        have written them by now. Does not wait for the count."""
        if self.pending.versions is not None:
            gradients, before = self.pending.versions
            if before is not None:
                writes = versions([g.own for g in gradients], since=before)
                assert writes is not None  # as it was not for `before`
                self.pending.writes.append((gradients, writes))
        self.pending.versions = None

    def check_writes(self) -> None:
        """Raises an error where somebody has written into gradients."""
        written = [g.name for gradients, counts in self.pending.writes
                   for g, count in zip(gradients, counts.asnumpy().tolist()) if count]
        self.pending.writes.clear()
        if written:
            scale, unscaled = self.update_scale, self.pending.unscaled
            self.forget()
            if unscaled is not None:
                raise RuntimeError(f"the gradients{in_names(dict.fromkeys(written))} were written "
                                   "after trainer.unscale(), but the update uses what that "
                                   "returned: change that")
            raise RuntimeError(
                f"the gradients{in_names(dict.fromkeys(written))} were written between the "
                f"backward pass and the step. They are multiplied by the loss scale, {scale:g}, "
                "which that write leaves out. To clip them, call "
                "trainer.clip_norm(max_norm, batch_size), or give clip_norm=; to change them, "
                "change what trainer.unscale() returns")

    # ---- the sum over devices and workers

    def sum(self, gradients: Iterable[Tuple[int, Any, List["mx.nd.NDArray"]]]) -> None:
        """Sums gradients over devices and workers.

        Args:
            gradients: a parameter's number, its key in the store, its gradient on each device.
        """
        if not self.workers.sums:
            return
        several = list(gradients)
        summed = self.workers.sum((key, on_devices) for _, key, on_devices in several)
        self.pending.summed = {(i, device): array for i, key, _ in several
                               for device, array in enumerate(summed.get(key, ()))}

    # ---- the update

    def update_or_skip(self, gradients: Sequence[Gradient], rescale_grad: float,
             update: Callable[[float], None], clear: Callable[[], None]) -> bool:
        """Updates, or skips the update where a gradient is not finite.

        Args:
            gradients: summed over devices and workers.
            rescale_grad: what unscaled gradients are to be multiplied by.
            update: makes the update with gradients multiplied by a number.
            clear: makes those gradients 0 that add up, once some are infinite.
        """
        sums = self._sums(gradients)
        self.check_writes()
        self._last_overflowed = _not_finite(gradients, sums)
        self.updated = not self.workers.any_after_sum(bool(self._last_overflowed)) \
            and not self.weights_replaced
        try:
            if self.weights_replaced:
                clear()
                self.skipped += 1
                log.warning("step skipped: ranks had other weights, which are rank 0's now. "
                            "Where the network has seen data before the Trainer is made, no "
                            "step is lost")
            elif self.updated:
                update(self._multiplier(rescale_grad, gradients, sums))
                self.skipped_in_a_row = 0
                self.loss_scale.update(True)
            else:
                clear()
                self._skip()
        finally:
            self.forget()
            self.weights_replaced = False
        return self.updated

    def _sums(self, gradients: Sequence[Gradient]) -> "np.ndarray[Any, Any]":
        """The sum of squares of each: what `settle` has computed, if of the same arrays."""
        if self.pending.checked is None:
            return _sums_of_squares(gradients)
        checked, sums = self.pending.checked
        same = [id(g.array) for g in checked] == [id(g.array) for g in gradients]
        return sums if same else _sums_of_squares(gradients)

    def norm(self, gradients: Sequence[Gradient]) -> float:
        """Of the whole gradient, as it is."""
        return self._norm(gradients, self._sums(gradients))

    def _norm(self, gradients: Sequence[Gradient], sums: "np.ndarray[Any, Any]") -> float:
        counted = sums.tolist()
        if self.workers.sums:  # devices hold the same gradient: it counts once
            counted = {g.place[0]: s for g, s in zip(gradients, counted)}.values()
        return math.sqrt(sum(counted))

    def _multiplier(self, rescale_grad: float, gradients: Sequence[Gradient],
                    sums: "np.ndarray[Any, Any]") -> float:
        """What the update multiplies gradients by: unscales and clips them."""
        multiplier = rescale_grad / self.update_scale
        max_norm = self.max_norm if self.pending.max_norm is None else self.pending.max_norm
        if max_norm is not None:
            norm = multiplier * self._norm(gradients, sums)
            multiplier *= max_norm / norm if norm > max_norm else 1.0
        return multiplier

    def _skip(self) -> None:
        """Counts a skipped step. Where no scale helps, raises LossScaleError."""
        before, names = self.loss_scale.scale, self._last_overflowed
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self._loss_is_to_blame():
            reason = "the loss itself is not finite, which no loss scale causes or mends: " \
                     "look at the data, the learning rate, and what overflows in the network " \
                     "(gluon_amp.explain(net, batch, loss_fn))"
        elif self.loss_scale.back_off(names):
            # one is how a dynamic scale works; several in a row are no search, but lost steps
            several = self.skipped_in_a_row == _SEVERAL and "nothing fits" not in self._warned
            log.log(logging.WARNING if several else logging.INFO,
                    "%s skipped%s: gradients not finite%s; loss scale %g%s",
                    f"{_SEVERAL} steps" if several else "step", " in a row" if several else "",
                    in_names(names, most=1), before, f" -> {self.loss_scale.scale:g}"
                    if self.loss_scale.scale != before else ", kept by its hysteresis")
            return
        elif self.scaling:
            reason = f"gradients are not finite{in_names(names)} at the loss scale " \
                     f"{before:g}, which is static: lower it, or use loss_scale='dynamic'. " \
                     "gluon_amp.explain(net, batch, loss_fn, loss_scale) names the first node " \
                     "that is not finite"
        else:
            reason = f"gradients are not finite{in_names(names)}, without a loss scale. " \
                     "gluon_amp.explain(net, batch, loss_fn) names the first node that is not " \
                     "finite"
        if self.skipped_in_a_row >= PATIENCE:
            raise LossScaleError(f"{self.skipped_in_a_row} steps skipped in a row: {reason}")
        log.warning("step skipped: %s", reason)

    def state(self) -> Dict[str, Any]:
        """For files."""
        return {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row,
                "loss_scale": self.loss_scale.state_dict() or None}

    def load(self, state: Dict[str, Any]) -> None:
        """Takes over what `state` gave, or nothing for a file of MXNet's, and forgets what was
        pending; an error changes nothing."""
        if not isinstance(state, dict):
            raise ValueError(f"the state of steps is a dictionary. Received: {state!r}")
        skipped, in_a_row = (whole_number(state.get(key, 0), key, least=0)
                             for key in ("skipped", "skipped_in_a_row"))
        if state.get("loss_scale"):
            self.loss_scale.load_state_dict(state["loss_scale"])
        self.skipped, self.skipped_in_a_row = skipped, in_a_row
        self._last_overflowed, self.weights_replaced = (), False
        self.forget()

    def overflowed(self, gradients: Callable[[], Sequence[Gradient]]) -> Tuple[str, ...]:
        """Names of the parameters whose newest gradients are not finite: those that wait for
        their step, or else those of the last step."""
        if not self.begun:
            return self._last_overflowed
        waiting = gradients()
        return _not_finite(waiting, _sums_of_squares(waiting))


def _power(scale: float) -> str:
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{scale:g}"


def _sums_of_squares(gradients: Sequence[Gradient]) -> "np.ndarray[Any, Any]":
    """The sum of squares of each: finite where all its numbers are."""
    return squares([g.array for g in gradients])


def _not_finite(gradients: Sequence[Gradient], sums: "np.ndarray[Any, Any]") -> Tuple[str, ...]:
    return not_finite([g.name for g in gradients], sums)
