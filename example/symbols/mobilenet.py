"""MobileNet as a symbol, in float32, or in float16 with hand-written casts.

Howard et al.: "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision
Applications" (2017). A unit is a depthwise 3x3 convolution, then a pointwise 1x1
convolution.
"""
import mxnet as mx

from .layers import cast_data, conv, norm, pool_all, relu, softmax

# Filters and stride of each unit.
UNITS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2),
         (1024, 1))


def get_symbol(num_classes, multiplier=1.0, dtype="float32"):
    """Returns the network with its SoftmaxOutput.

    Args:
        multiplier: multiplier of all numbers of filters, such as 1.0, 0.75, 0.5 or 0.25.
        dtype: "float32" or "float16".
    """
    if not multiplier > 0:
        raise ValueError(f"invalid multiplier. Valid: numbers above 0. Received: {multiplier!r}")

    channels = _scaled(32, multiplier)
    net = cast_data(mx.sym.Variable("data"), dtype)
    net = _conv_relu(net, channels, 3, 2, "conv0")
    for i, (filters, stride) in enumerate(UNITS, 1):
        net = _conv_relu(net, channels, 3, stride, f"unit{i}_depthwise", groups=channels)
        channels = _scaled(filters, multiplier)
        net = _conv_relu(net, channels, 1, 1, f"unit{i}_pointwise")
    net = mx.sym.FullyConnected(pool_all(net, "pool"), num_hidden=num_classes, name="fc")
    return softmax(net, dtype)


def _scaled(filters, multiplier):
    return max(1, int(filters * multiplier))


def _conv_relu(net, filters, kernel, stride, name, groups=1):
    """Returns a convolution with its norm and ReLU."""
    net = conv(net, filters, kernel, f"{name}_conv", stride, groups=groups)
    return relu(norm(net, f"{name}_bn"), f"{name}_relu")
