"""example/gradient_penalty.py against second-order gradients, and what it refuses."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gradient_penalty import gradient_penalty
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import Calling, ready
from trainers import recorded

rng = np.random.RandomState(3)
SAMPLES = rng.normal(size=(16, 6)).astype("float32")


class Critic(gluon.HybridBlock):
    """Dense layers and tanh, of which MXNet has second-order gradients."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.first, self.last = nn.Dense(12, in_units=6), nn.Dense(1, in_units=12)

    def hybrid_forward(self, F, x):
        return self.last(F.tanh(self.first(x)))


def critic():
    return ready(Critic(), mx.init.Xavier(magnitude=8, rnd_type="gaussian"))


def gradients(net):
    return [p.grad().asnumpy().astype("float32") for p in net.collect_params().values()]


def as_x(array, x):
    """MXNet's `autograd.grad` returns arrays of `mx.nd`, also in numpy mode."""
    return array.as_np_ndarray() if isinstance(x, mx.np.ndarray) else array


def second_order(net, x, target=1.0):
    """The penalty and its gradients by second-order gradients of a float32 network."""
    x = nd.array(x)
    x.attach_grad()
    with autograd.record():
        slope, = autograd.grad(net(x), [x], create_graph=True, retain_graph=True)
        slope = as_x(slope, x)
        penalty = ((slope ** 2).sum(axis=1) ** 0.5 - target) ** 2
    penalty.backward()
    return penalty.asnumpy(), [x.grad.asnumpy(), *gradients(net)]


def by_difference(net, x, target=1.0):
    x = nd.array(x)
    x.attach_grad()
    penalty = recorded(lambda: gradient_penalty(net, x, target=target))
    penalty.backward()
    return penalty.asnumpy(), [x.grad.asnumpy(), *gradients(net)]


ROUNDING = {"float16": 2e-3, "bfloat16": 2e-2}  # of gradients


def round_weights(net, policy):
    """To numbers that conversion to a policy does not change."""
    for parameter in net.collect_params().values() if policy else ():
        dtype = "bfloat16" if policy == "bfloat16" else "float16"
        parameter.set_data(parameter.data().astype(dtype).astype("float32"))


def assert_near(found, expected, share):
    """Except for the last bias, whose gradient is 0."""
    for one, other in zip(found[:-1], expected[:-1]):
        assert np.abs(one - other).max() < share * np.abs(other).max()


@pytest.mark.parametrize("target", [1.0, 0.0])
@pytest.mark.parametrize("policy", [None, "float16", "mixed_float16", "bfloat16", "tf32"])
def test_value_and_gradients_are_those_of_second_order_gradients(policy, target):
    mx.random.seed(1)
    net = critic()
    round_weights(net, policy)
    value, expected = second_order(net, SAMPLES, target)
    assert value.std() > 0.1
    if policy is not None:
        amp.convert(net, policy)
    found, by = by_difference(net, SAMPLES, target)
    np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)
    assert_near(by, expected, 1e-3 + ROUNDING.get(policy, 0))


def test_16_bit_parameters_need_no_conversion():
    net = critic()
    round_weights(net, "float16")
    expected = by_difference(net, SAMPLES)
    net.cast("float16")
    found = by_difference(net, SAMPLES)
    np.testing.assert_array_equal(found[0], expected[0])
    assert_near(found[1], expected[1], 1e-3)


def dense(count=12):
    return nn.Dense(count, flatten=False)


KINKS = {
    "relu": lambda: nn.Activation("relu"),
    "leaky": lambda: nn.LeakyReLU(0.2),
    "prelu": nn.PReLU,
    "clip": lambda: Calling(lambda F, x: F.clip(x, -0.5, 0.7)),
    "abs": lambda: Calling(lambda F, x: F.abs(x)),
    "minimum": lambda: Calling(lambda F, x: F.minimum(x, 0.3 * x)),
    "maximum scalar": lambda: Calling(lambda F, x: F.maximum(x, 0.1)),
    "comparison": lambda: Calling(lambda F, x: (x > 0.1) * x + x),
}


def convolutions(make):
    return (nn.Conv2D(4, 3), make(), nn.Conv2D(3, 3, strides=2), make(),
            nn.AvgPool2D(2, 1), nn.Dense(1))


def norm_of_zeros(make):
    """The norm of ReLUs that are mostly zero is curved: the central difference must be narrow."""
    return nn.Conv2D(8, 3), make(), nn.LayerNorm(epsilon=1e-3), nn.Dense(1)


def dense_layers(make):
    return dense(), make(), dense(), make(), dense(1)


def sequence(make):
    """The samples are along the second axis within."""
    def swapped():
        return Calling(lambda F, x: x.swapaxes(0, 1))
    return swapped(), dense(), make(), swapped(), nn.Dense(1)


CRITICS = [
    *((dense_layers, kink, (16, 6), nn.HybridSequential) for kink in KINKS),
    *((convolutions, kink, (3, 2, 8, 8), nn.HybridSequential) for kink in ("prelu", "leaky")),
    (norm_of_zeros, "relu", (8, 3, 8, 8), nn.HybridSequential),
    (sequence, "leaky", (5, 4, 6), nn.HybridSequential),
    (dense_layers, "leaky", (16, 6), nn.Sequential),
]


def numeric(net, x, directions):
    """The derivatives of the penalty along a direction of each parameter, in float64."""
    net.cast("float64")
    x = x.astype("float64")
    x.attach_grad()

    def value():
        recorded(lambda: net(x).sum()).backward()
        norms = np.sqrt((x.grad.asnumpy() ** 2).reshape(len(x), -1).sum(1))
        return ((norms - 1) ** 2).sum()

    found = []
    for parameter, direction in zip(net.collect_params().values(), directions):
        before, ends = parameter.data().asnumpy(), []
        for step in (1e-8, -1e-8):
            parameter.set_data(mx.nd.array(before + step * direction, dtype="float64"))
            ends.append(value())
        parameter.set_data(mx.nd.array(before, dtype="float64"))
        found.append((ends[0] - ends[1]) / 2e-8)
    return found


@pytest.mark.parametrize("policy", [None, "float16", "bfloat16"])
@pytest.mark.parametrize(("layers", "kink", "shape", "kind"), CRITICS)
def test_gradients_of_critics_with_kinks_match_numeric_ones(layers, kink, shape, kind, policy):
    mx.random.seed(2)
    net = kind()
    net.add(*layers(KINKS[kink]))
    net.initialize(mx.init.Xavier(magnitude=6))
    random = np.random.RandomState(4)
    x = nd.array(random.normal(size=shape))
    net(x)
    round_weights(net, policy)
    if policy:
        amp.convert(net, policy)
    with autograd.record():
        gradient_penalty(net, x).sum().backward()
    found = gradients(net)
    amp.restore(net)
    directions = [random.choice([-1, 1], g.shape) for g in found]
    for gradient, direction, expected in zip(found, directions, numeric(net, x, directions)):
        error = abs((gradient * direction).sum() - expected)
        share = 2e-3 + ROUNDING.get(policy, 0)
        # the last term: a float32 output's rounding, over the step of 2^-14
        assert error < share * np.linalg.norm(gradient) + 4e-3


def test_float32_deconvolution():
    """Two of the same shapes in a backward pass crash in MXNet."""
    def layers(make):
        return nn.Conv2DTranspose(3, 3, strides=2), make(), nn.Dense(1)
    test_gradients_of_critics_with_kinks_match_numeric_ones(
        layers, "leaky", (3, 2, 4, 4), nn.HybridSequential, None)


@pytest.mark.parametrize(("layer", "received"), [
    (lambda: nn.MaxPool2D(2), "Pooling"), (nn.SELU, "LeakyReLU"),
    (lambda: Calling(lambda F, x: x.max(axis=2)), "max"),
    (lambda: Calling(lambda F, x: F.contrib.foreach(
        lambda row, state: (F.relu(row), state), x, [])[0]), "_foreach .*, with .*relu"),
])
def test_other_kinks_are_refused(layer, received):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(2, 3), layer(), nn.Dense(1))
    net.initialize()
    x = nd.ones((4, 2, 8, 8))
    gradient_penalty(net, x)
    with autograd.record(), pytest.raises(ValueError, match="Valid: ReLU.*Received: .*" + received):
        gradient_penalty(net, x)


def test_deconvolutions_with_16_bit_parameters_are_refused():
    """MXNet's float32 deconvolutions crash for such a critic."""
    net = nn.HybridSequential()
    net.add(nn.Conv2DTranspose(3, 3), nn.Dense(1))
    net.initialize()
    x = mx.np.ones((2, 2, 4, 4)) if mx.util.is_np_array() else nd.ones((2, 2, 4, 4))
    net(x)
    amp.convert(net)
    with autograd.record(), pytest.raises(ValueError, match=r'Valid: .*"mixed_float16"'):
        gradient_penalty(net, x)


@pytest.mark.parametrize(("forward", "message"), [
    (lambda F, x: x * x.shape[0], "HybridBlock that hybridize.*shape"),
    (lambda F, x: x * F.random.uniform(shape=(16, 6)), "without random numbers")])
def test_critic_that_cannot_be_traced_or_draws_is_refused(forward, message):
    with autograd.record(), pytest.raises(ValueError, match=message):
        gradient_penalty(Calling(forward), nd.array(SAMPLES))


def test_batch_norm_and_dropout_are_refused_in_training_and_valid_if_frozen():
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=6), nn.BatchNorm(in_channels=4), nn.Dropout(0.5))
    net.initialize()
    amp.convert(net)
    x = nd.array(SAMPLES)
    before = gradient_penalty(net, x).asnumpy()
    names = f"{net[1].name}_fwd, {net[2].name}_fwd"
    with autograd.record(), pytest.raises(ValueError, match=f"amp.freeze.*Received: {names}"):
        gradient_penalty(net, x)
    amp.freeze(net[1])
    net[2]._rate = 0
    found = recorded(gradient_penalty, net, x)
    found.backward()
    np.testing.assert_allclose(found.asnumpy(), before, rtol=1e-4)
    assert not net[1].running_mean.data().asnumpy().any()


def test_training_calls_stay_in_the_policy_and_scaled_loss_trains():
    net = amp.convert(critic())
    before = net(nd.array(SAMPLES)).asnumpy()
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    losses = []
    for _ in range(30):
        penalty = recorded(lambda: gradient_penalty(net, nd.array(SAMPLES).astype("float16")))
        trainer.backward(penalty)
        trainer.step(len(SAMPLES))
        losses.append(penalty.mean().asnumpy().item())
    assert losses[-1] < 0.1 * losses[0]
    assert net.first.weight.dtype == "float16"
    assert trainer.skipped == 0
    assert trainer.loss_scale > 1
    assert net(nd.array(SAMPLES)).dtype == before.dtype
    assert next(iter(net._amp.traces.values())).ops


def test_further_inputs_and_several_outputs_for_each_sample():
    net = Calling(lambda F, x, label, dense: F.tanh(F.concat(dense(x), label, dim=1)),
                  nn.Dense(3, in_units=6))
    net.initialize(mx.init.Xavier(magnitude=4))
    amp.convert(net, "mixed_float16")
    label = nd.array(rng.normal(size=(16, 2)))
    x = nd.array(SAMPLES)
    x.attach_grad()
    recorded(lambda: net(x, label).sum(axis=1)).backward()
    value = (np.sqrt((x.grad.asnumpy() ** 2).sum(1)) - 1) ** 2
    found = gradient_penalty(net, x, label)
    np.testing.assert_allclose(found.asnumpy(), value, rtol=0.02, atol=2e-3)


def test_zero_samples_and_constant_critic_have_finite_gradients():
    net = amp.convert(ready(nn.Dense(1, in_units=6, weight_initializer="zeros")), "mixed_float16")
    penalty = recorded(lambda: gradient_penalty(net, nd.zeros((4, 6))))
    penalty.backward()
    assert np.array_equal(penalty.asnumpy(), np.ones(4))
    assert not net.weight.grad().asnumpy().any()


def test_critics_and_arguments_that_are_refused():
    x, net = nd.array(SAMPLES), critic()
    with pytest.raises(TypeError, match="a gluon Block"):
        gradient_penalty(lambda x: x, x)
    with pytest.raises(TypeError, match=r"a row for each sample. Received: \(3, 6\)"):
        gradient_penalty(net, x, x[:3])
    with pytest.raises(TypeError, match=r"arrays of MXNet. Received: numpy\.ndarray"):
        gradient_penalty(net, SAMPLES)
    for other in ("int32", "float64"):
        with pytest.raises(TypeError, match=rf"x must be float32.*16 bits. Received: {other}"):
            gradient_penalty(net, x.astype(other))
    net.cast("float64")
    with pytest.raises(TypeError, match=r"x must be float64.*Received: float32"):
        gradient_penalty(net, x)
    assert gradient_penalty(net, x.astype("float64")).dtype == np.float64
    net.cast("float32")
    with pytest.raises(ValueError, match="must be 0 or a positive number"):
        gradient_penalty(net, x, target=-1)
    pairs = Calling(lambda F, x: (x, x))
    with pytest.raises(ValueError, match="one array with a row for each of the 16 samples"):
        gradient_penalty(pairs, x)
    with pytest.raises(ValueError, match=r"each of the 16 samples. Received: \(1,\)"):
        gradient_penalty(Calling(lambda F, x: x.sum(axis=(0, 1)).reshape((1,))), x)


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("frozen", ["", "first", "last"])
@pytest.mark.parametrize("policy", [None, "float16", "mixed_float16"])
def test_penalty_after_the_critics_loss(policy, frozen, numpy):
    """The pass for the penalty leaves the graph of the critic's loss, which has the same labels."""
    with mx.util.np_shape(numpy), mx.util.np_array(numpy):
        array = mx.np.array if numpy else nd.array
        layers = {"first": nn.Dense(8, in_units=9), "last": nn.Dense(1, in_units=8)}
        net = Calling(lambda F, x, label, first, last: last(F.LeakyReLU(
            first(F.concat(x, label, dim=1)), slope=0.2)) if not numpy else last(F.npx.leaky_relu(
                first(F.np.concatenate([x, label], axis=1)), slope=0.2)), *layers.values())
        net.initialize(mx.init.Xavier())
        net.hybridize()
        if policy:
            amp.convert(net, policy)
        if frozen:
            layers[frozen].collect_params().setattr("grad_req", "null")
        x, label = (array(rng.normal(size=(16, columns)).astype("float32")) for columns in (6, 3))
        with autograd.record():
            loss = net(x, label).mean()
            penalty = gradient_penalty(net, x, label).mean()
        autograd.backward([loss, penalty])
        for name, layer in layers.items():
            if name != frozen:
                assert abs(layer.weight.grad().asnumpy()).max() > 0
