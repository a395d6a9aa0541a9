"""A Gluon Trainer that scales gradients, looks at them once, and steps or skips.

    backward(loss)   the gradients of scale * loss, by head gradients: the loss stays as it is
    step(n)          sums them over the devices, then takes one sum of squares of each:
                       all finite   update, with gradients * coefficient / (scale * n)
                       not          no update; gradients that add up become 0
                     and tells the scale, which the next step already uses

`coefficient` clips the norm. Nothing is ever written into a gradient: what is divided and
clipped is the optimizer's `rescale_grad`, which multiplies in float32.
"""
import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from .._mxnet import mx, np
from ..cpu.arrays import to_float32
from ..cpu.finite import all_finite, not_finite, squares
from ..files import replace_file
from .loss_scale import as_loss_scale, of, positive
from .optimizer import check_scalable, with_masters
from .optimizer import optimizer as make_optimizer
from .states import check_order, check_states, read_states
from .step import Scaled, Scaling


@dataclass
class _Backward:
    """What the backward passes since the last step have done."""
    scale: float
    losses: List[Any] = field(default_factory=list)  # without their graphs
    written: Set[Tuple[int, int]] = field(default_factory=set)  # gradients: parameter, device


@dataclass
class _Entry:
    """One parameter on one device."""
    index: int
    device: int
    name: str
    weight: Any
    gradient: Any


class Trainer(Scaled, mx.gluon.Trainer):
    """`gluon.Trainer` with loss scaling, clipping and float32 masters.

        with autograd.record():
            loss = loss_fn(net(data), label)
        trainer.backward(loss)
        trainer.step(batch_size)

    By hand: `backward`, `allreduce_grads`, then `unscale` or `clip_norm` or both, then `update`.

    Args:
        optimizer: a name, as for `gluon_amp.optimizer`, or an optimizer.
        loss_scale: "dynamic", a number, a StaticLossScale, a DynamicLossScale, or None.
        clip_norm: the largest norm of the whole gradient, as the optimizer gets it:
            unscaled, and divided by the batch size.
        enabled: False is loss_scale=None: a `gluon.Trainer`, but for `clip_norm`.
    """

    def __init__(self, params: Any, optimizer: Any, optimizer_params: Any = None,
                 kvstore: Any = "device", compression_params: Any = None,
                 update_on_kvstore: Optional[bool] = None, loss_scale: Any = "dynamic",
                 clip_norm: Optional[float] = None, enabled: bool = True) -> None:
        scale = as_loss_scale(loss_scale)
        self._scaling = Scaling(scale if enabled else None)
        self._max_norm = None if clip_norm is None else positive(clip_norm, "clip_norm")
        parameters = list(params.values()) if hasattr(params, "values") else params
        if not parameters:
            raise ValueError("a Trainer needs parameters. Received: none")
        if self._scaling.on or self._max_norm is not None:
            _check_kvstore(kvstore, update_on_kvstore, parameters)
            update_on_kvstore = False
        self._forget()
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params,
                         update_on_kvstore)

    def _init_optimizer(self, optimizer: Any, optimizer_params: Any) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            optimizer, optimizer_params = make_optimizer(optimizer, **optimizer_params), None
        if self._scaling.on:
            check_scalable(optimizer)
        super()._init_optimizer(with_masters(optimizer), optimizer_params)

    def _forget(self) -> None:
        self._backward: Optional[_Backward] = None
        self._unscaled: Optional[Dict[Tuple[int, int], Any]] = None
        self._clip_once: Optional[float] = None
        self._updated = True

    # ---- what one asks

    @property
    def overflowed(self) -> Tuple[str, ...]:
        """Names of the parameters whose gradients are not finite; after a step, were not."""
        if self._backward is None:
            return self._scaling.overflowed
        entries = self._entries(ignore_stale_grad=True)
        return not_finite([e.name for e in entries], squares([e.gradient for e in entries]))

    # ---- what one does

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        """Computes the scaled gradients of a loss, or of several.

        The losses stay unscaled. Calls before one step share one scale, so gradients
        with grad_req="add" add up.
        """
        losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
        if not self._scaling.on:
            mx.autograd.backward(losses, retain_graph=retain_graph)
            self._forget()
            return
        with self._scaled(losses) as scale:
            heads = [mx.nd.ones_like(one.as_nd_ndarray()) * scale for one in losses]
            mx.autograd.backward(losses, heads, retain_graph)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> bool:
        """Sums gradients over devices and updates, unless they are not finite.

        Returns:
            whether it updated. Learning rate schedules do not see a skipped step.
        """
        self._check_step(batch_size, ignore_stale_grad)
        super().step(batch_size, ignore_stale_grad)
        return self._updated

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> bool:
        """`step` after `allreduce_grads`."""
        self._check_step(batch_size, ignore_stale_grad)
        super().update(batch_size, ignore_stale_grad)
        return self._updated

    def unscale(self) -> Dict[str, List[Any]]:
        """The gradients without the scale, in float32: a list over devices for each name.

        `update` then uses these, with all that is changed in them. The float16 gradients
        stay as they are, since small numbers would vanish there.
        """
        self._check_backward("unscale()")
        if self._unscaled is not None:
            raise RuntimeError("unscale() was already called since the last backward(): "
                               "use the gradients that it returned")
        scale = self._backward.scale if self._backward else 1.0
        entries = self._entries(ignore_stale_grad=True)
        self._unscaled = {(e.index, e.device): to_float32(e.gradient) / scale for e in entries}
        named: Dict[str, List[Any]] = {}
        for e in entries:
            named.setdefault(e.name, []).append(self._unscaled[e.index, e.device])
        return named

    def clip_norm(self, max_norm: float, batch_size: int = 1) -> float:
        """Clips the next `update` to this norm, over all parameters, of the gradient divided
        by `update`'s batch size. Returns the norm before, divided by `batch_size`; it is
        infinite or NaN if the gradients are.
        """
        positive(max_norm, "max_norm")
        factor = self._scale / positive(batch_size, "batch_size") / self._gradients_scale()
        self._check_backward("clip_norm()")
        entries = self._entries(ignore_stale_grad=True)
        self._clip_once = max_norm
        return factor * self._norm(entries, squares([e.gradient for e in entries]))

    # ---- how it is done

    @contextmanager
    def _scaled(self, losses: List[Any]) -> Iterator[float]:
        """Around a backward pass: gives its scale and notes which gradients it wrote.

        MXNet marks the weights whose gradients a backward pass writes. The marks are taken
        off at once, so that a mark at the step tells of somebody else's backward pass.
        """
        _check_losses(losses)
        weights = dict(self._weights())
        if self._backward is None:
            for weight in weights.values():
                weight._fresh_grad = False
            backward = _Backward(self._scaling.value)
        else:
            self._check_nobody_else()
            backward = self._backward
        yield backward.scale
        for key, weight in weights.items():
            if weight._fresh_grad:
                backward.written.add(key)
                weight._fresh_grad = False
        backward.losses += [loss.detach() for loss in losses]
        self._backward, self._unscaled, self._clip_once = backward, None, None

    def _weights(self) -> Iterator[Tuple[Tuple[int, int], Any]]:
        trainable = [(i, p) for i, p in enumerate(self._params) if p.grad_req != "null"]
        if not trainable:
            raise RuntimeError(f"nothing to train: all {len(self._params)} parameters of this "
                               "Trainer have grad_req='null'")
        for i, parameter in trainable:
            for device, weight in enumerate(parameter.list_data()):
                yield (i, device), weight

    def _check_step(self, batch_size: Any, ignore_stale_grad: bool) -> None:
        positive(batch_size, "batch_size")
        self._check_backward("step()")
        if self._scaling.on:
            self._entries(ignore_stale_grad)

    def _check_backward(self, call: str) -> None:
        if not self._scaling.on:
            return
        next(self._weights())  # or the error that there is nothing to train
        if self._backward is None:
            raise RuntimeError(f"{call} needs new gradients: call trainer.backward(loss), not "
                               "loss.backward(), before each step")
        self._check_nobody_else()

    def _check_nobody_else(self) -> None:
        names = [self._params[i].name for (i, _), weight in self._weights() if weight._fresh_grad]
        if names:
            self._forget()
            raise RuntimeError(f"the gradients{of(names)} were written by another backward pass "
                               "after trainer.backward(): a loss.backward(), or that of another "
                               "Trainer. Their scale is not known: step before it")

    def _entries(self, ignore_stale_grad: bool) -> List[_Entry]:
        """The gradients to use, parameter by parameter."""
        written = self._backward.written if self._backward else \
            {key for key, weight in self._weights() if weight._fresh_grad}
        entries, stale = [], []
        for (i, device), weight in self._weights():
            parameter = self._params[i]
            if (i, device) in written:
                gradient = (self._unscaled or {}).get((i, device), parameter.list_grad()[device])
                entries.append(_Entry(i, device, parameter.name, weight, gradient))
            else:
                stale.append(parameter.name)
        if stale and not (ignore_stale_grad and entries):
            raise RuntimeError(f"backward has not computed the gradients{of(stale)} since the last "
                               "step: the loss does not depend on them. If that is meant, "
                               "call step(batch_size, ignore_stale_grad=True)")
        return entries

    def _update(self, ignore_stale_grad: bool = False) -> None:
        asked = self._scaling.on or self._max_norm is not None \
            or self._unscaled is not None or self._clip_once is not None
        if not asked:
            super()._update(ignore_stale_grad)
            self._forget()
            return
        entries = self._entries(ignore_stale_grad)
        sums = squares([e.gradient for e in entries])
        bad = not_finite([e.name for e in entries], sums)
        try:
            if bad:
                self._skip(bad)
            else:
                self._apply(entries, sums)
        finally:
            self._forget()
            self._updated = not bad
            self._optimizer.rescale_grad = self._scale  # as given, for its next Trainer
            for e in entries:
                e.weight._fresh_grad = False

    def _apply(self, entries: List[_Entry], sums: "np.ndarray") -> None:
        factor = self._optimizer.rescale_grad / self._gradients_scale()
        max_norm = self._clip_once or self._max_norm
        if max_norm is not None:
            norm = factor * self._norm(entries, sums)
            factor *= max_norm / norm if norm > max_norm else 1.0
        self._optimizer.rescale_grad = factor
        for device, updater in enumerate(self._updaters):
            mine = [(e.index, e.gradient, e.weight) for e in entries if e.device == device]
            if mine:
                updater(*zip(*mine))
        self._scaling.update()

    def _skip(self, names: Tuple[str, ...]) -> None:
        for parameter in self._params:
            if parameter.grad_req == "add":
                parameter.zero_grad()
        losses = self._backward.losses if self._backward else []
        # With several workers all must decide alike, and they share gradients, not losses.
        self._scaling.skip(names, self._distributed or all_finite(list(map(to_float32, losses))))

    def _gradients_scale(self) -> float:
        return 1.0 if self._unscaled is not None or not self._backward else self._backward.scale

    def _norm(self, entries: List[_Entry], sums: "np.ndarray") -> float:
        """Of the summed gradient: devices that have been summed hold the same one."""
        each = {e.index if self._kvstore else (e.index, e.device): s
                for e, s in zip(entries, sums)}
        return math.sqrt(sum(each.values()))

    # ---- files

    def save_states(self, fname: str) -> None:
        """Writes the optimizer with its masters, the loss scale and the counters.

        A `gluon.Trainer` can read the file, too.
        """
        self._optimizer.trainer_state = {"names": [p.name for p in self._params],
                                         **self._scaling.state()}
        replace_file(fname, super().save_states)

    def load_states(self, fname: str) -> None:
        """Takes over what `save_states` wrote, here or in a `gluon.Trainer`.

        A file that does not fit is an error and changes nothing. It is a pickle, as MXNet's
        are, which may run code: load what you trust.
        """
        states, optimizer = read_states(fname)
        maker = optimizer or self._optimizer
        check_order(fname, maker, [p.name for p in self._params])
        check_states(fname, states, maker, self._optimizer, {
            i: (p.name, None if p._data is None else p.list_data()[0])
            for i, p in enumerate(self._params)})
        self._scaling.load(getattr(optimizer, "trainer_state", {}))
        super().load_states(fname)
        with_masters(self._optimizer)
        self._forget()


@contextmanager
def scale_loss(loss: Any, trainer: Trainer) -> Iterator[Any]:
    """The scaled loss, or losses, whose backward pass is to run inside; for those who come
    from `mx.contrib.amp`. `trainer.backward(loss)` does the same.

        with gluon_amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    """
    if not isinstance(trainer, Trainer):
        raise TypeError("scale_loss takes a gluon_amp.Trainer. Received: "
                        f"{type(trainer).__module__}.{type(trainer).__name__}")
    if not trainer._scaling.on:
        yield loss
        return
    several = isinstance(loss, (list, tuple))
    losses = list(loss) if several else [loss]
    with trainer._scaled(losses) as scale:
        with mx.autograd.record(mx.autograd.is_training()):
            scaled = [one * scale for one in losses]
        yield scaled if several else scaled[0]


def _check_kvstore(kvstore: Any, update_on_kvstore: Optional[bool], parameters: Any) -> None:
    """What would update the weights before anybody could look at the gradients."""
    name = str(getattr(kvstore, "type", kvstore))
    why = "loss scaling and clip_norm look at the gradients before the update"
    if update_on_kvstore:
        raise ValueError(f"{why}: update_on_kvstore must be False or None. Received: True")
    if "async" in name:
        raise ValueError(f"{why}, and {name} updates on its servers: use dist_sync")
    sparse = [p.name for p in parameters if getattr(p, "_stype", "default") != "default"]
    if sparse:
        raise ValueError(f"{why}, and row_sparse weights are updated on the kvstore. "
                         f"Received: row_sparse weights{of(sparse)}")
    sparse = [p.name for p in parameters if getattr(p, "_grad_stype", "default") != "default"]
    if sparse and "dist" in name:
        raise ValueError(f"{why}, and {name} updates those that are row_sparse on its servers. "
                         f"Received: row_sparse gradients{of(sparse)}")


def _check_losses(losses: List[Any]) -> None:
    if not losses:
        raise ValueError("backward takes a loss or a list of losses. Received: an empty list")
    for loss in losses:
        if not isinstance(loss, mx.nd.NDArray):
            raise TypeError("backward takes a loss or a list of losses. "
                            f"Received: {type(loss).__name__}")
        if loss.dtype is np.float16:
            raise ValueError("the loss is float16, where a sum above 65504 is infinite: take it "
                             "in float32, as loss_fn(net(data).astype('float32'), label); "
                             "converted networks return float32, but under pure_float16")
