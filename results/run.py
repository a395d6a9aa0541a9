"""Runs the trainings of this folder: python results/run.py [STUDY ...]

It writes the concatenated log.jsonl of runs named KIND-seedN to STUDY.jsonl.xz in
results/runs/MACHINE, or in FOLDER with --output FOLDER. Completed runs of this machine are skipped,
there and in results/runs, so another call continues; remove a study's file to repeat it. A run that
fails after its first logged loss is completed: plan.md counts it. Lower seeds of all studies run
first. It trains one run per CPU in parallel, each with one thread, and ends those that remain after
--minutes. On the same machine, another call resumes those of image_classification.py after their
last complete epoch. The data is in ../shared or $GLUON_AMP_DATA. plan.md has the comparisons, which
were fixed before the runs.
"""
import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Dict, NamedTuple, Sequence

import study

HERE = Path(__file__).parent
# `control` is float32 with all weights changed by one unit in the last place: observe.py.
TYPES = {"float32": "--dtype float32", "control": "--dtype float32", "float16": "--dtype float16"}
BFLOAT16 = {"bfloat16": "--dtype bfloat16"}
PHOTOS = "SHARED/data/caltech10_128"
EFFICIENTNET = "SHARED/models/efficientnet_lite0"


class Study(NamedTuple):
    script: str  # from the checkout
    flags: str
    seeds: Sequence[int]
    kinds: Dict[str, str] = TYPES


def task(name, *more):
    """Returns the study of a script in tasks/."""
    return Study(f"results/tasks/{name}.py", "", range(10), {
        arm: f"--arm {arm}" for arm in ("float32", "control", "float16", "bfloat16", *more)})


CIFAR10 = Study(
    "example/image_classification.py",
    "--dataset SHARED/data/cifar10_train.rec --val SHARED/data/cifar10_test.rec --classes 10 "
    "--model cifar_resnet20_v1 --image-size 32 --examples 5000 --batch-size 100 --epochs 6 "
    "--lr 0.1 --warmup-epochs 0.5 --log-interval 25", range(10),
    {**TYPES, "float16-static128": "--dtype float16 --loss-scale 128", **BFLOAT16})


STUDIES = {
    "digits": Study("example/image_classification.py", "", range(30), {**TYPES, **BFLOAT16}),
    "cifar10": CIFAR10,
    # the question of cifar10, with new seeds
    "cifar10_replication": CIFAR10._replace(seeds=range(10, 30), kinds={**TYPES, **BFLOAT16}),
    "plateau": CIFAR10._replace(
        flags="--dataset SHARED/data/cifar10_train.rec --val SHARED/data/cifar10_test.rec "
        "--classes 10 --model cifar_resnet20_v1 --image-size 32 --random-crop --crop-ratio 0.875 "
        "--batch-size 100 --epochs 65 "
        "--lr 0.1 --lr-mode step --lr-decay-epoch 40,55 --warmup-epochs 0.5 --log-interval 25",
        seeds=range(3), kinds={**TYPES, **BFLOAT16}),
    "fine_tune_resnet20": Study(
        "example/fine_tune.py",
        f"--dataset {PHOTOS}_train.rec --val {PHOTOS}_test.rec --classes 10 "
        "--pretrained cifar_resnet20_v1 "
        "--pretrained-params SHARED/models/cifar_resnet20_v1-0000.params --image-size 32 "
        "--bn-momentum 0.8 --epochs 6 --log-interval 9", range(30)),
    # One recipe with Gluon and with the Symbolic API: random, mirrored crops of 112 pixels of
    # photos whose shorter side is 128; validation on center crops.
    "fine_tune_efficientnet": Study(
        "example/fine_tune.py",
        f"--dataset {PHOTOS}_train.rec --val {PHOTOS}_test.rec --classes 10 "
        f"--pretrained-symbol {EFFICIENTNET}-symbol.json "
        f"--pretrained-params {EFFICIENTNET}-0000.params "
        "--image-size 112 --crop-ratio 0.875 --random-crop --rgb-mean 127 --rgb-std 128 "
        "--bn-momentum 0.8 --batch-size 32 --epochs 3 --lr 0.01 --lr-mode step "
        "--lr-decay-epoch 2 --log-interval 9", range(10)),
    "fine_tune_symbolic": Study(
        "example/symbolic_fine_tune.py",
        f"--data-train {PHOTOS}_train.rec --data-val {PHOTOS}_test.rec --num-classes 10 "
        f"--pretrained-model {EFFICIENTNET} --image-shape 3,112,112 --rgb-mean 127,127,127 "
        "--rgb-std 128,128,128 --random-crop 1 --random-mirror 1 --bn-momentum 0.8 "
        "--initializer xavier --batch-size 32 --num-epochs 3 --lr 0.01 --lr-step-epochs 2 "
        "--disp-batches 5", range(10)),
    "cifar10_symbolic": Study(
        "example/train_imagenet.py",
        "--data-train SHARED/data/cifar10_train.rec --data-val SHARED/data/cifar10_test.rec "
        "--num-classes 10 --network resnet --num-layers 20 --image-shape 3,32,32 "
        "--batch-size 100 --num-epochs 6 --lr 0.1 --lr-step-epochs 4 --warmup-epochs 0.5 "
        "--random-crop 1 --random-mirror 1 --pad-size 4 --top-k 5 --rgb-mean 125.3,123,113.9 "
        "--rgb-std 63,62.1,66.7 --disp-batches 20", range(10)),
    "gpt": task("gpt", "cast"),
    "unet": task("unet", "cast"),
    **{name: task(name) for name in ("lstm", "translate", "ssd", "ctc", "wgan")},
}


def files_of(name):
    """Returns the files of a study's runs. The first are not in runs/."""
    return [*HERE.glob(f"{name}.jsonl"), *HERE.glob(f"tasks/{name}.jsonl"),
            *sorted(HERE.glob(f"runs/*/{name}.jsonl.xz"))]


def runs_of(file, where):
    """Returns the names of a machine's runs in a file."""
    return {run for run, lines in study.runs(file).items() if lines[0].get("machine") == where}


def words(where):
    """Returns a machine's name as the name of a folder."""
    return re.sub(r"\W+", "_", where).lower()


def unfinished(where):
    """Returns the folder of a machine's runs that have not ended."""
    return HERE / ".unfinished" / words(where)


def machine(gpu):
    """Returns the name of the GPU or of the CPU that trains."""
    if gpu:
        return subprocess.check_output(
            ["nvidia-smi", "--id=0", "--query-gpu=name", "--format=csv,noheader"],
            text=True).strip()
    facts = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
    return f"{facts['model name']}, family {facts['cpu family']}, model {facts['model']}"


def train(name, kind, seed, where, more="", seconds=None):
    """Trains a run on a machine with more flags.

    Returns:
        Its folder, which is to be removed, and the lines of its log.jsonl. If it fails after its
        first logged loss, the last line has why.

    Raises:
        RuntimeError: it fails before. ChildProcessError: a signal from outside ends it.
        subprocess.TimeoutExpired: it has not ended after so many seconds.
    """
    script, flags, _, kinds = STUDIES[name]
    folder = unfinished(where) / f"{name}-{kind}-seed{seed}"
    saved, hits = folder / "saved", folder / "hits"
    # observe.py changes the weights of the control after the first update of a process.
    if script == CIFAR10.script and kind != "control" and (saved / "checkpoint.json").exists():
        more += " --resume"
    else:
        shutil.rmtree(folder, ignore_errors=True)
    before = [] if "tasks" in script else [HERE / "observe.py", kind, hits]
    last, log, begun = [], saved / "log.jsonl", time.time()
    try:
        study.train(script, f"--seed {seed} {kinds[kind]} {flags}{more}", saved, before=before,
                    seconds=seconds)
    except RuntimeError as error:
        last = [{"failed": str(error)[-500:]}]
        if not log.exists() or log.stat().st_mtime < begun \
                or not any("loss" in line for line in study.lines(log)):
            raise RuntimeError(f"{error}\nRemove {folder} to start it again") from None
    if before and not last:
        last = [{"hits": hits.read_text()}]
        if not last[0]["hits"]:  # it was interrupted after its last epoch
            shutil.rmtree(folder)
            raise RuntimeError("no validation. Another call repeats it")
    lines = [*study.lines(log), *last]
    lines[0]["machine"] = where
    text = json.dumps(lines)
    for path, word in ((saved, "SAVE_DIR"), (study.SHARED, "SHARED")):
        text = text.replace(str(path), word)
    return folder, json.loads(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", metavar="STUDY",
                        help=f"{', '.join(STUDIES)}; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N",
                        help="number of parallel runs (%(default)s)")
    parser.add_argument("--minutes", type=float, default=150, metavar="N",
                        help="end after this time (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the runs")
    parser.add_argument("--gpu", action="store_true",
                        help="train on GPU 0, without TF32 and without the arm bfloat16")
    args = parser.parse_args()
    unknown = set(args.studies) - set(STUDIES)
    if unknown:
        parser.error(f"no study {', '.join(sorted(unknown))}. Valid: {', '.join(STUDIES)}")
    more = ""
    if args.gpu:
        more = " --gpus 0"
        os.environ.update(NVIDIA_TF32_OVERRIDE="0", MXNET_CUDNN_AUTOTUNE_DEFAULT="0")
    where = machine(args.gpu)
    unfinished(where).mkdir(parents=True, exist_ok=True)
    lock = (unfinished(where) / "lock").open("w")  # until the end of the process
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        parser.error(f"another call trains in {unfinished(where)}: wait for its end")
    output = args.output or HERE / "runs" / words(where)
    files = {name: output / f"{name}.jsonl.xz" for name in args.studies or STUDIES}
    for file in files.values():
        if len(runs_of(file, where)) < len(study.runs(file)):
            parser.error(f"{file} has runs of another machine: pass another --output")
    done = {name: set().union(*(runs_of(each, where) for each in (file, *files_of(name))))
            for name, file in files.items()}
    left = sorted(((name, kind, seed) for name in files for seed in STUDIES[name].seeds
                   for kind in STUDIES[name].kinds if not (args.gpu and kind == "bfloat16")
                   if f"{kind}-seed{seed}" not in done[name]), key=lambda run: run[2])
    end, writing = time.monotonic() + 60 * args.minutes, threading.Lock()

    def train_in_time(name, kind, seed):
        """Returns whether the run has not failed."""
        seconds = end - time.monotonic()
        if seconds <= 0:
            return True
        run = f"{kind}-seed{seed}"
        try:
            folder, made = train(name, kind, seed, where, more, seconds)
        except subprocess.TimeoutExpired:
            return True
        except (RuntimeError, ChildProcessError) as error:
            print(f"{name} {run}: {error}", flush=True)
            return False
        with writing:
            study.put_run(files[name], run, made)
        shutil.rmtree(folder)
        print(f"{name} {run}", *([made[-1]["failed"]] if "failed" in made[-1] else []), flush=True)
        return "failed" not in made[-1]

    pool = ThreadPoolExecutor(args.jobs)
    futures = [pool.submit(train_in_time, *run) for run in left]
    try:
        failed = sum(not future.result() for future in as_completed(futures))
    except BaseException as error:  # the system ends the trainings with this process
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    sys.exit(f"{failed} runs failed" if failed else 0)


if __name__ == "__main__":
    main()
