"""Defects of MXNet that the import repairs, in float32 and in 16 bits (docs/import.md)."""
import numpy as np
import pytest
from mxnet import autograd, nd
from processes import printed
from trainers import recorded

TYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize("dtype", TYPES)
def test_gradient_of_hard_sigmoid(dtype):
    """In (f(x) + x) * 2, both f and the sum of gradients read the gradient of the sum."""
    x = nd.array([-3, -.5, .25, .5, 2, 4], dtype=dtype)
    x.attach_grad()
    op = nd.CachedOp(graph())
    recorded(op, x).backward()
    slope = np.array([0, .2, .2, .2, .2, 0])
    np.testing.assert_allclose(x.grad.asnumpy().astype("float32"), 2 * (slope + 1), rtol=1e-2)


def graph():
    import mxnet as mx
    x = mx.sym.var("x")
    return (mx.sym.hard_sigmoid(x) + x) * 2


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [4, 16])
def test_gradient_of_recorded_prediction_of_pooling(width, dtype, rng):
    values = rng.permutation(2 * 3 * 4 * width).reshape(2, 3, 4, width)
    grads = []
    for train_mode in (True, False):
        x = nd.array(values, dtype=dtype)
        x.attach_grad()
        with autograd.record(train_mode=train_mode):
            out = nd.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max")
        out.backward(train_mode=train_mode)
        grads.append(x.grad.asnumpy().astype("float32"))
    np.testing.assert_array_equal(*grads)
    assert grads[0].sum() == out.size


OFF = """
import gluon_amp, mxnet as mx, numpy as np
from mxnet import autograd, nd
assert gluon_amp.cpu.library.load()
x = mx.sym.var("x")
op = nd.CachedOp((mx.sym.hard_sigmoid(x) + x) * 2)
array = nd.array([-3, 4])
array.attach_grad()
with autograd.record():
    out = op(array)
out.backward()
print(array.grad.asnumpy().tolist())
"""


def test_variable_leaves_repairs_out():
    assert printed(OFF) == "[2.0, 2.0]\n"
    assert printed(OFF, GLUON_AMP_REPAIRS="off") != "[2.0, 2.0]\n"
