"""Loss scales: pure arithmetic, no arrays.

Float16 gradients below 6e-8 are 0. So the loss is scaled up before the backward pass,
and the update scales down again. Both must use one number, which these objects keep:

    static    the pair of a weighted loss and an optimizer's `rescale_grad`
    dynamic   while gradients are finite: grow every `growth_interval` steps, up to `maximum`
              when they are not:          back off, down to `minimum`; there, an error
"""
import inspect
import numbers
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Optional, Union

from mxnet.gluon.loss import Loss, SDMLLoss

from .optimizer import check_scalable
from .optimizer import optimizer as make_optimizer


class LossScaleError(RuntimeError):
    """No loss scale makes the gradients finite."""


def positive(value: Any, what: str) -> float:
    """A number above 0 that float32 holds, as its inverse, or an error."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 2.0 ** -126 <= value <= 2.0 ** 126:
        raise ValueError(f"{what} must be a positive, finite number, from 2^-126 to 2^126. "
                         f"Received: {value!r}")
    return float(value)


@dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that stays, and the pair of loss and optimizer made from it.

    The pair works with MXNet's own `gluon.Trainer` and `Module`. Powers of two scale
    without any rounding.
    """
    scale: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", positive(self.scale, "scale"))

    def loss(self, cls: Any, **kwargs: Any) -> Loss:
        """A Gluon loss of this class, whose values and gradients are scaled.

        Args:
            cls: such as `gluon.loss.SoftmaxCrossEntropyLoss`.
            kwargs: its arguments; a `weight` among them is multiplied by the scale.
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

    def optimizer(self, name: str, *, rescale_grad: float = 1.0, **kwargs: Any) -> Any:
        """`gluon_amp.optimizer(name, ...)` that undoes the scale, for `gluon.Trainer`.

        Args:
            rescale_grad: multiplied by 1 / scale. (The Trainer divides by the batch size.)
        """
        made = make_optimizer(name, rescale_grad=rescale_grad / self.scale, **kwargs)
        check_scalable(made)
        made.static_loss_scale = self.scale
        return made

    def module_optimizer(self, name: str, *, batch_size: int, rescale_grad: float = 1.0,
                         **kwargs: Any) -> Any:
        """The same for MXNet's `Module`, which does not divide by the batch size once
        `rescale_grad` is given: 1 / (scale * batch_size), over all devices and workers. The
        other half is the symbol's: `SoftmaxOutput(..., grad_scale=scale.scale)`."""
        size = positive(batch_size, "batch_size")
        return self.optimizer(name, rescale_grad=rescale_grad / size, **kwargs)

    def unscaled(self, loss: Any) -> Any:
        """A scaled loss as it would be without, for the log."""
        return loss / self.scale


class DynamicLossScale:
    """The largest loss scale that keeps gradients finite, found by trying.

    Call `update` after each step. An overflow lowers the scale for the very next step.

    Args:
        initial: the scale to begin with.
        growth_factor: multiplies the scale after `growth_interval` finite steps in a row.
        backoff_factor: multiplies it after an overflow.
        minimum: the floor: an overflow there is a LossScaleError.
        maximum: the cap.
    """

    def __init__(self, initial: float = 2.0 ** 16, growth_factor: float = 2.0,
                 backoff_factor: float = 0.5, growth_interval: int = 2000,
                 minimum: float = 1.0, maximum: float = 2.0 ** 24) -> None:
        self.minimum = positive(minimum, "minimum")
        self.maximum = positive(maximum, "maximum")
        if self.minimum > self.maximum:
            raise ValueError("minimum must not be above maximum. "
                             f"Received: minimum={minimum!r}, maximum={maximum!r}")
        self.scale = self._within(initial, "initial")
        self.growth_factor = positive(growth_factor, "growth_factor")
        if self.growth_factor <= 1:
            raise ValueError(f"growth_factor must be above 1. Received: {growth_factor!r}")
        self.backoff_factor = positive(backoff_factor, "backoff_factor")
        if self.backoff_factor >= 1:
            raise ValueError(f"backoff_factor must be below 1. Received: {backoff_factor!r}")
        self.growth_interval = whole_number(growth_interval, "growth_interval", least=1)
        self.finite_steps = 0  # in a row, since the scale last changed

    def update(self, finite: bool, parameters: Iterable[str] = ()) -> None:
        """Takes in whether a step's gradients were finite.

        Args:
            parameters: names of those whose gradients were not, for the error.
        """
        if finite:
            self.finite_steps += 1
            if self.finite_steps >= self.growth_interval:
                self.scale = min(self.scale * self.growth_factor, self.maximum)
                self.finite_steps = 0
        elif self.scale <= self.minimum:
            raise LossScaleError(f"gradients are not finite{of(parameters)} at the smallest loss "
                                 f"scale, {self.minimum!r}: their float16 numbers overflow "
                                 "without any scaling. Keep these layers in float32 "
                                 "(convert(keep=...)), or lower the learning rate")
        else:
            self.scale = max(self.scale * self.backoff_factor, self.minimum)
            self.finite_steps = 0

    def state_dict(self) -> Dict[str, Any]:
        """What changes while training."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Takes over what `state_dict` gave; a bad one is an error and changes nothing."""
        if not isinstance(state, dict) or set(state) != {"scale", "finite_steps"}:
            raise ValueError("a DynamicLossScale's state has scale and finite_steps. "
                             f"Received: {state!r}")
        scale = self._within(state["scale"], "scale")
        self.finite_steps = whole_number(state["finite_steps"], "finite_steps", least=0)
        self.scale = scale

    def _within(self, scale: Any, what: str) -> float:
        if not self.minimum <= positive(scale, what) <= self.maximum:
            raise ValueError(f"{what} must lie between minimum={self.minimum!r} and "
                             f"maximum={self.maximum!r}. Received: {scale!r}")
        return float(scale)

    def __repr__(self) -> str:
        return f"DynamicLossScale(scale={self.scale!r}, finite_steps={self.finite_steps})"


def _no_weight(cls: Any) -> str:
    return f"{cls.__name__} takes no weight, or does not use it, so it cannot be scaled by one: " \
           "use gluon_amp.Trainer, which scales gradients"


LossScale = Union[StaticLossScale, DynamicLossScale]


def as_loss_scale(value: Any) -> Optional[LossScale]:
    """What `loss_scale=` takes: a scale, a number, "dynamic" or None."""
    if value is None or isinstance(value, (StaticLossScale, DynamicLossScale)):
        return value
    if isinstance(value, str) and value == "dynamic":
        return DynamicLossScale()
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return StaticLossScale(positive(value, "loss_scale"))
    raise ValueError('loss_scale takes "dynamic", a number, a StaticLossScale, a DynamicLossScale, '
                     f"or None for no scaling. Received: {value!r}")


def of(parameters: Iterable[str]) -> str:
    """ in a, b, c and 4 more, or nothing"""
    parameters = list(parameters)
    more = f" and {len(parameters) - 5} more" if len(parameters) > 5 else ""
    return f" in {', '.join(parameters[:5])}{more}" if parameters else ""


def whole_number(value: Any, what: str, least: int) -> int:
    """The number, if it is whole and large enough, or an error."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{what} must be a whole number from {least} on. Received: {value!r}")
    return int(value)
