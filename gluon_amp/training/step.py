"""The step of a Trainer or a Module: its gradients, from the first backward pass to the update.

    stage     gradients                              leads to it
    EMPTY     no backward pass since the update      update_or_skip, reset
    SCALED    of backward passes, times `scale`      backward_pass, around each pass
    SUMMED    summed over devices and workers        sum

In SCALED and SUMMED, `unscale` and `sum` may replace the arrays that the update uses.

`update_or_skip` checks the gradients once:

    all finite   updates, with gradients * rescale_grad / scale, clipped
    otherwise    skips; accumulated gradients become 0; logs the reason

A step never writes to gradients. One number unscales and clips all of them: the optimizer's
`rescale_grad`, by which it multiplies gradients in float32.
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
    Dict,
    Iterable,
    Iterator,
    List,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
)

from .._mxnet import mx, np
from ..checks import in_names, positive_number, same_objects, whole_number
from ..cpu.arrays import (
    Squares,
    all_finite,
    is_16bit,
    multiply,
    not_finite,
    squares,
    to_float32,
)
from ..cpu.library import marks, read, versions
from ..parallel.sync import Workers
from .loss_scale import GivenLossScale, LossScaleError, as_loss_scale
from .moving_averages import MovingAverages

log = logging.getLogger("gluon_amp")

PATIENCE = 16  # skipped steps in a row before an error if no scale can back off
_LONGEST = 600  # seconds that a call waits for those of other threads
_SEVERAL = 3  # skipped steps in a row before a warning if the scale backs off

Method = TypeVar("Method", bound=Callable[..., Any])


class Gradient:
    """The gradient of one parameter on one device.

    Attributes:
        index: the parameter's, as the optimizer has it.
        own: the gradient.
        array: for the update: the gradient or its replacement.
        adds: whether backward passes add to it.
        is_new: whether a backward pass has written it since the last step.
    """
    __slots__ = ("adds", "array", "device", "index", "is_new", "name", "own", "weight")

    def __init__(self, index: int, name: str, device: int, weight: Any, own: Any,
                 adds: bool) -> None:
        self.index, self.name, self.device, self.weight = index, name, device, weight
        self.own = self.array = own
        self.adds, self.is_new = adds, False


def gradients_of(index: int, name: str, weights: Sequence[Any], gradients: Sequence[Any],
                 adds: bool) -> List[Gradient]:
    """Returns the gradients of a parameter with these arrays on its devices."""
    return [Gradient(index, name, device, *arrays, adds)
            for device, arrays in enumerate(zip(weights, gradients))]


class Stage(enum.Enum):
    """What gradients are: see the head of this file."""
    EMPTY = 0
    SCALED = 1
    SUMMED = 2


class Step:
    """The steps of a Trainer or a Module.

    Args:
        loss_scale: as for `Trainer`.
        max_norm: as `clip_norm` for `Trainer`.
        gradients: returns the gradients of trained parameters; the same list again if nothing has
            changed.
        adding: returns gradients to which backward passes add; by default those of parameters.
        marked: whether autograd writes gradients. It marks the weights whose gradients it writes.
            The marks are cleared after each `backward_pass`, so a mark at the step comes from
            another backward pass. Executors write all gradients.

    Attributes:
        loss_scale: the loss scale; a `LossScale` of 1 without scaling.
        workers: the workers, which sum gradients.
        max_norm: the norm to which each update is clipped; None for no clipping.
        next_max_norm: the same for the next update only.
        skipped: the number of skipped steps.
        skipped_in_a_row: the number of skipped steps since the last update.
        updated: whether the last step updated.
        has_updated: whether any step has updated, also before its state was saved.
        checked: the operators of graphs without loss heads that ignore the loss scale.
        weights_replaced: whether rank 0's weights have replaced any worker's since the last step,
            so that gradients may belong to earlier weights.
        averages: the moving averages that the step keeps finite; None on a CPU.
        stage: what the gradients are.
        scale: the loss scale of the gradients; 1 before the first backward pass.
        unscaled: whether `unscale` has replaced the gradients.
    """

    def __init__(self, loss_scale: GivenLossScale, max_norm: Optional[float],
                 gradients: Callable[[], List[Gradient]],
                 adding: Optional[Callable[[], List["mx.nd.NDArray"]]] = None,
                 marked: bool = True) -> None:
        self.loss_scale = as_loss_scale(loss_scale)
        self.max_norm = None if max_norm is None else positive_number(max_norm, "clip_norm")
        self.workers = Workers(names=not marked)
        self._lock = threading.RLock()
        self.skipped = self.skipped_in_a_row = 0
        self.updated, self.has_updated = True, False
        self.weights_replaced = False
        self.checked: Set[int] = set()
        self.averages: Optional[MovingAverages] = None
        self._read_gradients, self._marked = gradients, marked
        self._adding = adding or self._parameters_adding
        self._last_read: List[Gradient] = []  # in the last `all`
        self._arrays: List[Any] = []  # their weights and gradients
        self._gradients: List[Gradient] = []  # the same; those that it has found before
        self._squares: List[Squares] = []  # the last sums of squares of them
        self._last_overflowed: Tuple[str, ...] = ()  # names in the last step
        # the gradients of the last step, their factor in the update, and the sums of their squares,
        # or their counts of writes then
        self._last: Tuple[Sequence[Gradient], float, Any, Any] = [], 1.0, None, None
        self._adding_at: Optional[float] = None  # the scale of accumulated gradients
        self.reset()

    def __getstate__(self) -> Dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def reset(self) -> None:
        """Clears the state of the backward passes since the last step."""
        self.stage, self.scale, self.unscaled = Stage.EMPTY, 1.0, False
        self.next_max_norm: Optional[float] = None
        self._losses: List[mx.nd.NDArray] = []  # of the backward passes, without graphs
        # gradients that only this package may write, and their counts of writes
        self._guarded: Tuple[Sequence[Gradient], Optional[mx.nd.NDArray]] = [], None
        self._writes: List[Tuple[Sequence[Gradient], mx.nd.NDArray]] = []  # since
        for gradient in self._gradients:
            gradient.is_new, gradient.array = False, gradient.own

    @property
    def scaling(self) -> bool:
        """Whether gradients are scaled."""
        return self.loss_scale.scales

    @property
    def _mxnet_marks(self) -> bool:
        """Whether MXNet's marks tell which gradients are new: any backward pass may write them."""
        return self._marked and not self.scaling

    @property
    def checks_gradients(self) -> bool:
        """Whether gradients are read before each update."""
        return self.scaling or self.max_norm is not None

    @property
    def begun(self) -> bool:
        """Whether there has been a backward pass since the last step."""
        return self.stage is not Stage.EMPTY

    @property
    def sums_several(self) -> bool:
        """Whether a sum over devices and workers changes gradients."""
        return self.workers.sums and (self.workers.count > 1
                                      or any(g.device for g in self._gradients))

    @property
    def decides(self) -> bool:
        """Whether the update needs `update_or_skip`; otherwise MXNet's suffices."""
        return self.checks_gradients or self.weights_replaced or self.next_max_norm is not None \
            or any(g.array is not g.own for g in self._gradients)

    @contextmanager
    def turn(self, call: str) -> Iterator[None]:
        """Runs the calls of several threads one after another."""
        if not self._lock.acquire(timeout=_LONGEST):
            raise RuntimeError(f"{call} waited {_LONGEST} seconds for another thread in a call of "
                               "the same Trainer or Module, such as a scale_loss() block that "
                               "itself waits for this thread")
        try:
            yield
        finally:
            self._lock.release()

    # ---- gradients

    def all(self) -> List[Gradient]:
        """Returns all gradients. Those of parameters that were cast or moved since the last call
        are not new."""
        found = self._read_gradients()
        if found is self._last_read:
            return self._gradients
        if self._marked and not found:
            raise RuntimeError("nothing to train: all parameters of this Trainer have "
                               "grad_req='null'")
        arrays = [array for gradient in found for array in (gradient.weight, gradient.own)]
        if not same_objects(arrays, self._arrays):
            before = {(id(g.weight), id(g.own)): g for g in self._gradients}
            self._gradients = [before.get((id(g.weight), id(g.own)), g) for g in found]
            self._arrays, self._squares = arrays, []
        self._last_read = found
        return self._gradients

    def _is_marked(self, clear: bool = False) -> Iterable[int]:
        """Returns for each gradient whether a backward pass has written it."""
        if not self._marked:
            return [True] * len(self._gradients)
        return marks([gradient.weight for gradient in self._gradients], clear)

    def note_written(self) -> None:
        """Records the gradients that a backward pass has written."""
        if self._mxnet_marks:
            return
        for gradient, is_marked in zip(self._gradients, self._is_marked(clear=True)):
            gradient.is_new |= bool(is_marked)

    def new(self) -> List[Gradient]:
        """Returns the gradients of backward passes since the last step."""
        return [gradient for gradient in self._gradients if gradient.is_new]

    def find_new(self) -> List[Gradient]:
        """Returns the same, without a loss scale also those of backward passes by others."""
        if not (self.scaling and self._marked):
            for gradient, is_marked in zip(self.all(), self._is_marked()):
                gradient.is_new = bool(is_marked)
        return self.new()

    def to_use(self, ignore_stale: bool = True) -> List[Gradient]:
        """Returns the gradients that the update uses, in the order of parameters."""
        new = self.find_new()
        if len(new) < len(self._gradients) and not (ignore_stale and new):
            stale = [gradient.name for gradient in self._gradients if not gradient.is_new]
            # the class that gluon.Trainer raises
            raise UserWarning(f"backward has not computed the gradients{in_names(stale)} since "
                              "the last step: the loss does not depend on them. If this is "
                              "intended, call step(batch_size, ignore_stale_grad=True)")
        return new

    def check_new(self, call: str) -> None:
        """Refuses a call without gradients of `trainer.backward`, or of a Module's."""
        if not self.scaling:
            return
        self.all()
        if not self.begun:
            remedy = "call trainer.backward(loss), not loss.backward(), before each step. With " \
                     "MXNet's Estimator, pass batch_processor=BatchProcessor() of " \
                     "gluon_amp.training.estimator" if self._marked else \
                     "call forward_backward(batch), or forward and backward, before each update"
            raise RuntimeError(f"{call} needs new gradients: {remedy}")
        if self._marked:
            self._refuse_others([g for g, marked in zip(self._gradients, self._is_marked())
                                 if marked])

    def _refuse_others(self, marked: Sequence[Gradient]) -> None:
        """Refuses gradients that another backward pass has written at an unknown scale."""
        if marked:
            self.reset()
            raise RuntimeError(
                f"the gradients{in_names(dict.fromkeys(g.name for g in marked))} were written by "
                "another backward pass: loss.backward() or another Trainer's backward pass with "
                "another loss scale. For several Trainers over one loss, call "
                "gluon_amp.backward(loss, [trainer, other]); else step before it, or call "
                "zero_grad() after it")

    def _parameters_adding(self) -> List["mx.nd.NDArray"]:
        return [gradient.own for gradient in self._gradients if gradient.adds]

    # ---- a backward pass

    def begin(self, scale: float) -> None:
        """Prepares a backward pass. The first of a step overwrites gradients of other passes,
        unless it adds to them. It rescales accumulated gradients at another scale."""
        if self._mxnet_marks:
            self.reset()  # results of `unscale` and `clip_norm`
            return
        self.all()
        self.count_writes()
        if self._are_discarded():
            self.reset()
        adding, is_first = self._adding(), not self.begun
        if self._marked:
            marked = [g for g, is_marked in zip(self._gradients, self._is_marked(is_first))
                      if is_marked and (g.adds or not is_first)]
            if marked and (not is_first or squares([g.own for g in marked]).any()):
                self._refuse_others(marked)
        summed = self.stage is Stage.SUMMED and self.sums_several
        if summed and adding:
            self.refuse_summed("update(batch_size), or zero_grad(), before backward()")
        if is_first or summed:  # after a pass that failed; or they would be summed again
            for gradient in self._gradients:
                gradient.is_new = False
        if self._adding_at is not None and self._adding_at != scale:
            multiply(adding, scale / self._adding_at)
        self._adding_at = scale

    def _are_discarded(self) -> bool:
        """Whether others have written zeros into all gradients of earlier passes, as zero_grad()
        does."""
        return any(any(read(vector)) for _, vector in self._writes) \
            and not squares([g.own for g in self._gradients if g.is_new]).any()

    def end(self, scale: float, losses: Sequence["mx.nd.NDArray"]) -> None:
        """Records a backward pass from these losses, with this scale."""
        if self.unscaled or self.stage is Stage.SUMMED:
            for gradient in self._gradients:
                gradient.array = gradient.own
        self.stage, self.scale, self.unscaled, self.next_max_norm = Stage.SCALED, scale, False, None
        self._losses += [loss.detach() for loss in losses]

    def loss_is_to_blame(self) -> bool:
        """Whether a loss is infinite or NaN on any worker. All workers must call it, and do so,
        because an overflow on one is an overflow on all."""
        return self.workers.any(not all_finite([to_float32(loss) for loss in self._losses]))

    # ---- writes by others between the backward pass and the update

    def guard(self, gradients: Sequence[Gradient]) -> None:
        """Records the counts of writes to these gradients, which only this package may write from
        now on: they are scaled, or the update uses the result of `unscale` instead."""
        if (self.scaling or self.unscaled) and gradients:
            self._guarded = gradients, versions([g.own for g in gradients])

    def count_writes(self) -> None:
        """Counts the writes of others to those gradients, before this package writes or uses them.
        It does not wait for the count."""
        gradients, before = self._guarded
        if before is not None:
            writes = versions([g.own for g in gradients], since=before)
            assert writes is not None  # because `before` was not None
            self._writes.append((gradients, writes))
        self._guarded = [], None

    def check_writes(self) -> None:
        """Raises an error if others have written to gradients."""
        written = []
        for gradients, vector in self._writes:
            counts = read(vector)
            if any(counts):
                written += [g.name for g, count in zip(gradients, counts) if count]
        self._writes.clear()
        if written:
            scale, unscaled = self.scale, self.unscaled
            self.reset()
            if unscaled:
                raise RuntimeError(f"the gradients{in_names(dict.fromkeys(written))} were written "
                                   "after trainer.unscale(), but the update uses the arrays that "
                                   "unscale() returned. Modify those arrays")
            raise RuntimeError(
                f"the gradients{in_names(dict.fromkeys(written))} were written between the "
                f"backward pass and the step. They are multiplied by the loss scale, {scale:g}, "
                "which such a write ignores. " + (
                    "To clip them, call trainer.clip_norm(max_norm, batch_size), or give "
                    "clip_norm=. To change them, modify the arrays that trainer.unscale() returns"
                    if self._marked else "To clip them, give clip_norm="))

    # ---- between the backward pass and the update

    def sum(self, keys: Optional[Sequence[Any]] = None) -> None:
        """Sums gradients over devices and workers.

        Args:
            keys: the keys of parameters in the store; by default their numbers.
        """
        self.count_writes()
        if not self.workers.sums:
            return
        # without a scale, loss.backward() may have written other gradients since
        if self.stage is Stage.SUMMED and self.scaling and self.sums_several:
            self.refuse_summed("update(batch_size), not step(), after it")
        if self.unscaled and self.sums_several:
            self.reset()
            raise RuntimeError("unscale() before the sum over devices and workers: call trainer."
                               "allreduce_grads(), then unscale(), then update(batch_size)")
        self.stage = Stage.SUMMED
        on_devices: Dict[Any, List[Any]] = {}
        for gradient in self.all():
            key = gradient.index if keys is None else keys[gradient.index]
            on_devices.setdefault(key, []).append(gradient.own)
        sums = self.workers.sum(on_devices.items())
        for gradient in self._gradients if sums else ():
            key = gradient.index if keys is None else keys[gradient.index]
            if key in sums:
                gradient.array = sums[key][gradient.device]

    def refuse_summed(self, instead: str) -> NoReturn:
        """Refuses to use gradients that have been summed."""
        self.reset()
        raise RuntimeError("the gradients have been summed since the last backward(), by "
                           f"allreduce_grads(): call {instead}")

    def read(self, call: str) -> List[Gradient]:
        """Returns the gradients for a call between the sum and the update."""
        self.check_new(call)
        self.count_writes()
        self.check_writes()
        return self.to_use()

    def unscale(self) -> List[Gradient]:
        """Replaces the gradients by unscaled ones, 16-bit ones in float32."""
        gradients = self.read("unscale()")
        if self.unscaled:
            raise RuntimeError("unscale() was already called since the last backward(): "
                               "use the gradients that it returned")
        for g in gradients:
            g.array = (to_float32(g.array) if is_16bit(g.array.dtype) else g.array) / self.scale
        self.unscaled = True
        self.guard(gradients)
        return gradients

    # ---- the update

    def multiplier(self, rescale_grad: float) -> float:
        """Returns the factor of gradients, from that of unscaled ones."""
        return rescale_grad if self.unscaled else rescale_grad / self.scale

    def update_or_skip(self, gradients: Sequence[Gradient], rescale_grad: float,
                       prepare: Callable[[], Callable[[float], None]]) -> bool:
        """Updates, or skips the update if a gradient is not finite.

        Args:
            gradients: the gradients, summed over devices and workers.
            rescale_grad: the factor of unscaled gradients.
            prepare: prepares the update, while a GPU computes the check. Returns a function that
                updates with gradients multiplied by a number.
        """
        read = self._check(gradients)
        update = prepare()
        sums = read()
        self._last = gradients, self.multiplier(rescale_grad), sums, None
        self.check_writes()
        self._last_overflowed = _not_finite(gradients, sums)
        norm = math.inf if self._last_overflowed else self._norm(gradients, sums)
        if self.workers.exchange:
            norm = self.workers.largest_after_sum(norm)
        self.updated = math.isfinite(norm) and not self.weights_replaced
        try:
            if self.updated:
                update(self._clipped(self.multiplier(rescale_grad), norm))
                if self.averages is not None:
                    self.averages.copy()
                self.skipped_in_a_row, self.has_updated = 0, True
                self.loss_scale = self.loss_scale.update(self.multiplier(1) * norm, self.scale)
                return True
            set_to_zero(self._adding())
            self.skipped += 1
            if self.weights_replaced:
                log.warning("step skipped: ranks had other weights, which are rank 0's now. Run "
                            "the network once before you create the Trainer to avoid this")
                return False
            if self.averages is not None:
                self.averages.restore()
            self._back_off(gradients)
            return False
        finally:
            if self._mxnet_marks:
                marks([gradient.weight for gradient in gradients], clear=True)
            self.reset()
            self.weights_replaced = False

    def note_unchecked(self, rescale_grad: float, ignore_stale: bool = True) -> None:
        """Records the gradients that MXNet updates with, for `gradient_norm`."""
        gradients = self.to_use(ignore_stale)
        self._last = gradients, rescale_grad, None, versions([g.own for g in gradients])

    @property
    def gradient_norm(self) -> Optional[float]:
        """The norm of the last step's gradients, unscaled and averaged over the batch. It is
        computed now if the step has not, and the gradients have not been written since."""
        gradients, multiplier, sums, before = self._last
        if not gradients:
            return None
        if sums is None:
            arrays = [gradient.own for gradient in gradients]
            now = versions(arrays)
            if before is not None and now is not None and read(now) != read(before):
                raise RuntimeError("the gradients of the last step have been overwritten. Without "
                                   "a loss scale and clip_norm, read gradient_norm before the next "
                                   "backward pass and before zero_grad()")
            sums = squares(arrays)
            self._last = gradients, multiplier, sums, None
        return multiplier * self._norm(gradients, sums)

    def _check(self, gradients: Sequence[Gradient]) -> "Callable[[], np.ndarray[Any, Any]]":
        """Computes the sum of squares of each gradient and of copies of moving averages, without
        waiting. Returns a function that waits, checks these copies, and returns the sums."""
        count, averages = len(gradients), self.averages
        unchecked = [] if averages is None else averages.unchecked()
        arrays = [*(gradient.array for gradient in gradients), *unchecked]
        squares = next((one for one in self._squares if same_objects(one.arrays, arrays)), None)
        if squares is None:
            squares = Squares(arrays)
            if all(gradient.array is gradient.own for gradient in gradients):
                self._squares = [squares, *self._squares[:1]]  # averages have two copies
        squares.start()

        def read() -> "np.ndarray[Any, Any]":
            sums = squares.read()
            if averages is not None:
                averages.check(np.isfinite(sums[count:]).tolist())
            return sums[:count]
        return read

    def norm(self, gradients: Sequence[Gradient]) -> float:
        """Returns the norm of all gradients together, without scaling."""
        return self._norm(gradients, self._check(gradients)())

    def _norm(self, gradients: Sequence[Gradient], sums: "np.ndarray[Any, Any]") -> float:
        counted = sums.tolist()
        if self.workers.sums:  # devices have the same gradient, which counts once
            counted = {g.index: s for g, s in zip(gradients, counted)}.values()
        return math.sqrt(sum(counted))

    def _clipped(self, multiplier: float, norm: float) -> float:
        """Returns the factor of gradients with this norm in the update, clipped."""
        max_norm = self.max_norm if self.next_max_norm is None else self.next_max_norm
        norm *= multiplier
        if max_norm is None or norm <= max_norm:
            return multiplier
        return multiplier * (max_norm / norm)

    def _back_off(self, gradients: Sequence[Gradient]) -> None:
        """Lowers the loss scale after a skipped step. Raises LossScaleError if no scale helps."""
        before, names = self.scale, self._last_overflowed
        self.skipped_in_a_row += 1
        if self.loss_is_to_blame():
            reason = "the loss itself is not finite at any loss scale: check the data. " \
                     "gluon_amp.explain(net, batch, loss_fn) names what overflows, and states " \
                     "if float32 is not finite either"
        elif self.loss_scale.changes:
            self._lower_scale(names, gradients)
            # a dynamic scale skips single steps; several in a row are worth a warning
            several = self.skipped_in_a_row == _SEVERAL
            log.log(logging.WARNING if several else logging.INFO,
                    "%s skipped%s: gradients not finite%s; loss scale %g -> %g",
                    f"{_SEVERAL} steps" if several else "step", " in a row" if several else "",
                    in_names(names, most=1), before, self.loss_scale.scale)
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

    def _lower_scale(self, names: Sequence[str], gradients: Sequence[Gradient]) -> None:
        try:
            self.loss_scale = self.loss_scale.update(math.inf, self.scale, names)
        except LossScaleError as error:
            raise LossScaleError(f"{error}{self._circumstances(gradients)}") from None

    def _circumstances(self, gradients: Sequence[Gradient]) -> str:
        """Returns what narrows down the cause of gradients that are not finite: the mean of the
        loss, weights that are not finite, and whether the learning rate can be the cause."""
        losses = [to_float32(loss).asnumpy().ravel() for loss in self._losses]
        with np.errstate(invalid="ignore", over="ignore"):
            mean = np.mean(np.concatenate(losses), dtype=np.float64) if losses else math.nan
        dense = [g for g in gradients if g.weight.stype == "default"]
        weights = _not_finite(dense, squares([g.weight for g in dense]))
        cause = f"The weights are not finite{in_names(weights)}. " if weights else ""
        if self.has_updated:
            cause += "If the loss has grown, lower the learning rate"
        else:
            cause += "No step has updated the weights, so the learning rate is not the cause"
        heads = "loss" if self._marked else "outputs"
        return f". The mean of the {heads} is {mean:.6g}. {cause}"

    @property
    def overflowed(self) -> Tuple[str, ...]:
        """The names of parameters whose gradients are not finite, of the pending gradients or else
        of the last step."""
        if not self.begun:
            return self._last_overflowed
        gradients = self.to_use()
        return _not_finite(gradients, squares([gradient.array for gradient in gradients]))

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
        self.skipped, self.skipped_in_a_row, self.has_updated = skipped, in_a_row, True
        self._last_overflowed, self.weights_replaced = (), False
        self._last = [], 1.0, None, None
        self.reset()


def scale_of_pass(steps: Sequence[Step]) -> float:
    """Returns the scale of the next backward pass for these steps: that of earlier passes since the
    last update, or the smallest of the steps."""
    begun = {step.scale for step in steps if step.begun}
    if len(begun) > 1:
        raise RuntimeError("these Trainers have had backward passes at different loss scales since "
                           "their last steps: call gluon_amp.backward for all of them, or "
                           f"step before. Received: {', '.join(map(str, sorted(begun)))}")
    return min(begun or {step.loss_scale.scale for step in steps})


@contextmanager
def backward_pass(steps: Sequence[Step], losses: Sequence["mx.nd.NDArray"]) -> Iterator[float]:
    """Yields the scale of the backward pass in the `with` block, which belongs to these steps and
    starts at these losses."""
    scale = scale_of_pass(steps)
    with mx.autograd.pause():  # operations on gradients are not recorded
        for step in steps:
            step.begin(scale)
    try:
        yield scale
    finally:
        for step in steps:
            step.note_written()
    for step in steps:
        step.end(scale, losses)
        step.guard(step.new())


def in_turn(method: Method) -> Method:
    """Runs calls of an object's method one after another: see `Step.turn`."""
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._step.turn(f"{method.__name__}()"):
            return method(self, *args, **kwargs)
    return call  # type: ignore[return-value]


def set_to_zero(arrays: Iterable["mx.nd.NDArray"]) -> None:
    """Sets gradients to 0; MXNet's `zero_grad` fails in numpy mode."""
    for array in arrays:
        classic = array.as_nd_ndarray()
        mx.nd.zeros_like(classic, out=classic)


def clear_added(parameters: Sequence["mx.gluon.Parameter"]) -> None:
    """Sets accumulated gradients to 0."""
    set_to_zero(gradient for parameter in parameters if parameter.grad_req == "add"
                for gradient in parameter._grad or ())


def _not_finite(gradients: Sequence[Gradient], sums: "np.ndarray[Any, Any]") -> Tuple[str, ...]:
    return not_finite([g.name for g in gradients], sums)
