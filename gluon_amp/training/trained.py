"""What a Trainer and a Module show of their step."""
from typing import Any, List, Optional, Tuple

from ..parallel import consistency
from ..parallel.sync import Workers
from .loss_scale import LossScale
from .step import Stage, Step


class Trained:
    """What a Trainer and a Module show of their step."""

    _step: Step
    _workers: Workers
    _has_compared = False  # whether a step has compared ranks since the training began
    _updating_here: str  # the setting with which ranks update

    def _compared_state(self) -> List[Any]:
        """Returns names and values that are the same on all ranks."""
        raise NotImplementedError

    @property
    def scaling(self) -> LossScale:
        """The loss scale with its limits."""
        return self._step.loss_scale

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 without scaling."""
        return self.scaling.scale

    @property
    def max_norm(self) -> Optional[float]:
        """The norm to which each update is clipped; None for no clipping."""
        return self._step.max_norm

    @property
    def pending(self) -> bool:
        """Whether gradients of a backward pass wait for the update."""
        return self._step.stage is not Stage.EMPTY

    @property
    def updated(self) -> bool:
        """Whether the last step updated; True before the first."""
        return self._step.updated

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
        """The norm of all gradients of the last step together, times `rescale_grad`.

        A Trainer divides the optimizer's `rescale_grad` by the batch size. The norm is unscaled and
        not clipped; infinite or NaN if a step was skipped for that, and None before the first.
        Without a loss scale and `clip_norm`, reading it computes it, before the next backward pass.

        Raises:
            RuntimeError: the store or servers have the sums of gradients.
        """
        if self._workers.updates:
            raise RuntimeError("gradient_norm needs gradients that this process sums, and the "
                               "store sums them. Valid: a loss scale, clip_norm, or "
                               f"{self._updating_here}")
        return self._step.gradient_norm

    def check_ranks(self) -> None:
        """Compares optimizer, weights, master weights and loss scale over all ranks.

        All ranks must call it; the first step and `average_statistics` do. Moving averages are
        not compared, because each rank computes them from its own data.

        Raises:
            RuntimeError: servers update the weights.
            RanksDifferError: names the first difference.
        """
        if self._workers.count > 1 and not self._workers.exchange:
            raise RuntimeError(f"check_ranks() needs {self._updating_here}")
        consistency.compare(self._workers, self._compared_state())
