"""AdamW. MXNet 1.9.1 has its operators, but no optimizer."""
from __future__ import annotations

import math
import os
from typing import Any, List, Sequence, Tuple, Union

from .._mxnet import mx
from ..annotations import Array, Arrays, Optimizer
from ..cpu.arrays import is_16bit

Index = Union[int, str]  # a name in a Module that updates on a kvstore
Indices = Union[Index, Sequence[Index]]


@mx.optimizer.register
class AdamW(mx.optimizer.Optimizer):
    """Adam with decoupled weight decay, after Loshchilov and Hutter.

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        weight -= lr * (sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon) + wd * weight)

    Without weight decay it is MXNet's Adam. On a GPU many parameters are updated in one call.

    Args:
        wd: the decay; the learning rate multiplies it, as in PyTorch.
    """

    def __init__(self, learning_rate: float = 0.001, beta1: float = 0.9, beta2: float = 0.999,
                 epsilon: float = 1e-8, **kwargs: Any) -> None:
        """See the class for the arguments."""
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        # the operator's limit is 50
        self.aggregate_num = max(1, min(50, int(os.getenv("MXNET_OPTIMIZER_AGGREGATION_SIZE",
                                                          "50"))))

    def create_state(self, index: Index, weight: Array) -> Tuple[Any, Any]:
        """Returns the two averages of a weight, which are 0."""
        zeros = mx.nd.zeros_like(weight.as_nd_ndarray())
        return zeros, zeros.copy()

    def update(self, index: Indices, weight: Arrays, grad: Arrays, state: object) -> None:
        """Updates a weight, or several in one call."""
        self._run("multi_adamw_update", *_lists(index, weight, grad, state))

    def update_multi_precision(self, index: Indices, weight: Arrays, grad: Arrays,
                               state: object) -> None:
        """Updates 16-bit weights by their float32 master weights."""
        indices, weights, grads, states = _lists(index, weight, grad, state)
        if not self.multi_precision or not is_16bit(weights[0].dtype):
            self.update(index, weight, grad, state)
            return
        self._run("multi_mp_adamw_update", indices, weights, grads,
                  [(mean, var, master) for master, (mean, var) in states])

    def _run(self, name: str, indices: Sequence[int], weights: Sequence[Array],
             grads: Sequence[Array], states: Sequence[Any]) -> None:
        self._update_count(indices)
        lrs: List[float] = self._get_lrs(indices)
        wds = [lr * wd for lr, wd in zip(lrs, self._get_wds(indices))]
        for i, index in enumerate(indices):
            lrs[i] = bias_corrected(self, lrs[i], self._index_update_count[index])
        # On a CPU the operator loops over the largest size for each array: one array per call.
        on_gpu = weights[0].ctx.device_type == "gpu"
        size = len(weights) if on_gpu else 1
        rescale_grad = self.rescale_grad
        if on_gpu:  # without it, MXNet fills an array with one more launch
            rescale_grad = mx.nd.array([rescale_grad], weights[0].ctx)
        for i in range(0, len(weights), size):
            part = slice(i, i + size)
            getattr(mx.nd.contrib, name)(
                weights[part], grads[part], *zip(*states[part]), lrs=lrs[part], wds=wds[part],
                rescale_grad=rescale_grad, etas=[1.0] * size, out=weights[part],
                beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon,
                clip_gradient=self.clip_gradient or -1)


def bias_corrected(made: Optimizer, lr: float, step: int) -> float:
    """Returns the bias-corrected learning rate of Adam's step."""
    return lr * (math.sqrt(1 - made.beta2 ** step) / (1 - made.beta1 ** step))


def _lists(index: Any, *rest: Any) -> List[List[Any]]:
    """Returns lists for arguments of one parameter or of several."""
    if isinstance(index, (tuple, list)):
        return [list(index), *map(list, rest)]
    return [[index], *([one] for one in rest)]
