"""Whole programs in numpy mode (`npx.set_np()`): bfloat16 arrays, files, resuming, tools, BERT.

Tests of other files run in this mode by `pytest --numpy` and `make -C tests np`.
"""
import copy
import warnings

import gluon_amp as amp
import mxnet as mx
import numpy as onp
import pytest
from cases import cases
from gluon_amp.cpu.arrays import dtype_name
from gluon_amp.tools.types import types
from mxnet import autograd, gluon, np, npx
from mxnet.gluon import nn, rnn
from networks import Calling, imported, ready, sequence
from numpy_networks import Bert, Transformer
from trainers import recorded, with_trainer

pytestmark = pytest.mark.numpy

POLICIES = ["float16", "mixed_float16", "bfloat16", "mixed_bfloat16"]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


@pytest.fixture(autouse=True)
def numpy_mode():
    npx.set_np()
    yield
    npx.reset_np()


def low(values):
    return np.array(values, dtype="bfloat16")


def values(net):
    return {name: p.data().asnumpy() for name, p in net._collect_params_with_prefix().items()}


def same(some, others):
    return some.keys() == others.keys() and all(
        onp.array_equal(some[name], others[name]) for name in some)


@pytest.fixture()
def batch(rng):
    return (np.array(rng.standard_normal((8, 3, 8, 8)), dtype="float32"),
            np.array(rng.integers(0, 4, 8), dtype="int32"))


def convolutional(policy, x):
    net = nn.HybridSequential(prefix="net_")  # the names of files do not depend on other tests
    with net.name_scope():
        net.add(nn.Conv2D(8, 3), nn.BatchNorm(), nn.Activation("relu"), nn.GlobalAvgPool2D(),
                nn.Dense(16, activation="tanh"), nn.LayerNorm(), nn.Dropout(0.2), nn.Dense(4))
    net.initialize(mx.init.Xavier())
    amp.convert(net, policy)(x)
    return net


def step(net, trainer, x, y):
    loss = recorded(lambda: LOSS(net(x), y))
    trainer.backward(loss)
    assert trainer.step(len(y))
    return loss.mean().item()


# ---- bfloat16 arrays ---------------------------------------------------------


def test_bfloat16_arrays_are_read_as_numbers():
    a = low([[1.5, 2.25], [-3, 0.1]])
    assert a.dtype.name == "bfloat16"
    assert a.asnumpy().dtype == onp.float32
    assert a.tolist() == [[1.5, 2.25], [-3.0, 0.10009765625]]
    assert a.item(1) == a[0, 1].item() == float(a[0, 1]) == 2.25
    assert int(a[1, 0]) == -3
    assert bool(a[0, 0])
    assert f"{a[0, 1]:.1f}" == "2.2"
    assert repr(a[0]) == "array([1.5 , 2.25], dtype=bfloat16)"


@pytest.mark.parametrize(("key", "value", "expected"), [
    (slice(None), 0, [[0, 0], [0, 0]]), (0, 7, [[7, 7], [3, 4]]), ((1, 0), 2.5, [[1, 2], [2.5, 4]]),
    ((slice(None), 1), 0.1, [[1, 0.10009765625], [3, 0.10009765625]]),
    (slice(None), onp.float32([5, 6]), [[5, 6], [5, 6]]), (1, [8, 9], [[1, 2], [8, 9]]),
    ([1, 0], 5, [[5, 5], [5, 5]])])
def test_assignment_to_bfloat16_array(key, value, expected):
    a = low([[1, 2], [3, 4]])
    a[key] = value
    assert dtype_name(a.dtype) == "bfloat16"
    assert a.tolist() == expected


def test_assignment_of_arrays_of_either_type():
    a, wide = low([[1, 2], [3, 4]]), np.zeros((2, 2))
    a[0], wide[1] = np.array([0.1, 5]), a[1]
    a[1] = a[0]
    assert a.tolist() == [[0.10009765625, 5]] * 2
    assert wide.tolist() == [[0, 0], [3, 4]]
    a[a > 1] = 6
    assert a.tolist() == [[0.10009765625, 6]] * 2
    zero_d = low(1)
    zero_d[()] = 3
    assert zero_d.item() == 3


@pytest.mark.parametrize("make", [
    lambda t: np.zeros((2, 3), dtype=t), lambda t: np.ones((2, 3), dtype=t),
    lambda t: np.full((2, 3), 2, dtype=t), lambda t: np.empty((2, 3), dtype=t),
    lambda t: np.array([[1, 2, 3]] * 2, dtype=t), lambda t: np.array(onp.ones((2, 3)), dtype=t),
    lambda t: np.ones((2, 3)).astype(t), lambda t: np.ones((2, 3), dtype="int32").astype(t),
    lambda t: np.zeros_like(low(onp.ones((2, 3)))),
    lambda t: np.ones_like(np.ones((2, 3)), dtype=t),
    lambda t: np.full_like(low(onp.ones((2, 3))), 2), lambda t: np.array(low(onp.ones((2, 3)))),
    lambda t: np.eye(2, 3, dtype=t), lambda t: np.arange(6, dtype=t).reshape(2, 3),
    lambda t: npx.one_hot(np.array([0, 2]), 3, dtype=t)])
@pytest.mark.parametrize("by", ["name", "dtype"])
def test_creation_functions_accept_bfloat16(make, by):
    made = make("bfloat16" if by == "name" else low([1]).dtype)
    assert dtype_name(made.dtype) == "bfloat16"
    assert made.asnumpy().shape == (2, 3)


def test_casts_and_copies_between_types():
    x = np.array([0, 1, 2.5, 200])
    for dtype in ("float16", "float32", "float64", "int32", "uint8"):
        there = x.astype(dtype).astype("bfloat16")
        assert there.astype(dtype).tolist() == x.astype(dtype).tolist()
        into = np.zeros(4, dtype=dtype)
        there.copyto(into)
        assert into.tolist() == x.astype(dtype).tolist()
    assert there.astype("bfloat16", copy=False) is there
    assert there.astype("bfloat16") is not there
    assert dtype_name(there.as_in_ctx(mx.cpu(1)).dtype) == "bfloat16"


def test_casts_are_differentiated():
    x = np.array([1.0, 2.0])
    x.attach_grad()
    recorded(lambda: (x.astype("bfloat16") * 3).astype("float32").sum()).backward()
    assert x.grad.tolist() == [3, 3]


@pytest.mark.parametrize("init", [mx.init.Xavier(), mx.init.Normal(), mx.init.Constant(2)])
@pytest.mark.parametrize("size", [0, 3])
def test_layers_may_be_cast_before_their_initialization(init, size):
    net = nn.Dense(2, in_units=size)
    net.cast("bfloat16")
    net.initialize(init)
    assert dtype_name(net(low([[1, 2, 3]])).dtype) == "bfloat16"
    weight = net.weight.data()
    assert weight.asnumpy().any()
    assert same({"": weight.asnumpy()}, {"": low(weight.asnumpy()).asnumpy()})


# ---- files and resuming ------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_training_resumes_bit_for_bit(policy, optimizer, batch, tmp_path):
    params, states = str(tmp_path / "net.params"), str(tmp_path / "trainer.states")
    ends = []
    for resumes in (False, True):
        net = convolutional(policy, batch[0])
        trainer = amp.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.01})
        if resumes:
            net.load_parameters(params)
            trainer.load_states(states)
        else:
            for _ in range(2):
                step(net, trainer, *batch)
            net.save_parameters(params)
            trainer.save_states(states)
        mx.random.seed(3)
        step(net, trainer, *batch)
        ends.append((values(net), trainer.loss_scale))
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


@pytest.mark.parametrize("policy", POLICIES)
def test_files_are_float32_and_load_into_a_float32_network(policy, batch, tmp_path):
    net = convolutional(policy, batch[0])
    net.save_parameters(str(tmp_path / "net.params"))
    plain = convolutional("float32", batch[0])
    plain.load_parameters(str(tmp_path / "net.params"))
    assert same(values(net), values(plain))
    net.export(str(tmp_path / "net"))
    served = imported(tmp_path / "net")
    assert onp.array_equal(served(batch[0]).asnumpy(), plain(batch[0]).asnumpy())


@pytest.mark.parametrize("policy", ["float16", "mixed_bfloat16"])
def test_exported_features_are_part_of_a_network(policy, batch, tmp_path):
    convolutional(policy, batch[0]).export(str(tmp_path / "net"))
    features = imported(tmp_path / "net")
    whole = sequence(features, nn.Dense(4))
    whole[1].initialize(mx.init.Xavier())
    expected = whole(batch[0]).asnumpy()
    amp.convert(whole, policy)
    amp.freeze(features)
    onp.testing.assert_allclose(whole(batch[0]).asnumpy(), expected, atol=0.05)
    before = values(features)
    trainer = amp.Trainer(whole.collect_params(), "sgd", {"learning_rate": 0.2})
    losses = [step(whole, trainer, *batch) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert same(before, values(features))


def test_symbol_block_of_several_inputs_and_outputs_is_part_of_a_network():
    def forward(F, x, inner):
        one, two = inner(x, x * 3)
        return one + inner(two, one)[0]

    x, y = (mx.sym.var(name).as_np_ndarray() for name in "xy")
    inner = gluon.SymbolBlock([x * 2 + y, x - y], [x, y])
    net = amp.convert(Calling(forward, inner), "float16")
    for train in (False, True):
        with autograd.record(train_mode=train):
            assert net(np.ones((1, 2))).tolist() == [[6, 6]]
    assert [out.tolist() for out in inner(np.ones(1), np.ones(1))] == [[3], [0]]
    with pytest.raises(ValueError, match="takes 2 inputs: x, y"):
        inner(x)


# ---- tools -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_no_deprecated_methods_of_arrays_are_called(policy, tmp_path):
    """Layers of MXNet whose own code calls none."""
    devices = [mx.cpu(0), mx.cpu(1)]
    net = amp.convert(ready(nn.Dense(4, in_units=3), ctx=devices), policy)
    given = [(np.ones((2, 3), ctx=device), np.zeros(2, ctx=device)) for device in devices]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(net)
        trainer = amp.Trainer(net.collect_params(), "adam")
        trainer.backward(recorded(lambda: [LOSS(net(x), y) for x, y in given]))
        assert trainer.step(4)
        net.save_parameters(str(tmp_path / "net.params"))
        trainer.save_states(str(tmp_path / "trainer.states"))
        trainer.load_states(str(tmp_path / "trainer.states"))
        assert amp.xray(net, given[:1], LOSS).findings == []
    assert [array.ctx for array in copied.weight.list_data()] == devices


@pytest.mark.parametrize("policy", POLICIES)
def test_own_code_may_mix_weights_and_gradients_with_float32_arrays(policy):
    net = ready(nn.Dense(4, in_units=3), mx.init.Normal(1))
    x, y = np.ones((2, 3)), np.zeros((2, 4))
    average = net.weight.data().copy()
    amp.convert(net, policy)
    weight = net.weight.data().asnumpy().astype("float32")
    kept = average.asnumpy()
    onp.testing.assert_allclose((0.9 * average + 0.1 * net.weight.data()).asnumpy(),
                                0.9 * kept + 0.1 * weight, rtol=1e-3)
    average += net.weight.data()
    onp.testing.assert_allclose(average.asnumpy(), kept + weight, rtol=1e-6)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, loss_scale=4)
    trainer.backward(recorded(
        lambda: gluon.loss.L2Loss()(net(x), y).sum() * 0 + (net.weight.data() ** 2).sum()))
    total = np.zeros(1) + (net.weight.grad() ** 2).sum()
    onp.testing.assert_allclose(total.asnumpy(), ((8 * weight) ** 2).sum(), rtol=0.02)
    assert trainer.step(1)
    assert not net.weight.data().asnumpy().any()  # the gradient is twice the weight


# ---- d2l's BERT and Transformer -----------------------------------------------


def trained(net, loss_of, steps):
    """Returns the losses of training with Adam."""
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    losses = []
    for _ in range(steps):
        loss = recorded(lambda: loss_of(net).astype("float32"))
        trainer.backward(loss)
        trainer.step(1)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("how", ["bfloat16", "mixed_bfloat16", "float16", "cast"])
def test_bert_trains(how, rng):
    tokens, segments = np.array(rng.integers(0, 30, (4, 10))), np.array([[0] * 5 + [1] * 5] * 4)
    lengths, places = np.array([10, 8, 6, 10]), np.array(rng.integers(0, 6, (4, 3)))
    words, weights = np.array(rng.integers(0, 30, 12)), np.array([[1], [1], [0]] * 4)

    def loss_of(net):
        masked, order = net(tokens, segments, lengths, places)
        loss = LOSS(masked.reshape(-1, 30), words, weights).sum() / (weights.sum() + 1e-8)
        return loss + LOSS(order, np.array([0, 1, 1, 0])).mean()

    net = ready(Bert(30), mx.init.Xavier())
    if how == "cast":
        net.cast("bfloat16")
    else:
        amp.convert(net, how)
    losses = trained(net, loss_of, 25)
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("policy", cases(["float16"], ["bfloat16", "mixed_bfloat16"]))
def test_transformer_trains_and_translates(policy, rng):
    source = np.array(rng.integers(2, 12, (6, 7)), dtype="float32")
    target = np.concatenate((np.ones((6, 1)), source[:, :-1]), axis=1)
    lengths = np.array([7, 5, 7, 6, 7, 4])
    net = ready(amp.convert(Transformer(12), policy), mx.init.Xavier())
    losses = trained(net, lambda net: LOSS(net(source, lengths, target), source).mean(), 40)
    assert losses[-1] < losses[0] / 3
    assert len(net.translate(source[:1], lengths[:1], np.ones((1, 1)), 7)) == 7


# ---- kinds of networks and of data -------------------------------------------


def of_words():
    return Calling(lambda F, words, table, dense: dense(table(words).mean(axis=1)),
                   nn.Embedding(9, 6), nn.Dense(4))


def of_numbers():
    return Calling(lambda F, x, hidden, norm, dense: dense(F.np.tanh(norm(hidden(x)))),
                   nn.Dense(6), nn.BatchNorm(), nn.Dense(4))


class Read(gluon.Block):
    """A plain Block around a network, which reads a value."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)
        return out * 0 if float(out.mean()) > 1e6 else out


DATA = {
    "float64": (of_numbers, lambda rng: np.array(rng.standard_normal((8, 5)), dtype="float64")),
    "float16": (of_numbers, lambda rng: np.array(rng.standard_normal((8, 5)), dtype="float16")),
    "int32": (of_words, lambda rng: np.array(rng.integers(0, 9, (8, 5)), dtype="int32")),
    "int64": (of_words, lambda rng: np.array(rng.integers(0, 9, (8, 5)), dtype="int64")),
    "batch of 1": (of_numbers, lambda rng: np.array(rng.standard_normal((1, 5)), dtype="float32")),
}


@pytest.mark.parametrize("policy", ["float16", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", ["hybridized", "never hybridized", "plain"])
@pytest.mark.parametrize("data", DATA)
def test_every_tool_takes_every_kind_of_network_and_data(data, kind, policy, rng, tmp_path):
    make, values_of = DATA[data]
    x, file = values_of(rng), str(tmp_path / "file")
    y = np.array(rng.integers(0, 4, len(x)))
    net = Read(make()) if kind == "plain" else make()
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(0), mx.cpu(1)])
    if kind == "hybridized":
        net.hybridize()
    amp.convert(net, policy)
    net(x)
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3}, clip_norm=1.0)
    with amp.Monitor(net, trainer, file, interval=1):
        for _ in range(2):
            with autograd.record():
                losses = [LOSS(net(x.as_in_ctx(mx.cpu(i))), y.as_in_ctx(mx.cpu(i)))
                          for i in range(2)]
            trainer.backward(losses)
            assert trainer.step(2 * len(x))
    net.save_parameters(file)
    before = values(net)
    net.load_parameters(file)
    assert same(before, values(net))
    trainer.save_states(file)
    trainer.load_states(file)
    net.collect_params().reset_ctx(mx.cpu())
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
    assert amp.lr_find(net, trainer, LOSS, [(x, y)], steps=10).rates
    view = amp.xray(net, [(x, y)], LOSS)
    assert view.loss_scale[1] >= 1
    assert amp.explain(net, (x, y), LOSS).first_overflow is None
    if kind != "plain":
        assert types(net)
        net.export(file)
        served = imported(file)
        if not data.startswith("float"):
            assert onp.allclose(served(x).asnumpy(), net(x).asnumpy(), atol=0.02)
        dtype = "float16" if policy == "float16" else "bfloat16"
        amp.export_onnx(net, file, x.shape, dtype)


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "bfloat16", "mixed_bfloat16"])
def test_empty_arrays_are_predicted(policy, hybridized):
    """MXNet's layers do not train on them, in float32 either."""
    net = ready(sequence(nn.Dense(6, in_units=5), nn.HybridLambda(lambda F, x: F.np.tanh(x) * 2),
                         nn.LayerNorm(in_channels=6), nn.Dense(3, in_units=6)))
    if hybridized:
        net.hybridize()
    amp.convert(net, policy)
    assert net(np.zeros((0, 5))).asnumpy().shape == (0, 3)
    assert net(np.ones((2, 5))).asnumpy().shape == (2, 3)
    assert low([]).asnumpy().shape == (0,)


@pytest.mark.parametrize("policy", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layer", [rnn.LSTM, rnn.GRU, rnn.RNN])
def test_recurrent_layers_in_graphs_begin_with_zeros(layer, policy, tmp_path):
    net = ready(sequence(layer(8, 2, bidirectional=True), nn.Dense(3, flatten=False)),
                mx.init.Xavier())
    x = np.random.normal(size=(5, 2, 6))
    expected = net(x).asnumpy()
    net.hybridize()
    amp.convert(net, policy)
    assert onp.allclose(net(x).asnumpy(), expected, atol=0.03)
    assert trained(net, lambda net: (net(x) ** 2).mean(), 3)[-1] < (expected ** 2).mean()
    amp.export_onnx(net, str(tmp_path / "net.onnx"), x.shape, policy)


def test_states_of_other_mode_are_refused_by_its_name(tmp_path):
    def made(arrays):
        net, trainer = with_trainer(ready(nn.Dense(2, in_units=3)), "adam")
        trainer.backward(recorded(lambda: net(arrays.ones((1, 3))).sum()))
        trainer.step(1)
        return trainer

    npx.reset_np()
    made(mx.nd).save_states(str(tmp_path / "states"))
    npx.set_np()
    with pytest.raises(ValueError, match=r"present mode of npx\.set_np\(\)"):
        made(np).load_states(str(tmp_path / "states"))
