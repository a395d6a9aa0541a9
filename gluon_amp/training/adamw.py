"""AdamW. MXNet 1.9.1 has its operators, but no optimizer."""
from __future__ import annotations

import math
from typing import Any, Tuple, Union

from .._mxnet import mx
from ..annotations import Array, Optimizer

Index = Union[int, str]  # of a weight; a name in a Module that updates on a kvstore


@mx.optimizer.register
class AdamW(mx.optimizer.Optimizer):
    """Adam with decoupled weight decay, after Loshchilov and Hutter.

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        weight -= lr * (sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon) + wd * weight)

    Without weight decay it is MXNet's Adam.

    Args:
        learning_rate: the factor `lr` of each update.
        beta1: the decay of the average `m` of gradients.
        beta2: the decay of the average `v` of their squares.
        epsilon: a small number that prevents a division by 0.
        kwargs: those of `mx.optimizer.Optimizer`, such as `wd`: the weight decay, which the
            learning rate multiplies, as in PyTorch.
    """

    def __init__(self, learning_rate: float = 0.001, beta1: float = 0.9, beta2: float = 0.999,
                 epsilon: float = 1e-8, **kwargs: Any) -> None:
        """See the class for the arguments."""
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def create_state(self, index: Index, weight: Array) -> Tuple[Any, Any]:
        """Returns the two averages of a weight, which are 0."""
        zeros = mx.nd.zeros_like(weight.as_nd_ndarray())
        return zeros, zeros.copy()

    def update(self, index: Index, weight: Array, grad: Array, state: Any) -> None:
        """Updates a float32 weight."""
        self._update_count(index)
        rate = self._get_lr(index)
        # MXNet's operator for lists parses their numbers correctly
        mx.nd.contrib.multi_adamw_update(
            [weight], [grad], *([average] for average in state), out=[weight],
            lrs=[bias_corrected(self, rate, self._index_update_count[index])],
            wds=[rate * self._get_wd(index)], etas=[1.0], rescale_grad=self.rescale_grad,
            beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon,
            clip_gradient=self.clip_gradient or -1)


def bias_corrected(adam: Optimizer, rate: float, step: int) -> float:
    """Returns the bias-corrected learning rate of Adam's step."""
    return rate * (math.sqrt(1 - adam.beta2 ** step) / (1 - adam.beta1 ** step))
