"""Inception networks as symbols, in float32, or in float16 with hand-written casts.

"googlenet" is Szegedy et al.: "Going Deeper with Convolutions" (2014), without its auxiliary
classifiers and response normalization; "bn" is Ioffe, Szegedy: "Batch Normalization" (2015); "v3"
is Szegedy et al.: "Rethinking the Inception Architecture for Computer Vision" (2015), without the
auxiliary classifier. A block has parallel branches: chains of convolutions that may start with
pooling.
"""
import mxnet as mx

from .layers import cast_data, conv, norm, pool, pool_all, relu, softmax

# Filters of each block: 1x1 branch; 3x3 branch; 5x5 branch; after pooling. None: pooling by 2
# between two blocks.
GOOGLENET = ((64, (96, 128), (16, 32), 32), (128, (128, 192), (32, 96), 64), None,
             (192, (96, 208), (16, 48), 64), (160, (112, 224), (24, 64), 64),
             (128, (128, 256), (24, 64), 64), (112, (144, 288), (32, 64), 64),
             (256, (160, 320), (32, 128), 128), None,
             (256, (160, 320), (32, 128), 128), (384, (192, 384), (48, 128), 128))
# The same, with two 3x3 convolutions in place of the 5x5 one, and the kind of pooling. Blocks
# without a 1x1 branch have stride 2.
BN = ((64, (64, 64), (64, 96), 32, "avg"), (64, (64, 96), (64, 96), 64, "avg"),
      (None, (128, 160), (64, 96), None, "max"),
      (224, (64, 96), (96, 128), 128, "avg"), (192, (96, 128), (96, 128), 128, "avg"),
      (160, (128, 160), (128, 160), 128, "avg"), (96, (128, 192), (160, 192), 128, "avg"),
      (None, (128, 192), (192, 256), None, "max"),
      (352, (192, 320), (160, 224), 128, "avg"), (352, (192, 320), (192, 224), 128, "max"))


def get_symbol(num_classes, version="v3", dtype="float32"):
    """Returns the network with its SoftmaxOutput.

    Args:
        version: "googlenet" or "bn", for images of 224 pixels (at least 64), or "v3", for 299 (at
            least 75).
        dtype: "float32" or "float16".
    """
    networks = {"googlenet": _googlenet, "bn": _bn, "v3": _v3}
    if version not in networks:
        raise ValueError(f"unknown version. Valid: {', '.join(networks)}. Received: {version!r}")
    net = networks[version](cast_data(mx.sym.Variable("data"), dtype))
    net = mx.sym.FullyConnected(net, num_hidden=num_classes, name="fc")
    return softmax(net, dtype)


def _googlenet(net):
    """GoogLeNet, whose convolutions have biases and no norms."""
    net = _layer(net, 64, 7, "conv1", 2, bias=True)
    net = pool(net, "max", 3, 2, "pool1", convention="full")
    net = _layer(net, 64, 1, "conv2_reduce", bias=True)
    net = _layer(net, 192, 3, "conv2", bias=True)
    net = pool(net, "max", 3, 2, "pool2", convention="full")
    for i, block in enumerate(GOOGLENET, 1):
        name = f"mixed{i}"
        if block is None:
            net = pool(net, "max", 3, 2, f"{name}_pool", convention="full")
            continue
        one, (reduce3, three), (reduce5, five), pooled_filters = block
        net = _concat(name, [
            _chain(net, f"{name}_1x1", (one, 1), bias=True),
            _chain(net, f"{name}_3x3", (reduce3, 1), (three, 3), bias=True),
            _chain(net, f"{name}_5x5", (reduce5, 1), (five, 5), bias=True),
            _chain(pool(net, "max", 3, 1, f"{name}_pool", pad=1), f"{name}_pooled",
                   (pooled_filters, 1), bias=True)])
    return mx.sym.Dropout(pool_all(net, "pool"), p=0.4, name="dropout")


def _bn(net):
    net = _layer(net, 64, 7, "conv1", 2)
    net = pool(net, "max", 3, 2, "pool1", convention="full")
    net = _layer(net, 64, 1, "conv2_reduce")
    net = _layer(net, 192, 3, "conv2")
    net = pool(net, "max", 3, 2, "pool2", convention="full")
    for i, (one, (reduce3, three), (reduce5, five), pooled_filters, kind) in enumerate(BN, 1):
        name, stride = f"mixed{i}", 1 if one else 2
        branches = [_chain(net, f"{name}_3x3", (reduce3, 1), (three, 3, stride)),
                    _chain(net, f"{name}_double", (reduce5, 1), (five, 3), (five, 3, stride))]
        pooled = pool(net, kind, 3, stride, f"{name}_pool", pad=1)
        if one:
            branches.insert(0, _chain(net, f"{name}_1x1", (one, 1)))
            pooled = _chain(pooled, f"{name}_pooled", (pooled_filters, 1))
        net = _concat(name, [*branches, pooled])
    return pool_all(net, "pool")


def _v3(net):
    net = _chain(net, "conv1", (32, 3, 2, 0), (32, 3, 1, 0), (64, 3))
    net = pool(net, "max", 3, 2, "pool1")
    net = _chain(net, "conv2", (80, 1), (192, 3, 1, 0))
    net = pool(net, "max", 3, 2, "pool2")
    for i, pooled_filters in enumerate((32, 64, 64), 1):
        net = _v3_35(net, pooled_filters, f"mixed{i}")
    net = _v3_to_17(net, "mixed4")
    for i, inside in enumerate((128, 160, 160, 192), 5):
        net = _v3_17(net, inside, f"mixed{i}")
    net = _v3_to_8(net, "mixed9")
    for i in (10, 11):
        net = _v3_8(net, f"mixed{i}")
    return mx.sym.Dropout(pool_all(net, "pool"), p=0.5, name="dropout")


def _v3_35(net, pooled_filters, name):
    """A block on 35 x 35 positions."""
    return _concat(name, [
        _chain(net, f"{name}_1x1", (64, 1)),
        _chain(net, f"{name}_5x5", (48, 1), (64, 5)),
        _chain(net, f"{name}_double", (64, 1), (96, 3), (96, 3)),
        _pool_branch(net, pooled_filters, name)])


def _v3_to_17(net, name):
    return _concat(name, [
        _chain(net, f"{name}_3x3", (384, 3, 2, 0)),
        _chain(net, f"{name}_double", (64, 1), (96, 3), (96, 3, 2, 0)),
        pool(net, "max", 3, 2, f"{name}_pool")])


def _v3_17(net, inside, name):
    """A block on 17 x 17 positions, with 1x7 and 7x1 convolutions."""
    row, column = (1, 7), (7, 1)
    return _concat(name, [
        _chain(net, f"{name}_1x1", (192, 1)),
        _chain(net, f"{name}_7x7", (inside, 1), (inside, row), (192, column)),
        _chain(net, f"{name}_double", (inside, 1), (inside, column), (inside, row),
               (inside, column), (192, row)),
        _pool_branch(net, 192, name)])


def _v3_to_8(net, name):
    return _concat(name, [
        _chain(net, f"{name}_3x3", (192, 1), (320, 3, 2, 0)),
        _chain(net, f"{name}_7x7", (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2, 0)),
        pool(net, "max", 3, 2, f"{name}_pool")])


def _v3_8(net, name):
    """A block on 8 x 8 positions, whose chains end in parallel 1x3 and 3x1 convolutions."""
    branches = [_chain(net, f"{name}_1x1", (320, 1))]
    for end, convolutions in (("3x3", [(384, 1)]), ("double", [(448, 1), (384, 3)])):
        chain = _chain(net, f"{name}_{end}", *convolutions)
        branches += [_layer(chain, 384, (1, 3), f"{name}_{end}_row"),
                     _layer(chain, 384, (3, 1), f"{name}_{end}_column")]
    return _concat(name, [*branches, _pool_branch(net, 192, name)])


def _pool_branch(net, filters, name):
    return _chain(pool(net, "avg", 3, 1, f"{name}_pool", pad=1), f"{name}_pooled", (filters, 1))


def _chain(net, name, *convolutions, bias=False):
    """Returns a chain of convolutions, given filters, kernel, and optional stride and pad."""
    for i, (filters, kernel, *rest) in enumerate(convolutions, 1):
        net = _layer(net, filters, kernel, f"{name}_{i}", *rest, bias=bias)
    return net


def _layer(net, filters, kernel, name, stride=1, pad=None, bias=False):
    """Returns a convolution with its norm, unless it has a bias, and a ReLU."""
    net = conv(net, filters, kernel, f"{name}_conv", stride, pad, bias=bias)
    if not bias:
        net = norm(net, f"{name}_bn", eps=1e-3)
    return relu(net, f"{name}_relu")


def _concat(name, branches):
    return mx.sym.Concat(*branches, dim=1, name=f"{name}_concat")
