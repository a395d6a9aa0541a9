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


def run(symbol, arrays, heads=None, training=True, types=None):
    """Outputs and gradients of a symbol whose variables have the arrays' types.

    The symbol runs as a CPU graph of those types. `heads` are the outputs'
    gradients; without them there are none. Returns (outputs, {name: gradient}).
    """
    types = types or {name: array.dtype.name for name, array in arrays.items()}
    rewritten = build(Graph.read(symbol), types).symbol()
    names = rewritten.list_inputs()
    values = {name: mx.nd.array(arrays[name], dtype=arrays[name].dtype) for name in names}
    op = as_function(rewritten)
    aux = set(rewritten.list_auxiliary_states())
    for name, value in values.items():
        if name not in aux and value.dtype in (np.float16, np.float32):
            value.attach_grad()
    with mx.autograd.record(train_mode=training):
        outputs = op(*(values[name] for name in names))
        outputs = outputs if isinstance(outputs, list) else [outputs]
    gradients = {}
    if heads is not None:
        mx.autograd.backward(outputs, [mx.nd.array(h, dtype=h.dtype) for h in heads])
        gradients = {n: v.grad.asnumpy() for n, v in values.items() if v.grad is not None}
    mx.nd.waitall()
    for name in aux:
        arrays[name][...] = values[name].asnumpy()
    return [o.asnumpy() for o in outputs], gradients


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
    values = {n: mx.nd.array(a, dtype="float32" if a.dtype == np.float16 else a.dtype)
              for n, a in arrays.items()}
    for value in values.values():
        value.attach_grad()
    names = symbol.list_inputs()
    op = as_function(symbol)
    with mx.autograd.record():
        outputs = op(*(values[name] for name in names))
        outputs = outputs if isinstance(outputs, list) else [outputs]
    mx.autograd.backward(outputs, [mx.nd.array(h, dtype="float32") for h in heads])
    return ([o.asnumpy() for o in outputs], {n: v.grad.asnumpy() for n, v in values.items()})


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
