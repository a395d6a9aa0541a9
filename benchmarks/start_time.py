"""What starting takes: `import gluon_amp` over `import mxnet`, and conversion of ResNet-152.

Both in turns, and the median of the differences.
"""
import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median

import gluon_amp as amp
import harness
from mxnet import gluon, nd

IMPORTS = {  # MXNet 1.9.1 reads np.bool, which numpy 1.24 took away
    "mxnet": "import numpy; numpy.bool = bool; import mxnet",
    "gluon_amp": "import gluon_amp",
}


def import_seconds(name):
    """Seconds of a process that imports one of IMPORTS; not in the checkout's folder."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS[name]]
    return harness.seconds(lambda: subprocess.run(command, check=True, cwd=Path(__file__).parent))


def first_forward(policy):
    """Seconds of conversion and the first forward of ResNet-152."""
    net = gluon.model_zoo.vision.resnet152_v1()
    net.initialize()
    data = nd.zeros((1, 3, 64, 64))
    net.hybridize()

    def forward():
        if policy != "float32":
            amp.convert(net, policy)
        net(data).wait_to_read()

    return harness.seconds(forward)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    table = harness.Table("start", "without gluon_amp ms", "gluon_amp adds ms", "pairs",
                          as_json=args.json)
    for name, function, kinds in (
            ("import", import_seconds, ("mxnet", "gluon_amp")),
            ("convert and first forward of ResNet-152", first_forward, ("float32", "float16"))):
        times = [[1e3 * function(kind) for kind in kinds] for _ in range(args.pairs + 1)]
        times = times[1:]  # the first fills caches
        table.row(name, median(a for a, _ in times), median(b - a for a, b in times), args.pairs)


if __name__ == "__main__":
    main()
