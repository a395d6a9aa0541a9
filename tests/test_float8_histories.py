"""How long the engine remembers a network's float8 tensors."""
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
