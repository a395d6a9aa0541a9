"""Moving averages stay finite: one that a batch would make infinite or NaN keeps its value."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready, sequence

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
POLICIES = ["float16", "bfloat16", "mixed_float16", "mixed_bfloat16", "float32"]
OVERFLOW = 7e4  # in float16
NORMS = {"batch norm": nn.BatchNorm, "with relu": nn.BatchNormReLU,
         "synchronized": lambda **kwargs: gluon.contrib.nn.SyncBatchNorm(num_devices=1, **kwargs)}


def network(policy="float16", norm=nn.BatchNorm, keep=(), devices=1):
    mx.random.seed(0)
    net = ready(sequence(norm(in_channels=3), nn.Conv2D(4, 3, in_channels=3), norm(in_channels=4),
                         nn.Dense(2)), ctx=[mx.cpu(i) for i in range(devices)])
    net(nd.ones((1, 3, 8, 8)))
    return amp.convert(net, policy, keep=[nn.BatchNorm] if keep else ())


def batch(bad=False):
    x = np.random.default_rng(0).standard_normal((4, 3, 8, 8))
    if bad:  # in one channel
        x[1, 2, 3, 4] = np.inf
    return nd.array(x), nd.array([0, 1, 0, 1])


def step(net, trainer, *data, times=1):
    contexts = net.collect_params().list_ctx()
    for _ in range(times):
        with autograd.record():
            losses = [LOSS(net(x).astype("float32"), y) for x, y in zip(
                *(gluon.utils.split_and_load(a, contexts) for a in data))]
        trainer.backward(losses)
    return trainer.step(len(data[0]))


def averages(net):
    return {name: p.list_data()[0].asnumpy() for name, p in net.collect_params().items()
            if "running" in name}


def assert_only_finite_ones_moved(net, before, good):
    """After a bad batch; `good`: the averages after the same batch without the infinity."""
    after = averages(net)
    first = [name for name in after if name.startswith(net[0].prefix)]
    for name in after:
        assert np.isfinite(after[name]).all()
    for name in first:
        assert after[name][2] == before[name][2]  # the channel with the infinity
        np.testing.assert_array_equal(after[name][:2], good[name][:2])
    assert len(first) == 2
    assert not np.array_equal(after[first[0]], before[first[0]])
    assert np.isfinite(net(batch()[0]).asnumpy()).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_infinite_batch_leaves_finite_averages(policy, norm):
    net, other = (network(policy, NORMS[norm]) for _ in range(2))
    trainer, others = (amp.Trainer(n.collect_params(), "sgd", {"learning_rate": 0.1},
                                   loss_scale=8) for n in (net, other))
    for n, t in ((net, trainer), (other, others)):
        assert step(n, t, *batch())
    before = averages(net)
    assert not step(net, trainer, *batch(bad=True))
    step(other, others, *batch())
    good = {name.replace(other.prefix, net.prefix): a for name, a in averages(other).items()}
    assert_only_finite_ones_moved(net, before, dict(zip(before, good.values())))
    assert step(net, trainer, *batch())


@pytest.mark.parametrize("scale", ["dynamic", 8, None])
@pytest.mark.parametrize("keep", [False, True])
def test_first_batch_may_be_infinite(scale, keep):
    """In layers that stay float32, too."""
    net = network(keep=keep)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=scale,
                          clip_norm=1)
    before = averages(net)
    assert not step(net, trainer, *batch(bad=True))
    for name, array in averages(net).items():
        assert np.isfinite(array).all()
        if name.startswith(net[0].prefix):
            assert array[2] == before[name][2]
    assert step(net, trainer, *batch())


def test_overflow_in_float16_leaves_predictions_finite():
    """In a layer before the norm, as in a network that reads data beyond float16."""
    net = ready(sequence(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Dense(2)))
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x, y = batch()
    assert step(net, trainer, x, y)
    before = averages(net)
    for _ in range(2):
        assert not step(net, trainer, x + OVERFLOW, y)
    for name, array in averages(net).items():
        np.testing.assert_array_equal(array, before[name])
    assert step(net, trainer, x, y)
    assert np.isfinite(net(x).asnumpy()).all()


@pytest.mark.parametrize("policy", ["float16", "float32"])
def test_accumulated_passes_on_two_devices(policy):
    net = network(policy, devices=2)
    net.collect_params(".*(weight|bias|gamma|beta)").setattr("grad_req", "add")
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=8)
    good, bad = batch(), batch(bad=True)
    assert step(net, trainer, *good, times=2)
    net.collect_params().zero_grad()
    assert not step(net, trainer, *bad, times=2)
    for name, parameter in net.collect_params(".*running.*").items():
        for array in parameter.list_data():
            assert np.isfinite(array.asnumpy()).all(), name
    assert step(net, trainer, *good)
    assert np.isfinite(net(good[0]).asnumpy()).all()


def symbol(norm):
    x = norm(mx.sym.var("data"), name="norm0")
    x = mx.sym.FullyConnected(x, num_hidden=4, name="dense0")
    x = norm(x, name="norm1")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=3), name="softmax")


OPERATORS = {"BatchNorm": mx.sym.BatchNorm, "BatchNorm_v1": mx.sym.BatchNorm_v1,
             "SyncBatchNorm": lambda x, name: mx.sym.contrib.SyncBatchNorm(x, key=name, name=name),
             "sparse": lambda x, name: mx.sym.IdentityAttachKLSparseReg(mx.sym.sigmoid(x),
                                                                        name=name)}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("scale", [8, "dynamic"])
def test_modules(operator, policy, scale):
    net = symbol(OPERATORS[operator])
    net = amp.convert_symbol(net, policy) if policy else net
    module = amp.Module(net, loss_scale=None if operator == "sparse" else scale, clip_norm=1)
    module.bind([("data", (4, 2))], [("softmax_label", (4,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    x, y = nd.array([[1, 2], [3, 4], [5, 6], [7, 9]]), nd.array([0, 1, 2, 1])
    bad = nd.array([[1, 2], [3, np.nan], [5, 6], [7, 9]])
    for data, good in ((bad, False), (x, True), (bad, False), (bad, False), (x, True)):
        before = {k: v.asnumpy() for k, v in module.get_params()[1].items()}
        module.forward_backward(mx.io.DataBatch([data], [y]))
        assert module.update() == good
        nd.waitall()  # MXNet's batch norm updates its averages without a dependency
        after = {k: v.asnumpy() for k, v in module.get_params()[1].items()}
        for name, array in after.items():
            assert np.isfinite(array).all(), name
            # of two columns, of which one has the NaN; without a gradient of the data,
            # MXNet does not update the average of the sparse one
            if "norm0" in name and operator != "sparse":
                assert array[0] != before[name][0], name
                assert (array[1] == before[name][1]) == (not good), name
