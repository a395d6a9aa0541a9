"""Operators with a state between forward and backward pass: recurrent layers, dropout, MXNet's
legacy operators. Their results and gradients are float32's, rounded."""
import functools
from itertools import product
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from halves import Op, assert_half, halves, ulps
from mxnet._ctypes.symbol import _symbol_creator
from operator_calls import F16, candidates, handle
from processes import printed

pytestmark = pytest.mark.isa

sym = mx.sym
X, Y, Z = (sym.var(name) for name in "xyz")
STATIC = (("static_alloc", True), ("static_shape", True))


def assert_all_half(ours, theirs):
    """Float32's results, rounded once."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        if one.dtype == np.float16:
            assert_half(one, other)
        else:
            assert np.array_equal(one, other)


def assert_gradients(ours, theirs, tolerance, base=0):
    """Within a tolerance of the largest."""
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        largest = np.abs(theirs[name]).max()
        np.testing.assert_allclose(gradient.astype(float), base + theirs[name],
                                   atol=tolerance * largest + base * 1e-3, rtol=tolerance,
                                   err_msg=name)


# ---- recurrent layers ----------------------------------------------------------------

GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}


def rnn(rng, mode, layers=1, both_ways=False, projection=None, inputs=4, width=6, **settings):
    ways = 2 if both_ways else 1
    state = projection or width
    size = 0
    for layer in range(layers):
        below = inputs if layer == 0 else state * ways
        size += ways * GATES[mode] * width * (below + state + 2)
        size += ways * width * (projection or 0)
    arrays = {"x": halves(rng, 5, 3, inputs), "w": halves(rng, size, scale=0.3),
              "h": halves(rng, layers * ways, 3, state)}
    if mode == "lstm":
        arrays["c"] = halves(rng, layers * ways, 3, width)
    if projection:
        settings["projection_size"] = projection
    symbol = sym.RNN(*map(sym.var, arrays), state_size=width, num_layers=layers, mode=mode,
                     bidirectional=both_ways, **settings)
    return symbol, arrays


@pytest.mark.parametrize("flags", [(), STATIC])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(("layers", "both_ways"), [(1, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize("mode", GATES)
def test_recurrent_layer_matches_float32(mode, layers, both_ways, states, flags, rng):
    symbol, arrays = rnn(rng, mode, layers, both_ways, state_outputs=states)
    wide = Op(symbol, arrays, wide=True)
    ours = Op(symbol, arrays, flags=flags)
    assert_all_half(ours.numbers(training=False), wide.numbers(training=False))
    assert_all_half(ours.numbers(), wide.numbers())
    assert len(ours.numbers()) == (1 if not states else 3 if mode == "lstm" else 2)
    heads = [halves(rng, *o.shape) for o in wide.forward()]
    expected = wide.gradients(heads)
    assert_gradients(ours.gradients(heads), expected, 2e-3)  # reads its rounded results
    assert_gradients(Op(symbol, arrays, request="add", flags=flags).gradients(heads), expected,
                     2e-3, base=1)


@pytest.mark.parametrize("flags", [(), STATIC])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("mode", GATES)
def test_recorded_prediction_of_recurrent_layer_has_gradients(mode, states, flags, rng):
    """A recorded prediction, also after an unrecorded one, and two backward passes."""
    symbol, arrays = rnn(rng, mode, 2, state_outputs=states)
    wide, ours = Op(symbol, arrays, wide=True), Op(symbol, arrays, flags=flags)
    heads = [halves(rng, *o.shape) for o in wide.forward()]
    expected = wide.gradients(heads, training=False)
    assert_gradients(ours.gradients(heads, training=False), expected, 2e-3)
    ours.numbers(training=False)
    outputs = ours.forward(training=False, recorded=True)
    assert_all_half([o.asnumpy() for o in outputs], wide.numbers(training=False))
    for retain in (True, False):
        ours.backward(outputs, heads, training=False, retain_graph=retain)
        assert_gradients(ours.collected(), expected, 2e-3)


@pytest.mark.parametrize("mode", GATES)
def test_recorded_prediction_with_sequence_lengths_has_gradients(mode, rng):
    symbol, arrays = rnn(rng, mode, use_sequence_length=True, sequence_length=sym.var("n"))
    arrays["n"] = np.int32([5, 2, 4])  # MXNet ignores them on CPUs
    heads = [halves(rng, 5, 3, 6)]
    assert_gradients(Op(symbol, arrays).gradients(heads, training=False),
                     Op(symbol, arrays, wide=True).gradients(heads), 2e-3)


PREDICTS = """
import sys
sys.path[:0] = sys.argv[1:]
import gluon_amp
import numpy as np
from halves import Op
from test_engine_states import STATIC, rnn
for flags in ((), STATIC):
    op = Op(*rnn(np.random.default_rng(0), "lstm", 2), flags=flags)
    for _ in range(3):
        op.numbers(training=False)
"""


def test_recurrent_prediction_needs_no_training_workspace():
    """MXNet does not pass to static graphs whether gradients are needed."""
    said = printed(PREDICTS, Path(__file__).parent, Path(__file__).parents[1], DNNL_VERBOSE="1")
    assert ",rnn," in said
    assert "forward_inference" in said
    assert "forward_training" not in said


@pytest.mark.parametrize("both_ways", [False, True])
def test_projected_lstm_predicts(both_ways, rng):
    symbol, arrays = rnn(rng, "lstm", 2, both_ways, projection=3, state_outputs=True)
    ours = Op(symbol, arrays).numbers(training=False)
    assert_all_half(ours, Op(symbol, arrays, wide=True).numbers(training=False))
    with pytest.raises(mx.MXNetError, match="No training support for LSTM with projection"):
        Op(symbol, arrays).numbers()


LAYERS = {
    "lstm": lambda rng: rnn(rng, "lstm", 2, True),
    "gru": lambda rng: rnn(rng, "gru"),
    "rnn_tanh": lambda rng: rnn(rng, "rnn_tanh"),
    "Convolution": lambda rng: (
        sym.Convolution(X, sym.var("w"), kernel=(3, 3), num_filter=16, no_bias=True),
        {"x": halves(rng, 2, 16, 6, 6), "w": halves(rng, 16, 16, 3, 3, scale=0.1)}),
    "Deconvolution": lambda rng: (
        sym.Deconvolution(X, sym.var("w"), kernel=(3, 3), num_filter=16, no_bias=True),
        {"x": halves(rng, 2, 16, 6, 6), "w": halves(rng, 16, 16, 3, 3, scale=0.1)}),
    "FullyConnected": lambda rng: (
        sym.FullyConnected(X, sym.var("w"), num_hidden=32, no_bias=True),
        {"x": halves(rng, 16, 32), "w": halves(rng, 32, 32)}),
}


@pytest.mark.parametrize("flags", [(), STATIC])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_cache_no_weights_of_earlier_calls(name, flags, rng):
    """MXNet caches reordered weights for inference."""
    symbol, arrays = LAYERS[name](rng)
    ours = Op(symbol, arrays, flags=flags)
    for training in (True, False, False, True, True, False):
        arrays["w"] = (arrays["w"] * rng.uniform(0.5, 1.5, arrays["w"].shape)).astype(np.float16)
        ours.values["w"][:] = mx.nd.array(arrays["w"], dtype="float16")
        expected = Op(symbol, arrays, wide=True)
        if training:
            heads = [halves(rng, *o.shape) for o in expected.forward()]
            assert_gradients(ours.gradients(heads), expected.gradients(heads), 2e-3)
        found = ours.numbers(training=training)
        for one, other in zip(found, expected.numbers(training=training)):
            largest = np.abs(other).max()
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("name", LAYERS)
def test_retained_graph_gives_same_gradients_again(name, rng):
    symbol, arrays = LAYERS[name](rng)
    ours = Op(symbol, arrays)
    outputs = ours.forward(recorded=True)
    heads = [halves(rng, *o.shape) for o in outputs]
    ours.backward(outputs, heads, retain_graph=True)
    first = ours.collected()
    Op(symbol, arrays).gradients(heads)  # other calls use the same scratch memory meanwhile
    ours.backward(outputs, heads)
    for key, gradient in ours.collected().items():
        assert np.array_equal(gradient, first[key]), key


def test_interleaved_forward_passes_keep_their_states(rng):
    symbol, arrays = rnn(rng, "lstm", 2, True)
    heads = [halves(rng, 5, 3, 12)]
    others = {**arrays, "x": halves(rng, 5, 3, 4)}
    expected = [Op(symbol, a).gradients(heads) for a in (arrays, others)]
    first, second = Op(symbol, arrays), Op(symbol, others)
    one, two = first.forward(recorded=True), second.forward(recorded=True)
    first.backward(one, heads)
    second.backward(two, heads)
    for op, gradients in zip((first, second), expected):
        for key, gradient in op.collected().items():
            assert np.array_equal(gradient, gradients[key])


# ---- dropout -------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"p": 0.5}, {"p": 0.1}, {"p": 0.0}, {"p": 0.99},
                                      {"p": 0.3, "mode": "always"}, {"p": 0.3, "axes": (1,)},
                                      {"p": 0.3, "axes": (0, 2)}])
@pytest.mark.parametrize("flags", [(), STATIC])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_mask_matches_float32_with_same_seed(settings, flags, training, rng):
    symbol = sym.Dropout(X, **settings)
    arrays = {"x": rng.uniform(0.5, 3, (5, 300, 4)).astype(np.float16)}
    heads = [halves(rng, 5, 300, 4)]
    wide, ours = Op(symbol, arrays, wide=True), Op(symbol, arrays, flags=flags)
    expected = wide.numbers(training=training)
    assert_all_half(ours.numbers(training=training), expected)
    drops = settings["p"] > 0 and (training or "mode" in settings)
    assert (expected[0] == 0).any() == drops
    assert_half(ours.gradients(heads, training)["x"], wide.gradients(heads, training)["x"])
    outputs = ours.forward(training, recorded=True)
    for retain in (True, True, False):
        ours.backward(outputs, heads, training, retain_graph=retain)
        assert_half(ours.collected()["x"], wide.collected()["x"])


def test_dropout_mask_depends_on_seed(rng):
    ours = Op(sym.Dropout(X), {"x": np.ones((5, 300), np.float16)})
    assert np.array_equal(ours.numbers(seed=1)[0], ours.numbers(seed=1)[0])
    assert not np.array_equal(ours.numbers(seed=1)[0], ours.numbers(seed=2)[0])


# ---- legacy operators ----------------------------------------------------------------

# by the tolerance of gradients relative to the largest; None: rounded once
LEGACY = {
    None: "SliceChannel _split_v2 SwapAxis Pad UpSampling SequenceMask SequenceLast "
          "SequenceReverse ROIPooling MakeLoss _contrib_index_copy SVMOutput Pooling "
          "LinearRegressionOutput MAERegressionOutput",
    2e-3: "L2Normalization LRN BilinearSampler Correlation CTCLoss SoftmaxOutput Deconvolution "
          "_npi_einsum",
    5e-3: "GroupNorm SpatialTransformer LogisticRegressionOutput"}


def called(name, rng):
    """A symbol of an operator with the first attributes of operator_calls, and its arrays."""
    attributes, inputs = next(candidates(name, rng))
    symbol = _symbol_creator(handle(name).value, None, {}, [*attributes],
                             [*map(str, attributes.values())], "op", False)
    return symbol, dict(zip(symbol.list_inputs(), inputs))


MORE = {
    "split, the second alone": lambda rng: (
        sym.split(X, num_outputs=3, axis=1)[1], {"x": halves(rng, 2, 3, 4, 5)}),
    **{f"{name} by {dtype.__name__}": lambda rng, name=name, dtype=dtype: (
        getattr(sym, name)(X, Y, use_sequence_length=True),
        {"x": halves(rng, 5, 4, 3), "y": dtype([1, 4, 2, 3])})
       for name in ("SequenceMask", "SequenceReverse") for dtype in (np.float16, np.float32)},
    "GroupNorm of two groups": lambda rng: (
        sym.GroupNorm(X, Y, Z, num_groups=2),
        {"x": halves(rng, 2, 4, 5), "y": halves(rng, 2), "z": halves(rng, 2)}),
    "MultiBoxTarget": lambda rng: (sym.contrib.MultiBoxTarget(X, Y, Z), {
        "x": np.float16([[[0.125, 0.125, 0.5, 0.5], [0.5, 0.25, 1, 0.75]]]),
        "y": np.float16([[[0, 0.125, 0.125, 0.5, 0.75]], [[1, 0.5, 0.5, 1, 1]]]),
        "z": halves(rng, 2, 3, 2)}),
    "einsum of a diagonal": lambda rng: (
        mx.sym.np.einsum("ii->i", X.as_np_ndarray()).as_nd_ndarray(), {"x": halves(rng, 7, 7)}),
}


@pytest.mark.parametrize(("name", "tolerance"), [
    *((name, tolerance) for tolerance, names in LEGACY.items() for name in names.split()),
    *((name, 5e-3 if "Norm" in name else None) for name in MORE)])
def test_legacy_operator_matches_float32(name, tolerance, rng):
    symbol, arrays = MORE[name](rng) if name in MORE else called(name, rng)
    wide = Op(symbol, arrays, wide=True)
    expected = wide.numbers()
    heads = [halves(rng, *o.shape) for o in expected]
    gradients = wide.gradients(heads)
    for flags in ((), STATIC):
        ours = Op(symbol, arrays, flags=flags)
        assert_all_half(ours.numbers(), expected)
        leave_nan_in_scratch()
        found = ours.gradients(heads)
        assert_near(found, gradients, tolerance)
        outputs = ours.forward(recorded=True)
        ours.backward(outputs, heads, retain_graph=True)
        ours.backward(outputs, heads)
        assert_near(ours.collected(), gradients, tolerance)
        added = Op(symbol, arrays, request="add", flags=flags).gradients(heads)
        assert_gradients(added, {n: g.astype(np.float32) for n, g in found.items()}, 1e-3, base=1)


@pytest.mark.parametrize(("op", "shape", "expected"), [
    (sym.image.flip_left_right(X), (4, 5, 3), lambda x: x[:, ::-1]),
    (sym.image.flip_top_bottom(X), (5, 4, 3), lambda x: x[::-1]),
    (sym.image.adjust_lighting(X, alpha=(1, 2, 3)), (5, 4, 1), lambda x: x),
    (sym.image.random_lighting(X), (5, 4, 1), lambda x: x)])
def test_elements_that_mxnets_image_operators_leave(op, shape, expected, rng):
    """The middle of an odd width or height, and images with one channel."""
    other = {"x": np.full(shape, 7, np.float16)}
    Op(sym.image.flip_left_right(X), other).numbers()  # remains in scratch memory
    Op(sym.image.flip_top_bottom(X), other).numbers()
    x = halves(rng, *shape)
    assert np.array_equal(Op(op, {"x": x}).numbers()[0], expected(x))


def assert_near(found, expected, tolerance):
    if tolerance is not None:
        assert_gradients(found, expected, tolerance)
        return
    for name, gradient in found.items():
        rounded = expected[name].astype(gradient.dtype)
        assert ulps(gradient, rounded).max() == 0, name


@functools.lru_cache(maxsize=None)
def sums_of_nan():
    names = [f"x{i}" for i in range(24)]
    return [Op(sym.add_n(*map(sym.var, names)), dict.fromkeys(names, np.full(size, np.nan, F16)))
            for size in (3, 3, 1000, 40000)]  # the smallest one that fits is reused


def leave_nan_in_scratch():
    """Fills scratch memory with NaN: an operator must write all of its results."""
    for op in sums_of_nan():
        op.numbers()


def test_shapes_can_change_between_calls(rng):
    for mode, length, batch in product(GATES, (1, 7), (1, 5)):
        symbol, arrays = rnn(rng, mode, 1, True)
        arrays["x"] = halves(rng, length, batch, 4)
        for name in {"h", "c"} & set(arrays):
            arrays[name] = halves(rng, 2, batch, 6)
        assert_all_half(Op(symbol, arrays).numbers(), Op(symbol, arrays, wide=True).numbers())
