"""The command lines of the training scripts: a parser, types of flags, and common flags."""
import argparse
import contextlib
import math
import os
import re

import gluon_amp as amp  # before mxnet
import mxnet as mx


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints a script's docstring as it is, and the defaults of flags that have one."""

    def _get_help_string(self, action):
        if "(default" in action.help or action.default in (False, None, "", []):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=HelpFormatter,
                         allow_abbrev=False)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} (--help shows more)\n")


def run(main):
    """Runs a script's `main`; prints user errors in one line, without a traceback."""
    try:
        main()
    except (ValueError, AssertionError, OSError, ImportError, mx.MXNetError,
            amp.LossScaleError) as error:
        if os.environ.get("DEBUG"):
            raise
        raise SystemExit(f"{first_line(error)} (DEBUG=1 shows where)") from None


def first_line(error):
    """Returns the message of an error, without MXNet's traceback and source location."""
    lines = [line for line in str(error).splitlines()
             if line.strip() and not line.startswith(("Traceback", "  File"))]
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"^MXNetError: |\[[\d:]+\] \S+: ", "", text).rstrip(" .")


# ---- types of flags: the `type=` of `add_argument`

def flag_type(convert, is_valid, requirement):
    """Returns a function that converts a flag's text, and refuses a value that is not valid."""
    def converted(text):
        with contextlib.suppress(ValueError):
            value = convert(text)
            if is_valid(value):
                return value
        raise argparse.ArgumentTypeError(f"{requirement}. Received: {text!r}")
    return converted


def list_of(number):
    return lambda text: [number(part) for part in text.split(",") if part]


def parsed_loss_scale(text):
    if text in ("auto", "dynamic"):
        return text
    return None if text == "none" else amp.StaticLossScale(float(text)).scale


positive_int = flag_type(int, lambda n: n >= 1, "must be an integer >= 1")
non_negative_int = flag_type(int, lambda n: n >= 0, "must be an integer >= 0")
seed = flag_type(int, lambda n: 0 <= n < 2**31, "must be an integer from 0 to 2147483647")
non_negative_float = flag_type(float, lambda x: 0 <= x < math.inf, "must be a finite number >= 0")
positive_float = flag_type(float, lambda x: 0 < x < math.inf, "must be a finite number > 0")
fraction = flag_type(float, lambda x: 0 <= x <= 1, "must be a number from 0 to 1")
integers = flag_type(list_of(int), lambda values: min(values, default=0) >= 0,
                     "must be integers >= 0, such as 0,2")
channel_means = flag_type(
    list_of(float), lambda values: len(values) in (1, 3) and all(map(math.isfinite, values)),
    "must be one finite number or three, such as 0.5 or 0.5,0.4,0.4")
channel_deviations = flag_type(channel_means, lambda values: min(values) > 0, "must be above 0")
new_file = flag_type(str, lambda path: not os.path.isdir(path) and os.path.isdir(
    os.path.dirname(os.path.realpath(path))), "must be a file in a folder that exists")
loss_scale = flag_type(parsed_loss_scale, lambda value: True,
                       "takes auto, dynamic, none or a positive number")


# ---- flags of several scripts; second names are those of the other of MXNet and GluonCV

def add_device_flags(parser):
    """Adds the loss scale, the seed and the GPUs."""
    flag = parser.add_argument_group("devices and numbers").add_argument
    flag("--loss-scale", type=loss_scale, default="auto", help="auto, dynamic, a number or none")
    flag("--seed", type=seed, default=0, help="seed of all random numbers")
    flag("--gpus", type=integers, default=[], help="GPUs, such as 0 or 0,2,5 (default: the CPU)")
    flag("--num-gpus", type=lambda text: list(range(non_negative_int(text))), dest="gpus",
         metavar="N", default=argparse.SUPPRESS, help="use the first N GPUs")


def add_training_flags(parser):
    """Adds the flags of scripts that train for epochs."""
    add_device_flags(parser)
    flag = parser.add_argument_group("training").add_argument
    flag("--batch-size", type=positive_int, default=64, help="of a process, over all its GPUs")
    flag("--epochs", "--num-epochs", type=positive_int, default=10,
         help="epochs; more with --resume extend a finished run")
    flag("--optimizer", default="sgd", help="an optimizer of MXNet, or adamw")
    flag("--momentum", "--mom", type=fraction, default=0.9, help="for optimizers that have one")
    flag("--wd", type=non_negative_float, default=1e-4, help="weight decay")
    flag("--lr", type=non_negative_float, default=0.1, help="learning rate")
    flag("--lr-mode", choices=("step", "cosine"),
         help="schedule (default: step with --lr-decay-epoch, else cosine)")
    flag("--lr-decay-epoch", "--lr-step-epochs", type=integers, default=[],
         help="epochs after which step decays the learning rate")
    flag("--lr-decay", "--lr-factor", type=non_negative_float, default=0.1, help="factor of step")
    flag("--warmup-epochs", type=non_negative_float, default=0, help="number of warm-up epochs")
    flag("--warmup-lr", type=non_negative_float, default=0.0, help="where the warm-up starts")
    flag("--warmup-strategy", choices=("linear", "constant"), default="linear",
         help="constant stays at --warmup-lr")
    flag("--kvstore", "--kv-store", default="device",
         choices=("local", "device", "dist_sync", "dist_device_sync", "horovod"),
         help="all-reduce in this process, or over many workers (docs/distributed.md)")
    flag = parser.add_argument_group("logs and X-rays").add_argument
    flag("--log-interval", "--disp-batches", type=positive_int, default=20,
         help="number of batches between two log lines")
    flag("--tensorboard", help="folder for TensorBoard's files (pip install tensorboard)")
    flag("--claim-speed", action="store_true",
         help="nothing else runs on this machine: reports compare speed")
    flag("--xray", help="folder for an X-ray of each epoch's first steps (docs/xray.md)")
    flag("--xray-steps", type=positive_int, default=3, help="number of steps of an X-ray")
