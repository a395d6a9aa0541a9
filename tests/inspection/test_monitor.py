"""`Monitor`: statistics of tensors at regular steps, without changes to training."""
import json
import logging

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn
from networks import ready, sequence
from trainers import recorded, values, with_trainer
from xray_networks import LOSS, batches, images_net

pytestmark = [pytest.mark.numpy, pytest.mark.isa]


def train(net, trainer, data, steps, monitor=None):
    """Takes steps on these batches in turn."""
    for i in range(steps):
        x, label = data[i % len(data)]
        with autograd.record():
            loss = LOSS(net(x), label)
        getattr(trainer, "backward", autograd.backward)(loss)
        trainer.step(len(label))
        if monitor:
            monitor.step()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def made(policy="float16"):
    """A network of convolutions and its trainer."""
    mx.random.seed(1)
    net = ready(images_net(), mx.init.Xavier())
    amp.convert(net, policy)
    net.hybridize(static_alloc=True, static_shape=True)
    net(batches()[0][0])
    return with_trainer(net, "sgd", {"learning_rate": 0.1})


def small():
    return [(nd.ones((3, 6)), nd.arange(3))]


def dense(policy="float16", cls=amp.Trainer, rate=0.1, **kwargs):
    """A dense layer in a network, and its trainer."""
    net = ready(sequence(nn.Dense(4, in_units=6, use_bias=False, prefix="net_dense_"),
                         prefix="net_"), mx.init.Normal(1))
    amp.convert(net, policy)
    return net, cls(net.collect_params(), "sgd", {"learning_rate": rate}, **kwargs)


def outputs(path):
    return [line for line in lines(path) if line["kind"] == "output"]


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
        net = ready(sequence(*make()), mx.init.Xavier())
        if policy:
            amp.convert(net, policy)
        net.hybridize(static_alloc=True)
        _, trainer = with_trainer(net, "sgd", {"learning_rate": 0.1})
        monitor = amp.Monitor(net, trainer, tmp_path / "a.jsonl", 2) if monitored else None
        for _ in range(4):
            with autograd.record():
                loss = (net(data) ** 2).mean()
            trainer.backward(loss)
            trainer.step(1)
            if monitor:
                monitor.step()
        results.append(values(net))
    assert all(np.array_equal(a, b) for a, b in zip(*results))
    assert {line["step"] for line in lines(tmp_path / "a.jsonl")} == {2, 4}


def test_statistics_match_values_of_tensors(tmp_path, rng):
    (net, trainer), file = dense(rate=0, loss_scale=8.0), tmp_path / "a.jsonl"
    x, label = rng.standard_normal((5, 6)).astype("float16"), nd.arange(5) % 4
    w = net[0].weight.data().asnumpy()
    with amp.Monitor(net, trainer, file, interval=1, layers=net[0]) as monitor:
        train(net, trainer, [(nd.array(x, dtype="float16"), label)], 1, monitor)
    found = {(line["node"], line["tensor"]): line for line in lines(file)}
    out = found["net_dense_fwd", "output"]
    exact = x.astype("float32") @ w.astype("float32").T
    exponents = np.floor(np.log2(np.abs(exact))).astype(int)
    assert (out["numbers"], out["format"], "loss_scale" in out) == (20, "float16", False)
    assert out["rms"] == pytest.approx(np.sqrt((exact ** 2).mean()), rel=1e-3)
    assert (out["largest"], out["least"]) == (exponents.max(), exponents.min())
    assert dict(out["bins"]) == dict(zip(*np.unique(exponents, return_counts=True)))
    assert out["zero"] == out["underflow"] == out["overflow"] == out["nan"] == 0
    soft = np.exp(exact) / np.exp(exact).sum(1, keepdims=True) - np.eye(4)[[0, 1, 2, 3, 0]]
    gradient = found["net_dense_fwd", "net_dense_weight"]
    assert (gradient["kind"], gradient["loss_scale"]) == ("gradient", 8)
    scaled = 8 * soft.T @ x.astype("float32")
    assert gradient["rms"] == pytest.approx(np.sqrt((scaled ** 2).mean()), rel=1e-2)


def test_overflow_and_underflow_are_reported(tmp_path):
    (net, trainer), file = dense(rate=0, loss_scale=None), tmp_path / "a.jsonl"
    net[0].weight.set_data(nd.array([[1e-4] * 6, [1.0] * 6, [3e4] * 6, [0.0] * 6]))
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
    (net, trainer), file = dense(), tmp_path / "a.jsonl"
    with amp.Monitor(net, trainer, file, 1, ".*dense_fwd") as monitor:
        for _ in range(3):
            net(nd.ones((7, 6)))
            train(net, trainer, small(), 1, monitor)
    assert {line["numbers"] for line in outputs(file)} == {12}


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
            amp.xray(dense()[0] if "another" in look else net, [(data, label)], LOSS)

    def observed(file, looks):
        mx.random.seed(1)
        net, trainer = dense("mixed_float16", kind)
        with amp.Monitor(net, trainer, file, 1) as monitor:
            for _ in range(2):
                for part, call in (
                        ("before", lambda: None),
                        ("after backward", lambda: getattr(trainer, "backward", autograd.backward)(
                            recorded(lambda: LOSS(net(data), label)))),
                        ("after", lambda: trainer.step(3))):
                    call()
                    if looks and part == place:
                        look_at(net)
                monitor.step()
        return lines(file)

    expected = observed(tmp_path / "alone.jsonl", False)
    assert expected
    assert observed(tmp_path / "looked.jsonl", True) == expected


def test_xray_that_takes_steps_leaves_the_monitor(tmp_path):
    (net, trainer), file = dense(), tmp_path / "a.jsonl"
    with amp.Monitor(net, trainer, file, 1, ".*dense_fwd") as monitor:
        amp.xray(net, small(), LOSS, trainer)
        train(net, trainer, small(), 2, monitor)
    assert [(line["step"], line["numbers"]) for line in outputs(file)] == [(1, 12), (2, 12)]


def test_passes_of_one_step_add_up(tmp_path):
    (net, trainer), file = dense(), tmp_path / "a.jsonl"
    net.collect_params().setattr("grad_req", "add")
    with amp.Monitor(net, trainer, file, 1, ".*dense_fwd") as monitor:
        for _ in range(2):
            trainer.backward(recorded(lambda: LOSS(net(nd.ones((3, 6))), nd.arange(3))))
        trainer.step(6)
        monitor.step()
    found = {line["tensor"]: line for line in lines(file)}
    gradient = found["net_dense_weight"]
    assert (found["output"]["numbers"], gradient["numbers"]) == (2 * 12, 2 * 24)
    assert (gradient["overflow"], gradient["loss_scale"]) == (0, 4)


@pytest.mark.parametrize("scale", [None, 2.0 ** 24])
def test_passes_of_scale_loss_are_observed_with_their_scale(scale, tmp_path):
    net, trainer = dense(loss_scale=scale and amp.DynamicLossScale(scale))
    file = tmp_path / "a.jsonl"
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
    (net, trainer), file = dense("mixed_bfloat16", gluon.Trainer), tmp_path / "a.jsonl"
    with amp.Monitor(net, trainer, file, 2) as monitor:
        train(net, trainer, small(), 4, monitor)
    assert {(line["step"], line["format"]) for line in outputs(file)
            if line["node"].endswith("dense_fwd")} == {(2, "bfloat16"), (4, "bfloat16")}


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

    net, trainer = with_trainer(amp.convert(ready(Plain())), "sgd", {"learning_rate": 0.1})
    file = tmp_path / "a.jsonl"
    for _ in range(2):
        with amp.Monitor(net, trainer, file, 1, "plain_dense._fwd") as monitor:
            train(net, trainer, small(), 1, monitor)
    assert [line["node"] for line in outputs(file)] == ["plain_dense0_fwd", "plain_dense1_fwd"] * 2


def test_step_without_training_warns(tmp_path, caplog):
    net, trainer = made()
    with amp.Monitor(net, trainer, tmp_path / "a.jsonl", 1) as monitor:
        train(net, trainer, batches(), 1, monitor)
        with caplog.at_level(logging.WARNING, "gluon_amp"):
            monitor.step()
    assert "no statistics of step 2, because the network did not train" in caplog.text


@pytest.mark.parametrize(("wrong", "words"), [
    ({"net": nn.Dense(2)}, r"network that gluon_amp\.convert has converted.*Dense"),
    ({"net": None}, r"network that gluon_amp\.convert has converted.*NoneType"),
    ({"trainer": "sgd"}, r"trainer is a gluon_amp\.Trainer, or MXNet's.*str"),
    *(({"interval": interval}, "interval must be an integer >= 1") for interval in (0, 1.5, True)),
    *(({"layers": layers}, "layers takes blocks and regular expressions") for layers in ([3], 3)),
    ({"layers": "["}, r"'\[' is not a regular expression"),
    ({"layers": []}, "layers is empty")])
def test_unsupported_arguments_are_refused(wrong, words, tmp_path):
    net, trainer = dense()
    file = tmp_path / "a.jsonl"
    with pytest.raises((TypeError, ValueError), match=words):
        amp.Monitor(**{"net": net, "trainer": trainer, "path": file, **wrong})
    assert not file.exists()


def test_layers_that_are_not_there_and_a_second_monitor_are_refused(tmp_path):
    (net, trainer), file = made(), tmp_path / "a.jsonl"
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
    data, label = small()[0]

    def observed(prefixes):
        """The lines of monitors of networks that take their steps in turn."""
        watched = []
        for prefix in prefixes:
            mx.random.seed(1)
            net = amp.convert(ready(nn.Dense(4, in_units=6, prefix=prefix), mx.init.Normal(1)))
            _, trainer = with_trainer(net, "sgd", loss_scale=64)
            file = tmp_path / f"{prefix}-of-{len(prefixes)}"
            watched.append((net, trainer, amp.Monitor(net, trainer, file, 1, net), file))
        losses = recorded(lambda: [LOSS(net(data.copy()), label.copy()) for net, *_ in watched])
        for loss, (_, trainer, *_) in zip(losses, watched):
            trainer.backward(loss)
            trainer.step(3)
        for *_, monitor, _ in watched:
            monitor.step()
            monitor.close()
        return [lines(file) for *_, file in watched]

    assert observed(["one_", "two_"]) == observed(["one_"]) + observed(["two_"])
