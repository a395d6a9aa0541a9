"""Optimizers that keep float32 masters of float16 weights.

MXNet's own do so with `multi_precision=True`. On a CPU they are slow at it, since
MXNet computes with halves one by one there; these widen, update the masters in
float32 and narrow with our kernels, SGD in one pass.
"""
import functools
from typing import Any, List

from ._mxnet import mx, np
from .cpu import library

_REGISTRY = mx.optimizer.Optimizer.opt_registry
_MASTER_LAST = (mx.optimizer.SGD, mx.optimizer.NAG, mx.optimizer.LARS)  # their states' order


def optimizer(name: str, **kwargs: Any) -> "mx.optimizer.Optimizer":
    """An MXNet optimizer with float32 masters for float16 parameters.

    Args:
        name: a name that `gluon.Trainer` takes, such as "sgd" or "adam".
        kwargs: the optimizer's own arguments.
    """
    cls = _REGISTRY.get(name.lower()) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"unknown optimizer. Valid: {', '.join(sorted(_REGISTRY))}. "
                         f"Received: {name!r}")
    return _with_masters(cls)(**{"multi_precision": True, **kwargs})


class _WithMasters:
    """In front of an optimizer's class."""

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        several = isinstance(index, (tuple, list))
        weights: List[Any] = list(weight) if several else [weight]
        grads, states = (list(grad), list(state)) if several else ([grad], [state])
        if not self.multi_precision or not all(map(_slow, weights)) or not all(map(_slow, grads)):
            super().update_multi_precision(index, weight, grad, state)
            return
        masters, inner = zip(*(s[::-1] if isinstance(self, _MASTER_LAST) else s for s in states))
        if type(self).__bases__[1] is mx.optimizer.SGD:
            self._sgd(index if several else [index], weights, grads, masters, inner)
            return
        grads = [library.call("_gluon_amp_widen", [g]) for g in grads]
        if several:
            self.update(index, masters, grads, inner)
        else:
            self.update(index, masters[0], grads[0], inner[0])
        for master, narrowed in zip(masters, weights):
            library.call("_gluon_amp_narrow", [master], out=narrowed)

    def _sgd(self, indices: Any, weights: Any, grads: Any, masters: Any, momenta: Any) -> None:
        self._update_count(indices)
        clip = self.clip_gradient or -1  # to MXNet 0 is none, too
        for weight, grad, master, momentum, lr, wd in zip(
                weights, grads, masters, momenta, self._get_lrs(indices), self._get_wds(indices)):
            state = [] if momentum is None else [momentum]
            library.call("_gluon_amp_sgd", [grad, master, *state], out=weight, lr=lr, wd=wd,
                         momentum=self.momentum, rescale_grad=self.rescale_grad, clip=clip)

    def __reduce__(self) -> Any:  # the class is made at run time, so pickle finds it by its base
        return _revive, (type(self).__bases__[1],), self.__getstate__()


def _slow(array: "mx.nd.NDArray") -> bool:
    return array.dtype is np.float16 and array.stype == "default" \
        and array.context.device_type != "gpu"


@functools.lru_cache(maxsize=None)
def _with_masters(cls: Any) -> Any:
    return type(cls.__name__, (_WithMasters, cls),
                {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _revive(cls: Any) -> Any:
    made = _with_masters(cls)
    return made.__new__(made)
