"""Networks train on a GPU with valid calls only, and steps make the same calls."""
import os

import networks
import numpy as np
import pytest
from software_gpu import recording
from steps import GPU, Training, calls_of, counted, layers, multiset, numbers, put, settled

TABLE = {**networks.ZOO, **networks.OTHERS}
del TABLE["while"]  # it reads values, which the recording GPU does not compute


def trained(name, policy):
    make, inputs = TABLE[name]
    return Training(make(), policy), inputs(np.random.default_rng(0))


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
@pytest.mark.parametrize("name", TABLE)
def test_network_trains_and_predicts_with_same_calls_each_step(name, policy):
    training, data = trained(name, policy)
    for _ in range(2):
        training.step(*data)
    steps = [calls_of(lambda: training.step(*data)) for _ in range(2)]
    assert multiset(steps[0]) == multiset(steps[1])
    assert counted(steps[1])["copies"] == 1 + (name == "plain")  # its block reads a mean
    training.net(*put(data))


@pytest.mark.parametrize("name", ["resnet18_v1", "encoder", "lstm"])
def test_pure_float16_runs(name):
    training, data = trained(name, "pure_float16")
    training.step(*data)


@pytest.mark.parametrize("name", ["resnet18_v1", "resnet50_v1", "vgg11", "mobilenetv2_0.25"])
def test_convolutional_products_run_in_float16_on_tensor_cores(name):
    training, data = trained(name, "float16")
    forward, _ = settled(training, *data)
    products = [call for call in forward if call.is_product]
    assert products
    assert {(c.factors, c.sums, c.on_tensor_cores) for c in products} == {("half", "float", True)}
    assert counted(forward)["casts"] <= 4  # of the data, the output, and their gradients


def test_cuda_graphs_replace_launches_of_static_passes(monkeypatch):
    """A capture forbids calls such as cudaMalloc, which would be refused."""
    monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", "1")
    training, data, launches = Training(layers(3)), numbers(4, 8, 6, 6), {}
    for _ in range(10):  # each of MXNet's two threads runs a graph once, then captures it
        calls = calls_of(lambda: training.backward(data))
        training.trainer.step(4)
        convolutions = sum(call.name.startswith("cudnnConvolution") for call in calls)
        launches[convolutions] = sum(call.name == "cudaGraphLaunch" for call in calls)
    assert launches[0] == 2  # forward and backward


@pytest.mark.parametrize("name", ["encoder", "interleaved"])
def test_attention_products_accumulate_in_float32(name):
    training, data = trained(name, "float16")
    forward, _ = settled(training, *data)
    products = [call for call in forward if call.is_product]
    assert {call.sums for call in products} == {"float"}
    scores = [call for call in products if "Batched" in call.name]
    # the other batched product reads a softmax, which is float32
    kinds = {"half", "float"} if name == "encoder" else {"half"}
    assert {call.factors for call in scores} == kinds


def test_recurrent_layers_use_tensor_cores_with_cudnn_9():
    training, data = trained("lstm", "float16")
    forward, _ = settled(training, *data)
    rnns = [call for call in forward if call.name.startswith("cudnnRNN")]
    math = "TENSOR_OP" if os.environ["RECORDING_GPU_CUDNN"] >= "9" else "DEFAULT"
    assert {(c.factors, c.sums, c.record["math"]) for c in rnns} == {("half", "float", math)}


def test_dropout_costs_as_in_float32_and_supports_repeated_backward():
    import mxnet as mx
    from gluon_amp import convert
    from mxnet import autograd
    from mxnet.gluon import nn
    net = nn.HybridSequential()
    net.add(nn.Dense(8, in_units=8), nn.Dropout(0.5), nn.Dense(8, in_units=8))
    net.initialize(ctx=GPU)
    convert(net)
    data = mx.nd.ones((4, 8), ctx=GPU)
    for _ in range(2):  # the first call traces
        with autograd.record():
            output = net(data)
    passes = [[str(call) for call in calls_of(lambda: output.backward(retain_graph=True))
               if call.is_launch and "Dropout" in call.operator] for _ in range(2)]
    assert passes[0] == passes[1]
    assert len(passes[0]) == 1
    assert "cudnnDropoutBackward" in passes[0][0]  # MXNet's second pass copies
    assert recording.violations() == 0
