"""MobileNet version 2 as a symbol, in float32, or in float16 with hand-written casts.

Sandler et al.: "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (2018). A unit expands
its channels with a 1x1 convolution, applies a depthwise convolution, and projects to few channels
with another 1x1 convolution without ReLU.
"""
import mxnet as mx

from .layers import cast_data, conv, norm, pool_all, softmax

# Expansion factor, filters, units, and stride of the first unit of each stage.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
          (6, 160, 3, 2), (6, 320, 1, 1))


def get_symbol(num_classes, multiplier=1.0, dtype="float32"):
    """Returns the network with its SoftmaxOutput.

    Args:
        multiplier: multiplier of all numbers of filters, such as 1.4, 1.0, 0.75, 0.5 or 0.35; the
            last convolution has at least 1280.
        dtype: "float32" or "float16".
    """
    if not multiplier > 0:
        raise ValueError(f"invalid multiplier. Valid: numbers above 0. Received: {multiplier!r}")

    before = _scaled(32, multiplier)
    net = cast_data(mx.sym.Variable("data"), dtype)
    net = _conv_relu6(net, before, 3, "conv0", 2)
    for i, (expand, filters, units, first) in enumerate(STAGES, 1):
        filters = _scaled(filters, multiplier)
        for j in range(1, units + 1):
            stride = first if j == 1 else 1
            net = _unit(net, before, expand, filters, stride, f"stage{i}_unit{j}")
            before = filters
    net = _conv_relu6(net, _scaled(1280, max(1.0, multiplier)), 1, "conv1")
    net = mx.sym.FullyConnected(pool_all(net, "pool"), num_hidden=num_classes, name="fc")
    return softmax(net, dtype)


def _scaled(filters, multiplier):
    """Returns the nearest multiple of 8 that is at least 90 % of a number."""
    wanted = filters * multiplier
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * wanted else rounded + 8


def _unit(net, before, expand, filters, stride, name):
    inside = net
    if expand > 1:
        inside = _conv_relu6(inside, before * expand, 1, f"{name}_expand")
    inside = _conv_relu6(inside, before * expand, 3, f"{name}_depthwise", stride, before * expand)
    inside = norm(conv(inside, filters, 1, f"{name}_project_conv"), f"{name}_project_bn")
    if stride == 1 and before == filters:
        inside = mx.sym.elemwise_add(inside, net, name=f"{name}_add")
    return inside


def _conv_relu6(net, filters, kernel, name, stride=1, groups=1):
    """Returns a convolution with its norm and ReLU6."""
    net = norm(conv(net, filters, kernel, f"{name}_conv", stride, groups=groups), f"{name}_bn")
    return mx.sym.clip(net, a_min=0, a_max=6, name=f"{name}_relu6")
