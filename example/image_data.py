"""Images for the Module scripts: RecordIO files (made by MXNet's im2rec), or random numbers."""
import os
import struct

import mxnet as mx
import numpy as np
from command import positive

_MAGIC = 0xCED7230A  # begins each record of a RecordIO file


def add_arguments(parser):
    data = parser.add_argument_group("data")
    data.add_argument("--data-train", help="RecordIO file of training images")
    data.add_argument("--data-val", help="RecordIO file of validation images")
    data.add_argument("--image-shape", default="3,224,224", help="channels,height,width")
    data.add_argument("--num-classes", type=positive, default=1000)
    data.add_argument("--num-examples", type=int,
                      help="training images in an epoch, for the schedule, if not as many as the "
                           "file has")
    data.add_argument("--rgb-mean", default="123.68,116.779,103.939")
    data.add_argument("--rgb-std", default="1,1,1")
    data.add_argument("--data-nthreads", type=int, default=4, help="threads that decode images")
    data.add_argument("--benchmark", type=int, default=0, choices=(0, 1),
                      help="1: random images, no files")
    augment = parser.add_argument_group("augmentation (as in MXNet's image-classification example)")
    for flag, kind, default in (
            ("pad-size", int, 0), ("fill-value", int, 127), ("random-crop", int, 0),
            ("random-mirror", int, 0), ("random-resized-crop", int, 0),
            ("max-random-h", int, 0), ("max-random-s", int, 0), ("max-random-l", int, 0),
            ("min-random-aspect-ratio", float, None), ("max-random-aspect-ratio", float, 0.0),
            ("max-random-rotate-angle", int, 0), ("max-random-shear-ratio", float, 0.0),
            ("max-random-scale", float, 1.0), ("min-random-scale", float, 1.0),
            ("max-random-area", float, 1.0), ("min-random-area", float, 1.0),
            ("min-crop-size", int, -1), ("max-crop-size", int, -1), ("brightness", float, 0.0),
            ("contrast", float, 0.0), ("saturation", float, 0.0), ("pca-noise", float, 0.0)):
        augment.add_argument(f"--{flag}", type=kind, default=default)


def image_shape(args):
    try:
        channels, height, width = map(int, args.image_shape.split(","))
    except ValueError:
        raise SystemExit("--image-shape takes channels,height,width, such as 3,224,224. "
                         f"Received: {args.image_shape}") from None
    return channels, height, width


def count_records(path, classes):
    """How many records a RecordIO file has; an error if it is missing, empty or cut short, or if
    a label is beyond the classes."""
    if not os.path.exists(path):
        raise SystemExit(f"{path} does not exist")
    size, count, at = os.path.getsize(path), 0, 0
    if size == 0:
        raise SystemExit(f"{path} is empty")
    with open(path, "rb") as file:
        while at < size:
            file.seek(at)
            header = file.read(16).ljust(16, b"\0")
            magic, length, labels, label = struct.unpack("<IIIf", header)
            if magic != _MAGIC:
                raise SystemExit(f"{path} is no RecordIO file, or damaged: no record begins at "
                                 f"byte {at}")
            part, length = length >> 29, length & (1 << 29) - 1
            if part in (0, 1) and labels == 0 and label >= classes:  # 0 means one, in this place
                raise SystemExit(f"{path} has a label {label:g}, and the network {classes} "
                                 "classes, from 0 on: --num-classes")
            at += 8 + (length + 3) // 4 * 4
            count += part in (0, 1)  # a record's only or first part
    if at > size:
        raise SystemExit(f"{path} is cut short: its last record ends {at - size} bytes behind it")
    return count


def iterators(args, part=0, parts=1):
    """Training and validation data, and how many training images there are."""
    shape = image_shape(args)
    if args.benchmark:
        examples = args.num_examples or 100 * args.batch_size
        return _Random((args.batch_size, *shape), args.num_classes, examples), None, examples
    if not args.data_train:
        raise SystemExit("--data-train FILE.rec is needed, or --benchmark 1 for random images")
    examples = count_records(args.data_train, args.num_classes)
    if examples < args.batch_size:
        raise SystemExit(f"{args.data_train} has {examples} images, fewer than one batch of "
                         f"{args.batch_size}")
    validated = count_records(args.data_val, args.num_classes) if args.data_val else 0
    mean, std = ([float(x) for x in text.split(",")] for text in (args.rgb_mean, args.rgb_std))
    common = {
        "data_shape": shape, "batch_size": args.batch_size, "label_width": 1,
        "mean_r": mean[0], "mean_g": mean[1], "mean_b": mean[2],
        "std_r": std[0], "std_g": std[1], "std_b": std[2],
        "preprocess_threads": args.data_nthreads, "num_parts": parts, "part_index": part}
    train = mx.io.ImageRecordIter(
        path_imgrec=args.data_train, shuffle=True, seed=args.seed, seed_aug=args.seed,
        rand_crop=bool(args.random_crop), rand_mirror=bool(args.random_mirror),
        random_resized_crop=bool(args.random_resized_crop), pad=args.pad_size,
        fill_value=args.fill_value, random_h=args.max_random_h, random_s=args.max_random_s,
        random_l=args.max_random_l, max_aspect_ratio=args.max_random_aspect_ratio,
        min_aspect_ratio=args.min_random_aspect_ratio,
        max_rotate_angle=args.max_random_rotate_angle,
        max_shear_ratio=args.max_random_shear_ratio, max_random_scale=args.max_random_scale,
        min_random_scale=args.min_random_scale, max_random_area=args.max_random_area,
        min_random_area=args.min_random_area, min_crop_size=args.min_crop_size,
        max_crop_size=args.max_crop_size, brightness=args.brightness, contrast=args.contrast,
        saturation=args.saturation, pca_noise=args.pca_noise, **common)
    val = None
    if validated:
        # Module counts the padding of a last, smaller batch as images: best that there is none.
        whole = [n for n in range(args.batch_size, args.batch_size // 2, -1) if validated % n == 0]
        common["batch_size"] = (whole or [args.batch_size])[0]
        val = mx.io.ImageRecordIter(path_imgrec=args.data_val, **common)
    return train, val, args.num_examples or examples


class _Random(mx.io.DataIter):
    """The same batch of random numbers, again and again."""

    def __init__(self, shape, classes, examples):
        super().__init__(shape[0])
        self.batches, self.done = max(1, examples // shape[0]), 0
        self.data = mx.nd.random.uniform(-1, 1, shape)
        self.label = mx.nd.array(np.random.randint(0, classes, shape[0]))
        self.provide_data = [mx.io.DataDesc("data", shape)]
        self.provide_label = [mx.io.DataDesc("softmax_label", shape[:1])]

    def reset(self):
        self.done = 0

    def next(self):
        if self.done == self.batches:
            raise StopIteration
        self.done += 1
        return mx.io.DataBatch([self.data], [self.label], pad=0)
