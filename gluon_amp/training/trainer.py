"""A Gluon Trainer that scales gradients, checks them once, and updates or skips.

    backward(loss)   computes the gradients of scale * loss with scaled head gradients; the loss
                     stays unscaled
    step(n)          sums them over devices and workers (parallel/sync.py), and takes a step
                     (step.py), which divides by scale and n
"""
from __future__ import annotations

import functools
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

from .._mxnet import GRAPH_LOCK, mx
from ..annotations import (
    Array,
    Arrays,
    Context,
    DType,
    KVStore,
    Optimizer,
    Parameter,
    ParameterDict,
    Shape,
)
from ..checks import counted, in_names, listed, positive_number, same_objects
from ..cpu.arrays import TYPES_16BIT, dtype_name, is_16bit
from ..cpu.library import graph_operators
from ..parallel import consistency, store
from ..parallel.sync import BROADCAST_KEYS, Workers
from ..policy import Policy
from . import checkpoint, masters
from .gradients import Gradient, Gradients, in_turn, set_to_zero
from .heads import check_graphs
from .loss_scale import AutoLossScale, GivenLossScale, LossScale
from .moving_averages import MovingAverages, Named
from .optimizer import check_scalable, given_optimizer, weights_unwritten
from .optimizer import optimizer as make_optimizer
from .step import Stage, Step, backward_pass, scale_of_pass
from .trained import Trained

_AVERAGES = ("running_mean", "running_var", "moving_mean", "moving_var")


class Trainer(Trained, mx.gluon.Trainer):
    """A `gluon.Trainer` with loss scaling, gradient clipping and float32 master weights.

        with autograd.record():
            loss = loss_fn(net(data), label)
        trainer.backward(loss)
        trainer.step(batch_size)

    To write a step by hand, call `backward`, `allreduce_grads`, then `unscale` or `clip_norm` or
    both, then `update`.

    Args:
        params: the parameters, as for `gluon.Trainer`.
        optimizer: a name, as for `gluon_amp.optimizer`, or an optimizer. 16-bit weights get master
            weights, unless `gluon_amp.optimizer(name, multi_precision=False)` created it.
        optimizer_params: the optimizer's arguments.
        kvstore: as for `gluon.Trainer`. With several workers "dist_sync", "dist_device_sync",
            "horovod" or `gluon_amp.parallel.Horovod()`.
        compression_params: refused.
        update_on_kvstore: True lets the store update; valid without a loss scale. By default the
            store updates row_sparse parameters only.
        loss_scale: "auto", "dynamic", a number, a StaticLossScale, a DynamicLossScale, or None.
            "auto" is "dynamic" if gradients are computed in float16, 1 (which skips steps with
            infinities) if in bfloat16, and else None, MXNet's own step. The parameters and the
            policies of their networks decide when the training begins: with the first backward
            pass, step, kvstore or `load_states`.
        clip_norm: the largest norm of all gradients together, unscaled and divided by the batch
            size. None does not clip.
    """

    _optimizer: Optimizer
    _params: List[Parameter]
    _params_to_init: List[Parameter]
    _kvstore_params: Dict[str, Any]
    # An X-ray's callback after each backward pass, with the pass's scale.
    after_pass: Optional[Callable[[float], None]] = None
    _is_scalable = False  # whether `__init__` checks that gradients may be scaled
    _compared: Optional[float] = None  # the last rescale_grad that ranks have compared
    _has_updated = False
    _updating_here = "update_on_kvstore=False"

    def __init__(self, params: Union[ParameterDict, Sequence[Parameter]],
                 optimizer: Union[str, Optimizer],
                 optimizer_params: Optional[Dict[str, Any]] = None,
                 kvstore: KVStore = "device",
                 compression_params: Optional[Dict[str, Any]] = None,
                 update_on_kvstore: Optional[bool] = None, loss_scale: GivenLossScale = "auto",
                 clip_norm: Optional[float] = None) -> None:
        """See the class for the arguments."""
        parameters = list(params.values()) if hasattr(params, "values") else params
        self._averaged: List[Any] = []  # `AveragedWeights`
        self._lists: List[Any] = []  # MXNet's lists of arrays, and the gradients in them
        self._listed: List[Gradient] = []
        self._without_heads: Set[int] = set()  # operators of graphs without any loss head
        self._workers = Workers()
        self._step = Step(Gradients(self._read_gradients), self._workers, loss_scale, clip_norm)
        if not parameters:
            raise ValueError("a Trainer needs parameters. Received: none")
        counts = Counter(one for one in parameters if isinstance(one, Parameter))
        twice = [one.name for one, count in counts.items() if count > 1]
        if twice:
            raise ValueError("a Trainer takes each parameter once. Received twice: "
                             + listed(twice))
        self._is_scalable = self._decided_now(parameters).scales
        checks = clip_norm is not None or self._is_scalable
        if checks:
            store.check_kvstore(kvstore, update_on_kvstore, parameters)
            update_on_kvstore = False
        kvstore = store.make_store(kvstore, compression_params)
        dense = all(p._stype == p._grad_stype == "default" for p in parameters
                    if isinstance(p, Parameter))
        if update_on_kvstore is None and store.updates_on_ranks(kvstore, dense):
            update_on_kvstore = False
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params,
                         update_on_kvstore)
        if checks:
            self._check_averages()
        self._store_is_dist = "dist" in store.kind_of(kvstore)
        # otherwise in the first backward pass, when all parameters have their shapes
        if self._store_is_dist and all(p._data is not None for p in self._params):
            if self._servers_update():
                self._connect_servers()
            else:
                self._broadcast_parameters()
                self._step.weights_replaced = False  # there are no gradients of earlier weights

    def _init_optimizer(self, optimizer: Union[str, Optimizer],
                        optimizer_params: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            optimizer, optimizer_params = make_optimizer(optimizer, **optimizer_params), None
        if self._is_scalable:
            check_scalable(optimizer)
        super()._init_optimizer(given_optimizer(optimizer), optimizer_params)

    @property
    def scaling(self) -> LossScale:
        """The loss scale with its limits; of "auto", as it would be decided now."""
        return self._decided_now(self._params)

    # ---- loss_scale="auto"

    def _decided_now(self, parameters: Sequence[Any]) -> LossScale:
        """Returns the loss scale; for "auto", that of the types of gradients now."""
        loss_scale = self._step.loss_scale
        return loss_scale.for_types(types_of_gradients(parameters)) \
            if isinstance(loss_scale, AutoLossScale) else loss_scale

    def _decide(self) -> None:
        """Decides loss_scale="auto". If the network was converted since `__init__`, checks what
        that checks."""
        if not isinstance(self._step.loss_scale, AutoLossScale):
            return
        self._step.loss_scale = self._decided_now(self._params)
        if self._step.loss_scale.scales and not self._is_scalable:
            check_scalable(self._optimizer)
            config = self._kvstore_params
            store.check_kvstore(config["kvstore"], config["update_on_kvstore"], self._params)
            config["update_on_kvstore"] = False
            self._check_averages()

    def _check_averages(self) -> None:
        """Keeps moving averages on GPUs finite."""
        if self._contexts[0].device_type == "gpu" and self._step.averages is None:
            self._step.averages = MovingAverages(self._averages)
            self._step.averages.begin()

    def check_policy(self, policy: Policy) -> None:
        """Refuses a policy whose gradients need another loss scale than "auto" has become."""
        self._step.loss_scale.for_types(_types_of(policy))

    # ---- a backward pass

    def backward(self, loss: Arrays, retain_graph: bool = False) -> None:
        """Computes scaled gradients. Calls before one step share one scale.

        Args:
            loss: a loss, or a list with the loss of each device. They stay unscaled.
            retain_graph: keeps the graph for another backward pass.

        Raises:
            ValueError: the network has loss heads, such as `SoftmaxOutput`, whose gradients
                no loss scale reaches.
            RuntimeError: the network has the averages of AveragedWeights.
        """
        _backward("backward()", loss, [self], retain_graph)

    def _read_gradients(self) -> List[Gradient]:
        """Returns the gradients of trained parameters. MXNet replaces a parameter's lists of arrays
        if it casts or moves them."""
        lists = [part for p in self._params for part in (p._data, p._grad, p._grad_req)]
        if not same_objects(lists, self._lists):
            self._lists, self._listed = lists, [
                Gradient(i, i, p.name, device, weight, own, own, p.grad_req == "add")
                for i, p in enumerate(self._params) if p.grad_req != "null"
                for device, (weight, own) in enumerate(zip(p._data or p.list_data(),  # its error
                                                           p._grad))]
        return self._listed

    # ---- a step

    @in_turn
    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> bool:
        """Sums gradients over devices and workers and updates, unless a gradient is not finite.

        Args:
            batch_size: the number of examples of all devices and workers, which divides the sum.
            ignore_stale_grad: skips parameters that no backward pass has reached.

        Returns:
            Whether it updated. A skipped step does not advance learning rate schedules.

        Raises:
            LossScaleError: the gradients overflow at the smallest scale; or 16 steps in a row were
                skipped and no lower scale can help: the loss is not finite, or the scale is static.
            RuntimeError: something else has written into the scaled gradients.
            UserWarning: no backward pass has reached a parameter; `gluon.Trainer` raises it, too.
        """
        self._check_step("step()", batch_size, ignore_stale_grad)
        self._check_and_rescale_grad(self._scale / batch_size)
        self._broadcast_parameters()
        if ignore_stale_grad:
            self._reach(are_summed=False)
        self._allreduce_grads()
        self._update(ignore_stale_grad)
        return self._end_step()

    @in_turn
    def allreduce_grads(self) -> None:
        """Sums gradients over devices and workers, before `unscale`, `clip_norm` and `update`."""
        self._step.gradients.count_writes()
        reached = {gradient.number for gradient in self._step.find_new()}
        set_to_zero(gradient.own for gradient in self._unreached(reached))
        super().allreduce_grads()
        self._step.guard()

    @in_turn
    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> bool:
        """Updates after `allreduce_grads`; otherwise the same as `step`."""
        self._check_step("update()", batch_size, ignore_stale_grad)
        if ignore_stale_grad:
            self._reach(are_summed=True)
        super().update(batch_size, ignore_stale_grad)
        return self._end_step()

    @in_turn
    def unscale(self) -> Dict[str, List[Array]]:
        """Returns unscaled gradients, 16-bit ones in float32.

        For each parameter's name they are a list over devices. `update` uses these arrays, with
        your changes. The 16-bit gradients stay scaled.
        """
        low = [g.name for g in self._step.gradients.read() if is_16bit(g.own.dtype)]
        if low and not self._optimizer.multi_precision:
            raise RuntimeError("unscale() returns float32 gradients, which need an optimizer with "
                               "master weights: multi_precision=True. Received: multi_precision="
                               f"False{in_names(low)}")
        named: Dict[str, List[Array]] = {}
        for gradient in self._step.unscale():
            named.setdefault(gradient.name, []).append(gradient.array)
        return named

    @in_turn
    def clip_norm(self, max_norm: float, batch_size: int = 1) -> float:
        """Clips the gradients of the next `update` to a norm over all parameters.

        Args:
            max_norm: the largest norm, unscaled and divided by the batch size.
            batch_size: as for `update`.

        Returns:
            The norm before clipping; infinite or NaN if the gradients are.

        Raises:
            RuntimeError: the gradients of several devices or workers have not been summed.
        """
        positive_number(max_norm, "max_norm")
        rescale_grad = self._scale / positive_number(batch_size, "batch_size")
        gradients = self._step.take("clip_norm()")
        self._connect()
        if self._workers.adds(gradients) and self._step.stage is not Stage.SUMMED:
            raise RuntimeError("clip_norm() before the sum over devices and workers: call trainer."
                               "allreduce_grads(), then clip_norm(), then update(batch_size)")
        return self._step.clip(max_norm, rescale_grad)

    def _check_step(self, call: str, batch_size: object, ignore_stale_grad: bool) -> None:
        self._check_own_weights(call)
        self._take_parameters(call)
        positive_number(batch_size, "batch_size")
        if not self._update_on_kvstore:
            self._step.take(call, ignore_stale_grad)

    def _take_parameters(self, call: str) -> None:
        """Becomes the Trainer of its parameters. Refuses 16-bit weights that this Trainer and
        another one update alternately."""
        others = [p for p in self._params if p._trainer is not self and p._stype == "default"]
        shared = [p.name for p in others if self._has_updated and p.grad_req != "null"
                  and is_16bit(p.dtype) and isinstance(p._trainer, Trainer)
                  and p._trainer._has_updated]
        if shared:
            raise RuntimeError(f"{call}: another Trainer has updated these 16-bit weights since. "
                               "Each has master weights of its own, so updates that 16 bits round "
                               "away would be lost. Valid: one Trainer for them, or float32 "
                               "weights, as with the policy 'mixed_float16'. "
                               f"Received: {listed(shared)}")
        for parameter in others:
            parameter._trainer = self

    def _allreduce_grads(self) -> None:
        """Sums gradients over devices and workers, once; or pushes them to servers, and pulls the
        weights that these update."""
        if self._update_on_kvstore:
            self._workers.lay_out(gradient for p in self._params if p.grad_req != "null"
                                  for gradient in p.list_grad())
            super()._allreduce_grads()
        elif self._workers.sums:
            self._workers.sum(self._step)

    def _update(self, ignore_stale_grad: bool = False) -> None:
        """Updates with `Step.apply`, unless the store updates."""
        self._check_summed()
        if self._update_on_kvstore:
            super()._update(ignore_stale_grad)
            self._step.finish()
            return
        try:
            self._step.apply(self._updaters)
        finally:
            self._optimizer.rescale_grad = self._scale  # the given value, for its next Trainer

    def _end_step(self) -> bool:
        """Compares ranks after the first step. Returns whether the step updated."""
        if self._workers.exchange and not self._has_compared:
            self.check_ranks()
            self._has_compared = True
        self._step.report_overflow(self)
        if self._step.updated:
            self._has_updated = True
            for averaged in self._averaged:
                averaged._note_update()
        return self._step.updated

    def _averages(self) -> Named:
        """Returns the moving averages on GPUs, which the step keeps finite."""
        return [(p.name, p.list_data()) for p in self._params
                if p.grad_req == "null" and p._data is not None and _is_average(p)]

    # ---- master weights

    def master(self, parameter: Parameter) -> Array:
        """Returns a copy of a parameter's float32 master weights.

        It is on the first device; all devices and workers have the same, but for moving averages.
        Float32 weights are their own master weights. Those of 16-bit weights are created by the
        first step; before it, this returns the weights. To write master weights, load a float32
        file: `net.load_parameters(file, masters=trainer)`.

        Args:
            parameter: a parameter of this Trainer.

        Raises:
            ValueError: it is not this Trainer's, or the optimizer has no master weights.
        """
        return masters.read(self, parameter)

    def _check_own_weights(self, call: str) -> None:
        """Refuses a call while the network has averages instead of the training's weights."""
        if any(averaged._applied for averaged in self._averaged):
            raise RuntimeError(f"{call} in the `with` block of AveragedWeights, where the network "
                               "has averages. Valid: after the block")

    # ---- many workers

    @property
    def workers(self) -> int:
        """The number of workers."""
        self._connect()
        return self._workers.count

    @property
    def rank(self) -> int:
        """The rank of this worker, from 0."""
        self._connect()
        return self._workers.rank

    def gather(self, mine: bytes) -> List[bytes]:
        """Returns the bytes of all workers, of one length, by rank. All workers must call it."""
        self._connect()
        return self._workers.gather(mine)

    def check_ranks(self) -> None:
        """Compares optimizer, weights, master weights and loss scale over all ranks.

        See `Module.check_ranks`. Before the first step, all ranks get rank 0's weights first.
        """
        self._broadcast_parameters()
        super().check_ranks()

    def _compared_state(self) -> List[Any]:
        weights = [(p.name, p.list_data()[0]) for p in self._params if not _is_average(p)]
        names = {i: p.name for i, p in enumerate(self._params)}
        return consistency.state_of(self._updaters[0], self._step.state(), weights, names)

    def _average_statistics(self) -> None:
        self._workers.average([p.list_data() for p in self._params
                               if _is_average(p) and p._data is not None])

    def _connect(self) -> None:
        """Creates the store, if there is none. The optimizer is sent to servers in the first step,
        because it cannot change there."""
        self._connect_servers()
        if not (self._kv_initialized or self._workers.sums):
            self._init_kvstore()

    def _broadcast_parameters(self) -> None:
        """Creates the store and broadcasts rank 0's parameters when they have their shapes."""
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()

    def _init_kvstore(self) -> None:
        self._connect_servers()
        super()._init_kvstore()
        self._workers.connect(self._kvstore, updates=bool(self._update_on_kvstore))
        if self._store_is_dist and not self._update_on_kvstore:
            self._workers.register_trainer()

    def _init_params(self) -> None:
        if not self._store_is_dist or self._update_on_kvstore:
            self._workers.lay_out((array for p in self._params for array in p.list_data()),
                                  predicted=True)
            super()._init_params()
            return
        consistency.check_same_network(self._workers, _described(self._params))
        self._step.loss_scale = consistency.agree_on_scale(self._workers, self._step.loss_scale)
        self._step.weights_replaced = consistency.broadcast(self._workers, [
            (self._param2idx[p.name], p.name, p.list_data()) for p in self._params], False)
        self._params_to_init = []

    def _servers_update(self) -> bool:
        """Whether MXNet's servers update weights."""
        if not self._store_is_dist:
            return False
        config = self._kvstore_params
        kvstore = config["kvstore"] = store.shared_store(config["kvstore"])
        return isinstance(kvstore, mx.kv.KVStore) and "dist" in kvstore.type \
            and config["update_on_kvstore"] is not False

    def _connect_servers(self) -> None:
        """Creates the store of servers that update. With an optimizer they can do nothing else, so
        before that, ranks compare their networks and get rank 0's parameters."""
        self._decide()
        if self._workers.sums or not self._servers_update():
            return
        kvstore, workers = self._kvstore_params["kvstore"], self._workers
        if "async" not in kvstore.type:
            workers.connect(kvstore)
            there = [(i, p) for i, p in enumerate(self._params) if p._data is not None]
            if workers.exchange:
                workers.register_trainer(servers_update=True)
                consistency.check_same_network(workers, _described([p for _, p in there]))
                consistency.broadcast(workers, [
                    (BROADCAST_KEYS + i, p.name, p.list_data()) for i, p in there
                    if p._stype == "default"], False)
        workers.connect(kvstore, updates=True)

    def _check_summed(self) -> None:
        """Refuses to update with this rank's own gradients, or with another rank's batch size."""
        if not self._workers.exchange:
            return
        if self._step.stage is not Stage.SUMMED:
            raise RuntimeError("update() before the sum over workers: call trainer."
                               "allreduce_grads(), then update(batch_size), or step(batch_size)")
        rescale_grad = self._optimizer.rescale_grad
        if rescale_grad != self._compared:
            # A rank with an unchanged value exchanges nothing: the others wait for it.
            self._compared = rescale_grad
            consistency.check_batch_size(self._workers, rescale_grad, self._scale)

    def _reach(self, are_summed: bool) -> None:
        """Counts gradients as new that only the losses of other devices or ranks reach. Otherwise
        only some would update the parameter. They become 0 before the sum. After it, those of other
        ranks are refused: the sum has stale gradients."""
        reached = {gradient.number for gradient in self._step.find_new()}
        flags = self._workers.gather(bytes(i in reached for i in range(len(self._params))))
        anywhere = {i for i, column in enumerate(zip(*flags)) if any(column)}
        if are_summed and self._workers.any(reached != anywhere):
            raise consistency.RanksDifferError(
                "the losses of some ranks reach parameters that those of others do not, and their "
                "stale gradients are in the sum: call step(batch_size, ignore_stale_grad=True), "
                "which counts these gradients as zeros")
        unreached = self._unreached(anywhere)
        if not are_summed:
            set_to_zero(gradient.own for gradient in unreached)
        for gradient in unreached:
            gradient.is_new = True
            gradient.weight._fresh_grad = not self._step.loss_scale.scales

    def _unreached(self, parameters: Set[int]) -> List[Gradient]:
        """Returns the gradients of these parameters that are not new, if they will be summed."""
        return [gradient for gradient in self._step.gradients.read() if self._workers.sums
                and gradient.number in parameters and not gradient.is_new]

    # ---- files

    def save_states(self, fname: str) -> None:
        """Writes the optimizer with its states and master weights, the loss scale and counters.

        Of an optimizer or a scheduler of your own, the file has what its `state_dict()` returns, or
        its attributes without one.

        Args:
            fname: the file's path.

        Raises:
            TypeError: an attribute of the optimizer or its scheduler is no number, text, list,
                dictionary or array, and its class has no `state_dict`.
        """
        self._check_own_weights("save_states()")
        self._broadcast_parameters()
        checkpoint.save(fname, self._all_updaters()[0], self._step,
                        names=[p.name for p in self._params],
                        averaged=[one._state() for one in self._averaged])

    def load_states(self, fname: str) -> None:
        """Loads a file of `save_states`, of this class or of `gluon.Trainer`.

        States of float32 weights also load for 16-bit weights, whose values become their master
        weights. Otherwise, parameters and states must have the same types. MXNet's schedulers are
        created as they were saved. A scheduler or an optimizer of your own must be given to this
        Trainer again; it gets the file's values. No code in a file runs.

        Args:
            fname: the file's path.

        Raises:
            ValueError: the file does not fit or is damaged. Nothing changes.
        """
        self._check_own_weights("load_states()")
        self._decide()
        saved = checkpoint.read(fname, self._optimizer)
        weights = {i: (p.name, (p._data or p.list_data())[0].as_nd_ndarray())  # its error
                   for i, p in enumerate(self._params)}
        *_, training = saved
        averages = training.get("averaged", [])
        with checkpoint.one_error(fname):
            if averages and len(averages) != len(self._averaged):
                raise ValueError(f"it holds {counted(len(averages), 'average')} of weights, and "
                                 f"this Trainer has {len(self._averaged)}. Create AveragedWeights "
                                 "before, as when it was saved")
            for averaged, state in zip(self._averaged, averages):
                averaged._check(state)
        self._broadcast_parameters()
        checkpoint.load(fname, saved, self._all_updaters(), self._step, weights,
                        [c.device_id for c in self._contexts])
        for averaged, state in zip(self._averaged, averages or [None] * len(self._averaged)):
            averaged._load(state)
        self._has_compared = False

    def _all_updaters(self) -> List[Any]:
        """Returns MXNet's updater of each device, or that of the store; [None] if servers update.
        """
        return [self._kvstore._updater] if self._update_on_kvstore else self._updaters


def types_of_gradients(parameters: Sequence[Any]) -> Set[str]:
    """Returns the 16-bit types in which gradients of trained parameters are computed: their own,
    and those of the policies of their networks."""
    types = set()
    for parameter in parameters:
        if isinstance(parameter, Parameter) and parameter.grad_req != "null":
            policy = getattr(parameter, "converted_by_gluon_amp", None)
            types |= {dtype_name(parameter.dtype)} if policy is None else _types_of(policy)
    return types & set(TYPES_16BIT)


def _types_of(policy: Policy) -> Set[str]:
    """Returns the 16-bit types of a policy; the other formats are one of these or float32."""
    return {policy.parameter.name, policy.compute.name, policy.output.name} & set(TYPES_16BIT)


def _described(parameters: Sequence[Parameter]) -> List[Tuple[str, Any, bool]]:
    """Returns the names, arrays, and whether trained, of parameters, which ranks compare."""
    return [(p.name, p.list_data()[0], p.grad_req != "null") for p in parameters]


def _is_average(parameter: Parameter) -> bool:
    """Whether it is a batch norm's moving average, which differs between ranks. In MXNet's blocks
    these are not differentiable, like Constants; in a SymbolBlock only names identify them."""
    if parameter._differentiable:
        return parameter.grad_req == "null" and parameter.name.endswith(_AVERAGES)
    return not isinstance(parameter, mx.gluon.Constant)


# ---- one backward pass for one or several Trainers


def backward(loss: Arrays, trainers: Sequence[Trainer], retain_graph: bool = False) -> None:
    """Computes scaled gradients of one loss for several Trainers. Then call `step` of each.

    The Trainers share the smallest of their loss scales. A Trainer whose gradients overflow skips
    its own step.

    Args:
        loss: a loss, or a list with the loss of each device.
        trainers: Trainers of different parameters, all with or all without loss scales.
        retain_graph: keeps the graph for another backward pass.

    Raises:
        TypeError: `trainers` is not a list of Trainers.
        ValueError: Trainers share parameters, or some have a loss scale and some have none.
    """
    several = list(trainers) if isinstance(trainers, (list, tuple)) else [trainers]
    wrong = [type(t).__module__ + "." + type(t).__name__ for t in several
             if not isinstance(t, Trainer)]
    if wrong or not several:
        raise TypeError("backward takes a loss and a list of gluon_amp.Trainers. "
                        f"Received: {', '.join(wrong) or 'an empty list'}")
    parameters = [p for trainer in several for p in trainer._params]
    shared = sorted({p.name for p in parameters if sum(p is q for q in parameters) > 1})
    if shared:
        raise ValueError("each Trainer has parameters of its own. Received in several: "
                         f"{', '.join(shared[:5])}")
    for trainer in several:
        trainer._decide()
    if len({trainer._step.loss_scale.scales for trainer in several}) > 1:
        raise ValueError("one backward pass has one loss scale. Valid: all Trainers with a loss "
                         "scale, or all with loss_scale=None")
    _backward("gluon_amp.backward()", loss, several, retain_graph)


def _backward(call: str, loss: Arrays, trainers: Sequence[Trainer], retain_graph: bool) -> None:
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    # operations on gradients are not recorded; MXNet's pass runs in one thread at a time
    with mx.autograd.pause(), _checked_pass(call, trainers, losses) as scale, GRAPH_LOCK:
        head_gradients = None if scale is None else [
            _head_gradient(loss.shape, loss.ctx, loss.dtype, scale) for loss in losses]
        mx.autograd.backward(losses, head_gradients, retain_graph)


@contextmanager
def _checked_pass(call: str, trainers: Sequence[Trainer],
                  losses: List[Array]) -> Iterator[Optional[float]]:
    """Checks a backward pass for Trainers, which begins and ends with the `with` block. Yields its
    scale; None without a loss scale."""
    steps = [trainer._step for trainer in trainers]
    with ExitStack() as stack:
        for trainer in sorted(trainers, key=id):  # one order: threads cannot block each other
            stack.enter_context(trainer._step.gradients.turn(call))
        for trainer in trainers:
            trainer._check_own_weights(call)
            trainer._decide()
            stack.enter_context(weights_unwritten(trainer._optimizer))
        scaled = steps[0].loss_scale.scales
        if scaled:
            _prepare(trainers, losses)
        with backward_pass(steps, losses) as scale:
            yield scale if scaled else None
        for trainer in trainers:
            if trainer.after_pass is not None:
                trainer.after_pass(scale)


def _prepare(trainers: Sequence[Trainer], losses: List[Array]) -> None:
    """Checks losses, and agrees with other ranks on weights and loss scale."""
    _check_losses(losses)
    for trainer in trainers:
        trainer._broadcast_parameters()
    steps = [trainer._step for trainer in trainers]
    operators = graph_operators(losses)
    # a graph is read if it has an operator that is in no earlier graph without any loss head
    if scale_of_pass(steps) == 1 \
            or all(operators <= trainer._without_heads for trainer in trainers):
        return
    gradients = [gradient.own for step in steps for gradient in step.gradients.read()]
    if not check_graphs(losses, gradients):
        for trainer in trainers:
            trainer._without_heads |= operators


def _check_losses(losses: List[Any]) -> None:
    """Refuses values that are not losses, and 16-bit losses."""
    if not losses:
        raise ValueError("backward takes a loss or a list of losses. Received: an empty list")
    for loss in losses:
        if not isinstance(loss, mx.nd.NDArray):
            raise TypeError("backward takes a loss or a list of losses. "
                            f"Received: {type(loss).__name__}")
        dtype = dtype_name(loss.dtype)
        if dtype in TYPES_16BIT:
            why = "a sum above 65504 is infinite" if dtype == "float16" else "a number has 8 bits"
            raise ValueError(f"the loss is {dtype}, where {why}: take it "
                             "in float32, as loss_fn(net(data).astype('float32'), label); "
                             "converted networks return float32, but under pure_float16")


@functools.lru_cache(maxsize=16)
def _head_gradient(shape: Shape, context: Context, dtype: DType, number: float) -> Array:
    """Returns the head gradient of a loss: an array filled with a number."""
    return mx.nd.full(shape, number, context, dtype)


@contextmanager
def scale_loss(loss: Arrays, trainer: Trainer) -> Iterator[Any]:
    """Scales a loss for a backward pass in the `with` block, as `mx.contrib.amp.scale_loss` does.

        with gluon_amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)

    Call it within `autograd.record()`.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError("scale_loss takes a gluon_amp.Trainer. Received: "
                        f"{type(trainer).__module__}.{type(trainer).__name__}")
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    with ExitStack() as stack:
        with mx.autograd.pause():
            scale = stack.enter_context(_checked_pass("scale_loss()", [trainer], losses))
        if scale is None:
            yield loss
            return
        with mx.autograd.record(mx.autograd.is_training()):
            scaled = [one * scale for one in losses]
        yield scaled if isinstance(loss, (list, tuple)) else scaled[0]
