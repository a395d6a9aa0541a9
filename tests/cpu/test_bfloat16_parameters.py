"""Float32 parameters of convolutions and dense layers with bfloat16 data: the weight is rounded
when it is read; biases and gradients of parameters are not rounded."""
import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from halves import as_bfloat16, bfloat16_ulps, generic_code
from mxnet import nd
from mxnet.gluon import nn
from networks import ready, sequence
from trainers import recorded

pytestmark = [pytest.mark.sanitize, pytest.mark.isa]

LAYERS = {
    "conv": (lambda: nn.Conv2D(32, 3, padding=1, in_channels=16), (4, 16, 9, 9)),
    "1x1, no bias": (lambda: nn.Conv2D(16, 1, in_channels=32, use_bias=False), (3, 32, 5, 5)),
    "stem": (lambda: nn.Conv2D(16, 7, 2, 3, in_channels=3), (2, 3, 20, 20)),
    "conv1d": (lambda: nn.Conv1D(16, 3, in_channels=16), (2, 16, 12)),
    "conv3d": (lambda: nn.Conv3D(8, 3, in_channels=4), (2, 4, 5, 5, 5)),
    "grouped": (lambda: nn.Conv2D(32, 3, groups=2, in_channels=32), (2, 32, 8, 8)),
    "depthwise": (lambda: nn.Conv2D(32, 3, groups=32, in_channels=32), (2, 32, 8, 8)),
    "odd channels": (lambda: nn.Conv2D(7, 3, in_channels=5), (2, 5, 8, 8)),
    "few places": (lambda: nn.Conv2D(128, 3, padding=1, in_channels=32), (1, 32, 2, 2)),
    "dense": (lambda: nn.Dense(24, in_units=40), (6, 40)),
    "dense of few rows": (lambda: nn.Dense(1024, in_units=1024), (2, 1024)),
    "dense of many rows": (lambda: nn.Dense(8, in_units=64, use_bias=False), (20000, 64)),
    "last axis": (lambda: nn.Dense(16, in_units=8, flatten=False), (3, 5, 8)),
}


def layer(make):
    mx.random.seed(5)
    net = ready(make(), mx.init.Normal(0.3))
    if net.bias is not None:  # one that is exact in bfloat16
        net.bias.set_data(nd.array(as_bfloat16(np.linspace(-1, 1, net.bias.shape[0]))))
    return net


def trained(net, x, head, request="write"):
    """The result, and the gradients of data and parameters."""
    x = x.copy()
    x.attach_grad()
    params = list(net.collect_params().values())
    for param in params:
        param.grad_req = request
        param.data().grad[:] = int(request == "add")
    y = recorded(net, x)
    y.backward(head)
    return [y.asnumpy(), x.grad.asnumpy(), *(param.grad().asnumpy() for param in params)]


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_weight_is_rounded_when_read_and_its_gradient_is_not(name, generic, request_, rng):
    make, shape = LAYERS[name]
    cast, ours = layer(make), amp.convert(layer(make), "mixed_bfloat16")
    cast.cast("bfloat16")
    x = nd.array(as_bfloat16(rng.standard_normal(shape)))
    head = nd.array(as_bfloat16(rng.standard_normal(cast(x.astype("bfloat16")).shape)))
    expected = trained(cast, x.astype("bfloat16"), head.astype("bfloat16"))
    if generic:
        with generic_code():
            found = trained(ours, x, head, request_)
    else:
        found = trained(ours, x, head, request_)
    if not generic:
        assert np.array_equal(found[0], expected[0])
    for i, (one, other) in enumerate(zip(found, expected)):
        exact = one - int(request_ == "add" and i > 1)
        large = np.abs(other) > 0.01 * np.sqrt(np.mean(other ** 2)) + 0.02 * (request_ == "add")
        assert bfloat16_ulps(exact, other)[large].max(initial=0) <= 1
    of_weight = found[2] - int(request_ == "add")
    assert np.mean(as_bfloat16(of_weight) != of_weight) > 0.5


def test_bias_is_not_rounded():
    net = amp.convert(layer(lambda: nn.Dense(1, in_units=1)), "mixed_bfloat16")
    net.weight.set_data(nd.zeros((1, 1)))
    net.bias.set_data(nd.array([1 + 3 * 2.0 ** -9]))  # rounds to 1 + 2 ** -7
    assert net(nd.ones((1, 1))).asnumpy() == 1 + 2.0 ** -7
    net.weight.set_data(nd.array([[-1]]))
    assert net(nd.ones((1, 1))).asnumpy() == 3 * 2.0 ** -9


def test_layer_uses_updated_parameters(rng):
    net = amp.convert(layer(lambda: nn.Conv2D(16, 3, in_channels=16)), "mixed_bfloat16")
    net.hybridize(static_alloc=True, static_shape=True)
    x = nd.array(as_bfloat16(rng.standard_normal((2, 16, 6, 6))))
    before = net(x).asnumpy()
    net.weight.set_data(net.weight.data() * 2)
    net.bias.set_data(net.bias.data() * 2)
    assert np.array_equal(net(x).asnumpy(), 2 * before)


def test_shared_weight_has_sum_of_gradients(rng):
    first = layer(lambda: nn.Dense(8, in_units=8))
    net = sequence(first, nn.Dense(8, in_units=8, params=first.params))
    amp.convert(net, "mixed_bfloat16")
    x = nd.array(as_bfloat16(rng.standard_normal((4, 8))))
    recorded(net, x).backward()
    w, hidden = as_bfloat16(first.weight.data().asnumpy()), first(x).asnumpy()
    ones = np.ones((4, 8), "float32")
    expected = ones.T @ hidden + as_bfloat16(ones @ w).T @ x.asnumpy()
    np.testing.assert_allclose(first.weight.grad().asnumpy(), expected, rtol=1e-3, atol=1e-3)
