"""The networks of the benchmarks, their batches and losses.

The loss of the first five is the mean of the outputs' squares. The others have a loss of their
task, with random targets.
"""
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "example"))
from gluon_amp.tools import demo
from model_zoo import zoo_network
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn


class Network(NamedTuple):
    make: Callable[[], Any]  # the uninitialized network
    batch: Callable[[], Any]  # data, target
    loss: Callable[[Any, Any], Any]  # loss of the output and the target


class LSTM(gluon.HybridBlock):
    """An LSTM of two layers of 256, with 35 time steps and a batch of 32."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.lstm = rnn.LSTM(256, num_layers=2, input_size=256)
            self.out = nn.Dense(1000, flatten=False, in_units=256)

    def hybrid_forward(self, F, x):
        return self.out(self.lstm(x))


class Encoder(gluon.HybridBlock):
    """A transformer encoder layer: multi-head attention, and an MLP of four times the width."""

    def __init__(self, width, heads, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.scale, self.dropout = heads, (width // heads) ** -0.5, dropout
        with self.name_scope():
            self.qkv = nn.Dense(3 * width, flatten=False, in_units=width)
            self.proj = nn.Dense(width, flatten=False, in_units=width)
            self.up = nn.Dense(4 * width, flatten=False, in_units=width)
            self.down = nn.Dense(width, flatten=False, in_units=4 * width)
            self.gelu = nn.GELU()
            self.norms = nn.HybridSequential()
            self.norms.add(nn.LayerNorm(in_channels=width), nn.LayerNorm(in_channels=width))

    def hybrid_forward(self, F, x):
        q, k, v = (self._split(p) for p in F.split(self.qkv(x), num_outputs=3, axis=-1))
        weights = F.softmax(F.batch_dot(q, k, transpose_b=True) * self.scale)
        mixed = F.batch_dot(self._drop(F, weights), v).reshape((-4, -1, self.heads, 0, 0))
        mixed = mixed.transpose((0, 2, 1, 3)).reshape((0, 0, -1))
        x = self.norms[0](x + self._drop(F, self.proj(mixed)))
        return self.norms[1](x + self._drop(F, self.down(self.gelu(self.up(x)))))

    def _split(self, x):
        x = x.reshape((0, 0, -4, self.heads, -1)).transpose((0, 2, 1, 3))
        return x.reshape((-3, 0, 0))

    def _drop(self, F, x):
        return F.Dropout(x, p=self.dropout) if self.dropout else x


class Bert(gluon.HybridBlock):
    """BERT-base with a classifier of two classes on the first token."""

    def __init__(self, layers=12, width=768, heads=12, length=128, words=30522, dropout=0.1,
                 **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.words = nn.Embedding(words, width)
            self.places = self.params.get("places_weight", shape=(1, length, width))
            self.norm, self.drop = nn.LayerNorm(in_channels=width), nn.Dropout(dropout)
            self.layers = nn.HybridSequential()
            for _ in range(layers):
                self.layers.add(Encoder(width, heads, dropout))
            self.pooler = nn.Dense(width, in_units=width, activation="tanh")
            self.out = nn.Dense(2, in_units=width)

    def hybrid_forward(self, F, x, places):
        x = self.layers(self.drop(self.norm(F.broadcast_add(self.words(x), places))))
        return self.out(self.drop(self.pooler(x.slice_axis(axis=1, begin=0, end=1))))


def attention():
    """Two encoder layers of width 64, and a classifier."""
    net = nn.HybridSequential()
    net.add(Encoder(64, 4), Encoder(64, 4), nn.Dense(10))
    return net


class UNet(gluon.HybridBlock):
    """A U-Net with two convolutions at each level, down and up."""

    def __init__(self, channels, levels=4, **kwargs):
        super().__init__(**kwargs)
        widths = [channels << level for level in range(levels)]
        with self.name_scope():
            self.downs, self.joins, self.ups = (nn.HybridSequential() for _ in range(3))
            for width in widths:
                self.downs.add(convolutions(width))
            for width in widths[-2::-1]:
                self.joins.add(nn.Conv2DTranspose(width, 2, 2))
                self.ups.add(convolutions(width))
            self.pool, self.out = nn.MaxPool2D(), nn.Conv2D(2, 1)

    def hybrid_forward(self, F, x):
        kept = [self.downs[0](x)]
        for down in list(self.downs)[1:]:
            kept.append(down(self.pool(kept[-1])))
        x = kept.pop()
        for join, up in zip(self.joins, self.ups):
            x = up(F.concat(join(x), kept.pop(), dim=1))
        return self.out(x)


def convolutions(width):
    net = nn.HybridSequential()
    for _ in range(2):
        net.add(nn.Conv2D(width, 3, 1, 1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
    return net


class Inverted(gluon.HybridBlock):
    """An inverted residual: expansion, depthwise convolution, projection. With stride 2 the padding
    is TensorFlow's: one more at the bottom and on the right."""

    def __init__(self, inputs, width, expand, kernel, stride, **kwargs):
        super().__init__(**kwargs)
        self.adds, inner = stride == 1 and inputs == width, inputs * expand
        with self.name_scope():
            self.body = nn.HybridSequential()
            if expand > 1:
                self.body.add(*lite(inner, 1), ReLU6())
            self.body.add(*lite(inner, kernel, stride, groups=inner), ReLU6(), *lite(width, 1))

    def hybrid_forward(self, F, x):
        return x + self.body(x) if self.adds else self.body(x)


class Pad(gluon.HybridBlock):
    def __init__(self, kernel, **kwargs):
        super().__init__(**kwargs)
        self.width = (0, 0, 0, 0) + 2 * ((kernel - 2) // 2, (kernel - 1) // 2)

    def hybrid_forward(self, F, x):
        return F.pad(x, mode="constant", pad_width=self.width)


class ReLU6(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.clip(x, 0, 6)


def lite(width, kernel, stride=1, groups=1):
    """A convolution of EfficientNet-Lite with its batch norm."""
    pads = [Pad(kernel)] if stride > 1 else []
    return [*pads, nn.Conv2D(width, kernel, stride, 0 if pads else kernel // 2, groups=groups,
                             use_bias=False), nn.BatchNorm(momentum=0.99, epsilon=1e-3)]


def efficientnet_lite0():
    net = nn.HybridSequential()
    net.add(*lite(32, 3, 2), ReLU6())
    inputs = 32
    for expand, width, depth, kernel, first_stride in (
            (1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2),
            (6, 112, 3, 5, 1), (6, 192, 4, 5, 2), (6, 320, 1, 3, 1)):
        for i in range(depth):
            net.add(Inverted(inputs, width, expand, kernel, 1 if i else first_stride))
            inputs = width
    net.add(*lite(1280, 1), ReLU6(), nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dropout(0.2),
            nn.Dense(1000))
    return net


def ssd():
    """gluoncv's SSD for the 20 classes of VOC; predictions include non-maximum suppression."""
    net = zoo_network("ssd_512_mobilenet1.0_custom", classes=[f"class{i}" for i in range(20)],
                      pretrained_base=False)
    net.collect_params(".*(gamma|var)").setattr("init", "ones")  # Xavier does not support them
    net.collect_params(".*(beta|mean)").setattr("init", "zeros")
    return net


def zoo(name):
    return lambda: gluon.model_zoo.vision.get_model(name)


def images(count, size, channels=3, classes=1000):
    return lambda: (nd.random.normal(shape=(count, channels, size, size)),
                    nd.random.randint(0, classes, (count,)).astype("float32"))


def sequences(*shape, classes=10):
    return lambda: (nd.random.normal(shape=shape),
                    nd.random.randint(0, classes, (shape[0],)).astype("float32"))


def sentences(count, length, words=30522):
    return lambda: (nd.random.randint(0, words, (count, length)).astype("float32"),
                    nd.random.randint(0, 2, (count,)).astype("float32"))


def masks(count, size):
    return lambda: (nd.random.normal(shape=(count, 3, size, size)),
                    nd.random.randint(0, 2, (count, size, size)).astype("float32"))


def boxes(count, size, anchors):
    return lambda: (nd.random.normal(shape=(count, 3, size, size)),
                    (nd.random.randint(0, 21, (count, anchors)).astype("float32"),
                     nd.random.normal(shape=(count, anchors, 4))))


def squares(output, target):
    return output.square().mean()


def cross_entropy(output, target):
    return gluon.loss.SoftmaxCrossEntropyLoss()(output, target).mean()


def pixels(output, target):
    return gluon.loss.SoftmaxCrossEntropyLoss(axis=1)(output, target).mean()


def classes_and_boxes(output, target):
    return (gluon.loss.SoftmaxCrossEntropyLoss()(output[0], target[0])
            + gluon.loss.HuberLoss()(output[1], target[1])).mean()


NETWORKS = {
    "resnet50 224px b8": Network(zoo("resnet50_v1"), images(8, 224), squares),
    "resnet18 64px b32": Network(zoo("resnet18_v1"), images(32, 64), squares),
    "mobilenetv2 128px b8": Network(zoo("mobilenetv2_1.0"), images(8, 128), squares),
    "lstm 2x256": Network(LSTM, sequences(35, 32, 256), squares),
    "transformer 256": Network(lambda: Encoder(256, 4), sequences(32, 64, 256), squares),
    "bert-base b4": Network(Bert, sentences(4, 128), cross_entropy),
    "densenet121 224px b4": Network(zoo("densenet121"), images(4, 224), cross_entropy),
    "resnet50v2 192px b8": Network(zoo("resnet50_v2"), images(8, 192), cross_entropy),
    "unet 128px b8": Network(lambda: UNet(32), masks(8, 128), pixels),
    "ssd-mobilenet 256px b4": Network(ssd, boxes(4, 256, 1536), classes_and_boxes),
    "efficientnet-lite0 224px b8": Network(efficientnet_lite0, images(8, 224), cross_entropy),
    "attention 64": Network(attention, sequences(16, 32, 64), cross_entropy),
    "demo": Network(demo.network, images(64, 8, channels=1, classes=10), cross_entropy),
}
if not find_spec("gluoncv"):
    print("ssd-mobilenet is skipped: gluoncv is not installed", file=sys.stderr)
    del NETWORKS["ssd-mobilenet 256px b4"]
