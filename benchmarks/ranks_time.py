"""A step with 1 and 2 ranks on this machine, and the bytes that a rank gets for it.

    python benchmarks/ranks_time.py

ResNet-18, 8 images of 64x64 on each rank, one thread each; medians of some steps, one store after
the other, so that times tell little on a machine that is busy. Bytes are TCP's, as the system
counts them, of one rank: with 1 rank those that a parameter server sends to it. Where gradients are
float32, both wires of Horovod send them as they are.
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
