"""Every Gluon block with parameters: float16 gradients of parameters and data match float32's for
the same rounded values."""
import inspect
from functools import lru_cache, partial

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.graph.graph import Graph
from gluon_amp.graph.operators import OPERATORS
from mxnet import autograd, gluon, nd
from mxnet.gluon import contrib, nn, rnn
from mxnet.operator import get_operator_arguments
from networks import Calling, ready, unrolled
from trainers import recorded


def between(block, last):
    """A block between operators that halve and double, so that MXNet may overwrite inputs with
    results, and gradients with gradients."""
    return Calling(lambda F, x, block: block(x * 0.5) if last else block(x * 0.5) * 2, block)


def cell(made):
    """Three steps of a recurrent cell."""
    return unrolled(made, 3)


def convolving_cell(name, size):
    make = getattr(contrib.rnn, name)
    return cell(make((4, *size), 5, i2h_kernel=3, h2h_kernel=3, i2h_pad=1))


WORDS, LINE, IMAGE, VIDEO = (2, 5), (2, 4, 7), (2, 4, 6, 6), (2, 4, 4, 5, 5)
BLOCKS = {
    "Dense": (lambda: nn.Dense(6), (3, 8)),
    "Embedding": (lambda: nn.Embedding(9, 6), WORDS),
    "BatchNorm": (lambda: nn.BatchNorm(), IMAGE),
    "BatchNormReLU": (lambda: nn.BatchNormReLU(), IMAGE),
    "SyncBatchNorm": (lambda: contrib.nn.SyncBatchNorm(num_devices=1), IMAGE),
    "InstanceNorm": (lambda: nn.InstanceNorm(), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(), LINE),
    "GroupNorm": (lambda: nn.GroupNorm(2), IMAGE),
    "Conv1D": (lambda: nn.Conv1D(6, 3), LINE),
    "Conv2D": (lambda: nn.Conv2D(6, 3, groups=2), IMAGE),
    "Conv3D": (lambda: nn.Conv3D(6, 3), VIDEO),
    "Conv1DTranspose": (lambda: nn.Conv1DTranspose(6, 3), LINE),
    "Conv2DTranspose": (lambda: nn.Conv2DTranspose(6, 3, strides=2), IMAGE),
    "Conv3DTranspose": (lambda: nn.Conv3DTranspose(6, 3), VIDEO),
    "PReLU": (lambda: nn.PReLU(mx.init.Constant(2)), IMAGE),
    "PReLU of a slope for each channel": (lambda: nn.PReLU(mx.init.Normal(2), 4), IMAGE),
    "RNN": (lambda: rnn.RNN(6), (3, 2, 4)),
    "LSTM": (lambda: rnn.LSTM(6, 2, bidirectional=True), (3, 2, 4)),
    "GRU": (lambda: rnn.GRU(6), (3, 2, 4)),
    "RNNCell": (lambda: cell(rnn.RNNCell(6)), (2, 3, 4)),
    "LSTMCell": (lambda: cell(rnn.LSTMCell(6)), (2, 3, 4)),
    "GRUCell": (lambda: cell(rnn.GRUCell(6)), (2, 3, 4)),
    "LSTMPCell": (lambda: cell(contrib.rnn.LSTMPCell(6, 5)), (2, 3, 4)),
    **{name: (partial(convolving_cell, name, size), (2, 3, 4, *size))
       for size in ((5,), (5, 5), (3, 3, 3))
       for name in (f"Conv{len(size)}D{kind}Cell" for kind in ("RNN", "LSTM", "GRU"))},
    "DeformableConvolution": (lambda: contrib.cnn.DeformableConvolution(6), IMAGE),
    "Convolution_v1": (lambda: Calling(  # which no block uses
        lambda F, x, **parameters: F.Convolution_v1(x, kernel=(3, 3), num_filter=6, **parameters),
        parameters={"weight": {"shape": (6, 4, 3, 3), "init": mx.init.Normal()},
                    "bias": {"shape": (6,), "init": mx.init.Normal()}}), IMAGE),
}
# MXNet 1.9.1 has no backward kernel for the first on a CPU, and does not pass statistics to the
# second outside of graphs.
# The third is an Embedding for plain blocks only.
NOT_HERE = {"_contrib_ModulatedDeformableConvolution", "BatchNorm_v1", "_contrib_SparseEmbedding"}
# Modifiers of other cells, containers, and plain blocks.
NO_PARAMETERS_OF_THEIR_OWN = """
    Block HybridBlock SymbolBlock Sequential HybridSequential Lambda HybridLambda Concurrent
    HybridConcurrent RecurrentCell HybridRecurrentCell SequentialRNNCell HybridSequentialRNNCell
    ModifierCell ZoneoutCell ResidualCell BidirectionalCell VariationalDropoutCell SparseEmbedding
    DropoutCell ModulatedDeformableConvolution
""".split()


def rounded(rng, shape):
    return nd.array(rng.standard_normal(shape).astype(np.float16))


@lru_cache(maxsize=None)
def gradients(name, policy, keep=()):
    """Gradients of parameters and of data that are not ids; and operators of the graph."""
    make, shape = BLOCKS[name]
    rng = np.random.default_rng(3)
    mx.random.seed(3)
    np.random.seed(3)
    # MXNet's float32 PReLU overwrites the output gradient before it reads it for the gradient of
    # the slope, unless the user gives the output gradient.
    exact = policy == "float32"
    net = ready(between(make(), last=exact), mx.init.Normal(0.5))
    x = nd.array(rng.integers(0, 9, shape) * 2) if shape == WORDS else rounded(rng, shape)
    with autograd.pause():
        head = rounded(rng, net(x).shape)
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data().astype("float16").astype("float32"))
    if policy != "float32":
        amp.convert(net, policy, keep=keep)
        x = x.astype("float16")  # so that all operators run in it
    if shape != WORDS:
        x.attach_grad()
    recorded(net, x).backward(head * 2 if exact else head)
    found = [p.grad().asnumpy().astype(np.float32) for p in net.collect_params().values()
             if p.grad_req != "null"]
    if shape != WORDS:
        found.append(x.grad.asnumpy().astype(np.float32))
    graph = [] if exact else Graph.read(net._cached_graph[1]).nodes()
    return found, {node.op for node in graph}


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "pure_float16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_match_float32(name, policy):
    assert_alike(gradients(name, policy)[0], gradients(name, "float32")[0],
                 steps=8 if name.endswith("Cell") else 4)


def assert_alike(found, expected, steps):
    """Within this number of float16 units of the largest."""
    assert len(expected) == len(found) > 0
    for wide, half in zip(expected, found):
        assert half.shape == wide.shape
        assert np.abs(half - wide).max() <= steps * 2 ** -11 * np.abs(wide).max()


def test_slope_gradient_of_float32_prelu_is_correct():
    assert_alike(gradients("PReLU", "float16", keep=nn.PReLU)[0],
                 gradients("PReLU", "float32")[0], steps=4)


def test_every_block_with_parameters_is_tested():
    blocks = {name for module in (nn, rnn, contrib.nn, contrib.rnn, contrib.cnn)
              for name, cls in vars(module).items()
              if inspect.isclass(cls) and issubclass(cls, gluon.Block)}
    without = {name for name in blocks if name.startswith(("Global", "Max", "Avg", "Pixel"))}
    without |= set("Dropout Flatten ReflectionPad2D Activation LeakyReLU ELU SELU Swish GELU "
                   "Identity".split())
    assert blocks - without - set(NO_PARAMETERS_OF_THEIR_OWN) <= set(BLOCKS)


def test_every_operator_with_parameters_is_tested():
    takes = {name for name in sorted(set(OPERATORS) - {"CuDNNBatchNorm"})  # not in a CPU build
             if {"weight", "gamma", "parameters"} & set(get_operator_arguments(name).names)
             and "quantized" not in name and "update" not in name}
    tried = set().union(*(gradients(name, "float16")[1] for name in BLOCKS))
    assert takes - NOT_HERE <= tried
