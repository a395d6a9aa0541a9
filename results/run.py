"""Runs the trainings of this folder: python results/run.py [STUDY ...]

It writes the concatenated log.jsonl of runs named KIND-seedN to results/STUDY.jsonl, or to
results/tasks/STUDY.jsonl, or to FOLDER/STUDY.jsonl with --output FOLDER. Completed runs are
skipped, there and in results/runs, so another call continues; remove a study's file to repeat it.
Lower seeds of all studies run first. It trains one run per CPU in parallel, each with one thread,
and ends those that remain after --minutes. On the same machine, another call resumes those of
image_classification.py after their last complete epoch. The data is in ../shared or
$GLUON_AMP_DATA. plan.md has the comparisons, which were fixed before the runs.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Dict, NamedTuple, Sequence

import study

HERE = Path(__file__).parent
# `control` is float32 with all weights changed by one unit in the last place: observe.py.
TYPES = {"float32": "--dtype float32", "control": "--dtype float32", "float16": "--dtype float16"}
BFLOAT16 = {"bfloat16": "--dtype bfloat16 --loss-scale none"}
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


def file_of(name, folder=None):
    """Returns the file of a study's runs."""
    if folder is None:
        folder = HERE / "tasks" if "tasks" in STUDIES[name].script else HERE
    return folder / f"{name}.jsonl"


def compressed(name):
    """Returns the files of a study in runs/."""
    return sorted(HERE.glob(f"runs/*/{name}.jsonl.xz"))


def committed(name, where):
    """Returns the runs of a study in runs/ that are of a machine."""
    return {run: lines for file in compressed(name)
            for run, lines in study.runs(file).items() if lines[0]["machine"] == where}


def machine(gpu):
    """Returns the name of the GPU or of the CPU that trains."""
    if gpu:
        return subprocess.check_output(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], text=True).strip()
    facts = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
    return f"{facts['model name']}, family {facts['cpu family']}, model {facts['model']}"


def train(name, kind, seed, where, more="", seconds=None):
    """Trains a run on a machine with more flags, and returns the lines of its log.jsonl.

    Raises:
        RuntimeError: it fails. subprocess.TimeoutExpired: it has not ended after so many seconds.
    """
    script, flags, _, kinds = STUDIES[name]
    folder = HERE / ".unfinished" / re.sub(r"\W+", "_", where) / f"{name}-{kind}-seed{seed}"
    saved, hits = folder / "saved", folder / "hits"
    # observe.py changes the weights of the control after the first update of a process.
    if script == CIFAR10.script and kind != "control" and (saved / "last.json").exists():
        more += " --resume"
    else:
        shutil.rmtree(folder, ignore_errors=True)
    before = [] if "tasks" in script else [HERE / "observe.py", kind, hits]
    study.train(script, f"--seed {seed} {kinds[kind]} {flags}{more}", saved, before=before,
                seconds=seconds)
    text = (saved / "log.jsonl").read_text()
    for path, word in ((saved, "SAVE_DIR"), (study.SHARED, "SHARED")):
        text = text.replace(str(path), word)
    lines = [json.loads(line) for line in text.splitlines()]
    if before:
        lines.append({"hits": hits.read_text()})
    lines[0]["machine"] = where
    shutil.rmtree(folder)
    return lines


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
    files = {name: file_of(name, args.output) for name in args.studies or STUDIES}
    where = machine(args.gpu)
    done = {name: {**study.runs(file), **committed(name, where)} for name, file in files.items()}
    left = sorted(((name, kind, seed) for name in files for seed in STUDIES[name].seeds
                   for kind in STUDIES[name].kinds if not (args.gpu and kind == "bfloat16")
                   if f"{kind}-seed{seed}" not in done[name]), key=lambda run: run[2])
    end = time.monotonic() + 60 * args.minutes

    def train_in_time(*run):
        seconds = end - time.monotonic()
        return train(*run, where, more, seconds) if seconds > 0 else None

    failed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(train_in_time, *run): run for run in left}
        for future in as_completed(futures):
            name, kind, seed = futures[future]
            try:
                made = future.result()
            except subprocess.TimeoutExpired:
                continue
            except RuntimeError as error:
                failed += 1
                print(f"{name} {kind}-seed{seed}: {error}", flush=True)
                continue
            if made:
                study.put_run(files[name], f"{kind}-seed{seed}", made)
                print(f"{name} {kind}-seed{seed}", flush=True)
    sys.exit(f"{failed} runs failed" if failed else 0)


if __name__ == "__main__":
    main()
