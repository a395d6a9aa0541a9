"""The detector of example/object_detection.py, shapes in clutter: mean average precision."""
import common
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

run = common.Run(__doc__)
from object_detection import CLASSES, SSD, average_precision, draw  # noqa: E402

SIZE, BATCH, STEPS, VALIDATION = 64, 16, 400, 128


def cluttered(rng, count):
    """Returns images with lines, beside the shapes to detect, and their labels."""
    images, labels = draw(rng, count, SIZE)
    for image in images:
        for _ in range(4):
            x, y = rng.randint(SIZE - 2, size=2)
            across, length = rng.randint(2), rng.randint(12, 40)
            rows = slice(y, y + (2 if across else length))
            columns = slice(x, x + (length if across else 2))
            image[:, rows, columns] += rng.uniform(0.5, 1.5, (3, 1, 1)) * rng.choice([-1, 1])
    return images, labels


net = SSD(12)
net.initialize(mx.init.Xavier())
run.convert(net)
net(run.array(np.zeros((1, 3, SIZE, SIZE))))  # allocates all parameters
class_loss, box_loss = gluon.loss.SoftmaxCrossEntropyLoss(), gluon.loss.HuberLoss()
schedule = mx.lr_scheduler.CosineScheduler(STEPS, 0.05, warmup_steps=30)
trainer = run.trainer(net, "sgd", {"learning_rate": 0.05, "lr_scheduler": schedule, "wd": 5e-4,
                                   "momentum": 0.9})
for _ in run.steps(STEPS):
    images, labels = cluttered(run.rng, BATCH)
    data, label = run.array(images), mx.nd.array(labels)
    with autograd.record():
        anchors, scores, boxes = net(data)
        with autograd.pause():
            box_target, box_mask, class_target = mx.nd.contrib.MultiBoxTarget(
                anchors, label, scores.transpose((0, 2, 1)), negative_mining_ratio=3)
        loss = class_loss(scores, class_target, (class_target >= 0).expand_dims(-1)) \
            + box_loss(boxes * box_mask, box_target * box_mask)
    run.update(trainer, loss, BATCH)
images, labels = cluttered(run.validation_rng, VALIDATION)
detections = []
for begin in range(0, VALIDATION, BATCH):
    anchors, scores, boxes = net(run.array(images[begin:begin + BATCH]))
    found = mx.nd.contrib.MultiBoxDetection(scores.softmax().transpose((0, 2, 1)), boxes, anchors,
                                            nms_threshold=0.45, threshold=0.05)
    detections += [rows[rows[:, 0] >= 0] for rows in found.asnumpy()]
run.end(trainer, mean_average_precision=float(np.mean(
    [average_precision(detections, labels, kind) for kind in range(len(CLASSES))])))
