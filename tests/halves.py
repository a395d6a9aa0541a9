"""Float16 for tests: runs one CPU graph, and expected results in numpy."""
from contextlib import contextmanager

import mxnet as mx
import numpy as np
from gluon_amp.cpu import library
from gluon_amp.formats import FORMATS
from gluon_amp.graph.build import build, cached_op
from gluon_amp.graph.graph import Graph


def as_function(symbol, flags=()):
    """A symbol as a function of the arrays of its variables in their order."""
    return cached_op(symbol, symbol.list_inputs(), {}, flags)[0]


class Op:
    """A graph of operators with its arrays, in float16 on a CPU or in MXNet's float32.

    The arrays keep gradients and states between calls; gradients to be added begin with ones.
    """

    def __init__(self, symbol, arrays, wide=False, request="write", flags=(), types=None):
        if not wide:
            types = types or {name: array.dtype.name for name, array in arrays.items()}
            symbol = build(Graph.read(symbol), types).symbol()
        self.op = as_function(symbol, flags)
        self.states, self.values = symbol.list_auxiliary_states(), {}
        for name in symbol.list_inputs():
            array = arrays[name]
            if wide and array.dtype == np.float16:
                array = array.astype(np.float32)
            self.values[name] = mx.nd.array(array, dtype=array.dtype)
            if name not in self.states and array.dtype in (np.float16, np.float32, np.float64):
                self.values[name].attach_grad(request)
                self.values[name].grad[:] = int(request == "add")

    def __getitem__(self, name):
        return self.values[name].asnumpy()

    def forward(self, training=True, recorded=False, seed=3):
        if seed is not None:
            mx.random.seed(seed)
        with mx.autograd.record(training) if recorded else \
                mx.autograd.train_mode() if training else mx.autograd.predict_mode():
            outputs = self.op(*self.values.values())
        return outputs if isinstance(outputs, list) else [outputs]

    def numbers(self, **kwargs):
        return [o.asnumpy() for o in self.forward(**kwargs)]

    def backward(self, outputs, heads, training=True, **kwargs):
        mx.autograd.backward(outputs, [mx.nd.array(h, dtype=o.dtype)
                                       for h, o in zip(heads, outputs)], train_mode=training,
                             **kwargs)

    def collected(self):
        """The gradients, by the names of their arrays."""
        return {n: v.grad.asnumpy() for n, v in self.values.items() if v.grad is not None}

    def gradients(self, heads, training=True):
        outputs = self.forward(training, recorded=True)
        self.backward(outputs, heads, training)
        return self.collected()


def run(symbol, arrays, heads=None, training=True, types=None):
    """Outputs and gradients of a symbol whose variables have the arrays' types.

    The symbol runs as a CPU graph of those types. `heads` are the outputs'
    gradients; without them there are none. Returns (outputs, {name: gradient}).
    """
    op = Op(symbol, arrays, types=types)
    outputs = op.forward(training, recorded=True, seed=None)
    if heads is not None:
        op.backward(outputs, heads)
    mx.nd.waitall()
    for name in op.states:
        arrays[name][...] = op[name]
    return [o.asnumpy() for o in outputs], op.collected() if heads is not None else {}


@contextmanager
def generic_code():
    """Disables dedicated kernels meanwhile."""
    mx.nd.waitall()
    library.table().use_generic_code(b"all")
    try:
        yield
        mx.nd.waitall()
    finally:
        library.table().use_generic_code(b"")


def stock(symbol, arrays, heads):
    """The same in MXNet's float32: outputs and gradients before any rounding."""
    op = Op(symbol, arrays, wide=True)
    outputs = op.forward(recorded=True, seed=None)
    op.backward(outputs, heads)
    return [o.asnumpy() for o in outputs], op.collected()


def halves(rng, *shape, scale=1.0):
    """Random float16 values."""
    return (rng.standard_normal(shape) * scale).astype(np.float16)


def ulps(a, b):
    """The distance of two float16 arrays in units of float16; NaN equals NaN."""
    def line(x):  # maps halves to integers in order
        bits = x.view(np.int16).astype(np.int32)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)
    a, b = np.asarray(a, np.float16), np.asarray(b, np.float16)
    both_nan = np.isnan(a) & np.isnan(b)
    return np.where(both_nan, 0, np.abs(line(a) - line(b)))


def as_bfloat16(x):
    """Float32 numbers, rounded to bfloat16."""
    return FORMATS["bfloat16"].round(np.asarray(x, np.float32))


def bfloat16_bits(x):
    """The upper halves of float32 numbers that are exact in bfloat16."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def bfloat16_ulps(a, b):
    """The distance of two float32 arrays in units of bfloat16 after rounding; NaN equals NaN."""
    def line(x):
        bits = as_bfloat16(x).view(np.int32)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits) >> 16
    return np.where(np.isnan(a) & np.isnan(b), 0, np.abs(line(a) - line(b)))


def assert_half(actual, expected, steps=0):
    """Checks that `actual` is float16 and within `steps` units of `expected`, rounded once."""
    assert actual.dtype == np.float16, actual.dtype
    assert actual.shape == expected.shape
    with np.errstate(over="ignore"):
        distance = ulps(actual, np.asarray(expected).astype(np.float16))
    worst = distance.max(initial=0)
    assert worst <= steps, (f"{worst} steps apart", actual.ravel()[distance.argmax()],
                            np.ravel(expected)[distance.argmax()])
