"""Compares float16 convolutions on GPU 0 with float32 ones: python convolutions.py ROWS [--small]

Each row has the largest difference of the output and of the gradients, relative to the largest
number of each. Sizes, strides, dilations, groups, layouts and ways to write vary.
"""
import itertools
import os
import sys

os.environ["NVIDIA_TF32_OVERRIDE"] = "0"

import gluon_amp  # noqa: F401  (before mxnet)
import mxnet as mx
import numpy as np
from mxnet import autograd, nd
from rows import add

BOUND = 4e-3
GPU = mx.gpu(0)
# kernel, stride, dilation, groups, inputs, outputs, pixels
CASES = [(1, 1, 1, 1, 64, 128, 14), (1, 2, 1, 1, 64, 128, 15), (3, 1, 1, 1, 64, 64, 14),
         (3, 2, 1, 1, 48, 96, 17), (3, 1, 2, 1, 32, 32, 14), (7, 2, 1, 1, 3, 64, 32),
         (3, 1, 1, 32, 32, 32, 14), (3, 2, 1, 4, 64, 32, 14), (5, 1, 1, 1, 20, 12, 9),
         (3, 1, 1, 1, 7, 5, 11), (1, 1, 1, 1, 1, 3, 8)]


def results(operator, dtype, layout, request, bias, case):
    kernel, stride, dilation, groups, inputs, outputs, pixels = case
    random = np.random.RandomState(0)
    deconvolution = operator is nd.Deconvolution
    shapes = [(4, inputs, pixels, pixels), (outputs, inputs // groups, kernel, kernel), (outputs,)]
    if deconvolution:
        shapes[1] = inputs, outputs // groups, kernel, kernel
    arrays = [nd.array(random.randn(*shape) * 0.1).astype("float16") for shape in shapes]
    if layout == "NHWC":
        arrays[:2] = [array.transpose((0, 2, 3, 1)) for array in arrays[:2]]
    arrays = [array.as_in_context(GPU).astype(dtype) for array in arrays[:3 if bias else 2]]
    for array in arrays:
        array.attach_grad(request)
        array.grad[:] = 0.25
    with autograd.record():
        y = operator(*arrays, kernel=(kernel,) * 2, stride=(stride,) * 2, dilate=(dilation,) * 2,
                     pad=(kernel // 2 * dilation,) * 2, num_filter=outputs, num_group=groups,
                     no_bias=not bias, layout=layout)
    y.backward(nd.array(random.randn(*y.shape) * 0.1).astype("float16").as_in_context(GPU)
               .astype(dtype))
    return [each.asnumpy().astype("float64") for each in (y, *(a.grad for a in arrays))]


def main(path, *flags):
    cases = CASES[4:6] if "--small" in flags else CASES
    failed = 0
    for case, layout, operator, (request, bias) in itertools.product(
            cases, ("NCHW", "NHWC"), (nd.Convolution, nd.Deconvolution),
            (("write", True), ("add", False))):
        row = {operator.__name__: list(case), "layout": layout, "request": request, "bias": bias}
        try:
            one, other = (results(operator, dtype, layout, request, bias, case)
                          for dtype in ("float16", "float32"))
        except mx.MXNetError as error:
            failed += 1
            add(path, **row, error=str(error).splitlines()[-1])
            continue
        differences = [abs(a - b).max() / abs(b).max() for a, b in zip(one, other)]
        failed += max(differences) > BOUND
        add(path, **row, difference=[round(float(each), 6) for each in differences])
    sys.exit(f"{failed} fail, or differ by more than {BOUND}" if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
