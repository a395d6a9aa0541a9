"""Master weights read, saved and loaded; averages of master weights."""
import contextlib

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import same
from converting import saved_types
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready, sequence
from trainers import recorded, with_trainer

POLICIES = ("float32", "float16", "mixed_float16", "bfloat16")
DEVICES = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]


def array(values):
    return (mx.np if mx.util.is_np_array() else nd).array(values)


def network(policy="float16", devices=DEVICES[0]):
    mx.random.seed(3)
    net = ready(sequence(nn.Dense(6, in_units=4, activation="relu"), nn.BatchNorm(in_channels=6),
                         nn.Dense(2, in_units=6)), mx.init.Xavier(), ctx=devices)
    return amp.convert(net, policy)


def trainer_of(net, optimizer="sgd", **kwargs):
    settings = {"learning_rate": 0.01, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    return amp.Trainer(net.collect_params(), optimizer, settings, **kwargs)


def train(net, trainer, steps, begin=0, factor=1.0):
    """Takes steps on data that depends on the step's number."""
    devices = net[0].weight.list_ctx()
    for step in range(begin, begin + steps):
        data = array(np.random.RandomState(step).normal(size=(8, 4)).astype("float32"))
        with autograd.record():
            losses = [(net(part) ** 2).mean() * factor
                      for part in gluon.utils.split_and_load(data, devices)]
        trainer.backward(losses)
        trainer.step(1)


def trained(*args, steps):
    """A network and its Trainer after some steps."""
    net = network(*args)
    trainer = trainer_of(net)
    train(net, trainer, steps)
    return net, trainer


def averaging(*args, steps=0, **kwargs):
    """The same with averages of the weights."""
    net = network(*args)
    trainer = trainer_of(net, **kwargs)
    averaged = amp.AveragedWeights(trainer, 0.5)
    train(net, trainer, steps)
    return net, trainer, averaged


def masters(net, trainer):
    return {name: trainer.master(parameter).asnumpy()
            for name, parameter in net._collect_params_with_prefix().items()}


def numbers(net, trainer):
    """Returns what files have: master weights, and means of moving averages over devices."""
    return {name: trainer.master(p).asnumpy() if p.grad_req != "null" else
            sum(a.asnumpy() for a in p.list_data()) / len(p.list_data())
            for name, p in net._collect_params_with_prefix().items()}


def weights(net):
    return {name: [a.asnumpy() for a in p.list_data()]
            for name, p in net._collect_params_with_prefix().items()}


@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nag", "rmsprop"])
@pytest.mark.parametrize("policy", POLICIES)
def test_master_is_float32_and_its_weight_rounded(policy, optimizer, devices):
    net = network(policy, devices)
    trainer = trainer_of(net, optimizer)
    before = masters(net, trainer)
    train(net, trainer, 3)
    after = masters(net, trainer)
    assert {a.dtype for a in after.values()} == {np.dtype("float32")}
    assert all((before[n] != after[n]).any() for n in ("0.weight", "2.weight"))
    for name, parameter in net._collect_params_with_prefix().items():
        found = array(after[name]).astype(parameter.dtype).asnumpy()
        for weight in parameter.list_data()[:None if parameter.grad_req != "null" else 1]:
            assert np.array_equal(found, weight.asnumpy())
    rounded = (net[0].weight.data().astype("float32").asnumpy() != after["0.weight"]).any()
    assert rounded == (policy in ("float16", "bfloat16"))


def test_master_is_a_copy_and_follows_writes_to_its_weight():
    net, trainer = trained(steps=1)
    trainer.master(net[0].weight)[:] = 7
    assert (masters(net, trainer)["0.weight"] != 7).all()
    net[0].weight.set_data(net[0].weight.data() * 0 + 0.5)
    assert (masters(net, trainer)["0.weight"] == 0.5).all()


def test_parameters_without_master_weights_are_refused():
    net = network()
    trainer = amp.Trainer(net.collect_params(), amp.optimizer("sgd", multi_precision=False))
    assert trainer.master(net[1].gamma).shape == (6,)
    for parameter, message in ((net[0].weight, "has multi_precision=False"),
                               (network()[0].weight, "does not have the parameter"),
                               ("weight", "does not have the parameter 'weight'")):
        with pytest.raises(ValueError, match=message):
            trainer.master(parameter)


@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
@pytest.mark.parametrize("policy", POLICIES)
def test_files_of_masters_are_float32_and_load_in_full(policy, devices, tmp_path):
    path = str(tmp_path / "net.params")
    net = network(policy, devices)
    net.hybridize()
    trainer = trainer_of(net)
    train(net, trainer, 3)
    net.save_parameters(path, masters=trainer)
    assert saved_types(path) == {"float32"}
    saved, expected = nd.load(path), numbers(net, trainer)
    assert all(np.array_equal(saved[n].asnumpy(), expected[n]) for n in expected)

    plain = network("float32")
    plain.load_parameters(path)
    assert all(np.array_equal(plain._collect_params_with_prefix()[n].data().asnumpy(), expected[n])
               for n in expected)

    net.export(path, masters=trainer)
    exported = gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")
    assert all(np.array_equal(exported.params[p.name].data().asnumpy(), expected[n])
               for n, p in net._collect_params_with_prefix().items())

    other = network(policy, devices)
    mine = trainer_of(other)
    other.load_parameters(path, ctx=devices, masters=mine)
    assert all(np.array_equal(masters(other, mine)[n], expected[n]) for n in expected)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_masters_load_from_an_exported_file(policy, tmp_path):
    path = str(tmp_path / "net")
    plain = network("float32")
    plain.hybridize()
    plain(array(np.ones((1, 4), "float32")))
    plain.export(path)
    net = gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")
    amp.convert(net, policy)
    trainer = trainer_of(net)
    net.load_parameters(f"{path}-0000.params", masters=trainer)
    saved = {name.partition(":")[2]: array.asnumpy()
             for name, array in nd.load(f"{path}-0000.params").items()}
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    assert trained
    assert all(np.array_equal(trainer.master(p).asnumpy(), saved[p.name]) for p in trained)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_files_of_three_devices_have_their_weights(policy, tmp_path):
    path = str(tmp_path / "net.params")
    net = network(policy, [mx.cpu(i) for i in range(3)])
    net.save_parameters(path)
    saved = nd.load(path)
    for name, parameter in net._collect_params_with_prefix().items():
        held = parameter.list_data()[0].astype("float32").asnumpy()
        assert np.array_equal(saved[name].asnumpy(), held)


def test_files_of_several_trainers(tmp_path):
    path = str(tmp_path / "net.params")
    net = network()
    trainers = [trainer_of(net[0]), trainer_of(net[1]), trainer_of(net[2])]
    amp.backward(recorded(lambda: net(array(np.ones((4, 4), "float32"))).mean()), trainers)
    for trainer in trainers:
        trainer.step(1)
    net.save_parameters(path, masters=trainers)
    assert np.array_equal(nd.load(path)["2.weight"].asnumpy(),
                          trainers[2].master(net[2].weight).asnumpy())
    for write in net.save_parameters, net.export:
        with pytest.raises(TypeError, match=r"masters takes a gluon_amp\.Trainer"):
            write(path, masters=net)
        with pytest.raises(ValueError, match="one that trains none of its parameters"):
            write(path, masters=trainer_of(network()))
    with pytest.raises(ValueError, match=r"masters= writes float32 parameters"):
        net.export(path, remove_amp_cast=False, masters=trainers)


@pytest.mark.mx_nd("MXNet cannot load names without a dot in numpy mode")
def test_file_of_a_layer_alone(tmp_path):
    path = str(tmp_path / "layer.params")
    net, trainer = trained(steps=2)
    net[2].save_parameters(path, masters=trainer)
    expected = trainer.master(net[2].weight).asnumpy()
    net[2].weight.set_data(net[2].weight.data() * 0)
    net[2].load_parameters(path, masters=trainer)
    assert np.array_equal(trainer.master(net[2].weight).asnumpy(), expected)


# ---- averages

@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
@pytest.mark.parametrize(("decay", "every"), [(0.9, 1), (None, 1), (0.5, 2), (None, 3)])
@pytest.mark.parametrize("policy", POLICIES)
def test_averages_are_those_of_the_master_weights(policy, decay, every, devices):
    net, trainer = trained(policy, devices, steps=0)
    averaged = amp.AveragedWeights(trainer, decay, every)
    expected, count = {}, 0
    for step in range(7):
        train(net, trainer, 1, begin=step)
        if (step + 1) % every == 0:
            count += 1
            share = 1 / count if decay is None or count == 1 else 1 - decay
            for name, value in masters(net, trainer).items():
                expected[name] = expected.get(name, 0) * (1 - share) \
                    + value.astype("float64") * share
    for name, parameter in net._collect_params_with_prefix().items():
        if parameter.grad_req != "null":
            found = averaged.value(parameter).asnumpy()
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected[name], rtol=2e-6, atol=1e-7)


@pytest.mark.mx_nd("no sparse arrays")
def test_averages_of_sparse_parameters_are_refused():
    weight = gluon.Parameter("weight", shape=(4, 1), stype="row_sparse", grad_stype="row_sparse")
    weight.initialize()
    with pytest.raises(ValueError, match=r"Received sparse: \['weight'\]"):
        amp.AveragedWeights(amp.Trainer([weight], "sgd", loss_scale=None))


@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
@pytest.mark.parametrize("policy", POLICIES)
def test_with_block_has_the_averages_and_restores_the_training(policy, devices, tmp_path):
    nets = [network(policy, devices) for _ in range(2)]
    trainers = [trainer_of(net) for net in nets]
    averaged = amp.AveragedWeights(trainers[0], 0.5)
    for net, trainer in zip(nets, trainers):
        train(net, trainer, 3)
    net, trainer = nets[0], trainers[0]
    before = weights(net), masters(net, trainer)
    data = array(np.ones((4, 4), "float32"))
    path = str(tmp_path / "averaged.params")
    with averaged as entered:
        assert entered is averaged
        assert any((a != b).any() for a, b in zip(weights(net)["0.weight"], before[0]["0.weight"]))
        inside = numbers(net, trainer)
        for name, parameter in net._collect_params_with_prefix().items():
            if parameter.grad_req != "null":
                assert np.array_equal(inside[name], averaged.value(parameter).asnumpy())
        net.save_parameters(path, masters=trainer)
        with autograd.train_mode():
            net(data.as_in_context(devices[0]) * 100)  # moves averages of the batch norm
        for call in (lambda: train(net, trainer, 1), amp.scale_loss(data, trainer).__enter__,
                     lambda: amp.lr_find(net, trainer, gluon.loss.L2Loss(), [(data, data)]),
                     lambda: trainer.step(1), lambda: trainer.save_states(path),
                     lambda: trainer.load_states(path), averaged.__enter__):
            with pytest.raises(RuntimeError, match="in the `with` block of AveragedWeights"):
                call()
    with autograd.record(), pytest.raises(RuntimeError, match=r"begins in autograd\.record"):
        averaged.__enter__()
    assert all(np.array_equal(nd.load(path)[n].asnumpy(), v) for n, v in inside.items())
    assert same(weights(net), before[0])
    assert same(masters(net, trainer), before[1])
    for net, trainer in zip(nets, trainers):
        train(net, trainer, 3, begin=3)
    assert same(masters(nets[0], trainers[0]), masters(nets[1], trainers[1]))


def fails(net):
    raise KeyError


@pytest.mark.parametrize("change", [amp.restore, lambda net: net.cast("float32"), fails,
                                    lambda net: net.collect_params().reset_ctx(mx.cpu(1))])
def test_network_that_is_cast_or_moved_or_fails_in_the_block_gets_its_weights_back(change):
    net, trainer, averaged = averaging(steps=3)
    before = masters(net, trainer)
    with pytest.raises(KeyError) if change is fails else contextlib.nullcontext(), averaged:
        change(net)
    for name, parameter in net._collect_params_with_prefix().items():
        found, = parameter.list_data()
        assert np.array_equal(found.asnumpy(), before[name].astype(found.dtype))
    if change is fails:
        assert same(masters(net, trainer), before)
        train(net, trainer, 1)


def test_skipped_steps_do_not_count():
    net, trainer, averaged = averaging(steps=2, loss_scale=128)
    train(net, trainer, 1, factor=float("inf"))
    assert (trainer.skipped, averaged.updates, averaged.count) == (1, 2, 2)


def test_learning_rate_range_test_changes_no_average():
    net, trainer, averaged = averaging(steps=2)
    before = averaged.value(net[0].weight).asnumpy()
    data, label = array(np.ones((8, 4), "float32")), array(np.ones((8, 2), "float32"))
    amp.lr_find(net, trainer, gluon.loss.L2Loss(), [(data, label)], steps=10)
    assert averaged.updates == 2
    assert np.array_equal(averaged.value(net[0].weight).asnumpy(), before)
    assert trainer.gradient_norm is None
    train(net, trainer, 1)
    assert averaged.updates == 3


def test_states_of_other_averages_are_refused_and_old_states_restart(tmp_path):
    path, old = str(tmp_path / "net.states"), str(tmp_path / "old.states")
    net, trainer = trained(steps=1)
    trainer.save_states(old)
    averaged = amp.AveragedWeights(trainer, 0.9)
    train(net, trainer, 2)
    trainer.save_states(path)
    none = trainer_of(net)
    with pytest.raises(ValueError, match="it holds 1 average of weights, and this Trainer has 0"):
        none.load_states(path)
    amp.AveragedWeights(none, 0.8)
    with pytest.raises(ValueError, match=r"'decay': 0.9.*Received: .*'decay': 0.8"):
        none.load_states(path)
    trainer.load_states(old)
    assert averaged.count == 0


@pytest.mark.parametrize(("kwargs", "message"), [
    *(({"decay": decay}, "decay must be a number between 0 and 1")
      for decay in (0, 1, 1.0, -0.5, "0.9", True)), ({"every": 0}, "every must be an integer")])
def test_invalid_arguments_are_refused(kwargs, message):
    net, trainer = trained(steps=0)
    assert amp.AveragedWeights(trainer, np.float32(0.5)).decay == 0.5
    with pytest.raises(ValueError, match=message):
        amp.AveragedWeights(trainer_of(net), **kwargs)
    with pytest.raises(TypeError, match=r"takes a gluon_amp\.Trainer"):
        amp.AveragedWeights(gluon.Trainer(net.collect_params(), "sgd"))


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "bfloat16"])
def test_layer_that_is_frozen_later_keeps_its_master_weights(policy, tmp_path):
    net, trainer = trained(policy, steps=2)
    trainable = {name: p for name, p in net._collect_params_with_prefix().items()
                 if p._differentiable}
    wanted = {name: trainer.master(p).asnumpy() for name, p in trainable.items()}

    def found():
        return {name: trainer.master(p).asnumpy() for name, p in trainable.items()}

    net.collect_params().setattr("grad_req", "null")
    path = str(tmp_path / "net.params")
    net.save_parameters(path, masters=trainer)
    saved = nd.load(path)
    assert same(found(), wanted)
    assert same({name: saved[name].asnumpy() for name in wanted}, wanted)
    for p in trainable.values():
        p.set_data(p.data() * 2)
    net.load_parameters(path, masters=trainer)
    assert same(found(), wanted)


@pytest.mark.parametrize("policy", ["float16", "mixed_bfloat16", "float32"])
@pytest.mark.parametrize("decay", [0.9, None])
def test_layer_that_is_frozen_later_is_averaged_as_before(decay, policy):
    net = ready(sequence(nn.Dense(4, in_units=3), nn.Dense(1, in_units=4)), mx.init.Xavier())
    amp.convert(net, policy)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    averaged, wanted = amp.AveragedWeights(trainer, decay), 0
    for i in range(40):
        if i == 5:
            net[0].collect_params().setattr("grad_req", "null")
        with autograd.record():
            loss = (net(nd.ones((2, 3))) - i) ** 2
        trainer.backward(loss)
        assert trainer.step(2)
        share = 1 / (i + 1) if decay is None or not i else 1 - decay
        wanted = (1 - share) * wanted + share * trainer.master(net[0].weight).asnumpy()
    np.testing.assert_allclose(averaged.value(net[0].weight).asnumpy(), wanted, rtol=1e-5)
    with averaged:
        np.testing.assert_allclose(trainer.master(net[0].weight).asnumpy(), wanted, rtol=1e-5)


def test_layer_that_is_frozen_and_converted_in_mid_training_has_no_master_weights(tmp_path):
    net = ready(sequence(nn.Dense(4, in_units=4), nn.Dense(2, in_units=4)), mx.init.Xavier())
    amp.convert(net, "float32")
    trainer = trainer_of(net, loss_scale=None)
    averaged = amp.AveragedWeights(trainer, 0.5)
    train(net, trainer, 2)
    amp.convert(amp.freeze(net[0]))
    trainer.backward(recorded(lambda: net[1](net[0](nd.ones((2, 4)))) ** 2))
    assert trainer.step(2)
    rounded = net[0].weight.data().astype("float32").asnumpy()
    np.testing.assert_array_equal(trainer.master(net[0].weight).asnumpy(), rounded)
    net.save_parameters(str(tmp_path / "net.params"), masters=trainer)
    with averaged:
        assert net[0](nd.ones((1, 4))).shape == (1, 4)


@pytest.mark.numpy
@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
@pytest.mark.parametrize("policy", POLICIES)
def test_layer_that_was_frozen_keeps_its_master_weights_in_a_resumed_training(policy, devices,
                                                                              tmp_path):
    files = [str(tmp_path / name) for name in ("net.params", "net.states", "masters.params", "net")]
    net, trainer, averaged = averaging(policy, devices, steps=3, optimizer="adam")
    amp.freeze(net[0])
    train(net, trainer, 2)
    net.save_parameters(files[0])
    trainer.save_states(files[1])
    other, resumed, loaded = averaging(policy, devices, optimizer="adam")
    amp.freeze(other[0])
    other.load_parameters(files[0], ctx=devices)
    resumed.load_states(files[1])
    expected = trainer.master(net[0].weight).asnumpy()
    assert np.array_equal(resumed.master(other[0].weight).asnumpy(), expected)
    other.hybridize()
    other(array(np.ones((1, 4), "float32")).as_in_context(devices[0]))
    other.save_parameters(files[2], masters=resumed)
    other.export(files[3], masters=resumed)
    for file, name in ((files[2], "0.weight"),
                       (f"{files[3]}-0000.params", f"arg:{other[0].weight.name}")):
        assert np.array_equal(nd.load(file)[name].asnumpy(), expected)
    for one, its_trainer in ((net, trainer), (other, resumed)):
        train(one, its_trainer, 2, begin=5)
    for p, q in zip(net.collect_params().values(), other.collect_params().values()):
        if p._differentiable:
            assert np.array_equal(averaged.value(p).asnumpy(), loaded.value(q).asnumpy())


@pytest.mark.numpy
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("write", ["set_data", "load_parameters"])
def test_averages_of_a_frozen_layer_follow_writes(write, policy, tmp_path):
    net, trainer, averaged = averaging(policy, steps=2)
    amp.freeze(net[0])
    value = net[0].weight.data() * 0 + 0.25
    if write == "set_data":
        net[0].weight.set_data(value)
    else:
        other = network(policy)
        other[0].weight.set_data(value)
        other.save_parameters(str(tmp_path / "net.params"))
        net.load_parameters(str(tmp_path / "net.params"))
    train(net, trainer, 30)
    np.testing.assert_allclose(averaged.value(net[0].weight).asnumpy(), 0.25, rtol=1e-6)


@pytest.mark.numpy
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_averages_of_a_weight_that_steps_do_not_reach_follow_writes(policy):
    net, trainer, averaged = averaging(policy, steps=2)
    for step in range(30):
        if step == 1:
            net[2].weight.set_data(net[2].weight.data() * 0 + 0.25)
        trainer.backward(recorded(lambda: net[0](array(np.ones((4, 4), "float32"))).mean()))
        trainer.step(1, ignore_stale_grad=True)
    np.testing.assert_allclose(averaged.value(net[2].weight).asnumpy(), 0.25, rtol=1e-6)


@pytest.mark.numpy
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("policy", POLICIES)
def test_error_at_the_beginning_of_a_with_block_restores_the_training(policy, error, monkeypatch):
    net, trainer, averaged = averaging(policy, steps=3)
    before, calls = (weights(net), masters(net, trainer)), []
    write = amp.training.masters.write

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise error
        write(*args)

    monkeypatch.setattr(amp.training.masters, "write", interrupted)
    with pytest.raises(error), averaged:
        pass
    monkeypatch.undo()
    assert same(weights(net), before[0])
    assert same(masters(net, trainer), before[1])
    train(net, trainer, 1)
    with averaged:
        assert np.array_equal(masters(net, trainer)["0.weight"],
                              averaged.value(net[0].weight).asnumpy())


class OwnMasters(mx.optimizer.SGD):
    """With master weights that nobody else reads."""

    def update_multi_precision(self, *args):
        super().update_multi_precision(*args)


@pytest.mark.numpy
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_averages_without_master_weights_are_refused_at_their_creation(policy):
    plain = amp.optimizer("sgd", multi_precision=False)
    for optimizer, why in ((plain, "multi_precision=False"),
                           (OwnMasters(multi_precision=True), "OwnMasters manages them itself")):
        trainer = amp.Trainer(network(policy).collect_params(), optimizer)
        with pytest.raises(ValueError, match=f"no master weights here, because .*{why}"):
            amp.AveragedWeights(trainer)
        assert not trainer._averaged
    wide, trainer = with_trainer(network("mixed_float16"), plain)
    averaged = amp.AveragedWeights(trainer)
    train(wide, trainer, 1)
    assert averaged.count == 1


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("policy", POLICIES)
def test_restore_brings_back_master_weights(policy, devices, numpy):
    with mx.util.np_shape(numpy), mx.util.np_array(numpy):
        net, trainer = trained(policy, devices, steps=3)
        expected, rounded = masters(net, trainer), weights(net)
        amp.restore(net, masters=trainer)
        restored = weights(net)
        for name, values in restored.items():
            for value in values if not name.startswith("1.running") else ():
                assert value.dtype == np.float32
                np.testing.assert_array_equal(value, expected[name])
        changes = any((values[0] != rounded[name][0]).any() for name, values in restored.items())
        assert changes == (policy in ("float16", "bfloat16"))


def test_restore_with_masters_of_a_part_and_of_averages():
    net = network()
    trainer = trainer_of(net[0])
    averaged = amp.AveragedWeights(trainer, decay=0.5)
    for _ in range(3):
        trainer.backward(recorded(lambda: (net(array(np.ones((8, 4), "float32"))) ** 2).mean()))
        trainer.step(1)
    expected, rounded = averaged.value(net[0].weight).asnumpy(), net[2].weight.data().asnumpy()
    with averaged:
        amp.restore(net, masters=[trainer])
        np.testing.assert_array_equal(net[0].weight.data().asnumpy(), expected)
    np.testing.assert_array_equal(net[2].weight.data().asnumpy(), rounded)


def test_restore_refuses_others_than_the_networks_trainers():
    net = network()
    plain = amp.Trainer(net.collect_params(), amp.optimizer("sgd", multi_precision=False))
    for given, error in ((trainer_of(network()), ValueError), (net, TypeError),
                         (plain, ValueError)):
        with pytest.raises(error):
            amp.restore(net, masters=given)
        assert net[0].weight.dtype == "float16"
