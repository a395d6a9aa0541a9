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
    mine.backward(recorded(net, ones(), ones()))
    other.backward(recorded(net, ones(), ones()))
    with pytest.raises(RuntimeError, match=f"gradients in {net.a.name} were written by another"):
        mine.step(1)
    assert other.step(1)
    mine.backward(recorded(net, ones(), ones()))
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


@pytest.mark.parametrize(("name", "call"), [
    ("step", lambda t: t.step(1)), ("update", lambda t: t.update(1)),
    ("unscale", lambda t: t.unscale()), ("clip_norm", lambda t: t.clip_norm(1))])
def test_methods_require_trainer_backward(name, call):
    net, trainer = with_trainer(One(), "sgd", loss_scale=8)
    message = r"\(\) needs new gradients: call trainer.backward\(loss\), not loss.backward\(\)"
    with pytest.raises(RuntimeError, match=name + message):
        call(trainer)
    recorded(net, ones(), ones()).backward()  # which applies no scale
    with pytest.raises(RuntimeError, match=name + message):
        call(trainer)
    trainer.backward(recorded(net, ones(), ones()))
    call(trainer)


@pytest.mark.parametrize("loss_scale", [None, 8])
def test_clipping_before_the_sum_over_devices_is_refused(loss_scale):
    net, trainer = with_trainer(One(devices=DEVICES), "sgd", loss_scale=loss_scale)
    backward(net, trainer)
    with pytest.raises(RuntimeError, match=r"clip_norm\(\) before the sum .*allreduce_grads\(\)"):
        trainer.clip_norm(1)


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
    assert [v[0] for v in values(net)] == [-1, 1]
    x = ones()
    x.attach_grad()
    trainer.backward(recorded(lambda: x * 2))
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


@pytest.mark.parametrize("clip_norm", [None, 9])
def test_gradients_can_be_written_without_scale(clip_norm):
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1}, loss_scale=None,
                                clip_norm=clip_norm)
    trainer.backward(recorded(net, ones(), ones()))
    for gradient in (net.a.grad(), net.b.grad()):
        gradient *= 0.5
    assert trainer.step(1)
    assert (net.b.data().asnumpy() == 0.5).all()


class Headed(gluon.HybridBlock):
    """A loss that starts its gradient: no loss scale reaches it."""

    def hybrid_forward(self, F, x, y):
        return F.SoftmaxOutput(x, y)


def by_scaled_loss(trainer, loss):
    with autograd.record(), amp.scale_loss(loss, trainer) as scaled:
        autograd.backward(scaled)


by_either = pytest.mark.parametrize("backward", [amp.Trainer.backward, by_scaled_loss])


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
    with pytest.raises(ValueError, match=f"so the loss scale: {head}"):
        backward(trainer, recorded(net, data, label))
    with pytest.raises(RuntimeError, match=r"step\(\) needs new gradients"):
        trainer.step(2)
    assert all(map(np.array_equal, before, values(net)))
    free = amp.Trainer(net.collect_params(), "sgd", loss_scale=None)
    backward(free, recorded(net, data, label))
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
        backward(trainer, recorded(lambda: loss_fn(net(data), label)))

    for _ in range(3):
        backward_from(loss_fn)
        if case == "later":
            assert trainer.step(2)
    before = values(net)
    with pytest.raises(ValueError, match="so the loss scale: SoftmaxOutput"):
        backward_from(head)
    assert all(map(np.array_equal, before, values(net)))


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_scaled_loss_makes_the_only_pass_through_a_loop_in_a_block(policy):
    def forward(F, x, dense):
        return F.contrib.foreach(lambda x, s: (dense(x) + s, s * 2), x, F.ones((2, 3)))[0]

    net = ready(Calling(forward, nn.Dense(3, in_units=3)))
    amp.convert(net, policy)
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=64)
    for _ in range(2):
        by_scaled_loss(trainer, recorded(net, nd.ones((4, 2, 3))))
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
        backward(trainer, loss(lambda x: nd.SoftmaxOutput(x, nd.zeros(1))))
    backward(trainer, loss(nd.square))
    assert trainer.step(1)


@pytest.mark.parametrize("hybridized", [False, True])
def test_scaled_loss_keeps_the_only_pass_of_mxnets_dropout(hybridized):
    """One of two would ignore what was dropped."""
    net = ready(sequence(nn.Dense(512, in_units=1), nn.Dropout(0.5)), mx.init.One())
    if hybridized:
        net.hybridize()
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=64)
    loss = recorded(lambda: net(nd.ones((1, 1))))
    by_scaled_loss(trainer, loss)
    kept = loss.asnumpy().ravel()
    assert set(kept) == {0, 2}
    assert np.array_equal(net[0].weight.grad().asnumpy().ravel(), kept * 64)
    loss = recorded(lambda: Headed()(net(nd.ones((1, 1))), nd.zeros(1)))
    with pytest.raises(ValueError, match="so the loss scale: SoftmaxOutput"):
        by_scaled_loss(trainer, loss)


def test_no_trainable_parameters_is_refused():
    net = One()
    for parameters, message in (([], r"needs parameters. Received: none"), (
            [net.a, net.b, net.a], f"each parameter once. Received twice: {net.a.name}$")):
        with pytest.raises(ValueError, match=message):
            amp.Trainer(parameters, "sgd")
    net, trainer = with_trainer(One(), "sgd", loss_scale="dynamic")
    net.collect_params().setattr("grad_req", "null")
    for call in (lambda: trainer.backward(ones()), lambda: trainer.step(1)):
        with pytest.raises(RuntimeError, match="nothing to train: all parameters of"):
            call()


def test_constants_alone_train_without_a_loss_scale():
    """As with MXNet's Trainer, whose step then does nothing."""
    constant = gluon.Constant("c", nd.ones(2))
    constant.initialize()
    trainer = amp.Trainer([constant], "sgd")
    assert trainer.step(1)
    assert constant.data().asnumpy().tolist() == [1, 1]


def test_kvstore_does_not_update_with_overflow_check(monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "1")
    net, trainer = with_trainer(One(devices=DEVICES), "sgd", kvstore=mx.kv.create("device"),
                                loss_scale=settled())
    backward(net, trainer)
    assert not trainer.step(1)
    assert on_all_devices(net) == {1}


HOROVODS = type("DistributedOptimizer", (mx.optimizer.SGD,), {"__module__": "horovod.mxnet"})
CHECKED = {"loss_scale": "dynamic"}, {"loss_scale": 2}, {"loss_scale": None, "clip_norm": 1}


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"loss_scale": "static"}, "loss_scale takes"), ({"loss_scale": 0}, "loss_scale must be a"),
    ({"loss_scale": True}, "loss_scale takes"), ({"clip_norm": 0}, "clip_norm must be a positive"),
    ({"clip_norm": float("nan")}, "clip_norm must be"), ({"optimizer": "sdg"}, "unknown optimizer"),
    ({"optimizer": "lbsgd"}, "lbsgd adds up"),
    *(({"update_on_kvstore": True, **checked}, r"must be False or None. Received: True")
      for checked in CHECKED),
    *(({"kvstore": "dist_async", **checked}, "dist_async updates on its servers: use dist_sync")
      for checked in CHECKED),
    # whose threshold is for gradients without a scale
    ({"compression_params": {"type": "2bit", "threshold": 0.5}},
     "gradient compression compares scaled gradients"),
    *(({"optimizer": amp.StaticLossScale(128).optimizer("sgd"), **scale},
       "one half of the static pair of 128") for scale in ({"loss_scale": 128}, {})),
    ({"optimizer": HOROVODS()}, "give the plain optimizer, and kvstore='horovod'")])
def test_bad_arguments_are_refused_at_construction(kwargs, message):
    params = One(devices=DEVICES).collect_params()
    with pytest.raises(ValueError, match=message):
        amp.Trainer(params, **{"optimizer": "sgd", **kwargs})
    if isinstance(kwargs.get("optimizer"), mx.optimizer.Optimizer):
        amp.Trainer(params, kwargs["optimizer"], loss_scale=None)


@pytest.mark.mx_nd("no sparse arrays")
def test_row_sparse_weights_are_refused():
    net = One()
    net.params.get("c", shape=(4, 4), stype="row_sparse", grad_stype="row_sparse")
    net.initialize(force_reinit=True)
    with pytest.raises(ValueError, match=r"Valid: loss_scale=None.*row_sparse weights in .*c"):
        amp.Trainer(net.collect_params(), "sgd")


def half(loss):
    with autograd.record():
        return loss.astype("float16")


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda trainer, loss: trainer.backward([]), ValueError,
     r"a list of losses. Received: an empty list"),
    (lambda trainer, loss: trainer.backward(0.5), TypeError,
     r"a loss or a list of losses. Received: float"),
    (lambda trainer, loss: trainer.backward([loss, half(loss)]), ValueError,
     r"the loss is float16.*take it in float32"),
    (lambda trainer, loss: (trainer.backward(loss), trainer.step(0)), ValueError,
     r"batch_size must be a positive, finite number.*: 0")])
def test_wrong_calls_are_refused(call, error, message):
    net, trainer = with_trainer(One(), "sgd", loss_scale=8)
    with pytest.raises(error, match=message):
        call(trainer, recorded(net, ones(), ones()))
    trainer.backward(recorded(net, ones(), ones()))
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
    """Descends without states; `scaled(optimizer, gradient)` may ignore rescale_grad."""

    def __init__(self, scaled, **kwargs):
        super().__init__(**kwargs)
        self.scaled = scaled

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        weight[:] = weight - self.lr * self.scaled(self, grad)


def needs_matrices(optimizer, grad):
    """Fails for weights that it has not been told of."""
    return optimizer.matrices[grad.shape] * grad


def test_optimizers_that_ignore_rescale_grad_are_refused():
    def plain(optimizer, grad):
        return grad

    params = make().collect_params()
    mod = amp.Module(mx.sym.LinearRegressionOutput(mx.sym.var("data"), name="out"),
                     label_names=["out_label"], loss_scale=8)
    mod.bind([("data", (2, 3))], [("out_label", (2, 3))])
    mod.init_params()
    message = r"Plain ignores rescale_grad.*Valid: gradients times"
    with pytest.raises(ValueError, match=message):
        amp.Trainer(params, Plain(plain), loss_scale=8)
    with pytest.raises(ValueError, match=message):
        mod.init_optimizer(optimizer=Plain(plain))
    amp.Trainer(params, Plain(plain), loss_scale=None)
    for scaled in (lambda optimizer, grad: grad * optimizer.rescale_grad,
                   lambda optimizer, grad: grad / abs(grad), needs_matrices):
        amp.Trainer(params, Plain(scaled), loss_scale=8)


def test_gradients_are_stale_after_parameters_move_to_another_device():
    net, trainer = with_trainer(One(), "sgd", loss_scale=8)
    trainer.backward(recorded(net, ones(), ones()))
    net.collect_params().reset_ctx(mx.cpu(1))
    with pytest.raises(UserWarning, match="has not computed the gradients"):
        trainer.step(1)


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
