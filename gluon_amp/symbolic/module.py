"""`Module` and `BucketingModule`: MXNet's own, on any device, with loss scaling.

binding.py has what they bind. Steps, workers and files are the Trainer's: training/step.py,
parallel/sync.py, training/checkpoint.py.
"""
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Iterable,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from mxnet.model import _update_params

from .._mxnet import mx, np
from ..annotations import Array, KVStore, Metric, Optimizer, Symbol
from ..checks import in_names
from ..cpu.arrays import dtype_name, is_half, to_float32
from ..cpu.finite import squares
from ..files import must_exist, replace_file
from ..graph.operators import LOSSES
from ..parallel import consistency, store
from ..parallel.sync import Workers
from ..training import checkpoint as files
from ..training.following import weights_unwritten
from ..training.optimizer import check_scalable, given_optimizer, optimizer_class, with_masters
from ..training.static_pair import GivenLossScale
from ..training.step import Gradient, Step
from .binding import Bindable, environment
from .convert import check_parameters, check_range


class _Backward:
    """A backward pass of a Module, and the forward and backward passes that repeat it.

    Args:
        averages: moving averages, and copies from before the forward pass.
        adding_up: gradients to which each backward pass adds.
        run: makes the backward pass at a scale.
    """

    def __init__(self, module: "_Module", averages: "Copies", adding_up: List["mx.nd.NDArray"],
                 scale: float, run: Callable[[float], None]) -> None:
        self._module, self._scale, self._run = module, scale, run
        self._averages = averages
        self._before = [(g, g.copy()) for g in adding_up]

    def gradients(self) -> List[Gradient]:
        return self._module._gradients()

    def can_repeat(self) -> bool:
        return True

    def repeat(self, scale: float) -> None:
        # The way back uses memory of the way there: both are gone again.
        for average, before in self._averages:
            before.copyto(average)
        for gradient, before in self._before:
            (before * (scale / self._scale)).copyto(gradient)
        for executor in self._module._module()._exec_group.execs:
            executor.forward(is_train=True)
        self._run(scale)


Copies = List[Tuple["mx.nd.NDArray", "mx.nd.NDArray"]]  # arrays, and copies of them
Pairs = Union[Mapping[str, Any], Sequence[Tuple[str, Any]]]


class _Module:
    """In front of MXNet's classes of modules."""

    _number = 0  # among this process's Modules on many workers
    _states_file: Optional[str] = None  # to be loaded once there is an optimizer
    # For an updater, from the next update on: until then it has them numbered as in the file.
    _fitting_states: Optional[Tuple[Any, Dict[Any, Any]]] = None
    _used_scale = 1.0  # in the last backward pass
    # Moving averages before the last forward pass, if another may have to begin there.
    _averages: Optional[Copies] = None

    def _init_step(self, loss_scale: GivenLossScale, clip_norm: Optional[float]) -> None:
        """Before the class of MXNet's is initialized."""
        self._workers = Workers(names=True)
        self._step = Step(loss_scale, clip_norm, self._workers)
        self._checkpoint = files.Checkpoint(self._step)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 without scaling."""
        return self._step.loss_scale.scale

    @property
    def skipped(self) -> int:
        """The number of skipped steps."""
        return self._step.skipped

    @property
    def overflowed(self) -> Tuple[str, ...]:
        """The names of parameters whose gradients are not finite, of the pending gradients or
        else of the last step."""
        return self._step.overflowed(self._gradients)

    def _module(self) -> "mx.mod.Module":
        """The module that is bound now."""
        return self

    def _modules(self) -> Iterable["mx.mod.Module"]:
        """All that share its optimizer."""
        return [self]

    def _bindable(self, symbol: "mx.sym.Symbol") -> Bindable:
        scale = (lambda: self._step.backward_scale) if self._step.scaling else None
        return Bindable.from_symbol(symbol, scale)

    def init_params(self,
                    initializer: Optional[mx.init.Initializer] = mx.init.Uniform(0.01),  # noqa: B008
                    arg_params: Optional[Dict[str, Array]] = None, *args: Any,
                    **kwargs: Any) -> None:
        """Draws in float32 what 16-bit parameters are rounded from."""
        module = self._module()
        host = (module and module._arg_params) or {}  # buckets share the dictionary
        halves = {name: a for name, a in host.items() if is_half(a.dtype)}
        check_range({name: dtype_name(a.dtype) for name, a in halves.items()}, arg_params or {})
        host.update({name: to_float32(a) for name, a in halves.items()})
        try:
            super().init_params(initializer, arg_params, *args, **kwargs)
        finally:
            for name, half in halves.items():
                host[name].astype(half.dtype).copyto(half)
            host.update(halves)

    def init_optimizer(self, kvstore: KVStore = "local", optimizer: Union[str, Optimizer] = "sgd",
                       optimizer_params: Pairs = (("learning_rate", 0.01),),
                       force_init: bool = False) -> None:
        """As MXNet's, with float32 masters."""
        if self.optimizer_initialized and not force_init:
            super().init_optimizer(kvstore, optimizer, optimizer_params, force_init)
            return
        module = self._module()
        if self._step.checks_gradients:
            store.check_not_async(kvstore)
        kvstore = store.make_store(kvstore, module._compression_params)
        by_name = not isinstance(optimizer, mx.optimizer.Optimizer)
        chosen = optimizer_class(optimizer) if by_name else optimizer
        if self._step.scaling:
            check_scalable(chosen)
        group = module._exec_group
        for name, weights in zip(group.param_names, group.param_arrays):
            # of a checkpoint in another type, which a kvstore would not take
            module._arg_params[name] = module._arg_params[name].astype(weights[0].dtype,
                                                                         copy=False)
        if "dist" in store.kind_of(kvstore):
            kvstore = self._check_workers(kvstore)
        if by_name:
            optimizer_params = {"multi_precision": True, **dict(optimizer_params)}
        else:
            given_optimizer(optimizer)
        here = self._step.checks_gradients \
            or store.updates_on_ranks(kvstore, not self._sparse())
        with environment("MXNET_UPDATE_ON_KVSTORE", "0" if here else None):
            super().init_optimizer(kvstore, optimizer, optimizer_params, force_init)
        self._broadcast_parameters()
        with_masters(module._optimizer)
        if self._states_file:
            self.load_optimizer_states(self._states_file)
            self._states_file = None

    def forward(self, data_batch: "mx.io.DataBatch", is_train: Optional[bool] = None) -> None:
        """As MXNet's."""
        if not self._step.searching and not self._checks_heads():
            self._averages = None
            super().forward(data_batch, is_train)
            return
        group = self._module()._exec_group
        before = [(a, a.copy()) for e in group.execs for a in e.aux_arrays]
        super().forward(data_batch, is_train)
        self._averages = before

    def backward(self, out_grads: object = None) -> None:
        """As MXNet's; head gradients that are given are scaled.

        Until a dynamic scale is settled, the gradients are checked here. Where they overflow,
        forward and backward passes at other scales find one, so that no step is lost.
        """
        module = self._module()
        group = module._exec_group
        if self._step.scaling and out_grads is None and not module._symbol.has_loss:
            raise ValueError("a loss scale needs a loss in the symbol, or out_grads for "
                             f"backward. Valid: {', '.join(sorted(LOSSES))}. Received outputs: "
                             f"{', '.join(module._symbol.list_outputs())}")
        adding_up = self._adding_up()
        scale = self._step.begin_backward(adding_up)
        mxnets_backward = super().backward

        def run(at: float) -> None:
            heads = out_grads
            if self._step.scaling and heads is not None:
                heads = [g * at for g in (heads if isinstance(heads, (list, tuple)) else [heads])]
            with weights_unwritten(module._optimizer):
                mxnets_backward(heads)

        again = self._averages is not None
        checking, searching = again and self._checks_heads(), again and self._step.searching
        backward = _Backward(self, self._averages or [],
                             adding_up if checking or searching else [], scale, run)
        if checking:
            self._check_heads(run)
            backward.repeat(scale)
        else:
            run(scale)
        self._step.end_backward(scale, [o for e in group.execs for o in e.outputs])
        if searching:
            self._step.settle(backward)
        self._used_scale = self._step.backward_scale
        self._step.record_versions(self._gradients())

    def _checks_heads(self) -> bool:
        """Whether the next backward pass is to show where gradients begin; at a scale of 1, none
        lacks the scale."""
        symbol = self._module()._symbol
        return symbol.may_begin and self._step.scaling and self._step.backward_scale != 1

    def _check_heads(self, run: Callable[[float], None]) -> None:
        """Refuses operators that begin gradients by themselves without the loss scale: a pass that
        begins with zeros shows them."""
        module = self._module()
        gradients = self._gradients()
        for gradient in gradients:
            gradient.array[:] = 0
        for executor in module._exec_group.execs:
            executor.set_scale(0)
        run(0.0)
        sums = squares([gradient.array for gradient in gradients])
        begin = [g.name for g, s in zip(gradients, sums) if np.isfinite(s) and s > 0]
        if begin:
            self._step.forget()
            raise ValueError("an operator in the symbol begins gradients by itself, as a Custom "
                             "operator may, and no loss scale reaches those gradients, which are"
                             f"{in_names(begin)}: the update would divide them by a scale that "
                             "they never had. Valid: Module(loss_scale=None)")
        module._symbol.may_begin = not np.isfinite(sums).all()  # then it is open

    def get_input_grads(self, merge_multi_context: bool = True) -> Any:
        """Without the scale."""
        grads = super().get_input_grads(merge_multi_context)
        if not self._step.scaling:
            return grads
        if merge_multi_context:
            return [g / self._used_scale for g in grads]
        return [[g / self._used_scale for g in on_devices] for on_devices in grads]

    def update(self) -> bool:
        """Updates, unless gradients are not finite; returns whether it did."""
        module = self._module()
        if self._fitting_states:
            files.give_states(*self._fitting_states)
            self._fitting_states = None
        if not self._step.checks_gradients and self._mxnet_updates():
            self._update_by_mxnet()
            self._step.forget()
            return True
        group, optimizer = module._exec_group, module._optimizer
        self._params_dirty = module._params_dirty = True  # moving averages, even if it is skipped
        self._step.count_writes()
        self._step.sum((i, name, grads) for i, (name, grads) in
                        enumerate(zip(group.param_names, group.grad_arrays))
                        if grads[0] is not None)
        gradients = self._gradients()
        used = {g.place: g.array for g in gradients}
        grad_arrays = [[used.get((i, device)) for device in range(len(grads))]
                       for i, grads in enumerate(group.grad_arrays)]
        rescale_grad = optimizer.rescale_grad

        def apply(multiplier: float) -> None:
            optimizer.rescale_grad = multiplier
            _update_params(group.param_arrays, grad_arrays, module._updater,
                           len(module._context), None, group.param_names)

        try:
            if self._step.checks_gradients or self._step.weights_replaced:
                self._step.update_or_skip(gradients, rescale_grad, apply, self._clear)
            else:
                apply(rescale_grad)
                self._step.forget()
                self._step.updated = True
        finally:
            optimizer.rescale_grad = rescale_grad
        if self._workers.exchange and not self._workers.compared:
            self._workers.compared = True
            self.check_ranks()
        return self._step.updated

    def _update_by_mxnet(self) -> None:
        """As MXNet's; where servers update, waits for them, but for no rank that has ended."""
        if self._workers.count == 1:
            super().update()
            return
        group = self._module()._exec_group
        trained = [(weights, grads) for weights, grads in zip(group.param_arrays,
                                                              group.grad_arrays)
                   if grads[0] is not None]
        self._workers.lay_out(g for _, grads in trained for g in grads)
        super().update()
        self._workers.wait(lambda: [w.wait_to_read() for weights, _ in trained for w in weights],
                           f"the servers' update of {len(trained)} weights")

    def _gradients(self) -> List[Gradient]:
        group = self._module()._exec_group
        replacements = self._step.replacements
        return [Gradient(name, (i, device), weight, replacements.get((i, device), grad), grad)
                for i, name in enumerate(group.param_names)
                for device, (weight, grad) in enumerate(zip(group.param_arrays[i],
                                                            group.grad_arrays[i]))
                if grad is not None]

    def _adding_up(self) -> List["mx.nd.NDArray"]:
        """Gradients to which each backward pass adds."""
        group = self._module()._exec_group
        return [grad for executor in group.execs
                for name, grad in zip(group.arg_names, executor.grad_arrays)
                if grad is not None and group.grad_req[name] == "add"]

    def _clear(self) -> None:
        for grad in self._adding_up():
            grad[:] = 0

    # ---- many workers

    def _check_workers(self, kvstore: KVStore) -> object:
        """Makes a store over many workers, before MXNet gives it parameters."""
        group = self._module()._exec_group
        sparse = self._sparse()
        if sparse and self._step.checks_gradients:
            raise ValueError(f"{store.CHECKS_FIRST}, and many workers update those on servers that "
                             f"are row_sparse. Received: row_sparse{in_names(sparse)}")
        kvstore = store.shared_store(kvstore)
        self._number = store.servers.add_module(kvstore)
        if "async" in kvstore.type:
            return kvstore
        self._workers.connect(kvstore)
        consistency.check_same_network(self._workers, [
            (name, arrays[0], grads[0] is not None) for name, arrays, grads in
            zip(group.param_names, group.param_arrays, group.grad_arrays)])
        consistency.agree_on_scale(self._workers, self._step.loss_scale)
        return kvstore

    def _sparse(self) -> List[str]:
        """Names of the parameters that are row_sparse, or whose gradients are."""
        group = self._module()._exec_group
        return [name for name, arrays, grads in zip(group.param_names, group.param_arrays,
                                                    group.grad_arrays)
                if {a.stype for a in (arrays[0], grads[0]) if a is not None} != {"default"}]

    def _mxnet_updates(self) -> bool:
        """Whether MXNet's own update does all that there is to do without a check of gradients."""
        module = self._module()
        return not self._workers.sums_at_once \
            and (module._update_on_kvstore or self._workers.count == 1)

    def _broadcast_parameters(self) -> None:
        """Every rank gets rank 0's parameters and moving averages, by the store that MXNet has."""
        module = self._module()
        group = module._exec_group
        workers = self._workers
        workers.connect(module._kvstore, updates=bool(module._update_on_kvstore))
        if workers.count == 1:
            return
        workers.owner = f"Module {self._number}"
        if workers.exchange:
            consistency.broadcast(workers, [
                (name, name, arrays) for name, arrays in zip(group.param_names,
                                                             group.param_arrays)], True)
            # gradients of before are of other weights, and at another scale
            self._step.weights_replaced = workers.any(self._step.begun)
        workers.broadcast([(f"statistics {name}", arrays) for name, arrays in
                           zip(group.aux_names, group.aux_arrays)], False)
        self._params_dirty = module._params_dirty = True

    def check_ranks(self) -> None:
        """Raises where the ranks of several machines do not hold the same optimizer, weights,
        masters and loss scale, and names the first that differs. All ranks have to call it; the
        first step or update does. Moving averages are each rank's own, of the data that it has
        seen."""
        self._check_can_exchange("check_ranks()")
        module = self._module()
        group = module._exec_group
        names = {i: name for i, (name, _) in self._weights().items()}
        consistency.compare(self._workers, [
            *consistency.settings_of(module._optimizer),
            *((name, arrays[0]) for name, arrays in zip(group.param_names, group.param_arrays)),
            *consistency.states_of(module._updater, names),
            ("the loss scale", self._step.state())])

    def _average_statistics(self) -> None:
        self._check_can_exchange("average_statistics()")
        module = self._module()
        self._workers.average(module._exec_group.aux_arrays)
        self._params_dirty = module._params_dirty = True

    def _check_can_exchange(self, call: str) -> None:
        consistency.check_can_exchange(self._workers, call, "MXNET_UPDATE_ON_KVSTORE=0")

    # ---- files

    def save_optimizer_states(self, fname: str) -> None:
        """Writes the optimizer with its masters, the loss scale and the counters."""
        module = self._module()

        def write(path: str) -> None:
            if module._update_on_kvstore:
                module._kvstore.save_optimizer_states(path, True)
            else:
                with open(path, "wb") as file:
                    file.write(module._updater.get_states(dump_optimizer=True))
        self._checkpoint.save(fname, module._optimizer, write)

    def load_optimizer_states(self, fname: str) -> None:
        """Takes over what `save_optimizer_states` wrote, here or in MXNet's `Module`: momenta,
        masters, counters, the loss scale. Rates stay those of this module's optimizer. There may
        have been another number of devices.

        A file that does not fit, or is damaged, is an error and changes nothing. It may hold
        MXNet's optimizers, schedulers and arrays, and the classes of this module's own optimizer
        and scheduler; anything else is refused before it runs.
        """
        module = self._module()
        mine = module._optimizer
        states, saved = files.read_states(fname, mine)
        updater = module._kvstore._updater if module._update_on_kvstore else module._updater
        if updater is None:
            raise ValueError("states that servers keep cannot be loaded: set the environment "
                             "variable MXNET_UPDATE_ON_KVSTORE to 0")
        group = module._exec_group
        trained = [(i, name) for i, name in enumerate(group.param_names)
                   if group.grad_arrays[i][0] is not None]
        devices = 0 if module._update_on_kvstore else len(module._context)
        with files.one_error(fname):
            fitting = files.renumber(states, trained, devices)
            if not module._update_on_kvstore:
                files.check_states(fname, fitting, saved or mine, mine, self._weights())
            if saved:
                files.carry_counts(saved, [c.device_id for c in module._context],
                                   lambda counts: files.renumber(counts, trained, devices))
            self._checkpoint.load_step(saved)
        files.give_states(updater, states)
        self._fitting_states = updater, fitting
        updater.optimizer = with_masters(saved or mine)
        for name in ("lr", "lr_scheduler", "wd", "rescale_grad", "sym_info", "idx2name", "lr_mult",
                     "wd_mult"):
            setattr(updater.optimizer, name, getattr(mine, name))
        for one in self._modules():
            one._optimizer = updater.optimizer

    def _weights(self) -> Dict[int, Tuple[str, "mx.nd.NDArray"]]:
        """By the numbers that MXNet's Module gives them."""
        module = self._module()
        group, devices = module._exec_group, len(module._context)
        return {i * devices + k: (name, weight)
                for i, (name, weights) in enumerate(zip(group.param_names, group.param_arrays))
                for k, weight in enumerate(weights)}


class Module(_Module, mx.mod.Module):
    """`mx.mod.Module` for symbols in mixed precision, on CPUs, too, with loss scaling.

    Args:
        symbol: such as `gluon_amp.convert_symbol` makes, or one with casts of its own.
        loss_scale: "dynamic", a number, a StaticLossScale, a DynamicLossScale, or None.
        clip_norm: the largest norm of the whole gradient, as the optimizer gets it: unscaled,
            and multiplied by `rescale_grad`.
        kwargs: as for `mx.mod.Module`.
    """

    def __init__(self, symbol: "mx.sym.Symbol", *args: Any, loss_scale: GivenLossScale = None,
                 clip_norm: Optional[float] = None, **kwargs: Any) -> None:
        self._init_step(loss_scale, clip_norm)
        super().__init__(self._bindable(symbol), *args, **kwargs)

    @classmethod
    def load(cls, prefix: str, epoch: int, load_optimizer_states: bool = False,
             **kwargs: Any) -> "Module":
        """A module from a checkpoint; arguments as for `mx.mod.Module.load`, and `loss_scale`."""
        must_exist(f"{prefix}-symbol.json", f"{prefix}-{epoch:04d}.params")
        symbol, args, auxs = mx.model.load_checkpoint(prefix, epoch)
        check_parameters(symbol, args, auxs)
        module = cls(symbol, **kwargs)
        module._arg_params, module._aux_params = args, auxs
        module.params_initialized = True
        if load_optimizer_states:
            module._states_file = f"{prefix}-{epoch:04d}.states"
        return module

    def save_checkpoint(self, prefix: str, epoch: int, save_optimizer_states: bool = False,
                        remove_amp_cast: bool = True) -> None:
        """Writes PREFIX-symbol.json, PREFIX-EPOCH.params and, if asked, PREFIX-EPOCH.states,
        each whole or not at all."""
        mx.nd.waitall()  # MXNet's batch norm moves its averages without telling
        replace_file(f"{prefix}-symbol.json",
                     lambda path: self._symbol.save(path, remove_amp_cast=remove_amp_cast))
        replace_file(f"{prefix}-{epoch:04d}.params", self.save_params)
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")


class BucketingModule(_Module, mx.mod.BucketingModule):
    """`mx.mod.BucketingModule` in mixed precision, as `gluon_amp.Module` is: with one loss scale
    and one `clip_norm` for all buckets."""

    def __init__(self, sym_gen: Callable[[Any], Any], *args: Any,
                 loss_scale: GivenLossScale = None,
                 clip_norm: Optional[float] = None, **kwargs: Any) -> None:
        self._init_step(loss_scale, clip_norm)

        def bindable(key: Hashable) -> Tuple[Symbol, Sequence[str], Sequence[str]]:
            symbol, data_names, label_names = sym_gen(key)
            return self._bindable(symbol), data_names, label_names

        super().__init__(bindable, *args, **kwargs)

    def _module(self) -> "mx.mod.Module":
        return self._curr_module

    def _modules(self) -> Iterable["mx.mod.Module"]:
        return self._buckets.values()

    @staticmethod
    def load(prefix: str, epoch: int, sym_gen: Any = None,
             default_bucket_key: Hashable = None,
             load_optimizer_states: bool = False, **kwargs: Any) -> "BucketingModule":
        """A module from a checkpoint; arguments as for the class."""
        must_exist(f"{prefix}-{epoch:04d}.params")
        module = BucketingModule(sym_gen, default_bucket_key, **kwargs)
        symbol, data_names, label_names = module._call_sym_gen(default_bucket_key)
        args, auxs = mx.model.load_params(prefix, epoch)
        check_parameters(symbol, args, auxs)
        first = mx.mod.Module(symbol, data_names, label_names, logger=module.logger,
                              context=module._context, work_load_list=module._work_load_list,
                              fixed_param_names=module._fixed_param_names,
                              state_names=module._state_names)
        first._arg_params, first._aux_params = args, auxs
        first.params_initialized = module.params_initialized = True
        module._buckets[default_bucket_key] = module._curr_module = first
        if load_optimizer_states:
            module._states_file = f"{prefix}-{epoch:04d}.states"
        return module

    def save_checkpoint(self, prefix: str, epoch: int, save_optimizer_states: bool = False,
                        remove_amp_cast: bool = False) -> None:
        """Writes PREFIX-EPOCH.params, PREFIX-KEY-symbol.json of each bucket, PREFIX.buckets and,
        if asked, PREFIX-EPOCH.states, each whole or not at all."""
        mx.nd.waitall()
        replace_file(f"{prefix}-{epoch:04d}.params", self.save_params)
        for key in self._buckets:
            symbol = self._call_sym_gen(key)[0]
            replace_file(f"{prefix}-{key}-symbol.json",
                         lambda path, symbol=symbol: symbol.save(path, remove_amp_cast))
        keys = mx.nd.array(list(self._buckets), dtype="int32")
        replace_file(f"{prefix}.buckets", lambda path: mx.nd.save(path, keys))
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")


class Speedometer(mx.callback.Speedometer):
    """MXNet's `Speedometer`, with the loss scale and the skipped steps at the line's end."""

    def __call__(self, param: mx.model.BatchEndParam) -> None:
        module = (param.locals or {}).get("self")
        if isinstance(module, _Module) and module._step.scaling and param.eval_metric is not None:
            param = param._replace(eval_metric=_WithScale(param.eval_metric, module))
        super().__call__(param)


class _WithScale:
    """A metric that also names the loss scale."""

    def __init__(self, metric: Metric, module: _Module) -> None:
        self.module, self.metric, self.reset_local = module, metric, metric.reset_local

    def get_name_value(self) -> List[Tuple[str, float]]:
        return [*self.metric.get_name_value(), ("loss-scale", self.module.loss_scale),
                ("skipped", self.module.skipped)]
