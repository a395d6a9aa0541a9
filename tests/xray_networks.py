"""Networks and batches for tests of the X-ray."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import Calling, ready, sequence

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def in_a_block(block):
    net = sequence(block)
    return net


def images_net(fault=None):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"),
                nn.MaxPool2D(), nn.Conv2D(12, 3), nn.LeakyReLU(0.1))
        if fault:
            net.add(nn.HybridLambda(fault, prefix="fault_"))
        net.add(nn.GlobalAvgPool2D(), nn.Dropout(0.2), nn.Dense(4))
    return net


def batches(count=2, size=12):
    rng = np.random.default_rng(0)
    return [(nd.array(rng.standard_normal((8, 3, size, size))), nd.array(rng.integers(0, 4, 8)))
            for _ in range(count)]


def converted(fault=None):
    net = ready(images_net(fault), mx.init.Xavier())
    return amp.convert(net)


def rows(count=2):
    rng = np.random.default_rng(0)
    return [(nd.array(rng.standard_normal((8, 6))), nd.array(rng.integers(0, 4, 8)))
            for _ in range(count)]


def prepared(net, keep=()):
    mx.random.seed(1)
    net.initialize(mx.init.Normal(0.3))
    return amp.convert(net, keep=keep)


class WithOwnParameter(gluon.Block):
    """A plain Block that multiplies by its own parameter."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.scale = self.params.get("scale", shape=(1,))
            self.body = images_net()


class Mean(gluon.Block):
    """A plain Block with two hybrid ones, one of which it calls twice."""

    def __init__(self, fault=None):
        super().__init__(prefix="mean_")
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Dense(8, in_units=6, activation="relu"))
            if fault:
                self.body.add(nn.HybridLambda(fault, prefix="fault_"))
            self.out = nn.Dense(4, in_units=8)

    def forward(self, x):
        return self.out((self.body(x) + self.body(x * 2)) / 2)


def calling(forward, *layers):
    """A network that is called as forward(F, its arguments, *layers)."""
    mx.random.seed(1)
    net = ready(Calling(forward, *layers, prefix="net_"), mx.init.Xavier())
    return amp.convert(net)


def named(node):
    """The name of a node in the present mode, from its name in `mx.nd`."""
    if mx.util.is_np_array():
        for ours, theirs in (("_mul", "multiply"), ("_minus", "subtract"), ("scalar", "_scalar"),
                             ("layernorm", "layer_norm")):
            node = node.replace(ours, theirs)
    return node


def layers(*units, flatten=True):
    return [nn.Dense(u, flatten=flatten, prefix=f"net_dense{i}_") for i, u in enumerate(units)]


def check_mended(net, view, given, loss_fn=LOSS, rtol=0.01):
    """With the nodes of `keep`, an X-ray has no findings, and losses are near float32's. Returns
    that X-ray."""
    amp.convert(net, keep=view.keep)
    after = amp.xray(net, given, loss_fn)
    # a lower loss scale helps what is left
    assert ([f for f in after.findings if not f.remedy], after.first_overflow) == ([], None)
    np.testing.assert_allclose(after.losses, after.reference_losses, rtol=rtol)
    return after


def training(looked_at, make=None, give=None, steps=4):
    """Trains a network with Dropout, with an X-ray or without. Returns all its values, and the next
    random numbers of MXNet."""
    mx.random.seed(5)
    np.random.seed(5)
    net = (make or converted)()
    given = (give or batches)(steps)
    net(given[0][0])
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
    if looked_at:
        view = amp.xray(net, given, LOSS, trainer, steps=steps)
        assert all(any(k.backward and c.squares for k, c in step.items()) for _, step in view.steps)
        scales, losses = [scale for scale, _ in view.steps], view.losses
    else:
        scales, losses = [], []
        for data, label in given:
            with autograd.record():
                loss = LOSS(net(data), label)
            trainer.backward(loss)
            scales.append(trainer.loss_scale)
            trainer.step(len(label))
            losses.append(float(loss.mean().asnumpy().item()))
    weights = [p.data().asnumpy().tobytes() for p in net.collect_params().values()]
    return scales, losses, trainer.skipped, weights, nd.random.uniform(shape=4).asnumpy().tobytes()
