"""Loss scales: none, dynamic, and static. They are values: a step replaces its own by the next.

Gradients below 3e-8 are 0 in float16. So the backward pass starts from the scale instead of 1, and
the update divides gradients by it. The dynamic scale follows the norm of all gradients,
which each step computes anyway: see `DynamicLossScale.update`.
"""
from __future__ import annotations

import inspect
import logging
import math
import numbers
from dataclasses import dataclass
from typing import Any, Collection, Dict, Iterable, Optional, Union

from mxnet.gluon.loss import Loss, SDMLLoss

from ..annotations import Array, Optimizer
from ..checks import in_names, positive_number, whole_number
from .optimizer import check_scalable
from .optimizer import optimizer as make_optimizer

log = logging.getLogger("gluon_amp")


class LossScaleError(RuntimeError):
    """The gradients overflow at every loss scale, or the loss itself is not finite."""


def as_power(scale: float) -> str:
    """Formats a loss scale: powers of two, besides 1, as 2^-14."""
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 and scale != 1 else f"{scale:g}"


class LossScale:
    """No loss scaling: the scale is always 1. The base class of other scales.

    Attributes:
        scale: multiplies the gradients of the next step.
        scales: whether gradients are scaled.
        changes: whether steps change the scale.
        was_auto: whether types of gradients have decided it.
    """
    scale: float = 1.0
    scales = False
    changes = False
    was_auto = False

    def update(self, norm: float, used: Optional[float] = None,
               parameters: Iterable[str] = ()) -> LossScale:
        """Returns the loss scale of the next step. See `DynamicLossScale.update`."""
        return self

    def for_types(self, types: Collection[str]) -> LossScale:
        """Returns the loss scale for gradients that are computed in these 16-bit types.

        Refuses types that need more than what "auto" has become.
        """
        needed = AutoLossScale().for_types(types)
        if self.was_auto and (needed.scales, needed.changes) > (self.scales, self.changes):
            raise RuntimeError(f"loss_scale='auto' became {self} when the training began, which "
                               f"does not fit {' and '.join(sorted(types))} gradients. Valid: "
                               "convert before the first backward pass, or loss_scale='dynamic'")
        return self

    def state_dict(self) -> Dict[str, Any]:
        """Returns what changes during training."""
        return {}

    def load_state_dict(self, state: Dict[str, Any]) -> LossScale:
        """Returns this loss scale; warns that a dynamic scale's state is ignored."""
        if state:
            log.warning("the file's dynamic loss scale, %s, is ignored: here loss_scale is %s. "
                        "loss_scale='dynamic' loads it", format(state["scale"], "g"), self)
        return self

    def __repr__(self) -> str:
        return "None"  # the value of `loss_scale=`


class AutoLossScale(LossScale):
    """The loss scale that fits the types of gradients, before they are decided."""

    def for_types(self, types: Collection[str]) -> LossScale:
        decided = LossScale() if not types else DynamicLossScale() if "float16" in types else \
            StaticLossScale(1)  # bfloat16 has float32's range
        vars(decided)["was_auto"] = True
        return decided

    def __repr__(self) -> str:
        return "'auto'"


_LARGEST = 65504.0  # in float16
_FIRST = 2.0 ** 2
_WITHOUT_GRADIENTS = 2.0 ** 16  # the largest scale if gradients are 0, which may be an underflow
# Gradients of activations may be larger than those of parameters, and gradients vary between steps.
_HEADROOM = 2.0 ** 4
_LEAST_HEADROOM = 2.0 ** 2  # below it, the scale is lowered without an overflow
_MUCH_HEADROOM = 2.0 ** 6  # above it, the scale grows sooner, as often as this:
_SOONER = 20
_FIRST_STEPS = 10
_LARGE_CHANGE = 2.0 ** 4  # in the first steps


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A loss scale that follows the gradients, and leaves headroom for larger ones.

    It is a value, which may be given to several Trainers; `trainer.loss_scale` is the scale now.

    Args:
        initial: the first scale; by default 4, or the nearest between minimum and maximum.
        growth_interval: the number of finite steps before the scale doubles.
        minimum: the smallest scale. An overflow there raises LossScaleError.
        maximum: the largest scale.
        scale: state; the scale of the next step. 0: `initial`.
        finite_steps: state; the number of finite steps in a row since the scale last changed.
        settled: state; whether the first steps, which calibrate it, are over.
        overflows: state; the number of overflows since `growth_interval` finite steps in a row
            last passed. While it is above 0, the scale does not grow earlier than after these.
    """
    initial: Optional[float] = None
    growth_interval: int = 2000
    minimum: float = 2.0 ** -14
    maximum: float = 2.0 ** 24
    scale: float = 0.0  # 0: the initial one
    finite_steps: int = 0
    settled: bool = False
    overflows: int = 0

    scales = True
    changes = True

    def __post_init__(self) -> None:
        if positive_number(self.minimum, "minimum") > positive_number(self.maximum, "maximum"):
            raise ValueError("minimum must not be above maximum. Received: "
                             f"minimum={self.minimum!r}, maximum={self.maximum!r}")
        whole_number(self.growth_interval, "growth_interval", least=1)
        initial = self._clipped(_FIRST) if self.initial is None \
            else self._within(self.initial, "initial")
        scale = self._within(self.scale, "scale") if self.scale else initial
        object.__setattr__(self, "initial", float(initial))
        object.__setattr__(self, "scale", float(scale))

    def update(self, norm: float, used: Optional[float] = None,
               parameters: Iterable[str] = ()) -> DynamicLossScale:
        """Returns a new DynamicLossScale, of the next step; this one does not change.

        A scale fits if norm * scale <= 65504 / 16.

        - In the first 10 finite steps, it becomes the largest power of two that fits, and changes
          by at most 16 in a step.
        - Later, it doubles after `growth_interval` finite steps, if that fits; 20 times as often
          while norm * scale < 65504 / 64.
        - If norm * scale > 65504 / 4, it is lowered to one that fits, before anything overflows.
        - An overflow halves it; in the first steps, it divides it by 16.

        Args:
            norm: the norm of all gradients together, unscaled; infinity or NaN after an overflow.
            used: the scale of the backward pass, if that was a smaller one of another Trainer.
            parameters: the names of those whose gradients overflowed, for the error.

        Raises:
            LossScaleError: an overflow at the smallest scale.
        """
        used = min(self.scale, used or self.scale)
        if not math.isfinite(norm):
            if used <= self.minimum:
                raise LossScaleError(self._nothing_fits(parameters))
            lower = used / (2 if self.settled else _LARGE_CHANGE)
            # an overflow after a finite step ends the first steps: the norm is no guide here
            return self._with(scale=max(lower, self.minimum), finite_steps=0,
                              overflows=self.overflows + 1,
                              settled=self.settled or self.finite_steps > 0)
        steps, fits = self.finite_steps + 1, self._largest(norm)
        if not self.settled:
            return self._with(scale=max(min(fits, used * _LARGE_CHANGE), self.minimum),
                              finite_steps=steps,
                              settled=steps >= min(_FIRST_STEPS, self.growth_interval))
        if norm * self.scale > _LARGEST / _LEAST_HEADROOM:
            return self._with(scale=fits, finite_steps=0)
        grown = max(self.scale, min(self.scale * 2, fits))
        if steps >= self.growth_interval:
            return self._with(scale=grown, finite_steps=0, overflows=0)
        if not self.overflows and steps % max(self.growth_interval // _SOONER, 1) == 0 \
                and self.scale < fits * _HEADROOM / _MUCH_HEADROOM:
            return self._with(scale=grown, finite_steps=0)
        return self._with(finite_steps=steps)

    def _with(self, **changes: Any) -> DynamicLossScale:
        """Returns this loss scale with other values, without checks."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), **changes)
        return other

    def _largest(self, norm: float) -> float:
        """Returns the largest power of two that fits, between minimum and maximum."""
        if norm == 0:
            return self._clipped(max(_WITHOUT_GRADIENTS, self.scale))
        return self._clipped(2.0 ** math.floor(math.log2(_LARGEST / _HEADROOM / max(norm, 1e-30))))

    def _clipped(self, scale: float) -> float:
        return min(max(scale, self.minimum), self.maximum)

    def _nothing_fits(self, parameters: Iterable[str]) -> str:
        return f"gradients are not finite{in_names(parameters)} at the smallest loss scale, " \
               f"{as_power(self.minimum)}: normalize the labels, take a mean instead of a sum in " \
               "the loss, keep these layers in float32 (convert(keep=...)), or give " \
               "DynamicLossScale a lower minimum. " \
               f"gluon_amp.explain(net, batch, loss_fn, {self.minimum!r}) names the first node " \
               "that is not finite, and states if float32 is not finite either; " \
               "gluon_amp.xray(net, [batch], loss_fn) names what to keep"

    def state_dict(self) -> Dict[str, Any]:
        """Returns what changes during training."""
        return {"scale": self.scale, "finite_steps": self.finite_steps,
                "overflows": self.overflows, "settled": self.settled}

    def load_state_dict(self, state: Dict[str, Any]) -> DynamicLossScale:
        """Returns a new DynamicLossScale with a `state_dict`; this one does not change.

        Raises:
            ValueError: the state is damaged.
        """
        added = {"settled", "overflows"}  # since earlier versions
        if not isinstance(state, dict) or set(state) | added != {"scale", "finite_steps"} | added:
            raise ValueError("a DynamicLossScale's state has scale, finite_steps, overflows and "
                             f"settled. Received: {state!r}")
        settled = state.get("settled", True)
        if not isinstance(settled, bool):
            raise ValueError(f"settled must be True or False. Received: {settled!r}")
        overflows, finite_steps = (whole_number(state.get(name, 0), name, least=0)
                                   for name in ("overflows", "finite_steps"))
        return self._with(scale=self._within(state["scale"], "scale"), settled=settled,
                          overflows=overflows, finite_steps=finite_steps)

    def _within(self, scale: float, what: str) -> float:
        if not self.minimum <= positive_number(scale, what) <= self.maximum:
            raise ValueError(f"{what} must lie between minimum={self.minimum!r} and "
                             f"maximum={self.maximum!r}. Received: {scale!r}")
        return float(scale)

    def __repr__(self) -> str:
        return f"DynamicLossScale(scale={self.scale!r}, finite_steps={self.finite_steps})"


DynamicLossScale.__init__.__doc__ = "See the class for the arguments."


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
        """Returns an optimizer that divides by the scale, for `gluon.Trainer`.

        Args:
            name: as for `gluon_amp.optimizer`.
            rescale_grad: divided by the scale. (The Trainer divides by the batch size.)
            kwargs: the optimizer's other arguments.
        """
        optimizer = make_optimizer(name, rescale_grad=rescale_grad / self.scale, **kwargs)
        check_scalable(optimizer)
        optimizer.static_loss_scale = self.scale
        return optimizer

    def module_optimizer(self, name: str, *, batch_size: int, rescale_grad: float = 1.0,
                         **kwargs: Any) -> Optimizer:
        """Returns an optimizer that divides by the scale and the batch size, for `Module`.

        `Module` does not divide by the batch size.

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


StaticLossScale.__init__.__doc__ = "See the class for the arguments."
GivenLossScale = Union[LossScale, float, str, None]


def as_loss_scale(value: GivenLossScale) -> LossScale:
    """Returns the loss scale for an argument `loss_scale=`."""
    if value is None:
        return LossScale()
    if isinstance(value, LossScale):
        return value
    if isinstance(value, str) and value in ("auto", "dynamic"):
        return AutoLossScale() if value == "auto" else DynamicLossScale()
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return StaticLossScale(positive_number(value, "loss_scale"))
    raise ValueError('loss_scale takes "auto", "dynamic", a number, a StaticLossScale, a '
                     f"DynamicLossScale, or None for no scaling. Received: {value!r}")


def _no_weight(cls: type) -> str:
    return f"{cls.__name__} takes no weight, or does not use it, so it cannot be scaled by one: " \
           "use gluon_amp.Trainer, which scales gradients"
