"""How long the engine remembers a network's float8 tensors, and which of them together."""
import gc

import gluon_amp as amp
import numpy as np
from gluon_amp._mxnet import mx
from gluon_amp.cpu.library import table
from gluon_amp.cpu.scales import Scales
from mxnet import autograd, gluon, nd


def test_histories_are_freed_some_time_after_their_network(rng):
    net = amp.convert(gluon.nn.Dense(3, in_units=7), "mixed_float8")
    net.initialize()
    with autograd.record():
        net(nd.array(rng.standard_normal((2, 7)))).wait_to_read()
    number = net._amp.scales.id
    assert table().scales(number)
    del net
    gc.collect()
    for _ in range(100):
        Scales()
    assert not table().scales(number)


def test_a_backward_pass_may_outlive_its_network(rng):
    gradients = []
    for early in (False, True):
        net = gluon.nn.Dense(3, in_units=7, use_bias=False)
        net.initialize(mx.init.One())
        amp.convert(net, "mixed_float8")
        x = nd.array(np.arange(14).reshape(2, 7) * 1e-9)
        weight = net.weight.data()
        with autograd.record():
            y = net(x)
        if early:
            del net
            gc.collect()
        y.backward()
        gradients.append(weight.grad.asnumpy())
    assert gradients[0].any()
    assert np.array_equal(*gradients)


class Step(gluon.HybridBlock):
    """Multiplies by a weight before a loop, and in each of its rounds."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(3, 3), init=mx.init.One())

    def hybrid_forward(self, F, x, weight):
        first = F.dot(1024 * x, weight, name="product")
        return first, F.contrib.foreach(
            lambda x, states: (F.dot(x, weight, name="product"), states),
            F.expand_dims(x, 0), [F.zeros((1,))])[0]


def test_a_loops_products_have_histories_of_their_own():
    net = Step()
    net.initialize()
    amp.convert(net, amp.Policy("mine", product="float8_e4m3", scaling="delayed", history=1))
    x = nd.array(2.0 ** -np.arange(9.0).reshape(3, 3))
    for _ in range(3):
        with autograd.record():
            outside, inside = net(x)
    assert np.array_equal(outside.asnumpy(), 1024 * inside[0].asnumpy())
