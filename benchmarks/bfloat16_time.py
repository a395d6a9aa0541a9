"""Measures bfloat16 on a CPU relative to float32: `python bfloat16_time.py [NETWORK ...]`.

Steps of both policies alternate. The time is CPU time, which other load on the machine changes
little; a ratio is the median of the pairs.
"""
import argparse
import time
from statistics import median

import harness

NETWORKS = list(harness.NETWORKS)[:6]
POLICIES = ("mixed_bfloat16", "bfloat16")


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
    table = harness.Table("network", "policy", "float32 ms", "lowest", "policy / float32",
                          "highest", as_json=args.json)
    for name in args.networks:
        base = harness.stepper(name, "float32")
        for policy in POLICIES:
            step = harness.stepper(name, policy)
            turns = [(processor_ms(base), processor_ms(step)) for _ in range(args.turns)]
            ratios = [ms / base_ms for base_ms, ms in turns]
            table.row(name, policy, median(base_ms for base_ms, _ in turns), min(ratios),
                      median(ratios), max(ratios))


if __name__ == "__main__":
    main()
