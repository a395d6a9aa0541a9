"""amp.Trainer: errors at the call that is wrong."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import Calling, ready, sequence
from trainers import (
    DEVICES,
    LOSS,
    One,
    backward,
    clip,
    make,
    on_all_devices,
    ones,
    recorded,
    settled,
    some_batches,
    values,
    with_trainer,
)

pytestmark = pytest.mark.numpy


def test_gradients_overwritten_by_another_trainer_are_refused():
    net = One()
    mine = amp.Trainer([net.a], "sgd", loss_scale=2)
    other = amp.Trainer([net.b], "sgd", loss_scale=1024)
    with autograd.record():
        loss = net(ones(), ones())
        again = net(ones(), ones())
    mine.backward(loss)
    other.backward(again)
    with pytest.raises(RuntimeError, match=f"gradients in {net.a.name} were written by another"):
        mine.step(1)
    assert other.step(1)
    loss = recorded(lambda: net(ones(), ones()))
    mine.backward(loss)
    assert mine.step(1)


def test_accumulating_scaled_on_unscaled_gradients_is_refused():
    net, trainer = with_trainer(One(grad_req="add"), "sgd", loss_scale=8)
    recorded(net, ones(), ones()).backward()
    with pytest.raises(RuntimeError, match=r"written by another backward pass"):
        trainer.backward(recorded(net, ones(), ones()))
    recorded(net, ones(), ones()).backward()
    net.collect_params().zero_grad()
    trainer.backward(recorded(net, ones(), ones()))
    assert trainer.step(1)


def test_gradients_are_not_all_reduced_twice():
    for grad_req in ("add", "write"):
        net, trainer = with_trainer(One(grad_req, DEVICES), "sgd", {"learning_rate": 0.5},
                                    loss_scale=8)
        backward(net, trainer)
        trainer.allreduce_grads()
        if grad_req == "add":
            with pytest.raises(RuntimeError, match=r"been summed since .* before backward\(\)"):
                backward(net, trainer)
            net.collect_params().zero_grad()
        backward(net, trainer)
        trainer.step(4)
        assert on_all_devices(net) == {1 - 0.5 * 2 / 4}
    # gradients that only the first of two passes writes would be summed twice
    backward(net, trainer)
    trainer.allreduce_grads()
    trainer.backward(recorded(lambda: [(net.b.data(d) * 1).sum() for d in DEVICES]))
    with pytest.raises(UserWarning, match=f"has not computed the gradients in {net.a.name}"):
        trainer.step(4)


def test_float16_losses_are_refused():
    net, trainer = with_trainer(One(), "sgd")
    loss = recorded(net, ones(), ones())
    half = recorded(lambda: recorded(net, ones(), ones()).astype("float16"))
    with pytest.raises(ValueError, match=r"the loss is float16.*take it in float32"):
        trainer.backward([loss, half])
    with pytest.raises(TypeError, match=r"a loss or a list of losses. Received: float"):
        trainer.backward(0.5)


@pytest.mark.parametrize(("name", "call"), [
    ("step", lambda t: t.step(1)), ("update", lambda t: t.update(1)),
    ("unscale", lambda t: t.unscale()), ("clip_norm", lambda t: t.clip_norm(1))])
def test_methods_require_trainer_backward(name, call):
    net, trainer = with_trainer(One(), "sgd", loss_scale=8)
    with pytest.raises(RuntimeError, match=rf"{name}\(\) needs new gradients: call "
                       r"trainer.backward\(loss\), not loss.backward\(\)"):
        call(trainer)
    recorded(net, ones(), ones()).backward()  # which applies no scale
    with pytest.raises(RuntimeError, match=r"call trainer.backward\(loss\), not loss.backward\(\)"):
        call(trainer)
    trainer.backward(recorded(net, ones(), ones()))
    call(trainer)


@pytest.mark.parametrize("loss_scale", [None, 8])
def test_clipping_before_the_sum_over_devices_is_refused(loss_scale):
    net, trainer = with_trainer(One(devices=DEVICES), "sgd", loss_scale=loss_scale)
    backward(net, trainer)
    with pytest.raises(RuntimeError, match=r"clip_norm\(\) before the sum .*allreduce_grads\(\)"):
        trainer.clip_norm(1)


def test_parameter_given_twice_is_refused():
    net = One()
    with pytest.raises(ValueError, match=f"each parameter once. Received twice: {net.a.name}$"):
        amp.Trainer([net.a, net.b, net.a], "sgd")


@pytest.mark.parametrize("loss_scale", [None, 8])
def test_unscaling_for_an_optimizer_without_master_weights_is_refused(loss_scale):
    net, trainer = with_trainer(One(), amp.optimizer("sgd", multi_precision=False),
                                loss_scale=loss_scale)
    (autograd if loss_scale is None else trainer).backward(recorded(net, ones(), ones()))
    with pytest.raises(RuntimeError, match=r"need an optimizer with master weights.*" + net.a.name):
        trainer.unscale()


def test_second_step_or_unscale_is_refused():
    net, trainer = with_trainer(One(), "sgd", loss_scale=8)
    for bad in (1.0, np.inf):
        trainer.backward(recorded(net, ones(bad), ones()))
        trainer.unscale()
        with pytest.raises(RuntimeError, match=r"unscale\(\) was already called"):
            trainer.unscale()
        trainer.step(1)
        with pytest.raises(RuntimeError, match=r"step\(\) needs new gradients"):
            trainer.step(1)


def test_stale_gradient_raises_before_any_update():
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1}, loss_scale=8)
    stock = gluon.Trainer(net.collect_params(), "sgd")  # which raises a UserWarning, too
    for each, backward_of in ((stock, autograd.backward), (trainer, trainer.backward)):
        backward_of(recorded(lambda: (net.a.data().astype("float32") * 2).sum()))
        with pytest.raises(UserWarning, match=net.b.name) as caught:
            each.step(1)
        if each is stock:
            net.a.set_data(net.a.data() * 0 + 1)  # it updates what comes before
    assert f"not computed the gradients in {net.b.name} since" in str(caught.value)
    assert all((v == 1).all() for v in values(net))
    assert trainer.step(1, ignore_stale_grad=True)
    assert (net.a.data().asnumpy() == -1).all()
    assert (net.b.data().asnumpy() == 1).all()
    with autograd.record():
        loss = ones() * 2
        loss.attach_grad()
        loss = loss * 2
    trainer.backward(loss)
    with pytest.raises(UserWarning, match="the loss does not depend on them"):
        trainer.step(1, ignore_stale_grad=True)


WRITES = {
    # It does not accept float16 on a CPU.
    "clip_global_norm": lambda grads: clip(grads[1:], 1),
    "multiply": lambda grads: [g.__imul__(0.5) for g in grads],
    "set": lambda grads: [g.__setitem__(slice(None), 3) for g in grads],
    "set one": lambda grads: grads[0].__setitem__(1, 3),
    "operator": lambda grads: nd.clip(grads[0], -1, 1, out=grads[0]),
    "zero": lambda grads: grads[0].__setitem__(slice(None), 0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("ends", ["step", "update", "clip_norm", "unscale", "backward"])
def test_writes_into_scaled_gradients_are_refused(write, ends):
    """gluon.utils.clip_global_norm would clip scaled gradients, which the update divides by the
    scale."""
    net = One("add" if ends == "backward" else "write")
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=1024)
    call = {"step": lambda: trainer.step(1), "update": lambda: trainer.update(1),
            "clip_norm": lambda: trainer.clip_norm(1), "unscale": trainer.unscale,
            "backward": lambda: (trainer.backward(recorded(net, ones(), ones())), trainer.step(1))}
    for _ in range(2):
        trainer.backward(recorded(net, ones(), ones()))
        WRITES[write]([net.a.grad(), net.b.grad()])
        with pytest.raises(RuntimeError, match="gradients in .* were written between.*"
                                               r"scale, 1024.*trainer.clip_norm.*unscale\(\)"):
            call[ends]()
        assert all((v == 1).all() for v in values(net))
    net.collect_params().zero_grad()
    trainer.backward(recorded(net, ones(), ones()))
    assert trainer.step(1)


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("summed", [False, True])
def test_zero_grad_discards_gradients(summed, devices, grad_req):
    """Of passes before which no step was taken, with a scale and without."""
    def trained(**kwargs):
        net, trainer = with_trainer(One(grad_req, DEVICES[:devices]), "sgd", {"learning_rate": 1},
                                    **kwargs)
        for number in range(1, 5):
            backward(net, trainer, number)
            if number % 2:
                if summed:
                    trainer.allreduce_grads()
            else:
                assert trainer.step(1)
            net.collect_params().zero_grad()
        return values(net)

    for one, other in zip(trained(loss_scale=64), trained(loss_scale=None)):
        assert (one == other).all()
    assert (one < 1).all()


def test_writes_after_allreduce_are_refused_and_reads_are_not():
    net, trainer = with_trainer(One(devices=DEVICES), "sgd", {"learning_rate": 1}, loss_scale=8)
    for last in (False, True):
        backward(net, trainer)
        gradients = [g for p in (net.a, net.b) for g in p.list_grad()]
        if last:
            break
        for gradient in gradients:
            assert (gradient.asnumpy() == 8).all()
            assert gradient[1].asnumpy().item() == 8
        trainer.allreduce_grads()
        assert trainer.clip_norm(1e9) > 0
        assert trainer.update(1)
    trainer.allreduce_grads()
    gradients[1][:] = 0
    with pytest.raises(RuntimeError, match=f"gradients in {net.a.name} were written between"):
        trainer.update(1)


def test_gradients_can_be_written_without_scale():
    for kwargs in ({"loss_scale": None}, {"loss_scale": None, "clip_norm": 9}):
        net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1}, **kwargs)
        trainer.backward(recorded(net, ones(), ones()))
        for gradient in (net.a.grad(), net.b.grad()):
            gradient *= 0.5
        assert trainer.step(1)
        assert (net.b.data().asnumpy() == 0.5).all()


class Headed(gluon.HybridBlock):
    """A loss that starts its gradient: no loss scale reaches it."""

    def hybrid_forward(self, F, x, y):
        return F.SoftmaxOutput(x, y)


def by_trainer(loss, trainer):
    trainer.backward(loss)


def by_scaled_loss(loss, trainer):
    with autograd.record(), amp.scale_loss(loss, trainer) as scaled:
        autograd.backward(scaled)


by_either = pytest.mark.parametrize("backward", [by_trainer, by_scaled_loss])


@by_either
@pytest.mark.parametrize("how", ["float16", "plain", "hybridized", "static"])
@pytest.mark.parametrize("scale", [64, "dynamic"])
@pytest.mark.parametrize("head", ["SoftmaxOutput", "LinearRegressionOutput", "MakeLoss",
                                  "LogisticRegressionOutput", "MAERegressionOutput", "make_loss"])
def test_loss_heads_in_network_are_refused_at_first_backward(head, scale, how, backward):
    """Their gradients are not scaled, but the update would divide them by the scale."""
    def forward(F, x, y, dense):
        x = dense(x)
        return getattr(F, head)(*([F.square(x - y)] if head.lower()[:4] == "make" else [x, y]))

    net = ready(Calling(forward, nn.Dense(3, in_units=4)))
    data, label = nd.ones((2, 4)), nd.zeros(2) if head == "SoftmaxOutput" else nd.ones((2, 3))
    net(data, label)
    if how == "float16":
        amp.convert(net)
    elif how != "plain":
        net.hybridize(static_alloc=how == "static")
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=scale)
    before = values(net)
    loss = recorded(net, data, label)
    with pytest.raises(ValueError, match=f"so the loss scale: {head}"):
        backward(loss, trainer)
    with pytest.raises(RuntimeError, match=r"step\(\) needs new gradients"):
        trainer.step(2)
    assert all(map(np.array_equal, before, values(net)))
    free = amp.Trainer(net.collect_params(), "sgd", loss_scale=None)
    backward(recorded(net, data, label), free)
    assert free.step(2)


@by_either
@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("case", ["later", "added", "after another loss"])
def test_loss_head_of_a_later_loss_is_refused(case, hybridized, backward):
    net, head, loss_fn = nn.Dense(3, in_units=4), Headed(), gluon.loss.SoftmaxCrossEntropyLoss()
    net.initialize()
    if hybridized:
        head.hybridize()
        loss_fn.hybridize()
    amp.convert(net)
    if case == "added":
        net.collect_params().setattr("grad_req", "add")
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=64)
    data, label = nd.ones((2, 4)), nd.zeros(2)

    def backward_from(loss_fn):
        loss = recorded(lambda: loss_fn(net(data), label))
        backward(loss, trainer)

    for _ in range(3):
        backward_from(loss_fn)
        if case == "later":
            assert trainer.step(2)
    before = values(net)
    with pytest.raises(ValueError, match="so the loss scale: SoftmaxOutput"):
        backward_from(head)
    assert all(map(np.array_equal, before, values(net)))


@by_either
def test_loss_head_whose_gradient_goes_nowhere_is_accepted(backward):
    """Such as that of a number to log."""
    net, trainer = with_trainer(ready(nn.Dense(3, in_units=4)), "sgd", loss_scale=64)
    with autograd.record():
        loss = nd.Dropout(net(nd.ones((2, 4))), p=0.5)
        loss = loss + nd.MakeLoss(nd.BlockGrad(loss)) * 0
    backward(loss, trainer)
    assert trainer.step(2)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_scaled_loss_makes_the_only_pass_through_a_loop_in_a_block(policy):
    def forward(F, x, dense):
        return F.contrib.foreach(lambda x, s: (dense(x) + s, s * 2), x, F.ones((2, 3)))[0]

    net = ready(Calling(forward, nn.Dense(3, in_units=3)))
    amp.convert(net, policy)
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=64)
    for _ in range(2):
        by_scaled_loss(recorded(net, nd.ones((4, 2, 3))), trainer)
        assert trainer.step(2)


@by_either
def test_loss_head_beside_a_loop_is_refused(backward):
    weight = ready(gluon.Parameter("weight", shape=(3,), init="ones"))
    trainer = amp.Trainer([weight], "sgd", loss_scale=64)

    def loss(head):
        with autograd.record():
            _, x = nd.contrib.foreach(lambda x, s: (x, s * weight.data()), nd.ones((2, 3)),
                                      nd.ones(3))
            return head(x.reshape((1, 3)))

    with pytest.raises(ValueError, match="so the loss scale: SoftmaxOutput"):
        backward(loss(lambda x: nd.SoftmaxOutput(x, nd.zeros(1))), trainer)
    backward(loss(nd.square), trainer)
    assert trainer.step(1)


@pytest.mark.parametrize("hybridized", [False, True])
def test_scaled_loss_keeps_the_only_pass_of_mxnets_dropout(hybridized):
    """One of two would ignore what was dropped."""
    net = ready(sequence(nn.Dense(512, in_units=1), nn.Dropout(0.5)), mx.init.One())
    if hybridized:
        net.hybridize()
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=64)
    loss = recorded(lambda: net(nd.ones((1, 1))))
    by_scaled_loss(loss, trainer)
    kept = loss.asnumpy().ravel()
    assert set(kept) == {0, 2}
    assert np.array_equal(net[0].weight.grad().asnumpy().ravel(), kept * 64)
    loss = recorded(lambda: Headed()(net(nd.ones((1, 1))), nd.zeros(1)))
    with pytest.raises(ValueError, match="so the loss scale: SoftmaxOutput"):
        by_scaled_loss(loss, trainer)


def test_no_loss_is_refused():
    _, trainer = with_trainer(One(), "sgd")
    with pytest.raises(ValueError, match=r"a list of losses. Received: an empty list"):
        trainer.backward([])


def test_no_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match=r"needs parameters. Received: none"):
        amp.Trainer([], "sgd")
    net, trainer = with_trainer(One(), "sgd", loss_scale="dynamic")
    net.collect_params().setattr("grad_req", "null")
    with pytest.raises(RuntimeError, match="nothing to train: all parameters of"):
        trainer.backward(ones())
    with pytest.raises(RuntimeError, match="nothing to train: all parameters of"):
        trainer.step(1)


def test_constants_alone_train_without_a_loss_scale():
    """As with MXNet's Trainer, whose step then does nothing."""
    constant = gluon.Constant("c", nd.ones(2))
    constant.initialize()
    trainer = amp.Trainer([constant], "sgd")
    assert trainer.step(1)
    assert constant.data().asnumpy().tolist() == [1, 1]


@pytest.mark.parametrize("scaling", [{"loss_scale": "dynamic"}, {"loss_scale": 2},
                                     {"loss_scale": None, "clip_norm": 1}])
def test_update_on_kvstore_is_refused_with_overflow_check(scaling):
    params = One(devices=DEVICES).collect_params()
    with pytest.raises(ValueError, match=r"must be False or None. Received: True"):
        amp.Trainer(params, "sgd", update_on_kvstore=True, **scaling)
    with pytest.raises(ValueError, match="dist_async updates on its servers: use dist_sync"):
        amp.Trainer(params, "sgd", kvstore="dist_async", **scaling)


def test_kvstore_does_not_update_with_overflow_check(monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "1")
    net, trainer = with_trainer(One(devices=DEVICES), "sgd", kvstore=mx.kv.create("device"),
                                loss_scale=settled())
    backward(net, trainer)
    assert not trainer.step(1)
    assert all((v == 1).all() for v in values(net))


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"loss_scale": "static"}, "loss_scale takes"), ({"loss_scale": 0}, "loss_scale must be a"),
    ({"loss_scale": True}, "loss_scale takes"), ({"clip_norm": 0}, "clip_norm must be a positive"),
    ({"clip_norm": float("nan")}, "clip_norm must be"), ({"optimizer": "sdg"}, "unknown optimizer"),
    ({"optimizer": "lbsgd"}, "lbsgd adds up")])
def test_bad_arguments_are_refused_at_construction(kwargs, message):
    params = One().collect_params()
    with pytest.raises(ValueError, match=message):
        amp.Trainer(params, **{"optimizer": "sgd", **kwargs})


def test_bad_batch_size_is_refused():
    net, trainer = with_trainer(One(), "sgd", loss_scale=8)
    trainer.backward(recorded(net, ones(), ones()))
    with pytest.raises(ValueError, match=r"batch_size must be a positive, finite number.*: 0"):
        trainer.step(0)
    assert trainer.step(1)


def test_16_bit_weights_of_several_trainers_are_refused_unless_one_follows_the_other(rng):
    """Each Trainer has master weights, whose small updates the other one would undo."""
    def trained(order, policy):
        mx.random.seed(1)
        net = amp.convert(make(), policy)
        trainers = [amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
                    for _ in range(2)]
        data, label = next(iter(some_batches(rng)))
        for which in order:
            trainers[which].backward(recorded(lambda: LOSS(net(data), label)))
            trainers[which].step(6)

    for order in ([0, 0, 1, 1], [1, 0, 0], [0, 0]):
        trained(order, "float16")
    trained([0, 1, 0, 1], "mixed_float16")
    for order in ([0, 1, 0], [1, 0, 1]):
        with pytest.raises(RuntimeError, match=r"step\(\): another Trainer has updated.*weight"):
            trained(order, "float16")


class Plain(mx.optimizer.Optimizer):
    """Descends without states, and ignores rescale_grad."""

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        weight[:] = weight - self.lr * self.scaled(grad)

    def scaled(self, grad):
        return grad


class Rescaled(Plain):
    def scaled(self, grad):
        return grad * self.rescale_grad


class Sign(Plain):
    def scaled(self, grad):
        return grad / abs(grad)


class Needs(Plain):
    """Fails for weights that it has not been told of."""

    def scaled(self, grad):
        return self.matrices[grad.shape] * grad


def test_optimizers_that_ignore_rescale_grad_are_refused():
    net = make()
    mod = amp.Module(mx.sym.LinearRegressionOutput(mx.sym.var("data"), name="out"),
                     label_names=["out_label"], loss_scale=8)
    mod.bind([("data", (2, 3))], [("out_label", (2, 3))])
    mod.init_params()
    with pytest.raises(ValueError, match=r"Plain ignores rescale_grad.*Valid: gradients times"):
        amp.Trainer(net.collect_params(), Plain(), loss_scale=8)
    with pytest.raises(ValueError, match="Plain ignores rescale_grad"):
        mod.init_optimizer(optimizer=Plain())
    amp.Trainer(net.collect_params(), Plain(), loss_scale=None)
    for other in (Rescaled(), Sign(), Needs()):
        amp.Trainer(net.collect_params(), other, loss_scale=8)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_gradient_compression_is_refused(policy):
    """Its threshold is for gradients without a scale."""
    given = {"type": "2bit", "threshold": 0.5}
    with pytest.raises(ValueError, match="gradient compression compares scaled gradients"):
        amp.Trainer(amp.convert(make(), policy).collect_params(), "sgd", compression_params=given)


@pytest.mark.mx_nd("no sparse arrays")
def test_row_sparse_weights_are_refused():
    net = One()
    net.params.get("c", shape=(4, 4), stype="row_sparse", grad_stype="row_sparse")
    net.initialize(force_reinit=True)
    with pytest.raises(ValueError, match=r"Valid: loss_scale=None.*row_sparse weights in .*c"):
        amp.Trainer(net.collect_params(), "sgd")


def test_half_of_static_pair_is_refused_with_scaled_gradients():
    params = One().collect_params()
    for kwargs in ({"loss_scale": 128}, {}):
        with pytest.raises(ValueError, match="one half of the static pair of 128"):
            amp.Trainer(params, amp.StaticLossScale(128).optimizer("sgd"), **kwargs)
    amp.Trainer(params, amp.StaticLossScale(128).optimizer("sgd"), loss_scale=None)


def test_gradients_are_stale_after_parameters_move_to_another_device():
    net, trainer = with_trainer(One(), "sgd", loss_scale=8)
    trainer.backward(recorded(net, ones(), ones()))
    net.collect_params().reset_ctx(mx.cpu(1))
    with pytest.raises(UserWarning, match="has not computed the gradients"):
        trainer.step(1)


def test_horovod_distributed_optimizer_is_refused_with_overflow_check():
    theirs = type("DistributedOptimizer", (mx.optimizer.SGD,), {"__module__": "horovod.mxnet"})
    params = One().collect_params()
    with pytest.raises(ValueError, match="give the plain optimizer, and kvstore='horovod'"):
        amp.Trainer(params, theirs())
    amp.Trainer(params, theirs(), loss_scale=None)


@pytest.mark.parametrize("loss_scale", [None, 8.0, "dynamic"])
def test_reason_of_skipped_steps_in_a_row_is_one_warning(loss_scale, caplog):
    net, trainer = with_trainer(amp.convert(ready(nn.Dense(1, in_units=2))), "sgd",
                                loss_scale=loss_scale, clip_norm=1.0)

    def step():
        trainer.backward(recorded(lambda: net(nd.ones((2, 2))) * np.inf))
        return trainer.step(2)

    with caplog.at_level("INFO"):
        assert not any(step() for _ in range(15))
        with pytest.raises(amp.LossScaleError, match="16 steps"):
            step()
    assert [record.levelname for record in caplog.records] == ["WARNING", *14 * ["INFO"]]
