"""amp.lr_find: suggests a rate, and restores the network and trainer."""
import pickle

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import numbers
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready
from trainers import recorded, values

pytestmark = pytest.mark.numpy

LOSS = gluon.loss.L2Loss()


def made(policy="float16", cls=amp.Trainer, name="sgd", **kwargs):
    mx.random.seed(2)
    net = nn.HybridSequential(prefix="net_")  # the Trainer sorts names: dense10 before dense9
    with net.name_scope():
        net.add(nn.Dense(8, in_units=4, activation="tanh"), nn.BatchNorm(in_channels=8),
                nn.Dense(1, in_units=8))
    net.initialize(mx.init.Xavier())
    amp.convert(net, policy)
    return net, cls(net.collect_params(), name, {"learning_rate": 0.01}, **kwargs)


@pytest.fixture()
def batches(rng):
    x = rng.standard_normal((10, 16, 4))
    return [(nd.array(a), nd.array(a.sum(1, keepdims=True))) for a in x]


def everything(net, trainer):
    states = pickle.loads(trainer._updaters[0].get_states(dump_optimizer=True))
    return (numbers([[p.data() for p in net.collect_params().values()], states[0]]),
            trainer.learning_rate, trainer.optimizer.num_update,
            getattr(trainer, "loss_scale", 1), getattr(trainer, "skipped", 0))


def step(net, trainer, batch):
    getattr(trainer, "backward", autograd.backward)(recorded(lambda: LOSS(net(batch[0]), batch[1])))
    trainer.step(16)


def same(a, b):
    return all(map(np.array_equal, a[0], b[0])) and a[1:] == b[1:]


@pytest.mark.parametrize("trained", [0, 5])
@pytest.mark.parametrize(("policy", "cls", "name"), [
    ("float16", amp.Trainer, "sgd"), ("float16", amp.Trainer, "adam"),
    ("mixed_bfloat16", amp.Trainer, "sgd"), ("float32", gluon.Trainer, "adam")])
def test_state_is_restored_and_training_continues_unchanged(policy, cls, name, trained,
                                                                 batches):
    pairs = [made(policy, cls, name) for _ in range(2)]
    for net, trainer in pairs:
        for batch in batches[:trained]:
            step(net, trainer, batch)
    found = amp.lr_find(*pairs[0], LOSS, batches)
    assert found.rates[0] == pytest.approx(1e-6)
    assert same(everything(*pairs[0]), everything(*pairs[1]))
    for net, trainer in pairs:
        for batch in batches:
            step(net, trainer, batch)
    assert same(everything(*pairs[0]), everything(*pairs[1]))


@pytest.mark.parametrize("cls", [amp.Trainer, gluon.Trainer])
def test_grad_req_add_gives_same_rates(cls, batches):
    found = []
    for request in ("write", "add"):
        net, trainer = made("float32", cls)
        trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
        for parameter in trained:
            parameter.grad_req = request
        found.append(amp.lr_find(net, trainer, LOSS, batches, steps=20))
    assert found[0] == found[1]
    assert not any(p.grad().asnumpy().any() for p in trained)


def test_suggested_rate_learns_and_sweep_ends_at_divergence(batches):
    found = amp.lr_find(*made(), LOSS, batches, start=1e-5, end=1e4)
    assert found.rates[-1] < 1e4
    assert 1e-3 < found.suggestion < 10
    net, trainer = made()
    trainer.set_learning_rate(found.suggestion)

    def loss():
        return sum(float(LOSS(net(x), y).mean().asnumpy().item()) for x, y in batches)

    before = loss()
    for batch in 5 * batches:
        step(net, trainer, batch)
    assert loss() < 0.3 * before


def test_skipped_steps_are_not_counted(batches):
    results = [amp.lr_find(*made(loss_scale=amp.DynamicLossScale(initial=scale, maximum=2.0 ** 30)),
                           LOSS, batches[:1], end=1e-2, steps=20)
               for scale in (2.0 ** 6, 2.0 ** 30)]
    assert results[0].rates == results[1].rates
    np.testing.assert_allclose(results[0].losses, results[1].losses, rtol=0.02)


@pytest.mark.parametrize("schedule", [
    mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.25), lambda step: 0.25])
def test_schedule_is_restored(schedule, batches):
    net, _ = made()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"lr_scheduler": schedule})
    amp.lr_find(net, trainer, LOSS, batches, steps=20)
    assert trainer.learning_rate == 0.25
    assert trainer.optimizer.lr_scheduler is schedule


def test_parameters_of_the_loss_are_restored(batches):
    net, _ = made()
    head = amp.convert(ready(nn.Dense(1, in_units=1, prefix="head_"), mx.init.Xavier()))
    trainer = amp.Trainer({**net.collect_params(), **head.collect_params()}, "sgd")
    before = everything(net, trainer), values(head)
    amp.lr_find(net, trainer, lambda out, y: LOSS(head(out), y), batches, steps=20)
    assert same(before[0], everything(net, trainer))
    assert all(map(np.array_equal, before[1], values(head)))


def test_no_suggestion_if_loss_does_not_decrease(batches):
    net, trainer = made()
    found = amp.lr_find(net, trainer, lambda out, y: (out * 0).sum() + 1, batches, steps=12)
    assert found.suggestion is None


def test_a_sweep_records_for_itself(batches):
    with autograd.record():
        assert amp.lr_find(*made(), LOSS, batches, steps=10).rates


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"start": 0}, "start must be a positive"), ({"start": 2, "end": 1}, "start must be below end"),
    ({"steps": 5}, "steps must be an integer >= 10. Received: 5"),
    ({"batches": []}, "needs batches that can be iterated again"),
    ({"batches": 3}, r"batches is a list of tuples.*Received: int"),
    ({"net": None}, "net must be a gluon Block. Received: NoneType"),
    ({"trainer": None}, "trainer must be a gluon_amp.Trainer, or MXNet's. Received: NoneType")])
def test_bad_arguments_are_refused(kwargs, message, batches):
    net, trainer = made()
    before, calls = everything(net, trainer), []
    net.register_forward_hook(lambda *_: calls.append(1))
    given = {"net": net, "trainer": trainer, "loss_fn": LOSS, "batches": batches, **kwargs}
    with pytest.raises((ValueError, TypeError), match=message):
        amp.lr_find(**given)
    assert not calls
    assert same(before, everything(net, trainer))


@pytest.mark.parametrize("cls", [amp.Trainer, gluon.Trainer])
def test_loss_that_is_never_finite_has_no_rates(cls, batches):
    found = amp.lr_find(*made("float32", cls), lambda out, y: out.sum() * float("nan"), batches)
    assert (found.rates, found.losses, found.suggestion) == ([], [], None)


def test_high_first_loss_is_not_mistaken_for_decrease(batches):
    """The average starts with one batch, so its first changes are not due to rates."""
    losses = iter([5.0, 2.5] + [2.5 - 0.001 * i for i in range(38)]
                  + [2.4 - 0.1 * i for i in range(20)])

    def loss_fn(out, label):
        return 0 * out.sum() + next(losses)

    found = amp.lr_find(*made(loss_scale=None), loss_fn, batches, steps=60)
    assert found.losses[0] - found.losses[1] > max(
        a - b for a, b in zip(found.losses[1:], found.losses[2:]))
    assert found.suggestion > found.rates[38]
