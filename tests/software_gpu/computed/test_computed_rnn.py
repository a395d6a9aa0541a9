"""Recurrent layers give the same results on a GPU as on a CPU. `make -C tests gpu` runs these tests
with cuDNN 8, and with cuDNN 9 by its newer functions."""
import os

import mxnet as mx
import numpy as np
import pytest
from rnn_cases import CASES, HIDDEN, INPUT, Case, difference, drawn, operator, results, unrolled

GPU = mx.gpu(0)
CUDNN_9 = os.environ["RECORDING_GPU_CUDNN"] >= "9"


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float16", 6e-3),
                                              ("float64", 1e-5)])
@pytest.mark.parametrize("case", [c for c in CASES if not (c.clip and CUDNN_9)], ids=str)
def test_layer_matches_cpu(case, dtype, bound, calls):
    assert difference(case, GPU, dtype) < bound
    called = {call.name for call in calls() if call.name.startswith("cudnnRNN")}
    assert called == ({"cudnnRNNForward", "cudnnRNNBackwardData_v8", "cudnnRNNBackwardWeights_v8"}
                      if CUDNN_9 else {"cudnnRNNForwardTrainingEx", "cudnnRNNBackwardDataEx",
                                       "cudnnRNNBackwardWeightsEx"})


@pytest.mark.skipif(not CUDNN_9, reason="cuDNN 8 runs what MXNet selects")
@pytest.mark.parametrize(("settings", "persistent"), [
    ({}, True), ({"num_layers": 2}, True), ({"state_size": 300}, False), ({"mode": "gru"}, False),
    ({"state_size": 1088}, False), ({"state_size": 192}, False), ({"batch": 65}, False),
    ({"bidirectional": True}, False), ({"dtype": "float32"}, False)])
def test_persistent_algorithm_runs_lstms_for_which_it_is_fast(settings, persistent, calls):
    settings = {"mode": "lstm", "state_size": 256, "num_layers": 1, **settings}
    dtype, size = settings.pop("dtype", "float16"), settings["state_size"]
    batch, ways = settings.pop("batch", 64), 1 + settings.get("bidirectional", False)
    gates = 4 if settings["mode"] == "lstm" else 3
    weights = sum(ways * gates * size * (size + 2 + (size if i else 8))
                  for i in range(settings["num_layers"]))
    state = (settings["num_layers"] * ways, batch, size)
    shapes = [(1, batch, 8), (weights,), state, *([state] if gates == 4 else [])]
    mx.nd.RNN(*(mx.nd.zeros(shape, dtype=dtype, ctx=GPU) for shape in shapes), **settings)
    call, = (call for call in calls() if call.name == "cudnnRNNForward")
    assert call.record["algorithm"] == int(persistent)


@pytest.mark.skipif(not CUDNN_9, reason="cuDNN 8 clips cells")
def test_cudnn_9_refuses_clipped_cells():
    with pytest.raises(mx.MXNetError, match="cuDNN 9 does not clip the cells of LSTMs"):
        results(Case("lstm", clip=(-.2, .1)), GPU)
    results(Case("lstm"), GPU)


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_relu"])
def test_unrolled_layer_is_mxnets(mode):
    case = Case(mode, 2, 2)
    pairs = zip(results(case, mx.cpu()), results(case, mx.cpu(), run=unrolled))
    assert all(np.allclose(one, other, atol=1e-5) for one, other in pairs)


@pytest.mark.parametrize("case", [Case("gru", 2, 2),
                                  Case("lstm", 2, 1, 2, None if CUDNN_9 else (-.2, .1), (1, 5, 2))],
                         ids=str)
def test_prediction_matches_training(case):
    inputs = [mx.nd.array(array, ctx=GPU) for array in drawn(case)[0]]
    with mx.autograd.train_mode():
        training = operator(case, *inputs)
    for one, other in zip(training, operator(case, *inputs)):
        assert np.array_equal(one.asnumpy(), other.asnumpy())


def test_dropout_is_between_layers_and_in_training_only():
    random = np.random.RandomState(0)
    count = sum(4 * HIDDEN * (width + HIDDEN + 2) for width in (INPUT, HIDDEN))
    arrays = [random.randn(5, 3, INPUT), random.randn(count), np.zeros((2, 3, HIDDEN)),
              np.zeros((2, 3, HIDDEN))]

    def outputs(context, p):
        inputs = [mx.nd.array(array, ctx=context) for array in arrays]
        made = mx.nd.RNN(*inputs, mode="lstm", state_size=HIDDEN, num_layers=2, p=p,
                         state_outputs=True)
        return [array.asnumpy() for array in made]

    plain = outputs(mx.cpu(), 0)
    for one, other in zip(outputs(GPU, 0.5), plain):
        np.testing.assert_allclose(one, other, atol=1e-6)
    with mx.autograd.train_mode():
        dropped = outputs(GPU, 0.5)
    np.testing.assert_allclose(dropped[1][0], plain[1][0], atol=1e-6)  # the first layer's state
    assert not np.allclose(dropped[1][1], plain[1][1], atol=1e-3)


@pytest.mark.parametrize(("dtype", "allowed", "math"), [
    ("float16", "1", "TENSOR_OP"), ("float16", "0", "DEFAULT"), ("float16", "False", "DEFAULT"),
    ("float32", "1", "DEFAULT")])
def test_float16_runs_on_tensor_cores_of_cudnn_9_if_the_setting_allows(dtype, allowed, math,
                                                                      monkeypatch, calls):
    monkeypatch.setenv("MXNET_CUDA_ALLOW_TENSOR_CORE", allowed)
    results(Case("lstm"), GPU, dtype)
    assert {call.record["math"] for call in calls()
            if call.name.startswith("cudnnRNN")} == {math if CUDNN_9 else "DEFAULT"}
