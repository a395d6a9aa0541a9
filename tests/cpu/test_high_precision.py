"""`Policy(high_precision=)`: the output, data gradient or weight gradient of a layer is a product
in high precision, with the others in low precision."""
from itertools import combinations

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.formats import FORMATS
from mxnet import autograd, gluon, nd

PRODUCTS = ("forward", "data_gradient", "weight_gradient")
SUBSETS = [chosen for count in range(4) for chosen in combinations(PRODUCTS, count)]
E4M3, E5M2 = FORMATS["float8_e4m3"], FORMATS["float8_e5m2"]

def layers_of(rows, inputs, outputs):
    """The product of each layer, and the shapes of its data and weight."""
    return {
        "Dense": (lambda F, x, w: F.FullyConnected(x, w, num_hidden=outputs, no_bias=True),
                  (rows, inputs), (outputs, inputs)),
        "Convolution": (lambda F, x, w: F.Convolution(x, w, kernel=(3, 3), num_filter=outputs,
                                                      no_bias=True),
                        (rows, inputs, 6, 6), (outputs, inputs, 3, 3)),
        "Deconvolution": (lambda F, x, w: F.Deconvolution(x, w, kernel=(3, 3), num_filter=outputs),
                          (rows, inputs, 6, 6), (inputs, outputs, 3, 3)),
        "dot": (lambda F, x, w: F.dot(x, w), (rows, inputs), (inputs, outputs)),
        "batch_dot": (lambda F, x, w: F.batch_dot(x, w, transpose_b=True),
                      (2, rows, inputs), (2, outputs, inputs)),
    }


LAYERS = layers_of(5, 7, 3)
# long sums, whose parts a GPU rounds
LONG = {name: layers_of(*(size,) * 3)[name] for name, size in zip(LAYERS, (300, 32, 32, 300, 300))}


class Product(gluon.HybridBlock):
    """A layer with one product, a weight and optionally a bias."""

    def __init__(self, multiply, shape, bias=0):
        super().__init__()
        self.multiply = multiply
        self.weight = self.params.get("weight", shape=shape)
        if bias:
            self.bias = self.params.get("bias", shape=(bias,), init="zeros")

    def hybrid_forward(self, F, x, weight, **bias):
        return self.multiply(F, x, weight, *bias.values())


def layer(name, policy, w, **flags):
    multiply, _, shape = LAYERS[name]
    net = Product(multiply, shape)
    net.initialize()
    net.weight.set_data(nd.array(w))
    amp.convert(net, policy)
    net.hybridize(**flags)
    return net


def step(net, x, head):
    """The output, and the gradients of data and weight."""
    data = nd.array(x)
    data.attach_grad()
    with autograd.record():
        out = net(data)
    out.backward(nd.array(head))
    return [a.asnumpy() for a in (out, data.grad, net.weight.grad())]


def inputs(name, rng, scale=1.0):
    multiply, *shapes = LAYERS[name]
    x, w = ((scale * rng.standard_normal(shape)).astype(np.float32) for shape in shapes)
    head = multiply(nd, nd.array(x), nd.array(w)).shape
    return x, w, (scale * rng.standard_normal(head)).astype(np.float32)


def chosen_of(name, high, exact, rounded):
    """Each product in float32, with exact inputs if it is in `high`."""
    made = [step(layer(name, "float32", tensors[1]), tensors[0], tensors[2])
            for tensors in (rounded, exact)]
    return [made[product in high][i] for i, product in enumerate(PRODUCTS)]


def fitting(format_, x):
    """Rounded with the scale for which the largest number just fits."""
    scale = 2.0 ** np.floor(np.log2(format_.largest / np.abs(x).max()))
    return format_.round(x * scale) / scale


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("high", SUBSETS, ids="+".join)
def test_high_precision_product_reads_unrounded_inputs(high, name, flags, rng):
    policy = amp.Policy("mine", product="float8_e4m3", gradient="float8_e5m2", scaling="current",
                        high_precision=high)
    x, w, head = exact = inputs(name, rng)
    rounded = fitting(E4M3, x), fitting(E4M3, w), fitting(E5M2, head)
    net = layer(name, policy, w, **flags)
    for _ in range(2):
        for got, expected in zip(step(net, x, head), chosen_of(name, high, exact, rounded)):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("high", SUBSETS, ids="+".join)
def test_high_precision_inputs_have_between_format(high, name, rng):
    between, dtype = FORMATS["bfloat16"], 2.0 ** -8
    policy = amp.Policy("mine", product="float8_e4m3", activation="bfloat16",
                        gradient="float8_e5m2", high_precision=high)
    exact = [between.round(a) for a in inputs(name, rng)]
    rounded = [format_.round(a) for format_, a in zip((E4M3, E4M3, E5M2), exact)]
    net = layer(name, policy, exact[1])
    for got, expected in zip(step(net, exact[0], exact[2]), chosen_of(name, high, exact, rounded)):
        np.testing.assert_allclose(got, expected, rtol=2 * dtype, atol=1e-4)


@pytest.mark.parametrize("high", SUBSETS, ids="+".join)
def test_delayed_scales_come_from_rounded_products_only(high, rng):
    policy = amp.Policy("mine", product="float8_e4m3", gradient="float8_e5m2", scaling="delayed",
                        history=1, high_precision=high)
    x, w, head = exact = inputs("Dense", rng, scale=1e-6)
    net = layer("Dense", policy, w)
    rounded = fitting(E4M3, x), fitting(E4M3, w), fitting(E5M2, head)
    for _ in range(3):
        for got, expected in zip(step(net, x, head), chosen_of("Dense", high, exact, rounded)):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-17)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("high", SUBSETS, ids="+".join)
def test_float16_high_precision_products_add_in_float32(high, name, rng, monkeypatch):
    monkeypatch.setitem(LAYERS, name, LONG[name])
    x, w, head = (np.abs(a).astype(np.float16).astype(np.float32) for a in inputs(name, rng, 0.1))
    policies = [amp.Policy("mine", compute="float16", batched="float16", **options) for options in (
        {"accumulate": "V100"}, {}, {"accumulate": "V100", "high_precision": high})]
    made = [step(layer(name, policy, w), x, head) for policy in policies]
    for product, low, plain, mine in zip(PRODUCTS, *made):
        right, wrong = (plain, low) if product in high else (low, plain)
        assert np.mean(mine != wrong) > 0.002 > 5 * np.mean(mine != right)


@pytest.mark.parametrize("high", [(), "weight_gradient"])
def test_bias_gradient_follows_weight_gradient(high, rng):
    net = Product(lambda F, x, w, b: F.FullyConnected(x, w, b, num_hidden=3), (3, 7), bias=3)
    net.initialize()
    amp.convert(net, amp.Policy("mine", product="float8_e4m3", gradient="float8_e5m2",
                                high_precision=high))
    x, _, head = inputs("Dense", rng)
    step(net, x, head)
    np.testing.assert_allclose(net.bias.grad().asnumpy(),
                               (head if high else E5M2.round(head)).sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("high", PRODUCTS)
def test_numpy_products_support_high_precision(high, rng):
    x, w, head = (rng.standard_normal(shape).astype(np.float32)
                  for shape in ((5, 7), (7, 3), (5, 3)))
    policy = amp.Policy("mine", product="float8_e4m3", high_precision=high)

    class Numpy(gluon.HybridBlock):
        def hybrid_forward(self, F, x, w):
            return self.multiply(F, x, w)

    mx.npx.set_np()
    try:
        for multiply in (lambda F, x, w: F.np.dot(x, w), lambda F, x, w: F.np.matmul(x, w)):
            net = Numpy()
            net.multiply = multiply
            amp.convert(net, policy)
            data = [mx.np.array(a) for a in (x, w)]
            for a in data:
                a.attach_grad()
            with autograd.record():
                out = net(*data)
            out.backward(mx.np.array(head))
            low = [E4M3.round(a) for a in (x, w, head)]
            expected = [a[0] @ a[1] if i == 0 else a[2] @ a[1].T if i == 1 else a[0].T @ a[2]
                        for i, a in enumerate((x, w, head) if product == high else low
                                              for product in PRODUCTS)]
            for got, right in zip([out, data[0].grad, data[1].grad], expected):
                np.testing.assert_allclose(got.asnumpy(), right, rtol=1e-5, atol=1e-5)
    finally:
        mx.npx.reset_np()


def test_first_layer_without_data_gradient_trains(rng):
    x, w, head = inputs("Dense", rng)
    net = layer("Dense", amp.Policy("mine", product="tf32", high_precision="weight_gradient"), w)
    with autograd.record():
        out = net(nd.array(x))
    out.backward(nd.array(head))
    np.testing.assert_allclose(net.weight.grad().asnumpy(), head.T @ x, rtol=1e-6, atol=1e-6)


def test_kept_layers_and_products_in_loops(rng):
    class Looping(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get("weight", shape=(7, 7))

        def hybrid_forward(self, F, x, weight):
            return F.contrib.foreach(
                lambda a, s: (F.FullyConnected(a, s, num_hidden=7, no_bias=True), s), x, weight)[0]

    net = Looping()
    net.initialize(mx.init.Normal(1))
    w = net.weight.data().asnumpy()
    amp.convert(net, amp.Policy("mine", product="float8_e4m3", high_precision="weight_gradient"))
    x, head = (rng.standard_normal((2, 5, 7)).astype(np.float32) for _ in range(2))
    out, dx, dw = step(net, x, head)
    np.testing.assert_allclose(out, E4M3.round(x) @ E4M3.round(w).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, E4M3.round(head) @ E4M3.round(w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, np.einsum("tbo,tbi->oi", head, x), rtol=1e-5, atol=1e-5)


def test_unsupported_product_is_refused():
    net = gluon.rnn.LSTM(4, input_size=3)
    net.initialize()
    amp.convert(net, amp.Policy("mine", product="tf32", high_precision="forward"))
    with pytest.raises(ValueError, match=r"mine: high_precision has no code for RNN .*keep="):
        net(nd.ones((2, 1, 3)))


@pytest.mark.parametrize("given", ["backward", ["forward", "x"], [["x"]], 1, None])
def test_unknown_product_name_is_refused(given):
    with pytest.raises(ValueError, match=r"unknown high_precision\. Valid: forward, data_gradient, "
                                         r"weight_gradient, or a sequence of these\. Received: "):
        amp.Policy("mine", product="tf32", high_precision=given)


@pytest.mark.parametrize("formats", [{}, {"compute": "float16"}, {"compute": "bfloat16"},
                                     {"product": "float16"}, {"compute": "float8_e5m2"}])
def test_high_precision_is_refused_without_rounded_products(formats):
    with pytest.raises(ValueError, match=r"high_precision is for products that round their"):
        amp.Policy("mine", **formats, high_precision="forward")


def test_names_are_sorted_and_policies_compare_equal():
    mine = amp.Policy("mine", product="tf32", high_precision=["weight_gradient", "forward"])
    assert mine.high_precision == ("forward", "weight_gradient")
    assert mine == amp.Policy("mine", product="tf32", high_precision={*mine.high_precision})
    mine = amp.Policy("mine", product="tf32", high_precision="forward")
    assert mine.high_precision == ("forward",)
