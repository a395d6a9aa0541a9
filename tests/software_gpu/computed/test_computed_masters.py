"""Master weights, averages of weights and gradient norms on a GPU match those on a CPU."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn

CPU, GPU, GPUS = [mx.cpu()], [mx.gpu(0)], [mx.gpu(0), mx.gpu(1)]


def train(contexts, optimizer, tmp_path):
    """Trains four steps; returns master weights, averages, norms, and weights after a block."""
    mx.random.seed(1)
    net = nn.HybridSequential()
    net.add(nn.Dense(6, in_units=4, use_bias=False), nn.BatchNorm(in_channels=6),
            nn.Dense(2, in_units=6))
    net.initialize(mx.init.Xavier(), ctx=contexts)
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.01},
                          loss_scale=128)
    averaged = amp.AveragedWeights(trainer, 0.5)
    norms = []
    data = nd.array(np.random.RandomState(0).normal(size=(8, 4)))
    for _ in range(4):
        with autograd.record():
            losses = [net(part.as_in_context(context)).square().sum() for part, context in zip(
                [data[i::len(contexts)] for i in range(len(contexts))], contexts)]
        trainer.backward(losses)
        trainer.step(8)
        norms.append(trainer.gradient_norm)
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    masters = [trainer.master(p).asnumpy() for p in trained]
    before = [[a.asnumpy() for a in p.list_data()] for p in trained]
    with averaged:
        net.save_parameters(str(tmp_path / "net.params"), masters=trainer)
        inside = [trainer.master(p).asnumpy() for p in trained]
    averages = [averaged.value(p).asnumpy() for p in trained]
    assert all(np.array_equal(a, b) for a, b in zip(inside, averages))
    for p, arrays in zip(trained, before):
        assert all(np.array_equal(a, b.asnumpy()) for a, b in zip(arrays, p.list_data()))
    again = [trainer.master(p).asnumpy() for p in trained]
    assert all(np.array_equal(a, b) for a, b in zip(masters, again))
    return masters, averages, norms


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("contexts", [GPU, GPUS], ids=["one", "two"])
def test_masters_averages_and_norms_match_the_cpu(contexts, optimizer, tmp_path):
    expected = train(CPU, optimizer, tmp_path) if len(contexts) == 1 else None
    masters, averages, norms = train(contexts, optimizer, tmp_path)
    assert {a.dtype for a in masters + averages} == {np.dtype("float32")}
    assert np.isfinite(norms).all()
    if expected:
        for mine, theirs in zip(masters + averages, expected[0] + expected[1]):
            np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=2e-3)
        np.testing.assert_allclose(norms, expected[2], rtol=2e-2)
