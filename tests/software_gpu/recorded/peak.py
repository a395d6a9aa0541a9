"""peak.py gluon_amp|contrib OPTIMIZER: prints the peak GPU memory, in bytes, of three steps of
ResNet-18."""
import sys

import gluon_amp as amp
import mxnet as mx
from mxnet import gluon
from mxnet.contrib import amp as contrib
from software_gpu import recording

how, optimizer = sys.argv[1:]
recording.pretend_finite()
recording.pretend("MultiAllFinite", 1, 1.0)
if how == "contrib":
    contrib.init()
net = gluon.model_zoo.vision.resnet18_v1(classes=16)
net.initialize(ctx=mx.gpu(0))
if how == "gluon_amp":
    amp.convert(net)
net.hybridize(static_alloc=True, static_shape=True)
trainer = (amp if how == "gluon_amp" else gluon).Trainer(net.collect_params(), optimizer, {})
if how == "contrib":
    contrib.init_trainer(trainer)
data, labels = mx.nd.ones((8, 3, 224, 224), mx.gpu(0)), mx.nd.zeros(8, mx.gpu(0))
for _ in range(3):
    with mx.autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(data), labels)
        if how == "contrib":
            with contrib.scale_loss(loss, trainer) as scaled:
                mx.autograd.backward(scaled)
    if how == "gluon_amp":
        trainer.backward(loss)
    trainer.step(8)
print(recording.peak())
