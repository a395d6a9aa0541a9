"""Common code of the networks: the two explicit casts, and layers.

A float16 network has a cast before its first layer and another before its softmax. Layers between
them run in float16, with float16 parameters, except those of batch norms, which are float32.
"""
import mxnet as mx

HIDDEN = 4096  # units of the fully connected layers of AlexNet and VGG


def check_dtype(dtype):
    if dtype not in ("float32", "float16"):
        raise ValueError(f"unknown dtype. Valid: float32, float16. Received: {dtype!r}")


def cast_data(net, dtype):
    """Returns the data, cast to float16 for a float16 network."""
    check_dtype(dtype)
    return mx.sym.Cast(net, dtype="float16") if dtype == "float16" else net


def softmax(net, dtype, **label):
    """Returns the output and loss of a network, always in float32."""
    if dtype == "float16":
        net = mx.sym.Cast(net, dtype="float32")
    return mx.sym.SoftmaxOutput(net, name="softmax", **label)


def conv(net, filters, kernel, name, stride=1, pad=None, groups=1, bias=False):
    """Returns a convolution; by default its padding keeps the size at stride 1."""
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    pad = tuple(size // 2 for size in kernel) if pad is None else (pad, pad)
    return mx.sym.Convolution(net, num_filter=filters, kernel=kernel, stride=(stride, stride),
                              pad=pad, num_group=groups, no_bias=not bias, name=name)


def norm(net, name, eps=2e-5, fix_gamma=False):
    return mx.sym.BatchNorm(net, eps=eps, momentum=0.9, fix_gamma=fix_gamma, name=name)


def relu(net, name):
    return mx.sym.Activation(net, act_type="relu", name=name)


def pool(net, kind, kernel, stride, name, pad=0, convention="valid"):
    """Returns a "max" or "avg" pooling."""
    return mx.sym.Pooling(net, pool_type=kind, kernel=(kernel, kernel), stride=(stride, stride),
                          pad=(pad, pad), pooling_convention=convention, name=name)


def pool_all(net, name):
    """Returns a flattened global average pooling."""
    net = mx.sym.Pooling(net, kernel=(1, 1), global_pool=True, pool_type="avg", name=name)
    return mx.sym.Flatten(net, name="flatten")


def hidden_layers(net):
    """Returns the two large fully connected layers of AlexNet and VGG."""
    net = mx.sym.Flatten(net, name="flatten")
    for i in (6, 7):
        net = mx.sym.FullyConnected(net, num_hidden=HIDDEN, name=f"fc{i}")
        net = mx.sym.Dropout(relu(net, f"relu{i}"), p=0.5, name=f"dropout{i}")
    return net
