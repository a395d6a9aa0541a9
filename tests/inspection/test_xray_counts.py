"""Counts of watched tensors in the engine are exact, and results are bitwise unchanged."""
import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from gluon_amp.formats import FORMATS
from gluon_amp.graph.build import build
from gluon_amp.graph.graph import Graph
from gluon_amp.inspection.tensors import Counts, Key
from gluon_amp.inspection.watch import read
from gluon_amp.policy import POLICIES
from halves import as_function
from mxnet import autograd, nd
from mxnet.gluon import nn, rnn
from networks import ready
from trainers import recorded
from xray_networks import images_net, in_a_block

pytestmark = [pytest.mark.sanitize, pytest.mark.numpy]

sym = mx.sym


def watched(symbol, head=1.0, watch=True, **arrays):
    """Runs a graph forward and backward. Returns its output, gradients and counts."""
    types = {name: a.dtype.name for name, a in arrays.items()}
    made = build(Graph.read(symbol), types, watch=watch).symbol()
    names = made.list_inputs()
    op = as_function(made)
    values = {name: nd.array(a, dtype=a.dtype) for name, a in arrays.items()}
    for value in values.values():
        value.attach_grad()
    read()
    output = recorded(lambda: op(*(values[name] for name in names)))
    output.backward(nd.ones_like(output) * head)
    return output.asnumpy(), {n: v.grad.asnumpy() for n, v in values.items()}, read()


def assert_counted(counts, exact):
    """Checks that counts match numpy's for the exact float32 numbers."""
    exact = np.asarray(exact, np.float32).ravel()
    finite = exact[np.isfinite(exact) & (exact != 0)]
    bins = np.bincount(np.maximum(np.frexp(finite)[1] - 1 + 127, 0), minlength=256)
    np.testing.assert_array_equal(counts.bins, bins)
    with np.errstate(over="ignore"):
        half = exact.astype(np.float16).astype(np.float32)
    fits = np.isfinite(half)
    assert counts.zero == (exact == 0).sum()
    assert counts.infinite == np.isinf(exact).sum()
    assert counts.nan == np.isnan(exact).sum()
    assert counts.overflowed == (np.isfinite(exact) & ~fits).sum()
    assert counts.flushed == ((exact != 0) & (half == 0)).sum()
    wide = exact.astype(np.float64)
    assert counts.squares == pytest.approx((wide[np.isfinite(exact)] ** 2).sum(), rel=1e-6)
    assert counts.error_squares == pytest.approx(((wide[fits] - half[fits]) ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("size", [1, 3, 511, 513, 70000, 200001])
def test_exponents_are_counted_before_rounding_forward_and_backward(size, rng):
    x = (rng.standard_normal(size) * 2.0 ** rng.integers(-24, 13, size)).astype(np.float16)
    x[:3] = [0, 65504, 30000][:size]
    factor = np.float32(np.float16(3.3))
    _, _, counts = watched(sym.var("x") * 3.3, x=x)
    name = next(iter(counts)).node
    assert_counted(counts[Key(name, False, 0)], x.astype(np.float32) * factor)
    assert_counted(counts[Key(name, True, 0)], np.full(size, factor))
    assert counts[Key(name, True, 0)].numbers == size


def numbers_of_kinds(rng):
    """Arrays with near, distant or varying exponents, or without an exponent."""
    plain = rng.standard_normal(150001).astype(np.float32)
    zeros = np.maximum(plain, 0)
    zeros[5000:20000] = 0
    steps = np.ldexp(plain, np.arange(plain.size) // 3000 % 7 * 9 - 30)
    some = plain.copy()
    some[[7, 70000, 140000]] = np.inf, np.nan, -np.inf
    return {"plain": plain, "zeros": zeros, "steps": steps, "apart": plain ** 21, "some": some,
            "tiny": plain * np.float32(1e-30), "subnormal": plain * np.float32(1e-39)}


def test_numbers_with_any_exponent_are_counted(rng):
    for numbers in numbers_of_kinds(rng).values():
        assert_counted(Counts.of_array(numbers, half=True), numbers)


def test_reference_is_float32_step(rng):
    x = sym.var("x")
    same = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 16}
    made = sym.Convolution(x, no_bias=True, name="first", **same)
    made = sym.clip(sym.BatchNorm(made, name="norm", fix_gamma=False), -1, 1)
    made = sym.Convolution(made, num_group=16, name="deep", **same)
    made = sym.Activation(made, act_type="relu") * made + sym.sigmoid(made) / 3
    made = sym.Convolution(made, num_filter=5, kernel=(1, 1), no_bias=True, name="last") - 2
    shapes, _, _ = made.infer_shape(x=(3, 4, 9, 9))
    arrays = {name: rng.standard_normal(shape).astype(np.float32)
              for name, shape in zip(made.list_arguments(), shapes)}
    statistics = {"norm_moving_mean": np.zeros(16, "f"), "norm_moving_var": np.ones(16, "f")}

    def step(graph):
        names = graph.list_inputs()
        op = as_function(graph)
        values = {name: nd.array(a) for name, a in {**arrays, **statistics}.items()}
        for name in arrays:
            values[name].attach_grad()
        output = recorded(lambda: op(*(values[name] for name in names)))
        output.backward()
        return {"": output.asnumpy(), **{n: values[n].grad.asnumpy() for n in arrays},
                **{n: values[n].asnumpy() for n in statistics}}

    types = dict.fromkeys([*arrays, *statistics], "float32")
    watched_graph = build(Graph.read(made), types, policy=POLICIES["float32"], watch=True,
                          samples=True).symbol()
    right, found = step(made), step(watched_graph)
    for name, array in right.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5 * np.abs(array).max())


def test_infinities_and_nans_are_counted_separately():
    x = np.float16([np.inf, -np.inf, np.nan, 0, 1, 65504])
    _, _, counts = watched(sym.var("x") * 2, x=x)
    found = next(c for key, c in counts.items() if not key.backward)
    assert (found.infinite, found.nan, found.zero, found.overflowed) == (2, 1, 1, 1)


@pytest.mark.parametrize(("channels", "side"), [(5, 9), (16, 9), (24, 9), (24, 120), (40, 50)])
def test_convolution_counts_exclude_padding(channels, side, rng):
    x = rng.standard_normal((3, 16, side, side)).astype(np.float16)
    w = rng.standard_normal((channels, 16, 3, 3)).astype(np.float16)
    conv = sym.Convolution(sym.var("x"), sym.var("w"), num_filter=channels, kernel=(3, 3),
                           no_bias=True, name="conv")
    output, gradients, counts = watched(conv, x=x, w=w)
    forward = counts[Key("conv", False, 0)]
    assert forward.numbers == output.size
    assert forward.zero == 0
    assert forward.squares == pytest.approx((output.astype(np.float64) ** 2).sum(), rel=1e-3)
    for which, name in enumerate("xw"):
        found = counts[Key("conv", True, which)]
        right = gradients[name].astype(np.float64)
        assert found.numbers == right.size
        assert found.squares == pytest.approx((right ** 2).sum(), rel=1e-3)


def leaky(x, g):
    factor = np.where(x > 0, 1, 1e-4)
    return x * factor, g * factor


def sigmoid(x, g):
    y = 1 / (1 + np.exp(-x))
    rounded = y.astype(np.float16).astype(float)
    return y, g * rounded * (1 - rounded)


def tanh(x, g):
    return np.tanh(x), g * (1 - np.tanh(x).astype(np.float16).astype(float) ** 2)


def softmax(x, g):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True), None


def layer_norm(x, g):
    n = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return n * 2.0 ** -23, None


def batch_norm(x, g):
    n = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3)
    return n * 1e-7, None


ONES = {"gamma": np.full(40, 1e-7, np.float32), "beta": np.zeros(40, np.float32)}
HALF = {"gamma": np.full(40, 2.0 ** -23, np.float16), "beta": np.zeros(40, np.float16)}
STATISTICS = {"mean": np.zeros(40, np.float32), "var": np.ones(40, np.float32)}
OWN_CODE = {  # operators with dedicated kernels, their results and gradients
    "leaky relu": (lambda x, **_: sym.LeakyReLU(x, slope=1e-4, name="op"), leaky, {}),
    "sigmoid": (lambda x, **_: sym.sigmoid(x, name="op"), sigmoid, {}),
    "tanh": (lambda x, **_: sym.Activation(x, act_type="tanh", name="op"), tanh, {}),
    "softmax": (lambda x, **_: sym.softmax(x, name="op"), softmax, {}),
    "layer norm": (lambda x, **p: sym.LayerNorm(x, *p.values(), name="op"), layer_norm, HALF),
    "batch norm": (lambda x, **p: sym.BatchNorm(x, *p.values(), fix_gamma=False, name="op"),
                   batch_norm, {**ONES, **STATISTICS}),
}


@pytest.mark.parametrize("name", OWN_CODE)
def test_flushed_values_are_counted_in_dedicated_kernels(name, rng):
    make, right, parameters = OWN_CODE[name]
    x = (rng.standard_normal((50, 40)) * (3e-3 if name == "leaky relu" else 8)).astype(np.float16)
    variables = {key: sym.var(key) for key in ["x", *parameters]}
    output, gradients, counts = watched(make(**variables), 2.0 ** -20, x=x, **parameters)
    exact, exact_gradient = right(x.astype(np.float64), 2.0 ** -20)
    for found, values in ((counts[Key("op", False, 0)], exact),
                          (counts[Key("op", True, 0)], exact_gradient)):
        if values is not None:
            flushed = ((values != 0) & (values.astype(np.float16) == 0)).sum()
            assert found.flushed == flushed
            assert found.error_squares > 0
    assert sum(c.flushed for c in counts.values()) > 0
    _, plain, _ = watched(make(**variables), 2.0 ** -20, watch=False, x=x, **parameters)
    assert gradients["x"].tobytes() == plain["x"].tobytes()
    assert output.dtype == np.float16


@pytest.mark.parametrize("shape", [(64, 24), (3, 5, 3, 3), (9, 40, 7, 7), (4, 3, 40, 40),
                                   (2, 70, 33, 33), (1, 1, 700, 700)])
def test_batch_norm_counts_values_before_rounding(shape, rng):
    """The counted values equal those of a float32 batch norm of the same inputs."""
    norm = sym.BatchNorm(sym.var("x"), fix_gamma=False, name="op")
    x = (rng.standard_normal(shape) * 3 + 1).astype(np.float16)
    values = {"op_gamma": rng.standard_normal(shape[1]), "op_beta": rng.standard_normal(shape[1]),
              "op_moving_mean": np.zeros(shape[1]), "op_moving_var": np.ones(shape[1])}
    values = {name: array.astype(np.float32) for name, array in values.items()}
    head = rng.standard_normal(shape).astype(np.float16)

    def step(dtype, **how):
        arrays = {"x": nd.array(x, dtype=dtype), **{n: nd.array(a) for n, a in values.items()}}
        for array in arrays.values():
            array.attach_grad()
        types = {name: np.dtype(array.dtype).name for name, array in arrays.items()}
        made = build(Graph.read(norm), types, **how).symbol()
        output = recorded(lambda: as_function(made)(*(arrays[name] for name in made.list_inputs())))
        output.backward(nd.array(head, dtype=dtype))
        return output.asnumpy(), arrays["x"].grad.asnumpy()

    exact = step("float32", policy=POLICIES["float32"], watch=True, samples=True)
    plain = step("float16")
    read()
    for found, right in zip(step("float16", watch=True), plain):
        np.testing.assert_array_equal(found, right)
    counts = read()
    for which, right in enumerate(exact):
        assert_counted(counts[Key("op", bool(which), 0)], right)


@pytest.mark.parametrize("name", ["dense", "lstm", "attention", "images"])
def test_watched_networks_are_bitwise_identical(name):
    def step(watch):
        mx.random.seed(1)
        np.random.seed(1)
        net, inputs = _network(name)
        data = [a.astype("float32") for a in inputs(np.random.default_rng(7))]
        net(*data)
        clean = Graph.read(net._cached_graph[1])
        graph, types = net.mixed_graph(["float32"] * len(data))
        made = build(graph, types, watch=watch).symbol()
        values = {p.name: p.data() for p in net.collect_params().values()}
        values.update(zip([d.name for d in net._cached_graph[0]], data))
        names = made.list_inputs()
        op = as_function(made)
        mx.random.seed(3)
        with autograd.record():
            output = op(*(values[n] for n in names))
            loss = sum((o ** 2).mean() for o in (output if isinstance(output, list) else [output]))
        loss.backward()
        assert clean.variables()
        return [values[p.name].grad.asnumpy() for p in net.collect_params().values()
                if p.grad_req != "null"]

    for watched_one, plain in zip(step(True), step(False)):
        assert watched_one.tobytes() == plain.tobytes()
    assert read()


def _network(name):
    make, inputs = {
        "dense": (lambda: nn.Dense(3), networks.floats(4, 5)),
        "lstm": (lambda: in_a_block(rnn.LSTM(8, input_size=6)), networks.floats(5, 2, 6)),
        "attention": (networks.self_attention, networks.floats(5, 2, 32)),
        "images": (lambda: images_net(), networks.images(9)),
    }[name]
    net = amp.convert(ready(make(), mx.init.Xavier()))
    return net, inputs


def test_counts_give_shares_in_any_format():
    counts = Counts.of_array(np.float32([0, 2.0 ** -40, 2.0 ** -20, 1, 2.0 ** 17]))
    assert counts.shares(FORMATS["float16"]) == {
        "zero": 0.2, "flushed": 0.2, "subnormal": 0.2, "overflowed": 0.2}
    assert counts.shares(FORMATS["bfloat16"]) == {
        "zero": 0.2, "flushed": 0, "subnormal": 0, "overflowed": 0}
    assert counts.times(2.0 ** -2).shares(FORMATS["float16"])["overflowed"] == 0
    assert counts.range == (-40, 17)
