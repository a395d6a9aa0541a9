"""How many files of the package a reader of a training step follows (benchmarks/walk.py)."""
import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMITS = {"first step": (16, 205), "later step": (9, 60)}  # files, changes of file


def test_a_step_visits_few_files():
    done = subprocess.run([sys.executable, "-W", "ignore", "walk.py", "--json"], cwd=BENCHMARKS,
                          stdout=subprocess.PIPE, check=True)
    rows = {row["path"]: row for row in map(json.loads, done.stdout.decode().splitlines())
            if "path" in row}
    for path, (files, changes) in LIMITS.items():
        row = rows[path]
        assert row["files"] <= files, row
        assert row["changes of file"] <= changes, row
