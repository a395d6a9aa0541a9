"""What many ranks do to training: `python results/ranks/run.py`.

Trains the same networks in float16 on 1, 2 and 4 ranks of MXNet's parameter server, whose batches
are together as large as the one of a single process. What is done stands in runs.jsonl beside this
file; a second call goes on where the first stopped. At the end it prints the tables of README.md
(at once with --tables).
"""
import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gluon_amp.report.verdict import conclusion, paired

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("GLUON_AMP_DATA", HERE.parent.parent.parent / "shared")).resolve()
SCRIPT = HERE.parent.parent / "example" / "image_classification.py"
RUNS = HERE / "runs.jsonl"
RANKS = (1, 2, 4)


class Study(NamedTuple):
    flags: str
    batch: int  # of all ranks together
    seeds: int
    margin: float  # points of accuracy


STUDIES = {
    "digits": Study("", 64, 10, 0.5),
    "cifar10": Study(
        "--dataset SHARED/data/cifar10_train.rec --val SHARED/data/cifar10_test.rec --classes 10 "
        "--model cifar_resnet20_v1 --image-size 32 --examples 2000 --epochs 3 --lr 0.1 "
        "--warmup-epochs 0.5", 100, 3, 5.0),
}


def train(name, ranks, seed):
    """One run; returns its line of runs.jsonl."""
    study, start = STUDIES[name], time.time()
    python = [sys.executable, "-W", "ignore"]
    launcher = [*python, "-m", "gluon_amp.tools.cli", "launch", "-n", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*python, str(SCRIPT), "--dtype", "float16", "--seed", str(seed), "--save-dir",
                   folder, "--batch-size", str(study.batch // ranks),
                   *shlex.split(study.flags.replace("SHARED", shlex.quote(str(SHARED))))]
        if ranks > 1:
            command = [*launcher, *command, "--kvstore", "dist_sync"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL,
                       env={**os.environ, "OMP_NUM_THREADS": "1"})
        lines = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if "err_top1" in line]
    return {"study": name, "ranks": ranks, "seed": seed,
            "accuracy": [round(100 - 100 * line["err_top1"], 4) for line in epochs],
            "skipped": epochs[-1]["skipped"], "seconds": round(time.time() - start)}


def done():
    return [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []


def print_table(name):
    """Of the seeds that all numbers of ranks have been trained with."""
    runs = {(run["ranks"], run["seed"]): run for run in done() if run["study"] == name}
    seeds = sorted({seed for _, seed in runs if all((ranks, seed) in runs for ranks in RANKS)})
    if len(seeds) < 2:
        return
    study = STUDIES[name]
    print(f"\n{name}, seeds {', '.join(map(str, seeds))}\n\n| ranks | batch of each | test "
          "accuracy of each seed | mean | skipped steps | minus 1 rank | |\n|" + " --- |" * 7)
    alone = [runs[1, seed]["accuracy"][-1] for seed in seeds]
    for ranks in RANKS:
        mine = [runs[ranks, seed]["accuracy"][-1] for seed in seeds]
        skipped = sum(runs[ranks, seed]["skipped"] for seed in seeds)
        cells = [ranks, study.batch // ranks, ", ".join(f"{a:.2f}" for a in mine),
                 f"{np.mean(mine):.2f} ± {np.std(mine, ddof=1):.2f}", skipped, "", ""]
        if ranks > 1:
            found = paired(mine, alone)
            low, high = found.interval()
            cells[5:] = [f"{found.mean:+.2f} ({low:+.2f} to {high:+.2f})",
                         conclusion(found, study.margin)]
        print(f"| {' | '.join(map(str, cells))} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=STUDIES, help="one of the two")
    parser.add_argument("--tables", action="store_true", help="only print what is there")
    args = parser.parse_args()
    for name in [] if args.tables else [args.only] if args.only else STUDIES:
        trained = {(run["ranks"], run["seed"]) for run in done() if run["study"] == name}
        for seed in range(STUDIES[name].seeds):
            for ranks in RANKS:
                if (ranks, seed) not in trained:
                    print(f"{name}: {ranks} ranks, seed {seed}", flush=True)
                    line = train(name, ranks, seed)
                    with open(RUNS, "a") as file:
                        file.write(json.dumps(line) + "\n")
    for name in STUDIES:
        print_table(name)


if __name__ == "__main__":
    main()
