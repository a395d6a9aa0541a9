"""Tests MXNet's CUDA build on a GPU: python3 tests/device/run.py OUT [--pieces PIECES] [--small]

Each step is a process with a time limit. Its output is appended to OUT/output.txt as it comes, its
rows to OUT/rows.jsonl. The first part takes at most 200 seconds. If one of its steps fails, the
steps that narrow the reason down run, and nothing else. Each part runs if the one before succeeds.
--pieces restores the pieces of pieces.py.
--small has the sizes of a software GPU: make -C tests device.
"""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Sequence

AT_ONCE = 20  # processes
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import unpack  # noqa: E402
from ways import BEFORE, WAYS, environment  # noqa: E402

PYTHON = (sys.executable, "-W", "ignore")
IMPORT = "import gluon_amp, mxnet as mx; from gluon_amp.cuda import load; print(load.prepared); "


class Step(NamedTuple):
    """A process. `unless` is why it is left out; None: it runs. Its turn begins with a line."""
    name: str
    seconds: int
    command: Sequence[str]
    unless: str = ""
    way: str = ""  # of ways.py


def script(name, *arguments):
    return (*PYTHON, str(HERE / name), *map(str, arguments))


def turn(library, name, *arguments):
    """A script that waits for its turn after the import of a library."""
    return (*PYTHON, str(HERE / "turn.py"), library, *script(name, *arguments)[len(PYTHON):])


def code(text):
    return (*PYTHON, "-c", IMPORT + text)


def first_part(args):
    on_gpu = "ctx=mx.gpu(0)"
    return [
        Step("machine", 15, ("nvidia-smi", "-q", "-d", "MEMORY,CLOCK"), args.software),
        Step("modules", 40, script("modules.py", args.packs), args.software),
        Step("import", 30, code("print(mx.context.num_gpus())")),
        Step("kernel", 30, code(f"print(mx.nd.ones((3, 4), {on_gpu}).asnumpy().sum())")),
        Step("product", 30, code(f"a = mx.nd.ones((64, 64), {on_gpu}); "
                                 "print(mx.nd.dot(a, a).asnumpy().max())")),
        Step("convolution", 40, code(
            f"a, w = mx.nd.ones((2, 8, 9, 9), {on_gpu}), mx.nd.ones((8, 8, 3, 3), {on_gpu}); "
            "print(mx.nd.Convolution(a, w, no_bias=True, kernel=(3, 3), num_filter=8)"
            ".asnumpy().max())")),
        Step("verify", 130, script("verify.py", args.out / "verify.json", *args.small_flag)),
    ]


def narrowing(args):
    """The steps after a failure of the first part."""
    return [Step("CPU of the same build", 30, code("print(mx.nd.ones((3, 4)).asnumpy().sum())")),
            Step("doctor", 60, (*PYTHON, "-c", "from gluon_amp_command import main; main()",
                                "doctor"))]


def second_part(args):
    small, rows = args.small_flag, args.out / "rows.jsonl"
    steps = [Step(f"operators {dtype}", 150, script("operators.py", dtype, rows, *small))
             for dtype in ("float32", "float16")]
    steps.append(Step("convolutions", 60, script("convolutions.py", rows, *small)))
    steps.append(Step("recurrent layers", 150, script("recurrent.py", rows)))
    for name in ("image_classification", "fine_tune", "train_imagenet", "language_model",
                 "object_detection"):
        lacks = name == "object_detection" and args.software
        steps.append(Step(name, 120, script("examples.py", name, rows, *small),
                          f"{lacks}, which lacks the kernel of MultiBoxPrior" if lacks else ""))
    steps.append(Step("cuDNN's functions", 90, script("cudnn_calls.py", rows, *small)))
    steps.append(Step("compute-sanitizer", 150, (
        "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1",
        *script("speed.py", "resnet50_v1", rows, "--small", "--once")), args.software))
    return steps


def third_part(args):
    """The steps of networks in each way, by turns, the most important first."""
    rows, torch = args.out / "rows.jsonl", "" if find_spec("torch") else "no PyTorch"
    plain = ("float32", "gluon_amp")

    def named(what, *words):
        return f"{what}: {' '.join(str(word) for word in words if word)}"

    def batch_of(batch):
        return ("--batch", batch) if batch and not args.small else ()

    def speed(network, way, batch=None, *more):
        lacks = "no folder before" if way == BEFORE and not args.before else ""
        if way == "mx.contrib.amp" and args.software:
            lacks = f"{args.software}, which lacks its overflow check"
        return Step(named(way, network, batch, *more), 90, turn(
            "gluon_amp", "speed.py", network, rows, "--way", way, *batch_of(batch), *more,
            *args.small_flag), lacks, way)

    def in_torch(network, batch=None, *more):
        return Step(named("PyTorch", network, batch, *more), 90, turn(
            "torch", "torch_speed.py", network, rows, "--rounds", 1, *batch_of(batch), *more),
            torch)

    def kernels(network, batch=None):
        return Step(named("kernels", network, batch), 60, turn(
            "gluon_amp", "kernels.py", network, rows, *filter(None, [batch])), torch)

    half = ("--types", "float16")
    steps = [*first_part(args)[:1], Step("verify", 60, turn(
        "gluon_amp", "verify.py", args.out / "verify.json", *args.small_flag))]
    for network in ("resnet50", "mobilenet", "bert", "lstm"):
        steps += [*(speed(network, way) for way in WAYS), in_torch(network)]
    for network in ("resnet50", "mobilenet"):
        steps += [*(speed(network, way, None, "--predict") for way in (*plain, BEFORE)),
                  in_torch(network, None, "--predict")]
    steps += [speed("resnet50", "gluon_amp", 64), in_torch("resnet50", 64, *half),
              kernels("resnet50", 64), speed("mobilenet", BEFORE), speed("resnet50", BEFORE)]
    for network, batch in (("unet", None), ("resnet50", 256)):
        steps += [*(speed(network, way, batch) for way in plain), in_torch(network, batch)]
    steps += [speed("transformer", way) for way in plain]
    if find_spec("gluoncv"):
        steps += [speed("ssd", way) for way in plain]
    steps += [kernels("mobilenet"), *(in_torch(network, None, "--compile")
                                      for network in ("resnet50", "bert"))]
    steps += 2 * [step for network in ("resnet50", "bert", "lstm") for step in (
        *(speed(network, way) for way in plain), in_torch(network, None, *half))]
    return [*steps, Step("convolutions", 60, turn("gluon_amp", "convolutions.py", rows,
                                                  *args.small_flag)),
            Step("cuDNN's functions", 90, turn("gluon_amp", "cudnn_calls.py", rows,
                                               *args.small_flag))]


def start(step, args, variables):
    with open(args.out / "output.txt", "a") as file:
        return subprocess.Popen(list(map(str, step.command)), stdin=subprocess.PIPE, stdout=file,
                                stderr=subprocess.STDOUT, start_new_session=True,
                                env=environment(step.way, args.before, variables))


def end(process):
    """Ends a process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def finish(process, seconds):
    """Gives a process its turn; returns its exit code, or what went wrong."""
    try:
        process.communicate(b"\n", seconds)
        return process.returncode
    except subprocess.TimeoutExpired:
        return f"not ended after {seconds} s"
    finally:
        end(process)


def run(step, args, variables, process=None):
    """Runs a step, whose process may have been started, and returns whether it succeeds; a step
    that is left out does."""
    begin = time.monotonic()
    if begin > args.end:
        step = step._replace(unless="no time")
    with open(args.out / "output.txt", "a") as file:
        file.write(f"\n==== {step.name}: {' '.join(map(str, step.command))}\n")
        if step.unless:
            file.write(f"left out: {step.unless}\n")
    if step.unless:
        result = f"left out: {step.unless}"
    else:
        try:
            process = process or start(step, args, variables)
            result = finish(process, round(min(step.seconds, args.end + 20 - begin)))
        except OSError as error:
            result = str(error)
    seconds = round(time.monotonic() - begin, 1)
    print(f"{step.name}: {'ok' if result == 0 else result} ({seconds} s)", flush=True)
    with open(args.out / "rows.jsonl", "a") as file:
        file.write(json.dumps({"step": step.name, "result": result, "seconds": seconds}) + "\n")
    return result == 0 or bool(step.unless)


def run_by_turns(steps, args, variables):
    """Runs steps, and returns those that fail. The first AT_ONCE import at the same time and wait
    for their turns. After a failed "verify", none runs."""
    turns = [i for i, step in enumerate(steps)
             if not step.unless and str(HERE / "turn.py") in step.command]
    processes = {i: start(steps[i], args, variables) for i in turns[:AT_ONCE]}
    failed = []
    try:
        for i, step in enumerate(steps):
            if not run(step, args, variables, processes.get(i)):
                failed.append(step.name)
                if step.name == "verify":
                    break
    finally:
        for process in processes.values():
            end(process)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pieces", type=Path)
    parser.add_argument("--target", type=Path, default=Path.home() / "mxnet-cu112")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--part", type=int, choices=(1, 2, 3),
                        help="only this part; 3 has the tables of benchmarks/README.md")
    parser.add_argument("--only", default="", metavar="PATTERN",
                        help="steps of part 3 whose name has the regular expression")
    parser.add_argument("--before", type=Path, help="a folder with another gluon_amp, for part 3")
    parser.add_argument("--seconds", type=int, default=3600, help="no step begins later")
    args = parser.parse_args()
    args.end = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rows.jsonl").touch()
    variables = dict(os.environ)
    if args.pieces:
        begin = time.monotonic()
        unpack.unpack(args.pieces, args.target)
        variables.update(unpack.environment(args.target))
        print(f"unpacked in {time.monotonic() - begin:.1f} s", flush=True)
    args.packs = Path(variables["GLUON_AMP_CACHE"], "kernels")
    args.small_flag = ("--small",) if args.small else ()
    args.software = "a software GPU" if "RECORDING_GPU_COUNT" in variables else ""
    failed = []
    if args.part in (None, 1):
        for step in first_part(args):
            if not run(step, args, variables):
                failed = [step.name]
                for each in narrowing(args):
                    run(each, args, variables)
                break
    if args.part in (None, 2) and not failed:
        failed = [step.name for step in second_part(args) if not run(step, args, variables)]
    if args.part in (None, 3) and not failed:
        failed = run_by_turns([step for step in third_part(args)
                               if re.search(args.only, step.name)], args, variables)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
