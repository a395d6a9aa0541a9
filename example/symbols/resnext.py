"""ResNeXt as a symbol, in float32, or in float16 with hand-written casts.

Xie, Girshick, Dollar, Tu, He: "Aggregated Residual Transformations for Deep Neural Networks"
(2016). It is a ResNet, version 1, with grouped 3x3 convolutions.
"""
import mxnet as mx

from .layers import cast_data, conv, norm, pool, pool_all, relu, softmax
from .resnet import unit_v1

UNITS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def get_symbol(num_classes, num_layers=50, num_group=32, group_width=4, dtype="float32"):
    """Returns the network with its SoftmaxOutput.

    Args:
        num_layers: 50, 101 or 152.
        num_group: groups of each 3x3 convolution.
        group_width: channels of a group in the first stage; each next stage doubles it. The paper's
            32x4d is `num_group=32, group_width=4`.
        dtype: "float32" or "float16".
    """
    if num_layers not in UNITS:
        raise ValueError("unknown num_layers. Valid: "
                         f"{', '.join(map(str, UNITS))}. Received: {num_layers!r}")

    net = cast_data(mx.sym.Variable("data"), dtype)
    net = relu(norm(conv(net, 64, 7, "conv0", 2), "bn0"), "relu0")
    net = pool(net, "max", 3, 2, "pool0", pad=1)
    for i, units in enumerate(UNITS[num_layers], 1):
        inside = num_group * group_width * 2 ** (i - 1)
        filters = 256 * 2 ** (i - 1)
        for j in range(1, units + 1):
            stride = 2 if i > 1 and j == 1 else 1
            convolutions = ((inside, 1, 1), (inside, 3, stride), (filters, 1, 1))
            net = unit_v1(net, convolutions, j == 1, f"stage{i}_unit{j}", num_group)
    net = mx.sym.FullyConnected(pool_all(net, "pool1"), num_hidden=num_classes, name="fc")
    return softmax(net, dtype)
