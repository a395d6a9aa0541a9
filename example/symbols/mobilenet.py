"""MobileNet as a symbol, in float32 or, by hand, in float16.

Howard et al.: "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision
Applications" (2017). A unit is a 3x3 convolution of each channel by itself (depthwise), then
a 1x1 convolution over the channels (pointwise).
"""
import mxnet as mx

# Filters and stride of each unit.
UNITS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2),
         (1024, 1))


def get_symbol(num_classes, multiplier=1.0, dtype="float32"):
    """The network, up to its SoftmaxOutput.

    Args:
        multiplier: of all numbers of filters, such as 1.0, 0.75, 0.5 or 0.25.
        dtype: "float32" or "float16".
    """
    if not multiplier > 0:
        raise ValueError(f"impossible multiplier. Valid: numbers above 0. Received: {multiplier!r}")
    if dtype not in ("float32", "float16"):
        raise ValueError(f"unknown dtype. Valid: float32, float16. Received: {dtype!r}")

    net = mx.sym.Variable("data")
    if dtype == "float16":
        net = mx.sym.Cast(net, dtype="float16")

    channels = _scaled(32, multiplier)
    net = _conv(net, channels, 3, 2, "conv0")
    for i, (filters, stride) in enumerate(UNITS, 1):
        net = _conv(net, channels, 3, stride, f"unit{i}_depthwise", groups=channels)
        channels = _scaled(filters, multiplier)
        net = _conv(net, channels, 1, 1, f"unit{i}_pointwise")
    net = mx.sym.Pooling(net, kernel=(1, 1), global_pool=True, pool_type="avg", name="pool")
    net = mx.sym.Flatten(net, name="flatten")
    net = mx.sym.FullyConnected(net, num_hidden=num_classes, name="fc")

    if dtype == "float16":
        net = mx.sym.Cast(net, dtype="float32")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def _scaled(filters, multiplier):
    return max(1, int(filters * multiplier))


def _conv(net, filters, kernel, stride, name, groups=1):
    """A convolution, its norm and its ReLU."""
    net = mx.sym.Convolution(net, num_filter=filters, kernel=(kernel, kernel),
                             stride=(stride, stride), pad=(kernel // 2, kernel // 2),
                             num_group=groups, no_bias=True, name=f"{name}_conv")
    net = mx.sym.BatchNorm(net, eps=2e-5, momentum=0.9, fix_gamma=False, name=f"{name}_bn")
    return mx.sym.Activation(net, act_type="relu", name=f"{name}_relu")
