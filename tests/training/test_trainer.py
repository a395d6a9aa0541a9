"""amp.Trainer: loss scaling, gradient clipping and skipped steps; all else is as in Gluon."""
import logging
import pickle
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready, sequence
from trainers import (
    DEVICES,
    LOSS,
    SGD,
    One,
    backward,
    clip,
    dynamic,
    fit,
    learn,
    make,
    on_all_devices,
    ones,
    recorded,
    same,
    settled,
    some_batches,
    values,
    with_trainer,
)

pytestmark = pytest.mark.numpy


@pytest.fixture()
def batches(rng):
    return some_batches(rng)


@pytest.mark.parametrize(("name", "scale"), [
    *((name, "dynamic") for name in ("sgd", "adam", "lamb", "rmsprop")), ("sgd", 128),
    ("sgd", None), ("sgd", amp.StaticLossScale(2.0 ** 20)),
    ("adam", amp.DynamicLossScale(initial=8, growth_interval=3))])
def test_float32_training_matches_gluon_trainer_bitwise(name, scale, batches):
    net, stock = make(), make()
    trainer = amp.Trainer(net.collect_params(), name, {"learning_rate": 0.01}, loss_scale=scale)
    reference = gluon.Trainer(stock.collect_params(), name, {"learning_rate": 0.01})
    assert fit(net, trainer, batches) == fit(stock, reference, batches)
    assert same(net, stock)
    assert trainer.skipped == 0


def test_tiny_gradients_train_only_with_scaling(rng):
    """Gradients of 1e-9 underflow to 0 in float16."""
    x = nd.array(rng.standard_normal((64, 10)))
    y = nd.dot(x, nd.array(rng.standard_normal((10, 1))))
    loss_fn = gluon.loss.L2Loss(weight=1e-9)

    def train(policy, **scaling):
        mx.random.seed(3)
        net = ready(sequence(nn.Dense(16, in_units=10, activation="relu"),
                             nn.Dense(1, in_units=16)), mx.init.Xavier())
        _, trainer = with_trainer(amp.convert(net, policy), "sgd", {"learning_rate": 1e8},
                                  **scaling)
        before = values(net)
        for _ in range(60):
            trainer.backward(recorded(lambda: loss_fn(net(x), y)))
            trainer.step(64)
        moved = not all(map(np.array_equal, before, values(net)))
        return moved, 1e9 * loss_fn(net(x), y).mean().asnumpy().item()

    _, wanted = train("float32", loss_scale=None)
    assert wanted < 0.05 * 0.5 * (y ** 2).mean().asnumpy().item()
    assert train("float16", loss_scale=None)[0] is False
    # the first four steps, at small scales, lose gradients
    assert train("float16", loss_scale="dynamic")[1] == pytest.approx(wanted, rel=0.05)
    assert train("float16", loss_scale=2.0 ** 16)[1] == pytest.approx(wanted, rel=0.02)


def test_gradients_are_scaled_and_loss_is_not():
    net, trainer = with_trainer(One(), "sgd", loss_scale=1024)
    loss = recorded(lambda: net(ones(2), ones(3)))
    trainer.backward(loss)
    assert loss.asnumpy().item() == 20
    assert (net.a.grad().asnumpy() == 2048).all()
    assert (net.b.grad().asnumpy() == 3072).all()


def test_list_of_losses_is_one_backward_pass():
    net, trainer = with_trainer(One(grad_req="write"), "sgd", {"learning_rate": 1}, loss_scale=4)
    trainer.backward(recorded(lambda: [net(ones(), ones()), net(ones(2), ones())]))
    assert trainer.step(1)
    assert (net.a.data().asnumpy() == -2).all()


def test_accumulated_gradients_share_scale_and_are_zeroed_by_skipped_step():
    net, trainer = with_trainer(One("add"), "sgd", {"learning_rate": 1},
                                loss_scale=settled(initial=2.0 ** 15))
    for _ in range(3):  # 3 * 2**15 overflows float16
        trainer.backward(recorded(net, ones(), ones()))
    assert (net.b.grad().asnumpy() == 3 * 2.0 ** 15).all()
    assert trainer.step(1) is False
    assert not any(p.grad().asnumpy().any() for p in (net.a, net.b))
    for _ in range(3):
        trainer.backward(recorded(net, ones(), ones()))
    assert trainer.step(1) is True
    assert all((v == -2).all() for v in values(net))


@pytest.mark.parametrize("how", ["backward", "scale_loss"])
def test_accumulated_gradients_are_rescaled_if_scale_changes(how):
    """Without zero_grad, a second step uses the sum of two gradients, as in float32."""
    net, trainer = with_trainer(One("add"), "sgd", {"learning_rate": 1},
                                loss_scale=dynamic(initial=64, growth_interval=1))
    for scale, weight in ((64, 0), (1024, -2), (1024, -5)):
        assert trainer.loss_scale == scale
        with autograd.record():
            loss = net(ones(), ones())
            if how == "scale_loss":
                with amp.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
        if how == "backward":
            trainer.backward(loss)
        assert trainer.step(1)
        assert all((v == weight).all() for v in values(net))


def test_scale_loss_matches_trainer_backward(batches):
    net, other = make("float16"), make("float16")
    trainer = amp.Trainer(net.collect_params(), "sgd", SGD, loss_scale=settled())
    second = amp.Trainer(other.collect_params(), "sgd", SGD, loss_scale=settled())
    fit(net, trainer, batches)
    for i, (x, y) in enumerate(batches):
        with autograd.record():
            loss = LOSS(other(x), y)
            with amp.scale_loss([loss] if i % 2 else loss, second) as scaled:
                autograd.backward(scaled)
        assert (scaled[0] if i % 2 else scaled)[0] == loss[0] * second.loss_scale
        second.step(len(y))
    assert same(net, other)
    assert trainer.loss_scale == second.loss_scale
    stock = gluon.Trainer(make().collect_params(), "sgd")
    with pytest.raises(TypeError, match=r"takes a gluon_amp.Trainer. Received: mxnet.gluon"), \
            amp.scale_loss(loss, stock):
        pass


def test_gan_step_with_two_scales_matches_float32(rng):
    loss_fn = gluon.loss.SigmoidBCELoss()
    batches = [(nd.array(rng.standard_normal((8, 4))), nd.array(rng.standard_normal((8, 6))))
               for _ in range(10)]

    def play(make_trainer):
        mx.random.seed(3)
        g, d = (ready(nn.Dense(units, in_units=inputs), mx.init.Xavier())
                for units, inputs in ((6, 4), (1, 6)))
        trainers = [make_trainer(g, 2.0 ** 4), make_trainer(d, 2.0 ** 14)]

        def learn(trainer, losses):
            getattr(trainer, "backward", autograd.backward)(losses)
            trainer.step(8)

        for noise, real in batches:
            with autograd.record():
                fake = g(noise)
                losses = [loss_fn(d(real), nd.ones(8)), loss_fn(d(fake.detach()), nd.zeros(8))]
            learn(trainers[1], losses)
            with autograd.record():
                loss = loss_fn(d(g(noise)), nd.ones(8))
            learn(trainers[0], loss)
        return values(g) + values(d)

    scaled = play(lambda n, s: amp.Trainer(n.collect_params(), "adam", loss_scale=s))
    stock = play(lambda n, _: gluon.Trainer(n.collect_params(), "adam"))
    assert all(map(np.array_equal, scaled, stock))


def test_stale_infinite_gradients_are_ignored():
    net, trainer = with_trainer(One(), "sgd", loss_scale=8)
    net.b.grad()[:] = np.inf
    trainer.backward(recorded(lambda: (net.a.data().astype("float32") * 2).sum()))
    assert trainer.overflowed == ()
    assert trainer.step(1, ignore_stale_grad=True)


@pytest.mark.parametrize("loss_scale", [None, 8, "dynamic"])
def test_loss_of_one_device_updates_both(loss_scale):
    """The last batch of an epoch may have fewer images than there are devices."""
    net, trainer = with_trainer(One(devices=DEVICES), "sgd", {"learning_rate": 0.25},
                                loss_scale=loss_scale)
    backward(net, trainer)
    trainer.step(2)
    trainer.backward([recorded(net, ones(2), ones(2))])
    assert trainer.step(1, ignore_stale_grad=True)
    assert on_all_devices(net) == {0.25}
    trainer.backward([recorded(net, ones(2), ones(2))])
    trainer.allreduce_grads()
    assert trainer.update(2, ignore_stale_grad=True)
    assert on_all_devices(net) == {0}


def test_frozen_layers_are_not_updated(batches):
    net = make("float16")
    net[0].collect_params().setattr("grad_req", "null")
    before = net[0].weight.data().asnumpy()
    trainer = amp.Trainer(net.collect_params(), "sgd", SGD, clip_norm=1)
    fit(net, trainer, batches[:5])
    assert np.array_equal(before, net[0].weight.data().asnumpy())


def test_update_on_kvstore_is_allowed_without_checks():
    net, trainer = with_trainer(One(devices=DEVICES), "sgd", {"learning_rate": 0.5},
                                loss_scale=None, update_on_kvstore=True)
    backward(net, trainer)
    assert trainer.step(1)
    assert all((v == 0).all() for v in values(net))
    with pytest.raises(RuntimeError, match=r"gradient_norm needs .* update_on_kvstore=False"):
        print(trainer.gradient_norm)


# ---- optimizers, sparse gradients, and weights written between steps

def test_optimizer_with_own_master_weights_is_supported():
    class Own(mx.optimizer.Optimizer):
        def create_state_multi_precision(self, index, weight):
            return None, weight.astype("float32")

        def update_multi_precision(self, index, weight, grad, state):
            state[1][:] -= self.lr * self.rescale_grad * grad.astype("float32")
            state[1].astype(weight.dtype).copyto(weight)

    net, trainer = with_trainer(One(), Own(learning_rate=0.25), loss_scale=64)
    for _ in range(3):
        assert learn(net, trainer, ones(), ones())
    assert all((v == 0.25).all() for v in values(net))


@pytest.mark.parametrize("name", ["sgd", "nag", "adam"])
def test_row_sparse_float16_updates_match_float32(name):
    def train(dtype):
        weight = nd.ones((4, 2), dtype=dtype)
        updater = mx.optimizer.Updater(amp.optimizer(name, learning_rate=0.125, wd=0.125))
        for row in (1, 3, 3):
            grad = mx.nd.sparse.row_sparse_array((np.ones((1, 2)), [row]), shape=(4, 2))
            updater(0, grad.astype(dtype), weight)
        return weight.asnumpy()

    np.testing.assert_array_equal(train("float16"), train("float32").astype("float16"))


@pytest.mark.mx_nd("no sparse arrays")
@pytest.mark.parametrize("bad", [False, True])
def test_row_sparse_gradients_are_checked_and_clipped(bad):
    def train(cls, **kwargs):
        mx.random.seed(3)
        net = ready(sequence(nn.Embedding(10, 4, sparse_grad=True), nn.Dense(1, in_units=4)),
                    mx.init.Normal(1))
        trainer = cls(net.collect_params(), "sgd", SGD, **kwargs)
        for words in ([1, 3], [3, 3], [0, 9]):
            with autograd.record():
                loss = net(nd.array(words)) * (np.nan if bad and words[0] == 0 else 1)
            getattr(trainer, "backward", autograd.backward)(loss)
            updated = trainer.step(2)
        return values(net), updated

    scaled, updated = train(amp.Trainer, loss_scale=256, clip_norm=1e9)
    assert updated is not bad
    assert bad or all(map(np.array_equal, scaled, train(gluon.Trainer)[0]))


def test_network_can_be_restored_and_converted_between_steps(batches):
    (net, trainer), (other, others) = (
        with_trainer(make("float16"), "sgd", SGD, loss_scale=64) for _ in range(2))
    fit(net, trainer, batches[:3])
    fit(other, others, batches[:3])
    amp.restore(net)
    x, y = batches[3]
    with autograd.record(train_mode=False):
        loss = LOSS(net(x), y)
    trainer.backward(loss)
    with pytest.raises(ValueError, match=r"was float16 .* is float32 now: make a new Trainer"):
        trainer.step(len(y))
    amp.convert(net)
    fit(net, trainer, batches[4:8])
    fit(other, others, batches[4:8])
    assert same(net, other)


# ---- optimizer objects

@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "adadelta", "nadam", "ftrl", "sgd"])
def test_optimizer_object_trains_as_optimizer_name(name, batches):
    rate = {"learning_rate": 0.01}
    nets = []
    for given in ((mx.optimizer.create(name, **rate),), (name, rate)):
        net, trainer = with_trainer(make("float16"), *given, loss_scale=64)
        fit(net, trainer, batches[:5])
        nets.append(net)
    assert same(*nets)


def test_optimizer_object_without_multi_precision_is_refused_if_unsafe():
    net = One()
    asked = amp.optimizer("adam", multi_precision=False)
    trainer = amp.Trainer(net.collect_params(), asked, loss_scale=64)
    with pytest.raises(ValueError, match=r"Adam would divide.*Received: multi_precision=False"):
        learn(net, trainer, ones(), ones())
    plain = amp.optimizer("sgd", multi_precision=False, learning_rate=1e-4)
    net, trainer = with_trainer(One(), plain, loss_scale=64)
    with pytest.warns(UserWarning, match="Accumulating with float16"):  # MXNet's
        learn(net, trainer, ones(), ones())
    assert (net.a.data().asnumpy() == 1).all()


# ---- clipping, and gradients changed by the user

def recorded_loss(net, x, y):
    return recorded(lambda: LOSS(net(x), y))


@pytest.mark.parametrize("how", ["argument", "method", "unscale"])
@pytest.mark.parametrize("scaling", [None, 2.0 ** 10, "dynamic"])
def test_clipping_matches_gluon_in_float32(how, scaling, batches):
    net, stock = make(), make()
    trainer = amp.Trainer(net.collect_params(), "sgd", SGD, loss_scale=scaling,
                          clip_norm=0.1 if how == "argument" else None)
    reference = gluon.Trainer(stock.collect_params(), "sgd", SGD)
    for x, y in batches:
        recorded_loss(stock, x, y).backward()
        grads = [p.grad() for p in stock.collect_params().values() if p.grad_req != "null"]
        norm = clip(grads, 0.1 * len(y)) / len(y)
        reference.step(len(y))
        trainer.backward(recorded_loss(net, x, y))
        if how == "method":
            trainer.allreduce_grads()
            assert trainer.clip_norm(0.1, len(y)) == pytest.approx(norm, rel=1e-5)
        elif how == "unscale":
            unscaled = [g for grads in trainer.unscale().values() for g in grads]
            assert clip(unscaled, 0.1 * len(y)) / len(y) == pytest.approx(norm, rel=1e-5)
        assert (trainer.step if how == "argument" else trainer.update)(len(y))
    for mine, theirs in zip(values(net), values(stock)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_clipped_gradients_do_not_become_subnormal():
    net, trainer = with_trainer(One(size=1000), "sgd", {"learning_rate": 1}, loss_scale=2.0 ** 16,
                                clip_norm=0.01)
    x = ones(1e-3 / 2, 1000) * nd.arange(1, 2, 0.001)
    assert learn(net, trainer, x, x)
    moved = 1 - net.a.data().astype("float32").asnumpy()  # at 1, float16 has steps of 2**-11
    exact = x.asnumpy() * 0.01 / np.sqrt(2 * (x.asnumpy().astype("f8") ** 2).sum())
    np.testing.assert_allclose(1 - net.b.data().asnumpy(), exact, atol=1e-7)
    master = trainer._updaters[0].states[0][1].asnumpy()
    np.testing.assert_allclose(1 - master, exact, rtol=2e-3)  # gradients are rounded to float16
    assert (moved == 0).any()
    assert (np.abs(net.a.grad().asnumpy()) > 30).all()


@pytest.mark.parametrize("kvstore", ["device", "local"])
@pytest.mark.parametrize("loss_scale", [8, None])
def test_clipped_norm_is_that_of_sum_over_devices(kvstore, loss_scale):
    net, trainer = with_trainer(One(devices=DEVICES), "sgd", {"learning_rate": 1}, kvstore=kvstore,
                                loss_scale=loss_scale)
    trainer.backward(recorded(
        lambda: [net(ones(i + 1, device=d), ones(0, device=d)) for i, d in enumerate(DEVICES)]))
    trainer.allreduce_grads()
    assert trainer.clip_norm(3, batch_size=2) == 3  # 4 times 3/2
    assert trainer.clip_norm(1.5, batch_size=2) == 3
    assert trainer.update(2)
    assert all((weight.asnumpy() == 0.25).all() for weight in net.a.list_data())


def test_norm_is_rescaled_for_batch_size_of_update():
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1}, loss_scale=8)
    trainer.backward(recorded(net, ones(2), ones(0)))
    assert trainer.clip_norm(1) == 4
    assert trainer.update(2)
    assert (net.a.data().asnumpy() == 0.5).all()


def test_unscaled_gradients_are_float32_and_can_be_modified():
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1}, loss_scale=2.0 ** 16)
    trainer.backward(recorded(net, ones(1e-6), ones(2)))
    grads = trainer.unscale()
    assert list(grads) == [net.a.name, net.b.name]
    (a,), (b,) = grads.values()
    assert a.dtype == np.float32
    np.testing.assert_allclose(a.asnumpy(), 1e-6, rtol=1e-3)
    assert (net.a.grad().asnumpy() > 0.06).all()  # still scaled
    a[:] = 3
    b[:] *= 0.5
    assert trainer.update(2)
    assert [v.tolist() for v in values(net)] == [[-0.5] * 4, [0.5] * 4]


@pytest.mark.parametrize("name", ["sgd", "adam", "nag", "lamb", "adamw"])
def test_unscale_then_update_equals_step(name, batches):
    (net, trainer), (other, others) = (
        with_trainer(make("float16"), name, {"learning_rate": 0.01}, loss_scale=1024)
        for _ in range(2))
    fit(net, trainer, batches[:5])
    for x, y in batches[:5]:
        others.backward(recorded_loss(other, x, y))
        others.unscale()
        others.update(len(y))
    assert same(net, other)


def test_unscale_without_scale_returns_newest_gradients():
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1}, loss_scale=None)
    for x in (2, 3):
        trainer.backward(recorded(net, ones(x), ones(x)))
        assert (trainer.unscale()[net.a.name][0].asnumpy() == x).all()
    trainer.update(1)
    assert (net.a.data().asnumpy() == -2).all()


@pytest.mark.parametrize("scaling", [None, 2.0 ** 10])
def test_clipping_original_gradients_after_unscale_is_refused(scaling, batches):
    """The update uses the arrays that unscale returned, which would stay unclipped."""
    x, y = batches[0]
    net = make()
    before = values(net)
    trainer = amp.Trainer(net.collect_params(), "sgd", SGD, loss_scale=scaling)
    trainer.backward(recorded_loss(net, x, y))
    trainer.unscale()
    clip([p.grad() for p in net.collect_params().values() if p.grad_req != "null"], 0.1)
    with pytest.raises(RuntimeError, match=r"after trainer\.unscale\(\).*Modify those arrays"):
        trainer.update(len(y))
    assert all(map(np.array_equal, values(net)[-2:], before[-2:]))


@pytest.mark.parametrize("call", ["step", "allreduce_grads"])
def test_unscale_before_allreduce_is_refused(call):
    """Devices would make different updates."""
    net, trainer = with_trainer(One(devices=DEVICES), "sgd", {"learning_rate": 1}, loss_scale=8)
    backward(net, trainer)
    trainer.unscale()
    with pytest.raises(RuntimeError, match=r"allreduce_grads\(\), then unscale\(\), then update"):
        trainer.step(1) if call == "step" else trainer.allreduce_grads()
    assert on_all_devices(net) == {1}


@pytest.mark.parametrize("scaling", [None, 1024, "dynamic"])
@pytest.mark.parametrize("norm", [False, True])
def test_gluon_clipping_of_converted_network_is_refused(norm, scaling):
    """MXNet's own error is about dot without float16, or, with a norm, about mixed types."""
    net = ready(sequence(nn.Dense(4, in_units=5), *[nn.LayerNorm(in_channels=4)] * norm))
    net, trainer = with_trainer(amp.convert(net), "sgd", loss_scale=scaling)
    trainer.backward(recorded(lambda: net(nd.ones((2, 5))).sum(axis=1)))
    grads = [p.grad() for p in net.collect_params().values()]
    assert all(np.isfinite(g.asnumpy()).all() for g in grads)
    with pytest.raises(TypeError, match=r"clip_global_norm.*trainer\.clip_norm\(.*clip_norm="):
        gluon.utils.clip_global_norm(grads, 0.1)
    assert trainer.step(2)
    amp.restore(net)
    clip([p.grad() for p in net.collect_params().values()], 0.1)


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_pickled_network_and_trainer_continue_bitwise(policy, batches):
    net, trainer = with_trainer(make(policy), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    fit(net, trainer, batches[:2])
    other, others = pickle.loads(pickle.dumps((net, trainer)))
    for one, its in ((net, trainer), (other, others)):
        fit(one, its, batches[2:])
    assert same(net, other)
    assert others.gradient_norm == trainer.gradient_norm


# ---- nonfinite gradients: skipped steps, their count, names and log

def test_overflow_skips_step_and_halves_scale():
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1},
                                loss_scale=settled(initial=2.0 ** 16))
    assert learn(net, trainer, ones(), ones()) is False  # 65536 overflows float16
    assert (trainer.loss_scale, trainer.skipped) == (2.0 ** 15, 1)
    assert trainer.overflowed == (net.a.name,)
    assert all((v == 1).all() for v in values(net))
    assert learn(net, trainer, ones(), ones()) is True
    assert (net.a.grad().asnumpy() == 2.0 ** 15).all()
    assert trainer.loss_scale < 2.0 ** 15  # lowered, because norm * scale left no headroom
    assert (trainer.skipped, trainer.overflowed) == (1, ())
    assert all((v == 0).all() for v in values(net))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("which", ["a", "b"])
def test_overflow_check_covers_float16_and_float32_gradients(bad, which):
    """MXNet's multi_all_finite does not accept mixed types."""
    net, trainer = with_trainer(One(), "sgd")
    data = {"a": ones(1e-3), "b": ones(1e-3)}
    data[which][2] = bad
    trainer.backward(recorded(net, data["a"], data["b"]))
    assert trainer.overflowed == (getattr(net, which).name,)
    assert trainer.step(1) is False
    assert trainer.overflowed == (getattr(net, which).name,)


@pytest.mark.parametrize("kvstore", [None, "device", "local"])
def test_overflow_check_covers_every_device(kvstore):
    """mx.contrib.amp checks the gradients of the first device only."""
    devices = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    net, trainer = with_trainer(One(devices=devices), "sgd", kvstore=kvstore, loss_scale=64)
    for bad in devices:
        trainer.backward([recorded(net, ones(np.inf if d == bad else 1, device=d), ones(device=d))
                          for d in devices])
        assert trainer.step(1) is False
    assert on_all_devices(net) == {1}


def test_skipped_step_does_not_advance_schedule_or_update_count():
    schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    net, trainer = with_trainer(One(), "nag", {"lr_scheduler": schedule},
                                loss_scale=settled(initial=2.0 ** 20))
    for _ in range(5):
        assert not learn(net, trainer, ones(), ones())
        assert (trainer.learning_rate, trainer.optimizer.num_update) == (1.0, 0)
    assert learn(net, trainer, ones(), ones())
    assert trainer.optimizer.num_update == 1


def test_overflow_check_covers_more_than_200_parameters():
    """MXNet's GPU kernel takes at most 200 arrays."""
    net = gluon.Block()
    for i in range(450):
        net.params.get(f"p{i}", shape=(2,), init="ones", dtype="float16" if i % 2 else "float32")
    net, trainer = with_trainer(ready(net), "sgd")
    parameters = list(net.params.values())
    for bad in (0, 199, 200, 449):
        with autograd.record():
            sums = [p.data().astype("float32").sum() for p in parameters]
            sums[bad] = sums[bad] * np.nan
            loss = mx.nd.add_n(*sums) * 1e-3
        trainer.backward(loss)
        assert not trainer.step(1)
        assert trainer.overflowed == (parameters[bad].name,)


def raised(net, trainer, x):
    """The message of the LossScaleError of 20 steps."""
    def learn_often():
        for _ in range(20):
            learn(net, trainer, ones(x), ones())

    with pytest.raises(amp.LossScaleError) as error:
        learn_often()
    return str(error.value)


def test_overflow_at_smallest_scale_in_first_step_has_mean_of_loss_and_no_learning_rate():
    net, trainer = with_trainer(One(), "sgd", loss_scale=dynamic(initial=2, minimum=1))
    loss = recorded(net, ones(1e5), ones()).asnumpy().mean()
    assert not learn(net, trainer, ones(1e5), ones())
    said = raised(net, trainer, 1e5)
    assert trainer.skipped == 2
    assert all((v == 1).all() for v in values(net))
    for words in (f"in {net.a.name} at the smallest loss scale, 1",
                  "No step has updated the weights, so the learning rate is not the cause",
                  "states if float32 is not finite either"):
        assert words in said
    assert "lower the learning rate" not in said
    shown = float(re.search(r"The mean of the loss is (\S+)\. ", said)[1])
    assert shown == pytest.approx(float(loss), rel=1e-3)


def test_overflow_at_smallest_scale_after_an_update_names_learning_rate(tmp_path):
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1e-9},
                                loss_scale=dynamic(minimum=1))
    assert learn(net, trainer, ones(1e-3), ones())
    trainer.save_states(str(tmp_path / "one.states"))
    _, loaded = with_trainer(net, "sgd", loss_scale=dynamic(minimum=1))
    loaded.load_states(str(tmp_path / "one.states"))
    for one in (trainer, loaded):
        assert "If the loss has grown, lower the learning rate" in raised(net, one, 1e5)


def test_weights_that_are_not_finite_are_named():
    net, trainer = with_trainer(One(), "sgd", loss_scale=dynamic(initial=2.0 ** 16))
    net.a.set_data(net.a.data() * np.nan)
    assert f"The weights are not finite in {net.a.name}. " in raised(net, trainer, 1)


def test_nonfinite_loss_does_not_lower_scale(caplog):
    net, trainer = with_trainer(One(), "sgd", loss_scale=dynamic(initial=1024))
    assert learn(net, trainer, ones(np.nan), ones()) is False
    assert trainer.loss_scale == 1024
    assert "the loss itself is not finite" in caplog.text
    for _ in range(14):
        learn(net, trainer, ones(np.nan), ones())
    with pytest.raises(amp.LossScaleError, match=r"16 steps .* the loss itself is not finite"):
        learn(net, trainer, ones(np.nan), ones())
    assert trainer.skipped == 16


def test_static_scale_raises_only_after_16_consecutive_skips(caplog):
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1e-9}, loss_scale=2 ** 10)
    for _ in range(30):
        assert not learn(net, trainer, ones(100), ones())
        assert learn(net, trainer, ones(), ones())
    assert "which is static" in caplog.text
    assert "gluon_amp.explain" in caplog.text
    for _ in range(15):
        assert not learn(net, trainer, ones(100), ones())
    with pytest.raises(amp.LossScaleError, match=f"16 steps .* in {net.a.name} .* static"):
        learn(net, trainer, ones(100), ones())


def test_skipped_step_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "gluon_amp")
    net = One()
    learn(net, amp.Trainer(net.collect_params(), "sgd", loss_scale=settled()), ones(), ones())
    message, = (record.getMessage() for record in caplog.records)
    assert net.a.name in message
    assert "65536 -> 32768" in message


@pytest.mark.parametrize("kwargs", [
    {"loss_scale": 8}, {"loss_scale": None, "clip_norm": 1}, {"loss_scale": None}])
def test_overflowed_names_parameters_of_newest_gradients(kwargs):
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 0}, **kwargs)
    trainer.backward(recorded(net, ones(np.inf), ones()))
    assert trainer.overflowed == (net.a.name,)
    checked = len(kwargs) > 1 or trainer.loss_scale > 1
    assert trainer.step(1) is not checked
    assert trainer.skipped == checked
    trainer.backward(recorded(net, ones(), ones()))
    assert trainer.overflowed == ()
    trainer.step(1)
    assert trainer.overflowed == ()


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
@pytest.mark.parametrize("devices", [1, 2])
def test_float64_parameters_of_a_plain_block_train_in_float64(name, devices):
    class Scaled(gluon.Block):
        def __init__(self):
            super().__init__()
            self.factor = self.params.get("factor", shape=(3,), dtype="float64", init="ones")
            self.dense = nn.Dense(2, in_units=3)

        def forward(self, x):
            return self.dense((x * self.factor.data(x.ctx)).astype("float32"))

    contexts = DEVICES[:devices]
    net, trainer = with_trainer(ready(amp.convert(Scaled()), mx.init.Normal(1), ctx=contexts), name,
                                {"learning_rate": 1e-9}, clip_norm=1.0)
    for by_hand in (False, True):
        trainer.backward(recorded(lambda: [
            nd.square(net(nd.ones((4, 3), ctx=context, dtype="float64"))).sum()
            for context in contexts]))
        if by_hand:
            trainer.allreduce_grads()
            assert trainer.unscale()[net.factor.name][0].dtype == np.float64
        assert trainer.update(4) if by_hand else trainer.step(4)
    moved = np.abs(net.factor.data(contexts[-1]).asnumpy() - 1)
    assert moved.dtype == np.float64
    assert ((moved > 0) & (moved < 1e-8)).all()  # float32 has no numbers between 1 - 6e-8 and 1


def test_overflow_of_float64_gradients_skips_the_step():
    weight = ready(gluon.Parameter("weight", shape=(2,), dtype="float64", init="ones"))
    trainer = amp.Trainer([weight], "sgd", loss_scale=1)
    for factor, updates in ((np.inf, False), (1e100, True)):
        with autograd.record():
            loss = (weight.data() * factor).sum()
        trainer.backward(loss)
        assert trainer.step(1) is updates


@pytest.mark.parametrize("name", ["adamw", "rmsprop", "adagrad", "ftrl"])
def test_optimizers_for_float32_refuse_float64_parameters(name):
    weight = ready(gluon.Parameter("weight", shape=(2,), dtype="float64", init="ones"))
    trainer = amp.Trainer([weight], name)
    trainer.backward(recorded(lambda: weight.data().sum()))
    with pytest.raises(ValueError, match=r"16-bit parameters only.* float64 parameter weight"):
        trainer.step(1)
