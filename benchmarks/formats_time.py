"""What other formats cost on a CPU, beside float16: `python formats_time.py [NETWORK ...]`.

Steps of all policies take turns, and what counts is their processor time, which others on the
machine change little; each ratio is the median of the turns. Formats without arrays of their own
are rounded in float32 arrays: twice the bytes, and a pass for each rounding.
"""
import argparse
import time
from statistics import median

import gluon_amp as amp
import harness

NETWORKS = ("resnet18 64px b32", "transformer 256", "demo")
POLICIES = ("float32", "tf32", "mixed_bfloat16", "mixed_float8", amp.Policy(
    "mixed_float8, current", product="float8_e4m3", between="bfloat16", gradient="float8_e5m2",
    scaling="current"))


def processor_ms(step):
    start = time.process_time()
    step()
    return 1e3 * (time.process_time() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="for bench_all.py")
    args = parser.parse_args()
    table = harness.Table("network", "policy", "float16 ms", "lowest", "policy / float16",
                          "highest", as_json=args.json)
    for name in args.networks:
        half, *steps = [harness.stepper(name, policy) for policy in ("float16", *POLICIES)]
        turns = [[processor_ms(step) for step in (half, *steps)] for _ in range(args.turns)]
        for i, policy in enumerate(POLICIES, 1):
            ratios = [turn[i] / turn[0] for turn in turns]
            table.row(name, getattr(policy, "name", policy), median(turn[0] for turn in turns),
                      min(ratios), median(ratios), max(ratios))


if __name__ == "__main__":
    main()
