"""The command line of a training script: its flags, its devices, its schedule, its errors."""
import argparse
import inspect
import json
import math
import os
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence

from .. import checks
from .._mxnet import message, mx
from ..checks import did_you_mean, positive
from ..files import must_exist
from ..policy import get_policy
from ..training.optimizer import optimizer_class
from ..training.static_pair import StaticLossScale


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it is written, and all defaults."""


class Parser(checks.Parser):
    """The parser of a script, with `--config FILE`: flags in a YAML or JSON file, by their names.

    What stands in the command line counts more than what stands in the file.
    """

    def __init__(self, description: Optional[str]):
        super().__init__(description=description, formatter_class=_Help)
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS,
                          help="a YAML or JSON file of flags, such as `batch-size: 64`; flags of "
                               "the command line count more")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The flags of the command line, behind those of the file."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config")
        found, rest = first.parse_known_args(args)
        words = args if found.config is None else [*self._from_file(found.config), *rest]
        flags = super().parse_args(words, namespace)
        if hasattr(flags, "config"):  # which argparse took in, and nobody has read
            self.error("--config is written in full, and in the command line")
        return flags

    def _from_file(self, path: str) -> List[str]:
        try:
            flags = _read_config(path)
        except (OSError, ValueError, ImportError) as error:
            self.error(f"--config: {' '.join(str(error).split())}")
        known = [flag for action in self._actions for flag in action.option_strings]
        words = []
        for name, value in flags.items():
            flag = "--" + str(name).lstrip("-").replace("_", "-")
            if flag not in known:
                self.error(f"--config {path}: there is no flag {flag}"
                           f"{did_you_mean(flag, known)}")
            words += _words(flag, value)
        return words


def _read_config(path: str) -> Any:
    must_exist(path)
    with open(path) as file:
        text = file.read()
    if path.endswith(".json"):
        flags = json.loads(text)
    else:
        try:
            import yaml
        except ImportError:
            raise ImportError("YAML needs a package: pip install pyyaml, or write JSON into a "
                              "file that ends with .json") from None
        try:
            flags = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(flags, dict):
        raise ValueError(f"{path} must hold names of flags and their values. "
                         f"Received: {type(flags).__name__}")
    return flags


def _words(flag: str, value: Any) -> List[str]:
    """A flag of a file as words of a command line."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return [f"{flag}={value}"]


# ---- types of flags

def _list_of(number: Callable[[str], Any], text: str, wanted: str) -> List[Any]:
    try:
        return [number(part) for part in text.split(",") if part]
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"must be {wanted}. Received: {text!r}") from None


def numbers(text: str) -> List[int]:
    """Whole numbers from 0 on, with commas between them."""
    return _list_of(lambda part: positive(part) if part.strip("0") else 0, text,
                    "whole numbers, such as 0,2")


def decimals(text: str) -> List[float]:
    """Numbers with commas between them."""
    return _list_of(float, text, "numbers, such as 0.5 or 0.5,0.4,0.4")


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on. Received: {text!r}")
    return int(text)


def decimal(text: str) -> float:
    """A finite number from 0 on."""
    return in_range(text, 0, math.inf, "must be a finite number from 0 on")


def share(text: str) -> float:
    """A number from 0 to 1."""
    return in_range(text, 0, 1, "must be a number from 0 to 1")


def above_0(text: str) -> float:
    """A finite number above 0."""
    return in_range(text, sys.float_info.min, math.inf, "must be a finite number above 0")


def in_range(text: str, least: float, most: float, wanted: str) -> float:
    """A finite number from `least` to `most`, or an error that says what is wanted."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (least <= number <= most and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{wanted}. Received: {text!r}")
    return number


def loss_scale(text: str) -> Any:
    """`dynamic`, `none`, or a number: what `Trainer` and `Module` take, with None for `none`."""
    if text in ("dynamic", "none"):
        return text
    try:
        return StaticLossScale(float(text)).scale
    except ValueError:
        raise argparse.ArgumentTypeError("takes a positive number, dynamic or none. "
                                         f"Received: {text}") from None


def add_gpus(parser: Any) -> None:
    """`--gpus 0,1`, and GluonCV's `--num-gpus 2` for the same."""
    add = parser.add_argument
    add("--gpus", type=numbers, default=[], help="such as 0 or 0,2,5; none: the CPU")
    add("--num-gpus", dest="gpus", metavar="N", default=argparse.SUPPRESS,
        type=lambda text: list(range(whole(text))), help="the first N GPUs")


# ---- what flags say

def devices_of(gpus: Sequence[int]) -> List[Any]:
    """The GPUs of these numbers, or the CPU if there are none."""
    if not gpus:
        return [mx.cpu()]
    if max(gpus) >= mx.context.num_gpus():
        raise ValueError(f"--gpus {max(gpus)}: MXNet sees {mx.context.num_gpus()} GPUs")
    return [mx.gpu(i) for i in gpus]


def is_float32(policy: str) -> bool:
    """Whether a policy of this name changes nothing."""
    return get_policy(policy).is_float32


def momentum_of(optimizer: str, momentum: float) -> Dict[str, float]:
    """The argument `momentum` for an optimizer of that name; nothing, if it takes none."""
    cls = optimizer_class(optimizer)
    return {"momentum": momentum} if "momentum" in inspect.signature(cls).parameters else {}


def schedule(lr: float, steps: int, epochs: int, mode: str = "step",
             decay_epochs: Sequence[float] = (), decay: float = 0.1, warmup_epochs: float = 0,
             warmup_lr: float = 0.0, warmup_strategy: str = "linear") -> Any:
    """A learning rate that warms up and then falls.

    Args:
        steps: updates in an epoch.
        mode: `step` multiplies the rate by `decay` after each of `decay_epochs`; `cosine` lets it
            fall to 0 in `epochs`.
        warmup_strategy: `linear` rises from `warmup_lr` to `lr`; `constant` stays at `warmup_lr`.
    """
    warmup_steps = int(warmup_epochs * steps)
    warmup = {"warmup_steps": warmup_steps, "warmup_begin_lr": warmup_lr,
              "warmup_mode": warmup_strategy}
    if mode == "cosine":
        if decay_epochs:
            raise ValueError("--lr-decay-epoch is for --lr-mode step. Received: --lr-mode cosine")
        if warmup_steps >= epochs * steps:
            raise ValueError(f"no epoch is left to the cosine: --warmup-epochs must be below the "
                             f"{epochs} epochs of the training. Received: {warmup_epochs:g}")
        return mx.lr_scheduler.CosineScheduler(epochs * steps, lr, **warmup)
    after = [int(epoch * steps) for epoch in decay_epochs] or [1 << 60]
    return mx.lr_scheduler.MultiFactorScheduler(after, decay, lr, **warmup)


def run(main: Callable[[], Any]) -> None:
    """Runs a script's `main`; an error that a user can mend is one line, without a traceback."""
    try:
        main()
    except (ValueError, AssertionError, OSError, mx.MXNetError) as error:
        if os.environ.get("DEBUG"):
            raise
        raise SystemExit(f"{message(error)} (DEBUG=1 shows where)") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
