"""Tests MXNet's CUDA build on a GPU: python3 tests/device/run.py OUT [--pieces PIECES] [--small]

Each step is a process with a time limit. Its output is appended to OUT/output.txt as it comes, its
rows to OUT/rows.jsonl. The first part takes at most 200 seconds. If one of its steps fails, the
steps that narrow the reason down run, and nothing else. --pieces restores the pieces of pieces.py.
--small has the sizes of a software GPU: make test-device.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Sequence

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import unpack  # noqa: E402

PYTHON = (sys.executable, "-W", "ignore")
IMPORT = "import gluon_amp, mxnet as mx; from gluon_amp.cuda import load; print(load.prepared); "


class Step(NamedTuple):
    """A process. `unless` is why it is left out; None: it runs."""
    name: str
    seconds: int
    command: Sequence[str]
    unless: str = ""


def script(name, *arguments):
    return (*PYTHON, str(HERE / name), *map(str, arguments))


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
    return [Step("libraries", 60, script("libraries.py")),
            Step("CPU of the same build", 30, code("print(mx.nd.ones((3, 4)).asnumpy().sum())")),
            Step("doctor", 60, (*PYTHON, "-c", "from gluon_amp_command import main; main()",
                                "doctor"))]


def second_part(args):
    small, rows = args.small_flag, args.out / "rows.jsonl"
    torch = args.software or ("" if find_spec("torch") else "no PyTorch")
    steps = [Step(f"operators {dtype}", 150, script("operators.py", dtype, rows, *small))
             for dtype in ("float32", "float16")]
    steps.append(Step("convolutions", 60, script("convolutions.py", rows, *small)))
    steps.append(Step("recurrent layers", 150, script("recurrent.py", rows)))
    for name in ("image_classification", "fine_tune", "train_imagenet", "language_model",
                 "object_detection"):
        lacks = name == "object_detection" and args.software
        steps.append(Step(name, 120, script("examples.py", name, rows, *small),
                          f"{lacks}, which lacks the kernel of MultiBoxPrior" if lacks else ""))
    for network in ("resnet50", "bert", "lstm"):
        steps.append(Step(f"speed {network}", 200, script("speed.py", network, rows, *small)))
        steps.append(Step(f"PyTorch {network}", 90, script("torch_speed.py", network, rows),
                          torch))
    steps.append(Step("layouts", 60, script("layouts.py", rows), args.software))
    steps.append(Step("cuDNN's functions", 90, script("cudnn_calls.py", rows, *small)))
    steps += [Step(f"kernels {network}", 60, script("kernels.py", network, rows), torch)
              for network in ("resnet50", "bert", "lstm")]
    steps.append(Step("compute-sanitizer", 150, (
        "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1",
        *script("speed.py", "resnet50_v1", rows, "--small", "--once")), args.software))
    return steps


def third_part(args):
    """What no GPU has measured, the most important first."""
    rows, torch = args.out / "rows.jsonl", "" if find_spec("torch") else "no PyTorch"
    before = ("--before", args.before) if args.before else ()
    plain, small = "float32;gluon_amp", args.small_flag

    def speed(network, ways, *more, rounds=1):
        more = () if args.small and more[:1] == ("--batch",) else more
        return Step(f"speed {' '.join(map(str, (network, *more)))}", 150, script(
            "speed.py", network, rows, "--ways", ways, "--rounds", rounds, *before, *more, *small))

    def in_torch(network, *more):
        return Step(f"PyTorch {' '.join(map(str, (network, *more)))}", 60, script(
            "torch_speed.py", network, rows, "--rounds", 1, *more), torch)

    def kernels(network, *batch):
        return Step(f"kernels {network}", 60, script("kernels.py", network, rows, *batch), torch)

    steps = [kernels("mobilenet"), speed("mobilenet", plain), in_torch("mobilenet"),
             speed("resnet50", "gluon_amp", "--batch", 64, rounds=2),
             in_torch("resnet50", "--batch", 64), kernels("resnet50", 64),
             speed("resnet50", plain, "--batch", 256), in_torch("resnet50", "--batch", 256),
             speed("unet", plain), in_torch("unet"), speed("transformer", plain)]
    if find_spec("gluoncv"):
        steps.append(speed("ssd", plain))
    steps.append(Step("cuDNN's functions", 90, script("cudnn_calls.py", rows, *small)))
    steps += [Step(f"torch.compile {network}", 90, script(
        "torch_speed.py", network, rows, "--compile", "--rounds", 1), torch)
        for network in ("resnet50", "bert")]
    return steps


def finish(step, file, environment):
    """Runs a step's process; returns its exit code, or what went wrong. Its own processes end with
    it."""
    try:
        process = subprocess.Popen(list(map(str, step.command)), stdout=file, env=environment,
                                   stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        return str(error)
    try:
        return process.wait(step.seconds)
    except subprocess.TimeoutExpired:
        return f"not ended after {step.seconds} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(step, args, environment):
    """Runs a step, and returns whether it succeeds; a step that is left out does."""
    output, begin = args.out / "output.txt", time.monotonic()
    if begin > args.end:
        step = step._replace(unless="no time")
    step = step._replace(seconds=min(step.seconds, args.end + 20 - begin))
    with open(output, "a") as file:
        file.write(f"\n==== {step.name}: {' '.join(map(str, step.command))}\n")
        file.flush()
        if step.unless:
            file.write(f"left out: {step.unless}\n")
            result = f"left out: {step.unless}"
        else:
            result = finish(step, file, environment)
    seconds = round(time.monotonic() - begin, 1)
    print(f"{step.name}: {'ok' if result == 0 else result} ({seconds} s)", flush=True)
    with open(args.out / "rows.jsonl", "a") as file:
        file.write(json.dumps({"step": step.name, "result": result, "seconds": seconds}) + "\n")
    return result == 0 or bool(step.unless)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pieces", type=Path)
    parser.add_argument("--target", type=Path, default=Path.home() / "mxnet-cu112")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--part", type=int, choices=(1, 2, 3),
                        help="only this part; 3, what no GPU has measured, runs only so")
    parser.add_argument("--before", type=Path, help="a folder with another gluon_amp, for part 3")
    parser.add_argument("--seconds", type=int, default=3600, help="no step begins later")
    args = parser.parse_args()
    args.end = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rows.jsonl").touch()
    environment = dict(os.environ)
    if args.pieces:
        begin = time.monotonic()
        unpack.unpack(args.pieces, args.target)
        environment.update(unpack.environment(args.target))
        print(f"unpacked in {time.monotonic() - begin:.1f} s", flush=True)
    args.packs = Path(environment["GLUON_AMP_CACHE"], "kernels")
    args.small_flag = ("--small",) if args.small else ()
    args.software = "a software GPU" if "RECORDING_GPU_COUNT" in environment else ""
    failed = []
    if args.part in (None, 1):
        for step in first_part(args):
            if not run(step, args, environment):
                failed = [step.name]
                for each in narrowing(args):
                    run(each, args, environment)
                break
    if args.part != 1 and not failed:
        steps = third_part(args) if args.part == 3 else second_part(args)
        failed = [step.name for step in steps if not run(step, args, environment)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
