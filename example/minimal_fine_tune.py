"""Fine-tunes a pretrained network on folders of images in float16, and predicts.

    python minimal_fine_tune.py photos/train photos/test

Both folders have a folder of images for each class. The pretrained weights are downloaded. A
second run continues the first.
"""
import sys

import gluon_amp as amp  # before mxnet
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.data.vision import ImageFolderDataset, transforms

NAME, DTYPE, EPOCHS, FOLDER = "mobilenetv2_1.0", "float16", 3, "runs/minimal_fine_tune"
if len(sys.argv) != 3:
    raise SystemExit(__doc__)
mx.random.seed(0)
np.random.seed(0)

# Data, normalized as for the pretrained network
prepare = transforms.Compose([
    transforms.Resize(256, keep_ratio=True), transforms.CenterCrop(224), transforms.ToTensor(),
    transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
training, test = map(ImageFolderDataset, sys.argv[1:])
if test.synsets != training.synsets:
    raise SystemExit(f"classes differ: {training.synsets} in training, {test.synsets} in the test")
loader = gluon.data.DataLoader(training.transform_first(prepare), 8, shuffle=True)
test_loader = gluon.data.DataLoader(test.transform_first(prepare), 8)

# The pretrained features with a new head, converted before their Trainer is created
net = gluon.nn.HybridSequential(prefix="fine_tuned_")
with net.name_scope():
    net.add(gluon.model_zoo.vision.get_model(NAME, pretrained=True, prefix="").features,
            gluon.nn.Dense(len(training.synsets)))
net[1].initialize(mx.init.Xavier())
amp.convert(net, DTYPE)
net.hybridize(static_alloc=True, static_shape=True)
trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

# Training, from the last checkpoint if there is one
position = amp.load_checkpoint(FOLDER, net, trainer)
for epoch in range(position.epoch, EPOCHS):
    for data, label in position.batches(loader):
        with autograd.record():
            loss = loss_fn(net(data), label)
        trainer.backward(loss)  # multiplies gradients by the loss scale
        trainer.step(len(label))  # unscales; skips the update if a gradient overflowed
    accuracy = mx.metric.Accuracy()
    for data, label in test_loader:
        accuracy.update(label, net(data))
    print(f"epoch {epoch}: test accuracy {accuracy.get()[1]:.3f}")
    amp.save_checkpoint(FOLDER, net, trainer, position)

# Prediction of the first images of the test
for (path, label), (image, _) in zip(test.items[:3], test.transform_first(prepare)):
    predicted = int(net(image.expand_dims(0)).argmax(axis=1).asscalar())
    print(path, "predicted", training.synsets[predicted], "label", test.synsets[label])
