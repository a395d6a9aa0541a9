"""`gradient_penalty` against the penalty that second-order gradients give, and what it refuses."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import Calling

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
    net = Critic()
    net.initialize(mx.init.Xavier(magnitude=8, rnd_type="gaussian"))
    return net


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
    with autograd.record():
        penalty = amp.gradient_penalty(net, x, target=target)
    penalty.backward()
    return penalty.asnumpy(), [x.grad.asnumpy(), *gradients(net)]


def assert_near(found, expected, share):
    """Except for the last bias, whose gradient is 0."""
    for one, other in zip(found[:-1], expected[:-1]):
        assert np.abs(one - other).max() < share * np.abs(other).max()


@pytest.mark.parametrize("target", [1.0, 0.0])
@pytest.mark.parametrize("policy", [None, "float16", "mixed_float16", "bfloat16", "tf32"])
def test_value_and_gradients_are_those_of_second_order_gradients(policy, target):
    mx.random.seed(1)
    net = critic()
    if policy is not None:  # at the same rounded weights
        for parameter in net.collect_params().values():
            dtype = "bfloat16" if policy == "bfloat16" else "float16"
            parameter.set_data(parameter.data().astype(dtype).astype("float32"))
    value, expected = second_order(net, SAMPLES, target)
    assert value.std() > 0.1
    if policy is not None:
        amp.convert(net, policy)
    found, by = by_difference(net, SAMPLES, target)
    np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)
    rounding = {"float16": 2e-3, "bfloat16": 2e-2}.get(policy, 0)
    assert_near(by, expected, 1e-3 + rounding)


def test_gradients_of_a_convolutional_critic_match_numeric_ones():
    """Central differences of the value."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, in_channels=2, activation="tanh"), nn.LayerNorm(in_channels=6),
            nn.Conv2D(3, 3, in_channels=4, activation="tanh"), nn.Conv2D(1, 2, in_channels=3))
    mx.random.seed(2)
    net.initialize(mx.init.Xavier(magnitude=6))
    amp.convert(net, "mixed_float16")
    x = nd.array(rng.normal(size=(3, 2, 8, 8)))
    with autograd.record():
        amp.gradient_penalty(net, x).sum().backward()
    weight = net[2].weight
    found, before = weight.grad().asnumpy(), weight.data().copy()
    ends = []
    for step in (1e-3, -1e-3):  # of all elements at once
        weight.set_data(before + step * nd.array(np.sign(found)))
        ends.append(amp.gradient_penalty(net, x).sum().asnumpy().item())
    assert np.abs(found).sum() == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=5e-3)


def test_batch_norm_and_dropout_are_refused_in_training_and_valid_if_frozen():
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=6), nn.BatchNorm(in_channels=4), nn.Dropout(0.5))
    net.initialize()
    amp.convert(net)
    x = nd.array(SAMPLES)
    before = amp.gradient_penalty(net, x).asnumpy()
    names = f"{net[1].name}, {net[2].name}"
    with autograd.record(), pytest.raises(ValueError, match=f"amp.freeze.*Received: {names}"):
        amp.gradient_penalty(net, x)
    amp.freeze(net[1])
    net[2]._rate = 0
    with autograd.record():
        found = amp.gradient_penalty(net, x)
    found.backward()
    np.testing.assert_allclose(found.asnumpy(), before, rtol=1e-4)
    assert not net[1].running_mean.data().asnumpy().any()


def test_training_calls_stay_in_the_policy_and_scaled_loss_trains():
    net = critic()
    amp.convert(net)
    before = net(nd.array(SAMPLES)).asnumpy()
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    losses = []
    for _ in range(30):
        with autograd.record():
            penalty = amp.gradient_penalty(net, nd.array(SAMPLES).astype("float16"))
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
    with autograd.record():
        output = net(x, label).sum(axis=1)
    output.backward()
    value = (np.sqrt((x.grad.asnumpy() ** 2).sum(1)) - 1) ** 2
    found = amp.gradient_penalty(net, x, label)
    np.testing.assert_allclose(found.asnumpy(), value, rtol=0.02, atol=2e-3)


def test_norms_of_relus_that_are_mostly_zero():
    """They are curved: the central difference must be narrow."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, activation="relu"), nn.LayerNorm(), nn.Dense(1))
    mx.random.seed(4)
    net.initialize(mx.init.Xavier())
    amp.convert(net)
    with autograd.record():
        amp.gradient_penalty(net, nd.random.uniform(shape=(8, 3, 8, 8))).backward()
    assert np.isfinite(net[0].weight.grad().asnumpy()).all()


def test_zero_samples_and_constant_critic_have_finite_gradients():
    net = nn.Dense(1, in_units=6, weight_initializer="zeros")
    net.initialize()
    amp.convert(net, "mixed_float16")
    with autograd.record():
        penalty = amp.gradient_penalty(net, nd.zeros((4, 6)))
    penalty.backward()
    assert np.array_equal(penalty.asnumpy(), np.ones(4))
    assert not net.weight.grad().asnumpy().any()


def test_critics_and_arguments_that_are_refused():
    x, net = nd.array(SAMPLES), critic()
    with pytest.raises(TypeError, match="a gluon Block"):
        amp.gradient_penalty(lambda x: x, x)
    with pytest.raises(TypeError, match=r"a row for each sample. Received: \(3, 6\)"):
        amp.gradient_penalty(net, x, x[:3])
    with pytest.raises(TypeError, match=r"arrays of MXNet. Received: numpy\.ndarray"):
        amp.gradient_penalty(net, SAMPLES)
    with pytest.raises(ValueError, match="target other than 0 must be a positive"):
        amp.gradient_penalty(net, x, target=-1)
    pairs = Calling(lambda F, x: (x, x))
    with pytest.raises(ValueError, match="one array with a row for each of the 16 samples"):
        amp.gradient_penalty(pairs, x)
    with pytest.raises(ValueError, match=r"each of the 16 samples. Received: \(1,\)"):
        amp.gradient_penalty(Calling(lambda F, x: x.sum(axis=(0, 1)).reshape((1,))), x)
    net.cast("float16")
    with pytest.raises(ValueError, match=r"or one that gluon_amp\.convert has converted.*weight"):
        amp.gradient_penalty(net, x)


def test_random_critic_is_refused():
    net = Calling(lambda F, x, dense: F.Dropout(dense(x), p=0.5, mode="always"),
                  nn.Dense(8, in_units=6))
    net.initialize()
    with autograd.record(), pytest.raises(ValueError, match="without random numbers"):
        amp.gradient_penalty(net, nd.array(SAMPLES))
