"""Networks of all kinds train in float16 as in float32."""
from importlib.util import find_spec

import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from arrays import flat, numbers
from cases import cases
from gluon_amp.policy import Policy
from model_zoo import zoo_network
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import imported, ready, sequence
from traces import at_most_traces
from trainers import recorded

pytestmark = [pytest.mark.sanitize, pytest.mark.long]

ALL = {**networks.ZOO, **networks.OTHERS}
# Their layers are those of smaller networks.
ALIKE = {"alexnet", "densenet121", "inceptionv3", "resnet50_v1", "resnet50_v2", "vgg11", "vgg11_bn"}
each_network = pytest.mark.parametrize(
    "name", cases([name for name in ALL if name not in ALIKE], sorted(ALIKE)))


def train(net, inputs, steps=2, lr=1e-3):
    """First outputs and gradients, the losses of some steps, and the last prediction."""
    trainer = gluon.Trainer(net.collect_params(), amp.optimizer("sgd", learning_rate=lr,
                                                                momentum=0.9))
    losses, first, gradients = [], None, None
    for _ in range(steps):
        mx.random.seed(3)  # the same dropout in every step and type
        with autograd.record():
            outputs = [*flat(net(*inputs))]
            loss = nd.add_n(*((o * o).mean().reshape(1) for o in outputs))
        loss.backward()
        if first is None:
            first = [o.asnumpy() for o in outputs]
            gradients = [p.grad().asnumpy().astype(np.float32)
                         for p in net.collect_params().values() if p.grad_req != "null"]
        trainer.step(1)
        losses.append(loss.asscalar())
    return first, gradients, losses, numbers(net(*inputs))


def both(make, inputs, policy="float16", **kwargs):
    results = []
    for name in ("float32", policy):
        mx.random.seed(1)
        np.random.seed(1)
        net = ready(make(), mx.init.Xavier(), force_reinit=False)
        if name != "float32":
            assert amp.convert(net, name) is net
        else:
            net.hybridize()
        with at_most_traces(2):  # of training and of prediction
            results.append(train(net, inputs, **kwargs))
    return results


def assert_alike(float32, float16, tolerance=0.02):
    """Outputs, losses and gradients agree within float16 precision.

    `tolerance` is that of the outputs. Deep convolutional networks with batch norms over
    few numbers amplify any noise; that their graphs are right is tested without rounding.
    """
    for wide, half in zip(float32[0], float16[0]):
        assert half.dtype == np.float32
        np.testing.assert_allclose(half, wide, atol=tolerance * np.abs(wide).max(), rtol=tolerance)
    np.testing.assert_allclose(float16[2][:1], float32[2][:1], rtol=2 * tolerance)
    assert cosine(float32[1], float16[1]) > 1 - 5 * tolerance
    assert all(np.isfinite(p).all() for p in float16[3])


def cosine(some, others):
    a, b = (np.concatenate([g.ravel() for g in part]).astype(np.float64) for part in (some, others))
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


NOISY = {"inceptionv3": 0.12, "resnet50_v1": 0.12, "resnet50_v2": 0.06, "mobilenet0.25": 0.06,
         "mobilenetv2_0.25": 0.06, "mobilenetv3_small": 0.06, "resnet50_v1b": 0.12}


@each_network
def test_trains_as_in_float32(name, rng):
    make, inputs = ALL[name]
    assert_alike(*both(make, inputs(rng)), NOISY.get(name, 0.02))


# With AVX2 alone, MXNet's float32 is this far from float64 itself (0.0022, without dropout; the
# unrounded graph 0.0007).
FAR = {"inceptionv3": 3e-3}


@each_network
def test_unrounded_graph_matches_float32(name, rng):
    make, inputs = ALL[name]
    inputs = inputs(rng)
    net = amp.convert(ready(make(), mx.init.Xavier()), Policy("not rounded", parameter="float16"))
    net(*inputs)  # initialization draws random numbers
    results = []
    for ours in (True, False):
        if not ours:
            amp.restore(net)
            net.hybridize()
        mx.random.seed(3)
        with autograd.record():
            outputs = [*flat(net(*inputs))]
            loss = nd.add_n(*((o * o).mean().reshape(1) for o in outputs))
        loss.backward()
        results.append(([o.asnumpy() for o in outputs],
                        [p.grad().asnumpy() for p in net.collect_params().values()
                         if p.grad_req != "null"]))
    (outputs, gradients), (wide_outputs, wide_gradients) = results
    far = FAR.get(name, 1e-3)
    for ours, theirs in zip(outputs, wide_outputs):
        np.testing.assert_allclose(ours, theirs, atol=far / 10 * np.abs(theirs).max(), rtol=1e-4)
    # a float32 sum in another order switches a few relus
    assert cosine(gradients, wide_gradients) > 1 - far


def test_cond_runs_the_chosen_branch(rng):
    x = networks.floats(3, 4)(rng)[0]
    net = ready(networks.condition())
    net.hybridize()
    wide = net(x).asnumpy()
    np.testing.assert_allclose(amp.convert(net)(x).asnumpy(), wide, rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("name", cases(["mobilenetv3_small", "cifar_resnet20_v1"],
                                       ["resnet50_v1b", "se_resnext50_32x4d"]))
def test_gluoncv_trains_as_in_float32(name, rng):
    if find_spec("gluoncv") is None:
        pytest.skip("gluoncv is not installed")
    _, inputs = networks.GLUONCV[name]
    assert_alike(*both(lambda: zoo_network(name, classes=10), inputs(rng)),
                 NOISY.get(name, 0.02))


@pytest.mark.parametrize("policy", ["mixed_float16", "pure_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["resnet18_v1", "lstm", "encoder", "arithmetic", "loop", "tied"])
def test_other_policies_train(name, policy, rng):
    make, inputs = ALL[name]
    float32, low = both(make, inputs(rng), policy)
    if policy == "pure_float16":
        assert all(o.dtype == np.float16 for o in low[0])
        low = ([o.astype(np.float32) for o in low[0]], *low[1:])
    assert_alike(float32, low, 0.1 if policy == "mixed_bfloat16" else 0.03)


def test_symbol_block_trains_as_in_float32(tmp_path, rng):
    inputs = networks.images(8)(rng)
    net = networks.exported(tmp_path)
    twin = imported(tmp_path / "net")
    assert_alike(train(net, inputs), train(amp.convert(twin), inputs))
    types = {name: np.dtype(p.dtype) for name, p in twin.collect_params().items()}
    assert {n for n, t in types.items() if t == "float32"} == {n for n in types if "batchnorm" in n}


def test_two_devices_share_the_batch(rng):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = amp.convert(ready(networks.zoo("mobilenet0.25")(), mx.init.Xavier(), ctx=devices))
    trainer = gluon.Trainer(net.collect_params(), amp.optimizer("sgd", learning_rate=0.01))
    data = gluon.utils.split_and_load(networks.images(32, 8)(rng)[0], devices)
    for _ in range(2):
        with autograd.record():
            losses = [(net(x) ** 2).mean() for x in data]
        autograd.backward(losses)
        trainer.step(8)
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            first, second = (d.asnumpy() for d in parameter.list_data())
            assert np.array_equal(first, second)


def test_input_can_change_shape_and_type(rng):
    net = ready(amp.convert(networks.zoo("resnet18_v1")()))
    small, large = (nd.array(rng.standard_normal((2, 3, px, px))) for px in (32, 64))
    for x in (small, large, small):
        assert net(x).shape == (2, 10)
    assert net(small.astype("float16")).dtype == np.float32
    rounded = small.astype("float16").astype("float32")
    assert np.array_equal(net(small.astype("float16")).asnumpy(), net(rounded).asnumpy())


def test_training_and_prediction_modes_differ_as_in_float32(rng):
    x = networks.images(16, 8)(rng)[0]
    net = ready(amp.convert(networks.Plain()))
    norm = net.body[1]
    predicted = net(x).asnumpy()
    assert not norm.running_mean.data().asnumpy().any()
    trained = recorded(lambda: net(x).asnumpy())
    assert norm.running_mean.data().asnumpy().any()
    assert np.abs(predicted - trained).max() > 1e-3
    with autograd.record(train_mode=False):
        frozen = net(x)
    frozen.backward()
    assert net.out.weight.grad().asnumpy().any()


def test_gradients_accumulate_with_grad_req_add(rng):
    x = networks.images(16, 8)(rng)[0]
    net = ready(amp.convert(networks.Plain()))
    net(x)
    parameters = [p for p in net.collect_params().values() if p.grad_req != "null"]
    found = []
    for request in ("write", "add"):
        x.attach_grad(request)
        for parameter in parameters:
            parameter.grad_req = request
        for _ in range(2):
            recorded(lambda: net(x).sum()).backward()
        found.append([a.asnumpy().astype(np.float32)
                      for a in (x.grad, *(p.grad() for p in parameters))])
    for once, twice in zip(*found):
        np.testing.assert_allclose(twice, 2 * once, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(("layer", "shape"), [
    (lambda: nn.Dense(4, in_units=3), (5, 3)),
    (lambda: nn.Dense(512, in_units=512), (1100, 512)),  # which runs in blocks
    (lambda: nn.Conv2D(4, 3, in_channels=3), (2, 3, 5, 5)),
    (lambda: nn.BatchNorm(in_channels=3), (2, 3, 5, 5)),
    (lambda: nn.LayerNorm(in_channels=3), (5, 3))],
    ids=["dense", "large dense", "convolution", "batch norm", "layer norm"])
def test_frozen_weight_does_not_change_gradient_of_bias(layer, shape, policy):
    net = amp.convert(ready(layer(), mx.init.Normal(0.1)), policy)
    x, found = nd.random.normal(shape=shape), []
    weight, bias = list(net.params.values())[:2]
    for frozen in (weight, bias, None):
        for parameter in (weight, bias):
            parameter.grad_req = "null" if parameter is frozen else "write"
        recorded(lambda: nd.square(net(x)).mean()).backward()
        found.append([None if p is frozen else p.grad().asnumpy() for p in (weight, bias)])
    (_, of_bias), (of_weight, _), both = found
    assert np.array_equal(of_weight, both[0])
    assert np.array_equal(of_bias, both[1])
    assert np.abs(of_bias).max() > 0


def test_frozen_parameters_are_not_updated(rng):
    net = ready(amp.convert(networks.Plain()))
    x = networks.images(16, 8)(rng)[0]
    net(x)
    net.body.collect_params().setattr("grad_req", "null")
    before = net.body[0].weight.data().asnumpy()
    train(net, [x])
    assert np.array_equal(net.body[0].weight.data().asnumpy(), before)


@pytest.mark.parametrize("policy", [None, "float16", "mixed_float16", "pure_float16"])
@pytest.mark.parametrize("pooling", [lambda: nn.MaxPool2D(3, 2, 1), nn.GlobalMaxPool2D,
                                     lambda: nn.MaxPool2D(2, layout="NHWC")])
@pytest.mark.parametrize("static", [False, True])
def test_recorded_prediction_has_gradients_through_max_pooling(policy, pooling, static):
    """As for saliency maps; MXNet stores the positions of maxima in training only."""
    net = ready(sequence(nn.Conv2D(16, 3, in_channels=3), pooling(), nn.Flatten(), nn.Dense(4)),
                mx.init.Xavier())
    x = nd.random.normal(shape=(2, 3, 20, 20))
    net(x)
    if policy:
        amp.convert(net, policy)
    if policy or static:
        net.hybridize(static_alloc=static, static_shape=static)
    x.attach_grad()
    gradients = []
    for train_mode in (False, True):
        for _ in range(2):
            with autograd.record(train_mode=train_mode):
                out = net(x)[:, 1].sum()
            out.backward()
            gradients.append(x.grad.asnumpy())
    assert gradients[0].any()
    for gradient in gradients[1:]:
        assert np.array_equal(gradient, gradients[0])
