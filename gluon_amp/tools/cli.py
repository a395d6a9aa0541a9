"""The command `gluon-amp`.

A subcommand is an entry of `COMMANDS`. Its `run` imports the module that implements it, and
returns the exit code, or None for 0. User errors (a wrong value, a missing file or package, kernels
that do not load) print one line to stderr, with exit code 1. All other errors show a traceback;
with `--debug` all errors do.
"""
import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Tuple

import mxnet as mx

from ..checks import Parser, positive
from ..cpu.library import KernelError
from ..files import replace_text
from ..version import __version__

_USER_ERRORS = (ValueError, OSError, ImportError, KernelError)


class _Command(NamedTuple):
    """A subcommand: its name, help and examples, and functions that add its arguments and run it.
    """
    name: str
    help: str
    examples: Tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Optional[int]]


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs a subcommand and returns its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # closed pipe, as in `gluon-amp doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the exit code after SIGPIPE
    except KeyboardInterrupt:
        return 130


def _run(arguments: Optional[List[str]]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return options.run(options) or 0
    except _USER_ERRORS as error:
        if isinstance(error, BrokenPipeError) or "debug" in options:
            raise
        print(f"gluon-amp {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gluon-amp", parents=[_DEBUG],
        description="Mixed-precision training for Apache MXNet Gluon.",
        epilog="gluon-amp COMMAND --help shows flags and examples. python -m gluon_amp SCRIPT.py "
               "... runs a script with gluon_amp imported first.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name, parents=[_DEBUG], help=command.help,
            description=f"{command.help[:1].upper()}{command.help[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog="\n  ".join(["examples:", *command.examples]))
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


_DEBUG = Parser(add_help=False)  # the flag of all parsers
_DEBUG.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                    help="show the traceback of an error")


# ---- the subcommands

def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("input").add_argument
    add("--model", metavar="NAME",
        help="a network of MXNet's model zoo, or an exported NAME-symbol.json: lists layers that "
        "do not fit Tensor Cores")
    add("--image-shape", default=(3, 224, 224), metavar="C,H,W", help="channels, height and width "
        "(3,224,224)", type=lambda text: tuple(map(positive, text.split(","))))
    add = parser.add_argument_group("output").add_argument
    add("--verify", nargs="?", const="gluon-amp-verify.json", metavar="FILE", help="compare GPU "
        "0's results with the CPU's, in two minutes; writes FILE (%(const)s) for a bug report")


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor, verify
    trains, text = doctor.examine(options.model, options.image_shape)
    if not options.verify:
        print(text)
        return 0 if trains else 1
    if not mx.context.num_gpus():
        raise ValueError("--verify needs a GPU that MXNet finds; gluon-amp doctor tells why it "
                         "finds none")
    facts = {**verify.verify(mx.gpu(0)), "machine": text.splitlines()}
    replace_text(options.verify, json.dumps(facts, indent=2) + "\n")
    print(f"{verify.describe(facts)}\n\nwrote {options.verify}")
    return 1 if facts["failed"] else 0


def _types_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("network", metavar="NETWORK", help="a network of MXNet's model zoo, or an "
                        "exported NAME-symbol.json")
    parser.add_argument("--policy", help="the policy (that of the exported network, or float16)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _types(options: argparse.Namespace) -> None:
    from .layers import load
    from .types import types_of_file
    rows = types_of_file(load(options.network), options.policy)
    print(json.dumps([vars(row) for row in rows], indent=2) if options.json else rows)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=positive, default=4, help="epochs on the digits (4)")


def _demo(options: argparse.Namespace) -> None:
    from .demo import demo
    demo(epochs=options.epochs)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("input").add_argument
    add("logs", nargs="+", metavar="LOG", help="logs of GluonCV and of MXNet's Module, log.jsonl "
        "of the recipes, TensorBoard's event files, CSV of errors by epoch")
    add = parser.add_argument_group("output").add_argument
    add("-o", "--output", default="report", metavar="DIR", help="folder of the report (report)")
    add("--title", default="Training report", help="title of the report (Training report)")
    add = parser.add_argument_group("comparison").add_argument
    add("--accuracy", type=float, metavar="SHARE", help="report the time to this accuracy, such as "
        "0.76 (default: one that 90 %% of the runs reach)")
    add("--margin", type=float, default=0.5, metavar="POINTS", help="margin of the "
        "equivalence test; in percent for metrics that are not shares, such as perplexity (0.5)")
    add("--claim-speed", action="store_true", help="compare speeds, which is valid if each run "
        "had its machine to itself (default: if the logs confirm it)")


def _report(options: argparse.Namespace) -> None:
    from ..reports import report
    print(report(options.logs, options.output, options.title, options.accuracy, options.margin,
                 options.claim_speed))


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("runs").add_argument
    add("script", metavar="SCRIPT", help="a training script with the flags --dtype, --seed and "
        "--save-dir, which writes log.jsonl into --save-dir, as gluon_amp.reports.Log and the "
        "recipes do")
    add("--policies", type=lambda text: text.split(","), metavar="A,B,...",
        default=["float32", "float16", "bfloat16"],
        help="values of --dtype (float32,float16,bfloat16)")
    add("--seeds", type=positive, default=5, metavar="N", help="number of seeds, from 0 on (5)")
    add("--flags", type=shlex.split, default=[], metavar="TEXT", help="further flags of the "
        "script, such as --flags='--epochs 5 --lr 0.1'")
    add = parser.add_argument_group("output").add_argument
    add("-o", "--output", default="compare", metavar="DIR", help="folder of the runs and of the "
        "report; finished runs in it are not repeated (compare)")
    add("--margin", type=float, default=0.5, metavar="POINTS", help="margin of the equivalence "
        "test, as for report (0.5)")


def _compare(options: argparse.Namespace) -> None:
    from .compare import compare, verdicts
    page = compare(options.script, options.policies, options.seeds, options.flags, options.output,
                   options.margin)
    print(f"{verdicts(page)}\n{page}")


def _launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--workers", type=positive, required=True, metavar="N",
                        help="number of workers")
    parser.add_argument("-s", "--servers", type=positive, default=1, metavar="N",
                        help="number of server processes, which sum gradients (1)")
    parser.add_argument("-H", "--hosts", metavar="FILE", help="a file with one host per line: "
                        "start workers there with ssh, round-robin, in this folder (default: here)")
    parser.add_argument("--exit-timeout", type=positive, metavar="SECONDS", help="end the job if "
                        "workers still run this long after another has exited with code 0 (60)")
    parser.add_argument("--horovod", action="store_true",
                        help="start the program with horovodrun, for kvstore='horovod'")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...",
                        help="the training program, with kvstore='dist_sync' or 'dist_device_sync'")


def _launch(options: argparse.Namespace) -> int:
    from ..parallel.launch import EXIT_TIMEOUT, launch, launch_horovod, read_hosts
    if options.program[:1] == ["--"]:
        del options.program[0]
    if not options.program:
        raise ValueError("launch needs a program, such as: gluon-amp launch -n 2 python train.py")
    hosts = read_hosts(options.hosts) if options.hosts else None
    if options.horovod:
        if options.exit_timeout:
            raise ValueError("--exit-timeout is for MXNet's servers: Horovod itself ends the job. "
                             f"Received: --horovod and --exit-timeout {options.exit_timeout}")
        return launch_horovod(options.program, options.workers, hosts)
    return launch(options.program, options.workers, options.servers, hosts,
                  options.exit_timeout or EXIT_TIMEOUT)


def _xray_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="an exported symbol, net-symbol.json, for a "
                        "new X-ray; or a folder that view.save or --output wrote; or a file of "
                        "gluon_amp.Monitor, whose page is written beside it")
    add = parser.add_argument_group("a saved X-ray").add_argument
    add("--format", metavar="NAME", help="evaluate this format on the same run, and write "
        "xray-NAME.html to the folder, or FILE-NAME.html")
    add = parser.add_argument_group("a new X-ray").add_argument
    add("--params", metavar="FILE", help="the symbol's parameters, such as net-0000.params")
    add("--data", nargs="+", metavar="NPZ", help="files of numpy.savez with an array for each "
        "input, such as data, and the label; one batch per file")
    add("--label", metavar="NAME", help="name of the label array (label)")
    add("--loss", metavar="NAME", help="loss for a symbol without one: softmax, sigmoid, l1 or "
        "l2 (softmax, the cross entropy of logits)")
    add("--policy", metavar="NAME", help="a policy of convert, such as mixed_float16 (float16)")
    add("--steps", type=positive, metavar="N", help="maximum number of batches (20)")
    add("-o", "--output", metavar="DIR", help="new folder for xray.html and its tables (xray)")


def _xray(options: argparse.Namespace) -> None:
    names = ("params", "data", "label", "loss", "policy", "steps", "output")
    values = {name: getattr(options, name) for name in names if getattr(options, name)}
    if not options.path.endswith(".json"):
        if values:
            flags = ", ".join("--" + name.replace("_", "-") for name in values)
            raise ValueError(f"{flags}: only for a new X-ray, whose PATH is an exported symbol, "
                             f"such as net-symbol.json. Received: {options.path}")
        from ..formats import get_format
        from ..inspection import saved
        format_ = None if options.format is None else get_format(options.format, "--format")
        shows_text = format_ is None and not os.path.isfile(options.path)
        print(saved.summary(options.path) if shows_text else saved.draw(options.path, format_))
        return
    if options.format:
        raise ValueError("--format is for a saved X-ray; a new one takes --policy. Received: "
                         f"--format {options.format} and {options.path}")
    missing = [f"--{name}" for name in ("params", "data") if name not in values]
    if missing:
        raise ValueError(f"an X-ray of {options.path} needs {' and '.join(missing)}")
    output = values.pop("output", "xray")
    if os.path.exists(output):
        raise ValueError(f"--output must be a new folder. Received: {output}, which exists")
    from .xray_files import xray_files
    view = xray_files(options.path, **values)
    print(f"{view}\n{view.save(output)}")


def _cuda_arguments(parser: argparse.ArgumentParser) -> None:
    of = parser.add_subparsers(dest="action", metavar="build|install", required=True)
    build = of.add_parser("build", parents=[_DEBUG], help="compile the kernels of MXNet's CUDA "
                          "build")
    add = build.add_argument
    add("--arch", action="append", metavar="N", help="90, 100 or 120 for compute capability 9.0, "
        "10.0 or 12.0, or ptx, which the driver compiles on GPUs from 9.0 on; repeatable (90)")
    add("--source", type=Path, metavar="TREE", help="sources of MXNet 1.9.1 with its submodules, "
        "CUB and Thrust 1.10.0 (default: fetched by git)")
    add("-j", "--jobs", type=positive, metavar="N", help="number of compilers at a time, as far as "
        "memory suffices (one per processor)")
    add("-o", "--output", type=Path, metavar="DIR", help="write compressed packs to this folder, "
        "for `install` on other machines (default: install the packs here)")
    install = of.add_parser("install", parents=[_DEBUG], help="check a pack and install it")
    install.add_argument("file", type=Path, metavar="FILE", help="a file .pack or .pack.xz")


def _cuda(options: argparse.Namespace) -> None:
    if options.action == "build":
        from ..cuda.build import build
        build(options.arch or ["90"], options.source, options.jobs, options.output)
    else:
        from ..cuda.install import install
        print(install(options.file))


COMMANDS = (
    _Command("report", "write a report of training logs: verdict, tables and plots", (
        "gluon-amp report float32.log float16.log -o report",
        "gluon-amp report runs/*/log.jsonl -o report --accuracy 0.76 --margin 0.25",
    ), _report_arguments, _report),
    _Command("doctor", "check float16 on this machine, and a network's sizes", (
        "gluon-amp doctor",
        "gluon-amp doctor --model resnet50_v1",
        "gluon-amp doctor --model net-symbol.json --image-shape 1,28,28",
        "gluon-amp doctor --verify",
    ), _doctor_arguments, _doctor),
    _Command("types", "list the type of each operator of a network, with the reason", (
        "gluon-amp types mobilenet1.0",
        "gluon-amp types net-symbol.json --policy mixed_float16",
    ), _types_arguments, _types),
    _Command("demo", "measure a step of MobileNetV2, then train on digits in three types", (
        "gluon-amp demo",
        "gluon-amp demo --epochs 2",
    ), _demo_arguments, _demo),
    _Command("xray", "show the effect of a format on every tensor of a model, new or saved", (
        "gluon-amp xray net-symbol.json --params net-0000.params --data batch.npz",
        "gluon-amp xray net-symbol.json --params net-0000.params --data 0.npz 1.npz "
        "--policy mixed_float16 -o folder",
        "gluon-amp xray FOLDER",
        "gluon-amp xray FOLDER --format bfloat16",
        "gluon-amp xray statistics.jsonl",
    ), _xray_arguments, _xray),
    _Command("compare", "train a script in several types and seeds, and report the difference", (
        "gluon-amp compare train.py",
        "gluon-amp compare train.py --policies float32,float16,bfloat16 --seeds 5 -o digits",
        "gluon-amp compare train.py --seeds 3 --flags=--epochs=5",
    ), _compare_arguments, _compare),
    _Command("launch", "start several workers, of MXNet's parameter server or Horovod", (
        "gluon-amp launch -n 2 python train.py --kvstore dist_sync",
        "gluon-amp launch -n 8 -s 2 -H hosts.txt python train.py --kvstore dist_device_sync",
        "gluon-amp launch -n 2 --horovod python train.py --kvstore horovod",
    ), _launch_arguments, _launch),
    _Command("cuda", "build or install kernels for GPUs that MXNet's wheel has no code for", (
        "gluon-amp cuda build",
        "gluon-amp cuda build --arch 100 --arch 120 -j 4 -o packs",
        "gluon-amp cuda install mxnet-cu112-1.9.1-sm_90.pack.xz",
    ), _cuda_arguments, _cuda),
)
