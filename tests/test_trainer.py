"""amp.Trainer: what it scales, and that nothing else changes."""
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
    dynamic,
    fit,
    make,
    ones,
    recorded,
    same,
    settled,
    some_batches,
    values,
)


@pytest.fixture()
def batches(rng):
    return some_batches(rng)


@pytest.mark.parametrize("scaling", [
    {"loss_scale": "dynamic"}, {"loss_scale": 128}, {"loss_scale": None},
    {"loss_scale": amp.StaticLossScale(2.0 ** 20)},
    {"loss_scale": amp.DynamicLossScale(initial=8, growth_interval=3)}])
@pytest.mark.parametrize("name", ["sgd", "adam", "lamb", "rmsprop"])
def test_a_float32_net_trains_bit_by_bit_as_with_gluons_trainer(scaling, name, batches):
    net, stock = make(), make()
    trainer = amp.Trainer(net.collect_params(), name, {"learning_rate": 0.01}, **scaling)
    reference = gluon.Trainer(stock.collect_params(), name, {"learning_rate": 0.01})
    assert fit(net, trainer, batches) == fit(stock, reference, batches)
    assert same(net, stock)
    assert trainer.skipped == 0


def test_without_scaling_the_weights_stay_put_and_with_it_they_learn(rng):
    """Gradients of 1e-9 are 0 in float16."""
    x = nd.array(rng.standard_normal((64, 10)))
    y = nd.dot(x, nd.array(rng.standard_normal((10, 1))))
    loss_fn = gluon.loss.L2Loss(weight=1e-9)

    def train(policy, **scaling):
        mx.random.seed(3)
        net = nn.HybridSequential()
        net.add(nn.Dense(16, in_units=10, activation="relu"), nn.Dense(1, in_units=16))
        net.initialize(mx.init.Xavier())
        amp.convert(net, policy)
        before = values(net)
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e8}, **scaling)
        for _ in range(60):
            with autograd.record():
                loss = loss_fn(net(x), y)
            trainer.backward(loss)
            trainer.step(64)
        moved = not all(map(np.array_equal, before, values(net)))
        return moved, 1e9 * loss_fn(net(x), y).mean().asscalar()

    start = 0.5 * float((y ** 2).mean().asscalar())
    _, wanted = train("float32", loss_scale=None)
    assert wanted < 0.05 * start
    assert train("float16", loss_scale=None)[0] is False
    assert train("float16", loss_scale="dynamic")[1] == pytest.approx(wanted, rel=0.02)
    assert train("float16", loss_scale=2.0 ** 16)[1] == pytest.approx(wanted, rel=0.02)


def test_the_loss_stays_unscaled_and_the_gradients_are_scaled():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=1024)
    with autograd.record():
        loss = net(ones(2), ones(3))
    trainer.backward(loss)
    assert loss.asscalar() == 20
    assert (net.a.grad().asnumpy() == 2048).all()
    assert (net.b.grad().asnumpy() == 3072).all()


def test_several_losses_are_one_backward_pass():
    net = One(grad_req="write")
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, loss_scale=4)
    with autograd.record():
        losses = [net(ones(), ones()), net(ones(2), ones())]
    trainer.backward(losses)
    assert trainer.step(1)
    assert (net.a.data().asnumpy() == -2).all()


def test_accumulated_gradients_share_one_scale_and_a_skipped_step_leaves_them_clean():
    net = One("add")
    scale = settled(initial=2.0 ** 15, growth_interval=1)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, loss_scale=scale)
    for batch in (ones(), ones(), ones()):  # 3 * 2**15 is no float16
        with autograd.record():
            loss = net(batch, ones())
        trainer.backward(loss)
        scale.scale = 2.0 ** 4  # not before the next step
    assert (net.b.grad().asnumpy() == 3 * 2.0 ** 15).all()
    assert trainer.step(1) is False
    assert (net.a.grad().asnumpy() == 0).all()
    assert (net.b.grad().asnumpy() == 0).all()
    for _ in range(3):
        with autograd.record():
            loss = net(ones(), ones())
        trainer.backward(loss)
    assert trainer.step(1) is True
    assert all((v == -2).all() for v in values(net))


@pytest.mark.parametrize("how", ["backward", "scale_loss"])
def test_gradients_that_add_up_over_a_change_of_scale_are_of_one_scale(how):
    """Of two steps without zero_grad the second uses two gradients, as in float32."""
    net = One("add")
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                          loss_scale=dynamic(initial=64, growth_interval=1))
    for scale, weight in ((64, 0), (128, -2), (256, -5)):
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


def test_scale_loss_is_that_of_contrib_amp(batches):
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


def test_a_gan_step_with_two_scales_is_float32s(rng):
    def nets():
        mx.random.seed(3)
        pair = [nn.Dense(6, in_units=4), nn.Dense(1, in_units=6)]
        for net in pair:
            net.initialize(mx.init.Xavier())
        return pair

    loss_fn = gluon.loss.SigmoidBCELoss()
    noise = [nd.array(rng.standard_normal((8, 4))) for _ in range(10)]
    real = [nd.array(rng.standard_normal((8, 6))) for _ in range(10)]

    def play(make_trainer):
        g, d = nets()
        trainers = [make_trainer(g, 2.0 ** 4), make_trainer(d, 2.0 ** 14)]

        def learn(trainer, losses):
            backward = getattr(trainer, "backward", autograd.backward)
            backward(losses)
            trainer.step(8)

        for z, x in zip(noise, real):
            with autograd.record():
                fake = g(z)
                losses = [loss_fn(d(x), nd.ones(8)), loss_fn(d(fake.detach()), nd.zeros(8))]
            learn(trainers[1], losses)
            with autograd.record():
                loss = loss_fn(d(g(z)), nd.ones(8))
            learn(trainers[0], loss)
        return values(g) + values(d)

    scaled = play(lambda n, s: amp.Trainer(n.collect_params(), "adam", loss_scale=s))
    stock = play(lambda n, _: gluon.Trainer(n.collect_params(), "adam"))
    assert all(map(np.array_equal, scaled, stock))


def test_old_infinities_in_gradients_that_are_not_used_do_not_matter():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=8)
    net.b.grad()[:] = np.inf
    with autograd.record():
        loss = (net.a.data().astype("float32") * 2).sum()
    trainer.backward(loss)
    assert trainer.overflowed == ()
    assert trainer.step(1, ignore_stale_grad=True)


def test_frozen_layers_are_left_alone(batches):
    net = make("float16")
    net[0].collect_params().setattr("grad_req", "null")
    before = net[0].weight.data().asnumpy()
    trainer = amp.Trainer(net.collect_params(), "sgd", SGD, clip_norm=1)
    fit(net, trainer, batches[:5])
    assert np.array_equal(before, net[0].weight.data().asnumpy())


def test_without_checks_the_kvstore_may_update():
    devices = [mx.cpu(0), mx.cpu(1)]
    net = One(devices=devices)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, loss_scale=None,
                          update_on_kvstore=True)
    trainer.backward([recorded(net, ones(device=d), ones(device=d)) for d in devices])
    assert trainer.step(1)
    assert all((v == 0).all() for v in values(net))
