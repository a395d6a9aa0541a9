"""Checks that an X-ray's keep= suffices for 50 steps, on networks that are difficult in float16.

It X-rays each network, applies keep=, X-rays again, and trains in float32 and float16. The second
X-ray must have no findings, and the mean loss of the last ten steps must be within 1 % of
float32's.

    python results/xray/keep.py [NAME ...]
"""
import sys

import gluon_amp as amp
import planted
from mxnet import gluon
from mxnet.gluon import nn
from planted import CLASSES, LOSS, chain, images, pooled, rows, sequences


class Masked(gluon.HybridBlock):
    """Causal attention with a mask of -1e9 and a softmax of exponentials."""

    def __init__(self, width=32):
        super().__init__()
        with self.name_scope():
            self.qkv = nn.Dense(3 * width, flatten=False)
            self.out = nn.Dense(width, flatten=False)
        self.width = width

    def hybrid_forward(self, F, x):
        q, k, v = F.split(self.qkv(x), num_outputs=3, axis=-1)
        scores = F.batch_dot(q, k, transpose_b=True) * self.width ** -0.5
        place = F.contrib.arange_like(x, axis=1)
        later = F.broadcast_greater(place.expand_dims(0), place.expand_dims(1))
        scores = F.broadcast_add(scores, later.expand_dims(0) * -1e9)
        e = F.exp(F.broadcast_sub(scores, F.max(scores, axis=-1, keepdims=True)))
        weights = F.broadcast_div(e, F.sum(e, axis=-1, keepdims=True))
        return x + self.out(F.batch_dot(weights, v))


class RootMeanSquare(gluon.HybridBlock):
    """A squared norm of large numbers."""

    def __init__(self, scale=300.0):
        super().__init__()
        self.scale = scale

    def hybrid_forward(self, F, x):
        y = x * self.scale
        return F.broadcast_div(y, F.sqrt(F.sum(y * y, axis=-1, keepdims=True) + 1e-6))


class Variance(gluon.HybridBlock):
    """The mean of squares minus the square of the mean, with cancellation."""

    def hybrid_forward(self, F, x):
        y = x + 30
        mean = F.mean(y, axis=-1, keepdims=True)
        variance = F.mean(y * y, axis=-1, keepdims=True) - mean * mean
        return F.broadcast_div(F.broadcast_sub(y, mean), F.sqrt(F.abs(variance) + 1e-5))


class Cosine(gluon.HybridBlock):
    """Rows of small numbers, normalized to length 1."""

    def hybrid_forward(self, F, x):
        y = x * 1e-3
        return F.broadcast_div(y, F.sqrt(F.sum(F.square(y), axis=-1, keepdims=True) + 1e-12))


class LongSum(gluon.HybridBlock):
    """A sum of 4,000 squares."""

    def hybrid_forward(self, F, x):
        many = F.broadcast_mul(x.reshape((0, -1, 1)), F.ones((1, 1, 4000)))
        return F.sum(many * many, axis=2) * 1e-3


class Scales(gluon.HybridBlock):
    """Convolutions between powers of two."""

    def __init__(self, channels=16):
        super().__init__()
        with self.name_scope():
            self.one = nn.Conv2D(channels, 3, padding=1)
            self.two = nn.Conv2D(channels, 3, padding=1)

    def hybrid_forward(self, F, x):
        return F.relu(self.two(self.one(x * 2.0 ** 13) * 2.0 ** 6) * 2.0 ** -19) + x * 0.1


NETWORKS = {
    "masked attention": (chain(lambda: nn.Dense(32, flatten=False), Masked),
                         chain(Masked, lambda: nn.Dense(CLASSES)), sequences),
    "squared norms": (chain(lambda: nn.Dense(48), RootMeanSquare),
                      chain(lambda: nn.Dense(48, activation="relu"), lambda: RootMeanSquare(1e4),
                            lambda: nn.Dense(CLASSES)), rows),
    "variance": (chain(lambda: nn.Dense(48), Variance),
                 chain(lambda: nn.Dense(32, activation="relu"), lambda: nn.Dense(CLASSES)), rows),
    "cosine": (chain(lambda: nn.Dense(48), Cosine),
               chain(lambda: nn.Dense(24, activation="tanh"), Cosine, lambda: nn.Dense(CLASSES)),
               rows),
    "long sum": (chain(lambda: nn.Dense(24), LongSum), chain(lambda: nn.Dense(CLASSES)), rows),
    "scaled convolutions": (chain(lambda: nn.Conv2D(16, 3, padding=1), nn.BatchNorm, Scales),
                            chain(Scales, nn.BatchNorm, pooled()), images),
}


def holds(name):
    """Prints a line; returns whether keep= suffices."""
    net, batches = planted.made(name, None)
    keep = amp.xray(net, batches, LOSS, steps=2).keep
    kept, _ = planted.made(name, None, keep=keep)
    still = [f.node for f in amp.xray(kept, batches, LOSS, steps=2).findings if not f.remedy]
    right, found = (planted.trained(name, None, policy, kept_nodes)
                    for policy, kept_nodes in (("float32", ()), ("float16", keep)))
    off = abs(found - right) / abs(right)
    print(f"{name:20} float32 {right:.5f} float16 {found:.5f} ({off:.2%} off) "
          f"still named: {still} keep: {keep}", flush=True)
    return not still and off <= 0.01


def main():
    planted.STEPS = 50
    planted.NETWORKS.update(NETWORKS)
    results = [holds(name) for name in sys.argv[1:] or NETWORKS]
    print(f"{sum(results)} of {len(results)} hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
