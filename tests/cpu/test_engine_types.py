"""Requested types, random numbers, unused results, views, empty arrays as in float32, rounded."""
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.graph.build import build
from gluon_amp.graph.graph import Entry, Graph, Node
from halves import Op, as_function, assert_half, halves, run
from mxnet import nd

pytestmark = [pytest.mark.sanitize, pytest.mark.isa]

F16, F32 = np.float16, np.float32
sym = mx.sym
X, Y = sym.var("x"), sym.var("y")


def wide_results(symbol, arrays):
    """MXNet's results in float32."""
    return Op(symbol, arrays, wide=True).numbers(training=False, seed=None)


def node(op, inputs=("x",), **attributes):
    return Graph([Entry(Node(op, "op", {k: str(v) for k, v in attributes.items()},
                             [Entry(Node("null", name)) for name in inputs]))]).symbol()


@pytest.mark.parametrize(("op", "settings"), [
    ("topk", {"k": 3}), ("topk", {"k": 3, "axis": 0, "ret_typ": "both"}), ("argsort", {}),
    ("argsort", {"axis": 0, "is_ascend": False}), ("one_hot", {"depth": 60, "on_value": 0.5}),
    ("softmax", {}), ("log_softmax", {"axis": 0})])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtype_argument_is_respected(op, settings, dtype, rng):
    x = rng.permutation(35).astype(F16).reshape(5, 7)
    outputs, _ = run(getattr(sym, op)(X, dtype=dtype, **settings), {"x": x}, training=False)
    expected = wide_results(getattr(sym, op)(X, dtype="float32", **settings), {"x": x})
    assert len(outputs) == len(expected)
    assert outputs[-1].dtype == dtype
    for ours, theirs in zip(outputs, expected):
        assert np.array_equal(ours, theirs.astype(ours.dtype))


@pytest.mark.parametrize("op", ["sort", "argmax", "argmin"])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_sort_and_argmax_match_float32(op, axis, rng):
    symbol = sym.BlockGrad(getattr(sym, op)(X, axis=axis))
    if op == "sort" and axis is None:
        symbol = sym.BlockGrad(node("sort", axis="None"))
    x = rng.permutation(35).astype(F16).reshape(5, 7)
    (out,), _ = run(symbol, {"x": x}, training=False)
    assert_half(out, wide_results(symbol, {"x": x})[0])


DRAWN = {"uniform": {"low": -1, "high": 2}, "normal": {"loc": 1, "scale": 2},
         "gamma": {"alpha": 2, "beta": 0.5}, "exponential": {"lam": 0.5}, "poisson": {"lam": 3},
         "negative_binomial": {"k": 3, "p": 0.4},
         "generalized_negative_binomial": {"mu": 2, "alpha": 0.3}}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_match_float32_rounded(name, rng):
    x = halves(rng, 40, 50)
    settings = DRAWN[name]
    alike = node(f"_random_{name}_like", **settings)
    shaped = {dtype: sym.Group([node(f"_random_{name}", (), shape="(40, 50)", dtype=dtype,
                                     **settings), X * 1]) for dtype in ("float16", "float32")}
    for ours, theirs in ((alike, alike), (shaped["float16"], shaped["float32"])):
        mx.random.seed(5)
        outputs, _ = run(ours, {"x": x}, training=False)
        mx.random.seed(5)
        assert_half(outputs[0], wide_results(theirs, {"x": x})[0])
        assert len(np.unique(outputs[0])) > 5


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_with_float16_parameters_match_float32(name):
    inputs = "xy"[:len(DRAWN[name])]
    symbol = node(f"_sample_{name}", inputs, shape="(30,)")
    arrays = {"x": F16([1, 2, 3]), "y": F16([0.5, 0.25, 0.75])}
    arrays = {key: arrays[key] for key in inputs}
    mx.random.seed(5)
    (out,), _ = run(symbol, arrays, training=False)
    mx.random.seed(5)
    expected, = wide_results(symbol, arrays)
    assert np.array_equal(out, expected.astype(out.dtype))
    assert len(np.unique(out)) > 5


def test_float64_stays_float64_beside_float16(rng):
    symbol = sym.broadcast_add(sym.Cast(X, dtype="float64"), Y * 1.1)
    arrays = {"x": halves(rng, 9), "y": rng.standard_normal(9)}
    (out,), gradients = run(symbol, arrays, [np.ones(9)])
    assert out.dtype == np.float64
    assert np.array_equal(out, arrays["x"].astype(float) + arrays["y"] * 1.1)
    assert (gradients["x"] == 1).all()
    (out,), _ = run(sym.Cast(X, dtype="float16") * 3, {"x": arrays["y"]})
    assert_half(out, arrays["y"].astype(F16) * F16(3))


def test_unused_outputs_are_not_allocated(rng):
    x = halves(rng, 4, 6)
    parts = sym.split(X, num_outputs=3, axis=1)
    (out,), gradients = run(parts[1] * 2, {"x": x}, [np.ones((4, 2), F16)])
    assert np.array_equal(out, x[:, 2:4] * 2)
    assert np.array_equal(gradients["x"], np.repeat([[0, 0, 2, 2, 0, 0]], 4, 0))
    (value,), _ = run(sym.topk(X, k=2, ret_typ="both")[0] * 1, {"x": x})
    assert np.array_equal(value, -np.sort(-x)[:, :2])
    (mean,), _ = run(sym.moments(X, axes=(1,))[0] * 1, {"x": x})
    assert_half(mean, x.astype(float).mean(1), 1)


@pytest.mark.parametrize("op", ["exp", "relu", "negative", "softmax", "square"])
def test_view_is_read_in_place(op, rng):
    types = {"x": "float16"}
    ours = as_function(build(Graph.read(getattr(sym, op)(X)), types).symbol())
    whole = nd.array(halves(rng, 9, 7), dtype="float16")
    assert np.array_equal(ours(whole[2:5]).asnumpy(), ours(whole[2:5].copy()).asnumpy())
    assert np.array_equal(ours(whole[3]).asnumpy(), ours(whole[3].copy()).asnumpy())
    assert np.array_equal(ours(whole.reshape((7, 9))).asnumpy(),
                          ours(whole.copy().reshape((7, 9)).copy()).asnumpy())


@pytest.mark.parametrize("flags", [[], [("static_alloc", True), ("static_shape", True)]])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
def test_results_of_other_types_do_not_overwrite_live_inputs(dtype, flags, rng):
    """With float16 indices or lengths; the result could reuse the memory of the data."""
    backward = np.arange(64, dtype=F16)[::-1]
    cases = [(sym.gather_nd(X * 2, Y * 1) * 1, backward[None], 64),
             (sym.take(X * 2, Y * 1) * 1, backward, 64),
             (sym.SequenceReverse(X * 2, Y * 1, use_sequence_length=True) * 1, np.full(4, 16, F16),
              (16, 4))]
    for symbol, y, shape in cases:
        x = rng.integers(0, 100, shape).astype(dtype)
        graph = build(Graph.read(symbol), {"x": dtype, "y": "float16"}).symbol()
        op = as_function(graph, flags)
        arrays = {"x": nd.array(x, dtype=dtype), "y": nd.array(y, dtype="float16")}
        out = op(*(arrays[name] for name in graph.list_inputs()))
        assert np.array_equal(out.asnumpy(), 2 * x[::-1])


def test_boolean_mask_matches_float32(rng):
    arrays = {"x": halves(rng, 4, 3), "y": np.array([1, 0, 1, 1], F32)}
    head = halves(rng, 3, 3)
    (out,), gradients = run(sym.contrib.boolean_mask(X * 2, Y), arrays, [head])
    assert np.array_equal(out, arrays["x"][[0, 2, 3]] * 2)
    assert np.array_equal(gradients["x"][[0, 2, 3]], head * 2)


@pytest.mark.parametrize("op", ["exp", "negative", "dot", "batch_dot", "log_softmax"])
def test_empty_arrays_give_empty_arrays(op):
    shapes = {"dot": [(0, 4), (4, 3)], "batch_dot": [(0, 2, 4), (0, 4, 3)]}.get(op, [(0, 4)])
    arrays = dict(zip("xy", (np.ones(shape, F16) for shape in shapes)))
    with mx.util.np_shape(True):
        (out,), _ = run(getattr(sym, op)(*map(sym.var, arrays)), arrays)
    assert out.size == 0
    assert out.dtype == F16


def zeros(*shape):
    return lambda dtype: nd.zeros(shape).astype(dtype)


def finished(call, *arrays):
    call(*arrays)
    nd.waitall()


def as_np(name, **attributes):
    return lambda *arrays: getattr(mx.np, name)(*(a.as_np_ndarray() for a in arrays), **attributes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("call", "inputs"), [
    (nd.LinearRegressionOutput, [zeros(0, 3), zeros(0, 3)]),
    (nd.SoftmaxActivation, [zeros(2, 0)]), (nd.SequenceMask, [zeros(0, 4, 4)]),
    (nd.SequenceReverse, [zeros(5, 0, 4)]), (nd.take, [zeros(3, 0), zeros(2)]),
    (as_np("average", axis=0), [zeros(3, 0)]), (as_np("std", axis=0), [zeros(3, 0)])])
def test_calls_with_empty_results_return(call, inputs, dtype):
    """MXNet's code divides by the size of an axis, which ends the process."""
    with mx.util.np_shape(True):
        arrays = [make(dtype) for make in inputs]
        arrays[0].attach_grad()
        with mx.autograd.record():
            result = call(*arrays)
        result.backward()
        assert result.size == arrays[0].grad.size == 0
        nd.waitall()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("name", "call", "inputs"), [
    ("take", lambda x, i: nd.take(x, i, mode="wrap"), [zeros(0, 3), zeros(2)]),
    ("take", nd.take, [zeros(0, 3), zeros(2)]), ("pick", nd.pick, [zeros(4, 0), zeros(4)]),
    ("dot", lambda x, y: nd.dot(x, y, transpose_a=True), [zeros(0, 3), zeros(0, 5)]),
    ("SequenceLast", nd.SequenceLast, [zeros(0, 4, 4)]),
    ("_npi_percentile", as_np("percentile", q=50), [zeros(0)]),
    ("_npi_average", as_np("average", axis=1, returned=True), [zeros(3, 0)]),
    ("_npi_pad", as_np("pad", pad_width=((1, 1), (0, 0)), mode="edge"), [zeros(0, 3)])])
def test_empty_inputs_of_other_results_are_refused(name, call, inputs, dtype):
    said = f"{name} takes no empty arrays, unless its results are empty, too. Received: inputs of"
    with mx.util.np_shape(True), pytest.raises(mx.MXNetError, match=said):
        finished(call, *(make(dtype) for make in inputs))


def test_empty_results_as_numpys():
    with mx.util.np_shape(True):
        with pytest.raises(mx.MXNetError, match="indices out of bound"):
            nd.take(nd.zeros((3, 0), dtype="float16"), nd.array([7]), mode="raise").wait_to_read()
        x = nd.zeros((0, 3), dtype="float16").as_np_ndarray()
        assert x.sum(axis=0).asnumpy().tolist() == [0, 0, 0]
        assert np.isnan(mx.np.average(x, axis=0).asnumpy()).all()
