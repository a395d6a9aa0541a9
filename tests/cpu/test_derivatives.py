"""The float16 and bfloat16 gradients of MXNet's operators are derivatives: they agree with
differences of MXNet's operator in float64, or in float32 where it takes no float64."""
import re

import mxnet as mx
import numpy as np
import pytest
from halves import as_bfloat16
from mxnet import autograd, nd
from operator_calls import F16, HERE, NO_GRADIENT, candidates, handle
from test_engine_operators import Call, values

pytestmark = pytest.mark.thorough

STEPS = {"float64": 1e-4, "float32": 2e-2}
UNITS = {"float16": 2 ** -11, "bfloat16": 2 ** -8}

# Gradients that are no derivatives, in MXNet's float32, too, by reason.
OTHERS = {
    "by definition": ".*Output|MakeLoss|make_loss|BlockGrad|_contrib_.*_ste",
    "of the first array only": "_contrib_box_decode|_np_atleast_[123]d|_npi_percentile",
    "of symmetric matrices": "_linalg_(potrf|syevd)|_npi_cholesky",
    "MXNet's has an error": "SoftmaxActivation|_image_flip_.*|_npi_where_[lr]scalar|"
        "_npi_(norm|rarctan2_scalar|rot90|std|var)",
}
HAS_TIES = ".*(max|min)(imum)?"  # derivatives of equal numbers have several definitions


class Wide(Call):
    """The operator in float64 or float32, as a function of its inputs."""

    def __init__(self, name, attributes, dtype):
        self.handle = handle(name).value
        self.attributes = {k: dtype if v == "float16" else v for k, v in attributes.items()}

    def __call__(self, inputs, heads):
        self.inputs = [nd.array(x, dtype=x.dtype) for x in inputs]
        with autograd.train_mode():
            outputs = self.forward()
        return sum((head * output.astype(np.float64)).sum()
                   for head, output in zip(heads, outputs))


def difference(function, inputs, i, direction, heads, step):
    """The derivative along a direction of one input, by a central difference."""
    def at(sign):
        moved = (inputs[i].astype(np.float64) + sign * step * direction).astype(inputs[i].dtype)
        return function([*inputs[:i], moved, *inputs[i + 1:]], heads)
    return (at(1) - at(-1)) / (2 * step)


def widest(name, attributes, inputs, heads):
    """The function in the widest type that MXNet supports, with its inputs and its step."""
    for dtype, step in STEPS.items():
        wide = [x.astype(dtype) if x.dtype == F16 else x for x in inputs]
        function = Wide(name, attributes, dtype)
        try:
            function(wide, heads)
        except mx.MXNetError:
            continue
        return function, wide, step
    return None


def has_ties(inputs):
    numbers = np.concatenate([x.ravel() for x in inputs])
    return len(np.unique(numbers)) < len(numbers)


@pytest.mark.parametrize("low", UNITS)
@pytest.mark.parametrize("name", [n for n in HERE if not any(
    re.fullmatch(p, n) for p in [*NO_GRADIENT.values(), *OTHERS.values()])])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_are_derivatives(name, low, rng):
    with mx.util.np_shape(name.startswith("_np")):
        for attributes, inputs in candidates(name, rng):
            if re.fullmatch(HAS_TIES, name) and has_ties(inputs):
                continue
            if low == "bfloat16":
                inputs = [as_bfloat16(x).astype(F16) if x.dtype == F16 else x for x in inputs]
            call = Call(name, attributes, inputs, low)
            try:
                heads = [as_bfloat16(rng.standard_normal(out.shape)) for out in call.forward()]
                gradients = call.gradients(heads)
                nd.waitall()
            except mx.MXNetError:
                continue  # MXNet does not support these shapes, or registers no gradient
            reference = widest(name, attributes, inputs, heads)
            for i, (x, gradient) in enumerate(zip(inputs, gradients)):
                if reference is None or gradient is None or x.dtype != F16:
                    continue
                function, wide, step = reference
                direction = rng.standard_normal(x.shape)
                expected, again = (difference(function, wide, i, direction, heads, step * part)
                                   for part in (1, 0.5))
                exact = values(gradient).astype(np.float64)
                size = np.linalg.norm(exact) * np.linalg.norm(direction)
                # a step beside a kink or a limit of the domain says nothing
                if np.isfinite([expected, again, size]).all() \
                        and abs(expected - again) < 1e-3 * (1 + abs(again)):
                    tolerance = 4 * UNITS[low] * size + 2 * abs(expected - again) + 1e-3
                    assert abs((exact * direction).sum() - again) < tolerance


def test_others_are_operators():
    for pattern in OTHERS.values():
        assert any(re.fullmatch(pattern, name) for name in HERE)
