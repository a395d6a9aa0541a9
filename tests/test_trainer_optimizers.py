"""amp.Trainer: optimizers, sparse gradients, and weights that are written between steps."""
import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from trainers import LOSS, SGD, One, fit, learn, make, ones, recorded, same, some_batches, values


@pytest.fixture()
def batches(rng):
    return some_batches(rng)


def test_gradients_are_only_read_by_adadelta_too():
    """MXNet's multiplies them in place."""
    net = One()
    trainer = amp.Trainer(net.collect_params(), "adadelta", loss_scale=8)
    trainer.backward(recorded(net, ones(), ones()))
    grads = [net.a.grad(), net.b.grad(), *(g[0] for g in trainer.unscale().values())]
    before = [g.asnumpy() for g in grads]
    trainer.update(4)
    mx.nd.waitall()
    assert all(map(np.array_equal, before, [g.asnumpy() for g in grads]))


def test_an_optimizer_with_masters_of_its_own_stays_as_it_is():
    class Own(mx.optimizer.Optimizer):
        def create_state_multi_precision(self, index, weight):
            return None, weight.astype("float32")

        def update_multi_precision(self, index, weight, grad, state):
            state[1][:] -= self.lr * self.rescale_grad * grad.astype("float32")
            state[1].astype(weight.dtype).copyto(weight)

    net = One()
    trainer = amp.Trainer(net.collect_params(), Own(learning_rate=0.25), loss_scale=64)
    for _ in range(3):
        assert learn(net, trainer, ones(), ones())
    assert all((v == 0.25).all() for v in values(net))


def test_sgds_momentum_may_be_switched_off():
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25, "momentum": 0.5},
                          loss_scale=64)
    assert learn(net, trainer, ones(), ones())
    trainer.optimizer.momentum = 0.0
    assert learn(net, trainer, ones(), ones())
    assert all((v == 0.5).all() for v in values(net))


@pytest.mark.parametrize("name", ["sgd", "nag", "adam"])
def test_row_sparse_gradients_of_float16_weights_update_as_float32s(name):
    def train(dtype):
        weight = nd.ones((4, 2), dtype=dtype)
        updater = mx.optimizer.Updater(amp.optimizer(name, learning_rate=0.125, wd=0.125))
        for row in (1, 3, 3):
            grad = mx.nd.sparse.row_sparse_array((np.ones((1, 2)), [row]), shape=(4, 2))
            updater(0, grad.astype(dtype), weight)
        return weight.asnumpy()

    np.testing.assert_array_equal(train("float16"), train("float32").astype("float16"))


@pytest.mark.parametrize("bad", [False, True])
def test_row_sparse_gradients_are_checked_and_clipped(bad):
    def train(cls, **kwargs):
        mx.random.seed(3)
        net = nn.Sequential()
        net.add(nn.Embedding(10, 4, sparse_grad=True), nn.Dense(1, in_units=4))
        net.initialize(mx.init.Normal(1))
        trainer = cls(net.collect_params(), "sgd", SGD, **kwargs)
        for words in ([1, 3], [3, 3], [0, 9]):
            with autograd.record():
                loss = net(nd.array(words)) * (np.nan if bad and words[0] == 0 else 1)
            trainer.backward(loss) if cls is amp.Trainer else loss.backward()
            updated = trainer.step(2)
        return values(net), updated

    scaled, updated = train(amp.Trainer, loss_scale=256, clip_norm=1e9)
    assert updated is not bad
    if not bad:
        assert all(map(np.array_equal, scaled, train(gluon.Trainer)[0]))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_masters_follow_loaded_parameters(name, batches, tmp_path):
    """MXNet's masters take the old weights back at the next step."""
    net = make("float16")
    trainer = amp.Trainer(net.collect_params(), name, {"learning_rate": 1e-6})
    fit(net, trainer, batches[:3])
    loaded = make("float16")
    for parameter in loaded.collect_params().values():
        parameter.set_data(parameter.data() * 0 + 0.5)
    loaded.save_parameters(str(tmp_path / "half.params"))
    net.load_parameters(str(tmp_path / "half.params"))
    fit(net, trainer, batches[3:4])
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            np.testing.assert_allclose(parameter.data().asnumpy(), 0.5, atol=1e-3)


def test_a_cast_after_a_step_asks_for_a_new_trainer(batches):
    net = make("float16")
    trainer = amp.Trainer(net.collect_params(), "sgd", SGD)
    fit(net, trainer, batches[:3])
    assert trainer.skipped < 3
    net.cast("float32")
    with pytest.raises(ValueError, match=r"was float16 .* make a new Trainer, .* after a cast"):
        fit(net, trainer, batches[:1])
    fit(net, amp.Trainer(net.collect_params(), "sgd", SGD), batches[:1])


def test_a_net_may_be_restored_to_look_at_it_and_converted_to_go_on(batches):
    net, other = make("float16"), make("float16")
    trainers = [amp.Trainer(n.collect_params(), "sgd", SGD, loss_scale=64) for n in (net, other)]
    for n, trainer in zip((net, other), trainers):
        fit(n, trainer, batches[:3])
    amp.restore(net)
    x, y = batches[3]
    with autograd.record(train_mode=False):
        loss = LOSS(net(x), y)
    trainers[0].backward(loss)
    with pytest.raises(ValueError, match=r"was float16 .* is float32 now: make a new Trainer"):
        trainers[0].step(len(y))
    amp.convert(net)
    for n, trainer in zip((net, other), trainers):
        fit(n, trainer, batches[4:8])
    assert same(net, other)


# ---- optimizers that are given as objects

def test_an_object_gets_masters_as_a_name_does():
    """A float16 weight of 1 does not move by 1e-4, its master does."""
    for optimizer in (mx.optimizer.SGD(learning_rate=1e-4), "sgd"):
        net = One()
        trainer = amp.Trainer(net.collect_params(), optimizer, loss_scale=64,
                              **({"optimizer_params": {"learning_rate": 1e-4}}
                                 if optimizer == "sgd" else {}))
        for _ in range(300):
            learn(net, trainer, ones(), ones())
        np.testing.assert_allclose(net.a.data().asnumpy(), 0.97, rtol=1e-3)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "adadelta", "nadam", "ftrl"])
def test_an_object_with_default_settings_trains_as_its_name_does(name, batches):
    net, other = make("float16"), make("float16")
    made = mx.optimizer.create(name, learning_rate=0.01)
    fit(net, amp.Trainer(net.collect_params(), made, loss_scale=64), batches[:5])
    fit(other, amp.Trainer(other.collect_params(), name, {"learning_rate": 0.01}, loss_scale=64),
        batches[:5])
    assert same(net, other)


def test_an_object_made_without_masters_on_purpose_is_refused_where_it_needs_them():
    net = One()
    asked = amp.optimizer("adam", multi_precision=False)
    trainer = amp.Trainer(net.collect_params(), asked, loss_scale=64)
    with pytest.raises(ValueError, match=r"Adam would divide.*Received: multi_precision=False"):
        learn(net, trainer, ones(), ones())
    plain = amp.optimizer("sgd", multi_precision=False, learning_rate=1e-4)
    net = One()
    trainer = amp.Trainer(net.collect_params(), plain, loss_scale=64)
    with pytest.warns(UserWarning, match="Accumulating with float16"):  # MXNet's
        learn(net, trainer, ones(), ones())
    assert (net.a.data().asnumpy() == 1).all()
