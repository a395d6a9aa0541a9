"""What training scripts share: a command line, images, networks to start from, many ranks, logs.

The scripts in `example/` are written with these; so can yours be.
"""
from ..files import replace_text
from ..policy import NAMES as POLICIES
from . import images
from .adding_module import AddingModule
from .command import (
    Parser,
    above_0,
    add_gpus,
    decimal,
    decimals,
    devices_of,
    is_float32,
    loss_scale,
    momentum_of,
    numbers,
    positive,
    run,
    schedule,
    share,
    whole,
)
from .networks import (
    check_network,
    small_network,
    tensor_core_hints,
    without_head,
    zoo_network,
)
from .progress import Progress
from .ranks import Part, Ranks, ValidationPart
from .record_files import Unpadded, records, records_of_part
from .run_folder import RunFolder, hold
from .training_log import ModuleLog, TrainingLog, gradient_norm, read_log
from .xray_epoch import XrayedIter, add_xray_arguments, xray_epoch

__all__ = ["POLICIES", "AddingModule", "ModuleLog", "Parser", "Part", "Progress", "Ranks",
           "RunFolder", "TrainingLog", "Unpadded", "ValidationPart", "XrayedIter", "above_0",
           "add_gpus", "add_xray_arguments", "check_network", "decimal", "decimals", "devices_of",
           "gradient_norm", "hold", "images", "is_float32", "loss_scale", "momentum_of", "numbers",
           "positive", "read_log", "records", "records_of_part", "replace_text", "run", "schedule",
           "share", "small_network", "tensor_core_hints", "whole", "without_head", "xray_epoch",
           "zoo_network"]
