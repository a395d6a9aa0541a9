"""AlexNet as a symbol, in float32, or in float16 with hand-written casts.

Krizhevsky, Sutskever, Hinton: "ImageNet Classification with Deep Convolutional Neural Networks"
(2012), in the form without two halves and without response normalization of Krizhevsky: "One
weird trick for parallelizing convolutional neural networks" (2014).
"""
import mxnet as mx

from .layers import cast_data, conv, hidden_layers, pool, relu, softmax

# Filters, kernel, stride and pad of each convolution, and whether pooling follows it.
CONVOLUTIONS = ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False),
                (256, 3, 1, 1, False), (256, 3, 1, 1, True))


def get_symbol(num_classes, dtype="float32"):
    """Returns the network with its SoftmaxOutput, for images of 63 pixels or more, such as 224.

    Args:
        dtype: "float32" or "float16".
    """
    net = cast_data(mx.sym.Variable("data"), dtype)
    for i, (filters, kernel, stride, pad, pooled) in enumerate(CONVOLUTIONS, 1):
        net = conv(net, filters, kernel, f"conv{i}", stride, pad, bias=True)
        net = relu(net, f"relu{i}")
        if pooled:
            net = pool(net, "max", 3, 2, f"pool{i}")
    net = hidden_layers(net)
    net = mx.sym.FullyConnected(net, num_hidden=num_classes, name="fc")
    return softmax(net, dtype)
