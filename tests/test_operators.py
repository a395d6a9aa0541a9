"""Each float16 operator reads float16, computes in float32 and rounds its result once; its
backward does the same. Forward against numpy, backward against MXNet's float32 gradients, or,
where a backward pass reads what the forward pass has rounded, against numpy's."""
import math

import numpy as np
import pytest
from gluon_amp._mxnet import mx
from gluon_amp.graph.graph import Graph
from halves import assert_half, halves, run, stock
from hypothesis import given, settings
from hypothesis import strategies as st

sym = mx.sym
X, Y, Z = (sym.var(name) for name in "xyz")
erf = np.vectorize(math.erf)


def f64(function):
    return lambda *arrays: function(*(a.astype(np.float64) for a in arrays))


def convolution(x, w):
    out = np.zeros((x.shape[0], w.shape[0], x.shape[2], x.shape[3]))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    for i in range(3):
        for j in range(3):
            part = padded[:, :, i:i + x.shape[2], j:j + x.shape[3]]
            out += np.einsum("nchw,oc->nohw", part, w[:, :, i, j])
    return out


def pool(function):
    def pooled(x):
        n, c, h, w = x.shape
        return function(x.reshape(n, c, h // 2, 2, w // 2, 2), axis=(3, 5))
    return pooled


# name: (symbol, shapes of x, y, z, numpy's float64 result, steps apart at most)
OPERATORS = {
    "FullyConnected": (sym.FullyConnected(X, Y, Z, num_hidden=7), [(5, 33), (7, 33), (7,)],
                       lambda x, w, b: x @ w.T + b, 1),
    "Convolution": (sym.Convolution(X, Y, no_bias=True, num_filter=6, kernel=(3, 3), pad=(1, 1)),
                    [(2, 3, 8, 9), (6, 3, 3, 3)], convolution, 1),
    "Deconvolution": (sym.Deconvolution(X, Y, no_bias=True, num_filter=4, kernel=(1, 1)),
                      [(2, 3, 8, 9), (3, 4, 1, 1)],
                      lambda x, w: np.einsum("nchw,co->nohw", x, w[:, :, 0, 0]), 1),
    "dot": (sym.dot(X, Y), [(5, 33), (33, 4)], np.matmul, 1),
    "batch_dot": (sym.batch_dot(X, Y), [(3, 5, 17), (3, 17, 4)], np.matmul, 1),
    "elemwise_add": (X + Y, [(7, 9), (7, 9)], np.add, 0),
    "elemwise_sub": (X - Y, [(7, 9), (7, 9)], np.subtract, 0),
    "elemwise_mul": (X * Y, [(7, 9), (7, 9)], np.multiply, 0),
    "elemwise_div": (X / Y, [(7, 9), (7, 9)], np.divide, 1),
    "broadcast_add": (sym.broadcast_add(X, Y), [(7, 9), (1, 9)], np.add, 0),
    "broadcast_mul": (sym.broadcast_mul(X, Y), [(7, 9), (7, 1)], np.multiply, 0),
    "mul_scalar": (X * 0.1, [(7, 9)], lambda x: x * float(np.float16(0.1)), 0),
    "plus_scalar": (X + 0.1, [(7, 9)], lambda x: x + float(np.float16(0.1)), 0),
    "rminus_scalar": (1 - X, [(7, 9)], lambda x: 1 - x, 0),
    "relu": (sym.relu(X), [(7, 9)], lambda x: np.maximum(x, 0), 0),
    "clip": (sym.clip(X, -0.3, 0.7), [(7, 9)],
             lambda x: np.clip(x, float(np.float16(-0.3)), float(np.float16(0.7))), 0),
    "sigmoid": (sym.sigmoid(X), [(7, 9)], lambda x: 1 / (1 + np.exp(-x)), 1),
    "tanh": (sym.tanh(X), [(7, 9)], np.tanh, 1),
    "gelu": (sym.LeakyReLU(X, act_type="gelu"), [(7, 9)],
             lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))), 1),
    "leaky": (sym.LeakyReLU(X, act_type="leaky", slope=0.25), [(7, 9)],
              lambda x: np.where(x > 0, x, x / 4), 0),
    "sqrt": (sym.sqrt(sym.abs(X) + 1), [(7, 9)],
             lambda x: np.sqrt((np.abs(x) + 1).astype(np.float16).astype(float)), 1),
    "negative": (-X, [(7, 9)], np.negative, 0),
    "max_pool": (sym.Pooling(X, kernel=(2, 2), stride=(2, 2), pool_type="max"), [(2, 3, 8, 6)],
                 pool(np.max), 0),
    "avg_pool": (sym.Pooling(X, kernel=(2, 2), stride=(2, 2), pool_type="avg"), [(2, 3, 8, 6)],
                 pool(np.mean), 1),
    "concat": (sym.concat(X, Y, dim=1), [(2, 3), (2, 4)],
               lambda x, y: np.concatenate([x, y], 1), 0),
    "stack": (sym.stack(X, Y), [(2, 3), (2, 3)], lambda x, y: np.stack([x, y]), 0),
    "reshape": (sym.reshape(X, (0, -1)), [(2, 3, 4)], lambda x: x.reshape(2, 12), 0),
    "transpose": (sym.transpose(X), [(2, 3)], np.transpose, 0),
    "slice": (sym.slice(X, begin=(1, 0), end=(3, 2)), [(4, 3)], lambda x: x[1:3, :2], 0),
    "tile": (sym.tile(X, reps=(2, 3)), [(4, 3)], lambda x: np.tile(x, (2, 3)), 0),
    "maximum": (sym.broadcast_maximum(X, Y), [(7, 9), (7, 9)], np.maximum, 0),
    "where": (sym.where(X > Y, X, Z), [(7, 9), (7, 9), (7, 9)],
              lambda x, y, z: np.where(x > y, x, z), 0),
    "sum": (sym.sum(X, axis=1), [(7, 300)], lambda x: x.sum(1), 1),
    "mean": (sym.mean(X, axis=1), [(7, 300)], lambda x: x.mean(1), 1),
    "softmax": (sym.softmax(X), [(7, 30)],
                lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True), 1),
    "layer_norm": (sym.LayerNorm(X, Y, Z), [(7, 30), (30,), (30,)],
                   lambda x, g, b: (x - x.mean(-1, keepdims=True))
                   / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b, 2),
    "add_n": (sym.add_n(X, Y, Z), [(7, 9)] * 3, lambda x, y, z: x + y + z, 1),
}


def layer_norm_gradients(g, x, gamma, mean, deviation):
    normal = (x - mean) / deviation
    scaled = g * gamma
    dx = (scaled - scaled.mean(-1, keepdims=True)
          - normal * (scaled * normal).mean(-1, keepdims=True)) / deviation
    return {"x": dx, "y": (g * normal).sum(0), "z": g.sum(0)}


def rounded(x):
    return x.astype(np.float16).astype(float)


# Gradients that read results of the forward pass, which are rounded: of the head g, the rounded
# output, and the inputs.
READ_OUTPUTS = {
    "sigmoid": lambda g, y, x: {"x": g * y * (1 - y)},
    "tanh": lambda g, y, x: {"x": g * (1 - y * y)},
    "softmax": lambda g, y, x: {"x": (g - (g * y).sum(-1, keepdims=True)) * y},
    "layer_norm": lambda g, y, x, gamma, beta: layer_norm_gradients(
        g, x, gamma, rounded(x.mean(-1, keepdims=True)),
        rounded(np.sqrt(x.var(-1, keepdims=True) + 1e-5))),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name, rng):
    symbol, shapes, function, steps = OPERATORS[name]
    arrays = {key: halves(rng, *shape) for key, shape in zip("xyz", shapes)}
    expected = f64(function)(*arrays.values())
    head = halves(rng, *expected.shape)
    (out,), gradients = run(symbol, arrays, [head])
    assert_half(out, expected, steps)
    if name in READ_OUTPUTS:
        float32 = f64(READ_OUTPUTS[name])(head, out, *arrays.values())
    else:
        _, float32 = stock(_with_half_constants(symbol), arrays, [head])
    for key, gradient in gradients.items():
        if name == "sqrt":  # two operators: two roundings
            np.testing.assert_allclose(gradient, float32[key], rtol=2e-3)
        else:
            assert_half(gradient, float32[key], 1)


def _with_half_constants(symbol):
    """The float32 symbol with the constants that a float16 operator would see."""
    graph = Graph.read(symbol)
    for node in graph.nodes():
        _round_constants(node)
    return graph.symbol()


def _round_constants(node):
    for key in ("scalar", "a_min", "a_max"):
        if key in node.attrs:
            node.attrs[key] = repr(float(np.float16(node.attrs[key])))


def test_a_rounded_sum_of_many_terms_is_accumulated_in_float32():
    x = np.full((1, 4096), 1, np.float16)
    (out,), _ = run(sym.FullyConnected(X, Y, no_bias=True, num_hidden=1), {"x": x, "y": x})
    assert out == 4096  # summed in float16, it would stay at 2048


def test_overflow_becomes_infinity_and_underflow_zero():
    big, small = np.float16([60000]), np.float16([6e-8])
    (out,), _ = run(X + Y, {"x": big, "y": big})
    assert np.isinf(out).all()
    (out,), _ = run(X * 0.25, {"x": small})
    assert out == 0


def test_activation_gradients_underflow_where_a_gpus_would():
    symbol = (X * 0.001) * 0.001
    _, gradients = run(symbol, {"x": np.float16([1])}, [np.float16([1e-3])])
    # 1e-3 * 1e-3 = 1e-6 fits, 1e-9 does not
    assert gradients["x"] == 0


def test_activation_gradients_overflow_where_a_gpus_would():
    _, gradients = run((X * 1000) * 1000, {"x": np.float16([1e-4])}, [np.float16([1])])
    assert np.isinf(gradients["x"]).all()


@pytest.mark.parametrize("activation", ["relu", "clip", "gelu"])
def test_activations_after_a_layer_round_as_two_operators_do(activation, rng):
    layer = sym.FullyConnected(X, Y, no_bias=True, num_hidden=16)
    act = {"relu": sym.relu, "clip": lambda s: sym.clip(s, 0, 6),
           "gelu": lambda s: sym.LeakyReLU(s, act_type="gelu")}[activation]
    arrays = {"x": halves(rng, 8, 32), "y": halves(rng, 16, 32)}
    head = halves(rng, 8, 16)
    steps = int(activation == "gelu")  # the libraries' erf differ in the last float32 bit
    (fused,), fused_gradients = run(act(layer), arrays, [head])
    (middle,), _ = run(layer, arrays)
    (out,), g = run(act(sym.var("m")), {"m": middle}, [head])
    assert_half(fused, out, steps)
    _, gradients = run(layer, arrays, [g["m"]])
    for key in arrays:
        assert_half(fused_gradients[key], gradients[key], 8 * steps)


def test_gradients_of_many_consumers_add_up(rng):
    symbol = sym.relu(X) + X
    for _ in range(11):  # MXNet sums more than 8 gradients in place
        symbol = symbol + sym.relu(X)
    _, gradients = run(symbol, {"x": np.ones((3, 3), np.float16)}, [np.ones((3, 3), np.float16)])
    assert (gradients["x"] == 13).all()
    inner = X * 1.0
    total = inner + inner
    for _ in range(5):
        total = total + (inner + inner)
    _, gradients = run(total, {"x": np.ones((3, 3), np.float16)}, [np.ones((3, 3), np.float16)])
    assert (gradients["x"] == 12).all()


def test_gradients_of_a_float32_tensor_with_many_consumers_add_up():
    x = sym.Cast(X, dtype="float32") * 1.0
    total = sym.Cast(x, dtype="float16") * 1.0
    for _ in range(9):
        total = total + sym.Cast(x * 1.0, dtype="float16")
    for half in (total, total + sym.Cast(x, dtype="float16")):
        consumers = 10 + (half is not total)
        _, gradients = run(half, {"x": np.ones(3, np.float16)}, [np.ones(3, np.float16)])
        assert (gradients["x"] == consumers).all()


# ---- random graphs ----------------------------------------------------------

UNARY = [sym.relu, sym.tanh, sym.sigmoid, sym.abs, lambda s: -s, lambda s: s * 0.37,
         lambda s: s + 0.11, lambda s: sym.clip(s, -0.5, 0.9), lambda s: sym.transpose(s),
         lambda s: sym.FullyConnected(sym.Cast(s, dtype="float16"), sym.var("w"), no_bias=True,
                                      num_hidden=6),
         lambda s: sym.LeakyReLU(s, act_type="gelu"), sym.identity,
         lambda s: sym.Cast(s, dtype="float32"), lambda s: sym.Cast(s, dtype="float16")]
BINARY = [lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a - b, sym.broadcast_maximum,
          lambda a, b: sym.relu(a + b)]


@st.composite
def graphs(draw):
    """A graph of 6x6 tensors over x, y and w, each step on any earlier result."""
    values = [sym.Cast(X, dtype="float16"), sym.Cast(Y, dtype="float16")]
    for _ in range(draw(st.integers(1, 12))):
        pick = st.sampled_from(values)
        if draw(st.booleans()):
            values.append(draw(st.sampled_from(UNARY))(draw(pick)))
        else:
            a, b = draw(pick), draw(pick)
            values.append(draw(st.sampled_from(BINARY))(sym.Cast(a, dtype="float16"),
                                                        sym.Cast(b, dtype="float16")))
    return sym.Cast(values[-1], dtype="float16")


def reference(symbol, arrays):
    """The graph node by node: float32 in MXNet, and numpy rounds what has type float16."""
    graph = Graph.read(symbol)
    types = graph.types({name: a.dtype.name for name, a in arrays.items()})
    values = {}
    for node in graph.nodes():
        entry = next(e for e in types if e.node is node)
        if node.is_variable:
            values[node] = arrays[node.name].astype(np.float32)
            continue
        half = types[entry] == "float16"
        if half:  # a float32 operator's constants are float32
            _round_constants(node)
        inputs = [sym.var(f"i{i}") for i in range(len(node.inputs))]
        if node.op == "Cast":
            out = values[node.inputs[0].node]
        else:
            single = Graph([type(entry)(node.like(
                [Graph.read(i).outputs[0] for i in inputs]))]).symbol()
            feed = {f"i{i}": mx.nd.array(values[e.node]) for i, e in enumerate(node.inputs)}
            out = single.eval(**feed)[0].asnumpy()
        values[node] = out.astype(np.float16).astype(np.float32) if half else out
    return values[graph.outputs[0].node]


@given(graphs(), st.integers(0, 2**16))
@settings(deadline=None, max_examples=60)
def test_random_graphs_round_where_their_types_say(symbol, seed):
    rng = np.random.default_rng(seed)
    arrays = {"x": halves(rng, 6, 6), "y": halves(rng, 6, 6),
              "w": halves(rng, 6, 6, scale=0.3)}
    arrays = {name: arrays[name] for name in symbol.list_arguments()}
    (out,), gradients = run(symbol, arrays, [halves(rng, 6, 6)])
    expected = reference(symbol, arrays)
    assert out.dtype == np.float16
    # Different float32 sums next to a tie may differ by a step, and a later sum may cancel.
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=4e-3, atol=4e-3)
    assert np.mean(out.astype(np.float32) != expected) < 0.2
    assert all(g.dtype == np.float16 and np.isfinite(g).all() for g in gradients.values())
