"""Measures the overhead of dispatch for float32 calls: `mx.nd.add` of 16 numbers.

Processes with the engine and without it (GLUON_AMP_ENGINE=off) alternate. It prints the medians,
and the median difference of the pairs with its 95 % confidence interval, in microseconds.
"""
import argparse
import os
import subprocess
import sys
from statistics import median

from compare import interval

CALLS = """
import gluon_amp, time
import mxnet as mx
x, y = mx.nd.ones(16), mx.nd.ones(16)
best = []
for _ in range(40):
    start = time.perf_counter()
    for _ in range(500):
        mx.nd.add(x, y)
    mx.nd.waitall()
    best.append((time.perf_counter() - start) / 500)
print(min(best))
"""


def microseconds(**variables):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CALLS], check=True, text=True,
                          capture_output=True, env={**os.environ, **variables})
    return 1e6 * float(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30,
                        help="number of pairs of processes, at least 6 (30)")
    args = parser.parse_args()
    pairs = [(microseconds(GLUON_AMP_ENGINE="off"), microseconds()) for _ in range(args.pairs)]
    off, on = zip(*pairs)
    differences = [b - a for a, b in pairs]
    low, high = interval(differences)
    print(f"without {median(off):.2f}, with {median(on):.2f}, difference "
          f"{median(differences):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
