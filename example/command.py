"""What the scripts here have in common as commands."""
import argparse
import os

from gluon_amp._mxnet import message, mx
from gluon_amp.tools.cli import positive


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is written, and all defaults."""


def _list_of(number, text, wanted):
    try:
        return [number(part) for part in text.split(",") if part]
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"must be {wanted}. Received: {text!r}") from None


def _from_0(text):
    return positive(text) if text.strip("0") else 0


def numbers(text):
    return _list_of(_from_0, text, "whole numbers, such as 0,2")


def decimals(text):
    return _list_of(float, text, "numbers, such as 0.5 or 0.5,0.4,0.4")


def devices_of(gpus):
    if not gpus:
        return [mx.cpu()]
    if max(gpus) >= mx.context.num_gpus():
        raise SystemExit(f"--gpus {max(gpus)}: MXNet sees {mx.context.num_gpus()} GPUs")
    return [mx.gpu(i) for i in gpus]


def run(main):
    """What a user can mend is one line."""
    try:
        main()
    except (ValueError, AssertionError, OSError, mx.MXNetError) as error:
        if os.environ.get("DEBUG"):
            raise
        raise SystemExit(f"{message(error)} (DEBUG=1 shows where)") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
