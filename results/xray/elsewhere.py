"""Checks X-rays of other faults than those of planted.py, in other networks.

    python results/xray/elsewhere.py [--output CSV]
"""
import argparse
import sys

import planted
from mxnet.gluon import nn, rnn
from mxnet.gluon.model_zoo.vision.densenet import _make_dense_block, _make_transition
from mxnet.gluon.model_zoo.vision.mobilenet import LinearBottleneck
from mxnet.gluon.model_zoo.vision.resnet import BasicBlockV1, BottleneckV2
from planted import CLASSES, Attention, chain, conv, images, pooled, rows, sequences


def words(rng):
    return rng.standard_normal((16, 12))


def embedded():
    return chain(lambda: nn.HybridLambda(lambda F, x: F.floor(F.clip(x * 8 + 25, 0, 49))),
                 lambda: nn.Embedding(50, 32), lambda: nn.Dense(32, flatten=False))


def long_rows(rng):
    return rng.standard_normal((16, 4, 1, 40))


def classes(width=16):
    return chain(lambda: nn.Dense(width, activation="tanh"), lambda: nn.Dense(CLASSES))


NETWORKS = {
    "bottlenecks": (chain(conv(16), lambda: BottleneckV2(16, 1, False, 16)),
                    chain(nn.BatchNorm, lambda: BasicBlockV1(16, 1, False, 16), pooled()), images),
    "inverted bottlenecks": (chain(conv(16), lambda: LinearBottleneck(16, 16, 2, 1)),
                             chain(lambda: nn.Conv2D(16, 1), nn.BatchNorm, pooled()), images),
    "grouped convolutions": (chain(lambda: nn.Conv2D(16, 3, padding=1),
                                   lambda: nn.Conv2D(32, 3, groups=4, activation="relu")),
                             chain(lambda: nn.Conv2D(16, 3, groups=8), pooled()), images),
    "dense block": (chain(lambda: nn.Conv2D(16, 3, padding=1),
                          lambda: _make_dense_block(2, 2, 8, 0, 1)),
                    chain(lambda: _make_transition(8), pooled()), images),
    "one dimension": (chain(lambda: nn.Conv2D(16, (1, 5), padding=(0, 2)), nn.BatchNorm),
                      chain(lambda: nn.Conv2D(8, (1, 3)), pooled()), long_rows),
    "gru": (chain(lambda: rnn.GRU(24, layout="NTC", input_size=32)),
            chain(lambda: rnn.GRU(16, layout="NTC", input_size=24), lambda: nn.Dense(CLASSES)),
            sequences),
    "embedding": (embedded(), chain(Attention, lambda: nn.Dense(CLASSES)), words),
    "dense": (chain(lambda: nn.Dense(24, activation="relu")), classes(), rows),
    "logits": (chain(lambda: nn.Dense(32, activation="relu"),
                     lambda: nn.Dense(16, activation="relu"), lambda: nn.Dense(CLASSES)),
               chain(), rows),
}


def powers(F, x):
    y = F.abs(x) * 8 + 1
    return F.cbrt(F.sqrt((y * y * y) * (y * y * y))) * 0.1


def row_norm(F, x):
    y = x * 1000
    return F.broadcast_div(y, F.sqrt(F.sum(y * y, axis=1, keepdims=True) + 1e-3))


def variance(F, x):
    y = x * 2 + 60
    mean = F.mean(y, axis=-1, keepdims=True)
    spread = F.mean(y * y, axis=-1, keepdims=True) - mean * mean
    return F.broadcast_div(F.broadcast_sub(y, mean), F.sqrt(F.abs(spread) + 1e-3))


def masks(F, x):
    mask, y = (x > 0.3) * -1e4, x * 3
    for _ in range(8):
        y = y + mask
    return F.maximum(y, x * 0.1 - 1) * 0.5 + F.sigmoid(y) * y


def factors(F, x):
    y = z = F.abs(x) * 4 + 3
    for _ in range(9):
        z = z * y
    for _ in range(9):
        z = z / y
    return z - y + x


def distances(F, x):
    y = x * 2 + 30
    near = F.slice_axis(y, axis=0, begin=0, end=4)
    squares = F.broadcast_add(F.sum(y * y, axis=1, keepdims=True),
                              F.reshape(F.sum(near * near, axis=1), (1, -1)))
    return F.exp((squares - 2 * F.dot(y, near, transpose_b=True)) * -0.01)


def long_dot(F, x):
    flat = F.reshape(F.abs(x) * 50 + 1, (0, 1, -1))
    many = F.tile(F.slice_axis(flat, axis=2, begin=0, end=500), (1, 1, 200))
    total = F.batch_dot(many, F.ones_like(many) * 10, transpose_b=True)
    return F.broadcast_mul(x, F.reshape(total, (0, 1, 1, 1)) * 1e-6)


def cosine(F, x):
    y = x * 1e-5
    return F.broadcast_div(y, F.sqrt(F.mean(y * y, axis=-1, keepdims=True) + 1e-10)) * 10


FAULTS = [
    ("bottlenecks", "an activation of 3e5", lambda F, x: x * 1e3 * 300),
    ("inverted bottlenecks", "exponents that are read", lambda F, x: F.exp(x * 6)),
    ("grouped convolutions", "norms of 1000s", row_norm),
    ("grouped convolutions", "a gate at 2^13",
     lambda F, x: F.sigmoid((x + 2.0 ** 13) - 2.0 ** 13) * x),
    ("dense block", "norms of 1000s", row_norm),
    ("one dimension", "a sum of 1e5 terms", long_dot),
    ("one dimension", "sixth powers", powers),
    ("one dimension", "2^17 and back", lambda F, x: x * 2.0 ** 14 * 8 * 2.0 ** -17),
    ("gru", "eight masks of -1e4", masks),
    ("gru", "ten factors and back", factors),
    ("gru", "gradients of 1e-12", lambda F, x: F.contrib.gradientmultiplier(x, scalar=1e-12)),
    ("embedding", "an offset of 3000", lambda F, x: (x + 3000) - 3000),
    ("embedding", "an epsilon of 1e-10", cosine),
    ("dense", "the variance by squares", variance),
    ("dense", "distances by squares", distances),
    ("dense", "a logarithm of small numbers", lambda F, x: F.log(x * 1e-3 + 1e-10) * 0.1),
    ("dense", "1e-7 and back", lambda F, x: x * 1e-4 * 1e-3 * 1e3 * 1e4),
    ("logits", "an offset of 2000", lambda F, x: x + 2000),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", metavar="CSV")
    options = parser.parse_args()
    planted.STEPS = 50
    planted.NETWORKS.update(NETWORKS)
    table = []
    for network, fault, function in FAULTS:
        planted.FAULTS[fault] = function
        table.append(planted.examine(network, fault))
        planted.show(table[-1])
    planted.conclude(table, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
