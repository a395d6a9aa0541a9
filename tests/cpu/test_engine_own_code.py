"""Dedicated kernels match the generic operator, which runs MXNet's float32 kernels: bitwise if
values are only moved, else within a unit of float16."""
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from gluon_amp.graph.build import build
from gluon_amp.graph.graph import Graph
from halves import Op, as_function, assert_half, generic_code, halves, stock, ulps

pytestmark = [pytest.mark.sanitize, pytest.mark.isa]

sym = mx.sym
X, Y, Z = (sym.var(name) for name in "xyz")
STATIC = (("static_alloc", True), ("static_shape", True))


def outcome(symbol, arrays, heads=None, request="write", flags=(), training=True):
    """Outputs, gradients and auxiliary states. Gradients are added to ones for "add"."""
    op = Op(symbol, arrays, request=request, flags=flags)
    outputs = op.forward(training, recorded=heads is not None)
    if heads is not None:
        op.backward(outputs, heads, training)
    return ([o.asnumpy() for o in outputs], op.collected() if heads is not None else {},
            {name: op[name] for name in op.states})


def heads_for(symbol, arrays, rng):
    outputs, _, _ = outcome(symbol, arrays)
    return [halves(rng, *o.shape).astype(o.dtype) for o in outputs]


# ---- each dedicated kernel ---------------------------------------------------------------


def unary(function):
    return function, lambda rng, shape: {"x": with_extremes(rng, shape)}


def binary(function):
    return lambda x: function(x, Y), lambda rng, shape: {"x": with_extremes(rng, shape),
                                                         "y": halves(rng, *shape, scale=3)}


def with_extremes(rng, shape):
    """Random halves and special values except NaN, which a test below covers."""
    x = halves(rng, *shape, scale=3)
    special = np.float16([0, -0.0, np.inf, -np.inf, 6e-8, -6e-8, 65504, -65504, 1, -1])
    x.ravel()[:special.size] = special[:x.size]
    return x


def activation(act):
    return unary(lambda x: sym.Activation(x, act_type=act))


def leaky(**settings):
    return unary(lambda x: sym.LeakyReLU(x, **settings))


# operator: (symbol of x, arrays for a shape), units in the result, units in the gradient. The
# gradient of a function that reads its result may be another unit off, as the results differ.
ANY_SHAPE = {
    "relu": (*unary(sym.relu), 0, 0),
    "sigmoid": (*unary(sym.sigmoid), 1, 2),
    "tanh": (*unary(sym.tanh), 1, 2),
    "Activation": (*activation("relu"), 0, 0),
    "Activation softrelu": (*activation("softrelu"), 0, 0),
    "LeakyReLU": (*leaky(act_type="leaky", slope=0.1), 1, 1),
    "LeakyReLU of slope 0": (*leaky(act_type="leaky", slope=0), 0, 0),
    "LeakyReLU of a negative slope": (*leaky(act_type="leaky", slope=-0.5), 0, 0),
    "LeakyReLU elu": (*leaky(act_type="elu"), 0, 0),
    "clip": (*unary(lambda x: sym.clip(x, -0.5, 0.7)), 0, 0),
    "clip between crossed bounds": (*unary(lambda x: sym.clip(x, 1, -1)), 0, 0),
    "_mul_scalar": (*unary(lambda x: x * 0.3), 0, 0),
    "_div_scalar": (*unary(lambda x: x / 3), 0, 0),
    "_plus_scalar": (*unary(lambda x: x + 0.3), 0, 0),
    "_minus_scalar": (*unary(lambda x: x - 0.3), 0, 0),
    "_rminus_scalar": (*unary(lambda x: 0.3 - x), 0, 0),
    "_copy": (*unary(sym.identity), 0, 0),
    "_backward_reshape": (*unary(lambda x: sym.reshape(x * 2, (-1,))), 0, 0),
    "Cast": (*unary(lambda x: sym.Cast(x, dtype="float32")), 0, 0),
    "Cast to float64": (*unary(lambda x: sym.Cast(x, dtype="float64")), 0, 0),
    "amp_cast": (*unary(lambda x: sym.amp_cast(sym.Cast(x, dtype="float32") * 1.1,
                                               dtype="float16")), 0, 0),
    "elemwise_add": (*binary(lambda x, y: x + y), 0, 0),
    "elemwise_sub": (*binary(lambda x, y: x - y), 0, 0),
    "elemwise_mul": (*binary(lambda x, y: x * y), 0, 0),
    "elemwise_div": (*binary(lambda x, y: x / y), 0, 0),
    "_grad_add": (lambda x: sym.add_n(*(x * k for k in range(1, 12))),
                  lambda rng, shape: {"x": halves(rng, *shape)}, 0, 0),
    "transpose": (*unary(sym.transpose), 0, 0),
    "stack": (*binary(lambda x, y: sym.stack(x, y, axis=-1)), 0, 0),
}
SHAPES = [(0,), (1,), (17,), (3, 5, 7), (2, 5, 3, 11), (33000,)]


@pytest.mark.parametrize("name", ANY_SHAPE)
def test_dedicated_kernel_matches_generic_operator(name, rng):
    function, make, steps, gradient_steps = ANY_SHAPE[name]
    with mx.util.np_shape(True):  # without it, MXNet reads 0 as "unknown"
        for shape in SHAPES:
            symbol = function(X)
            arrays = make(rng, shape)
            if shape == (0,) and "amp_cast" in name:
                continue  # MXNet's kernel fails
            heads = heads_for(symbol, arrays, rng)
            for request in ("write", "add"):
                own = outcome(symbol, arrays, heads, request)
                with generic_code():
                    generic = outcome(symbol, arrays, heads, request)
                compare(own, generic, steps, gradient_steps + (request == "add"))


def compare(own, generic, steps, gradient_steps):
    for ours, theirs in zip(own[0], generic[0]):
        assert_close(ours, theirs, steps)
    assert own[1].keys() == generic[1].keys()
    for name, gradient in own[1].items():
        assert_close(gradient, generic[1][name], gradient_steps)


def assert_close(ours, theirs, steps):
    """Near 0, where a gradient is a difference, units are those of numbers of size 1/16."""
    assert ours.dtype == theirs.dtype
    if ours.dtype != np.float16:
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
        return
    apart = np.minimum(ulps(ours, theirs), apart_near_zero(ours, theirs))
    assert apart.max(initial=0) <= steps, (ours[apart > steps][:3], theirs[apart > steps][:3])


def apart_near_zero(ours, theirs):
    with np.errstate(invalid="ignore"):
        difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    return np.nan_to_num(difference, nan=np.inf) / 2.0 ** -14


@pytest.mark.parametrize("name", [n for n in ANY_SHAPE if n not in ("Cast", "Cast to float64")])
def test_results_can_overwrite_inputs(name, rng):
    """With static memory, a result overwrites an input that is not read again."""
    function, make, _, _ = ANY_SHAPE[name]
    symbol = -function(-X)
    arrays = make(rng, (5, 77))
    heads = heads_for(symbol, arrays, rng)
    for training in (True, False):
        assert_equal(outcome(symbol, arrays, heads, "write", (), training),
                     outcome(symbol, arrays, heads, "write", STATIC, training))
    assert_equal(outcome(symbol, arrays, None, "write", (), False),
                 outcome(symbol, arrays, None, "write", STATIC, False))


def assert_equal(one, other):
    for a, b in zip(one[0], other[0]):
        assert np.array_equal(a, b, equal_nan=True)
    for part in (1, 2):
        assert one[part].keys() == other[part].keys()
        for name, a in one[part].items():
            assert np.array_equal(a, other[part][name], equal_nan=True), name


def indices(rng, *shape, dtype=np.int32):
    return rng.integers(0, 7, shape).astype(dtype)


def fixed(*shapes, **others):
    return lambda rng: {**{n: halves(rng, *s) for n, s in zip("xyz", shapes)}, **others}


# operator: symbol, arrays; these only move values, or add those with one destination
MOVES = {
    "slice": (sym.slice(X, begin=(1, None, 0), end=(3, 2, None)), fixed((7, 6, 5))),
    "slice by steps": (sym.slice(X, begin=(5, 0), end=(1, None), step=(-2, 2)), fixed((7, 6, 5))),
    "slice_axis": (sym.slice_axis(X, axis=-1, begin=1, end=3), fixed((7, 6, 5))),
    "tile": (sym.tile(X, reps=(2, 1, 3)), fixed((3, 2, 4))),
    "transpose": (sym.transpose(X, axes=(2, 0, 1)), fixed((7, 6, 5))),
    **{f"transpose by {axes}": (sym.transpose(X, axes=axes), fixed((3, 2, 35, 1, 40)))
       for axes in ((0, 2, 1, 3, 4), (4, 3, 0, 1, 2), (0, 4, 3, 2, 1), (3, 0, 1, 2, 4),
                    (2, 4, 0, 3, 1))},
    **{f"Concat along {axis}": (sym.concat(X, Y, X, dim=axis), fixed((2, 3, 5), (2, 3, 5)))
       for axis in (0, 1, 2, -1)},
    "Concat of different widths": (sym.concat(X, Y, Z, dim=1), fixed((3, 2), (3, 5), (3, 1))),
    "Concat of one": (sym.concat(X, dim=0), fixed((3, 2))),
    "Concat of views": (sym.concat(-X, X * 2, dim=1) * 2, fixed((3, 4))),
    "_rnn_param_concat": (sym._internal._rnn_param_concat(X, Y, X, dim=0), fixed((70,), (9,))),
    "SliceChannel": (sym.split(X, num_outputs=3, axis=1), fixed((4, 6, 5))),
    **{f"SliceChannel along {axis}": (sym.split(X, num_outputs=2, axis=axis), fixed((4, 6, 8)))
       for axis in (0, 2, -1)},
    "SliceChannel squeezed": (sym.split(X, num_outputs=6, axis=1, squeeze_axis=True),
                              fixed((4, 6, 5))),
    "SliceChannel's second": (sym.split(X, num_outputs=2, axis=-1)[1] * 2, fixed((4, 6))),
    "stack": (sym.stack(X, Y, axis=1), fixed((3, 4), (3, 4))),
}
GATHERS = {
    "Embedding": sym.Embedding(X, Y, input_dim=7, output_dim=5),
    **{f"take along {axis}": sym.take(Y, X, axis=axis, mode="clip") for axis in (0, 1)},
    "take, wrapping": sym.take(Y, X - 9, axis=0, mode="wrap"),
}


@pytest.mark.parametrize("name", MOVES)
def test_operators_that_move_values_are_bitwise_exact(name, rng):
    symbol, make = MOVES[name]
    moved(symbol, make(rng), rng)


@pytest.mark.parametrize("dtype", ["int32", "float32", "int64"])
@pytest.mark.parametrize("name", GATHERS)
def test_gather_operators_accept_any_index(name, dtype, rng):
    arrays = {"x": indices(rng, 4, 3, dtype=dtype), "y": halves(rng, 7, 7)[:, :5]}
    forward, _, _ = outcome(GATHERS[name], arrays)
    with generic_code():
        assert np.array_equal(outcome(GATHERS[name], arrays)[0][0], forward[0])


def embedding_gradient(words, weight, head, request):
    graph = build(Graph.read(GATHERS["Embedding"]),
                  {"x": str(words.dtype), "y": "float16"}).symbol()
    op = as_function(graph)
    weight = mx.nd.array(weight, dtype="float16")
    weight.attach_grad(request)
    weight.grad[:] = 0.1
    with mx.autograd.record():
        out = op(mx.nd.array(words, dtype=words.dtype), weight)
    out.backward(mx.nd.array(head, dtype="float16"))
    return weight.grad.asnumpy()


@pytest.mark.parametrize("dtype", ["int32", "float32", "int64", "float64"])
@pytest.mark.parametrize("request_", ["write", "add"])
def test_embedding_gradient_matches_generic_operator(dtype, request_, rng):
    words = rng.integers(-2, 9, (50, 3)).astype(dtype)  # including indices out of range
    weight, head = halves(rng, 7, 5), halves(rng, 50, 3, 5)
    found = embedding_gradient(words, weight, head, request_)
    with generic_code():
        assert np.array_equal(found, embedding_gradient(words, weight, head, request_))


def moved(symbol, arrays, rng):
    heads = heads_for(symbol, arrays, rng)
    for request in ("write", "add"):
        for flags in ((), STATIC):
            own = outcome(symbol, arrays, heads, request, flags)
            with generic_code():
                assert_equal(own, outcome(symbol, arrays, heads, request, flags))


def test_sigmoid_and_tanh_gradients_read_results(rng):
    """MXNet's Activation computes sigmoid and tanh again in the backward pass."""
    arrays = {"x": halves(rng, 300, scale=3)}
    head = halves(rng, 300)
    slopes = {"sigmoid": lambda y: y * (1 - y), "tanh": lambda y: 1 - y * y}
    for act, slope in slopes.items():
        (y,), gradients, _ = outcome(sym.Activation(X, act_type=act), arrays, [head])
        (same,), _, _ = outcome(getattr(sym, act)(X), arrays)
        assert np.array_equal(y, same)
        assert_half(gradients["x"], head.astype(float) * slope(y.astype(float)), 1)


def test_gelu_is_within_one_unit_of_exact_value(rng):
    from math import erf, exp, pi, sqrt
    arrays = {"x": halves(rng, 3000, scale=3)}
    head = np.ones(3000, np.float16)
    (y,), gradients, _ = outcome(sym.LeakyReLU(X, act_type="gelu"), arrays, [head])
    x = arrays["x"].astype(float)
    below = np.array([0.5 * (1 + erf(v / sqrt(2))) if v > -2 else below_tail(v) for v in x])
    density = np.array([exp(-v * v / 2) / sqrt(2 * pi) for v in x])
    assert_half(y, x * below, 1)
    np.testing.assert_allclose(gradients["x"].astype(float), below + x * density, rtol=1e-3,
                               atol=2e-7)


def below_tail(v):
    from math import erfc, sqrt
    return 0.5 * erfc(-v / sqrt(2))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_softmax_along_any_axis_matches_float32(axis, rng):
    arrays, heads = {"x": halves(rng, 3, 4, 5, scale=2)}, [halves(rng, 3, 4, 5)]
    symbol = sym.softmax(X, axis=axis, temperature=1.5)
    (y,), gradients, _ = outcome(symbol, arrays, heads)
    (expected,), _ = stock(symbol, arrays, heads)
    assert_half(y, expected, 1)
    wide, g = y.astype(float), heads[0].astype(float)
    slope = wide * (g - (g * wide).sum(axis, keepdims=True)) / 1.5
    np.testing.assert_allclose(gradients["x"], slope, rtol=1e-3, atol=1e-6)


def test_softmax_with_lengths_ignores_padding(rng):
    arrays = {"x": halves(rng, 3, 5), "y": np.int32([2, 5, 1])}
    out, = outcome(sym.softmax(X, Y, use_length=True), arrays)[0]
    for row, x, length in zip(out, arrays["x"], arrays["y"]):
        powers = np.exp(x[:length].astype(float))
        assert_half(row[:length], powers / powers.sum(), 1)
        assert not row[length:].any()


PIECES, BLOCKS = (5, 20, 128, 128), (3, 32, 9, 7)  # a piece has two images, the last one has one
MAXIMUM = {"pool_type": "max"}


@pytest.mark.parametrize(("shape", "settings"), [
    *((shape, settings) for shape in (PIECES, BLOCKS) for settings in (
        {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), **MAXIMUM},
        {"kernel": (2, 2), "stride": (2, 2), "pool_type": "avg"},
        {"kernel": (3, 3), "pool_type": "avg", "pad": (1, 1), "count_include_pad": False},
        {"kernel": (1, 1), "global_pool": True, "pool_type": "avg"},
        {"kernel": (2, 2), "stride": (2, 2), "pool_type": "lp", "p_value": 2},
    )),
    ((5, 32, 96, 96), {"kernel": (2, 2), "stride": (2, 2), **MAXIMUM}),
    ((3, 16, 40), {"kernel": 3, "stride": 2, "pooling_convention": "full", **MAXIMUM}),
    ((3, 16, 7, 5), {"kernel": (1, 1), "stride": (2, 1), "pooling_convention": "full",
                     "pool_type": "avg"}),
    ((2, 16, 7, 6), {"kernel": (2, 2), "stride": (2, 2), "pooling_convention": "full",
                     "pool_type": "avg"}),  # oneDNN does not support it
    ((3, 32, 5, 9, 8), {"kernel": (1, 2, 2), "stride": (1, 2, 2), **MAXIMUM}),
    ((2, 17, 4, 6, 6), {"kernel": (2, 3, 3), "stride": (2, 2, 2), **MAXIMUM}),
], ids=str)
def test_dedicated_pooling_is_bitwise_identical(shape, settings, rng):
    symbol = sym.Pooling(X, **settings)
    arrays = {"x": np.maximum(halves(rng, *shape), np.float16(0))}  # with ties at 0
    heads = heads_for(symbol, arrays, rng)
    for request, training in (("write", True), ("add", True), ("write", False)):
        with_heads = heads if training or settings["pool_type"] == "avg" else None
        found = outcome(symbol, arrays, with_heads, request, training=training)
        with generic_code():
            expected = outcome(symbol, arrays, with_heads, request, training=training)
        assert np.array_equal(found[0][0], expected[0][0])
        if not with_heads:
            continue
        # with AVX2, oneDNN adds in another order for a plain layout
        another = library.load() != "avx512" and settings["pool_type"] == "avg"
        np.testing.assert_allclose(found[1]["x"].astype(float), expected[1]["x"],
                                   rtol=0.001 * another, atol=0.001 * another)


def test_nan_is_propagated():
    nan = {"x": np.float16([np.nan, 1])}
    for symbol in (sym.relu(X), sym.Activation(X, act_type="relu"), sym.sigmoid(X), sym.tanh(X),
                   sym.clip(X, -1, 1), sym.LeakyReLU(X), sym.LeakyReLU(X, act_type="gelu"), X * 2,
                   X + X, sym.softmax(X), sym.Cast(X, dtype="float32"), sym.concat(X, X, dim=0)):
        out = outcome(symbol, nan)[0][0]
        assert np.isnan(out[0])
