"""amp.Trainer finds its first loss scale by repeated backward passes, without skipping a step."""
import gc
import logging
import os
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn
from networks import Calling
from trainers import LOSS, One, dynamic, learn, ones, recorded, same, settled, values

pytestmark = pytest.mark.numpy


def messages(caplog, level=logging.WARNING):
    return [r.getMessage() for r in caplog.records if r.name == "gluon_amp" and r.levelno >= level]


def test_first_step_is_made_at_scale_that_fits(caplog):
    caplog.set_level(logging.INFO, logger="gluon_amp")
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    assert learn(net, trainer, ones(30), ones(30))  # 30 * 2**16 overflows float16
    assert (trainer.loss_scale, trainer.skipped, trainer.overflowed) == (2.0 ** 11, 0, ())
    assert (net.a.grad().asnumpy() == 30 * 2.0 ** 11).all()
    assert all((v == -29).all() for v in values(net))
    assert messages(caplog, logging.INFO) == ["loss scale 2^11 found in 5 backward passes"]
    assert not messages(caplog)  # no warning for a success
    learn(net, trainer, ones(100), ones(100))
    assert (trainer.loss_scale, trainer.skipped) == (2.0 ** 9, 0)
    assert not messages(caplog)


def test_consecutive_skips_without_search_log_one_warning(caplog):
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    for skipped in range(9):
        with autograd.record(), amp.scale_loss(net(ones(2000), ones(2000)), trainer) as scaled:
            scaled.backward()
        assert not trainer.step(1), skipped
    assert messages(caplog) == [f"3 steps skipped in a row: gradients not finite in {net.a.name}; "
                                "loss scale 16384 -> 8192"]


def test_fitting_first_scale_is_kept(caplog):
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    assert learn(net, trainer, ones(0.5), ones(0.5))
    assert trainer.loss_scale == 2.0 ** 16
    assert not messages(caplog)


class Recurrent(gluon.HybridBlock):
    """Layers whose second backward pass might differ from the first."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.conv = nn.Conv2D(4, 3, in_channels=1)
            self.norm, self.relu, self.drop = nn.BatchNorm(), nn.PReLU(), nn.Dropout(0.4)
            self.rnn = rnn.LSTM(6, 2, layout="NTC", dropout=0.3)
            self.layer_norm, self.out = nn.LayerNorm(), nn.Dense(3)

    def hybrid_forward(self, F, x):
        h = self.drop(self.relu(self.norm(self.conv(x))))
        h = self.rnn(h.reshape((-1, 4, 16)))
        return self.out(self.layer_norm(h))


@pytest.mark.parametrize("static", [None, False, True])
@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "mixed_bfloat16"])
def test_step_after_search_equals_step_started_at_that_scale(policy, static, rng):
    x, y = nd.array(rng.standard_normal((5, 1, 6, 6))), nd.array(rng.integers(0, 3, 5))

    def trained(**kwargs):
        mx.random.seed(4)
        net = Recurrent()
        net.initialize(mx.init.Xavier())
        net(x)
        amp.convert(net, policy)
        if static is not None:
            net.hybridize(static_alloc=static, static_shape=static)
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, **kwargs)
        for _ in range(3):
            mx.random.seed(5)
            with autograd.record():
                loss = LOSS(net(x), y) * (2.0 ** 110 if policy == "mixed_bfloat16" else 30)
            trainer.backward(loss)
            assert trainer.step(5 * (2.0 ** 110 if policy == "mixed_bfloat16" else 30))
        return net, trainer

    net, trainer = trained()
    assert trainer.skipped == 0
    assert trainer.loss_scale < 2.0 ** 16
    assert same(net, trained(loss_scale=trainer.loss_scale)[0])


@pytest.mark.parametrize("loss_scale", [64, amp.DynamicLossScale(64), None])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_first_step_leaves_gradients_of_others_as_they_are(loss_scale, static, grad_req):
    """Those of the data, and of a network that another Trainer trains."""
    mx.random.seed(3)
    net, other = nn.Dense(3, in_units=4), nn.Dense(4, in_units=4)
    for layer in (net, other):
        layer.initialize(mx.init.Xavier())
        layer.hybridize(static_alloc=static, static_shape=static)
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=loss_scale)
    x = nd.arange(8).reshape((2, 4)) / 8
    x.attach_grad(grad_req)
    other.collect_params().setattr("grad_req", grad_req)

    def gradients():
        return [a.asnumpy() for a in (x.grad, other.weight.grad(), other.bias.grad())]

    def loss():
        return (net(nd.tanh(other(x))) ** 2).sum()

    with autograd.record():
        one = loss()
    one.backward()
    expected = gradients()
    assert all(g.any() for g in expected)
    for array in (x.grad, *(p.grad() for p in other.collect_params().values())):
        array[:] = 0
    for i in range(2):
        with autograd.record():
            one = loss()
        trainer.backward(one)
        times = 1 if grad_req == "write" else i + 1
        for found, wanted in zip(gradients(), expected):
            np.testing.assert_allclose(found, wanted * trainer.loss_scale * times, rtol=1e-5)


def test_graph_that_cannot_start_gradients_is_passed_once():
    for function, passes in ((nd.square, 1), (nd.MakeLoss, 2)):
        net = One()
        trainer, scales = amp.Trainer(net.collect_params(), "sgd", loss_scale=64), []
        trainer.after_pass = scales.append
        with autograd.record():
            loss = net(ones(), ones()) + function(net.b.data() * 0).sum()
        trainer.backward(loss)
        assert scales == [64, 0][:passes]
        assert trainer.step(1)


def test_accumulated_gradients_share_one_scale():
    net = One("add")
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                          loss_scale=dynamic(initial=2.0 ** 15))
    for x in (1, 3, 4):  # the second and third passes overflow
        trainer.backward(recorded(net, ones(x), ones(x)))
    assert (net.a.grad().asnumpy() == 8 * trainer.loss_scale).all()
    assert trainer.step(1)
    assert all((v == -7).all() for v in values(net))
    assert trainer.skipped == 0


def test_passes_over_different_parameters_share_one_scale():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                          loss_scale=dynamic(initial=2.0 ** 15))
    with autograd.record():
        first = (net.b.data() * 3).sum()
    trainer.backward(first)
    with autograd.record():
        second = ((net.a.data() * 1).astype("float32") * 5).sum()
    trainer.backward(second)
    assert trainer.loss_scale == 2.0 ** 13
    assert trainer.step(1)
    assert (net.b.data().asnumpy() == -2).all()
    assert (net.a.data().asnumpy() == -4).all()


def test_losses_on_several_devices_leave_headroom_for_their_sum():
    devices = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    net = One(devices=devices)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    with autograd.record():
        losses = [net(ones(x, device=d), ones(device=d)) for x, d in zip((1, 31, 31), devices)]
    trainer.backward(losses)
    assert trainer.step(1)
    assert (trainer.loss_scale, trainer.skipped) == (2.0 ** 9, 0)
    for device in devices:
        assert (net.a.data(device).asnumpy() == -62).all()


@pytest.mark.parametrize("passes", [1, 3])
def test_overflow_of_sum_over_devices_skips_no_step(passes):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = One(devices=devices)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    for parameter in net.collect_params().values():
        parameter.grad_req = "add"
    for _ in range(passes):
        with autograd.record():
            losses = [net(ones(0.75, device=d), ones(device=d)) for d in devices]
        trainer.backward(losses)
    assert trainer.step(1)
    assert trainer.skipped == 0
    for device in devices:
        assert (net.a.data(device).asnumpy() == 1 - passes * 1.5).all()


def test_no_fitting_scale_warns_once(caplog):
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd")
    for _ in range(3):
        assert not learn(net, trainer, ones(1e5), ones())
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == 1
    assert said[0].startswith(f"gradients are not finite in {net.a.name} at the smallest loss")
    assert learn(net, trainer, ones(), ones())


def test_settled_scale_skips_instead_of_searching():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0},
                          loss_scale=dynamic(initial=2.0 ** 15, growth_interval=5))
    for _ in range(5):
        assert learn(net, trainer, ones(), ones())
    assert not learn(net, trainer, ones(), ones())  # 65536 overflows float16
    assert learn(net, trainer, ones(), ones())


def test_settled_state_is_saved(tmp_path):
    net, path = One(), str(tmp_path / "states")
    for scale in (settled(), dynamic()):
        amp.Trainer(net.collect_params(), "sgd", loss_scale=scale).save_states(path)
        loaded = dynamic()
        amp.Trainer(net.collect_params(), "sgd", loss_scale=loaded).load_states(path)
        assert loaded.settled is scale.settled


@pytest.mark.parametrize("engine", [True, False])
def test_graph_is_freed_after_backward_unless_retained(engine, monkeypatch):
    if not engine:
        monkeypatch.setattr(library, "_table", None)
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    for x in (0.5, 30):
        loss = recorded(net, ones(x), ones(x))
        trainer.backward(loss)
        gradients = [g.asnumpy() for g in (net.a.grad(), net.b.grad())]
        with pytest.raises(mx.MXNetError, match=r"not (in|part of) a computation"):
            trainer.backward(loss)
        assert trainer.step(1)
        loss = recorded(net, ones(x), ones(x))
        trainer.backward(loss, retain_graph=True)
        trainer.backward(loss)
        assert all(map(np.array_equal, gradients, [net.a.grad().asnumpy(), net.b.grad().asnumpy()]))
        assert trainer.step(1)


class Exponent(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.a = self.params.get("a", shape=(1,), init="ones")

    def hybrid_forward(self, F, x, a):
        return F.exp(F.broadcast_mul(x, a))


def test_search_leaks_no_memory(caplog):
    caplog.set_level(logging.INFO, logger="gluon_amp")

    def train():
        net = Exponent()
        net.initialize()
        amp.convert(net).hybridize(static_alloc=True, static_shape=True)
        trainer = amp.Trainer(net.collect_params(), "sgd")
        with autograd.record():
            loss = net(nd.full(2 ** 23, 1e-4)).sum()
        trainer.backward(loss)
        assert trainer.step(1)

    def megabytes():
        """The memory of this process after training."""
        train()
        nd.waitall()
        gc.collect()
        nd.waitall()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2 ** 20

    before = megabytes()  # includes memory that is never freed
    assert max(megabytes() for _ in range(2)) < before + 8  # one of its arrays has 16
    assert "found" in caplog.text


def test_graph_is_freed_although_outputs_are_alive():
    """The next forward pass reuses the memory of a static network."""
    net = nn.Dense(4, in_units=3)
    net.initialize()
    trainer = amp.Trainer(net.collect_params(), "sgd")
    for _ in range(2):
        with autograd.record():
            outputs = net(nd.ones((2, 3)))
            loss = nd.square(outputs).sum()
        trainer.backward(loss)
        for one in (outputs, loss):
            with pytest.raises(mx.MXNetError, match="not in a computational graph"):
                one.backward()
        assert trainer.step(2)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("pattern", [None, ".*(weight|bias)"])
def test_float32_moving_averages_are_updated_once(pattern, hybrid):
    """MXNet's batch norm updates them in its backward pass, also those of no Trainer."""
    def averages(**kwargs):
        mx.random.seed(3)
        net = nn.HybridSequential()
        net.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4))
        net.initialize()
        net.hybridize(hybrid)
        trainer = amp.Trainer(net.collect_params(pattern), "sgd", {"learning_rate": 1e-38},
                              **kwargs)
        with autograd.record():
            loss = nd.square(net(nd.arange(12).reshape((4, 3)))[:, :2]).sum() * 1e34
        trainer.backward(loss)
        assert trainer.step(1)
        assert trainer.skipped == 0
        return net[1].running_mean.data().asnumpy()

    assert np.array_equal(averages(), averages(loss_scale=None))


def test_step_is_skipped_if_backward_cannot_be_repeated():
    """MXNet's dropout does not apply its mask in a second backward pass."""
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=dynamic(initial=2.0 ** 16))
    with autograd.record():
        loss = nd.Dropout((net.a.data() * 1).astype("float32"), p=0.5).sum() + net.b.data().sum()
    trainer.backward(loss)
    assert not trainer.step(1)
    assert (trainer.loss_scale, trainer.skipped) == (2.0 ** 15, 1)


@pytest.mark.parametrize("kind", [nn.HybridSequential, nn.Sequential])
def test_dropout_of_a_converted_network_allows_the_search(kind):
    """The layers of a plain Block are converted one by one; the engine runs their dropout."""
    net = kind()
    net.add(nn.Dense(64, in_units=8), nn.Dropout(0.5), nn.Dense(1, in_units=64))
    net.initialize()
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), "sgd")
    for _ in range(3):
        with autograd.record():
            loss = net(nd.ones((4, 8))) ** 2 * 100
        trainer.backward(loss)
        assert trainer.step(400)


@pytest.mark.parametrize("large", [1e33, 1.5e32])
def test_second_backward_through_mxnet_dropout_is_never_used(large):
    """It would pass gradients on without the mask and its factor of 2: half of the true values,
    which are finite for 1.5e32."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(64, in_units=64, use_bias=False), gluon.nn.Dropout(0.5))
    net.initialize(mx.init.One())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0},
                          loss_scale=amp.DynamicLossScale(initial=2.0 ** 24))
    x = nd.ones((2, 64))
    x[0, 0] = large  # scaled and summed, it overflows float32
    with mx.autograd.record():
        loss = net(x).sum() * 1e-1
    trainer.backward(loss)
    assert trainer.step(1) is False


@pytest.mark.parametrize(("root", "says"), [
    ("log", "the loss itself is not finite"),
    ("sqrt", "without a loss scale")])
def test_skipped_step_without_loss_scale_names_no_scale(root, says, caplog):
    net = nn.Dense(1, in_units=1)
    net.initialize()
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=None, clip_norm=1)
    with autograd.record():
        loss = getattr(nd, root)(net(nd.zeros((1, 1))))
    trainer.backward(loss)
    assert trainer.step(1) is False
    assert says in messages(caplog)[-1]
    assert "static" not in messages(caplog)[-1]


@pytest.mark.parametrize("kind", ["foreach", "cond"])
@pytest.mark.parametrize(("initial", "factor"), [(2.0 ** 24, 1), (1, 2.0 ** 20)])
def test_networks_with_loops_skip_steps_until_scale_fits(kind, initial, factor,
                                                                       caplog):
    """MXNet's loops free their iterations in the backward pass."""
    def forward(F, x, cell):
        if kind == "foreach":
            return F.contrib.foreach(lambda row, state: (row, F.tanh(cell(state + row))),
                                     F.stack(x, x), cell(x))[1]
        return F.contrib.cond((F.sum(x) > 0).astype("float32"), lambda: cell(x), lambda: x * 1)

    def trained(loss_scale):
        net = Calling(forward, nn.Dense(3, in_units=3))
        net.initialize(mx.init.Constant(0.1))
        amp.convert(net)
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1 / factor},
                              loss_scale=loss_scale)
        updated = 0
        while updated < 3:
            with autograd.record():
                loss = nd.square(net(nd.ones((2, 3)))).sum() * factor
            trainer.backward(loss)
            updated += trainer.step(2)
        return [p.data().asnumpy() for p in net.collect_params().values()], trainer.skipped

    weights, skipped = trained(amp.DynamicLossScale(initial, minimum=2.0 ** -30))
    right, _ = trained(16 / factor)
    assert skipped > 0
    assert caplog.text.count("no second backward pass: steps are skipped") == 1
    for a, b in zip(weights, right):
        np.testing.assert_allclose(a, b, rtol=2e-3)
