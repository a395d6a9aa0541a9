"""The table of a folder of logs: python results/table.py results/fine_tune_symbolic ...

Runs of one seed begin with the same weights and see the images in the same order, so they are
compared one by one: the interval is that of the mean of their differences.
"""
import json
import re
import sys
from pathlib import Path
from statistics import mean, stdev

from scipy.stats import t


def result(path):
    """Test accuracy after the last epoch, in percent, and how many steps were skipped."""
    log, lines = path.read_text(), path.with_suffix(".jsonl")
    if lines.exists():
        last = json.loads(lines.read_text().splitlines()[-1])
        return 100 * (1 - last["err_top1"]), last["skipped"]
    return 100 * float(re.findall(r"Validation-accuracy=(\S+)", log)[-1]), \
        log.count("step skipped")


for folder in map(Path, sys.argv[1:]):
    kinds = {path.name.rsplit("-", 1)[0] for path in folder.glob("*-seed*.log")}
    if not kinds:
        continue
    print(f"\n{folder.name}\n\n| runs | test accuracy of each seed | mean | standard deviation "
          "| skipped steps | minus float32 (95 %) |\n| --- | --- | --- | --- | --- | --- |")
    for kind in sorted(kinds, key=lambda kind: (kind != "float32", kind)):
        results = [result(path) for path in sorted(folder.glob(f"{kind}-seed*.log"))]
        accuracies = [accuracy for accuracy, _ in results]
        if kind == "float32":
            reference, difference = accuracies, ""
        else:
            differences = [a - b for a, b in zip(accuracies, reference)]
            half = t.ppf(0.975, len(differences) - 1) * stdev(differences) / len(differences) ** 0.5
            difference = f"{mean(differences):+.2f} ± {half:.2f}"
        print(f"| {kind} | {', '.join(f'{a:.2f}' for a in accuracies)} | {mean(accuracies):.2f} "
              f"| {stdev(accuracies):.2f} | {', '.join(str(skipped) for _, skipped in results)} "
              f"| {difference} |")
