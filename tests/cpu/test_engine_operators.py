"""Each of MXNet's operators gives float32's results for float16 or bfloat16 values, rounded once,
and float32's gradients for the rounded results."""
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu.bfloat16 import is_bfloat16
from halves import as_bfloat16, bfloat16_bits, bfloat16_ulps, halves, ulps
from mxnet import autograd, gluon, nd
from mxnet._ctypes.ndarray import _imperative_invoke
from operator_calls import (
    CASES,
    F16,
    F32,
    HERE,
    HIDDEN,
    NO_GRADIENT,
    NOT_HERE,
    OPERATORS,
    candidates,
    handle,
)

pytestmark = [pytest.mark.sanitize, pytest.mark.isa]


class Call:
    """An operator called outside of graphs; `low` is the type that replaces float16."""

    def __init__(self, name, attributes, inputs, low):
        self.low = low
        self.handle = handle(name).value
        wanted = low if low == "bfloat16" else "float16"
        self.attributes = {k: wanted if v == "float16" else v for k, v in attributes.items()}
        self.inputs = [nd.array(x, dtype=low if x.dtype == F16 else x.dtype) for x in inputs]

    def run(self):
        made = _imperative_invoke(self.handle, self.inputs, list(self.attributes),
                                  [str(v) for v in self.attributes.values()], None, False, False)
        return made if isinstance(made, list) else [made]

    def forward(self):
        return [in_numpy(o) for o in self.run()]

    def gradients(self, heads, results=None):
        for x in self.inputs:
            if x.dtype in (F16, F32) or is_bfloat16(x.dtype):
                x.attach_grad()
        with autograd.record():
            outputs = self.run()
        for output, result in zip(outputs, results or ()):
            nd.array(values(result), dtype=output.dtype).copyto(output)
        autograd.backward(outputs, [nd.array(h, dtype=o.dtype) for h, o in zip(heads, outputs)])
        return [None if x.grad is None else in_numpy(x.grad) for x in self.inputs]


def in_numpy(array):
    """The values of an array, or the bits of bfloat16."""
    numbers = array.asnumpy()
    return bfloat16_bits(numbers) if is_bfloat16(array.dtype) else numbers


def values(made):
    """The values of a result of `in_numpy`."""
    if made.dtype != np.uint16:
        return made
    return np.asarray(made.astype(np.uint32) << np.uint32(16), np.uint32).view(F32)


def steps(ours, theirs):
    assert ours.shape == theirs.shape
    if ours.dtype == np.uint16:
        return bfloat16_ulps(values(ours), theirs).max(initial=0)
    if ours.dtype != F16:
        assert np.array_equal(ours, theirs.astype(ours.dtype), equal_nan=ours.dtype.kind == "f")
        return 0
    with np.errstate(over="ignore"):
        return ulps(ours, theirs.astype(F16)).max(initial=0)


def assert_close(ours, theirs, tolerance):
    np.testing.assert_allclose(values(ours).astype(float), theirs, rtol=tolerance,
                               atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", HERE)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_operator_matches_float32_rounded_once(name, low, rng):
    called = has_gradient = False
    with mx.util.np_shape(name.startswith("_np")):
        for attributes, inputs in candidates(name, rng):
            if low == "bfloat16":  # its values of this size are exact in float16
                inputs = [as_bfloat16(x).astype(F16) if x.dtype == F16 else x for x in inputs]
            wide = Call(name, attributes, inputs, "float32")
            try:
                expected = wide.forward()
            except mx.MXNetError:
                continue  # these shapes are not supported
            called = True
            results = Call(name, attributes, inputs, low).forward()
            assert max(map(steps, results, expected), default=0) == 0
            heads = [as_bfloat16(halves(rng, *r.shape)) for r in results]
            try:
                expected = wide.gradients(heads, None if name in HIDDEN else results)
                nd.waitall()
            except mx.MXNetError:
                continue
            has_gradient = True
            found = Call(name, attributes, inputs, low).gradients(heads)
            for ours, theirs in zip(found, expected):
                if ours is not None and name in HIDDEN:
                    assert_close(ours, theirs, HIDDEN[name] * (8 if low == "bfloat16" else 1))
                elif ours is not None:
                    assert steps(ours, theirs) == 0
    assert called, "MXNet takes none of the shapes: give it some in CASES, or a reason in NOT_HERE"
    assert has_gradient != any(re.fullmatch(p, name) for p in NO_GRADIENT.values())


def test_most_operators_are_called():
    assert len(HERE) > 400
    for pattern in [*NOT_HERE.values(), *NO_GRADIENT.values()]:
        assert any(re.fullmatch(pattern, name) for name in OPERATORS), pattern
    assert set(CASES) <= set(HERE)


ELEMENTWISE = ("hard_sigmoid relu sigmoid tanh softsign abs sign sin cos exp erf square cbrt "
               "arctan negative expm1 identity BlockGrad softmax reciprocal").split()


@pytest.mark.parametrize("policy", ["float16", "mixed_bfloat16", "float32 nodes"])
def test_gradient_read_by_two_operators_is_not_overwritten(policy):
    """In (f(x) + x) * 2, both f and the sum of gradients read the gradient of the sum."""
    def forward(F, x):
        rows = F.split(x, num_outputs=len(ELEMENTWISE), axis=0)
        return F.concat(*((getattr(F, name)(row) + row) * 2
                          for name, row in zip(ELEMENTWISE, rows)), dim=0)

    nets = [gluon.nn.HybridLambda(forward) for _ in range(2)]
    if policy == "float32 nodes":
        amp.convert(nets[1], keep=nets[1])
    else:
        amp.convert(nets[1], policy)
    grads = []
    for net in nets:
        x = nd.array([[-3, -0.5, 0.25, 0.5, 1.5, 2.75]] * len(ELEMENTWISE))
        x.attach_grad()
        with autograd.record():
            out = net(x.astype("float16") if policy == "float16" else x)
        out.backward()
        grads.append(x.grad.asnumpy())
    for name, found, exact in zip(ELEMENTWISE, grads[1], grads[0]):
        np.testing.assert_allclose(found, exact, rtol=0.02, atol=0.02, err_msg=name)
