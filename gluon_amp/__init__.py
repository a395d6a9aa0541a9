"""Mixed-precision training for Apache MXNet."""
from . import _mxnet  # noqa: F401, I001  (first: every other module may import from mxnet)
from . import data
from .formats import Format
from .gluon.convert import convert, restore
from .gpu.trace import gpu_trace
from .cpu import library
from .cpu.library import KernelError
from .parallel.consistency import RanksDifferError, average_statistics
from .training.estimator import BatchProcessor
from .parallel.horovod import Horovod
from .training.loss_scale import DynamicLossScale, LossScaleError
from .training.lr_find import lr_find
from .symbolic.module import BucketingModule, Module, Speedometer
from .training.optimizer import optimizer
from .onnx.export import export_onnx
from .policy import Policy
from .report import read as read_logs, report
from .symbolic.convert import convert_model, convert_symbol
from .tensor_core_math import tensor_core_dot
from .training.static_pair import StaticLossScale
from .training.scale_loss import scale_loss
from .training.trainer import Trainer
from .parallel.supervise import RankEndedError
from .inspection.search import search
from .inspection.types import types
from .inspection.view import explain, xray
from .version import __version__ as __version__
from . import recipes

library.start()

__all__ = ["BatchProcessor", "BucketingModule", "DynamicLossScale", "Format", "Horovod",
           "KernelError", "LossScaleError", "Module", "Policy", "RankEndedError",
           "RanksDifferError", "Speedometer", "StaticLossScale", "Trainer", "average_statistics",
           "convert", "convert_model", "convert_symbol", "data", "explain", "export_onnx",
           "gpu_trace", "lr_find", "optimizer", "read_logs", "recipes", "report", "restore",
           "scale_loss", "search", "tensor_core_dot", "types", "xray"]
