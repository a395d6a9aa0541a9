"""Tensors between layers have oneDNN's layout if this processor's bfloat16 convolutions read and
write it. Results are bitwise identical to those with the plain layout."""
import os

import gluon_amp as amp
import numpy as np
import pytest
from cases import cases
from gluon_amp._mxnet import mx
from gluon_amp.cpu import library
from gluon_amp.graph.build import build
from gluon_amp.graph.graph import Graph
from gluon_amp.policy import POLICIES
from mxnet import autograd, nd
from mxnet.gluon import nn
from processes import run_tests

pytestmark = [pytest.mark.sanitize, pytest.mark.isa,
              pytest.mark.skipif(not library.keeps_layout(),
                                 reason="needs AVX512_BF16 without AMX")]


def convolution(channels, kernel=3, stride=1, **kwargs):
    """A convolution with a batch norm and a relu."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels, kernel, stride, kernel // 2, use_bias=False, **kwargs),
            nn.BatchNorm(), nn.Activation("relu"))
    return net


class Residual(nn.HybridSequential):
    def hybrid_forward(self, F, x):
        return F.relu(x + super().hybrid_forward(F, x))


class Dense(nn.HybridSequential):
    def hybrid_forward(self, F, x):
        for layer in self._children.values():
            x = F.concat(x, layer(x), dim=1)
        return x


class Heads(nn.HybridSequential):
    """A network that also returns the result of each child."""
    def hybrid_forward(self, F, x):
        made = []
        for layer in self._children.values():
            x = layer(x)
            made.append(x)
        return made


def of(cls, *layers):
    net = cls()
    net.add(*layers)
    return net


def residual():
    return of(nn.HybridSequential, convolution(16, 5, 2), nn.MaxPool2D(3, 2, 1),
              of(Residual, convolution(32, 1), convolution(16)), of(Residual, convolution(16)),
              convolution(48, 1, 2), nn.GlobalAvgPool2D(), nn.Dense(4))


def depthwise():
    return of(nn.HybridSequential, convolution(32, 3, 2), convolution(32, groups=32),
              nn.HybridLambda(lambda F, x: 1 - (F.clip(x, 0, 6) - 0.5) / (x * x + 1)),
              convolution(24, 1),
              convolution(64, 1), convolution(64, groups=4), nn.LeakyReLU(0.1), convolution(16, 1),
              nn.AvgPool2D(2), nn.Flatten())


def dense():
    return of(nn.HybridSequential, convolution(32),
              of(Dense, convolution(16), convolution(32, 1), convolution(16)),
              nn.AvgPool2D(2), of(Dense, convolution(16), convolution(20)), nn.Conv2D(10, 1))


def levels():
    return of(nn.HybridSequential, convolution(16), nn.MaxPool2D(), convolution(32),
              nn.Conv2DTranspose(16, 2, 2), nn.BatchNorm(),
              nn.Conv2DTranspose(32, 4, 2, 1, use_bias=False), convolution(16), nn.Conv2D(2, 1))


def heads():
    return of(Heads, convolution(16), of(Residual, convolution(16)), nn.Dropout(0.0),
              convolution(32, 3, 2), nn.Conv2D(16, 3, activation="sigmoid"))


def norms():
    return of(nn.HybridSequential, nn.Conv2D(32, 1), nn.BatchNorm(scale=False),
              nn.BatchNorm(use_global_stats=True), nn.Conv2D(16, 3), nn.BatchNorm(),
              nn.Conv2D(16, 1))


NETWORKS = {f.__name__: f for f in (residual, depthwise, dense, levels, heads, norms)}
LAYOUT = "GLUON_AMP_LAYOUT"


def initialized(make, policy="mixed_bfloat16"):
    mx.random.seed(3)
    np.random.seed(3)
    net = make()
    net.initialize(mx.init.Xavier())
    amp.convert(net, policy)
    return net


def as_list(made):
    return list(made) if isinstance(made, (list, tuple)) else [made]


def numbers(make, data, request="write", steps=2, policy="mixed_bfloat16", **flags):
    """All results of training and prediction."""
    net = initialized(make, policy)
    net.hybridize(**flags)
    x = nd.array(data)
    x.attach_grad(request)
    rng, made = np.random.default_rng(7), []
    for _ in range(steps):
        with autograd.record():
            out = as_list(net(x))
        if request == "add":
            net.collect_params(".*(weight|bias|gamma|beta)").setattr("grad_req", "add")
        autograd.backward(out, [nd.array(rng.standard_normal(o.shape)).astype(o.dtype)
                                for o in out])
        made += [*out, x.grad, *(p.grad() for p in net.collect_params().values()
                                 if p.grad_req != "null")]
        made = [a.copy() for a in made]
    made += [*as_list(net(x)), *(p.data() for p in net.collect_params().values())]
    return [a.asnumpy() for a in made]


def assert_same(monkeypatch, *args, **kwargs):
    made = []
    for value in ("off", "on"):
        monkeypatch.setenv(LAYOUT, value)
        made.append(numbers(*args, **kwargs))
    for plain, converted in zip(*made):
        np.testing.assert_array_equal(plain.view(np.uint32), converted.view(np.uint32))


def in_layout(net, *shape):
    """Operators with tensors in oneDNN's layout in the graph of a network."""
    net.hybridize()
    net(nd.zeros(shape))
    graph, types = net.mixed_graph(["float32"])
    return [n.op for n in build(graph, types, POLICIES["mixed_bfloat16"], layouts=True).nodes()
            if "layouts" in n.settings]


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True},
                                   {"static_alloc": True, "static_shape": True}],
                         ids=["dynamic", "static memory", "static"])
@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("name", NETWORKS)
def test_network_is_bitwise_identical(name, request_, flags, rng, monkeypatch):
    assert_same(monkeypatch, NETWORKS[name], rng.standard_normal((2, 3, 24, 20)), request_, **flags)


def test_bfloat16_parameters(rng, monkeypatch):
    assert_same(monkeypatch, residual, rng.standard_normal((2, 3, 24, 20)), policy="bfloat16")


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 5, 7), (9, 6, 6), (40, 4, 5), (2, 3, 3),
                                   (20, 14, 14), (2, 70, 61), (1, 1, 40), (3, 1, 1)], ids=str)
def test_images_of_each_size(shape, rng, monkeypatch):
    images, height, width = shape
    def make():
        return of(nn.HybridSequential, nn.Conv2D(32, 1), nn.BatchNorm(), nn.Activation("relu"),
                  nn.Conv2D(16, 1), nn.BatchNorm(), nn.Conv2D(16, 1))
    assert_same(monkeypatch, make, 3 + rng.standard_normal((images, 5, height, width)))


@pytest.mark.parametrize("axes", [1, 3])
def test_1d_and_3d_convolutions(axes, rng, monkeypatch):
    convolve, pool = {1: (nn.Conv1D, nn.MaxPool1D), 3: (nn.Conv3D, nn.AvgPool3D)}[axes]
    def make():
        return of(nn.HybridSequential, convolve(16, 3), nn.BatchNorm(), pool(2), convolve(32, 2),
                  nn.Activation("tanh"), convolve(16, 1))
    assert_same(monkeypatch, make, rng.standard_normal((3, 4, *[10, 9, 8][:axes])))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e-40])
def test_nonfinite_and_subnormal_numbers(value, rng, monkeypatch):
    data = rng.standard_normal((2, 3, 24, 20))
    data[1, 2, 5, 6] = value
    assert_same(monkeypatch, residual, data)


def test_layers_between_convolutions_have_the_layout():
    made = in_layout(initialized(residual), 2, 3, 24, 20)
    counts = {op: made.count(op) for op in ("Convolution", "BatchNorm", "elemwise_add")}
    assert counts == {"Convolution": 5, "BatchNorm": 5, "elemwise_add": 2}
    assert {"Pooling", "Activation", "relu"} <= set(made)
    assert "Deconvolution" in in_layout(initialized(levels), 2, 3, 24, 20)
    assert "Concat" in in_layout(initialized(dense), 2, 3, 24, 20)


def test_outputs_have_plain_layout():
    net = initialized(heads)
    in_layout(net, 2, 3, 24, 20)
    graph, types = net.mixed_graph(["float32"])
    built: Graph = build(graph, types, POLICIES["mixed_bfloat16"], layouts=True)
    for output in built.outputs:
        _, outputs = output.node.settings.get("layouts", "0 0").split()
        assert outputs[output.output] == "0"


@pytest.mark.parametrize(("threads", "workers"), cases([(2, 4)], [(2, 1), (1, 4)]))
def test_numbers_of_threads_and_workers(threads, workers, pytestconfig):
    if os.environ.get("MXNET_CPU_WORKER_NTHREADS"):
        pytest.skip("this is the inner run")
    done = run_tests(pytestconfig, __file__, "-k", "network_is_bitwise or each_size",
                     OMP_NUM_THREADS=str(threads), MXNET_CPU_WORKER_NTHREADS=str(workers))
    assert done.returncode == 0, done.stdout
