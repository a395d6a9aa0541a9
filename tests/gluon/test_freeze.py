"""Frozen layers do not change in training: neither their parameters nor their moving averages."""
import fine_tune
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import Calling, imported, ready, sequence
from symbolic_fine_tune import first_layers, without_head
from trainers import recorded

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def features():
    net = sequence(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"), nn.BatchNormReLU(),
                   gluon.contrib.nn.SyncBatchNorm(num_devices=1))
    return net


def as_symbol(net):
    return gluon.SymbolBlock(net(mx.sym.var("data")), mx.sym.var("data"), net.collect_params())


class Network(nn.HybridBlock):
    def __init__(self, body):
        super().__init__()
        with self.name_scope():
            self.body, self.head = body, nn.HybridSequential()
            self.head.add(nn.Conv2D(3, 3), nn.BatchNorm(), nn.Dense(2))

    def hybrid_forward(self, F, x):
        return self.head(self.body(x))


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return nd.array(rng.standard_normal((4, 3, 8, 8)) * 3 + 5), nd.array([0, 1, 0, 1])


def values(net):
    return {name: p.data().asnumpy() for name, p in net.collect_params().items()}


def train(net, x, y, steps=3):
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for _ in range(steps):
        trainer.backward(recorded(lambda: LOSS(net(x).astype("float32"), y)))
        assert trainer.step(4)


def assert_only_head_moved(net, before):
    after = values(net)
    for name, value in after.items():
        moved = not np.array_equal(value, before[name])
        assert moved == (name not in net.body.collect_params()), name


@pytest.mark.parametrize("kind", ["blocks", "symbol"])
@pytest.mark.parametrize("policy", [None, "float16", "mixed_bfloat16"])
@pytest.mark.parametrize("when", ["before", "after", "after a run"])
def test_frozen_part_does_not_change(kind, policy, when, data):
    net = Network(as_symbol(features()) if kind == "symbol" else features())
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net(data[0])
    if when == "before":
        assert amp.freeze(net.body) is net.body
    if policy:
        amp.convert(net, policy)
    if when == "after a run":
        train(net, *data, steps=1)
    if when != "before":
        amp.freeze(net.body)
    before = values(net)
    expected = net.body(data[0]).asnumpy()
    trained = recorded(net.body, data[0])
    np.testing.assert_array_equal(trained.asnumpy(), expected)
    train(net, *data)
    assert_only_head_moved(net, before)
    np.testing.assert_array_equal(net.body(data[0]).asnumpy(), expected)


def test_whole_network_and_exported_files_are_frozen(data, tmp_path):
    net = ready(amp.freeze(amp.convert(features())))
    expected = recorded(net, data[0])
    net.export(str(tmp_path / "net"))
    loaded = imported(tmp_path / "net")
    with autograd.record():
        np.testing.assert_allclose(loaded(data[0]).asnumpy(), expected.asnumpy(), atol=0.01)


@pytest.mark.parametrize("policy", [None, "float16"])
def test_batch_norms_in_loops_of_a_symbol_block_are_frozen(policy):
    def step(x, states):
        return mx.sym.BatchNorm(x, fix_gamma=False, name="norm"), states
    out, _ = mx.sym.contrib.foreach(step, mx.sym.var("data"), [])
    net = ready(gluon.SymbolBlock(out, mx.sym.var("data")))
    x = nd.random.normal(5, 3, (2, 8, 3))
    net(x)
    amp.freeze(net)
    if policy:
        amp.convert(net, policy)
    before, expected = values(net), net(x).asnumpy()
    np.testing.assert_array_equal(recorded(net, x).asnumpy(), expected)
    for name, value in values(net).items():
        np.testing.assert_array_equal(value, before[name])
    amp.freeze(net, False)
    assert not np.allclose(recorded(net, x).asnumpy(), expected, atol=1)


def test_gradients_reach_layers_before_a_frozen_one(data):
    net = ready(sequence(nn.Conv2D(3, 1), features(), nn.Dense(2)), mx.init.Xavier())
    net(data[0])
    amp.freeze(amp.convert(net)[1])
    before = values(net)
    train(net, *data)
    moved = {name for name, value in values(net).items() if not np.array_equal(value, before[name])}
    assert moved == set(net.collect_params()) - set(net[1].collect_params())


@pytest.mark.parametrize("kind", ["blocks", "symbol"])
@pytest.mark.parametrize("policy", [None, "float16", "mixed_bfloat16"])
def test_unfrozen_part_trains_as_if_never_frozen(kind, policy, data):
    found = []
    for again in (False, True):
        mx.random.seed(2)
        net = Network(as_symbol(features()) if kind == "symbol" else features())
        net.initialize(mx.init.Xavier(), force_reinit=True)
        net.hybridize()
        net(data[0])
        if again:
            amp.freeze(net.body)
        if policy:
            amp.convert(net, policy)
        if again:
            with autograd.record():
                net.body(data[0])
            assert amp.freeze(net.body, False) is net.body
        before = values(net)
        train(net, *data)
        found.append(values(net))
        assert not any(np.array_equal(value, before[name]) for name, value in found[-1].items())
    for one, other in zip(*(each.values() for each in found)):
        np.testing.assert_array_equal(one, other)


def test_own_block_with_averages_is_refused():
    own_norm = Calling(
        lambda F, x, gamma, beta, mean, var: F.BatchNorm(x, gamma, beta, mean, var),
        parameters={name: {"shape": (3,), "init": "ones", "differentiable": name in "gamma beta"}
                    for name in ("gamma", "beta", "mean", "var")})
    net = sequence(nn.BatchNorm(in_channels=3), own_norm)
    with pytest.raises(ValueError, match=r"Calling .*_mean, .*_var.*use_global_stats=True"):
        amp.freeze(net)
    assert net[0].gamma.grad_req == "write"
    assert not net[0]._kwargs["use_global_stats"]


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="Received: Symbol"):
        amp.freeze(mx.sym.var("x"))


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["blocks", "symbol"])
def test_fine_tuning_freezes_first_layers(kind, layers, data):
    body = ready(features(), mx.init.Xavier())
    body(data[0])
    if kind == "symbol":
        whole = mx.sym.FullyConnected(body(mx.sym.var("data")), num_hidden=2)
        body = gluon.SymbolBlock(without_head(whole, freeze=layers), mx.sym.var("data"),
                                 body.collect_params())
    fine_tune.freeze(body, layers)
    net = Network(body)
    net.head.initialize()
    net(data[0])
    amp.convert(net)
    before = values(net)
    train(net, *data)
    names = first_layers(body.collect_params(), layers)
    assert len(names) == layers
    for name, value in values(net).items():
        assert np.array_equal(value, before[name]) == (name.rsplit("_", 1)[0] in names or
                                                       name.rsplit("_", 2)[0] in names), name


# ---- Module

def symbol():
    x = mx.sym.var("data")
    for i in range(3):
        x = mx.sym.BatchNorm(x, fix_gamma=i == 1, name=f"norm{i}")
        x = mx.sym.FullyConnected(x, num_hidden=4, name=f"dense{i}")
    return mx.sym.SoftmaxOutput(x, name="softmax")


@pytest.mark.parametrize("kind", [amp.Module, amp.BucketingModule])
@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_fixed_names_freeze_averages(kind, policy, scale):
    net = amp.convert_symbol(symbol(), policy) if policy else symbol()
    names = ["norm0_gamma", "norm0_beta", "norm1_beta", "norm2_beta", "dense0_weight"]
    if kind is amp.BucketingModule:
        module = kind(lambda key: (net, ("data",), ("softmax_label",)), default_bucket_key=8,
                      fixed_param_names=names, loss_scale=scale)
    else:
        module = kind(net, fixed_param_names=names, loss_scale=scale)
    rng = np.random.default_rng(0)
    x, y = nd.array(rng.standard_normal((8, 4)) + 2), nd.array(rng.integers(0, 4, 8))
    described = [("data", (8, 4))], [("softmax_label", (8,))]
    module.bind(*described)
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    before = [{k: v.asnumpy() for k, v in part.items()} for part in module.get_params()]
    module.forward_backward(mx.io.DataBatch([x], [y], 0, 0, 8, *described))
    assert module.update()
    nd.waitall()  # MXNet's batch norm updates its averages without a dependency
    moved = {name for part, was in zip(module.get_params(), before) for name in part
             if not np.array_equal(part[name].asnumpy(), was[name])}
    assert moved.isdisjoint(names)
    # norm2 learns gamma; norm1 has no other parameter than beta
    assert {n for n in moved if "moving" in n} == {"norm2_moving_mean", "norm2_moving_var"}
