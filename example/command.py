"""What the scripts here have in common as commands."""
import argparse
import os

from gluon_amp._mxnet import message, mx
from gluon_amp.cli import positive

__all__ = ["Help", "numbers", "positive", "run"]


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is written, and all defaults."""


def numbers(text):
    return [int(number) for number in text.split(",") if number]


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
