"""A language model over characters, two LSTM layers: perplexity."""
import math

import common
import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn, rnn

run = common.Run(__doc__)
STEPS, WIDTH = 1000, 128
text = common.Text(length=32, batch_size=16)


class Model(gluon.HybridBlock):
    """Returns logits of each next character."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(len(text.alphabet), WIDTH)
            self.lstm = rnn.LSTM(WIDTH, 2, layout="NTC", input_size=WIDTH)
            self.scores = nn.Dense(len(text.alphabet), flatten=False, in_units=WIDTH)

    def hybrid_forward(self, F, x):
        return self.scores(self.lstm(self.embed(x)))


net = Model()
net.initialize(mx.init.Xavier())
run.convert(net)
trainer = run.trainer(net, "adam", {"learning_rate": 3e-3})
run.end(trainer, perplexity=math.exp(text.train(run, net, trainer, STEPS)))
