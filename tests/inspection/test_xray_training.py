"""X-ray's headline and severity state what the training does: trained in the same test."""
import json
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.inspection.lines import xray_lines
from gluon_amp.inspection.render import rows
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import Calling, ready

pytestmark = pytest.mark.numpy


def dense():
    return [nn.Dense(32, activation="relu"), nn.Dense(1)]


def convolutions():
    return [nn.Conv2D(4, 3, padding=1, activation="relu"), nn.Conv2D(1, 1)]


def network(make=dense, policy="float16"):
    mx.random.seed(3)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(*make())
    return amp.convert(ready(net, mx.init.Xavier()), policy)


def regression(mean, spread=1.0, count=2):
    rng = np.random.default_rng(0)
    return [(nd.array(rng.normal(size=(32, 10))), nd.array(rng.normal(mean, spread, (32, 1))))
            for _ in range(count)]


def pixels(size, count=2):
    rng = np.random.default_rng(0)
    return [(nd.array(rng.normal(size=(2, 3, size, size))),
             nd.array(rng.integers(0, 2, (2, 1, size, size)) * 4)) for _ in range(count)]


def summed(output, label):
    return ((output - label) ** 2).sum(axis=(1, 2, 3))


def times(factor, loss_fn):
    return lambda output, label: factor * loss_fn(output, label)


def trainer_of(net, rate=1e-9, **kwargs):
    return amp.Trainer(net.collect_params(), "sgd", {"learning_rate": rate}, **kwargs)


def raises(net, batches, loss_fn, trainer=None):
    """Whether 30 steps on these batches raise LossScaleError."""
    trainer = trainer or trainer_of(net)
    try:
        for data, label in batches * (30 // len(batches)):
            with autograd.record():
                loss = loss_fn(net(data), label)
            trainer.backward(loss)
            trainer.step(len(data))
    except amp.LossScaleError:
        return True
    return False


@pytest.mark.parametrize(("make", "batches", "loss_fn"), [
    (dense, lambda: regression(500, 100), gluon.loss.L2Loss()),
    (dense, lambda: regression(-900, 20), gluon.loss.L2Loss()),
    (dense, lambda: regression(3e3), gluon.loss.L1Loss(weight=200)),
    (convolutions, lambda: pixels(24), summed)])
def test_training_near_scale_1_is_no_error(make, batches, loss_fn):
    net, batches = network(make), batches()
    view = amp.xray(net, batches, loss_fn)
    assert view.window.high < 2 ** 7
    assert view.verdict.startswith("Training runs")
    assert (view.keep, view.severity in ("good", "warning")) == ([], True)
    assert not raises(net, batches, loss_fn)


@pytest.mark.parametrize(("make", "batches", "loss_fn"), [
    (dense, lambda: regression(5e4), times(2.0 ** 14, gluon.loss.L2Loss())),
    (dense, lambda: regression(-3e5, 1e3), times(2.0 ** 14, gluon.loss.L2Loss())),
    (convolutions, lambda: pixels(200), times(2.0 ** 16, summed))])
def test_training_that_overflows_at_smallest_scale_is_an_error(make, batches, loss_fn):
    net, batches = network(make), batches()
    view = amp.xray(net, batches, loss_fn)
    assert (view.severity, view.keep) == ("error", [])
    initial, least = (2.0 ** int(power) for power in re.search(
        r"amp.DynamicLossScale\(2\*\*(-\d+), minimum=2\*\*(-\d+)\)$", view.verdict).groups())
    assert initial == view.window.high
    assert least <= initial / 2 ** 10  # gradients grow
    fact = "an example has 40000" if make is convolutions else "the labels are not normalized"
    assert any(note.startswith(fact) for note in view.notes)
    assert raises(net, batches, loss_fn)
    net, scale = network(make), amp.DynamicLossScale(initial, minimum=least)
    assert not raises(net, batches, loss_fn, trainer_of(net, 1e-18, loss_scale=scale))


@pytest.mark.parametrize(("loss_scale", "said"), [
    (amp.DynamicLossScale(minimum=2 ** -24), "Training runs: "),
    (0.5, "Training raises LossScaleError, because gradients overflow at its smallest loss scale, "
          "2^-1"),
    (None, "Training writes NaN into the weights, because gradients overflow at its smallest loss "
           "scale, 1")])
def test_trainer_with_lower_minimum_or_without_scale_is_judged_by_its_own(loss_scale, said):
    net, batches = network(), regression(5e4)
    net(batches[0][0])
    trainer = trainer_of(net, 1e-12, loss_scale=loss_scale)
    assert amp.xray(net, batches[:1], gluon.loss.L2Loss(), trainer).verdict.startswith(said)


@pytest.mark.parametrize(("loss_scale", "said"), [
    ("dynamic", "Training runs: "),
    *((scale, "Training runs and loses gradients, because they need a loss scale of at least 2^")
      for scale in (None, 2.0))])
def test_gradients_that_need_a_larger_scale_than_the_trainings(loss_scale, said):
    net, batches = network(), regression(0)
    net(batches[0][0])
    view = amp.xray(net, batches, times(2e-7, gluon.loss.L2Loss()),
                    trainer_of(net, loss_scale=loss_scale))
    assert view.verdict.startswith(said)
    assert view.severity == ("good" if loss_scale == "dynamic" else "warning")


def parts(F, x, one, two, out):
    """Reads the columns of its data apart, as in a network of several features."""
    left = F.slice_axis(x, axis=1, begin=0, end=4)
    return out(F.concat(one(left), two(F.slice_axis(x, axis=1, begin=4, end=10))))


@pytest.mark.parametrize(("make", "factor", "size"), [
    (dense, 2.0 ** 21, 22),
    (lambda: [Calling(parts, nn.Dense(8), nn.Dense(8), nn.Dense(1))], 2.0 ** 17, 18),
    (lambda: [nn.Dense(32, weight_initializer=mx.init.Normal(1)), nn.Dense(1)], 2.0 ** 14, 15),
    (lambda: [nn.Flatten(), *dense()], 2.0 ** 18, 19)])
def test_large_data_are_named_and_nothing_is_kept(make, factor, size):
    batches = [(data.clip(-3, 3) * factor, label) for data, label in regression(0)]
    net = network(make)
    view = amp.xray(net, batches, gluon.loss.L2Loss())
    assert view.keep == []
    assert {finding.node for finding in view.findings} == {"data"}
    assert f"data reach 2^{size}, and " in view.verdict
    assert " (input data): normalize the input data: mean " in view.verdict
    assert view.severity == "error"
    assert "does not suit" not in str(view)
    fixed = [(data / factor, label) for data, label in batches]
    assert amp.xray(net, fixed, gluon.loss.L2Loss()).findings == []


def test_tiny_data_are_named():
    batches = [(data * 1e-8, label) for data, label in regression(0)]
    view = amp.xray(network(), batches, gluon.loss.L2Loss())
    assert view.verdict.startswith("Training runs, with less accuracy than in float32: data are "
                                   "rounded to ")
    assert view.keep == []


def test_text_and_tables_have_the_same_numbers(tmp_path):
    """Also for numbers between 65504 and 2^16, of which rounding makes infinities."""
    def forward(F, x):
        return x * 2 ** 12
    net = network(lambda: [nn.Dense(64), nn.HybridLambda(forward), nn.Dense(1)])
    data = nd.array(np.random.default_rng(0).normal(size=(256, 10)) * 8)
    view = amp.xray(net, [(data, nd.zeros((256, 1)))], gluon.loss.L2Loss())
    finding = view.findings[0]
    share, exponent = re.match(r"([\d.]+)% of .* lies beyond 65504, up to 2\^(\d+)",
                               finding.detail).groups()
    row = next(row for row in rows(view) if row["tensor"] == finding.tensor)
    assert f"{row['overflowed']:.2%}" == f"{share}%"
    assert row["largest"] == int(exponent)
    line = next(line for line in xray_lines(view)
                if line.get("node") == finding.tensor and line["kind"] == "output")
    assert f"{line['overflow']:.2%}" == f"{share}%"
    json.dumps(line)


def test_headline_names_batches_that_training_skips():
    (data, label), good = regression(0)
    net = network(lambda: [nn.HybridLambda(lambda F, x: x * 256), nn.Dense(1)])
    view = amp.xray(net, [(data * 256, label), good], gluon.loss.L2Loss())
    assert view.verdict.startswith(
        "Training skips 1 of 2 batches, because the loss is not finite: ")


@pytest.mark.parametrize(("factor", "too"), [(1e30, True), (2.0 ** 20, False)])
def test_explain_states_if_float32_is_not_finite_either(factor, too):
    data, label = regression(0)[0]
    found = amp.explain(network(), (data * factor, label), gluon.loss.L2Loss()).first_overflow
    assert found.in_float32 == too
    assert str(found).endswith("not finite in float32 either: precision is not the cause") == too
