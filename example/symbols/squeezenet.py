"""SqueezeNet as a symbol, in float32, or in float16 with hand-written casts.

Iandola et al.: "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters and <0.5MB model
size" (2016). A fire unit squeezes the channels with a 1x1 convolution and expands them with a
1x1 and a 3x3 one. Version 1.1, by the same authors, needs less than half of the arithmetic. The
classifier is a convolution with global average pooling, without a fully connected layer.
"""
import mxnet as mx

from .layers import cast_data, conv, pool, pool_all, relu, softmax

# Filters and kernel of the first convolution; the fire units with pooling after them.
VERSIONS = {"1.0": (96, 7, (3, 7)), "1.1": (64, 3, (2, 4))}
SQUEEZED = (16, 16, 32, 32, 48, 48, 64, 64)  # each expansion has four times as many


def get_symbol(num_classes, version="1.1", dtype="float32"):
    """Returns the network with its SoftmaxOutput, for images of 32 pixels or more, such as 224.

    Args:
        version: "1.0" or "1.1".
        dtype: "float32" or "float16".
    """
    if version not in VERSIONS:
        raise ValueError(f"unknown version. Valid: 1.0, 1.1. Received: {version!r}")
    filters, kernel, pooled = VERSIONS[version]

    net = cast_data(mx.sym.Variable("data"), dtype)
    net = relu(conv(net, filters, kernel, "conv1", 2, pad=0, bias=True), "relu1")
    net = pool(net, "max", 3, 2, "pool1", convention="full")
    for i, squeezed in enumerate(SQUEEZED, 1):
        net = _fire(net, squeezed, f"fire{i + 1}")
        if i in pooled:
            net = pool(net, "max", 3, 2, f"pool{i + 1}", convention="full")
    net = mx.sym.Dropout(net, p=0.5, name="dropout")
    net = relu(conv(net, num_classes, 1, "conv10", bias=True), "relu10")
    return softmax(pool_all(net, "pool10"), dtype)


def _fire(net, squeezed, name):
    net = relu(conv(net, squeezed, 1, f"{name}_squeeze", bias=True), f"{name}_squeeze_relu")
    expanded = [relu(conv(net, 4 * squeezed, kernel, f"{name}_expand{kernel}", bias=True),
                     f"{name}_expand{kernel}_relu") for kernel in (1, 3)]
    return mx.sym.Concat(*expanded, dim=1, name=f"{name}_concat")
