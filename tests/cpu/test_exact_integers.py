"""Results of small integers, which both types represent: each bit is right, and NaN in the memory
around every array is neither read nor overwritten."""
import gluon_amp  # noqa: F401  (before mxnet)
import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

pytestmark = [pytest.mark.isa, pytest.mark.sanitize]

AROUND = 7  # elements of NaN before and after each array
SIZES = (1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 100)
TYPES = ("float16", "bfloat16")


class Memory:
    """An array between NaNs.

    Attributes:
        array: a part of larger memory.
    """

    def __init__(self, numbers, dtype):
        size = int(np.prod(numbers.shape))
        self._all = nd.full(size + 2 * AROUND, np.nan).astype(dtype)
        self.array = self._all[AROUND:AROUND + size].reshape(numbers.shape)
        self.array[:] = nd.array(numbers).astype(dtype)

    def check(self, expected):
        everything = self._all.astype("float32").asnumpy()
        assert np.isnan(everything[:AROUND]).all()
        assert np.isnan(everything[-AROUND:]).all()
        np.testing.assert_array_equal(
            everything[AROUND:-AROUND].reshape(self.array.shape), expected)


def check(dtype, operator, reference, *operands, **attributes):
    """Compares an operator's result with that of numpy's integers, in new memory."""
    inputs = [Memory(numbers, dtype) for numbers in operands]
    expected = np.asarray(reference(*(numbers.astype(np.int64) for numbers in operands)))
    out = Memory(np.zeros(expected.shape), dtype)
    operator(*(memory.array for memory in inputs), out=out.array, **attributes)
    out.check(expected)
    for memory, numbers in zip(inputs, operands):
        memory.check(numbers)


def integers(rng, *shape, most=2):
    return rng.integers(-most, most + 1, shape)


BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "equal": np.equal, "not_equal": np.not_equal, "greater": np.greater,
    "greater_equal": np.greater_equal, "lesser": np.less, "lesser_equal": np.less_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", BINARY)
def test_binary_operators(dtype, name, rng):
    operator = getattr(nd, f"broadcast_{name}")
    for size in SIZES:
        for left, right in (((3, size), (3, size)), ((3, size), (1, size)), ((3, 1), (3, size)),
                            ((2, 1, size), (1, 3, 1))):
            check(dtype, operator, BINARY[name], integers(rng, *left, most=12),
                  integers(rng, *right, most=12))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["elemwise_add", "elemwise_sub", "elemwise_mul"])
def test_elementwise_operators(dtype, name, rng):
    for size in SIZES:
        check(dtype, getattr(nd, name), BINARY[name.rpartition("_")[2]],
              integers(rng, size, most=12), integers(rng, size, most=12))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "reference"), [
    ("sum", np.sum), ("max", np.max), ("min", np.min), ("prod", np.prod),
    ("norm", lambda x, axis, keepdims: np.abs(x).sum(axis, keepdims=keepdims))])
def test_reductions(dtype, name, reference, rng):
    for size in SIZES:
        for shape, axis in (((size,), 0), ((3, size), 1), ((size, 3), 0), ((2, size, 5), 1)):
            numbers = integers(rng, *shape, most=1)
            attributes = {"ord": 1} if name == "norm" else {}
            check(dtype, getattr(nd, name), lambda x, axis=axis: reference(x, axis, keepdims=True),
                  numbers, axis=axis, keepdims=True, **attributes)


@pytest.mark.parametrize("dtype", TYPES)
def test_products_of_matrices(dtype, rng):
    for rows, depth, columns in ((1, 1, 1), (2, 7, 3), (5, 16, 17), (17, 33, 8), (9, 50, 31)):
        a, b = integers(rng, rows, depth), integers(rng, depth, columns)
        for flip_a in (False, True):
            for flip_b in (False, True):
                def product(left, right, flip_a=flip_a, flip_b=flip_b):
                    return (left.T if flip_a else left) @ (right.T if flip_b else right)
                check(dtype, nd.dot, product, a.T.copy() if flip_a else a,
                      b.T.copy() if flip_b else b, transpose_a=flip_a, transpose_b=flip_b)
        x, w = integers(rng, 3, rows, depth), integers(rng, 3, depth, columns)
        check(dtype, nd.batch_dot, np.matmul, x, w)
        bias = integers(rng, columns)
        check(dtype, nd.FullyConnected, lambda x, w, c: x @ w.T + c, a, b.T.copy(), bias,
              num_hidden=columns)


def convolved(x, w, stride, pad):
    """A convolution of integers, by its definition."""
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    height, width = w.shape[2:]
    rows, columns = ((n - k) // stride + 1 for n, k in zip(x.shape[2:], (height, width)))
    y = np.zeros((len(x), len(w), rows, columns), np.int64)
    for i in range(height):
        for j in range(width):
            part = x[:, :, i:i + stride * rows:stride, j:j + stride * columns:stride]
            y += np.einsum("ncij,oc->noij", part, w[:, :, i, j])
    return y


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("channels", "filters", "size", "kernel", "stride", "pad"), [
    (1, 1, 5, 1, 1, 0), (3, 5, 7, 3, 1, 1), (3, 16, 9, 3, 2, 1), (16, 17, 6, 1, 1, 0),
    (8, 4, 11, 5, 2, 2)])
def test_convolutions(dtype, channels, filters, size, kernel, stride, pad, rng):
    check(dtype, nd.Convolution, lambda x, w: convolved(x, w, stride, pad),
          integers(rng, 2, channels, size, size, most=1),
          integers(rng, filters, channels, kernel, kernel, most=1),
          kernel=(kernel, kernel), stride=(stride, stride), pad=(pad, pad), num_filter=filters,
          no_bias=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "reference"), [("max", np.max), ("sum", np.sum)])
def test_pooling(dtype, name, reference, rng):
    for size in (2, 6, 16, 34):
        numbers = integers(rng, 2, 3, size, size, most=12)

        def pooled(x, n=size // 2):
            return reference(x.reshape(2, 3, n, 2, n, 2), (3, 5))
        check(dtype, nd.Pooling, pooled, numbers, kernel=(2, 2), stride=(2, 2), pool_type=name)


def test_convolutions_differ_from_a_wrong_reference(rng):
    with pytest.raises(AssertionError):
        check("float16", nd.dot, lambda a, b: a @ b + 1, integers(rng, 3, 4), integers(rng, 4, 3))
    mx.nd.waitall()
