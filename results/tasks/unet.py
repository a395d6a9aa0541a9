"""A U-Net that segments shapes in noise: intersection over union."""
import common
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

run = common.Run(__doc__)
SIZE, BATCH, STEPS, WIDTH = 32, 16, 800, 8


def drawn(rng, count):
    """Returns images and masks: 0 is background, 1 discs, 2 rectangles."""
    images = rng.normal(0, 0.5, (count, 1, SIZE, SIZE))
    masks = np.zeros((count, SIZE, SIZE))
    y, x = np.mgrid[:SIZE, :SIZE]
    for image, mask in zip(images, masks):
        for kind in (1, 2):
            cx, cy = rng.randint(6, SIZE - 6, 2)
            a, b = rng.randint(3, 8, 2)
            inside = ((x - cx) ** 2 + (y - cy) ** 2 < a * a) if kind == 1 else \
                (abs(x - cx) < a) & (abs(y - cy) < b)
            image[0][inside] += rng.uniform(0.4, 1.0)
            mask[inside] = kind
    return images, masks


def convolutions(channels):
    net = nn.HybridSequential()
    for _ in range(2):
        net.add(nn.Conv2D(channels, 3, padding=1, use_bias=False), nn.BatchNorm(),
                nn.Activation("relu"))
    return net


class UNet(gluon.HybridBlock):
    """Two levels down and up, with skip connections."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.down1, self.down2 = convolutions(WIDTH), convolutions(2 * WIDTH)
            self.bottom = convolutions(4 * WIDTH)
            self.pool = nn.MaxPool2D()
            self.up2 = nn.Conv2DTranspose(2 * WIDTH, 2, 2)
            self.up1 = nn.Conv2DTranspose(WIDTH, 2, 2)
            self.join2, self.join1 = convolutions(2 * WIDTH), convolutions(WIDTH)
            self.scores = nn.Conv2D(3, 1)

    def hybrid_forward(self, F, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.join2(F.concat(self.up2(c), b, dim=1))
        return self.scores(self.join1(F.concat(self.up1(b), a, dim=1)))


net = UNet()
net.initialize(mx.init.Xavier())
run.convert(net)
net(run.array(np.zeros((1, 1, SIZE, SIZE))))  # allocates all parameters
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss(axis=1)
trainer = run.trainer(net, "adam", {"learning_rate": 3e-3})
for _ in run.steps(STEPS):
    images, masks = drawn(run.rng, BATCH)
    with autograd.record():
        loss = loss_fn(net(run.array(images)), mx.nd.array(masks))
    run.update(trainer, loss, BATCH)
images, masks = drawn(run.validation_rng, 256)
found = np.concatenate([net(run.array(images[i:i + 64])).asnumpy().argmax(1)
                        for i in range(0, len(images), 64)])
shares = [((found == kind) & (masks == kind)).sum() / ((found == kind) | (masks == kind)).sum()
          for kind in (1, 2)]
run.end(trainer, intersection_over_union=float(np.mean(shares)))
