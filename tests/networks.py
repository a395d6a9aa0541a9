"""Networks for tests of conversion: {name: (make, inputs)}. `make()` returns an uninitialized net,
`inputs(rng)` its arguments as NDArrays."""
import mxnet as mx
import numpy as np
from mxnet import gluon, nd
from mxnet.gluon import nn, rnn


def images(px, batch=4):
    return lambda rng: [nd.array(rng.standard_normal((batch, 3, px, px)))]


def floats(*shape):
    return lambda rng: [nd.array(rng.standard_normal(shape))]


def zoo(name, **kwargs):
    return lambda: gluon.model_zoo.vision.get_model(name, classes=10, **kwargs)


def sequence(*layers, **kwargs):
    net = nn.HybridSequential(**kwargs)
    net.add(*layers)
    return net


def ready(block, *args, **kwargs):
    """The block, or the parameter, after its initialization."""
    block.initialize(*args, **kwargs)
    return block


class Calling(gluon.HybridBlock):
    """A network that calls function(F, *arguments, *layers, **parameters).

    Args:
        parameters: the arguments of each parameter by its name, or the value of a constant.
    """

    def __init__(self, function, *layers, parameters=None, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        for i, layer in enumerate(layers):
            self.register_child(layer, str(i))
        for name, given in (parameters or {}).items():
            setattr(self, name, self.params.get(name, **given) if isinstance(given, dict)
                    else self.params.get_constant(name, given))

    def hybrid_forward(self, F, *args, **parameters):
        return self.function(F, *args, *self._children.values(), **parameters)


class Encoder(gluon.HybridBlock):
    """A transformer encoder layer, with dropout and a mask of valid words."""

    def __init__(self, width=32, heads=4, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.width = heads, width
        with self.name_scope():
            self.qkv = nn.Dense(3 * width, flatten=False)
            self.proj = nn.Dense(width, flatten=False)
            self.ffn1 = nn.Dense(4 * width, flatten=False)
            self.ffn2 = nn.Dense(width, flatten=False)
            self.norm1, self.norm2 = nn.LayerNorm(), nn.LayerNorm()
            self.gelu, self.drop = nn.GELU(), nn.Dropout(0.1)

    def heads_first(self, x):
        return x.reshape((0, 0, self.heads, -1)).transpose((0, 2, 1, 3)).reshape((-3, 0, 0))

    def hybrid_forward(self, F, x, mask):
        q, k, v = (self.heads_first(p) for p in F.split(self.qkv(x), num_outputs=3, axis=-1))
        scores = F.batch_dot(q, k, transpose_b=True) * (self.width // self.heads) ** -0.5
        mask = F.repeat(mask, self.heads, axis=0)
        scores = F.broadcast_add(scores, (mask - 1) * 1e4)
        weights = self.drop(F.softmax(scores))
        mixed = F.batch_dot(weights, v).reshape((-4, -1, self.heads, 0, 0))
        mixed = mixed.transpose((0, 2, 1, 3)).reshape((0, 0, -3))
        x = self.norm1(x + self.drop(self.proj(mixed)))
        return self.norm2(x + self.drop(self.ffn2(self.gelu(self.ffn1(x)))))


def self_attention():
    """The interleaved products of BERT."""
    def forward(F, x, dense):
        qkv = dense(x)
        scores = F.contrib.interleaved_matmul_selfatt_qk(qkv, heads=4)
        return F.contrib.interleaved_matmul_selfatt_valatt(qkv, F.softmax(scores), heads=4)
    return Calling(forward, nn.Dense(96, flatten=False))


class Tied(gluon.HybridBlock):
    """A language model whose output layer shares the weight of its embedding."""

    def __init__(self, vocabulary=50, width=16, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = nn.Embedding(vocabulary, width)
            self.hidden = nn.Dense(width, flatten=False, activation="tanh")
            self.out = nn.Dense(vocabulary, flatten=False, in_units=width,
                                params=self.embed.params)

    def hybrid_forward(self, F, words):
        return self.out(self.hidden(self.embed(words)))


def arithmetic():
    """Overloaded operators on arrays."""
    def forward(F, x, y, dense, scale):
        h = F.broadcast_mul(dense(x), scale)
        h = h * 2 + dense(y) - 0.5
        h = F.where(h > 0, h, h * 0.1)
        first, rest = h.slice_axis(axis=1, begin=0, end=2), h.slice_axis(axis=1, begin=2, end=None)
        return F.concat(rest, F.exp(-F.abs(first)), dim=1)
    return Calling(forward, nn.Dense(8, flatten=False),
                   parameters={"scale": {"shape": (8,), "init": "ones"}})


class Loop(gluon.HybridBlock):
    """A recurrence by foreach, with a layer and a norm in its body."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.cell = nn.Dense(8, flatten=False, in_units=8)
            self.norm = nn.LayerNorm(in_channels=8)

    def hybrid_forward(self, F, x, state):
        def body(step, state):
            state = F.tanh(self.norm(self.cell(step) + state * 0.5))
            return F.relu(state) + state, state
        outputs, state = F.contrib.foreach(body, x, state)
        return outputs, state


def two_layers(forward):
    return Calling(forward, *(nn.Dense(4, flatten=False, in_units=4) for _ in "ab"))


def counting_loop():
    def forward(F, x, first, dense):
        def step(i, state):
            return state, [i + 1, F.tanh(dense(state))]
        _, (_, last) = F.contrib.while_loop(lambda i, state: i < 3, step,
                                            [F.zeros((1,)), first(x)], max_iterations=3)
        return last
    return two_layers(forward)


def condition(function="sum", most=1e6):
    """One of two branches, by a number of the first layer's output."""
    def forward(F, x, a, b):
        h = a(x)
        return F.contrib.cond(getattr(F, function)(h) < most, lambda: b(h), lambda: h * 2)
    return two_layers(forward)


def nested():
    """Several inputs and nested outputs."""
    return Calling(lambda F, x, pair, a, b: (
        a(x), [b(pair[0]), (a(pair[0] + pair[1]), x + pair[1])]), nn.Dense(4), nn.Dense(5))


class Plain(gluon.Block):
    """A plain block with hybrid children."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
            self.out = nn.Dense(10)

    def forward(self, x):
        x = self.body(x)
        if x.mean().asnumpy().item() > 1e6:  # not possible in a graph
            x = x * 0
        return self.out(x * 0.5)


def unrolled(cell, steps=4):
    """A cell unrolled over time."""
    return Calling(lambda F, x, cell: cell.unroll(steps, x, layout="NTC", merge_outputs=True)[0],
                   cell)


def fused(layer):
    """A fused recurrent layer and an output."""
    return Calling(lambda F, x, layer, out: out(layer(x)), layer, nn.Dense(6, flatten=False))


def imported(path):
    """The network in the files of `export`."""
    return gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")


def exported(folder):
    """A SymbolBlock from the files of `export`."""
    net = nn.HybridSequential(prefix="exported_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8), nn.Activation("relu"),
                nn.GlobalAvgPool2D(), nn.Dense(10, in_units=8))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net(nd.zeros((1, 3, 8, 8)))
    net.export(str(folder / "net"))
    return imported(folder / "net")


def bidirectional():
    return unrolled(rnn.BidirectionalCell(rnn.LSTMCell(8, input_size=6, prefix="l_"),
                                           rnn.LSTMCell(8, input_size=6, prefix="r_")))


ZOO = {
    "alexnet": (zoo("alexnet"), images(224, 2)),
    "densenet121": (zoo("densenet121"), images(224, 2)),
    "inceptionv3": (zoo("inceptionv3"), images(299, 2)),
    "resnet18_v1": (zoo("resnet18_v1"), images(64, 8)),
    "resnet50_v1": (zoo("resnet50_v1"), images(64, 8)),
    "resnet18_v2": (zoo("resnet18_v2"), images(64, 8)),
    "resnet50_v2": (zoo("resnet50_v2"), images(64, 8)),
    "squeezenet1.1": (zoo("squeezenet1.1"), images(224, 2)),
    "vgg11": (zoo("vgg11"), images(32)),
    "vgg11_bn": (zoo("vgg11_bn"), images(32, 8)),
    "mobilenet0.25": (zoo("mobilenet0.25"), images(128, 8)),
    "mobilenetv2_0.25": (zoo("mobilenetv2_0.25"), images(128, 8)),
}
GLUONCV = {name: (name, images(px, 8)) for name, px in (
    ("resnet50_v1b", 64), ("se_resnext50_32x4d", 64), ("mobilenetv3_small", 64),
    ("cifar_resnet20_v1", 32))}
OTHERS = {
    "lstm": (lambda: fused(rnn.LSTM(16, 2)), floats(5, 4, 6)),
    "gru": (lambda: fused(rnn.GRU(16, layout="NTC")), floats(4, 5, 6)),
    "bidirectional": (lambda: fused(rnn.LSTM(8, 2, bidirectional=True, dropout=0.2)),
                      floats(5, 4, 6)),
    "rnn_relu": (lambda: fused(rnn.RNN(8)), floats(5, 4, 6)),
    "lstm_cell": (lambda: unrolled(rnn.LSTMCell(8)), floats(3, 4, 6)),
    "gru_cell": (lambda: unrolled(rnn.GRUCell(8)), floats(3, 4, 6)),
    "bidirectional_cell": (bidirectional, floats(3, 4, 6)),
    "encoder": (Encoder, lambda rng: [nd.array(rng.standard_normal((2, 7, 32))),
                                      nd.array(np.arange(7)[None] < [[7], [4]]).expand_dims(1)
                                      .broadcast_to((2, 7, 7))]),
    "interleaved": (self_attention, floats(7, 2, 32)),
    "tied": (Tied, lambda rng: [nd.array(rng.integers(0, 50, (4, 6)))]),
    "arithmetic": (arithmetic, lambda rng: floats(4, 6)(rng) + floats(4, 6)(rng)),
    "loop": (Loop, lambda rng: floats(5, 3, 8)(rng) + floats(3, 8)(rng)),
    "while": (counting_loop, floats(3, 4)),
    "nested": (nested, lambda rng: [floats(3, 4)(rng)[0], [floats(3, 4)(rng)[0],
                                                           floats(3, 4)(rng)[0]]]),
    "plain": (Plain, images(8)),
}
