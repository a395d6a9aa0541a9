"""ResNet as a symbol, in float32, or in float16 with hand-written casts.

Version 1 is He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition" (2015);
version 2, with norms before the convolutions, "Identity Mappings in Deep Residual Networks" (2016)
by the same authors. Bottleneck units have their stride in the 3x3 convolution. Images of at most 32
pixels get the small variant for CIFAR, with projection shortcuts.
"""
import mxnet as mx

from .layers import cast_data, conv, norm, pool, pool_all, relu, softmax

UNITS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3),
         152: (3, 8, 36, 3)}
SMALL_UNITS = {6 * n + 2: (n, n, n) for n in (3, 5, 7, 9, 18)}


def get_symbol(num_classes, num_layers=50, image_shape="3,224,224", version=1, dtype="float32"):
    """Returns the network with its SoftmaxOutput.

    Args:
        num_layers: 18, 34, 50, 101 or 152; for images of at most 32 pixels 20, 32, 44, 56 or 110.
        image_shape: channels, height and width of an image.
        version: 1 or 2.
        dtype: "float32" or "float16".
    """
    small = int(image_shape.split(",")[1]) <= 32
    stages = SMALL_UNITS if small else UNITS
    if num_layers not in stages:
        raise ValueError(f"unknown num_layers for images of {image_shape}. Valid: "
                         f"{', '.join(map(str, stages))}. Received: {num_layers!r}")
    if version not in (1, 2):
        raise ValueError(f"unknown version. Valid: 1, 2. Received: {version!r}")
    unit = unit_v1 if version == 1 else unit_v2
    bottleneck = num_layers >= 50 and not small
    width = 16 if small else 64

    net = mx.sym.Variable("data")
    if version == 2:  # before the cast, so that pixels of any scale fit into float16
        net = norm(net, "data_bn", fix_gamma=True)
    net = cast_data(net, dtype)
    net = conv(net, width, 3 if small else 7, "conv0", 1 if small else 2)
    if version == 1 or not small:
        net = relu(norm(net, "bn0"), "relu0")
    if not small:
        net = pool(net, "max", 3, 2, "pool0", pad=1)
    before = width
    for i, units in enumerate(stages[num_layers], 1):
        filters = width * 2 ** (i - 1) * (4 if bottleneck else 1)
        for j in range(1, units + 1):
            stride = 2 if i > 1 and j == 1 else 1
            net = unit(net, _convolutions(filters, stride, bottleneck), filters != before,
                       f"stage{i}_unit{j}")
            before = filters
    if version == 2:
        net = relu(norm(net, "bn1"), "relu1")
    net = mx.sym.FullyConnected(pool_all(net, "pool1"), num_hidden=num_classes, name="fc")
    return softmax(net, dtype)


def _convolutions(filters, stride, bottleneck):
    """Returns filters, kernel and stride of each convolution of a unit."""
    if bottleneck:
        return (filters // 4, 1, 1), (filters // 4, 3, stride), (filters, 1, 1)
    return (filters, 3, stride), (filters, 3, 1)


def unit_v1(net, convolutions, project, name, groups=1):
    """Returns a unit with norms after convolutions, and the last ReLU after the sum.

    Args:
        convolutions: filters, kernel and stride of each.
        project: whether the shortcut needs a convolution.
        groups: the number of groups of 3x3 convolutions.
    """
    shortcut = net
    if project:
        stride = max(stride for _, _, stride in convolutions)
        shortcut = conv(net, convolutions[-1][0], 1, f"{name}_shortcut", stride)
        shortcut = norm(shortcut, f"{name}_shortcut_bn")
    for i, (filters, kernel, stride) in enumerate(convolutions, 1):
        net = conv(net, filters, kernel, f"{name}_conv{i}", stride,
                   groups=groups if kernel == 3 else 1)
        net = norm(net, f"{name}_bn{i}")
        if i < len(convolutions):
            net = relu(net, f"{name}_relu{i}")
    return relu(mx.sym.elemwise_add(net, shortcut, name=f"{name}_add"), f"{name}_relu")


def unit_v2(net, convolutions, project, name):
    """Returns a unit with a norm and ReLU before each convolution."""
    shortcut = net
    for i, (filters, kernel, stride) in enumerate(convolutions, 1):
        net = relu(norm(net, f"{name}_bn{i}"), f"{name}_relu{i}")
        if i == 1 and project:
            strides = max(stride for _, _, stride in convolutions)
            shortcut = conv(net, convolutions[-1][0], 1, f"{name}_shortcut", strides)
        net = conv(net, filters, kernel, f"{name}_conv{i}", stride)
    return mx.sym.elemwise_add(net, shortcut, name=f"{name}_add")
