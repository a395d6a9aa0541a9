"""Mixed-precision training for Apache MXNet."""
from . import _mxnet  # noqa: F401, I001  (first: every other module may import from mxnet)
from . import data
from .convert import convert, restore
from .cpu import library
from .cpu.library import KernelError
from .loss_scale import DynamicLossScale, LossScaleError, StaticLossScale
from .lr_find import lr_find
from .module import BucketingModule, Module, Speedometer
from .optimizer import optimizer
from .policy import Policy
from .report import report
from .symbol import convert_model, convert_symbol
from .trainer import Trainer, scale_loss

library.start()

__version__ = "0.1.0"
__all__ = ["BucketingModule", "DynamicLossScale", "KernelError", "LossScaleError", "Module",
           "Policy", "Speedometer", "StaticLossScale", "Trainer", "convert", "convert_model",
           "convert_symbol", "data", "lr_find", "optimizer", "report", "restore",
           "scale_loss"]
