"""Each operator of MXNet has a row in the table, and runs in its type from every namespace."""
import ctypes
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from gluon_amp.formats import FORMATS
from gluon_amp.graph import operators
from gluon_amp.graph.build import build
from gluon_amp.graph.casts import insert_casts
from gluon_amp.graph.graph import Entry, Graph, Node
from gluon_amp.policy import get_policy
from mxnet import gluon, nd
from networks import Calling, ready, sequence

sym = mx.sym
ALL = {name for name in mx.operator.get_all_registered_operators()
       if not name.startswith(library.PREFIX)}
# Aliases do not occur in graphs: MXNet writes the primary name.
PRIMARY = library.operators()


def test_every_operator_of_mxnet_has_a_row():
    forward = {name for name in PRIMARY if "_backward" not in name}
    assert sorted(forward - set(operators.OPERATORS)) == []


def test_table_has_no_unknown_operators():
    of_gpus = {"CuDNNBatchNorm"}  # in MXNet's CUDA build only
    assert sorted(set(operators.OPERATORS) - ALL - of_gpus) == []


def test_no_operator_has_two_rows():
    words = [name for *_, names in operators._TABLE for name in names.split()]
    assert len(words) == len(set(words))


def test_columns_have_operators_of_mxnet_only():
    backward = {name for name in PRIMARY if "backward" in name}
    of_mxnet = set(operators.OPERATORS) | backward | operators.COLUMNS["runs_in_mxnet"]
    columns = {name: names for name, names in operators.COLUMNS.items() if name != "constants"}
    assert {name: names - of_mxnet for name, names in columns.items() if names - of_mxnet} == {}
    assert {name for name in operators.COLUMNS["runs_in_mxnet"] if not _exists(name)} == set()


def _exists(name):
    handle = ctypes.c_void_p()
    return not mx.base._LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle))


def test_moving_averages_are_the_inputs_that_norms_mutate():
    names = sorted(operators.BATCH_NORMS - {"CuDNNBatchNorm"})
    for name in names:
        data = [Entry(Node("null", f"x{i}")) for i in range(5)]
        graph = Graph([Entry(Node(name, "norm", {"key": "k"} if "Sync" in name else {}, data))])
        assert operators.moving_averages(graph) == {"x3", "x4"} == graph.mutated(), name


def test_operators_with_dedicated_kernels_exist_in_mxnet():
    assert "BatchNorm" in library.operators("own_code")
    assert "Correlation" not in library.operators("own_code")
    assert library.operators("own_code") <= ALL


def types_of(symbol, policy="float16", **inputs):
    graph = insert_casts(Graph.read(symbol), inputs or {"x": "float16"}, get_policy(policy), [])
    types = graph.types(inputs or {"x": "float16"})
    return {node.name: (types[node.inputs[0]], types[Entry(node)])
            for node in graph.nodes() if node.inputs}


def calling(function, policy="float16"):
    return amp.convert(gluon.nn.HybridLambda(function), policy)


def test_slice_indices_are_not_rounded_to_float16():
    places = {"start": "2049", "stop": "2053", "step": "1", "axis": "0"}
    inputs = [Entry(Node("null", name)) for name in "xy"]
    graph = Graph([Entry(Node("_npi_insert_slice", "n", places, inputs))])
    x, y = np.arange(2100, dtype="float16").reshape(-1, 1) % 64, np.full((4, 1), 7, "float16")
    with mx.util.np_shape(True):
        made = build(graph, {"x": "float16", "y": "float16"}).symbol()
        executor = made.bind(mx.cpu(), [nd.array(a, dtype="float16") for a in (x, y)],
                             grad_req="null")
        found, = executor.forward()
    assert np.array_equal(found.asnumpy(), np.insert(x, slice(2049, 2053), y, axis=0))


def test_batched_product_between_casts_reads_float16():
    """It sums in float32 by a setting, without casts of its arrays."""
    x, y = (mx.sym.amp_cast(mx.sym.var(name), dtype="float32") for name in "xy")
    graph = Graph.read(mx.sym.amp_cast(mx.sym.batch_dot(x, y), dtype="float16"))
    built = build(graph, dict.fromkeys("xy", "float16"))
    assert [node.op for node in built.nodes()] == ["null", "null", "batch_dot"]
    arrays = [nd.full(shape, 1 / 64, dtype="float16") for shape in ((1, 1, 4096), (1, 4096, 1))]
    executor = built.symbol().bind(mx.cpu(), arrays, grad_req="null")
    assert executor.forward()[0].asscalar() == 1
    counted = build(graph, dict.fromkeys("xy", "float16"), watch=True)
    assert [node.op for node in counted.nodes()].count("amp_cast") == 3


@pytest.mark.parametrize(("dtype", "mirrored"), [("float16", False), ("float32", True)])
def test_mirroring_does_not_run_16_bit_dropout_twice(dtype, mirrored):
    with mx.AttrScope(force_mirroring="True"):
        graph = Graph.read(mx.sym.Dropout(mx.sym.var("x")))
    node, = (n for n in build(graph, {"x": dtype}).nodes() if n.op == "Dropout")
    assert ("__force_mirroring__" in node.attrs) is mirrored


# functions that numpy mode must compute in float32, and values whose results are beyond float16
NUMPY = [
    *((lambda np_, v, name=name: getattr(np_, name)(v), value) for name, value in (
        ("degrees", 3000), ("exp", 12), ("square", 300), ("expm1", 12), ("cosh", 12), ("sinh", 12),
        ("reciprocal", 1e-5), ("log", 3), ("log2", 3), ("log10", 3), ("log1p", 3), ("tan", 1.5),
        ("arcsin", 0.5))),
    (lambda np_, v: np_.around(v), 2.5), (lambda np_, v: np_.round(v * 2), [0.3, 1.7]),
    (lambda np_, v: np_.power(v, 4), 40), (lambda np_, v: v ** 4, 40), (lambda np_, v: 1 / v, 1e-5),
    (lambda np_, v: np_.power(3, v), 12), (lambda np_, v: np_.prod(np_.stack([v, v, v, v])), 40),
    (lambda np_, v: np_.std(np_.stack([v, -v])), 300), (lambda np_, v: np_.hypot(v, v), 60000),
    (lambda np_, v: v * np_.logspace(0, 8, 3), [1, 1, 1]),
    (lambda np_, v: np_.nan_to_num(v, posinf=1e6, neginf=-1e6, nan=1e9) * 1e-6,
     [np.inf, -np.inf, np.nan, 0])]


@pytest.mark.parametrize(("function", "value"), NUMPY)
def test_numpy_functions_run_in_float32(function, value):
    halves = np.float16(np.atleast_1d(value))
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = calling(lambda F, x: function(F.np, x))
        result = net(mx.np.array(halves, dtype="float16")).asnumpy()
    expected = function(np, halves.astype("float32"))
    np.testing.assert_allclose(result.ravel(), expected.ravel(), rtol=1e-5)


# functions that return the classes 2999 and 3001 as floats
CLASSES = {
    "argmax": lambda F, x: F.argmax(x, axis=1),
    "argmin": lambda F, x: F.argmin(-x, axis=1),
    "argmax, moved": lambda F, x: F.reshape(F.expand_dims(F.argmax(x, axis=1), 0), (-1,)),
    "argmax and a number": lambda F, x: F.argmax(x, axis=1) * 2 - F.argmax(x, axis=1),
    "argmax in a condition": lambda F, x: F.contrib.cond(
        F.sum(x) > 0, lambda: F.argmax(x, axis=1), lambda: F.argmin(x, axis=1)),
    "topk": lambda F, x: F.topk(x, k=1, axis=1).reshape((-1,)),
    "topk of both": lambda F, x: F.topk(x, k=1, axis=1, ret_typ="both")[1].reshape((-1,)),
    "argsort": lambda F, x: F.slice_axis(F.argsort(x, axis=1), axis=1, begin=-1, end=None)
    .reshape((-1,)),
    "linspace": lambda F, x: F.broadcast_mul(
        x, F.expand_dims(F.linspace(start=0, stop=3999, num=4000), 0)).max(axis=1),
}


# The output of linspace is not an index: under pure_float16 it is float16.
@pytest.mark.parametrize(("name", "policy"), [
    (name, policy) for name in CLASSES for policy in ("float16", "pure_float16", "mixed_bfloat16")
    if (name, policy) != ("linspace", "pure_float16")])
def test_class_indices_above_2048_are_exact(name, policy):
    x = np.zeros((2, 4000), np.float16)
    x[0, 2999], x[1, 3001] = 1, 1

    net = calling(CLASSES[name], policy)
    x = nd.array(x, dtype="float32" if policy == "mixed_bfloat16" else "float16")
    assert net(x).asnumpy().tolist() == [2999, 3001]


def test_random_numbers_beyond_float16_and_counts_are_exact():
    def draw(F, x):
        zeros = F.relu(x) * 0
        return (zeros + F.random.uniform(1e5, 2e5, shape=(300,)),
                zeros + F.random.poisson(4001, shape=(300,)), F.sample_poisson(zeros + 4000))

    drawn, counts, sampled = (a.asnumpy() for a in calling(draw)(nd.ones(300, dtype="float16")))
    assert drawn.min() >= 1e5
    assert drawn.max() <= 2e5
    for found in counts, sampled:
        assert len(np.unique(found % 2)) == 2  # float16 has even numbers there
        assert abs(found.mean() - 4000) < 40


def test_division_by_1e_minus_5_matches_product_with_1e5():
    net = calling(lambda F, x: (F.relu(x) / 1e-5, F.relu(x) * 1e5))
    for found in net(nd.array([1, 2], dtype="float16")):
        np.testing.assert_allclose(found.asnumpy(), [1e5, 2e5], rtol=1e-4)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "pure_float16", "mixed_bfloat16"])
def test_large_mask_and_small_epsilon_keep_their_values(policy):
    def forward(F, x, mask):
        masked = F.where(mask, x, -1e18 * F.ones_like(x))
        return F.softmax(masked), x / (F.relu(x) * 0 + 1e-12)

    net = calling(forward, policy)
    dtype = "float32" if policy == "mixed_bfloat16" else "float16"
    x = nd.array([[1, 2], [3, 4]], dtype=dtype)
    mask = nd.array([[1, 0], [0, 0]], dtype=dtype)
    soft, quotient = net(x, mask)
    assert np.allclose(soft.asnumpy(), [[1, 0], [0.5, 0.5]])
    if policy != "pure_float16":  # whose results are float16
        np.testing.assert_allclose(quotient.asnumpy(), x.asnumpy().astype(np.float32) / 1e-12,
                                   rtol=1e-2)


NUMBERS = {
    "arange": lambda F, x: F.broadcast_add(x, F.arange(start=100000, stop=100002)),
    "linspace": lambda F, x: F.broadcast_add(x, F.linspace(start=0, stop=1e5, num=2)),
    "counts": lambda F, x: F.broadcast_add(x, F.arange(start=4097, stop=4099)),
    "full": lambda F, x: F.broadcast_add(x, F.full((2,), 1e5)),
    "one_hot": lambda F, x: F.one_hot(F.argmax(x, axis=1), 2, on_value=1e5, off_value=-1e5) + x}


@pytest.mark.parametrize("name", NUMBERS)
def test_constants_beyond_float16_stay_finite(name):
    net, x = calling(lambda F, x: NUMBERS[name](F, F.relu(x))), nd.array([[1, 2], [3, 4]])
    found = net(x.astype("float16")).asnumpy()
    np.testing.assert_allclose(found, amp.restore(net)(x).asnumpy())


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "pure_float16"])
@pytest.mark.parametrize(("value", "apply"), [
    (-1e9, lambda F, x, c: F.softmax(F.where(x > 5, x, F.broadcast_mul(F.ones_like(x), c)))),
    (1e-10, lambda F, x, c: F.rsqrt(F.broadcast_add(x * 0, c)) * 1e-5),
    (4097, lambda F, x, c: F.broadcast_mul(F.ones_like(x), c) - 4096)],
    ids=["mask", "epsilon", "number"])
def test_constant_parameter_beyond_float16_keeps_its_value(value, apply, policy):
    x = nd.array([[1, 2], [3, 4]])
    net = ready(Calling(lambda F, x, constant: apply(F, F.relu(x), constant),
                        parameters={"constant": nd.array([value])}))
    expected = net(x).asnumpy()
    np.testing.assert_allclose(amp.convert(net, policy)(x.astype("float16")).asnumpy(), expected,
                               rtol=1e-4)


def test_small_numerator_is_kept_in_pure_float16():
    net = calling(lambda F, x: (1e-9 / (x * 1e-3)) * 1e6, "pure_float16")
    found = net(nd.array([1, 2], dtype="float16")).asnumpy()
    np.testing.assert_allclose(found, [1, 0.5], rtol=1e-3)


def test_constant_beyond_float16_promotes_node_to_float32():
    x = sym.var("x")
    kinds = types_of(sym.relu((sym.relu(x) + 1e-12) * 2.0))
    assert [v for k, v in kinds.items() if "plus" in k] == [("float32", "float32")]
    for fits in (x + 1e-4, x * 0, x * 60000, x * float("inf"), x + 6e-8):
        assert set(types_of(fits).values()) == {("float16", "float16"), ("float16", "float32")} \
            or all(v[0] == "float16" for v in types_of(fits).values())


@pytest.mark.parametrize("name", list(FORMATS))
def test_constants_representable_in_a_format(name):
    format_ = FORMATS[name]

    def holds(number):
        return operators.holds_numbers(Node("_mul_scalar", "n", {"scalar": repr(number)}), format_)

    assert all(map(holds, [0.0, 1.0, format_.largest, format_.smallest, np.inf, np.nan]))
    if name != "float32":
        assert not holds(format_.smallest / 4)
    if name == "float16":
        assert not holds(format_.largest * 2)


def test_sum_and_lp_pooling_run_in_float32():
    x = sym.var("x")
    for kind, low in (("max", True), ("avg", True), ("sum", False), ("lp", False)):
        pool = sym.Pooling(x, kernel=(2, 2), pool_type=kind, p_value=2, name="pool")
        assert (types_of(pool)["pool"][0] == "float16") == low


def test_every_rule_has_a_reason():
    assert all(re.search(r"\w{3}", rule.why) for rule in operators.OPERATORS.values())


@mx.util.use_np
@pytest.mark.parametrize("write", [
    lambda F, x: F.np.nan_to_num(x), lambda F, x: F.np.nan_to_num(x, posinf=1e9, neginf=-1e9),
    lambda F, x: F.np.clip(x, -3e38, 3e38)], ids=["limits", "numbers", "clip"])
@pytest.mark.parametrize("policy", ["pure_float16", "float16"])
def test_values_made_finite_in_float32_stay_finite_after_cast(write, policy):
    """MXNet's float16 kernel uses the limits of float16."""
    def numbers(net):
        return net(mx.np.array([[np.inf], [-np.inf], [2]])).astype("float32").asnumpy().ravel()

    limits = [65504, -65504, 2]
    dense = ready(gluon.nn.Dense(1, use_bias=False, flatten=False), mx.init.One())
    net = sequence(gluon.nn.HybridLambda(write), dense)
    assert numbers(amp.convert(net, policy)).tolist() == limits
    if policy == "pure_float16":
        assert numbers(calling(write, policy)).tolist() == limits

    def read_twice(F, x):  # in float16 and in float32
        made = write(F, x)
        return F.npx.fully_connected(made, F.np.ones((1, 1)), no_bias=True, num_hidden=1), \
            F.np.exp(made * 1e-9)

    product, power = amp.convert(Calling(read_twice), policy)(mx.np.array([[np.inf]]))
    assert product.astype("float32").item() == 65504
    assert power.item() > 2  # not of 65504


@mx.util.use_np
def test_infinite_bounds_are_kept():
    net = calling(lambda F, x: F.np.clip(x, -float("inf"), 100), "pure_float16")
    x = mx.np.array([np.inf, -np.inf, 2])
    assert net(x).astype("float32").asnumpy().tolist() == [100, -np.inf, 2]
