"""`tensor_core_dot` matches measured results of GPUs bitwise, and refuses unknown cases."""
import itertools
import math
import os
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu.tensor_core.gpus import GPUS, INPUTS, Sum, TensorCore
from gluon_amp.formats import FORMATS
from gluon_amp.graph.graph import Entry, Graph, Node
from halves import adding_as, as_function
from networks import Calling
from tensor_core_sums import product

SHARED = Path(os.environ.get("GLUON_AMP_DATA") or Path(__file__).parents[2] / "shared")
MEASURED = [name for name, rule in GPUS.items() if rule.measured]
each_gpu = pytest.mark.parametrize("gpu", GPUS)


def assert_bits(made, wanted):
    """Bitwise equal, including signs of zeros; NaN is NVIDIA's."""
    assert made.dtype == wanted.dtype == np.float32
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(made.view("uint32")[nan], np.uint32(0x7fffffff))
    np.testing.assert_array_equal(made.view("uint32")[~nan], wanted.view("uint32")[~nan])


# ---- measured results of GPUs

@pytest.mark.skipif(not (SHARED / "tensor_cores").is_dir(),
                    reason="needs GPUs' results in ../shared/tensor_cores or $GLUON_AMP_DATA")
@pytest.mark.parametrize("gpu", MEASURED)
def test_measured_results_of_gpu_match(gpu):
    file = SHARED / "tensor_cores" / f"{gpu}.npz"
    if not file.exists():
        pytest.skip(f"no results of {gpu} in {file.parent.name}/ (make test-tensor-cores has them)")
    measured = np.load(file)
    a, b = measured["a"].view("float16"), measured["b"].view("float16")
    c, d = measured["c"].view("float32"), measured["d"].view("float32")
    assert a.shape == b.shape == (5000, GPUS[gpu].block)
    made = amp.tensor_core_dot(a[:, None, :], b[:, :, None], c[:, None, None], gpu=gpu)
    assert_bits(made.ravel(), d)
    for i in range(20):
        assert_bits(np.array(amp.tensor_core_dot(a[i], b[i], c[i], gpu=gpu)), d[i])


# ---- the rule

def numbers(rng, *shape):
    return rng.standard_normal(shape).astype("float16")


def any_finite(rng, *shape):
    bits = rng.integers(0, 1 << 16, shape).astype("uint16")
    return np.where((bits & 0x7c00) == 0x7c00, bits & 0x83ff, bits).view("float16")


def subnormal(rng, *shape):
    return (rng.integers(0, 1 << 16, shape).astype("uint16") & 0x87ff).view("float16")


def many_zeros(rng, *shape):
    return np.where(rng.random(shape) < 0.8, np.float16(-0.0), any_finite(rng, *shape))


def largest(rng, *shape):
    """The longest sums."""
    return np.full(shape, 65504, "float16")


def seldom_endless(rng, *shape):
    special = rng.choice(np.float16([np.inf, -np.inf, np.nan]), shape)
    return np.where(rng.random(shape) < 0.01, special, many_zeros(rng, *shape))


def any_accumulator(rng, *shape):
    bits = rng.integers(0, 1 << 32, shape).astype("uint32")
    return np.where((bits & 0x7f800000) == 0x7f800000, bits & 0x807fffff, bits).view("float32")


def close_accumulator(rng, *shape):
    """Numbers as large as sums of the largest halves."""
    return (rng.uniform(-2, 2, shape) * 2.0 ** 35).astype("float32")


def endless_accumulator(rng, *shape):
    return rng.choice(np.float32([0, -0.0, 1, np.inf, -np.inf, np.nan]), shape)


@each_gpu
@pytest.mark.parametrize("accumulator", [any_accumulator, close_accumulator, endless_accumulator])
@pytest.mark.parametrize("factors", [numbers, any_finite, subnormal, many_zeros, largest,
                                     seldom_endless])
def test_every_bit_matches_the_rule(factors, accumulator, gpu, rng):
    rule = GPUS[gpu]
    for rows, depth, columns, split in ((1, 1, 1, None), (3, 33, 70, None), (5, 600, 2, None),
                                        (4, 50, 19, 24), (17, 12, 5, 5)):
        a, b = factors(rng, rows, depth), factors(rng, depth, columns)
        c = accumulator(rng, rows, columns)
        assert_bits(amp.tensor_core_dot(a, b, c, gpu=gpu, split=split),
                    product(a, b, c, Sum(rule.block, rule.fraction), split=split or 0))


@each_gpu
def test_engine_accumulator_holds_the_sum_of_an_instruction(gpu):
    """Each half of a block is summed in 32 bits: products are below 4, c below 2."""
    block, fraction = GPUS[gpu][:2]
    assert 4 * (block // 2) + 2 <= 2 ** (31 - fraction)
    assert block % 2 == 0


# ---- error bounds

@each_gpu
@pytest.mark.parametrize("factors", [numbers, any_finite])
def test_error_of_an_instruction_is_within_its_bound(factors, gpu, rng):
    """The truncation of each addend but the largest is less than a unit of the largest, and that of
    the sum is less than a unit of the result."""
    rule = GPUS[gpu]
    a, b = factors(rng, 300, rule.block), factors(rng, 300, rule.block)
    c = factors(rng, 300).astype("float32") * factors(rng, 300).astype("float32")
    made = amp.tensor_core_dot(a[:, None], b[:, :, None], c[:, None, None], gpu=gpu).ravel()
    wide_a, wide_b, wide_c = (x.astype("float64") for x in (a, b, c))
    def exponent(x, smallest):
        return np.where(x == 0, -400, np.maximum(np.frexp(x)[1] - 1, smallest))

    top = np.maximum((exponent(wide_a, -14) + exponent(wide_b, -14)).max(1), exponent(wide_c, -126))
    unit = np.ldexp(1.0, top - rule.fraction)
    bound = rule.block * unit + np.spacing(abs(made)).astype("float64")
    for i in range(len(made)):
        terms = [float(x) * float(y) for x, y in zip(a[i], b[i])]
        error = math.fsum([float(made[i]), -float(c[i]), *(-t for t in terms)])
        assert abs(error) < bound[i]


@each_gpu
def test_sums_of_positive_numbers_are_never_too_large(gpu, rng):
    a, b = abs(numbers(rng, 10, 5000)), abs(numbers(rng, 5000, 10))
    exact = a.astype("float64") @ b.astype("float64")
    made = amp.tensor_core_dot(a, b, gpu=gpu)
    assert np.all(made < exact)
    pieces = amp.tensor_core_dot(a, b, gpu=gpu, split=512)
    assert np.mean(exact - pieces) < np.mean(exact - made) / 2


# ---- other formats

def row(format, gpu, a, b, c=0.0, **more):
    """The product of two vectors of numbers of the format."""
    kind = "float16" if format == "float16" else "float32"
    made = amp.tensor_core_dot(np.array(a, kind), np.array(b, kind), c, gpu, format=format, **more)
    return float(made)


@pytest.mark.parametrize("format", ["float16", "bfloat16"])
def test_bfloat16_accumulates_as_float16(format):
    a = [4096, 1, 1, 1, 1]
    assert [row(format, gpu, a, a) for gpu in ("A100", "H100")] == [2 ** 24 + 4] * 2
    assert row(format, "Ada", [2 ** 12, 2 ** -2], [2 ** 12, 1]) == 2 ** 24  # truncated: 24 bits
    assert row(format, "H100", [2 ** 12, 0.5, 0.5, 0.5, 0.5], [2 ** 12, 1, 1, 1, 1]) == 2 ** 24 + 2


def test_bfloat16_and_tf32_have_range_of_float32():
    for format in "bfloat16", "tf32":
        assert row(format, "A100", [2.0 ** 100, 1], [2.0 ** 20, 1]) == 2.0 ** 120
        assert row(format, "A100", [2.0 ** -100], [2.0 ** -48]) == 2.0 ** -148
        assert row(format, "A100", [2.0 ** 100], [2.0 ** 28]) == np.inf
        assert np.isnan(row(format, "A100", [np.inf, 1], [1, -np.inf]))


def test_tf32_blocks_are_half_as_long():
    a = [4096, 1, 1, 1, 1]
    assert row("tf32", "A100", a, a) == 2 ** 24 + 2  # 3 is truncated to 2, and 2 + 1 to 2
    assert row("tf32", "H100", a, a) == 2 ** 24 + 4


@pytest.mark.parametrize("format", ["float8_e4m3", "float8_e5m2"])
def test_float8_keeps_13_bits_except_on_b200(format):
    a, b = [128, 0.5], [64, 1]
    assert [row(format, gpu, a, b) for gpu in ("Ada", "H100", "H200")] == [2 ** 13] * 3
    assert row(format, "B200", a, b) == 2 ** 13 + 0.5
    ones = [1] * 18  # Ada: the last 2 are added when the unit is 2
    assert row(format, "Ada", ones, ones, 2 ** 14 - 16) == 2 ** 14
    assert row(format, "H100", ones, ones, 2 ** 14 - 16) == 2 ** 14 + 2


def test_b200_adds_accumulator_last_and_rounds_to_nearest():
    assert row("float8_e4m3", "B200", [1, 0.5], [1, 1], 2.0 ** 24) == 2 ** 24 + 2
    assert row("float16", "B200", [1, 0.5], [1, 1], 2.0 ** 24) == 2 ** 24


def test_float16_sums_round_each_instruction_to_nearest():
    for gpu in "V100", "A100", "H100":
        assert row("float16", gpu, [2048, 1], [1, 1], sums="float16") == 2048
        assert row("float16", gpu, [2048, 3], [1, 1], sums="float16") == 2052
        assert row("float16", gpu, [60000, 60000], [1, 1], sums="float16") == np.inf
    a = [1, 1, 1, 0, 1, 1, 1, 0]
    assert row("float16", "V100", a, a, 2048, sums="float16") == 2056  # through 2052
    assert row("float16", "A100", a, a, 2048, sums="float16") == 2054
    made = amp.tensor_core_dot(mx.nd.ones((2, 3), dtype="float16"),
                               mx.nd.ones((3, 2), dtype="float16"), sums="float16")
    assert made.dtype == np.float16


@pytest.mark.parametrize(("gpu", "format"), [
    (gpu, format) for gpu, core in GPUS.items() for format in INPUTS if core.sum_of(format)])
def test_every_bit_of_other_formats_matches_the_rule(gpu, format, rng):
    factors, sums = FORMATS[format], "float16" if format == "float16" else "float32"
    kind = "float16" if format == "float16" else "float32"
    wide = {"bfloat16": 40, "tf32": 40, "float16": 8}.get(format, 4)
    for scale, split in ((1, None), (2.0 ** (wide // 2), None), (2.0 ** -wide, 40)):
        a, b = (factors.round(scale * rng.standard_normal(shape)).astype(kind)
                for shape in ((5, 70), (70, 6)))
        c = (scale * rng.standard_normal((5, 6))).astype(sums)
        made = amp.tensor_core_dot(a, b, c, gpu, format=format, sums=sums, split=split)
        wanted = product(a, b, c, GPUS[gpu].sum_of(format), factors, FORMATS[sums], split or 0)
        assert made.dtype == wanted.dtype
        assert np.isfinite(wanted).any()
        np.testing.assert_array_equal(made.view(f"u{made.itemsize}"),
                                      wanted.view(f"u{made.itemsize}"))


def test_other_formats_accept_stacks_splits_and_ndarrays(rng):
    f = amp.Format("bfloat16", 8, 7)
    a, b = f.round(rng.standard_normal((2, 3, 40))), f.round(rng.standard_normal((40, 5)))
    made = amp.tensor_core_dot(mx.nd.array(a), mx.nd.array(b), gpu="A100", format="bfloat16",
                               split=16)
    assert isinstance(made, mx.nd.NDArray)
    pieces = [amp.tensor_core_dot(a[..., k:k + 16], b[k:k + 16], gpu="A100", format="bfloat16")
              for k in (0, 16, 32)]
    assert_bits(made.asnumpy(), pieces[0] + pieces[1] + pieces[2])
    assert amp.tensor_core_dot(a[:, :0], b, gpu="A100", format="bfloat16").shape == (2, 0, 5)


# ---- arrays of every kind

def test_shapes_follow_matmul(rng):
    for left, right in (((7,), (7,)), ((3, 7), (7,)), ((7,), (7, 4)), ((3, 7), (7, 4)),
                        ((2, 3, 7), (7, 4)), ((2, 1, 3, 7), (5, 7, 4)), ((0, 7), (7, 4)),
                        ((3, 0), (0, 4))):
        a, b = numbers(rng, *left), numbers(rng, *right)
        wanted = np.matmul(a.astype("float32"), b.astype("float32"))
        made = amp.tensor_core_dot(a, b)
        assert made.shape == wanted.shape
        assert made.dtype == np.float32
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)
        start = amp.tensor_core_dot(a, b, np.float32(3))
        np.testing.assert_allclose(start, wanted + 3, rtol=1e-5, atol=1e-5)


def test_ndarrays_give_ndarrays(rng):
    a, b = numbers(rng, 3, 9), numbers(rng, 9, 4)
    c = rng.standard_normal((3, 4)).astype("float32")
    made = amp.tensor_core_dot(mx.nd.array(a, dtype="float16"), mx.nd.array(b, dtype="float16"),
                               mx.nd.array(c))
    assert isinstance(made, mx.nd.NDArray)
    assert_bits(made.asnumpy(), amp.tensor_core_dot(a, b, c))
    vector = mx.nd.array(a[0], dtype="float16")
    assert amp.tensor_core_dot(vector, vector, mx.nd.ones(1)).shape == (1,)


def test_numpy_ndarrays_give_numpy_ndarrays(rng):
    a, b = numbers(rng, 3, 9), numbers(rng, 9)
    with mx.util.np_shape(True):
        made = amp.tensor_core_dot(mx.np.array(a, dtype="float16"), b)
        inner = amp.tensor_core_dot(mx.np.array(b, dtype="float16"), b)
        assert type(made) is type(inner) is mx.np.ndarray
        assert inner.shape == ()
        assert_bits(made.asnumpy(), amp.tensor_core_dot(a, b))


def test_empty_sum_returns_accumulator():
    c = np.float32([[1, -0.0], [np.nan, np.inf]])
    made = amp.tensor_core_dot(np.zeros((2, 0), "float16"), np.zeros((0, 2), "float16"), c)
    assert_bits(made, c + np.float32(0))


def test_split_can_be_any_whole_number(rng):
    a, b = numbers(rng, 5, 100), numbers(rng, 100, 5)
    assert_bits(amp.tensor_core_dot(a, b, split=10 ** 40), amp.tensor_core_dot(a, b))


def test_transposed_and_strided_arrays_are_accepted(rng):
    a, b = numbers(rng, 40, 6).T[:, ::2], numbers(rng, 8, 20).T
    assert_bits(amp.tensor_core_dot(a, b), amp.tensor_core_dot(a.copy(), b.copy()))


def test_large_matrices_match_their_parts(rng):
    a, b = numbers(rng, 1100, 20), numbers(rng, 20, 2100)
    c = rng.standard_normal((1100, 2100)).astype("float32")
    made = amp.tensor_core_dot(a, b, c)
    for rows in (slice(0, 3), slice(1020, 1030), slice(1098, None)):
        for columns in (slice(0, 70), slice(2040, 2060)):
            part = amp.tensor_core_dot(a[rows], b[:, columns], c[rows, columns])
            assert_bits(made[rows, columns], part)


def test_split_as_long_as_sum_has_no_effect(rng):
    a, b = numbers(rng, 5, 100), numbers(rng, 100, 5)
    assert_bits(amp.tensor_core_dot(a, b, split=100), amp.tensor_core_dot(a, b))


def test_chain_matches_consecutive_instructions(rng):
    a, b = numbers(rng, 5, 12), numbers(rng, 12, 5)
    chain = np.zeros((5, 5), "float32")
    for k in range(0, 12, 4):
        chain = amp.tensor_core_dot(a[:, k:k + 4], b[k:k + 4], chain)
    assert_bits(amp.tensor_core_dot(a, b), chain)


def test_gpu_names_ignore_case_and_spaces(rng):
    a, b = numbers(rng, 5, 100), numbers(rng, 100, 5)
    assert_bits(amp.tensor_core_dot(a, b, gpu="RTX30"), amp.tensor_core_dot(a, b, gpu="RTX 30"))
    assert_bits(amp.tensor_core_dot(a, b, gpu="ada"), amp.tensor_core_dot(a, b, gpu="Ada"))


# ---- refused arguments

@pytest.mark.parametrize(("arguments", "error", "said"), [
    ({"gpu": "K80"}, ValueError, "unknown GPU. Valid: V100, T4, A2, .*Received: 'K80'"),
    ({"gpu": None}, ValueError, "unknown GPU. Valid: .*Received: None"),
    ({"split": 0}, ValueError, "split must be an integer >= 1, or None.*Received: 0"),
    ({"split": 2.5}, ValueError, "split must be an integer >= 1, or None.*Received: 2.5"),
    ({"split": True}, ValueError, "split must be .*Received: True"),
    ({"a": np.ones((3, 4), "float32")}, TypeError, "a must be a float16 array. Received: float32"),
    ({"b": mx.nd.ones((4, 5))}, TypeError, "b must be a float16 array. Received: float32"),
    ({"a": np.ones((3, 5), "float16")}, ValueError, r"Received: \(3, 5\) and \(4, 5\)"),
    ({"a": np.float16(1)}, ValueError, "takes matrices and vectors. Received: a number"),
    ({"a": np.ones((2, 3, 4), "float16"), "b": np.ones((3, 4, 5), "float16")}, ValueError,
     r"stacks of the same shape.*Received: \(2, 3, 4\) and \(3, 4, 5\)"),
    ({"c": np.ones((5, 3), "float32")}, ValueError, r"\(3, 5\).*Received: \(5, 3\)"),
    ({"c": 0.1}, TypeError, "c must hold float32 numbers. Received: float64"),
    ({"c": 1j}, TypeError, "c must hold float32 numbers. Received: complex128"),
    ({"c": 1e300}, TypeError, "c must hold float32 numbers"),
    ({"c": 1e300, "sums": "float16"}, TypeError, "c must hold float16 numbers"),
    ({"sums": "bfloat16"}, ValueError, "sums must be 'float32' or 'float16'. Rec.*'bfloat16'"),
    ({"format": "float8"}, ValueError, "unknown format. Valid: float16, bfl.*Received: 'float8'"),
    ({"format": "tf32"}, ValueError, "V100's .* do not multiply tf32 numbers. Valid: A2, .*B200$"),
    ({"format": "float8_e4m3", "gpu": "A100"}, ValueError, "Valid: Ada, H100, H200, B200$"),
    ({"format": "tf32", "gpu": "A100", "sums": "float16"}, ValueError, "no rule is known"),
    ({"format": "tf32", "gpu": "A100", "a": np.ones((3, 4), int)}, TypeError, "a must be .*int64"),
    ({"format": "bfloat16", "gpu": "A100", "b": np.full((4, 5), 1.01)}, TypeError,
     "b must hold numbers of bfloat16. Received: float64, with others"),
])
def test_invalid_arguments_are_refused(arguments, error, said):
    given = {"a": np.ones((3, 4), "float16"), "b": np.ones((4, 5), "float16"), **arguments}
    with pytest.raises(error, match=said):
        amp.tensor_core_dot(**given)


# ---- networks with empty arrays

@pytest.mark.parametrize("policy", ["mixed_float8", amp.Policy(
    "gpu", "float16", "float16", accumulate="V100")], ids=["mixed_float8", "as a GPU"])
@pytest.mark.parametrize(("op", "a", "b", "shape"), [
    ("dot", (3, 0), (0, 4), (3, 4)), ("dot", (0, 3), (3, 4), (0, 4)),
    ("dot", (2, 3, 0), (0,), (2, 3)),
    ("matmul", (2, 3, 0), (2, 0, 4), (2, 3, 4)), ("matmul", (0, 3, 5), (0, 5, 4), (0, 3, 4)),
    ("fully_connected", (0, 3), (4, 3), (0, 4)),
    ("convolution", (0, 3, 5, 5), (4, 3, 3, 3), (0, 4, 3, 3))])
def test_empty_sums_are_0_in_networks(op, a, b, shape, policy):
    more = {"fully_connected": {"num_hidden": 4, "no_bias": True},
            "convolution": {"num_filter": 4, "kernel": (3, 3), "no_bias": True}}.get(op, {})
    mx.npx.set_np()
    try:
        net = mx.gluon.nn.HybridLambda(
            lambda F, x, w: getattr(F.npx if more else F.np, op)(x, w, **more))
        amp.convert(net, policy)
        x, w = mx.np.ones(a), mx.np.ones(b)
        w.attach_grad()
        with mx.autograd.record():
            y = net(x, w)
        y.backward()
        assert y.shape == shape
        assert not y.asnumpy().any()
        assert not w.grad.asnumpy().any()
    finally:
        mx.npx.reset_np()


# ---- products of networks with `accumulate` match the plain rule

sym = mx.sym
X, Y, Z = (sym.var(name) for name in "xyz")
RULES = [("coarse", None), ("coarser", 24), ("H100", None)]


@pytest.fixture(autouse=True)
def coarse_gpus(monkeypatch):
    monkeypatch.setitem(GPUS, "coarse", TensorCore(block=4, fraction=9, measured=False))
    monkeypatch.setitem(GPUS, "coarser", TensorCore(block=8, fraction=7, measured=False))


def outcome(symbol, arrays, gpu, split, head=None):
    """The output, and all gradients if a head gradient is given."""
    names = symbol.list_inputs()
    graph = adding_as(gpu, Graph.read(symbol), dict.fromkeys(names, "float16"), split)
    op = as_function(graph.symbol())
    values = [mx.nd.array(arrays[name], dtype="float16") for name in names]
    for value in values:
        value.attach_grad()
    with mx.autograd.record():
        output = op(*values)
    made = [output.asnumpy()]
    if head is not None:
        output.backward(mx.nd.array(head, dtype="float16"))
        made += [value.grad.asnumpy() for value in values]
    return made


def times(a, b, gpu, split):
    """a @ b for stacks of matrices, by the rule, in float32."""
    rule = GPUS[gpu]
    stack = a.shape[:-2]
    made = np.zeros((*stack, a.shape[-2], b.shape[-1]), "float32")
    for i in np.ndindex(*stack):
        made[i] = product(a[i], b[i], made[i], Sum(rule.block, rule.fraction), split=split or 0)
    return made


def turned(a):
    return np.swapaxes(a, -1, -2)


def assert_same(made, wanted):
    for i, (one, other) in enumerate(zip(made, wanted)):
        np.testing.assert_array_equal(one, other.astype("float16").reshape(one.shape), str(i))


# ---- products of matrices

@pytest.mark.parametrize(("gpu", "split"), RULES)
@pytest.mark.parametrize(("ta", "tb"), [*itertools.product([False, True], repeat=2)])
@pytest.mark.parametrize("operator", [sym.dot, sym.batch_dot, sym.linalg.gemm2])
def test_matrix_products(operator, ta, tb, gpu, split):
    rng = np.random.default_rng(1)
    stack = () if operator is sym.dot else (3,)
    a, b, head = (numbers(rng, *stack, *shape) for shape in ((5, 70), (70, 9), (5, 9)))
    arrays = {"x": turned(a) if ta else a, "y": turned(b) if tb else b}
    more = {"alpha": 0.3} if operator is sym.linalg.gemm2 else {}
    alpha = np.float32(more.get("alpha", 1))
    made = outcome(operator(X, Y, transpose_a=ta, transpose_b=tb, **more), arrays, gpu, split, head)
    da = times(head, turned(b), gpu, split) * alpha
    db = times(turned(a), head, gpu, split) * alpha
    assert_same(made, [times(a, b, gpu, split) * alpha, turned(da) if ta else da,
                       turned(db) if tb else db])


@pytest.mark.parametrize(("gpu", "split"), RULES)
def test_dot_of_vectors_and_of_more_axes(gpu, split):
    rng = np.random.default_rng(2)
    a, b, head = numbers(rng, 90), numbers(rng, 90), numbers(rng, 1)
    made = outcome(sym.dot(X, Y), {"x": a, "y": b}, gpu, split, head)
    assert_same(made, [times(a[None], b[:, None], gpu, split),
                       times(b[:, None], head[None], gpu, split),
                       times(a[:, None], head[None], gpu, split)])
    a, b = numbers(rng, 2, 3, 40), numbers(rng, 40, 4, 5)
    made = outcome(sym.dot(X, Y), {"x": a, "y": b}, gpu, split)
    assert_same(made, [times(a.reshape(6, 40), b.reshape(40, 20), gpu, split)])


def numpys(op, **attrs):
    """A symbol of one of numpy's operators, of x and y."""
    inputs = [Entry(Node("null", name)) for name in "xy"]
    return Graph([Entry(Node(op, "mine", attrs, inputs))]).symbol()


@pytest.mark.parametrize(("gpu", "split"), RULES)
@pytest.mark.parametrize(("op", "attrs", "a", "b"), [
    ("_np_dot", {}, (2, 3, 40), (40, 5)), ("_np_dot", {}, (3, 40), (40,)),
    ("_npi_matmul", {}, (4, 40), (40, 5)), ("_npi_matmul", {}, (2, 3, 40), (40, 5)),
    ("_npi_matmul", {}, (2, 3, 4, 40), (2, 3, 40, 5)), ("_npi_matmul", {}, (40,), (40, 5)),
    ("_npi_tensordot_int_axes", {"axes": "2"}, (3, 4, 10), (4, 10, 2, 3)),
    ("_npi_tensordot_int_axes", {"axes": "1"}, (3, 40), (40, 2))])
def test_numpy_matrix_products(op, attrs, a, b, gpu, split):
    rng = np.random.default_rng(8)
    depth = 40
    stack = a[:-2] if len(b) > 2 and op == "_npi_matmul" else ()
    a, b = numbers(rng, *a), numbers(rng, *b)
    rows, columns = a.reshape(*stack, -1, depth), b.reshape(*stack, depth, -1)
    wanted = times(rows, columns, gpu, split)
    axes = int(attrs.get("axes", 1))
    shape = (a @ b).shape if op == "_npi_matmul" else np.tensordot(a, b, axes).shape
    head = numbers(rng, *wanted.shape)
    made = outcome(numpys(op, **attrs), {"x": a, "y": b}, gpu, split, head.reshape(shape))
    assert_same(made, [wanted, times(head, turned(columns), gpu, split),
                       times(turned(rows), head, gpu, split)])


@pytest.mark.parametrize(("gpu", "split"), RULES)
def test_gemm_adds_in_float32(gpu, split):
    rng = np.random.default_rng(9)
    a, b, c, head = (numbers(rng, 2, *shape) for shape in ((5, 70), (70, 9), (5, 9), (5, 9)))
    symbol = sym.linalg.gemm(X, Y, Z, alpha=0.5, beta=3)
    made = outcome(symbol, {"x": a, "y": b, "z": c}, gpu, split, head)
    assert_same(made, [times(a, b, gpu, split) * 0.5 + 3 * c.astype("float32"),
                       times(head, turned(b), gpu, split) * 0.5,
                       times(turned(a), head, gpu, split) * 0.5, 3 * head.astype("float32")])


@pytest.mark.parametrize(("op", "a", "b", "said"), [
    ("_np_dot", (3, 4), (2, 4, 5), "for np.dot a second array of one or two axes. Received:"),
    ("_npi_matmul", (3, 4), (2, 4, 5), "for np.matmul two stacks of one shape, or a second array")])
def test_other_shapes_of_numpy_products_are_refused_at_call(op, a, b, said):
    graph = adding_as("V100", Graph.read(numpys(op)), dict.fromkeys("xy", "float16"))
    with pytest.raises(mx.MXNetError, match=rf"{said}.*\[3,4\] and \[2,4,5\]"):
        as_function(graph.symbol())(*(mx.nd.ones(shape, dtype="float16") for shape in (a, b)))


@pytest.mark.parametrize(("gpu", "split"), RULES)
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_dense(bias, flatten, gpu, split):
    rng = np.random.default_rng(3)
    x, units = numbers(rng, 6, 5, 20), 7
    rows = x.reshape(6, 100) if flatten else x.reshape(30, 20)
    w, b = numbers(rng, units, rows.shape[1]), numbers(rng, units)
    head = numbers(rng, len(rows), units)
    symbol = sym.FullyConnected(X, Y, *([Z] if bias else []), num_hidden=units, flatten=flatten,
                                no_bias=not bias)
    shape = (6, units) if flatten else (6, 5, units)
    made = outcome(symbol, {"x": x, "y": w, "z": b}, gpu, split, head.reshape(shape))
    wanted = [times(rows, w.T, gpu, split) + (b.astype("float32") if bias else 0),
              times(head, w, gpu, split), times(head.T, rows, gpu, split)]
    if bias:
        wanted.append(head.astype("float32").sum(0))
    assert_same(made[:3], wanted[:3])
    for one, other in zip(made[3:], wanted[3:]):  # a float32 sum in another order than a GPU's
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


# ---- attention

@pytest.mark.parametrize(("gpu", "split"), RULES)
def test_self_attention(gpu, split):
    rng = np.random.default_rng(4)
    time, batch, heads, width = 11, 2, 3, 20
    x = numbers(rng, time, batch, heads, 3, width)
    q, k, v = (x[:, :, :, i].transpose(1, 2, 0, 3) for i in range(3))
    flat = x.reshape(time, batch, -1)
    factor = np.float32(1) / np.sqrt(np.float32(width))
    head = numbers(rng, batch, heads, time, time)
    made = outcome(sym.contrib.interleaved_matmul_selfatt_qk(X, heads=heads), {"x": flat}, gpu,
                   split, head.reshape(-1, time, time))
    dx = np.zeros(x.shape, "float32")
    dx[:, :, :, 0] = (times(head, k, gpu, split) * factor).transpose(2, 0, 1, 3)
    dx[:, :, :, 1] = (times(turned(head), q, gpu, split) * factor).transpose(2, 0, 1, 3)
    assert_same(made, [times(q, turned(k), gpu, split) * factor, dx])

    weights, head = numbers(rng, batch, heads, time, time), numbers(rng, time, batch, heads, width)
    made = outcome(sym.contrib.interleaved_matmul_selfatt_valatt(X, Y, heads=heads),
                   {"x": flat, "y": weights.reshape(-1, time, time)}, gpu, split,
                   head.reshape(time, batch, -1))
    back = head.transpose(1, 2, 0, 3)
    dx = np.zeros(x.shape, "float32")
    dx[:, :, :, 2] = times(turned(weights), back, gpu, split).transpose(2, 0, 1, 3)
    assert_same(made, [times(weights, v, gpu, split).transpose(2, 0, 1, 3), dx,
                       times(back, turned(v), gpu, split)])


@pytest.mark.parametrize(("gpu", "split"), RULES)
def test_cross_attention(gpu, split):
    rng = np.random.default_rng(5)
    time, other, batch, heads, width = 7, 11, 2, 3, 20
    x, kv = numbers(rng, time, batch, heads, width), numbers(rng, other, batch, heads, 2, width)
    q, k, v = (part.transpose(1, 2, 0, 3) for part in (x, kv[:, :, :, 0], kv[:, :, :, 1]))
    factor = np.float32(1) / np.sqrt(np.float32(width))
    head = numbers(rng, batch, heads, time, other)
    made = outcome(sym.contrib.interleaved_matmul_encdec_qk(X, Y, heads=heads),
                   {"x": x.reshape(time, batch, -1), "y": kv.reshape(other, batch, -1)}, gpu, split,
                   head.reshape(-1, time, other))
    dkv = np.zeros(kv.shape, "float32")
    dkv[:, :, :, 0] = (times(turned(head), q, gpu, split) * factor).transpose(2, 0, 1, 3)
    assert_same(made, [times(q, turned(k), gpu, split) * factor,
                       (times(head, k, gpu, split) * factor).transpose(2, 0, 1, 3), dkv])

    weights, head = numbers(rng, batch, heads, time, other), numbers(rng, time, batch, heads, width)
    made = outcome(sym.contrib.interleaved_matmul_encdec_valatt(X, Y, heads=heads),
                   {"x": kv.reshape(other, batch, -1), "y": weights.reshape(-1, time, other)}, gpu,
                   split, head.reshape(time, batch, -1))
    back = head.transpose(1, 2, 0, 3)
    dkv = np.zeros(kv.shape, "float32")
    dkv[:, :, :, 1] = times(turned(weights), back, gpu, split).transpose(2, 0, 1, 3)
    assert_same(made, [times(weights, v, gpu, split).transpose(2, 0, 1, 3), dkv,
                       times(back, turned(v), gpu, split)])


# ---- convolutions

def windows(x, places, start, step, along):
    """Windows of x (batch, channels, *positions): (channels * window, batch * positions).

    Element `tap` of the window at position p is x[p * step + start[tap]], with zeros outside of x.
    """
    made = []
    for tap in itertools.product(*[range(len(s)) for s in start]):
        seen = x
        for axis, t in enumerate(tap):
            at = np.arange(places[axis]) * step[axis] + start[axis][t]
            inside = (at >= 0) & (at < along[axis])
            seen = np.take(seen, np.where(inside, at, 0), axis + 2)
            mask = inside.reshape([-1 if k == axis + 2 else 1 for k in range(x.ndim)])
            seen = np.where(mask, seen, np.float16(0))
        made.append(seen)
    made = np.stack(made, 2)  # batch, channels, window, positions
    return np.moveaxis(made, 0, 2).reshape(made.shape[1] * made.shape[2], -1)


def of_large(large, places, g):
    start = [[t * d - p for t in range(k)] for k, d, p in zip(g["kernel"], g["dilate"], g["pad"])]
    return windows(large, places, start, g["stride"], large.shape[2:])


def of_small(small, places, g):
    """The small array dilated with zeros by the stride."""
    far = [(n - 1) * s + 1 for n, s in zip(small.shape[2:], g["stride"])]
    spread = np.zeros((*small.shape[:2], *far), "float16")
    spread[(slice(None), slice(None), *(slice(None, None, s) for s in g["stride"]))] = small
    start = [[p - t * d for t in range(k)] for k, d, p in zip(g["kernel"], g["dilate"], g["pad"])]
    return windows(spread, places, start, [1] * len(far), far)


def in_groups(x, groups, axis):
    return np.split(x, groups, axis)


def small_of(large, weight, places, g, *rule):
    made = [times(w.reshape(len(w), -1), of_large(x, places, g), *rule) for x, w in
            zip(in_groups(large, g["num_group"], 1), in_groups(weight, g["num_group"], 0))]
    return images(np.concatenate(made), len(large), places)


def large_of(small, weight, places, g, *rule):
    made = [times(np.swapaxes(w, 0, 1).reshape(w.shape[1], -1), of_small(y, places, g), *rule)
            for y, w in zip(in_groups(small, g["num_group"], 1),
                            in_groups(weight, g["num_group"], 0))]
    return images(np.concatenate(made), len(small), places)


def weight_of(large, small, g, *rule):
    def of_group(x, y):
        lines = np.swapaxes(y, 0, 1).reshape(y.shape[1], -1)
        return times(lines, of_large(x, small.shape[2:], g).T, *rule)

    groups = zip(in_groups(large, g["num_group"], 1), in_groups(small, g["num_group"], 1))
    return np.concatenate([of_group(x, y) for x, y in groups])


def images(matrix, batch, places):
    return np.swapaxes(matrix.reshape(len(matrix), batch, *places), 0, 1)


GEOMETRIES = {
    "3x3": {"kernel": (3, 3), "pad": (1, 1)},
    "1x1": {"kernel": (1, 1)},
    "stride, dilation": {"kernel": (3, 2), "stride": (2, 3), "dilate": (2, 1), "pad": (2, 1)},
    "groups": {"kernel": (3, 3), "pad": (1, 1), "num_group": 2},
    "depthwise": {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "num_group": 4},
    "1D": {"kernel": (5,), "stride": (2,), "pad": (1,)},
    "3D": {"kernel": (2, 3, 2), "stride": (1, 2, 1), "pad": (0, 1, 1)},
}
PLACES = {1: (17,), 2: (7, 8), 3: (4, 5, 3)}


def geometry(name):
    given = GEOMETRIES[name]
    ones = (1,) * len(given["kernel"])
    return {"stride": ones, "dilate": ones, "pad": (0,) * len(ones), "num_group": 1, **given}


@pytest.mark.parametrize(("gpu", "split"), RULES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolution(name, gpu, split):
    g, rng = geometry(name), np.random.default_rng(6)
    x = numbers(rng, 2, 4, *PLACES[len(g["kernel"])])
    w, b = numbers(rng, 8, 4 // g["num_group"], *g["kernel"]), numbers(rng, 8)
    symbol = sym.Convolution(X, Y, Z, num_filter=8, **g)
    arrays = {"x": x, "y": w, "z": b}
    y = outcome(symbol, arrays, gpu, split)[0]
    head = numbers(rng, *y.shape)
    made = outcome(symbol, arrays, gpu, split, head)
    bias = b.astype("float32").reshape(-1, *[1] * len(g["kernel"]))
    assert_same(made[:3], [small_of(x, w, y.shape[2:], g, gpu, split) + bias,
                           large_of(head, w, x.shape[2:], g, gpu, split),
                           weight_of(x, head, g, gpu, split)])
    others = tuple(k for k in range(y.ndim) if k != 1)
    np.testing.assert_allclose(made[3], head.astype("float64").sum(others), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("gpu", "split"), RULES)
@pytest.mark.parametrize("name", [name for name in GEOMETRIES if name != "3D"])
def test_deconvolution(name, gpu, split):
    g, rng = geometry(name), np.random.default_rng(7)
    x = numbers(rng, 2, 4, *PLACES[len(g["kernel"])])
    w = numbers(rng, 4, 8 // g["num_group"], *g["kernel"])
    symbol = sym.Deconvolution(X, Y, num_filter=8, **g)
    arrays = {"x": x, "y": w}
    y = outcome(symbol, arrays, gpu, split)[0]
    head = numbers(rng, *y.shape)
    made = outcome(symbol, arrays, gpu, split, head)
    assert_same(made, [large_of(x, w, y.shape[2:], g, gpu, split),
                       small_of(head, w, x.shape[2:], g, gpu, split),
                       weight_of(head, x, g, gpu, split)])


def test_deconvolution_to_target_shape():
    rng = np.random.default_rng(8)
    x, w = numbers(rng, 2, 3, 5, 6), numbers(rng, 3, 4, 3, 3)
    symbol = sym.Deconvolution(X, Y, num_filter=4, kernel=(3, 3), stride=(2, 2),
                               target_shape=(10, 12))
    g = {"kernel": (3, 3), "stride": (2, 2), "dilate": (1, 1), "pad": (1, 1), "num_group": 1}
    made = outcome(symbol, {"x": x, "y": w}, "V100", None)
    assert_same(made, [large_of(x, w, (10, 12), g, "V100", None)])


def test_coarse_gpu_rule_changes_results():
    rng = np.random.default_rng(9)
    a, b = numbers(rng, 20, 70), numbers(rng, 70, 30)
    coarse, coarser, fine = (outcome(sym.dot(X, Y), {"x": a, "y": b}, *rule)[0] for rule in RULES)
    assert np.mean(coarse != fine) > 0.9
    assert np.mean(coarse != coarser) > 0.9


def test_second_derivative_of_dense_layer_is_refused():
    graph = adding_as("V100", Graph.read(sym.FullyConnected(X, Y, no_bias=True, num_hidden=3)),
                      dict.fromkeys("xy", "float16"))
    x, w = mx.nd.ones((2, 4), dtype="float16"), mx.nd.ones((3, 4), dtype="float16")
    op = as_function(graph.symbol())
    x.attach_grad()
    w.attach_grad()
    with mx.autograd.record(), pytest.raises(mx.MXNetError, match="a dense layer's gradient"):
        mx.autograd.grad(op(x, w), [x], create_graph=True, retain_graph=True)


@pytest.mark.parametrize("symbol", [
    sym.contrib.DeformableConvolution(X, Y, Z, kernel=(3, 3), num_filter=4, no_bias=True,
                                      name="mine"),
    sym.linalg.syrk(X, name="mine"), sym.linalg.trmm(X, Y, name="mine"),
    sym.linalg.gemm2(X, Y, axis=0, name="mine"),
    sym.Correlation(X, Y, name="mine"), sym.khatri_rao(X, Y, name="mine"),
    sym.UpSampling(X, Y, scale=2, sample_type="bilinear", num_filter=3, name="mine"),
    sym.GridGenerator(X, transform_type="affine", target_shape=(4, 4), name="mine"),
    sym.SpatialTransformer(X, Y, target_shape=(4, 4), transform_type="affine",
                           sampler_type="bilinear", name="mine")],
    ids=lambda symbol: Graph.read(symbol).outputs[0].node.op)
def test_unsupported_operators_are_refused_by_name(symbol):
    op = Graph.read(symbol).outputs[0].node.op
    with pytest.raises(ValueError, match=rf"no code for .*{op[-5:]} \(mine\).*keep=.*Valid: "):
        adding_as("V100", Graph.read(symbol), dict.fromkeys("xyz", "float16"))


@pytest.mark.parametrize("batched", [None, "float16"])
def test_batched_products_of_converted_network_follow_policy(batched, rng):
    same = mx.gluon.nn.Dense(2000, use_bias=False, flatten=False, in_units=2000)
    net = Calling(lambda F, x, y, same: F.batch_dot(same(x), same(y), transpose_b=True) * 2, same)
    net.initialize()
    same.weight.set_data(mx.nd.eye(2000))  # returns its data in float16
    amp.convert(net, amp.Policy("mine", compute="float16", accumulate="V100", batched=batched))
    a, b = (rng.random((2, 6, 2000)).astype("float16") for _ in "ab")
    made = net(*(mx.nd.array(x, dtype="float32") for x in (a, b))).asnumpy()
    sums = amp.tensor_core_dot(a, b.transpose(0, 2, 1), gpu="V100")
    assert np.array_equal(made, sums.astype("float16") * np.float16(2))
    exact = (a.astype("float64") @ b.transpose(0, 2, 1).astype("float64")).astype("float16")
    assert not np.array_equal(exact, sums.astype("float16"))


def test_operators_without_products_run():
    for symbol in (sym.UpSampling(X, scale=2, sample_type="nearest"),
                   sym.GridGenerator(X, transform_type="warp")):
        adding_as("V100", Graph.read(symbol), {"x": "float16"})
