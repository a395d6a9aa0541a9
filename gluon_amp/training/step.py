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

MXNet marks the weights of gradients that autograd writes. The marks are cleared after each
`begin` and `end`, so a mark at the step comes from another backward pass. Executors mark nothing.
"""
import enum
import functools
import logging
import math
import threading
from contextlib import contextmanager
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
)

from .._mxnet import mx, np
from ..checks import positive_number, same_objects, whole_number
from ..cpu import arrays
from ..cpu.library import marks, read, versions
from . import refusals
from .gradients import Gradient, set_to_zero
from .loss_scale import AutoLossScale, GivenLossScale, as_loss_scale
from .moving_averages import MovingAverages

log = logging.getLogger("gluon_amp")

_LONGEST = 600  # seconds that a call waits for those of other threads

Method = TypeVar("Method", bound=Callable[..., Any])
Prepare = Callable[[], Callable[[float], None]]


class _Turns:
    """A lock for the calls of several threads. A copy is another lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> Any:
        return _Turns, ()


class Stage(enum.Enum):
    """What gradients are: see the head of this file."""
    EMPTY = 0
    SCALED = 1
    SUMMED = 2


class Step:
    """The steps of a Trainer or a Module.

    Args:
        gradients: returns the gradients of trained parameters; the same list again if nothing has
            changed.
        workers: the `Workers` that sum gradients and exchange numbers.
        loss_scale: as for `Trainer`.
        max_norm: as `clip_norm` for `Trainer`.
        marked: whether autograd writes the gradients. Executors write all, and mark nothing.
        adding: returns the arrays to which backward passes add; by default those of parameters.

    Attributes:
        loss_scale: the loss scale; a `LossScale` of 1 without scaling.
        max_norm: the norm to which each update is clipped; None for no clipping.
        skipped: the number of skipped steps.
        skipped_in_a_row: the number of those since the last update.
        updated: whether the last step updated.
        checked: the operators of graphs without any loss head that ignores the loss scale.
        weights_replaced: whether rank 0's weights have replaced any worker's since the last step,
            so that gradients may belong to earlier weights.
        averages: the moving averages that the step keeps finite; None on a CPU.
        stage: what the gradients are.
        scale: the loss scale of the gradients; 1 before the first backward pass.
    """

    def __init__(self, gradients: Callable[[], Sequence[Gradient]], workers: Any,
                 loss_scale: GivenLossScale, max_norm: Optional[float], marked: bool = True,
                 adding: Optional[Callable[[], List["mx.nd.NDArray"]]] = None) -> None:
        self.loss_scale = as_loss_scale(loss_scale)
        self._auto: Optional[AutoLossScale] = None  # which `decide` has replaced
        self.max_norm = None if max_norm is None else positive_number(max_norm, "clip_norm")
        self.skipped = self.skipped_in_a_row = 0
        self.updated, self._has_updated = True, False
        self.weights_replaced = False
        self.checked: Set[int] = set()
        self.averages: Optional[MovingAverages] = None
        self._workers, self._marked, self._adding = workers, marked, adding
        self._turns = _Turns()
        self._read = gradients
        self._gradients: Sequence[Gradient] = []  # those of the last `read`
        self._squares: List[arrays.Squares] = []  # the last sums of squares of them
        # the gradients of the last step, their factor in the update, and the sums of their squares,
        # or their counts of writes then
        self._last: Tuple[Sequence[Gradient], float, Any, Any] = [], 1.0, None, None
        self._adding_at: Optional[float] = None  # the scale of accumulated gradients
        self.reset()

    def reset(self) -> None:
        """Clears the state of the backward passes since the last step."""
        self.stage, self.scale, self._unscaled = Stage.EMPTY, 1.0, False
        self._next_max_norm: Optional[float] = None  # of the next update only
        self._losses: List[mx.nd.NDArray] = []  # of the backward passes, without graphs
        # gradients that only this package may write, their counts of writes, and those since
        self._guarded: Tuple[Sequence[Gradient], Optional[mx.nd.NDArray]] = [], None
        self._writes: List[Tuple[Sequence[Gradient], mx.nd.NDArray]] = []
        for gradient in self._gradients:
            gradient.is_new, gradient.array = False, gradient.own

    def decide(self, types: Collection[str]) -> None:
        """Decides loss_scale="auto" by the 16-bit types in which gradients are computed."""
        if self._auto is None and isinstance(self.loss_scale, AutoLossScale):
            self._auto, self.loss_scale = self.loss_scale, self.loss_scale.for_types(types)
        else:
            self.check_types(types)

    def check_types(self, types: Collection[str]) -> None:
        """Refuses types of gradients that need more than what `decide` has decided."""
        if self._auto is not None:
            needed, decided = self._auto.for_types(types), self.loss_scale
            if (needed.scales, needed.changes) > (decided.scales, decided.changes):
                refusals.other_types(decided, types)

    @property
    def scaling(self) -> bool:
        """Whether gradients are scaled. Otherwise any backward pass may write them."""
        return self.loss_scale.scales

    @property
    def checks_gradients(self) -> bool:
        """Whether each update checks gradients."""
        return self.loss_scale.scales or self.max_norm is not None

    @property
    def checks_next(self) -> bool:
        """Whether the next update checks gradients, or does not use them as they are."""
        return self.checks_gradients or self.weights_replaced or self._next_max_norm is not None \
            or any(gradient.array is not gradient.own for gradient in self._gradients)

    @contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """Runs the calls of several threads one after another."""
        if not self._turns.lock.acquire(timeout=_LONGEST):
            refusals.waited(call, _LONGEST)
        try:
            yield
        finally:
            self._turns.lock.release()

    # ---- gradients

    def read(self) -> Sequence[Gradient]:
        """Returns all gradients."""
        self._gradients = self._read()
        if self._marked and not self._gradients:
            refusals.nothing_to_train()
        return self._gradients

    def new(self) -> List[Gradient]:
        """Returns those of backward passes since the last step."""
        return [gradient for gradient in self._gradients if gradient.is_new]

    def find_new(self) -> List[Gradient]:
        """Returns the same; without a loss scale also those of backward passes by other code."""
        if not (self.scaling and self._marked):
            for gradient, is_marked in zip(self.read(), self._marks()):
                gradient.is_new = bool(is_marked)
        return self.new()

    def _marks(self, clear: bool = False) -> Sequence[int]:
        return marks([g.weight for g in self._gradients], clear) if self._marked else \
            [True] * len(self._gradients)

    def _accumulated(self) -> List["mx.nd.NDArray"]:
        return self._adding() if self._adding else [g.own for g in self._gradients if g.adds]

    def take(self, call: str, ignore_stale: bool = True) -> List[Gradient]:
        """Returns the gradients that an update uses, in the order of parameters. Refuses a call
        without new gradients of all parameters, or with those of another backward pass."""
        gradients = self.read()
        if self.scaling and self.stage is Stage.EMPTY:
            refusals.no_gradients(call, self._marked)
        if self.scaling and self._marked:
            self._refuse_others([g for g, marked in zip(gradients, self._marks()) if marked])
        new = self.find_new()
        if len(new) < len(gradients) and not (ignore_stale and new):
            refusals.stale([gradient.name for gradient in gradients if not gradient.is_new])
        self.count_writes()
        return new

    def _refuse_others(self, gradients: Sequence[Gradient]) -> None:
        if gradients:
            self.reset()
            refusals.other_pass([gradient.name for gradient in gradients])

    def guard(self) -> None:
        """Refuses writes of other code to new gradients until the update, if it would not use what
        was written, or would divide it by a scale that it lacks."""
        if self.scaling or self._unscaled:
            new = self.new()
            self._guarded = new, versions([g.own for g in new]) if new else None

    def count_writes(self) -> None:
        """Counts the writes of other code to guarded gradients, before this package writes or uses
        them. It does not wait for the count."""
        gradients, before = self._guarded
        if before is not None:
            writes = versions([g.own for g in gradients], since=before)
            assert writes is not None  # because `before` was not None
            self._writes.append((gradients, writes))
        self._guarded = [], None

    def _written(self) -> List[str]:
        return [g.name for gradients, counts in self._writes
                for g, count in zip(gradients, read(counts)) if count]

    def _check_writes(self) -> None:
        written = self._written() if self._writes else ()
        if written:
            scale, unscaled = self.scale, self._unscaled
            self.reset()
            refusals.written(written, scale, unscaled, self._marked)

    # ---- a backward pass

    def begin(self, scale: float) -> None:
        """Prepares a backward pass. The first of a step overwrites gradients of other passes,
        unless it adds to them. It rescales accumulated gradients at another scale."""
        if not self.scaling and self._marked:
            self.reset()  # results of `unscale` and `clip_norm`
            return
        gradients = self.read()
        self.count_writes()
        if self._writes and self._written() and _are_zero(self.new()):  # as by zero_grad()
            self.reset()
        is_first, added = self.stage is Stage.EMPTY, self._accumulated()
        others = [g for g, is_marked in zip(gradients, self._marks(clear=is_first))
                  if self._marked and is_marked and (g.adds or not is_first)]
        if others and not (is_first and _are_zero(others)):
            self._refuse_others(others)
        if self.stage is Stage.SUMMED and added:
            self.reset()
            refusals.summed("update(batch_size), or zero_grad(), before backward()")
        if self.stage is not Stage.SCALED:  # after a pass that failed; or they were summed
            for gradient in gradients:
                gradient.is_new = False
        if self._adding_at is not None and self._adding_at != scale:
            arrays.multiply(added, scale / self._adding_at)
        self._adding_at = scale

    def end(self, scale: float, losses: Optional[Sequence["mx.nd.NDArray"]]) -> None:
        """Records a backward pass from these losses, with this scale; None if it failed."""
        if self.scaling or not self._marked:
            for gradient, is_marked in zip(self._gradients, self._marks(clear=True)):
                gradient.is_new |= bool(is_marked)
        if losses is None:
            return
        if self._unscaled or self.stage is Stage.SUMMED:
            for gradient in self._gradients:
                gradient.array = gradient.own
        self.stage, self.scale, self._unscaled = Stage.SCALED, scale, False
        self._next_max_norm = None
        self._losses += [loss.detach() for loss in losses]
        self.guard()

    # ---- between the backward pass and the update

    def begin_sum(self, several: bool) -> None:
        """Prepares a sum of gradients; `several`: over several devices or workers."""
        if not several:
            return
        # without a scale, loss.backward() may have written other gradients since
        if self.stage is Stage.SUMMED and self.scaling or self._unscaled:
            unscaled = self._unscaled
            self.reset()
            refusals.summed("update(batch_size), not step(), after it", unscaled)
        self.stage = Stage.SUMMED

    def unscale(self) -> List[Gradient]:
        """Replaces the gradients by unscaled ones, 16-bit ones in float32."""
        gradients = self.take("unscale()")
        self._check_writes()
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
        self._check_writes()
        self.guard()
        self._next_max_norm = max_norm
        return self._multiplier(rescale_grad) * self._norm(gradients, self._check(gradients)())

    # ---- the update

    def apply(self, gradients: Sequence[Gradient], rescale_grad: float, prepare: Prepare) -> None:
        """Updates; or checks gradients, and skips the update if one is not finite.

        Args:
            gradients: the gradients, summed over devices and workers.
            rescale_grad: the factor of unscaled gradients.
            prepare: prepares the update, while a GPU computes the check. Returns a function that
                updates with gradients multiplied by a number.
        """
        multiplier = self._multiplier(rescale_grad)
        if not self.checks_next:
            self.note_unchecked(gradients, multiplier)
            prepare()(multiplier)
            self.finish()
            return
        sums_of = self._check(gradients)
        update = prepare()
        sums = sums_of()
        self._last = gradients, multiplier, sums, None
        self._check_writes()
        norm = self._norm(gradients, sums)
        if self._workers.exchange:
            norm = self._workers.largest_after_sum(norm)
        updates = math.isfinite(norm) and not self.weights_replaced
        try:
            if updates:
                max_norm = self.max_norm if self._next_max_norm is None else self._next_max_norm
                if max_norm is not None and norm * multiplier > max_norm:
                    multiplier *= max_norm / (norm * multiplier)
                update(multiplier)
                if self.averages is not None:
                    self.averages.copy()
                self.loss_scale = self.loss_scale.update(self._multiplier(1) * norm, self.scale)
            else:
                self._skip(gradients, overflowed_in(gradients, sums))
        finally:
            if not self.scaling:
                self._marks(clear=True)
            self.finish(updates)

    def finish(self, updated: bool = True) -> None:
        """Ends the step."""
        self.updated, self.weights_replaced = updated, False
        if updated:
            self.skipped_in_a_row, self._has_updated = 0, True
        self.reset()

    def note_unchecked(self, gradients: Sequence[Gradient], multiplier: float) -> None:
        """Records the gradients of an update without a check, for `gradient_norm`."""
        self._last = gradients, multiplier, None, versions([g.own for g in gradients])

    def _multiplier(self, rescale_grad: float) -> float:
        """Returns the factor of gradients, from that of unscaled ones."""
        return rescale_grad if self._unscaled else rescale_grad / self.scale

    def _check(self, gradients: Sequence[Gradient]) -> Callable[[], Any]:
        """Computes the sum of squares of each gradient and of copies of moving averages, without
        waiting. Returns a function that waits, checks these copies, and returns the sums."""
        count, averages = len(gradients), self.averages
        checked = [*(g.array for g in gradients), *(averages.unchecked() if averages else ())]
        sums = next((s for s in self._squares if same_objects(s.arrays, checked)), None)
        if sums is None:
            sums = arrays.Squares(checked)
            if all(gradient.array is gradient.own for gradient in gradients):
                self._squares = [sums, *self._squares[:1]]  # averages have two copies
        sums.start()

        def read_sums() -> Any:
            numbers = sums.read()
            if averages is not None:
                averages.check(np.isfinite(numbers[count:]).tolist())
            return numbers[:count]
        return read_sums

    def _skip(self, gradients: Sequence[Gradient], overflowed: Sequence[str]) -> None:
        """Lowers the loss scale, and logs the reason. Raises LossScaleError if no scale helps."""
        set_to_zero(self._accumulated())
        self.skipped += 1
        if self.weights_replaced:
            log.warning("step skipped: ranks had other weights, which are rank 0's now. Run "
                        "the network once before you create the Trainer to avoid this")
            return
        if self.averages is not None:
            self.averages.restore()
        self.skipped_in_a_row += 1
        skip = refusals.Skip(self.skipped_in_a_row, gradients, overflowed, self.scale,
                             self._losses, not self._marked, self._has_updated)
        # an overflow on one worker is an overflow on all, so all exchange this
        is_finite = arrays.all_finite([arrays.to_float32(loss) for loss in self._losses])
        self.loss_scale = skip.report(not self._workers.any(not is_finite), self.loss_scale)

    def _norm(self, gradients: Sequence[Gradient], sums: "np.ndarray[Any, Any]") -> float:
        """Returns the norm of all gradients together, from the sums of their squares."""
        numbers = sums.tolist()
        if self._workers.sums:  # devices have the same gradient, which counts once
            numbers = {g.index: number for g, number in zip(gradients, numbers)}.values()
        return math.sqrt(sum(numbers))

    @property
    def gradient_norm(self) -> Optional[float]:
        """The norm of the last step's gradients, unscaled and averaged over the batch. It is
        computed now if the step has not, and the gradients have not been written since."""
        gradients, multiplier, sums, before = self._last
        if not gradients:
            return None
        if sums is None:
            now = versions([gradient.own for gradient in gradients])
            if before is not None and now is not None and read(now) != read(before):
                refusals.overwritten()
            sums = arrays.squares([gradient.own for gradient in gradients])
            self._last = gradients, multiplier, sums, None
        return multiplier * self._norm(gradients, sums)

    @property
    def overflowed(self) -> Tuple[str, ...]:
        """The names of parameters whose gradients are not finite, of the pending gradients or else
        of the last step."""
        gradients, _, sums, _ = self._last
        if self.stage is not Stage.EMPTY:
            gradients = self.find_new()
            sums = arrays.squares([gradient.array for gradient in gradients])
        return () if sums is None else overflowed_in(gradients, sums)

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
        self.weights_replaced, self._last = False, ([], 1.0, None, None)
        self.reset()


def in_turn(method: Method) -> Method:
    """Runs calls of an object's method one after another, with a decided loss scale."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._step.turn(f"{method.__name__}()"):
            self._decide()
            return method(self, *args, **kwargs)
    return call  # type: ignore[return-value]


def overflowed_in(gradients: Sequence[Gradient], sums: "np.ndarray[Any, Any]") -> Tuple[str, ...]:
    """Returns the names of gradients whose sums of squares are not finite."""
    return arrays.not_finite([g.name for g in gradients], sums)


def _are_zero(gradients: Sequence[Gradient]) -> bool:
    return not arrays.squares([gradient.own for gradient in gradients]).any()
