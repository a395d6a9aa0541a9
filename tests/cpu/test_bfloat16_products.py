"""bfloat16 products by processor instructions and by widening to float32 differ only in the order
of sums: by at most one unit of bfloat16, unless large numbers cancel."""
import os
from collections import Counter
from pathlib import Path

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from halves import as_bfloat16, bfloat16_ulps, generic_code
from mxnet import autograd, nd
from mxnet.gluon import nn
from processes import printed, run_tests
from trainers import recorded

pytestmark = [pytest.mark.sanitize, pytest.mark.isa]

CONVOLUTIONS = {
    "1d": ((3, 16, 20), (32, 16, 3), {}), "2d": ((2, 16, 9, 11), (32, 16, 3, 3), {"pad": (1, 1)}),
    "3d": ((2, 16, 6, 7, 5), (16, 16, 3, 3, 3), {"pad": (1, 0, 1)}),
    "strides": ((2, 32, 11, 12), (16, 32, 3, 3), {"stride": (2, 2), "pad": (1, 1)}),
    "dilated": ((2, 16, 13, 13), (16, 16, 3, 3), {"dilate": (2, 2)}),
    "1x1": ((2, 64, 7, 7), (16, 64, 1, 1), {}), "stem": ((2, 3, 20, 20), (16, 3, 7, 7),
                                                        {"stride": (2, 2), "pad": (3, 3)}),
    "1x1, strides": ((2, 32, 7, 6), (16, 32, 1, 1), {"stride": (2, 2)}),
    "few places": ((2, 32, 3, 3), (128, 32, 3, 3), {"pad": (1, 1)}),
    "few places, strides": ((1, 16, 9, 8), (64, 16, 3, 2),
                            {"stride": (2, 3), "dilate": (2, 1), "pad": (1, 0)}),
    "padding only": ((4, 64, 1, 1), (128, 64, 3, 3), {"stride": (2, 2), "pad": (1, 1)}),
    "odd channels": ((2, 5, 8, 8), (7, 5, 3, 3), {}),
    "grouped": ((2, 32, 8, 8), (32, 16, 3, 3), {"num_group": 2, "pad": (1, 1)}),
    "depthwise": ((2, 32, 8, 8), (32, 1, 3, 3), {"num_group": 32, "pad": (1, 1)}),
}


FLAGS = set(Path("/proc/cpuinfo").read_text().split())
ISAS = {"AVX2": None, "AVX512_CORE": None, "AVX512_CORE_BF16": "avx512_bf16",
        "AVX512_CORE_AMX": "amx_bf16"}  # DNNL_MAX_CPU_ISA: the processor's flag


@pytest.mark.parametrize("isa", ISAS)
def test_products_use_processor_instructions_if_available(isa):
    lines = printed("""
import gluon_amp, mxnet as mx
from mxnet import autograd, nd
def low(*shape):
    made = nd.ones(shape).astype("bfloat16")
    made.attach_grad()
    return made
x, y = low(2, 16, 8, 8), low(2, 16, 8)
w = low(16, 16, 3, 3)
for call in (lambda: nd.Convolution(x, w, kernel=(3, 3), num_filter=16, no_bias=True),
             lambda: nd.Deconvolution(x, w, kernel=(3, 3), num_filter=16, no_bias=True),
             lambda: nd.FullyConnected(x, low(16, 1024), num_hidden=16, no_bias=True),
             lambda: nd.dot(low(5, 6), low(6, 7)),
             lambda: nd.batch_dot(y, y, transpose_b=True)):
    with autograd.record():
        out = call()
    out.backward()
nd.waitall()
""", DNNL_VERBOSE="1", DNNL_MAX_CPU_ISA=isa, GLUON_AMP_ISA="")
    made = [line.split(",")[3:5] for line in lines.splitlines()
            if ",exec," in line and ",reorder," not in line and "bf16" in line]
    assert Counter(kind for kind, _ in made) == (
        Counter(convolution=6, inner_product=3, matmul=6) if ISAS[isa] in FLAGS else {})
    assert all(("amx" in implementation) == ("AMX" in isa) for _, implementation in made)


@pytest.mark.parametrize("isa", [isa for isa, flag in ISAS.items() if flag])
def test_each_instruction_set(isa, pytestconfig):
    if os.environ.get("DNNL_MAX_CPU_ISA"):
        pytest.skip("this is the inner run")
    if ISAS[isa] not in FLAGS:
        pytest.skip(f"this processor has no {ISAS[isa]}")
    done = run_tests(pytestconfig, __file__, "-k", "not instruction", DNNL_MAX_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout


def made(call, arrays, request, rng):
    """The result and the gradients, which accumulate on ones for "add"."""
    values = [nd.array(a).astype("bfloat16") for a in arrays]
    for value in values:
        value.attach_grad(request)
        value.grad[:] = int(request == "add")
    out = recorded(call, *values)
    out.backward(nd.array(rng.standard_normal(out.shape)).astype("bfloat16"))
    return [out.asnumpy(), *(value.grad.asnumpy() for value in values)]


def assert_alike(call, arrays, rng, request="write"):
    arrays = [as_bfloat16(a) for a in arrays]
    seed = rng.integers(2 ** 32)
    ours = made(call, arrays, request, np.random.default_rng(seed))
    with generic_code():
        theirs = made(call, arrays, request, np.random.default_rng(seed))
    for one, other in zip(ours, theirs):
        large = np.abs(other) > 0.01 * np.sqrt(np.mean(other ** 2))
        assert bfloat16_ulps(one, other)[large].max(initial=0) <= 1
        np.testing.assert_allclose(one, other, rtol=2 ** -7, atol=2e-4 * np.abs(other).max())


def test_gradient_is_zero_for_weights_that_read_padding_only():
    """oneDNN leaves these gradients uninitialized."""
    x, w = nd.ones((4, 64, 1, 1), dtype="bfloat16"), nd.ones((128, 64, 3, 3), dtype="bfloat16")
    w.attach_grad()
    freed = [nd.full(300_000, 1e30) for _ in range(6)]  # memory that the backward pass reuses
    nd.waitall()
    del freed
    with autograd.record():
        out = nd.Convolution(x, w, kernel=(3, 3), stride=(2, 2), pad=(1, 1), num_filter=128,
                             no_bias=True)
    out.backward()
    gradient = w.grad.asnumpy()
    assert (gradient[:, :, 1, 1] == 4).all()
    assert gradient.sum() == 4 * 128 * 64


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, request_, bias, rng):
    x, w, attributes = CONVOLUTIONS[name]
    arrays = [rng.standard_normal(shape) for shape in (x, w, *[(w[0],)] * bias)]
    assert_alike(lambda *a: nd.Convolution(*a, kernel=w[2:], num_filter=w[0], no_bias=not bias,
                                           **attributes), arrays, rng, request_)


DECONVOLUTIONS = {
    "1d": ((3, 16, 20), (16, 32, 3), {}),
    "2d": ((2, 16, 9, 11), (16, 32, 4, 4), {"stride": (2, 2), "pad": (1, 1)}),
    "3d": ((2, 16, 3, 4, 5), (16, 8, 3, 3, 3), {"stride": (1, 2, 1)}),
    "dilated": ((2, 16, 7, 7), (16, 16, 3, 3), {"dilate": (2, 2)}),
    "adjusted": ((2, 16, 7, 6), (16, 24, 3, 3), {"stride": (2, 2), "pad": (1, 1), "adj": (1, 1)}),
    "odd channels": ((2, 5, 8, 8), (5, 7, 3, 3), {}), "to two": ((2, 16, 8, 8), (16, 2, 4, 4), {}),
    "grouped": ((2, 32, 6, 6), (32, 8, 3, 3), {"num_group": 2}),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("name", DECONVOLUTIONS)
def test_deconvolutions(name, request_, bias, rng):
    x, w, attributes = DECONVOLUTIONS[name]
    outputs = w[1] * attributes.get("num_group", 1)
    arrays = [rng.standard_normal(shape) for shape in (x, w, *[(outputs,)] * bias)]
    assert_alike(lambda *a: nd.Deconvolution(*a, kernel=w[2:], num_filter=outputs,
                                             no_bias=not bias, **attributes), arrays, rng, request_)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("shape", [(5, 7, 3), (64, 32, 48), (1, 100, 17), (300, 16, 1)])
def test_dense_layers(shape, request_, bias, rng):
    rows, wide, high = shape
    arrays = [rng.standard_normal(s) for s in ((rows, wide), (high, wide), *[(high,)] * bias)]
    assert_alike(lambda *a: nd.FullyConnected(*a, num_hidden=high, no_bias=not bias), arrays, rng,
                 request_)


def test_dense_layer_along_last_axis(rng):
    arrays = [rng.standard_normal(s) for s in ((2, 3, 8), (4, 8), (4,))]
    assert_alike(lambda *a: nd.FullyConnected(*a, num_hidden=4, flatten=False), arrays, rng)


@pytest.mark.parametrize("a", [False, True])
@pytest.mark.parametrize("b", [False, True])
@pytest.mark.parametrize("name", ["dot", "batch_dot"])
@pytest.mark.parametrize("request_", ["write", "add"])
def test_matrix_products(name, a, b, request_, rng):
    first, second = ((9, 5)[::-1] if a else (9, 5)), ((5, 13)[::-1] if b else (5, 13))
    batch = (4,) * (name == "batch_dot")
    arrays = [rng.standard_normal(batch + shape) for shape in (first, second)]
    assert_alike(lambda x, y: getattr(nd, name)(x, y, transpose_a=a, transpose_b=b), arrays, rng,
                 request_)


@pytest.mark.parametrize(("call", "shapes", "places"), [
    (lambda *a: nd.Convolution(*a, kernel=(3, 3), num_filter=16),
     ((2, 16, 8, 8), (16, 16, 3, 3), (16,)), 72),
    (lambda *a: nd.FullyConnected(*a, num_hidden=16), ((5, 4), (16, 4), (16,)), 5)])
def test_gradient_of_bias_alone(call, shapes, places, rng):
    x, w, b = (nd.array(rng.standard_normal(s)).astype("bfloat16") for s in shapes)
    b.attach_grad()
    y = recorded(call, x, w, b)
    y.backward(nd.ones(y.shape).astype("bfloat16"))
    assert b.grad.asnumpy().tolist() == [places] * 16


def test_product_with_empty_axis(rng):
    with mx.util.np_shape(True):
        x = nd.zeros((0, 4)).astype("bfloat16")
        assert nd.dot(x, nd.ones((4, 3)).astype("bfloat16")).shape == (0, 3)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("make", [
    lambda: nn.Dense(512, in_units=512, use_bias=False),
    lambda: nn.Conv2D(512, 1, in_channels=512, use_bias=False)], ids=["dense", "convolution"])
def test_result_can_overwrite_input(make, policy, rng):
    """Static graphs plan memory so for layers with as many outputs as inputs."""
    net = nn.HybridSequential()
    for _ in range(3):
        net.add(make())
    mx.random.seed(1)
    net.initialize(mx.init.Normal(0.04))
    x = nd.array(rng.standard_normal((6, 512, 1, 1)[:2 if isinstance(net[0], nn.Dense) else 4]))
    x.attach_grad()
    found = []
    for convert in (False, True):
        if convert:
            amp.convert(net, policy)
        net.hybridize(static_alloc=True, static_shape=True)
        y = recorded(net, x)
        y.backward()
        found.append([y.asnumpy(), net(x).asnumpy(), x.grad.asnumpy()])
    for exact, ours in zip(*found):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=0.02 * np.abs(exact).max())
