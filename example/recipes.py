"""The common code of the training scripts: flags, images, networks, ranks, logs.

It uses private modules of gluon_amp: take it from a checkout of the installed version.
"""
import argparse
import contextlib
import fcntl
import functools
import glob
import inspect
import itertools
import json
import logging
import math
import os
import random
import struct
import sys
import time
from array import array

import gluon_amp as amp
import mxnet as mx
import numpy as np
from gluon_amp import checks
from gluon_amp._mxnet import message
from gluon_amp.checks import did_you_mean, nearest, positive
from gluon_amp.files import must_exist, replace_text
from gluon_amp.parallel import average_statistics
from gluon_amp.parallel.store import make_store, shared_store
from gluon_amp.parallel.sync import Workers
from gluon_amp.policy import NAMES as POLICIES  # noqa: F401  (choices of --policy)
from gluon_amp.policy import get_policy
from gluon_amp.tools.tensor_cores import matrix_layers

log = logging.getLogger("recipes")


# ---- the command line

class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints the description verbatim, and the defaults of flags that have one."""

    def _get_help_string(self, action):
        if "(default" in action.help or action.default is False or action.default in (None, "", []):
            return action.help
        return super()._get_help_string(action)


class Parser(checks.Parser):
    """The parser of a script, with `--config FILE`: flags in a YAML or JSON file, by their names.

    Flags on the command line override those of the file.
    """

    def __init__(self, description):
        super().__init__(description=description, formatter_class=_Help)
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS,
                          help="a YAML or JSON file of flags, such as `batch-size: 64`; flags on "
                               "the command line override it")

    def parse_args(self, args=None, namespace=None):
        """Parses the flags of the file, then those of the command line."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config")
        found, rest = first.parse_known_args(args)
        words = args if found.config is None else [*self._from_file(found.config), *rest]
        flags = super().parse_args(words, namespace)
        if hasattr(flags, "config"):  # an abbreviation, or a flag of the file
            self.error("--config must be spelled out, and on the command line")
        return flags

    def _from_file(self, path):
        try:
            flags = _read_config(path)
        except (OSError, ValueError, ImportError) as error:
            self.error(f"--config: {' '.join(str(error).split())}")
        known = [flag for action in self._actions for flag in action.option_strings]
        words = []
        for name, value in flags.items():
            flag = "--" + str(name).lstrip("-").replace("_", "-")
            if flag not in known:
                self.error(f"--config {path}: there is no flag {flag}"
                           f"{did_you_mean(flag, known)}")
            words += _words(flag, value)
        return words


def _read_config(path):
    must_exist(path)
    with open(path) as file:
        text = file.read()
    if path.endswith(".json"):
        flags = json.loads(text)
    else:
        try:
            import yaml
        except ImportError:
            raise ImportError("YAML needs a package: pip install pyyaml, or write JSON into a "
                              "file that ends with .json") from None
        try:
            flags = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(flags, dict):
        raise ValueError(f"{path} must map names of flags to values. "
                         f"Received: {type(flags).__name__}")
    return flags


def _words(flag, value):
    """Returns a flag of a file as command-line arguments."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return [f"{flag}={value}"]


# ---- types of flags

def _list_of(number, text, wanted):
    try:
        return [number(part) for part in text.split(",") if part]
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"must be {wanted}. Received: {text!r}") from None


def numbers(text):
    """Parses comma-separated non-negative integers."""
    return _list_of(lambda part: positive(part) if part.strip("0") else 0, text,
                    "whole numbers, such as 0,2")


def decimals(text):
    """Parses comma-separated numbers."""
    return _list_of(float, text, "numbers, such as 0.5 or 0.5,0.4,0.4")


def whole(text):
    """Parses a non-negative integer."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on. Received: {text!r}")
    return int(text)


def decimal(text):
    """Parses a finite non-negative number."""
    return in_range(text, 0, math.inf, "must be a finite number from 0 on")


def share(text):
    """Parses a number from 0 to 1."""
    return in_range(text, 0, 1, "must be a number from 0 to 1")


def above_0(text):
    """Parses a finite positive number."""
    return in_range(text, sys.float_info.min, math.inf, "must be a finite number above 0")


def in_range(text, least, most, wanted):
    """Parses a finite number from `least` to `most`; errors name the valid range."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (least <= number <= most and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{wanted}. Received: {text!r}")
    return number


def loss_scale(text):
    """Parses `dynamic`, `none` or a number as the `loss_scale` of `Trainer` and `Module`."""
    if text in ("dynamic", "none"):
        return text
    try:
        return amp.StaticLossScale(float(text)).scale
    except ValueError:
        raise argparse.ArgumentTypeError("takes a positive number, dynamic or none. "
                                         f"Received: {text}") from None


def add_gpus(parser):
    """Adds `--gpus 0,1`, and GluonCV's equivalent `--num-gpus 2`."""
    add = parser.add_argument
    add("--gpus", type=numbers, default=[],
        help="GPUs to use, such as 0 or 0,2,5 (default: the CPU)")
    add("--num-gpus", dest="gpus", metavar="N", default=argparse.SUPPRESS,
        type=lambda text: list(range(whole(text))), help="use the first N GPUs")


def add_types(parser):
    """Adds `--dtype` and `--loss-scale` for float32, float16 or bfloat16."""
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"),
                        help="type of the network")
    parser.add_argument("--loss-scale", type=loss_scale, default="dynamic",
                        help="loss scale of float16: dynamic, a number or none")


# ---- values of flags

def devices_of(gpus):
    """Returns the GPUs with these numbers; without numbers the CPU."""
    if not gpus:
        return [mx.cpu()]
    if max(gpus) >= mx.context.num_gpus():
        raise ValueError(f"--gpus {max(gpus)}: MXNet finds {mx.context.num_gpus()} GPUs")
    return [mx.gpu(i) for i in gpus]


def begin(parser, args):
    """Seeds all random numbers. Returns the device of `--gpus`, and numpy's generator."""
    if len(args.gpus) > 1:
        parser.error("--gpus: one is enough")
    device, = devices_of(args.gpus)
    mx.random.seed(args.seed)
    return device, np.random.RandomState(args.seed)


def is_float32(policy):
    """Returns whether a policy is float32."""
    return get_policy(policy).is_float32


def momentum_of(optimizer, momentum):
    """Returns the argument `momentum`, if the optimizer has one."""
    takes = inspect.signature(type(amp.optimizer(optimizer))).parameters
    return {"momentum": momentum} if "momentum" in takes else {}


def schedule(lr, steps, epochs, mode="step", decay_epochs=(), decay=0.1, warmup_epochs=0,
             warmup_lr=0.0, warmup_strategy="linear"):
    """Returns a learning rate schedule with warm-up and decay.

    Args:
        steps: updates in an epoch.
        mode: `step` multiplies the rate by `decay` after each of `decay_epochs`; `cosine` decays
            it to 0 over `epochs`.
        warmup_strategy: `linear` rises from `warmup_lr` to `lr`; `constant` stays at `warmup_lr`.
    """
    warmup_steps = int(warmup_epochs * steps)
    warmup = {"warmup_steps": warmup_steps, "warmup_begin_lr": warmup_lr,
              "warmup_mode": warmup_strategy}
    if mode == "cosine":
        if decay_epochs:
            raise ValueError("--lr-decay-epoch is for --lr-mode step. Received: --lr-mode cosine")
        if warmup_steps >= epochs * steps:
            raise ValueError(f"no epochs are left to the cosine: --warmup-epochs must be below the "
                             f"{epochs} epochs of the training. Received: {warmup_epochs:g}")
        return mx.lr_scheduler.CosineScheduler(epochs * steps, lr, **warmup)
    after = [int(epoch * steps) for epoch in decay_epochs] or [1 << 60]
    return mx.lr_scheduler.MultiFactorScheduler(after, decay, lr, **warmup)


def run(main):
    """Runs a script's `main`; prints user errors in one line, without a traceback."""
    try:
        main()
    except (ValueError, AssertionError, OSError, mx.MXNetError) as error:
        if os.environ.get("DEBUG"):
            raise
        raise SystemExit(f"{message(error)} (DEBUG=1 shows where)") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None


# ---- many ranks

MANY = ("dist_sync", "dist_device_sync", "horovod")


def add_kvstore_flag(parser):
    """Adds the flag that selects the kvstore of `Ranks`."""
    parser.add_argument(
        "--kvstore", "--kv-store", dest="kvstore", default="device",
        choices=("local", "device", *MANY),
        help="all-reduce of gradients: local or device in one process; dist_sync or "
             "dist_device_sync by MXNet's parameter server (gluon-amp launch -n 2 python ...); "
             "horovod (horovodrun -np 2 python ...). Each process reads a part of the data, in "
             "batches of --batch-size; --lr is not scaled")


class Ranks:
    """The processes that train one network: one, unless the kvstore is distributed.

    Args:
        kvstore: the value of --kvstore.
        names: True for a Module, whose keys in the store are names; those of a Trainer are numbers.

    Attributes:
        store: the `kvstore=` of a Trainer, or of `Module.fit`.
        rank: the rank of this process. Rank 0 logs and saves.
        workers: the number of ranks.
    """

    def __init__(self, kvstore="device", names=False):
        self.store = kvstore
        if kvstore in MANY:
            os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"  # updating servers report no overflow
            self.store = shared_store(make_store(kvstore, None))
        self._workers = Workers(self.store if kvstore in MANY else None, names)
        self.rank, self.workers = self._workers.rank, self._workers.count
        self._by_horovod = kvstore == "horovod"

    def devices(self, gpus):
        """Returns the GPUs of this process; with Horovod one, by its local rank."""
        if not self._by_horovod or not gpus:
            return gpus
        import horovod.mxnet as hvd
        if hvd.local_size() > len(gpus):
            raise ValueError(f"--gpus: Horovod runs {hvd.local_size()} processes here, and each "
                             f"needs a GPU. Received: {','.join(map(str, gpus))}")
        return [gpus[hvd.local_rank()]]

    def start_log(self, format):
        """Sets up logging: rank 0 logs everything, other ranks errors only."""
        logging.basicConfig(level=logging.ERROR if self.rank else logging.INFO, format=format,
                            force=True)

    def sum(self, *numbers):
        """Sums each number over ranks, in rank order: the result is the same on all ranks."""
        layout = struct.Struct(f"{len(numbers)}d")
        rows = self._workers.gather(layout.pack(*map(float, numbers)))
        return [sum(column) for column in zip(*map(layout.unpack, rows))]

    def check_same(self, number, what):
        """Raises an error if ranks have different numbers, which would deadlock."""
        numbers = [int(row) for row in self._workers.gather(b"%20d" % number)]
        if len(set(numbers)) > 1:
            raise ValueError(f"ranks have different numbers of {what}. Rank 0, 1, ...: "
                             f"{', '.join(map(str, numbers))}. All must read the same files")

    def sum_metric(self, metric):
        """All-reduces the sums of a metric or of a CompositeEvalMetric."""
        for one in getattr(metric, "metrics", [metric]):
            one.sum_metric, one.num_inst = self.sum(one.global_sum_metric, one.global_num_inst)
            one.global_sum_metric, one.global_num_inst = one.sum_metric, one.num_inst


class Part(mx.gluon.data.Sampler):
    """A sampler of a rank's part of training data: equal, disjoint parts.

    Each epoch has its own order, which is the same in every run.

    Args:
        length: the length of all data.

    Attributes:
        epoch: the epoch; set it before each epoch.
    """

    def __init__(self, length, seed, ranks):
        self.length, self.seed, self.ranks, self.epoch = length, seed, ranks, 0

    def __iter__(self):
        order = np.random.RandomState([self.seed, self.epoch]).permutation(self.length)
        workers = self.ranks.workers
        return iter(order[:len(self) * workers][self.ranks.rank::workers])

    def __len__(self):
        return self.length // self.ranks.workers


class ValidationPart(mx.gluon.data.Sampler):
    """Returns a rank's part of validation data; each example is in one part."""

    def __init__(self, length, ranks):
        if length < ranks.workers:
            raise ValueError(f"{length} images to validate are too few for {ranks.workers} ranks")
        self.mine = range(ranks.rank, length, ranks.workers)

    def __iter__(self):
        return iter(self.mine)

    def __len__(self):
        return len(self.mine)


# ---- RecordIO files

_MAGIC = 0xCED7230A  # the start of each record
# The first bytes of images that OpenCV reads: JPEG, PNG, BMP, WebP, TIFF, JPEG 2000, PNM, EXR,
# HDR, Sun.
_IMAGES = (b"\xff\xd8", b"\x89PNG", b"BM", b"RIFF", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP", b"P1",
           b"P2", b"P3", b"P4", b"P5", b"P6", b"v/1\x01", b"#?R", b"\x59\xa6\x6a\x95")


def records(path, classes):
    """Returns the offsets of the records of a RecordIO file. Raises an error if the file is
    missing, empty or truncated, a record is not an image, or a label is not a class."""
    if not os.path.exists(path):
        raise ValueError(f"{path} does not exist")
    size, at = os.path.getsize(path), 0
    if size == 0:
        raise ValueError(f"{path} is empty")
    begins = array("Q")
    with open(path, "rb") as file:
        while at < size:
            file.seek(at)
            header = file.read(64).ljust(64, b"\0")
            magic, length, labels, label = struct.unpack("<IIIf", header[:16])
            if magic != _MAGIC:
                raise ValueError(f"{path} is not a RecordIO file, or damaged: no record starts at "
                                 f"byte {at}")
            part, length = length >> 29, length & (1 << 29) - 1
            if part in (0, 1):  # a whole record or its first part
                begins.append(at)
                one_label = labels == 0  # its declared length
                if one_label and not (0 <= label < classes and label == int(label)):
                    raise ValueError(f"{path} has a label {label:g}, and the network {classes} "
                                     "classes, from 0 on: --num-classes")
                image = header[32 + 4 * labels:] if length > 24 else b""
                if labels <= 4 and at + 8 + length <= size and not image.startswith(_IMAGES):
                    raise ValueError(f"{path} has a record at byte {at} that is not an image "
                                     "that MXNet can read")
            at += 8 + (length + 3) // 4 * 4
    if at > size:
        raise ValueError(f"{path} is truncated: {at - size} bytes of its last record are missing")
    return begins


def records_of_part(path, index, begins, part, parts):
    """Returns the number of records that MXNet's iterators read for `part_index` and `num_parts`.
    MXNet splits the index, or else the file, into equal parts; a record belongs to the part in
    which it starts."""
    if index:
        with open(index) as file:
            count = sum(1 for line in file if line.strip())
        step = -(-count // parts)
        return len(range(count)[step * part:step * (part + 1)])
    step = (-(-os.path.getsize(path) // parts) + 3) // 4 * 4
    return sum(step * part <= at < step * (part + 1) for at in begins)


class Unpadded(mx.io.DataIter):
    """A DataIter without the padding of its last batch, which a Module would count.

    Args:
        data_iter: restarts after a reset, as with `round_batch=False`.
        examples: the number of its examples.
        least: the smallest last batch: every device needs an example.
    """

    def __init__(self, data_iter, examples, least=1):
        super().__init__(data_iter.batch_size)
        self.data_iter, self.examples, self.least = data_iter, examples, least
        self.provide_data, self.provide_label = data_iter.provide_data, data_iter.provide_label
        self.given = 0

    def reset(self):
        self.data_iter.reset()
        self.given = 0

    def next(self):
        if self.given >= self.examples:
            raise StopIteration
        batch = self.data_iter.next()
        count = min(self.batch_size, max(self.examples - self.given, self.least))
        self.given += count
        return mx.io.DataBatch([array[:count] for array in batch.data],
                               [array[:count] for array in batch.label], pad=0)


# ---- images of classifiers

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
CLASSES = {"digits": 10, "mnist": 10, "cifar10": 10, "caltech101": 101, "imagenet": 1000}
_FILES = {"cifar10": [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"],
          "mnist": ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz",
                    "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]}
_TAKEN = "digits, cifar10, mnist, caltech101, imagenet, dummy, a folder of folders, or a .rec"


def add_image_flags(parser):
    """Adds the flags of images; second names are from GluonCV's scripts."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", "--rec-train", default="digits", help=_TAKEN)
    add("--val", "--rec-val", help="validation data, if the dataset is a folder or a .rec")
    add("--use-rec", action="store_true", help="require that the dataset is a .rec")
    add("--rec-train-idx", metavar="FILE", help="index of a .rec dataset, which must be next to it")
    add("--rec-val-idx", metavar="FILE", help="index of the validation data")
    add("--data-dir", help="folder of the dataset (default: MXNet's)")
    add("--examples", type=positive, help="number of training images to use (default: all)")
    add("--classes", "--num-classes", type=positive,
        help="number of classes (default: the dataset's)")
    add("--image-size", "--input-size", type=positive,
        help="height and width in pixels (default: the dataset's, or 224)")
    add("--crop-ratio", type=_share, default=1.0,
        help="center crop in validation as a share of the image's sides, such as 0.875")
    add("--random-crop", action="store_true", help="crop that share at a random position in "
        "training (default: 40 to 100 %% of the image's area, resized)")
    add("--num-workers", "--num-data-workers", "-j", type=whole, default=0,
        help="number of processes that load images")
    add("--mean", type=decimals, default=[0.45],
        help="mean of pixels from 0 to 1: one number, or one for each channel")
    add("--std", type=_deviations, default=[0.25], help="standard deviation of pixels from 0 to 1")
    for flag, name in (("--rgb-mean", "mean"), ("--rgb-std", "std")):
        add(flag, dest=name, default=argparse.SUPPRESS, metavar="R,G,B",
            type=functools.partial(_of_255, decimals if name == "mean" else _deviations),
            help=f"--{name} for pixels from 0 to 255")


def three_numbers(text):
    """Checks numbers for red, green and blue; returns the text."""
    if len(decimals(text)) != 3:
        raise argparse.ArgumentTypeError("takes three numbers, of red, green and blue. "
                                         f"Received: {text!r}")
    return text


def three_deviations(text):
    """Checks positive numbers for red, green and blue; returns the text."""
    _deviations(three_numbers(text))
    return text


def _deviations(text):
    values = decimals(text)
    if not all(value > 0 for value in values):
        raise argparse.ArgumentTypeError(f"must be above 0. Received: {text!r}")
    return values


def _of_255(kind, text):
    return [value / 255 for value in kind(text)]


def _share(text):
    return in_range(text, sys.float_info.min, 1, "must be above 0, and at most 1")


def image_loaders(args, ranks):
    """Returns the sampler of this rank's training data, and its training and validation loaders."""
    check_dataset(args)
    train_data, val_data = _datasets(args)
    if args.examples:
        train_data = train_data.take(args.examples)
    ranks.check_same(len(train_data), "training images")
    ranks.check_same(len(val_data), "validation images")
    DataLoader = mx.gluon.data.DataLoader
    order = Part(len(train_data), args.seed, ranks)
    loader = DataLoader(train_data, args.batch_size, sampler=order, last_batch="discard",
                        num_workers=args.num_workers)
    if not len(loader):
        raise ValueError(f"{len(order)} images make no batch of {args.batch_size}")
    return order, loader, DataLoader(val_data, args.batch_size, num_workers=args.num_workers,
                                     sampler=ValidationPart(len(val_data), ranks))


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
    if args.benchmark:
        return
    if args.dataset not in (*CLASSES, "dummy"):
        _existing(args.dataset)
    name = args.dataset
    if args.use_rec and not name.endswith(".rec"):
        raise ValueError(f"--use-rec needs --rec-train FILE.rec. Received: --dataset {name}")
    for flag, file in (("--rec-train-idx", name), ("--rec-val-idx", args.val or "")):
        if getattr(args, flag[2:].replace("-", "_")) and not file.endswith(".rec"):
            raise ValueError(f"{flag} is for a .rec file. Received: {file or 'no --rec-val'}")
    if args.val and (name in CLASSES or name == "dummy"):
        raise ValueError(f"--val is for a folder or a .rec file: {name} has its own validation "
                         f"images. Received: --val {args.val}")
    ready = {"digits": {"image_size": None}, "dummy": {}}.get(name)
    if ready is not None:
        usual = {"crop_ratio": 1.0, "random_crop": False, "mean": [0.45], "std": [0.25], **ready}
        given = [f"--{flag.replace('_', '-')}" for flag, value in usual.items()
                 if getattr(args, flag) != value]
        if given:
            raise ValueError(f"the images of {name} are not preprocessed: remove "
                             f"{', '.join(given)}")


# ---- datasets: pairs of an image and a label

def _datasets(args):
    """Returns training and validation data."""
    name = args.dataset
    if args.benchmark or name == "dummy":
        return _dummy(args), _dummy(args)
    if name == "digits":
        return _digits()
    train, val = _known(args) if name in CLASSES else _files(args)
    size = args.image_size or SHAPES.get(name, (3, 224, 224))[1]
    log.info("images of %d x %d pixels (--image-size)", size, size)
    return (train.transform_first(image_transform(args, size, train=True)),
            val.transform_first(image_transform(args, size, train=False)))


def _known(args):
    """Returns the training and validation data of a named dataset."""
    name, vision = args.dataset, mx.gluon.data.vision
    if name in ("caltech101", "imagenet"):
        if not args.data_dir:
            raise ValueError(f"this script does not download {name}: pass --data-dir FOLDER with "
                             "train/ and val/, each with a folder for each class")
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
                         f"{root}: {', '.join(missing)}. Pass a folder with these files as "
                         "--data-dir") from None


def _files(args):
    """Returns the data of folders of folders or of RecordIO files, which it checks first."""
    vision = mx.gluon.data.vision
    paths = [_existing(path) for path in (args.dataset, args.val or args.dataset)]
    if not args.val:
        log.warning("no --val: validation uses the training data")
    if not args.dataset.endswith(".rec"):
        return [vision.ImageFolderDataset(path) for path in paths]
    for path, index in {paths[1]: args.rec_val_idx, paths[0]: args.rec_train_idx}.items():
        records(path, classes_of(args))
        beside = f"{os.path.splitext(path)[0]}.idx"
        if index and os.path.abspath(index) != os.path.abspath(beside):
            raise ValueError(f"MXNet reads the index next to {path}. Valid: {beside}. "
                             f"Received: {index}")
        if not os.path.exists(beside):
            raise ValueError(f"{path} needs an index next to it, with the suffix .idx")
    return [vision.ImageRecordDataset(path) for path in paths]


def _existing(path):
    if not os.path.exists(path):
        raise ValueError(f"{path} does not exist. --dataset takes {_TAKEN} file")
    return path


def _digits():
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


def _dummy(args):
    shape = SHAPES.get(args.dataset, (3, args.image_size or 224, args.image_size or 224))
    rng = np.random.RandomState(args.seed)
    count = 8 * args.batch_size
    return mx.gluon.data.ArrayDataset(rng.rand(count, *shape).astype("float32"),
                                      rng.randint(0, classes_of(args), count).astype("int32"))


def image_transform(args, size, train):
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
    """Crops a random square."""

    def __init__(self, size):
        super().__init__()
        self.size = size, size

    def forward(self, image):
        return mx.image.random_crop(image, self.size)[0]


class _RandomMirror(mx.gluon.Block):
    """Mirrors half of the images; MXNet's transform drops the middle column of odd widths."""

    def forward(self, image):
        return image.flip(axis=1) if random.random() < 0.5 else image


# ---- networks

def small_network(classes):
    """A network of three convolutions and a dense layer, which trains in seconds on a CPU."""
    nn = mx.gluon.nn
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
    try:
        return _from_zoo(mx.gluon.model_zoo.vision.get_model, name, options)
    except ValueError as error:
        names = str(error).split("\n\t")[1:]
        if not names:  # an error of something other than the name
            raise
    try:
        model_zoo = import_gluoncv().model_zoo
    except ImportError as error:
        raise ValueError(f"MXNet's model zoo has no {name}, and gluoncv's cannot be imported "
                         f"({message(error)}): in the checkout, pip install '.[cpu,gluoncv]'"
                         f"{did_you_mean(name, names)}") from None
    names += model_zoo.get_model_list()
    if name.lower() not in names:
        raise ValueError(f"neither MXNet's nor gluoncv's model zoo has {name}"
                         f"{did_you_mean(name, names)}")
    return _from_zoo(model_zoo.get_model, name, options)


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


def _from_zoo(get_model, name, options):
    try:
        return get_model(name, **options)
    except TypeError as error:
        raise ValueError(f"{name} does not take all of {', '.join(options)}: {error}") from None
    except (OSError, RuntimeError) as error:
        if not options.get("pretrained"):
            raise
        raise OSError(f"{name} could not be downloaded ({type(error).__name__})") from None


def check_network(symbol, image, prefix=None):
    """Raises an error if a network does not support images of this shape, or its checkpoint is of
    another network or type."""
    try:
        asked = _signature(symbol, image)
    except mx.MXNetError as error:
        shape = ",".join(map(str, image))
        raise ValueError(f"the network does not take --image-shape {shape}: "
                         f"{message(error)}") from None
    if prefix is None:
        return
    must_exist(f"{prefix}-symbol.json")
    try:
        saved = _signature(mx.sym.load(f"{prefix}-symbol.json"), image)
    except mx.MXNetError:
        saved = None
    if saved != asked:
        raise ValueError(f"{prefix}-symbol.json has another network or --dtype than the flags: "
                         "pass those of the original run")


def _signature(symbol, image):
    """Returns names, shapes and types of a network's parameters and outputs."""
    return (symbol.list_arguments(), symbol.infer_shape(data=(1, *image)),
            symbol.infer_type(data="float32"))


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
    frozen = first_layers([n for n in symbol.list_arguments() if n != "data"], freeze)
    for node in graph["nodes"]:
        if "BatchNorm" not in node["op"]:
            continue
        attributes = node.setdefault("attrs", {})
        if bn_momentum is not None:
            attributes["momentum"] = str(bn_momentum)
        gamma = graph["nodes"][node["inputs"][1][0]]["name"]
        if gamma.rsplit("_", 1)[0] in frozen:
            attributes["use_global_stats"] = "True"
    internals = mx.sym.load_json(json.dumps(graph)).get_internals()
    name = (layer or _head(graph)).replace("_output", "")
    layers = [one[:-len("_output")] for one in internals.list_outputs() if one.endswith("_output")]
    if name not in layers:
        raise ValueError(f"--layer-before-fullc: there is no layer {name}. Similar: "
                         f"{', '.join(nearest(name, layers))}")
    features = internals[f"{name}_output"]
    features = features if layer else features.get_children()[0]
    if "data" not in features.list_arguments():
        raise ValueError("the network has no argument named data. Its first arguments: "
                         f"{', '.join(features.list_arguments()[:3])}")
    return features


def _head(graph):
    """Returns the name of the last fully connected layer."""
    nodes, i = graph["nodes"], graph["heads"][0][0]
    while nodes[i]["op"] != "FullyConnected":
        if not nodes[i]["inputs"]:
            layers = [node["name"] for node in nodes if node["op"] != "null"]
            raise ValueError("the network has no FullyConnected layer before its output. Pass "
                             "--layer-before-fullc, such as one of "
                             f"{', '.join(layers[-5:])}")
        i = nodes[i]["inputs"][0][0]
    return nodes[i]["name"]


def tensor_core_hints(net, batch_size, devices):
    """Returns the reasons why a network does not run at full speed on Tensor Cores."""
    hints = []
    shapes = {p.name: p.shape for p in net.collect_params().values()}
    slow = [f"{layer.name} {layer.sizes}" for layer in
            matrix_layers(net(mx.sym.var("data")), shapes) if not layer.fits]
    if slow:
        hints.append("sizes that are not multiples of 8 run slower, or off Tensor Cores: "
                     f"{', '.join(slow)}")
    if batch_size % (8 * devices):
        hints.append(f"a batch of {batch_size / devices:g} for each GPU is not a multiple of 8")
    if os.environ.get("MXNET_CUDNN_AUTOTUNE_DEFAULT") == "0":
        hints.append("MXNET_CUDNN_AUTOTUNE_DEFAULT=0: cuDNN does not search for its "
                     "fastest algorithms")
    return hints


# ---- log.jsonl, and TensorBoard's files

def add_log_flags(parser):
    """Adds the flags of a `TrainingLog`."""
    add = parser.add_argument
    add("--tensorboard", metavar="FOLDER",
        help="write TensorBoard event files to this folder (pip install tensorboard)")
    add("--claim-speed", action="store_true",
        help="confirm that nothing else runs on this machine: reports compare the speed")


class TrainingLog:
    """Collects the steps and epochs of a run, and writes log.jsonl and TensorBoard files.

    Args:
        args: the script's flags; it reads `tensorboard`.
        path: the path of log.jsonl; None for none.
        lines: the lines of a resumed run.
        steps: the number of its steps.
        writes: whether this rank writes; rank 0 does.
    """

    def __init__(self, args, path, lines=(), steps=0, writes=True):
        self.args, self.path, self.lines = args, path if writes else None, list(lines)
        self.writes = writes
        self.losses = []
        self.steps = steps
        self.writer = None
        if writes and args.tensorboard:
            self.writer = _EventFile(args.tensorboard)
            self.writer.add_text("arguments", json.dumps(vars(args)))

    def add_step(self, epoch, batch, loss, updated, shown, **values):
        """Adds a step.

        Args:
            loss: the loss of the step.
            updated: whether it updated the network.
            shown: whether to write a log line.
            values: lr, loss_scale, skipped and gradient_norm, each a number or a function that
                returns it.
        """
        self.steps += 1
        self.losses.append(loss)
        if updated and not shown:
            return
        values = {name: value() if callable(value) else value for name, value in values.items()}
        line = {"epoch": epoch, "batch": batch, "loss": _finite(_mean(self.losses)),
                **{name: _finite(value) for name, value in values.items()}}
        if not updated:
            line["skip"] = True
        if shown:
            self.losses = []
        self.lines.append(line)
        self._draw("step", line, self.steps - 1)

    def add_epoch(self, line):
        """Adds the end of an epoch; warns of infinities or NaNs in predictions."""
        if self.writes and not math.isfinite(line.get("validation_loss") or 0):
            log.warning("epoch %d: the network's predictions are not finite. They use the batch "
                        "norms' moving averages, which lag in the first steps: a deep float16 "
                        "network may exceed 65504 until they have converged",
                        line["epoch"])
        self.lines.append({name: _finite(value) for name, value in line.items()})
        self._draw("epoch", line, line["epoch"])

    def save(self):
        """Writes log.jsonl atomically."""
        if not self.path:
            return
        arguments = {"version": 2, "arguments": vars(self.args)}
        replace_text(self.path, "".join(
            json.dumps(line) + "\n" for line in [arguments, *self.lines]))

    def start_epoch(self):
        """Call it before the first step of an epoch."""
        self.losses = []

    def end(self):
        """Call it at the end of the run."""
        if self.writer:
            self.writer.close()

    def _draw(self, place, line, at):
        if not self.writer:
            return
        for name, value in line.items():
            if name not in ("epoch", "batch", "skip") and isinstance(value, (int, float)):
                self.writer.add_scalar(f"{place}/{name}", value, at)


class ModuleLog:
    """Logs `Module.fit` to a `TrainingLog`; its methods are the callbacks of `fit`.

    Args:
        module: an `AddingModule`.
        interval: the number of batches between two log lines.
        ranks: the ranks; all of them must use these callbacks.
    """

    def __init__(self, log, module, interval, batch_size, ranks=None):
        self.log, self.module, self.interval = log, module, interval
        self.batch_size, self.ranks = batch_size, ranks or Ranks()
        self.skipped = module.skipped
        self.validation = []
        self._start()

    def _start(self):
        self.began, self.batches = time.time(), 0
        self.losses = []
        self.training = {}

    def batch_end(self, param):
        """fit's `batch_end_callback`."""
        if param.nbatch == 0:
            self.log.start_epoch()
        module, optimizer = self.module, self.module._optimizer
        scale, updated = module.gradient_scale, module.skipped == self.skipped
        self.skipped, self.batches = module.skipped, param.nbatch + 1
        factor = optimizer.rescale_grad / scale
        gradients = [grads[0] for grads in module._exec_group.grad_arrays if grads[0] is not None]
        loss = cross_entropy(module.get_outputs()[0], param.locals["data_batch"].label[0])
        self.losses.append(loss)
        self.metric = param.eval_metric
        self.log.add_step(
            param.epoch, param.nbatch, loss, updated, (param.nbatch + 1) % self.interval == 0,
            gradient_norm=lambda: factor * gradient_norm(gradients), lr=optimizer.learning_rate,
            loss_scale=scale, skipped=self.skipped)

    def epoch_end(self, *_):
        """The `epoch_end_callback` of `fit`, before validation. Pass it as the first callback, so
        that later ones save a synchronized state."""
        self.seconds, self.validation = time.time() - self.began, []
        self.ranks.sum_metric(self.metric)
        self.training = dict(self.metric.get_global_name_value())
        if self.ranks.workers > 1:
            self.module.check_ranks()
            average_statistics(self.module)

    def validation_batch_end(self, param):
        """fit's `eval_batch_end_callback`."""
        self.validation.append(cross_entropy(self.module.get_outputs()[0],
                                             param.locals["eval_batch"].label[0]))

    def validation_end(self, param):
        """fit's `eval_end_callback`."""
        self.ranks.sum_metric(param.eval_metric)
        found = dict(param.eval_metric.get_global_name_value())
        line = {"epoch": param.epoch, "accuracy": self.training.get("accuracy"),
                "err_top1": 1 - found["accuracy"], "loss": self._mean(self.losses),
                "validation_loss": self._mean(self.validation),
                "samples_per_second":
                    self.batches * self.batch_size * self.ranks.workers / self.seconds,
                "seconds": self.seconds, "lr": self.module._optimizer.learning_rate,
                "loss_scale": self.module.loss_scale, "skipped": self.module.skipped}
        top5 = found.get("top_k_accuracy_5")
        if top5 is not None:
            line["err_top5"] = 1 - top5
        self.log.add_epoch(line)
        self.log.save()
        self._start()

    def _mean(self, losses):
        total, count = self.ranks.sum(sum(losses), len(losses))
        return total / count if count else math.nan


def cross_entropy(probabilities, label):
    """Returns the mean cross entropy of softmax outputs over a batch."""
    likely = probabilities.astype("float32").pick(label.as_in_context(probabilities.ctx))
    return float(-(likely + 1e-12).log().mean().asscalar())


def gradient_norm(gradients):
    """Returns the global norm of gradients."""
    return math.sqrt(sum(float(g.astype("float32").norm().asscalar()) ** 2 for g in gradients))


def read_log(path):
    """Returns the arguments and the lines of a log.jsonl of version 1 or 2."""
    found = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                raise ValueError(f"{path} is damaged: line {number} is not JSON") from None
    if not found or not isinstance(found[0], dict):
        raise ValueError(f"{path} is damaged: it must have a run's arguments, and then a line "
                         "for each step and epoch")
    for number, line in enumerate(found[1:], 2):
        if not _is_step_or_epoch(line):
            raise ValueError(f"{path} is damaged: line {number} is neither a step nor an epoch")
    arguments = found[0].get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"{path} is damaged: its first line must have a run's arguments")
    return arguments, found[1:]


def _is_step_or_epoch(line):
    if not isinstance(line, dict):
        return False
    epoch, error = line.get("epoch"), line.get("err_top1")
    return type(epoch) is int and (error is None or type(error) in (int, float))


class _EventFile:
    """Writes scalars and texts to a TensorBoard event file."""

    def __init__(self, folder):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except (ImportError, TypeError) as error:  # TypeError: too old for protobuf
            raise ValueError("--tensorboard needs a package: pip install tensorboard. "
                             f"{str(error).splitlines()[0]}") from None
        self.event, self.summary, self.tensor = event_pb2.Event, summary_pb2, tensor_pb2.TensorProto
        self.file = EventFileWriter(folder)

    def add_scalar(self, tag, value, step):
        self._add(step, tag=tag, simple_value=value)

    def add_text(self, tag, text):
        kind = self.summary.SummaryMetadata.PluginData(plugin_name="text")
        self._add(0, tag=tag, metadata=self.summary.SummaryMetadata(plugin_data=kind),
                  tensor=self.tensor(dtype="DT_STRING", string_val=[text.encode()]))

    def _add(self, step, **value):
        values = [self.summary.Summary.Value(**value)]
        self.file.add_event(self.event(step=step, wall_time=time.time(),
                                       summary=self.summary.Summary(value=values)))

    def close(self):
        self.file.close()


def _mean(values):
    return sum(values) / len(values) if values else math.nan


def _finite(value):
    """Returns the value; None for a number that is not finite, which JSON does not support."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the folder of a run

# Flags that may change when a run is resumed.
MAY_DIFFER = ("resume", "save_dir", "log_interval", "log_seconds", "num_workers", "gpus",
              "data_dir", "tensorboard", "claim_speed", "logging_file", "save_period",
              "kvstore", "workers", "xray", "xray_steps", "teacher_params")


def add_folder_flags(parser, folder):
    """Adds the flags of a `RunFolder`, some with GluonCV's names, too."""
    add = parser.add_argument
    add("--save-dir", default=folder, help="folder for all files of the run")
    add("--save-period", "--save-frequency", type=positive, metavar="N",
        help="keep the parameters of every Nth epoch, besides the last")
    add("--resume", action="store_true", help="resume from the last epoch in "
        "--save-dir; without one start a new run")
    add("--resume-params", metavar="FILE", help="start with these parameters")
    add("--resume-states", metavar="FILE", help="start with these states of the Trainer")
    add("--resume-epoch", type=whole, default=0, help="start with this epoch, counted from 0")


def hold(folder):
    """Locks a folder until this process ends; raises an error if another process has it."""
    os.makedirs(folder, exist_ok=True)
    file = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)  # stays open
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a loader's processes do not inherit it
    except OSError:
        os.close(file)
        raise ValueError(f"another run writes to {folder}: pass another "
                         "--save-dir") from None


class RunFolder:
    """The folder `args.save_dir`. Rank 0 writes to it, all ranks read it.

    Args:
        args: a script's flags; it reads those of `add_folder_flags`, `epochs` and `batch_size`.
        writes: whether the run writes files.
    """

    def __init__(self, args, ranks, writes=True):
        self.args, self.path, self.ranks = args, args.save_dir, ranks
        self.writes = writes and ranks.rank == 0
        if not writes:
            return
        if os.path.exists(self._file("last.json")) and not args.resume:
            raise ValueError(f"{self.path} has a run: pass --resume to continue it, or another "
                             "--save-dir")
        if self.writes:
            hold(self.path)

    def start_record(self, lines, steps):
        """Returns the run's log, which continues earlier lines and steps."""
        path = self._file("log.jsonl") if self.writes else None
        return TrainingLog(self.args, path, lines, steps, writes=self.ranks.rank == 0)

    def save(self, net, trainer, epoch, record):
        """Saves the parameters, states and log of an epoch."""
        if not self.writes:
            return
        net.save_parameters(self._file(f"epoch-{epoch}.params"))
        trainer.save_states(self._file(f"epoch-{epoch}.states"))
        record.save()
        replace_text(self._file("last.json"), json.dumps({"epoch": epoch}))
        errors = [line["err_top1"] for line in record.lines if line.get("err_top1") is not None]
        if errors and errors[-1] == min(errors):
            net.save_parameters(self._file("best.params"))
        kept = self.args.save_period and epoch % self.args.save_period == 0
        for old in (f"epoch-{epoch - 1}.params", f"epoch-{epoch - 1}.states"):
            if os.path.exists(self._file(old)) and not (kept and old.endswith(".params")):
                os.remove(self._file(old))

    def resume(self, net, trainer):
        """Loads a network and its Trainer from the last epoch, or from the files of the flags.
        Returns the number of completed epochs, and their log lines."""
        args = self.args
        if not args.resume:
            return self._begin(net, trainer)
        if not os.path.exists(self._file("last.json")):
            self._check_nothing_is_there()
            log.info("nothing to resume in %s", self.path)
            return self._begin(net, trainer)
        epoch = self._last_epoch()
        must_exist(self._file("log.jsonl"), self._file(f"epoch-{epoch}.params"),
                   self._file(f"epoch-{epoch}.states"))
        was, lines = read_log(self._file("log.jsonl"))
        self._check_same_run(was, epoch)
        done = [line["epoch"] for line in lines if "batch" not in line]
        if epoch not in done:
            raise ValueError(f"{self._file('log.jsonl')} has no end of epoch {epoch}, which "
                             f"{self._file('last.json')} has: the files are of different runs")
        _load_parameters(net, self._file(f"epoch-{epoch}.params"))
        _load_states(trainer, self._file(f"epoch-{epoch}.states"))
        if epoch + 1 >= args.epochs:
            log.info("no epochs are left to train; --epochs above %d continues", args.epochs)
        return epoch + 1, [line for line in lines if line["epoch"] <= epoch]

    def _begin(self, net, trainer):
        """Starts a run: from scratch, or from the files of `--resume-params` and the like."""
        args = self.args
        if args.resume_epoch >= args.epochs:
            raise ValueError(f"--resume-epoch {args.resume_epoch} leaves none of the {args.epochs} "
                             "epochs to train: --epochs includes earlier epochs")
        if args.resume_params:
            must_exist(args.resume_params)
            _load_parameters(net, args.resume_params)
        if args.resume_states:
            must_exist(args.resume_states)
            _load_states(trainer, args.resume_states)
        return args.resume_epoch, []

    def _file(self, name):
        return os.path.join(self.path, name)

    def _check_nothing_is_there(self):
        """Refuses a folder without last.json, unless its first epoch was interrupted."""
        found = sorted(os.path.basename(path) for pattern in ("epoch-*.params", "best.params")
                       for path in glob.glob(self._file(pattern)))
        later = [name for name in found if name != f"epoch-{self.args.resume_epoch}.params"]
        if later:
            raise ValueError(f"{self._file('last.json')} is missing, and there is {later[0]}: "
                             "no new run is started. Restore last.json, such as "
                             '{"epoch": 3} for epoch-3.params and epoch-3.states')

    def _last_epoch(self):
        path = self._file("last.json")
        try:
            with open(path) as file:
                epoch = json.load(file)["epoch"]
            if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f'{path} is damaged: it must be {{"epoch": 3}}, with the number '
                             "of the last complete epoch") from None
        return epoch

    def _check_same_run(self, was, epoch):
        """Refuses flags that differ from the original run's, except more epochs at its end."""
        args, now = self.args, json.loads(json.dumps(vars(self.args)))
        for run in (was, now):  # the number of ranks may change, not the size of a step
            sizes = run.get("batch_size", 0), run.get("workers", 1)
            if any(type(size) is not int for size in sizes):
                raise ValueError(f"{self._file('log.jsonl')} is damaged: batch_size and workers "
                                 f"must be integers. Received: {sizes}")
            run["batch_size"] = sizes[0] * sizes[1]
        if epoch + 1 == was.get("epochs") < args.epochs:
            log.info("completed epochs: %d; remaining: %d, with the schedule of %d epochs",
                     epoch + 1, args.epochs - epoch - 1, args.epochs)
            was["epochs"] = args.epochs
        differ = [f"{name} was {was.get(name, 'unset')}, is {now.get(name, 'unset')}"
                  for name in {**was, **now} if name not in MAY_DIFFER
                  and was.get(name) != now.get(name)]
        if differ:
            raise ValueError("--resume needs the flags of the original run: "
                             f"{'; '.join(differ)}")


def _load_parameters(net, path):
    try:
        net.load_parameters(path)
    except (mx.MXNetError, AssertionError, ValueError) as error:  # the errors lack the path
        raise ValueError(f"{path} has other parameters, or is damaged: {message(error)}") \
            from None


def _load_states(trainer, path):
    """Loads states, but keeps the schedule of this run, which may have more epochs."""
    schedule = trainer.optimizer.lr_scheduler
    trainer.load_states(path)
    trainer.optimizer.lr_scheduler = schedule


# ---- the progress bar

def add_progress_flags(parser):
    """Adds the flags of a `Progress`."""
    add = parser.add_argument
    add("--log-interval", type=positive, default=20, help="number of batches between two log lines")
    add("--log-seconds", type=decimal, default=60.0,
        help="maximum seconds between two lines of the text log, but not of log.jsonl")


class Progress:
    """Iterates over the batches of an epoch. On a terminal a bar shows epoch, loss, scale,
    samples/s and the remaining time.

    Args:
        args: a script's flags; it reads those of `add_progress_flags` and `epochs`.
        samples: the number of examples of a step over all ranks.
        shows: False on ranks that do not log.
    """

    def __init__(self, args, batches, epoch, samples, shows=True):
        from tqdm import tqdm  # imported late: a tenth of gluon_amp's import time
        self.args, self.samples, self.shows = args, samples, shows
        self.bar = tqdm(batches, f"epoch {epoch + 1}/{args.epochs}", leave=False,
                        disable=None if shows else True, unit=" samples", unit_scale=samples,
                        dynamic_ncols=True, mininterval=0.2)
        self._begun, self._batches = time.time(), 0

    def __iter__(self):
        from tqdm.contrib.logging import logging_redirect_tqdm
        terminal = self.shows and sys.stderr.isatty()
        with logging_redirect_tqdm() if terminal else contextlib.nullcontext():
            yield from enumerate(self.bar)

    def step(self, batch, loss, scale):
        """Shows a step.

        Returns:
            Whether --log-interval makes this step a line in both logs; and the samples/s since
            the last line if a line of text is due, else 0.
        """
        self.bar.set_postfix_str(f"loss {loss:.3g}, scale {scale:g}", refresh=False)
        self._batches += 1
        seconds = time.time() - self._begun
        due = (batch + 1) % self.args.log_interval == 0
        if not due and seconds < self.args.log_seconds:
            return False, 0.0
        speed = self.samples * self._batches / max(seconds, 1e-9)
        self._begun, self._batches = time.time(), 0
        return due, speed


# ---- --xray

def add_xray_flags(parser):
    """Adds the flags of `xray_epoch`."""
    add = parser.add_argument
    add("--xray", metavar="FOLDER", help="write an X-ray of each epoch's first steps to this "
        "folder (docs/xray.md), without any effect on training")
    add("--xray-steps", type=positive, default=3, help="number of steps of an X-ray")


class XrayedIter(mx.io.DataIter):
    """An iterator over a Module's batches that X-rays the first batches of each epoch, and then
    yields all batches unchanged and in order.

    Args:
        batches: the wrapped iterator.
        epoch: the number of the first epoch.
    """

    def __init__(self, args, epoch, module, batches):
        super().__init__(batches.batch_size)
        self.args, self.epoch, self.module, self.batches = args, epoch, module, batches
        self.first = None  # batches of this epoch; None before they are read

    @property
    def provide_data(self):
        return self.batches.provide_data

    @property
    def provide_label(self):
        return self.batches.provide_label

    def reset(self):
        self.batches.reset()
        if self.first is not None:
            self.first, self.epoch = None, self.epoch + 1

    def next(self):
        if self.first is None:
            self.first = [_copied(batch) for batch in
                          itertools.islice(self.batches, self.args.xray_steps)]
            xray_epoch(self.args, self.epoch, self.module, self.first)
        return self.first.pop(0) if self.first else self.batches.next()


def _copied(batch):
    """Copies a batch: an iterator may reuse its arrays for the next."""
    return mx.io.DataBatch([array.copy() for array in batch.data],
                           [array.copy() for array in batch.label], batch.pad, batch.index,
                           batch.bucket_key, batch.provide_data, batch.provide_label)


def xray_epoch(args, epoch, net, batches, loss_fn=None):
    """X-rays copies of an epoch's first batches, into FOLDER/epoch-0 and so on. Call it before the
    epoch, and before its random seed is set."""
    if not args.xray:
        return
    folder = os.path.join(args.xray, f"epoch-{epoch}")
    if os.path.exists(folder):
        log.info("%s exists", folder)
        return
    os.makedirs(args.xray, exist_ok=True)
    view = amp.xray(net, itertools.islice(batches, args.xray_steps), loss_fn, steps=args.xray_steps)
    log.info("X-ray of epoch %d: %s\n%s", epoch, view.save(folder), view)


# ---- --macrobatch-size

class AddingModule(amp.Module):
    """A Module with gradient accumulation.

    Args:
        batches: the number of batches of an update.

    Attributes:
        gradient_scale: the loss scale of the last gradients; `update` may change `loss_scale`.
    """

    def __init__(self, *args, batches=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.added = batches, 0
        self.gradient_scale = self.loss_scale

    def bind(self, *args, **kwargs):
        super().bind(*args, **kwargs, grad_req="add" if self.batches > 1 else "write")

    def forward_backward(self, data_batch):
        if self.added == 0 and self.batches > 1:
            for gradient in itertools.chain(*self._exec_group.grad_arrays):
                if gradient is not None:
                    gradient[:] = 0
        super().forward_backward(data_batch)

    def update(self):
        self.gradient_scale = self.loss_scale
        self.added = (self.added + 1) % self.batches
        return self.added > 0 or super().update()
