"""Measures start-up: `import gluon_amp` after `import mxnet`, and the conversion of ResNet-152.

A process imports MXNet and then gluon_amp, whose time is the overhead: MXNet's import alone differs
more between two processes. Conversions alternate with float32 networks; the result is the median
difference.
"""
import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import harness
from harness import amp
from mxnet import gluon, nd

# MXNet does not import with numpy 1.24 and later: numpy_names.py adds the removed names.
IMPORTS = f"""
import sys, time
sys.path.insert(0, {str(Path(amp.__file__).parent)!r})
import numpy_names
numpy_names.install()
del sys.path[0]
times = [time.perf_counter()]
import mxnet
times.append(time.perf_counter())
import gluon_amp
times.append(time.perf_counter())
print(times[1] - times[0], times[2] - times[1])
"""


def import_seconds():
    """Returns the import times of MXNet and gluon_amp in seconds, outside the checkout and with
    compiled Python files, as in an installation."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS]
    done = subprocess.run(command, check=True, cwd=Path(__file__).parent, env=environment,
                          capture_output=True, text=True)
    return [float(seconds) for seconds in done.stdout.split()]


def first_forward(policy):
    """Returns the seconds of conversion and the first forward pass of ResNet-152."""
    net = gluon.model_zoo.vision.resnet152_v1()
    net.initialize()
    data = nd.zeros((1, 3, 64, 64))
    net.hybridize()
    gc.collect()  # frees earlier networks before the measurement

    def forward():
        if policy != "float32":
            amp.convert(net, policy)
        net(data).wait_to_read()

    return harness.seconds(forward)


def conversion_seconds():
    """Returns the seconds of the float32 network, and the difference of the float16 network."""
    float32, float16 = map(first_forward, ("float32", "float16"))
    return float32, float16 - float32


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    table = harness.Table("start", "without gluon_amp ms", "gluon_amp adds ms", "pairs",
                          as_json=args.json)
    for name, measure in (("import", import_seconds),
                          ("convert and first forward of ResNet-152", conversion_seconds)):
        times = [measure() for _ in range(args.pairs + 1)][1:]  # the first run fills caches
        table.row(name, 1e3 * median(a for a, _ in times), 1e3 * median(b for _, b in times),
                  args.pairs)


if __name__ == "__main__":
    main()
