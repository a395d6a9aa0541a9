"""`convert`: what it refuses, and the trainers that must be made anew."""
import gluon_amp as amp
import numpy as np
import pytest
from converting import Net, make, step, types, values
from gluon_amp._mxnet import mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

# What is refused


@pytest.mark.parametrize("thing", [3, None, "resnet18_v1", [nn.Dense(3)]])
def test_what_is_no_block_is_refused(thing):
    with pytest.raises(TypeError, match=f"takes a gluon Block.*{type(thing).__name__}"):
        amp.convert(thing)


def test_a_symbol_is_sent_to_convert_symbol():
    with pytest.raises(TypeError, match=r"gluon_amp\.convert_symbol"):
        amp.convert(mx.sym.var("x"))


@pytest.mark.parametrize(("forward", "message"), [
    (lambda F, x: x * x.shape[0], "no attribute 'shape'"),
    (lambda F, x: x if x.sum() > 0 else -x, "bool"),
    (lambda F, x: x * float(x.sum().asscalar()), "asscalar"),
    (lambda F, x: F.array([1, 2, 3, 4]) + x, "array")], ids=["shape", "bool", "value", "array"])
def test_a_network_that_is_no_graph_says_what_to_make_of_it(forward, message):
    class Asks(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            return forward(F, x)

    net, x = Asks(), mx.nd.ones((2, 4))
    net(x)
    amp.convert(net)
    with pytest.raises(RuntimeError, match=f"never hybridized, and does not.*{message}.*plain"):
        net(x)


@pytest.mark.parametrize("ask", [
    lambda net, x: net.hybridize(backend="MKLDNN"),
    lambda net, x: net.optimize_for(x, backend="MKLDNN")])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_backends_graph_is_refused(ask, when, x):
    net = make()
    net(x)
    calls = [lambda: ask(net, x), lambda: amp.convert(net)]
    if when == "after":
        calls.reverse()
    calls[0]()
    with pytest.raises(ValueError, match=r"no backend.*hybridize\(\) without.*'MKLDNN'"):
        calls[1]()
    amp.restore(net)
    net.hybridize(clear=True)
    amp.convert(net)(x)


@pytest.mark.parametrize("policy", ["fp16", "Float16", None, 16])
def test_an_unknown_policy_lists_the_valid_ones(policy):
    net = make()
    with pytest.raises(ValueError, match="unknown policy") as caught:
        amp.convert(net, policy)
    text = str(caught.value)
    for name in ("float32", "float16", "mixed_float16", "pure_float16", "mixed_bfloat16", "O0",
                 "O3", f"Received: {policy!r}"):
        assert name in text
    assert type(net) is Net


def test_keep_that_matches_nothing_lists_near_names():
    net = make(prefix="net_")
    with pytest.raises(ValueError, match=r"'net_dense9' matches nothing.*net_dense0"):
        amp.convert(net, keep="net_dense9")
    with pytest.raises(ValueError, match=r"block 'other_dense0' matches nothing.*net_dense0"):
        amp.convert(net, keep=[nn.Dense(3, prefix="other_dense0_")])
    with pytest.raises(ValueError, match=r"class Conv3D matches nothing.*Conv2D"):
        amp.convert(net, keep=[net.output, nn.Conv3D])
    assert type(net) is Net
    assert set(types(net).values()) == {"float32"}


def test_keep_that_matches_only_part_of_a_name_matches_nothing():
    with pytest.raises(ValueError, match="matches nothing"):
        amp.convert(make(), keep="dense")


def test_keep_that_is_no_regular_expression_says_so():
    with pytest.raises(ValueError, match=r"keep: '\*dense' is no regular expression"):
        amp.convert(make(), keep="*dense")


@pytest.mark.parametrize("keep", [[3], [None], [int], 3])
def test_keep_of_a_wrong_type_says_what_it_takes(keep):
    with pytest.raises(TypeError, match=r"keep takes blocks, classes of blocks and regular"):
        amp.convert(make(), keep=keep)


def test_float64_parameters_are_named():
    net = make()
    net.output.cast("float64")
    with pytest.raises(ValueError, match=r"float64: .*dense0_weight, .*dense0_bias"):
        amp.convert(net)
    assert type(net) is Net


def test_a_net_cast_by_hand_to_float16_is_mended(x):
    net = make()
    net.cast("float16")
    net.features[1].gamma.cast("float16")
    amp.convert(net)
    assert {n for n, t in types(net).items() if t == "float32"} \
        == {n for n in types(net) if "batchnorm" in n}
    assert net(x).dtype == np.float32
    assert set(types(amp.restore(net)).values()) == {"float32"}
    step(amp.convert(net), x)


# Trainers


DEVICES = [[mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]]


def train_on(devices, net, trainer, x):
    with autograd.record():
        losses = [(net(x.as_in_context(d)) ** 2).mean() for d in devices]
    autograd.backward(losses)
    trainer.step(1)


@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
def test_a_trainer_that_has_stepped_makes_convert_raise(devices, x):
    net = Net()
    net.initialize(ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    train_on(devices, net, trainer, x)
    assert bool(trainer._update_on_kvstore) == (len(devices) == 2)
    with pytest.raises(ValueError, match=r"already stepped.*conv0_weight"):
        amp.convert(net)
    assert type(net) is Net
    assert set(types(net).values()) == {"float32"}
    amp.convert(net, "mixed_float16")  # no parameter changes its type
    train_on(devices, net, trainer, x)


@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
def test_a_trainer_that_has_not_stepped_may_wait(devices, x):
    net = Net()
    net.initialize(ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": 0.1, "multi_precision": True})
    amp.convert(net)
    before = values(net)["dense0_weight"]
    train_on(devices, net, trainer, x)
    assert (values(net)["dense0_weight"] != before).any()
    amp.convert(net)  # the same types
    kinds = types(net)
    for undo in (amp.restore, lambda n: amp.convert(n, "mixed_float16"),
                 lambda n: amp.convert(n, keep=n.output)):
        with pytest.raises(ValueError, match=r"already stepped.*dense0_weight"):
            undo(net)
    assert types(net) == kinds
    train_on(devices, net, trainer, x)


def test_a_new_trainer_lets_a_trained_net_be_restored(x):
    net = amp.convert(make())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    train_on([mx.cpu()], net, trainer, x)
    out = net(x).asnumpy()
    with pytest.raises(ValueError, match=r"already stepped.*make a new Trainer"):
        amp.restore(net)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.restore(net)
    np.testing.assert_allclose(net(x).asnumpy(), out, rtol=0.02, atol=0.01)
    train_on([mx.cpu()], net, trainer, x)
    assert np.isfinite(net(x).asnumpy()).all()
