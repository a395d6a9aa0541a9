"""RNN, LSTM and GRU whose products have another format than what lies between: the engine's loop
over time, against MXNet's float32 code and numpy."""

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from gluon_amp.formats import FORMATS
from mxnet import autograd, gluon, nd

TIME, BATCH, DATA, UNITS = 4, 3, 5, 6
MODES = {"rnn_relu": gluon.rnn.RNN, "rnn_tanh": gluon.rnn.RNN, "lstm": gluon.rnn.LSTM,
         "gru": gluon.rnn.GRU}
FINE = amp.Format("fine", exponent=8, fraction=21)


def layer(mode, **settings):
    more = {"activation": mode[4:]} if mode.startswith("rnn") else {}
    mx.random.seed(3)
    net = MODES[mode](UNITS, input_size=DATA, **more, **settings)
    net.initialize(mx.init.Uniform(0.5))
    return net


def outcome(net, rng):
    """Outputs, states, and the gradients of data, states and parameters."""
    x = nd.array(rng.standard_normal((TIME, BATCH, DATA)))
    states = [nd.array(rng.standard_normal(state.shape)) for state in net.begin_state(BATCH)]
    for one in (x, *states):
        one.attach_grad()
    with autograd.record():
        out, last = net(x, states)
    made = [out, *last]
    autograd.backward(made, [nd.array(rng.standard_normal(one.shape)) for one in made])
    gradients = [one.grad for one in (x, *states)]
    gradients += [p.grad() for p in net.collect_params().values()]
    return [one.asnumpy() for one in (*made, *gradients)]


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True}],
                         ids=["one layer", "two layers, both ways"])
@pytest.mark.parametrize("mode", MODES)
def test_in_a_fine_format_it_is_float32s(mode, settings, rng):
    state = rng.bit_generator.state
    exact = outcome(layer(mode, **settings), rng)
    rng.bit_generator.state = state
    ours = outcome(amp.convert(layer(mode, **settings), amp.Policy("fine", product=FINE)), rng)
    for one, other in zip(ours, exact):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * abs(other).max())
    assert any((one != other).any() for one, other in zip(ours, exact))


def test_a_product_reads_its_format_and_outputs_lie_on_the_one_between(rng):
    e4m3, bfloat16 = (FORMATS[name].round for name in ("float8_e4m3", "bfloat16"))
    net = layer("rnn_tanh")
    weights = {name.split("_", 1)[1]: bfloat16(p.data().asnumpy())
               for name, p in net.collect_params().items()}
    amp.convert(net, amp.Policy("mine", product="float8_e4m3", between="bfloat16"))
    x, h = (rng.standard_normal(shape).astype(np.float32)
            for shape in ((TIME, BATCH, DATA), (1, BATCH, UNITS)))
    out = net(nd.array(x), [nd.array(h)])[0].asnumpy()
    h = bfloat16(h[0])
    for step, ours in zip(bfloat16(x), out):
        to_x = e4m3(step) @ e4m3(weights["l0_i2h_weight"]).T + weights["l0_i2h_bias"]
        to_h = e4m3(h) @ e4m3(weights["l0_h2h_weight"]).T + weights["l0_h2h_bias"]
        h = bfloat16(np.tanh(to_x + to_h))
        np.testing.assert_allclose(ours, h, rtol=2.0 ** -7)
        assert np.mean(ours == h) > 0.9
        h = ours


def test_gradients_of_gates_are_rounded_before_products_read_them(rng):
    """One step of tanh: the gradient of the data is that of the sum, rounded, times a weight."""
    e5m2 = FORMATS["float8_e5m2"].round
    net = layer("rnn_tanh")
    weight = net.l0_i2h_weight.data().asnumpy()
    amp.convert(net, amp.Policy("mine", product=FINE, gradient="float8_e5m2"))
    x, head = (nd.array(rng.standard_normal((1, BATCH, size))) for size in (DATA, UNITS))
    x.attach_grad()
    with autograd.record():
        y = net(x)
    y.backward(head)
    of_sum = e5m2(head.asnumpy() * (1 - y.asnumpy() ** 2))
    np.testing.assert_allclose(x.grad.asnumpy(), of_sum @ weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(net.l0_h2h_bias.grad().asnumpy(), of_sum.sum((0, 1)), rtol=1e-5,
                               atol=1e-6)


@pytest.mark.parametrize("mode", ["lstm", "gru"])
@pytest.mark.parametrize("policy", ["tf32", "mixed_float8", amp.Policy(
    "halves", product="float8_e4m3", between="float16", gradient="float8_e5m2", scaling="current"),
    amp.Policy("random", product=amp.Format("f", 5, 4, rounding="stochastic"))],
    ids=["tf32", "mixed_float8", "between halves", "stochastic"])
def test_it_is_near_float32(policy, mode, rng):
    state = rng.bit_generator.state
    exact = outcome(layer(mode, num_layers=2, bidirectional=True), rng)
    made = []
    for _ in range(2):
        rng.bit_generator.state = state
        net = amp.convert(layer(mode, num_layers=2, bidirectional=True), policy)
        mx.random.seed(5)
        made.append(outcome(net, rng))
    closeness = 2e-3 if policy == "tf32" else 0.2
    for one, again, other in zip(*made, exact):
        assert np.array_equal(one, again)
        assert 0 < np.linalg.norm(one - other) < closeness * np.linalg.norm(other)


def test_tensors_of_any_size_fit_with_scales(rng):
    """What a small input does is lost in float8 without scales."""
    net = amp.convert(layer("rnn_relu"), "mixed_float8")
    for p in net.collect_params(".*bias").values():
        p.set_data(nd.zeros(p.shape))
    x = nd.array(rng.standard_normal((TIME, BATCH, DATA)))
    whole = net(x).asnumpy()
    small = amp.convert(layer("rnn_relu"), "mixed_float8")
    for p in small.collect_params(".*bias").values():
        p.set_data(nd.zeros(p.shape))
    assert np.array_equal(small(x * 2.0 ** -30).asnumpy(), whole * np.float32(2.0 ** -30))


@pytest.mark.parametrize("mode", ["lstm", "gru"])
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}],
                         ids=["", "static"])
def test_a_recorded_prediction_has_the_gradients_of_training(mode, flags, rng):
    policy = amp.Policy("m", product="tf32", between="bfloat16")
    net = amp.convert(layer(mode, num_layers=2), policy)
    net.hybridize(**flags)
    x = nd.array(rng.standard_normal((TIME, BATCH, DATA)))
    weights = net.collect_params().values()
    made = []
    for train_mode in (True, False):
        net(x)
        with autograd.record(train_mode):
            y = net(x)
        for retain in (True, False):
            y.backward(retain_graph=retain, train_mode=train_mode)
            made.append([p.grad().asnumpy() for p in weights])
    first, *others = made
    assert all(one.any() for one in first)
    for again in others:
        assert all(map(np.array_equal, first, again))
