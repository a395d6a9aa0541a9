"""The table of a folder of logs: python results/table.py results/fine_tune_symbolic ..."""
import json
import re
import sys
from pathlib import Path
from statistics import mean, stdev, variance

from scipy.stats import t


def result(path):
    """Test accuracy after the last epoch, in percent, and how many steps were skipped."""
    log, lines = path.read_text(), path.with_suffix(".jsonl")
    if lines.exists():
        last = json.loads(lines.read_text().splitlines()[-1])
        return 100 * (1 - last["err_top1"]), last["skipped"]
    return 100 * float(re.findall(r"Validation-accuracy=(\S+)", log)[-1]), \
        log.count("step skipped")


def interval(a, b):
    """Half the width of the 95 % interval of the difference of means, after Welch."""
    va, vb = variance(a) / len(a), variance(b) / len(b)
    freedom = (va + vb) ** 2 / (va ** 2 / (len(a) - 1) + vb ** 2 / (len(b) - 1))
    return t.ppf(0.975, freedom) * (va + vb) ** 0.5


for folder in map(Path, sys.argv[1:]):
    print(f"\n{folder.name}\n\n| dtype | test accuracy of each seed | mean | standard deviation "
          "| skipped steps |\n| --- | --- | --- | --- | --- |")
    runs = {}
    for dtype in ("float32", "float16"):
        results = [result(path) for path in sorted(folder.glob(f"{dtype}-seed*.log"))]
        runs[dtype] = [accuracy for accuracy, _ in results]
        print(f"| {dtype} | {', '.join(f'{a:.2f}' for a in runs[dtype])} "
              f"| {mean(runs[dtype]):.2f} | {stdev(runs[dtype]):.2f} "
              f"| {', '.join(str(skipped) for _, skipped in results)} |")
    difference = mean(runs["float16"]) - mean(runs["float32"])
    print(f"\nfloat16 - float32: {difference:+.2f} ± {interval(*runs.values()):.2f} points "
          "(95 % interval)")
