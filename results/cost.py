"""Measures the step and the memory of each study: python results/cost.py [STUDY ...]

It runs the first steps of each study with two threads in float32, float16 and bfloat16, one after
another, in several rounds, and appends to results/runs/costs.jsonl. Run it on an idle machine. A
step is from the end of one update to the end of the next one, with reading of the data. Memory is
the peak of a process beyond its imports.
"""
import argparse
import json
import resource
import runpy
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import study
from run import STUDIES, machine

HERE = Path(__file__).parent
COSTS = HERE / "runs/costs.jsonl"
ARMS = ("float32", "float16", "bfloat16")
ROUNDS = 3
FIRST = 10  # steps that do not count: they compile, and search the loss scale
# The last flag of a name counts.
SHORT = {"tasks": "--steps 60", "symbolic_fine_tune": "--num-epochs 1",
         "train_imagenet": "--num-epochs 1", "": "--epochs 1"}


def meter(result):
    """Writes the median seconds of a step and the peak memory, when the process ends."""
    import gluon_amp as amp
    import mxnet as mx
    from mxnet import gluon

    times, imports = [], []

    def timed(function):
        def call(self, *args, **kwargs):
            done = function(self, *args, **kwargs)
            mx.nd.waitall()
            times.append(time.perf_counter())
            return done
        return call

    def parsed(function):
        def call(self, *args, **kwargs):
            imports.append(peak())
            return function(self, *args, **kwargs)
        return call

    for owner, name in ((gluon.Trainer, "step"), (amp.Trainer, "step"), (amp.Module, "update")):
        if name in vars(owner):
            setattr(owner, name, timed(getattr(owner, name)))
    argparse.ArgumentParser.parse_args = parsed(argparse.ArgumentParser.parse_args)

    def write():
        steps = [end - begin for begin, end in zip(times[FIRST:], times[FIRST + 1:])]
        Path(result).write_text(json.dumps(
            {"step_seconds": median(steps), "steps": len(steps), "bytes": peak() - imports[0]}))
    return write


def peak():
    """Returns the largest memory of this process in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measured(name, arm):
    """Returns the measurement of a run."""
    script, flags, seeds, kinds = STUDIES[name]
    short = next(more for word, more in SHORT.items() if word in script)
    with tempfile.TemporaryDirectory(dir=HERE, prefix=".cost") as scratch:
        result = Path(scratch, "result.json")
        study.train(script, f"--seed {seeds[0]} {kinds[arm]} {flags} {short}",
                    Path(scratch, "saved"), before=[__file__, "--meter", result], threads=2)
        return json.loads(result.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", metavar="STUDY", default=list(STUDIES))
    args = parser.parse_args()
    unknown = set(args.studies) - set(STUDIES)
    if unknown:
        parser.error(f"no study {', '.join(sorted(unknown))}. Valid: {', '.join(STUDIES)}")
    runs = [{"study": name, "machine": machine(gpu=False), "round": number, "arm": arm}
            for number in range(ROUNDS) for name in args.studies for arm in ARMS
            if arm in STUDIES[name].kinds]
    for run in study.left(COSTS, runs):
        study.add(COSTS, {**run, **measured(run["study"], run["arm"])})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--meter"]:
        write, sys.argv = meter(sys.argv[2]), sys.argv[3:]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
        write()
    else:
        main()
