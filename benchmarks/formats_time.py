"""Measures formats on a CPU relative to float16: `python formats_time.py [NETWORK ...]`. With
`--bfloat16` and `--sums` it measures bfloat16 and Tensor Cores' sums relative to float32.

Steps of both policies alternate. The time is CPU time, which other load on the machine changes
little; a ratio is the median of the pairs. Emulated formats round float32 arrays: twice the bytes,
and one pass for each rounding.
"""
import argparse
import time
from statistics import median

import harness
from gluon_amp.cpu.tensor_core.gpus import GPUS
from gluon_amp.policy import get_policy
from harness import amp

NETWORKS = ("resnet18 64px b32", "transformer 256", "demo")
FORMATS = ("float32", "tf32", "mixed_bfloat16", "mixed_float8", amp.Policy(
    "mixed_float8, current", product="float8_e4m3", activation="bfloat16", gradient="float8_e5m2",
    scaling="current"))
SUMS = [amp.Policy(f"{gpu} in pieces of {split}" if split else gpu, parameter="float16",
                   compute="float16", accumulate=gpu, split=split)
        for gpu, rule in GPUS.items() if rule.measured for split in (None, 512, 4096)]
SUMS_NETWORK = NETWORKS[0]
BFLOAT16 = ("mixed_bfloat16", "bfloat16")
BFLOAT16_NETWORKS = list(harness.NETWORKS)[:6]


def processor_ms(step):
    start = time.process_time()
    step()
    return 1e3 * (time.process_time() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--sums", action="store_true",
                        help="measure Tensor Cores' sums relative to float32")
    parser.add_argument("--bfloat16", action="store_true", help="beside float32")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="for bench_all.py")
    args = parser.parse_args()
    policies, base, networks = FORMATS, "float16", NETWORKS
    if args.sums:
        policies, base, networks = SUMS, "float32", [SUMS_NETWORK]
    elif args.bfloat16:
        policies, base, networks = BFLOAT16, "float32", BFLOAT16_NETWORKS
    table = harness.Table("network", "policy", f"{base} ms", "lowest", f"policy / {base}",
                          "highest", as_json=args.json)
    for name in args.networks or networks:
        beside = harness.stepper(name, base)
        for policy in policies:
            step = harness.stepper(name, policy)
            turns = [(processor_ms(beside), processor_ms(step)) for _ in range(args.turns)]
            ratios = [ms / base_ms for base_ms, ms in turns]
            table.row(name, get_policy(policy).name, median(base_ms for base_ms, _ in turns),
                      min(ratios), median(ratios), max(ratios))


if __name__ == "__main__":
    main()
