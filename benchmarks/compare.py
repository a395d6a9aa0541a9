"""Compares the float16 steps of two commits or work trees: `compare.py OLD NEW`.

Each is built into a temporary folder, with the MXNet that runs this. Then processes of the two take
turns; each times some steps of one network, and what is shown is the median of the pairs' ratios,
below 1 where NEW is faster, with the interval that holds the true median in 95 of 100 cases.
"""
import argparse
import shutil
import subprocess
import sys
import tempfile
from math import comb
from pathlib import Path
from statistics import median

import harness

ROOT = Path(__file__).resolve().parent.parent


def build(which, folder):
    """Installs a commit, or a folder's files as they are, into a new folder."""
    source = Path(f"{folder}.source")
    if Path(which).is_dir():
        shutil.copytree(which, source, ignore=shutil.ignore_patterns(
            ".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__"))
    else:
        source.mkdir()
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", which], check=True,
                                 stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps",
                    "--disable-pip-version-check", "--target", str(folder), str(source)],
                   check=True)
    return str(folder)


def interval(values):
    """The 95 % interval of the median: the values of the ranks that hold it that often at least."""
    rank, outside = 0, 0.0
    while outside + comb(len(values), rank) / 2 ** len(values) <= 0.025:
        outside += comb(len(values), rank) / 2 ** len(values)
        rank += 1
    return sorted(values)[rank - 1], sorted(values)[-rank]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="a commit, or a folder")
    parser.add_argument("new")
    parser.add_argument("--only", default="", help="part of a network's name")
    parser.add_argument("--policy", default="float16")
    parser.add_argument("--pairs", type=int, default=15, help="of processes, 6 at least (15)")
    parser.add_argument("--steps", type=int, default=10, help="in each process (10)")
    args = parser.parse_args()
    if args.pairs < 6:
        parser.error("--pairs: fewer than 6 have no 95 % interval")
    with tempfile.TemporaryDirectory() as temporary:
        trees = [build(which, Path(temporary, name))
                 for name, which in (("old", args.old), ("new", args.new))]
        table = harness.Table("network", "old ms", "new / old", "95 % from", "to")
        for name in harness.NETWORKS:
            if args.only in name:
                times = [[median(harness.child("seconds", name, args.policy, args.steps,
                                               PYTHONPATH=tree)) for tree in trees]
                         for _ in range(args.pairs)]
                found = [new / old for old, new in times]
                table.row(name, 1e3 * median(old for old, _ in times), median(found),
                          *interval(found))


if __name__ == "__main__":
    main()
