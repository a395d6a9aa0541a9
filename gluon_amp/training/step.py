"""A loss scale at work: which steps are skipped, why, and what becomes of the scale."""
import logging
from typing import Any, Dict, Optional, Tuple

from .loss_scale import DynamicLossScale, LossScale, LossScaleError, of

log = logging.getLogger("gluon_amp")

# Steps skipped in a row, before an error, where no scale can back off: as many as a
# dynamic scale takes from its first value down to its floor.
PATIENCE = 16


class Scaling:
    """What a Trainer and a Module share.

    Attributes:
        scale: the loss scale, or None for no scaling.
        skipped: how many steps were.
        overflowed: the parameters whose gradients were not finite in the last step.
    """

    def __init__(self, scale: Optional[LossScale]) -> None:
        self.scale = scale
        self.skipped = 0
        self.in_a_row = 0
        self.overflowed: Tuple[str, ...] = ()

    @property
    def on(self) -> bool:
        return self.scale is not None

    @property
    def value(self) -> float:
        """What gradients are multiplied by."""
        return 1.0 if self.scale is None else self.scale.scale

    def update(self) -> None:
        """Takes in a step whose gradients were finite."""
        self.in_a_row, self.overflowed = 0, ()
        if isinstance(self.scale, DynamicLossScale):
            self.scale.update(True)

    def skip(self, names: Tuple[str, ...], loss_is_finite: bool) -> None:
        """Takes in a step that was skipped. Where no scale helps, raises LossScaleError."""
        before = self.value
        self.skipped += 1
        self.in_a_row += 1
        self.overflowed = names
        if not loss_is_finite:
            reason = "the loss itself is not finite, which no loss scale causes or mends: " \
                     "look at the data, the learning rate, and what overflows in the network"
        elif isinstance(self.scale, DynamicLossScale):
            self.scale.update(False, names)
            log.info("step skipped: gradients not finite%s; loss scale %g -> %g", of(names),
                     before, self.value)
            return
        else:
            reason = f"gradients are not finite{of(names)} at the loss scale {before:g}, which " \
                     "is static: lower it, or use loss_scale='dynamic'"
        if self.in_a_row >= PATIENCE:
            raise LossScaleError(f"{self.in_a_row} steps skipped in a row: {reason}")
        log.warning("step skipped: %s", reason)

    def state(self) -> Dict[str, Any]:
        """For files."""
        return {"skipped": self.skipped, "skipped_in_a_row": self.in_a_row,
                "loss_scale": self.scale.state_dict()
                if isinstance(self.scale, DynamicLossScale) else None}

    def load(self, state: Dict[str, Any]) -> None:
        """What `state` gave, or nothing for a file of MXNet's; an error changes nothing."""
        saved = state.get("loss_scale")
        if saved and isinstance(self.scale, DynamicLossScale):
            self.scale.load_state_dict(saved)
        elif saved:
            log.warning("the file's dynamic loss scale, %g, is left: here loss_scale is %s. "
                        "loss_scale='dynamic' takes it over", saved["scale"], self.scale)
        self.skipped = state.get("skipped", 0)
        self.in_a_row = state.get("skipped_in_a_row", 0)
        self.overflowed = ()


class Scaled:
    """In front of what keeps a `_scaling`: a Trainer, a Module."""

    _scaling: Scaling

    @property
    def loss_scale(self) -> float:
        """The scale that the next step uses; 1 without scaling."""
        return self._scaling.value

    @property
    def skipped(self) -> int:
        """How many steps were skipped."""
        return self._scaling.skipped

    @property
    def overflowed(self) -> Tuple[str, ...]:
        """Names of the parameters whose gradients were not finite in the last step."""
        return self._scaling.overflowed
