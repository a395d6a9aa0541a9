"""Measures the speed and memory of reading logs; with --runs N, the time of a report of N runs.

It reads a log of 1 GB in a temporary folder, in GluonCV's formats. Lines have a logger's prefix or
not, accuracies or errors, and a loss scale; output of other libraries is between them.
"""
import argparse
import tempfile
import time
from itertools import product
from pathlib import Path

import harness
from gluon_amp.reports import read_logs, report

NOISE = "[20:35:14] src/io/iter_image_recordio_2.cc:170: ImageRecordIOParser2: use 31 threads\n"


def epoch(number, prefix, metric, tail, batches=5000):
    """Returns the lines of one epoch."""
    return "".join([
        *(f"{prefix}Epoch[{number}] Batch [{i}]\tSpeed: {2800 + i % 97:f} samples/sec\t"
          f"{metric}=0.{i:06d}\tlr=0.1{i:05d}{tail}\n" for i in range(49, 50 * batches, 50)),
        f"{prefix}[Epoch {number}] training: {metric}=0.744984\n",
        f"{prefix}[Epoch {number}] speed: 2770 samples/sec\ttime cost: 473.752902\n",
        f"{prefix}[Epoch {number}] validation: err-top1=0.228974 err-top5=0.064094{tail}\n",
        *[NOISE] * (batches // 50)])


def report_of_many(args):
    """Writes logs of 20 epochs, half float32 and half float16, in pairs of one recipe."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.runs):
            with open(Path(folder) / f"run{i}.log", "w") as file:
                file.write(f"Namespace(batch_size=128, dtype='float{32 - 16 * (i % 2)}', "
                           f"model='resnet50_v1b', wd={i // 2 / 1e6})\n")
                for number in range(20):
                    file.write(epoch(number, "", "accuracy", "", batches=4).replace(
                        "err-top1=0.228974", f"err-top1={0.3 + (i * 7 % 97) / 1000:.6f}"))
        start = time.perf_counter()
        page = report(sorted(Path(folder).glob("*.log")), Path(folder) / "report")
        table = harness.Table("runs", "seconds", "peak memory MB", "HTML MB", as_json=args.json)
        table.row(args.runs, time.perf_counter() - start, harness.high_water() / 1e6,
                  page.stat().st_size / 1e6)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="(1000)")
    parser.add_argument("--runs", type=int, help="report this number of short runs instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.runs:
        report_of_many(args)
        return
    size = args.megabytes * 10 ** 6
    formats = list(product(("", "INFO:root:"), ("accuracy", "top1-err"),
                           ("", "\tloss-scale=1024\tskipped=3")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        with open(path, "w") as file:
            file.write("Namespace(batch_size=128, dtype='float16', model='resnet50_v1b')\n")
            number = 0
            while file.tell() < size:
                file.write(epoch(number, *formats[number % len(formats)]))
                number += 1
        before = harness.high_water()
        start = time.perf_counter()
        run, = read_logs([path])
        seconds = time.perf_counter() - start
        peak = harness.high_water()
        assert list(run.epochs) == list(range(number))
        table = harness.Table("log MB", "epochs", "MB per second", "peak memory MB",
                              "of it while reading", as_json=args.json)
        megabytes = path.stat().st_size / 1e6
        table.row(megabytes, number, megabytes / seconds, peak / 1e6, (peak - before) / 1e6)


if __name__ == "__main__":
    main()
