"""Training in bfloat16: optimizers, several devices, Module, X-ray; refused policies."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu.bfloat16 import is_bfloat16
from halves import as_bfloat16
from mxnet import nd
from mxnet.gluon import nn
from networks import ready, sequence
from trainers import fit, recorded, values, with_trainer

pytestmark = pytest.mark.isa

POLICIES = ["bfloat16", "mixed_bfloat16"]
def network(policy):
    net = ready(sequence(nn.Conv2D(16, 3, in_channels=3), nn.BatchNorm(in_channels=16),
                         nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Dense(4, in_units=16)),
                mx.init.Xavier())
    amp.convert(net, policy)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def batch(rng):
    label = rng.integers(0, 4, 16)
    data = rng.standard_normal((16, 3, 6, 6)) + label[:, None, None, None]
    return nd.array(data), nd.array(label)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_network_learns_without_loss_scale(policy, name, rng):
    net, (data, label) = network(policy), batch(rng)
    _, trainer = with_trainer(net, name, {"learning_rate": 0.02})
    losses = fit(net, trainer, [(data, label)] * 30)
    assert trainer.skipped == 0
    assert losses[-1] < 0.5 * losses[0]
    assert is_bfloat16(net[0].weight.dtype) == (policy == "bfloat16")


def test_gradients_of_two_devices_are_summed_in_float32():
    devices = [mx.cpu(0), mx.cpu(1)]
    net = ready(nn.Dense(1, in_units=2, use_bias=False), mx.init.One(), ctx=devices)
    _, trainer = with_trainer(amp.convert(net, "bfloat16"), "sgd", {"learning_rate": 1.0})
    numbers = [np.float32([[1, 3]]), np.float32([[2.0 ** -8, 2.0 ** -7]])]
    trainer.backward(recorded(
        lambda: [net(nd.array(x, ctx=d)).sum() for x, d in zip(numbers, devices)]))
    trainer.step(1)
    expected = as_bfloat16(1 - as_bfloat16(numbers[0] + numbers[1]))
    assert np.array_equal(net.weight.data(devices[0]).asnumpy(), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_module_learns(policy, rng):
    data, label = (x.asnumpy() for x in batch(rng))
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4)
    symbol = amp.convert_symbol(mx.sym.SoftmaxOutput(symbol, name="softmax"), policy)
    module = amp.Module(symbol)
    batches = mx.io.NDArrayIter(data.reshape(16, -1), label, 8)
    module.fit(batches, num_epoch=20, initializer=mx.init.Xavier(),
               optimizer_params={"learning_rate": 0.05})
    assert dict(module.score(batches, "acc"))["accuracy"] > 0.9


@pytest.mark.parametrize("roles", [
    {"parameter": "bfloat16", "compute": "float16"},
    {"parameter": "float16", "compute": "bfloat16"}])
def test_parameters_of_another_type_are_cast_on_use(roles, rng):
    net, trainer = with_trainer(network(amp.Policy("mine", **roles)), "sgd")
    loss, = fit(net, trainer, [batch(rng)])
    assert np.isfinite(loss)
    assert all(np.isfinite(weight).all() for weight in values(net))
