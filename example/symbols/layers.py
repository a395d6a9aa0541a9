"""What the networks have in common: the two casts by hand, and the usual layers.

In float16 a network has a cast before its first layer and another before its softmax. All that
lies between runs in float16, with float16 parameters; a batch norm's are float32 by themselves.
"""
import mxnet as mx

HIDDEN = 4096  # units of each fully connected layer of an AlexNet or a VGG


def check_dtype(dtype):
    if dtype not in ("float32", "float16"):
        raise ValueError(f"unknown dtype. Valid: float32, float16. Received: {dtype!r}")


def narrow(net, dtype):
    """The data as the network takes it: cast to float16, if that is its type."""
    check_dtype(dtype)
    return mx.sym.Cast(net, dtype="float16") if dtype == "float16" else net


def softmax(net, dtype, **label):
    """The network's output and loss: of a float16 network, too, in float32."""
    if dtype == "float16":
        net = mx.sym.Cast(net, dtype="float32")
    return mx.sym.SoftmaxOutput(net, name="softmax", **label)


def conv(net, filters, kernel, name, stride=1, pad=None, groups=1, bias=False):
    """A convolution, at stride 1 with as large an output as its input, unless `pad` is given."""
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    pad = tuple(size // 2 for size in kernel) if pad is None else (pad, pad)
    return mx.sym.Convolution(net, num_filter=filters, kernel=kernel, stride=(stride, stride),
                              pad=pad, num_group=groups, no_bias=not bias, name=name)


def norm(net, name, eps=2e-5, fix_gamma=False):
    return mx.sym.BatchNorm(net, eps=eps, momentum=0.9, fix_gamma=fix_gamma, name=name)


def relu(net, name):
    return mx.sym.Activation(net, act_type="relu", name=name)


def pool(net, kind, kernel, stride, name, pad=0, convention="valid"):
    """The largest ("max") or the mean ("avg") of each window."""
    return mx.sym.Pooling(net, pool_type=kind, kernel=(kernel, kernel), stride=(stride, stride),
                          pad=(pad, pad), pooling_convention=convention, name=name)


def pool_all(net, name):
    """The mean over each channel, as a vector for each image."""
    net = mx.sym.Pooling(net, kernel=(1, 1), global_pool=True, pool_type="avg", name=name)
    return mx.sym.Flatten(net, name="flatten")


def hidden_layers(net):
    """The two large fully connected layers of an AlexNet or a VGG."""
    net = mx.sym.Flatten(net, name="flatten")
    for i in (6, 7):
        net = mx.sym.FullyConnected(net, num_hidden=HIDDEN, name=f"fc{i}")
        net = mx.sym.Dropout(relu(net, f"relu{i}"), p=0.5, name=f"dropout{i}")
    return net
