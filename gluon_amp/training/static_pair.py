"""The static loss scale with its pair of loss and optimizer, and the argument `loss_scale=`."""
import inspect
import numbers
from dataclasses import dataclass
from typing import Any, Union

from mxnet.gluon.loss import Loss, SDMLLoss

from ..annotations import Array, Optimizer
from ..checks import positive_number
from .loss_scale import DynamicLossScale, LossScale
from .optimizer import check_scalable
from .optimizer import optimizer as make_optimizer


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A constant loss scale, and the loss and optimizer that match it.

    Use `loss` and `optimizer` with MXNet's own `gluon.Trainer` and `Module`. A power of two scales
    without rounding.

    Args:
        scale: the factor.
    """
    scale: float
    scales = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", positive_number(self.scale, "scale"))

    @property
    def kind(self) -> str:
        return f"the loss scale {self.scale:g}"

    def loss(self, cls: type, **kwargs: Any) -> Loss:
        """Returns a Gluon loss whose values and gradients are multiplied by the scale.

        Args:
            cls: a class such as `gluon.loss.SoftmaxCrossEntropyLoss`.
            kwargs: its arguments. The scale multiplies `weight`.

        Raises:
            TypeError: the class has no weight that multiplies the loss.
        """
        if not (isinstance(cls, type) and issubclass(cls, Loss)):
            raise TypeError(f"scale.loss takes a class of gluon.loss. Received: {cls!r}")
        if issubclass(cls, SDMLLoss):
            raise TypeError(_no_weight(cls))
        weight = inspect.signature(cls).parameters.get("weight")
        default = 1.0 if weight is None else weight.default
        given = kwargs.pop("weight", None)
        if given is None:
            given = default if isinstance(default, numbers.Real) else 1.0
        try:
            return cls(weight=given * self.scale, **kwargs)
        except TypeError as error:
            if weight is None:
                raise TypeError(_no_weight(cls)) from error
            raise

    def optimizer(self, name: str, *, rescale_grad: float = 1.0, **kwargs: Any) -> Optimizer:
        """Returns `gluon_amp.optimizer(name, ...)` that divides by the scale, for `gluon.Trainer`.

        Args:
            name: as for `gluon_amp.optimizer`.
            rescale_grad: divided by the scale. (The Trainer divides by the batch size.)
            kwargs: the optimizer's other arguments.
        """
        made = make_optimizer(name, rescale_grad=rescale_grad / self.scale, **kwargs)
        check_scalable(made)
        made.static_loss_scale = self.scale
        return made

    def module_optimizer(self, name: str, *, batch_size: int, rescale_grad: float = 1.0,
                         **kwargs: Any) -> Optimizer:
        """Returns the same for `Module`, which does not divide by the batch size.

        The symbol has the other half: `SoftmaxOutput(..., grad_scale=scale.scale)`.

        Args:
            name: as for `gluon_amp.optimizer`.
            batch_size: of all devices and workers.
            rescale_grad: divided by the scale and the batch size.
            kwargs: the optimizer's other arguments.
        """
        size = positive_number(batch_size, "batch_size")
        return self.optimizer(name, rescale_grad=rescale_grad / size, **kwargs)

    def unscaled(self, loss: Array) -> Array:
        """Returns a scaled loss divided by the scale, for the log."""
        return loss / self.scale


GivenLossScale = Union[LossScale, float, str, None]


def as_loss_scale(value: GivenLossScale) -> LossScale:
    """Returns the loss scale for an argument `loss_scale=`."""
    if value is None:
        return LossScale()
    if isinstance(value, LossScale):
        return value
    if isinstance(value, str) and value == "dynamic":
        return DynamicLossScale()
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return StaticLossScale(positive_number(value, "loss_scale"))
    raise ValueError('loss_scale takes "dynamic", a number, a StaticLossScale, a DynamicLossScale, '
                     f"or None for no scaling. Received: {value!r}")


def _no_weight(cls: type) -> str:
    return f"{cls.__name__} takes no weight, or does not use it, so it cannot be scaled by one: " \
           "use gluon_amp.Trainer, which scales gradients"
