"""`make -C tests weight-gradients`: weight gradients of convolutions of all small shapes, against
numpy. Memory holds large numbers before each call, which show what a kernel does not write."""
import itertools
import os
import sys
from dataclasses import dataclass

import gluon_amp  # noqa: F401  (runs 16-bit operators on a CPU)
import numpy as np
from mxnet import autograd, nd

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # of the largest gradient
LAYERS = [(16, 16, 1), (3, 16, 1), (5, 7, 1), (32, 32, 2), (8, 8, 8)]  # inputs, outputs, groups


@dataclass(frozen=True)
class Case:
    op: str
    image: tuple  # the data's spatial axes
    kernel: tuple
    stride: tuple
    dilate: tuple
    pad: tuple
    layer: tuple = (16, 16, 1)
    dtype: str = "float32"
    request: str = "write"

    def error(self, rng):
        """Runs the layer. Returns the largest difference, relative to the largest gradient."""
        inputs, outputs, groups = self.layer
        forward = self.op == "Convolution"
        weight = (outputs, inputs // groups) if forward else (inputs, outputs // groups)
        x, w = (nd.array(rng.standard_normal((*first, *axes))).astype(self.dtype)
                for first, axes in (((2, inputs), self.image), (weight, self.kernel)))
        w.attach_grad(self.request)
        x.attach_grad()
        w.grad[:] = 1
        with autograd.record():
            y = getattr(nd, self.op)(x, w, kernel=self.kernel, stride=self.stride, pad=self.pad,
                                     dilate=self.dilate, num_filter=outputs, num_group=groups,
                                     no_bias=True)
        dy = nd.array(rng.standard_normal(y.shape)).astype(self.dtype)
        y.backward(dy)
        data, result = (a.astype("float32").asnumpy().astype("float64") for a in (x, dy))
        expected = self._gradient(*((data, result) if forward else (result, data)))
        if self.request == "add":
            expected += 1
        difference = np.abs(w.grad.astype("float32").asnumpy() - expected).max()
        return difference / max(1, np.abs(expected).max())

    def _gradient(self, x, dy):
        """That of a convolution; a deconvolution is one from its result to its data."""
        groups, places, kernel = self.layer[2], dy.shape[2:], self.kernel
        reach = [(n - 1) * s + (k - 1) * d + 1
                 for n, s, k, d in zip(places, self.stride, kernel, self.dilate)]
        x = np.pad(x, [(0, 0), (0, 0), *((p, max(0, r - n - p)) for p, r, n in
                                         zip(self.pad, reach, x.shape[2:]))])
        x, dy = (a.reshape(len(a), groups, a.shape[1] // groups, *a.shape[2:]) for a in (x, dy))
        made = np.zeros((groups, dy.shape[2], x.shape[2], *kernel))
        for at in np.ndindex(*kernel):
            part = x[(..., *(slice(k * d, k * d + (n - 1) * s + 1, s)
                             for k, d, n, s in zip(at, self.dilate, places, self.stride)))]
            made[(..., *at)] = np.einsum("ngip,ngop->goi", part.reshape(*x.shape[:3], -1),
                                         dy.reshape(*dy.shape[:3], -1))
        return made.reshape(-1, *made.shape[2:])


def is_valid(op, size, kernel, stride, pad, dilate):
    reach = (kernel - 1) * dilate + 1
    if pad >= reach or (kernel == 1 and dilate > 1):
        return False
    return size + 2 * pad >= reach if op == "Convolution" \
        else (size - 1) * stride + reach > 2 * pad


def cases():
    """Yields cases of one to three axes, one of which varies."""
    for op, axes in itertools.product(["Convolution", "Deconvolution"], [1, 2, 3]):
        for size, kernel, stride, pad, dilate in itertools.product(
                range(1, 7), range(1, 7), (1, 2, 3), range(4), (1, 2)):
            if not is_valid(op, size, kernel, stride, pad, dilate) \
                    or (op == "Deconvolution" and axes == 3 and dilate > 1):  # MXNet refuses it
                continue
            for at in {0, axes - 1}:
                def one(varied, other, at=at, axes=axes):
                    return tuple(varied if i == at else other for i in range(axes))
                for layer, dtype, request in itertools.product(LAYERS, TOLERANCE,
                                                               ["write", "add"]):
                    yield Case(op, one(size, 4), one(kernel, 3), one(stride, 1), one(dilate, 1),
                               one(pad, 1), layer, dtype, request)


def poison():
    """Fills the scratch memory of operators, and freed memory, with large numbers."""
    for dtype in TOLERANCE:
        large = 1e4 if dtype == "float16" else 1e16
        x, w = (nd.full((n, 32, size, size, size), large, dtype=dtype)
                for n, size in ((2, 6), (32, 3)))
        for array in (x, w):
            array.attach_grad()
        with autograd.record():
            y = nd.Convolution(x, w, kernel=(3, 3, 3), num_filter=32, no_bias=True)
        y.backward(nd.full(y.shape, large, dtype=dtype))
    freed = [nd.full(2 ** n, 1e30) for n in range(6, 18)]
    nd.waitall()
    del freed


def main():
    rng, failed, count = np.random.default_rng(0), [], 0
    part, parts = map(int, os.environ.get("PART", "0/1").split("/"))
    for count, case in enumerate(cases()):
        if count % 100 == 0:
            poison()
        if count % parts == part and not case.error(rng) < TOLERANCE[case.dtype]:
            failed.append(case)
    print(f"{count + 1} cases, {len(failed)} failed")
    for case in failed[:20]:
        print(case)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
