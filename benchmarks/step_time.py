"""Step time and memory of float16 over float32: `make bench`.

A step is forward, backward and SGD with momentum, on a hybridized static net. Steps
of the two types alternate, and what is shown is the median of the pairs' ratios: the
machine may be busy with other things. Where PyTorch is installed, the same nets run
there under its float16 autocast, in the same way.
"""
import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "2")

import gluon_amp as amp
from gluon_amp._mxnet import mx, np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn


class LSTM(gluon.HybridBlock):
    """Two layers of 256, over 35 steps of a batch of 32."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.lstm = rnn.LSTM(256, num_layers=2, input_size=256)
            self.out = nn.Dense(1000, flatten=False, in_units=256)

    def hybrid_forward(self, F, x):
        return self.out(self.lstm(x))


class Transformer(gluon.HybridBlock):
    """One encoder layer of width 256, 4 heads, over 32 sentences of 64 words."""

    def __init__(self, width=256, heads=4, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.scale = heads, (width // heads) ** -0.5
        with self.name_scope():
            self.qkv = nn.Dense(3 * width, flatten=False, in_units=width)
            self.proj = nn.Dense(width, flatten=False, in_units=width)
            self.up = nn.Dense(4 * width, flatten=False, in_units=width)
            self.down = nn.Dense(width, flatten=False, in_units=4 * width)
            self.gelu = nn.GELU()
            self.norms = nn.HybridSequential()
            self.norms.add(nn.LayerNorm(in_channels=width), nn.LayerNorm(in_channels=width))

    def hybrid_forward(self, F, x):
        q, k, v = (self._split(p) for p in F.split(self.qkv(x), num_outputs=3, axis=-1))
        weights = F.softmax(F.batch_dot(q, k, transpose_b=True) * self.scale)
        mixed = F.batch_dot(weights, v).reshape((-4, -1, self.heads, 0, 0))
        mixed = mixed.transpose((0, 2, 1, 3)).reshape((0, 0, -1))
        x = self.norms[0](x + self.proj(mixed))
        return self.norms[1](x + self.down(self.gelu(self.up(x))))

    def _split(self, x):
        x = x.reshape((0, 0, -4, self.heads, -1)).transpose((0, 2, 1, 3))
        return x.reshape((-3, 0, 0))


def zoo(name):
    return lambda: gluon.model_zoo.vision.get_model(name)


NETS = {  # name: (network, shape of a batch)
    "resnet50 224px b8": (zoo("resnet50_v1"), (8, 3, 224, 224)),
    "resnet18 64px b32": (zoo("resnet18_v1"), (32, 3, 64, 64)),
    "mobilenetv2 128px b8": (zoo("mobilenetv2_1.0"), (8, 3, 128, 128)),
    "lstm 2x256": (LSTM, (35, 32, 256)),
    "transformer 256": (Transformer, (32, 64, 256)),
}


def stepper(make, shape, policy):
    """A function that trains one step and waits for it."""
    mx.random.seed(1)
    np.random.seed(1)
    net = make()
    net.initialize(mx.init.Xavier())
    if policy != "float32":
        amp.convert(net, policy)
    net.hybridize(static_alloc=True, static_shape=True)
    optimizer = {"learning_rate": 0.01, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_params(), amp.optimizer("sgd", **optimizer)
                            if policy != "float32" else mx.optimizer.SGD(**optimizer))
    data = nd.random.normal(shape=shape)

    def step():
        with autograd.record():
            loss = net(data).square().mean()
        loss.backward()
        trainer.step(1)
        nd.waitall()

    return step


def ratio(first, second, pairs):
    """Seconds of the first, and the ratio of the second to it, medians over pairs."""
    for _ in range(3):
        first(), second()
    ratios, seconds = [], []
    for _ in range(pairs):
        start = time.perf_counter()
        first()
        middle = time.perf_counter()
        second()
        seconds.append(middle - start)
        ratios.append((time.perf_counter() - middle) / seconds[-1])
    return median(seconds), median(ratios)


def peak_bytes(name, policy):
    """Memory that a process needs to train, above what it needs to import MXNet."""
    code = (f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
            "import step_time as b;"
            f"before = b.high_water(); step = b.stepper(*b.NETS[{name!r}], {policy!r});"
            "step(); step(); step(); print(b.high_water() - before)")
    return int(subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True,
                              capture_output=True, text=True).stdout.split()[-1])


def high_water():
    """The most bytes that this process has had in memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status).group(1))


def convert_seconds():
    """What conversion adds to ResNet-152's first forward."""
    def first_forward(policy):
        net = gluon.model_zoo.vision.resnet152_v1()
        net.initialize()
        data = nd.zeros((1, 3, 64, 64))
        net.hybridize()
        start = time.perf_counter()
        if policy != "float32":
            amp.convert(net, policy)
        net(data).wait_to_read()
        return time.perf_counter() - start

    return median(first_forward("float16") - first_forward("float32") for _ in range(3))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="float16")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", default="", help="part of a network's name")
    parser.add_argument("--no-memory", action="store_true")
    args = parser.parse_args()
    try:
        import torch_nets
    except ImportError:
        torch_nets = None
        print("PyTorch is not installed: its table is left out (pip install 'gluon-amp[bench]')")
    print("| network | float32 ms | float16 / float32 | peak memory |")
    print("| --- | --- | --- | --- |")
    nets = {name: net for name, net in NETS.items() if args.only in name}
    for name, (make, shape) in nets.items():
        seconds, times = ratio(stepper(make, shape, "float32"),
                               stepper(make, shape, args.policy), args.pairs)
        memory = ""
        if not args.no_memory:
            memory = f"{peak_bytes(name, args.policy) / peak_bytes(name, 'float32'):.2f}"
        print(f"| {name} | {seconds * 1e3:.0f} | {times:.2f} | {memory} |", flush=True)
    if not args.only:
        print(f"\nconvert of ResNet-152 and its first forward: {convert_seconds():+.2f} s")
    if torch_nets:  # last: its threads spin beside MXNet's
        print("\n| PyTorch | float32 ms | float16 autocast / float32 |\n| --- | --- | --- |")
        for name, (_, shape) in nets.items():
            seconds, times = ratio(*torch_nets.steppers(name, shape), max(3, args.pairs // 5))
            print(f"| {name} | {seconds * 1e3:.0f} | {times:.1f} |", flush=True)


if __name__ == "__main__":
    main()
