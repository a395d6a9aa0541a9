"""Trains on ImageNet, or any images in RecordIO files, with the Symbolic API.

    python train_imagenet.py --gpus 0,1,2,3 --dtype float16 --batch-size 1024 --lr 0.4 \\
        --data-train train.rec --data-val val.rec
    python train_imagenet.py --benchmark 1 --dtype float16 --num-layers 18 --batch-size 8 \\
        --num-epochs 1 --num-examples 160

The flags and the log format are those of MXNet's example/image-classification. `main` selects the
network, a symbol that ends with SoftmaxOutput; for one of your own call `fit` with it.
"""
import argparse
import itertools
import logging
import math
import os
import time

import command_line as cli
import gluon_amp as amp  # before mxnet
import images
import mxnet as mx
import numpy as np
import recipes
from gluon_amp.parallel import average_statistics
from gluon_amp.reports import Log
from gluon_amp.symbolic.module import Speedometer

# The values of --loss and --initializer, and MXNet's names of them.
LOSSES = {"": [], "ce": ["ce"], "nll": ["nll_loss"], "ce,nll": ["ce", "nll_loss"]}
INITIALIZERS = {"xavier": "xavier", "msra": "msraprelu", "orthogonal": "orthogonal",
                "normal": "normal", "uniform": "uniform", "one": "one", "zero": "zero"}
# Flags of augmentation: MXNet's default, and the argument of mx.io.ImageRecordIter.
AUGMENTATION = {
    "pad-size": (0, "pad"), "fill-value": (127, "fill_value"), "random-crop": (0, "rand_crop"),
    "random-mirror": (0, "rand_mirror"), "random-resized-crop": (0, "random_resized_crop"),
    "max-random-h": (0, "random_h"), "max-random-s": (0, "random_s"),
    "max-random-l": (0, "random_l"), "max-random-aspect-ratio": (0.0, "max_aspect_ratio"),
    "max-random-rotate-angle": (0, "max_rotate_angle"),
    "max-random-shear-ratio": (0.0, "max_shear_ratio"),
    "max-random-scale": (1.0, "max_random_scale"), "min-random-scale": (1.0, "min_random_scale"),
    "max-random-area": (1.0, "max_random_area"), "min-random-area": (1.0, "min_random_area"),
    "min-crop-size": (-1, "min_crop_size"), "max-crop-size": (-1, "max_crop_size"),
    "brightness": (0.0, "brightness"), "contrast": (0.0, "contrast"),
    "saturation": (0.0, "saturation"), "pca-noise": (0.0, "pca_noise")}
# The defaults with --use-imagenet-data-augmentation.
IMAGENET = {"random_resized_crop": 1, "random_mirror": 1, "min_random_area": 0.08,
            "min_random_aspect_ratio": 3 / 4, "max_random_aspect_ratio": 4 / 3,
            "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "pca_noise": 0.1,
            "rgb_std": "58.393,57.12,57.375"}


# ---- flags; second names are from image_classification.py

def add_flags(parser):
    """Adds the flags of training and data."""
    cli.add_training_flags(parser)
    parser.set_defaults(batch_size=128, epochs=80, lr_mode="step", lr_decay_epoch=[30, 60])
    flag = parser.add_argument_group("precision and initialization").add_argument
    flag("--dtype", choices=("float32", "float16"), default="float32", help="type of the network")
    flag("--macrobatch-size", type=cli.positive_int, help="images of an update over all workers: "
         "gradients of several batches accumulate (default: one batch)")
    flag("--gc-type", type=cli.flag_type(str, lambda kind: kind == "none", "must be none: MXNet "
         "cannot compress float16 gradients"), default="none", help="compression of gradients")
    flag("--gc-threshold", type=float, default=0.5, help="no effect: gradients are not compressed")
    flag("--initializer", default="default", choices=("default", *INITIALIZERS), help="of weights "
         "(default: normal for alexnet, xavier for vgg, else Gaussian xavier by fan-in)")
    flag = parser.add_argument_group("output and resuming").add_argument
    flag("--model-prefix", help="save checkpoints under this prefix")
    flag("--save-period", type=cli.positive_int, default=1, help="epochs between two checkpoints")
    flag("--load-epoch", type=cli.positive_int, help="resume from this epoch of --model-prefix")
    flag("--resume", action="store_true", help="resume from the last one, if there is any")
    flag("--save-dir", help="write log.jsonl to this folder (see docs/recipes.md)")
    flag("--loss", choices=tuple(LOSSES), default="", metavar="NAMES",
         help="log these losses: ce, nll, or both as ce,nll")
    flag("--top-k", type=cli.non_negative_int, default=0, help="log the top-k accuracy, too")
    flag("--monitor", type=cli.non_negative_int, default=0,
         help="batches between two logs of the outputs' sizes")
    flag("--test-io", type=int, choices=(0, 1), default=0, help="1: only read the images")
    flag("--benchmark", type=int, choices=(0, 1), default=0, help="1: train on random images")
    flag = parser.add_argument_group("data").add_argument
    flag("--data-train", "--rec-train", help="RecordIO file of training images")
    flag("--data-train-idx", "--rec-train-idx", default="", help="index, to shuffle a whole file")
    flag("--data-val", "--rec-val", help="RecordIO file of validation images")
    flag("--data-val-idx", "--rec-val-idx", default="", help="its index")
    flag("--use-rec", action="store_true", help="no effect: images are always in RecordIO files")
    flag("--image-shape", default=[3, 224, 224], help="channels,height,width", type=cli.flag_type(
        cli.list_of(int), lambda shape: len(shape) == 3 and min(shape) > 0,
        "takes channels,height,width, such as 3,224,224"))
    flag("--input-size", type=lambda text: [3, *[cli.positive_int(text)] * 2], dest="image_shape",
         metavar="N", default=argparse.SUPPRESS, help="--image-shape 3,N,N")
    flag("--num-classes", "--classes", type=cli.positive_int, default=1000, help="of the labels")
    flag("--num-examples", type=cli.positive_int, help="images of an epoch (default: the file's)")
    flag("--rgb-mean", type=cli.channel_means, default="123.68,116.779,103.939",
         help="mean of pixels from 0 to 255")
    flag("--rgb-std", type=cli.channel_deviations, default="1,1,1", help="standard deviation")
    flag("--data-nthreads", "--num-data-workers", "-j", type=cli.positive_int, default=4,
         help="threads that decode images")
    flag = parser.add_argument_group("augmentation").add_argument
    flag("--use-imagenet-data-augmentation", type=int, choices=(0, 1), default=0,
         help="1: the usual augmentation of ResNets on ImageNet; other flags override it")
    for name, (default, argument) in AUGMENTATION.items():
        flag(f"--{name}", type=type(default), default=default, help=f"{argument} of the iterator")
    flag("--min-random-aspect-ratio", type=float, help="min_aspect_ratio of the iterator")


def parse_flags(parser, arguments):
    """Parses the flags; --use-imagenet-data-augmentation sets the defaults of others."""
    args = parser.parse_args(arguments)
    if args.use_imagenet_data_augmentation:
        parser.set_defaults(**IMAGENET)
        args = parser.parse_args(arguments)
    return args


# ---- data

def iterators(args, part=0, parts=1, completed_epochs=0):
    """Returns training and validation data, and the numbers of their images. The training data is
    part `part` of `parts`, with random numbers other than those of the completed epochs."""
    if args.benchmark:
        count = args.num_examples or 100 * args.batch_size
        batch = mx.io.NDArrayIter(
            mx.nd.random.uniform(-1, 1, (args.batch_size, *args.image_shape)),
            np.random.randint(0, args.num_classes, args.batch_size), args.batch_size)
        return mx.io.ResizeIter(batch, max(1, count // args.batch_size)), None, count, 0
    if not args.data_train:
        raise ValueError("--data-train FILE.rec is needed, or --benchmark 1 for random images")
    count = images.check_records(args.data_train, args.num_classes)
    if count < args.batch_size * parts:
        raise ValueError(f"{args.data_train} has {count} images, fewer than one batch of "
                         f"{args.batch_size} for each of {parts} workers")
    val, val_count = None, 0
    if args.data_val:
        val_count = images.check_records(args.data_val, args.num_classes)
        val = mx.io.ImageRecordIter(path_imgrec=args.data_val, path_imgidx=args.data_val_idx,
                                    round_batch=False, **preprocessing(args))
    augmentation = {argument: getattr(args, name.replace("-", "_"))
                    for name, (_, argument) in AUGMENTATION.items()}
    seed = (args.seed + completed_epochs) % 2**31
    train = mx.io.ImageRecordIter(
        path_imgrec=args.data_train, path_imgidx=args.data_train_idx, shuffle=True,
        seed=seed, seed_aug=seed, num_parts=parts, part_index=part,
        min_aspect_ratio=args.min_random_aspect_ratio, **augmentation, **preprocessing(args))
    return train, val, min(args.num_examples or count, count), val_count


def preprocessing(args):
    """Returns the arguments of an iterator that training and validation share."""
    options = {"data_shape": tuple(args.image_shape), "batch_size": args.batch_size,
               "preprocess_threads": args.data_nthreads}
    for name, values in (("mean", args.rgb_mean), ("std", args.rgb_std)):
        red, green, blue = values * 3 if len(values) == 1 else values
        options.update({f"{name}_r": red, f"{name}_g": green, f"{name}_b": blue})
    return options


def without_padding(batches, count, least=1):
    """Yields the batches of `count` images, without the padding of the last one, which MXNet does
    not report. That batch has at least `least` images, one for each device."""
    batches.reset()
    while count > 0:
        batch = batches.next()
        size = min(batches.batch_size, max(count, least))
        count -= size
        yield mx.io.DataBatch([array[:size] for array in batch.data],
                              [array[:size] for array in batch.label], pad=0)


def time_reading(args, train):
    """Reads all images of an epoch, and logs the speed."""
    start = last_log = time.time()
    for i, _ in enumerate(train, 1):
        if i % args.log_interval == 0:
            logging.info("Batch [%d]\tSpeed: %.2f samples/sec", i,
                         args.log_interval * args.batch_size / (time.time() - last_log))
            last_log = time.time()
    logging.info("%d batches in %.3f s", i, time.time() - start)


# ---- network

def make_module(args, symbol, workers, completed_epochs, frozen):
    """Returns the Module of a symbol, or of a checkpoint with its optimizer's states, if any."""
    check_network(symbol, args.image_shape, args.model_prefix if completed_epochs else None)
    options = {"context": workers.devices, "loss_scale": args.loss_scale,
               "fixed_param_names": frozen}
    if not completed_epochs:
        return amp.Module(symbol, **options)
    path = f"{args.model_prefix}-{completed_epochs:04d}"
    has_states = os.path.exists(f"{path}.states")
    if not has_states:
        logging.warning("%s.states does not exist: the optimizer starts with new states", path)
    try:
        return amp.Module.load(args.model_prefix, completed_epochs, has_states, **options)
    except mx.MXNetError as error:
        raise ValueError(f"{path}.params is damaged: {cli.first_line(error)}") from None


def check_network(symbol, image_shape, prefix=None):
    """Refuses a shape of images that does not fit the network, and another network's checkpoint."""
    try:
        expected = signature(symbol, image_shape)
    except mx.MXNetError as error:
        raise ValueError("the network does not take --image-shape "
                         f"{','.join(map(str, image_shape))}: {cli.first_line(error)}") from None
    if prefix and signature(mx.sym.load(f"{prefix}-symbol.json"), image_shape) != expected:
        raise ValueError(f"{prefix}-symbol.json has another network or --dtype than the flags: "
                         "pass those of the original run")


def signature(symbol, image_shape):
    """Returns the names, shapes and types of a network's parameters and outputs."""
    return (symbol.list_arguments(), symbol.infer_shape(data=(1, *image_shape)),
            symbol.infer_type(data="float32"))


def initializer_of(args):
    """Returns the initializer of the weights."""
    if args.initializer != "default":
        return mx.init.create(INITIALIZERS[args.initializer])
    # Without norms and with pixels of up to 255, larger weights diverge
    network = getattr(args, "network", None)  # symbolic_fine_tune.py has none
    return {"alexnet": mx.init.Normal(), "vgg": mx.init.Xavier()}.get(
        network, mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))


# ---- training

def fit(args, symbol, arg_params=None, aux_params=None, frozen=None):
    """Trains a symbol that ends with SoftmaxOutput, in the type of its casts. Returns the Module.

    Args:
        arg_params, aux_params: pretrained parameters and moving averages; others are initialized.
        frozen: the names of parameters that are not trained.
    """
    recipes.seed_all(args.seed)
    check_flags(args)
    workers = recipes.Workers(args)
    recipes.log_to_stderr(workers.rank, f"%(asctime)-15s Node[{workers.rank}] %(message)s")
    args.workers = workers.count  # the log has it: a resumed run needs as many
    update_every = batches_per_update(args, workers)
    images_per_update = update_every * args.batch_size * workers.count
    completed_epochs = first_epoch(args)

    # Data. An update never spans two epochs. The iterator's epochs differ by one batch, if the
    # batch size does not divide the images, and the workers' parts of a file by one image
    train, val, count, val_count = iterators(args, workers.rank, workers.count, completed_epochs)
    logging.info("start with arguments %s", args)
    if args.test_io:
        return time_reading(args, train)
    updates = max(1, count // workers.count // args.batch_size) // update_every
    if not updates:
        raise ValueError(f"--macrobatch-size {args.macrobatch_size}: an epoch has {count} images, "
                         "which is less")
    train = mx.io.ResizeIter(train, updates * update_every, reset_internal=False)

    # Network and optimizer. amp.Module updates float32 copies of float16 weights: updates are
    # often too small for float16
    module = make_module(args, symbol, workers, completed_epochs, frozen)
    module.bind(train.provide_data, train.provide_label,
                grad_req="add" if update_every > 1 else "write")
    if not completed_epochs:
        module.init_params(initializer_of(args), arg_params, aux_params,
                           allow_missing=arg_params is not None)
    module.init_optimizer(workers.store, args.optimizer, {
        **recipes.optimizer_options(args), "lr_scheduler": recipes.lr_schedule(args, updates),
        "begin_num_update": completed_epochs * updates, "rescale_grad": 1 / images_per_update})

    # What is measured and logged
    top_k = [mx.metric.create("top_k_accuracy", top_k=args.top_k)] if args.top_k else []
    metric = mx.metric.CompositeEvalMetric(["accuracy", *top_k, *LOSSES[args.loss]])
    record = start_log(args, workers, completed_epochs, math.ceil(args.log_interval / update_every))
    monitor = mx.mon.Monitor(args.monitor) if args.monitor else None
    if monitor:
        module.install_monitor(monitor)

    for epoch in range(completed_epochs, args.epochs):
        batches = xray(args, epoch, module, train) if args.xray and workers.rank == 0 else train
        accuracy = train_epoch(args, epoch, module, batches, update_every, metric, record, monitor)
        train.reset()
        average_statistics(module)  # of batch norms, over all devices of all workers
        results = validate(args, epoch, module, val, val_count, metric) if val else {}
        record.epoch(accuracy=accuracy, **results)
        if args.model_prefix and workers.rank == 0 and (
                (epoch + 1) % args.save_period == 0 or epoch + 1 == args.epochs):
            os.makedirs(os.path.dirname(args.model_prefix) or ".", exist_ok=True)
            module.save_checkpoint(args.model_prefix, epoch + 1, save_optimizer_states=True)
    record.close()
    return module


def batches_per_update(args, workers):
    """Returns the number of batches whose gradients accumulate in an update."""
    images_per_batch = args.batch_size * workers.count
    batches, remainder = divmod(args.macrobatch_size or images_per_batch, images_per_batch)
    if remainder:
        raise ValueError(f"--macrobatch-size must be a multiple of --batch-size {args.batch_size} "
                         f"on each of {workers.count} workers. Received: {args.macrobatch_size}")
    return batches


def train_epoch(args, epoch, module, batches, update_every, metric, record, monitor):
    """Trains with the batches of an epoch, and returns the accuracy."""
    speedometer = Speedometer(args.batch_size, args.log_interval)
    start, losses = time.time(), []
    metric.reset()
    for i, batch in enumerate(batches):
        if monitor:
            monitor.tic()
        if update_every > 1 and i % update_every == 0:
            clear_gradients(module)
        # Multiplies gradients by the loss scale, so that small ones do not become 0 in float16
        module.forward_backward(batch)
        losses.append(cross_entropy(module, batch))
        if (i + 1) % update_every == 0:
            # Unscales the gradients. If one overflowed, skips the update and lowers the scale
            module.update()
            record.step(module, losses, update_every * args.batch_size * args.workers)
            losses = []
        module.update_metric(metric, batch.label)
        if monitor:
            monitor.toc_print()
        speedometer(mx.model.BatchEndParam(epoch, i, metric, {"self": module}))
    results = dict(metric.get_global_name_value())
    for name, value in results.items():
        logging.info("Epoch[%d] Train-%s=%f", epoch, name, value)
    logging.info("Epoch[%d] Time cost=%.3f", epoch, time.time() - start)
    return results["accuracy"]


def validate(args, epoch, module, val, count, metric):
    """Returns the errors and the loss of validation, as fields of log.jsonl."""
    metric.reset()
    losses, sizes = [], []
    for batch in without_padding(val, count, max(1, len(args.gpus))):
        module.forward(batch, is_train=False)
        module.update_metric(metric, batch.label)
        losses.append(float(cross_entropy(module, batch).asscalar()))
        sizes.append(len(batch.label[0]))
    results = dict(metric.get_name_value())
    for name, value in results.items():
        logging.info("Epoch[%d] Validation-%s=%f", epoch, name, value)
    errors = {field: 1 - results[name] for field, name in (
        ("err_top1", "accuracy"), ("err_top5", "top_k_accuracy_5")) if name in results}
    return {**errors, "validation_loss": np.average(losses, weights=sizes)}


def cross_entropy(module, batch):
    """Returns the mean cross entropy of the Module's probabilities for a batch."""
    probabilities = module.get_outputs()[0].astype("float32")
    likely = probabilities.pick(batch.label[0].as_in_context(probabilities.ctx))
    return -(likely + 1e-12).log().mean()


def clear_gradients(module):
    """Sets gradients to 0, to which the backward passes of the next update add."""
    for gradient in itertools.chain(*module._exec_group.grad_arrays):
        if gradient is not None:
            gradient[:] = 0


def xray(args, epoch, module, train):
    """X-rays the network with the first batches of an epoch. Returns all batches of the epoch."""
    # Copies, because the iterator uses the arrays of a batch again for the next one
    first = [mx.io.DataBatch([array.copy() for array in batch.data],
                             [array.copy() for array in batch.label], batch.pad)
             for batch in itertools.islice(train, args.xray_steps)]
    recipes.xray_epoch(args, epoch, module, first)
    return itertools.chain(first, train)


# ---- checks of flags, and resumed runs

def check_flags(args):
    """Refuses flags that do not fit each other."""
    if len(args.gpus) > 1 and args.batch_size % len(args.gpus):
        raise ValueError(f"--batch-size {args.batch_size} does not divide over {len(args.gpus)} "
                         "GPUs")
    if args.top_k and not 2 <= args.top_k <= args.num_classes:
        raise ValueError(f"--top-k must be from 2 to --num-classes {args.num_classes}, or 0 for "
                         f"none. Received: {args.top_k}")


def first_epoch(args):
    """Returns the number of completed epochs, from --load-epoch or --resume."""
    completed_epochs = args.load_epoch or 0
    if completed_epochs and args.resume:
        raise ValueError("--load-epoch and --resume exclude each other")
    if (completed_epochs or args.resume) and not args.model_prefix:
        raise ValueError(f"--{'load-epoch' if completed_epochs else 'resume'} needs --model-prefix")
    if args.resume:
        completed_epochs = last_whole_epoch(args.model_prefix)
        logging.info("--resume: completed epochs: %d", completed_epochs)
    if completed_epochs >= args.epochs:
        logging.info("no epochs are left to train: --num-epochs %d", args.epochs)
    return completed_epochs


def last_whole_epoch(prefix):
    """Returns the last epoch that a Module saved with this prefix; it writes the states last."""
    saved = [epoch for epoch in range(10_000) if os.path.exists(f"{prefix}-{epoch:04d}.params")]
    whole = [epoch for epoch in saved if os.path.exists(f"{prefix}-{epoch:04d}.states")]
    if saved and not whole:
        raise ValueError(f"{prefix}-{saved[-1]:04d}.states does not exist, which --resume needs: "
                         f"--load-epoch {saved[-1]} continues with a new optimizer")
    return max(whole, default=0)


def start_log(args, workers, completed_epochs, interval):
    """Returns the run's log, which keeps the lines of completed epochs."""
    path = None
    if args.save_dir and workers.rank == 0:
        os.makedirs(args.save_dir, exist_ok=True)
        path = os.path.join(args.save_dir, "log.jsonl")
        check_log(path, args, completed_epochs)
    return Log(path, args, interval=interval, tensorboard=args.tensorboard,
               begin=completed_epochs, rank=workers.rank)


def check_log(path, args, completed_epochs):
    """Refuses the log of another run."""
    lines = Log.read(path)[1] if os.path.exists(path) else []
    ended = [line["epoch"] for line in lines if "batch" not in line]
    if ended and not (completed_epochs or args.resume):
        raise ValueError(f"{path} exists: pass another --save-dir, or --load-epoch to continue")
    if args.resume and (ended or lines and completed_epochs):
        recipes.check_same_flags(path, args, (
            *recipes.MAY_DIFFER, "epochs", "load_epoch", "data_nthreads", "monitor", "loss",
            "top_k", "use_rec"))
        if completed_epochs and completed_epochs - 1 not in ended:
            raise ValueError(f"{path} has no end of epoch {completed_epochs - 1}, and "
                             f"{args.model_prefix}-{completed_epochs:04d}.params is of that epoch: "
                             "the files are of different runs")


def main(arguments=None):
    """Trains a network of example/symbols with the flags."""
    import symbols  # symbolic_fine_tune.py does not need these

    parser = cli.Parser(__doc__)
    symbols.add_flags(parser)
    add_flags(parser)
    args = parse_flags(parser, arguments)

    # In float16 the symbol has two casts: of the images, and before the softmax
    fit(args, symbols.network_of(args))


if __name__ == "__main__":
    cli.run(main)
