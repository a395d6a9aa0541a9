"""Values that overflow in some batches only, and loss scales that training does not reach."""

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.inspection.session import NetworkCopy, Session
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn
from networks import Calling, ready
from xray_networks import LOSS, calling, check_mended, layers, named, rows

pytestmark = pytest.mark.numpy


def with_largest(*numbers):
    """Batches whose largest numbers are these."""
    given = rows(len(numbers))
    for (data, _), number in zip(given, numbers):
        data[:] = nd.clip(data, -1, 1)
        data[2, 3] = number
    return given


def with_exp(F, x, dense, out):
    return out(F.tanh(dense(F.exp(x)) * 1e-3))


def test_exp_near_overflow_in_one_batch_is_reported():
    net = calling(with_exp, *layers(8, 4))
    view = amp.xray(net, with_largest(8.0, 7.0, 10.5), LOSS)
    assert view.first_overflow is None
    assert (view.findings[0].node, view.findings[0].reason) == ("net_exp0", "range above")
    assert "reaches 2^15 in one batch, and 2^11 in the median batch" in view.findings[0].detail
    check_mended(net, view, with_largest(8.0, 7.0, 10.5))
    assert amp.explain(net, with_largest(12.0)[0], LOSS).first_overflow is None


@pytest.mark.parametrize("largest", [(8.0, 7.0, 8.5), (10.5, 10.5, 10.5)])
def test_exp_with_headroom_or_constant_size_is_no_finding(largest):
    assert amp.xray(calling(with_exp, *layers(8, 4)), with_largest(*largest),
                    LOSS).findings == []


def headroom_notes(value):
    def forward(F, x, dense, out):
        return out(((dense(x) * 0 + value) * 1e4) * 1e-4)
    view = amp.xray(calling(forward, *layers(8, 4)), rows(), LOSS)
    return view, [note for note in view.notes if "largest number" in note]


def test_headroom_below_factor_2_is_noted():
    view, (note,) = headroom_notes(5.0)
    assert view.findings == []
    assert note.startswith(named("net__mulscalar1 is within a factor of 1.32 of float16's largest "
                                 "number, 65504"))


def test_larger_headroom_and_overflow_are_not_noted():
    assert headroom_notes(3.0)[1] == []
    view, notes = headroom_notes(7.0)
    assert view.findings[0].severity == "error"
    assert notes == []


def exploding(*before):
    """Blocks followed by 12 layers whose values grow beyond float16."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(*before, *(Calling(lambda F, x, inner: x + inner(x), nn.Dense(6, in_units=6))
                           for _ in range(12)))
    mx.random.seed(1)
    net.initialize(mx.init.Normal(40))
    return net


def test_network_unsuitable_for_float16_is_reported():
    view = amp.xray(amp.convert(exploding()), rows(), LOSS)
    assert np.isfinite(view.reference_losses).all()
    assert "keep= leaves 0 of 24 tensors" in str(view)
    assert "norms between the layers" in str(view)


def test_initial_zeros_of_lstm_are_not_counted_as_tensors():
    """They have no counts."""
    lstms = [nn.HybridLambda(lambda F, x: F.expand_dims(x, 0)),
             *(rnn.LSTM(6, input_size=6) for _ in range(3)),
             nn.HybridLambda(lambda F, x: F.BlockGrad(F.reshape(x, (-3, 0))))]
    net = exploding(*lstms)
    for parameter in net.collect_params(".*lstm").values():
        parameter.set_data(parameter.data() * 1e-2)
    view = amp.xray(amp.convert(net), rows(), LOSS)
    assert "7 of 31 tensors" in str(view)


def test_overflow_that_depends_on_random_numbers_is_explained():
    def forward(F, x, dense, out):
        h = dense(x)
        return out(h + F.random.normal_like(h) * 26000 * 2.0 ** -13)
    net = calling(forward, *layers(6, 4))
    for seed in range(8):
        mx.random.seed(seed)
        assert amp.explain(net, rows()[0], LOSS).first_overflow.node == named("net__mulscalar0")


def test_keep_never_names_casts():
    """In a loop whose body ends in a cast, followed by another cast."""
    def forward(F, x, inner, out):
        _, state = F.contrib.foreach(lambda row, state: (row, F.tanh(inner(state + row))),
                                     F.expand_dims(x, axis=0), x)
        return out(state)
    net = calling(forward, nn.Dense(6, in_units=6, prefix="net_inner_"), *layers(4))
    with Session(net, rows(), LOSS, 1, "xray") as session:
        layout = NetworkCopy(session).layout
    kept = {name for tensor in layout.tensors for name in layout.kept_for(tensor.key)}
    assert kept
    assert not [name for name in kept if "amp_cast" in name]


def test_gradients_after_forward_fault_keep_nothing():
    """The norm of rows that cancelled to 0 has large gradients; without cancellation it has not."""
    def forward(F, x, dense, out):
        return out(F.L2Normalization((dense(x) * 0.03 + 700) - 700))
    net = calling(forward, *layers(8, 4))
    view = amp.xray(net, rows(), LOSS)
    assert [finding.reason for finding in view.findings] == ["cancellation"]
    assert not any("dense" in name for name in view.keep)


# ---- values that recur: in a loop, and in a block that is called several times

class Step(gluon.HybridBlock):
    def __init__(self, fault):
        super().__init__(prefix="net_step_")
        self.fault = fault
        with self.name_scope():
            self.inner = nn.Dense(6, in_units=6, activation="tanh")

    def hybrid_forward(self, F, x):
        return self.fault(F, x, self.inner)


class Rounds(gluon.HybridBlock):
    """The same step six times: in a loop, or by calling the block so often."""

    def __init__(self, fault, kind):
        super().__init__(prefix="net_")
        self.kind = kind
        with self.name_scope():
            self.step, self.out = Step(fault), nn.Dense(4, in_units=6)

    def hybrid_forward(self, F, x):
        if self.kind == "calls":
            for _ in range(6):
                x = self.step(x)
        else:
            rounds = F.broadcast_axis(F.expand_dims(x, 0), axis=0, size=6)
            _, x = F.contrib.foreach(lambda row, state: (row, self.step(state)), rounds, x * 1)
        return self.out(F.log(F.abs(x) + 1))


def grows(F, x, inner):
    return x * 16 + inner(x)


def grows_behind_a_reshape(F, x, inner):
    wide = F.batch_dot(F.expand_dims(x, 1), F.ones((8, 6, 6)) * 8)
    return wide.reshape((8, 6)) + inner(x)


def made(fault, kind, keep=()):
    mx.random.seed(1)
    net = ready(Rounds(fault, kind), mx.init.Xavier())
    net.hybridize()
    net(rows()[0][0])
    return amp.convert(net, keep=keep)


@pytest.mark.parametrize("kind", ["calls", "foreach"])
@pytest.mark.parametrize(("fault", "part"), [(grows, "mulscalar"),
                                             (grows_behind_a_reshape, "batch_dot")])
def test_value_growing_in_loop_is_reported_with_its_line(fault, kind, part):
    view = amp.xray(made(fault, kind), rows(), LOSS)
    assert named(f"_{part}")[1:] in view.findings[0].node
    assert view.findings[0].reason.startswith("range above")
    line = fault.__code__.co_firstlineno + 1
    if fault is grows or not mx.util.is_np_array():  # where a call of F has a line in numpy_mode.py
        assert f"test_xray_outliers.py, line {line}" in view.first_overflow.where
    after = amp.xray(made(fault, kind, view.keep), rows(), LOSS)
    assert (after.findings, after.first_overflow) == ([], None)


def test_nodes_after_infinity_in_loop_are_not_blamed():
    class Net(Rounds):
        def hybrid_forward(self, F, x):
            return super().hybrid_forward(F, (x * F.ones_like(x) * 4e5).reshape((8, 6)))
    mx.random.seed(1)
    net = ready(Net(lambda F, x, inner: x * 2 + inner(x), "foreach"), mx.init.Xavier())
    view = amp.xray(amp.convert(net), rows(), LOSS)
    assert [finding.node for finding in view.findings] == [named("net__mulscalar0")]


def test_gradient_rounded_by_cast_is_reported_with_producing_line():
    def forward(F, x, inner, out):
        y = inner(x)
        return out(F.log(y * y + 1e-10) * 50)
    net = calling(forward, *layers(6, 4))
    found = amp.explain(net, rows()[0], LOSS, loss_scale=2.0 ** 20).first_overflow
    assert found.backward
    assert "out(F.log(y * y + 1e-10) * 50)" in found.where


# ---- batches that advice is based on


def with_sqrt():
    return calling(lambda F, x, dense, out: out(F.sqrt(F.abs(dense(x)))), *layers(8, 4))


def test_batch_with_nonfinite_gradients_does_not_lower_loss_scale():
    (data, label), good = rows()
    view = amp.xray(with_sqrt(), [(data * 0, label), good], LOSS, reference=False)
    first, second = (scale for scale, _ in view.steps)
    assert first < 1 < second == view.scale


@pytest.mark.parametrize("trained", [False, True])
def test_nonfinite_float32_gradients_are_noted(trained):
    """A square root of 0 passes an infinite gradient on."""
    (data, label), good = rows()
    net = with_sqrt()
    trainer = amp.Trainer(net.collect_params(), "sgd") if trained else None
    view = amp.xray(net, [(data * 0, label), good], LOSS, trainer)
    assert "\nnote: batch 0: gradients are not finite in float32 either" in str(view)
    assert (view.findings, view.keep, view.left_out) == ([], [], [0])


def test_keep_is_judged_by_all_batches_together():
    """In one of them almost all numbers of the first layer are 0, which alone would be a fault."""
    def forward(F, x, dense, out):
        h = dense(x)
        large = F.ones_like(h) * 1e3 * (1 + h * 0)
        return out(F.concat(h, F.log(large * 1e3)))
    (data, label), good = rows()
    view = amp.xray(calling(forward, *layers(8, 4)), [(data * 1e-6, label), good], LOSS)
    assert [finding.node for finding in view.findings] == [named("net__mulscalar2")]


# ---- the report


def test_keep_is_empty_if_no_node_helps():
    net = calling(lambda F, x, dense, out: F.exp(F.abs(out(dense(x))) + 12), *layers(8, 4))
    amp.convert(net, amp.Policy("halves", "float16", "float16", output="float16"))
    view = amp.xray(net, rows(), lambda out, label: out.mean(axis=1))
    assert view.keep == []
    assert "with nothing to keep, float16 still does not suit: net_exp0" in str(view)


def test_window_fits_each_step():
    """The step with the smallest gradients needs the highest scale, and others do not hide it."""
    net = calling(lambda F, x, dense, out: out(dense(x)), *layers(8, 4))
    given = [(data, [label, nd.array([factor])]) for (data, label), factor in
             zip(rows(), (2.0 ** -12, 2.0 ** 3))]
    small, large, both = (amp.xray(net, some, lambda out, y: LOSS(out, y[0]) * y[1]).loss_scale
                          for some in (given[:1], given[1:], given))
    assert small[0] > large[0]
    assert both == (small[0], large[1])


@pytest.mark.parametrize(("bits", "words"), [
    (2, "gradients fit up to the loss scale 2^-12, and that of the training ends at 2^-14"),
    (3, "amp.DynamicLossScale(2**-11, minimum=2**-24)"),
    (5, "amp.DynamicLossScale(2**-9, minimum=2**-24)")])
def test_headroom_that_training_may_use_up_is_noted(bits, words):
    net = calling(lambda F, x, dense, out: out(dense(x)), *layers(8, 4))
    high = amp.xray(net, rows(), LOSS).loss_scale[1]
    view = amp.xray(net, rows(), lambda out, label: LOSS(out, label) * (high * 2.0 ** (14 - bits)))
    assert view.loss_scale[1] == 2.0 ** (bits - 14)
    assert (view.findings, view.severity) == ([], "good")
    assert words in str(view)


def test_headroom_after_keep_is_noted():
    def forward(F, x, dense, out):
        h = dense(x) * 3e4
        return out(h * h * 2.0 ** -30)
    net = calling(forward, *layers(8, 4))
    high = amp.xray(net, rows(), LOSS).loss_scale[1]
    view = amp.xray(net, rows(), lambda out, label: LOSS(out, label) * (high * 2.0 ** 11))
    assert view.keep
    assert view.loss_scale[1] == 2.0 ** -11
    assert "amp.DynamicLossScale(2**-11, minimum=2**-24)" in str(view)
