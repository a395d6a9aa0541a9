"""`Module` and `BucketingModule`: MXNet's own, on any device, with loss scaling.

What they bind is binding.py's matter. A step is as in the Trainer: one look at all
gradients after they are summed over devices; then an update with gradients divided by the
scale, or none.
"""
from typing import Any, List, Tuple

from mxnet.model import _update_params

from ._mxnet import mx, np
from .binding import LOSS_HEADS, Bindable, environment
from .files import replace_file
from .finite import all_finite, squares
from .graph import Graph
from .halves import to_float32
from .loss_scale import as_loss_scale
from .optimizer import check_scalable, with_masters
from .scaling import Scaling
from .states import read_states
from .symbol import check_parameters


class _Scaled:
    """In front of MXNet's classes of modules."""

    _scaling: Scaling

    def _module(self) -> Any:
        """The module that is bound now."""
        return self

    @property
    def loss_scale(self) -> float:
        """The scale that the next forward pass uses; 1 without scaling."""
        return self._scaling.value

    @property
    def skipped(self) -> int:
        """How many steps were skipped."""
        return self._scaling.skipped

    @property
    def overflowed(self) -> Any:
        """Names of the parameters whose gradients were not finite in the last step."""
        return self._scaling.overflowed

    def _bindable(self, symbol: Any) -> Bindable:
        return Bindable.of(symbol, (lambda: self._scaling.value) if self._scaling.on else None)

    def init_params(self, initializer: Any = mx.init.Uniform(0.01), *args: Any,  # noqa: B008
                    **kwargs: Any) -> None:
        """Draws in float32 what float16 parameters are rounded from."""
        module = self._module()
        if module is not None and module._arg_params:
            types = {name: a.dtype for name, a in module._arg_params.items()}
            module._arg_params = {n: to_float32(a) if a.dtype is np.float16 else a
                                  for n, a in module._arg_params.items()}
            super().init_params(initializer, *args, **kwargs)
            module._arg_params = {n: a.astype(types[n], copy=False)
                                  for n, a in module._arg_params.items()}
        else:
            super().init_params(initializer, *args, **kwargs)

    def init_optimizer(self, kvstore: Any = "local", optimizer: Any = "sgd",
                       optimizer_params: Any = (("learning_rate", 0.01),),
                       force_init: bool = False) -> None:
        """As MXNet's, with float32 masters."""
        if self.optimizer_initialized and not force_init:
            super().init_optimizer(kvstore, optimizer, optimizer_params, force_init)
            return
        name = str(getattr(kvstore, "type", kvstore))
        if self._scaling.on and "async" in name:
            raise ValueError("loss scaling looks at the gradients before the update, and "
                             f"{name} updates on its servers: use dist_sync")
        if isinstance(optimizer, str):
            optimizer_params = {"multi_precision": True, **dict(optimizer_params)}
        with environment("MXNET_UPDATE_ON_KVSTORE", "0" if self._scaling.on else None):
            super().init_optimizer(kvstore, optimizer, optimizer_params, force_init)
        made = with_masters(self._module()._optimizer)
        if self._scaling.on:
            check_scalable(made)

    def backward(self, out_grads: Any = None) -> None:
        """As MXNet's; head gradients that are given are scaled."""
        if self._scaling.on:
            if out_grads is None:
                self._check_heads()
            else:
                several = isinstance(out_grads, (list, tuple))
                out_grads = [g * self._scaling.value for g in
                             (out_grads if several else [out_grads])]
        super().backward(out_grads)

    def _check_heads(self) -> None:
        heads = [e.node for e in Graph.read(self._module()._symbol).outputs]
        unknown = [n.name for n in heads if n.op not in LOSS_HEADS and n.op != "BlockGrad"]
        if len(unknown) == len(heads):
            raise ValueError("a loss scale needs a loss head, or out_grads for backward. Valid: "
                             f"{', '.join(sorted(LOSS_HEADS))}. Received: {', '.join(unknown)}")

    def update(self) -> bool:
        """Updates, unless gradients are not finite; returns whether it did."""
        if not self._scaling.on:
            super().update()
            return True
        module = self._module()
        group, optimizer = module._exec_group, module._optimizer
        names = [name for name, grads in zip(group.param_names, group.grad_arrays)
                 if grads[0] is not None for _ in grads]
        _sum_over_devices(module._kvstore, group.param_names, group.grad_arrays)
        arrays = [g for grads in group.grad_arrays if grads[0] is not None for g in grads]
        bad = tuple(dict.fromkeys(n for n, s in zip(names, squares(arrays)) if not np.isfinite(s)))
        if bad:
            for name, grads in zip(group.param_names, group.grad_arrays):
                if group.grad_req[name] == "add":
                    for grad in grads:
                        grad[:] = 0
            shared = module._kvstore is not None and "dist" in module._kvstore.type
            outputs = [to_float32(o) for e in group.execs for o in e.outputs]
            self._scaling.skip(bad, shared or all_finite(outputs))
            return False
        rescale = optimizer.rescale_grad
        optimizer.rescale_grad = rescale / self._scaling.value
        try:
            _update_params(group.param_arrays, group.grad_arrays, module._updater,
                           len(module._context), None, group.param_names)
        finally:
            optimizer.rescale_grad = rescale
        self._params_dirty = module._params_dirty = True
        self._scaling.update()
        return True

    def save_optimizer_states(self, fname: str) -> None:
        """Writes the optimizer with its masters, the loss scale and the counters."""
        module = self._module()
        module._optimizer.trainer_state = self._scaling.state()
        if module._update_on_kvstore:
            replace_file(fname, lambda path: module._kvstore.save_optimizer_states(path, True))
            return
        data = module._updater.get_states(dump_optimizer=True)

        def write(path: str) -> None:
            with open(path, "wb") as file:
                file.write(data)
        replace_file(fname, write)

    def load_optimizer_states(self, fname: str) -> None:
        """Takes over what `save_optimizer_states` wrote, here or in MXNet's `Module`."""
        module = self._module()
        _, optimizer = read_states(fname)
        mine = type(module._optimizer).__name__
        if optimizer is not None and type(optimizer).__name__ != mine:
            raise ValueError(f"{fname} holds the states of {type(optimizer).__name__}; this "
                             f"module has {mine}")
        self._scaling.load(getattr(optimizer, "trainer_state", {}))
        if module._update_on_kvstore:
            module._kvstore.load_optimizer_states(fname)
            updater = module._kvstore._updater
        else:
            updater = module._updater
            with open(fname, "rb") as file:
                updater.set_states(file.read())
        if optimizer is None:
            updater.optimizer = module._optimizer
        module._optimizer = with_masters(updater.optimizer)


class Module(_Scaled, mx.mod.Module):
    """`mx.mod.Module` for symbols in mixed precision, on CPUs, too, with loss scaling.

    Args:
        symbol: such as `gluon_amp.convert_symbol` makes, or one with casts of its own.
        loss_scale: "dynamic", a number, a StaticLossScale, a DynamicLossScale, or None.
        kwargs: as for `mx.mod.Module`.
    """

    def __init__(self, symbol: Any, *args: Any, loss_scale: Any = None, **kwargs: Any) -> None:
        self._scaling = Scaling(as_loss_scale(loss_scale))
        super().__init__(self._bindable(symbol), *args, **kwargs)

    @staticmethod
    def load(prefix: str, epoch: int, load_optimizer_states: bool = False,
             **kwargs: Any) -> "Module":
        """A module from a checkpoint; arguments as for `mx.mod.Module.load`, and `loss_scale`."""
        symbol, args, auxs = mx.model.load_checkpoint(prefix, epoch)
        check_parameters(symbol, args, auxs)
        module = Module(symbol, **kwargs)
        module._arg_params, module._aux_params = args, auxs
        module.params_initialized = True
        if load_optimizer_states:
            module._preload_opt_states = f"{prefix}-{epoch:04d}.states"
        return module

    def save_checkpoint(self, prefix: str, epoch: int, save_optimizer_states: bool = False,
                        remove_amp_cast: bool = True) -> None:
        """Writes PREFIX-symbol.json, PREFIX-EPOCH.params and, if asked, PREFIX-EPOCH.states,
        each whole or not at all."""
        replace_file(f"{prefix}-symbol.json",
                     lambda path: self._symbol.save(path, remove_amp_cast=remove_amp_cast))
        replace_file(f"{prefix}-{epoch:04d}.params", self.save_params)
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")


class BucketingModule(_Scaled, mx.mod.BucketingModule):
    """`mx.mod.BucketingModule` in the same way: one loss scale for all buckets."""

    def __init__(self, sym_gen: Any, *args: Any, loss_scale: Any = None, **kwargs: Any) -> None:
        self._scaling = Scaling(as_loss_scale(loss_scale))

        def bindable(key: Any) -> Any:
            symbol, data_names, label_names = sym_gen(key)
            return self._bindable(symbol), data_names, label_names

        super().__init__(bindable, *args, **kwargs)

    def _module(self) -> Any:
        return self._curr_module


class Speedometer(mx.callback.Speedometer):
    """MXNet's `Speedometer`, with the loss scale and the skipped steps at the line's end."""

    def __call__(self, param: Any) -> None:
        module = (param.locals or {}).get("self")
        if isinstance(module, _Scaled) and module._scaling.on and param.eval_metric is not None:
            param = param._replace(eval_metric=_WithScale(param.eval_metric, module._scaling))
        super().__call__(param)


class _WithScale:
    """A metric that also names the loss scale."""

    def __init__(self, metric: Any, scaling: Scaling) -> None:
        self.scaling, self.metric, self.reset_local = scaling, metric, metric.reset_local

    def get_name_value(self) -> List[Tuple[str, float]]:
        return [*self.metric.get_name_value(), ("loss-scale", self.scaling.value),
                ("skipped", self.scaling.skipped)]


def _sum_over_devices(kvstore: Any, names: List[str], grads: List[Any]) -> None:
    if kvstore is None:
        return
    for i, (name, on_devices) in enumerate(zip(names, grads)):
        if on_devices[0] is None:
            continue
        if on_devices[0].stype == "default":
            kvstore.pushpull(name, on_devices, priority=-i)
        else:
            kvstore.push(name, on_devices, priority=-i)
            kvstore.pull(name, out=on_devices, priority=-i, ignore_sparse=False)
