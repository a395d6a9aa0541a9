"""Graphs of float16 operators round each result once, in forward and backward passes."""
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.graph.graph import Graph
from halves import halves, run
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.sanitize

sym = mx.sym
X, Y, W = sym.var("x"), sym.var("y"), sym.var("w")


def round_constants(node):
    for key in ("scalar", "a_min", "a_max"):
        if key in node.attrs:
            node.attrs[key] = repr(float(np.float16(node.attrs[key])))


def test_long_sum_is_accumulated_in_float32():
    x = np.full((1, 4096), 1, np.float16)
    (out,), _ = run(sym.FullyConnected(X, Y, no_bias=True, num_hidden=1), {"x": x, "y": x})
    assert out == 4096  # summed in float16, it would stay at 2048


def test_overflow_becomes_infinity_and_underflow_becomes_zero():
    big, small = np.float16([60000]), np.float16([6e-8])
    (out,), _ = run(X + Y, {"x": big, "y": big})
    assert np.isinf(out).all()
    (out,), _ = run(X * 0.25, {"x": small})
    assert out == 0


def test_activation_gradients_underflow_as_on_gpu():
    symbol = (X * 0.001) * 0.001
    _, gradients = run(symbol, {"x": np.float16([1])}, [np.float16([1e-3])])
    # 1e-3 * 1e-3 = 1e-6 fits, 1e-9 does not
    assert gradients["x"] == 0


def test_activation_gradients_overflow_as_on_gpu():
    _, gradients = run((X * 1000) * 1000, {"x": np.float16([1e-4])}, [np.float16([1])])
    assert np.isinf(gradients["x"]).all()


def test_gradients_of_float32_tensor_with_many_readers_accumulate():
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
         lambda s: sym.FullyConnected(sym.Cast(s, dtype="float16"), W, no_bias=True,
                                      num_hidden=6),
         lambda s: sym.LeakyReLU(s, act_type="gelu"), sym.identity,
         lambda s: sym.Cast(s, dtype="float32"), lambda s: sym.Cast(s, dtype="float16")]
BINARY = [lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a - b, sym.broadcast_maximum,
          lambda a, b: sym.relu(a + b)]


@st.composite
def graphs(draw):
    """A graph of 6x6 tensors over x, y and w; each step uses any earlier results."""
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
    """The graph node by node in MXNet's float32; numpy rounds tensors of type float16."""
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
            round_constants(node)
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
def test_random_graphs_round_at_their_types(symbol, seed):
    rng = np.random.default_rng(seed)
    arrays = {"x": halves(rng, 6, 6), "y": halves(rng, 6, 6),
              "w": halves(rng, 6, 6, scale=0.3)}
    arrays = {name: arrays[name] for name in symbol.list_arguments()}
    (out,), gradients = run(symbol, arrays, [halves(rng, 6, 6)])
    expected = reference(symbol, arrays)
    assert out.dtype == np.float16
    # Different float32 sums near a tie may differ by a unit, and a later sum may cancel.
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=4e-3, atol=4e-3)
    assert np.mean(out.astype(np.float32) != expected) < 0.2
    assert all(g.dtype == np.float16 and np.isfinite(g).all() for g in gradients.values())
