"""RNN, LSTM and GRU with `accumulate`: products as on Tensor Cores of a GPU.

The reference is numpy with the plain rule. Its exponentials may differ from the engine's
in the last bit of float32, which changes one half in some thousands by a unit; wrong products would
change most, since this GPU keeps few bits."""
from contextlib import suppress

import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu.tensor_core.gpus import GPUS, Sum, TensorCore
from gluon_amp.graph.graph import Graph
from halves import adding_as, as_function, stock
from tensor_core_sums import product

GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
TIME, BATCH, DATA, UNITS = 5, 3, 9, 6


@pytest.fixture(autouse=True)
def coarse_gpu(monkeypatch):
    monkeypatch.setitem(GPUS, "coarse", TensorCore(block=4, fraction=9, measured=False))


def times(a, b):
    start = np.zeros((len(a), b.shape[1]), "float32")
    return product(a.astype("float16"), b.astype("float16"), start, Sum(4, 9))


def half(x):
    return x.astype("float16").astype("float32")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Direction:
    """One direction of a layer; all arrays are float32."""

    def __init__(self, mode, wx, wh, bx, bh):
        self.mode, self.wx, self.wh, self.bx, self.bh = mode, wx, wh, bx, bh

    def forward(self, x, h, c):
        self.x, self.kept, outputs = x, [], []
        for step in x:
            s, r = times(step, self.wx.T) + self.bx, times(h, self.wh.T) + self.bh
            before, cell = h, c
            if self.mode == "lstm":
                gates = np.split(s + r, 4, 1)
                i, f, o = (sigmoid(gates[k]) for k in (0, 1, 3))
                g = np.tanh(gates[2])
                c = f * c + i * g
                h, values = o * np.tanh(c), (i, f, g, o, cell, c)
            elif self.mode == "gru":
                (sr, sz, sn), (rr, rz, rn) = np.split(s, 3, 1), np.split(r, 3, 1)
                gate, z = sigmoid(sr + rr), sigmoid(sz + rz)
                n = np.tanh(sn + gate * rn)
                h, values = (1 - z) * n + z * h, (gate, z, n, rn)
            else:
                h = np.maximum(s + r, 0) if self.mode == "rnn_relu" else np.tanh(s + r)
                values = (h,)
            h = half(h)
            self.kept.append((before, values))
            outputs.append(h)
        return np.stack(outputs), h, c

    def backward(self, dy, dh, dc):
        to_x, to_h = [], []
        for above, (before, values) in zip(dy[::-1], self.kept[::-1]):
            dh = dh + above
            if self.mode == "lstm":
                i, f, g, o, cell, after = values
                tanh = np.tanh(after)
                d = dc + dh * o * (1 - tanh * tanh)
                dx = [d * g * i * (1 - i), d * cell * f * (1 - f), d * i * (1 - g * g),
                      dh * tanh * o * (1 - o)]
                ds, dc, rest = dx, d * f, 0
            elif self.mode == "gru":
                r, z, n, rn = values
                d = dh * (1 - z) * (1 - n * n)
                dx = [d * rn * r * (1 - r), dh * (before - n) * z * (1 - z), d]
                ds, rest = [*dx[:2], d * r], dh * z
            else:
                h, = values
                ds = dx = [dh * (h > 0) if self.mode == "rnn_relu" else dh * (1 - h * h)]
                rest = 0
            to_x.append(half(np.concatenate(dx, 1)))
            to_h.append(half(np.concatenate(ds, 1)))
            dh = rest + times(to_h[-1], self.wh)
        to_x, to_h = (np.stack(gates[::-1]) for gates in (to_x, to_h))
        return to_x, to_h, dh, dc

    def gradients(self, to_x, to_h, x, before):
        flat_x, flat_h = (gates.reshape(-1, gates.shape[-1]) for gates in (to_x, to_h))
        x_rows, h_rows = x.reshape(-1, x.shape[-1]), before.reshape(-1, before.shape[-1])
        return (times(flat_x, self.wx).reshape(x.shape), times(flat_x.T, x_rows),
                times(flat_h.T, h_rows), flat_x.sum(0), flat_h.sum(0))


def reference(mode, layers, directions, x, parameters, h, c, heads):
    """Outputs; gradients of data, parameters, and states."""
    rest, many = parameters.astype("float32"), GATES[mode] * UNITS
    x, h, c = (a.astype("float32") for a in (x, h, c))
    heads = [head.astype("float32") for head in heads]

    def take(*shape):
        nonlocal rest
        taken, rest = rest[:np.prod(shape)].reshape(shape), rest[np.prod(shape):]
        return taken

    sizes = [DATA if k < directions else directions * UNITS for k in range(layers * directions)]
    weights = [(take(many, size), take(many, UNITS)) for size in sizes]
    nets = [Direction(mode, *w, take(many), take(many)) for w in weights]
    states, inputs = [], []
    for layer in range(layers):
        inputs.append(x)
        outputs = []
        for d in range(directions):
            k = layer * directions + d
            way = slice(None, None, -1 if d else 1)
            y, *last = nets[k].forward(x[way], h[k], c[k])
            outputs.append(y[way])
            states.append(last)
        x = np.concatenate(outputs, 2)
    made = [x, np.stack([s[0] for s in states]), np.stack([s[1] for s in states])]
    dy, dh, dc = heads[0], list(heads[1]), list(heads[2])
    of_weights, of_biases = [], []
    for layer in reversed(range(layers)):
        dx, here, biases = 0, [], []
        for d in range(directions):
            k = layer * directions + d
            way = slice(None, None, -1 if d else 1)
            part = dy[:, :, d * UNITS:(d + 1) * UNITS][way]
            to_x, to_h, dh[k], dc[k] = nets[k].backward(part, dh[k], dc[k])
            before = np.stack([b for b, _ in nets[k].kept])[way]
            data, wx, wh, bx, bh = nets[k].gradients(to_x[way], to_h[way], inputs[layer], before)
            dx = dx + data
            here += [wx.ravel(), wh.ravel()]
            biases += [bx, bh]
        dy = half(dx)
        of_weights, of_biases = here + of_weights, biases + of_biases
    gradients = [dy, np.concatenate(of_weights + of_biases), np.stack(dh), np.stack(dc)]
    return (made, gradients) if mode == "lstm" else (made[:2], gradients[:3])


def outcome(symbol, arrays, heads, training=True, gpu="coarse"):
    graph = adding_as(gpu, Graph.read(symbol), dict.fromkeys(arrays, "float16"))
    op = as_function(graph.symbol())
    values = [mx.nd.array(arrays[name], dtype="float16") for name in symbol.list_inputs()]
    for value in values:
        value.attach_grad()
    with mx.autograd.record(train_mode=training):
        outputs = op(*values)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    mx.autograd.backward(outputs, [mx.nd.array(head, dtype="float16") for head in heads])
    return [o.asnumpy() for o in outputs], [v.grad.asnumpy() for v in values]


def assert_close(made, wanted):
    assert made.shape == wanted.shape
    wanted = wanted.astype("float16")
    assert np.mean(made == wanted) > 0.98
    np.testing.assert_allclose(made, wanted, rtol=0.02, atol=0.02)


def arrays_for(mode, layers, directions, rng):
    many = GATES[mode] * UNITS
    count = sum(many * ((DATA if layer == 0 else directions * UNITS) + UNITS + 2)
                for layer in range(layers)) * directions
    state = (layers * directions, BATCH, UNITS)
    arrays = {"x": rng.standard_normal((TIME, BATCH, DATA)),
              "p": rng.standard_normal(count) * 0.5, "h": rng.standard_normal(state),
              "c": rng.standard_normal(state)}
    heads = [rng.standard_normal((TIME, BATCH, directions * UNITS)), rng.standard_normal(state),
             rng.standard_normal(state)]
    return ({name: a.astype("float16") for name, a in arrays.items()},
            [head.astype("float16") for head in heads])


@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("mode", GATES)
def test_outputs_and_gradients(mode, layers, directions, rng):
    arrays, heads = arrays_for(mode, layers, directions, rng)
    made, gradients = reference(mode, layers, directions, *arrays.values(), heads)
    if mode != "lstm":
        del arrays["c"]
    symbol = mx.sym.RNN(*map(mx.sym.var, arrays), state_size=UNITS, num_layers=layers, mode=mode,
                        bidirectional=directions == 2, state_outputs=True)
    outputs, found = outcome(symbol, arrays, heads[:len(made)])
    for one, other in zip([*outputs, *found], [*made, *gradients]):
        assert_close(one, other)


@pytest.mark.parametrize("mode", GATES)
def test_fine_gpu_rule_is_near_float32(mode, rng):
    arrays, heads = arrays_for(mode, 2, 2, rng)
    if mode != "lstm":
        del arrays["c"], heads[2]
    symbol = mx.sym.RNN(*map(mx.sym.var, arrays), state_size=UNITS, num_layers=2, mode=mode,
                        bidirectional=True, state_outputs=True)
    outputs, found = outcome(symbol, arrays, heads, gpu="H100")
    wanted, gradients = stock(symbol, arrays, heads)
    for one, other in zip([*outputs, *found], [*wanted, *gradients.values()]):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.02 * abs(other).max())


def test_without_state_outputs_and_in_prediction(rng):
    arrays, heads = arrays_for("lstm", 1, 1, rng)
    heads[1:] = [np.zeros_like(head) for head in heads[1:]]
    made, gradients = reference("lstm", 1, 1, *arrays.values(), heads)
    symbol = mx.sym.RNN(*map(mx.sym.var, arrays), state_size=UNITS, num_layers=1, mode="lstm")
    for training in (True, False):
        (output,), found = outcome(symbol, arrays, heads[:1], training)
        for one, other in zip([output, *found], [made[0], *gradients]):
            assert_close(one, other)


def test_dropout_between_layers_is_refused(rng):
    arrays, _ = arrays_for("lstm", 2, 1, rng)
    symbol = mx.sym.RNN(*map(mx.sym.var, arrays), state_size=UNITS, num_layers=2, mode="lstm",
                        p=0.5)
    op = as_function(adding_as("coarse", Graph.read(symbol),
                               dict.fromkeys(arrays, "float16")).symbol())
    values = [mx.nd.array(arrays[name], dtype="float16") for name in symbol.list_inputs()]
    values[0].attach_grad()
    refused = pytest.raises(mx.MXNetError, match="accumulate=: RNN with dropout between its layers")
    with mx.autograd.record():
        output = op(*values)
    with refused:
        output.wait_to_read()
    output.backward()  # after an error that MXNet has reported, its engine runs the backward pass
    with refused:
        values[0].grad.wait_to_read()
    with suppress(mx.MXNetError):  # of the other gradients
        mx.nd.waitall()
