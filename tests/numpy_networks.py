"""Networks in numpy mode for tests: a BERT and a translating Transformer of plain Blocks, which
call the functions that those of the book d2l call."""
import math

from mxnet import autograd, np, npx
from mxnet.gluon import Block, nn


def attend(queries, keys, values, lengths, dropout):
    """Softmax attention, of the first `lengths` keys alone."""
    scores = npx.batch_dot(queries, keys, transpose_b=True) / math.sqrt(queries.shape[-1])
    if lengths is not None:
        rows = lengths.repeat(scores.shape[1]) if lengths.ndim == 1 else lengths.reshape(-1)
        masked = npx.sequence_mask(scores.reshape(-1, scores.shape[-1]), rows, True, value=-1e6,
                                   axis=1)
        scores = masked.reshape(scores.shape)
    return npx.batch_dot(dropout(npx.softmax(scores)), values)


class Heads(Block):
    """Attention with several heads."""

    def __init__(self, width, heads, rate):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(rate)
        self.query, self.key, self.value, self.out = (
            nn.Dense(width, use_bias=False, flatten=False) for _ in range(4))

    def split(self, x):
        x = x.reshape(x.shape[0], x.shape[1], self.heads, -1).transpose(0, 2, 1, 3)
        return x.reshape(-1, x.shape[2], x.shape[3])

    def forward(self, queries, keys, lengths):
        if lengths is not None:
            lengths = lengths.repeat(self.heads, axis=0)
        mixed = attend(self.split(self.query(queries)), self.split(self.key(keys)),
                       self.split(self.value(keys)), lengths, self.dropout)
        mixed = mixed.reshape(-1, self.heads, mixed.shape[1], mixed.shape[2])
        mixed = mixed.transpose(0, 2, 1, 3)
        return self.out(mixed.reshape(mixed.shape[0], mixed.shape[1], -1))


class Residual(Block):
    """A residual connection with a layer norm behind it."""

    def __init__(self, rate):
        super().__init__()
        self.dropout, self.norm = nn.Dropout(rate), nn.LayerNorm()

    def forward(self, x, y):
        return self.norm(self.dropout(y) + x)


def feed_forward(width):
    made = nn.Sequential()
    made.add(nn.Dense(2 * width, activation="relu", flatten=False), nn.Dense(width, flatten=False))
    return made


class EncoderLayer(Block):
    def __init__(self, width, heads, rate):
        super().__init__()
        self.attention, self.feed = Heads(width, heads, rate), feed_forward(width)
        self.first, self.second = Residual(rate), Residual(rate)

    def forward(self, x, lengths):
        x = self.first(x, self.attention(x, x, lengths))
        return self.second(x, self.feed(x))


class DecoderLayer(Block):
    def __init__(self, width, heads, rate):
        super().__init__()
        self.own, self.other = Heads(width, heads, rate), Heads(width, heads, rate)
        self.feed = feed_forward(width)
        self.first, self.second, self.third = (Residual(rate) for _ in range(3))

    def forward(self, x, encoded, lengths, earlier=None):
        """Decodes all words at once in training, and one after `earlier` ones in prediction."""
        seen = x if earlier is None else np.concatenate((earlier, x), axis=1)
        until = None
        if autograd.is_training():
            until = np.tile(np.arange(1, x.shape[1] + 1, ctx=x.ctx), (x.shape[0], 1))
        x = self.first(x, self.own(x, seen, until))
        x = self.second(x, self.other(x, encoded, lengths))
        return self.third(x, self.feed(x)), seen


class Embedded(Block):
    """Words with sines as positions."""

    def __init__(self, words, width, rate, longest=20):
        super().__init__()
        self.width, self.dropout = width, nn.Dropout(rate)
        self.embedding = nn.Embedding(words, width)
        angles = np.arange(longest).reshape(-1, 1) / np.power(
            10000, np.arange(0, width, 2) / width)
        self.positions = np.zeros((1, longest, width))
        self.positions[:, :, 0::2] = np.sin(angles)
        self.positions[:, :, 1::2] = np.cos(angles)

    def forward(self, words):
        x = self.embedding(words) * math.sqrt(self.width)
        return self.dropout(x + self.positions[:, :x.shape[1], :].as_in_ctx(x.ctx))


class Transformer(Block):
    def __init__(self, words, width=16, heads=2, layers=2, rate=0.1):
        super().__init__()
        self.source, self.target = Embedded(words, width, rate), Embedded(words, width, rate)
        self.encoder, self.decoder = nn.Sequential(), nn.Sequential()
        for _ in range(layers):
            self.encoder.add(EncoderLayer(width, heads, rate))
            self.decoder.add(DecoderLayer(width, heads, rate))
        self.out = nn.Dense(words, flatten=False)

    def encode(self, source, lengths):
        x = self.source(source)
        for layer in self.encoder:
            x = layer(x, lengths)
        return x

    def decode(self, target, encoded, lengths, earlier):
        x, seen = self.target(target), []
        for layer, before in zip(self.decoder, earlier):
            x, so_far = layer(x, encoded, lengths, before)
            seen.append(so_far)
        return self.out(x), seen

    def forward(self, source, lengths, target):
        return self.decode(target, self.encode(source, lengths), lengths,
                           [None] * len(self.decoder))[0]

    def translate(self, source, lengths, first, count):
        """Decodes greedily, word by word."""
        encoded, word, seen, found = self.encode(source, lengths), first, [None] * 2, []
        for _ in range(count):
            scores, seen = self.decode(word, encoded, lengths, seen)
            word = scores.argmax(axis=2)
            found.append(word.squeeze(axis=0).astype("int32").item())
        return found


class Bert(Block):
    """An encoder with masked words and the order of two sentences as tasks."""

    def __init__(self, words, width=16, heads=2, layers=2, rate=0.1, longest=20):
        super().__init__()
        self.tokens, self.segments = nn.Embedding(words, width), nn.Embedding(2, width)
        self.positions = self.params.get("positions", shape=(1, longest, width))
        self.layers = nn.Sequential()
        for _ in range(layers):
            self.layers.add(EncoderLayer(width, heads, rate))
        self.masked = nn.Sequential()
        self.masked.add(nn.Dense(width, flatten=False, activation="relu"), nn.LayerNorm(),
                        nn.Dense(words, flatten=False))
        self.pooled, self.following = nn.Dense(width, activation="tanh"), nn.Dense(2)

    def forward(self, tokens, segments, lengths, places):
        x = self.tokens(tokens) + self.segments(segments)
        x = x + self.positions.data(ctx=x.ctx)[:, :x.shape[1], :]
        for layer in self.layers:
            x = layer(x, lengths)
        rows = np.repeat(np.arange(0, x.shape[0]), places.shape[1])
        hidden = x[rows, places.reshape(-1)].reshape((x.shape[0], places.shape[1], -1))
        return self.masked(hidden), self.following(self.pooled(x[:, 0, :]))
