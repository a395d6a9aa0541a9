"""Measures the effect of the number of ranks on accuracy: `python results/ranks/run.py`.

It trains the same networks in float16 on 1, 2 and 4 ranks of MXNet's parameter server, with the
same total batch size. runs.jsonl in this folder has the completed runs; another call continues. At
the end it prints the tables of README.md; with --tables it only prints them.
"""
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import study
from gluon_amp.reports.verdict import conclusion, paired

RUNS = Path(__file__).with_name("runs.jsonl")
RANKS = (1, 2, 4)


class Study(NamedTuple):
    flags: str
    batch: int  # batch size over all ranks
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
    """Runs one training; returns its line of runs.jsonl."""
    flags, batch = STUDIES[name].flags, STUDIES[name].batch // ranks
    flags = f"--dtype float16 --seed {seed} --batch-size {batch} {flags}"
    launcher = []
    if ranks > 1:
        launcher = [*study.PYTHON, "-m", "gluon_amp", "launch", "-n", str(ranks)]
        flags += " --kvstore dist_sync"
    with tempfile.TemporaryDirectory() as folder:
        study.train("example/image_classification.py", flags, folder, launcher)
        epochs = [line for line in study.lines(Path(folder, "log.jsonl")) if "err_top1" in line]
    return {"study": name, "ranks": ranks, "seed": seed,
            "accuracy": [round(100 - 100 * line["err_top1"], 4) for line in epochs],
            "skipped": epochs[-1]["skipped"]}


def print_table(name):
    """Prints the table of the seeds with runs for all numbers of ranks."""
    runs = {(run["ranks"], run["seed"]): run for run in study.lines(RUNS) if run["study"] == name}
    seeds = sorted({seed for _, seed in runs if all((ranks, seed) in runs for ranks in RANKS)})
    if len(seeds) < 2:
        return
    whole, margin = STUDIES[name].batch, STUDIES[name].margin
    print(f"\n{name}, seeds {', '.join(map(str, seeds))}\n\n| workers | batch of each | test "
          "accuracy of each seed | mean | skipped steps | minus 1 worker | |\n|" + " --- |" * 7)
    alone = [runs[1, seed]["accuracy"][-1] for seed in seeds]
    for ranks in RANKS:
        mine = [runs[ranks, seed]["accuracy"][-1] for seed in seeds]
        skipped = sum(runs[ranks, seed]["skipped"] for seed in seeds)
        cells = [ranks, whole // ranks, ", ".join(f"{a:.2f}" for a in mine),
                 f"{np.mean(mine):.2f} ± {np.std(mine, ddof=1):.2f}", skipped, "", ""]
        if ranks > 1:
            found = paired(mine, alone)
            low, high = found.interval()
            cells[5:] = [f"{found.mean:+.2f} ({low:+.2f} to {high:+.2f})",
                         conclusion(found, margin)]
        print(f"| {' | '.join(map(str, cells))} |")


def main():
    args = study.parser(__doc__, STUDIES).parse_args()
    for line in study.left(RUNS, [
            {"study": name, "ranks": ranks, "seed": seed} for name in study.chosen(args, STUDIES)
            for seed in range(STUDIES[name].seeds) for ranks in RANKS]):
        study.add(RUNS, train(line["study"], line["ranks"], line["seed"]))
    for name in STUDIES:
        print_table(name)


if __name__ == "__main__":
    main()
