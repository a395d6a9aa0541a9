"""Trains 57 small networks whose gradients differ by 2^40, and compares dynamic loss scales.

    python benchmarks/loss_scales.py           # 60 steps of each network
    python benchmarks/loss_scales.py --late    # 6,000 steps of one, whose gradients shrink

The first prints for each network:

- the skipped steps in float16, in mixed_float16, and with a scale like PyTorch's in float16, which
  starts at 2^16 / (number of losses) and is halved after an overflow;
- the most backward passes of one of the first ten steps;
- log2 of the scale in steps 1, 2, 3, 4 and 60;
- float32's mean loss of the first and of the last six steps;
- the change of the last losses in float16 and in mixed_float16, as a share of float32's progress.

The second prints how many elements of the gradient are 0 in float16, but not in float32.
"""
import argparse
import math
from dataclasses import dataclass
from typing import List, NamedTuple

from gluon_amp._mxnet import mx, np
from gluon_amp.training.loss_scale import LossScale
from harness import amp
from mxnet import autograd, nd
from scaled_networks import CASES, CLASSES, ROWS, Case, labels, perceptron, sgd

STEPS, BATCHES = 60, 6
LATE = Case(lambda: perceptron(4, 32, 20, "tanh"), labels(ROWS, 32), CLASSES, sgd(0.2))
POLICIES = "float16", "mixed_float16"


@dataclass(frozen=True)
class Halved(LossScale):
    """A loss scale like PyTorch's, which does not grow in so few steps."""
    scale: float
    scales = changes = True

    def update(self, norm, used=None, parameters=()):
        return self if math.isfinite(norm) else Halved(self.scale / 2)


class Counted(autograd.Function):
    """Returns the loss, and counts backward passes."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, loss):
        return loss.copy()

    def backward(self, gradient):
        self.passes += 1
        return gradient


class Training(NamedTuple):
    skipped: int
    passes: int  # the most of one of the first ten steps
    scales: List[float]
    first: float  # mean losses
    last: float


def build(case, policy):
    make, data, loss, optimizer = case
    mx.random.seed(3)
    net = make()
    net.initialize(mx.init.Xavier())
    batches = [tuple(map(nd.array, data(np.random.default_rng(i)))) for i in range(BATCHES)]
    net(batches[0][0])
    amp.convert(net, policy)
    net.hybridize()
    return net, batches, loss, optimizer


def train(name, policy, scale_for):
    """Trains a network with a loss scale for a number of losses."""
    net, batches, loss_fn, optimizer = build(CASES[name], policy)
    size = loss_fn(net(batches[0][0]).astype("float32"), batches[0][1]).size
    trainer = amp.Trainer(net.collect_params(), *optimizer, loss_scale=scale_for(size))
    passes, scales, losses = [], [], []
    for step in range(STEPS):
        x, y = batches[step % BATCHES]
        mx.random.seed(step)  # the same dropout
        counted = Counted()
        with autograd.record():
            loss = counted(loss_fn(net(x).astype("float32"), y))
        scales.append(trainer.loss_scale)
        trainer.backward(loss)
        trainer.step(len(x) if loss.size > 1 else 1)
        losses.append(loss.mean().asscalar())
        passes.append(counted.passes)
    return Training(trainer.skipped, max(passes[:10]), scales, np.mean(losses[:BATCHES]),
                    np.mean(losses[-BATCHES:]))


def first_steps(names):
    print("| network | skipped | passes | scale | float32's loss | change |")
    print("| --- | --- | --- | --- | --- | --- |")
    totals = np.zeros(3, int)
    for name in names:
        exact = train(name, "float32", lambda _: None)
        runs = [train(name, policy, lambda _: "dynamic") for policy in POLICIES]
        skipped = [run.skipped for run in (
            *runs, train(name, "float16", lambda size: Halved(2.0 ** 16 / size)))]
        totals += skipped
        scales = [f"{math.log2(scale):.0f}" for scale in runs[0].scales]
        changes = [(run.last - exact.last) / abs(exact.first - exact.last) for run in runs]
        print(f"| {name} | {', '.join(map(str, skipped))} | {max(run.passes for run in runs)} | "
              f"{', '.join(scales[:4])} .. {scales[-1]} | {exact.first:.3g} to {exact.last:.3g} | "
              f"{changes[0]:.2%}, {changes[1]:.2%} |", flush=True)
    print("skipped steps:", *totals)


def late_steps(policy, steps):
    """Trains on 6 batches until their gradients are small. It compares the gradient with those in
    float32, and at the largest scale by the norm."""
    net, batches, loss_fn, optimizer = build(LATE, policy)
    reference, *_ = build(LATE, "float32")
    trainer = amp.Trainer(net.collect_params(), *optimizer)
    pairs = list(zip(net.collect_params().values(), reference.collect_params().values()))
    for step in range(1, steps + 1):
        x, y = batches[step % BATCHES]
        with autograd.record():
            loss = loss_fn(net(x).astype("float32"), y)
        trainer.backward(loss)
        trainer.step(len(x))
        if step % (steps // 6) == 0:
            for low, full in pairs:
                full.set_data(low.data().astype("float32"))
            norm = trainer.gradient_norm * len(x)
            limit = 2.0 ** math.floor(math.log2(65504 / 4 / norm))
            lost = [share_lost(net, reference, x, y, loss_fn, scale, pairs)
                    for scale in (trainer.loss_scale, min(limit, 2.0 ** 24))]
            print(f"step {step}: loss {loss.mean().asscalar():.2g}, norm {norm:.2g}, scale "
                  f"2^{math.log2(trainer.loss_scale):.0f} of 2^{math.log2(limit):.0f}, skipped "
                  f"{trainer.skipped}, lost {lost[0]:.3%}, at the limit {lost[1]:.3%}", flush=True)


def share_lost(net, reference, x, y, loss_fn, scale, pairs):
    """Returns the share of elements of the gradient that are 0, but not in float32."""
    for one, factor in ((net, scale), (reference, 1.0)):
        with autograd.record():
            loss = loss_fn(one(x).astype("float32"), y)
        autograd.backward([loss], [nd.full(loss.shape, factor)])
    found = [(low.grad().asnumpy(), full.grad().asnumpy()) for low, full in pairs]
    return sum(((a == 0) & (b != 0)).sum() for a, b in found) / sum((b != 0).sum()
                                                                  for _, b in found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--policy", default="float16", choices=POLICIES, help="of --late")
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--steps", type=int, default=6000, help="of --late")
    given = parser.parse_args()
    if given.late:
        late_steps(given.policy, given.steps)
    else:
        first_steps(given.networks)
