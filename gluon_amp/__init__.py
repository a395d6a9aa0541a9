"""Mixed-precision training for Apache MXNet."""
from typing import NoReturn

from . import data  # first: its import is that of MXNet, which other modules import by name
from .cpu import library
from .gluon.convert import convert, restore
from .gluon.freeze import freeze
from .gluon.parameter import wrap_mxnet
from .gluon.records import wrap_load_parameters
from .graph.keep import ops
from .graph.operators import engine_columns
from .inspection import overflows
from .inspection.monitor import Monitor
from .inspection.xray import explain, xray
from .onnx.export import export_onnx
from .policy import Policy
from .reports import report
from .symbolic.convert import convert_model, convert_symbol, refuse_in_feed_forward
from .symbolic.module import BucketingModule, Module
from .training.averaged_weights import AveragedWeights
from .training.loss_scale import DynamicLossScale, LossScaleError, StaticLossScale
from .training.lr_find import lr_find
from .training.optimizer import optimizer
from .training.resume import load_checkpoint, save_checkpoint
from .training.step import Step
from .training.trainer import Trainer, backward, scale_loss
from .version import __version__ as __version__

library.start(engine_columns())
wrap_mxnet()
wrap_load_parameters()
refuse_in_feed_forward()
Step.after_overflow = overflows.warn

__all__ = ["AveragedWeights", "BucketingModule", "DynamicLossScale", "LossScaleError", "Module",
           "Monitor", "Policy", "StaticLossScale", "Trainer", "backward", "convert",
           "convert_model", "convert_symbol", "data", "explain", "export_onnx", "freeze",
           "load_checkpoint", "lr_find", "ops", "optimizer", "report", "restore",
           "save_checkpoint", "scale_loss", "xray"]

# Other names, and the modules that have them.
_MODULES = {"BatchProcessor": "training.estimator", "Horovod": "parallel",
            "KernelError": "cpu.library", "Log": "reports", "RanksDifferError": "parallel",
            "Speedometer": "symbolic.module", "average_statistics": "parallel",
            "read_logs": "reports"}

# Names of other toolkits and names that are removed, and what to use instead.
_INSTEAD = {
    "autocast": "gluon_amp.convert(net) converts a network once, and no context is needed",
    "GradScaler": "gluon_amp.Trainer(params, optimizer) scales the loss",
    "Format": "Formats are the names 'float32', 'float16' and 'bfloat16'",
    "tensor_core_dot": "The sums of Tensor Cores are a study, results/tensor_cores",
    "gpu_trace": "The software GPU is a part of the checkout, tests/software_gpu",
    "types": "The command gluon-amp types lists what each operator of a network runs in",
    "search": "gluon_amp.xray(net, batches, loss_fn).keep names what stays in float32",
    "gradient_penalty": "Copy example/gradient_penalty.py and kinks.py of the checkout",
    "recipes": "The scripts' module is example/recipes.py of the checkout"}

# Names of mx.contrib.amp, and their equivalents.
_CONTRIB = {
    "init": "No call is needed: gluon_amp.convert(net) converts one network after its creation",
    "init_trainer": "Use gluon_amp.Trainer(...) instead of gluon.Trainer(...)",
    "unscale": "Use trainer.unscale(), of a gluon_amp.Trainer",
    "convert_hybrid_block": "Use gluon_amp.convert(net)",
    "convert_bucketing_module": "Use gluon_amp.BucketingModule, of symbols that "
                                "gluon_amp.convert_symbol has converted",
    **dict.fromkeys(("list_lp16_ops", "list_fp32_ops", "list_lp16_fp32_ops",
                     "list_conditional_fp32_ops", "list_widest_type_cast",
                     "list_loss_output_functions", "list_lp16_use_fp32_params"),
                    "Use keep= of gluon_amp.convert; the command gluon-amp types lists what each "
                    "operator of a network runs in")}


def __getattr__(name: str) -> NoReturn:
    hint = ""
    if name in _MODULES:
        hint = f". Its module has it: from gluon_amp.{_MODULES[name]} import {name}"
    elif name in _INSTEAD:
        hint = f". {_INSTEAD[name]}"
    elif name in _CONTRIB:
        hint = f", which mx.contrib.amp has. {_CONTRIB[name]}"
    raise AttributeError(f"module 'gluon_amp' has no attribute {name!r}{hint}")
