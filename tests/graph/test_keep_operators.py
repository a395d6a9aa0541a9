"""`keep=amp.ops(...)`: all nodes of an operator stay float32."""
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn
from networks import Calling, ready, sequence


def attention():
    """Two batch_dot, named by MXNet."""
    net = Calling(lambda F, x, dense: F.batch_dot(F.softmax(F.batch_dot(
        dense(x), x, transpose_b=True)), x), nn.Dense(4, in_units=4, flatten=False))
    net.initialize(mx.init.Xavier())
    return net


def types_of(net, op):
    """The types in which the nodes of an operator ran."""
    graph, known = net.mixed_graph(["float32"])
    types = graph.types(known)
    return [types[node.inputs[0]] for node in graph.nodes_within() if node.op == op]


@pytest.mark.parametrize("runs_before", [False, True])
@pytest.mark.parametrize("name", ["FullyConnected", "npx.fully_connected"])
def test_all_nodes_of_an_operator_stay_float32(name, runs_before):
    net, x = attention(), nd.random.normal(shape=(2, 3, 4))
    if runs_before:
        net.hybridize()
        net(x)
    amp.convert(net, "float16", keep=amp.ops(name))
    net(x)
    assert types_of(net, "FullyConnected") == ["float32"]
    amp.convert(net, "float16")
    net(x)
    assert types_of(net, "FullyConnected") == ["float16"]


def test_batched_products_of_a_policy_that_lowers_them():
    policy = amp.Policy("mine", compute="float16", batched="float16")
    net, x = attention(), nd.random.normal(shape=(2, 3, 4))
    amp.convert(net, policy)
    net(x)
    assert types_of(net, "batch_dot") == ["float16"] * 2
    amp.convert(net, policy, keep=[amp.ops("batch_dot"), ".*dense.*"])
    net(x)
    assert types_of(net, "batch_dot") == ["float32"] * 2
    assert types_of(net, "FullyConnected") == ["float32"]


def test_nodes_of_later_traces_and_children():
    net = ready(sequence(nn.Dense(4, in_units=4), Calling(lambda F, x: F.tanh(x))))
    amp.convert(net, keep=amp.ops("FullyConnected", "tanh"))
    net.add(nn.Dense(2, in_units=4))
    net[2].initialize()
    for recording in (False, True):  # two traces
        with mx.autograd.record() if recording else mx.autograd.pause():
            net(nd.ones((2, 4)))
        assert types_of(net, "FullyConnected") == ["float32"] * 2
        assert types_of(net, "tanh") == ["float32"]


@pytest.mark.parametrize("name", ["matmul", "np.matmul", "_npi_matmul"])
def test_names_of_mx_np(name):
    policy = amp.Policy("mine", compute="float16", batched="float16")
    mx.npx.set_np()
    try:
        net = amp.convert(Calling(lambda F, x: F.np.matmul(x, x)), policy, keep=amp.ops(name))
        net(mx.np.ones((2, 3, 3)))
        assert types_of(net, "_npi_matmul") == ["float32"]
    finally:
        mx.npx.reset_np()


def test_symbols_and_checkpoints():
    data = mx.sym.var("data")
    symbol = mx.sym.FullyConnected(mx.sym.tanh(mx.sym.FullyConnected(data, num_hidden=4)),
                                   num_hidden=2)
    low = amp.convert_symbol(symbol)
    kept = amp.convert_symbol(symbol, keep=amp.ops("FullyConnected"))
    assert sum(a.get("__dtype__") == "2" for a in low.attr_dict().values()) == 4
    assert sum(a.get("__dtype__") == "2" for a in kept.attr_dict().values()) == 0


@pytest.mark.parametrize("runs_before", [False, True])
def test_files_record_kept_operators(runs_before, tmp_path):
    net, x = attention(), nd.ones((2, 3, 4))
    if runs_before:
        net.hybridize()
        net(x)
    amp.convert(net, keep=amp.ops("FullyConnected"))
    net(x)
    net.save_parameters(f"{tmp_path}/net.params")
    other = amp.convert(attention(), like=f"{tmp_path}/net.params")
    other(x)
    assert types_of(other, "FullyConnected") == ["float32"]
    with pytest.raises(ValueError, match=r"ops\('FullyConnected'\).*does not keep"):
        amp.convert(attention()).load_parameters(f"{tmp_path}/net.params")


def test_xray_repeats_kept_operators():
    net = ready(sequence(nn.Dense(4, in_units=4), Calling(lambda F, x: F.exp(x * 30))),
                mx.init.One())
    amp.convert(net, amp.Policy("bare", compute="float16", sensitive="float16"),
                keep=amp.ops("FullyConnected"))
    view = amp.xray(net, [(nd.ones((2, 4)) / 8, nd.ones((2, 4)))], gluon.loss.L2Loss())
    assert view.keep[0].names == {"FullyConnected"}
    assert "amp.ops(" in str(view)
    amp.convert(net, "float16", keep=view.keep)
    net(nd.ones((2, 4)))
    assert types_of(net, "FullyConnected") == ["float32"]


def convert(keep):
    amp.convert(nn.Dense(2), keep=keep)


def convert_symbol(keep):
    amp.convert_symbol(mx.sym.tanh(mx.sym.var("x")), keep=keep)


@pytest.mark.parametrize(("call", "said"), [
    (lambda: amp.ops("batchdot"), r"no operator 'batchdot'\. Did you mean batch_dot"),
    (lambda: amp.ops("Nope"), "no operator 'Nope'$"),  # and none has a similar name
    (lambda: amp.ops(np.tanh), "names of operators"), (amp.ops, "at least one operator"),
    (lambda: convert(amp.ops("dot")), r"amp.ops\('dot'\) matches nothing.* are FullyConn"),
    (lambda: convert_symbol(amp.ops("Pooling")), r"\('Pooling'\) matches nothing in this symbol"),
    (lambda: convert("dense"), r"matches nothing in this network\. Did you mean .*dense"),
    (lambda: convert("zzz"), "'zzz' matches nothing in this network$"),
    *((lambda call=call, name=name: call(name), re.escape(f"keep=gluon_amp.ops({name!r})") + "$")
      for call in (convert, convert_symbol)
      for name in ("FullyConnected", "batch_dot", "np.matmul", "_plus_scalar"))])
def test_invalid_operators_are_refused_with_the_remedy(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()
