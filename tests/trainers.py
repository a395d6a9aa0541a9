"""A small convolutional network, and a network with known gradients, for tests of Trainer."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
SGD = {"learning_rate": 0.1, "momentum": 0.9}
DEVICES = [mx.cpu(0), mx.cpu(1)]


def make(policy="float32", devices=None):
    """A small convolutional net with the same initial values at each call."""
    mx.random.seed(3)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8), nn.Activation("relu"),
            nn.GlobalAvgPool2D(), nn.Dense(5, in_units=8))
    net.initialize(mx.init.Xavier(), ctx=devices or mx.cpu())
    net(nd.zeros((1, 3, 8, 8), ctx=(devices or [mx.cpu()])[0]))
    return amp.convert(net, policy)


class One(gluon.Block):
    """Parameters whose gradients are the data: loss = sum(a * x), a in float16, b in float32."""

    def __init__(self, grad_req="write", devices=None, value=1.0, size=4):
        super().__init__()
        for name, dtype in (("a", "float16"), ("b", "float32")):
            self.params.get(name, shape=(size,), dtype=dtype, grad_req=grad_req,
                            init=mx.init.Constant(value))
        self.initialize(ctx=devices or mx.cpu())
        self.a, self.b = (self.params.get(name) for name in "ab")

    def forward(self, x, y):  # "* 1": MXNet's cast alone does not accumulate gradients
        return ((self.a.data(x.ctx) * 1).astype("float32") * x
                + self.b.data(x.ctx) * y).sum().reshape(1)


def learn(net, trainer, *data):
    """Makes one step and returns whether it updated."""
    trainer.backward(recorded(net, *data))
    return trainer.step(1)


def backward(net, trainer, x=1.0, y=1.0):
    """A backward pass from the losses of all devices of `One`, with these data."""
    trainer.backward([recorded(net, ones(x, device=d), ones(y, device=d))
                      for d in net.a.list_ctx()])


def on_all_devices(net):
    """The values of all parameters on all devices."""
    return {float(number) for p in net.collect_params().values() for array in p.list_data()
            for number in array.asnumpy()}


def ones(scale=1.0, size=4, device=None):
    return nd.full(size, scale, ctx=device or mx.cpu())


def clip(gradients, limit):
    """Clips gradients to a global norm in place, as users of each mode do. MXNet's function does
    not take `mx.np` arrays."""
    if not mx.util.is_np_array():
        return gluon.utils.clip_global_norm(gradients, limit)
    norm = np.sqrt(sum((gradient ** 2).sum().item() for gradient in gradients))
    for gradient in gradients:
        gradient[:] *= min(1, limit / norm)
    return norm


def values(net):
    return [p.data().asnumpy() for p in net.collect_params().values()]


def same(net, other):
    return all(map(np.array_equal, values(net), values(other)))


def some_batches(rng):
    return [(nd.array(rng.standard_normal((6, 3, 8, 8))), nd.array(rng.integers(0, 5, 6)))
            for _ in range(20)]


def fit(net, trainer, batches):
    losses = []
    for x, y in batches:
        with autograd.record():
            loss = LOSS(net(x), y)
        if isinstance(trainer, amp.Trainer):
            trainer.backward(loss)
        else:
            loss.backward()
        trainer.step(len(y))
        losses.append(loss.mean().asnumpy().item())
    return losses


def with_trainer(net, *args, **kwargs):
    """The network, and a Trainer of its parameters."""
    return net, amp.Trainer(net.collect_params(), *args, **kwargs)


def recorded(function, *arguments):
    with autograd.record():
        return function(*arguments)


def dynamic(**kwargs):
    return amp.DynamicLossScale(**kwargs)


def settled(initial=2.0 ** 16, **kwargs):
    """A dynamic scale after its first steps."""
    return amp.DynamicLossScale(initial, settled=True, **kwargs)
