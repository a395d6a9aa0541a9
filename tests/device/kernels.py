"""Lists the kernels of a step of gluon_amp by their time: python kernels.py NETWORK ROWS

PyTorch's profiler sees all kernels of the process. Each row has the calls and microseconds of a
kernel in STEPS steps. Other rows have the milliseconds of a step, of plain forward and backward
passes, and of a prediction.
"""
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import gluon_amp as amp  # noqa: E402
import mxnet as mx  # noqa: E402
from mxnet import autograd, nd  # noqa: E402
from rows import add, milliseconds  # noqa: E402
from speed import network  # noqa: E402

STEPS = 3


def main(name, path):
    import torch
    from torch.profiler import ProfilerActivity, profile
    net, data = network(name)
    net.initialize(mx.init.Xavier(), ctx=mx.gpu(0))
    data = data.as_in_context(mx.gpu(0))
    amp.convert(net)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.001, "momentum": 0.9})

    def loss_of(data):
        return (net(data).astype("float32") ** 2).mean()

    def step():
        with autograd.record():
            loss = loss_of(data)
        trainer.backward(loss)
        trainer.step(1)

    def passes():
        with autograd.record():
            loss = loss_of(data)
        loss.backward()

    for _ in range(6):
        step()
    for what, run in ("step", step), ("passes", passes), ("prediction", lambda: net(data)):
        add(path, network=name, part=what, ms=milliseconds(run, 10))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            step()
        nd.waitall()
        torch.cuda.synchronize()
    for event in sorted(found.key_averages(), key=lambda e: -e.self_device_time_total):
        add(path, network=name, kernel=event.key[:300], count=event.count,
            us=event.self_device_time_total)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # with both libraries loaded, the process may end with a segmentation fault
