"""A language model over characters, two LSTM layers: perplexity."""
from pydoc_data.topics import topics

import common
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

run = common.Run(__doc__)
LENGTH, BATCH, STEPS, WIDTH = 32, 16, 1000, 128
text = "".join(map(topics.get, sorted(topics)))
alphabet = sorted(set(text))
numbers = np.array([alphabet.index(character) for character in text[:200_000]])
training, validation = np.split(numbers, [len(numbers) * 9 // 10])


class Model(gluon.HybridBlock):
    """Returns logits of each next character."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(len(alphabet), WIDTH)
            self.lstm = rnn.LSTM(WIDTH, 2, layout="NTC", input_size=WIDTH)
            self.scores = nn.Dense(len(alphabet), flatten=False, in_units=WIDTH)

    def hybrid_forward(self, F, x):
        return self.scores(self.lstm(self.embed(x)))


def batch_of(part, rng):
    begins = rng.randint(len(part) - LENGTH, size=(BATCH, 1))
    read = part[begins + np.arange(LENGTH + 1)]
    return mx.nd.array(read[:, :-1]), mx.nd.array(read[:, 1:])


net = Model()
net.initialize(mx.init.Xavier())
run.convert(net)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = run.trainer(net, "adam", {"learning_rate": 3e-3})
for _ in run.steps(STEPS):
    data, label = batch_of(training, run.rng)
    with autograd.record():
        loss = loss_fn(net(data), label)
    run.update(trainer, loss, BATCH)
losses = [loss_fn(net(data), label).mean().asscalar()
          for data, label in (batch_of(validation, run.validation_rng) for _ in range(20))]
run.end(trainer, perplexity=float(np.exp(np.mean(losses))))
