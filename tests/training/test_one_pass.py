"""Each call of backward makes one pass, also in the first steps, which find the loss scale."""
import collections
import logging

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn
from networks import Calling, ready, sequence
from trainers import LOSS, One, backward, learn, ones, recorded, settled, values, with_trainer

pytestmark = pytest.mark.numpy


def messages(caplog, level=logging.WARNING):
    return [r.getMessage() for r in caplog.records if r.name == "gluon_amp" and r.levelno >= level]


def test_first_steps_follow_the_gradients(caplog):
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1})
    for scale in (4, 32, 32):  # 32 * norm 85 is below 65504 / 16
        trainer.backward(recorded(net, ones(30), ones(30)))
        assert trainer.loss_scale == scale
        assert (net.a.grad().asnumpy() == 30 * scale).all()
        assert trainer.step(1)
    assert (trainer.skipped, trainer.overflowed) == (0, ())
    assert all((v == -89).all() for v in values(net))
    assert learn(net, trainer, ones(300), ones(300))
    assert (trainer.loss_scale, trainer.skipped) == (4, 0)
    assert not messages(caplog)


@pytest.mark.parametrize("how", ["backward", "scale_loss"])
def test_consecutive_skips_log_one_warning(how, caplog):
    net, trainer = with_trainer(One(), "sgd", loss_scale=settled())
    for skipped in range(9):
        with autograd.record():
            loss = net(ones(2000), ones(2000))
            if how == "scale_loss":
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
        if how == "backward":
            trainer.backward(loss)
        assert not trainer.step(1), skipped
    message, = messages(caplog)
    assert all(words in message for words in ("3 steps", net.a.name, "16384 -> 8192"))


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
def test_scales_of_the_first_steps_do_not_change_what_is_learned(policy, static, rng):
    x, y = nd.array(rng.standard_normal((5, 1, 6, 6))), nd.array(rng.integers(0, 3, 5))

    def trained(**kwargs):
        mx.random.seed(4)
        net = ready(Recurrent(), mx.init.Xavier())
        net(x)
        amp.convert(net, policy)
        if static is not None:
            net.hybridize(static_alloc=static, static_shape=static)
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, **kwargs)
        for _ in range(3):
            mx.random.seed(5)
            trainer.backward(recorded(lambda: LOSS(net(x), y) * 30))
            assert trainer.step(5 * 30)
        return net, trainer

    net, trainer = trained()
    assert trainer.skipped == 0
    assert trainer.loss_scale != 4
    for found, wanted in zip(values(net), values(trained(loss_scale=4)[0])):
        np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("loss_scale", [64, amp.DynamicLossScale(64), None])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_first_step_leaves_gradients_of_others_as_they_are(loss_scale, static, grad_req):
    """Those of the data, and of a network that another Trainer trains."""
    mx.random.seed(3)
    net, other = (ready(nn.Dense(units, in_units=4), mx.init.Xavier()) for units in (3, 4))
    for layer in (net, other):
        layer.hybridize(static_alloc=static, static_shape=static)
    _, trainer = with_trainer(net, "sgd", loss_scale=loss_scale)
    x = nd.arange(8).reshape((2, 4)) / 8
    x.attach_grad(grad_req)
    other.collect_params().setattr("grad_req", grad_req)

    def gradients():
        return [x.grad, other.weight.grad(), other.bias.grad()]

    def loss():
        return (net(nd.tanh(other(x))) ** 2).sum()

    recorded(loss).backward()
    expected = [array.asnumpy() for array in gradients()]
    assert all(g.any() for g in expected)
    for array in gradients():
        array[:] = 0
    for i in range(2):
        trainer.backward(recorded(loss))
        times = 1 if grad_req == "write" else i + 1
        for found, wanted in zip(gradients(), expected):
            np.testing.assert_allclose(found.asnumpy(), wanted * trainer.loss_scale * times,
                                       rtol=1e-5)


def test_passes_over_different_parameters_share_one_scale():
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1})
    for step in range(2):
        trainer.backward(recorded(lambda: (net.b.data() * 3).sum()))
        trainer.backward(recorded(lambda: ((net.a.data() * 1).astype("float32") * 5).sum()))
        assert (net.b.grad().asnumpy() == 3 * trainer.loss_scale).all()
        assert (net.a.grad().asnumpy() == 5 * trainer.loss_scale).all()
        assert trainer.step(1)
        assert (net.b.data().asnumpy() == -2 - 3 * step).all()
        assert (net.a.data().asnumpy() == -4 - 5 * step).all()
    assert trainer.loss_scale > 4


def test_losses_on_several_devices_leave_headroom_for_their_sum():
    devices = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    net, trainer = with_trainer(One(devices=devices), "sgd", {"learning_rate": 1})
    for step in range(1, 4):
        trainer.backward([recorded(net, ones(x, device=d), ones(device=d))
                          for x, d in zip((1, 31, 31), devices)])
        assert trainer.step(1)
        assert all((a.asnumpy() == 1 - 63 * step).all() for a in net.a.list_data())
    assert (trainer.loss_scale, trainer.skipped) == (32, 0)  # 32 * norm 126 is below 65504 / 16


@pytest.mark.parametrize("passes", [1, 3])
def test_overflow_of_sum_over_devices_skips_no_step(passes):
    net, trainer = with_trainer(One("add", [mx.cpu(0), mx.cpu(1)]), "sgd", {"learning_rate": 1})
    for _ in range(passes):
        backward(net, trainer, 0.75)
    assert trainer.step(1)
    assert trainer.skipped == 0
    assert all((a.asnumpy() == 1 - passes * 1.5).all() for a in net.a.list_data())


def test_settled_state_is_saved(tmp_path):
    path = str(tmp_path / "states")
    for scale, then in ((settled(16), 16), (amp.DynamicLossScale(16), 256)):
        net, saving = with_trainer(One(), "sgd", loss_scale=scale)
        saving.save_states(path)
        _, trainer = with_trainer(net, "sgd", loss_scale=amp.DynamicLossScale())
        trainer.load_states(path)
        assert learn(net, trainer, ones(0.1), ones(0.1))
        assert trainer.loss_scale == then


def test_graph_is_freed_after_backward_unless_retained():
    net, trainer = with_trainer(One(), "sgd", {"learning_rate": 1}, loss_scale=64)
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


def test_graph_is_freed_although_outputs_are_alive():
    """The next forward pass reuses the memory of a static network."""
    net, trainer = with_trainer(ready(nn.Dense(4, in_units=3)), "sgd")
    for _ in range(2):
        with autograd.record():
            outputs = net(nd.ones((2, 3)))
            loss = nd.square(outputs).sum()
        trainer.backward(loss)
        for one in (outputs, loss):
            with pytest.raises(mx.MXNetError, match="not in a computational graph"):
                one.backward()
        assert trainer.step(2)


@pytest.mark.parametrize(("root", "says"), [
    ("log", "the loss itself is not finite"),
    ("sqrt", "without a loss scale")])
def test_skipped_step_without_loss_scale_names_no_scale(root, says, caplog):
    net, trainer = with_trainer(ready(nn.Dense(1, in_units=1)), "sgd", loss_scale=None, clip_norm=1)
    trainer.backward(recorded(lambda: getattr(nd, root)(net(nd.zeros((1, 1))))))
    assert trainer.step(1) is False
    assert says in messages(caplog)[-1]
    assert "static" not in messages(caplog)[-1]


@pytest.mark.parametrize("kind", ["foreach", "cond"])
def test_networks_with_loops_skip_no_step(kind, caplog):
    def forward(F, x, cell):
        if kind == "foreach":
            return F.contrib.foreach(lambda row, state: (row, F.tanh(cell(state + row))),
                                     F.stack(x, x), cell(x))[1]
        return F.contrib.cond((F.sum(x) > 0).astype("float32"), lambda: cell(x), lambda: x * 1)

    def trained(loss_scale):
        net = ready(Calling(forward, nn.Dense(3, in_units=3)), mx.init.Constant(0.1))
        _, trainer = with_trainer(amp.convert(net), "sgd", {"learning_rate": 0.1},
                                  loss_scale=loss_scale)
        for _ in range(3):
            trainer.backward(recorded(lambda: nd.square(net(nd.ones((2, 3)))).sum()))
            assert trainer.step(2)
        return values(net)

    for found, wanted in zip(trained("dynamic"), trained(16)):
        np.testing.assert_allclose(found, wanted, rtol=2e-3)
    assert not messages(caplog)

def test_second_pass_through_retained_dropout_has_the_same_gradients():
    net = ready(sequence(nn.Dense(64, in_units=8), nn.Dropout(0.5), nn.Dense(1, in_units=64)))
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=64)
    loss = recorded(lambda: net(nd.ones((4, 8))))
    gradients = []
    for retain in (True, False):
        trainer.backward(loss, retain_graph=retain)
        gradients.append([p.grad().asnumpy() for p in net.collect_params().values()])
    assert all(map(np.array_equal, *gradients))
    assert trainer.step(4)


# ---- one pass in each call

CALLS: "collections.Counter[str]" = collections.Counter()


class Counting(autograd.Function):
    """The square; it frees what it saved, so that a second pass would fail."""

    def forward(self, x):
        self.save_for_backward(x)
        CALLS["function forward"] += 1
        return x * x

    def backward(self, gradient):
        x, = self.saved_tensors
        self.save_for_backward()
        CALLS["function backward"] += 1
        return 2 * x * gradient


class CountingOp(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        CALLS["operator forward"] += 1
        self.assign(out_data[0], req[0], in_data[0] * 2)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        CALLS["operator backward"] += 1
        self.assign(in_grad[0], req[0], out_grad[0] * 2)


@mx.operator.register("counts_its_calls")
class CountingProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return CountingOp()


class Counted(gluon.Block):
    """A network of two parts, with a batch norm, a Function, a CustomOp and a hook between them."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.below, self.above = nn.Dense(4, in_units=3), nn.Dense(2, in_units=4)
            self.norm = nn.BatchNorm(momentum=0.5, in_channels=4)
        self.below.register_forward_hook(lambda *_: CALLS.update(["hook"]))

    def forward(self, x):
        x = Counting()(self.norm(self.below(x)))
        return self.above(nd.Custom(x, op_type="counts_its_calls"))


@pytest.mark.mx_nd("its function and operator compute with arrays of mx.nd")
@pytest.mark.parametrize("scale", ["dynamic", 64])
@pytest.mark.parametrize("how", ["trainer", "two trainers", "scale_loss", "accumulation"])
def test_each_call_of_backward_is_one_pass(how, scale):
    CALLS.clear()
    net = ready(Counted(), mx.init.Constant(0.5))
    parts = [net.above, net.below] if how == "two trainers" else [net]
    trainers = [with_trainer(part, "sgd", {"learning_rate": 1e-5}, loss_scale=scale)[1]
                for part in parts]
    passes = 3 if how == "accumulation" else 1
    if passes > 1:
        net.collect_params(".*(weight|bias|gamma|beta)").setattr("grad_req", "add")
    x = nd.arange(12).reshape((4, 3))
    mean = (x.asnumpy() @ np.full((3, 4), 0.5)).mean(0)
    for done in range(passes, 11 * passes, passes):
        for _ in range(passes):
            with autograd.record():
                loss = net(x).sum() * 1e3
                if how == "scale_loss":
                    with amp.scale_loss(loss, trainers[0]) as scaled:
                        scaled.backward()
            if how == "two trainers":
                amp.backward(loss, trainers)
            elif how != "scale_loss":
                trainers[0].backward(loss)
        assert all(trainer.step(passes) for trainer in trainers)
        if passes > 1:
            net.collect_params().zero_grad()
        nd.waitall()
        assert set(CALLS.values()) == {done}
        np.testing.assert_allclose(net.norm.running_mean.data().asnumpy(),
                                   mean * (1 - 0.5 ** done), rtol=0.05)
    assert len(CALLS) == 5


@pytest.mark.mx_nd("MXNet's Module has no numpy mode")
@pytest.mark.parametrize("scale", ["dynamic", 64])
def test_each_call_of_a_modules_backward_is_one_pass(scale):
    CALLS.clear()
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4)
    x = mx.sym.BatchNorm(x, momentum=0.5, name="norm")
    x = mx.sym.Custom(x, op_type="counts_its_calls")
    module = amp.Module(mx.sym.MakeLoss(x.sum() * 1e3), label_names=None, loss_scale=scale)
    module.bind([("data", (4, 3))])
    module.init_params(mx.init.Constant(0.5))
    module.init_optimizer(optimizer_params={"learning_rate": 1e-8})
    batch = nd.arange(12).reshape((4, 3))
    mean = (batch.asnumpy() @ np.full((3, 4), 0.5)).mean(0)
    for step in range(1, 11):
        module.forward_backward(mx.io.DataBatch([batch], []))
        assert module.update()
        nd.waitall()
        assert {"operator forward": step, "operator backward": step} == CALLS
        found = module.get_params()[1]["norm_moving_mean"].asnumpy()
        np.testing.assert_allclose(found, mean * (1 - 0.5 ** step), rtol=0.05)
