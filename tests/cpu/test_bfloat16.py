"""bfloat16 in MXNet's Python API: names, casts, numpy, files, Gluon layers, updates of weights."""
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from gluon_amp.cpu.bfloat16 import is_bfloat16
from halves import as_bfloat16, bfloat16_bits
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn
from networks import ready, sequence
from trainers import recorded

pytestmark = [pytest.mark.isa, pytest.mark.vectorized]


def low(x):
    return nd.array(x, dtype="bfloat16")


@pytest.mark.parametrize("make", [
    lambda: nd.zeros((2, 3), dtype="bfloat16"), lambda: nd.ones((2, 3), dtype="bfloat16"),
    lambda: nd.full((2, 3), 1.5, dtype="bfloat16"), lambda: nd.empty((2, 3), dtype="bfloat16"),
    lambda: nd.array([[1.5, 2, 3]] * 2, dtype="bfloat16"),
    lambda: nd.array(np.ones((2, 3)), dtype="bfloat16"),
    lambda: nd.ones((2, 3)).astype("bfloat16"), lambda: nd.cast(nd.ones((2, 3)), "bfloat16"),
    lambda: nd.ones((2, 3), dtype="float16").astype("bfloat16"),
    lambda: nd.zeros_like(low(np.ones((2, 3)))), lambda: low(np.ones((2, 3))).copy()])
def test_creation_functions_accept_bfloat16(make):
    made = make()
    assert is_bfloat16(made.dtype)
    assert made.asnumpy().dtype == np.float32
    assert made.shape == made.asnumpy().shape == (2, 3)


def test_every_bfloat16_is_widened_exactly_and_round_trips():
    every = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    found = low(every).asnumpy()
    numbers = ~np.isnan(every)
    assert np.array_equal(bfloat16_bits(found[numbers]), np.flatnonzero(numbers))
    assert np.isnan(found[~numbers]).all()


def test_ties_are_rounded_to_even():
    step = 2.0 ** -8
    ties = np.float32([1 + step, 1 + 3 * step, -1 - step, 3.3961775292304e38, 2.0 ** -134])
    assert low(ties).asnumpy().tolist() == [1, 1 + 2.0 ** -6, -1, np.inf, 0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8"])
def test_casts_to_and_from_bfloat16(dtype):
    x = nd.array([0, 1, 2.5, 200], dtype=dtype)
    assert low([0, 1, 2.5, 200]).astype(dtype).asnumpy().tolist() == x.asnumpy().tolist()
    there = x.astype("bfloat16")
    assert is_bfloat16(there.dtype)
    assert there.asnumpy().tolist() == x.asnumpy().astype("float32").tolist()
    into = nd.zeros(4, dtype=dtype)
    there.copyto(into)
    assert into.asnumpy().tolist() == x.asnumpy().tolist()


def test_assignment_to_bfloat16_array():
    x = nd.zeros((2, 3), dtype="bfloat16")
    x[:] = np.float32([[1, 2, 3], [4, 5, 6]]) / 7
    assert np.array_equal(x.asnumpy(), as_bfloat16(np.arange(1, 7).reshape(2, 3) / np.float32(7)))
    x[0, 1:] = 2.5
    x[1] = nd.array([7, 8, 9])
    x[0, 0] = low([1.25])
    assert x.asnumpy().tolist() == [[1.25, 2.5, 2.5], [7, 8, 9]]
    assert x[1, 2].asscalar() == 9


def test_files_store_float32(tmp_path):
    path = str(tmp_path / "arrays")
    nd.save(path, {"x": low([1.5, 2.5]), "i": nd.array([3], dtype="int32")})
    loaded = nd.load(path)
    assert loaded["x"].dtype == np.float32
    assert loaded["x"].asnumpy().tolist() == [1.5, 2.5]
    assert loaded["i"].dtype == np.int32


def test_parameters_round_trip_through_files(tmp_path):
    path = str(tmp_path / "net.params")
    nets = [nn.Dense(3, in_units=4) for _ in range(3)]
    for net in nets:
        net.initialize(mx.init.Normal())
    nets[0].cast("bfloat16")
    nets[0].save_parameters(path)
    nets[1].load_parameters(path)
    nets[2].cast("bfloat16")
    nets[2].load_parameters(path)
    assert nets[1].weight.data().dtype == np.float32
    assert is_bfloat16(nets[2].weight.data().dtype)
    for net in nets[1:]:
        assert np.array_equal(net.weight.data().asnumpy(), nets[0].weight.data().asnumpy())


LAYERS = {
    "dense": (lambda: nn.Dense(4, in_units=5), (3, 5)),
    "conv1d": (lambda: nn.Conv1D(8, 3, in_channels=6), (2, 6, 9)),
    "conv": (lambda: nn.Conv2D(16, 3, in_channels=16, padding=1), (2, 16, 8, 8)),
    "conv3d": (lambda: nn.Conv3D(8, 3, in_channels=4), (2, 4, 5, 5, 5)),
    "grouped": (lambda: nn.Conv2D(16, 3, in_channels=16, groups=16), (2, 16, 8, 8)),
    "deconv": (lambda: nn.Conv2DTranspose(8, 2, 2, in_channels=16), (2, 16, 8, 8)),
    "batch norm": (lambda: nn.BatchNorm(in_channels=6), (4, 6, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(in_channels=12), (3, 12)),
    "max pool": (lambda: nn.MaxPool2D(2), (2, 16, 8, 8)),
    "lstm": (lambda: rnn.LSTM(8, 2, input_size=5, bidirectional=True), (3, 2, 5)),
    "gru": (lambda: rnn.GRU(8, input_size=5), (3, 2, 5)),
    "embedding": (lambda: nn.Embedding(7, 4), None),
    "attention": (lambda: nn.HybridLambda(lambda F, x: F.batch_dot(
        F.softmax(F.batch_dot(x, x, transpose_b=True)), x).transpose((1, 0, 2))), (2, 5, 4)),
}


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_cast_layer_runs_forward_and_backward(name, hybridized, rng):
    """Near float32's results for the same values: twice the largest errors, which attention has,
    0.0054 of the norm and 0.0063 of the largest element."""
    make, shape = LAYERS[name]
    mx.random.seed(3)
    net = ready(make(), mx.init.Normal(0.3))
    if hybridized:
        net.hybridize(static_alloc=True, static_shape=True)
    x = rng.standard_normal(shape) if shape else np.array([1, 5, 1, 0])
    head, made = None, []
    for dtype in ("bfloat16", "float32"):
        net.cast(dtype)  # float32 gets the rounded bfloat16 values
        data = nd.array(x, dtype="bfloat16" if shape else "float32").astype(
            dtype if shape else "float32")
        if shape:
            data.attach_grad()
        out = recorded(net, data)
        assert is_bfloat16(out.dtype) == (dtype == "bfloat16")
        if head is None:
            head = rng.standard_normal(out.shape)
        out.backward(nd.array(as_bfloat16(head), dtype=dtype))
        gradients = [p.grad().asnumpy() for p in net.collect_params().values()
                     if p.grad_req != "null"]
        made.append([out.asnumpy(), *gradients, *([data.grad.asnumpy()] if shape else [])])
    for ours, theirs in zip(*made):
        apart = np.abs(ours - theirs)
        assert np.linalg.norm(apart) <= 0.011 * np.linalg.norm(theirs)
        assert apart.max() <= 0.013 * np.abs(theirs).max()


def test_batch_norm_keeps_float32_parameters():
    net = sequence(nn.Conv2D(4, 1, in_channels=2), nn.BatchNorm(in_channels=4))
    net.cast("bfloat16")
    assert is_bfloat16(net[0].weight.dtype)
    assert {p.dtype for p in net[1].collect_params().values()} == {"float32"}
    data = mx.sym.var("data")
    block = gluon.SymbolBlock(net(data), data)
    block.cast("bfloat16")
    types = {name: is_bfloat16(p.dtype) for name, p in block.collect_params().items()}
    assert types == {name: "conv" in name for name in types}


def test_dropout_scales_kept_values():
    x = nd.ones((100, 100), dtype="bfloat16")
    x.attach_grad()
    y = recorded(lambda: nd.Dropout(x, p=0.5))
    y.backward(nd.ones((100, 100), dtype="bfloat16"))
    assert set(np.unique(y.asnumpy())) == {0, 2}
    assert np.array_equal(x.grad.asnumpy(), y.asnumpy())
    assert 0.4 < (y.asnumpy() > 0).mean() < 0.6


@pytest.mark.parametrize("name", ["sgd", "adam", "nag", "signum"])
def test_mxnet_update_rounds_weights_once(name):
    """MXNet's bfloat16 kernel truncates, so that sums of small steps drift."""
    weights = [nd.array([1, -2, 0.5]), low([1, -2, 0.5])]
    gradient = nd.array([0.3, 0.2, -0.1]).astype("bfloat16")
    for weight, grad in zip(weights, (gradient.astype("float32"), gradient)):
        made = mx.optimizer.create(name, learning_rate=0.125)
        made.update(0, weight, grad, made.create_state(0, weight))
    assert np.array_equal(weights[1].asnumpy(), as_bfloat16(weights[0].asnumpy()))


def test_zero_grad_zeroes_bfloat16_gradients():
    net = ready(nn.Dense(3, in_units=2))
    net.cast("bfloat16")
    net.collect_params().setattr("grad_req", "add")
    recorded(lambda: net(low(np.ones((1, 2)))).sum()).backward()
    gradients = [p.grad() for p in net.collect_params().values()]
    assert all((gradient.asnumpy() == 1).all() for gradient in gradients)
    net.collect_params().zero_grad()
    assert all((gradient.asnumpy() == 0).all() for gradient in gradients)


@pytest.mark.parametrize(("value", "finite"), [(3e38, 1), (np.inf, 0), (np.nan, 0)])
def test_all_finite_accepts_bfloat16(value, finite):
    x = low([1, value, -2])
    assert nd.all_finite(x) == finite
    assert nd.multi_all_finite(x, low([1]), num_arrays=2) == finite
    for before in (0, 1):
        result = nd.array([before])
        nd.all_finite(x, init_output=False, out=result)
        assert result == (before and finite)
