"""Images for the training scripts of classifiers: datasets, RecordIO files, validation."""
import functools
import logging
import math
import os
import random
import struct

import command_line as cli
import gluon_amp  # noqa: F401  (before mxnet)
import mxnet as mx
import numpy as np
import recipes
from mxnet import gluon
from mxnet.gluon.data import vision
from mxnet.gluon.data.dataloader import default_batchify_fn

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
CLASSES = {"digits": 10, "mnist": 10, "cifar10": 10, "caltech101": 101, "imagenet": 1000}
RECORD = 0xCED7230A  # the first number of a RecordIO record
DATASETS = "digits, cifar10, mnist, caltech101, imagenet, dummy, a folder of folders, or a .rec"


def image_loaders(args, workers):
    """Returns this worker's sampler and loader of training images, and the loader of validation."""
    train_data, val_data = image_datasets(args)
    if args.examples:
        train_data = train_data.take(args.examples)
    sampler = recipes.WorkerSampler(len(train_data), args.seed, workers)
    mean, std = ([value / 255 for value in flag] for flag in (args.rgb_mean, args.rgb_std))
    options = {"num_workers": args.num_workers, "batchify_fn": functools.partial(
        make_batch, mean, std, number_of_classes(args))}
    loader = gluon.data.DataLoader(train_data, args.batch_size, sampler=sampler,
                                   last_batch="discard", **options)
    if not len(loader):
        raise ValueError(f"{len(sampler)} images make no batch of {args.batch_size}")
    return sampler, loader, gluon.data.DataLoader(val_data, args.batch_size, **options)


def make_batch(mean, std, classes, samples):
    """Returns a batch of images and labels. Normalizing a batch is faster than image by image."""
    data, labels = default_batchify_fn(samples)
    if data.dtype == np.uint8:
        data = mx.nd.image.normalize(mx.nd.image.to_tensor(data), mean, std)
    largest = labels.max().asscalar()
    if largest >= classes:  # MXNet accepts such labels silently
        raise ValueError(f"the data has a label {largest:g}, and the network {classes} classes, "
                         "from 0 on: --classes")
    return [data, labels]


def number_of_classes(args):
    """Returns the number of classes of the labels."""
    return args.classes or CLASSES.get(args.dataset, 10)


def check_image_flags(args):
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
        check_image_flags(args)
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
            raise ValueError(f"{name} does not exist. --dataset takes {DATASETS} file")
        if not args.val:
            logging.warning("no --val: validation uses the training data")
        read = records if name.endswith(".rec") else folders
        data = read(args, name, args.val or name)
    size = args.image_size or SHAPES.get(name, (3, 224, 224))[1]
    logging.info("images of %d x %d pixels (--image-size)", size, size)
    return [part.transform_first(image_transform(args, size, train))
            for part, train in zip(data, (True, False))]


class Folder(vision.ImageFolderDataset):
    """The images of a folder with a folder for each class, in the order of `classes`."""

    def __init__(self, path, classes=None):
        super().__init__(path)
        names = self.synsets
        self.synsets = classes or [name for name in names if name[0] != "."]
        files = [(file, names[label]) for file, label in self.items if names[label][0] != "."]
        other = {name for _, name in files} - set(self.synsets)
        if other:
            raise ValueError(f"{path} has the classes {', '.join(sorted(other))}, which the "
                             "training data lacks")
        if not files:
            raise ValueError(f"{path} has no images: it must have a folder for each class, with "
                             ".jpg or .png files")
        self.items = [(file, self.synsets.index(name)) for file, name in files]

    def __getitem__(self, i):
        try:
            image, label = super().__getitem__(i)
            image.wait_to_read()
            return image, label
        except mx.MXNetError as error:
            raise ValueError(f"{self.items[i][0]} is not an image that MXNet can read: "
                             f"{cli.first_line(error)}") from None


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
        check_records(path, number_of_classes(args))
        beside = f"{os.path.splitext(os.path.abspath(path))[0]}.idx"
        if not os.path.exists(beside) or index and os.path.abspath(index) != beside:
            raise ValueError(f"{path} needs an index next to it: {beside}. Received: {index}")
    return [vision.ImageRecordDataset(path).transform(
        lambda image, label: (image, np.float32(label).item())) for path in paths]


def check_records(path, classes):
    """Counts the images of a RecordIO file by its headers. Refuses labels that are not classes."""
    size, valid, at, count = os.path.getsize(path), set(range(classes)), 0, 0
    with open(path, "rb") as file:
        while at < size:
            file.seek(at)
            header = file.read(36).ljust(36, b"\0")
            start, length, labels, label = struct.unpack("<IIIf", header[:16])
            if start != RECORD:
                raise ValueError(f"{path} is damaged: no record starts at byte {at}")
            part, length = length >> 29, length & (1 << 29) - 1
            if part in (0, 1):  # a whole record or its first part
                label = struct.unpack("<f", header[32:])[0] if labels else label
                if labels > 1 or label not in valid:
                    has = f"{labels} labels" if labels > 1 else f"a label {label:g}"
                    raise ValueError(f"{path} has {has}, and the network {classes} classes, from 0 "
                                     "on: --num-classes")
                count += 1
            at += 8 + (length + 3) // 4 * 4
    if at > size or not count:
        raise ValueError(f"{path} is damaged: {'its last record is cut' if at > size else 'empty'}")
    return count


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
                                   rng.randint(0, number_of_classes(args), count).astype("int32"))


def image_transform(args, size, train):
    """Returns a function that resizes and crops images, and mirrors half of the training images."""
    mirrors = train and args.dataset != "mnist"  # a mirrored digit is not a digit
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


def validate(net, loader, devices, loss_fn):
    """Returns top-1 and top-5 errors, and the loss."""
    correct1, correct5, count, loss = 0, 0, 0, 0.0
    for batch in loader:
        parts = (gluon.utils.split_and_load(x, devices[:len(x)], even_split=False) for x in batch)
        for data, label in zip(*parts):
            out = net(data)
            predicted = out.topk(k=min(5, out.shape[1]), axis=1).asnumpy()
            correct = predicted == label.asnumpy()[:, None]
            correct1 += correct[:, 0].sum()
            correct5 += correct.sum()
            count += len(correct)
            loss += float(loss_fn(out, label).sum().asscalar())
    return 1 - correct1 / count, 1 - correct5 / count, loss / count
