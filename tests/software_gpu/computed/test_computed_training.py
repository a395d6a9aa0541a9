"""Training on a GPU matches training on a CPU."""
import functools

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import flat
from gluon_amp.cpu import library
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

CPU, GPU, GPUS = [mx.cpu()], [mx.gpu(0)], [mx.gpu(0), mx.gpu(1)]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def network(contexts, dtype="float16", norm=nn.BatchNorm):
    mx.random.seed(1)
    np.random.seed(1)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, in_channels=1), norm(in_channels=8), nn.Activation("relu"),
            nn.MaxPool2D(), nn.Dense(10, in_units=8 * 9))
    net.initialize(mx.init.Xavier(), ctx=contexts)
    return amp.convert(net, dtype) if dtype == "float16" else net


def batches(count, size=32):
    rng = np.random.default_rng(0)
    for _ in range(count):
        labels = rng.integers(0, 10, size)
        images = rng.standard_normal((size, 1, 8, 8)) * 0.1
        images[np.arange(size), 0, labels // 8, labels % 8] += 2
        yield nd.array(images), nd.array(labels)


def step(net, trainer, images, labels, contexts, gradients=None):
    with autograd.record():
        losses = [LOSS(net(x).astype("float32"), y) for x, y in zip(
            gluon.utils.split_and_load(images, contexts),
            gluon.utils.split_and_load(labels, contexts))]
    trainer.backward(losses)
    if gradients:
        gradients()
    trainer.step(len(images))
    return sum(float(loss.mean().asscalar()) for loss in losses) / len(losses)


def train(contexts, steps=6, dtype="float16", optimizer="sgd", norm=nn.BatchNorm, **settings):
    net = network(contexts, dtype, norm)
    arguments = {"learning_rate": 0.05, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    trainer = amp.Trainer(net.collect_params(), optimizer, arguments,
                          **{"loss_scale": 1024, **settings})
    losses = [step(net, trainer, *batch, contexts) for batch in batches(steps)]
    return net, trainer, losses


def weights(net, context):
    return [p.data(context).asnumpy().astype("float32") for p in net.collect_params().values()]


def sync_norm(devices):
    return functools.partial(gluon.contrib.nn.SyncBatchNorm, num_devices=len(devices))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "lamb", "nag", "rmsprop"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_losses_decrease_as_on_cpu(optimizer, dtype):
    on_cpu, on_gpu = (train(contexts, 10, dtype, optimizer)[2] for contexts in (CPU, GPU))
    assert on_cpu[-1] < 0.7 * on_cpu[0]
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-4 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("norm", [nn.BatchNorm, sync_norm(GPUS)])
def test_two_gpus_have_same_weights(norm):
    net, _, losses = train(GPUS, norm=norm)
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            assert np.array_equal(*(parameter.data(context).asnumpy() for context in GPUS))
    if norm is not nn.BatchNorm:  # statistics of both halves of a batch are those of one GPU
        np.testing.assert_allclose(losses, train(GPU)[2], rtol=2e-2)


def test_first_steps_find_scale_without_skipping_a_step():
    _, trainer, losses = train(GPU, loss_scale="dynamic")
    assert trainer.loss_scale > 4
    assert trainer.skipped == 0
    np.testing.assert_allclose(losses, train(CPU)[2], rtol=2e-2)


def test_later_overflow_skips_step_and_lowers_scale():
    scale = amp.DynamicLossScale(1024, settled=True)
    net = network(GPU)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, loss_scale=scale)
    images, labels = next(batches(1))
    before = weights(net, GPU[0])
    step(net, trainer, images * 1e9, labels, GPU)
    assert trainer.skipped == 1
    after = weights(net, GPU[0])
    trained = [i for i, p in enumerate(net.collect_params().values()) if p.grad_req != "null"]
    assert all(np.array_equal(before[i], after[i]) for i in trained)


def test_master_weights_keep_updates_lost_in_float16():
    net, trainer, _ = train(GPU, 1)
    kinds = {np.dtype(p.dtype) for p in net.collect_params(".*weight").values()}
    assert kinds == {np.dtype("float16")}
    trainer.set_learning_rate(1e-6)
    before = weights(net, GPU[0])
    for batch in batches(60):
        step(net, trainer, *batch, GPU)
    changed = np.concatenate([(a != b).ravel() for a, b in zip(before, weights(net, GPU[0]))])
    assert changed.mean() > 0.01  # one such step does not change float16 weights


def test_resumed_training_is_bitwise_identical(tmp_path):
    net, trainer, _ = train(GPU, 3, loss_scale="dynamic")
    net.save_parameters(str(tmp_path / "net"))
    trainer.save_states(str(tmp_path / "states"))
    other, again, _ = train(GPU, 1, loss_scale="dynamic")
    other.load_parameters(str(tmp_path / "net"), ctx=GPU)
    again.load_states(str(tmp_path / "states"))
    for batch in batches(3):
        step(net, trainer, *batch, GPU)
        step(other, again, *batch, GPU)
    for one, two in zip(weights(net, GPU[0]), weights(other, GPU[0])):
        assert np.array_equal(one, two)


def test_accumulated_gradients_match_a_larger_batch():
    results = []
    for contexts, parts in ((GPU, 1), (GPU, 4), (CPU, 4)):
        net = network(contexts, norm=lambda in_channels: nn.Activation("relu"))
        parameters = net.collect_params()
        parameters.setattr("grad_req", "add" if parts > 1 else "write")
        trainer = amp.Trainer(parameters, "sgd", {"learning_rate": 0.05}, loss_scale=1024)
        images, labels = next(batches(1))
        for x, y in zip(*(np.split(a.asnumpy(), parts) for a in (images, labels))):
            with autograd.record():
                loss = LOSS(net(nd.array(x, ctx=contexts[0])).astype("float32"),
                            nd.array(y, ctx=contexts[0]))
            trainer.backward(loss)
        trainer.step(len(images))
        results.append(np.concatenate([w.ravel() for w in weights(net, contexts[0])]))
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=2e-3)


def test_clipping_matches_cpu():
    for settings in ({"clip_norm": 0.1}, {}):
        on_cpu, on_gpu = (train(contexts, 3, **settings)[2] for contexts in (CPU, GPU))
        np.testing.assert_allclose(on_gpu, on_cpu, rtol=2e-2)


def test_module_training_matches_cpu():
    data = mx.sym.var("data")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=16), act_type="relu")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=10), name="softmax")
    symbol = amp.convert_symbol(symbol, "float16")
    results = []
    for contexts in (CPU, GPU):
        mx.random.seed(1)
        np.random.seed(1)
        module = amp.Module(symbol, context=contexts, loss_scale=1024)
        module.bind([("data", (32, 64))], [("softmax_label", (32,))])
        module.init_params(mx.init.Xavier())
        module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.5})
        for images, labels in batches(5):
            module.forward_backward(mx.io.DataBatch([images.reshape((32, 64))], [labels]))
            module.update()
        module.forward(mx.io.DataBatch([images.reshape((32, 64))], [labels]), is_train=False)
        results.append(module.get_outputs()[0].asnumpy())
    np.testing.assert_allclose(*results, atol=2e-2)


def test_unknown_kernel_is_named():
    with pytest.raises(mx.MXNetError, match="error of the recording GPU"):
        mx.nd.SequenceReverse(nd.ones((3, 4), ctx=GPU[0])).asnumpy()


@pytest.mark.parametrize(("contexts", "norm"), [
    (contexts, norm) for contexts in (GPU, GPUS) for norm in (nn.BatchNorm, sync_norm(contexts))])
def test_overflow_leaves_averages_finite(contexts, norm):
    net = network(contexts, norm=norm)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, loss_scale=8)

    def averages():
        return [array.asnumpy() for p in net.collect_params(".*running.*").values()
                for array in p.list_data()]

    for number, (images, labels) in enumerate(batches(3)):
        before = averages()
        bad = images.copy()
        bad[:, 0, 0, 0] = 7e4  # beyond float16, on each device
        step(net, trainer, bad, labels, contexts)
        assert trainer.skipped == number + 1
        for one, other in zip(averages(), before):
            np.testing.assert_array_equal(one, other)
        step(net, trainer, images, labels, contexts)
        assert trainer.skipped == number + 1
        for one, other in zip(averages(), before):
            assert not np.array_equal(one, other)
    for context in contexts:
        assert np.isfinite(net(images.as_in_context(context)).asnumpy()).all()


def test_finite_averages_of_skipped_step_stay():
    """They change in the forward pass; so do those of layers before the overflow."""
    net = nn.HybridSequential()
    for _ in range(40):  # more averages than a launch copies
        net.add(nn.BatchNorm(in_channels=2))
    net.add(nn.Conv2D(1, 1, in_channels=2), nn.BatchNorm(in_channels=1))
    net.initialize(ctx=GPU)
    amp.convert(net)
    net[40].weight.set_data(nd.full((1, 2, 1, 1), 6e4))
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, clip_norm=1,
                          loss_scale=8)
    x = nd.random.normal(10, 5, (8, 2, 3, 3)).as_in_context(GPU[0])
    with autograd.record():
        loss = net(x).sum()
    trainer.backward(loss)
    assert not trainer.step(8)
    moved = [p.data().asnumpy() for p in net.collect_params(".*running_mean").values()]
    assert all((values != 0).all() for values in moved[:1])
    assert (moved[-1] == 0).all()
    assert all(np.isfinite(p.data().asnumpy()).all() for p in net.collect_params().values())


def test_overflow_leaves_averages_of_module_finite():
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4)
    x = mx.sym.FullyConnected(mx.sym.BatchNorm(x, name="norm"), num_hidden=3)
    module = amp.Module(amp.convert_symbol(mx.sym.SoftmaxOutput(x, name="softmax")), context=GPU,
                        loss_scale="dynamic")
    module.bind([("data", (4, 2))], [("softmax_label", (4,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    x, y = nd.array([[1, 2], [3, 4], [5, 6], [7, 9]]), nd.array([0, 1, 2, 1])
    for data, good in ((x * 7e4, False), (x, True), (x * 7e4, False), (x, True)):
        before = {k: v.asnumpy() for k, v in module.get_params()[1].items()}
        module.forward_backward(mx.io.DataBatch([data], [y]))
        assert module.update() == good
        for name, array in module.get_params()[1].items():
            assert np.array_equal(array.asnumpy(), before[name]) == (not good)


@pytest.mark.parametrize(("optimizer", "settings"), [
    ("sgd", {"momentum": 0.9}), ("adamw", {}), ("lamb", {}), ("nag", {"momentum": 0.9}),
    ("nag", {}), ("adam", {}), ("rmsprop", {}), ("rmsprop", {"centered": True})])
def test_prepared_update_has_the_bits_of_mxnets_updater(optimizer, settings):
    base = mx.optimizer.Optimizer.opt_registry[optimizer]

    def train(cls):
        net, schedule = network(GPU), mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.05)
        net[0].weight.lr_mult, net[4].bias.wd_mult = 0.5, 0.0
        made = cls(learning_rate=0.05, lr_scheduler=schedule, clip_gradient=0.5, wd=0.01,
                   multi_precision=True, **settings)
        trainer = amp.Trainer(net.collect_params(), made, loss_scale=16)
        for i, (images, labels) in enumerate(batches(9)):
            if i == 2:
                images[0, 0, 0, 0] = np.inf
            if i == 4:
                made.clip_gradient = None
            if i == 5:
                made.momentum = 0.0
            with autograd.record():
                loss = LOSS(net(images.as_in_context(GPU[0])).astype("float32"),
                            labels.as_in_context(GPU[0]))
            trainer.backward(loss)
            if i == 6:
                # not below 1e-4, whose text MXNet parses with an error
                trainer.clip_norm(0.3 * trainer.clip_norm(1e9, 32), 32)
            trainer.step(32 if i < 8 else 64)
        states = [s for i, s in sorted(trainer._updaters[0].states.items())]
        arrays = [*weights(net, GPU[0]), *(a.asnumpy() for a in flat(states))]
        return arrays, trainer.skipped, trainer.learning_rate

    # a class with master weights of its own stays MXNet's
    own = type("Own", (base,), {"update_multi_precision": base.update_multi_precision})
    (prepared, *counts), (plain, *same) = train(base), train(own)
    assert counts == same == [1, 0.05 / 8]
    assert len(prepared) == len(plain)
    for one, other in zip(prepared, plain):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "nag", "lamb", "signum"])
def test_written_weights_replace_master_weights(optimizer):
    net, trainer, _ = train(GPU, 3, optimizer=optimizer)
    net[0].weight.set_data(mx.nd.full(net[0].weight.shape, 0.3))
    before = trainer.master(net[4].weight).asnumpy()
    trainer.set_learning_rate(0)
    for batch in batches(2):
        step(net, trainer, *batch, GPU)
    assert (trainer.master(net[0].weight).asnumpy() == np.float16(0.3)).all()
    assert np.array_equal(trainer.master(net[4].weight).asnumpy(), before)


def test_calls_run_in_order_with_and_without_the_engine(monkeypatch):
    def updated():
        weight, state = nd.ones(3, GPU[0]), nd.ones(3, GPU[0])
        name = "multi_sgd_mom_update"
        library.Calls(2 * [(name, [weight, weight, state], [weight])]).run([
            library.Attributes(name, num_weights=1, lrs=[lr], wds=[0.0], momentum=0.5)
            for lr in (1.0, 2.0)])
        return weight.asnumpy().tolist(), state.asnumpy().tolist()

    # adds 0.5 * 1 - 1 * 1 = -0.5, then 0.5 * -0.5 - 2 * 0.5 = -1.25
    assert updated() == ([-0.75] * 3, [-1.25] * 3)
    monkeypatch.setattr(library, "_table", None)
    assert updated() == ([-0.75] * 3, [-1.25] * 3)


def test_calls_refuse_arrays_that_do_not_fit():
    weight, state = nd.ones(3, GPU[0]), nd.ones(2, GPU[0])
    calls = library.Calls([("sgd_mom_update", [weight, weight, state], [weight])])
    with pytest.raises(mx.MXNetError, match="Incompatible attr in node  at 2-th input"):
        calls.run([library.Attributes("sgd_mom_update", lr=1.0)])
    with pytest.raises(mx.MXNetError, match="Cannot find argument 'rate'"):
        library.Attributes("sgd_mom_update", rate=1.0)
    with pytest.raises(mx.MXNetError, match="another device"):
        library.Calls([("sgd_mom_update", [weight, weight, nd.ones(3)], [weight])]).run(
            [library.Attributes("sgd_mom_update", lr=1.0)])
