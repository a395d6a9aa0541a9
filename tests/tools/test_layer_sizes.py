"""Layers whose sizes do not fit Tensor Cores are reported by name."""
import gluon_amp as amp
import mxnet as mx
import pytest
from gluon_amp.tools.layer_sizes import matrix_layers
from mxnet import nd
from mxnet.gluon import nn


def net():
    made = nn.HybridSequential(prefix="net_")
    with made.name_scope():
        made.add(nn.Conv2D(16, 3), nn.BatchNorm(), nn.Conv2D(24, 3, groups=2), nn.Flatten(),
                 nn.Dense(10))
    made.initialize()
    made(nd.zeros((1, 3, 8, 8)))
    return made


def found(block):
    shapes = {p.name: p.shape for p in block.collect_params().values()}
    return {layer.name: (layer.sizes, layer.fits)
            for layer in matrix_layers(block(mx.sym.var("data")), shapes)}


def test_layers_and_their_channels():
    layers = {"net_conv0_fwd": ((16, 3), False), "net_conv1_fwd": ((24, 16), True),
              "net_dense0_fwd": ((10, 384), False)}
    assert found(net()) == layers
    assert found(amp.convert(net())) == layers


def measured(block, *shape):
    """The only layer of a block for data of this shape."""
    symbol = block(mx.sym.var("data"))
    internals = symbol.get_internals()
    shapes = dict(zip(internals.list_outputs(), internals.infer_shape(data=shape)[1]))
    (layer,) = matrix_layers(symbol, shapes)
    return layer.sizes, layer.rows, layer.multiply_adds, layer.fits


@pytest.mark.parametrize(("block", "shape", "expected"), [
    (lambda: nn.Conv2D(16, 3, in_channels=8), (2, 8, 6, 6),
     ((16, 8), None, 2 * 16 * 4 * 4 * 8 * 3 * 3, True)),
    (lambda: nn.Conv2D(16, 3, groups=2, in_channels=8), (2, 8, 6, 6),
     ((16, 8), None, 2 * 16 * 4 * 4 * 4 * 3 * 3, True)),
    (lambda: nn.Conv2D(16, 3, in_channels=8, layout="NHWC"), (2, 6, 6, 8),
     ((16, 8), None, 2 * 16 * 4 * 4 * 8 * 3 * 3, True)),
    (lambda: nn.Conv2D(16, 3, groups=16, in_channels=16), (2, 16, 6, 6),
     ((1, 1), None, 2 * 16 * 4 * 4 * 3 * 3, False)),
    (lambda: nn.Conv2DTranspose(8, 4, 2, 1, in_channels=16), (1, 16, 4, 4),
     ((8, 16), None, 16 * 4 * 4 * 8 * 4 * 4, True)),
    (lambda: nn.Dense(32, in_units=16), (8, 16), ((32, 16), 8, 8 * 32 * 16, True)),
    (lambda: nn.Dense(32, in_units=16), (10, 16), ((32, 16), 10, 10 * 32 * 16, False)),
    (lambda: nn.Dense(32, in_units=16, flatten=False), (2, 4, 16),
     ((32, 16), 8, 8 * 32 * 16, True)),
])
def test_rows_and_multiply_adds_with_known_output_shapes(block, shape, expected):
    assert measured(block(), *shape) == expected
