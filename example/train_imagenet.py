"""Trains on ImageNet, or any images in RecordIO files, with the Symbolic API.

    python train_imagenet.py --gpus 0,1,2,3 --dtype float16 --batch-size 1024 --lr 0.4 \\
        --data-train train.rec --data-val val.rec
    python train_imagenet.py --benchmark 1 --dtype float16 --num-layers 18 --batch-size 8 \\
        --num-epochs 1 --num-examples 160

The flags and the log format are those of MXNet's example/image-classification.
"""
import argparse
import glob
import itertools
import logging
import os
import time

import gluon_amp as amp
import images
import mxnet as mx
import numpy as np
import recipes
from gluon_amp.parallel import average_statistics
from gluon_amp.reports import Log
from gluon_amp.symbolic.module import Speedometer

# The values of --loss, and MXNet's names of the metrics.
LOSSES = {"": [], "ce": ["ce"], "nll": ["nll_loss"], "ce,nll": ["ce", "nll_loss"]}


image_shape = recipes.flag_type(
    recipes.list_of(int), lambda shape: len(shape) == 3 and min(shape) > 0,
    "takes channels,height,width, such as 3,224,224")


def add_arguments(parser):
    """Adds the flags of training and data; second names are from image_classification.py."""
    positive_int, zero_or_one = recipes.positive_int, {"choices": (0, 1)}
    recipes.add_training_flags(parser)
    parser.set_defaults(batch_size=128, epochs=80, lr_mode="step", lr_decay_epoch=[30, 60])
    recipes.add_flags(parser, "precision and initialization", (
        ("--dtype", ("float32", "float16"), "float32", "type of the network"),
        ("--macrobatch-size", positive_int, None,
         "images of an update over all workers, a multiple of --batch-size times the number of "
         "workers: gradients accumulate (default: one batch)"),
        ("--gc-type", ("none", "2bit"), "none", "only none: MXNet cannot compress float16"),
        ("--gc-threshold", float, 0.5, "threshold of --gc-type 2bit"),
        ("--initializer", ("default", "xavier", "msra", "orthogonal", "normal", "uniform", "one",
                           "zero"), "default", "initializer of weights (default: normal for "
         "alexnet, xavier for vgg, else Gaussian xavier by fan-in of magnitude 2)")))
    recipes.add_flags(parser, "output and resuming", (
        ("--model-prefix", str, None, "save checkpoints under this prefix"),
        ("--save-period", positive_int, 1, "number of epochs between two checkpoints"),
        ("--load-epoch", positive_int, None, "resume from this epoch of --model-prefix"),
        ("--resume", bool, False, "resume from the last checkpoint of --model-prefix, if any"),
        ("--save-dir", str, None, "write log.jsonl to this folder (see docs/recipes.md)"),
        ("--loss", tuple(LOSSES), "", "log these losses: ce, nll, or both as ce,nll",
         {"metavar": "NAMES"}),
        ("--top-k", recipes.non_negative_int, 0, "log the top-k accuracy, too"),
        ("--monitor", recipes.non_negative_int, 0,
         "batches between two logs of the outputs' sizes"),
        ("--test-io", int, 0, "1: only read the images, and log the speed", zero_or_one),
        ("--benchmark", int, 0, "1: train on random images, without files", zero_or_one)))
    recipes.add_flags(parser, "data", (
        ("--data-train --rec-train", str, None, "RecordIO file of training images"),
        ("--data-train-idx --rec-train-idx", str, "", "its index, to shuffle the whole file"),
        ("--data-val --rec-val", str, None, "RecordIO file of validation images"),
        ("--data-val-idx --rec-val-idx", str, "", "its index"),
        ("--use-rec", bool, False, "no effect: images always come from RecordIO files"),
        ("--image-shape", image_shape, [3, 224, 224], "channels,height,width"),
        ("--input-size", lambda text: [3, *[positive_int(text)] * 2], argparse.SUPPRESS,
         "--image-shape 3,N,N", {"dest": "image_shape", "metavar": "N"}),
        ("--num-classes --classes", positive_int, 1000, "number of classes"),
        ("--num-examples", positive_int, None,
         "images of an epoch (default, and at most: the file's)"),
        ("--rgb-mean", recipes.decimals, "123.68,116.779,103.939", "mean of pixels from 0 to 255"),
        ("--rgb-std", recipes.deviations, "1,1,1", "standard deviation of pixels from 0 to 255"),
        ("--data-nthreads --num-data-workers -j", positive_int, 4, "threads that decode images")))
    recipes.add_flags(parser, "augmentation (arguments of mx.io.ImageRecordIter)", (
        ("--use-imagenet-data-augmentation", int, 0, "1: the usual augmentation of ResNets on "
         "ImageNet, with --rgb-std 58.393,57.12,57.375; other flags override it", zero_or_one),
        *((f"--{flag}", type(default), default, "of mx.io.ImageRecordIter")
          for flag, default in AUGMENTATION.items()),
        ("--min-random-aspect-ratio", float, None, "of mx.io.ImageRecordIter")))


# MXNet's defaults
AUGMENTATION = {
    "pad-size": 0, "fill-value": 127, "random-crop": 0, "random-mirror": 0,
    "random-resized-crop": 0, "max-random-h": 0, "max-random-s": 0, "max-random-l": 0,
    "max-random-aspect-ratio": 0.0, "max-random-rotate-angle": 0, "max-random-shear-ratio": 0.0,
    "max-random-scale": 1.0, "min-random-scale": 1.0, "max-random-area": 1.0,
    "min-random-area": 1.0, "min-crop-size": -1, "max-crop-size": -1, "brightness": 0.0,
    "contrast": 0.0, "saturation": 0.0, "pca-noise": 0.0}
# Random crops of 8 to 100 % of an image, mirroring, color jitter, and normalization.
IMAGENET = {"random_resized_crop": 1, "random_mirror": 1, "min_random_area": 0.08,
            "min_random_aspect_ratio": 3 / 4, "max_random_aspect_ratio": 4 / 3,
            "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "pca_noise": 0.1,
            "rgb_std": "58.393,57.12,57.375"}


def parse_flags(parser, arguments):
    """Parses the flags; --use-imagenet-data-augmentation sets the defaults of others."""
    args = parser.parse_args(arguments)
    if args.use_imagenet_data_augmentation:
        parser.set_defaults(**IMAGENET)
        args = parser.parse_args(arguments)
    return args


# ---- data

def iterators(args, part=0, parts=1, begin=0):
    """Returns training and validation data, and the number of training images.

    Args:
        begin: the number of completed epochs, whose random numbers are not repeated.
    """
    shape = tuple(args.image_shape)
    if args.benchmark:
        examples = args.num_examples or 100 * args.batch_size
        batch = mx.io.NDArrayIter(mx.nd.random.uniform(-1, 1, (args.batch_size, *shape)),
                                  np.random.randint(0, args.num_classes, args.batch_size),
                                  args.batch_size)
        return mx.io.ResizeIter(batch, max(1, examples // args.batch_size)), None, examples
    if not args.data_train:
        raise SystemExit("--data-train FILE.rec is needed, or --benchmark 1 for random images")
    examples = images.check_records(args.data_train, args.num_classes)
    if examples < args.batch_size * parts:
        each = f" for each of {parts} ranks" if parts > 1 else ""
        raise SystemExit(f"{args.data_train} has {examples} images, fewer than one batch of "
                         f"{args.batch_size}{each}")
    val_examples = args.data_val and images.check_records(args.data_val, args.num_classes)
    mean, std = (values * 3 if len(values) == 1 else values
                 for values in (args.rgb_mean, args.rgb_std))
    common = {
        "data_shape": shape, "batch_size": args.batch_size, "label_width": 1,
        "preprocess_threads": args.data_nthreads,
        **{f"{name}_{channel}": value for name, values in (("mean", mean), ("std", std))
           for channel, value in zip("rgb", values)}}
    iterator_names = {
        "pad_size": "pad", "max_random_h": "random_h", "max_random_s": "random_s",
        "max_random_l": "random_l", "max_random_aspect_ratio": "max_aspect_ratio",
        "min_random_aspect_ratio": "min_aspect_ratio", "random_crop": "rand_crop",
        "random_mirror": "rand_mirror", "max_random_rotate_angle": "max_rotate_angle",
        "max_random_shear_ratio": "max_shear_ratio"}
    flags = [flag.replace("-", "_") for flag in (*AUGMENTATION, "min-random-aspect-ratio")]
    train = mx.io.ImageRecordIter(
        path_imgrec=args.data_train, path_imgidx=args.data_train_idx, shuffle=True,
        seed=(args.seed + begin) % 2**31, seed_aug=(args.seed + begin) % 2**31,
        num_parts=parts, part_index=part, **common,
        **{iterator_names.get(flag, flag): getattr(args, flag) for flag in flags})
    val = args.data_val and Unpadded(mx.io.ImageRecordIter(
        path_imgrec=args.data_val, path_imgidx=args.data_val_idx, round_batch=False, **common),
        val_examples, max(1, len(args.gpus)))
    return train, val, min(args.num_examples or examples, examples)


class Unpadded(mx.io.DataIter):
    """An iterator of so many examples without the padding of its last batch, which a Module would
    count. That batch has at least `least` examples, one for each device."""

    def __init__(self, batches, examples, least=1):
        super().__init__(batches.batch_size)
        self.batches, self.examples, self.least, self.left = batches, examples, least, examples
        self.provide_data, self.provide_label = batches.provide_data, batches.provide_label

    def reset(self):
        self.batches.reset()
        self.left = self.examples

    def next(self):
        if self.left <= 0:
            raise StopIteration
        batch = self.batches.next()
        count = min(self.batch_size, max(self.left, self.least))
        self.left -= count
        return mx.io.DataBatch([array[:count] for array in batch.data],
                               [array[:count] for array in batch.label], pad=0)


class XrayedIter(mx.io.DataIter):
    """Yields the batches of an iterator, and X-rays the first ones of each epoch before."""

    def __init__(self, args, epoch, module, batches):
        super().__init__(batches.batch_size)
        self.args, self.epoch, self.module, self.batches = args, epoch, module, batches
        self.provide_data, self.provide_label = batches.provide_data, batches.provide_label
        self.first = None  # batches of this epoch; None before they are read

    def reset(self):
        self.batches.reset()
        if self.first is not None:
            self.first, self.epoch = None, self.epoch + 1

    def next(self):
        if self.first is None:  # copies: an iterator may reuse its arrays for the next batch
            self.first = [mx.io.DataBatch([array.copy() for array in batch.data],
                                          [array.copy() for array in batch.label], batch.pad)
                          for batch in itertools.islice(self.batches, self.args.xray_steps)]
            recipes.xray_epoch(self.args, self.epoch, self.module, self.first)
        return self.first.pop(0) if self.first else self.batches.next()


# ---- training

def fit(args, symbol, arg_params=None, aux_params=None, fixed=None):
    """Trains and returns the module."""
    # Flags that exclude each other, workers and devices, data
    recipes.seed_all(args.seed)
    if args.gc_type != "none":
        raise SystemExit("--gc-type: MXNet cannot compress float16 gradients. Valid: none")
    if len(args.gpus) > 1 and args.batch_size % len(args.gpus):
        raise SystemExit(f"--batch-size {args.batch_size} does not divide over {len(args.gpus)} "
                         "GPUs")
    if args.top_k and not 2 <= args.top_k <= args.num_classes:
        raise SystemExit(f"--top-k must be from 2 to --num-classes {args.num_classes}, or 0 for "
                         f"none. Received: {args.top_k}")
    workers = recipes.Workers(args, "%(asctime)-15s Node[{}] %(message)s")
    args.workers = workers.count
    per_update, begin = batches_of_update(args), epoch_to_begin(args)
    train, val, examples = iterators(args, workers.rank, workers.count, begin)
    logging.info("start with arguments %s", args)
    if args.test_io:
        return test_reading(train, args)
    # An update never spans two epochs. The iterator's epochs differ by one batch, if the batch
    # size does not divide the images, and the workers' parts of a file by one image.
    updates = max(1, examples // workers.count // args.batch_size) // per_update
    if not updates:
        raise SystemExit(f"--macrobatch-size {args.macrobatch_size}: an epoch has {examples} "
                         "images, which is less")
    train = mx.io.ResizeIter(train, updates * per_update, reset_internal=False)

    # The module, which scales the loss, from a checkpoint if the flags say so
    check_network(symbol, args.image_shape, args.model_prefix if begin else None)
    options = {"context": workers.devices, "loss_scale": args.loss_scale,
               "fixed_param_names": fixed, "batches": per_update}
    if begin:
        states = os.path.exists(f"{args.model_prefix}-{begin:04d}.states")
        if not states:
            logging.warning("%s-%04d.states does not exist: the optimizer starts with new states",
                            args.model_prefix, begin)
        try:
            module = AccumulatingModule.load(args.model_prefix, begin, states, **options)
        except mx.MXNetError as error:
            raise ValueError(f"{args.model_prefix}-{begin:04d}.params is damaged: "
                             f"{recipes.first_line(error)}") from None
    else:
        module = AccumulatingModule(symbol, **options)
    optimizer = {"learning_rate": args.lr, "wd": args.wd, "begin_num_update": begin * updates,
                 "lr_scheduler": recipes.schedule(args, updates),
                 "rescale_grad": 1 / (args.batch_size * workers.count * per_update),
                 **recipes.momentum_of(args.optimizer, args.momentum)}

    # What is logged and saved after each batch and epoch
    metrics = ["accuracy", *map(mx.metric.create, LOSSES[args.loss])]
    if args.top_k:
        metrics.insert(1, mx.metric.create("top_k_accuracy", top_k=args.top_k))
    # The gradient is complete after the last batch of an update: log lines have its norm.
    record = start_log(args, workers, begin, -(-args.log_interval // per_update) * per_update)
    log = ModuleLog(record, module, args.batch_size * workers.count, bool(val))
    epoch_ends, validation_ends = [log.epoch_end], [log.validation_end]
    if workers.count > 1:
        epoch_ends += [lambda *_: module.check_ranks(), lambda *_: average_statistics(module)]
    if args.model_prefix and workers.rank == 0:
        os.makedirs(os.path.dirname(args.model_prefix) or ".", exist_ok=True)
        save = checkpoint(args, module)  # after the epoch's line in the log
        if val:
            validation_ends.append(lambda param: save(param.epoch))
        else:
            epoch_ends.append(save)
    if args.xray and workers.rank == 0:
        train = XrayedIter(args, begin, module, train)
    module.fit(
        train, val, metrics, kvstore=workers.store,
        optimizer=args.optimizer, optimizer_params=optimizer, begin_epoch=begin,
        num_epoch=args.epochs, arg_params=arg_params, aux_params=aux_params,
        allow_missing=arg_params is not None, initializer=initializer_of(args),
        batch_end_callback=[log.batch_end, Speedometer(args.batch_size, args.log_interval)],
        epoch_end_callback=epoch_ends, eval_batch_end_callback=log.validation_batch_end,
        eval_end_callback=validation_ends,
        monitor=mx.mon.Monitor(args.monitor) if args.monitor else None)
    record.close()
    return module


def checkpoint(args, module):
    """Returns the callback that saves every --save-period epochs, and the last."""
    def save(epoch, *_):
        if (epoch + 1) % args.save_period == 0 or epoch + 1 == args.epochs:
            module.save_checkpoint(args.model_prefix, epoch + 1, save_optimizer_states=True)
    return save


class AccumulatingModule(amp.Module):
    """A Module that accumulates the gradients of so many batches for an update."""

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
        return self.added == 0 and super().update()


class ModuleLog:
    """Logs `Module.fit` to a `gluon_amp.reports.Log`; its methods are the callbacks of `fit`.

    Args:
        images: the number of images of a batch over all workers.
        validates: whether epochs end with a validation.
    """

    def __init__(self, log, module, images, validates=True):
        self.log, self.module, self.images, self.validates = log, module, images, validates
        self.validation = []

    def loss(self, batch):
        """Returns the mean cross entropy of the module's softmax outputs for a batch."""
        outputs = self.module.get_outputs()[0].astype("float32")
        likely = outputs.pick(batch.label[0].as_in_context(outputs.ctx))
        return -(likely + 1e-12).log().mean()

    def batch_end(self, param):
        self.metric = param.eval_metric
        self.log.step(self.module, self.loss(param.locals["data_batch"]), self.images)

    def epoch_end(self, *_):
        self.accuracy = dict(self.metric.get_global_name_value()).get("accuracy")
        if not self.validates:
            self.log.epoch(accuracy=self.accuracy)

    def validation_batch_end(self, param):
        batch = param.locals["eval_batch"]
        self.validation.append((float(self.loss(batch).asscalar()), len(batch.label[0])))

    def validation_end(self, param):
        values = dict(param.eval_metric.get_global_name_value())
        errors = {f"err_top{k}": 1 - values[name] for k, name in (
            (1, "accuracy"), (5, "top_k_accuracy_5")) if name in values}
        losses, counts = zip(*self.validation)
        self.log.epoch(accuracy=self.accuracy, **errors,
                       validation_loss=np.average(losses, weights=counts))
        self.validation = []


# ---- checks, checkpoints and logs

def check_network(symbol, image, prefix=None):
    """Raises an error if a network does not support images of this shape, or its checkpoint is of
    another network or type."""
    def signature(symbol):
        """Names, shapes and types of a network's parameters and outputs."""
        return (symbol.list_arguments(), symbol.infer_shape(data=(1, *image)),
                symbol.infer_type(data="float32"))

    try:
        wanted = signature(symbol)
    except mx.MXNetError as error:
        shape = ",".join(map(str, image))
        raise ValueError(f"the network does not take --image-shape {shape}: "
                         f"{recipes.first_line(error)}") from None
    if prefix is None:
        return
    recipes.must_exist(f"{prefix}-symbol.json")
    try:
        saved = signature(mx.sym.load(f"{prefix}-symbol.json"))
    except mx.MXNetError:
        saved = None
    if saved != wanted:
        raise ValueError(f"{prefix}-symbol.json has another network or --dtype than the flags: "
                         "pass those of the original run")


def batches_of_update(args):
    """Returns the number of batches of each worker in a macrobatch."""
    batch = args.batch_size * args.workers
    count, rest = divmod(args.macrobatch_size or batch, batch)
    if rest:
        raise SystemExit(f"--macrobatch-size must be a multiple of --batch-size {args.batch_size} "
                         f"on each of {args.workers} workers. Received: {args.macrobatch_size}")
    return count


def epoch_to_begin(args):
    """Returns the number of completed epochs, from --load-epoch or --resume."""
    begin = args.load_epoch or 0
    if begin and args.resume:
        raise SystemExit("--load-epoch and --resume exclude each other")
    if (begin or args.resume) and not args.model_prefix:
        raise SystemExit(f"--{'load-epoch' if begin else 'resume'} needs --model-prefix")
    if args.resume:
        begin = last_whole_epoch(args.model_prefix)
        logging.info("--resume: completed epochs: %d", begin)
    if begin >= args.epochs:
        logging.info("no epochs are left to train: --num-epochs %d", args.epochs)
    return begin


def last_whole_epoch(prefix):
    """Returns the last epoch saved with this prefix; states are written after parameters."""
    saved = {kind: {int(path[-len(f"0000{kind}"):-len(kind)]) for path in
                    glob.glob(f"{glob.escape(prefix)}-[0-9][0-9][0-9][0-9]{kind}")}
             for kind in (".params", ".states")}
    whole = saved[".params"] & saved[".states"]
    if saved[".params"] and not whole:
        last = max(saved[".params"])
        raise SystemExit(f"{prefix}-{last:04d}.states does not exist, which --resume needs: "
                         f"--load-epoch {last} continues with a new optimizer")
    return max(whole, default=0)


def initializer_of(args):
    if args.initializer == "default":
        # Without norms and with pixels of up to 255, larger weights diverge.
        network = getattr(args, "network", None)
        return {"alexnet": mx.init.Normal(), "vgg": mx.init.Xavier()}.get(
            network, mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    return mx.init.create({"msra": "msraprelu"}.get(args.initializer, args.initializer))


def test_reading(train, args):
    """Reads all images of an epoch, and logs the speed."""
    begun = tic = time.time()
    for i, _ in enumerate(train, 1):
        if i % args.log_interval == 0:
            logging.info("Batch [%d]\tSpeed: %.2f samples/sec", i,
                         args.log_interval * args.batch_size / (time.time() - tic))
            tic = time.time()
    logging.info("%d batches in %.3f s", i, time.time() - begun)


def start_log(args, workers, begin, interval):
    """Returns the run's log, which keeps the lines of completed epochs."""
    path = None
    if args.save_dir and workers.rank == 0:
        os.makedirs(args.save_dir, exist_ok=True)
        path = os.path.join(args.save_dir, "log.jsonl")
        lines = Log.read(path)[1] if os.path.exists(path) else []
        ended = [line["epoch"] for line in lines if "batch" not in line]
        if ended and not (begin or args.resume):
            raise SystemExit(f"{path} exists: pass another --save-dir, or --load-epoch to continue")
        if args.resume and (ended or lines and begin):
            recipes.check_flags(path, args, (
                *recipes.MAY_DIFFER, "epochs", "load_epoch", "data_nthreads", "monitor", "loss",
                "top_k", "use_rec"))
            if begin and begin - 1 not in ended:
                raise SystemExit(f"{path} has no end of epoch {begin - 1}, and "
                                 f"{args.model_prefix}-{begin:04d}.params is of that epoch: the "
                                 "files are of different runs")
    return Log(path, args, interval=interval, tensorboard=args.tensorboard, begin=begin,
               rank=workers.rank)


def main(arguments=None):
    from symbols import NETWORKS, get_symbol  # symbolic_fine_tune.py does not have these

    parser = recipes.Parser(__doc__)
    recipes.add_flags(parser, "network", (
        ("--network", tuple(NETWORKS), "resnet", f"{', '.join(NETWORKS)}; resnet: resnet-v1",
         {"metavar": "NAME"}),
        ("--num-layers", int, None, "depth of a resnet or resnext (default: 50), or a vgg (16)"),
        ("--multiplier", float, None, "width of a mobilenet or mobilenetv2 (default: 1)"),
        ("--batch-norm", bool, None, "use the vgg variant with batch norms"),
        ("--num-group", int, None, "groups of a resnext's 3x3 convolutions (default: 32)")))
    add_arguments(parser)
    args = parse_flags(parser, arguments)
    try:
        symbol = get_symbol(args.network, args.num_classes,
                            ",".join(map(str, args.image_shape)), args.dtype,
                            num_layers=args.num_layers, multiplier=args.multiplier,
                            batch_norm=args.batch_norm, num_group=args.num_group)
    except ValueError as error:
        raise SystemExit(f"{parser.prog}: {error}") from None
    fit(args, symbol)


if __name__ == "__main__":
    recipes.run(main)
