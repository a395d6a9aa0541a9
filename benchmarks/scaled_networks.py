"""57 small networks for `loss_scales.py`, whose gradients differ by 2^40.

The last five need a loss scale below 1: without scaling, their gradients overflow in float16.
"""
import math
from typing import Any, Callable, NamedTuple, Tuple

from gluon_amp._mxnet import np
from mxnet import gluon, init, nd
from mxnet.gluon import loss as losses
from mxnet.gluon import nn, rnn
from networks import Encoder

CLASSES, DISTANCE = losses.SoftmaxCrossEntropyLoss(), losses.L2Loss()
BINARY = losses.SigmoidBinaryCrossEntropyLoss()


class Case(NamedTuple):
    make: Callable[[], Any]  # the uninitialized network
    data: Callable[[Any], Tuple[Any, Any]]  # a batch of a random generator: inputs, labels
    loss: Callable[[Any, Any], Any]  # of outputs and labels, for each example or the mean
    optimizer: Tuple[str, dict]


def sgd(rate):
    return "sgd", {"learning_rate": rate, "momentum": 0.9}


def adam(rate=1e-3):
    return "adam", {"learning_rate": rate}


RMSPROP = "rmsprop", {"learning_rate": 5e-4}

# ---- networks ------------------------------------------------------------------------------------


class Function(gluon.HybridBlock):
    """A network that computes function(F, x, *layers)."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function = function
        for layer in layers:
            self.register_child(layer)

    def hybrid_forward(self, F, x):
        return self.function(F, x, *self._children.values())


def stack(*layers):
    net = nn.HybridSequential()
    net.add(*layers)
    return net


def zoo(name):
    return gluon.model_zoo.vision.get_model(name, classes=10)


def perceptron(outputs=4, width=64, depth=1, kind="relu", weights=None):
    hidden = (nn.Dense(width, kind, weight_initializer=weights) for _ in range(depth))
    return stack(*hidden, nn.Dense(outputs))


def convolution(channels, stride=1):
    return nn.Conv2D(channels, 3, stride, 1)


def images_to(outputs, norm=None):
    layers = [layer for width in (16, 32) for layer in (
        convolution(width), *([norm()] if norm else []), nn.Activation("relu"), nn.MaxPool2D())]
    return stack(*layers, nn.Dense(outputs))


def recurrent(layer, outputs, words=500):
    return stack(nn.Embedding(words, 16), layer, nn.Dense(outputs, flatten=False))


def last_word(F, x, body):
    return body(x).slice_axis(axis=1, begin=-1, end=None).reshape((0, -1))


def transformer(outputs, depth=2):
    return stack(nn.Embedding(500, 32), *(Encoder(32, 4, 0.1) for _ in range(depth)),
                 nn.Dense(outputs, flatten=False))


def mean_of_words(F, x, body):
    return body(x).mean(axis=1)


def vision_transformer():
    patches = nn.HybridLambda(lambda F, x: x.reshape((0, 0, -1)).transpose((0, 2, 1)))
    body = stack(nn.Conv2D(32, 4, 4), patches, Encoder(32, 4), Encoder(32, 4),
                 nn.Dense(10, flatten=False))
    return Function(mean_of_words, body)


def judge(norm=None):
    """A GAN's discriminator, or, without norm, a WGAN's critic."""
    return stack(nn.Conv2D(16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2D(32, 4, 2, 1),
                 *([norm()] if norm else []), nn.LeakyReLU(0.2), nn.Dense(1))


def generator(norm=None):
    """A generator of images, before a judge that does not train."""
    frozen = judge(norm)
    frozen.collect_params().setattr("grad_req", "null")
    squares = nn.HybridLambda(lambda F, x: x.reshape((0, 32, 4, 4)))
    return stack(nn.Dense(32 * 4 * 4), squares, nn.BatchNorm(), nn.Activation("relu"),
                 nn.Conv2DTranspose(16, 4, 2, 1), nn.BatchNorm(), nn.Activation("relu"),
                 nn.Conv2DTranspose(3, 4, 2, 1), nn.Activation("tanh"), frozen)


def detector():
    def rows(F, x, body, *heads):
        features = body(x)
        return F.concat(*(head(features).transpose((0, 2, 3, 1)).reshape((0, -1, 4))
                          for head in heads), dim=2)
    body = stack(*(layer for width in (16, 32) for layer in (
        convolution(width, 2), nn.BatchNorm(), nn.Activation("relu"))))
    return Function(rows, body, convolution(16), convolution(16))


def segmentation():
    return stack(convolution(16), nn.BatchNorm(), nn.Activation("relu"), convolution(16),
                 nn.Activation("relu"), nn.Conv2D(3, 1))


def autoencoder():
    return stack(nn.Dense(64, "relu"), nn.Dense(16), nn.Dense(64, "relu"), nn.Dense(784))


def variational():
    """The inputs are 784 pixels and noise for 8 codes; it returns pixels, means, log variances."""
    def outputs(F, x, encoder, decoder):
        noise = x.slice_axis(axis=1, begin=784, end=792)
        codes = encoder(x.slice_axis(axis=1, begin=0, end=784))
        mean, log_variance = F.split(codes, num_outputs=2, axis=1)
        return F.concat(decoder(mean + noise * F.exp(log_variance / 2)), codes, dim=1)
    return Function(outputs, stack(nn.Dense(64, "relu"), nn.Dense(16)),
                    stack(nn.Dense(64, "relu"), nn.Dense(784)))


def factors():
    def product(F, x, users, items):
        user, item = F.split(x, num_outputs=2, axis=1, squeeze_axis=True)
        return (users(user) * items(item)).sum(axis=1)
    return Function(product, nn.Embedding(300, 16), nn.Embedding(300, 16))


def residual():
    def output(F, x, first, *rest):
        h = first(x)
        for layer in rest[:-1]:
            h = h + layer(F.relu(h))
        return rest[-1](h)
    return Function(output, *(nn.Dense(32) for _ in range(25)), nn.Dense(10))


def times(inner, outer, *layers):
    return Function(lambda F, x, body: body(x * inner) * outer, stack(*layers))


def wavenet():
    dilated = [nn.Conv1D(16, 2, dilation=2 ** i, activation="tanh") for i in range(5)]
    return Function(lambda F, x, words, body: body(words(x).transpose((0, 2, 1))),
                    nn.Embedding(64, 16), stack(*dilated, nn.Conv1D(64, 1)))


def graph_network():
    """The inputs are matrices of adjacency and features of 12 nodes."""
    def output(F, x, first, second, last):
        adjacent = x.slice_axis(axis=2, begin=0, end=12)
        h = F.relu(first(F.batch_dot(adjacent, x.slice_axis(axis=2, begin=12, end=20))))
        return last(F.relu(second(F.batch_dot(adjacent, h))).sum(axis=1))
    return Function(output, nn.Dense(32, flatten=False), nn.Dense(32, flatten=False), nn.Dense(3))


# ---- data ----------------------------------------------------------------------------------------


def weights(*shape):
    return np.random.default_rng(9).standard_normal(shape)


def labels(shape, batch, classes=4, size=1.0, offset=0.0):
    def data(rng):
        x = rng.standard_normal((batch, *shape))
        y = (x.reshape((batch, -1)) @ weights(math.prod(shape), classes)).argmax(1)
        return x * size + offset, y
    return data


def targets(batch=32, size=1.0, offset=0.0, features=16, of=lambda y: y):
    def data(rng):
        x = rng.standard_normal((batch, features))
        return x, of(x @ weights(features, 1) / features ** 0.5) * size + offset
    return data


def words(batch, length, classes=None):
    """The label is the next word, or a class of the last one."""
    def data(rng):
        x = rng.zipf(1.3, (batch, length + 1)) % 500
        return x[:, :-1], x[:, -2] % classes if classes else x[:, 1:]
    return data


def noise(batch, *shape):
    return lambda rng: (rng.standard_normal((batch, *shape)), np.ones(batch))


def real_and_false(rng):
    x = rng.standard_normal((32, 3, 16, 16))
    x[:16] += 0.5
    return np.tanh(x), np.repeat((1, 0), 16)


def boxes(rng):
    classes = (rng.random((4, 256, 1)) < 0.1) * rng.integers(1, 4, (4, 256, 1))
    corners = rng.standard_normal((4, 256, 4)) * 2
    return rng.standard_normal((4, 3, 32, 32)), np.concatenate([classes, corners], 2)


def pixels_by_class(rng):
    x = rng.standard_normal((4, 3, 32, 32))
    return x, x.argmax(1)


def pixels(batch, size=1.0, extra=0):
    def data(rng):
        x = rng.random((batch, 784)) * size
        return np.concatenate([x, rng.standard_normal((batch, extra))], 1), x
    return data


def sounds(rng):
    return rng.standard_normal((8, 30, 16)), rng.integers(0, 11, (8, 6))


def ratings(size=1):
    return lambda rng: (rng.integers(0, 300, (64, 2)), rng.integers(1, 6, 64) * size)


def pairs(rng):
    return rng.zipf(1.3, (64, 2)) % 300, rng.random(64) < 0.2


def waves(rng):
    phase = np.arange(129) / rng.integers(3, 20) + rng.random((4, 1))
    x = (32 + 31 * np.sin(phase)).astype(int)
    return x[:, :-1], x[:, 32:]


def small_images(rng):
    y = rng.random((4, 3, 32, 32)) * 255
    return y[:, :, ::2, ::2] / 255, y


def actions(rng):
    chosen, reward = rng.integers(0, 4, 32), rng.standard_normal(32) * 100
    return rng.standard_normal((32, 8)), np.stack([chosen, reward], 1)


def graphs(rng):
    adjacent, features = rng.random((16, 12, 12)) < 0.3, rng.standard_normal((16, 12, 8))
    return np.concatenate([adjacent, features], 2), rng.integers(0, 3, 16)


# ---- losses --------------------------------------------------------------------------------------


def cross_entropy(out, y, axis=-1):
    return -out.log_softmax(axis=axis).pick(y, axis=axis)


def sum_over_words(out, y):
    return cross_entropy(out, y).sum(axis=1)


def of_boxes(out, y):
    classes, corners = out[:, :, :4], out[:, :, 4:]
    return sum_over_words(classes, y[:, :, 0]) + \
        nd.smooth_l1(corners - y[:, :, 1:], scalar=1).sum(axis=(1, 2))


def squared_sum(out, y):
    return (out - y).square().sum(axis=1)


def evidence_bound(out, y):
    x, mean, log_variance = out[:, :784], out[:, 784:792], out[:, 792:]
    likelihood = (nd.relu(x) - x * y + nd.log1p(nd.exp(-x.abs()))).sum(axis=1)
    return likelihood - (1 + log_variance - mean.square() - log_variance.exp()).sum(axis=1) / 2


def triplets(out, _):
    return losses.TripletLoss()(*out.reshape((-1, 3, 16)).split(3, axis=1, squeeze_axis=True))


def of_actions(out, y):
    return cross_entropy(out, y[:, 0]) * y[:, 1]


def gram(out, _):
    rows = out.reshape((0, 0, -1))
    return (nd.batch_dot(rows, rows.swapaxes(1, 2)) - 5).square().sum(axis=(1, 2))


def critic(out, y):
    return out.reshape((-1,)) * (1 - 2 * y)


ROWS, IMAGES, PHOTOS = (16,), (1, 28, 28), (3, 32, 32)
CASES = {
    "one example": Case(perceptron, labels(ROWS, 1), CLASSES, sgd(0.01)),
    "256 examples": Case(perceptron, labels(ROWS, 256), CLASSES, sgd(0.05)),
    "784 features": Case(lambda: perceptron(10, 256), labels((784,), 32, 10), CLASSES, sgd(0.01)),
    "mean of losses": Case(perceptron, labels(ROWS, 64), lambda *x: CLASSES(*x).mean(), sgd(0.1)),
    "weights of 0": Case(lambda: nn.Dense(10, weight_initializer="zeros"),
                         labels((784,), 64, 10), CLASSES, sgd(0.01)),
    "10,000 labels": Case(lambda: perceptron(10000, 32),
                          lambda rng: (rng.standard_normal((64, 16)), rng.integers(0, 10000, 64)),
                          CLASSES, sgd(0.05)),
    "40 layers of relu": Case(lambda: perceptron(10, 32, 40), labels(ROWS, 32, 10), CLASSES,
                              sgd(0.01)),
    "30 layers of tanh": Case(lambda: perceptron(10, 32, 30, "tanh", init.Normal(0.1)),
                              labels(ROWS, 32, 10), CLASSES, sgd(0.01)),
    "24 residual layers, no norm": Case(residual, labels(ROWS, 32, 10), CLASSES, sgd(1e-4)),
    "inputs of 1e-4, outputs times 1e4": Case(
        lambda: times(1e-4, 1e4, nn.Dense(32, use_bias=False), nn.Dense(4, use_bias=False)),
        labels(ROWS, 32), CLASSES, sgd(0.01)),
    "outputs times 1e3": Case(
        lambda: times(1, 1e3, nn.Dense(32), nn.LayerNorm(), nn.Activation("tanh"), nn.Dense(4)),
        labels(ROWS, 32), CLASSES, sgd(1e-4)),
    "regression": Case(lambda: perceptron(1), targets(), DISTANCE, adam()),
    "targets of 1e-4": Case(lambda: stack(nn.Dense(64, "relu"), nn.Dense(
        1, weight_initializer=init.Normal(1e-4))), targets(size=1e-4), DISTANCE, adam(1e-4)),
    "L1, targets of 1e3": Case(lambda: perceptron(1), targets(64, 1e3), losses.L1Loss(), adam()),
    "Huber, targets of 1e2": Case(lambda: perceptron(1), targets(size=1e2), losses.HuberLoss(),
                                  adam()),
    "Poisson, counts of 1e3": Case(lambda: perceptron(1), targets(size=1e3, of=abs),
                                   losses.PoissonNLLLoss(), adam()),
    "hinge": Case(lambda: nn.Dense(1), targets(64, of=np.sign), losses.HingeLoss(), sgd(0.01)),
    "policy gradient, returns of 100": Case(lambda: perceptron(kind="tanh"), actions, of_actions,
                                            adam()),
    "LeNet": Case(lambda: images_to(10), labels(IMAGES, 32, 10), CLASSES, sgd(0.02)),
    "BatchNorm": Case(lambda: images_to(10, nn.BatchNorm), labels(IMAGES, 32, 10), CLASSES,
                      sgd(0.02)),
    "BatchNorm, 256 examples": Case(lambda: images_to(10, nn.BatchNorm),
                                    labels((1, 16, 16), 256, 10), CLASSES, sgd(0.05)),
    "pixels of 0 to 255": Case(lambda: images_to(10), labels(IMAGES, 16, 10, 60, 128), CLASSES,
                               sgd(1e-5)),
    "ResNet-18 v1": Case(lambda: zoo("resnet18_v1"), labels(PHOTOS, 8, 10), CLASSES, sgd(0.01)),
    "ResNet-18 v2": Case(lambda: zoo("resnet18_v2"), labels(PHOTOS, 8, 10), CLASSES, sgd(0.01)),
    "MobileNet 0.25": Case(lambda: zoo("mobilenet0.25"), labels(PHOTOS, 16, 10), CLASSES,
                           sgd(0.01)),
    "MobileNetV2 0.25": Case(lambda: zoo("mobilenetv2_0.25"), labels(PHOTOS, 16, 10), CLASSES,
                             sgd(0.01)),
    "VGG-11": Case(lambda: zoo("vgg11"), labels(PHOTOS, 4, 10), CLASSES, sgd(0.005)),
    "vision transformer": Case(vision_transformer, labels((3, 16, 16), 16, 10), CLASSES, adam()),
    "detection, sums": Case(detector, boxes, of_boxes, sgd(1e-4)),
    "segmentation, sum": Case(segmentation, pixels_by_class,
                              lambda *x: cross_entropy(*x, axis=1).sum(axis=(1, 2)), sgd(1e-4)),
    "segmentation, mean": Case(segmentation, pixels_by_class,
                               lambda *x: cross_entropy(*x, axis=1).mean(), sgd(0.5)),
    "super-resolution, L1 sum": Case(
        lambda: stack(convolution(16), nn.Activation("relu"), convolution(12),
                      nn.HybridLambda(lambda F, x: F.depth_to_space(x, 2))),
        small_images, lambda out, y: (out - y).abs().sum(axis=(1, 2, 3)), adam()),
    "autoencoder": Case(autoencoder, pixels(32), DISTANCE, adam()),
    "variational autoencoder": Case(variational, pixels(16, extra=8), evidence_bound, adam()),
    "GAN, discriminator": Case(lambda: judge(nn.BatchNorm), real_and_false, BINARY, adam(2e-4)),
    "GAN, generator": Case(lambda: generator(nn.BatchNorm), noise(16, 16), BINARY, adam(2e-4)),
    "WGAN, critic": Case(judge, real_and_false, critic, RMSPROP),
    "WGAN, generator": Case(generator, noise(16, 16), critic, RMSPROP),
    "LSTM": Case(lambda: recurrent(rnn.LSTM(32, 2, layout="NTC"), 500), words(10, 20), CLASSES,
                 adam(3e-3)),
    "LSTM, sum over words": Case(lambda: recurrent(rnn.LSTM(32, 2, layout="NTC"), 500),
                                 words(10, 20), sum_over_words, adam(3e-3)),
    "GRU, classes": Case(lambda: Function(last_word, recurrent(rnn.GRU(32, layout="NTC"), 5)),
                         words(32, 15, 5), CLASSES, adam(3e-3)),
    "bidirectional LSTM, tags": Case(
        lambda: recurrent(rnn.LSTM(24, layout="NTC", bidirectional=True), 9),
        lambda rng: (x := words(16, 12)(rng)[0], x % 9), sum_over_words, adam(3e-3)),
    "CTC": Case(lambda: stack(rnn.LSTM(32, layout="NTC", bidirectional=True),
                              nn.Dense(12, flatten=False)), sounds, losses.CTCLoss(), adam()),
    "WaveNet, sums": Case(wavenet, waves, lambda *x: cross_entropy(*x, axis=1).sum(axis=1),
                          adam()),
    "transformer": Case(lambda: transformer(500), words(8, 24), CLASSES, adam()),
    "transformer, classes": Case(lambda: Function(mean_of_words, transformer(5)),
                                 words(16, 16, 5), CLASSES, adam()),
    "transformer of 6 layers": Case(lambda: Function(mean_of_words, transformer(5, 6)),
                                    words(8, 16, 5), CLASSES, adam(3e-4)),
    "ratings": Case(factors, ratings(), DISTANCE, adam(0.01)),
    "ratings in thousands": Case(factors, ratings(1000), DISTANCE, adam(0.01)),
    "pairs of words": Case(factors, pairs, BINARY, adam(0.01)),
    "triplets": Case(lambda: stack(nn.Dense(64, "relu", flatten=False),
                                   nn.Dense(16, flatten=False)), noise(16, 3, 20), triplets,
                     sgd(0.01)),
    "graphs": Case(graph_network, graphs, CLASSES, adam()),
    # a scale below 1
    "targets of 1e4": Case(lambda: perceptron(1), targets(size=1e4), DISTANCE, adam()),
    "targets of 3e5": Case(lambda: perceptron(1), targets(16, 1e3, 3e5), DISTANCE, adam()),
    "squared sums of 0 to 255": Case(autoencoder, pixels(16, 255), squared_sum, adam()),
    "inputs of 1e-6": Case(lambda: times(1e-6, 1, nn.Dense(32, use_bias=False),
                                         nn.LayerNorm(epsilon=1e-12), nn.Dense(4)),
                           labels(ROWS, 32), CLASSES, sgd(1e-3)),
    "Gram matrices": Case(lambda: stack(convolution(8), nn.Activation("relu"), convolution(16)),
                          noise(2, 3, 24, 24), gram, sgd(1e-9)),
}
