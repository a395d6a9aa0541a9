"""Batch norms of channels-last data in float16 give the CPU's results, and so do gradients of
convolutions' biases. With cuDNN 9, they use fast functions."""
import os

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

CUDNN_9 = os.environ["RECORDING_GPU_CUDNN"] >= "9"
CHANNELS_LAST = [((2, 5, 4, 8), 3), ((40, 8), 1), ((40, 8, 1, 1), 1), ((2, 3, 2, 4, 3), 4)]


def results(shape, axis, context, training=True, dtype="float16"):
    """Output, moving averages and gradients; these are added to ones."""
    random = np.random.RandomState(0)
    x, y_gradient = (nd.array(random.randn(*shape), dtype="float16", ctx=context).astype(dtype)
                     for _ in range(2))
    scale, bias, mean, variance = (
        nd.array(random.rand(shape[axis]) + 0.5, ctx=context) for _ in range(4))
    for array in (x, scale, bias):
        array.attach_grad("add")
        array.grad[:] = 1
    with autograd.record(train_mode=training):
        y = nd.BatchNorm(x, scale, bias, mean, variance, axis=axis, fix_gamma=False)
    y.backward(y_gradient)
    variance = variance[:0] if training else variance  # a GPU divides by one less than the count
    return [array.asnumpy() for array in (y, mean, variance, x.grad, scale.grad, bias.grad)]


@pytest.mark.parametrize(("shape", "axis"), [*CHANNELS_LAST, ((2, 8, 5, 4), 1), ((2, 8, 5), 1)])
def test_training_matches_cpu(shape, axis, calls):
    on_gpu = results(shape, axis, mx.gpu(0))
    for one, other in zip(on_gpu, results(shape, axis, mx.cpu(), dtype="float32")):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
    fast = "Ex" if CUDNN_9 and (shape, axis) in CHANNELS_LAST else ""
    assert {call.name for call in calls() if "BatchNorm" in call.name} == {
        f"cudnnBatchNormalizationForwardTraining{fast}",
        f"cudnnBatchNormalizationBackward{fast}"}


@pytest.mark.parametrize(("shape", "axis"), CHANNELS_LAST)
def test_prediction_matches_cpu(shape, axis):
    on_gpu = results(shape, axis, mx.gpu(0), training=False)
    on_cpu = results(shape, axis, mx.cpu(), training=False, dtype="float32")
    for one, other in zip(on_gpu[:3], on_cpu):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("request_", "batch", "channels"), [
    ("write", 2, 6), ("add", 2, 6), ("write", 3, 1)])
def test_bias_gradients_of_channels_last_convolutions(request_, batch, channels, calls):
    random = np.random.RandomState(0)
    x, w, b, head = (nd.array(random.randn(*shape), dtype="float16", ctx=mx.gpu(0)) for shape in (
        (batch, 5, 4, 8), (channels, 1, 1, 8), (channels,), (batch, 5, 4, channels)))
    b.attach_grad(request_)
    b.grad[:] = 1
    with autograd.record():
        y = nd.Convolution(x, w, b, kernel=(1, 1), num_filter=channels, layout="NHWC")
    y.backward(head)
    expected = head.asnumpy().astype("float32").sum(axis=(0, 1, 2)) + (request_ == "add")
    np.testing.assert_allclose(b.grad.asnumpy(), expected, rtol=2e-3, atol=4e-3)
    names = [call.name for call in calls()]
    assert ("cudnnConvolutionBackwardBias" not in names) == CUDNN_9
