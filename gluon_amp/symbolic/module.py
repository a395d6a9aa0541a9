"""`Module` and `BucketingModule`: MXNet's modules with mixed precision and loss scaling.

binding.py binds their symbols. They share backward passes, steps, workers and files with the
Trainer: training/gradients.py, training/step.py, parallel/sync.py, training/checkpoint.py.
"""
from __future__ import annotations

from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Hashable,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from .._mxnet import environment, mx
from ..annotations import Array, DataBatch, KVStore, Metric, Optimizer, Symbol
from ..checks import in_names
from ..cpu.arrays import dtype_name, is_16bit, mean_on_cpu, to_float32
from ..cpu.bfloat16 import is_bfloat16
from ..files import must_exist, replace_file
from ..graph.operators import LOSSES
from ..parallel import consistency, store
from ..parallel.sync import Workers
from ..record import record_in, save
from ..training import checkpoint as files
from ..training.gradients import Gradient, Gradients, in_turn
from ..training.heads import NO_LOSS_SCALE
from ..training.heads import refuse as refuse_heads
from ..training.loss_scale import GivenLossScale
from ..training.moving_averages import MovingAverages, Named
from ..training.optimizer import (
    check_scalable,
    given_optimizer,
    optimizer_class,
    weights_unwritten,
    with_masters,
)
from ..training.step import Stage, Step, backward_pass, scale_of_pass
from ..training.trained import Trained
from .binding import Bindable, Executor
from .convert import check_parameters, check_range, check_record

# Settings that stay those of a Module when it loads states.
_OF_MODULE = ("lr", "lr_scheduler", "wd", "rescale_grad", "lr_mult", "wd_mult")

Pairs = Union[Mapping[str, Any], Sequence[Tuple[str, Any]]]


class _Module(Trained):
    """The mixin of `Module` and `BucketingModule`."""

    _states_file: Optional[str] = None  # loaded when the optimizer is initialized
    _grad_arrays: Any = None  # MXNet's list of arrays, and the gradients in it
    _listed: Sequence[Gradient] = ()
    _updating_here = "MXNET_UPDATE_ON_KVSTORE=0"

    def _init_step(self, loss_scale: GivenLossScale, clip_norm: Optional[float]) -> None:
        """Creates the step's state; called before MXNet's `__init__`."""
        self._workers = Workers(names=True)
        gradients = Gradients(self._read_gradients, marked=False, adding=self._adding)
        self._step = Step(gradients, self._workers, loss_scale, clip_norm)

    def _decide(self) -> None:
        """loss_scale="auto" is decided when a graph that trains is bound: see `_bindable`."""

    def _module(self) -> mx.mod.Module:
        """Returns the current module of MXNet."""
        return self

    def _numbered(self) -> mx.mod.Module:
        """Returns the module whose parameters number the optimizer's states."""
        return self

    def _host(self) -> Dict[str, Array]:
        """Returns the parameters on the host, which all buckets share."""
        module = self._module()
        return (module and module._arg_params) or {}

    def _bindable(self, symbol: Symbol) -> Bindable:
        if not isinstance(symbol, mx.sym.Symbol):
            raise TypeError(f"{type(self).__name__} takes a symbol. Received: "
                            f"{type(symbol).__name__}")

        def decide_scale(types: Collection[str]) -> bool:
            self._step.loss_scale = self._step.loss_scale.for_types(types)
            return self._step.loss_scale.scales

        return Bindable.from_symbol(symbol, decide_scale)

    def init_params(self,
                    initializer: Optional[mx.init.Initializer] = mx.init.Uniform(0.01),  # noqa: B008
                    arg_params: Optional[Dict[str, Array]] = None, *args: Any,
                    **kwargs: Any) -> None:
        """Initializes in float32 and rounds 16-bit parameters."""
        host = self._host()
        low = {name: a for name, a in host.items() if is_16bit(a.dtype)}
        check_range({name: dtype_name(a.dtype) for name, a in low.items()}, arg_params or {})
        host.update({name: to_float32(a) for name, a in low.items()})
        try:
            super().init_params(initializer, arg_params, *args, **kwargs)
        finally:
            for name, array in low.items():
                host[name].astype(array.dtype).copyto(array)
            host.update(low)

    def set_params(self, arg_params: Dict[str, Array], aux_params: Dict[str, Array],
                   allow_missing: bool = False, *args: Any, **kwargs: Any) -> None:
        """The same as MXNet's; refuses numbers outside a parameter's type."""
        if allow_missing:
            check_range({name: dtype_name(a.dtype) for name, a in self._host().items()},
                        arg_params)
        super().set_params(arg_params, aux_params, allow_missing, *args, **kwargs)

    def init_optimizer(self, kvstore: KVStore = "local", optimizer: Union[str, Optimizer] = "sgd",
                       optimizer_params: Pairs = (("learning_rate", 0.01),),
                       force_init: bool = False) -> None:
        """The same as MXNet's, with float32 master weights."""
        if self.optimizer_initialized and not force_init:
            super().init_optimizer(kvstore, optimizer, optimizer_params, force_init)
            return
        module = self._module()
        if self.params_initialized:
            self.get_params()  # updates the host's copies, which initialize the store
        if self._step.checks_gradients:
            store.check_not_async(kvstore)
        kvstore = store.make_store(kvstore, module._compression_params)
        by_name = not isinstance(optimizer, mx.optimizer.Optimizer)
        chosen: Any = optimizer_class(optimizer) if by_name else optimizer
        if self._step.loss_scale.scales:
            check_scalable(chosen(**dict(optimizer_params)) if by_name else chosen)
        for name, weights, _ in _parameters(module):
            # a checkpoint may have another type, which a kvstore would refuse
            module._arg_params[name] = module._arg_params[name].astype(weights[0].dtype,
                                                                       copy=False)
        if "dist" in store.kind_of(kvstore):
            kvstore = self._check_workers(kvstore)
        if by_name:
            optimizer_params = {"multi_precision": True, **dict(optimizer_params)}
        else:
            given_optimizer(optimizer)
        here = self._step.checks_gradients or self._sums_bfloat16() \
            or store.updates_on_ranks(kvstore, not self._sparse())
        with environment("MXNET_UPDATE_ON_KVSTORE", "0" if here else None):
            super().init_optimizer(kvstore, optimizer, optimizer_params, force_init)
        self._broadcast_parameters()
        with_masters(module._optimizer)
        if self._states_file:
            self.load_optimizer_states(self._states_file)
            self._states_file = None

    def forward(self, data_batch: DataBatch, is_train: Optional[bool] = None) -> None:
        """The same as MXNet's."""
        module = self._module()
        if self._step.checks_gradients and module._context[0].device_type == "gpu":
            self._step.averages = self._step.averages or MovingAverages(self._averages_to_check)
            self._step.averages.begin()
        super().forward(data_batch, is_train)

    @in_turn
    def backward(self, out_grads: object = None) -> None:
        """The same as MXNet's; scales `out_grads`."""
        module = self._module()
        if self._step.loss_scale.scales and out_grads is None and not module._symbol.has_loss:
            raise ValueError("a loss scale needs a loss in the symbol, or out_grads for "
                             f"backward. Valid: {', '.join(sorted(LOSSES))}; or, for a loss of "
                             f"your own, {NO_LOSS_SCALE}. Received outputs: "
                             f"{', '.join(module._symbol.list_outputs())}")
        executors = module._exec_group.execs
        scalable = [executor for executor in executors if isinstance(executor, Executor)]
        if self._step.loss_scale.scales and scale_of_pass([self._step]) != 1:
            heads = {head for executor in scalable for head in executor.unscaled_heads}
            if heads:
                refuse_heads("the symbol", heads)
        outputs = [output for executor in executors for output in executor.outputs]
        with backward_pass([self._step], outputs) as scale, weights_unwritten(module._optimizer):
            if self._step.loss_scale.scales:
                for executor in scalable:
                    executor.set_scale(scale)
                if out_grads is not None:
                    listed = out_grads if isinstance(out_grads, (list, tuple)) else [out_grads]
                    out_grads = [gradient * scale for gradient in listed]
            super().backward(out_grads)

    def get_input_grads(self, merge_multi_context: bool = True) -> Any:
        """The same as MXNet's, unscaled."""
        grads = super().get_input_grads(merge_multi_context)
        if not self._step.loss_scale.scales:
            return grads
        if merge_multi_context:
            return [g / self._step.scale for g in grads]
        return [[g / self._step.scale for g in on_devices] for on_devices in grads]

    @in_turn
    def update(self) -> bool:
        """Updates unless a gradient is not finite. Returns whether it updated.

        Raises:
            RuntimeError: it has no optimizer; or it has a loss scale, and there was no backward
                pass since the last update.
        """
        module = self._module()
        if not self.optimizer_initialized:
            raise RuntimeError("update() needs an optimizer: call init_optimizer before")
        gradients = self._step.take("update()")
        self._params_dirty = module._params_dirty = True  # a skipped step changed moving averages
        if self._workers.updates:
            self._workers.lay_out(gradient.own for gradient in gradients)
            super().update()
            self._step.finish()
        else:
            if self._workers.sums:
                self._workers.sum(self._step)
            self._step.apply([module._updater])
        if self._workers.exchange and not self._has_compared:
            self.check_ranks()
            self._has_compared = True
        self._step.report_overflow(self)
        return self._step.updated

    def _read_gradients(self) -> Sequence[Gradient]:
        """Returns the gradients of trained parameters."""
        module = self._module()
        group, devices = module._exec_group, len(module._context)
        if group.grad_arrays is not self._grad_arrays:  # a new list after each change
            numbers = {name: i for i, name in enumerate(self._numbered()._exec_group.param_names)}
            self._grad_arrays, self._listed = group.grad_arrays, [
                Gradient(name, numbers[name] * devices + device, name, device, weight, own, own,
                         group.grad_req[name] == "add")
                for name, weights, grads in _parameters(module)
                if grads[0] is not None for device, (weight, own) in enumerate(zip(weights, grads))]
        return self._listed

    def _adding(self) -> List[Array]:
        """Returns the gradients to which each backward pass adds."""
        group = self._module()._exec_group
        return [grad for executor in group.execs
                for name, grad in zip(group.arg_names, executor.grad_arrays)
                if grad is not None and group.grad_req[name] == "add"]

    def _averages_to_check(self) -> Named:
        """Returns the moving averages on GPUs, which the step keeps finite."""
        module = self._module()
        group = module._exec_group
        return [(name, arrays) for name, arrays in zip(group.aux_names, group.aux_arrays)
                if name in module._symbol.averages]

    # ---- many workers

    def _check_workers(self, kvstore: KVStore) -> object:
        """Connects a distributed store before MXNet initializes its parameters."""
        sparse = self._sparse()
        if sparse and self._step.checks_gradients:
            raise ValueError(f"{store.CHECKS_FIRST}, and servers update row_sparse parameters. "
                             f"Received: row_sparse{in_names(sparse)}")
        kvstore = store.shared_store(kvstore)
        number = store.servers.add_module(kvstore)
        if "async" in kvstore.type:
            return kvstore
        self._workers.connect(kvstore)
        self._workers.owner = f"Module {number}"
        consistency.check_same_network(self._workers, [
            (name, arrays[0], grads[0] is not None)
            for name, arrays, grads in _parameters(self._module())])
        self._step.loss_scale = consistency.agree_on_scale(self._workers, self._step.loss_scale)
        return kvstore

    def _sparse(self) -> List[str]:
        """Returns the names of parameters with row_sparse values or gradients."""
        return [name for name, arrays, grads in _parameters(self._module())
                if {a.stype for a in (arrays[0], grads[0]) if a is not None} != {"default"}]

    def _sums_bfloat16(self) -> bool:
        """Whether it sums bfloat16 gradients of several devices, which MXNet's stores truncate."""
        module = self._module()
        return len(module._context) > 1 and any(is_bfloat16(weights[0].dtype)
                                                for _, weights, _ in _parameters(module))

    def _broadcast_parameters(self) -> None:
        """Broadcasts rank 0's parameters and moving averages."""
        module = self._module()
        group = module._exec_group
        workers = self._workers
        workers.connect(module._kvstore, updates=bool(module._update_on_kvstore))
        if workers.count == 1:
            return
        if workers.exchange:
            consistency.broadcast(workers, [
                (name, name, arrays) for name, arrays, _ in _parameters(module)], True)
            # pending gradients belong to other weights and another scale
            self._step.weights_replaced = workers.any(self._step.stage is not Stage.EMPTY)
        workers.broadcast([(f"statistics {name}", arrays) for name, arrays in
                           zip(group.aux_names, group.aux_arrays)], False)
        self._params_dirty = module._params_dirty = True

    def _compared_state(self) -> List[Any]:
        module = self._module()
        weights = [(name, arrays[0]) for name, arrays, _ in _parameters(module)]
        names = {i: name for i, (name, _) in self._weights().items()}
        return consistency.state_of(module._updater, self._step.state(), weights, names)

    def _average_statistics(self) -> None:
        module = self._module()
        self._workers.average(module._exec_group.aux_arrays)
        self._params_dirty = module._params_dirty = True

    def get_params(self) -> Tuple[Dict[str, Array], Dict[str, Array]]:
        """The same as MXNet's, after all updates of moving averages.

        Of several devices, it is the mean. MXNet computes it in the parameters' type, which would
        round or overflow.
        """
        mx.nd.waitall()  # MXNet's engine does not track the writes of batch norms to averages
        module = self._module()
        dirty, group = self._params_dirty or module._params_dirty, module._exec_group
        args, averages = super().get_params()
        if dirty and len(module._context) > 1:
            for names, arrays, host in ((group.param_names, group.param_arrays, args),
                                        (group.aux_names, group.aux_arrays, averages)):
                for name, on_devices in zip(names, arrays):
                    if on_devices[0].stype == "default":
                        host[name][:] = mean_on_cpu(on_devices).astype(host[name].dtype)
        return args, averages

    # ---- files

    def save_params(self, fname: str) -> None:
        """Writes the parameters, atomically, and the record of the symbol's policy."""
        save(fname, super().save_params, record_in(self._module()._symbol))

    def load_params(self, fname: str) -> None:
        """Loads a file of parameters, which must not record another policy than the symbol's."""
        check_record(self._module()._symbol, fname)
        super().load_params(fname)

    def save_optimizer_states(self, fname: str) -> None:
        """Writes the optimizer with its master weights, the loss scale and the counters."""
        files.save(fname, self._updater_in_use(), self._step, saves_scheduler=False)

    def load_optimizer_states(self, fname: str) -> None:
        """Loads the states that this class or MXNet's `Module` saved, on any number of devices.

        States of float32 weights also load for 16-bit weights, whose values become their master
        weights. Otherwise, parameters and states must have the same types. It restores momenta,
        master weights, counters and the loss scale. Learning rates, scheduler and weight decays
        stay those of this module's optimizer. No code in a file runs.

        Raises:
            ValueError: the file is damaged or does not fit. Nothing changes.
        """
        module = self._module()
        saved = files.read(fname, module._optimizer, _OF_MODULE)
        numbered = _parameters(self._numbered())
        trained = [(i, name) for i, (name, _, grads) in enumerate(numbered) if grads[0] is not None]
        devices = 0 if module._update_on_kvstore else len(module._context)
        weights = self._weights() if devices else {
            name: (name, arrays[0]) for name, arrays, grads in numbered if grads[0] is not None}
        files.load(fname, saved, [self._updater_in_use()], self._step, weights,
                   [c.device_id for c in module._context],
                   lambda values: files.renumber(values, trained, devices))

    def _updater_in_use(self) -> Any:
        """Returns the updater of this process; None if servers update."""
        module = self._module()
        return module._kvstore._updater if module._update_on_kvstore else module._updater

    def _weights(self) -> Dict[int, Tuple[str, Array]]:
        """Returns names and weights by the indices of MXNet's Module."""
        module = self._numbered()
        devices = len(module._context)
        return {i * devices + k: (name, weight)
                for i, (name, weights, _) in enumerate(_parameters(module))
                for k, weight in enumerate(weights)}


def _parameters(module: mx.mod.Module) -> List[Tuple[str, List[Any], List[Any]]]:
    """Returns the name of each parameter, and its arrays and gradients on each device."""
    group = module._exec_group
    return list(zip(group.param_names, group.param_arrays, group.grad_arrays))


class Module(_Module, mx.mod.Module):
    """`mx.mod.Module` for symbols in mixed precision, on GPUs and CPUs, with loss scaling.

    Args:
        symbol: the result of `gluon_amp.convert_symbol`, or a symbol with casts.
        loss_scale: as for `gluon_amp.Trainer`; the types of the symbol's arrays decide "auto" when
            it is bound.
        clip_norm: the largest norm of all gradients together, unscaled and multiplied by
            `rescale_grad`. None does not clip.
        kwargs: as for `mx.mod.Module`.
    """

    def __init__(self, symbol: Symbol, *args: Any, loss_scale: GivenLossScale = "auto",
                 clip_norm: Optional[float] = None, **kwargs: Any) -> None:
        """See the class for the arguments."""
        self._init_step(loss_scale, clip_norm)
        super().__init__(self._bindable(symbol), *args, **kwargs)

    @classmethod
    def load(cls, prefix: str, epoch: int, load_optimizer_states: bool = False,
             **kwargs: Any) -> Module:
        """Loads a module from a checkpoint.

        Args:
            prefix: as for `mx.mod.Module.load`.
            epoch: as for `mx.mod.Module.load`.
            load_optimizer_states: whether `init_optimizer` loads the optimizer's states.
            kwargs: as for the class.

        Raises:
            ValueError: the parameters do not fit the symbol.
        """
        must_exist(f"{prefix}-symbol.json", f"{prefix}-{epoch:04d}.params")
        symbol, args, auxs = mx.model.load_checkpoint(prefix, epoch)
        check_record(symbol, f"{prefix}-{epoch:04d}.params")
        check_parameters(symbol, args, auxs)
        module = cls(symbol, **kwargs)
        module._arg_params, module._aux_params = args, auxs
        module.params_initialized = True
        if load_optimizer_states:
            module._states_file = f"{prefix}-{epoch:04d}.states"
        return module

    def save_checkpoint(self, prefix: str, epoch: int, save_optimizer_states: bool = False,
                        remove_amp_cast: bool = True) -> None:
        """Writes PREFIX-symbol.json, PREFIX-EPOCH.params and optionally PREFIX-EPOCH.states.

        Each file is replaced atomically. PREFIX-EPOCH.params.json has the policy of the symbol.
        Parameters have the symbol's types.

        Args:
            prefix: the beginning of the files' names, with a folder or without.
            epoch: the number in the files' names.
            save_optimizer_states: whether to write PREFIX-EPOCH.states, too.
            remove_amp_cast: removes `amp_cast` operators, such as those of `mx.contrib.amp`. The
                casts of `gluon_amp.convert_symbol` stay: the symbol is in mixed precision.
        """
        replace_file(f"{prefix}-symbol.json",
                     lambda path: self._symbol.save(path, remove_amp_cast=remove_amp_cast))
        self.save_params(f"{prefix}-{epoch:04d}.params")
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")


class BucketingModule(_Module, mx.mod.BucketingModule):
    """`mx.mod.BucketingModule` in mixed precision, with one loss scale for all buckets.

    Args:
        sym_gen: a function of a bucket's key. It returns the symbol, which
            `gluon_amp.convert_symbol` has converted, the names of its data and those of its labels.
        default_bucket_key: the key of the largest bucket.
        loss_scale: as for `gluon_amp.Module`.
        clip_norm: as for `gluon_amp.Module`.
        kwargs: as for `mx.mod.BucketingModule`.
    """

    def __init__(self, sym_gen: Callable[[Any], Any], *args: Any,
                 loss_scale: GivenLossScale = "auto",
                 clip_norm: Optional[float] = None, **kwargs: Any) -> None:
        """See the class for the arguments."""
        if not callable(sym_gen):
            raise TypeError("sym_gen must be a function that returns a symbol, the names of its "
                            "data and those of its labels for a bucket's key. "
                            f"Received: {sym_gen!r}")
        if not args and kwargs.get("default_bucket_key") is None:
            raise TypeError("default_bucket_key must be the key of the largest bucket. "
                            "Received: None")
        self._init_step(loss_scale, clip_norm)

        def bindable(key: Hashable) -> Tuple[Symbol, Sequence[str], Sequence[str]]:
            found = sym_gen(key)
            if not isinstance(found, (tuple, list)) or len(found) != 3:
                raise TypeError("sym_gen must return a symbol, the names of its data and those of "
                                f"its labels. Received for the bucket {key!r}: {found!r}")
            symbol, data_names, label_names = found
            return self._bindable(symbol), data_names, label_names

        super().__init__(bindable, *args, **kwargs)

    def _module(self) -> mx.mod.Module:
        return self._curr_module

    def _numbered(self) -> mx.mod.Module:
        return self._buckets[self._default_bucket_key]

    def init_optimizer(self, *args: Any, **kwargs: Any) -> None:
        """The same as `Module`'s, for the parameters of the default bucket."""
        current, self._curr_module = self._curr_module, self._numbered()
        try:
            super().init_optimizer(*args, **kwargs)
        finally:
            self._curr_module = current

    @staticmethod
    def load(prefix: str, epoch: int, sym_gen: Any = None,
             default_bucket_key: Hashable = None,
             load_optimizer_states: bool = False, **kwargs: Any) -> BucketingModule:
        """Loads a module from a checkpoint.

        Args:
            prefix: the beginning of the files' names.
            epoch: the number in the files' names.
            sym_gen: as for the class. It is required: the saved symbols are not read.
            default_bucket_key: as for the class, required.
            load_optimizer_states: whether `init_optimizer` loads the optimizer's states.
            kwargs: as for the class.

        Raises:
            TypeError: `sym_gen` or `default_bucket_key` is missing.
            ValueError: the parameters do not fit the symbol of the default bucket.
        """
        must_exist(f"{prefix}-{epoch:04d}.params")
        module = BucketingModule(sym_gen, default_bucket_key, **kwargs)
        symbol, data_names, label_names = module._call_sym_gen(default_bucket_key)
        check_record(symbol, f"{prefix}-{epoch:04d}.params")
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
        """Writes the parameters, the symbols of the buckets and optionally the states.

        The files are PREFIX-EPOCH.params, PREFIX-EPOCH.params.json with the policy of the symbol,
        PREFIX-KEY-symbol.json of each bucket, PREFIX.buckets and PREFIX-EPOCH.states. Each is
        replaced atomically. Arguments are those of `Module.save_checkpoint`; the default of
        `remove_amp_cast` is that of `mx.mod.BucketingModule`.
        """
        self.save_params(f"{prefix}-{epoch:04d}.params")
        for key in self._buckets:
            symbol = self._call_sym_gen(key)[0]
            replace_file(f"{prefix}-{key}-symbol.json",
                         lambda path, symbol=symbol: symbol.save(path, remove_amp_cast))
        keys = mx.nd.array(list(self._buckets), dtype="int32")
        replace_file(f"{prefix}.buckets", lambda path: mx.nd.save(path, keys))
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")


class Speedometer(mx.callback.Speedometer):
    """MXNet's `Speedometer`, which also logs the loss scale and the number of skipped steps.

    Args:
        batch_size: the number of examples of a batch, for the speed.
        frequent: the number of batches from one log to the next.
        auto_reset: whether each log resets the metric.
    """

    def __call__(self, param: mx.model.BatchEndParam) -> None:
        module = (param.locals or {}).get("self")
        if isinstance(module, _Module) and module.scaling.scales and param.eval_metric is not None:
            param = param._replace(eval_metric=_WithScale(param.eval_metric, module))
        super().__call__(param)


class _WithScale:
    """A metric that also reports the loss scale and the number of skipped steps."""

    def __init__(self, metric: Metric, module: _Module) -> None:
        self.module, self.metric, self.reset_local = module, metric, metric.reset_local

    def get_name_value(self) -> List[Tuple[str, float]]:
        return [*self.metric.get_name_value(), ("loss-scale", self.module.loss_scale),
                ("skipped", self.module.skipped)]
