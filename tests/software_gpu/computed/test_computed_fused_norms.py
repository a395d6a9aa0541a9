"""Batch norms with a ReLU, and with an addition, give the results of separate operators."""
import os

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.graph.build import cached_op
from gluon_amp.graph.graph import Graph
from gluon_amp.graph.norms import fuse_norms

pytestmark = pytest.mark.skipif(os.environ["RECORDING_GPU_CUDNN"] < "9",
                                reason="norms are fused with cuDNN 9: newer_gpus.py")
SHAPE = (2, 5, 4, 8)
NAMES = ("gamma", "beta", "mean", "variance")


def graph_of(added):
    """A graph with a batch norm and a ReLU; `added`: the place of the other term, or None."""
    norm = mx.sym.BatchNorm(mx.sym.var("x"), *map(mx.sym.var, NAMES), axis=3, fix_gamma=False)
    if added is not None:
        terms = [norm, mx.sym.tanh(mx.sym.var("z"))]
        norm = mx.sym.elemwise_add(*(terms if added else terms[::-1]))
    return Graph.read(mx.sym.relu(norm))


def types_of(graph):
    return {name: "float32" if name in NAMES else "float16" for name in graph.variables()}


def results(graph, requests="write", training=True, shape=SHAPE):
    """Output, moving averages and gradients, on a GPU."""
    random, gpu = np.random.RandomState(0), mx.gpu(0)
    of = {name: mx.nd.array(random.rand(shape[-1]) + 0.5, ctx=gpu) for name in NAMES}
    of.update((name, mx.nd.array(random.randn(*shape), dtype="float16", ctx=gpu))
              for name in ("x", "z"))
    inputs = [of[name] for name in graph.variables()]
    wanted = [array for name, array in of.items() if name in graph.variables()
              and name not in ("mean", "variance")]
    for array in wanted:
        array.attach_grad(requests)
        array.grad[:] = 1
    op, _ = cached_op(graph.symbol(), graph.variables(), {}, [("static_alloc", True)])
    head = mx.nd.array(random.randn(*shape), dtype="float16", ctx=gpu)
    with mx.autograd.record(train_mode=training):
        y = op(*inputs)
    y.backward(head, train_mode=training)
    return [array.asnumpy().astype("float32")
            for array in (y, of["mean"], of["variance"], *(array.grad for array in wanted))]


def fused(added):
    graph = graph_of(added)
    made = fuse_norms(graph, types_of(graph))
    assert [node.op for node in made.nodes() if not node.is_variable and node.op != "tanh"] \
        == ["_gluon_amp_norm_relu"]
    return made


@pytest.mark.parametrize("added", [None, 0, 1])
@pytest.mark.parametrize(("requests", "training", "channels"), [
    ("write", True, 8), ("write", False, 8), ("add", True, 8), ("write", True, 6)])
def test_results_are_those_of_separate_operators(added, requests, training, channels, calls):
    shape = (2, 5, 4, channels)
    ours = results(fused(added), requests, training, shape)
    functions = {call.name for call in calls()
                 if call.name.startswith(("cudnnBatchNorm", "cudnnActivation"))}
    theirs = results(graph_of(added), requests, training, shape)
    for one, other in zip(ours, theirs):
        np.testing.assert_allclose(one, other, rtol=4e-3, atol=4e-3)
    if requests == "write" and training and channels == 8:
        assert functions == {"cudnnBatchNormalizationForwardTrainingEx",
                             "cudnnBatchNormalizationBackwardEx"}
    else:
        assert "cudnnActivationBackward" in functions


def test_two_forward_passes_before_their_backward_passes():
    graph, gpu = fused(None), mx.gpu(0)
    op, _ = cached_op(graph.symbol(), graph.variables(), {})
    gradients = []
    for together in (False, True):
        random = np.random.RandomState(0)
        of = {name: mx.nd.array(random.rand(8) + 0.5, ctx=gpu) for name in NAMES}
        data = [mx.nd.array(random.randn(*SHAPE), dtype="float16", ctx=gpu) for _ in range(2)]
        outputs = []
        for x in data:
            x.attach_grad()
            with mx.autograd.record():
                outputs.append(op(*({**of, "x": x}[name] for name in graph.variables())))
            if not together:
                outputs.pop().backward()
        if together:
            mx.autograd.backward(outputs)
        gradients.append([x.grad.asnumpy() for x in data])
    assert np.array_equal(*gradients)


@pytest.mark.parametrize("change", [
    lambda y: y, lambda y: mx.sym.tanh(y), lambda y: mx.sym.Group([y, mx.sym.relu(y)]),
    lambda y: mx.sym.relu(mx.sym.elemwise_add(y, y)), lambda y: mx.sym.relu(y) + y])
def test_other_readers_of_a_norm_keep_it(change):
    norm = mx.sym.BatchNorm(mx.sym.var("x"), *map(mx.sym.var, NAMES), axis=3, fix_gamma=False)
    graph = Graph.read(change(norm))
    kept = [node.op for node in fuse_norms(graph, types_of(graph)).nodes()]
    assert kept == [node.op for node in graph.nodes()]


@pytest.mark.parametrize("settings", [
    {"axis": 1}, {"fix_gamma": True}, {"use_global_stats": True}, {"cudnn_off": True}])
def test_other_norms_stay(settings):
    settings = {"axis": 3, "fix_gamma": False, **settings}
    norm = mx.sym.BatchNorm(mx.sym.var("x"), *map(mx.sym.var, NAMES), **settings)
    graph = Graph.read(mx.sym.relu(norm))
    assert "BatchNorm" in [node.op for node in fuse_norms(graph, types_of(graph)).nodes()]


class Residual(mx.gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.before, self.norms = mx.gluon.nn.Conv2D(8, 1), []
            for _ in range(2):
                self.norms.append(mx.gluon.nn.BatchNorm())
                self.register_child(self.norms[-1])

    def hybrid_forward(self, F, x):
        x = self.before(x)
        y = F.relu(self.norms[0](x))
        return F.relu(x + self.norms[1](y))


def test_converted_network_trains_and_predicts_with_fused_norms(monkeypatch, calls):
    data = np.random.RandomState(0).randn(2, 3, 4, 4)
    results, found = [], {}
    for layout in ("off", "on"):  # off: channels-first, without fused norms
        monkeypatch.setenv("GLUON_AMP_LAYOUT", layout)
        mx.random.seed(0)
        net = Residual()
        net.initialize(mx.init.Xavier(), ctx=mx.gpu(0))
        amp.convert(net)
        net.hybridize(static_alloc=True)
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        x = mx.nd.array(data, ctx=mx.gpu(0))
        losses = []
        for _ in range(3):
            with mx.autograd.record():
                loss = (net(x).astype("float32") ** 2).mean()
            trainer.backward(loss)
            trainer.step(1)
            losses.append(loss.asscalar())
        results.append([*losses, net(x).astype("float32").mean().asscalar()])
        found[layout] = any(call.name.endswith("TrainingEx") for call in calls())
    assert found == {"off": False, "on": True}
    np.testing.assert_allclose(*results, rtol=2e-3)
