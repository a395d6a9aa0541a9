"""A Gluon Trainer that scales gradients, looks at them once, and steps or skips.

    backward(loss)   the gradients of scale * loss, by head gradients: the loss stays as it is
    step(n)          sums them over the devices, and takes a step (step.py), which divides
                     by scale and n
"""
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

from .._mxnet import mx, np
from ..checks import in_names, positive_number
from ..cpu.arrays import to_float32
from ..files import replace_file
from . import graphs
from .optimizer import check_scalable, given_optimizer, with_masters
from .optimizer import optimizer as make_optimizer
from .ranks import RanksTrainer
from .states import check_order, check_states, read_states
from .step import Gradient, Place, Steps


class Trainer(RanksTrainer):
    """`gluon.Trainer` with loss scaling, clipping and float32 masters.

        with autograd.record():
            loss = loss_fn(net(data), label)
        trainer.backward(loss)
        trainer.step(batch_size)

    By hand: `backward`, `allreduce_grads`, then `unscale` or `clip_norm` or both, then `update`.

    Args:
        optimizer: a name, as for `gluon_amp.optimizer`, or an optimizer. Float16 weights get
            float32 masters with either; `gluon_amp.optimizer(name, multi_precision=False)` makes
            one without.
        loss_scale: "dynamic", a number, a StaticLossScale, a DynamicLossScale, or None.
        clip_norm: the largest norm of the whole gradient, as the optimizer gets it:
            unscaled, and divided by the batch size.
        enabled: False is loss_scale=None: a `gluon.Trainer`, but for `clip_norm`.
    """

    def __init__(self, params: Any, optimizer: Any, optimizer_params: Any = None,
                 kvstore: Any = "device", compression_params: Any = None,
                 update_on_kvstore: Optional[bool] = None, loss_scale: Any = "dynamic",
                 clip_norm: Optional[float] = None, enabled: bool = True) -> None:
        self._steps = Steps(loss_scale if enabled else None, clip_norm)
        parameters = list(params.values()) if hasattr(params, "values") else params
        if not parameters:
            raise ValueError("a Trainer needs parameters. Received: none")
        if self._steps.looking:
            _check_kvstore(kvstore, update_on_kvstore, parameters)
            update_on_kvstore = False
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params,
                         update_on_kvstore)

    def _init_optimizer(self, optimizer: Any, optimizer_params: Any) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            optimizer, optimizer_params = make_optimizer(optimizer, **optimizer_params), None
        if self._steps.scaling:
            check_scalable(optimizer)
        super()._init_optimizer(given_optimizer(optimizer), optimizer_params)

    # ---- what one asks

    @property
    def loss_scale(self) -> float:
        """The scale that the next step uses; 1 without scaling."""
        return self._steps.scale

    @property
    def skipped(self) -> int:
        """How many steps were skipped."""
        return self._steps.skipped

    @property
    def overflowed(self) -> Tuple[str, ...]:
        """Names of the parameters whose newest gradients are not finite. Those are the gradients
        that wait for their step, or else those of the last step."""
        return self._steps.overflowed(lambda: self._gradients(ignore_stale_grad=True))

    # ---- what one does

    def backward(self, loss: Any, retain_graph: bool = False) -> None:
        """Computes the scaled gradients of a loss, or of several.

        The losses stay unscaled. Calls before one step share one scale, so gradients
        with grad_req="add" add up.

        Until a dynamic scale is settled, the gradients are looked at here. Where they overflow,
        further backward passes find the scale, so that no step is lost. Arrays of your own with
        grad_req="add" get a sum of all these passes.
        """
        losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
        if not self._steps.scaling:
            mx.autograd.backward(losses, retain_graph=retain_graph)
            self._steps.forget()
            self._steps.pending.scale = 1.0
            return
        scale = self._begin(losses)
        searching = self._steps.searching
        if searching:
            self._begin_alike()
        kept = self._kept_gradients() if searching else {}

        def go_back(at: float, retain: bool) -> None:
            heads = [mx.nd.ones_like(one.as_nd_ndarray()) * at for one in losses]
            mx.autograd.backward(losses, heads, retain)

        go_back(scale, retain_graph or searching)
        self._note(losses, scale)
        if searching:
            averages = [(a, a.copy()) for p in self._params if p.grad_req == "null"
                        and p._data is not None for a in p.list_data()]

            def again(at: float) -> None:
                for gradient, before in kept.values():
                    (before * (at / scale)).copyto(gradient)
                go_back(at, True)
                self._note_written()
                for average, after_once in averages:  # MXNet's batch norms move them on the way
                    after_once.copyto(average)

            self._steps.settle(lambda: self._gradients(ignore_stale_grad=True),
                               lambda: graphs.can_go_back_again(losses), again)
            if not retain_graph:
                graphs.free(losses)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> bool:
        """Sums gradients over devices and updates, unless they are not finite.

        Returns:
            whether it updated. Learning rate schedules do not see a skipped step.
        """
        self._check_step(batch_size, ignore_stale_grad)
        super().step(batch_size, ignore_stale_grad)
        self._check_ranks_once()
        return self._steps.updated

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> bool:
        """`step` after `allreduce_grads`."""
        self._check_step(batch_size, ignore_stale_grad)
        super().update(batch_size, ignore_stale_grad)
        self._check_ranks_once()
        return self._steps.updated

    def unscale(self) -> Dict[str, List[Any]]:
        """The gradients without the scale, in float32: a list over devices for each name.

        `update` then uses these, with all that is changed in them. The float16 gradients
        stay as they are, since small numbers would vanish there.
        """
        self._check_backward("unscale()")
        pending = self._steps.pending
        if pending.unscaled is not None:
            raise RuntimeError("unscale() was already called since the last backward(): "
                               "use the gradients that it returned")
        scale = self._steps.gradients_scale
        gradients = self._gradients(ignore_stale_grad=True)
        pending.unscaled = {g.place: to_float32(g.array) / scale for g in gradients}
        named: Dict[str, List[Any]] = {}
        for g in gradients:
            named.setdefault(g.name, []).append(pending.unscaled[g.place])
        return named

    def clip_norm(self, max_norm: float, batch_size: int = 1) -> float:
        """Clips the next `update` to this norm, over all parameters, of the gradient divided
        by `update`'s batch size. Returns the norm before, divided by `batch_size`; it is
        infinite or NaN if the gradients are.
        """
        positive_number(max_norm, "max_norm")
        factor = self._scale / positive_number(batch_size, "batch_size")
        self._check_backward("clip_norm()")
        norm = self._steps.norm(self._gradients(ignore_stale_grad=True))
        self._steps.pending.max_norm = max_norm
        return factor / self._steps.gradients_scale * norm

    # ---- how it is done

    def _begin(self, losses: List[Any]) -> float:
        """Before a backward pass: gives its scale.

        MXNet marks the weights whose gradients a backward pass writes. The marks are taken
        off at once, so that a mark at the step tells of somebody else's backward pass.
        """
        _check_losses(losses)
        weights = dict(self._weights())
        if self._steps.pending.scale is None:
            for weight in weights.values():
                weight._fresh_grad = False
        else:
            self._check_nobody_else()
        return self._steps.begin([g for p in self._params if p.grad_req == "add"
                                  for g in p.list_grad()])

    def _note(self, losses: List[Any], scale: float) -> None:
        """After a backward pass."""
        pending = self._steps.pending
        self._note_written()
        pending.scale = scale
        pending.losses += [loss.detach() for loss in losses]
        pending.unscaled = pending.max_norm = None

    def _note_written(self) -> None:
        for place, weight in self._weights():
            if weight._fresh_grad:
                self._steps.pending.written.add(place)
                weight._fresh_grad = False

    def _kept_gradients(self) -> Dict[Place, Tuple[Any, Any]]:
        """Gradients that a backward pass does not simply replace, and copies of them: those that
        add up, and those of passes before in this step."""
        kept = {}
        for place, _ in self._weights():
            parameter = self._params[place[0]]
            if parameter.grad_req == "add" or place in self._steps.pending.written:
                gradient = parameter.list_grad()[place[1]]
                kept[place] = gradient, gradient.copy()
        return kept

    def _weights(self) -> Iterator[Tuple[Place, Any]]:
        trainable = [(i, p) for i, p in enumerate(self._params) if p.grad_req != "null"]
        if not trainable:
            raise RuntimeError(f"nothing to train: all {len(self._params)} parameters of this "
                               "Trainer have grad_req='null'")
        for i, parameter in trainable:
            for device, weight in enumerate(parameter.list_data()):
                yield (i, device), weight

    def _check_step(self, batch_size: Any, ignore_stale_grad: bool) -> None:
        positive_number(batch_size, "batch_size")
        self._check_backward("step()")
        if self._steps.scaling:
            self._gradients(ignore_stale_grad)

    def _check_backward(self, call: str) -> None:
        if not self._steps.scaling:
            return
        next(self._weights())  # or the error that there is nothing to train
        if self._steps.pending.scale is None:
            raise RuntimeError(f"{call} needs new gradients: call trainer.backward(loss), not "
                               "loss.backward(), before each step")
        self._check_nobody_else()

    def _check_nobody_else(self) -> None:
        names = [self._params[i].name for (i, _), weight in self._weights() if weight._fresh_grad]
        if names:
            self._steps.forget()
            raise RuntimeError(f"the gradients{in_names(names)} were written by another backward "
                               "pass after trainer.backward(): a loss.backward(), or that of "
                               "another Trainer. Their scale is not known: step before it")

    def _gradients(self, ignore_stale_grad: bool) -> List[Gradient]:
        """The gradients to use, parameter by parameter."""
        pending = self._steps.pending
        gradients, stale = [], []
        for place, weight in self._weights():
            i, device = place
            parameter = self._params[i]
            if place in pending.written if self._steps.scaling else weight._fresh_grad:
                array = pending.summed.get(place, parameter.list_grad()[device])
                array = (pending.unscaled or {}).get(place, array)
                gradients.append(Gradient(parameter.name, place, weight, array))
            else:
                stale.append(parameter.name)
        if stale and not (ignore_stale_grad and gradients):
            raise RuntimeError(f"backward has not computed the gradients{in_names(stale)} since "
                               "the last step: the loss does not depend on them. If that is "
                               "meant, call step(batch_size, ignore_stale_grad=True)")
        return gradients

    def _allreduce_grads(self) -> None:
        if self._update_on_kvstore:
            super()._allreduce_grads()
            return
        summed = self._steps.reduction.sum((i, p.list_grad()) for i, p in enumerate(self._params)
                                           if p.grad_req != "null")
        self._steps.pending.summed = {(i, device): array for i, arrays in summed.items()
                                      for device, array in enumerate(arrays)}

    def _update(self, ignore_stale_grad: bool = False) -> None:
        pending = self._steps.pending
        plain = not (self._steps.looking or pending.unscaled or pending.max_norm
                     or pending.summed or pending.moved)
        if plain:
            super()._update(ignore_stale_grad)
            self._steps.forget()
            return
        gradients = self._gradients(ignore_stale_grad)

        def apply(factor: float) -> None:
            self._optimizer.rescale_grad = factor
            for device, updater in enumerate(self._updaters):
                mine = [(g.place[0], g.array, g.weight) for g in gradients if g.place[1] == device]
                if mine:
                    updater(*zip(*mine))

        try:
            self._steps.take(gradients, self._optimizer.rescale_grad, apply, self._clear)
        finally:
            self._optimizer.rescale_grad = self._scale  # as given, for its next Trainer
            for g in gradients:
                g.weight._fresh_grad = False

    def _clear(self) -> None:
        for parameter in self._params:
            if parameter.grad_req == "add":
                parameter.zero_grad()

    # ---- files

    def save_states(self, fname: str) -> None:
        """Writes the optimizer with its masters, the loss scale and the counters.

        A `gluon.Trainer` can read the file, too.
        """
        self._optimizer.trainer_state = {"names": [p.name for p in self._params],
                                         **self._steps.state()}
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
        self._steps.load(getattr(optimizer, "trainer_state", {}))
        super().load_states(fname)
        self._ranks_checked = False
        with_masters(self._optimizer)


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
    if not trainer._steps.scaling:
        yield loss
        return
    several = isinstance(loss, (list, tuple))
    losses = list(loss) if several else [loss]
    scale = trainer._begin(losses)
    with mx.autograd.record(mx.autograd.is_training()):
        scaled = [one * scale for one in losses]
    yield scaled if several else scaled[0]
    trainer._note(losses, scale)


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
                         f"Received: row_sparse weights{in_names(sparse)}")
    sparse = [p.name for p in parameters if getattr(p, "_grad_stype", "default") != "default"]
    if sparse and "dist" in name:
        raise ValueError(f"{why}, and {name} updates those that are row_sparse on its servers. "
                         f"Received: row_sparse gradients{in_names(sparse)}")


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
