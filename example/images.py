"""Images for the training scripts of classifiers: datasets, RecordIO files, and networks."""
import functools
import logging
import math
import os
import random
import struct
import sys

import gluon_amp  # noqa: F401  (before mxnet)
import mxnet as mx
import numpy as np
import recipes
from mxnet import gluon
from mxnet.gluon.data import vision
from mxnet.gluon.data.dataloader import default_batchify_fn

log = logging.getLogger("images")

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
CLASSES = {"digits": 10, "mnist": 10, "cifar10": 10, "caltech101": 101, "imagenet": 1000}
_VALID = "digits, cifar10, mnist, caltech101, imagenet, dummy, a folder of folders, or a .rec"


def add_image_flags(parser):
    """Adds the flags of images; second names are from GluonCV's scripts."""
    positive_int = recipes.positive_int
    crop_ratio = recipes.flag_type(float, lambda x: 0 < x <= 1, "must be above 0, and at most 1")
    recipes.add_flags(parser, "data", (
        ("--dataset --rec-train", str, "digits", _VALID),
        ("--val --rec-val", str, None, "validation data, if the dataset is a folder or a .rec"),
        ("--use-rec", bool, False, "require that the dataset is a .rec"),
        ("--rec-train-idx", str, None, "index of a .rec dataset, which must be next to it"),
        ("--rec-val-idx", str, None, "index of the validation data"),
        ("--data-dir", str, None, "folder of the dataset (default: MXNet's)"),
        ("--examples", positive_int, None, "number of training images to use (default: all)"),
        ("--classes --num-classes", positive_int, None,
         "number of classes (default: the dataset's or the folder's; 10 for a .rec)"),
        ("--image-size --input-size", positive_int, None,
         "height and width (default: the dataset's; 224 for a folder or a .rec)"),
        ("--crop-ratio", crop_ratio, 1.0, "center crop in validation, a share of each side"),
        ("--random-crop", bool, False,
         "crop that share in training (default: 40 to 100 %%; of up to 32 pixels all)"),
        ("--num-workers --num-data-workers -j", recipes.non_negative_int, 0,
         "processes that load images"),
        ("--rgb-mean", recipes.decimals, [114.75], "mean of pixels from 0 to 255: one or three"),
        ("--rgb-std", recipes.deviations, [63.75], "standard deviation of pixels")))


# ---- datasets

def image_loaders(args, workers):
    """Returns the sampler and loader of this worker's training data, and that of validation."""
    train_data, val_data = image_datasets(args)
    if args.examples:
        train_data = train_data.take(args.examples)
    order = recipes.WorkerSampler(len(train_data), args.seed, workers)
    options = {"num_workers": args.num_workers,
               "batchify_fn": functools.partial(image_batch, *(
                   [x / 255 for x in values] for values in (args.rgb_mean, args.rgb_std)))}
    loader = gluon.data.DataLoader(train_data, args.batch_size, sampler=order,
                                   last_batch="discard", **options)
    if not len(loader):
        raise ValueError(f"{len(order)} images make no batch of {args.batch_size}")
    return order, loader, gluon.data.DataLoader(val_data, args.batch_size, **options)


def image_batch(mean, std, samples):
    """Returns a batch of images and labels, and normalizes pixels: faster than image by image."""
    data, labels = default_batchify_fn(samples)
    if data.dtype == np.uint8:
        data = mx.nd.image.normalize(mx.nd.image.to_tensor(data), mean, std)
    return [data, labels]


def classes_of(args):
    """Returns the number of classes of the labels."""
    return args.classes or CLASSES.get(args.dataset, 10)


def check_labels(args, label):
    """Refuses a batch with labels that are not classes, which MXNet accepts silently."""
    largest = label.max().asscalar()
    if largest >= classes_of(args):
        raise ValueError(f"the data has a label {largest:g}, and the network {classes_of(args)} "
                         "classes, from 0 on: --classes")


def check_flags(args):
    """Refuses flags that the dataset would ignore."""
    name = args.dataset
    if args.val and name in (*CLASSES, "dummy"):
        raise ValueError(f"--val is for a folder or a .rec file: {name} has its own validation "
                         f"images. Received: --val {args.val}")
    if args.use_rec and not name.endswith(".rec"):
        raise ValueError(f"--use-rec needs --rec-train FILE.rec. Received: --dataset {name}")
    if name == "digits" and args.image_size or name in ("digits", "dummy") and (
            args.random_crop or args.crop_ratio < 1):
        raise ValueError(f"the images of {name} are not preprocessed: remove --image-size, "
                         "--crop-ratio and --random-crop")


def image_datasets(args):
    """Returns training and validation data: pairs of an image and a label."""
    name = args.dataset
    if not args.benchmark:
        check_flags(args)
    if args.benchmark or name == "dummy":
        return random_images(args), random_images(args)
    if name == "digits":
        return digits()
    if name in ("cifar10", "mnist"):
        data = downloaded(name, args.data_dir)
    elif name in CLASSES:
        if not args.data_dir:
            raise ValueError(f"{name} is not downloaded: pass --data-dir FOLDER with train/ and "
                             "val/, each with a folder for each class")
        data = folders(args, *(os.path.join(args.data_dir, part) for part in ("train", "val")))
    else:
        if not os.path.exists(name):
            raise ValueError(f"{name} does not exist. --dataset takes {_VALID} file")
        if not args.val:
            log.warning("no --val: validation uses the training data")
        read = records if name.endswith(".rec") else folders
        data = read(args, name, args.val or name)
    size = args.image_size or SHAPES.get(name, (3, 224, 224))[1]
    log.info("images of %d x %d pixels (--image-size)", size, size)
    return [part.transform_first(image_transform(args, size, train))
            for part, train in zip(data, (True, False))]


class Folder(vision.ImageFolderDataset):
    """The images of a folder with a folder for each class, in the order of `classes`."""

    def __init__(self, path, classes=None):
        recipes.must_exist(path)
        super().__init__(path)
        names = [name for name in self.synsets if not name.startswith(".")]
        items = [(file, self.synsets[label]) for file, label in self.items]
        items = [(file, name) for file, name in items if name in names]
        self.synsets = classes or names
        other = {name for _, name in items} - set(self.synsets)
        if not items or other:
            raise ValueError(f"{path} has " + (
                f"the classes {', '.join(sorted(other))}, which the training data lacks" if other
                else "no images: it must have a folder for each class, with .jpg or .png files"))
        self.items = [(file, self.synsets.index(name)) for file, name in items]

    def __getitem__(self, i):
        try:
            image, label = super().__getitem__(i)
            image.wait_to_read()
            return image, label
        except mx.MXNetError as error:
            raise ValueError(f"{self.items[i][0]} is not an image that MXNet can read: "
                             f"{recipes.first_line(error)}") from None


def folders(args, path, val_path):
    """Returns the images of two folders. Their classes have the same numbers."""
    train = Folder(path)
    if args.examples:  # they are sorted by class
        np.random.RandomState(0).shuffle(train.items)
    if args.dataset not in CLASSES:
        args.classes = args.classes or len(train.synsets)
    return train, Folder(val_path, train.synsets)


def records(args, *paths):
    """Returns the images of RecordIO files; a label may be an array of one number."""
    for path, index in zip(paths, (args.rec_train_idx, args.rec_val_idx)):
        check_records(path, classes_of(args))
        beside = f"{os.path.splitext(os.path.abspath(path))[0]}.idx"
        if not os.path.exists(beside) or index and os.path.abspath(index) != beside:
            raise ValueError(f"{path} needs an index next to it: {beside}. Received: {index}")
    return [vision.ImageRecordDataset(path).transform(
        lambda image, label: (image, np.float32(label).item())) for path in paths]


def downloaded(name, folder):
    """Returns MXNet's MNIST or CIFAR-10."""
    dataset = vision.CIFAR10 if name == "cifar10" else vision.MNIST
    folder = folder or os.path.join(mx.base.data_dir(), "datasets", name)
    try:
        return [dataset(folder, train=train) for train in (True, False)]
    except OSError as error:
        raise ValueError(f"{name} could not be downloaded ({type(error).__name__}), and {folder} "
                         "lacks files of it. Valid: --data-dir with all of them") from None


def digits():
    """Returns scikit-learn's scanned digits of 8x8 pixels; 450 of 1,797 are for validation."""
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).reshape(-1, 1, 8, 8).astype("float32")
    order = np.random.RandomState(0).permutation(len(labels))
    return [gluon.data.ArrayDataset(images[part], labels[part].astype("int32"))
            for part in (order[450:], order[:450])]


def random_images(args):
    """Returns eight batches of random images and labels."""
    shape = SHAPES.get(args.dataset, (3, args.image_size or 224, args.image_size or 224))
    rng, count = np.random.RandomState(args.seed), 8 * args.batch_size
    return gluon.data.ArrayDataset(rng.rand(count, *shape).astype("float32"),
                                   rng.randint(0, classes_of(args), count).astype("int32"))


def image_transform(args, size, train):
    """Returns the function that resizes and crops an image, and mirrors half of a training's."""
    mirrors = train and args.dataset != "mnist"  # a mirrored digit is none
    transforms, resized = vision.transforms, math.ceil(size / args.crop_ratio)
    if args.random_crop and args.crop_ratio == 1:
        raise ValueError("--random-crop needs a --crop-ratio below 1, such as 0.875")
    if not train or args.random_crop:
        resize = transforms.Resize(resized, keep_ratio=args.crop_ratio < 1)
    elif size > 32:
        resize = transforms.RandomResizedCrop(size, (0.4, 1.0))
    else:
        resize = transforms.Resize(size)

    def transform(image):
        image = resize(image).asnumpy()  # numpy's slices take a hundredth of the time of MXNet's
        x, y = (random.randint(0, side - size) if train and side > size else (side - size) // 2
                for side in image.shape[1::-1])
        image = image[y:y + size, x:x + size]
        return image[:, ::-1] if mirrors and random.random() < 0.5 else image
    return transform


# ---- RecordIO files

_RECORD = 0xCED7230A  # the first bytes of each record
# The first bytes of images that OpenCV reads: JPEG, PNG, BMP, WebP, TIFF, JPEG 2000, PNM, EXR,
# HDR, Sun.
_IMAGES = (b"\xff\xd8", b"\x89PNG", b"BM", b"RIFF", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP", b"P1",
           b"P2", b"P3", b"P4", b"P5", b"P6", b"v/1\x01", b"#?R", b"\x59\xa6\x6a\x95")


def check_records(path, classes):
    """Returns the number of images in a RecordIO file, from its headers alone. Refuses a damaged
    file, records that are no images, and labels that are not classes."""
    recipes.must_exist(path)
    size, at, count = os.path.getsize(path), 0, 0
    if size == 0:
        raise ValueError(f"{path} is empty")
    with open(path, "rb") as file:
        while at < size:
            file.seek(at)
            header = file.read(64).ljust(64, b"\0")
            start, length, labels, label = struct.unpack("<IIIf", header[:16])
            if start != _RECORD:
                raise ValueError(f"{path} is not a RecordIO file, or damaged: no record starts at "
                                 f"byte {at}")
            part, length = length >> 29, length & (1 << 29) - 1
            if part in (0, 1):  # a whole record or its first part
                count += 1
                if labels > 1:
                    raise ValueError(f"{path} has labels of {labels} numbers; a classifier takes "
                                     "one")
                if labels:
                    label, = struct.unpack("<f", header[32:36])
                if not (0 <= label < classes and label == int(label)):
                    raise ValueError(f"{path} has a label {label:g}, and the network {classes} "
                                     "classes, from 0 on: --num-classes")
                image = header[32 + 4 * labels:] if length > 24 else b""
                if at + 8 + length <= size and not image.startswith(_IMAGES):
                    raise ValueError(f"{path} has a record at byte {at} that is not an image "
                                     "that MXNet can read")
            at += 8 + (length + 3) // 4 * 4
    if at > size:
        raise ValueError(f"{path} is truncated: {at - size} bytes of its last record are missing")
    return count


# ---- networks

def small_network(classes):
    """A network of three convolutions and a dense layer, which trains in seconds on a CPU."""
    nn = gluon.nn
    net = nn.HybridSequential()
    for channels, stride in ((32, 1), (64, 2), (128, 2)):
        net.add(nn.Conv2D(channels, 3, stride, 1, use_bias=False), nn.BatchNorm(),
                nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(classes))
    return net


def zoo_network(name, **options):
    """Returns `small`, a network of MXNet's model zoo, or else of gluoncv's."""
    get_model = gluon.model_zoo.vision.get_model
    try:
        get_model("")
    except ValueError as error:  # which lists the names
        names = ["small", *str(error).split("\n\t")[1:]]
    if name == "small":
        get_model = lambda name, **options: small_network(**options)  # noqa: E731
    if name.lower() not in names:
        try:
            zoo = import_gluoncv().model_zoo
        except ImportError as error:
            raise ValueError(f"MXNet's model zoo has no {name}, and gluoncv's cannot be imported "
                             f"({recipes.first_line(error)}): in the checkout, pip install "
                             f"'.[cpu,gluoncv]'{recipes.did_you_mean(name, names)}") from None
        get_model, names = zoo.get_model, [*names, *zoo.get_model_list()]
    if name.lower() not in names:
        raise ValueError(f"neither MXNet's nor gluoncv's model zoo has {name}"
                         f"{recipes.did_you_mean(name, names)}")
    try:
        return get_model(name, **options)
    except TypeError as error:
        raise ValueError(f"{name} does not take all of {', '.join(options)}: {error}") from None
    except (OSError, RuntimeError) as error:
        if not options.get("pretrained"):
            raise
        raise OSError(f"{name} could not be downloaded ({type(error).__name__})") from None


def import_gluoncv():
    """Imports gluoncv without PyTorch: it refuses PyTorch 2, which MXNet's networks do not need."""
    torch = sys.modules.pop("torch", None)
    sys.modules["torch"] = None  # makes `import torch` raise ImportError
    try:
        import gluoncv
    finally:
        del sys.modules["torch"]
        if torch is not None:
            sys.modules["torch"] = torch
    return gluoncv
