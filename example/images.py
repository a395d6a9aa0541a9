"""Images for the training scripts of classifiers: datasets, RecordIO files, and networks."""
import argparse
import difflib
import functools
import json
import logging
import math
import os
import random
import re
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


# ---- datasets

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
CLASSES = {"digits": 10, "mnist": 10, "cifar10": 10, "caltech101": 101, "imagenet": 1000}
_FILES = {"cifar10": [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"],
          "mnist": ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz",
                    "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]}
_VALID = "digits, cifar10, mnist, caltech101, imagenet, dummy, a folder of folders, or a .rec"


def add_image_flags(parser):
    """Adds the flags of images; second names are from GluonCV's scripts."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", "--rec-train", default="digits", help=_VALID)
    add("--val", "--rec-val", help="validation data, if the dataset is a folder or a .rec")
    add("--use-rec", action="store_true", help="require that the dataset is a .rec")
    add("--rec-train-idx", metavar="FILE", help="index of a .rec dataset, which must be next to it")
    add("--rec-val-idx", metavar="FILE", help="index of the validation data")
    add("--data-dir", help="folder of the dataset (default: MXNet's)")
    add("--examples", type=recipes.positive, help="number of training images to use (default: all)")
    add("--classes", "--num-classes", type=recipes.positive,
        help="number of classes (default: the dataset's, or 10 for a .rec)")
    add("--image-size", "--input-size", type=recipes.positive,
        help="height and width in pixels (default: the dataset's, or 224)")
    add("--crop-ratio", default=1.0,
        type=recipes.flag_type(float, lambda x: 0 < x <= 1, "must be above 0, and at most 1"),
        help="center crop in validation as a share of the image's sides, such as 0.875")
    add("--random-crop", action="store_true", help="crop that share at a random position in "
        "training (default: 40 to 100 %% of the image's area, resized)")
    add("--num-workers", "--num-data-workers", "-j", type=recipes.whole, default=0,
        help="number of processes that load images")
    add("--mean", type=recipes.shares, default=[0.45],
        help="mean of pixels from 0 to 1: one number, or one for each channel")
    add("--std", type=recipes.share_deviations, default=[0.25],
        help="standard deviation of pixels from 0 to 1")
    for flag, kind in (("mean", recipes.decimals), ("std", recipes.deviations)):
        add(f"--rgb-{flag}", dest=flag, default=argparse.SUPPRESS, metavar="R,G,B",
            type=lambda text, kind=kind: [value / 255 for value in kind(text)],
            help=f"--{flag} for pixels from 0 to 255")


def image_loaders(args, ranks):
    """Returns the sampler of this rank's training data, and the loaders of its training data and
    of all validation data."""
    train_data, val_data = image_datasets(args)
    if args.examples:
        train_data = train_data.take(args.examples)
    order = recipes.Part(len(train_data), args.seed, ranks)
    options = {"num_workers": args.num_workers,
               "batchify_fn": functools.partial(image_batch, args.mean, args.std)}
    loader = gluon.data.DataLoader(train_data, args.batch_size, sampler=order,
                                   last_batch="discard", **options)
    if not len(loader):
        raise ValueError(f"{len(order)} images make no batch of {args.batch_size}")
    return order, loader, gluon.data.DataLoader(val_data, args.batch_size, **options)


def image_batch(mean, std, samples):
    """Returns a batch of images and of labels; pixels are normalized, which takes less time here
    than image by image."""
    data, labels = default_batchify_fn(samples)
    if data.dtype == np.uint8:
        data = mx.nd.image.normalize(mx.nd.image.to_tensor(data), mean, std)
    return [data, labels]


def classes_of(args):
    """Returns the number of classes of the labels."""
    return args.classes or CLASSES.get(args.dataset, 10)


def check_labels(args, label):
    """Refuses a batch with labels that are not classes, which MXNet accepts silently."""
    largest, classes = label.max().asscalar(), classes_of(args)
    if largest >= classes:
        raise ValueError(f"the data has a label {largest:g}, and the network {classes} classes, "
                         "from 0 on: --classes")


def check_dataset(args):
    """Refuses a missing dataset, and flags that it would ignore."""
    name = args.dataset
    if args.benchmark:
        return
    if name not in (*CLASSES, "dummy"):
        _existing(name)
    elif args.val:
        raise ValueError(f"--val is for a folder or a .rec file: {name} has its own validation "
                         f"images. Received: --val {args.val}")
    if args.use_rec and not name.endswith(".rec"):
        raise ValueError(f"--use-rec needs --rec-train FILE.rec. Received: --dataset {name}")
    for flag, index, file in (("--rec-train-idx", args.rec_train_idx, name),
                              ("--rec-val-idx", args.rec_val_idx, args.val or "no --rec-val")):
        if index and not file.endswith(".rec"):
            raise ValueError(f"{flag} is for a .rec file. Received: {file}")
    unused = {"crop_ratio": 1.0, "random_crop": False, "mean": [0.45], "std": [0.25],
              **({"image_size": None} if name == "digits" else {})}
    given = [f"--{flag.replace('_', '-')}" for flag, default in unused.items()
             if getattr(args, flag) != default]
    if given and name in ("digits", "dummy"):
        raise ValueError(f"the images of {name} are not preprocessed: remove {', '.join(given)}")


def image_datasets(args):
    """Returns training and validation data: pairs of an image and a label. Images of small RecordIO
    files are decoded and resized once."""
    check_dataset(args)
    name, keep = args.dataset, False
    if args.benchmark or name == "dummy":
        return random_images(args), random_images(args)
    if name == "digits":
        return digits()
    if name in ("mnist", "cifar10"):
        data = _downloaded(name, args.data_dir)
    elif name in CLASSES:
        if not args.data_dir:
            raise ValueError(f"this script does not download {name}: pass --data-dir FOLDER with "
                             "train/ and val/, each with a folder for each class")
        data = folders(args, [_existing(os.path.join(args.data_dir, part))
                              for part in ("train", "val")])
    else:
        if not args.val:
            log.warning("no --val: validation uses the training data")
        paths = [name, _existing(args.val or name)]
        if name.endswith(".rec"):
            for path, index in zip(paths, (args.rec_train_idx, args.rec_val_idx)):
                check_records(path, classes_of(args))
                _check_index(path, index)
            data = [vision.ImageRecordDataset(path).transform(_with_scalar) for path in paths]
            keep = max(map(os.path.getsize, paths)) < _SMALL
        else:
            data = folders(args, paths)
    size = args.image_size or SHAPES.get(name, (3, 224, 224))[1]
    log.info("images of %d x %d pixels (--image-size)", size, size)
    datasets = []
    for part, train in zip(data, (True, False)):
        fixed, drawn = image_transforms(args, size, train)
        part = part.transform_first(fixed)
        datasets.append((Kept(part) if keep else part).transform_first(drawn))
    return datasets


class Folder(vision.ImageFolderDataset):
    """The images of a folder with a folder for each class.

    Args:
        classes: the classes, in order; default: the folders, without hidden ones.
    """

    def __init__(self, path, classes=None):
        super().__init__(path)
        named = [(file, self.synsets[label]) for file, label in self.items]
        named = [(file, name) for file, name in named if not name.startswith(".")]
        if not named:
            raise ValueError(f"{path} has no images: it must have a folder for each class, with "
                             ".jpg, .jpeg or .png files")
        self.synsets = classes or [name for name in self.synsets if not name.startswith(".")]
        other = {name for _, name in named} - set(self.synsets)
        if other:
            raise ValueError(f"{path} has the classes {', '.join(sorted(other))}, which the "
                             "training data lacks")
        numbers = {name: number for number, name in enumerate(self.synsets)}
        self.items = [(file, numbers[name]) for file, name in named]

    def __getitem__(self, i):
        try:
            image, label = super().__getitem__(i)
            image.wait_to_read()
            return image, label
        except mx.MXNetError as error:
            raise ValueError(f"{self.items[i][0]} is not an image that MXNet can read: "
                             f"{recipes.first_line(error)}") from None


def folders(args, paths):
    """Returns the images of two folders. Their classes have the same numbers."""
    train = Folder(paths[0])
    if args.examples:  # they are sorted by class
        np.random.RandomState(0).shuffle(train.items)
    if args.dataset not in CLASSES:
        args.classes = args.classes or len(train.synsets)
    return train, Folder(paths[1], train.synsets)


def _with_scalar(image, label):
    """Returns a sample of a record; its label may be an array of one number."""
    return image, np.float32(label).item()


def _existing(path):
    if not os.path.exists(path):
        raise ValueError(f"{path} does not exist. --dataset takes {_VALID} file")
    return path


def _downloaded(name, folder):
    """Returns MXNet's MNIST or CIFAR-10."""
    dataset = vision.CIFAR10 if name == "cifar10" else vision.MNIST
    folder = folder or os.path.join(mx.base.data_dir(), "datasets", name)
    try:
        return [dataset(folder, train=train) for train in (True, False)]
    except OSError as error:
        missing = [f for f in _FILES[name] if not os.path.exists(os.path.join(folder, f))]
        raise ValueError(f"{name} could not be downloaded ({type(error).__name__}). Missing in "
                         f"{folder}: {', '.join(missing)}. Pass a folder with these files as "
                         "--data-dir") from None


def _check_index(path, index):
    beside = f"{os.path.splitext(path)[0]}.idx"
    if index and os.path.abspath(index) != os.path.abspath(beside):
        raise ValueError(f"MXNet reads the index next to {path}. Valid: {beside}. "
                         f"Received: {index}")
    if not os.path.exists(beside):
        raise ValueError(f"{path} needs an index next to it, with the suffix .idx")


def digits():
    """Returns scikit-learn's scanned digits of 8x8 pixels; 450 of 1,797 are for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the digits come with scikit-learn: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).reshape(-1, 1, 8, 8).astype("float32")
    order = np.random.RandomState(0).permutation(len(labels))
    return [gluon.data.ArrayDataset(images[part], labels[part].astype("int32"))
            for part in (order[450:], order[:450])]


def random_images(args):
    """Returns eight batches of random images and labels."""
    shape = SHAPES.get(args.dataset, (3, args.image_size or 224, args.image_size or 224))
    rng = np.random.RandomState(args.seed)
    count = 8 * args.batch_size
    return gluon.data.ArrayDataset(rng.rand(count, *shape).astype("float32"),
                                   rng.randint(0, classes_of(args), count).astype("int32"))


def image_transforms(args, size, train):
    """Returns the preprocessing of an image: what is the same each time, and what is random."""
    transforms = vision.transforms
    if args.random_crop and args.crop_ratio == 1:
        raise ValueError("--random-crop needs a --crop-ratio below 1, such as 0.875")
    fixed, drawn = [], [RandomMirror()] if train else []
    if train and size > 32 and not args.random_crop:
        drawn[:0] = transforms.RandomResizedCrop(size, (0.4, 1.0)), ToNumpy()
        return transforms.Compose(fixed), transforms.Compose(drawn)
    if args.crop_ratio == 1 or (train and not args.random_crop):
        fixed.append(transforms.Resize(size))
    else:
        fixed.append(transforms.Resize(math.ceil(size / args.crop_ratio), keep_ratio=True))
        if train:
            drawn.insert(0, RandomCrop(size))
        else:
            fixed.append(transforms.CenterCrop(size))
    return transforms.Compose([*fixed, ToNumpy()]), transforms.Compose(drawn)


class Kept(gluon.data.Dataset):
    """A dataset whose samples stay in memory once they are read."""

    def __init__(self, data):
        self.data, self.samples = data, {}

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        if i not in self.samples:
            self.samples[i] = self.data[i]
        return self.samples[i]


class ToNumpy(gluon.Block):
    """Converts an image to numpy, whose slices take a hundredth of the time of MXNet's."""

    def forward(self, image):
        return image.asnumpy()


class RandomCrop(gluon.Block):
    """Crops a random square."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, image):
        x, y = (random.randint(0, image.shape[axis] - self.size) for axis in (1, 0))
        return image[y:y + self.size, x:x + self.size]


class RandomMirror(gluon.Block):
    """Mirrors half of the images; MXNet's transform drops the middle column of odd widths."""

    def forward(self, image):
        return image[:, ::-1] if random.random() < 0.5 else image


_SMALL = 2**25  # bytes of a RecordIO file
_RECORD = 0xCED7230A  # the first bytes of each record of a RecordIO file
# The first bytes of images that OpenCV reads: JPEG, PNG, BMP, WebP, TIFF, JPEG 2000, PNM, EXR,
# HDR, Sun.
_IMAGES = (b"\xff\xd8", b"\x89PNG", b"BM", b"RIFF", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP", b"P1",
           b"P2", b"P3", b"P4", b"P5", b"P6", b"v/1\x01", b"#?R", b"\x59\xa6\x6a\x95")


def check_records(path, classes):
    """Returns the number of images in a RecordIO file, from its headers alone.

    Raises:
        ValueError: the file is missing, empty or truncated, a record is not an image, or a label
            is not a class.
    """
    if not os.path.exists(path):
        raise ValueError(f"{path} does not exist")
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
    """Returns a network of MXNet's model zoo, or else of gluoncv's.

    Args:
        options: for the zoo, such as `classes=10` or `pretrained=True`.
    """
    get_model, names = gluon.model_zoo.vision.get_model, _names_in_zoo()
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


def _names_in_zoo():
    """Returns the names of MXNet's model zoo, which only its error lists."""
    try:
        gluon.model_zoo.vision.get_model("")
    except ValueError as error:
        return str(error).split("\n\t")[1:]


def import_gluoncv():
    """Imports gluoncv with PyTorch hidden: it refuses PyTorch 2, which its MXNet networks do not
    need."""
    torch = sys.modules.pop("torch", None)
    sys.modules["torch"] = None  # makes `import torch` raise ImportError
    try:
        import gluoncv
    finally:
        del sys.modules["torch"]
        if torch is not None:
            sys.modules["torch"] = torch
    return gluoncv


def first_layers(parameters, count):
    """Returns the names of the first layers of parameters in the order of a network."""
    return list(dict.fromkeys(name.rsplit("_", 1)[0] for name in parameters))[:count]


def without_head(symbol, layer=None, bn_momentum=None, freeze=0):
    """Returns a classifier's features: its symbol up to its last fully connected layer.

    Args:
        layer: the last layer of the features instead.
        bn_momentum: the momentum of all batch norms; a short training needs a lower one.
        freeze: the number of layers, from the first, whose batch norms use their moving averages
            and do not change them.
    """
    graph = json.loads(symbol.tojson(remove_amp_cast=False))
    nodes = graph["nodes"]
    frozen = first_layers([n for n in symbol.list_arguments() if n != "data"], freeze)
    for node in nodes:
        if "BatchNorm" in node["op"]:
            attributes = node.setdefault("attrs", {})
            if bn_momentum is not None:
                attributes["momentum"] = str(bn_momentum)
            gamma = nodes[node["inputs"][1][0]]["name"]
            if gamma.rsplit("_", 1)[0] in frozen:
                attributes["use_global_stats"] = "True"
    internals = mx.sym.load_json(json.dumps(graph)).get_internals()
    name = layer or _head(nodes, graph["heads"][0][0])
    layers = [one[:-len("_output")] for one in internals.list_outputs() if one.endswith("_output")]
    if name not in layers:
        name = re.sub("_output$", "", name)
    if name not in layers:
        similar = difflib.get_close_matches(name, layers, 5, 0.3) or layers[:5]
        raise ValueError(f"--layer-before-fullc: there is no layer {name}. Similar: "
                         f"{', '.join(similar)}")
    features = internals[f"{name}_output"]
    features = features if layer else features.get_children()[0]
    if "data" not in features.list_arguments():
        raise ValueError("the network has no argument named data. Its first arguments: "
                         f"{', '.join(features.list_arguments()[:3])}")
    return features


def _head(nodes, i):
    """Returns the name of the last fully connected layer before node i."""
    while nodes[i]["op"] != "FullyConnected":
        if not nodes[i]["inputs"]:
            layers = [node["name"] for node in nodes if node["op"] != "null"]
            raise ValueError("the network has no FullyConnected layer before its output. Pass "
                             "--layer-before-fullc, such as one of "
                             f"{', '.join(layers[-5:])}")
        i = nodes[i]["inputs"][0][0]
    return nodes[i]["name"]
