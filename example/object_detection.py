"""Trains an object detector (SSD) in float32, float16 or bfloat16, on images that it draws.

    python object_detection.py --dtype float16
    python object_detection.py --steps 2000 --batch-size 64 --gpus 0

The images are noise with one to three squares, discs and triangles. The detector predicts the
bounding box and the class of each. bfloat16 runs on CPUs only.
"""
import time

import command_line as cli
import gluon_amp as amp  # before mxnet
import mxnet as mx
import numpy as np
import recipes
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

CLASSES = ("square", "disc", "triangle")
MAX_OBJECTS = 3  # maximum number of objects in an image
SIZES = ((0.2, 0.27), (0.37, 0.45))  # sizes of each map's anchors, as shares of the image
RATIOS = (1.0, 2.0, 0.5)
ANCHORS = len(SIZES[0]) + len(RATIOS) - 1  # anchors at each position


def draw(rng, count, size):
    """Returns images, and for each image three rows of class, left, top, right and bottom. Rows of
    -1 are padding."""
    images = rng.normal(0.0, 0.3, (count, 3, size, size)).astype(np.float32)
    labels = np.full((count, MAX_OBJECTS, 5), -1, np.float32)
    y, x = np.mgrid[:size, :size] + 0.5
    for image, label in zip(images, labels):
        for row in label[:rng.randint(1, MAX_OBJECTS + 1)]:
            side = rng.uniform(0.18, 0.45) * size
            left, top = rng.uniform(0, size - side, 2)
            kind = rng.randint(len(CLASSES))
            across, down = (x - left) / side, (y - top) / side
            inside = (across >= 0) & (across <= 1) & (down >= 0) & (down <= 1)
            if CLASSES[kind] == "disc":
                inside &= (across - 0.5) ** 2 + (down - 0.5) ** 2 <= 0.25
            if CLASSES[kind] == "triangle":
                inside &= abs(across - 0.5) <= down / 2
            image[:, inside] += rng.uniform(0.5, 1.5, (3, 1)) * rng.choice([-1, 1])
            row[:] = kind, *(np.array([left, top, left + side, top + side]) / size)
    return images, labels


def convolutions(*channels):
    """Convolutions with batch norms and a pooling layer at the end."""
    net = nn.HybridSequential()
    for each in channels:
        net.add(nn.Conv2D(each, 3, padding=1, use_bias=False), nn.BatchNorm(),
                nn.Activation("relu"))
    net.add(nn.MaxPool2D())
    return net


class SSD(gluon.HybridBlock):
    """Returns anchors, and for each the class scores and the offsets of the box."""

    def __init__(self, width):
        super().__init__()
        with self.name_scope():
            stem = nn.HybridSequential()
            stem.add(convolutions(width), convolutions(2 * width),
                     convolutions(4 * width, 4 * width))
            self.maps, self.scores, self.boxes = (nn.HybridSequential() for _ in range(3))
            self.maps.add(stem, convolutions(4 * width))
            for _ in SIZES:
                self.scores.add(nn.Conv2D(ANCHORS * (len(CLASSES) + 1), 3, padding=1))
                self.boxes.add(nn.Conv2D(ANCHORS * 4, 3, padding=1))

    def hybrid_forward(self, F, x):
        anchors, scores, boxes = [], [], []
        for sizes, stage, score, box in zip(SIZES, self.maps, self.scores, self.boxes):
            x = stage(x)
            anchors.append(F.contrib.MultiBoxPrior(x, sizes=sizes, ratios=RATIOS))
            scores.append(F.Flatten(F.transpose(score(x), (0, 2, 3, 1))))
            boxes.append(F.Flatten(F.transpose(box(x), (0, 2, 3, 1))))
        return (F.concat(*anchors, dim=1),
                F.reshape(F.concat(*scores, dim=1), (0, -1, len(CLASSES) + 1)),
                F.concat(*boxes, dim=1))


def overlap(box, others):
    """Returns the intersection over union."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    intersection = np.prod(np.maximum(high - low, 0), 1)
    areas = np.prod(box[2:] - box[:2]) + np.prod(others[:, 2:] - others[:, :2], 1)
    return intersection / (areas - intersection)


def average_precision(detections, labels, kind):
    """Returns the average precision of a class at an IoU of 0.5; NaN without objects."""
    objects = [label[label[:, 0] == kind, 1:] for label in labels]
    detected = [np.zeros(len(boxes), bool) for boxes in objects]
    candidates = [(row[1], i, row[2:]) for i, rows in enumerate(detections)
                  for row in rows if row[0] == kind]
    hits = []
    for _, i, box in sorted(candidates, key=lambda candidate: -candidate[0]):
        overlaps = overlap(box, objects[i]) * ~detected[i]
        hits.append(len(overlaps) > 0 and overlaps.max() >= 0.5)
        if hits[-1]:
            detected[i][overlaps.argmax()] = True
    true_positives = np.cumsum(hits)
    precision = np.maximum.accumulate((true_positives / np.arange(1, len(hits) + 1))[::-1])[::-1]
    count = sum(map(len, objects))
    return float((precision * hits).sum() / count) if count else np.nan


def parse_flags(arguments):
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    flag = parser.add_argument_group("network").add_argument
    flag("--image-size", type=cli.positive_int, default=64,
         help="height and width in pixels, a multiple of 16")
    flag("--width", type=cli.positive_int, default=16, help="channels of the first convolution")
    flag = parser.add_argument_group("training").add_argument
    flag("--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
         help="type of the network")
    flag("--batch-size", type=cli.positive_int, default=32, help="images in a step")
    flag("--steps", type=cli.positive_int, default=1000, help="number of updates")
    flag("--lr", type=cli.positive_float, default=0.05, help="peak learning rate")
    flag("--momentum", type=cli.fraction, default=0.9, help="momentum of SGD")
    flag("--wd", type=cli.non_negative_float, default=5e-4, help="weight decay")
    flag = parser.add_argument_group("output").add_argument
    flag("--log-interval", type=cli.positive_int, default=50,
         help="number of steps between two log lines")
    flag("--save", type=cli.new_file, help="file to save the parameters to")
    flag("--validation-images", type=cli.positive_int, default=128,
         help="number of validation images")
    cli.add_device_flags(parser)
    args = parser.parse_args(arguments)
    if args.image_size % 16:
        parser.error(f"--image-size must be a multiple of 16. Received: {args.image_size}")
    if len(args.gpus) > 1:
        parser.error("--gpus: this script uses one GPU")
    return args


def detect(net, images, batch_size, device):
    """Returns the detections of each image: rows of class, score and box."""
    detections = []
    for begin in range(0, len(images), batch_size):
        anchors, scores, boxes = net(nd.array(images[begin:begin + batch_size], device))
        detected = nd.contrib.MultiBoxDetection(
            scores.softmax().transpose((0, 2, 1)), boxes, anchors, nms_threshold=0.45,
            threshold=0.05)
        detections += [rows[rows[:, 0] >= 0] for rows in detected.asnumpy()]
    return detections


def main(arguments=None):
    """Trains with the flags, and prints the mean average precision."""
    args = parse_flags(arguments)
    device, = recipes.devices_of(args.gpus)
    recipes.seed_all(args.seed)
    rng = np.random.RandomState(args.seed)  # of the images

    # The network, in the type of --dtype. Convert before the Trainer is created
    net = SSD(args.width)
    net.initialize(mx.init.Xavier(), device)
    amp.convert(net, args.dtype)
    net.hybridize(static_alloc=True, static_shape=True)
    class_loss, box_loss = gluon.loss.SoftmaxCrossEntropyLoss(), gluon.loss.HuberLoss()

    # The Trainer updates float32 copies of 16-bit weights, because updates are often too small for
    # 16 bits
    net(nd.zeros((1, 3, args.image_size, args.image_size), device))  # allocates all parameters
    schedule = mx.lr_scheduler.CosineScheduler(
        args.steps, args.lr, warmup_steps=min(50, args.steps - 1))
    trainer = amp.Trainer(net.collect_params(), "sgd",
                          {"learning_rate": args.lr, "lr_scheduler": schedule, "wd": args.wd,
                           "momentum": args.momentum}, loss_scale=args.loss_scale)

    total, start = 0.0, time.time()
    for step in range(1, args.steps + 1):
        images, labels = draw(rng, args.batch_size, args.image_size)
        data, label = nd.array(images, device), nd.array(labels, device)
        with autograd.record():
            anchors, scores, boxes = net(data)
            with autograd.pause():  # matches anchors to objects; hard negative mining for others
                box_target, box_mask, class_target = nd.contrib.MultiBoxTarget(
                    anchors, label, scores.transpose((0, 2, 1)), negative_mining_ratio=3)
            loss = class_loss(scores, class_target, (class_target >= 0).expand_dims(-1)) \
                + box_loss(boxes * box_mask, box_target * box_mask)
        # Multiplies gradients by the loss scale, so that small ones do not become 0 in float16
        trainer.backward(loss)
        # Unscales the gradients. If one overflowed, skips the update and lowers the scale
        trainer.step(args.batch_size)
        total = total + loss.mean()
        if step % args.log_interval == 0 or step == args.steps:
            steps = (step - 1) % args.log_interval + 1
            print(f"step {step}: loss={total.asscalar() / steps:.5f} "
                  f"lr={trainer.learning_rate:.2e} loss-scale={trainer.loss_scale:g} "
                  f"skipped={trainer.skipped} {(time.time() - start) / steps * 1e3:.0f} ms/step",
                  flush=True)
            total, start = 0.0, time.time()
    if args.save:
        net.save_parameters(args.save)

    # Detections in validation images
    rng = np.random.RandomState(args.seed + 1)
    images, labels = draw(rng, args.validation_images, args.image_size)
    detections = detect(net, images, args.batch_size, device)
    precisions = [average_precision(detections, labels, kind) for kind in range(len(CLASSES))]
    print(f"mAP@0.5={np.nanmean(precisions):.4f}", *(
        f"{name}={each:.4f}" for name, each in zip(CLASSES, precisions)))


if __name__ == "__main__":
    cli.run(main)
