"""Hooks on converted networks read arrays in the plain layout, on every processor."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from mxnet import autograd, nd
from mxnet.gluon import nn

pytestmark = pytest.mark.filterwarnings("ignore:register_op_hook is experimental")


def network(policy):
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(2):
            net.add(nn.Conv2D(32, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.AvgPool2D(), nn.GlobalAvgPool2D(), nn.Dense(4))
    net.initialize(mx.init.Xavier())
    return amp.convert(net, policy)


def seen(policy, training, all_arrays, first):
    """The arrays that a hook reads in the network's first or second call, and the result."""
    found = []

    def hook(_, name, array):
        handle = mx.base.ctypes.cast(array, mx.base.NDArrayHandle)
        found.append((name, mx.nd.NDArray(handle, False).asnumpy()))

    net, x = network(policy), nd.random.normal(shape=(2, 3, 16, 16))
    if not first:
        with autograd.record(training):
            net(x)
    net.register_op_hook(hook, all_arrays)
    with autograd.record(training):
        found.append(("result", net(x).asnumpy()))
    return found


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("all_arrays", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_hook_on_network_with_onednns_layout_reads_plain_arrays(policy, training, all_arrays,
                                                                 first, monkeypatch):
    """Without AVX512_BF16, convolutions lack the layout, but all other code copies to and from it
    as on a processor that has it."""
    monkeypatch.setenv("GLUON_AMP_LAYOUT", "off")
    plain = seen(policy, training, all_arrays, first)
    monkeypatch.delenv("GLUON_AMP_LAYOUT")
    monkeypatch.setattr(library, "keeps_layout", lambda: True)
    found = seen(policy, training, all_arrays, first)
    assert len(found) > 10
    for (name, array), (other, expected) in zip(found, plain):
        assert name == other
        np.testing.assert_array_equal(array, expected, err_msg=str(name))
    assert len(found) == len(plain)
