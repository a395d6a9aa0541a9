"""RNN, LSTM and GRU of bfloat16 arrays: inputs of products are bfloat16, all else is float32."""
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from halves import as_bfloat16, bfloat16_ulps
from mxnet import autograd, nd
from networks import ready, sequence
from trainers import recorded

pytestmark = [pytest.mark.sanitize, pytest.mark.isa]

GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}
TIME, BATCH, DATA, UNITS = 5, 3, 7, 20


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def layer_of(mode, x, wx, wh, bx, bh, h, c):
    """One direction of a layer: unrounded outputs, last state and last cell."""
    states, cell = [], c if mode == "lstm" else h
    for step in x:
        to_x, to_h = (a.reshape(len(h), GATES[mode], -1).swapaxes(0, 1)
                      for a in (step @ wx.T + bx, as_bfloat16(h) @ wh.T + bh))
        if mode == "lstm":
            i, f, g, o = to_x + to_h
            cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(cell)
        elif mode == "gru":
            r, z = sigmoid(to_x[:2] + to_h[:2])
            h = cell = (1 - z) * np.tanh(to_x[2] + r * to_h[2]) + z * cell
        else:
            h = np.tanh(to_x + to_h)[0] if mode == "rnn_tanh" else np.maximum(to_x + to_h, 0)[0]
        states.append(h)
    return states, h, cell


def reference(mode, layers, directions, x, w, h, c=None):
    """The forward pass in numpy."""
    at, sizes, weights = 0, [DATA] + (layers - 1) * [directions * UNITS], []
    all_gates = GATES[mode] * UNITS

    def take(*shape):
        nonlocal at
        at += int(np.prod(shape))
        return w[at - int(np.prod(shape)):at].reshape(shape)

    for size in sizes:
        for _ in range(directions):
            weights.append([take(all_gates, size), take(all_gates, UNITS)])
    for one in weights:
        one += [take(all_gates), take(all_gates)]
    last_h, last_c = [], []
    for layer in range(layers):
        out = []
        for d in range(directions):
            which = layer * directions + d
            states, *last = layer_of(mode, x[::-1] if d else x, *weights[which], h[which],
                                     None if c is None else c[which])
            out.append(states[::-1] if d else states)
            last_h.append(last[0])
            last_c.append(last[1])
        x = as_bfloat16(np.concatenate(out, axis=-1))
    return [x, np.stack(last_h), *([np.stack(last_c)] if mode == "lstm" else [])]


def drawn(rng, mode, layers, directions):
    size = sum(directions * GATES[mode] * UNITS * (below + UNITS + 2)
               for below in [DATA] + (layers - 1) * [directions * UNITS])
    states = (layers * directions, BATCH, UNITS)
    shapes = [(TIME, BATCH, DATA), (size,), states, *[states] * (mode == "lstm")]
    return [as_bfloat16(rng.standard_normal(s) * (0.3 if len(s) == 1 else 1)) for s in shapes]


def call_of(mode, layers, directions, states=True, **settings):
    return lambda *arrays: nd.RNN(*arrays, state_size=UNITS, num_layers=layers, mode=mode,
                                  bidirectional=directions == 2, state_outputs=states, **settings)


def outcome(call, arrays, rng, request="write", dtype="bfloat16", training=True):
    """Outputs, and the gradients of all arrays with grad_req=request."""
    values = [nd.array(a).astype(dtype) for a in arrays]
    for value in values:
        value.attach_grad(request)
        value.grad[:] = int(request == "add")
    with autograd.record(train_mode=training):
        out = call(*values)
    out = out if isinstance(out, list) else [out]
    autograd.backward(out, [nd.array(as_bfloat16(rng.standard_normal(o.shape))).astype(dtype)
                            for o in out], train_mode=training)
    return [o.asnumpy() for o in out], [value.grad.asnumpy() for value in values]


SHAPES = pytest.mark.parametrize(("layers", "directions"), [(1, 1), (1, 2), (2, 1), (2, 2)])


@SHAPES
@pytest.mark.parametrize("mode", GATES)
def test_forward_pass_reads_bfloat16_and_accumulates_in_float32(mode, layers, directions, rng):
    arrays = drawn(rng, mode, layers, directions)
    ours, _ = outcome(call_of(mode, layers, directions), arrays, rng)
    predicted = call_of(mode, layers, directions)(*(nd.array(a).astype("bfloat16") for a in arrays))
    exact = reference(mode, layers, directions, *(a.astype(float) for a in arrays))
    assert len(ours) == len(exact)
    for one, other, same in zip(ours, exact, predicted):
        assert bfloat16_ulps(one, other)[np.abs(other) > 0.01].max() <= 1
        assert np.mean(one == as_bfloat16(other)) > 0.98
        assert np.array_equal(one, same.asnumpy())


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("states", [False, True])
@SHAPES
@pytest.mark.parametrize("mode", GATES)
def test_gradients_are_near_float32(mode, layers, directions, states, training, request_, rng):
    """Within some roundings of the largest, unless rounding switches a relu; also for a recorded
    prediction."""
    arrays, call = drawn(rng, mode, layers, directions), call_of(mode, layers, directions, states)
    seed = rng.integers(2 ** 32)
    _, ours = outcome(call, arrays, np.random.default_rng(seed), request_, training=training)
    _, exact = outcome(call, arrays, np.random.default_rng(seed), request_, "float32")
    for one, other in zip(ours, exact):
        away = np.abs(one - other) / np.abs(other).max()
        assert np.median(away) < 0.003
        assert (np.quantile(away, 0.8) if mode == "rnn_relu" else away.max()) < 0.02


@pytest.mark.parametrize("mode", GATES)
def test_repeated_and_partial_gradients(mode, rng):
    values = [nd.array(a).astype("bfloat16") for a in drawn(rng, mode, 2, 2)]
    found = []
    for wanted in (values, values[1:2], values[:1]):
        for value in values:
            value.attach_grad("write" if any(value is w for w in wanted) else "null")
        y = recorded(lambda: call_of(mode, 2, 2, states=False)(*values))
        for retain in (True, False):
            y.backward(retain_graph=retain)
            found.append([w.grad.asnumpy() for w in wanted])
    everything = found[0]
    for some in found[1:]:
        start = 1 if some[0].ndim == 1 else 0
        assert all(np.array_equal(a, b) for a, b in zip(some, everything[start:]))


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}])
def test_results_can_overwrite_inputs(flags, rng):
    """Static graphs plan memory so: inputs must not change before they are read."""
    block = ready(sequence(*(mx.gluon.rnn.GRU(UNITS, 2, input_size=UNITS) for _ in range(2))),
                  mx.init.Uniform(0.3))
    block.cast("bfloat16")
    x = nd.array(rng.standard_normal((TIME, BATCH, UNITS))).astype("bfloat16")
    x.attach_grad()
    y = recorded(lambda: block(x * 1))
    y.backward()
    expected = [y.asnumpy(), x.grad.asnumpy()]
    block.hybridize(**flags)
    for _ in range(2):
        y = recorded(lambda: block(x * 1))
        y.backward()
        assert all(np.array_equal(a, b.asnumpy()) for a, b in zip(expected, (y, x.grad)))


@pytest.mark.parametrize("settings", [
    {"num_layers": 2, "p": 0.5},
    {"num_layers": 1, "lstm_state_clip_min": -0.1, "lstm_state_clip_max": 0.1}])
def test_unsupported_settings_run_in_float32(settings, rng):
    arrays = drawn(rng, "lstm", settings["num_layers"], 1)
    results = []
    for dtype in ("bfloat16", "float32"):
        mx.random.seed(1)
        with autograd.record(train_mode="p" in settings):
            out = nd.RNN(*(nd.array(a).astype(dtype) for a in arrays), state_size=UNITS,
                         mode="lstm", **settings)
        results.append(out.asnumpy())
    assert bfloat16_ulps(*results).max() <= 1
