"""amp.Trainer: clipping, and gradients that one changes by hand."""
import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from trainers import (
    LOSS,
    SGD,
    One,
    fit,
    learn,
    make,
    ones,
    recorded,
    same,
    some_batches,
    values,
)


@pytest.fixture()
def batches(rng):
    return some_batches(rng)


def recorded_loss(net, x, y):
    with autograd.record():
        return LOSS(net(x), y)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("scaling", [None, 2.0 ** 10, "dynamic"])
def test_clipping_is_that_of_gluon_in_float32(by_hand, scaling, batches):
    net, stock = make(), make()
    trainer = amp.Trainer(net.collect_params(), "sgd", SGD, loss_scale=scaling,
                          clip_norm=None if by_hand else 0.1)
    reference = gluon.Trainer(stock.collect_params(), "sgd", SGD)
    for x, y in batches:
        with autograd.record():
            loss = LOSS(stock(x), y)
        loss.backward()
        grads = [p.grad() for p in stock.collect_params().values() if p.grad_req != "null"]
        norm = gluon.utils.clip_global_norm(grads, 0.1 * len(y)) / len(y)
        reference.step(len(y))
        with autograd.record():
            loss = LOSS(net(x), y)
        trainer.backward(loss)
        if by_hand:
            trainer.allreduce_grads()
            assert trainer.clip_norm(0.1, len(y)) == pytest.approx(norm, rel=1e-5)
            assert trainer.update(len(y))
        else:
            assert trainer.step(len(y))
    for mine, theirs in zip(values(net), values(stock)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_clipped_gradient_never_lands_in_float16s_subnormals():
    net = One(size=1000)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                          loss_scale=2.0 ** 16, clip_norm=0.01)
    x = ones(1e-3 / 2, 1000) * nd.arange(1, 2, 0.001)
    assert learn(net, trainer, x, x)
    moved = 1 - net.a.data().astype("float32").asnumpy()  # at 1, float16 has steps of 2**-11
    exact = x.asnumpy() * 0.01 / np.sqrt(2 * (x.asnumpy().astype("f8") ** 2).sum())
    np.testing.assert_allclose(1 - net.b.data().asnumpy(), exact, atol=1e-7)
    master = trainer._updaters[0].states[0][1].asnumpy()
    np.testing.assert_allclose(1 - master, exact, rtol=2e-3)  # of gradients rounded to float16
    assert (moved == 0).any()
    assert (np.abs(net.a.grad().asnumpy()) > 30).all()


@pytest.mark.parametrize("kvstore", ["device", "local"])
def test_the_norm_is_that_of_the_sum_over_devices(kvstore):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = One(devices=devices)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, kvstore=kvstore,
                          loss_scale=8)
    with autograd.record():
        losses = [net(ones(i + 1, device=d), ones(0, device=d)) for i, d in enumerate(devices)]
    trainer.backward(losses)
    trainer.allreduce_grads()
    assert trainer.clip_norm(3, batch_size=2) == 3  # 4 times 3/2
    assert trainer.clip_norm(1.5, batch_size=2) == 3
    assert trainer.update(2)
    for device in devices:
        assert (net.a.data(device).asnumpy() == 0.25).all()


def test_a_norm_that_is_not_finite_clips_nothing_and_the_step_is_skipped():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=None, clip_norm=1)
    assert learn(net, trainer, ones(np.inf), ones()) is False
    assert trainer.skipped == 1
    assert all((v == 1).all() for v in values(net))


def test_the_norm_is_clipped_for_the_batch_size_of_the_update():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, loss_scale=8)
    trainer.backward(recorded(net, ones(2), ones(0)))
    assert trainer.clip_norm(1) == 4
    assert trainer.update(2)
    assert (net.a.data().asnumpy() == 0.5).all()


def test_unscaled_gradients_are_float32_and_the_update_uses_what_one_makes_of_them():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, loss_scale=2.0 ** 16)
    with autograd.record():
        loss = net(ones(1e-6), ones(2))
    trainer.backward(loss)
    grads = trainer.unscale()
    assert list(grads) == [net.a.name, net.b.name]
    assert grads[net.a.name][0].dtype == np.float32
    np.testing.assert_allclose(grads[net.a.name][0].asnumpy(), 1e-6, rtol=1e-3)
    assert (net.a.grad().asnumpy() > 0.06).all()  # as it was: scaled
    grads[net.a.name][0][:] = 3
    grads[net.b.name][0][:] *= 0.5
    assert trainer.update(2)
    assert (net.a.data().asnumpy() == -0.5).all()
    assert (net.b.data().asnumpy() == 0.5).all()


@pytest.mark.parametrize("name", ["sgd", "adam", "nag", "lamb", "adamw"])
def test_unscale_and_update_is_a_step(name, batches):
    net, other = make("float16"), make("float16")
    trainers = [amp.Trainer(n.collect_params(), name, {"learning_rate": 0.01}, loss_scale=1024)
                for n in (net, other)]
    fit(net, trainers[0], batches[:5])
    for x, y in batches[:5]:
        with autograd.record():
            loss = LOSS(other(x), y)
        trainers[1].backward(loss)
        trainers[1].unscale()
        trainers[1].update(len(y))
    assert same(net, other)


def test_without_scaling_too_a_new_backward_pass_makes_unscaled_gradients_anew():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, loss_scale=None)
    for x in (2, 3):
        trainer.backward(recorded(net, ones(x), ones(x)))
        assert (trainer.unscale()[net.a.name][0].asnumpy() == x).all()
    trainer.update(1)
    assert (net.a.data().asnumpy() == -2).all()


@pytest.mark.parametrize("scaling", [None, 2.0 ** 10])
def test_what_unscale_returns_may_be_clipped_with_gluons_own_function(scaling, batches):
    x, y = batches[0]
    net, stock = make(), make()
    trainer = amp.Trainer(net.collect_params(), "sgd", SGD, loss_scale=scaling)
    trainer.backward(recorded_loss(net, x, y))
    norm = gluon.utils.clip_global_norm([g for grads in trainer.unscale().values() for g in grads],
                                        0.1)
    assert trainer.update(len(y))
    recorded_loss(stock, x, y).backward()
    grads = [p.grad() for p in stock.collect_params().values() if p.grad_req != "null"]
    assert norm == pytest.approx(gluon.utils.clip_global_norm(grads, 0.1), rel=1e-5)
    gluon.Trainer(stock.collect_params(), "sgd", SGD).step(len(y))
    for mine, theirs in zip(values(net), values(stock)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaling", [None, 2.0 ** 10])
def test_gradients_that_are_clipped_after_unscale_are_an_error(scaling, batches):
    """The update uses what unscale returned: it would not be clipped at all."""
    x, y = batches[0]
    net = make()
    before = values(net)
    trainer = amp.Trainer(net.collect_params(), "sgd", SGD, loss_scale=scaling)
    trainer.backward(recorded_loss(net, x, y))
    trainer.unscale()
    gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()
                                  if p.grad_req != "null"], 0.1)
    with pytest.raises(RuntimeError, match=r"written after trainer\.unscale\(\).*change that"):
        trainer.update(len(y))
    assert all(map(np.array_equal, values(net)[-2:], before[-2:]))


@pytest.mark.parametrize("call", ["step", "allreduce_grads"])
def test_unscale_before_the_sum_over_devices_is_an_error(call):
    """Each device would take a step of its own."""
    devices = [mx.cpu(0), mx.cpu(1)]
    net = One(devices=devices)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, loss_scale=8)
    trainer.backward([recorded(net, ones(i, device=d), ones(device=d))
                      for i, d in enumerate(devices)])
    trainer.unscale()
    with pytest.raises(RuntimeError, match=r"allreduce_grads\(\), then unscale\(\), then update"):
        trainer.step(1) if call == "step" else trainer.allreduce_grads()
    assert all((net.a.data(d).asnumpy() == 1).all() for d in devices)


@pytest.mark.parametrize("scaling", [None, 1024, "dynamic"])
@pytest.mark.parametrize("layers", ["float16", "float16 and a norm"])
def test_gluons_clipping_of_a_converted_network_names_what_to_call(layers, scaling):
    """MXNet says that its dot has no float16, or that float16 and float32 do not fit."""
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=5))
    if layers != "float16":
        net.add(nn.LayerNorm(in_channels=4))
    net.initialize()
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=scaling)
    with autograd.record():
        loss = net(nd.ones((2, 5))).sum(axis=1)
    trainer.backward(loss)
    grads = [p.list_grad()[0] for p in net.collect_params().values()]
    assert all(np.isfinite(g.asnumpy()).all() for g in grads)
    with pytest.raises(TypeError, match=r"clip_global_norm.*trainer\.clip_norm\(.*clip_norm="):
        gluon.utils.clip_global_norm(grads, 0.1)
    assert trainer.step(2)
    amp.restore(net)
    gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], 0.1)
