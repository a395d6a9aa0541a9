"""Trains a classifier of digits in float16 with MXNet's Estimator, and predicts.

    python minimal_estimator.py

A second run continues the first.
"""
import gluon_amp as amp  # before mxnet
import mxnet as mx
import numpy as np
from gluon_amp.training.estimator import BatchProcessor
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.estimator import Estimator
from mxnet.gluon.contrib.estimator.event_handler import EpochEnd
from sklearn.datasets import load_digits

DTYPE, EPOCHS, FOLDER = "float16", 5, "runs/minimal_estimator"
mx.random.seed(0)
np.random.seed(0)

# Data: 1,797 images of 8 x 8 pixels, of which 450 are for validation
images, labels = load_digits(return_X_y=True)
images = (images / 8 - 1).astype("float32")
order = np.random.permutation(len(labels))
training = gluon.data.DataLoader(
    gluon.data.ArrayDataset(images[order[450:]], labels[order[450:]]), 64, shuffle=True)
validation = gluon.data.DataLoader(
    gluon.data.ArrayDataset(images[order[:450]], labels[order[:450]]), 64)

# The network, converted before its Trainer is created
net = nn.HybridSequential(prefix="digits_")
with net.name_scope():
    net.add(nn.Dense(128), nn.BatchNorm(), nn.Activation("relu"), nn.Dense(10))
net.initialize(mx.init.Xavier())
amp.convert(net, DTYPE)
net.hybridize(static_alloc=True, static_shape=True)

trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
position = amp.load_checkpoint(FOLDER, net, trainer)  # epoch 0 without a checkpoint


class SaveCheckpoint(EpochEnd):
    """Saves a checkpoint each epoch. MXNet's CheckpointHandler fails to resume a finished run."""

    def epoch_end(self, estimator, *args, **kwargs):
        position.epoch += 1
        amp.save_checkpoint(FOLDER, net, trainer, position)


# Training. This batch processor calls trainer.backward
estimator = Estimator(net, gluon.loss.SoftmaxCrossEntropyLoss(), mx.metric.Accuracy(),
                      trainer=trainer, batch_processor=BatchProcessor())
if position.epoch < EPOCHS:
    estimator.fit(training, validation, epochs=EPOCHS - position.epoch,
                  event_handlers=[SaveCheckpoint()])
    print(dict(metric.get() for metric in estimator.val_metrics))

# Prediction
data = mx.nd.array(images[order[:10]])
print("predicted", net(data).argmax(axis=1).asnumpy().astype(int), "labels", labels[order[:10]])
