"""A converted network is traced once for each mode, and again only if it changes."""
import copy
import gc
import weakref

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from converting import Net, make
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn
from networks import ready, sequence
from traces import at_most_traces
from trainers import recorded


class OfFour:
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = sequence(*(nn.Dense(3, in_units=3) for _ in range(4)))


class Sliced(OfFour, nn.HybridBlock):
    """Calls a slice of its layers, and each layer of another."""

    def hybrid_forward(self, F, x):
        x = self.body[:2](self.body[0](x))
        for layer in self.body[1:]:
            x = layer(x)
        return x


class SlicedPlain(OfFour, gluon.Block):
    def forward(self, x):
        for layer in self.body[1:]:
            x = layer(x)
        return self.body(x)


def converted(cls, policy="float16"):
    return amp.convert(make(cls), policy)


def run(*nets, steps=1):
    """Trains and predicts."""
    for _ in range(steps):
        for net in nets:
            x = nd.ones((2, 3, 8, 8) if isinstance(net, Net) else (2, 3))
            recorded(net, x).backward()
            net(x).wait_to_read()


@pytest.mark.parametrize("cls", [Sliced, SlicedPlain])
def test_slice_of_layers_does_not_trace_again(cls):
    nets = [converted(cls), converted(cls)]
    with at_most_traces(2) as traces:  # of training and of prediction
        run(*nets, steps=5)
    assert len(traces) == (2 if cls is Sliced else 2 * 4)


def test_another_network_does_not_trace_again(x, capsys):
    net = converted(Net)
    run(net)
    with at_most_traces(0):
        other = converted(Net, "bfloat16")
        run(net)
        net.summary(x)
        copied = copy.deepcopy(net)
        run(net)
        copied.features.add(nn.Activation("relu"))
        amp.restore(copied)
        amp.restore(other)
        other.add = nn.Dense(3)
        run(net)


@pytest.mark.parametrize("change", ["child", "convert", "restore", "again", "shared"])
def test_changed_block_is_traced_again_in_all_networks_that_contain_it(change):
    shared = ready(sequence(nn.Dense(3, in_units=3), nn.HybridSequential()), mx.init.One())
    nets = [sequence(shared) for _ in range(2)]
    if change != "convert":
        for net in nets:
            amp.convert(net)
    alone = converted(Sliced)
    run(*nets, shared, alone)
    before = [net(nd.ones((2, 3))).asnumpy() for net in nets]
    if change in ("restore", "shared"):
        amp.restore(shared)
    if change == "shared":
        run(*nets)
        amp.convert(sequence(shared), "mixed_bfloat16")
    elif change == "again":
        amp.convert(shared, "bfloat16", keep=shared)
    elif change == "convert":
        amp.convert(nets[0])
        nets[0].add(nn.HybridLambda(lambda F, x: x + 1))
        amp.convert(nets[1], "bfloat16")
        before[0] += 1
    (shared[1] if change == "child" else shared).add(nn.HybridLambda(lambda F, x: x + 1))
    with at_most_traces(0):
        run(alone)
    run(*nets, shared)
    for net, was in zip(nets, before):
        assert np.array_equal(net(nd.ones((2, 3))).asnumpy(), was + 1)


def test_traces_do_not_keep_a_network_alive():
    shared = amp.convert(ready(nn.Dense(3, in_units=3)))
    outer = amp.convert(sequence(shared))
    run(outer, shared)
    gone = weakref.ref(outer)
    del outer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("cls", [rnn.LSTM, rnn.GRU, rnn.RNN])
def test_rnn_returns_states_if_it_is_called_with_states(cls, hybridized):
    """MXNet's hybridized layers return what they returned at first."""
    layer = ready(cls(5, input_size=3))
    x, states = nd.ones((2, 4, 3)), layer.begin_state(4)
    expected, last = layer(x, states)
    amp.convert(layer, "bfloat16")
    if hybridized:
        layer.hybridize()
    for _ in range(2):
        np.testing.assert_allclose(layer(x).asnumpy(), expected.asnumpy(), atol=0.01)
        out, found = layer(x, states)
        np.testing.assert_allclose(out.asnumpy(), expected.asnumpy(), atol=0.01)
        for one, other in zip(found, last):
            np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), atol=0.01)


class Counted(nn.HybridBlock):
    """A block with a parameter of its own, which counts its calls and may raise an error."""

    def __init__(self, error=None):
        super().__init__()
        self.calls, self.error = 0, error
        with self.name_scope():
            self.factor = self.params.get("factor", shape=(4,))

    def hybrid_forward(self, F, x, factor):
        self.calls += 1
        if self.error:
            raise self.error
        return F.broadcast_mul(x, factor)


@pytest.mark.parametrize("keep", [(), ".*broadcast_mul.*", amp.ops("broadcast_mul")])
def test_convert_calls_hybrid_forward_once_at_most(keep):
    net = amp.convert(ready(sequence(Counted(), nn.Dense(3), Counted())), keep=keep)
    assert [net[0].calls, net[2].calls] == [1, 1]


def test_convert_hides_no_error_of_the_users_code():
    net = ready(sequence(Counted(ZeroDivisionError("mine"))))
    with pytest.raises(ZeroDivisionError, match="mine"):
        amp.convert(net)
    assert type(net[0]) is Counted
    net[0].error = AttributeError("Symbol has no shape")
    amp.convert(net, keep=[Counted])
