"""A Gluon Trainer that scales gradients, looks at them once, and steps or skips.

    backward(loss)   the gradients of scale * loss, by head gradients: the loss stays as it is
    step(n)          sums them over the devices, and takes a step (step.py), which divides
                     by scale and n
"""
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from .._mxnet import mx
from ..checks import in_names, positive_number
from ..cpu.arrays import to_float32
from ..cpu.library import marks
from ..parallel.sync import check_kvstore
from . import graphs
from .following import backward_pass
from .optimizer import check_scalable, given_optimizer
from .optimizer import optimizer as make_optimizer
from .pending import Gradient, Place
from .static_pair import GivenLossScale
from .step import Steps, TakesSteps, clear_added
from .trainer_files import TrainerFiles


class Trainer(TakesSteps, TrainerFiles):
    """`gluon.Trainer` with loss scaling, clipping and float32 masters.

        with autograd.record():
            loss = loss_fn(net(data), label)
        trainer.backward(loss)
        trainer.step(batch_size)

    By hand: `backward`, `allreduce_grads`, then `unscale` or `clip_norm` or both, then `update`.

    Args:
        optimizer: a name, as for `gluon_amp.optimizer`, or an optimizer. Float16 weights get
            masters; `gluon_amp.optimizer(name, multi_precision=False)` makes one without.
        kvstore: for many workers "dist_sync", "dist_device_sync", "horovod", `gluon_amp.Horovod()`.
        loss_scale: "dynamic", a number, a StaticLossScale, a DynamicLossScale, or None.
        clip_norm: the largest norm of the whole gradient, as the optimizer gets it:
            unscaled, and divided by the batch size. None: no clipping.
        enabled: False is loss_scale=None. All other arguments are as for `gluon.Trainer`.
    """

    _optimizer: "mx.optimizer.Optimizer"
    _heads_checked = False  # by the first backward pass with a scale
    _repeats: Optional[bool] = None  # whether that went through the graph a second time
    # What an X-ray has called after each backward pass, with the scale at which that began.
    after_pass: Optional[Callable[[float], None]] = None

    def __init__(self, params: Union["mx.gluon.ParameterDict", Sequence["mx.gluon.Parameter"]],
                 optimizer: Union[str, "mx.optimizer.Optimizer"],
                 optimizer_params: Optional[Dict[str, Any]] = None,
                 kvstore: Union[str, "mx.kv.KVStoreBase", None] = "device",
                 compression_params: Optional[Dict[str, Any]] = None,
                 update_on_kvstore: Optional[bool] = None, loss_scale: GivenLossScale = "dynamic",
                 clip_norm: Optional[float] = None, enabled: bool = True) -> None:
        self._steps = Steps(loss_scale if enabled else None, clip_norm)
        parameters = list(params.values()) if hasattr(params, "values") else params
        if not parameters:
            raise ValueError("a Trainer needs parameters. Received: none")
        if self._steps.looking:
            check_kvstore(kvstore, update_on_kvstore, parameters)
            update_on_kvstore = False
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params,
                         update_on_kvstore)

    def _init_optimizer(self, optimizer: Any, optimizer_params: Any) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            optimizer, optimizer_params = make_optimizer(optimizer, **optimizer_params), None
        if self._steps.scaling:
            check_scalable(optimizer)
        super()._init_optimizer(given_optimizer(optimizer), optimizer_params)

    # ---- what one does

    def backward(self, loss: Union["mx.nd.NDArray", Sequence["mx.nd.NDArray"]],
                 retain_graph: bool = False) -> None:
        """Computes the scaled gradients of a loss, or of a list with one of each device.

        The losses stay unscaled. Calls before one step share one scale, so gradients
        with grad_req="add" add up.

        Until a dynamic scale is settled, the gradients are looked at here. Where they overflow,
        further backward passes find the scale, so that no step is lost. Arrays of your own with
        grad_req="add" get a sum of all these passes.
        """
        # what is done to gradients is no part of the graph
        with mx.autograd.pause(), backward_pass(self._optimizer):
            self._backward(list(loss) if isinstance(loss, (list, tuple)) else [loss], retain_graph)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> bool:
        """Sums gradients over devices and workers, divides by `batch_size`, which counts the
        examples of all of them, and updates, unless a gradient is infinite or NaN.

        Returns:
            whether it updated. Learning rate schedules do not see a skipped step.
        """
        self._check_step(batch_size, ignore_stale_grad)
        if ignore_stale_grad:
            self._reach_alike()
        super().step(batch_size, ignore_stale_grad)
        self._check_ranks_once()
        return self._steps.updated

    def allreduce_grads(self) -> None:
        """Sums gradients over devices and workers, for `unscale`, `clip_norm` and `update`."""
        super().allreduce_grads()
        self._steps.watch(self._waiting())

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> bool:
        """The rest of a `step`, after `allreduce_grads` has summed the gradients."""
        self._check_step(batch_size, ignore_stale_grad)
        if ignore_stale_grad:
            self._check_reached()
        super().update(batch_size, ignore_stale_grad)
        self._check_ranks_once()
        return self._steps.updated

    def unscale(self) -> Dict[str, List["mx.nd.NDArray"]]:
        """The gradients without the scale, in float32: a list over devices for each name.

        `update` then uses these, with all that is changed in them. The float16 gradients
        stay as they are, since small numbers would vanish there.
        """
        self._check_backward("unscale()")
        self._steps.end_watch()
        self._steps.check_watched()
        pending = self._steps.pending
        if pending.unscaled is not None:
            raise RuntimeError("unscale() was already called since the last backward(): "
                               "use the gradients that it returned")
        scale = self._steps.gradients_scale
        gradients = self._gradients(ignore_stale_grad=True)
        pending.unscaled = {g.place: to_float32(g.array) / scale for g in gradients}
        named: Dict[str, List[mx.nd.NDArray]] = {}
        for g in gradients:
            named.setdefault(g.name, []).append(pending.unscaled[g.place])
        self._steps.watch(gradients)
        return named

    def clip_norm(self, max_norm: float, batch_size: int = 1) -> float:
        """Clips the next `update` to this norm, over all parameters, of the gradient divided
        by `update`'s batch size. Returns the norm before, divided by `batch_size`; it is
        infinite or NaN if the gradients are."""
        positive_number(max_norm, "max_norm")
        factor = self._scale / positive_number(batch_size, "batch_size")
        self._check_backward("clip_norm()")
        gradients = self._gradients(ignore_stale_grad=True)
        self._steps.end_watch()
        self._steps.check_watched()
        self._steps.watch(gradients)
        norm = self._steps.norm(gradients)
        self._steps.pending.max_norm = max_norm
        return factor / self._steps.gradients_scale * norm

    # ---- how it is done

    def _backward(self, losses: List["mx.nd.NDArray"], retain_graph: bool) -> None:
        if not self._steps.scaling:
            mx.autograd.backward(losses, retain_graph=retain_graph)
            if self.after_pass is not None:
                self.after_pass(1.0)
            self._steps.forget()
            self._steps.note(1.0, [])
            return
        scale = self._begin(losses)
        searching, checking = self._steps.searching, not self._heads_checked and scale != 1
        if searching:
            self._begin_alike()
        kept = self._kept_gradients() if searching else {}
        averages: List[Tuple[mx.nd.NDArray, mx.nd.NDArray]] = []

        def go_back(at: float, retain: bool = True) -> None:
            heads = [graphs.head(one.shape, one.context, one.dtype, at) for one in losses]
            try:
                mx.autograd.backward(losses, heads, retain)
            finally:
                self._note_written()
            if self.after_pass is not None:
                self.after_pass(at)

        def again(at: float) -> None:
            if not averages:
                averages.extend(self._averages())
            for gradient, before in kept.values():
                (before * (at / scale)).copyto(gradient)
            go_back(at)

        go_back(scale, retain_graph or searching or checking)
        self._steps.note(scale, [loss.detach() for loss in losses])
        if checking:
            averages.extend(self._averages())
            try:
                sure = graphs.check_heads(losses, self._waiting(), go_back)
                self._heads_checked, self._repeats = sure is not False, sure is not None
            except ValueError:
                self._steps.forget()
                raise
        if searching:
            converted = all(getattr(p, "converted_by_gluon_amp", False) for p in self._params)
            self._steps.settle(self._waiting, lambda: graphs.can_go_back_again(
                losses, self._waiting(), converted, self._repeats, lambda: again(scale)), again)
        if averages:
            mx.nd.waitall()
            for average, after_once in averages:
                after_once.copyto(average)
        if (searching or checking) and not retain_graph:
            graphs.free(losses)
        self._steps.watch(self._waiting())

    def _averages(self) -> List[Tuple["mx.nd.NDArray", "mx.nd.NDArray"]]:
        """Moving averages, and copies of them: MXNet's batch norms move them on the way back, so
        that further passes would move them again. Waits, since they do it without telling."""
        mx.nd.waitall()
        return [(a, a.copy()) for p in self._params if p.grad_req == "null" and p._data is not None
                for a in p.list_data()]

    def _begin(self, losses: List["mx.nd.NDArray"]) -> float:
        """Before a backward pass: gives its scale.

        MXNet marks the weights whose gradients a backward pass writes. The marks are taken
        off at once, so that a mark at the step tells of somebody else's backward pass.
        """
        graphs.check_losses(losses)
        self._steps.pending.are_summed = False
        if not self._steps.begun:
            self._marked(take_off=True)
        else:
            self._check_nobody_else()
        return self._steps.begin([g for p in self._params if p.grad_req == "add"
                                  for g in p.list_grad()])

    def _note_written(self) -> None:
        pending = self._steps.pending
        pending.written, pending.stale = self._written(pending.written, take_off=True)

    def _written(self, known: Dict[Place, Gradient],
                 take_off: bool = False) -> Tuple[Dict[Place, Gradient], List[str]]:
        """The gradients that are known to be written, or marked so; and the names of the others."""
        written, stale = {}, []
        for place, weight, is_marked in self._marked(take_off):
            parameter = self._params[place[0]]
            if is_marked:
                own = parameter.list_grad()[place[1]]
                written[place] = Gradient(parameter.name, place, weight, own, own)
            elif place in known:
                written[place] = known[place]
            else:
                stale.append(parameter.name)
        return written, stale

    def _marked(self, take_off: bool = False) -> List[Tuple[Place, Any, int]]:
        """The weights, and whether each has a mark of MXNet's."""
        weights = self._weights()
        marked = marks([weight for _, weight in weights], take_off)
        return [(place, weight, mark) for (place, weight), mark in zip(weights, marked)]

    def _kept_gradients(self) -> Dict[Place, Tuple["mx.nd.NDArray", "mx.nd.NDArray"]]:
        """Gradients that a backward pass does not simply replace, and copies of them: those that
        add up, and those of passes before in this step."""
        kept = {}
        for place, _ in self._weights():
            parameter = self._params[place[0]]
            if parameter.grad_req == "add" or place in self._steps.pending.written:
                gradient = parameter.list_grad()[place[1]]
                kept[place] = gradient, gradient.copy()
        return kept

    def _weights(self) -> List[Tuple[Place, "mx.nd.NDArray"]]:
        weights = [((i, device), weight) for i, p in enumerate(self._params)
                   if p.grad_req != "null" for device, weight in enumerate(p.list_data())]
        if not weights:
            raise RuntimeError(f"nothing to train: all {len(self._params)} parameters of this "
                               "Trainer have grad_req='null'")
        return weights

    def _check_step(self, batch_size: Any, ignore_stale_grad: bool) -> None:
        positive_number(batch_size, "batch_size")
        self._check_backward("step()")
        if self._steps.scaling:
            self._gradients(ignore_stale_grad)
        self._steps.end_watch()

    def _check_backward(self, call: str) -> None:
        if not self._steps.scaling:
            return
        if not self._steps.begun:
            self._weights()  # or the error that there is nothing to train
            raise RuntimeError(f"{call} needs new gradients: call trainer.backward(loss), not "
                               "loss.backward(), before each step")
        self._check_nobody_else()

    def _check_nobody_else(self) -> None:
        names, pending = [], self._steps.pending
        for place, weight, is_marked in self._marked():
            known = pending.written.get(place)
            if is_marked:
                names.append(self._params[place[0]].name)
            elif known is not None and known.weight is not weight:
                pending.stale.append(pending.written.pop(place).name)  # cast or moved since
        if names:
            self._steps.forget()
            raise RuntimeError(f"the gradients{in_names(names)} were written by another backward "
                               "pass after trainer.backward(): a loss.backward(), or that of "
                               "another Trainer. Their scale is not known: step before it")

    def _gradients(self, ignore_stale_grad: bool = True) -> List[Gradient]:
        """The gradients to use, parameter by parameter."""
        pending = self._steps.pending
        written, stale = (pending.written, pending.stale) if self._steps.scaling \
            else self._written({})
        instead = self._steps.instead
        gradients = [replace(g, array=instead[place]) if place in instead else g
                     for place, g in written.items()] if instead else list(written.values())
        if stale and not (ignore_stale_grad and gradients):
            raise RuntimeError(f"backward has not computed the gradients{in_names(stale)} since "
                               "the last step: the loss does not depend on them. If that is "
                               "meant, call step(batch_size, ignore_stale_grad=True)")
        return gradients

    def _waiting(self) -> List[Gradient]:
        """The gradients that wait for a step, if any."""
        return self._gradients(ignore_stale_grad=True) if self._steps.pending.written else []

    def _allreduce_grads(self) -> None:
        if self._update_on_kvstore:
            self._update_on_servers()
            return
        self._begin_sum()
        self._steps.sum((i, i, p.list_grad()) for i, p in enumerate(self._params)
                        if p.grad_req != "null")

    def _update(self, ignore_stale_grad: bool = False) -> None:
        self._check_sum()
        pending = self._steps.pending
        plain = not (self._steps.looking or self._steps.instead or pending.max_norm
                     or pending.moved)
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
            self._steps.take(gradients, self._optimizer.rescale_grad, apply,
                             lambda: clear_added(self._params))
        finally:
            self._optimizer.rescale_grad = self._scale  # as given, for its next Trainer
            marks([g.weight for g in gradients], take_off=True)
