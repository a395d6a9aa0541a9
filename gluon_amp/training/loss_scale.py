"""Loss scales: none, dynamic, and static.

Gradients below 3e-8 are 0 in float16. So the loss is multiplied by the scale before the backward
pass, and the update divides gradients by it. The dynamic scale is found by trial:

    while gradients are finite: grows every `growth_interval` steps, up to `maximum`
    after an overflow:          backs off, down to `minimum`; there, an error
    until it is settled:        searches instead, with further backward passes in the same step
"""
from __future__ import annotations

import inspect
import itertools
import logging
import math
import numbers
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, Union

from mxnet.gluon.loss import Loss, SDMLLoss

from ..annotations import Array, Optimizer
from ..checks import in_names, positive_number, whole_number
from .optimizer import check_scalable
from .optimizer import optimizer as make_optimizer

log = logging.getLogger("gluon_amp")


class LossScaleError(RuntimeError):
    """The gradients overflow at every loss scale, or the loss itself is not finite."""


def as_power(scale: float) -> str:
    """Formats a loss scale: powers of two as 2^-14."""
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{scale:g}"


# A search divides the scale by this until nothing overflows, then tries 4 times and 2 times the
# result. From 2^16 it reaches 1 in four divisions.
_LARGE_STEP = 2.0 ** 4
# The most backward passes of a search: the first, four divisions, and one more. If the divisions
# use all, the result may be too small by up to 2^3, and grows later.
_PASSES = 6
# The scale is settled after this many finite steps in a row: overflows are rare then, and a skipped
# step costs less than a check after each backward pass.
_SETTLED_AFTER = 100


def lower_scales(scale: float, minimum: float) -> Iterator[float]:
    """Yields the lower loss scales that a search tries, down to the smallest."""
    while scale > minimum:
        scale = max(scale / _LARGE_STEP, minimum)
        yield scale


class LossScale:
    """No loss scaling: the scale is always 1. The base class of other scales.

    Attributes:
        scale: multiplies the gradients of the next step.
        scales: whether gradients are scaled.
        settled: whether the search of the first scale is over.
        kind: the name in messages.
    """
    scale: float
    scales = False
    settled = True

    def __init__(self) -> None:
        self.scale = 1.0

    @property
    def kind(self) -> str:
        return "no loss scale"

    def update(self, finite: bool, parameters: Iterable[str] = ()) -> bool:
        """Updates the scale after a step. Returns False if it never changes."""
        return False

    def _search(self, overflows: Callable[[float], bool]) -> int:
        """See `DynamicLossScale._search`."""
        return 0

    def _nothing_fits(self, parameters: Iterable[str]) -> str:
        """See `DynamicLossScale._nothing_fits`."""
        return ""

    def _lower_to(self, scale: float) -> None:
        """See `DynamicLossScale._lower_to`."""

    def state_dict(self) -> Dict[str, Any]:
        """Returns what changes during training."""
        return {}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Loads nothing; warns that a dynamic scale's state is ignored."""
        if state:
            log.warning("the file's dynamic loss scale, %s, is ignored: here loss_scale is %s. "
                        "loss_scale='dynamic' loads it", format(state["scale"], "g"), self)

    def __repr__(self) -> str:
        return "None"  # the value of `loss_scale=`


class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite and backs off after an overflow.

    Each step of a Trainer or Module updates it, so that each needs an object of its own.

    Args:
        initial: the first scale.
        growth_factor: multiplies the scale after `growth_interval` finite steps in a row.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: the number of finite steps before the scale grows.
        minimum: the smallest scale. An overflow there raises LossScaleError.
        maximum: the largest scale.
        hysteresis: the number of overflows since the last growth at which the scale backs off.
            Earlier overflows only skip their step. The search of the first scale ignores it.

    Attributes:
        settled: whether the search of the first scale is over: after 100 (or `growth_interval`)
            finite steps in a row. Set it to True to skip the search.
    """

    scales = True
    kind = "a dynamic loss scale"

    def __init__(self, initial: float = 2.0 ** 16, growth_factor: float = 2.0,
                 backoff_factor: float = 0.5, growth_interval: int = 2000,
                 minimum: float = 1.0, maximum: float = 2.0 ** 24,
                 hysteresis: int = 1) -> None:
        """See the class for the arguments."""
        self.minimum = positive_number(minimum, "minimum")
        self.maximum = positive_number(maximum, "maximum")
        if self.minimum > self.maximum:
            raise ValueError("minimum must not be above maximum. "
                             f"Received: minimum={minimum!r}, maximum={maximum!r}")
        self.scale = self._within(initial, "initial")
        self.growth_factor = positive_number(growth_factor, "growth_factor")
        if self.growth_factor <= 1:
            raise ValueError(f"growth_factor must be above 1. Received: {growth_factor!r}")
        self.backoff_factor = positive_number(backoff_factor, "backoff_factor")
        if self.backoff_factor >= 1:
            raise ValueError(f"backoff_factor must be below 1. Received: {backoff_factor!r}")
        self.growth_interval = whole_number(growth_interval, "growth_interval", least=1)
        self.hysteresis = whole_number(hysteresis, "hysteresis", least=1)
        self.finite_steps = 0  # in a row, since the scale last changed
        self.overflows = 0  # since the scale last grew; at most hysteresis - 1
        self.settled = False

    def update(self, finite: bool, parameters: Iterable[str] = ()) -> bool:
        """Updates the scale after a step.

        Args:
            finite: whether all gradients were finite.
            parameters: the names of those whose gradients were not, for the error.

        Returns:
            Whether the scale ever changes, which only a static one does not.

        Raises:
            LossScaleError: an overflow at the smallest scale.
        """
        if finite:
            self.finite_steps += 1
            self.settled |= self.finite_steps >= min(_SETTLED_AFTER, self.growth_interval)
            if self.finite_steps >= self.growth_interval:
                self.scale = min(self.scale * self.growth_factor, self.maximum)
                self.finite_steps = self.overflows = 0
        elif self.overflows + 1 < self.hysteresis:
            self.overflows += 1
            self.finite_steps = 0
        elif self.scale <= self.minimum:
            raise LossScaleError(self._nothing_fits(parameters))
        else:
            self.scale = max(self.scale * self.backoff_factor, self.minimum)
            self.finite_steps = 0
        return True

    def _nothing_fits(self, parameters: Iterable[str]) -> str:
        """Returns the error message for gradients that overflow at the smallest scale."""
        return f"gradients are not finite{in_names(parameters)} at the smallest loss scale, " \
               f"{self.minimum!r}: normalize the labels, take a mean instead of a sum in the " \
               "loss, keep these layers in float32 (convert(keep=...)), or give " \
               "DynamicLossScale a lower minimum. " \
               f"gluon_amp.explain(net, batch, loss_fn, {self.minimum!r}) names the first node " \
               "that is not finite, and states if float32 is not finite either; " \
               "gluon_amp.xray(net, [batch], loss_fn) names what to keep"

    def _search(self, overflows: Callable[[float], bool]) -> int:
        """Searches the scale of a step whose backward pass overflowed at the current one.

        It divides the scale until nothing overflows, then tries larger scales in between.

        Args:
            overflows: runs a backward pass at a scale, and returns whether gradients overflow. Its
                last call has the resulting scale.

        Returns:
            The number of backward passes, the first included; 0 if no scale was found. In that
            case the scale does not change, or is lower if the passes did not reach the minimum.
        """
        too_high, passes, last = self.scale, 1, self.scale
        low = None
        for last in itertools.islice(lower_scales(self.scale, self.minimum), _PASSES - 1):
            passes += 1
            if not overflows(last):
                low = last
                break
        if low is None:
            # if even the minimum overflows, a bad batch may be the cause: the step only backs off
            self.scale = self.scale if last <= self.minimum else last
            return 0
        growth = _LARGE_STEP ** 0.5
        while growth >= 2 and passes + 2 <= _PASSES:  # one at a larger scale, and one to return
            if low * growth < too_high:
                last = low * growth
                passes += 1
                if overflows(last):
                    too_high = last
                else:
                    low = last
            growth **= 0.5
        self.scale = low
        if self.scale != last:
            passes += 1
            overflows(self.scale)
        self.finite_steps = 0
        return passes

    def _lower_to(self, scale: float) -> None:
        """Lowers the scale to the result of another search."""
        if scale < self.scale:
            self.scale, self.finite_steps = max(scale, self.minimum), 0

    def state_dict(self) -> Dict[str, Any]:
        """Returns what changes during training."""
        return {"scale": self.scale, "finite_steps": self.finite_steps,
                "overflows": self.overflows, "settled": self.settled}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Loads a `state_dict`. A bad one raises ValueError and changes nothing."""
        added = {"settled", "overflows"}  # since earlier versions
        if not isinstance(state, dict) or set(state) | added != {"scale", "finite_steps"} | added:
            raise ValueError("a DynamicLossScale's state has scale, finite_steps, overflows and "
                             f"settled. Received: {state!r}")
        settled = state.get("settled", True)  # earlier versions had no search
        if not isinstance(settled, bool):
            raise ValueError(f"settled must be True or False. Received: {settled!r}")
        scale = self._within(state["scale"], "scale")
        overflows = whole_number(state.get("overflows", 0), "overflows", least=0)
        self.finite_steps = whole_number(state["finite_steps"], "finite_steps", least=0)
        self.scale, self.settled = scale, settled
        self.overflows = min(overflows, self.hysteresis - 1)

    def _within(self, scale: float, what: str) -> float:
        if not self.minimum <= positive_number(scale, what) <= self.maximum:
            raise ValueError(f"{what} must lie between minimum={self.minimum!r} and "
                             f"maximum={self.maximum!r}. Received: {scale!r}")
        return float(scale)

    def __repr__(self) -> str:
        return f"DynamicLossScale(scale={self.scale!r}, finite_steps={self.finite_steps})"


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
        """The loss scale in words."""
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
        """Returns an optimizer that divides by the scale, for `gluon.Trainer`.

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
    if isinstance(value, str) and value == "dynamic":
        return DynamicLossScale()
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return StaticLossScale(positive_number(value, "loss_scale"))
    raise ValueError('loss_scale takes "dynamic", a number, a StaticLossScale, a DynamicLossScale, '
                     f"or None for no scaling. Received: {value!r}")


def _no_weight(cls: type) -> str:
    return f"{cls.__name__} takes no weight, or does not use it, so it cannot be scaled by one: " \
           "use gluon_amp.Trainer, which scales gradients"
