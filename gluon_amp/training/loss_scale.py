"""The dynamic loss scale: pure arithmetic, no arrays.

Float16 gradients below 6e-8 are 0. So the loss is scaled up before the backward pass,
and the update scales down again. Both must use one number. This one is found by trying:

    while gradients are finite: grow every `growth_interval` steps, up to `maximum`
    when they are not:          back off, down to `minimum`; there, an error
"""
from typing import Any, Dict, Iterable

from ..checks import in_names, positive_number, whole_number


class LossScaleError(RuntimeError):
    """No loss scale makes the gradients finite."""


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
            raise LossScaleError(f"gradients are not finite{in_names(parameters)} at the "
                                 f"smallest loss scale, {self.minimum!r}: their float16 numbers "
                                 "overflow without any scaling. Keep these layers in float32 "
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
        if not self.minimum <= positive_number(scale, what) <= self.maximum:
            raise ValueError(f"{what} must lie between minimum={self.minimum!r} and "
                             f"maximum={self.maximum!r}. Received: {scale!r}")
        return float(scale)

    def __repr__(self) -> str:
        return f"DynamicLossScale(scale={self.scale!r}, finite_steps={self.finite_steps})"
