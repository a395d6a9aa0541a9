"""Sequence to sequence with attention, which sorts digits: exact matches."""
import common
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

run = common.Run(__doc__)
LENGTH, DIGITS, BATCH, STEPS, WIDTH = 8, 20, 64, 800, 64
BEGIN = DIGITS  # the decoder's first input


class Translator(gluon.HybridBlock):
    """A GRU reads the digits; another writes, with attention over the first one's states."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(DIGITS + 1, WIDTH)
            self.reader = rnn.GRU(WIDTH, layout="NTC", input_size=WIDTH, bidirectional=True)
            self.keys = nn.Dense(WIDTH, flatten=False, in_units=2 * WIDTH)
            self.writer = rnn.GRU(WIDTH, layout="NTC", input_size=WIDTH)
            self.scores = nn.Dense(DIGITS, flatten=False, in_units=2 * WIDTH)

    def hybrid_forward(self, F, source, target):
        keys = self.keys(self.reader(self.embed(source)))
        states = self.writer(self.embed(target))
        weights = F.softmax(F.batch_dot(states, keys, transpose_b=True) / WIDTH ** 0.5)
        return self.scores(F.concat(states, F.batch_dot(weights, keys), dim=2))


def shifted(target):
    """Returns the decoder's inputs: each digit that precedes."""
    return np.concatenate([np.full((len(target), 1), BEGIN), target[:, :-1]], 1)


net = Translator()
net.initialize(mx.init.Xavier())
run.convert(net)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = run.trainer(net, "adam", {"learning_rate": 2e-3})
for _ in run.steps(STEPS):
    source = run.rng.randint(DIGITS, size=(BATCH, LENGTH))
    target = np.sort(source, 1)
    with autograd.record():
        loss = loss_fn(net(mx.nd.array(source), mx.nd.array(shifted(target))), mx.nd.array(target))
    run.update(trainer, loss, BATCH)

# Greedy decoding: one more digit in each round
source = run.validation_rng.randint(DIGITS, size=(512, LENGTH))
written = np.zeros_like(source)
for place in range(LENGTH):
    scores = net(mx.nd.array(source), mx.nd.array(shifted(written))).asnumpy()
    written[:, place] = scores[:, place].argmax(-1)
run.end(trainer, exact_match=float((written == np.sort(source, 1)).all(1).mean()))
