"""Measures a step with 1 and 2 ranks on this machine, and the bytes that a rank receives.

    python benchmarks/ranks_time.py

ResNet-18 with 8 images of 64x64 and one thread on each rank. Times are medians of steps, one store
after another, so they are unreliable on a busy machine. Bytes are the system's TCP counts of one
rank; with 1 rank those from the parameter server. Both wires of Horovod send float32 gradients
unchanged.
"""
import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import harness

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from ranks import Ranks

STORES = [("dist_sync", "float32"), ("dist_sync", "float16"), ("horovod float16", "float32"),
          ("horovod float16", "float16"), ("horovod float32", "float16")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    table = harness.Table("store", "network", "ranks", "ms", "MB received", as_json=args.json)
    with Ranks() as ranks:
        for store, dtype in STORES:
            if store.startswith("horovod") and not find_spec("horovod"):
                continue
            for count in (1, 2):
                told = ranks.run("times_steps", count, store, dtype=dtype, ranks=count,
                                 steps=args.steps)
                assert all(isinstance(one, tuple) for one in told), told
                seconds, received = told[0]
                table.row(store, dtype, count, 1e3 * seconds, received / 1e6)


if __name__ == "__main__":
    main()
