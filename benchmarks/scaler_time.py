"""Measures the overhead of loss scaling and clipping.

On the same float32 gradients, steps of gluon_amp.Trainer alternate with those of `mx.contrib.amp`
with its `unscale` and `gluon.utils.clip_global_norm`. The optimizer has no effect, and the time of
gluon.Trainer's step is subtracted from both. Results are medians.
"""
import argparse
import time
from statistics import median

import harness
from gluon_amp._mxnet import mx
from harness import amp
from mxnet import autograd, gluon
from mxnet.contrib.amp.amp import scale_loss, unscale
from mxnet.contrib.amp.loss_scaler import LossScaler

CASES = [  # number of parameters, their size, number of devices
    (160, 160000, 1), (2000, 12800, 1), (160, 12800, 1), (500, 12800, 1), (160, 160000, 2),
    (2000, 12800, 2)]


class Nothing(mx.optimizer.Optimizer):
    """Updates nothing."""

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        pass


class Net(gluon.Block):
    """A network of parameters of one size, which all affect its output."""

    def __init__(self, count, size):
        super().__init__()
        for i in range(count):
            self.params.get(f"p{i}", shape=(size,), init="ones")

    def forward(self, x):
        return mx.nd.add_n(*(p.data(x.context).sum() for p in self.params.values())) * x


def step(net, devices, trainer, kind):
    """Returns the seconds of everything after the backward pass."""
    with autograd.record():
        losses = [net(mx.nd.full(1, 1e-3, ctx=d)) for d in devices]
        if kind == "contrib":
            with scale_loss(losses, trainer) as scaled:
                autograd.backward(scaled)
    if kind == "ours":
        trainer.backward(losses)
    elif kind == "gluon":
        autograd.backward(losses)
    mx.nd.waitall()
    start = time.perf_counter()
    if kind == "contrib":
        trainer.allreduce_grads()
        unscale(trainer)
        for device in devices:
            gluon.utils.clip_global_norm([p.grad(device) for p in trainer._params], 1.0)
        trainer.update(1)
    else:
        trainer.step(1)
    mx.nd.waitall()
    return time.perf_counter() - start


def measure(count, size, devices, rounds=15):
    """Returns the overhead of gluon_amp and mx.contrib.amp in milliseconds."""
    times = {"gluon": [], "contrib": [], "ours": []}
    nets = {}
    for kind in times:
        net = Net(count, size)
        net.initialize(ctx=devices)
        parameters = net.collect_params()
        if kind == "ours":
            trainer = amp.Trainer(parameters, Nothing(), loss_scale="dynamic", clip_norm=1.0)
        else:
            trainer = gluon.Trainer(parameters, Nothing(), update_on_kvstore=False)
        if kind == "contrib":  # as in init_trainer, but without init's patches of operators
            trainer._amp_loss_scaler, trainer._amp_original_scale = LossScaler(), trainer._scale
        nets[kind] = net, trainer
    for _ in range(rounds):
        for kind, (net, trainer) in nets.items():
            times[kind].append(step(net, devices, trainer, kind))
    base = median(times["gluon"])
    return {kind: 1e3 * (median(t) - base) for kind, t in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    table = harness.Table("parameters", "of size", "devices", "contrib.amp ms", "gluon_amp ms",
                          "ratio", as_json=parser.parse_args().json)
    for count, size, devices in CASES:
        added = measure(count, size, [mx.cpu(i) for i in range(devices)])
        table.row(count, size, devices, added["contrib"], added["ours"],
                  added["ours"] / added["contrib"])


if __name__ == "__main__":
    main()
