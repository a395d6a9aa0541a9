"""The table of a folder of logs: python results/table.py results/fine_tune_symbolic ..."""
import re
import sys
from pathlib import Path
from statistics import mean, stdev


def last_accuracy(log):
    return 100 * float(re.findall(r"Validation-accuracy=(\S+)", log)[-1])


for folder in map(Path, sys.argv[1:]):
    print(f"\n{folder.name}\n\n| dtype | seeds | test accuracy, each | mean | standard deviation "
          "| skipped steps |\n| --- | --- | --- | --- | --- | --- |")
    for dtype in ("float32", "float16"):
        logs = [path.read_text() for path in sorted(folder.glob(f"{dtype}-seed*.log"))]
        accuracies = [last_accuracy(log) for log in logs]
        skipped = [log.count("step skipped") for log in logs]
        print(f"| {dtype} | {len(logs)} | {', '.join(f'{a:.2f}' for a in accuracies)} "
              f"| {mean(accuracies):.2f} | {stdev(accuracies):.2f} "
              f"| {', '.join(map(str, skipped))} |")
