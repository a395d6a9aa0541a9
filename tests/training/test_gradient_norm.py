"""`gradient_norm` of Trainers and Modules: the norm of the gradients that the update uses."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from modules import prepared
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready, sequence
from trainers import recorded

SIZE = 8
KINDS = {
    "float32": ("float32", {"loss_scale": None}),
    "float32 scaled": ("float32", {}),
    "float16": ("float16", {"loss_scale": 1024}),
    "float16 dynamic": ("float16", {}),
    "bfloat16": ("bfloat16", {"loss_scale": None}),
    "clipped": ("float16", {"clip_norm": 1e-3}),
    "clipped float32": ("float32", {"loss_scale": None, "clip_norm": 1e-3}),
}
DEVICES = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]


def batch(size=SIZE):
    rng = np.random.RandomState(0)
    make = (mx.np if mx.util.is_np_array() else nd).array
    return make(rng.normal(size=(size, 4)).astype("float32"))


def start(kind, devices=DEVICES[0], **more):
    policy, settings = KINDS[kind]
    mx.random.seed(1)
    net = ready(sequence(nn.Dense(6, in_units=4, activation="tanh"), nn.Dense(2, in_units=6)),
                mx.init.Xavier(), ctx=devices)
    amp.convert(net, policy)
    return net, amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1},
                            **{**settings, **more})


def losses(net, factor=1.0):
    data = gluon.utils.split_and_load(batch(), net[0].weight.list_ctx())
    return [(net(part) ** 2).sum(axis=1) * factor for part in data]


def stepped():
    """A float32 network and its Trainer after a step."""
    net, trainer = start("float32")
    trainer.backward(recorded(losses, net))
    trainer.step(SIZE)
    return net, trainer


def reference():
    """The norm of the mean gradient, in float32 by MXNet alone."""
    net, _ = start("float32")
    autograd.backward(recorded(losses, net))
    return np.sqrt(sum((p.grad().asnumpy().astype("float64") ** 2).sum()
                       for p in net.collect_params().values())) / SIZE


@pytest.mark.parametrize("devices", DEVICES, ids=["one", "two"])
@pytest.mark.parametrize("kind", KINDS)
def test_norm_is_unscaled_averaged_and_not_clipped(kind, devices):
    net, trainer = start(kind, devices)
    assert trainer.gradient_norm is None
    trainer.backward(recorded(losses, net))
    trainer.step(SIZE)
    assert trainer.gradient_norm == pytest.approx(reference(), rel=1e-4 if "32" in kind else 2e-2)
    assert trainer.gradient_norm == trainer.gradient_norm


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_norm_of_a_step_by_hand(kind):
    net, trainer = start(kind)
    trainer.backward(recorded(losses, net))
    trainer.allreduce_grads()
    norm = trainer.clip_norm(1e-3, SIZE)
    trainer.update(SIZE)
    assert trainer.gradient_norm == norm
    trainer.backward(recorded(losses, net))
    for arrays in trainer.unscale().values():
        arrays[0][:] *= 3
    trainer.update(SIZE)
    assert trainer.gradient_norm == pytest.approx(3 * reference(), rel=0.1)  # a step later


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_norm_of_a_skipped_step_is_not_finite(value):
    net, trainer = start("float16")
    trainer.backward(recorded(losses, net, value))
    assert not trainer.step(SIZE)
    assert not np.isfinite(trainer.gradient_norm)


def test_norm_of_accumulated_gradients():
    net, trainer = start("float16")
    net.collect_params().setattr("grad_req", "add")
    for _ in range(2):
        trainer.backward(recorded(losses, net))
    trainer.step(2 * SIZE)
    net.collect_params().zero_grad()
    assert trainer.gradient_norm == pytest.approx(reference(), rel=2e-2)


@pytest.mark.parametrize("overwrite", ["backward", "zero_grad"])
def test_overwritten_gradients_without_a_scale_are_refused(overwrite):
    net, trainer = stepped()
    if overwrite == "backward":
        trainer.backward(recorded(losses, net))
    else:
        net.collect_params().zero_grad()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="have been overwritten"):
            _ = trainer.gradient_norm


def test_norm_that_was_read_stays():
    net, trainer = stepped()
    norm = trainer.gradient_norm
    net.collect_params().zero_grad()
    assert trainer.gradient_norm == norm == pytest.approx(reference(), rel=1e-5)


def test_stale_gradients_do_not_count():
    net, trainer = stepped()
    trainer.backward(recorded(
        lambda: net[1](mx.nd.ones((2, 6)) if not mx.util.is_np_array() else mx.np.ones((2, 6)))))
    trainer.step(1, ignore_stale_grad=True)
    norm = trainer.gradient_norm
    expected = np.sqrt(sum((p.grad().asnumpy() ** 2).sum() for p in net[1].params.values()))
    assert norm == pytest.approx(expected, rel=1e-5)


def test_reading_is_the_only_synchronization(monkeypatch):
    net, trainer = start("bfloat16")
    read = []
    monkeypatch.setattr("gluon_amp.cpu.arrays.Squares.read", lambda sums: (
        read.append(len(sums.arrays)) or np.ones(len(sums.arrays))))
    trainer.backward(recorded(losses, net))
    trainer.step(SIZE)
    assert read == []
    assert trainer.gradient_norm == 2 / SIZE
    assert read == [4]


@pytest.mark.mx_nd("MXNet's Module has no numpy mode")
@pytest.mark.parametrize("loss_scale", [None, 128, "dynamic"])
def test_norm_of_a_module(loss_scale):
    out = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    symbol = mx.sym.MakeLoss((out ** 2).sum(axis=1))
    module = prepared(amp.Module(symbol, label_names=None, context=mx.cpu(), loss_scale=loss_scale),
                      (SIZE, 4), init=mx.init.Xavier(), optimizer=None)
    module.init_optimizer(kvstore=None, optimizer_params={"rescale_grad": 1 / SIZE})
    assert module.gradient_norm is None
    module.forward(mx.io.DataBatch([batch()]), is_train=True)
    module.backward()
    gradients = [g[0].asnumpy() / (module.loss_scale if loss_scale else 1)
                 for g in module._exec_group.grad_arrays]
    module.update()
    expected = np.sqrt(sum((g.astype("float64") ** 2).sum() for g in gradients)) / SIZE
    assert module.gradient_norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.mx_nd("MXNet's Module has no numpy mode")
@pytest.mark.parametrize("updates", ["0", "1"])
def test_norm_that_a_store_has_is_refused(updates, monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", updates)
    out = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    module = prepared(amp.Module(mx.sym.MakeLoss(out), label_names=None, context=DEVICES[1]),
                      (SIZE, 4), optimizer=None)
    module.init_optimizer(kvstore="device")
    module.forward_backward(mx.io.DataBatch([nd.ones((SIZE, 4))]))
    module.update()
    if updates == "1":
        with pytest.raises(RuntimeError, match="the store sums them"):
            _ = module.gradient_norm
    else:
        assert module.gradient_norm == pytest.approx(np.sqrt(8 * SIZE ** 2 + 2 * SIZE ** 2) / SIZE)
