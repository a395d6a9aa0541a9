"""Measures step time, prediction time and memory of float16 relative to float32: `make bench`.

A float32 step uses `gluon.Trainer` with MXNet's SGD; a float16 step uses `amp.convert` and
`amp.Trainer` with a dynamic loss scale. Both use momentum 0.9 and static hybridized networks. Steps
of the two types alternate. The table has the minimum, median and maximum ratio of the pairs, and
the CPU share of other processes. "net.cast / converted" compares MXNet's float16, `net.cast` with
`gluon.Trainer` and a static scale, with the converted network. A prediction is one forward pass.
Memory is the peak of a separate process, above that of imports.
"""
import argparse
import csv
import datetime
import subprocess
from pathlib import Path

import harness
from harness import amp

COLUMNS = {  # measurements, and their columns
    "step": ("float32 ms", "lowest", "float16 / float32", "highest", "pairs", "busy"),
    "cast": ("net.cast / converted",),
    "prediction": ("prediction float32 ms", "prediction"),
    "memory": ("memory",),
    "bfloat16": ("bfloat16 / float32", "bfloat16 memory"),
    "contrib": ("mx.contrib.amp bfloat16 / float32",),
    "torch": ("PyTorch bfloat16 / float32",),
    "prediction-memory": ("memory of a prediction",),
    "workers-memory": ("memory, 4 workers",),
}
BFLOAT16 = "mixed_bfloat16"
HISTORY = Path(__file__).with_name("history.csv")


def measure(what, name, policy, pairs, budget):
    """Returns the cells of one of COLUMNS for one network."""
    if what in harness.MAKERS:
        make = harness.MAKERS[what]
        budget = budget if what == "step" else budget / 4
        found = harness.ratios(make(name, "float32"), make(name, policy), pairs, budget)
        if what == "step":
            return (1e3 * found.seconds, *found[1:])
        return (1e3 * found.seconds, found.median)
    if what == "cast":
        steps = harness.stepper(name, policy), harness.stepper(name, harness.CAST)
        return (harness.ratios(*steps, pairs, budget).median,)
    if what == "bfloat16":
        steps = harness.stepper(name, "float32"), harness.stepper(name, BFLOAT16)
        return (harness.ratios(*steps, pairs, budget / 2).median,
                harness.memory_ratio(name, BFLOAT16, "step"))
    if what == "contrib":
        return (harness.contrib_ratio(name, 7),)
    if what == "torch":
        return (harness.torch_ratio(name, budget / 2),)
    if what == "workers-memory":  # differs by some percent between processes
        return (harness.memory_ratio(name, policy, "step", 3, MXNET_CPU_WORKER_NTHREADS="4"),)
    kind = "prediction" if what == "prediction-memory" else "step"
    return (harness.memory_ratio(name, policy, kind),)


def commit():
    """Returns the commit of the measured gluon_amp, with a + if its files have changed."""
    def git(*args):
        return subprocess.run(["git", "-C", str(Path(amp.__file__).parent), *args], check=True,
                              stdout=subprocess.PIPE, text=True).stdout.strip()

    return git("rev-parse", "--short=7", "HEAD") + ("+" if git("status", "--short", ".") else "")


def record(name, found):
    """Appends the ratios of a network to history.csv."""
    with open(HISTORY, "a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow([
            datetime.date.today(), commit(), harness.machine(), name,
            f"{found['float16 / float32']:.3f}", f"{found['memory']:.3f}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="float16")
    parser.add_argument("--only", default="", help="run only networks with this text in their name")
    parser.add_argument("--pairs", type=int, default=25,
                        help="number of pairs without other load (25)")
    parser.add_argument("--seconds", type=float, default=12,
                        help="time limit after 5 pairs; a quarter for predictions (12)")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, metavar="COLUMN",
                        default=[c for c in COLUMNS if c != "workers-memory"],
                        help=f"columns out of {', '.join(COLUMNS)} (default: all but the last)")
    parser.add_argument("--record", action="store_true", help=f"append to {HISTORY.name}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.record and (not {"step", "memory"} <= set(args.columns) or args.policy != "float16"):
        parser.error("--record needs the columns step and memory, and float16")
    columns = ["network", *(title for what in args.columns for title in COLUMNS[what])]
    table = harness.Table(*columns, as_json=args.json)
    for name in harness.NETWORKS:
        if args.only in name:
            cells = [name]
            for what in args.columns:
                cells += measure(what, name, args.policy, args.pairs, args.seconds)
            table.row(*cells)
            if args.record:
                record(name, dict(zip(columns, cells)))


if __name__ == "__main__":
    main()
