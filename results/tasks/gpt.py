"""A GPT over characters, the network of example/language_model.py: validation loss."""
from pydoc_data.topics import topics

import common
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

run = common.Run(__doc__)
from language_model import GPT  # noqa: E402

LENGTH, BATCH, STEPS = 32, 16, 800
text = "".join(map(topics.get, sorted(topics)))
alphabet = sorted(set(text))
numbers = np.array([alphabet.index(character) for character in text[:200_000]])
training, validation = np.split(numbers, [len(numbers) * 9 // 10])


def batch_of(part, rng):
    begins = rng.randint(len(part) - LENGTH, size=(BATCH, 1))
    read = part[begins + np.arange(LENGTH + 1)]
    return mx.nd.array(read[:, :-1]), mx.nd.array(read[:, 1:])


net = GPT(len(alphabet), 64, 2, 4, LENGTH, 0.0)
net.initialize(mx.init.Normal(0.02))
run.convert(net)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
schedule = mx.lr_scheduler.CosineScheduler(STEPS, 3e-3, warmup_steps=40)
trainer = run.trainer(net, "adamw", {"learning_rate": 3e-3, "lr_scheduler": schedule, "wd": 0.1},
                      clip_norm=1.0)
for _ in run.steps(STEPS):
    data, label = batch_of(training, run.rng)
    with autograd.record():
        loss = loss_fn(net(data), label)
    run.update(trainer, loss, BATCH)
losses = [loss_fn(net(data), label).mean().asscalar()
          for data, label in (batch_of(validation, run.validation_rng) for _ in range(20))]
run.end(trainer, validation_loss=float(np.mean(losses)))
