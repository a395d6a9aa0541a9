"""Trains small networks whose gradients differ by 2^40, and compares dynamic loss scales.

    python benchmarks/loss_scales.py           # 60 steps of each network
    python benchmarks/loss_scales.py --late    # 6,000 steps of one, whose gradients shrink

The first prints for each network the skipped steps, scales and last losses of gluon_amp's scale and
of one like PyTorch's, which starts at 2^16 / (number of losses) and is halved after an overflow.
The second prints how many elements of the gradient are 0 in float16, but not in float32.
"""
import argparse
import math
from dataclasses import dataclass

from gluon_amp._mxnet import mx, np
from gluon_amp.training.loss_scale import LossScale
from harness import amp
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn
from mxnet.gluon.loss import CTCLoss, L2Loss, SoftmaxCrossEntropyLoss

STEPS, BATCHES = 60, 6
CLASSES, DISTANCE = SoftmaxCrossEntropyLoss(), L2Loss()


def stack(*layers):
    net = nn.HybridSequential()
    net.add(*layers)
    return net


class Function(gluon.HybridBlock):
    """A network that computes function(F, x, *layers)."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function = function
        for layer in layers:
            self.register_child(layer)

    def hybrid_forward(self, F, x):
        return self.function(F, x, *self._children.values())


def labels(shape, batch, classes=4, size=1.0, offset=0.0):
    def data(rng):
        x = rng.standard_normal((batch, *shape))
        y = (x.reshape((batch, -1)) @ np.random.default_rng(9).standard_normal(
            (math.prod(shape), classes))).argmax(1)
        return x * size + offset, y
    return data


def targets(batch, size):
    return lambda rng: (x := rng.standard_normal((batch, 8)), x.sum(1, keepdims=True) * size)


def words(rng):
    x = rng.zipf(1.3, (8, 13)) % 100
    return x[:, :-1], x[:, 1:]


def language_model():
    return stack(nn.Embedding(100, 32), rnn.LSTM(32, layout="NTC"), nn.Dense(100, flatten=False))


def convolutions(*norm):
    return stack(nn.Conv2D(8, 3), *norm, nn.Activation("relu"), nn.Conv2D(16, 3),
                 nn.GlobalAvgPool2D(), nn.Dense(4))


def pixels(rng):
    x = rng.standard_normal((2, 3, 16, 16))
    return x, x.sum(1, keepdims=True)


def gram(out, _):
    rows = out.reshape((0, 0, -1))
    return nd.batch_dot(rows, rows.swapaxes(1, 2)).square().sum((1, 2))


def perceptron(width=32, depth=1, kind="relu", outputs=4):
    return stack(*[nn.Dense(width, kind) for _ in range(depth)], nn.Dense(outputs))


SGD, ADAM = ("sgd", {"learning_rate": 0.05}), ("adam", {"learning_rate": 0.01})
SLOW = "sgd", {"learning_rate": 1e-3}
NETWORKS = {  # make, data, loss, optimizer
    "one example": (perceptron, labels((16,), 1), CLASSES, SGD),
    "256 examples": (perceptron, labels((16,), 256), CLASSES, SGD),
    "mean of losses": (perceptron, labels((16,), 64), lambda *x: CLASSES(*x).mean(), SGD),
    "targets of 1e-4": (lambda: perceptron(outputs=1), targets(32, 1e-4), DISTANCE, ADAM),
    "targets of 1e4": (lambda: perceptron(outputs=1), targets(32, 1e4), DISTANCE, ADAM),
    "convolutions": (convolutions, labels((3, 12, 12), 16), CLASSES, SGD),
    "BatchNorm": (lambda: convolutions(nn.BatchNorm()), labels((3, 12, 12), 16), CLASSES, SGD),
    "pixels from 0 to 255": (convolutions, labels((3, 12, 12), 16, size=64, offset=128), CLASSES,
                             ADAM),
    "LSTM": (language_model, words, CLASSES, ADAM),
    "LSTM, sum over words": (language_model, words, lambda *x: CLASSES(*x) * 12, ADAM),
    "CTC": (lambda: stack(rnn.GRU(32, layout="NTC"), nn.Dense(6, flatten=False)),
            lambda rng: (rng.standard_normal((8, 20, 5)), rng.integers(0, 5, (8, 4))), CTCLoss(),
            ADAM),
    "sum over pixels": (lambda: stack(nn.Conv2D(8, 3, padding=1), nn.Conv2D(1, 3, padding=1)),
                        pixels, lambda out, y: (out - y).square().sum((1, 2, 3)), SLOW),
    "Gram matrices": (lambda: nn.Conv2D(16, 3), pixels, gram, ("sgd", {"learning_rate": 1e-9})),
    "critic": (lambda: perceptron(64, 2, outputs=1), targets(32, 1),
               lambda out, y: out * nd.sign(y), ADAM),
    "20 layers of tanh": (lambda: perceptron(32, 20, "tanh"), labels((16,), 32), CLASSES, SGD),
    "inputs of 1e-4, outputs times 1e4": (
        lambda: Function(lambda F, x, a, b: b(a(x)) * 1e4, nn.Dense(32, use_bias=False),
                         nn.Dense(4, use_bias=False)), labels((16,), 32, size=1e-4), CLASSES, SGD),
}


@dataclass(frozen=True)
class Halved(LossScale):
    """A loss scale like PyTorch's, which does not grow in so few steps."""
    scale: float
    scales = changes = True

    def update(self, norm, used=None, parameters=()):
        return self if math.isfinite(norm) else Halved(self.scale / 2)


def build(name, policy):
    make, data, loss, optimizer = NETWORKS[name]
    mx.random.seed(3)
    net = make()
    net.initialize(mx.init.Xavier())
    batches = [tuple(map(nd.array, data(np.random.default_rng(i)))) for i in range(BATCHES)]
    net(batches[0][0])
    amp.convert(net, policy)
    net.hybridize()
    return net, batches, loss, optimizer


def train(name, policy, scale_for):
    """Returns the skipped steps, the scales and the mean of the last losses."""
    net, batches, loss_fn, optimizer = build(name, policy)
    size = loss_fn(net(batches[0][0]).astype("float32"), batches[0][1]).size
    trainer = amp.Trainer(net.collect_params(), *optimizer, loss_scale=scale_for(size))
    skipped, scales, losses = 0, [], []
    for step in range(STEPS):
        x, y = batches[step % BATCHES]
        with autograd.record():
            loss = loss_fn(net(x).astype("float32"), y)
        scales.append(trainer.loss_scale)
        trainer.backward(loss)
        skipped += not trainer.step(len(x) if loss.size > 1 else 1)
        losses.append(loss.mean().asscalar())
    return skipped, scales, np.mean(losses[-BATCHES:])


def first_steps(policy):
    print(f"{'network':34} {'skipped':10} {'log2 of the scale in steps 1, 2, 3, 4 .. 60':40} last "
          "loss: float32, gluon_amp, like PyTorch's")
    totals = np.zeros(2, int)
    for name in NETWORKS:
        exact = train(name, "float32", lambda _: None)[2]
        runs = [train(name, policy, scale_for) for scale_for in (
            lambda _: "dynamic", lambda size: Halved(2.0 ** 16 / size))]
        totals += [skipped for skipped, *_ in runs]
        shown = "; ".join(" ".join(f"{math.log2(s):.0f}" for s in [*scales[:4], scales[-1]])
                          for _, scales, _ in runs)
        print(f"{name:34} {runs[0][0]:3} {runs[1][0]:5}  {shown:40} {exact:.4g}, "
              f"{runs[0][2]:.4g}, {runs[1][2]:.4g}", flush=True)
    print("skipped steps:", *totals)


def late_steps(policy, steps):
    """Trains on 6 batches until their gradients are small. It compares the gradient with those in
    float32, and at the largest scale by the norm."""
    net, batches, loss_fn, _ = build("20 layers of tanh", policy)
    reference, *_ = build("20 layers of tanh", "float32")
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2, "momentum": 0.9})
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
    parser.add_argument("--policy", default="float16", choices=["float16", "mixed_float16"])
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--steps", type=int, default=6000, help="of --late")
    given = parser.parse_args()
    if given.late:
        late_steps(given.policy, given.steps)
    else:
        first_steps(given.policy)
