"""Runs a command with MXNet's CUDA build on a recording GPU.

    python -m gluon_amp.cuda [--devices N] [--capability SM[,SM...]] [--cudnn {8,9}] [--log FILE]
                             [--compute] [--build cu112] COMMAND ...
"""
import argparse
import os
from pathlib import Path
from typing import Optional, Sequence

from .environment import BUILDS, environment


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gluon_amp.cuda")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--capability", type=lambda text: [*map(int, text.split(","))],
                        default=[70], metavar="SM[,SM...]",
                        help="compute capability of the GPUs, such as 90; or of each: 86,90")
    parser.add_argument("--cudnn", type=int, choices=(8, 9), default=8,
                        help="version of cuDNN; gluon_amp must be imported for 9")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--compute", action="store_true",
                        help="execute the recorded calls on the host")
    parser.add_argument("--build", choices=BUILDS, default="cu112", help="MXNet's CUDA wheel")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("a command is required")
    made = environment(options.log, options.devices, options.capability,
                       compute=options.compute, cudnn=options.cudnn, build=options.build)
    os.execvpe(options.command[0], options.command, made)


if __name__ == "__main__":
    main()
