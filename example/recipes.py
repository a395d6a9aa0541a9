"""What the training scripts beside this file share: flags, images, networks, ranks, logs.

This file uses modules of gluon_amp that are no part of its public names: take it from the checkout
of the version that is installed.
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
from gluon_amp.policy import NAMES as POLICIES  # noqa: F401  (what --policy takes)
from gluon_amp.policy import get_policy
from gluon_amp.tools.tensor_cores import matrix_layers

log = logging.getLogger("recipes")


# ---- the command line

class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it is written, and all defaults."""


class Parser(checks.Parser):
    """The parser of a script, with `--config FILE`: flags in a YAML or JSON file, by their names.

    What stands in the command line counts more than what stands in the file.
    """

    def __init__(self, description):
        super().__init__(description=description, formatter_class=_Help)
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS,
                          help="a YAML or JSON file of flags, such as `batch-size: 64`; flags of "
                               "the command line count more")

    def parse_args(self, args=None, namespace=None):
        """The flags of the command line, behind those of the file."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config")
        found, rest = first.parse_known_args(args)
        words = args if found.config is None else [*self._from_file(found.config), *rest]
        flags = super().parse_args(words, namespace)
        if hasattr(flags, "config"):  # which argparse took in, and nobody has read
            self.error("--config is written in full, and in the command line")
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
            raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(flags, dict):
        raise ValueError(f"{path} must hold names of flags and their values. "
                         f"Received: {type(flags).__name__}")
    return flags


def _words(flag, value):
    """A flag of a file as words of a command line."""
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
    """Whole numbers from 0 on, with commas between them."""
    return _list_of(lambda part: positive(part) if part.strip("0") else 0, text,
                    "whole numbers, such as 0,2")


def decimals(text):
    """Numbers with commas between them."""
    return _list_of(float, text, "numbers, such as 0.5 or 0.5,0.4,0.4")


def whole(text):
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on. Received: {text!r}")
    return int(text)


def decimal(text):
    """A finite number from 0 on."""
    return in_range(text, 0, math.inf, "must be a finite number from 0 on")


def share(text):
    """A number from 0 to 1."""
    return in_range(text, 0, 1, "must be a number from 0 to 1")


def above_0(text):
    """A finite number above 0."""
    return in_range(text, sys.float_info.min, math.inf, "must be a finite number above 0")


def in_range(text, least, most, wanted):
    """A finite number from `least` to `most`, or an error that says what is wanted."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (least <= number <= most and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{wanted}. Received: {text!r}")
    return number


def loss_scale(text):
    """`dynamic`, `none`, or a number: what `Trainer` and `Module` take, with None for `none`."""
    if text in ("dynamic", "none"):
        return text
    try:
        return amp.StaticLossScale(float(text)).scale
    except ValueError:
        raise argparse.ArgumentTypeError("takes a positive number, dynamic or none. "
                                         f"Received: {text}") from None


def add_gpus(parser):
    """`--gpus 0,1`, and GluonCV's `--num-gpus 2` for the same."""
    add = parser.add_argument
    add("--gpus", type=numbers, default=[], help="such as 0 or 0,2,5; none: the CPU")
    add("--num-gpus", dest="gpus", metavar="N", default=argparse.SUPPRESS,
        type=lambda text: list(range(whole(text))), help="the first N GPUs")


def add_types(parser):
    """`--dtype` and `--loss-scale` of a network in float32, float16 or bfloat16."""
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"),
                        help="of the network")
    parser.add_argument("--loss-scale", type=loss_scale, default="dynamic",
                        help="of float16: dynamic, a number or none")


# ---- what flags say

def devices_of(gpus):
    """The GPUs of these numbers, or the CPU if there are none."""
    if not gpus:
        return [mx.cpu()]
    if max(gpus) >= mx.context.num_gpus():
        raise ValueError(f"--gpus {max(gpus)}: MXNet sees {mx.context.num_gpus()} GPUs")
    return [mx.gpu(i) for i in gpus]


def begin(parser, args):
    """Seeds all random numbers. Returns the one device of `--gpus`, and numpy's generator."""
    if len(args.gpus) > 1:
        parser.error("--gpus: one is enough")
    device, = devices_of(args.gpus)
    mx.random.seed(args.seed)
    return device, np.random.RandomState(args.seed)


def is_float32(policy):
    """Whether a policy of this name changes nothing."""
    return get_policy(policy).is_float32


def momentum_of(optimizer, momentum):
    """The argument `momentum` for an optimizer of that name; nothing, if it takes none."""
    takes = inspect.signature(type(amp.optimizer(optimizer))).parameters
    return {"momentum": momentum} if "momentum" in takes else {}


def schedule(lr, steps, epochs, mode="step", decay_epochs=(), decay=0.1, warmup_epochs=0,
             warmup_lr=0.0, warmup_strategy="linear"):
    """A learning rate that warms up and then falls.

    Args:
        steps: updates in an epoch.
        mode: `step` multiplies the rate by `decay` after each of `decay_epochs`; `cosine` lets it
            fall to 0 in `epochs`.
        warmup_strategy: `linear` rises from `warmup_lr` to `lr`; `constant` stays at `warmup_lr`.
    """
    warmup_steps = int(warmup_epochs * steps)
    warmup = {"warmup_steps": warmup_steps, "warmup_begin_lr": warmup_lr,
              "warmup_mode": warmup_strategy}
    if mode == "cosine":
        if decay_epochs:
            raise ValueError("--lr-decay-epoch is for --lr-mode step. Received: --lr-mode cosine")
        if warmup_steps >= epochs * steps:
            raise ValueError(f"no epoch is left to the cosine: --warmup-epochs must be below the "
                             f"{epochs} epochs of the training. Received: {warmup_epochs:g}")
        return mx.lr_scheduler.CosineScheduler(epochs * steps, lr, **warmup)
    after = [int(epoch * steps) for epoch in decay_epochs] or [1 << 60]
    return mx.lr_scheduler.MultiFactorScheduler(after, decay, lr, **warmup)


def run(main):
    """Runs a script's `main`; an error that a user can mend is one line, without a traceback."""
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
    """The flag that says how `Ranks` are made."""
    parser.add_argument(
        "--kvstore", "--kv-store", dest="kvstore", default="device",
        choices=("local", "device", *MANY),
        help="how gradients are summed: in one process by local or device; by dist_sync or "
             "dist_device_sync, MXNet's parameter server (gluon-amp launch -n 2 python ...), or "
             "by horovod (horovodrun -np 2 python ...), over processes that each read a part of "
             "the data in batches of --batch-size: scale --lr yourself")


class Ranks:
    """The processes that train one network: a single one, unless the kvstore is for many.

    Args:
        kvstore: what --kvstore names.
        names: True for a Module, whose stores know parameters by names; a Trainer's, by numbers.

    Attributes:
        store: the `kvstore=` of a Trainer, or of `Module.fit`.
        rank: this process's number, from 0 on. Rank 0 logs and saves.
        workers: how many there are.
    """

    def __init__(self, kvstore="device", names=False):
        self.store = kvstore
        if kvstore in MANY:
            os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"  # servers that update tell ranks nothing
            self.store = shared_store(make_store(kvstore, None))
        self._workers = Workers(self.store if kvstore in MANY else None, names)
        self.rank, self.workers = self._workers.rank, self._workers.count
        self._by_horovod = kvstore == "horovod"

    def devices(self, gpus):
        """Which of these GPUs are this process's: with Horovod one, by its number here."""
        if not self._by_horovod or not gpus:
            return gpus
        import horovod.mxnet as hvd
        if hvd.local_size() > len(gpus):
            raise ValueError(f"--gpus: Horovod runs {hvd.local_size()} processes here, and each "
                             f"needs a GPU. Received: {','.join(map(str, gpus))}")
        return [gpus[hvd.local_rank()]]

    def start_log(self, format):
        """Rank 0 logs; the others only say what went wrong."""
        logging.basicConfig(level=logging.ERROR if self.rank else logging.INFO, format=format,
                            force=True)

    def sum(self, *numbers):
        """Each number, summed over all ranks in their order: all get the same bits."""
        layout = struct.Struct(f"{len(numbers)}d")
        rows = self._workers.gather(layout.pack(*map(float, numbers)))
        return [sum(column) for column in zip(*map(layout.unpack, rows))]

    def check_same(self, number, what):
        """Raises an error where ranks hold different numbers, since they would wait for each other.
        """
        numbers = [int(row) for row in self._workers.gather(b"%20d" % number)]
        if len(set(numbers)) > 1:
            raise ValueError(f"ranks have different numbers of {what}. Rank 0, 1, ...: "
                             f"{', '.join(map(str, numbers))}. All must read the same files")

    def sum_metric(self, metric):
        """Sums a metric, or those of a CompositeEvalMetric, since it was reset."""
        for one in getattr(metric, "metrics", [metric]):
            one.sum_metric, one.num_inst = self.sum(one.global_sum_metric, one.global_num_inst)
            one.global_sum_metric, one.global_num_inst = one.sum_metric, one.num_inst


class Part(mx.gluon.data.Sampler):
    """A rank's part of training data: all ranks have as many, and none has another's.

    The order of an epoch is its own, and the same in every run.

    Args:
        length: of all data.

    Attributes:
        epoch: to be set before each.
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
    """A rank's part of validation data: together the ranks have all of it, each example once."""

    def __init__(self, length, ranks):
        if length < ranks.workers:
            raise ValueError(f"{length} images to validate are too few for {ranks.workers} ranks")
        self.mine = range(ranks.rank, length, ranks.workers)

    def __iter__(self):
        return iter(self.mine)

    def __len__(self):
        return len(self.mine)


# ---- RecordIO files

_MAGIC = 0xCED7230A  # begins each record
# What begins images that OpenCV reads: JPEG, PNG, BMP, WebP, TIFF, JPEG 2000, PNM, EXR, HDR, Sun.
_IMAGES = (b"\xff\xd8", b"\x89PNG", b"BM", b"RIFF", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP", b"P1",
           b"P2", b"P3", b"P4", b"P5", b"P6", b"v/1\x01", b"#?R", b"\x59\xa6\x6a\x95")


def records(path, classes):
    """The bytes at which the records of a RecordIO file begin. It is an error if the file is
    missing, empty or cut short, if a record holds no image, or if a label is no class."""
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
                raise ValueError(f"{path} is no RecordIO file, or damaged: no record begins at "
                                 f"byte {at}")
            part, length = length >> 29, length & (1 << 29) - 1
            if part in (0, 1):  # a record's only or first part
                begins.append(at)
                one_label = labels == 0  # so it says
                if one_label and not (0 <= label < classes and label == int(label)):
                    raise ValueError(f"{path} has a label {label:g}, and the network {classes} "
                                     "classes, from 0 on: --num-classes")
                image = header[32 + 4 * labels:] if length > 24 else b""
                if labels <= 4 and at + 8 + length <= size and not image.startswith(_IMAGES):
                    raise ValueError(f"{path} has a record at byte {at} that is no image of a kind "
                                     "that MXNet reads")
            at += 8 + (length + 3) // 4 * 4
    if at > size:
        raise ValueError(f"{path} is cut short: its last record ends {at - size} bytes behind it")
    return begins


def records_of_part(path, index, begins, part, parts):
    """How many records a rank reads that gives MXNet's iterators this `part_index` and `num_parts`.
    MXNet cuts the index, or else the file, into parts of one length; a record belongs to the part
    in which it begins."""
    if index:
        with open(index) as file:
            count = sum(1 for line in file if line.strip())
        step = -(-count // parts)
        return len(range(count)[step * part:step * (part + 1)])
    step = (-(-os.path.getsize(path) // parts) + 3) // 4 * 4
    return sum(step * part <= at < step * (part + 1) for at in begins)


class Unpadded(mx.io.DataIter):
    """A DataIter without what fills up its last batch, which a Module would count.

    Args:
        data_iter: one that begins anew after a reset, as with `round_batch=False`.
        examples: how many it has.
        least: the smallest last batch, since every device needs an example.
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


# ---- images to train a classifier on

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
CLASSES = {"digits": 10, "mnist": 10, "cifar10": 10, "caltech101": 101, "imagenet": 1000}
_FILES = {"cifar10": [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"],
          "mnist": ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz",
                    "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]}
_TAKEN = "digits, cifar10, mnist, caltech101, imagenet, dummy, a folder of folders, or a .rec"


def add_image_flags(parser):
    """The flags about images; the second names are those of GluonCV's scripts."""
    add = parser.add_argument_group("data").add_argument
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


def three_numbers(text):
    """The type of a flag that has a number each for red, green and blue: the text as it is."""
    if len(decimals(text)) != 3:
        raise argparse.ArgumentTypeError("takes three numbers, of red, green and blue. "
                                         f"Received: {text!r}")
    return text


def three_deviations(text):
    """The same for three numbers that something is divided by: they must be above 0."""
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
    """This rank's part of the training data, and loaders of its parts of both."""
    check_dataset(args)
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


def classes_of(args):
    """How many classes the labels have."""
    return args.classes or CLASSES.get(args.dataset, 10)


def check_labels(args, label):
    """Refuses a batch that has a label beyond the classes: MXNet takes it without a word."""
    largest, classes = label.max().asscalar(), classes_of(args)
    if largest >= classes:
        raise ValueError(f"the data has a label {largest:g}, and the network {classes} classes, "
                         "from 0 on: --classes")


def check_dataset(args):
    """Refuses a dataset that is not there, and flags that it would pass over."""
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

def _datasets(args):
    """Training and validation data."""
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


def _files(args):
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
    """Cuts a square out of an image, at a random place."""

    def __init__(self, size):
        super().__init__()
        self.size = size, size

    def forward(self, image):
        return mx.image.random_crop(image, self.size)[0]


class _RandomMirror(mx.gluon.Block):
    """Mirrors every second image; MXNet's own transform leaves out the middle of odd widths."""

    def forward(self, image):
        return image.flip(axis=1) if random.random() < 0.5 else image


# ---- networks

def small_network(classes):
    """Three convolutions and a dense layer: learns small images in seconds, on a CPU."""
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    for channels, stride in ((32, 1), (64, 2), (128, 2)):
        net.add(nn.Conv2D(channels, 3, stride, 1, use_bias=False), nn.BatchNorm(),
                nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(classes))
    return net


def zoo_network(name, **options):
    """The network of that name, from MXNet's model zoo or else from gluoncv's.

    Args:
        options: for the zoo, such as `classes=10` or `pretrained=True`.
    """
    try:
        return _from_zoo(mx.gluon.model_zoo.vision.get_model, name, options)
    except ValueError as error:
        names = str(error).split("\n\t")[1:]
        if not names:  # it is not the name that is wrong
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
    """gluoncv, which refuses to be imported beside PyTorch 2, though its networks of MXNet need no
    PyTorch: so it is imported as if there were none."""
    torch = sys.modules.pop("torch", None)
    sys.modules["torch"] = None  # Python's way to say that there is none
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
    """It is an error if a network does not take images of this shape, or if the checkpoint that
    it goes on from is of another network or of another type."""
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
        raise ValueError(f"{prefix}-symbol.json is of another network, or of another --dtype, than "
                         "the flags name: give those that the training was begun with")


def _signature(symbol, image):
    """Names, shapes and types of what a network learns and gives."""
    return (symbol.list_arguments(), symbol.infer_shape(data=(1, *image)),
            symbol.infer_type(data="float32"))


def without_head(symbol, layer=None, bn_momentum=None, freeze=False):
    """A classifier's features: its symbol up to the input of its last fully connected layer.

    Args:
        layer: the features end with the output of this layer instead.
        bn_momentum: of all batch norms; in a short training their usual moving averages lag.
        freeze: batch norms use their statistics and do not move them.
    """
    graph = json.loads(symbol.tojson(remove_amp_cast=False))
    for node in graph["nodes"]:
        if node["op"] == "BatchNorm" and bn_momentum is not None:
            node.setdefault("attrs", {})["momentum"] = str(bn_momentum)
        if node["op"] == "BatchNorm" and freeze:
            node.setdefault("attrs", {})["use_global_stats"] = "True"
    internals = mx.sym.load_json(json.dumps(graph)).get_internals()
    name = (layer or _head(graph)).replace("_output", "")
    layers = [one[:-len("_output")] for one in internals.list_outputs() if one.endswith("_output")]
    if name not in layers:
        raise ValueError(f"--layer-before-fullc: there is no layer {name}. Near it: "
                         f"{', '.join(nearest(name, layers))}")
    features = internals[f"{name}_output"]
    features = features if layer else features.get_children()[0]
    if "data" not in features.list_arguments():
        raise ValueError("the network has no argument named data. Its arguments begin with "
                         f"{', '.join(features.list_arguments()[:3])}")
    return features


def _head(graph):
    """The name of the last fully connected layer."""
    nodes, i = graph["nodes"], graph["heads"][0][0]
    while nodes[i]["op"] != "FullyConnected":
        if not nodes[i]["inputs"]:
            layers = [node["name"] for node in nodes if node["op"] != "null"]
            raise ValueError("the network's head is unknown: no FullyConnected lies before its "
                             "output. Choose --layer-before-fullc among "
                             f"{', '.join(layers[-5:])}")
        i = nodes[i]["inputs"][0][0]
    return nodes[i]["name"]


def tensor_core_hints(net, batch_size, devices):
    """Sentences about what keeps a GPU's Tensor Cores from their full speed with this network."""
    hints = []
    shapes = {p.name: p.shape for p in net.collect_params().values()}
    slow = [f"{layer.name} {layer.sizes}" for layer in
            matrix_layers(net(mx.sym.var("data")), shapes) if not layer.fits]
    if slow:
        hints.append("no multiples of 8, so off Tensor Cores or slower on them: "
                     f"{', '.join(slow)}")
    if batch_size % (8 * devices):
        hints.append(f"so does a batch of {batch_size / devices:g} for each GPU")
    if os.environ.get("MXNET_CUDNN_AUTOTUNE_DEFAULT") == "0":
        hints.append("MXNET_CUDNN_AUTOTUNE_DEFAULT=0: cuDNN does not look for its fastest "
                     "algorithms")
    return hints


# ---- log.jsonl, and TensorBoard's files

def add_log_flags(parser):
    """The flags that a `TrainingLog` reads."""
    add = parser.add_argument
    add("--tensorboard", metavar="FOLDER",
        help="also write TensorBoard's event files there: pip install tensorboard")
    add("--claim-speed", action="store_true",
        help="nothing else runs on this machine: reports may compare the speed")


class TrainingLog:
    """Takes in the steps and epochs of a run, and writes them where they were asked for.

    Args:
        args: the script's flags; `tensorboard` is read.
        path: of log.jsonl; None for none.
        lines: those of a run that is resumed.
        steps: how many steps it had made.
        writes: False for a rank that only takes in; rank 0 writes.
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
        """Takes in a step.

        Args:
            loss: of the step.
            updated: whether it updated the network.
            shown: whether a line of the log is due.
            values: lr, loss_scale, skipped and gradient_norm, each a number or a function that
                gives it.
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
        """Takes in the end of an epoch; warns where the network predicted infinities or NaNs."""
        if self.writes and not math.isfinite(line.get("validation_loss") or 0):
            log.warning("epoch %d: the network's predictions are not finite. They use the batch "
                        "norms' moving averages, which lag behind in the first steps: a deep "
                        "float16 network may then pass 65504, until it has trained more steps",
                        line["epoch"])
        self.lines.append({name: _finite(value) for name, value in line.items()})
        self._draw("epoch", line, line["epoch"])

    def save(self):
        """Writes log.jsonl; killed at any moment, the old one or the new one is there."""
        if not self.path:
            return
        arguments = {"version": 2, "arguments": vars(self.args)}
        replace_text(self.path, "".join(
            json.dumps(line) + "\n" for line in [arguments, *self.lines]))

    def start_epoch(self):
        """To be called before an epoch's first step."""
        self.losses = []

    def end(self):
        """To be called when the run is over."""
        if self.writer:
            self.writer.close()

    def _draw(self, place, line, at):
        if not self.writer:
            return
        for name, value in line.items():
            if name not in ("epoch", "batch", "skip") and isinstance(value, (int, float)):
                self.writer.add_scalar(f"{place}/{name}", value, at)


class ModuleLog:
    """Writes what `Module.fit` trains into a `TrainingLog`: the callbacks of `fit` are methods of
    this.

    Args:
        interval: batches from one line of the log to the next.
        ranks: those that train; all have to use these callbacks.
    """

    def __init__(self, log, module, interval, batch_size, ranks=None):
        self.log, self.module, self.interval = log, module, interval
        self.batch_size, self.ranks = batch_size, ranks or Ranks()
        self.scale, self.skipped = module.loss_scale, module.skipped
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
        scale, updated = self.scale, module.skipped == self.skipped
        self.scale, self.skipped, self.batches = module.loss_scale, module.skipped, param.nbatch + 1
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
        """fit's `epoch_end_callback`: validation follows. The first of these callbacks, so that
        others save what ranks agree on."""
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
    """The mean over a batch, of a softmax's outputs."""
    likely = probabilities.astype("float32").pick(label.as_in_context(probabilities.context))
    return float(-(likely + 1e-12).log().mean().asscalar())


def gradient_norm(gradients):
    """The norm of the whole gradient, which is given as the arrays of all parameters."""
    return math.sqrt(sum(float(g.astype("float32").norm().asscalar()) ** 2 for g in gradients))


def read_log(path):
    """The arguments and the lines of a log.jsonl, of either version."""
    found = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                raise ValueError(f"{path} is damaged: line {number} is no JSON") from None
    if not found or not isinstance(found[0], dict):
        raise ValueError(f"{path} is damaged: it should hold a run's arguments, and then a line "
                         "for each step and epoch")
    for number, line in enumerate(found[1:], 2):
        if not _is_step_or_epoch(line):
            raise ValueError(f"{path} is damaged: line {number} is of no step and no epoch")
    arguments = found[0].get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"{path} is damaged: its first line should hold a run's arguments")
    return arguments, found[1:]


def _is_step_or_epoch(line):
    if not isinstance(line, dict):
        return False
    epoch, error = line.get("epoch"), line.get("err_top1")
    return type(epoch) is int and (error is None or type(error) in (int, float))


class _EventFile:
    """What TensorBoard's own `summary.Writer` does, and texts."""

    def __init__(self, folder):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except (ImportError, TypeError) as error:  # TypeError: older than the protobuf beside it
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
    """The value; None for a number that is not finite, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the folder of a run

# Flags that a run may go on with other values of.
MAY_DIFFER = ("resume", "save_dir", "log_interval", "log_seconds", "num_workers", "gpus",
              "data_dir", "tensorboard", "claim_speed", "logging_file", "save_period",
              "kvstore", "workers", "xray", "xray_steps", "teacher_params")


def add_folder_flags(parser, folder):
    """The flags that a `RunFolder` reads, and GluonCV's names of some."""
    add = parser.add_argument
    add("--save-dir", default=folder, help="where all files of the run go")
    add("--save-period", "--save-frequency", type=positive, metavar="N",
        help="keep the parameters of each so many epochs; those of the last one are always there")
    add("--resume", action="store_true", help="go on from the last epoch in --save-dir; "
        "where there is none, begin")
    add("--resume-params", metavar="FILE", help="begin with these parameters")
    add("--resume-states", metavar="FILE", help="and with this state of the Trainer")
    add("--resume-epoch", type=whole, default=0, help="and with this epoch, from 0 on")


def hold(folder):
    """Locks a folder for this process until it ends; other processes are refused."""
    os.makedirs(folder, exist_ok=True)
    file = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)  # stays open
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a loader's processes do not inherit it
    except OSError:
        os.close(file)
        raise ValueError(f"another run writes into {folder}: --save-dir names another "
                         "place") from None


class RunFolder:
    """What `args.save_dir` holds. Rank 0 writes, all read.

    Args:
        args: a script's flags; those of `add_folder_flags`, `epochs` and `batch_size` are read.
        writes: whether anything is to be written at all.
    """

    def __init__(self, args, ranks, writes=True):
        self.args, self.path, self.ranks = args, args.save_dir, ranks
        self.writes = writes and ranks.rank == 0
        if not writes:
            return
        if os.path.exists(self._file("last.json")) and not args.resume:
            raise ValueError(f"{self.path} has a run: --resume goes on with it, --save-dir names "
                             "another place")
        if self.writes:
            hold(self.path)

    def start_record(self, lines, steps):
        """The run's log, which goes on behind the lines and steps of before."""
        path = self._file("log.jsonl") if self.writes else None
        return TrainingLog(self.args, path, lines, steps, writes=self.ranks.rank == 0)

    def save(self, net, trainer, epoch, record):
        """Parameters, states and log of an epoch."""
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
        """Puts a network and its Trainer where the run has stopped, or where `--resume-params`
        and the like say. Returns the epochs that are done, and their lines of the log."""
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
                             f"{self._file('last.json')} names: one of them is of another run")
        _load_parameters(net, self._file(f"epoch-{epoch}.params"))
        _load_states(trainer, self._file(f"epoch-{epoch}.states"))
        if epoch + 1 >= args.epochs:
            log.info("no epoch is left to train; a number above --epochs %d goes on", args.epochs)
        return epoch + 1, [line for line in lines if line["epoch"] <= epoch]

    def _begin(self, net, trainer):
        """Begins a run: anew, or with what `--resume-params` and the like name."""
        args = self.args
        if args.resume_epoch >= args.epochs:
            raise ValueError(f"--resume-epoch {args.resume_epoch} leaves none of the {args.epochs} "
                             "epochs to train: --epochs counts those before it, too")
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
        """Without last.json there may be files of a first epoch whose saving was cut short."""
        found = sorted(os.path.basename(path) for pattern in ("epoch-*.params", "best.params")
                       for path in glob.glob(self._file(pattern)))
        later = [name for name in found if name != f"epoch-{self.args.resume_epoch}.params"]
        if later:
            raise ValueError(f"{self._file('last.json')} is missing, and there is {later[0]}: "
                             "nothing is started over. Put it back, such as "
                             '{"epoch": 3} beside epoch-3.params and epoch-3.states')

    def _last_epoch(self):
        path = self._file("last.json")
        try:
            with open(path) as file:
                epoch = json.load(file)["epoch"]
            if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f'{path} is damaged: it should hold {{"epoch": 3}}, with the number '
                             "of the last whole epoch") from None
        return epoch

    def _check_same_run(self, was, epoch):
        """`--resume` goes on with the run as it was begun; a finished one may get more epochs."""
        args, now = self.args, json.loads(json.dumps(vars(self.args)))
        for run in (was, now):  # as many ranks as one likes go on with it, if a step is as large
            sizes = run.get("batch_size", 0), run.get("workers", 1)
            if any(type(size) is not int for size in sizes):
                raise ValueError(f"{self._file('log.jsonl')} is damaged: batch_size and workers "
                                 f"should be whole numbers. Received: {sizes}")
            run["batch_size"] = sizes[0] * sizes[1]
        if epoch + 1 == was.get("epochs") < args.epochs:
            log.info("epochs done: %d; to follow: %d, at their rates in a run of %d",
                     epoch + 1, args.epochs - epoch - 1, args.epochs)
            was["epochs"] = args.epochs
        differ = [f"{name} was {was.get(name, 'not there')}, is {now.get(name, 'not there')}"
                  for name in {**was, **now} if name not in MAY_DIFFER
                  and was.get(name) != now.get(name)]
        if differ:
            raise ValueError("--resume goes on with the run as it was begun: "
                             f"{'; '.join(differ)}")


def _load_parameters(net, path):
    try:
        net.load_parameters(path)
    except (mx.MXNetError, AssertionError, ValueError) as error:  # which name no file
        raise ValueError(f"{path} holds other parameters, or is damaged: {message(error)}") \
            from None


def _load_states(trainer, path):
    """Loads states, but keeps this run's own schedule, which may have more epochs than the one
    before."""
    schedule = trainer.optimizer.lr_scheduler
    trainer.load_states(path)
    trainer.optimizer.lr_scheduler = schedule


# ---- what a terminal shows

def add_progress_flags(parser):
    """The flags that a `Progress` reads."""
    add = parser.add_argument
    add("--log-interval", type=positive, default=20, help="batches of a line of the log")
    add("--log-seconds", type=decimal, default=60.0,
        help="seconds after which there is a line in any case; in the text, not in log.jsonl")


class Progress:
    """Goes through the batches of an epoch. On a terminal a bar shows epoch, loss, scale,
    samples/s and the time left.

    Args:
        args: a script's flags; those of `add_progress_flags` and `epochs` are read.
        samples: how many examples a step takes in, of all ranks together.
        shows: False on ranks that do not log.
    """

    def __init__(self, args, batches, epoch, samples, shows=True):
        from tqdm import tqdm  # which takes a tenth of gluon_amp's import
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
        """After each step: shows it.

        Returns:
            whether --log-interval makes this step a line in both logs; and the samples/s since
            the line before, where one of text is due; else 0.
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
    """The flags that `xray_epoch` reads."""
    add = parser.add_argument
    add("--xray", metavar="FOLDER", help="write there, for each epoch, what float16 does to every "
        "tensor in its first steps (docs/xray.md); training stays as it is, bit by bit")
    add("--xray-steps", type=positive, default=3, help="how many steps")


class XrayedIter(mx.io.DataIter):
    """An iterator of a Module's batches that has the first of each epoch X-rayed before it hands
    them out, as they are and in their order.

    Args:
        batches: the iterator itself.
        epoch: the number of the first epoch.
    """

    def __init__(self, args, epoch, module, batches):
        super().__init__(batches.batch_size)
        self.args, self.epoch, self.module, self.batches = args, epoch, module, batches
        self.first = None  # of this epoch; None before they are read

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
    """An iterator may use the arrays of a batch again for the next."""
    return mx.io.DataBatch([array.copy() for array in batch.data],
                           [array.copy() for array in batch.label], batch.pad, batch.index,
                           batch.bucket_key, batch.provide_data, batch.provide_label)


def xray_epoch(args, epoch, net, batches, loss_fn=None):
    """X-rays an epoch's first batches before it is trained, on copies: FOLDER/epoch-0 and so on.
    To be called before the epoch's random numbers are seeded."""
    if not args.xray:
        return
    folder = os.path.join(args.xray, f"epoch-{epoch}")
    if os.path.exists(folder):
        log.info("%s is there already", folder)
        return
    os.makedirs(args.xray, exist_ok=True)
    view = amp.xray(net, itertools.islice(batches, args.xray_steps), loss_fn, steps=args.xray_steps)
    log.info("X-ray of epoch %d: %s\n%s", epoch, view.save(folder), view)


# ---- --macrobatch-size

class AddingModule(amp.Module):
    """A Module that updates with the sum of the gradients of some batches.

    Args:
        batches: how many make an update.
    """

    def __init__(self, *args, batches=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.added = batches, 0

    def bind(self, *args, **kwargs):
        super().bind(*args, **kwargs, grad_req="add" if self.batches > 1 else "write")

    def forward_backward(self, data_batch):
        if self.added == 0 and self.batches > 1:
            for gradient in itertools.chain(*self._exec_group.grad_arrays):
                if gradient is not None:
                    gradient[:] = 0
        super().forward_backward(data_batch)

    def update(self):
        self.added = (self.added + 1) % self.batches
        return self.added > 0 or super().update()
