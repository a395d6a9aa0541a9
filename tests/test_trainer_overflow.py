"""amp.Trainer where gradients are not finite: what is skipped, counted, named and logged."""
import logging

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet import autograd, gluon
from trainers import One, dynamic, learn, ones, recorded, settled, values


def test_an_overflow_skips_the_step_and_the_next_one_uses_the_halved_scale():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                          loss_scale=settled(initial=2.0 ** 16))
    assert learn(net, trainer, ones(), ones()) is False  # 65536 is no float16
    assert (trainer.loss_scale, trainer.skipped) == (2.0 ** 15, 1)
    assert trainer.overflowed == (net.a.name,)
    assert all((v == 1).all() for v in values(net))
    assert learn(net, trainer, ones(), ones()) is True
    assert (net.a.grad().asnumpy() == 2.0 ** 15).all()
    assert (trainer.loss_scale, trainer.skipped, trainer.overflowed) == (2.0 ** 15, 1, ())
    assert all((v == 0).all() for v in values(net))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("which", ["a", "b"])
def test_float16_and_float32_gradients_are_both_checked(bad, which):
    """MXNet's multi_all_finite raises for such a mixture."""
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd")
    data = {"a": ones(1e-3), "b": ones(1e-3)}
    data[which][2] = bad
    trainer.backward(recorded(net, data["a"], data["b"]))
    assert trainer.overflowed == (getattr(net, which).name,)
    assert trainer.step(1) is False
    assert trainer.overflowed == (getattr(net, which).name,)


@pytest.mark.parametrize("kvstore", [None, "device", "local"])
def test_every_device_is_checked(kvstore):
    """mx.contrib.amp looks at the first device's gradients only."""
    devices = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    net = One(devices=devices)
    trainer = amp.Trainer(net.collect_params(), "sgd", kvstore=kvstore, loss_scale=64)
    for bad in range(3):
        with autograd.record():
            losses = [net(ones(np.inf if i == bad else 1, device=d), ones(device=d))
                      for i, d in enumerate(devices)]
        trainer.backward(losses)
        assert trainer.step(1) is False
    assert all((v == 1).all() for v in values(net))


def test_learning_rate_schedules_and_update_counts_do_not_see_a_skipped_step():
    net = One()
    schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    trainer = amp.Trainer(net.collect_params(), "nag", {"lr_scheduler": schedule},
                          loss_scale=settled(initial=2.0 ** 20))
    for _ in range(5):
        assert not learn(net, trainer, ones(), ones())
        assert (trainer.learning_rate, trainer.optimizer.num_update) == (1.0, 0)
    assert learn(net, trainer, ones(), ones())
    assert trainer.optimizer.num_update == 1


def test_more_parameters_than_mxnets_own_check_looks_at():
    """Its kernel for GPUs takes 200 arrays."""
    net = gluon.Block()
    for i in range(450):
        net.params.get(f"p{i}", shape=(2,), init="ones", dtype="float16" if i % 2 else "float32")
    net.initialize()
    parameters = list(net.params.values())
    trainer = amp.Trainer(net.params, "sgd")
    for bad in (0, 199, 200, 449):
        with autograd.record():
            sums = [p.data().astype("float32").sum() for p in parameters]
            sums[bad] = sums[bad] * np.nan
            loss = mx.nd.add_n(*sums) * 1e-3
        trainer.backward(loss)
        assert not trainer.step(1)
        assert trainer.overflowed == (parameters[bad].name,)


def test_an_overflow_at_the_floor_is_an_error_that_names_the_parameters():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=dynamic(initial=2))
    assert not learn(net, trainer, ones(1e5), ones())
    with pytest.raises(amp.LossScaleError, match=f"in {net.a.name} at the smallest loss scale, 1"):
        learn(net, trainer, ones(1e5), ones())
    assert all((v == 1).all() for v in values(net))
    assert trainer.skipped == 2


def test_a_loss_that_is_not_finite_is_no_fault_of_the_scale(caplog):
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=dynamic(initial=1024))
    assert learn(net, trainer, ones(np.nan), ones()) is False
    assert trainer.loss_scale == 1024
    assert "the loss itself is not finite" in caplog.text
    for _ in range(14):
        learn(net, trainer, ones(np.nan), ones())
    with pytest.raises(amp.LossScaleError, match=r"16 steps .* the loss itself is not finite"):
        learn(net, trainer, ones(np.nan), ones())
    assert trainer.skipped == 16


def test_a_static_scale_that_never_fits_is_an_error_and_one_that_mostly_does_is_not(caplog):
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-9}, loss_scale=2 ** 10)
    for _ in range(30):
        assert not learn(net, trainer, ones(100), ones())
        assert learn(net, trainer, ones(), ones())
    assert "which is static" in caplog.text
    assert "gluon_amp.explain" in caplog.text
    for _ in range(15):
        assert not learn(net, trainer, ones(100), ones())
    with pytest.raises(amp.LossScaleError, match=f"16 steps .* in {net.a.name} .* static"):
        learn(net, trainer, ones(100), ones())


def test_what_is_skipped_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "gluon_amp")
    net = One()
    learn(net, amp.Trainer(net.collect_params(), "sgd", loss_scale=settled()), ones(), ones())
    assert [r.getMessage() for r in caplog.records] == [
        f"step skipped: gradients not finite in {net.a.name}; loss scale 65536 -> 32768"]


def test_overflowed_names_the_newest_gradients_with_and_without_a_scale():
    for kwargs in ({"loss_scale": 8}, {"loss_scale": None, "clip_norm": 1}, {"loss_scale": None}):
        net = One()
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0}, **kwargs)
        trainer.backward(recorded(net, ones(np.inf), ones()))
        assert trainer.overflowed == (net.a.name,)
        trainer.step(1)
        trainer.backward(recorded(net, ones(), ones()))
        assert trainer.overflowed == ()
        trainer.step(1)
        assert trainer.overflowed == ()
