"""Trains a classifier of digits in float16 with Module, and predicts. A second run continues.

    python minimal_module.py
"""
import logging
import os

import gluon_amp as amp  # before mxnet
import mxnet as mx
import numpy as np
from sklearn.datasets import load_digits

DTYPE, EPOCHS, PREFIX = "float16", 5, "runs/minimal_module/digits"
logging.basicConfig(level=logging.INFO, format="%(message)s")
os.makedirs(os.path.dirname(PREFIX), exist_ok=True)
mx.random.seed(0)
np.random.seed(0)

# Data: 1,797 images of 8 x 8 pixels, of which 450 are for validation
images, labels = load_digits(return_X_y=True)
images = (images / 8 - 1).reshape(-1, 1, 8, 8).astype("float32")
order = np.random.permutation(len(labels))
training = mx.io.NDArrayIter(images[order[450:]], labels[order[450:]], 64, shuffle=True,
                             last_batch_handle="discard")
validation = mx.io.NDArrayIter(images[order[:450]], labels[order[:450]], 50)

# The network; convert_symbol inserts the casts, also the one to float32 before the softmax
net = mx.sym.var("data")
for i, (channels, stride) in enumerate(((32, (1, 1)), (64, (2, 2)))):
    net = mx.sym.Convolution(net, kernel=(3, 3), num_filter=channels, stride=stride, pad=(1, 1),
                             no_bias=True, name=f"conv{i}")
    net = mx.sym.relu(mx.sym.BatchNorm(net, fix_gamma=False, name=f"norm{i}"))
net = mx.sym.Pooling(net, global_pool=True, pool_type="avg", kernel=(1, 1))
net = mx.sym.FullyConnected(net, num_hidden=10, name="output")
net = amp.convert_symbol(mx.sym.SoftmaxOutput(net, name="softmax"), DTYPE)

# Training, from the last checkpoint if there is one
first_epoch = max((epoch for epoch in range(EPOCHS + 1)
                   if os.path.exists(f"{PREFIX}-{epoch:04d}.states")), default=0)
if first_epoch:
    module = amp.Module.load(PREFIX, first_epoch, load_optimizer_states=True)
else:
    module = amp.Module(net)
module.fit(training, validation, begin_epoch=first_epoch, num_epoch=EPOCHS, optimizer="adam",
           optimizer_params={"learning_rate": 0.01}, initializer=mx.init.Xavier(),
           epoch_end_callback=mx.callback.module_checkpoint(
               module, PREFIX, save_optimizer_states=True))

# Prediction
predicted = module.predict(validation).argmax(axis=1)[:10].asnumpy().astype(int)
print("predicted", predicted, "labels", labels[order[:10]])
