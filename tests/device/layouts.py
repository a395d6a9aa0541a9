"""Measures the convolutions of ResNet-50 by layout, and batch norms by axis: python layouts.py ROWS

Each row has the milliseconds of a forward and a backward pass at batch 128.
"""
import sys

import gluon_amp  # noqa: F401  (before mxnet)
import mxnet as mx
from mxnet import autograd, nd
from rows import add, milliseconds

GPU, BATCH, STEPS = mx.gpu(0), 128, 20
# inputs, outputs, pixels, kernel, stride
CONVOLUTIONS = [(3, 64, 224, 7, 2), (64, 64, 56, 3, 1), (64, 256, 56, 1, 1), (256, 64, 56, 1, 1),
                (128, 128, 28, 3, 1), (256, 512, 56, 1, 2), (256, 256, 14, 3, 1),
                (512, 512, 7, 3, 1), (512, 2048, 7, 1, 1)]
WAYS = [("float32", "NCHW"), ("float16", "NCHW"), ("float16", "NHWC")]


def passes(forward):
    """The milliseconds of a forward and a backward pass."""
    def step():
        with autograd.record():
            y = forward()
        y.backward()

    for _ in range(3):
        step()
    return milliseconds(step, STEPS)


def drawn(channels, pixels, outer, layout, dtype):
    shape = (outer, channels, pixels, pixels)
    if layout == "NHWC":
        shape = (outer, pixels, pixels, channels)
    made = (nd.random.normal(shape=shape, ctx=GPU) * 0.05).astype(dtype)
    made.attach_grad()
    return made


def main(path):
    for inputs, outputs, pixels, kernel, stride in CONVOLUTIONS:
        for dtype, layout in WAYS:
            x = drawn(inputs, pixels, BATCH, layout, dtype)
            weight = drawn(inputs, kernel, outputs, layout, dtype)
            settings = {"kernel": (kernel, kernel), "stride": (stride, stride),
                        "pad": (kernel // 2, kernel // 2), "num_filter": outputs,
                        "no_bias": True, "layout": layout}
            add(path, convolution=[inputs, outputs, pixels, kernel, stride], type=dtype,
                layout=layout,
                ms=passes(lambda x=x, w=weight, s=settings: nd.Convolution(x, w, **s)))
    for dtype, layout in WAYS:
        arrays = [drawn(256, 56, BATCH, layout, dtype), *(nd.ones(256, ctx=GPU) for _ in range(4))]
        for array in arrays[:3]:
            array.attach_grad()
        add(path, batch_norm=[BATCH, 256, 56, 56], type=dtype, layout=layout,
            ms=passes(lambda arrays=arrays, layout=layout: nd.BatchNorm(
                *arrays, axis=layout.index("C"), fix_gamma=False)))


if __name__ == "__main__":
    main(sys.argv[1])
