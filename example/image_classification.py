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
from gluon_amp.reports import Log
from gluon_amp.training.resume import Position
from mxnet import autograd, gluon

log = logging.getLogger("image_classification")
POLICIES = ("float32", "float16", "mixed_float16", "pure_float16", "bfloat16", "mixed_bfloat16",
            "tf32", "O0", "O1", "O2", "O3")


# ---- flags; second names are from GluonCV's scripts

def add_network_flags(parser):
    """Adds the flags that select a network; fine_tune.py has its own."""
    recipes.add_flags(parser, "network", (
        ("--model", str, "small", "small, or a network of MXNet's or gluoncv's model zoo"),
        ("--use-pretrained", bool, False, "load the model zoo's parameters"),
        ("--batch-norm", bool, False, "use the VGG variant with batch norms"),
        ("--last-gamma", bool, False, "residual blocks begin as identities (gluoncv)")))


def add_flags(parser, folder="runs/image_classification"):
    images.add_image_flags(parser)
    recipes.add_training_flags(parser)
    recipes.add_flags(parser, "precision and regularization", (
        ("--dtype", ("float32", "float16", "bfloat16"), "float32", "type; bfloat16: CPUs only"),
        ("--policy", POLICIES, None, "policy of gluon_amp.convert, in place of --dtype"),
        ("--mode", ("hybrid", "imperative"), "hybrid", "execution mode of the network"),
        ("--no-wd", bool, False, "no weight decay for biases and batch norms' parameters"),
        ("--label-smoothing", recipes.fraction, 0, "amount of label smoothing; 0.1 for the flag "
         "without a number", {"nargs": "?", "const": 0.1}),
        ("--mixup", bool, False, "train on weighted sums of two images and of their labels"),
        ("--mixup-alpha", recipes.positive_float, 0.2,
         "parameter of the weights' beta distribution"),
        ("--mixup-off-epoch", recipes.non_negative_int, 0, "number of last epochs without mixup"),
        ("--teacher", str, None, "also train on this network's outputs (distillation)"),
        ("--teacher-params", str, None, "parameters of the teacher (default: the model zoo's)"),
        ("--temperature", recipes.positive_float, 20.0, "divisor of both networks' logits"),
        ("--hard-weight", recipes.fraction, 0.5,
         "weight of the labels' loss; the rest: teacher's")))
    recipes.add_flags(parser, "output and resuming", (
        ("--benchmark", bool, False, "train on random images, and print samples/s and memory"),
        ("--logging-file", str, None, "write the log to this file, too"),
        ("--save-dir", str, folder, "folder for all files of the run"),
        ("--save-period --save-frequency", recipes.positive_int, None, "epochs between kept files"),
        ("--resume", bool, False, "resume from the last epoch in --save-dir, if there is one"),
        ("--resume-params", str, None, "start with this file of parameters"),
        ("--resume-states", str, None, "start with this file of states of the Trainer"),
        ("--resume-epoch", recipes.non_negative_int, 0, "start with this epoch, counted from 0")))


# ---- network, Trainer and loss

def network(args, devices):
    """Returns an initialized classifier."""
    options = {flag: True for flag in ("batch_norm", "last_gamma") if getattr(args, flag)}
    if args.use_pretrained:
        return images.zoo_network(args.model, pretrained=True, ctx=devices, **options)
    net = images.zoo_network(args.model, classes=images.classes_of(args), **options)
    net.initialize(mx.init.MSRAPrelu(), ctx=devices)
    return net


def converted(args, net):
    """Converts to the precision of the flags; hybridizes first, because float16 runs as a graph."""
    if args.mode == "hybrid":
        net.hybridize(static_alloc=True, static_shape=True)
    return amp.convert(net, args.policy or args.dtype)


def teacher_of(args, devices):
    """Returns the network of --teacher."""
    if not args.teacher_params:
        return converted(args, images.zoo_network(args.teacher, pretrained=True, ctx=devices))
    net = images.zoo_network(args.teacher, classes=images.classes_of(args))
    net.load_parameters(args.teacher_params, ctx=devices)
    return converted(args, net)


def trainer_of(args, net, kvstore="device", **schedule):
    options = {"learning_rate": args.lr, "wd": args.wd, **schedule,
               **recipes.momentum_of(args.optimizer, args.momentum)}
    if args.no_wd:
        net.collect_params(".*beta|.*gamma|.*bias").setattr("wd_mult", 0.0)
    return amp.Trainer(net.collect_params(), args.optimizer, options, kvstore,
                       loss_scale=args.loss_scale)


def loss_of(args):
    """Softmax cross entropy in float32, with label smoothing and a teacher if the flags say so."""
    smooth, classes = args.label_smoothing, images.classes_of(args)
    temperature, teacher_weight = args.temperature, 1 - args.hard_weight
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)

    def loss_fn(out, label, teacher_out=None):
        out = out.astype("float32")  # under pure_float16 the network returns float16
        label = label.one_hot(classes) if label.ndim == 1 else label
        loss = cross_entropy(out, label * (1 - smooth) + smooth / classes)
        if teacher_out is None:
            return loss
        if teacher_out.shape != out.shape:
            raise ValueError(f"--teacher {args.teacher} has {teacher_out.shape[1]} classes, and "
                             f"the network {out.shape[1]}")
        teacher_probabilities = (teacher_out.astype("float32") / temperature).softmax()
        distillation = temperature ** 2 * cross_entropy(out / temperature, teacher_probabilities)
        return (1 - teacher_weight) * loss + teacher_weight * distillation
    return loss_fn


# ---- training

def mixup(args, data, label):
    """Returns weighted sums of two images and of their labels."""
    share = np.random.beta(args.mixup_alpha, args.mixup_alpha)
    label = label.one_hot(images.classes_of(args))
    return share * data + (1 - share) * data[::-1], share * label + (1 - share) * label[::-1]


def validate(net, loader, devices, loss_fn):
    """Returns top-1 and top-5 errors, and the loss."""
    top1, top5, count, loss = 0, 0, 0, 0.0
    for batch in loader:
        parts = (gluon.utils.split_and_load(x, devices[:len(x)], even_split=False) for x in batch)
        for data, label in zip(*parts):
            out = net(data)
            predicted = out.topk(k=min(5, out.shape[1]), axis=1).asnumpy()
            correct = predicted == label.asnumpy()[:, None]
            top1, top5 = top1 + correct[:, 0].sum(), top5 + correct.sum()
            count += len(correct)
            loss += float(loss_fn(out, label).sum().asscalar())
    return 1 - top1 / count, 1 - top5 / count, loss / count


def resume(args, net, trainer, steps):
    """Loads the checkpoint of --save-dir, or what --resume-params and the like say.

    Returns the position in the training: `steps` are those of an epoch.
    """
    schedule = trainer.optimizer.lr_scheduler  # may have more epochs than the checkpoint's
    if not args.benchmark and os.path.exists(os.path.join(args.save_dir, "checkpoint.json")):
        if not args.resume:
            raise ValueError(f"{args.save_dir} has a run: pass --resume to continue it, or "
                             "another --save-dir")
        recipes.check_flags(os.path.join(args.save_dir, "log.jsonl"), args)
        position = amp.load_checkpoint(args.save_dir, net, trainer)
        if position.epoch >= args.epochs:
            log.info("no epochs are left to train; --epochs above %d continues", args.epochs)
    else:
        if args.resume:
            log.info("nothing to resume in %s", args.save_dir)
        if args.resume_epoch >= args.epochs:
            raise ValueError(f"--resume-epoch {args.resume_epoch} leaves none of the {args.epochs} "
                             "epochs to train: --epochs includes earlier epochs")
        position = Position(args.resume_epoch)
        if args.resume_params:
            net.load_parameters(args.resume_params)
        if args.resume_states:
            trainer.load_states(args.resume_states)
        else:
            trainer.optimizer.begin_num_update = trainer.optimizer.num_update = \
                args.resume_epoch * steps
    trainer.optimizer.lr_scheduler = schedule
    return position


def save(args, net, trainer, position, record):
    """Saves a checkpoint for --resume. Rank 0 also saves the best parameters, and parameters and
    states of each --save-period epochs and of the last, under GluonCV's names."""
    name = os.path.join(args.save_dir, f"epoch-{position.epoch - 1}")
    if trainer.rank == 0:
        errors = [line["err_top1"] for line in record.lines if line.get("err_top1") is not None]
        if errors and errors[-1] == min(errors):
            net.save_parameters(os.path.join(args.save_dir, "best.params"))
        if position.epoch == args.epochs or position.epoch % (args.save_period or args.epochs) == 0:
            net.save_parameters(f"{name}.params")
            trainer.save_states(f"{name}.states")
    amp.save_checkpoint(args.save_dir, net, trainer, position, record)


def train(args, make_network, validates_first=False):
    """Trains the network that `make_network(args, devices)` returns. Returns the epochs' lines of
    log.jsonl."""
    workers = recipes.Workers(args)
    devices, images_per_step = workers.devices, args.batch_size * workers.count
    if workers.rank == 0 and not args.benchmark:
        os.makedirs(args.save_dir, exist_ok=True)
    if args.logging_file and workers.rank == 0:
        logging.getLogger().addHandler(logging.FileHandler(args.logging_file))
    order, loader, val_loader = images.image_loaders(args, workers)
    log.info("%s", args)
    recipes.seed_all(args.seed)

    # The network, converted before its Trainer is created, and the loss
    net = converted(args, make_network(args, devices))
    out = net(next(iter(val_loader))[0][:1].as_in_context(devices[0]))  # allocates all parameters
    if out.shape[1] != images.classes_of(args):
        raise ValueError(f"{args.model} has {out.shape[1]} classes, and the data "
                         f"{images.classes_of(args)}: fine_tune.py replaces the head")
    teacher, loss_fn = args.teacher and teacher_of(args, devices), loss_of(args)
    if validates_first:
        log.info("before: err-top1=%f err-top5=%f",
                 *validate(net, val_loader, devices, loss_fn)[:2])

    # The Trainer, which scales the loss, and the position of a resumed run
    schedule = recipes.schedule(args, len(loader))
    trainer = trainer_of(args, net, workers.store, lr_scheduler=schedule)
    position = resume(args, net, trainer, len(loader))
    record = Log(None if args.benchmark else os.path.join(args.save_dir, "log.jsonl"), args,
                 interval=args.log_interval, tensorboard=args.tensorboard, begin=position,
                 rank=workers.rank)

    for epoch in range(position.epoch, args.epochs):
        order.epoch = epoch
        if args.xray and workers.rank == 0:
            recipes.xray_epoch(args, epoch, net, loader, loss_fn)
        recipes.seed_all(args.seed + 1 + epoch + 1_000_000 * workers.rank)  # dropout, augmentation
        uses_mixup = args.mixup and epoch < args.epochs - args.mixup_off_epoch
        metric, start = mx.metric.Accuracy(), time.time()
        tic = start
        for i, (data, label) in enumerate(position.batches(loader)):
            images.check_labels(args, label)
            data, target = mixup(args, data, label) if uses_mixup else (data, label)
            datas, labels, targets = (gluon.utils.split_and_load(x, devices, even_split=False)
                                      for x in (data, label, target))
            teacher_outs = [teacher(x) if teacher else None for x in datas]
            with autograd.record():
                outputs = [net(x) for x in datas]
                losses = [loss_fn(*each) for each in zip(outputs, targets, teacher_outs)]
            trainer.backward(losses)
            trainer.step(images_per_step)

            metric.update(labels, outputs)
            scale = f"\tloss-scale={trainer.loss_scale:g}\tskipped={trainer.skipped}"
            if record.step(trainer, losses, images_per_step):
                log.info("Epoch[%d] Batch [%d]\tSpeed: %f samples/sec\taccuracy=%f\tlr=%f%s",
                         epoch, i, images_per_step * args.log_interval / (time.time() - tic),
                         metric.get()[1], trainer.learning_rate, scale)
                tic = time.time()
        seconds = time.time() - start
        if workers.count > 1:
            trainer.check_ranks()
            average_statistics(trainer)
        accuracy, speed = metric.get()[1], len(loader) * images_per_step / seconds
        top1, top5, validation_loss = validate(net, val_loader, devices, loss_fn)
        log.info("[Epoch %d] training: accuracy=%f", epoch, accuracy)
        log.info("[Epoch %d] speed: %d samples/sec\ttime cost: %f", epoch, speed, seconds)
        log.info("[Epoch %d] validation: err-top1=%f err-top5=%f%s", epoch, top1, top5, scale)
        record.epoch(accuracy=accuracy, err_top1=top1, err_top5=top5, seconds=seconds,
                     validation_loss=validation_loss, samples_per_second=speed)
        if args.benchmark:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            log.info("%.1f samples/s, peak memory of the process %.0f MB", speed, memory)
        else:
            save(args, net, trainer, position, record)
    record.close()
    return [line for line in record.lines if "batch" not in line]


def main(arguments=None):
    parser = recipes.Parser(__doc__)
    add_network_flags(parser)
    add_flags(parser)
    return train(parser.parse_args(arguments), network)


if __name__ == "__main__":
    recipes.run(main)
