"""Grids other than float16 use float32 arrays: an operator rounds its results to bfloat16, or, on
the grid "float32", does not round them, and equals the float32 operator."""
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.formats import FORMATS
from gluon_amp.graph.graph import Entry, Graph, Node
from halves import as_function, assert_half, halves, run, stock

sym = mx.sym
X, Y, Z = (sym.var(name) for name in "xyz")


def bfloat16(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def square(rng):
    return {"x": halves(rng, 4, 4), "y": halves(rng, 4, 4)}


def images(rng):
    return {"x": halves(rng, 2, 16, 6, 6), "y": halves(rng, 16, 16, 3, 3, scale=0.1)}


def rnn(rng):
    return {"x": halves(rng, 3, 2, 4), "y": halves(rng, 216, scale=0.3), "z": halves(rng, 1, 2, 6)}


# name: symbol, arrays, whether its gradient reads its rounded result
OPERATORS = {
    "relu": (sym.relu(X), square, False), "sigmoid": (sym.sigmoid(X), square, True),
    "tanh": (sym.tanh(X), square, True), "gelu": (sym.LeakyReLU(X, act_type="gelu"), square, False),
    "Activation": (sym.Activation(X, act_type="relu"), square, False),
    "clip": (sym.clip(X, -0.5, 0.5), square, False),
    "_mul_scalar": (X * 3, square, False), "_rminus_scalar": (1 - X, square, False),
    "elemwise_add": (X + Y, square, False), "elemwise_mul": (X * Y, square, False),
    "elemwise_div": (X / Y, square, False), "softmax": (sym.softmax(X), square, True),
    "Concat": (sym.concat(X, Y, dim=1), square, False),
    "SliceChannel": (sym.split(X, num_outputs=2), square, False),
    "transpose": (sym.transpose(X), square, False), "slice": (sym.slice_axis(
        X, axis=0, begin=1, end=3), square, False),
    "Convolution": (sym.Convolution(X, Y, kernel=(3, 3), num_filter=16, no_bias=True), images,
                    False),
    "exp": (sym.exp(X), square, True), "square": (sym.square(X), square, False),
    "mean": (sym.mean(X, axis=1), square, False), "dot": (sym.dot(X, Y), square, False),
    "Pooling": (sym.Pooling(X, kernel=(2, 2), pool_type="avg"), images, False),
    "FullyConnected": (sym.FullyConnected(X, Y, num_hidden=4, no_bias=True), square, False),
    "broadcast_sub": (sym.broadcast_sub(X, Y), square, False),
    "log_softmax": (sym.log_softmax(X), square, True),
    "RNN": (sym.RNN(X, Y, Z, mode="gru", state_size=6, num_layers=1), rnn, True),
}


def on_bfloat16(arrays):
    return {name: bfloat16(array).astype(np.float16) for name, array in arrays.items()}


def heads_for(symbol, arrays, rng):
    outputs, _ = run(symbol, arrays)
    return [bfloat16(rng.standard_normal(o.shape)).astype(np.float16) for o in outputs]


def used(symbol, arrays):
    return {name: arrays[name] for name in symbol.list_inputs()}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_rounds_once_to_bfloat16(name, rng):
    symbol, make, reads_result = OPERATORS[name]
    arrays = used(symbol, on_bfloat16(make(rng)))
    heads = heads_for(symbol, arrays, rng)
    outputs, gradients = run(symbol, arrays, heads, grid="bfloat16")
    wide, wide_gradients = stock(symbol, arrays, heads)
    for ours, theirs in zip(outputs, wide):
        if name == "RNN":  # each step reads the rounded state before it
            assert_near(ours, theirs)
        else:
            assert_bfloat16(ours, theirs)
    assert gradients.keys() == wide_gradients.keys()
    for key, gradient in gradients.items():
        (assert_near if reads_result else assert_bfloat16)(gradient, wide_gradients[key])


def assert_near(ours, theirs):
    """Twice the largest errors on a CPU with AVX-512: 0.0022 of the norm, 0.003 of the
    largest element."""
    apart = np.abs(ours.astype(np.float32) - theirs)
    assert np.linalg.norm(apart) <= 0.0045 * np.linalg.norm(theirs)
    assert apart.max() <= 0.006 * np.abs(theirs).max()
    assert np.array_equal(bfloat16(ours), ours)


def assert_bfloat16(ours, theirs):
    """Rounded once; a float32 sum in another order may round a tie the other way."""
    expected = bfloat16(theirs)
    apart = np.abs(ours.astype(np.float32) - expected)
    assert (apart <= np.abs(expected) * 2.0 ** -7 + 1e-6).all()
    assert np.mean(apart > 1e-6) < 0.02
    assert np.array_equal(bfloat16(ours), ours)


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_without_rounding_equals_float32(name, rng):
    symbol, make, _ = OPERATORS[name]
    arrays = used(symbol, make(rng))
    symbol = sym.Group([out * 1.7 + 0.3 for out in symbol])  # intermediate values are not rounded
    heads = heads_for(symbol, arrays, rng)
    outputs, gradients = run(symbol, arrays, heads, grid="float32")
    wide, wide_gradients = stock(symbol, arrays, heads)
    for ours, theirs in zip(outputs, wide):
        assert_half(ours, theirs, 1)
        assert np.mean(ours != theirs.astype(np.float16)) < 0.02
    for key, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wide_gradients[key], rtol=1e-3,
                                   atol=1e-4 * np.abs(wide_gradients[key]).max())


@pytest.mark.parametrize("grid", ["bfloat16", "float32"])
def test_batch_norm_on_other_grids(grid, rng):
    names = ("x", "gamma", "beta", "mean", "var")
    symbol = sym.BatchNorm(*map(sym.var, names), fix_gamma=False, eps=1e-3, momentum=0.5)
    x = bfloat16(rng.standard_normal((4, 3, 5, 5)) + 2).astype(np.float16)
    arrays = {"x": x, "gamma": np.float32([1, 2, 3]), "beta": np.float32([0, 1, -1]),
              "mean": np.zeros(3, np.float32), "var": np.ones(3, np.float32)}
    head = bfloat16(rng.standard_normal(x.shape)).astype(np.float16)
    (y,), gradients = run(symbol, arrays, [head], grid=grid)
    wide = x.astype(float)
    mean, var = (f(wide, (0, 2, 3), keepdims=True) for f in (np.mean, np.var))
    scale = (arrays["gamma"].reshape(1, 3, 1, 1) / np.sqrt(var + 1e-3))
    hat = (wide - mean) / np.sqrt(var + 1e-3)
    expected = scale * (wide - mean) + arrays["beta"].reshape(1, 3, 1, 1)
    g = head.astype(float)
    dx = scale * (g - g.mean((0, 2, 3), keepdims=True)
                  - hat * (g * hat).mean((0, 2, 3), keepdims=True))
    if grid == "bfloat16":
        assert_bfloat16(y, expected)
        assert_bfloat16(gradients["x"], dx)
    else:
        np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(gradients["x"], dx, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(gradients["gamma"], (g * hat).sum((0, 2, 3)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(arrays["mean"], 0.5 * mean.ravel(), rtol=1e-5)
    np.testing.assert_allclose(arrays["var"], 0.5 + 0.5 * var.ravel(), rtol=1e-5)


@pytest.mark.parametrize("grid", ["bfloat16", "float32", "float16"])
def test_dropout_mask_is_same_on_every_grid(grid, rng):
    symbol = sym.Dropout(X, p=0.5)  # kept values are doubled: exact on every grid
    arrays = {"x": bfloat16(rng.uniform(1, 2, (50, 40))).astype(np.float16)}
    head = bfloat16(rng.standard_normal((50, 40))).astype(np.float16)
    mx.random.seed(3)
    (y,), gradients = run(symbol, arrays, [head], grid=grid)
    mx.random.seed(3)
    (wide,), wide_gradients = stock(symbol, arrays, [head])
    assert np.array_equal(y, wide)
    assert np.array_equal(gradients["x"], wide_gradients["x"])


def test_accumulated_gradient_is_rounded_before_and_after_sum(rng):
    """As in the body of a loop, whose variables may be on the grid."""
    x, head = (bfloat16(rng.standard_normal(200)) for _ in "xy")
    grid = FORMATS["bfloat16"]._for_engine
    node = Node("square", "op", {}, [Entry(Node("null", "x"))])
    node.settings = {"inputs": "1", "outputs": "1",
                     **{f"{what}_grid": grid for what in ("output", "gradient", "back")}}
    op = as_function(Graph([Entry(node)]).symbol())
    values = mx.nd.array(x)
    values.attach_grad("add")
    values.grad[:] = 1
    with mx.autograd.record():
        out = op(values)
    out.backward(mx.nd.array(head))
    assert np.array_equal(out.asnumpy(), bfloat16(x * x))
    assert np.array_equal(values.grad.asnumpy(), bfloat16(1 + bfloat16(2 * x * head)))


@pytest.mark.parametrize("grid", ["bfloat16", "float16"])
def test_constants_are_rounded_to_grid(grid):
    (out,), _ = run(X * 0.1, {"x": np.float16([1])}, grid=grid)
    expected = np.float16(0.1) if grid == "float16" else bfloat16([0.1])[0]
    assert out[0] == expected
