"""Dedicated kernels for norms, convolutions and dense layers: batch norm matches numpy and updates
its statistics once, in the forward pass; the others match the generic operator.
"""

import contextlib

import mxnet as mx
import numpy as np
import pytest
from halves import Op, assert_half, generic_code, halves, run, stock

pytestmark = [pytest.mark.sanitize, pytest.mark.isa]

sym = mx.sym
NAMES = ("x", "gamma", "beta", "mean", "var")
STATIC = (("static_alloc", True), ("static_shape", True))


def assert_step(actual, expected):
    """Within a unit of float16; near 0, where float32 differences cancel, within that of 1/256."""
    assert actual.dtype == np.float16
    assert actual.shape == expected.shape
    expected = expected.astype(np.float16)
    step = np.spacing(np.maximum(np.abs(expected), np.float16(1 / 256)))
    assert (np.abs(actual.astype(float) - expected) <= step).all()


# ---- batch norm against numpy ------------------------------------------------------


class Expected:
    """A batch norm in float64, rounded once."""

    def __init__(self, arrays, axis, eps, given=False, fixed=False):
        self.x = arrays["x"].astype(np.float64)
        self.axes = tuple(i for i in range(self.x.ndim) if i != axis % self.x.ndim)
        self.shape = [1] * self.x.ndim
        self.shape[axis] = -1
        self.given = given
        self.mean = arrays["mean"].astype(float) if given else self.x.mean(self.axes)
        self.var = arrays["var"].astype(float) if given else self.x.var(self.axes)
        self.gamma = np.ones_like(self.mean) if fixed else arrays["gamma"].astype(float)
        self.beta, self.fixed = arrays["beta"].astype(float), fixed
        self.inverse = 1 / np.sqrt(self.var + eps)
        self.hat = (self.x - self.along(self.mean)) * self.along(self.inverse)
        self.y = self.along(self.gamma) * self.hat + self.along(self.beta)

    def along(self, values):
        return values.reshape(self.shape)

    def gradients(self, g):
        g = g.astype(float)
        scale = self.along(self.gamma * self.inverse)
        dx = scale * g
        if not self.given:
            count = self.x.size / self.mean.size
            dx = scale * (g - self.along(g.sum(self.axes) / count)
                          - self.hat * self.along((g * self.hat).sum(self.axes) / count))
        return dx, 0 * self.gamma if self.fixed else (g * self.hat).sum(self.axes), \
            g.sum(self.axes)


def norm_arrays(rng, shape, axis=1):
    channels = shape[axis]
    return {"x": (halves(rng, *shape) * np.float16(2) + np.float16(1)),
            "gamma": rng.uniform(0.5, 2, channels).astype(np.float32),
            "beta": rng.standard_normal(channels).astype(np.float32),
            "mean": rng.standard_normal(channels).astype(np.float32),
            "var": rng.uniform(0.5, 2, channels).astype(np.float32)}


def norm(op=sym.BatchNorm, **settings):
    return op(*map(sym.var, NAMES), **{"fix_gamma": False, "eps": 1e-3, "momentum": 0.75,
                                       **settings})


SHAPES = [((4, 3, 5, 7), 1), ((8, 17, 14, 14), 1), ((4, 5), 1), ((2, 3, 50), 1),
          ((2, 2, 3, 4, 5), 1), ((4, 5, 7, 3), 3), ((4, 5, 7, 17), -1), ((6, 7, 3), 2),
          ((300, 1), 1), ((1, 2, 33, 65), 1)]
SETTINGS = [{}, {"use_global_stats": True}, {"fix_gamma": True},
            {"fix_gamma": True, "use_global_stats": True}]


@pytest.mark.vectorized
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_matches_numpy(shape, axis, settings, training, rng):
    arrays = norm_arrays(rng, shape, axis)
    given = bool(settings.get("use_global_stats")) or not training
    expected = Expected(arrays, axis, 1e-3, given, settings.get("fix_gamma"))
    head = halves(rng, *shape)
    for request, flags in (("write", ()), ("add", ()), ("write", STATIC), ("add", STATIC)):
        layer = Op(norm(axis=axis, **settings), arrays, request=request, flags=flags)
        out, = layer.forward(training, recorded=True)
        assert_step(out.asnumpy(), expected.y)
        assert np.mean(out.asnumpy() != expected.y.astype(np.float16)) < 0.05
        out.backward(mx.nd.array(head, dtype="float16"), train_mode=training)
        base = int(request == "add")
        found = layer.collected()
        for name, gradient in zip(NAMES, expected.gradients(head)):
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(found[name], base + gradient, rtol=2e-3,
                                       atol=2e-3 * scale + 1e-5, err_msg=name)
            assert found[name].dtype == arrays[name].dtype
        keep = 1 if given else 0.75
        for name, batch in (("mean", expected.mean), ("var", expected.var)):
            np.testing.assert_allclose(layer[name], keep * arrays[name] + (1 - keep) * batch,
                                       rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flags", [(), STATIC])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_mean_and_deviation_do_not_overwrite_gamma(training, flags, rng):
    arrays = norm_arrays(rng, (4, 6, 5, 5))
    x, gamma, beta, *moving = map(sym.var, NAMES)
    out = sym.BatchNorm(x, gamma * 1, beta * 1, *moving, fix_gamma=False, eps=1e-3,
                        output_mean_var=True)
    y, mean, inverse = Op(sym.Group([out[0], out[1] * 1, out[2] * 1]), arrays,
                          flags=flags).forward(training)
    expected = Expected(arrays, 1, 1e-3, not training)
    assert_step(y.asnumpy(), expected.y)
    np.testing.assert_allclose(mean.asnumpy(), expected.mean, rtol=1e-5)
    np.testing.assert_allclose(inverse.asnumpy(), expected.inverse, rtol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS)
def test_batch_norm_with_relu_matches_norm_then_relu(settings, rng):
    arrays = norm_arrays(rng, (4, 17, 5, 5))
    head = halves(rng, 4, 17, 5, 5)
    results = []
    for symbol in (norm(sym.contrib.BatchNormWithReLU, **settings), sym.relu(norm(**settings))):
        layer = Op(symbol, arrays)
        out, = layer.forward(recorded=True)
        out.backward(mx.nd.array(head, dtype="float16"))
        results.append([out.asnumpy(), layer["mean"], layer["var"], *layer.collected().values()])
    for both in zip(*results):
        assert np.array_equal(*both)


def test_generic_batch_norm_matches(rng):
    for shape, axis in SHAPES[:6]:
        arrays = norm_arrays(rng, shape, axis)
        head = halves(rng, *shape)
        results = []
        for code in (contextlib.nullcontext, generic_code):
            layer = Op(norm(axis=axis), arrays)
            with code():
                out, = layer.forward(recorded=True)
                out.backward(mx.nd.array(head, dtype="float16"))
            results.append((out.asnumpy(), layer.collected(), layer["mean"]))
        assert_step(results[0][0], results[1][0])
        np.testing.assert_allclose(results[0][1]["x"], results[1][1]["x"], rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(results[0][1]["gamma"], results[1][1]["gamma"], rtol=1e-3,
                                   atol=1e-3)
        np.testing.assert_allclose(results[0][2], results[1][2], rtol=1e-5, atol=1e-6)


# ---- update of statistics ------------------------------------------------------------


def test_statistics_are_updated_once_in_forward_pass(rng):
    arrays = norm_arrays(rng, (4, 3, 5, 5))
    layer = Op(norm(), arrays)
    batch = arrays["x"].astype(float).mean((0, 2, 3))
    moved = arrays["mean"].astype(float)

    def assert_moved(times):
        nonlocal moved
        for _ in range(times):
            moved = 0.75 * moved + 0.25 * batch
        np.testing.assert_allclose(layer["mean"], moved, rtol=1e-5, atol=1e-6)

    layer.forward(training=False)
    assert_moved(0)
    layer.forward(training=True)
    assert_moved(1)
    out, = layer.forward(recorded=True)  # and a backward pass does not
    assert_moved(1)
    out.backward(retain_graph=True)
    assert_moved(0)
    first = layer.collected()
    out.backward()
    assert_moved(0)
    for name, gradient in layer.collected().items():
        assert np.array_equal(gradient, first[name])
    out, = layer.forward(training=False, recorded=True)
    out.backward(train_mode=False)
    assert_moved(0)
    layer.forward(training=False)
    assert_moved(0)


def test_prediction_uses_statistics_updated_by_training(rng):
    arrays = norm_arrays(rng, (4, 3, 5, 5))
    layer = Op(norm(), arrays, flags=STATIC)
    for _ in range(3):
        layer.forward(recorded=True)[0].backward()
        now = {**arrays, "mean": layer["mean"], "var": layer["var"]}
        assert_step(layer.forward(training=False)[0].asnumpy(), Expected(now, 1, 1e-3, True).y)


def test_small_deviations_from_large_means_are_exact(rng):
    """Sums of squares would cancel in float32."""
    arrays = norm_arrays(rng, (16, 4, 9, 9))
    arrays["x"] = (1000 + 0.5 * rng.integers(-2, 3, arrays["x"].shape)).astype(np.float16)
    out, = Op(norm(eps=1e-5), arrays).forward()
    assert_half(out.asnumpy(), Expected(arrays, 1, 1e-5).y, 2)


# ---- layer norm ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 17), (1, 1), (5, 1000), (300, 130)])
def test_layer_norm_matches_numpy(shape, rng):
    x = halves(rng, *shape, scale=2) + np.float16(3)
    cast = sym.amp_cast(sym.var("x"), dtype="float32")
    symbol = sym.LayerNorm(cast, sym.var("gamma"), sym.var("beta"))
    symbol = sym.amp_cast(symbol, dtype="float16")
    arrays = {"x": x, "gamma": rng.uniform(0.5, 2, shape[-1]).astype(np.float32),
              "beta": rng.standard_normal(shape[-1]).astype(np.float32)}
    head = halves(rng, *shape)
    (y,), gradients = run(symbol, arrays, [head])
    (predicted,), _ = run(symbol, arrays, training=False)
    assert np.array_equal(y, predicted)
    wide, g = x.astype(float), head.astype(float)
    inverse = 1 / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    hat = (wide - wide.mean(-1, keepdims=True)) * inverse
    assert_step(y, hat * arrays["gamma"] + arrays["beta"])
    h = g * arrays["gamma"]
    dx = inverse * (h - h.mean(-1, keepdims=True) - hat * (h * hat).mean(-1, keepdims=True))
    np.testing.assert_allclose(gradients["x"].astype(float), dx, rtol=1e-3,
                               atol=1e-3 * np.abs(h * inverse).max())
    np.testing.assert_allclose(gradients["gamma"], (g * hat).sum(0) if g.ndim == 2 else
                               (g * hat).sum((0, 1)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradients["beta"], g.reshape(-1, shape[-1]).sum(0), rtol=1e-4,
                               atol=1e-4)


def test_layer_norm_of_float32_residual_sum_uses_fast_kernel(rng):
    """A residual sum of mixed precision: MXNet's float32 kernel gives other bits, and is slow."""
    cast = sym.amp_cast(sym.var("x"), dtype="float32") + sym.var("r")
    arrays = {"x": halves(rng, 64, 200, scale=2), "r": rng.standard_normal((64, 200)).astype("f"),
              "gamma": np.ones(200, "f"), "beta": np.zeros(200, "f")}
    symbol = sym.LayerNorm(cast, sym.var("gamma"), sym.var("beta"))
    (y,), gradients = run(symbol, arrays, [np.ones((64, 200), "f") * arrays["r"]])
    data = arrays["x"].astype(float) + arrays["r"]
    hat = (data - data.mean(-1, keepdims=True)) / np.sqrt(data.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, hat, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients["gamma"], (hat * arrays["r"]).sum(0), rtol=1e-3, atol=1e-4)
    (theirs,), _ = stock(symbol, arrays, [np.ones((64, 200), "f")])
    assert not np.array_equal(y, theirs)


def test_layer_norm_along_another_axis_matches_mxnet(rng):
    symbol = sym.LayerNorm(*map(sym.var, "xyz"), axis=1)
    arrays = {"x": halves(rng, 4, 5, 6), "y": halves(rng, 5), "z": halves(rng, 5)}
    head = halves(rng, 4, 5, 6)
    (y,), gradients = run(symbol, arrays, [head])
    (wide,), expected = stock(symbol, arrays, [head])
    assert_half(y, wide)
    for name, gradient in gradients.items():  # reads the rounded mean and deviation
        np.testing.assert_allclose(gradient, expected[name], rtol=5e-3, atol=5e-3)


# ---- convolutions --------------------------------------------------------------------

# name: shapes of data and weight, and settings
CONVOLUTIONS = {
    "3 x 3": ((3, 16, 9, 8), (16, 16, 3, 3), {"pad": (1, 1)}),
    "odd channels": ((3, 5, 9, 8), (7, 5, 3, 3), {}),
    "depthwise": ((2, 32, 9, 8), (32, 1, 3, 3), {"num_group": 32}),
    "groups": ((2, 32, 9, 8), (32, 8, 3, 3), {"num_group": 4}),
    "strides and holes": ((2, 16, 9, 8), (8, 16, 3, 3), {"stride": (2, 2), "dilate": (2, 2)}),
    "1 x 1": ((2, 48, 5, 5), (24, 48, 1, 1), {}), "one dimension": ((2, 16, 9), (8, 16, 3), {}),
    "one dimension of more channels": ((2, 48, 19), (32, 48, 3), {}),
    "three dimensions": ((2, 4, 5, 6, 7), (8, 4, 3, 3, 3), {}),
    "three dimensions of more channels": ((2, 32, 5, 6, 7), (16, 32, 3, 3, 3), {}),
    "in pieces of the batch": ((33, 16, 64, 64), (16, 16, 1, 1), {}),
    "in pieces of the channels": ((3, 250, 5, 4), (264, 250, 3, 3), {"pad": (1, 1)}),
    "one dimension in pieces of the channels": ((2, 250, 20), (264, 250, 9), {}),
}
DECONVOLUTIONS = {
    "a deconvolution": ((3, 32, 9, 8), (32, 16, 4, 4), {"stride": (2, 2), "pad": (1, 1)}),
    "a deconvolution of odd channels": ((3, 7, 9, 8), (7, 5, 3, 3), {}),
    "a deconvolution in groups": ((3, 32, 5, 5), (32, 16, 2, 2),
                                  {"stride": (2, 2), "num_group": 2}),
    "a deconvolution in pieces": ((9, 16, 64, 64), (16, 16, 2, 2), {"stride": (2, 2)}),
    "a deconvolution in pieces of the channels": ((2, 200, 3, 4), (200, 210, 4, 4),
                                                  {"stride": (2, 2), "pad": (1, 1)}),
}
DENSE = {
    "few rows": ((33, 16), (24, 16), {}),
    "few rows in pieces of the weight": ((9, 700), (1001, 700), {}),
    "more rows in pieces of the weight": ((200, 700), (1001, 700), {}),
    "over a vocabulary": ((300, 40), (7001, 40), {}),
    "in pieces of the rows": ((5001, 30), (240, 30), {}),
    "in pieces of all axes but the last": ((140, 81, 64), (64, 64), {"flatten": False}),
    "in pieces of the first axis": ((6001, 5, 40), (8, 200), {}),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*CONVOLUTIONS, *DECONVOLUTIONS, *DENSE])
def test_dedicated_kernel_matches_generic_operator(name, bias, rng):
    shape, weight, settings = {**CONVOLUTIONS, **DECONVOLUTIONS, **DENSE}[name]
    outputs = weight[1] * settings.get("num_group", 1) if name in DECONVOLUTIONS else weight[0]
    if name in DENSE:
        operator, settings = sym.FullyConnected, {"num_hidden": outputs, **settings}
    else:
        operator = sym.Convolution if name in CONVOLUTIONS else sym.Deconvolution
        settings = {"kernel": weight[2:], "num_filter": outputs, **settings}
    variables = [sym.var(n) for n in ("xyz" if bias else "xy")]
    symbol = operator(*variables, no_bias=not bias, **settings)
    arrays = {"x": halves(rng, *shape), "y": halves(rng, *weight, scale=0.2)}
    if bias:
        arrays["z"] = halves(rng, outputs)
    results = []
    head = None
    for request, generic in (("write", False), ("write", True), ("add", False)):
        layer = Op(symbol, arrays, request=request)
        with generic_code() if generic else contextlib.nullcontext():
            out, = layer.forward(recorded=True)
            head = halves(rng, *out.shape) if head is None else head
            out.backward(mx.nd.array(head, dtype="float16"))
        results.append((out.asnumpy(), layer.collected()))
    own, generic, added = results
    assert np.array_equal(own[0], added[0])
    assert_alike(own[0], generic[0])
    for key, gradient in own[1].items():
        assert_alike(gradient, generic[1][key])
        assert_half(added[1][key], np.float32(1) + gradient.astype(np.float32))


@pytest.mark.parametrize("shape", [(513, 64), (7, 73, 64)])
def test_dense_prediction_in_two_pieces_matches_generic_operator(shape, rng):
    symbol = sym.FullyConnected(*map(sym.var, "xyz"), num_hidden=256, flatten=False)
    arrays = {"x": halves(rng, *shape), "y": halves(rng, 256, 64, scale=0.2), "z": halves(rng, 256)}
    (own,), _ = run(symbol, arrays, training=False)
    with generic_code():
        (generic,), _ = run(symbol, arrays, training=False)
    assert_alike(own, generic)


def assert_alike(ours, theirs):
    """Float32 sums in another order: one unit, or negligible relative to the largest."""
    assert ours.dtype == theirs.dtype == np.float16
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-5 * np.abs(theirs).max())
