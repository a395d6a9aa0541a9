"""Mixed-precision training for Apache MXNet."""
from . import _mxnet  # noqa: F401  (first: every other module may then import from mxnet)
from .convert import convert, restore
from .cpu.library import KernelError
from .loss_scale import DynamicLossScale, LossScaleError, StaticLossScale
from .optimizer import optimizer
from .policy import Policy
from .trainer import Trainer, scale_loss

__version__ = "0.1.0"
__all__ = ["DynamicLossScale", "KernelError", "LossScaleError", "Policy", "StaticLossScale",
           "Trainer", "convert", "optimizer", "restore", "scale_loss"]
