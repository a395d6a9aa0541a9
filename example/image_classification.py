"""Trains an image classifier with Gluon, in float32 or float16.

    python image_classification.py --dataset digits --dtype float16
    python image_classification.py --dataset cifar10 --model cifar_resnet20_v1 --dtype float16 \\
        --batch-size 128 --epochs 60 --lr-mode cosine --warmup-epochs 2 --gpus 0
    python image_classification.py --dataset train.rec --val test.rec --model resnet18_v1

Log lines have GluonCV's format, followed by the loss scale and the number of skipped steps.
SAVE_DIR/log.jsonl is machine-readable (docs/recipes.md describes it). After an interruption,
`--resume` continues from the last complete epoch, bit for bit with --num-workers 0.
"""
import logging
import os
import resource
import time

import gluon_amp as amp
import images
import mxnet as mx
import numpy as np
import recipes
from gluon_amp.parallel import average_statistics
from mxnet import autograd, gluon

log = logging.getLogger("image_classification")
POLICIES = ("float32", "float16", "mixed_float16", "pure_float16", "bfloat16", "mixed_bfloat16",
            "tf32", "O0", "O1", "O2", "O3")


def parse(arguments=None):
    parser = recipes.Parser(__doc__)
    add_network_arguments(parser)
    add_arguments(parser)
    return parser.parse_args(arguments)


def add_network_arguments(parser):
    """Adds the flags that select a network; fine_tune.py has its own."""
    add = parser.add_argument_group("network").add_argument
    add("--model", default="small", help="small, or a network of MXNet's or gluoncv's model zoo")
    add("--use-pretrained", action="store_true", help="load the model zoo's parameters")
    add("--batch-norm", action="store_true", help="use the VGG variant with batch norms")
    add("--last-gamma", action="store_true",
        help="initialize gamma of each residual block's last batch norm to 0 (gluoncv)")


def add_arguments(parser, folder="runs/image_classification"):
    images.add_image_flags(parser)
    training = parser.add_argument_group("training")
    add = training.add_argument  # the second names are from GluonCV's scripts
    add("--dtype", default="float32", choices=("float32", "float16", "bfloat16"),
        help="type of the network; bfloat16: CPUs only")
    add("--policy", choices=POLICIES,
        help="policy of gluon_amp.convert, in place of --dtype")
    add("--loss-scale", type=recipes.loss_scale, default="auto",
        help="loss scale: auto, dynamic, a number or none")
    add("--batch-size", type=recipes.positive, default=64,
        help="batch size of a process, over all its GPUs")
    add("--epochs", "--num-epochs", type=recipes.positive, default=10,
        help="number of epochs; a larger one with --resume extends a finished run")
    add("--optimizer", default="sgd", help="an optimizer of MXNet, or adamw")
    add("--lr", type=recipes.decimal, default=0.1, help="learning rate")
    add("--lr-mode", choices=("step", "cosine"),
        help="learning rate schedule (default: step with --lr-decay-epoch, else cosine)")
    add("--lr-decay-epoch", type=recipes.numbers, default=[],
        help="epochs after which step decays the rate, such as 30,60")
    add("--lr-decay", type=recipes.decimal, default=0.1, help="decay factor of step")
    add("--warmup-epochs", type=recipes.decimal, default=0, help="number of warm-up epochs")
    add("--warmup-lr", type=recipes.decimal, default=0.0,
        help="learning rate at the start of warm-up")
    add("--wd", type=recipes.decimal, default=1e-4, help="weight decay")
    add("--no-wd", action="store_true",
        help="no weight decay for biases and batch norms' parameters")
    add("--momentum", type=recipes.share, default=0.9,
        help="momentum, for optimizers that have one")
    add("--mode", default="hybrid", choices=("hybrid", "imperative"),
        help="execution mode of the network")
    recipes.add_device_flags(training)
    recipes.add_kvstore_flag(training)
    add = parser.add_argument_group("regularization and distillation").add_argument
    add("--label-smoothing", type=recipes.share, default=0, nargs="?", const=0.1, metavar="SHARE",
        help="amount of label smoothing; 0.1 for the flag without a number")
    add("--mixup", action="store_true",
        help="train on weighted sums of two images and of their labels")
    add("--mixup-alpha", type=recipes.above_0, default=0.2,
        help="parameter of the beta distribution of mixup's weights")
    add("--mixup-off-epoch", type=recipes.whole, default=0,
        help="number of last epochs without mixup")
    add("--teacher", metavar="MODEL", help="also train on this network's outputs (distillation)")
    add("--teacher-params", metavar="FILE",
        help="parameters of the teacher (default: the model zoo's)")
    add("--temperature", type=recipes.above_0, default=20.0,
        help="divisor of both networks' logits")
    add("--hard-weight", type=recipes.share, default=0.5,
        help="weight of the labels' loss; the teacher's has the rest")
    output = parser.add_argument_group("output and resuming")
    add = output.add_argument
    add("--benchmark", action="store_true",
        help="train on random images, and print samples/s and peak memory")
    add("--logging-file", metavar="FILE", help="write the log to this file, too")
    recipes.add_progress_flags(output)
    recipes.add_folder_flags(output, folder)
    recipes.add_log_flags(output)
    recipes.add_xray_flags(output)


# ---- network

def network(args, devices):
    """Returns an initialized classifier."""
    classes, options = images.classes_of(args), options_of(args)
    if args.model == "small":
        net = images.small_network(classes)
    elif args.use_pretrained:
        net = images.zoo_network(args.model, pretrained=True, ctx=devices, **options)
    else:
        net = images.zoo_network(args.model, classes=classes, **options)
    if not args.use_pretrained:
        net.initialize(mx.init.MSRAPrelu(), ctx=devices)
    return net


def converted(args, net):
    """Converts to the precision of the flags; hybridizes first, because float16 runs as a graph."""
    if args.mode == "hybrid":
        net.hybridize(static_alloc=True, static_shape=True)
    return amp.convert(net, args.policy or args.dtype)


def teacher_of(args, devices):
    """Returns the network of --teacher; None without it."""
    if not args.teacher:
        return None
    if not args.teacher_params:
        net = images.zoo_network(args.teacher, pretrained=True, ctx=devices)
    else:
        if not os.path.exists(args.teacher_params):
            raise SystemExit(f"{args.teacher_params} does not exist")
        classes = images.classes_of(args)
        net = images.small_network(classes) if args.teacher == "small" else \
            images.zoo_network(args.teacher, classes=classes)
        net.load_parameters(args.teacher_params, ctx=devices)
    return converted(args, net)


def options_of(args):
    """Returns the keyword arguments for the model zoos."""
    if args.batch_norm and not args.model.startswith("vgg"):
        raise ValueError(f"--batch-norm is for a VGG. Received: --model {args.model}")
    if args.model == "small" and (args.last_gamma or args.use_pretrained):
        raise ValueError("--last-gamma and --use-pretrained are for a model zoo's networks. "
                         "Received: --model small")
    return {**({"batch_norm": True} if args.batch_norm else {}),
            **({"last_gamma": True} if args.last_gamma else {})}


def schedule_of(args, steps):
    return recipes.schedule(args.lr, steps, args.epochs, args.lr_mode, args.lr_decay_epoch,
                            args.lr_decay, args.warmup_epochs, args.warmup_lr)


def trainer_of(args, net, kvstore="device", **schedule):
    options = {"learning_rate": args.lr, "wd": args.wd, **schedule,
               **recipes.momentum_of(args.optimizer, args.momentum)}
    if args.no_wd:
        net.collect_params(".*beta|.*gamma|.*bias").setattr("wd_mult", 0.0)
    return amp.Trainer(net.collect_params(), args.optimizer, options, kvstore,
                       loss_scale=args.loss_scale)


def loss_of(args):
    """Softmax cross entropy in float32, with label smoothing if the flags set it."""
    smooth, classes = args.label_smoothing, images.classes_of(args)
    hot, soft = args.temperature, 1 - args.hard_weight
    loss = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)
    sparse_loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def of_labels(out, label):
        if label.ndim == 1 and not smooth:
            return sparse_loss(out, label)
        label = label.one_hot(classes) if label.ndim == 1 else label
        return loss(out, label * (1 - smooth) + smooth / classes if smooth else label)

    def loss_fn(out, label, taught=None):
        out = out.astype("float32")  # under pure_float16 the network returns float16
        if taught is None:
            return of_labels(out, label)
        if taught.shape != out.shape:
            raise ValueError(f"--teacher {args.teacher} has {taught.shape[1]} classes, and the "
                             f"network {out.shape[1]}")
        taught = (taught.astype("float32") / hot).softmax()
        return (1 - soft) * of_labels(out, label) + soft * hot ** 2 * loss(out / hot, taught)
    return loss_fn


# ---- training

def mixup_of(args, epoch, rank):
    """Returns a function that mixes images and labels; None without --mixup."""
    if not args.mixup or epoch >= args.epochs - args.mixup_off_epoch:
        return None
    rng = np.random.RandomState([args.seed, epoch, rank] if rank else [args.seed, epoch])
    classes = images.classes_of(args)

    def mix(data, label):
        share = rng.beta(args.mixup_alpha, args.mixup_alpha)
        label = label.one_hot(classes)
        return (share * data + (1 - share) * data[::-1],
                share * label + (1 - share) * label[::-1])
    return mix


def scale_text(trainer):
    return f"\tloss-scale={trainer.loss_scale:g}\tskipped={trainer.skipped}"


def peak_megabytes(devices):
    """Returns the used memory of the GPUs, or the peak memory of the process."""
    if devices[0].device_type == "gpu":
        free_and_total = [mx.context.gpu_memory_info(d.device_id) for d in devices]
        return sum(total - free for free, total in free_and_total) / 2 ** 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def validate(net, loader, devices, loss_fn):
    """Returns top-1 and top-5 errors, and the loss. With fewer than five classes the top-5 error
    is 0."""
    top1, top5, count, loss = 0, 0, 0, 0.0
    for data, label in loader:
        datas, labels = (gluon.utils.split_and_load(x, devices[:len(x)], even_split=False)
                         for x in (data, label))
        for out, y in zip([net(x) for x in datas], labels):
            best = out.topk(k=min(5, out.shape[1]), axis=1).asnumpy() == y.asnumpy()[:, None]
            top1, top5, count = top1 + best[:, 0].sum(), top5 + best.sum(), count + len(best)
            loss += float(loss_fn(out, y).sum().asscalar())
    return 1 - top1 / count, 1 - top5 / count, loss / count


def train(args, make_network, validates_first=False):
    """Trains the network that `make_network(args, devices)` returns; --resume continues a run.
    Returns the epochs' lines of log.jsonl."""
    # Ranks, devices of this process, images, the output folder, random numbers
    args.lr_mode = args.lr_mode or ("step" if args.lr_decay_epoch else "cosine")
    ranks = recipes.Ranks(args.kvstore)
    ranks.start_log("%(message)s")
    if args.logging_file and ranks.rank == 0:
        logging.getLogger().addHandler(logging.FileHandler(args.logging_file))
    devices = ranks.devices(args.gpus)
    if ranks.workers > 1:
        args.workers = ranks.workers
    order, loader, val_loader = images.image_loaders(args, ranks)
    folder = recipes.RunFolder(args, ranks.rank, writes=not args.benchmark)
    log.info("%s", args)
    if len(devices) > 1:
        log.info("each of the %d GPUs gets %g images of a batch: --batch-size is their sum",
                 len(devices), args.batch_size / len(devices))
    recipes.seed_all(args.seed)

    # The network, converted before its Trainer is created, and the loss
    net = converted(args, make_network(args, devices))
    out = net(next(iter(val_loader))[0][:1].as_in_context(devices[0]))  # allocates all parameters
    classes = images.classes_of(args)
    if out.shape[1] != classes:
        raise ValueError(f"{args.model} has {out.shape[1]} classes, and the data {classes}: "
                         "fine_tune.py replaces the head")
    teacher, loss_fn = teacher_of(args, devices), loss_of(args)
    if validates_first:
        log.info("before: err-top1=%f err-top5=%f",
                 *validate(net, val_loader, devices, loss_fn)[:2])

    # The Trainer, which scales the loss, and the state of a resumed run
    trainer = trainer_of(args, net, ranks.store, lr_scheduler=schedule_of(args, len(loader)))
    first = folder.resume(net, trainer)
    if not args.resume_states and trainer.optimizer.num_update == 0:  # else the states have it
        trainer.optimizer.begin_num_update = trainer.optimizer.num_update = first * len(loader)
    record = folder.start_log(first)
    images_per_step = args.batch_size * ranks.workers

    for epoch in range(first, args.epochs):
        order.epoch = epoch
        if args.xray and ranks.rank == 0:
            recipes.xray_epoch(args, epoch, net, loader, loss_fn)
        recipes.seed_all(args.seed + 1 + epoch + 1_000_000 * ranks.rank)  # dropout, augmentation
        mix = mixup_of(args, epoch, ranks.rank)
        metric, start = mx.metric.Accuracy(), time.time()
        progress = recipes.Progress(args, loader, epoch, images_per_step, ranks.rank)
        for i, (data, label) in progress:
            images.check_labels(args, label)
            mixed, target = mix(data, label) if mix else (data, label)
            datas, labels, targets = (gluon.utils.split_and_load(x, devices, even_split=False)
                                      for x in (mixed, label, target))
            taught = [teacher(x) if teacher else None for x in datas]
            with autograd.record():
                outputs = [net(x) for x in datas]
                losses = [loss_fn(*each) for each in zip(outputs, targets, taught)]
            trainer.backward(losses)
            trainer.step(images_per_step)

            metric.update(labels, outputs)
            loss = sum(float(one.sum().asscalar()) for one in losses) / args.batch_size
            shown = record.step(trainer, loss, images_per_step)
            speed = progress.step(loss, trainer.loss_scale, shown)
            if speed:
                log.info("Epoch[%d] Batch [%d]\tSpeed: %f samples/sec\taccuracy=%f\tlr=%f%s",
                         epoch, i, speed, metric.get()[1], trainer.learning_rate,
                         scale_text(trainer))
        seconds = time.time() - start
        if ranks.workers > 1:
            trainer.check_ranks()
            average_statistics(trainer)
        accuracy, speed = metric.get()[1], len(loader) * images_per_step / seconds
        top1, top5, validation_loss = validate(net, val_loader, devices, loss_fn)
        log.info("[Epoch %d] training: accuracy=%f", epoch, accuracy)
        log.info("[Epoch %d] speed: %d samples/sec\ttime cost: %f", epoch, speed, seconds)
        log.info("[Epoch %d] validation: err-top1=%f err-top5=%f%s", epoch, top1, top5,
                 scale_text(trainer))
        record.epoch(accuracy=accuracy, err_top1=top1, err_top5=top5, seconds=seconds,
                     validation_loss=validation_loss, samples_per_second=speed)
        if args.benchmark:
            log.info("%.1f samples/s, peak memory %.0f MB", speed, peak_megabytes(devices))
        folder.save(net, trainer, epoch, record)
    record.close()
    return [line for line in record.lines if "batch" not in line]


def main(arguments=None):
    return train(parse(arguments), network)


if __name__ == "__main__":
    recipes.run(main)
