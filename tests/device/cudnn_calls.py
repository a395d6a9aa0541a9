"""Measures cuDNN's functions alone, in float16: python cudnn_calls.py ROWS [--small]

Batch norms by layout and function, also with a fused ReLU and addition, whose results are compared
with those of separate operators; gradients of biases; the fastest algorithms of convolutions;
LSTMs by algorithm, compared with the first. A call runs STEPS times on one stream. --small has the
sizes of a software GPU.
"""
import ctypes
import sys
import time
from contextlib import contextmanager

import gluon_amp  # noqa: F401  (before mxnet)
import mxnet as mx
from gluon_amp.cuda import load
from mxnet import nd
from mxnet.base import _LIB, check_call
from rows import add

SMALL = "--small" in sys.argv
GPU, BATCH, STEPS = mx.gpu(0), 2 if SMALL else 128, 2 if SMALL else 20
NCHW, NHWC, FLOAT, HALF, SPATIAL, PERSISTENT = 0, 1, 0, 2, 1, 2  # cuDNN's numbers
SUMS_IN_FLOAT, HALF_OF_BLAS = 68, 2  # cuBLAS's
RELU, CROSS_CORRELATION, TENSOR_OP = 1, 1, 1
OPERATIONS = ("batch norm", "with ReLU", "with addition and ReLU")
# channels, pixels
NORMS = [(8, 4)] if SMALL else [(64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14),
                                (1024, 14), (512, 7), (2048, 7)]
BIASES = [(8, 4)] if SMALL else [(64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7)]
# inputs, outputs, pixels, kernel, stride
CONVOLUTIONS = [(8, 8, 4, 3, 1)] if SMALL else [
    (4, 64, 224, 7, 2), (64, 64, 56, 3, 1), (64, 256, 56, 1, 1), (256, 64, 56, 1, 1),
    (128, 128, 28, 3, 1), (256, 512, 56, 1, 2), (256, 256, 14, 3, 1), (512, 512, 7, 3, 1),
    (512, 2048, 7, 1, 1)]

# layers, steps, batch, states
LSTMS = [(1, 3, 2, 8)] if SMALL else [(2, 64, 64, 1024), (1, 64, 64, 1024), (2, 64, 64, 512),
                                      (2, 35, 32, 256), (2, 35, 20, 650)]
ALGORITHMS = {"standard": 0, "persistent": 1, "persistent, few states": 3}
LSTM, DOUBLE_BIAS, PACKED, ADD = 2, 2, 1, 0


class Result(ctypes.Structure):
    """cudnnConvolutionFwdAlgoPerf_t, and those of gradients."""
    _fields_ = [("algorithm", ctypes.c_int), ("status", ctypes.c_int), ("ms", ctypes.c_float),
                ("bytes", ctypes.c_size_t), ("determinism", ctypes.c_int), ("math", ctypes.c_int),
                ("reserved", ctypes.c_int * 3)]


def library(needed, otherwise):
    choice = load.prepared and load.prepared.choice
    return ctypes.CDLL(str(choice.paths.get(needed, otherwise) if choice else needed))


CUDNN, CUDART = library("libcudnn.so.8", "libcudnn.so.9"), ctypes.CDLL("libcudart.so.11.0")
BLAS = library("libcublas.so.11", "libcublas.so.11")
CUDNN.cudnnGetErrorString.restype = ctypes.c_char_p
ONE, ZERO = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
EPSILON = ctypes.c_double(1e-5)


class Failed(Exception):
    pass


def call(name, *arguments):
    status = getattr(CUDNN, name)(*arguments)
    if status:
        raise Failed(f"{name}: {CUDNN.cudnnGetErrorString(status).decode()}")


@contextmanager
def row(path, **facts):
    """A row of facts, to which `with` adds more, or the error of a call."""
    try:
        yield facts
    except Failed as error:
        facts["error"] = str(error)
    add(path, **facts)


def created(kind, setter="", *values):
    made = ctypes.c_void_p()
    call(f"cudnnCreate{kind}Descriptor", ctypes.byref(made))
    if setter:
        call(setter, made, *values)
    return made


def tensor(layout, n, c, h, w, dtype=HALF):
    return created("Tensor", "cudnnSetTensor4dDescriptor", layout, dtype, n, c, h, w)


def pointer(array):
    found = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(found)))
    return found


def drawn(count, dtype="float16"):
    return nd.random.normal(shape=(count,), ctx=GPU).astype(dtype)


def milliseconds(run):
    for _ in range(3):
        run()
    CUDART.cudaDeviceSynchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        run()
    if CUDART.cudaDeviceSynchronize():
        raise Failed("cudaDeviceSynchronize")
    return 1e3 * (time.perf_counter() - begin) / STEPS


class Norm:
    """Arrays and descriptors of a batch norm of BATCH x channels x pixels x pixels."""

    def __init__(self, handle, channels, pixels, shape, layout, operation=None):
        """`operation`: one of OPERATIONS, by the functions with a workspace; None: by the others,
        a batch norm alone."""
        self.handle, self.operation = handle, operation
        count, self.data = BATCH * channels * pixels ** 2, tensor(layout, *shape)
        self.parameters = created("Tensor")
        call("cudnnDeriveBNTensorDescriptor", self.parameters, self.data, SPATIAL)
        self.arrays = {name: drawn(count) for name in ("x", "z", "dy")}
        self.arrays.update((name, nd.zeros(count, ctx=GPU, dtype="float16"))
                           for name in ("y", "dz", "dx"))
        self.arrays.update((name, nd.ones(channels, ctx=GPU)) for name in (
            "scale", "bias", "running_mean", "running_variance", "mean", "inverse", "dscale",
            "dbias"))
        self.activation = created("Activation", "cudnnSetActivationDescriptor", RELU, 0,
                                  ctypes.c_double(0)) if operation else None
        self.z = self.data if operation == 2 else None
        if operation is not None:
            self.forward_bytes, self.backward_bytes, self.reserve_bytes = self.sizes()
            self.arrays["work"] = nd.zeros(max(self.forward_bytes, self.backward_bytes, 1), ctx=GPU,
                                           dtype="uint8")
            self.arrays["reserve"] = nd.zeros(max(self.reserve_bytes, 1), ctx=GPU, dtype="uint8")
        nd.waitall()
        self.at = {name: pointer(array) for name, array in self.arrays.items()}

    def sizes(self):
        sizes = [ctypes.c_size_t() for _ in range(3)]
        first, d = (self.handle, PERSISTENT, self.operation), self.data
        y = d if self.operation else None
        call("cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize", *first, d, self.z, d,
             self.parameters, self.activation, ctypes.byref(sizes[0]))
        call("cudnnGetBatchNormalizationBackwardExWorkspaceSize", *first, d, y, d, self.z, d,
             self.parameters, self.activation, ctypes.byref(sizes[1]))
        call("cudnnGetBatchNormalizationTrainingExReserveSpaceSize", *first, self.activation, d,
             ctypes.byref(sizes[2]))
        return [size.value for size in sizes]

    def forward(self):
        at, d = self.at, self.data
        last = (self.parameters, at["scale"], at["bias"], ctypes.c_double(0.1), at["running_mean"],
                at["running_variance"], EPSILON, at["mean"], at["inverse"])
        if self.operation is None:
            call("cudnnBatchNormalizationForwardTraining", self.handle, PERSISTENT, ONE, ZERO, d,
                 at["x"], d, at["y"], *last)
        else:
            call("cudnnBatchNormalizationForwardTrainingEx", self.handle, PERSISTENT,
                 self.operation, ONE, ZERO, d, at["x"], self.z, self.z and at["z"], d, at["y"],
                 *last, self.activation, at["work"], ctypes.c_size_t(self.forward_bytes),
                 at["reserve"], ctypes.c_size_t(self.reserve_bytes))

    def backward(self):
        at, d = self.at, self.data
        scales = (ONE, ZERO, ONE, ZERO)
        if self.operation is None:
            call("cudnnBatchNormalizationBackward", self.handle, PERSISTENT, *scales, d, at["x"], d,
                 at["dy"], d, at["dx"], self.parameters, at["scale"], at["dscale"], at["dbias"],
                 EPSILON, at["mean"], at["inverse"])
        else:
            fused = self.operation > 0
            call("cudnnBatchNormalizationBackwardEx", self.handle, PERSISTENT, self.operation,
                 *scales, d, at["x"], d if fused else None, at["y"] if fused else None, d, at["dy"],
                 self.z, self.z and at["dz"], d, at["dx"], self.parameters, at["scale"],
                 at["bias"] if fused else None, at["dscale"], at["dbias"], EPSILON, at["mean"],
                 at["inverse"], self.activation, at["work"], ctypes.c_size_t(self.backward_bytes),
                 at["reserve"], ctypes.c_size_t(self.reserve_bytes))

    def inference(self):
        at, d = self.at, self.data
        call("cudnnBatchNormalizationForwardInference", self.handle, SPATIAL, ONE, ZERO, d, at["x"],
             d, at["y"], self.parameters, at["scale"], at["bias"], at["running_mean"],
             at["running_variance"], EPSILON)

    def difference(self, channels):
        """The largest differences of outputs and gradients from those of float32 operators."""
        of = {name: self.arrays[name].astype("float32").reshape((-1, channels))
              for name in ("x", "z", "dy")}
        self.forward()
        self.backward()
        CUDART.cudaDeviceSynchronize()
        names = ["x", "scale", "bias", *(["z"] if self.operation == 2 else [])]
        of.update((name, nd.ones(channels, ctx=GPU)) for name in ("scale", "bias"))
        for name in names:
            of[name].attach_grad()
        with mx.autograd.record():
            y = nd.BatchNorm(of["x"], of["scale"], of["bias"], *(nd.ones(channels, ctx=GPU)
                                                                for _ in range(2)), fix_gamma=False,
                             eps=1e-5)
            y = y + of["z"] if self.operation == 2 else y
            y = nd.relu(y) if self.operation else y
        y.backward(of["dy"])
        pairs = {"y": y, **{f"d{name}": of[name].grad for name in names}}
        return {name: float((self.arrays[name].astype("float32").reshape(expected.shape) - expected)
                            .abs().max().asscalar() / expected.abs().max().asscalar())
                for name, expected in pairs.items()}


def norms(path, handle):
    for channels, pixels in NORMS:
        rows = BATCH * pixels ** 2
        shapes = {"n x c x h x w": (BATCH, channels, pixels, pixels),
                  "1 x c x n x 1": (1, channels, rows, 1), "n x c x 1 x 1": (rows, channels, 1, 1)}
        ways = [("n x c x h x w", NCHW, None)]
        ways += [(name, NHWC, operation) for name in shapes for operation in (None, 0)]
        ways += [("n x c x h x w", NHWC, 1), ("n x c x h x w", NHWC, 2), ("1 x c x n x 1", NHWC, 1),
                 ("1 x c x n x 1", NHWC, 2)]
        for name, layout, operation in ways:
            function = OPERATIONS[operation] if operation is not None else "no workspace"
            with row(path, cudnn_norm=[BATCH, channels, pixels], shape=name,
                     layout="NHWC" if layout else "NCHW", function=function) as facts:
                norm = Norm(handle, channels, pixels, shapes[name], layout, operation)
                if operation is not None:
                    facts["bytes"] = [norm.forward_bytes, norm.backward_bytes, norm.reserve_bytes]
                facts["forward_ms"] = milliseconds(norm.forward)
                facts["backward_ms"] = milliseconds(norm.backward)
                if operation is None:
                    facts["inference_ms"] = milliseconds(norm.inference)
                if layout == NHWC and pixels < 30:
                    facts["difference"] = norm.difference(channels)


def biases(path, handle):
    """Gradients of biases: sums of rows by cuDNN, and by a product with ones; additions."""
    blas = ctypes.c_void_p()
    BLAS.cublasCreate_v2(ctypes.byref(blas))
    for channels, pixels in BIASES:
        rows = BATCH * pixels ** 2
        data, bias = drawn(rows * channels), nd.zeros(channels, ctx=GPU, dtype="float16")
        ones = nd.ones(rows, ctx=GPU, dtype="float16")
        nd.waitall()
        dy, b, of_ones = map(pointer, (data, bias, ones))

        def product(dy=dy, b=b, of_ones=of_ones, c=channels, rows=rows):
            if BLAS.cublasGemmEx(blas, 0, 0, c, 1, rows, ONE, dy, HALF_OF_BLAS, c, of_ones,
                                 HALF_OF_BLAS, rows, ZERO, b, HALF_OF_BLAS, c, SUMS_IN_FLOAT, -1):
                raise Failed("cublasGemmEx")

        ways = {"product with ones": product}
        for layout, name in ((NCHW, "NCHW"), (NHWC, "NHWC")):
            x, y = tensor(layout, BATCH, channels, pixels, pixels), tensor(layout, 1, channels, 1,
                                                                           1)
            ways[f"gradient, {name}"] = lambda x=x, y=y, dy=dy, b=b: call(
                "cudnnConvolutionBackwardBias", handle, ONE, x, dy, ZERO, y, b)
            ways[f"addition, {name}"] = lambda x=x, y=y, dy=dy, b=b: call(
                "cudnnAddTensor", handle, ONE, y, b, ONE, x, dy)
        for way, run in ways.items():
            with row(path, cudnn_bias=[BATCH, channels, pixels], way=way) as facts:
                facts["ms"] = milliseconds(run)


def convolutions(path, handle):
    for inputs, outputs, pixels, kernel, stride in CONVOLUTIONS:
        after = (pixels - 1) // stride + 1
        x = tensor(NHWC, BATCH, inputs, pixels, pixels)
        y = tensor(NHWC, BATCH, outputs, after, after)
        w = created("Filter", "cudnnSetFilter4dDescriptor", HALF, NHWC, outputs, inputs, kernel,
                    kernel)
        convolution = created("Convolution", "cudnnSetConvolution2dDescriptor", kernel // 2,
                              kernel // 2, stride, stride, 1, 1, CROSS_CORRELATION, FLOAT)
        call("cudnnSetConvolutionMathType", convolution, TENSOR_OP)
        for part, arguments in (("Forward", (x, w, convolution, y)),
                                ("BackwardData", (w, y, convolution, x)),
                                ("BackwardFilter", (x, y, convolution, w))):
            count, found = ctypes.c_int(), (Result * 8)()
            with row(path, cudnn_convolution=[inputs, outputs, pixels, kernel, stride],
                     part=part) as facts:
                call(f"cudnnFindConvolution{part}Algorithm", handle, *arguments, 8,
                     ctypes.byref(count), found)
                facts["fastest"] = [{"algorithm": one.algorithm, "ms": round(one.ms, 4),
                                     "MiB": one.bytes >> 20, "math": one.math}
                                    for one in found[:count.value] if not one.status][:3]


class Lstm:
    """An LSTM, which has as many inputs as states."""

    def __init__(self, handle, layers, steps, batch, states, algorithm):
        self.handle, self.data = handle, created("RNNData")
        dropout, nothing = created("Dropout"), ctypes.c_void_p()
        call("cudnnSetDropoutDescriptor", dropout, handle, ctypes.c_float(0), nothing,
             ctypes.c_size_t(0), ctypes.c_ulonglong(0))
        self.rnn = created("RNN", "cudnnSetRNNDescriptor_v8", algorithm, LSTM, DOUBLE_BIAS, 0, 0,
                           HALF, FLOAT, TENSOR_OP, states, states, states, layers, dropout, 0)
        call("cudnnSetRNNDataDescriptor", self.data, HALF, PACKED, steps, batch, states,
             (ctypes.c_int * batch)(*[steps] * batch), nothing)
        self.state = created("Tensor", "cudnnSetTensorNdDescriptor", HALF, 3,
                             (ctypes.c_int * 3)(layers, batch, states),
                             (ctypes.c_int * 3)(batch * states, states, 1))
        sizes = self.sizes = [ctypes.c_size_t() for _ in range(3)]
        call("cudnnGetRNNWeightSpaceSize", handle, self.rnn, ctypes.byref(sizes[0]))
        call("cudnnGetRNNTempSpaceSizes", handle, self.rnn, 1, self.data, ctypes.byref(sizes[1]),
             ctypes.byref(sizes[2]))
        mx.random.seed(0)
        count, weights = steps * batch * states, sizes[0].value // 2
        self.arrays = {"x": drawn(count), "dy": drawn(count), "w": drawn(weights) * 0.02}
        for name, length in {"y": count, "dx": count, "dw": weights,
                             "h": layers * batch * states}.items():
            self.arrays[name] = nd.zeros(length, ctx=GPU, dtype="float16")
        for name, size in zip(("work", "reserve"), sizes[1:]):
            self.arrays[name] = nd.zeros(max(size.value, 1), ctx=GPU, dtype="uint8")
        nd.waitall()
        self.at = {name: pointer(array) for name, array in self.arrays.items()}

    def last(self, weights):
        return (self.sizes[0], self.at[weights], self.sizes[1], self.at["work"], self.sizes[2],
                self.at["reserve"])

    def forward(self):
        at, h = self.at, self.at["h"]
        call("cudnnRNNForward", self.handle, self.rnn, 1, None, self.data, at["x"], self.data,
             at["y"], self.state, h, None, self.state, h, None, *self.last("w"))

    def backward(self):
        at, h = self.at, self.at["h"]
        call("cudnnRNNBackwardData_v8", self.handle, self.rnn, None, self.data, at["y"], at["dy"],
             self.data, at["dx"], self.state, h, None, None, self.state, h, None, None,
             *self.last("w"))
        call("cudnnRNNBackwardWeights_v8", self.handle, self.rnn, ADD, None, self.data, at["x"],
             self.state, h, self.data, at["y"], *self.last("dw"))

    def results(self):
        self.arrays["dw"][:] = 0
        nd.waitall()
        self.forward()
        self.backward()
        CUDART.cudaDeviceSynchronize()
        return {name: self.arrays[name].asnumpy().astype("float32") for name in ("y", "dx", "dw")}


def lstms(path, handle):
    for shape in LSTMS:
        standard = {}
        for name, algorithm in ALGORITHMS.items():
            with row(path, cudnn_lstm=list(shape), algorithm=name) as facts:
                lstm = Lstm(handle, *shape, algorithm)
                found = lstm.results()
                standard = standard or found
                facts["difference"] = {key: float(abs(found[key] - standard[key]).max()
                                                  / abs(standard[key]).max()) for key in found}
                facts["forward_ms"] = milliseconds(lstm.forward)
                facts["backward_ms"] = milliseconds(lstm.backward)
                begin = time.perf_counter()
                lstm.forward()
                lstm.backward()
                facts["host_ms"] = 1e3 * (time.perf_counter() - begin)
                facts["MiB"] = [size.value >> 20 for size in lstm.sizes]


def main(path):
    handle = ctypes.c_void_p()
    nd.ones(1, ctx=GPU).wait_to_read()
    call("cudnnCreate", ctypes.byref(handle))
    for part in (norms, lstms, biases, convolutions):
        begin = time.perf_counter()
        part(path, handle)
        print(part.__name__, f"{time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
