"""Each operator of the table runs forward and backward on a GPU in the type of the table."""
import mxnet as mx
import pytest
from operator_cases import CALLED, NOT_CALLED, Alone, cases
from software_gpu import recording
from steps import GPU, calls_of

# MXNet's float32 kernels do not run them on a GPU either.
NOT_ON_GPUS = {"_contrib_BatchNormWithReLU", "_image_adjust_lighting", "_image_flip_left_right",
               "_image_flip_top_bottom", "_contrib_RROIAlign", "khatri_rao"}
# The cases have no shapes for them.
NO_CASE = {"_contrib_hawkesll", "_npi_pinv", "_npi_tensorinv", "_npi_tensorsolve"}
# MXNet checks indices or percentiles that it reads from the GPU. Memory that no kernel has written
# holds anything.
CHECKED = {"gather_nd", "scatter_nd", "_npi_percentile"}
# Gradients that MXNet sums in float16: docs/gpu.md. The first three without compensation.
ADD_IN_HALF = {
    "Embedding", "_contrib_SparseEmbedding", "take",
    "broadcast_axis", "broadcast_like", "broadcast_to", "repeat", "tile",
    *(f"broadcast_{name}" for name in "add sub mul div mod maximum minimum".split()),
    *(f"_npi_{name}" for name in "add subtract multiply true_divide mod arctan2 copysign".split())}


def attempt(run):
    """The error of a call, or None."""
    try:
        run()
    except (mx.MXNetError, ValueError) as error:
        return error
    return None


def in_float32(name):
    """A case that runs in MXNet's float32, and whether its backward pass runs."""
    for attributes, inputs in cases(name):
        alone = Alone(name, attributes, inputs, None, GPU)
        before = recording.violations()
        if attempt(alone.forward) is None:
            return (attributes, inputs), attempt(alone.backward) is None \
                and recording.violations() == before
    return None, False


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
@pytest.mark.parametrize("name", CALLED)
def test_operator_runs_if_it_does_in_float32(name, policy):
    if name in CHECKED:
        pytest.skip("MXNet checks numbers that no kernel computes here")
    with mx.util.np_shape(name.startswith("_np")):
        case, goes_back = in_float32(name)
        assert (case is None) == (name in NOT_ON_GPUS | NO_CASE)
        if case is None:
            return
        alone = Alone(name, *case, policy, GPU)
        calls = calls_of(alone.forward)
        if goes_back:
            calls += calls_of(alone.backward)
    in_half = [str(call) for call in calls if call.adds_in_half]
    assert name in ADD_IN_HALF or not in_half


def test_operators_not_called_are_in_the_table():
    import re

    from gluon_amp.graph.operators import OPERATORS
    for pattern in NOT_CALLED.values():
        assert any(re.fullmatch(pattern, name) for name in OPERATORS), pattern


@pytest.mark.parametrize("name", ["batch_dot", "_npi_matmul"])
def test_batched_products_add_in_float32_unless_policy_says_float16(name):
    import gluon_amp as amp
    with mx.util.np_shape(name.startswith("_np")):
        case, _ = in_float32(name)
        for batched, sums in (("float32", "float"), ("float16", "half")):
            policy = amp.Policy("mine", parameter="float16", compute="float16", batched=batched)
            alone = Alone(name, *case, policy, GPU)
            calls = calls_of(alone.forward) + calls_of(alone.backward)
            assert {call.sums for call in calls if call.is_product} == {sums}
