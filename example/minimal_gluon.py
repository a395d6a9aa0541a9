"""Trains a classifier of digits in float16, and predicts. A second run continues the first.

    python minimal_gluon.py
"""
import gluon_amp as amp  # before mxnet
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

DTYPE, EPOCHS, FOLDER = "float16", 5, "runs/minimal_gluon"
mx.random.seed(0)
np.random.seed(0)

# Data: 1,797 images of 8 x 8 pixels, of which 450 are for validation
images, labels = load_digits(return_X_y=True)
images = (images / 8 - 1).reshape(-1, 1, 8, 8).astype("float32")
order = np.random.permutation(len(labels))
training = gluon.data.DataLoader(
    gluon.data.ArrayDataset(images[order[450:]], labels[order[450:]]), 64, shuffle=True)
validation = gluon.data.DataLoader(
    gluon.data.ArrayDataset(images[order[:450]], labels[order[:450]]), 64)

# The network, converted before its Trainer is created
net = nn.HybridSequential(prefix="digits_")
with net.name_scope():
    for channels, stride in ((32, 1), (64, 2)):
        net.add(nn.Conv2D(channels, 3, stride, 1, use_bias=False), nn.BatchNorm(),
                nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
net.initialize(mx.init.Xavier())
amp.convert(net, DTYPE)
net.hybridize(static_alloc=True, static_shape=True)
trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

# Training, from the last checkpoint if there is one
position = amp.load_checkpoint(FOLDER, net, trainer)
for epoch in range(position.epoch, EPOCHS):
    for data, label in position.batches(training):
        with autograd.record():
            loss = loss_fn(net(data), label)
        trainer.backward(loss)  # multiplies gradients by the loss scale
        trainer.step(len(label))  # unscales; skips the update if a gradient overflowed
    accuracy = mx.metric.Accuracy()
    for data, label in validation:
        accuracy.update(label, net(data))
    print(f"epoch {epoch}: validation accuracy {accuracy.get()[1]:.3f}, "
          f"loss scale {trainer.loss_scale:g}, {trainer.skipped} steps skipped")
    amp.save_checkpoint(FOLDER, net, trainer, position)

# Prediction
data = mx.nd.array(images[order[:10]])
print("predicted", net(data).argmax(axis=1).asnumpy().astype(int), "labels", labels[order[:10]])
