"""Measures steps of a network on GPU 0 in four ways: python speed.py NETWORK ROWS [--small]

Each way is a process of its own, `--way WAY`, because mx.contrib.amp and TF32 are settings of a
process. The ways alternate in three rounds; a row has the milliseconds of a way's steps.
"""
import os
import subprocess
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

WAYS = ("float32 without TF32", "float32", "mx.contrib.amp", "gluon_amp")


class LSTM(gluon.HybridBlock):
    """Two layers of 1,024."""

    def __init__(self, width):
        super().__init__()
        with self.name_scope():
            self.lstm = rnn.LSTM(width, num_layers=2, layout="NTC", input_size=width)
            self.out = nn.Dense(10, flatten=False, in_units=width)

    def hybrid_forward(self, F, x):
        return self.out(self.lstm(x))


def network(name, small):
    """A network, its batch, and the number of samples."""
    from networks import Bert
    if name.startswith("resnet"):
        count, size = (2, 32) if small else (128, 224)
        name = "resnet18" if small else name  # a software GPU takes minutes for ResNet-50
        return (gluon.model_zoo.vision.get_model(f"{name}_v1"),
                nd.random.normal(shape=(count, 3, size, size)), count)
    if name == "bert":
        count, length = (2, 16) if small else (32, 128)
        layers, width, heads = (1, 64, 4) if small else (12, 768, 12)
        return (Bert(layers, width, heads, length, dropout=0.0),
                nd.random.randint(0, 30522, (count, length)).astype("float32"), count)
    count, length, width = (2, 4, 32) if small else (64, 64, 1024)
    return LSTM(width), nd.random.normal(shape=(count, length, width)), count


def measure(name, way, small, once):
    """Milliseconds of a step, MiB in use, samples a second."""
    gpu = mx.gpu(0)
    if way == "mx.contrib.amp":
        from mxnet.contrib import amp as contrib
        contrib.init()
    net, data, count = network(name, small)
    net.initialize(mx.init.Xavier(), ctx=gpu)
    data = data.as_in_context(gpu)
    if way == "gluon_amp":
        amp.convert(net)
    net.hybridize(static_alloc=True, static_shape=True)
    make = amp.Trainer if way == "gluon_amp" else gluon.Trainer
    trainer = make(net.collect_params(), "sgd", {"learning_rate": 0.001, "momentum": 0.9})
    if way == "mx.contrib.amp":
        contrib.init_trainer(trainer)

    def step():
        with autograd.record():
            loss = (net(data).astype("float32") ** 2).mean()
            if way == "mx.contrib.amp":
                with contrib.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
        if way == "gluon_amp":
            trainer.backward(loss)
        elif way != "mx.contrib.amp":
            loss.backward()
        trainer.step(1)

    steps = 1 if once else 2 if small else 20
    for _ in range(1 if once else 2 if small else 6):
        step()
    nd.waitall()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    issued = time.perf_counter() - begin
    nd.waitall()
    seconds = (time.perf_counter() - begin) / steps
    free, total = mx.context.gpu_memory_info(0)
    return {"ms": 1e3 * seconds, "host_ms": 1e3 * issued / steps, "samples": count / seconds,
            "mib": (total - free) / 2**20}


def main(name, path, *flags):
    small, once = "--small" in flags, "--once" in flags
    if "--way" in flags or once:
        way = flags[flags.index("--way") + 1] if "--way" in flags else "gluon_amp"
        add(path, network=name, way=way, **measure(name, way, small, once))
        return
    failed = []
    for _ in range(1 if small else 3):
        for way in WAYS:
            if small and way == "mx.contrib.amp":  # the computing GPU lacks its overflow check
                continue
            tf32 = {"NVIDIA_TF32_OVERRIDE": "0"} if way == WAYS[0] else {}
            done = subprocess.run([sys.executable, "-W", "ignore", __file__, name, path, *flags,
                                   "--way", way], env={**os.environ, **tf32}, check=False)
            failed += [way] if done.returncode else []
    sys.exit(f"{name} fails: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
