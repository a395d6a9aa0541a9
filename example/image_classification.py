"""Trains an image classifier with Gluon, in float32 or float16.

    python image_classification.py --dataset digits --dtype float16
    python image_classification.py --dataset cifar10 --model cifar_resnet20_v1 --dtype float16 \\
        --batch-size 128 --epochs 60 --lr-mode cosine --warmup-epochs 2 --gpus 0
    python image_classification.py --dataset train.rec --val test.rec --model resnet18_v1

Log lines are GluonCV's, with the loss scale and the skipped steps at their ends; SAVE_DIR/log.jsonl
holds more for machines (docs/recipes.md says what). Killed at any moment, `--resume` goes on behind
the last whole epoch as if nothing had been: bit by bit, with --num-workers 0.
"""
import functools
import json
import logging
import math
import os
import random
import resource
import time

import gluon_amp as amp
import mxnet as mx
import numpy as np
from gluon_amp import recipes
from mxnet import autograd, gluon
from mxnet.gluon.data.vision import transforms
from tqdm import tqdm

log = logging.getLogger("image_classification")
POLICIES = ("float32", "float16", "mixed_float16", "pure_float16", "mixed_bfloat16", "tf32",
            "mixed_float8", "O0", "O1", "O2", "O3")
MAY_DIFFER = ("resume", "save_dir", "log_interval", "num_workers", "gpus", "data_dir",
              "tensorboard", "mlperf", "claim_speed", "logging_file", "save_period")
SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
FILES = {"cifar10": [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"],
         "mnist": ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz",
                   "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]}
CLASSES = {"digits": 10, "mnist": 10, "cifar10": 10, "caltech101": 101, "imagenet": 1000}


def parse(arguments=None):
    parser = recipes.Parser(__doc__)
    add_arguments(parser)
    return parser.parse_args(arguments)


def add_arguments(parser):
    add = parser.add_argument  # the second names are those of GluonCV's scripts
    add("--dataset", "--rec-train", default="digits",
        help="digits, cifar10, mnist, caltech101, imagenet, dummy, a folder of folders, or a .rec")
    add("--val", "--rec-val", help="validation data, where the dataset is a folder or a .rec")
    add("--use-rec", action="store_true", help="the dataset is a .rec: it is known by its name")
    add("--data-dir", help="where the dataset lies, if not in MXNet's own place")
    add("--examples", type=recipes.positive, help="how many training images to use, if not all")
    add("--model", default="small", help="small, or a name of MXNet's or gluoncv's model zoo")
    add("--use-pretrained", action="store_true", help="begin with the model zoo's parameters")
    add("--batch-norm", action="store_true", help="a VGG with batch norms")
    add("--last-gamma", action="store_true",
        help="the last batch norm of each residual block begins with 0 (gluoncv's networks)")
    add("--classes", "--num-classes", type=recipes.positive, help="if not the dataset's")
    add("--image-size", "--input-size", type=recipes.positive, help="if not the dataset's, or 224")
    add("--crop-ratio", type=float, default=1.0,
        help="validation takes this share of an image, from its middle: 0.875 for ImageNet")
    add("--dtype", default="float32", choices=("float32", "float16"), help="of the network")
    add("--policy", choices=POLICIES, help="of gluon_amp.convert, if not --dtype")
    add("--loss-scale", type=recipes.loss_scale, default="dynamic",
        help="dynamic, a number or none")
    add("--batch-size", type=recipes.positive, default=64, help="of all GPUs together")
    add("--epochs", "--num-epochs", type=recipes.positive, default=10,
        help="passes over the data; with --resume a finished run goes on to more")
    add("--optimizer", default="sgd", help="a name of MXNet's, or adamw")
    add("--lr", type=float, default=0.1, help="the learning rate")
    add("--lr-mode", default="cosine", choices=("step", "cosine"), help="how it falls")
    add("--lr-decay-epoch", type=recipes.numbers, default=[],
        help="of step: after which epochs, such as 30,60")
    add("--lr-decay", type=float, default=0.1, help="of step: by which factor")
    add("--warmup-epochs", type=float, default=0, help="in which the rate rises")
    add("--warmup-lr", type=float, default=0.0, help="from which rate on")
    add("--wd", type=float, default=1e-4, help="weight decay")
    add("--no-wd", action="store_true", help="none for biases, and for batch norms' parameters")
    add("--momentum", type=float, default=0.9, help="of optimizers that have one")
    add("--label-smoothing", type=float, default=0, help="the share of all classes in a label")
    add("--mixup", action="store_true", help="train on weighted sums of two images and labels")
    add("--mixup-alpha", type=float, default=0.2, help="of the beta distribution of the weights")
    add("--mixup-off-epoch", type=int, default=0, help="so many epochs at the end without mixup")
    add("--mode", default="hybrid", choices=("hybrid", "imperative"), help="how the network runs")
    add("--gpus", type=recipes.numbers, default=[], help="such as 0,1; none: the CPU")
    add("--num-gpus", dest="gpus", metavar="N", default=[],
        type=lambda text: list(range(recipes.positive(text) if text != "0" else 0)),
        help="the first N GPUs")
    add("--num-workers", "--num-data-workers", "-j", type=int, default=0,
        help="processes that load images")
    add("--save-dir", default="runs/image_classification", help="where all files of the run go")
    add("--save-period", "--save-frequency", type=recipes.positive,
        help="keep the parameters of each so many epochs; those of the last one are always there")
    add("--resume", action="store_true", help="go on from the last epoch in --save-dir")
    add("--resume-params", metavar="FILE", help="begin with these parameters")
    add("--resume-states", metavar="FILE", help="and with this state of the Trainer")
    add("--resume-epoch", type=int, default=0, help="and with this epoch, from 0 on")
    add("--log-interval", type=recipes.positive, default=20, help="batches of a line of the log")
    add("--logging-file", metavar="FILE", help="also write the log there")
    add("--seed", type=int, default=0, help="of all random numbers")
    add("--mean", type=recipes.decimals, default=[0.45],
        help="of pixels from 0 to 1: one number, or one each channel")
    add("--std", type=recipes.decimals, default=[0.25], help="the same")
    for flag, name in (("--rgb-mean", "mean"), ("--rgb-std", "std")):
        add(flag, dest=name, default=[0.45] if name == "mean" else [0.25], metavar="R,G,B",
            type=lambda text: [value / 255 for value in recipes.decimals(text)],
            help=f"--{name} of pixels from 0 to 255")
    recipes.TrainingLog.add_arguments(parser)
    add("--benchmark", action="store_true", help="random images; samples/s and peak memory")


# ---- data

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
    if train and size > 32:
        steps = [transforms.RandomResizedCrop(size, (0.4, 1.0))]
    elif train or args.crop_ratio == 1:
        steps = [transforms.Resize(size)]
    else:
        steps = [transforms.Resize(math.ceil(size / args.crop_ratio), keep_ratio=True),
                 transforms.CenterCrop(size)]
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


# ---- network

def network(args):
    """The classifier, initialized."""
    devices = recipes.devices_of(args.gpus)
    if args.model == "small":
        net = recipes.small_network(classes_of(args))
    elif args.use_pretrained:
        net = recipes.zoo_network(args.model, pretrained=True, ctx=devices, **options_of(args))
    else:
        net = recipes.zoo_network(args.model, classes=classes_of(args), **options_of(args))
    if not args.use_pretrained:
        net.initialize(mx.init.MSRAPrelu(), ctx=devices)
    return net


def options_of(args):
    """What the model zoos are told besides."""
    if args.batch_norm and not args.model.startswith("vgg"):
        raise SystemExit(f"--batch-norm is for a VGG. Received: --model {args.model}")
    return {**({"batch_norm": True} if args.batch_norm else {}),
            **({"last_gamma": True} if args.last_gamma else {})}


def schedule_of(args, steps):
    return recipes.schedule(args.lr, steps, args.epochs, args.lr_mode, args.lr_decay_epoch,
                            args.lr_decay, args.warmup_epochs, args.warmup_lr)


def trainer_of(args, net, **schedule):
    options = {"learning_rate": args.lr, "wd": args.wd, **schedule}
    if args.optimizer in ("sgd", "nag", "signum", "lars", "dcasgd"):
        options["momentum"] = args.momentum
    if args.no_wd:
        net.collect_params(".*beta|.*gamma|.*bias").setattr("wd_mult", 0.0)
    return amp.Trainer(net.collect_params(), args.optimizer, options,
                       loss_scale=None if args.loss_scale == "none" else args.loss_scale,
                       enabled=(args.policy or args.dtype) not in ("float32", "O0"))


def loss_of(args):
    """Softmax cross entropy in float32, of smoothed labels if they are to be."""
    smooth, classes = args.label_smoothing, classes_of(args)
    loss = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)
    sparse_loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def loss_fn(out, label):
        out = out.astype("float32")  # under pure_float16 the network's is float16
        if label.ndim == 1 and not smooth:
            return sparse_loss(out, label)
        label = label.one_hot(classes) if label.ndim == 1 else label
        return loss(out, label * (1 - smooth) + smooth / classes if smooth else label)
    return loss_fn


# ---- training

def mixup_of(args, epoch):
    """What makes weighted sums of two images, and of their labels; None where it is off."""
    if not args.mixup or epoch >= args.epochs - args.mixup_off_epoch:
        return None
    rng, classes = np.random.RandomState([args.seed, epoch]), classes_of(args)

    def mix(data, label):
        share = rng.beta(args.mixup_alpha, args.mixup_alpha)
        label = label.one_hot(classes)
        return (share * data + (1 - share) * data[::-1],
                share * label + (1 - share) * label[::-1])
    return mix


def train_epoch(args, net, trainer, loss_fn, loader, devices, epoch, record):
    """One pass; the training accuracy, the mean loss and the seconds."""
    metric, start, tic = mx.metric.Accuracy(), time.time(), time.time()
    total, count = 0.0, 0
    mix = mixup_of(args, epoch)
    record.start_epoch(epoch)
    for i, (data, label) in enumerate(tqdm(loader, disable=None, leave=False)):
        check_labels(args, label)
        data, target = mix(data, label) if mix else (data, label)
        datas, labels, targets = (gluon.utils.split_and_load(x, devices, even_split=False)
                                  for x in (data, label, target))
        with autograd.record():
            outputs = [net(x) for x in datas]
            losses = [loss_fn(out, y) for out, y in zip(outputs, targets)]
        scale, lr = trainer.loss_scale, trainer.learning_rate
        trainer.backward(losses)
        updated = trainer.step(len(data))
        metric.update(labels, outputs)
        loss = sum(float(one.sum().asscalar()) for one in losses)
        total, count = total + loss, count + len(data)
        shown = (i + 1) % args.log_interval == 0
        record.add_step(
            epoch, i, loss / len(data), updated, shown, lr=lr, loss_scale=scale,
            skipped=trainer.skipped, gradient_norm=functools.partial(
                norm, net, scale * len(data)))
        if shown:
            speed = args.batch_size * args.log_interval / (time.time() - tic)
            log.info("Epoch[%d] Batch [%d]\tSpeed: %f samples/sec\taccuracy=%f\tlr=%f%s", epoch, i,
                     speed, metric.get()[1], trainer.learning_rate, scale_text(trainer))
            tic = time.time()
    return metric.get()[1], total / count, time.time() - start


def norm(net, divisor):
    """Of the gradient that has just updated the network: summed over devices, and unscaled."""
    return recipes.gradient_norm([p.list_grad()[0] for p in net.collect_params().values()
                         if p.grad_req != "null"]) / divisor


def run_epoch(args, net, trainer, loss_fn, order, loader, val_loader, devices, epoch, record):
    """Trains one epoch, validates and logs; returns the epoch's line of the log."""
    order.epoch = epoch
    mx.random.seed(args.seed + 1 + epoch)  # of dropout and MXNet's augmentation
    random.seed(args.seed + 1 + epoch)  # of Gluon's crops
    accuracy, loss, seconds = train_epoch(args, net, trainer, loss_fn, loader, devices, epoch,
                                          record)
    speed = len(loader) * args.batch_size / seconds
    top1, top5, validation_loss = validate(net, val_loader, devices, loss_fn)
    log.info("[Epoch %d] training: accuracy=%f", epoch, accuracy)
    log.info("[Epoch %d] speed: %d samples/sec\ttime cost: %f", epoch, speed, seconds)
    log.info("[Epoch %d] validation: err-top1=%f err-top5=%f%s", epoch, top1, top5,
             scale_text(trainer))
    return {"epoch": epoch, "accuracy": accuracy, "err_top1": top1, "err_top5": top5,
            "loss": loss, "validation_loss": validation_loss,
            "samples_per_second": speed, "seconds": seconds, "lr": trainer.learning_rate,
            "loss_scale": trainer.loss_scale, "skipped": trainer.skipped}


def scale_text(trainer):
    return f"\tloss-scale={trainer.loss_scale:g}\tskipped={trainer.skipped}"


def peak_megabytes(devices):
    """Of each GPU what is taken now (MXNet keeps what it has had); else the process's most."""
    if devices[0].device_type == "gpu":
        free_and_total = [mx.context.gpu_memory_info(d.device_id) for d in devices]
        return sum(total - free for free, total in free_and_total) / 2 ** 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def validate(net, loader, devices, loss_fn):
    """Top-1 and top-5 errors, and the loss; of fewer than five classes all are among the first
    five."""
    top1, top5, count, loss = 0, 0, 0, 0.0
    for data, label in loader:
        datas, labels = (gluon.utils.split_and_load(x, devices, even_split=False)
                         for x in (data, label))
        for out, y in zip([net(x) for x in datas], labels):
            best = out.topk(k=min(5, out.shape[1]), axis=1).asnumpy() == y.asnumpy()[:, None]
            top1, top5, count = top1 + best[:, 0].sum(), top5 + best.sum(), count + len(best)
            loss += float(loss_fn(out, y).sum().asscalar())
    return 1 - top1 / count, 1 - top5 / count, loss / count


def save(args, net, trainer, epoch, record):
    """Parameters, states and log; last.json, written at the end, says that they belong together."""
    folder = args.save_dir
    net.save_parameters(os.path.join(folder, f"epoch-{epoch}.params"))
    trainer.save_states(os.path.join(folder, f"epoch-{epoch}.states"))
    record.save()
    recipes.replace_text(os.path.join(folder, "last.json"), json.dumps({"epoch": epoch}))
    errors = [line["err_top1"] for line in record.lines if "batch" not in line]
    if errors[-1] == min(errors):
        net.save_parameters(os.path.join(folder, "best.params"))
    kept = args.save_period and epoch % args.save_period == 0
    for old in (f"epoch-{epoch - 1}.params", f"epoch-{epoch - 1}.states"):
        if os.path.exists(os.path.join(folder, old)) and not (kept and old.endswith(".params")):
            os.remove(os.path.join(folder, old))


def start(args):
    """Log, place and seeds; returns the devices. A run that is there is not written over."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    if args.logging_file:
        logging.getLogger().addHandler(logging.FileHandler(args.logging_file))
    devices = recipes.devices_of(args.gpus)
    begun = os.path.exists(os.path.join(args.save_dir, "last.json"))
    if begun and not args.resume and not args.benchmark:
        raise SystemExit(f"{args.save_dir} has a run: --resume goes on with it, --save-dir names "
                         "another place")
    os.makedirs(args.save_dir, exist_ok=True)
    log.info("%s", args)
    mx.random.seed(args.seed)
    np.random.seed(args.seed)
    random.seed(args.seed)
    return devices


def resume(args, net, trainer):
    """The epochs that are done, and their log."""
    last = os.path.join(args.save_dir, "last.json")
    if not args.resume:
        if args.resume_params:
            net.load_parameters(args.resume_params)
        if args.resume_states:
            load_states(trainer, args.resume_states)
        return args.resume_epoch, []
    if not os.path.exists(last):
        log.info("nothing to resume in %s", args.save_dir)
        return 0, []
    with open(last) as file:
        epoch = json.load(file)["epoch"]
    was, lines = recipes.read_log(os.path.join(args.save_dir, "log.jsonl"))
    now = json.loads(json.dumps(vars(args)))
    if epoch + 1 == was.get("epochs") < args.epochs:
        log.info("the %d epochs are done; %d follow, at their rates in a run of %d", epoch + 1,
                 args.epochs - epoch - 1, args.epochs)
        was["epochs"] = args.epochs
    differ = [f"{name} was {was.get(name, 'not there')}, is {now.get(name, 'not there')}"
              for name in {**was, **now} if name not in MAY_DIFFER
              and was.get(name) != now.get(name)]
    if differ:
        raise SystemExit(f"--resume goes on with the run as it was begun: {'; '.join(differ)}")
    net.load_parameters(os.path.join(args.save_dir, f"epoch-{epoch}.params"))
    load_states(trainer, os.path.join(args.save_dir, f"epoch-{epoch}.states"))
    if epoch + 1 >= args.epochs:
        log.info("all %d epochs are done", args.epochs)
    return epoch + 1, [line for line in lines if line["epoch"] <= epoch]


def load_states(trainer, path):
    """The schedule is that of this run, which may have more epochs than the one before."""
    schedule = trainer.optimizer.lr_scheduler
    trainer.load_states(path)
    trainer.optimizer.lr_scheduler = schedule


def fit(args, net, order, loader, val_loader, devices):
    """Trains a converted network, from where --resume finds it."""
    trainer = trainer_of(args, net, lr_scheduler=schedule_of(args, len(loader)))
    loss_fn = loss_of(args)
    if args.gpus:
        for hint in recipes.tensor_core_hints(net, args.batch_size, len(devices)):
            log.info("%s", hint)
    begin, lines = resume(args, net, trainer)
    path = None if args.benchmark else os.path.join(args.save_dir, "log.jsonl")
    record = recipes.TrainingLog(args, path, lines, begin * len(loader))
    for epoch in range(begin, args.epochs):
        line = run_epoch(args, net, trainer, loss_fn, order, loader, val_loader, devices, epoch,
                         record)
        record.add_epoch(line)
        if args.benchmark:
            log.info("%.1f samples/s, peak memory %.0f MB", line["samples_per_second"],
                     peak_megabytes(devices))
        else:
            save(args, net, trainer, epoch, record)
    record.end()
    return [line for line in record.lines if "batch" not in line]


def main(arguments=None):
    args = parse(arguments)
    devices = start(args)
    order, loader, val_loader = loaders(args)

    net = network(args)
    amp.convert(net, args.policy or args.dtype)
    if args.mode == "hybrid":
        net.hybridize(static_alloc=True, static_shape=True)
    out = net(next(iter(val_loader))[0][:1].as_in_context(devices[0]))  # makes all parameters
    if out.shape[1] != classes_of(args):
        raise SystemExit(f"{args.model} has {out.shape[1]} classes, and the data "
                         f"{classes_of(args)}: fine_tune.py puts a new head on it")
    return fit(args, net, order, loader, val_loader, devices)


if __name__ == "__main__":
    recipes.run(main)
