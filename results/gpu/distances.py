"""Prints the relative errors of the test networks on a GPU, compared with the CPU, as CSV.

    python tests/software_gpu --compute python results/gpu/distances.py [NETWORK ...]
"""
import csv
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "software_gpu" / "computed")]

import gluon_amp  # noqa: E402, F401  (before mxnet)
import networks  # noqa: E402
from mxnet import gluon  # noqa: E402
from mxnet.gluon import nn  # noqa: E402
from test_computed_networks import TABLE, compare  # noqa: E402

COLUMNS = [f"{what} {part}" for what in ("GPU float32", "nudged", "CPU float16", "GPU float16")
           for part in ("output", "gradients")]


class SSDHeads(gluon.HybridBlock):
    """An SSD head: classes and boxes of the anchors of three scales."""

    def __init__(self, anchors=4, classes=5, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.scales = [nn.Conv2D(16, 3, 2, 1, activation="relu") for _ in range(3)]
            self.classes = [nn.Conv2D(anchors * (classes + 1), 3, 1, 1) for _ in range(3)]
            self.boxes = [nn.Conv2D(anchors * 4, 3, 1, 1) for _ in range(3)]
            for block in (*self.scales, *self.classes, *self.boxes):
                self.register_child(block)

    def hybrid_forward(self, F, x):
        found = [], []
        for scale, *heads in zip(self.scales, self.classes, self.boxes):
            x = scale(x)
            for outputs, head in zip(found, heads):
                outputs.append(F.flatten(F.transpose(head(x), (0, 2, 3, 1))))
        return tuple(F.concat(*outputs, dim=1) for outputs in found)


TABLE["ssd_heads"] = SSDHeads, networks.images(32)


def main(names):
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["network", *COLUMNS])
    for name in names or TABLE:
        rows.writerow([name, *(f"{x:.2g}" for pair in compare(name) for x in pair)])
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
