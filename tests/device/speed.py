"""Measures steps of a network on GPU 0 in one of several ways: python speed.py NETWORK ROWS

run.py starts it in the environment of the way (ways.py). A row has the milliseconds of a step, or
with --predict of a prediction, in blocks of ten and their median. --small has the sizes of a
software GPU. NETWORK is resnet50 (as in torchvision), resnet50_v1 (as in MXNet's zoo, with biases),
mobilenet, unet, ssd (needs gluoncv), transformer, bert or lstm.
"""
import argparse
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import gluon_amp as amp  # noqa: E402
import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.gluon import nn, rnn  # noqa: E402
from rows import add  # noqa: E402
from ways import BEFORE, WAYS  # noqa: E402


class Bottleneck(gluon.HybridBlock):
    """A residual block whose second convolution has the stride, without biases."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        with self.name_scope():
            self.body, self.down = nn.HybridSequential(), nn.HybridSequential()
            self.body.add(*convolution(width, 1), nn.Activation("relu"),
                          *convolution(width, 3, stride), nn.Activation("relu"),
                          *convolution(outputs, 1))
            if inputs != outputs:
                self.down.add(*convolution(outputs, 1, stride))

    def hybrid_forward(self, F, x):
        return F.relu(self.body(x) + self.down(x))


def convolution(width, kernel, stride=1):
    """A convolution with its batch norm."""
    return nn.Conv2D(width, kernel, stride, kernel // 2, use_bias=False), nn.BatchNorm()


def resnet(depths):
    net = nn.HybridSequential()
    net.add(*convolution(64, 7, 2), nn.Activation("relu"), nn.MaxPool2D(3, 2, 1))
    inputs = 64
    for level, depth in enumerate(depths):
        for block in range(depth):
            net.add(Bottleneck(inputs, 64 << level, 2 if level and not block else 1))
            inputs = 256 << level
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(1000))
    return net


class LSTM(gluon.HybridBlock):
    """Two layers of 1,024."""

    def __init__(self, width):
        super().__init__()
        with self.name_scope():
            self.lstm = rnn.LSTM(width, num_layers=2, layout="NTC", input_size=width)
            self.out = nn.Dense(10, flatten=False, in_units=width)

    def hybrid_forward(self, F, x):
        return self.out(self.lstm(x))


BLOCKS = 3  # of steps
BATCHES = {"resnet50": 128, "resnet50_v1": 128, "mobilenet": 128, "unet": 16, "ssd": 32,
           "transformer": 32, "bert": 32, "lstm": 64}


def network(name, small=False, batch=None):
    """A network and its batch."""
    from networks import Bert, Encoder, UNet
    count = batch or (2 if small else BATCHES[name])
    if name == "bert":
        length = 16 if small else 128
        layers, width, heads = (1, 64, 4) if small else (12, 768, 12)
        return (Bert(layers, width, heads, length, dropout=0.0),
                nd.random.randint(0, 30522, (count, length)).astype("float32"))
    if name == "lstm":
        length, width = (4, 32) if small else (64, 1024)
        return LSTM(width), nd.random.normal(shape=(count, length, width))
    if name == "transformer":
        return Encoder(256, 4), nd.random.normal(shape=(count, 4 if small else 64, 256))
    if name == "ssd":
        from networks import ssd
        return ssd(), nd.random.normal(shape=(count, 3, *[64 if small else 256] * 2))
    zoo, size = gluon.model_zoo.vision.get_model, 32 if small else 224
    # a software GPU takes minutes for 50 layers
    make = {"resnet50": lambda: resnet((1, 1) if small else (3, 4, 6, 3)),
            "resnet50_v1": lambda: zoo(f"resnet{18 if small else 50}_v1"),
            "mobilenet": lambda: zoo("mobilenetv2_0.25" if small else "mobilenetv2_1.0"),
            "unet": lambda: UNet(8 if small else 64)}[name]
    return make(), nd.random.normal(shape=(count, 3, size, size))


def measure(name, way, args):
    """Milliseconds of a step, MiB in use, samples a second."""
    gpu = mx.gpu(0)
    if way == "mx.contrib.amp":
        from mxnet.contrib import amp as contrib
        contrib.init()
    net, data = network(name, args.small, args.batch)
    net.initialize(mx.init.Xavier(), ctx=gpu)
    data = data.as_in_context(gpu)
    ours = way in ("gluon_amp", BEFORE)
    if ours:
        amp.convert(net)
    net.hybridize(static_alloc=True, static_shape=True)
    arguments = net.collect_params(), "sgd", {"learning_rate": 0.001, "momentum": 0.9}
    trainer = amp.Trainer(*arguments) if ours else gluon.Trainer(*arguments)
    if way == "mx.contrib.amp":
        contrib.init_trainer(trainer)

    def step():
        if args.predict:
            net(data)
            return
        with autograd.record():
            loss = (net(data).astype("float32") ** 2).mean()
            if way == "mx.contrib.amp":
                with contrib.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
        if ours:
            trainer.backward(loss)
        elif way != "mx.contrib.amp":
            loss.backward()
        trainer.step(1)

    steps = 1 if args.once else 2 if args.small else 10
    for _ in range(1 if args.once else 2 if args.small else 8):
        step()
    nd.waitall()
    cpu, found, host = time.process_time(), [], []
    for _ in range(BLOCKS):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        host.append(1e3 * (time.perf_counter() - begin) / steps)
        nd.waitall()
        found.append(1e3 * (time.perf_counter() - begin) / steps)
    free, total = mx.context.gpu_memory_info(0)
    ms = statistics.median(found)
    return {"batch": len(data), "ms": ms, "blocks": found, "host_ms": statistics.median(host),
            "cpu_ms": 1e3 * (time.process_time() - cpu) / steps / BLOCKS,
            "samples": 1e3 * len(data) / ms, "mib": (total - free) / 2**20}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=BATCHES)
    parser.add_argument("rows")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--way", choices=(*WAYS, BEFORE), default="gluon_amp")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--once", action="store_true", help="one step")
    args = parser.parse_args()
    what = {"part": "prediction"} if args.predict else {}
    add(args.rows, network=args.network, way=args.way, **what,
        **measure(args.network, args.way, args))


if __name__ == "__main__":
    main()
