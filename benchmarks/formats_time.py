"""Step time of other formats over float16's, on a CPU: `python formats_time.py [NETWORK ...]`.

Steps of float16 and of the other policy alternate, as in step_time.py. Formats without arrays of
their own are rounded in float32 arrays: twice the bytes, and a pass for each rounding.
"""
import argparse

import gluon_amp as amp
import harness

NETWORKS = ("resnet18 64px b32", "transformer 256", "demo")
POLICIES = ("tf32", "mixed_bfloat16", "mixed_float8", amp.Policy(
    "mixed_float8, current", product="float8_e4m3", between="bfloat16", gradient="float8_e5m2",
    scaling="current"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", action="store_true", help="for bench_all.py")
    args = parser.parse_args()
    table = harness.Table("network", "policy", "float16 ms", "lowest", "policy / float16",
                          "highest", "pairs", "busy", as_json=args.json)
    for name in args.networks:
        for policy in POLICIES:
            found = harness.ratios(harness.stepper(name, "float16"), harness.stepper(name, policy),
                                   args.pairs, args.seconds)
            table.row(name, getattr(policy, "name", policy), 1e3 * found.seconds, *found[1:])


if __name__ == "__main__":
    main()
