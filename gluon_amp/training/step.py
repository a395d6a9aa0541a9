"""The step of a Trainer or a Module.

    begin_backward,     before and after each backward pass; `Pending` has the state until the step
    end_backward
    settle              after it, until a dynamic scale is settled: checks the gradients, and if
                        they overflow repeats the pass at lower scales, so that no step is skipped
    update_or_skip      checks the summed gradients, once:
                          all finite   updates, with gradients * rescale_grad / scale, clipped
                          otherwise    skips; accumulated gradients become 0; logs the reason
                        updates the loss scale, and clears `Pending`

A step never writes to gradients. One number unscales and clips all of them: the optimizer's
`rescale_grad`, by which it multiplies gradients in float32.
"""
import functools
import logging
import math
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Protocol,
    Sequence,
    Set,
    Tuple,
    TypeVar,
)

from .._mxnet import GRAPHS, mx, np
from ..checks import in_names, positive_number, whole_number
from ..cpu.arrays import dtype_name, multiply, to_float32
from ..cpu.finite import all_finite, not_finite, squares
from ..cpu.library import started, versions
from ..formats import FORMATS
from ..parallel.sync import Workers
from .averages import Averages
from .loss_scale import LossScaleError
from .static_pair import GivenLossScale, as_loss_scale

log = logging.getLogger("gluon_amp")

# Skipped steps in a row before an error if no scale can back off: as many as a dynamic scale takes
# from its first value to its minimum.
PATIENCE = 16
_SEVERAL = 3  # skipped steps in a row before a warning if the scale backs off

Method = TypeVar("Method", bound=Callable[..., Any])
Place = Tuple[int, int]  # a gradient's key: the indices of its parameter and of its device


@dataclass
class Gradient:
    """The gradient of one parameter on one device."""
    name: str
    place: Place
    weight: "mx.nd.NDArray"
    array: "mx.nd.NDArray"  # for the update: the gradient or its replacement
    own: "mx.nd.NDArray"  # the gradient


@dataclass
class Pending:
    """The state since the last step.

    Attributes:
        scale: the loss scale of the pending gradients; None before the first backward pass.
        losses: the losses, without graphs.
        thread: the thread of the pending backward passes.
        written: the gradients that were written.
        stale: names of the parameters whose gradients were not written.
        unscaled: float32 gradients of `unscale`, which the update uses instead.
        summed: float32 sums over workers of a float32 wire, which the update uses instead.
        are_summed: whether gradients have been summed over devices and workers.
        max_norm: the norm to which the next update is clipped.
        versions: gradients that only this package may write, and their counts of writes.
        writes: earlier ones, and the counts of writes since.
        checked: gradients that `settle` has checked, and their sums of squares.
    """
    scale: Optional[float] = None
    losses: List["mx.nd.NDArray"] = field(default_factory=list)
    thread: Optional[threading.Thread] = None
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
        """Returns the gradients written since the last step."""

    def refusal(self) -> str:
        """Returns why another pass does not compute the same gradients; "" if it does."""

    def repeat(self, scale: float) -> None:
        """Repeats the pass at this loss scale."""


class Step:
    """The steps of a Trainer or a Module.

    Attributes:
        loss_scale: the loss scale; a `LossScale` of 1 without scaling.
        workers: the workers, which sum gradients.
        heads: the name in messages of the arrays at which backward passes start.
        max_norm: the norm to which each update is clipped; None for no clipping.
        skipped: the number of skipped steps.
        skipped_in_a_row: the number of skipped steps since the last update.
        updated: whether the last step updated.
        has_updated: whether any step has updated, also before its state was saved.
        weights_replaced: whether rank 0's weights have replaced any worker's since the last step,
            so that gradients may belong to earlier weights.
        pending: the state since the last step.
        averages: the moving averages that the step keeps finite.
    """

    def __init__(self, loss_scale: GivenLossScale, max_norm: Optional[float],
                 workers: Workers, heads: str = "loss") -> None:
        self.loss_scale = as_loss_scale(loss_scale)
        self.workers, self.heads = workers, heads
        self.max_norm = None if max_norm is None else positive_number(max_norm, "clip_norm")
        self.skipped = self.skipped_in_a_row = 0
        self.updated = True
        self.has_updated = False
        self.weights_replaced = False
        self.pending = Pending()
        self.averages = Averages()
        self._last_overflowed: Tuple[str, ...] = ()  # names in the last step
        self._adding_at: Optional[float] = None  # the scale of accumulated gradients
        self._warned: Set[str] = set()  # logged warnings of searches
        self._calling: Optional[threading.Thread] = None  # the thread that is in `in_thread`

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
        """Whether `settle` must be called after each backward pass."""
        return not self.loss_scale.settled

    @property
    def backward_scale(self) -> float:
        """The scale of the next backward pass, which is that of earlier ones in this step."""
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
        """The arrays that the update uses instead of parameters' gradients."""
        return {**self.pending.summed, **(self.pending.unscaled or {})}

    def forget(self) -> None:
        """Clears the state since the last step."""
        self.pending = Pending()

    @contextmanager
    def in_thread(self, call: str) -> Iterator[None]:
        """Refuses a call while another thread is in one, or has pending backward passes."""
        here = threading.current_thread()
        with GRAPHS:
            for other in (self._calling, self.pending.thread):
                if other is not None and other is not here and other.is_alive():
                    raise RuntimeError(
                        f"{call} was called in the thread {here.name}, while the thread "
                        f"{other.name} is in a step of the same parameters. One thread makes all "
                        "calls of a step. Valid: the losses of all devices in one call, as "
                        "trainer.backward([loss, other]), or a network for each thread")
            before, self._calling = self._calling, here
        try:
            yield
        finally:
            self._calling = before

    # ---- a backward pass

    def begin_backward(self, adding_up: Sequence["mx.nd.NDArray"],
                       scale: Optional[float] = None) -> float:
        """Returns the scale of the next backward pass. Accumulated gradients at another scale of an
        earlier step are rescaled to it."""
        self.count_writes()
        self.pending.checked = None
        scale = self.backward_scale if scale is None else scale
        if self._adding_at is not None and self._adding_at != scale:
            multiply(adding_up, scale / self._adding_at)
        self._adding_at = scale
        return scale

    def end_backward(self, scale: float, losses: Sequence["mx.nd.NDArray"]) -> None:
        """Records a backward pass from these losses, with this scale."""
        self.pending.scale = scale
        self.pending.thread = threading.current_thread()
        self.pending.losses += losses
        self.pending.unscaled = self.pending.max_norm = None

    def settle(self, backward: Repeatable) -> None:
        """Checks the gradients of a backward pass. If they overflow, repeats it at lower scales,
        and keeps the scale that fits."""
        if self.weights_replaced:  # the step will be skipped
            return
        if not self._overflow_anywhere(backward.gradients()) or self._loss_is_to_blame():
            return
        refusal = backward.refusal()
        if self.workers.any(bool(refusal)):
            self.warn_of_one_pass(refusal or "another rank's graph allows no second backward pass: "
                                  "steps are skipped until the loss scale fits")
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
            self._warn_once("nothing fits", self.loss_scale.nothing_fits(names)
                            + self._circumstances(backward.gradients()))

    def follow(self, other: "Step") -> None:
        """Adopts the scale that another step with the same backward pass has settled."""
        if self is other:
            return
        self.pending.scale = self._adding_at = other.pending.scale
        if self.searching and other.pending.scale == other.loss_scale.scale:
            self.loss_scale.lower_to(other.loss_scale.scale)

    def warn_of_one_pass(self, text: str) -> None:
        """Warns once that a graph allows no second backward pass."""
        self._warn_once("no second pass", text)

    def _warn_once(self, what: str, text: str) -> None:
        """Logs a warning once, and later as info."""
        log.log(logging.INFO if what in self._warned else logging.WARNING, text)
        self._warned.add(what)

    def _overflow_anywhere(self, gradients: Sequence[Gradient]) -> bool:
        """Whether gradients overflow on any worker, or may overflow in the sum over devices and
        workers."""
        sums = self._check(gradients)
        overflow = bool(_not_finite(gradients, sums))
        devices = {g.place[1] for g in gradients} if self.workers.sums else {0}
        summed = len(devices) * self.workers.count
        if summed > 1:
            # too strict for float32 sums over Horovod, which allow a larger scale
            largest = [_largest(dtype_name(g.array.dtype)) / summed for g in gradients]
            overflow = overflow or any(
                math.sqrt(s) > most  # no number is above the norm, which is there already
                and np.abs(g.array.asnumpy()).max() > most
                for g, s, most in zip(gradients, sums, largest))
        # `update_or_skip` reuses these sums if the gradients do not change in between: without a
        # sum over devices and workers, and without other writes, which the engine detects.
        unchanged = started() and self.workers.count == len({g.place[1] for g in gradients}) == 1
        self.pending.checked = (gradients, sums) if unchanged and not overflow else None
        return self.workers.any(overflow)

    def _loss_is_to_blame(self) -> bool:
        """Whether a loss is infinite or NaN on any worker. All workers must call it, and do so,
        because an overflow on one is an overflow on all."""
        return self.workers.any(
            not all_finite([to_float32(loss) for loss in self.pending.losses]))

    # ---- writes by others between the backward pass and the update

    def record_versions(self, gradients: Sequence[Gradient]) -> None:
        """Records the counts of writes to these gradients, which only this package may write from
        now on: they are scaled, or the update uses the result of `unscale` instead."""
        if (self.scaling or self.pending.unscaled is not None) and gradients:
            self.pending.versions = gradients, versions([g.own for g in gradients])

    def count_writes(self) -> None:
        """Counts the writes of others to those gradients, before this package writes or uses them.
        It does not wait for the count."""
        if self.pending.versions is not None:
            gradients, before = self.pending.versions
            if before is not None:
                writes = versions([g.own for g in gradients], since=before)
                assert writes is not None  # because `before` was not None
                self.pending.writes.append((gradients, writes))
        self.pending.versions = None

    def check_writes(self) -> None:
        """Raises an error if others have written to gradients."""
        written = [g.name for gradients, counts in self.pending.writes
                   for g, count in zip(gradients, counts.asnumpy().tolist()) if count]
        self.pending.writes.clear()
        if written:
            scale, unscaled = self.update_scale, self.pending.unscaled
            self.forget()
            if unscaled is not None:
                raise RuntimeError(f"the gradients{in_names(dict.fromkeys(written))} were written "
                                   "after trainer.unscale(), but the update uses the arrays that "
                                   "unscale() returned. Modify those arrays")
            raise RuntimeError(
                f"the gradients{in_names(dict.fromkeys(written))} were written between the "
                f"backward pass and the step. They are multiplied by the loss scale, {scale:g}, "
                "which such a write ignores. To clip them, call "
                "trainer.clip_norm(max_norm, batch_size), or give clip_norm=. To change them, "
                "modify the arrays that trainer.unscale() returns")

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
        """Updates, or skips the update if a gradient is not finite.

        Args:
            gradients: the gradients, summed over devices and workers.
            rescale_grad: the factor of unscaled gradients.
            update: updates with gradients multiplied by a number.
            clear: sets accumulated gradients to 0 after an overflow.
        """
        known = self._checked_sums(gradients)
        sums = self._check(gradients) if known is None else known
        self.check_writes()
        self._last_overflowed = _not_finite(gradients, sums)
        self.updated = not self.workers.any_after_sum(bool(self._last_overflowed)) \
            and not self.weights_replaced
        try:
            if self.weights_replaced:
                clear()
                self.skipped += 1
                log.warning("step skipped: ranks had other weights, which are rank 0's now. Run "
                            "the network once before you create the Trainer to avoid this")
            elif self.updated:
                update(self._multiplier(rescale_grad, gradients, sums))
                self.averages.copy()
                self.skipped_in_a_row, self.has_updated = 0, True
                self.loss_scale.update(True)
            else:
                clear()
                self.averages.restore()
                self._skip(gradients)
        finally:
            self.forget()
            self.weights_replaced = False
        return self.updated

    def _sums(self, gradients: Sequence[Gradient]) -> "np.ndarray[Any, Any]":
        """Returns the sum of squares of each gradient."""
        known = self._checked_sums(gradients)
        return _sums_of_squares(gradients) if known is None else known

    def _check(self, gradients: Sequence[Gradient]) -> "np.ndarray[Any, Any]":
        """Returns the same, and checks copies of moving averages in the same synchronization."""
        sums = squares([*(g.array for g in gradients), *self.averages.unchecked()])
        self.averages.check(np.isfinite(sums[len(gradients):]).tolist())
        return sums[:len(gradients)]

    def _checked_sums(self, gradients: Sequence[Gradient]) -> Optional["np.ndarray[Any, Any]"]:
        """Returns the sums of squares of `settle`, if the arrays are the same."""
        if self.pending.checked is None:
            return None
        checked, sums = self.pending.checked
        same = [id(g.array) for g in checked] == [id(g.array) for g in gradients]
        return sums if same else None

    def norm(self, gradients: Sequence[Gradient]) -> float:
        """Returns the norm of all gradients together, without scaling."""
        return self._norm(gradients, self._sums(gradients))

    def _norm(self, gradients: Sequence[Gradient], sums: "np.ndarray[Any, Any]") -> float:
        counted = sums.tolist()
        if self.workers.sums:  # devices have the same gradient, which counts once
            counted = {g.place[0]: s for g, s in zip(gradients, counted)}.values()
        return math.sqrt(sum(counted))

    def _multiplier(self, rescale_grad: float, gradients: Sequence[Gradient],
                    sums: "np.ndarray[Any, Any]") -> float:
        """Returns the factor of gradients in the update, which unscales and clips them."""
        multiplier = rescale_grad / self.update_scale
        max_norm = self.max_norm if self.pending.max_norm is None else self.pending.max_norm
        if max_norm is not None:
            norm = multiplier * self._norm(gradients, sums)
            multiplier *= max_norm / norm if norm > max_norm else 1.0
        return multiplier

    def _circumstances(self, gradients: Sequence[Gradient]) -> str:
        """Returns what narrows down the cause of gradients that are not finite: the mean of the
        loss, weights that are not finite, and whether the learning rate can be the cause."""
        losses = [to_float32(loss).asnumpy().ravel() for loss in self.pending.losses]
        with np.errstate(invalid="ignore", over="ignore"):
            mean = np.mean(np.concatenate(losses), dtype=np.float64) if losses else math.nan
        dense = [g for g in gradients if g.weight.stype == "default"]
        weights = _not_finite(dense, squares([g.weight for g in dense]))
        cause = f"The weights are not finite{in_names(weights)}. " if weights else ""
        if self.has_updated:
            cause += "If the loss has grown, lower the learning rate"
        else:
            cause += "No step has updated the weights, so the learning rate is not the cause"
        return f". The mean of the {self.heads} is {mean:.6g}. {cause}"

    def _skip(self, gradients: Sequence[Gradient]) -> None:
        """Counts a skipped step. Raises LossScaleError if no scale helps."""
        before, names = self.loss_scale.scale, self._last_overflowed
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self._loss_is_to_blame():
            reason = "the loss itself is not finite at any loss scale: check the data. " \
                     "gluon_amp.explain(net, batch, loss_fn) names what overflows, and states " \
                     "if float32 is not finite either"
        elif self._backs_off(names, gradients):
            # a dynamic scale skips single steps; several in a row are worth a warning
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
        reason += self._circumstances(gradients)
        if self.skipped_in_a_row >= PATIENCE:
            raise LossScaleError(f"{self.skipped_in_a_row} steps skipped in a row: {reason}")
        log.warning("step skipped: %s", reason)

    def _backs_off(self, names: Sequence[str], gradients: Sequence[Gradient]) -> bool:
        """Lowers the loss scale. Returns False if it never changes."""
        try:
            return self.loss_scale.back_off(names)
        except LossScaleError as error:
            raise LossScaleError(f"{error}{self._circumstances(gradients)}") from None

    def state(self) -> Dict[str, Any]:
        """Returns the state for files."""
        return {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row,
                "loss_scale": self.loss_scale.state_dict() or None}

    def load(self, state: Dict[str, Any]) -> None:
        """Loads a result of `state`, which is empty for a file of MXNet, and clears `pending`. An
        error changes nothing."""
        if not isinstance(state, dict):
            raise ValueError(f"the state of steps is a dictionary. Received: {state!r}")
        skipped, in_a_row = (whole_number(state.get(key, 0), key, least=0)
                             for key in ("skipped", "skipped_in_a_row"))
        if state.get("loss_scale"):
            self.loss_scale.load_state_dict(state["loss_scale"])
        self.skipped, self.skipped_in_a_row, self.has_updated = skipped, in_a_row, True
        self._last_overflowed, self.weights_replaced = (), False
        self.forget()

    def overflowed(self, gradients: Callable[[], Sequence[Gradient]]) -> Tuple[str, ...]:
        """Returns the names of parameters whose gradients are not finite, of the pending gradients
        or else of the last step."""
        if not self.begun:
            return self._last_overflowed
        waiting = gradients()
        return _not_finite(waiting, _sums_of_squares(waiting))


def in_one_thread(method: Method) -> Method:
    """Refuses a call of an object's method while another thread is in a step of its `_step`."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._step.in_thread(f"{method.__name__}()"):
            return method(self, *args, **kwargs)
    return call  # type: ignore[return-value]


def _power(scale: float) -> str:
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{scale:g}"


def _largest(dtype: str) -> float:
    """Returns the largest number of a type."""
    return float(np.finfo(dtype).max) if dtype == "float64" else FORMATS[dtype].largest


def _sums_of_squares(gradients: Sequence[Gradient]) -> "np.ndarray[Any, Any]":
    """Returns the sum of squares of each gradient, which is finite if all its values are."""
    return squares([g.array for g in gradients])


def _not_finite(gradients: Sequence[Gradient], sums: "np.ndarray[Any, Any]") -> Tuple[str, ...]:
    return not_finite([g.name for g in gradients], sums)
