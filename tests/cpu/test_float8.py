"""Float8 products: current or delayed scaling for each tensor, and reproducible stochastic
rounding."""
import copy
import gc
import pickle
from dataclasses import replace

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import same
from gluon_amp.cpu import library
from gluon_amp.cpu.library import table
from gluon_amp.cpu.scales import Scales, scales_of
from gluon_amp.formats import FORMATS
from gluon_amp.policy import get_policy
from halves import AT_RANDOM
from mxnet import autograd, gluon, nd
from networks import Calling
from processes import printed

E4M3, E5M2 = FORMATS["float8_e4m3"], FORMATS["float8_e5m2"]


def policy(scaling="delayed", **more):
    return amp.Policy("mine", product="float8_e4m3", gradient="float8_e5m2", scaling=scaling,
                      **more)


def scaled(format_, x, largest=None):
    """Rounded with the scale for this largest number, and saturated."""
    largest = np.abs(x).max() if largest is None else largest
    scale = 2.0 ** np.floor(np.log2(format_.largest / largest))
    return format_.round(np.clip(x * scale, -format_.largest, format_.largest)) / scale


def dense(policy, w):
    net = gluon.nn.Dense(w.shape[0], in_units=w.shape[1], use_bias=False)
    net.initialize()
    net.weight.set_data(nd.array(w))
    return amp.convert(net, policy)


def step(net, x, head):
    """Output, and the gradients of data and weight."""
    data = nd.array(x)
    data.attach_grad()
    with autograd.record():
        out = net(data)
    out.backward(nd.array(head))
    return out.asnumpy(), data.grad.asnumpy(), net.weight.grad().asnumpy()


def normal(rng, *shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6])
def test_current_scaling_fits_tensors_of_any_size(scale, rng):
    x, w, head = normal(rng, 5, 7, scale=scale), normal(rng, 3, 7), normal(rng, 5, 3, scale=scale)
    out, dx, dw = step(dense(policy("current"), w), x, head)
    x, w, head = scaled(E4M3, x), scaled(E4M3, w), scaled(E5M2, head)
    np.testing.assert_allclose(out, x @ w.T, rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose(dx, head @ w, rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose(dw, head.T @ x, rtol=1e-5, atol=1e-6 * scale ** 2)


def test_delayed_scaling_uses_last_tensors(rng):
    w, sizes = normal(rng, 3, 7), [1.0, 8.0, 100.0, 0.01, 0.01, 0.01]
    net, xs, heads = dense(policy(history=2), w), [], []
    for size in sizes:
        x, head = normal(rng, 5, 7, scale=size), normal(rng, 5, 3, scale=1 / size)
        out, dx, dw = step(net, x, head)
        before = [max(map(np.max, map(np.abs, past[-2:]))) if past else None
                  for past in (xs, heads)]
        xs.append(x)
        heads.append(head)
        x, head, quiet = scaled(E4M3, x, before[0]), scaled(E5M2, head, before[1]), scaled(E4M3, w)
        np.testing.assert_allclose(out, x @ quiet.T, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dx, head @ quiet, rtol=1e-5, atol=1e-6 / size)
        np.testing.assert_allclose(dw, head.T @ x, rtol=1e-5, atol=1e-5)


def test_predictions_use_histories_without_changing_them(rng):
    w, x = normal(rng, 3, 7), normal(rng, 5, 7)
    net = dense(policy(history=1), w)
    first = net(nd.array(1000 * x)).asnumpy()  # without a history: current scaling
    np.testing.assert_allclose(first, scaled(E4M3, 1000 * x) @ scaled(E4M3, w).T, rtol=1e-5,
                               atol=1e-3)
    step(net, x, np.ones((5, 3), np.float32))
    expected = scaled(E4M3, 1000 * x, np.abs(x).max()) @ scaled(E4M3, w).T
    for _ in range(2):
        np.testing.assert_allclose(net(nd.array(1000 * x)).asnumpy(), expected, rtol=1e-5,
                                   atol=1e-3)


def test_backward_of_recorded_prediction_reads_same_values(rng):
    w, x, head = normal(rng, 3, 7), normal(rng, 5, 7, scale=1e-6), normal(rng, 5, 3)
    net, data = dense(policy(history=1), w), nd.array(x)
    for size in (1.0, 50.0):  # before and after training
        with autograd.record(train_mode=False):
            out = net(data)
        out.backward(nd.array(head))
        read = scaled(E4M3, x, size * np.abs(x).max())
        np.testing.assert_allclose(net.weight.grad().asnumpy(), scaled(E5M2, head).T @ read,
                                   rtol=1e-5, atol=1e-11)
        step(net, 50 * x, head)


def test_prediction_before_backward_does_not_change_gradients(rng):
    w, x, head = normal(rng, 3, 7), normal(rng, 5, 7), normal(rng, 5, 3)
    made = []
    for predicts in (False, True):
        net = dense(policy(history=1), w)
        step(net, 1000 * x, head)
        with autograd.record():
            out = net(nd.array(x))
        if predicts:
            net(nd.array(x))
        out.backward(nd.array(head))
        made.append(net.weight.grad().asnumpy())
    assert np.array_equal(*made)


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_infinity_is_propagated(scaling, rng):
    net, x = dense(policy(scaling), normal(rng, 3, 7)), normal(rng, 5, 7)
    head = np.ones((5, 3), np.float32)
    head[0, 0] = np.inf
    _, dx, dw = step(net, x, head)
    assert not np.isfinite(dx[0]).any()
    assert not np.isfinite(dw[0]).any()
    x[1, 1] = np.inf
    out, _, _ = step(net, x, np.ones((5, 3), np.float32))
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(np.delete(out, 1, 0)).all()


def test_layer_called_twice_scales_each_input_separately(rng):
    w, x, head = normal(rng, 3, 7), normal(rng, 5, 7), np.ones((5, 3), np.float32)
    layer = dense("float32", w)
    net = amp.convert(Calling(lambda F, x, layer: layer(x) + layer(1000 * x), layer),
                      policy(history=1))
    data = nd.array(x)
    for _ in range(2):
        with autograd.record():
            out = net(data)
        out.backward(nd.array(head))
    both = scaled(E4M3, x), scaled(E4M3, 1000 * x)
    np.testing.assert_allclose(out.asnumpy(), sum(both) @ scaled(E4M3, w).T, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(layer.weight.grad().asnumpy(), head.T @ sum(both), rtol=1e-5,
                               atol=1e-3)


def test_margin_adds_headroom(rng):
    w, x = normal(rng, 3, 7), normal(rng, 5, 7)
    net = dense(policy(history=1, margin=3), w)
    step(net, x, np.ones((5, 3), np.float32))
    out = net(nd.array(8 * x)).asnumpy()
    largest = 8 * np.abs(x).max()
    expected = scaled(E4M3, 8 * x, largest) @ scaled(E4M3, w, 8 * np.abs(w).max()).T
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("more", "said"), [
    ({"scaling": "last"}, "unknown scaling. Valid: None, delayed, current. Received: 'last'"),
    ({"history": 0}, "history must be an integer >= 1. Received: 0"),
    ({"margin": -1}, "margin must be an integer >= 0. Received: -1"),
    ({"product": "float16"}, "scaling is for products whose format differs"),
    ({"activation": "float8_e4m3"}, "scaling is for products whose format differs")])
def test_scaling_arguments_are_checked(more, said):
    with pytest.raises(ValueError, match=said):
        amp.Policy("mine", **{"product": "float8_e4m3", "scaling": "delayed", **more})


# ---- training and resuming

def network(name="mixed_float8"):
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()  # MXNet gives it a new prefix each time
    with net.name_scope():
        net.add(gluon.nn.Conv2D(8, 3, in_channels=1), gluon.nn.Activation("relu"),
                gluon.nn.Dense(10, in_units=8 * 36), gluon.nn.Dense(4, in_units=10))
    net.initialize(mx.init.Xavier())
    return amp.convert(net, name)


def trainer_of(net):
    return amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})


def train(net, trainer, steps):
    rng = np.random.default_rng(3)
    x, y = nd.array(normal(rng, 16, 1, 8, 8)), nd.array(rng.integers(0, 4, 16))
    losses = []
    for _ in range(steps):
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
        trainer.backward(loss)
        trainer.step(16)
        losses.append(float(loss.mean().asscalar()))
    return losses


def weights(net):
    return [p.data().asnumpy() for p in net.collect_params().values()]


def histories(net):
    return scales_of(net.collect_params().values())


def test_float8_learns_and_differs_from_bfloat16():
    nets = [network(name) for name in ("mixed_float8", "mixed_bfloat16")]
    losses = [train(net, trainer_of(net), 12) for net in nets]
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert not same(*map(weights, nets))


@pytest.mark.parametrize("history", [2, 16])
def test_training_resumes_bitwise(history, tmp_path):
    float8 = replace(get_policy("mixed_float8"), history=history)
    net = network(float8)
    trainer = trainer_of(net)
    train(net, trainer, 5)
    net.save_parameters(str(tmp_path / "net"))
    trainer.save_states(str(tmp_path / "states"))
    train(net, trainer, 5)

    other = network(float8)
    again = trainer_of(other)
    other.load_parameters(str(tmp_path / "net"))
    again.load_states(str(tmp_path / "states"))
    train(other, again, 5)
    assert same(weights(net), weights(other))
    assert [s.read() for s in histories(net)] == [s.read() for s in histories(other)] != [""]

    forgetful = network(float8)  # histories have an effect
    anew = trainer_of(forgetful)
    forgetful.load_parameters(str(tmp_path / "net"))
    anew.load_states(str(tmp_path / "states"))
    for scales in histories(forgetful):
        scales.write("")
    train(forgetful, anew, 5)
    assert not same(weights(net), weights(forgetful))


def test_histories_continue_on_another_device(tmp_path):
    net = network()
    trainer = trainer_of(net)
    train(net, trainer, 3)
    trainer.save_states(str(tmp_path / "states"))
    other = network()
    other.collect_params().reset_ctx([mx.cpu(1), mx.cpu(2)])
    trainer_of(other).load_states(str(tmp_path / "states"))
    expected = histories(net)[0].read().splitlines()
    found = histories(other)[0].read()
    assert sorted(found.splitlines()) == sorted(
        line.replace(" cpu0", f" cpu{device}") for line in expected for device in (1, 2))


def test_layer_added_later_belongs_to_network(tmp_path):
    net, twin = network(), network("float32")
    for one in (net, twin):
        one.add(gluon.nn.Dense(4, in_units=4))
        one[-1].initialize()
    trainer, other = trainer_of(net), trainer_of(amp.convert(twin, "mixed_float8"))
    train(net, trainer, 1)
    trainer.save_states(str(tmp_path / "states"))
    other.load_states(str(tmp_path / "states"))
    trained = histories(net)[0].read()
    assert histories(twin)[0].read() == trained
    train(twin, other, 1)  # continues with these, and adds no others
    assert len(histories(twin)[0].read().splitlines()) == len(trained.splitlines())


def test_states_with_histories_are_refused_without_float8_networks(tmp_path):
    net = network()
    trainer = trainer_of(net)
    train(net, trainer, 1)
    trainer.save_states(str(tmp_path / "states"))
    other = trainer_of(network("mixed_bfloat16"))
    with pytest.raises(ValueError, match="float8 histories of 1 network; here: 0"):
        other.load_states(str(tmp_path / "states"))


def test_copy_has_its_own_histories(rng):
    w, x = normal(rng, 3, 7), normal(rng, 5, 7)
    net = dense(policy(history=2), w)
    step(net, x, np.ones((5, 3), np.float32))
    twin = copy.deepcopy(net)
    assert np.array_equal(net(nd.array(9 * x)).asnumpy(), twin(nd.array(9 * x)).asnumpy())
    step(twin, 100 * x, np.ones((5, 3), np.float32))
    assert not np.array_equal(net(nd.array(9 * x)).asnumpy(), twin(nd.array(9 * x)).asnumpy())


def test_converted_networks_can_be_copied_without_engine(monkeypatch):
    """As on a GPU machine with another build of MXNet."""
    def missing():
        raise amp.KernelError("the CPU kernels are missing")
    net = network("float16")
    monkeypatch.setattr(library, "_table", None)
    monkeypatch.setattr("gluon_amp.cpu.scales.table", missing)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert same(weights(net), weights(twin))


def test_two_gradient_products_have_separate_histories(rng):
    """The gradients of dot are two dots that both read the output gradient."""
    net = gluon.nn.HybridLambda(lambda F, a, b: F.dot(a, b))
    amp.convert(net, policy(history=1))
    formats, largest = (E4M3, E4M3, E5M2), [None] * 3
    for size in (1.0, 50.0, 3.0):
        arrays = normal(rng, 4, 6), normal(rng, 6, 2), normal(rng, 4, 2, scale=size)
        a, b, head = map(nd.array, arrays)
        a.attach_grad()
        b.attach_grad()
        with autograd.record():
            out = net(a, b)
        out.backward(head)
        read_a, read_b, g = map(scaled, formats, arrays, largest)
        np.testing.assert_allclose(a.grad.asnumpy(), g @ read_b.T, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(b.grad.asnumpy(), read_a.T @ g, rtol=1e-5, atol=1e-4)
        largest = [np.abs(x).max() for x in arrays]


# ---- rounded inputs

def test_bias_is_not_rounded(rng):
    net = gluon.nn.Dense(3, in_units=7)
    net.initialize()
    bias = normal(rng, 3)
    net.weight.set_data(nd.zeros((3, 7)))
    net.bias.set_data(nd.array(bias))
    amp.convert(net, amp.Policy("mine", product="float8_e4m3"))
    assert np.array_equal(net(nd.ones((1, 7))).asnumpy()[0], bias)


def test_einsum_with_several_formats_is_refused():
    net = gluon.nn.HybridLambda(lambda F, a, b: F.np.einsum("ij,jk->ik", a, b))
    amp.convert(net, policy())
    mx.npx.set_np()
    try:
        with pytest.raises(ValueError, match="einsum requires one format"):
            net(mx.np.ones((2, 2)), mx.np.ones((2, 2)))
    finally:
        mx.npx.reset_np()


# ---- stochastic rounding

def test_seed_reproduces_training_with_stochastic_rounding():
    def trained(seed):
        net = network(amp.Policy("mine", compute=AT_RANDOM))
        mx.random.seed(seed)
        train(net, trainer_of(net), 3)
        return weights(net)
    first = trained(5)
    assert same(first, trained(5))
    assert not same(first, trained(6))


# ---- lifetime and grouping of histories

def test_histories_are_freed_after_their_network(rng):
    net = amp.convert(gluon.nn.Dense(3, in_units=7), "mixed_float8")
    net.initialize()
    with autograd.record():
        net(nd.array(rng.standard_normal((2, 7)))).wait_to_read()
    number = net._amp.scales.id
    assert table().scales(number)
    del net
    gc.collect()
    for _ in range(100):
        Scales()
    assert not table().scales(number)


def test_backward_pass_can_outlive_its_network(rng):
    gradients = []
    for early in (False, True):
        net = gluon.nn.Dense(3, in_units=7, use_bias=False)
        net.initialize(mx.init.One())
        amp.convert(net, "mixed_float8")
        x = nd.array(np.arange(14).reshape(2, 7) * 1e-9)
        weight = net.weight.data()
        with autograd.record():
            y = net(x)
        if early:
            del net
            gc.collect()
        y.backward()
        gradients.append(weight.grad.asnumpy())
    assert gradients[0].any()
    assert np.array_equal(*gradients)


class Step(gluon.HybridBlock):
    """Multiplies by a weight before a loop and in each iteration."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(3, 3), init=mx.init.One())

    def hybrid_forward(self, F, x, weight):
        first = F.dot(1024 * x, weight, name="product")
        return first, F.contrib.foreach(
            lambda x, states: (F.dot(x, weight, name="product"), states),
            F.expand_dims(x, 0), [F.zeros((1,))])[0]


def test_products_in_loop_have_their_own_histories():
    net = Step()
    net.initialize()
    amp.convert(net, amp.Policy("mine", product="float8_e4m3", scaling="delayed", history=1))
    x = nd.array(2.0 ** -np.arange(9.0).reshape(3, 3))
    for _ in range(3):
        with autograd.record():
            outside, inside = net(x)
    assert np.array_equal(outside.asnumpy(), 1024 * inside[0].asnumpy())


RACE = """
import threading
import gluon_amp as amp, mxnet as mx
from gluon_amp.cpu.library import table
from gluon_amp.cpu.scales import scales_of
from mxnet import autograd, nd
net = mx.gluon.nn.Dense(64, in_units=4096)
net.initialize()
amp.convert(net, amp.Policy("mine", product="float8_e4m3", scaling="delayed", history=64))
x = nd.ones((256, 4096))

def step():
    with autograd.record():
        loss = net(x).sum()
    loss.backward()

step()
scales, = scales_of(net.collect_params().values())
ended = threading.Event()

def replace():
    while not ended.is_set():
        table().set_scales(scales.id, b"")

thread = threading.Thread(target=replace)
thread.start()
for _ in range(20):
    step()
mx.nd.waitall()
ended.set()
thread.join()
step()
print(len(scales.read().splitlines()))
"""


def test_histories_may_be_deleted_while_the_network_runs():
    """glibc overwrites freed memory here, so a write to a freed history ends the process."""
    assert printed(RACE, MALLOC_PERTURB_="85", OMP_NUM_THREADS="1") == "3\n"
