"""Networks converted to float32: one script for all types, and MXNet's arithmetic."""
import copy
import pickle

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from converting import Net, make, step, types, values
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import Calling, imported, ready, sequence

POLICIES = ("float32", "O0", "float16", "mixed_float16", "bfloat16", "mixed_bfloat16")


def train(net, trainer, x, steps=3):
    losses = []
    for _ in range(steps):
        with autograd.record():
            loss = (net(x) ** 2).mean()
        if hasattr(trainer, "backward"):
            trainer.backward(loss)
        else:
            loss.backward()
        trainer.step(1)
        losses.append(loss.asnumpy())
    return losses


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_script_trains_saves_loads_exports_and_predicts(policy, hybrid, tmp_path, x):
    path = str(tmp_path / "net")
    net = make()
    if hybrid:
        net.hybridize()
    amp.convert(net, policy, keep=net.output)
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    train(net, trainer, x)
    net.save_parameters(f"{path}.params", masters=trainer)
    net.export(path, masters=trainer)
    expected = net(x).asnumpy()
    for name, parameter in net._collect_params_with_prefix().items():
        saved = nd.load(f"{path}.params")[name]
        assert saved.dtype == np.float32
        if parameter.grad_req != "null":
            master = trainer.master(parameter).asnumpy()
            assert np.array_equal(saved.asnumpy(), master)
            exported = nd.load(f"{path}-0000.params")[f"arg:{parameter.name}"]
            assert np.array_equal(exported.asnumpy(), master)

    resumed = amp.convert(make(), like=f"{path}.params")
    mine = amp.Trainer(resumed.collect_params(), "adam", {"learning_rate": 0.01})
    resumed.load_parameters(f"{path}.params", masters=mine)
    assert np.array_equal(resumed(x).asnumpy(), expected)
    for before, after in zip(net.collect_params().values(), resumed.collect_params().values()):
        if before.grad_req != "null":
            assert np.array_equal(trainer.master(before).asnumpy(), mine.master(after).asnumpy())

    served = amp.convert(imported(path), like=f"{path}-0000.params")
    np.testing.assert_allclose(served(x).asnumpy(), expected, rtol=1e-6, atol=1e-6)
    assert amp.restore(net) is net
    assert set(types(net).values()) == {"float32"}


def batch_norm_and_dropout():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.3), nn.Dense(5))
    return net


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("optimizer", "settings"), [
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9}), ("adam", {}), ("lamb", {})])
def test_float32_network_trains_bit_for_bit_as_an_unconverted_one(optimizer, settings, hybrid, x):
    found = []
    for convert in (False, True):
        mx.random.seed(5)
        net = make(batch_norm_and_dropout)
        if convert:
            amp.convert(net, "float32")
        if hybrid:
            net.hybridize()
        trainer = gluon.Trainer(net.collect_params(), optimizer, settings)
        losses = train(net, trainer, x, steps=5)
        found.append([*losses, *(p.data().asnumpy() for p in net.collect_params().values())])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def test_float32_network_runs_the_code_of_mxnet():
    net, plain = amp.convert(make(), "float32"), make()
    for mine, theirs in ((net, plain), (net.features, plain.features), (net.output, plain.output)):
        for name in ("__call__", "__getattribute__", "__setattr__", "forward", "hybrid_forward",
                     "hybridize", "_call_cached_op", "_build_cache", "summary", "cast"):
            assert getattr(type(mine), name) is getattr(type(theirs), name)
    assert not net._active


def test_files_of_a_float32_network_are_those_of_mxnet(tmp_path, x):
    net = make()
    net.hybridize()
    net(x)
    net.save_parameters(str(tmp_path / "plain.params"))
    net.export(str(tmp_path / "plain"))
    amp.convert(net, "float32")
    net.save_parameters(str(tmp_path / "converted.params"))
    net.export(str(tmp_path / "converted"))
    for name in (".params", "-0000.params"):
        plain, converted = (nd.load(str(tmp_path / f"{which}{name}"))
                            for which in ("plain", "converted"))
        assert set(plain) == set(converted)
        assert all(np.array_equal(plain[n].asnumpy(), converted[n].asnumpy()) for n in plain)
    assert (tmp_path / "plain-symbol.json").read_text() \
        == (tmp_path / "converted-symbol.json").read_text()


@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_integers_stay_integers_in_files(policy, tmp_path):
    def table():
        return Calling(lambda F, x, body, ids: body(x), nn.Dense(2, in_units=2),
                       parameters={"ids": nd.array([70001, 3], dtype="int32")})

    net = amp.convert(ready(table()), policy)
    net.save_parameters(str(tmp_path / "net.params"))
    assert nd.load(str(tmp_path / "net.params"))["ids"].dtype == np.int32
    plain = table()
    plain.load_parameters(str(tmp_path / "net.params"))
    assert plain.ids.data().asnumpy().tolist() == [70001, 3]


def test_parameters_that_a_user_has_cast_become_float32(tmp_path, x):
    net = make()
    net.hybridize()
    net.cast("float16")
    net(x.astype("float16"))
    amp.convert(net, "float32")
    assert set(types(net).values()) == {"float32"}
    assert net(x).dtype == np.float32
    step(net, x)


def test_float32_and_other_policies_replace_each_other(tmp_path, x):
    net = make()
    expected = net(x).asnumpy()
    amp.convert(net, "float32")
    amp.convert(net, "mixed_float16", keep=net.output)
    assert not np.array_equal(net(x).asnumpy(), expected)
    amp.convert(net, "float32")
    assert np.array_equal(net(x).asnumpy(), expected)
    assert not net._active
    net.save_parameters(str(tmp_path / "net.params"))
    assert np.array_equal(amp.restore(net)(x).asnumpy(), expected)
    assert type(net) is Net
    assert type(net.features) is nn.HybridSequential


def test_new_children_slices_and_copies_have_the_same_files(tmp_path):
    path = str(tmp_path / "net.params")
    net = amp.convert(nn.HybridSequential(), "float32")
    net.add(nn.Dense(4, in_units=3), nn.Dense(2, in_units=4))
    net.initialize()
    trainer = amp.Trainer(net.collect_params(), "sgd")
    for part in (net, net[0], net[:1], copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        part.save_parameters(path)
    net[1].save_parameters(path, masters=trainer)
    with pytest.raises(ValueError, match="trains none of its parameters"):
        copy.deepcopy(net).save_parameters(path, masters=trainer)


class Masked(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(2, in_units=3)

    def hybrid_forward(self, F, x, mask=None):
        return self.body(x) if mask is None else F.broadcast_mul(self.body(x), mask)


class MaskedLayers(nn.HybridSequential):
    def __init__(self):
        super().__init__()
        self.add(nn.Dense(2, in_units=3))

    def hybrid_forward(self, F, x, mask=None):
        x = super().hybrid_forward(F, x)
        return x if mask is None else F.broadcast_mul(x, mask)


class ReadsShapes(Masked):
    def hybrid_forward(self, F, x):
        return self.body(x).reshape((x.shape[0], -1))


def test_export_without_hybridize_refuses_a_graph_that_calls_choose(tmp_path):
    x = nd.ones((2, 3))
    masked = x, nd.ones((2, 1))
    for cls, arguments in ((Masked, masked), (MaskedLayers, masked), (ReadsShapes, (x,))):
        net = amp.convert(make(cls), "float32")
        net(*arguments)
        with pytest.raises(RuntimeError, match=r"call \w+\.hybridize\(\), and run \w+ on data"):
            net.export(str(tmp_path / "net"))
        assert not list(tmp_path.iterdir())
    net = amp.convert(make(Masked), "float32")
    net.hybridize()
    with pytest.raises(RuntimeError, match="run"):
        net.export(str(tmp_path / "net"))
    net(x, nd.ones((2, 1)))
    net.export(str(tmp_path / "net"))
    assert len(nd.load(str(tmp_path / "net-0000.params"))) == 2


@pytest.mark.parametrize("cls", [Net, lambda: sequence(nn.BatchNorm(), nn.Dense(5))])
def test_export_leaves_a_network_that_was_not_hybridized_as_it_is(cls, tmp_path, x):
    net = amp.convert(make(cls), "float32")
    expected = net(x).asnumpy()
    net.export(str(tmp_path / "net"))
    assert not net._active
    assert np.array_equal(net(x).asnumpy(), expected)
    assert np.array_equal(imported(str(tmp_path / "net"))(x).asnumpy(), expected)


def test_export_of_several_policies_is_refused(tmp_path, x):
    net = amp.convert(make(), "float32")
    amp.convert(net.features, "float16")
    net(x)
    with pytest.raises(ValueError, match="one policy"):
        net.export(str(tmp_path / "net"))
    assert not list(tmp_path.iterdir())


def test_files_of_masters_are_those_of_converted_networks(tmp_path, x):
    net = make()
    net.hybridize()
    net(x)
    trainer = amp.Trainer(net.collect_params(), "sgd")
    for call in (net.save_parameters, net.export, net.load_parameters):
        with pytest.raises(TypeError, match="masters"):
            call(str(tmp_path / "net"), masters=trainer)
    assert not list(tmp_path.iterdir())
    amp.convert(net, "float32")
    net.save_parameters(str(tmp_path / "net.params"), masters=trainer)
    other = amp.convert(Net(), "float32")
    other.load_parameters(str(tmp_path / "net.params"))
    assert all(np.array_equal(a, b) for a, b in zip(values(net).values(), values(other).values()))
