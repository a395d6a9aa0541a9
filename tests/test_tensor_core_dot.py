"""`tensor_core_dot` gives, bit by bit, what GPUs have given, and refuses what it cannot know."""
import math
import os
import subprocess
import sys
from pathlib import Path

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from gluon_amp.cpu import library
from gluon_amp.tensor_core_math import GPUS
from tensor_core_rule import exponent, instruction, product

SHARED = Path(os.environ.get("GLUON_AMP_DATA") or Path(__file__).parents[2] / "shared")
MEASURED = [name for name, rule in GPUS.items() if rule.measured]
each_gpu = pytest.mark.parametrize("gpu", GPUS)


def assert_bits(made, wanted):
    """The same bits, zeros' signs too; a NaN is NVIDIA's."""
    assert made.dtype == wanted.dtype == np.float32
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(made.view("uint32")[nan], np.uint32(0x7fffffff))
    np.testing.assert_array_equal(made.view("uint32")[~nan], wanted.view("uint32")[~nan])


# ---- what GPUs have given

@pytest.mark.skipif(not (SHARED / "tensor_cores").is_dir(),
                    reason="needs GPUs' results in ../shared/tensor_cores or $GLUON_AMP_DATA")
@pytest.mark.parametrize("gpu", MEASURED)
def test_all_measured_results_of_a_gpu(gpu):
    measured = np.load(SHARED / "tensor_cores" / f"{gpu}.npz")
    a, b = measured["a"].view("float16"), measured["b"].view("float16")
    c, d = measured["c"].view("float32"), measured["d"].view("float32")
    assert a.shape == b.shape == (5000, GPUS[gpu].block)
    made = amp.tensor_core_dot(a[:, None, :], b[:, :, None], c[:, None, None], gpu=gpu)
    assert_bits(made.ravel(), d)
    for i in range(20):
        assert_bits(np.array(amp.tensor_core_dot(a[i], b[i], c[i], gpu=gpu)), d[i])


# ---- what the rule gives

def ordinary(rng, *shape):
    return rng.standard_normal(shape).astype("float16")


def any_finite(rng, *shape):
    bits = rng.integers(0, 1 << 16, shape).astype("uint16")
    return np.where((bits & 0x7c00) == 0x7c00, bits & 0x83ff, bits).view("float16")


def subnormal(rng, *shape):
    return (rng.integers(0, 1 << 16, shape).astype("uint16") & 0x87ff).view("float16")


def many_zeros(rng, *shape):
    return np.where(rng.random(shape) < 0.8, np.float16(-0.0), any_finite(rng, *shape))


def largest(rng, *shape):
    """Sums as long as they can be."""
    return np.full(shape, 65504, "float16")


def seldom_endless(rng, *shape):
    special = rng.choice(np.float16([np.inf, -np.inf, np.nan]), shape)
    return np.where(rng.random(shape) < 0.01, special, many_zeros(rng, *shape))


def any_accumulator(rng, *shape):
    bits = rng.integers(0, 1 << 32, shape).astype("uint32")
    return np.where((bits & 0x7f800000) == 0x7f800000, bits & 0x807fffff, bits).view("float32")


def close_accumulator(rng, *shape):
    """As large as the sums of the largest halves."""
    return (rng.uniform(-2, 2, shape) * 2.0 ** 35).astype("float32")


def endless_accumulator(rng, *shape):
    return rng.choice(np.float32([0, -0.0, 1, np.inf, -np.inf, np.nan]), shape)


@each_gpu
@pytest.mark.parametrize("accumulator", [any_accumulator, close_accumulator, endless_accumulator])
@pytest.mark.parametrize("factors", [ordinary, any_finite, subnormal, many_zeros, largest,
                                     seldom_endless])
def test_every_bit_is_the_rules(factors, accumulator, gpu, rng):
    rule = GPUS[gpu]
    for rows, depth, columns, split in ((1, 1, 1, None), (3, 33, 70, None), (5, 600, 2, None),
                                        (4, 50, 19, 24), (17, 12, 5, 5)):
        a, b = factors(rng, rows, depth), factors(rng, depth, columns)
        c = accumulator(rng, rows, columns)
        assert_bits(amp.tensor_core_dot(a, b, c, gpu=gpu, split=split),
                    product(a, b, c, rule.block, rule.fraction, split))


@each_gpu
def test_the_engine_has_room_for_an_instructions_sum(gpu):
    """It adds two halves of a block in 32 bits each: products are below 4, c below 2."""
    block, fraction, _ = GPUS[gpu]
    assert 4 * (block // 2) + 2 <= 2 ** (31 - fraction)
    assert block % 2 == 0


@pytest.mark.parametrize("isa", list(library.VARIANTS))
def test_each_instruction_set_gives_the_rules_bits(isa):
    if os.environ.get("GLUON_AMP_ISA"):
        pytest.skip("this is such a process")
    if not all(library.__cpu_features__.get(f, False) for f in library.VARIANTS[isa]):
        pytest.skip(f"this processor has no {isa}")
    if isa == library.load():
        return  # tested by this very run
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k",
                    "every_bit and (V100 or H100)"], check=True, timeout=300,
                   env={**os.environ, "GLUON_AMP_ISA": isa}, stdout=subprocess.DEVNULL)


# ---- how far from the exact sum

@each_gpu
@pytest.mark.parametrize("factors", [ordinary, any_finite])
def test_an_instruction_is_closer_to_the_exact_sum_than_its_bound(factors, gpu, rng):
    """What is cut off each addend is less than a unit under the largest, and the largest loses
    nothing; what is cut off the sum is less than a unit of the result."""
    rule = GPUS[gpu]
    a, b = factors(rng, 300, rule.block), factors(rng, 300, rule.block)
    c = factors(rng, 300).astype("float32") * factors(rng, 300).astype("float32")
    made = amp.tensor_core_dot(a[:, None], b[:, :, None], c[:, None, None], gpu=gpu).ravel()
    wide_a, wide_b, wide_c = (x.astype("float64") for x in (a, b, c))
    top = np.maximum((exponent(wide_a, -14) + exponent(wide_b, -14)).max(1), exponent(wide_c, -126))
    unit = np.ldexp(1.0, top - rule.fraction)
    bound = rule.block * unit + np.spacing(abs(made)).astype("float64")
    for i in range(len(made)):
        terms = [float(x) * float(y) for x, y in zip(a[i], b[i])]
        error = math.fsum([float(made[i]), -float(c[i]), *(-t for t in terms)])
        assert abs(error) < bound[i]


@each_gpu
def test_sums_of_positive_numbers_are_never_too_large(gpu, rng):
    a, b = abs(ordinary(rng, 10, 5000)), abs(ordinary(rng, 5000, 10))
    exact = a.astype("float64") @ b.astype("float64")
    made = amp.tensor_core_dot(a, b, gpu=gpu)
    assert np.all(made < exact)
    pieces = amp.tensor_core_dot(a, b, gpu=gpu, split=512)
    assert np.mean(exact - pieces) < np.mean(exact - made) / 2


# ---- arrays of every kind

def test_vectors_matrices_and_stacks_have_the_shapes_of_matmul(rng):
    for left, right in (((7,), (7,)), ((3, 7), (7,)), ((7,), (7, 4)), ((3, 7), (7, 4)),
                        ((2, 3, 7), (7, 4)), ((2, 1, 3, 7), (5, 7, 4)), ((0, 7), (7, 4)),
                        ((3, 0), (0, 4))):
        a, b = ordinary(rng, *left), ordinary(rng, *right)
        wanted = np.matmul(a.astype("float32"), b.astype("float32"))
        made = amp.tensor_core_dot(a, b)
        assert made.shape == wanted.shape
        assert made.dtype == np.float32
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)
        start = amp.tensor_core_dot(a, b, np.float32(3))
        np.testing.assert_allclose(start, wanted + 3, rtol=1e-5, atol=1e-5)


def test_arrays_of_mxnet_give_arrays_of_mxnet(rng):
    a, b = ordinary(rng, 3, 9), ordinary(rng, 9, 4)
    c = rng.standard_normal((3, 4)).astype("float32")
    made = amp.tensor_core_dot(mx.nd.array(a, dtype="float16"), mx.nd.array(b, dtype="float16"),
                               mx.nd.array(c))
    assert isinstance(made, mx.nd.NDArray)
    assert_bits(made.asnumpy(), amp.tensor_core_dot(a, b, c))
    vector = mx.nd.array(a[0], dtype="float16")
    assert amp.tensor_core_dot(vector, vector, mx.nd.ones(1)).shape == (1,)


def test_arrays_of_mxnets_numpy_give_such_arrays(rng):
    a, b = ordinary(rng, 3, 9), ordinary(rng, 9)
    with mx.util.np_shape(True):
        made = amp.tensor_core_dot(mx.np.array(a, dtype="float16"), b)
        inner = amp.tensor_core_dot(mx.np.array(b, dtype="float16"), b)
        assert type(made) is type(inner) is mx.np.ndarray
        assert inner.shape == ()
        assert_bits(made.asnumpy(), amp.tensor_core_dot(a, b))


def test_a_sum_of_nothing_is_what_was_there():
    c = np.float32([[1, -0.0], [np.nan, np.inf]])
    made = amp.tensor_core_dot(np.zeros((2, 0), "float16"), np.zeros((0, 2), "float16"), c)
    assert_bits(made, c + np.float32(0))


def test_a_split_may_be_any_whole_number(rng):
    a, b = ordinary(rng, 5, 100), ordinary(rng, 100, 5)
    assert_bits(amp.tensor_core_dot(a, b, split=10 ** 40), amp.tensor_core_dot(a, b))


def test_arrays_that_are_transposed_or_not_contiguous_are_taken_as_they_look(rng):
    a, b = ordinary(rng, 40, 6).T[:, ::2], ordinary(rng, 8, 20).T
    assert_bits(amp.tensor_core_dot(a, b), amp.tensor_core_dot(a.copy(), b.copy()))


def test_large_matrices_are_what_their_parts_are(rng):
    a, b = ordinary(rng, 1100, 20), ordinary(rng, 20, 2100)
    c = rng.standard_normal((1100, 2100)).astype("float32")
    made = amp.tensor_core_dot(a, b, c)
    for rows in (slice(0, 3), slice(1020, 1030), slice(1098, None)):
        for columns in (slice(0, 70), slice(2040, 2060)):
            part = amp.tensor_core_dot(a[rows], b[:, columns], c[rows, columns])
            assert_bits(made[rows, columns], part)


def test_a_split_as_long_as_the_sum_is_none(rng):
    a, b = ordinary(rng, 5, 100), ordinary(rng, 100, 5)
    assert_bits(amp.tensor_core_dot(a, b, split=100), amp.tensor_core_dot(a, b))


def test_a_chain_is_its_instructions_one_after_the_other(rng):
    a, b = ordinary(rng, 5, 12), ordinary(rng, 12, 5)
    chain = np.zeros((5, 5), "float32")
    for k in range(0, 12, 4):
        chain = amp.tensor_core_dot(a[:, k:k + 4], b[k:k + 4], chain)
    assert_bits(amp.tensor_core_dot(a, b), chain)
    first = instruction(a[:, None, :4], b.T[None, :, :4], np.zeros((5, 5), "float32"), 23)
    assert_bits(amp.tensor_core_dot(a[:, :4], b[:4]), first)


def test_names_of_gpus_may_be_written_in_other_ways(rng):
    a, b = ordinary(rng, 5, 100), ordinary(rng, 100, 5)
    assert_bits(amp.tensor_core_dot(a, b, gpu="RTX30"), amp.tensor_core_dot(a, b, gpu="RTX 30"))
    assert_bits(amp.tensor_core_dot(a, b, gpu="ada"), amp.tensor_core_dot(a, b, gpu="Ada"))


# ---- what is refused

@pytest.mark.parametrize(("arguments", "error", "said"), [
    ({"gpu": "T4"}, ValueError, "nobody has measured a T4.*Valid: V100, A2, .*H100.*'T4'"),
    ({"gpu": "t4"}, ValueError, "nobody has measured a t4"),
    ({"gpu": "K80"}, ValueError, "unknown GPU. Valid: V100, A2, .*Received: 'K80'"),
    ({"gpu": None}, ValueError, "unknown GPU. Valid: .*Received: None"),
    ({"split": 0}, ValueError, "split must be a whole number of products.*Received: 0"),
    ({"split": 2.5}, ValueError, "split must be a whole number of products.*Received: 2.5"),
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
])
def test_what_cannot_be_right_is_refused(arguments, error, said):
    given = {"a": np.ones((3, 4), "float16"), "b": np.ones((4, 5), "float16"), **arguments}
    with pytest.raises(error, match=said):
        amp.tensor_core_dot(**given)


# ---- networks whose arrays are empty

@pytest.mark.parametrize("policy", ["mixed_float8", amp.Policy(
    "gpu", "float16", "float16", accumulate="V100")], ids=["mixed_float8", "as a GPU"])
@pytest.mark.parametrize(("op", "a", "b", "shape"), [
    ("dot", (3, 0), (0, 4), (3, 4)), ("dot", (0, 3), (3, 4), (0, 4)),
    ("dot", (2, 3, 0), (0,), (2, 3)),
    ("matmul", (2, 3, 0), (2, 0, 4), (2, 3, 4)), ("matmul", (0, 3, 5), (0, 5, 4), (0, 3, 4)),
    ("fully_connected", (0, 3), (4, 3), (0, 4)),
    ("convolution", (0, 3, 5, 5), (4, 3, 3, 3), (0, 4, 3, 3))])
def test_sums_of_nothing_are_0_in_networks(op, a, b, shape, policy):
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
