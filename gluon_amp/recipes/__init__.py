"""What training scripts share: a command line, networks to start from, and a log.

The scripts in `example/` are written with these; so can yours be.
"""
from .command import Parser, decimals, devices_of, loss_scale, numbers, positive, run, schedule
from .networks import small_network, tensor_core_hints, without_head, zoo_network
from .ranks import Part, Ranks, ValidationPart
from .record_files import Unpadded, records, records_of_part
from .training_log import ModuleLog, TrainingLog, gradient_norm, read_log, replace_text

__all__ = ["ModuleLog", "Parser", "Part", "Ranks", "TrainingLog", "Unpadded", "ValidationPart",
           "decimals", "devices_of", "gradient_norm", "loss_scale", "numbers", "positive",
           "read_log", "records", "records_of_part", "replace_text", "run", "schedule",
           "small_network", "tensor_core_hints", "without_head", "zoo_network"]
