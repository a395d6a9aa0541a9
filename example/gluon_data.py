"""Image data for Gluon, as the flags of image_classification.py name it."""
import logging
import os

import gluon_amp  # noqa: F401  (before mxnet: newer numpys then fit it)
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon.data.vision import transforms

log = logging.getLogger("image_classification")
SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
FILES = {"cifar10": [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"],
         "mnist": ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz",
                   "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]}
CLASSES = {"digits": 10, "mnist": 10, "cifar10": 10, "caltech101": 101, "imagenet": 1000}


def datasets(args):
    """Training and validation data: pairs of an image and a label."""
    name, root = args.dataset, {"root": args.data_dir} if args.data_dir else {}
    vision = gluon.data.vision
    if args.benchmark or name == "dummy":
        return _dummy(args), _dummy(args)
    try:
        if name == "digits":
            return _digits()
        if name in ("cifar10", "mnist"):
            cls = vision.CIFAR10 if name == "cifar10" else vision.MNIST
            pair = cls(train=True, **root), cls(train=False, **root)
        elif name in ("caltech101", "imagenet"):
            if not args.data_dir:
                raise SystemExit(f"{name} is not downloaded by this script: --data-dir names a "
                                 "folder with train/ and val/, of a folder for each class")
            pair = tuple(vision.ImageFolderDataset(_existing(os.path.join(args.data_dir, part)))
                         for part in ("train", "val"))
        else:
            cls = vision.ImageRecordDataset if name.endswith(".rec") else vision.ImageFolderDataset
            pair = tuple(cls(_existing(path)) for path in (name, args.val or name))
            if not args.val:
                log.warning("no --val: what is called validation is of the training data")
    except OSError as error:
        root = args.data_dir or os.path.join(mx.base.data_dir(), "datasets", name)
        missing = [f for f in FILES.get(name, []) if not os.path.exists(os.path.join(root, f))]
        raise SystemExit(f"{name} could not be downloaded ({type(error).__name__}). Missing in "
                         f"{root}: {', '.join(missing)}. --data-dir names a folder that has "
                         "them") from None
    size = args.image_size or SHAPES.get(name, (3, 224, 224))[1]
    log.info("images of %d x %d pixels (--image-size)", size, size)
    return (pair[0].transform_first(_transform(args, size, train=True)),
            pair[1].transform_first(_transform(args, size, train=False)))


def _existing(path):
    if not os.path.exists(path):
        raise SystemExit(f"{path} does not exist. --dataset takes digits, cifar10, mnist, "
                         "caltech101, imagenet, dummy, a folder of folders, or a .rec file")
    return path


def _digits():
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).reshape(-1, 1, 8, 8).astype("float32")
    order = np.random.RandomState(0).permutation(len(labels))
    train, test = order[450:], order[:450]
    return tuple(gluon.data.ArrayDataset(images[part], labels[part].astype("int32"))
                 for part in (train, test))


def _dummy(args):
    shape = SHAPES.get(args.dataset, (3, args.image_size or 224, args.image_size or 224))
    rng = np.random.RandomState(args.seed)
    count = 8 * args.batch_size
    return gluon.data.ArrayDataset(rng.rand(count, *shape).astype("float32"),
                                   rng.randint(0, classes_of(args), count).astype("int32"))


def _transform(args, size, train):
    steps = [transforms.Resize(size)] if not train or size <= 32 else \
        [transforms.RandomResizedCrop(size, (0.4, 1.0))]
    steps += [transforms.RandomFlipLeftRight()] if train else []
    return transforms.Compose([*steps, transforms.ToTensor(),
                               transforms.Normalize(args.mean, args.std)])


def classes_of(args):
    return args.classes or CLASSES.get(args.dataset, 10)


def check_labels(args, label):
    """Of a batch: MXNet takes what is beyond the classes without a word."""
    largest, classes = label.max().asscalar(), classes_of(args)
    if largest >= classes:
        raise SystemExit(f"the data has a label {largest:g}, and the network {classes} classes, "
                         "from 0 on: --classes")


class Shuffled(gluon.data.Sampler):
    """An order of its own for each epoch, the same in every run."""

    def __init__(self, length, seed):
        self.length, self.seed, self.epoch = length, seed, 0

    def __iter__(self):
        return iter(np.random.RandomState([self.seed, self.epoch]).permutation(self.length))

    def __len__(self):
        return self.length


def loaders(args):
    """The order of the training data, and both loaders."""
    train_data, val_data = datasets(args)
    if args.examples:
        train_data = train_data.take(args.examples)
    order = Shuffled(len(train_data), args.seed)
    loader = gluon.data.DataLoader(train_data, args.batch_size, sampler=order,
                                   last_batch="discard", num_workers=args.num_workers)
    if not len(loader):
        raise SystemExit(f"{len(train_data)} images make no batch of {args.batch_size}")
    return order, loader, gluon.data.DataLoader(val_data, args.batch_size,
                                                num_workers=args.num_workers)
