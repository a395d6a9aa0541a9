"""Prints how far each network of the tests on a GPU is from the CPU, as CSV.

    python -m gluon_amp.gpu --compute python results/gpu/distances.py [NETWORK ...]
"""
import csv
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "gpu_computing")]

from test_computed_networks import TABLE, compare  # noqa: E402  (behind its folder)

COLUMNS = [f"{what} {part}" for what in ("GPU float32", "nudged", "CPU float16", "GPU float16")
           for part in ("output", "gradients")]


def main(names):
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["network", *COLUMNS])
    for name in names or TABLE:
        rows.writerow([name, *(f"{x:.2g}" for pair in compare(name) for x in pair)])
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
