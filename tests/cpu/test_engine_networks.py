"""Converted networks on a CPU are bitwise identical for every memory plan and every repeated
backward pass; float32 networks do not change."""
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from gluon_amp.graph.build import build
from gluon_amp.graph.graph import Graph
from halves import as_function, assert_half, run
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn
from mxnet_alone import MXNET_ALONE
from networks import ready, sequence
from processes import printed
from trainers import recorded

pytestmark = pytest.mark.isa

sym = mx.sym
X = sym.var("x")
FLAGS = [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True},
         {"inline_limit": 0}]


class Residual(gluon.HybridBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.stem, self.one, self.two = (nn.Conv2D(16, 3, padding=1) for _ in range(3))
            self.first, self.second = nn.BatchNorm(), nn.BatchNorm()
            self.out = nn.Dense(5)

    def hybrid_forward(self, F, x):
        x = self.stem(x)
        h = F.relu(self.first(self.one(x)))
        return self.out(F.relu(self.second(self.two(h)) + x))


def plain():
    net = sequence(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"),
                   nn.MaxPool2D(), nn.Conv2D(12, 3), nn.LeakyReLU(0.1), nn.GlobalAvgPool2D(),
                   nn.Dropout(0.3), nn.Dense(4))
    return net


def attention_inputs(rng):
    return [nd.array(rng.standard_normal((2, 5, 32))), nd.ones((2, 1, 5))]


# MXNet's Dropout frees its mask in the first backward pass: the attention network is all float16
# here, so that the engine's Dropout runs.
NETS = {"plain": (plain, networks.images(12), "float16"),
        "residual": (Residual, networks.images(9), "float16"),
        "attention": (networks.Encoder, attention_inputs, "pure_float16"),
        "attention in parts": (networks.self_attention, networks.floats(5, 2, 32), "float16"),
        "lstm": (lambda: rnn.LSTM(8, 2, input_size=6, bidirectional=True),
                 networks.floats(5, 2, 6), "float16"),
        "bfloat16": (Residual, networks.images(9), "mixed_bfloat16")}


def converted(name, rng=None, **flags):
    make, inputs, policy = NETS[name]
    mx.random.seed(1)
    np.random.seed(1)
    net = amp.convert(ready(make(), mx.init.Xavier()), policy)
    net.hybridize(**flags)
    inputs = inputs(rng or np.random.default_rng(7))
    net(*inputs)
    return net, inputs


def trained(name, request, flags):
    """Outputs and gradients of three steps with two backward passes each, and statistics."""
    net, inputs = converted(name, **flags)
    parameters = [p for p in net.collect_params().values() if p.grad_req != "null"]
    for parameter in parameters:
        parameter.grad_req = request
    inputs[0].attach_grad(request)
    found = []
    for step in range(3):
        mx.random.seed(step)
        out = recorded(net, *inputs)
        head = nd.array(np.random.default_rng(step).standard_normal(out.shape), dtype=out.dtype)
        found.append(out.asnumpy())
        for retain in (True, False):
            out.backward(head, retain_graph=retain)
            found += [p.grad().asnumpy() for p in parameters] + [inputs[0].grad.asnumpy()]
    return len(parameters) + 1, found + [p.data().asnumpy() for n, p in
                                         net.collect_params().items() if "running" in n]


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("name", NETS)
def test_memory_plans_are_bitwise_identical(name, request_):
    _, expected = trained(name, request_, FLAGS[0])
    for flags in FLAGS[1:]:
        _, found = trained(name, request_, flags)
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("name", NETS)
def test_repeated_backward_of_retained_graph_is_bitwise_identical(name):
    count, found = trained(name, "write", {})
    for step in range(3):
        first = 1 + step * (1 + 2 * count)
        once, twice = found[first:first + count], found[first + count:first + 2 * count]
        assert any(g.any() for g in once)
        for one, other in zip(once, twice):
            assert np.array_equal(one, other)


def test_autograd_grad_matches_backward(rng):
    net, inputs = converted("residual", rng)
    inputs[0].attach_grad()
    weight = net.stem.weight
    results = []
    for step in range(2):
        loss = recorded(lambda: (net(*inputs) ** 2).sum())
        if step == 0:
            results.append(autograd.grad(loss, [inputs[0], weight.data()]))
        else:
            loss.backward()
            results.append([inputs[0].grad, weight.grad()])
    for one, other in zip(*results):
        assert np.array_equal(one.asnumpy(), other.asnumpy())
        assert one.asnumpy().any()


SECOND = ["sigmoid", "exp", "tanh", "sin", "square", "log", "sqrt", "arctan", "reciprocal"]


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_supported_by_mxnet(name, rng):
    """They differ from float32's by the rounding of intermediate values."""
    values = rng.uniform(0.1, 0.9, (3, 4)).astype(np.float16)
    symbol = getattr(sym, name)(X)
    results = []
    for dtype in ("float32", "float16"):
        graph = symbol if dtype == "float32" else \
            build(Graph.read(symbol), {"x": "float16"}).symbol()
        op = as_function(graph)
        x = nd.array(values, dtype=dtype)
        x.attach_grad()
        with autograd.record():
            slope = autograd.grad(op(x), x, create_graph=True, retain_graph=True)[0]
        slope.backward()
        results.append((slope.asnumpy(), x.grad.asnumpy()))
    for wide, half in zip(*results):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, wide, rtol=8e-3, atol=1e-3)


def second_gradients(dtype, arrays, flatten, head):
    """Of a dense layer: the sum of squares of its gradients, and that sum's gradients."""
    arrays = [nd.array(a, dtype=dtype) for a in arrays]
    for a in arrays:
        a.attach_grad()
    with autograd.record():
        y = nd.FullyConnected(*arrays, num_hidden=5, flatten=flatten, no_bias=len(arrays) == 2)
        found = autograd.grad(y.tanh(), arrays if head == "all" else arrays[:1],
                              create_graph=True, retain_graph=True)
        total = sum(g.square().sum() for g in found)
    total.backward()
    return total.asscalar(), [a.grad.asnumpy().astype("float64") for a in arrays]


@pytest.mark.parametrize("head", ["data", "all"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("flatten", [False, True])
def test_second_gradients_of_dense_layers_match_numeric_ones(flatten, bias, head, rng):
    """MXNet 1.9.1 leaves out the gradient with respect to the layer's head gradient."""
    shapes = [(3, 2, 4), (5, 8 if flatten else 4)] + [(5,)] * bias
    arrays = [rng.uniform(-0.5, 0.5, shape) for shape in shapes]
    exact = second_gradients("float64", arrays, flatten, head)[1]
    for array, found in zip(arrays, exact):
        index = tuple(0 for _ in array.shape)
        ends, kept = [], array[index]
        for array[index] in (kept + 1e-4, kept - 1e-4):
            ends.append(second_gradients("float64", arrays, flatten, head)[0])
        array[index] = kept
        assert found[index] == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-5)
    for dtype, share in (("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)):
        for found, one in zip(second_gradients(dtype, arrays, flatten, head)[1], exact):
            assert np.abs(found - one).max() < share * np.abs(one).max()


def test_two_threads_can_call_one_network(rng):
    net, _ = converted("residual", rng)
    inputs = [networks.images(9)(rng) for _ in range(2)]
    expected = [net(*x).asnumpy() for x in inputs]
    start = threading.Barrier(2)

    def work(i):
        start.wait()
        return [np.array_equal(net(*inputs[i]).asnumpy(), expected[i]) for _ in range(50)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[True] * 50] * 2


def trained_on(net, x):
    return recorded(net, x)


@pytest.mark.parametrize("other", [trained_on, lambda net, x: net(x.astype("float16"))],
                         ids=["in training", "on another type"])
def test_thread_can_call_network_during_call_of_another(other, monkeypatch):
    """In another mode, or with data of another type, it runs another graph."""
    out, x = nn.Dense(8, in_units=8), nd.ones((2, 8))
    net = networks.Calling(lambda F, x, out: out(x) * (2 - autograd.is_training()), out)
    net.initialize(mx.init.Xavier())
    amp.convert(net)
    expected, weight = net(x).asnumpy(), out.weight
    take, here = weight.data, threading.current_thread()

    def data(*args):
        if threading.current_thread() is here:
            thread = threading.Thread(target=other, args=(net, x))
            thread.start()
            thread.join()
        return take(*args)

    monkeypatch.setattr(weight, "data", data)
    assert np.array_equal(net(x).asnumpy(), expected)


# ---- float32 is unchanged --------------------------------------------------------------


def test_float32_is_bitwise_unchanged_by_import():
    """Every result has the same bits."""
    printed(MXNET_ALONE + FLOAT32, MXNET_SAFE_ACCUMULATION="1")


FLOAT32 = """
import sys
import numpy as np
import mxnet as mx
from mxnet import autograd, gluon, nd

def trained():
    mx.random.seed(1)
    np.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(16, 3, padding=1), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"),
            gluon.nn.Dropout(0.2), gluon.nn.Dense(7), gluon.nn.LayerNorm(), gluon.nn.Dense(4))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    x = nd.random.normal(shape=(8, 3, 9, 9))
    found = []
    for _ in range(3):
        with autograd.record():
            out = net(x)
            total = out
            for k in range(12):
                total = total + out * k
            loss = nd.add_n(total, out, out * 2, nd.softmax(out)).sum()
        loss.backward()
        trainer.step(8)
        found += [loss.asnumpy(), *(p.data().asnumpy() for p in net.collect_params().values())]
    return found

assert "gluon_amp" not in sys.modules
before = trained()
import gluon_amp
assert gluon_amp.cpu.library.load()
for one, other in zip(before, trained()):
    assert np.array_equal(one, other)
"""


# ---- sums of gradients -----------------------------------------------------------------


def bfloat16(x):
    bits = np.float32(x).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


FACTORS = [1, -1, 2, -2, 4, -4, 8, -8, 0.5, -0.5, 0.25]  # equal readers would be merged


@pytest.mark.parametrize("readers", [2, 3, 7])
def test_sum_of_gradients_is_rounded_before_it_is_read(readers, rng):
    """MXNet sums the gradients of a tensor's readers, and adds more than eight one by one."""
    h = X * 3
    symbol = sym.Group([h * factor for factor in FACTORS[:readers]])
    heads = [bfloat16(rng.integers(128, 256, 300) / 128 * 2.0 ** -rng.integers(0, 5, 300))
             for _ in range(readers)]
    arrays = {"x": np.ones(300, np.float16)}
    total = np.zeros(300, np.float32)  # exact: the heads have few bits
    for head, factor in zip(heads, FACTORS):
        total += head * np.float32(factor)
    _, gradients = run(symbol, arrays, [h.astype(np.float16) for h in heads])
    assert_half(gradients["x"], total.astype(np.float16).astype(float) * 3)


def test_results_are_reproducible_in_another_process():
    """Results do not depend on addresses, or on previous contents of memory."""
    code = f"import sys; sys.path[:0] = {[str(path) for path in Path(__file__).parents[:2]]!r}\n" \
           "import gluon_amp, hashlib, test_engine_networks as nets\n" \
           "found = nets.trained('residual', 'write', {})[1]\n" \
           "print(hashlib.sha256(b''.join(a.tobytes() for a in found)).hexdigest())"
    here = hashlib.sha256(b"".join(a.tobytes() for a in trained("residual", "write", {})[1]))
    assert printed(code, MALLOC_PERTURB_="165").split()[-1] == here.hexdigest()
