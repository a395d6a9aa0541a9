"""Runs a command with MXNet's CUDA build on a software GPU.

    python tests/software_gpu [--devices N] [--capability SM[,SM...]] [--cudnn {8,9}] [--log FILE]
                              [--compute] COMMAND ...
"""
import argparse
import os
import sys
from pathlib import Path


def parser():
    options = argparse.ArgumentParser(prog="python tests/software_gpu")
    options.add_argument("--devices", type=int, default=1)
    options.add_argument("--capability", type=lambda text: [*map(int, text.split(","))],
                         default=[70], metavar="SM[,SM...]",
                         help="compute capability of the GPUs, such as 90; or of each: 86,90")
    options.add_argument("--cudnn", type=int, choices=(8, 9), default=8,
                         help="version of cuDNN; gluon_amp must be imported for 9")
    options.add_argument("--log", type=Path)
    options.add_argument("--compute", action="store_true",
                         help="execute the recorded calls on the host")
    options.add_argument("command", nargs=argparse.REMAINDER)
    return options


def main(arguments=None):
    from software_gpu.environment import environment
    options = parser().parse_args(arguments)
    if not options.command:
        parser().error("a command is required")
    variables = environment(options.log, options.devices, options.capability,
                            compute=options.compute, cudnn=options.cudnn)
    os.execvpe(options.command[0], options.command, variables)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    main()
