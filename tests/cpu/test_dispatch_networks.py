"""Networks cast to float16 train on a CPU in every way that MXNet runs them."""
import json

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import flat
from cases import cases
from halves import assert_half, halves
from mxnet import autograd, gluon, nd
from mxnet.contrib import amp as contrib_amp
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision
from processes import printed

pytestmark = pytest.mark.long

WAYS = {"imperative": None, "hybridized": {}, "static memory": {"static_alloc": True},
        "static": {"static_alloc": True, "static_shape": True}}
CLASSES = 4


def batches(count, size, rng, batch=16):
    """Images whose class is their brightest quarter."""
    for _ in range(count):
        images = rng.standard_normal((batch, 3, size, size)).astype("float32")
        labels = rng.integers(0, CLASSES, batch)
        half = size // 2
        for image, label in zip(images, labels):
            top, left = label // 2 * half, label % 2 * half
            image[:, top:top + half, left:left + half] += 2
        yield nd.array(images), nd.array(labels)


def same_weights(make, seed=5):
    mx.random.seed(seed)
    net = make()
    net.initialize(mx.init.Xavier())
    return net


def train(net, data, dtype, scale=1.0, rate=0.02):
    """Trains as in the tutorial, with a weighted loss and matching rescale_grad. Returns losses."""
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss(weight=scale)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {
        "learning_rate": rate, "momentum": 0.5, "multi_precision": True,
        "rescale_grad": 1 / scale})
    losses = []
    for x, y in data:
        with autograd.record():
            out = net(x.astype(dtype, copy=False))
            loss = loss_fn(out.astype("float32"), y)
        loss.backward()
        trainer.step(x.shape[0])
        losses.append(loss.mean().asscalar() / scale)
    return np.array(losses)


# ---- the tutorial, as published --------------------------------------------------------

NETWORKS = {"resnet18_v1": 0.01, "resnet18_v2": 0.01, "mobilenet0_25": 0.03}  # learning rates
EPOCHS = {"mobilenet0_25": 4}  # in one, its loss varies with the processor and the threads


@pytest.mark.parametrize("name", cases(["mobilenet0_25"], ["resnet18_v2", "resnet18_v1"]))
def test_published_gluon_tutorial_trains_as_in_float32(name, rng):
    data = list(batches(24, 32, rng))
    ends = {}
    for dtype in ("float32", "float16"):
        net = same_weights(lambda: getattr(vision, name)(classes=CLASSES))
        net(data[0][0])
        if dtype == "float16":
            net.cast("float16")
        net.hybridize(static_alloc=True, static_shape=True)
        losses = train(net, data, dtype, 8.0 if dtype == "float16" else 1.0, NETWORKS[name])
        ends[dtype] = losses[-8:].mean()
        assert losses[:2].mean() > 2 * ends[dtype], losses
    assert abs(ends["float16"] - ends["float32"]) < 0.2


# ---- ways to run a network -------------------------------------------------------------


def small_network():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=8),
            nn.Activation("relu"), nn.MaxPool2D(2), nn.Conv2D(8, 3, groups=2, in_channels=8),
            nn.LeakyReLU(0.1), nn.GlobalAvgPool2D(), nn.Flatten(), nn.LayerNorm(in_channels=8),
            nn.Dense(CLASSES, in_units=8))
    return net


def test_all_execution_modes_are_bitwise_identical(rng):
    data = list(batches(4, 12, rng))
    found = {}
    for way, flags in WAYS.items():
        net = same_weights(small_network)
        net.cast("float16")
        if flags is not None:
            net.hybridize(**flags)
        losses = train(net, data, "float16", scale=128.0)
        weights = [p.data().asnumpy() for p in net.collect_params().values()]
        assert [w.dtype.name for w in weights].count("float16") == 8
        found[way] = [losses, net(data[0][0].astype("float16")).asnumpy(), *weights]
    for way in WAYS:
        assert all(map(np.array_equal, found[way], found["imperative"])), way


def test_cast_network_matches_converted_network_bitwise(rng):
    data = list(batches(4, 12, rng))
    weights = []
    for convert in (False, True):
        net = same_weights(small_network)
        if convert:
            amp.convert(net, "pure_float16")
        else:
            net.cast("float16")
        train(net, data, "float16", scale=128.0)
        weights.append([p.data().asnumpy() for p in net.collect_params().values()])
    assert all(map(np.array_equal, *weights))


@pytest.mark.parametrize("way", ["imperative", "static"])
def test_rnn_with_dropout_trains_and_predicts_in_float16(way, rng):
    values, results = halves(rng, 5, 3, 6), []
    for dtype in ("float16", "float32"):
        net = same_weights(lambda: gluon.rnn.LSTM(8, 2, dropout=0.2, input_size=6))
        net.cast(dtype)
        if WAYS[way] is not None:
            net.hybridize(**WAYS[way])
        x = nd.array(values, dtype=dtype)
        x.attach_grad()
        for _ in range(2):
            mx.random.seed(1)
            with autograd.record():
                out, states = net(x, net.begin_state(3, dtype=dtype))
            states = list(flat(states))
            autograd.backward([out, *states])
        gradients = [p.grad() for p in net.collect_params().values()]
        results.append([out, *states, x.grad, *gradients,
                        net(x, net.begin_state(3, dtype=dtype))[0]])
    for found, exact in zip(*results):
        assert found.dtype == np.float16
        exact = exact.asnumpy()
        np.testing.assert_allclose(found.asnumpy(), exact, rtol=0.02,
                                   atol=0.004 * np.abs(exact).max())


def test_symbol_blocks_and_executors_run_float16(rng):
    data = mx.sym.Variable("data")
    out = mx.sym.FullyConnected(mx.sym.Cast(data, dtype="float16"), num_hidden=3, name="dense")
    values = {name: halves(rng, *shape) for name, shape in
              (("data", (4, 5)), ("dense_weight", (3, 5)), ("dense_bias", (3,)))}
    wide = {name: value.astype("float32") for name, value in values.items()}
    exact = wide["data"] @ wide["dense_weight"].T + wide["dense_bias"]
    executor = out.simple_bind(mx.cpu(), data=(4, 5), type_dict={"data": "float32"})
    executor.copy_params_from({n: nd.array(v, dtype=v.dtype) for n, v in values.items()
                               if n != "data"})
    executor.forward(is_train=True, data=nd.array(wide["data"]))
    executor.backward(nd.ones((4, 3), dtype="float16"))
    assert_half(executor.outputs[0].asnumpy(), exact)
    assert_half(executor.grad_dict["dense_bias"].asnumpy(), np.full(3, 4))
    block = gluon.SymbolBlock(out, data)
    block.collect_params().initialize()
    block.cast("float16")
    for name, parameter in block.collect_params().items():
        parameter.set_data(nd.array(values[name], dtype="float16"))
    assert_half(block(nd.array(wide["data"])).asnumpy(), exact)


def test_bucketing_module_trains_in_float16(rng):
    def graph(length):
        data = mx.sym.Cast(mx.sym.Variable("data"), dtype="float16")
        out = mx.sym.FullyConnected(mx.sym.mean(data, axis=1), num_hidden=2, name="dense")
        return mx.sym.SoftmaxOutput(mx.sym.Cast(out, dtype="float32"), name="softmax"), \
            ["data"], ["softmax_label"]

    module = mx.mod.BucketingModule(graph, default_bucket_key=6, context=mx.cpu())
    shapes = {length: [("data", (16, length, 3))] for length in (6, 4)}
    module.bind(shapes[6], [("softmax_label", (16,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer="sgd", optimizer_params={
        "learning_rate": 1.0, "multi_precision": True, "rescale_grad": 1 / 16})
    metric = mx.metric.Accuracy()
    for step in range(40):
        length = (6, 4)[step % 2]
        values = rng.standard_normal((16, length, 3)).astype("float32")
        labels = (values.mean((1, 2)) > 0).astype("float32")
        batch = mx.io.DataBatch([nd.array(values)], [nd.array(labels)], bucket_key=length,
                                provide_data=shapes[length],
                                provide_label=[("softmax_label", (16,))])
        module.forward_backward(batch)
        module.update()
        if step >= 30:
            module.update_metric(metric, batch.label)
    assert metric.get()[1] > 0.9


# ---- optimizers and kvstores -----------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize(("name", "settings"), [
    ("sgd", {}), ("sgd", {"momentum": 0.9}), ("sgd", {"momentum": 0.9, "aggregate_num": 1}),
    ("sgd", {"aggregate_num": 1}), ("nag", {"momentum": 0.9}), ("adam", {})])
def test_multi_precision_updates_match_float32_bitwise(name, settings, clip, rng):
    """Master weights and states match, and weights are rounded master weights."""
    shapes = [(3, 5), (300,), (70, 7)]
    weights = [halves(rng, *shape) for shape in shapes]
    settings = {"learning_rate": 0.05, "wd": 0.01, "rescale_grad": 0.5, "clip_gradient": clip,
                **settings}
    aggregate = settings.pop("aggregate_num", None)
    results = []
    for dtype in ("float16", "float32"):
        made = mx.optimizer.create(name, multi_precision=True, **settings)
        made.aggregate_num = aggregate or made.aggregate_num
        update = mx.optimizer.get_updater(made)
        arrays = [nd.array(w, dtype=dtype) for w in weights]
        draw = np.random.default_rng(3)
        for _ in range(4):
            grads = [nd.array(halves(draw, *shape), dtype=dtype) for shape in shapes]
            if made.aggregate_num > 1:
                update(list(range(3)), grads, arrays)
            else:
                for i in range(3):
                    update(i, grads[i], arrays[i])
        masters = arrays if dtype == "float32" else \
            [next(s for s in flat(update.states[i]) if is_master(s, arrays[i])) for i in range(3)]
        if dtype == "float16":
            for master, weight in zip(masters, arrays):
                assert np.array_equal(master.asnumpy().astype("float16"), weight.asnumpy())
        results.append(masters)
    for master, exact in zip(*results):
        assert np.array_equal(master.asnumpy(), exact.asnumpy())


def is_master(state, weight):
    return np.array_equal(state.asnumpy().astype("float16"), weight.asnumpy())


@pytest.mark.parametrize("kind", ["local", "device"])
def test_kvstore_sums_float16(kind, rng):
    store = mx.kv.create(kind)
    values = [halves(rng, 40) for _ in range(3)]
    store.init("w", nd.zeros(40, dtype="float16"))
    store.push("w", [nd.array(v, dtype="float16", ctx=mx.cpu(i)) for i, v in enumerate(values)])
    out = nd.zeros(40, dtype="float16")
    store.pull("w", out=out)
    np.testing.assert_allclose(out.asnumpy(), np.sum([v.astype("float32") for v in values], 0),
                               rtol=2e-3, atol=2e-3)


# ---- threads, workers, processes -------------------------------------------------------


WORKERS = """
import gluon_amp, numpy as np, mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
mx.random.seed(1)
data = gluon.data.ArrayDataset(np.random.RandomState(1).randn(64, 3, 8, 8).astype("float16"),
                               np.arange(64, dtype="float32") % 4)
loader = gluon.data.DataLoader(data, 16, num_workers=2)
net = nn.HybridSequential()
net.add(nn.Conv2D(8, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Dense(4))
net.initialize(mx.init.Xavier())
net.cast("float16")
net.hybridize(static_alloc=True, static_shape=True)
trainer = gluon.Trainer(net.collect_params(), "sgd", {
    "learning_rate": 0.05, "multi_precision": True})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
total = 0
for epoch in range(3):
    for x, y in loader:
        assert x.dtype == np.float16
        x = x.as_in_context(mx.cpu())
        with autograd.record():
            loss = loss_fn(net(x).astype("float32"), y)
        loss.backward()
        trainer.step(16)
        total = loss.mean().asscalar()
print(repr(float(total)))
"""


@pytest.mark.thorough
def test_four_workers_and_forked_loaders_match_one_bitwise(rng):
    found = {printed(WORKERS, MXNET_CPU_WORKER_NTHREADS=count) for count in ("1", "4")}
    assert len(found) == 1
    assert np.isfinite(float(found.pop()))


# ---- mx.contrib.amp --------------------------------------------------------------------

CONTRIB = """
import gluon_amp, json, numpy as np, mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.contrib import amp
from mxnet.gluon.model_zoo import vision
amp.init()
rng = np.random.RandomState(1)
x = nd.array(rng.randn(16, 3, 32, 32))
y = nd.arange(16) % 4
x[:] += y.reshape((16, 1, 1, 1))
mx.random.seed(1)
net = vision.resnet18_v1(classes=4)
net.initialize(mx.init.Xavier())
net.hybridize(static_alloc=True, static_shape=True)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9},
                        update_on_kvstore=False)
amp.init_trainer(trainer)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
losses = []
for step in range(20):
    with autograd.record():
        loss = loss_fn(net(x), y)
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(16)
    losses.append(float(loss.mean().asscalar()))
print(json.dumps(losses))
"""


@pytest.mark.thorough
def test_contrib_amp_trains_on_cpu():
    losses = json.loads(printed(CONTRIB).splitlines()[-1])
    assert losses[0] > 1
    assert np.mean(losses[-4:]) < 0.2


@pytest.mark.parametrize("name", ["resnet18_v1", "resnet18_v2", "mobilenet_v2_0_25",
                                  "mobilenet0_25", "squeezenet1_1", "densenet121"])
def test_contrib_amp_converts_hybrid_blocks(name, rng):
    net = getattr(vision, name)(classes=10)
    net.initialize(mx.init.Xavier("gaussian", "in", 2))  # keeps the outputs in the range of float16
    net.hybridize()
    size = 224 if name in ("squeezenet1_1", "densenet121") else 64
    x = nd.array(rng.standard_normal((1, 3, size, size)))
    exact = net(x).asnumpy()
    converted = contrib_amp.convert_hybrid_block(net, ctx=mx.cpu())
    converted.hybridize()
    found = converted(x).asnumpy()
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found, exact, rtol=0.05, atol=0.02 * np.abs(exact).max())
