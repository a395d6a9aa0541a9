"""Compares the float16 steps of two commits or work trees: `compare.py OLD NEW`.

It builds each into a temporary folder, with the installed MXNet. Processes of both alternate; each
times some steps of one network with its own harness.py. A row has the median ratio of the pairs,
which is below 1 if NEW is faster, and its 95 % confidence interval. It also has the ratio of the
peak memory of ten steps.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from math import comb
from pathlib import Path
from statistics import median

import harness

ROOT = Path(__file__).resolve().parent.parent


class Tree:
    """Installs a commit, or the current files of a folder, into a new folder."""

    def __init__(self, which, folder):
        self.folder, self.source = folder, Path(f"{folder}.source")
        build(which, self.source, folder)

    def run(self, *args):
        """Returns the output of its harness.py."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", self.source / "benchmarks/harness.py",
             *map(str, args)], check=True, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(self.folder)})
        return json.loads(done.stdout.splitlines()[-1])


def build(which, source, folder):
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


def interval(values):
    """Returns the 95 % confidence interval of the median, from order statistics."""
    rank, outside = 0, 0.0
    while outside + comb(len(values), rank) / 2 ** len(values) <= 0.025:
        outside += comb(len(values), rank) / 2 ** len(values)
        rank += 1
    return sorted(values)[rank - 1], sorted(values)[-rank]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="a commit or a folder")
    parser.add_argument("new")
    parser.add_argument("--only", default="", help="run only networks with this text in their name")
    parser.add_argument("--policy", default="float16")
    parser.add_argument("--pairs", type=int, default=15,
                        help="number of pairs of processes, at least 6 (15)")
    parser.add_argument("--steps", type=int, default=10,
                        help="number of steps in each process (10)")
    args = parser.parse_args()
    if args.pairs < 6:
        parser.error("--pairs: a 95 % interval needs 6 or more")
    with tempfile.TemporaryDirectory() as temporary:
        old, new = (Tree(which, Path(temporary, name))
                    for name, which in (("old", args.old), ("new", args.new)))
        table = harness.Table("network", "old ms", "new / old", "95 % from", "to", "memory")
        for name in harness.NETWORKS:
            if args.only in name:
                times = [[median(tree.run("seconds", name, args.policy, args.steps))
                          for tree in (old, new)] for _ in range(args.pairs)]
                found = [after / before for before, after in times]
                memory = [tree.run("memory", name, args.policy, "step") for tree in (old, new)]
                table.row(name, 1e3 * median(before for before, _ in times), median(found),
                          *interval(found), memory[1] / memory[0])


if __name__ == "__main__":
    main()
