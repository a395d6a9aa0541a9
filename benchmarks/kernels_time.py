"""Measures what hand-written kernels save: the step of a small network that uses them, with these
kernels and with the generic one.

Steps with and without the kernels alternate in one process. It prints the medians of the
processor's time in milliseconds, and the median ratio of neighbours with its 95 % confidence
interval.
"""
import argparse
import time
from statistics import median

import gluon_amp as amp
import mxnet as mx
import numpy as np
from compare import interval
from gluon_amp.cpu import library
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn


class Excitation(gluon.HybridBlock):
    """A convolution with squeeze and excitation, and a residual connection."""

    def __init__(self, channels):
        super().__init__()
        with self.name_scope():
            self.convolution = nn.Conv2D(channels, 3, padding=1, in_channels=channels)
            self.squeeze = nn.GlobalAvgPool2D()
            self.narrow = nn.Dense(channels // 4, activation="relu")
            self.widen = nn.Dense(channels, activation="sigmoid")

    def hybrid_forward(self, F, x):
        y = self.convolution(x)
        weights = self.widen(self.narrow(self.squeeze(y)))
        return F.relu(F.broadcast_mul(y, weights.expand_dims(2).expand_dims(3)) + x)


def sequential(*blocks):
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def function(name, **attrs):
    return nn.HybridLambda(lambda F, x: getattr(F, name)(x, **attrs))


def images(batch, channels, size):
    return nd.array(np.random.standard_normal((batch, channels, size, size)))


# operators with hand-written kernels: a network that uses them, and its data
ROWS = {
    "_backward_Embedding": lambda: (
        sequential(nn.Embedding(20000, 256), nn.Dense(64, flatten=False, in_units=256)),
        nd.array(np.random.randint(0, 20000, (16, 128)))),
    "broadcast_mul _backward_broadcast_mul": lambda: (
        sequential(*(Excitation(64) for _ in range(3))), images(16, 64, 28)),
    "Pad _backward_Pad": lambda: (
        sequential(*(block for _ in range(3) for block in (
            nn.ReflectionPad2D(1), nn.Conv2D(32, 3, in_channels=32), nn.Activation("relu")))),
        images(4, 32, 56)),
    "UpSampling _backward_UpSampling": lambda: (
        sequential(nn.Conv2D(32, 3, padding=1), function(
            "UpSampling", scale=2, sample_type="nearest"), nn.Conv2D(16, 3)), images(8, 16, 32)),
}


def measure(make, operators, pairs):
    """The times of steps with the kernels and without them."""
    np.random.seed(0)
    mx.random.seed(0)
    net, data = make()
    net.initialize()
    amp.convert(net)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})

    def milliseconds(generic):
        library.table().use_generic_code(generic.encode())
        start = time.process_time()
        with autograd.record():
            loss = net(data).square().mean()
        trainer.backward(loss)
        trainer.step(1)
        nd.waitall()
        return 1e3 * (time.process_time() - start)

    for _ in range(3):
        milliseconds("")
    times = [(milliseconds(""), milliseconds(operators)) for _ in range(pairs)]
    library.table().use_generic_code(b"")
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="number of pairs of steps (15)")
    args = parser.parse_args()
    library.load()
    for operators, make in ROWS.items():
        times = measure(make, operators, args.pairs)
        low, high = interval([with_ / without for with_, without in times])
        print(f"{operators}: with {median(a for a, _ in times):.1f}, "
              f"without {median(b for _, b in times):.1f}, ratio "
              f"{median(a / b for a, b in times):.2f} ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
