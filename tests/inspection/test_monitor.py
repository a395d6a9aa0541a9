"""`Monitor`: statistics of tensors at regular steps, without changes to training."""
import json
import logging

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn
from xray_networks import LOSS, batches, images_net

pytestmark = [pytest.mark.numpy, pytest.mark.isa]


def train(net, trainer, data, steps, monitor=None):
    """The losses of some steps."""
    losses = []
    for i in range(steps):
        x, label = data[i % len(data)]
        with autograd.record():
            loss = LOSS(net(x), label)
        if isinstance(trainer, amp.Trainer):
            trainer.backward(loss)
        else:
            loss.backward()
        trainer.step(len(label))
        losses.append(loss.asnumpy())
        if monitor:
            monitor.step()
    return losses


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def made(policy="float16", seed=1, **kwargs):
    """A network and its trainer."""
    mx.random.seed(seed)
    net = images_net()
    net.initialize(mx.init.Xavier())
    amp.convert(net, policy)
    net.hybridize(static_alloc=True, static_shape=True)
    net(batches()[0][0])
    return net, amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, **kwargs)


def dense(policy="float16"):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4, in_units=6, use_bias=False, prefix="dense_"))
    net.initialize(mx.init.Normal(1))
    amp.convert(net, policy)
    return net


NETWORKS = {
    "convolutions": (lambda: [nn.Conv2D(32, 3, in_channels=16), nn.BatchNorm(in_channels=32),
                              nn.Activation("relu"), nn.Conv2D(32, 3, strides=2, in_channels=32),
                              nn.GlobalAvgPool2D(), nn.Dropout(0.2), nn.Dense(4, in_units=32)],
                     (8, 16, 20, 20)),
    "lstm": (lambda: [rnn.LSTM(32, input_size=16), nn.Dense(4, flatten=False, in_units=32)],
             (7, 4, 16)),
    "gru": (lambda: [rnn.GRU(32, input_size=16, bidirectional=True)], (7, 4, 16))}


@pytest.mark.parametrize("policy", [None, "float16", "mixed_float16", "bfloat16",
                                    "mixed_bfloat16"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_training_is_bitwise_unchanged(policy, name, tmp_path):
    """On processors with instructions of bfloat16, and in RNNs, products of bfloat16 have other
    bits in float32. Without a policy, the network is hybridized only."""
    make, shape = NETWORKS[name]
    data, results = nd.array(np.random.default_rng(0).standard_normal(shape)), []
    for monitored in (False, True):
        mx.random.seed(1)
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(*make())
        net.initialize(mx.init.Xavier())
        if policy:
            amp.convert(net, policy)
        net.hybridize(static_alloc=True)
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        monitor = amp.Monitor(net, trainer, tmp_path / "a.jsonl", 2) if monitored else None
        for _ in range(4):
            with autograd.record():
                loss = (net(data) ** 2).mean()
            trainer.backward(loss)
            trainer.step(1)
            if monitor:
                monitor.step()
        results.append([p.data().asnumpy() for p in net.collect_params().values()])
    assert all(np.array_equal(a, b) for a, b in zip(*results))
    assert {line["step"] for line in lines(tmp_path / "a.jsonl")} == {2, 4}


def test_statistics_match_values_of_tensors(tmp_path, rng):
    net, file = dense(), tmp_path / "a.jsonl"
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0}, loss_scale=8.0)
    x, label = rng.standard_normal((5, 6)).astype("float16"), nd.arange(5) % 4
    w = net[0].weight.data().asnumpy()
    with amp.Monitor(net, trainer, file, interval=1, layers=net[0]) as monitor:
        train(net, trainer, [(nd.array(x, dtype="float16"), label)], 1, monitor)
    found = {(line["node"], line["tensor"]): line for line in lines(file)}
    out = found["net_dense_fwd", "output"]
    exact = x.astype("float32") @ w.astype("float32").T
    assert out["numbers"] == 20
    assert out["format"] == "float16"
    assert out["rms"] == pytest.approx(np.sqrt((exact ** 2).mean()), rel=1e-3)
    assert out["largest"] == np.floor(np.log2(np.abs(exact).max()))
    assert out["least"] == np.floor(np.log2(np.abs(exact).min()))
    exponents = np.floor(np.log2(np.abs(exact))).astype(int)
    assert dict(out["bins"]) == dict(zip(*np.unique(exponents, return_counts=True)))
    assert out["zero"] == out["underflow"] == out["overflow"] == out["nan"] == 0
    assert "loss_scale" not in out
    soft = np.exp(exact) / np.exp(exact).sum(1, keepdims=True) - np.eye(4)[[0, 1, 2, 3, 0]]
    gradient = found["net_dense_fwd", "net_dense_weight"]
    assert gradient["kind"] == "gradient"
    assert gradient["loss_scale"] == 8
    scaled = 8 * soft.T @ x.astype("float32")
    assert gradient["rms"] == pytest.approx(np.sqrt((scaled ** 2).mean()), rel=1e-2)


def test_overflow_and_underflow_are_reported(tmp_path):
    net, file = dense(), tmp_path / "a.jsonl"
    net[0].weight.set_data(nd.array([[1e-4] * 6, [1.0] * 6, [3e4] * 6, [0.0] * 6]))
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0}, loss_scale=None)
    data = nd.ones((2, 6)) * nd.array([[1e-5], [1.0]])
    with amp.Monitor(net, trainer, file, 1, ".*dense_fwd") as monitor, autograd.record():
        net(data)
        monitor.step()
    line, = lines(file)
    assert (line["overflow"], line["zero"], line["underflow"]) == (1 / 8, 1 / 4, 1 / 8)


@pytest.mark.parametrize(("layers", "nodes"), [
    ("net_conv0_fwd", {"net_conv0_fwd"}),
    (["net_conv0_fwd", "net_dense0_.*"], {"net_conv0_fwd", "net_dense0_fwd"})])
def test_only_chosen_layers_are_written(layers, nodes, tmp_path):
    net, trainer = made("mixed_float16")
    file = tmp_path / "a.jsonl"
    with amp.Monitor(net, trainer, file, 2, layers) as monitor:
        train(net, trainer, batches(), 3, monitor)
    assert {line["node"].split("_weight_")[0].replace("_bias_amp_cast_float16", "_fwd").replace(
        "_amp_cast_float16", "_fwd") for line in lines(file)} >= nodes
    assert not any("batchnorm" in line["node"] for line in lines(file))


def test_predictions_between_steps_are_not_counted(tmp_path):
    net, file = dense(), tmp_path / "a.jsonl"
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    data = [(nd.ones((3, 6)), nd.arange(3))]
    with amp.Monitor(net, trainer, file, 1, ".*dense_fwd") as monitor:
        for _ in range(3):
            net(nd.ones((7, 6)))
            train(net, trainer, data, 1, monitor)
    assert {line["numbers"] for line in lines(file) if line["kind"] == "output"} == {12}


@pytest.mark.parametrize("kind", [amp.Trainer, gluon.Trainer])
@pytest.mark.parametrize("place", ["before", "after backward", "after"])
@pytest.mark.parametrize("look", ["xray", "explain", "xray of another network", "xray that fails"])
def test_xray_between_steps_loses_nothing(kind, place, look, tmp_path):
    data, label = nd.array(np.random.default_rng(1).standard_normal((3, 6))), nd.arange(3)

    def look_at(net):
        if look == "explain":
            amp.explain(net, (data, label), LOSS)
        elif look == "xray that fails":
            with pytest.raises(ValueError, match="does not take"):
                amp.xray(net, [(nd.ones((3, 5)), label)], LOSS)
        else:
            amp.xray(dense() if "another" in look else net, [(data, label)], LOSS)

    def observed(file, looked):
        mx.random.seed(1)
        net = dense("mixed_float16")
        trainer = kind(net.collect_params(), "sgd", {"learning_rate": 0.1})
        at = place if looked else ""
        with amp.Monitor(net, trainer, file, 1) as monitor:
            for _ in range(2):
                if at == "before":
                    look_at(net)
                with autograd.record():
                    loss = LOSS(net(data), label)
                getattr(trainer, "backward", lambda loss: loss.backward())(loss)
                if at == "after backward":
                    look_at(net)
                trainer.step(3)
                if at == "after":
                    look_at(net)
                monitor.step()
        return lines(file)

    expected = observed(tmp_path / "alone.jsonl", False)
    assert expected
    assert observed(tmp_path / "looked.jsonl", True) == expected


def test_xray_that_takes_steps_leaves_the_monitor(tmp_path):
    net, file = dense(), tmp_path / "a.jsonl"
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    data = [(nd.ones((3, 6)), nd.arange(3))]
    with amp.Monitor(net, trainer, file, 1, ".*dense_fwd") as monitor:
        amp.xray(net, data, LOSS, trainer)
        train(net, trainer, data, 2, monitor)
    assert [line["step"] for line in lines(file) if line["kind"] == "output"] == [1, 2]
    assert {line["numbers"] for line in lines(file) if line["kind"] == "output"} == {12}


def test_passes_of_one_step_add_up(tmp_path):
    net, file = dense(), tmp_path / "a.jsonl"
    net.collect_params().setattr("grad_req", "add")
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with amp.Monitor(net, trainer, file, 1, ".*dense_fwd") as monitor:
        for _ in range(2):
            with autograd.record():
                loss = LOSS(net(nd.ones((3, 6))), nd.arange(3))
            trainer.backward(loss)
        trainer.step(6)
        monitor.step()
    numbers = {line["tensor"]: line["numbers"] for line in lines(file)}
    assert numbers["output"] == 2 * 12
    assert numbers["net_dense_weight"] == 2 * 24
    gradient, = (line for line in lines(file) if line["tensor"] == "net_dense_weight")
    assert gradient["overflow"] == 0
    assert gradient["loss_scale"] == 4


@pytest.mark.parametrize("scale", [None, 2.0 ** 24])
def test_passes_of_scale_loss_are_observed_with_their_scale(scale, tmp_path):
    net, file = dense(), tmp_path / "a.jsonl"
    given = scale and amp.DynamicLossScale(scale)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=given)
    with amp.Monitor(net, trainer, file, 1, ".*dense_fwd") as monitor:
        with autograd.record():
            loss = LOSS(net(nd.ones((3, 6))), nd.arange(3))
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        assert trainer.step(3) == (scale is None)  # the gradients overflow
        monitor.step()
    gradient, = (line for line in lines(file) if line["tensor"] == "net_dense_weight")
    assert gradient["loss_scale"] == (scale or 1)
    assert (gradient["overflow"] > 0) == (scale is not None)


def test_gluon_trainer_is_supported(tmp_path):
    net, file = dense("mixed_bfloat16"), tmp_path / "a.jsonl"
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with amp.Monitor(net, trainer, file, 2) as monitor:
        train(net, trainer, [(nd.ones((3, 6)), nd.arange(3))], 4, monitor)
    assert {(line["step"], line["format"]) for line in lines(file) if line["tensor"] == "output"
            and line["node"].endswith("dense_fwd")} == {(2, "bfloat16"), (4, "bfloat16")}


def test_tensorboard_scalars(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    net, trainer = made()
    with amp.Monitor(net, trainer, tmp_path / "a.jsonl", 2, "net_dense0_fwd",
                     tensorboard=str(tmp_path / "board")) as monitor:
        train(net, trainer, batches(), 4, monitor)
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert "net_dense0_fwd/output/rms" in events.Tags()["scalars"]
    assert "net_dense0_fwd/net_dense0_weight/overflow" in events.Tags()["scalars"]
    shown = events.Scalars("net_dense0_fwd/output/rms")
    told = [line for line in lines(tmp_path / "a.jsonl") if line["tensor"] == "output"]
    assert [event.step for event in shown] == [2, 4]
    assert [event.value for event in shown] == pytest.approx([line["rms"] for line in told])


def test_parts_of_plain_block_are_observed_and_file_is_appended(tmp_path):
    class Plain(gluon.Block):
        def __init__(self):
            super().__init__(prefix="plain_")
            with self.name_scope():
                self.one, self.two = nn.Dense(5, in_units=6), nn.Dense(4, in_units=5)

        def forward(self, x):
            return self.two(self.one(x) * float(x.shape[0]))

    net, file = Plain(), tmp_path / "a.jsonl"
    net.initialize()
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for _ in range(2):
        with amp.Monitor(net, trainer, file, 1, "plain_dense._fwd") as monitor:
            train(net, trainer, [(nd.ones((3, 6)), nd.arange(3))], 1, monitor)
    assert [line["node"] for line in lines(file) if line["kind"] == "output"] \
        == ["plain_dense0_fwd", "plain_dense1_fwd"] * 2


def test_step_without_training_warns(tmp_path, caplog):
    net, trainer = made()
    with amp.Monitor(net, trainer, tmp_path / "a.jsonl", 1) as monitor:
        train(net, trainer, batches(), 1, monitor)
        with caplog.at_level(logging.WARNING, "gluon_amp"):
            monitor.step()
    assert "no statistics of step 2, because the network did not train" in caplog.text


def test_unsupported_arguments_are_refused(tmp_path):
    net, trainer = made()
    file = tmp_path / "a.jsonl"
    with pytest.raises(TypeError, match=r"network that gluon_amp\.convert has converted.*Dense"):
        amp.Monitor(nn.Dense(2), trainer, file)
    with pytest.raises(TypeError, match=r"network that gluon_amp\.convert has converted.*NoneType"):
        amp.Monitor(None, trainer, file)
    with pytest.raises(TypeError, match=r"trainer is a gluon_amp\.Trainer, or MXNet's.*str"):
        amp.Monitor(net, "sgd", file)
    for interval in (0, 1.5, True):
        with pytest.raises(ValueError, match="interval must be an integer >= 1"):
            amp.Monitor(net, trainer, file, interval)
    with pytest.raises(TypeError, match="layers takes blocks and regular expressions"):
        amp.Monitor(net, trainer, file, layers=[3])
    with pytest.raises(TypeError, match="layers takes blocks and regular expressions"):
        amp.Monitor(net, trainer, file, layers=3)
    with pytest.raises(ValueError, match=r"'\[' is not a regular expression"):
        amp.Monitor(net, trainer, file, layers="[")
    with pytest.raises(ValueError, match="layers is empty"):
        amp.Monitor(net, trainer, file, layers=[])
    assert not file.exists()
    with amp.Monitor(net, trainer, file, 1, "net_dens_fwd") as monitor, \
            pytest.raises(ValueError, match=r"'net_dens_fwd'. Did you mean net_dense0_fwd"):
        train(net, trainer, batches(), 1, monitor)
    with amp.Monitor(net, trainer, file, 1), \
            pytest.raises(RuntimeError, match="observed by another Monitor"):
        amp.Monitor(net, trainer, file, 1)


def test_closed_monitor_observes_nothing(tmp_path):
    net, trainer = made()
    monitor = amp.Monitor(net, trainer, tmp_path / "a.jsonl", 1)
    monitor.close()
    with pytest.raises(RuntimeError, match=r"Monitor of .*a\.jsonl is closed"):
        monitor.step()
    with amp.Monitor(net, trainer, tmp_path / "b.jsonl", 1) as other:
        train(net, trainer, batches(), 1, other)
    assert monitor.steps == 0
    assert lines(tmp_path / "b.jsonl")


def test_two_networks_are_observed_at_once(tmp_path):
    data, label = nd.ones((3, 6)), nd.arange(3)

    def observed(prefixes):
        """The lines of monitors of networks that take their steps in turn."""
        nets = []
        for prefix in prefixes:
            mx.random.seed(1)
            net = nn.Dense(4, in_units=6, prefix=prefix)
            net.initialize(mx.init.Normal(1))
            nets.append(amp.convert(net))
        trainers = [amp.Trainer(net.collect_params(), "sgd", loss_scale=64) for net in nets]
        files = [tmp_path / f"{prefix}-of-{len(prefixes)}" for prefix in prefixes]
        monitors = [amp.Monitor(net, trainer, file, 1, net)
                    for net, trainer, file in zip(nets, trainers, files)]
        with autograd.record():
            losses = [LOSS(net(data.copy()), label.copy()) for net in nets]
        for loss, trainer in zip(losses, trainers):
            trainer.backward(loss)
            trainer.step(3)
        for monitor in monitors:
            monitor.step()
            monitor.close()
        return [lines(file) for file in files]

    assert observed(["one_", "two_"]) == observed(["one_"]) + observed(["two_"])
