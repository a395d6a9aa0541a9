"""CTC on generated sound, tones that spell digits: label error rate."""
import common
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

run = common.Run(__doc__)
DIGITS, SPOKEN, FRAMES, BANDS, BATCH, STEPS, WIDTH = 8, 4, 40, 16, 16, 1200, 48


def spoken(rng, count):
    """Returns magnitudes of tones in noise (count, FRAMES, BANDS), and the digits: each is a pair
    of bands that sound for five to nine frames, with silence between."""
    digits = rng.randint(DIGITS, size=(count, SPOKEN))
    sound = np.abs(rng.normal(0, 0.5, (count, FRAMES, BANDS)))
    for frames, row in zip(sound, digits):
        at = rng.randint(0, 3)
        for digit in row:
            length = rng.randint(5, 9)
            bands = [digit, BANDS - 1 - 3 * digit % DIGITS]
            frames[at:at + length, bands] += rng.uniform(0.6, 1.2)
            at += length + rng.randint(1, 3)
    return sound, digits


class Listener(gluon.HybridBlock):
    """Returns logits of each frame: DIGITS digits and the blank."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.conv = nn.Conv1D(WIDTH, 5, padding=2, in_channels=BANDS, activation="relu")
            self.lstm = rnn.LSTM(WIDTH, layout="NTC", input_size=WIDTH, bidirectional=True)
            self.scores = nn.Dense(DIGITS + 1, flatten=False, in_units=2 * WIDTH)

    def hybrid_forward(self, F, x):
        return self.scores(self.lstm(self.conv(x.transpose((0, 2, 1))).transpose((0, 2, 1))))


def distance(written, wanted):
    """Returns the edit distance."""
    row = list(range(len(wanted) + 1))
    for i, one in enumerate(written, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(wanted, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


net = Listener()
net.initialize(mx.init.Xavier())
run.convert(net)
loss_fn = gluon.loss.CTCLoss()  # its last class is the blank
trainer = run.trainer(net, "adam", {"learning_rate": 5e-3})
for _ in run.steps(STEPS):
    sound, digits = spoken(run.rng, BATCH)
    with autograd.record():
        loss = loss_fn(net(run.array(sound)).astype("float32"), mx.nd.array(digits))
    run.update(trainer, loss, BATCH)
sound, digits = spoken(run.validation_rng, 256)
errors = 0
for scores, wanted in zip(net(run.array(sound)).asnumpy(), digits):
    best = scores.argmax(-1)
    written = [one for one, last in zip(best, [DIGITS, *best[:-1]]) if one not in (last, DIGITS)]
    errors += distance(written, list(wanted))
run.end(trainer, label_error_rate=errors / digits.size)
