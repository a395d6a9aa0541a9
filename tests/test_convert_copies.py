"""Copies and pickles of converted networks compute the same, and are independent."""
import copy
import pickle
import threading

import gluon_amp as amp
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
@mx.util.use_np
def test_a_copy_of_a_numpy_network_is_one(make_copy):
    net = nn.Dense(3, in_units=2)
    net.initialize()
    x = mx.np.ones((1, 2))
    out = amp.convert(net)(x)
    found = make_copy(net)(x)
    assert isinstance(found, mx.np.ndarray)
    assert np.array_equal(found.asnumpy(), out.asnumpy())


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


class WithLock(nn.Dense):
    """A block with something in it that can be neither pickled nor copied."""

    def __init__(self):
        super().__init__(3, in_units=2)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "lock"}

    def __setstate__(self, state):
        self.__dict__.update(state, lock=threading.Lock())


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle"])
def test_a_block_that_says_itself_how_it_is_copied_is_copied_so(make_copy):
    net = WithLock()
    net.initialize()
    twin = make_copy(amp.convert(net))
    assert twin.lock is not net.lock
    assert np.array_equal(twin(nd.ones((1, 2))).asnumpy(), net(nd.ones((1, 2))).asnumpy())


def test_a_copy_of_a_plain_block_works():
    net = amp.convert(holding(nn.Dense(3, in_units=2), cls=nn.Sequential))
    twin = copy.deepcopy(net)
    assert np.array_equal(twin(nd.ones((1, 2))).asnumpy(), net(nd.ones((1, 2))).asnumpy())


# Parameters shared with a new block


@pytest.mark.parametrize("new", [
    lambda net: nn.Dense(5, in_units=8, params=net.output.params),
    lambda net: nn.Dense(5, in_units=8, params=net.output.collect_params()),
    lambda net: nn.Dense(5, in_units=8, params=net.output.params, dtype="float16")])
def test_a_new_block_shares_the_parameters_of_a_converted_one(new, x):
    net = amp.convert(make())
    other = new(net)
    assert other.weight is net.output.weight
    assert types(net.output) == types(other) == dict.fromkeys(net.output.params, "float16")
    amp.convert(other)
    features = nd.random.normal(shape=(2, 8))
    assert np.array_equal(other(features).asnumpy(), net.output(features).asnumpy())
    step(other, features)
    assert np.array_equal(other(features).asnumpy(), net.output(features).asnumpy())


def test_a_new_block_of_another_type_is_refused_by_mxnet_as_ever():
    net = amp.convert(make())
    with pytest.raises(AssertionError, match="desired 'float64' vs stored 'float16'"):
        nn.Dense(5, in_units=8, params=net.output.params, dtype="float64")


def test_a_tied_output_of_a_converted_network_is_part_of_it(x):
    """As language models tie their output to their embedding."""
    net = amp.convert(make())
    with net.name_scope():
        net.tied = nn.Dense(5, in_units=8, params=net.output.params)
    assert net.tied.weight is net.output.weight
    assert types(net.tied) == types(net.output)
    assert np.array_equal(net.tied(nd.ones((2, 8))).asnumpy(),
                          net.output(nd.ones((2, 8))).asnumpy())
