"""Inputs of an X-ray: data and weights that are not finite, batches with several labels, networks
that have not run, trainers of any kind."""
import json

import gluon_amp as amp
import mxnet as mx
import numpy as np
import processes
import pytest
from gluon_amp.formats import FORMATS
from gluon_amp.inspection import render
from gluon_amp.inspection.saved import read
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import Calling, ready, sequence
from trainers import fit, recorded, values, with_trainer
from xray_networks import LOSS, rows

pytestmark = pytest.mark.numpy


def two_layers(fault=None):
    fault = [nn.HybridLambda(fault, prefix="net_fault_")] if fault else []
    net = sequence(nn.Dense(8, activation="relu", prefix="net_first_"), *fault,
                   nn.Dense(4, prefix="net_second_"), prefix="net_")
    mx.random.seed(1)
    return amp.convert(ready(net, mx.init.Normal(0.3)))


def two_layers_and_trainer():
    """The same after a prediction."""
    net = two_layers()
    net(rows(1)[0][0])
    return with_trainer(net, "sgd", {"learning_rate": 1e-6}, loss_scale=64)


def nonfinite(number=np.nan):
    data, label = rows(1)[0]
    data[1, 2] = number
    return data, label


def test_explain_runs_in_new_threads():
    assert processes.printed("""
import threading
import gluon_amp as amp, mxnet as mx
net = mx.gluon.nn.Dense(4, in_units=3)
net.initialize(mx.init.One())
amp.convert(net)
batch = mx.nd.ones((2, 3)), mx.nd.zeros((2,))
loss_fn = mx.gluon.loss.SoftmaxCrossEntropyLoss()
for _ in range(20):
    thread = threading.Thread(
        target=lambda: print(amp.explain(net, batch, loss_fn).first_overflow))
    thread.start()
    thread.join()
""").split() == ["None"] * 20


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_nonfinite_data_is_reported_and_nothing_is_kept(number):
    net = two_layers()
    view = amp.xray(net, [nonfinite(number)], LOSS)
    assert str(view.first_overflow) == "batch 0: the input data is not finite"
    assert (view.findings, view.keep, view.window) == ([], [], None)
    assert "Training runs" not in str(view)
    assert amp.explain(net, nonfinite(number), LOSS).first_overflow.node == "data"


def test_nonfinite_weight_is_reported():
    net, _ = two_layers_and_trainer()
    net[1].bias.set_data(nd.array([0, 1, np.inf, 0]))
    for view in (amp.xray(net, rows(1), LOSS), amp.explain(net, rows(1)[0], LOSS)):
        assert (view.first_overflow.node, view.first_overflow.op) == ("net_second_bias", "")


def test_advice_ignores_batches_with_nonfinite_data(tmp_path):
    right = amp.xray(two_layers(lambda F, x: x * 1e6), rows(2), LOSS)
    view = amp.xray(two_layers(lambda F, x: x * 1e6), [rows(2)[0], nonfinite(), rows(2)[1]], LOSS)
    assert (view.findings, view.keep, view.window) == (right.findings, right.keep, right.window)
    assert view.findings
    assert any("batch 1: the input data is not finite" in note for note in view.notes)
    view.save(str(tmp_path / "xray"))
    assert "Batch 1: the input data is not finite" in (tmp_path / "xray" / "xray.html").read_text()


def test_reading_in_another_format_ignores_left_out_batches(tmp_path):
    for name, given in (("all", [nonfinite(), *rows(1)]), ("sound", rows(1))):
        amp.xray(two_layers(), given, LOSS).save(str(tmp_path / name))
    seen, right = (read(str(tmp_path / name), FORMATS["bfloat16"]) for name in ("all", "sound"))
    assert (seen.findings, seen.notes) == ([], [])
    assert seen.window.high == right.window.high > 2.0 ** 100


def test_overflow_report_has_ranges_of_data_and_parameters():
    (net, _), (data, label) = two_layers_and_trainer(), rows(1)[0]
    net[1].weight.set_data(nd.full((4, 8), 2.0 ** 15))
    found = amp.explain(net, (data, label), LOSS).first_overflow
    assert found.inputs["net_second_weight"] == (15, 15)
    assert found.inputs["net_second_bias"] is None  # all 0
    found = amp.explain(two_layers(), (nd.full(data.shape, 2.0 ** 20), label), LOSS).first_overflow
    assert found.inputs == {"data": (20, 20)}
    assert "block net_first" in found.where  # which reads data that a cast made infinite
    found = amp.explain(two_layers(), (data, label), LOSS, 2.0 ** 40).first_overflow
    assert found.backward
    assert "net_second_fwd 2^" in str(found)


def noisy():
    """Adds noise in training and in prediction."""
    def forward(F, x, one, two):
        hidden = one(x)
        return two(hidden + F.random.normal_like(hidden))
    return Calling(forward, nn.Dense(8), nn.Dense(4))


def symbol_block():
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
    return gluon.SymbolBlock(mx.sym.tanh(x), [mx.sym.var("data")])


@pytest.mark.parametrize("make", [noisy, symbol_block])
def test_xray_of_network_that_has_not_run_leaves_training_unchanged(make):
    def trained(looked_at):
        mx.random.seed(4)
        net = amp.convert(ready(make(), mx.init.Normal(0.3)))
        if looked_at:
            amp.xray(net, rows(2), LOSS)
        fit(*with_trainer(net, "sgd", {"learning_rate": 0.1}, loss_scale=64), rows(2))
        return [array.tobytes() for array in (*values(net), nd.random.uniform(shape=3).asnumpy())]

    assert trained(True) == trained(False)


def test_list_of_labels_ends_a_batch():
    def loss_fn(out, labels):
        classes, numbers = labels
        return LOSS(out, classes) + nd.square(out - numbers).mean(axis=1)

    data, label = rows(1)[0]
    net = two_layers()
    view = amp.xray(net, [(data, [label, nd.ones((8, 4))])], loss_fn)
    with autograd.pause():
        loss = loss_fn(net(data), [label, nd.ones((8, 4))])
    assert view.losses == [pytest.approx(float(loss.mean().asnumpy().item()))]


def test_files_hold_weights(tmp_path):
    net, trainer = two_layers_and_trainer()
    net[0].weight.set_data(net[0].weight.data() * 2.0 ** -16)  # too small for float16
    view = amp.xray(net, rows(1), LOSS, trainer)
    view.save(str(tmp_path / "xray"))
    table = {(row["tensor"], row["kind"]): row for row in render.rows(view)}
    lines = map(json.loads, (tmp_path / "xray" / "xray.jsonl").read_text().splitlines())
    held = {(line["parameter"], line["kind"]): line for line in lines if "parameter" in line}
    for weight, now in zip(view.weights, values(net)):
        now = now.astype(np.float32)
        row, line = table[weight.name, "weight"], held[weight.name, "weight"]
        assert row["format"] == "float16"
        small = (now != 0) & (np.abs(now) < 2.0 ** -14)
        assert float(row["subnormal"]) + float(row["flushed"]) == pytest.approx(small.mean())
        exponents = np.floor(np.log2(np.abs(now[now != 0])))
        assert dict(line["bins"]) == dict(zip(*np.unique(exponents, return_counts=True)))
        assert (line["zero"], int(row["numbers"])) == ((now == 0).sum(), now.size)


def test_weights_are_judged_in_another_format(tmp_path):
    net, trainer = two_layers_and_trainer()
    amp.convert(net, "bfloat16")
    net[0].weight.set_data(net[0].weight.data() * 2.0 ** -30)  # too small for float16
    view = amp.xray(net, rows(1), LOSS, trainer)
    view.save(str(tmp_path / "xray"))
    for name, found in (("bfloat16", False), ("float16", True)):
        again = read(str(tmp_path / "xray"), FORMATS[name])
        assert [w.counts.numbers for w in again.weights] == [
            w.counts.numbers for w in view.weights]
        below = {f.node for f in again.findings if f.reason == "range below"}
        assert ("net_first_weight" in below) == found


def test_batch_size_argument_reaches_trainer_step():
    def weights(batch_size):
        net, trainer = two_layers_and_trainer()
        trainer.set_learning_rate(0.1)
        if batch_size:
            amp.xray(net, rows(1), LOSS, trainer, batch_size=batch_size)
        else:
            trainer.backward(recorded(lambda: LOSS(net(rows(1)[0][0]), rows(1)[0][1])))
            trainer.step(2)
        return [array.tobytes() for array in values(net)]

    assert weights(2) == weights(None) != weights(8)
    with pytest.raises(ValueError, match="batch_size must be an integer"):
        weights(-1)
    with pytest.raises(ValueError, match="batch_size is for the steps of trainer="):
        amp.xray(two_layers(), rows(1), LOSS, batch_size=2)


@pytest.mark.parametrize("net", [None, nn.Dense(4, in_units=6)])
def test_errors_name_the_function_that_was_called(net):
    for name, given in (("xray", rows(1)), ("explain", rows(1)[0])):
        with pytest.raises(TypeError, match=f"^{name} takes a network that gluon_amp"):
            getattr(amp, name)(net, given, LOSS)


@pytest.mark.parametrize("with_trainer", [False, True])
def test_xray_and_explain_pause_a_recording(with_trainer):
    """MXNet refuses writes to arrays of a graph that is being recorded."""
    def shown():
        net, trainer = two_layers_and_trainer()
        assert amp.explain(net, rows(1)[0], LOSS).first_overflow is None
        return str(amp.xray(net, rows(2), LOSS, trainer if with_trainer else None))

    with autograd.record():
        seen = shown()
        assert autograd.is_recording()
    assert seen == shown()


def waiting_trainer(net):
    trainer = amp.Trainer(net.collect_params(), "sgd")
    trainer.backward(recorded(lambda: LOSS(net(rows(1)[0][0]), rows(1)[0][1])))
    return trainer


@pytest.mark.parametrize(("make", "said"), [
    (lambda net: "sgd", "a gluon_amp.Trainer, or MXNet's. Received: str"),
    (lambda net: amp.Trainer(two_layers().collect_params(), "sgd"), "none of the network's para"),
    (waiting_trainer, "gradients wait for the trainer's step"),
])
def test_trainer_that_cannot_step_is_refused(make, said):
    net, _ = two_layers_and_trainer()
    with pytest.raises((TypeError, ValueError), match=said):
        amp.xray(net, rows(1), LOSS, make(net))


def test_loss_without_gradients_is_refused():
    with pytest.raises(ValueError, match="no gradients come from the loss"):
        amp.xray(two_layers(), rows(1), lambda out, label: label)


def test_batch_with_nonfinite_float32_loss_gives_no_advice(tmp_path):
    net = two_layers(lambda F, x: F.exp(x * 20) * 1e-5)
    given = [(rows(1)[0][0] * size, rows(1)[0][1]) for size in (0.1, 100)]
    view = amp.xray(net, given, LOSS)
    assert (view.findings, view.keep, view.left_out) == ([], [], [1])
    assert "batch 1: the loss is not finite in float32 either" in view.notes[0]
    assert view.window.low <= view.window.high
    alone = amp.xray(net, given[1:], LOSS)
    assert (alone.findings, alone.keep, alone.window) == ([], [], None)
    assert "Training runs" not in str(alone)
    alone.save(str(tmp_path / "xray"))


def test_batch_with_nonfinite_loss_does_not_change_loss_scale():
    def loss_fn(out, label):
        return LOSS(out, label) * (np.nan if label[0].asnumpy().item() == 3 else 1)
    data, label = rows(1)[0]
    first = label.copy()
    label[0], first[0] = 0, 3
    view = amp.xray(two_layers(), [(data, first), (data, label)], loss_fn)
    right = amp.xray(two_layers(), [(data, label)], loss_fn)
    assert (view.left_out, view.loss_scale) == ([0], right.loss_scale)
    assert view.steps[1][0] == right.steps[0][0]
