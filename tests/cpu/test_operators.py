"""Graphs of float16 operators round each result once, in forward and backward passes."""
import mxnet as mx
import numpy as np
import pytest
from halves import run

pytestmark = pytest.mark.sanitize

sym = mx.sym
X, Y = sym.var("x"), sym.var("y")


def test_long_sum_is_accumulated_in_float32():
    x = np.full((1, 4096), 1, np.float16)
    (out,), _ = run(sym.FullyConnected(X, Y, no_bias=True, num_hidden=1), {"x": x, "y": x})
    assert out == 4096  # summed in float16, it would stay at 2048


def test_overflow_becomes_infinity_and_underflow_becomes_zero():
    big, small = np.float16([60000]), np.float16([6e-8])
    (out,), _ = run(X + Y, {"x": big, "y": big})
    assert np.isinf(out).all()
    (out,), _ = run(X * 0.25, {"x": small})
    assert out == 0


def test_activation_gradients_underflow_as_on_gpu():
    symbol = (X * 0.001) * 0.001
    _, gradients = run(symbol, {"x": np.float16([1])}, [np.float16([1e-3])])
    # 1e-3 * 1e-3 = 1e-6 fits, 1e-9 does not
    assert gradients["x"] == 0


def test_activation_gradients_overflow_as_on_gpu():
    _, gradients = run((X * 1000) * 1000, {"x": np.float16([1e-4])}, [np.float16([1])])
    assert np.isinf(gradients["x"]).all()


def test_gradients_of_float32_tensor_with_many_readers_accumulate():
    x = sym.Cast(X, dtype="float32") * 1.0
    total = sym.Cast(x, dtype="float16") * 1.0
    for _ in range(9):
        total = total + sym.Cast(x * 1.0, dtype="float16")
    for half in (total, total + sym.Cast(x, dtype="float16")):
        consumers = 10 + (half is not total)
        _, gradients = run(half, {"x": np.ones(3, np.float16)}, [np.ones(3, np.float16)])
        assert (gradients["x"] == consumers).all()
