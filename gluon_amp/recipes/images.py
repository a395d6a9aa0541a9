"""Images to train a classifier on: known datasets, folders and RecordIO files.

What is asked for stands in a script's flags, which `add_arguments` adds.
"""
import argparse
import functools
import logging
import math
import os
import random
import sys
from typing import Any, Callable, List, Tuple

from .._mxnet import mx, np
from .command import decimals, in_range, positive, whole
from .ranks import Part, Ranks, ValidationPart
from .record_files import records

log = logging.getLogger("gluon_amp.recipes")

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
CLASSES = {"digits": 10, "mnist": 10, "cifar10": 10, "caltech101": 101, "imagenet": 1000}
_FILES = {"cifar10": [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"],
          "mnist": ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz",
                    "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]}
_TAKEN = "digits, cifar10, mnist, caltech101, imagenet, dummy, a folder of folders, or a .rec"


def add_arguments(parser: Any) -> None:
    """The flags about images; the second names are those of GluonCV's scripts."""
    add = parser.add_argument
    add("--dataset", "--rec-train", default="digits", help=_TAKEN)
    add("--val", "--rec-val", help="validation data, where the dataset is a folder or a .rec")
    add("--use-rec", action="store_true", help="the dataset is a .rec: it is known by its name")
    add("--rec-train-idx", metavar="FILE", help="its index, which lies beside it")
    add("--rec-val-idx", metavar="FILE", help="that of the validation data")
    add("--data-dir", help="where the dataset lies, if not in MXNet's own place")
    add("--examples", type=positive, help="how many training images to use, if not all")
    add("--classes", "--num-classes", type=positive, help="if not the dataset's")
    add("--image-size", "--input-size", type=positive, help="if not the dataset's, or 224")
    add("--crop-ratio", type=_share, default=1.0,
        help="validation takes this share of an image, from its middle: 0.875 for ImageNet")
    add("--random-crop", action="store_true", help="training takes that share, too, from anywhere; "
        "else 40 to 100 %% of an image, stretched")
    add("--num-workers", "--num-data-workers", "-j", type=whole, default=0,
        help="processes that load images")
    add("--mean", type=decimals, default=[0.45],
        help="of pixels from 0 to 1: one number, or one each channel")
    add("--std", type=_deviations, default=[0.25], help="the same")
    for flag, name in (("--rgb-mean", "mean"), ("--rgb-std", "std")):
        add(flag, dest=name, default=argparse.SUPPRESS, metavar="R,G,B",
            type=functools.partial(_of_255, decimals if name == "mean" else _deviations),
            help=f"--{name} of pixels from 0 to 255")


def three_numbers(text: str) -> str:
    """The type of a flag that has a number each for red, green and blue: the text as it is."""
    if len(decimals(text)) != 3:
        raise argparse.ArgumentTypeError("takes three numbers, of red, green and blue. "
                                         f"Received: {text!r}")
    return text


def three_deviations(text: str) -> str:
    """The same for three numbers that something is divided by: they must be above 0."""
    _deviations(three_numbers(text))
    return text


def _deviations(text: str) -> List[float]:
    values = decimals(text)
    if not all(value > 0 for value in values):
        raise argparse.ArgumentTypeError(f"must be above 0. Received: {text!r}")
    return values


def _of_255(kind: Callable[[str], List[float]], text: str) -> List[float]:
    return [value / 255 for value in kind(text)]


def _share(text: str) -> float:
    return in_range(text, sys.float_info.min, 1, "must be above 0, and at most 1")


def image_loaders(args: Any, ranks: Ranks) -> Tuple[Part, Any, Any]:
    """This rank's part of the training data, and loaders of its parts of both."""
    _check_effects(args)
    train_data, val_data = _datasets(args)
    if args.examples:
        train_data = train_data.take(args.examples)
    ranks.check_same(len(train_data), "training images")
    ranks.check_same(len(val_data), "images to validate")
    DataLoader = mx.gluon.data.DataLoader
    order = Part(len(train_data), args.seed, ranks)
    loader = DataLoader(train_data, args.batch_size, sampler=order, last_batch="discard",
                        num_workers=args.num_workers)
    if not len(loader):
        raise ValueError(f"{len(order)} images make no batch of {args.batch_size}")
    return order, loader, DataLoader(val_data, args.batch_size, num_workers=args.num_workers,
                                     sampler=ValidationPart(len(val_data), ranks))


def classes_of(args: Any) -> int:
    """How many classes the labels have."""
    return args.classes or CLASSES.get(args.dataset, 10)


def check_labels(args: Any, label: Any) -> None:
    """Refuses a batch that has a label beyond the classes: MXNet takes it without a word."""
    largest, classes = label.max().asscalar(), classes_of(args)
    if largest >= classes:
        raise ValueError(f"the data has a label {largest:g}, and the network {classes} classes, "
                         "from 0 on: --classes")


def _check_effects(args: Any) -> None:
    """A flag that the dataset would pass over is an error."""
    if args.benchmark:
        return
    name = args.dataset
    if args.use_rec and not name.endswith(".rec"):
        raise ValueError(f"--use-rec needs --rec-train FILE.rec. Received: --dataset {name}")
    for flag, file in (("--rec-train-idx", name), ("--rec-val-idx", args.val or "")):
        if getattr(args, flag[2:].replace("-", "_")) and not file.endswith(".rec"):
            raise ValueError(f"{flag} is for a .rec file. Received: {file or 'no --rec-val'}")
    if args.val and (name in CLASSES or name == "dummy"):
        raise ValueError(f"--val is for a folder or a .rec file: {name} has images of its own to "
                         f"validate. Received: --val {args.val}")
    ready = {"digits": {"image_size": None}, "dummy": {}}.get(name)
    if ready is not None:
        usual = {"crop_ratio": 1.0, "random_crop": False, "mean": [0.45], "std": [0.25], **ready}
        given = [f"--{flag.replace('_', '-')}" for flag, value in usual.items()
                 if getattr(args, flag) != value]
        if given:
            raise ValueError(f"the images of {name} are used as they are, without "
                             f"{', '.join(given)}")


# ---- datasets: pairs of an image and a label

def _datasets(args: Any) -> Tuple[Any, Any]:
    """Training and validation data."""
    name = args.dataset
    if args.benchmark or name == "dummy":
        return _dummy(args), _dummy(args)
    if name == "digits":
        return _digits()
    train, val = _known(args) if name in CLASSES else _files(args)
    size = args.image_size or SHAPES.get(name, (3, 224, 224))[1]
    log.info("images of %d x %d pixels (--image-size)", size, size)
    return (train.transform_first(_transform(args, size, train=True)),
            val.transform_first(_transform(args, size, train=False)))


def _known(args: Any) -> List[Any]:
    """A dataset by its name."""
    name, vision = args.dataset, mx.gluon.data.vision
    if name in ("caltech101", "imagenet"):
        if not args.data_dir:
            raise ValueError(f"{name} is not downloaded by this script: --data-dir names a "
                             "folder with train/ and val/, of a folder for each class")
        return [vision.ImageFolderDataset(_existing(os.path.join(args.data_dir, part)))
                for part in ("train", "val")]
    cls = vision.CIFAR10 if name == "cifar10" else vision.MNIST
    place = {"root": args.data_dir} if args.data_dir else {}
    try:
        return [cls(train=train, **place) for train in (True, False)]
    except OSError as error:
        root = args.data_dir or os.path.join(mx.base.data_dir(), "datasets", name)
        missing = [f for f in _FILES[name] if not os.path.exists(os.path.join(root, f))]
        raise ValueError(f"{name} could not be downloaded ({type(error).__name__}). Missing in "
                         f"{root}: {', '.join(missing)}. --data-dir names a folder that has "
                         "them") from None


def _files(args: Any) -> List[Any]:
    """Folders of folders, or RecordIO files, which are looked through first."""
    vision = mx.gluon.data.vision
    paths = [_existing(path) for path in (args.dataset, args.val or args.dataset)]
    if not args.val:
        log.warning("no --val: what is called validation is of the training data")
    if not args.dataset.endswith(".rec"):
        return [vision.ImageFolderDataset(path) for path in paths]
    for path, index in {paths[1]: args.rec_val_idx, paths[0]: args.rec_train_idx}.items():
        records(path, classes_of(args))
        beside = f"{os.path.splitext(path)[0]}.idx"
        if index and os.path.abspath(index) != os.path.abspath(beside):
            raise ValueError(f"MXNet reads the index that lies beside {path}. Valid: {beside}. "
                             f"Received: {index}")
        if not os.path.exists(beside):
            raise ValueError(f"{path} needs its index, a file beside it that ends with .idx")
    return [vision.ImageRecordDataset(path) for path in paths]


def _existing(path: str) -> str:
    if not os.path.exists(path):
        raise ValueError(f"{path} does not exist. --dataset takes {_TAKEN} file")
    return path


def _digits() -> Tuple[Any, Any]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the digits come with scikit-learn: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).reshape(-1, 1, 8, 8).astype("float32")
    order = np.random.RandomState(0).permutation(len(labels))
    train, test = (mx.gluon.data.ArrayDataset(images[part], labels[part].astype("int32"))
                   for part in (order[450:], order[:450]))
    return train, test


def _dummy(args: Any) -> Any:
    shape = SHAPES.get(args.dataset, (3, args.image_size or 224, args.image_size or 224))
    rng = np.random.RandomState(args.seed)
    count = 8 * args.batch_size
    return mx.gluon.data.ArrayDataset(rng.rand(count, *shape).astype("float32"),
                                      rng.randint(0, classes_of(args), count).astype("int32"))


def _transform(args: Any, size: int, train: bool) -> Any:
    transforms = mx.gluon.data.vision.transforms
    if args.random_crop and args.crop_ratio == 1:
        raise ValueError("--random-crop needs a --crop-ratio below 1, such as 0.875")
    if train and size > 32 and not args.random_crop:
        steps = [transforms.RandomResizedCrop(size, (0.4, 1.0))]
    elif args.crop_ratio == 1 or (train and not args.random_crop):
        steps = [transforms.Resize(size)]
    else:
        steps = [transforms.Resize(math.ceil(size / args.crop_ratio), keep_ratio=True),
                 _RandomCrop(size) if train else transforms.CenterCrop(size)]
    steps += [_RandomMirror()] if train else []
    return transforms.Compose([*steps, transforms.ToTensor(),
                               transforms.Normalize(args.mean, args.std)])


class _RandomCrop(mx.gluon.Block):
    """Cuts a square out of an image, at a random place."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size, size

    def forward(self, image: Any) -> Any:
        return mx.image.random_crop(image, self.size)[0]


class _RandomMirror(mx.gluon.Block):
    """Mirrors every second image; MXNet's own transform leaves out the middle of odd widths."""

    def forward(self, image: Any) -> Any:
        return image.flip(axis=1) if random.random() < 0.5 else image
