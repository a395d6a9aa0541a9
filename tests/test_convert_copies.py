"""Copies of a converted network, by deepcopy or pickle: they compute the same, on their own."""
import copy
import pickle

import gluon_amp as amp
import networks
import numpy as np
import pytest
from converting import Net, holding, make, step, types
from gluon_amp._mxnet import mx
from mxnet import autograd, nd
from mxnet.gluon import nn

COPIES = [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))]


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_computes_the_same_and_is_independent(used, make_copy, x):
    net = amp.convert(make(), keep=nn.Dense)
    if used:
        step(net, x)
    twin = make_copy(net)
    assert type(twin) is type(net)
    assert types(twin) == types(net)
    out = net(x).asnumpy()
    assert np.array_equal(twin(x).asnumpy(), out)
    twin.output.weight.set_data(twin.output.weight.data() * 2)
    assert not np.array_equal(twin(x).asnumpy(), out)
    assert np.array_equal(net(x).asnumpy(), out)
    step(net, x)
    step(twin, x)
    assert not np.array_equal(twin(x).asnumpy(), out)
    assert type(amp.restore(twin)) is Net
    assert type(net) is not Net


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle"])
def test_a_copy_lies_on_the_same_devices_and_has_the_gradients(make_copy):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = nn.Dense(3, in_units=2)
    net.initialize(ctx=devices)
    amp.convert(net)
    net.weight.grad_req = "add"

    def backward(net):
        with autograd.record():
            losses = [net(nd.ones((1, 2), ctx=d)).sum() for d in devices]
        autograd.backward(losses)
        return [g.asnumpy() for g in net.weight.list_grad()]

    backward(net)
    twin = make_copy(net)
    assert [a.context for a in twin.weight.list_data()] == devices
    for mine, theirs in zip(backward(twin), backward(net)):
        assert np.array_equal(mine, np.full((3, 2), 2))
        assert np.array_equal(theirs, mine)


def test_a_copy_of_a_plain_block_works():
    net = amp.convert(holding(nn.Dense(3, in_units=2), cls=nn.Sequential))
    twin = copy.deepcopy(net)
    assert np.array_equal(twin(nd.ones((1, 2))).asnumpy(), net(nd.ones((1, 2))).asnumpy())


def test_a_symbol_block_trains_predicts_and_is_copied(tmp_path, x):
    net = amp.convert(networks.exported(tmp_path))
    step(net, x)
    out = net(x).asnumpy()
    assert np.array_equal(copy.deepcopy(net)(x).asnumpy(), out)
    assert np.array_equal(pickle.loads(pickle.dumps(net))(x).asnumpy(), out)
