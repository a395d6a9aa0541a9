"""How fast logs are read, and in how much memory: `make bench`.

A log of 1 GB in a temporary folder, in the formats that GluonCV has used over time, is read once:
lines with and without a logger's prefix, of accuracies and of errors, with a loss scale, and what
other libraries print between them.
"""
import argparse
import resource
import tempfile
import time
from itertools import product
from pathlib import Path

from gluon_amp.report import read

NOISE = "[20:35:14] src/io/iter_image_recordio_2.cc:170: ImageRecordIOParser2: use 31 threads\n"


def epoch(number, prefix, metric, tail, batches=5000):
    """The lines of one epoch."""
    return "".join([
        *(f"{prefix}Epoch[{number}] Batch [{i}]\tSpeed: {2800 + i % 97:f} samples/sec\t"
          f"{metric}=0.{i:06d}\tlr=0.1{i:05d}{tail}\n" for i in range(49, 50 * batches, 50)),
        f"{prefix}[Epoch {number}] training: {metric}=0.744984\n",
        f"{prefix}[Epoch {number}] speed: 2770 samples/sec\ttime cost: 473.752902\n",
        f"{prefix}[Epoch {number}] validation: err-top1=0.228974 err-top5=0.064094{tail}\n",
        *[NOISE] * (batches // 50)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="(1000)")
    size = parser.parse_args().megabytes * 10 ** 6
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
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        run, = read([path])
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert list(run.epochs) == list(range(number))
        print(f"report: {path.stat().st_size / 1e6:,.0f} MB, {number} epochs, read at "
              f"{path.stat().st_size / 1e6 / seconds:.0f} MB/s; peak memory {peak / 1024:.0f} MB, "
              f"of which {(peak - before) / 1024:.0f} MB came while reading")


if __name__ == "__main__":
    main()
