"""VGG as a symbol, in float32, or in float16 with hand-written casts.

Simonyan, Zisserman: "Very Deep Convolutional Networks for Large-Scale Image Recognition" (2014),
with or without batch norms, which are a later addition.
"""
import mxnet as mx

from .layers import cast_data, conv, hidden_layers, norm, pool, relu, softmax

FILTERS = (64, 128, 256, 512, 512)  # convolutions of each stage, before a pooling
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3),
                19: (2, 2, 4, 4, 4)}


def get_symbol(num_classes, num_layers=16, batch_norm=False, dtype="float32"):
    """Returns the network with its SoftmaxOutput, for images of 32 pixels or more, such as 224.

    Args:
        num_layers: 11, 13, 16 or 19.
        batch_norm: whether a batch norm follows each convolution.
        dtype: "float32" or "float16".
    """
    if num_layers not in CONVOLUTIONS:
        raise ValueError("unknown num_layers. Valid: "
                         f"{', '.join(map(str, CONVOLUTIONS))}. Received: {num_layers!r}")

    net = cast_data(mx.sym.Variable("data"), dtype)
    for i, (count, filters) in enumerate(zip(CONVOLUTIONS[num_layers], FILTERS), 1):
        for j in range(1, count + 1):
            net = conv(net, filters, 3, f"conv{i}_{j}", bias=True)
            if batch_norm:
                net = norm(net, f"bn{i}_{j}")
            net = relu(net, f"relu{i}_{j}")
        net = pool(net, "max", 2, 2, f"pool{i}")
    net = hidden_layers(net)
    net = mx.sym.FullyConnected(net, num_hidden=num_classes, name="fc")
    return softmax(net, dtype)
