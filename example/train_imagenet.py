"""Trains on ImageNet, or any images in RecordIO files, with the Symbolic API.

    python train_imagenet.py --gpus 0,1,2,3 --dtype float16 --batch-size 1024 --lr 0.4 \\
        --data-train train.rec --data-val val.rec
    python train_imagenet.py --benchmark 1 --dtype float16 --num-layers 18 --batch-size 8

The flags and the log format are those of MXNet's example/image-classification.
"""
import argparse
import glob
import itertools
import logging
import math
import os
import platform
import time

import gluon_amp as amp
import images
import mxnet as mx
import numpy as np
import recipes
from gluon_amp.parallel import average_statistics
from gluon_amp.reports import Log
from gluon_amp.symbolic.module import Speedometer


def add_arguments(parser):
    """Adds the flags of training and data; second names are from image_classification.py."""
    positive, numbers = recipes.positive, recipes.numbers
    training = parser.add_argument_group("training")
    recipes.add_device_flags(training)
    add = training.add_argument
    add("--gc-type", default="none", choices=("none", "2bit"),
        help="gradient compression; only none: MXNet cannot compress float16")
    add("--gc-threshold", type=float, default=0.5, help="threshold of --gc-type 2bit")
    add("--batch-size", type=positive, default=128, help="batch size over all GPUs")
    add("--macrobatch-size", type=positive, help="images of an update over all ranks, for gradient "
        "accumulation; a multiple of --batch-size (default: one batch)")
    add("--num-epochs", "--epochs", type=positive, default=80, help="number of epochs")
    add("--lr", type=recipes.decimal, default=0.1, help="learning rate")
    add("--lr-factor", "--lr-decay", type=recipes.decimal, default=0.1,
        help="decay factor of the learning rate")
    add("--lr-step-epochs", "--lr-decay-epoch", type=numbers, default=[30, 60],
        help="epochs after which the rate decays, such as 30,60")
    add("--warmup-epochs", type=recipes.decimal, default=0, help="number of warm-up epochs")
    add("--warmup-lr", type=recipes.decimal, default=0.0,
        help="learning rate at the start of warm-up")
    add("--warmup-strategy", default="linear", choices=("linear", "constant"),
        help="linear: the rate rises to --lr; constant: it stays at --warmup-lr")
    add("--optimizer", default="sgd", help="an optimizer of MXNet, or adamw")
    add("--mom", "--momentum", type=recipes.share, default=0.9,
        help="momentum, for optimizers that have one")
    add("--wd", type=recipes.decimal, default=1e-4, help="weight decay")
    add("--initializer", default="default", choices=("default", "xavier", "msra", "orthogonal",
                                                     "normal", "uniform", "one", "zero"),
        help="initializer of weights (default: normal for alexnet, xavier for vgg, else Gaussian "
        "xavier by fan-in of magnitude 2)")
    add("--dtype", default="float32", choices=("float32", "float16"), help="type of the network")
    add("--loss-scale", type=recipes.loss_scale, default="auto",
        help="loss scale: auto, dynamic, a number or none")
    add("--load-epoch", type=positive, help="resume from this epoch of --model-prefix")
    add("--resume", action="store_true", help="resume from the last checkpoint of "
        "--model-prefix, if any; a larger --num-epochs extends a finished run")
    add("--test-io", type=int, default=0, choices=(0, 1), help="1: only read the images, "
        "and log the speed")
    recipes.add_kvstore_flag(training)
    output = parser.add_argument_group("output and resuming")
    add = output.add_argument
    add("--model-prefix", help="save checkpoints under this prefix")
    add("--save-period", type=positive, default=1, help="number of epochs between two checkpoints")
    add("--save-dir", help="write log.jsonl to this folder (see docs/recipes.md)")
    add("--disp-batches", "--log-interval", type=positive, default=20,
        help="number of batches between two log lines")
    add("--loss", default="", choices=LOSSES, metavar="NAMES",
        help="log these losses: ce, nll, or both as ce,nll")
    add("--top-k", type=recipes.whole, default=0, help="log the top-k accuracy, too")
    add("--monitor", type=recipes.whole, default=0,
        help="number of batches between two logs of the outputs' sizes")
    recipes.add_log_flags(output)
    recipes.add_xray_flags(output)
    add = parser.add_argument_group("data").add_argument
    add("--data-train", "--rec-train", help="RecordIO file of training images")
    add("--data-train-idx", "--rec-train-idx", default="",
        help="its index, for shuffling over the whole file")
    add("--data-val", "--rec-val", help="RecordIO file of validation images")
    add("--data-val-idx", "--rec-val-idx", default="", help="its index")
    add("--use-rec", action="store_true", help="no effect: images always come from RecordIO files")
    add("--image-shape", default="3,224,224", help="channels,height,width")
    add("--input-size", dest="image_shape", metavar="N", default=argparse.SUPPRESS,
        type=lambda text: "3,{0},{0}".format(positive(text)), help="--image-shape 3,N,N")
    add("--num-classes", "--classes", type=positive, default=1000, help="number of classes")
    add("--num-examples", type=positive, help="training images in an epoch "
        "(default, and at most: those of the file)")
    add("--rgb-mean", type=recipes.three_numbers, default="123.68,116.779,103.939",
        help="mean of pixels from 0 to 255")
    add("--rgb-std", type=recipes.three_deviations, default="1,1,1",
        help="standard deviation of pixels from 0 to 255")
    add("--data-nthreads", "--num-data-workers", "-j", type=positive, default=4,
        help="number of threads that decode images")
    add("--benchmark", type=int, default=0, choices=(0, 1),
        help="1: train on random images, without files")
    add_augmentation(parser)


# The values of --loss, and MXNet's names of the metrics.
LOSSES = {"": [], "ce": ["ce"], "nll": ["nll_loss"], "ce,nll": ["ce", "nll_loss"]}


def add_augmentation(parser):
    augment = parser.add_argument_group("augmentation (as in MXNet's image-classification example)")
    augment.add_argument("--use-imagenet-data-augmentation", type=int, default=0, choices=(0, 1),
                         help="1: the usual augmentation of ResNets on ImageNet, with "
                         "--rgb-std 58.393,57.12,57.375; other flags override it")
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
        augment.add_argument(f"--{flag}", type=kind, default=default,
                             help="argument of mx.io.ImageRecordIter")


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

def image_shape(args):
    try:
        channels, height, width = map(int, args.image_shape.split(","))
        if min(channels, height, width) < 1:
            raise ValueError
    except ValueError:
        raise SystemExit("--image-shape takes channels,height,width, such as 3,224,224. "
                         f"Received: {args.image_shape}") from None
    return channels, height, width


def iterators(args, part=0, parts=1, begin=0):
    """Returns training and validation data, and the number of training images.

    Args:
        begin: the number of completed epochs, whose random numbers are not repeated.
    """
    shape = image_shape(args)
    if args.benchmark:
        examples = args.num_examples or 100 * args.batch_size
        return RandomIter((args.batch_size, *shape), args.num_classes, examples), None, examples
    if not args.data_train:
        raise SystemExit("--data-train FILE.rec is needed, or --benchmark 1 for random images")
    examples = images.check_records(args.data_train, args.num_classes)
    if examples < args.batch_size * parts:
        each = f" for each of {parts} ranks" if parts > 1 else ""
        raise SystemExit(f"{args.data_train} has {examples} images, fewer than one batch of "
                         f"{args.batch_size}{each}")
    val_examples = args.data_val and images.check_records(args.data_val, args.num_classes)
    mean, std = ([float(x) for x in text.split(",")] for text in (args.rgb_mean, args.rgb_std))
    common = {
        "data_shape": shape, "batch_size": args.batch_size, "label_width": 1,
        "mean_r": mean[0], "mean_g": mean[1], "mean_b": mean[2],
        "std_r": std[0], "std_g": std[1], "std_b": std[2],
        "preprocess_threads": args.data_nthreads}
    train = mx.io.ImageRecordIter(
        path_imgrec=args.data_train, path_imgidx=args.data_train_idx, shuffle=True,
        seed=(args.seed + begin) % 2**31, seed_aug=(args.seed + begin) % 2**31,
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
        saturation=args.saturation, pca_noise=args.pca_noise,
        num_parts=parts, part_index=part, **common)
    val = args.data_val and Unpadded(mx.io.ImageRecordIter(
        path_imgrec=args.data_val, path_imgidx=args.data_val_idx, round_batch=False, **common),
        val_examples, max(1, len(args.gpus)))
    return train, val, min(args.num_examples or examples, examples)


class RandomIter(mx.io.DataIter):
    """Repeats one batch of random numbers."""

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


class Unpadded(mx.io.DataIter):
    """A DataIter without the padding of its last batch, which a Module would count.

    Args:
        batches: restarts after a reset, as with `round_batch=False`.
        examples: the number of its examples.
        least: the smallest last batch: every device needs an example.
    """

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
    """Yields the batches of an iterator, and X-rays the first ones of each epoch before.

    Args:
        batches: the wrapped iterator.
        epoch: the number of the first epoch.
    """

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
        if self.first is None:
            self.first = [self.copied(batch) for batch in
                          itertools.islice(self.batches, self.args.xray_steps)]
            recipes.xray_epoch(self.args, self.epoch, self.module, self.first)
        return self.first.pop(0) if self.first else self.batches.next()

    @staticmethod
    def copied(batch):
        """Copies a batch: an iterator may reuse its arrays for the next."""
        return mx.io.DataBatch([array.copy() for array in batch.data],
                               [array.copy() for array in batch.label], batch.pad, batch.index,
                               batch.bucket_key, batch.provide_data, batch.provide_label)


# ---- training

def fit(args, symbol, arg_params=None, aux_params=None, fixed=None):
    """Trains and returns the module."""
    recipes.seed_all(args.seed)
    if args.batch_size % max(1, len(args.gpus)):
        raise SystemExit(f"--batch-size {args.batch_size} does not divide over {len(args.gpus)} "
                         "GPUs")
    if args.gc_type != "none":
        raise SystemExit("--gc-type: MXNet cannot compress float16 gradients, and for float32 it "
                         "does so only where the kvstore updates, which loss scaling excludes. "
                         f"Valid: none. Received: {args.gc_type}")
    if args.top_k and not 2 <= args.top_k <= args.num_classes:
        raise SystemExit(f"--top-k must be from 2 to --num-classes {args.num_classes}, or 0 for "
                         f"none. Received: {args.top_k}")
    if args.model_prefix:
        os.makedirs(os.path.dirname(args.model_prefix) or ".", exist_ok=True)
    ranks = recipes.Ranks(args.kvstore)
    if ranks.workers > 1:
        args.workers = ranks.workers
    contexts = ranks.devices(args.gpus)
    ranks.start_log(f"%(asctime)-15s Node[{ranks.rank}] %(message)s")
    per_update, begin = batches_of_update(args, ranks.workers), epoch_to_begin(args)
    train, val, examples = iterators(args, ranks.rank, ranks.workers, begin)
    logging.info("start with arguments %s", args)
    logging.info("gluon_amp %s, MXNet %s, Python %s", amp.__version__, mx.__version__,
                 platform.python_version())
    if args.test_io:
        return test_reading(train, args)
    batches = max(1, examples // ranks.workers // args.batch_size)
    if per_update > 1:  # an update never spans two epochs
        if batches < per_update:
            raise SystemExit(f"--macrobatch-size {args.macrobatch_size}: an epoch has {examples} "
                             "images, which is less")
        batches = batches // per_update * per_update
    # The iterator's epochs differ by one batch, if the batch size does not divide the images, and
    # the ranks' parts of a file by one image.
    train = mx.io.ResizeIter(train, batches, reset_internal=False)
    epoch_size = batches // per_update
    check_network(symbol, image_shape(args), args.model_prefix if begin else None)
    options = {"context": contexts, "loss_scale": args.loss_scale,
               "fixed_param_names": fixed, "batches": per_update}
    if begin:
        states = has_states(args.model_prefix, begin)
        if not states:
            logging.warning("%s-%04d.states does not exist: the optimizer starts with new states",
                            args.model_prefix, begin)
        try:
            module = AddingModule.load(args.model_prefix, begin, states, **options)
        except mx.MXNetError as error:
            raise ValueError(f"{args.model_prefix}-{begin:04d}.params is damaged: "
                             f"{recipes.first_line(error)}") from None
    else:
        module = AddingModule(symbol, **options)
    optimizer = {"learning_rate": args.lr, "wd": args.wd, "begin_num_update": begin * epoch_size,
                 "lr_scheduler": recipes.schedule(
                     args.lr, epoch_size, args.num_epochs, "step", args.lr_step_epochs,
                     args.lr_factor, args.warmup_epochs, args.warmup_lr, args.warmup_strategy),
                 "rescale_grad": 1 / (args.batch_size * ranks.workers * per_update),
                 **recipes.momentum_of(args.optimizer, args.mom)}
    metrics = ["accuracy"]
    if args.top_k:
        metrics.append(mx.metric.create("top_k_accuracy", top_k=args.top_k))
    metrics += [mx.metric.create(name) for name in LOSSES[args.loss]]
    # The gradient is complete after the last batch of an update: log lines have its norm.
    interval = -(-args.disp_batches // per_update) * per_update
    record = start_record(args, ranks, begin, interval)
    log = ModuleLog(record, module, args.batch_size * ranks.workers, bool(val))
    epoch_ends, validation_ends = [log.epoch_end], [log.validation_end]
    if ranks.workers > 1:
        epoch_ends += [lambda *_: module.check_ranks(), lambda *_: average_statistics(module)]
    if args.model_prefix and ranks.rank == 0:
        save = checkpoint(args, module)  # after the epoch's line in the log
        if val:
            validation_ends.append(lambda param: save(param.epoch))
        else:
            epoch_ends.append(save)
    if args.xray and ranks.rank == 0:
        train = XrayedIter(args, begin, module, train)
    module.fit(
        train, val, metrics, kvstore=ranks.store,
        optimizer=args.optimizer, optimizer_params=optimizer, begin_epoch=begin,
        num_epoch=args.num_epochs, arg_params=arg_params, aux_params=aux_params,
        allow_missing=arg_params is not None,
        initializer=initializer_of(args),
        batch_end_callback=[log.batch_end, Speedometer(args.batch_size, args.disp_batches)],
        epoch_end_callback=epoch_ends, eval_batch_end_callback=log.validation_batch_end,
        eval_end_callback=validation_ends,
        monitor=mx.mon.Monitor(args.monitor) if args.monitor else None)
    record.close()
    return module


def checkpoint(args, module):
    """Returns the callback that saves every --save-period epochs, and the last."""
    def save(epoch, *_):
        if (epoch + 1) % args.save_period == 0 or epoch + 1 == args.num_epochs:
            module.save_checkpoint(args.model_prefix, epoch + 1, save_optimizer_states=True)
    return save


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

    @property
    def gradients(self):
        """The gradients on the first device."""
        return [grads[0] for grads in self._exec_group.grad_arrays if grads[0] is not None]

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


class ModuleLog:
    """Logs `Module.fit` to a `gluon_amp.reports.Log`; its methods are the callbacks of `fit`.

    Args:
        module: an `AddingModule`.
        images: the number of images of a batch over all ranks.
        validates: whether epochs end with a validation.
    """

    def __init__(self, log, module, images, validates=True):
        self.log, self.module, self.images, self.validates = log, module, images, validates
        self.start()

    def start(self):
        """Starts an epoch."""
        self.began, self.losses, self.validation = time.time(), [], []

    def batch_end(self, param):
        """The `batch_end_callback` of `fit`."""
        module, optimizer = self.module, self.module._optimizer
        scale, self.metric = module.gradient_scale, param.eval_metric
        unscale = optimizer.rescale_grad / scale
        self.losses.append(self.loss(param.locals["data_batch"]))
        self.log.step(module, self.losses[-1], self.images, loss_scale=scale,
                      gradient_norm=lambda: unscale * gradient_norm(module.gradients))

    def epoch_end(self, *_):
        """The `epoch_end_callback` of `fit`, before validation."""
        self.seconds = time.time() - self.began
        self.accuracy = dict(self.metric.get_global_name_value()).get("accuracy")
        if not self.validates:
            self.end()

    def validation_batch_end(self, param):
        """The `eval_batch_end_callback` of `fit`."""
        batch = param.locals["eval_batch"]
        self.validation.append((self.loss(batch), len(batch.label[0])))

    def validation_end(self, param):
        """The `eval_end_callback` of `fit`."""
        found = dict(param.eval_metric.get_global_name_value())
        errors = {"err_top1": 1 - found["accuracy"]}
        if "top_k_accuracy_5" in found:
            errors["err_top5"] = 1 - found["top_k_accuracy_5"]
        losses, counts = zip(*self.validation)
        self.end(validation_loss=np.average(losses, weights=counts), **errors)

    def end(self, **values):
        """Ends an epoch of the log."""
        self.log.epoch(accuracy=self.accuracy, seconds=self.seconds, **values,
                       samples_per_second=len(self.losses) * self.images / self.seconds)
        self.start()

    def loss(self, batch):
        """Returns the mean cross entropy of the module's softmax outputs for a batch."""
        outputs = self.module.get_outputs()[0].astype("float32")
        likely = outputs.pick(batch.label[0].as_in_context(outputs.ctx))
        return float(-(likely + 1e-12).log().mean().asscalar())


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


def batches_of_update(args, workers):
    """Returns the number of batches of each rank in a macrobatch."""
    count, rest = divmod(args.macrobatch_size or args.batch_size * workers,
                         args.batch_size * workers)
    if rest:
        each = f" on {workers} ranks" if workers > 1 else ""
        raise SystemExit(f"--macrobatch-size must be a multiple of --batch-size {args.batch_size}"
                         f"{each}. Received: {args.macrobatch_size}")
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
    if begin >= args.num_epochs:
        logging.info("no epochs are left to train: --num-epochs %d", args.num_epochs)
    return begin


def last_whole_epoch(prefix):
    """Returns the last epoch saved with this prefix; states are written after parameters."""
    saved = [int(path[-len("0000.params"):-len(".params")])
             for path in glob.glob(glob.escape(prefix) + "-[0-9][0-9][0-9][0-9].params")]
    whole = [epoch for epoch in saved if has_states(prefix, epoch)]
    if saved and not whole:
        raise SystemExit(f"{prefix}-{max(saved):04d}.states does not exist, which --resume needs: "
                         f"--load-epoch {max(saved)} continues with a new optimizer")
    return max(whole, default=0)


def has_states(prefix, epoch):
    return os.path.exists(f"{prefix}-{epoch:04d}.states")


def initializer_of(args):
    if args.initializer == "default":
        # Without norms and with pixels of up to 255, larger weights diverge.
        network = getattr(args, "network", None)
        return {"alexnet": mx.init.Normal(), "vgg": mx.init.Xavier()}.get(
            network, mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    return mx.init.create({"msra": "msraprelu"}.get(args.initializer, args.initializer))


def test_reading(train, args):
    """Reads all images of an epoch, and logs the speed."""
    begun, tic = time.time(), time.time()
    for i, _ in enumerate(train, 1):
        if i % args.disp_batches == 0:
            logging.info("Batch [%d]\tSpeed: %.2f samples/sec", i,
                         args.disp_batches * args.batch_size / (time.time() - tic))
            tic = time.time()
    logging.info("%d batches in %.3f s", i, time.time() - begun)


# Flags that may change when a run is resumed.
MAY_DIFFER = (*recipes.MAY_DIFFER, "num_epochs", "load_epoch", "disp_batches", "data_nthreads",
              "monitor", "loss", "top_k", "use_rec")


def start_record(args, ranks, begin, interval):
    """Returns the run's log; --load-epoch keeps the lines of earlier epochs in log.jsonl."""
    path = None
    if args.save_dir and not ranks.rank:
        recipes.hold(args.save_dir)
        path = os.path.join(args.save_dir, "log.jsonl")
        was, lines = Log.read(path) if os.path.exists(path) else ({}, [])
        ended = [line["epoch"] for line in lines if "batch" not in line]
        if args.resume and was and (begin or ended):
            recipes.check_flags(path, was, args, MAY_DIFFER)
            if begin and begin - 1 not in ended:
                raise SystemExit(f"{path} has no end of epoch {begin - 1}, and "
                                 f"{args.model_prefix}-{begin:04d}.params is of that epoch: the "
                                 "files are of different runs")
        elif ended and not begin:
            raise SystemExit(f"{path} exists: pass another --save-dir, or --load-epoch to continue")
    return recipes.start_log(args, path, interval, begin, ranks.rank)


def gradient_norm(gradients):
    """Returns the norm of all gradients together."""
    return math.sqrt(sum(float(g.astype("float32").norm().asscalar()) ** 2 for g in gradients))


def main(arguments=None):
    from symbols import NETWORKS, get_symbol  # symbolic_fine_tune.py does not have these

    parser = recipes.Parser(__doc__)
    add = parser.add_argument_group("network").add_argument
    add("--network", default="resnet", choices=NETWORKS, metavar="NAME",
        help=f"{', '.join(NETWORKS)}; resnet: resnet-v1")
    add("--num-layers", type=int, help="depth of a resnet or resnext (default: 50), or a vgg (16)")
    add("--multiplier", type=float,
        help="width multiplier of a mobilenet or mobilenetv2 (default: 1)")
    add("--batch-norm", action="store_true", default=None,
        help="use the vgg variant with batch norms")
    add("--num-group", type=int, help="groups of a resnext's 3x3 convolutions (default: 32)")
    add_arguments(parser)
    args = parse_flags(parser, arguments)
    image_shape(args)
    try:
        symbol = get_symbol(args.network, args.num_classes, args.image_shape, args.dtype,
                            num_layers=args.num_layers, multiplier=args.multiplier,
                            batch_norm=args.batch_norm, num_group=args.num_group)
    except ValueError as error:
        raise SystemExit(f"{parser.prog}: {error}") from None
    fit(args, symbol)


if __name__ == "__main__":
    recipes.run(main)
