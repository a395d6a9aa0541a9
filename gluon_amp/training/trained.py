"""What a Trainer and a Module show of their step."""
from typing import Optional, Tuple

from .loss_scale import LossScale
from .step import Step


class Trained:
    """What a Trainer and a Module show of their step."""

    _step: Step

    @property
    def scaling(self) -> LossScale:
        """The loss scale with its limits."""
        return self._step.loss_scale

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 without scaling."""
        return self.scaling.scale

    @property
    def skipped(self) -> int:
        """The number of skipped steps."""
        return self._step.skipped

    @property
    def overflowed(self) -> Tuple[str, ...]:
        """The names of parameters whose gradients are not finite.

        These are pending gradients or else those of the last step.
        """
        return self._step.overflowed

    @property
    def gradient_norm(self) -> Optional[float]:
        """The norm of all gradients of the last step together, as the update sees them."""
        return self._step.gradient_norm
