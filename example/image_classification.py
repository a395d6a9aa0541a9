"""Trains an image classifier with Gluon, in float32 or float16.

    python image_classification.py --dataset digits --dtype float16
    python image_classification.py --dataset cifar10 --model cifar_resnet20_v1 --dtype float16 \\
        --batch-size 128 --epochs 60 --lr-mode cosine --warmup-epochs 2 --gpus 0

For a network of your own change `make_network`, for other data `image_loaders` in images.py. Log
lines have GluonCV's format; docs/recipes.md describes SAVE_DIR/log.jsonl. After an interruption,
--resume continues from the last complete epoch, bit for bit with --num-workers 0.
"""
import logging
import os
import resource
import time

import command_line as cli
import gluon_amp as amp  # before mxnet
import images
import mxnet as mx
import numpy as np
import recipes
from gluon_amp.parallel import average_statistics
from gluon_amp.reports import Log
from model_zoo import zoo_network
from mxnet import autograd, gluon


def add_network_flags(parser):
    """Adds the flags that select a network; fine_tune.py has others."""
    flag = parser.add_argument_group("network").add_argument
    flag("--model", default="small", help="small, or a network of MXNet's or gluoncv's model zoo")
    flag("--use-pretrained", action="store_true", help="load the model zoo's parameters")
    flag("--batch-norm", action="store_true", help="use the VGG variant with batch norms")
    flag("--last-gamma", action="store_true", help="residual blocks begin as identities (gluoncv)")


def add_flags(parser, save_dir="runs/image_classification"):
    """Adds the other flags; second names are from GluonCV's scripts."""
    crop_ratio = cli.flag_type(float, lambda x: 0 < x <= 1, "must be above 0, and at most 1")
    flag = parser.add_argument_group("data").add_argument
    flag("--dataset", "--rec-train", default="digits", help=images.DATASETS)
    flag("--val", "--rec-val", help="validation data, if the dataset is a folder or a .rec")
    flag("--use-rec", action="store_true", help="require that the dataset is a .rec")
    flag("--rec-train-idx", help="index of a .rec dataset, which must be next to it")
    flag("--rec-val-idx", help="index of the validation data")
    flag("--data-dir", help="folder of the dataset (default: MXNet's)")
    flag("--examples", type=cli.positive_int, help="number of training images (default: all)")
    flag("--classes", "--num-classes", type=cli.positive_int,
         help="number of classes (default: the dataset's or the folder's; 10 for a .rec)")
    flag("--image-size", "--input-size", type=cli.positive_int,
         help="height and width (default: the dataset's; 224 for a folder or a .rec)")
    flag("--crop-ratio", type=crop_ratio, default=1.0,
         help="share of each side that the center crop of validation keeps")
    flag("--random-crop", action="store_true", help="random crops of that share in training "
         "(default: 40 to 100 %% of the area; whole images up to 32 pixels)")
    flag("--num-workers", "--num-data-workers", "-j", type=cli.non_negative_int, default=0,
         help="processes that load images")
    flag("--rgb-mean", type=cli.channel_means, default=[114.75],
         help="mean of pixels from 0 to 255, one number or three")
    flag("--rgb-std", type=cli.channel_deviations, default=[63.75], help="standard deviation")
    cli.add_training_flags(parser)
    flag = parser.add_argument_group("precision and regularization").add_argument
    flag("--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
         help="type of the network; bfloat16: CPUs only")
    flag("--policy", help="policy of gluon_amp.convert, in place of --dtype")
    flag("--mode", choices=("hybrid", "imperative"), default="hybrid",
         help="run a float32 network as a graph, or not")
    flag("--no-wd", action="store_true", help="no weight decay for biases and batch norms")
    flag("--label-smoothing", type=cli.fraction, default=0, nargs="?", const=0.1,
         help="amount of label smoothing; 0.1 for the flag without a number")
    flag("--mixup", action="store_true", help="train on weighted sums of two images and labels")
    flag("--mixup-alpha", type=cli.positive_float, default=0.2, help="of mixup's beta distribution")
    flag("--mixup-off-epoch", type=cli.non_negative_int, default=0, help="last epochs without it")
    flag("--teacher", help="also train on this network's outputs (distillation)")
    flag("--teacher-params", help="parameters of the teacher (default: the model zoo's)")
    flag("--temperature", type=cli.positive_float, default=20.0, help="divisor of logits (teacher)")
    flag("--hard-weight", type=cli.fraction, default=0.5, help="share of the labels (teacher)")
    flag = parser.add_argument_group("output and resuming").add_argument
    flag("--benchmark", action="store_true", help="random images; prints samples/s and memory")
    flag("--logging-file", help="write the log to this file, too")
    flag("--save-dir", default=save_dir, help="folder for all files of the run")
    flag("--save-period", "--save-frequency", type=cli.positive_int,
         help="keep the files of each Nth epoch, besides those of the last one")
    flag("--resume", action="store_true", help="continue the run in --save-dir, if there is one")
    flag("--resume-params", help="start with this file of parameters")
    flag("--resume-states", help="start with this file of states of the Trainer")
    flag("--resume-epoch", type=cli.non_negative_int, default=0, help="start with this epoch")


# ---- network, Trainer and loss

def make_network(args, devices):
    """Returns an initialized classifier."""
    options = {name: True for name in ("batch_norm", "last_gamma") if getattr(args, name)}
    if args.use_pretrained:
        return zoo_network(args.model, pretrained=True, ctx=devices, **options)
    net = zoo_network(args.model, classes=images.number_of_classes(args), **options)
    net.initialize(mx.init.MSRAPrelu(), ctx=devices)
    return net


def make_teacher(args, devices):
    """Returns the network of --teacher."""
    if not args.teacher_params:
        return convert(args, zoo_network(args.teacher, pretrained=True, ctx=devices))
    net = zoo_network(args.teacher, classes=images.number_of_classes(args))
    net.load_parameters(args.teacher_params, ctx=devices)
    return convert(args, net)


def convert(args, net):
    """Converts a network to the type of the flags. In 16 bits it runs as a graph in each --mode."""
    if args.mode == "hybrid":
        net.hybridize(static_alloc=True, static_shape=True)
    return amp.convert(net, args.policy or args.dtype)


def make_trainer(args, net, kvstore="device", **schedule):
    """Returns the Trainer, which scales gradients and updates float32 copies of 16-bit weights."""
    if args.no_wd:
        net.collect_params(".*beta|.*gamma|.*bias").setattr("wd_mult", 0.0)
    options = {**recipes.optimizer_options(args), **schedule}
    return amp.Trainer(net.collect_params(), args.optimizer, options, kvstore,
                       loss_scale=args.loss_scale)


def make_loss(args):
    """Returns the loss: cross entropy, and distillation if it gets a teacher's outputs."""
    classes, smoothing = images.number_of_classes(args), args.label_smoothing
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)

    def loss_fn(out, label, teacher_out=None):
        out = out.astype("float32")  # under pure_float16 the network returns float16
        label = label.one_hot(classes) if label.ndim == 1 else label
        loss = cross_entropy(out, label * (1 - smoothing) + smoothing / classes)
        if teacher_out is None:
            return loss
        if teacher_out.shape != out.shape:
            raise ValueError(f"--teacher {args.teacher} has {teacher_out.shape[1]} classes, and "
                             f"the network {out.shape[1]}")
        probabilities = (teacher_out.astype("float32") / args.temperature).softmax()
        distillation = args.temperature ** 2 * cross_entropy(out / args.temperature, probabilities)
        return args.hard_weight * loss + (1 - args.hard_weight) * distillation
    return loss_fn


def mixup(args, data, label):
    """Returns weighted sums of two images and of their labels."""
    share = np.random.beta(args.mixup_alpha, args.mixup_alpha)
    label = label.one_hot(images.number_of_classes(args))
    return share * data + (1 - share) * data[::-1], share * label + (1 - share) * label[::-1]


# ---- training

def prepare(args):
    """Returns the workers, and what `images.image_loaders` returns. Seeds random numbers."""
    workers = recipes.Workers(args)
    recipes.log_to_stderr(workers.rank)
    if workers.rank == 0 and not args.benchmark:
        os.makedirs(args.save_dir, exist_ok=True)
    if workers.rank == 0 and args.logging_file:
        logging.getLogger().addHandler(logging.FileHandler(args.logging_file))
    loaders = images.image_loaders(args, workers)
    logging.info("%s", args)
    recipes.seed_all(args.seed)
    return workers, loaders


def train(args, workers, loaders, net):
    """Trains a converted network."""
    sampler, loader, val_loader = loaders
    devices, images_per_step = workers.devices, args.batch_size * workers.count
    teacher = make_teacher(args, devices) if args.teacher else None
    loss_fn = make_loss(args)
    trainer = make_trainer(args, net, workers.store,
                           lr_scheduler=recipes.lr_schedule(args, len(loader)))
    position = recipes.resume(args, net, trainer, len(loader))
    record = Log(None if args.benchmark else os.path.join(args.save_dir, "log.jsonl"), args,
                 interval=args.log_interval, tensorboard=args.tensorboard, begin=position,
                 rank=workers.rank)

    for epoch in range(position.epoch, args.epochs):
        sampler.epoch = epoch  # another order of the images
        if args.xray and workers.rank == 0:
            recipes.xray_epoch(args, epoch, net, loader, loss_fn)
        # Dropout and augmentation do not depend on earlier epochs, which a resumed run lacks
        recipes.seed_all(args.seed + 1 + epoch + 1_000_000 * workers.rank)
        mixes = args.mixup and epoch < args.epochs - args.mixup_off_epoch
        metric, start = mx.metric.Accuracy(), time.time()
        last_log = start
        for batch, (data, label) in enumerate(position.batches(loader)):
            data, target = mixup(args, data, label) if mixes else (data, label)
            data_parts, label_parts, target_parts = (
                gluon.utils.split_and_load(x, devices, even_split=False)
                for x in (data, label, target))  # a part for each GPU
            teacher_outs = [teacher(x) if teacher else None for x in data_parts]
            with autograd.record():
                outputs = [net(x) for x in data_parts]
                losses = [loss_fn(*each) for each in zip(outputs, target_parts, teacher_outs)]
            # Multiplies gradients by the loss scale, so that small ones do not become 0 in float16
            trainer.backward(losses)
            # Unscales the gradients. If one overflowed, skips the update and lowers the scale
            trainer.step(images_per_step)
            metric.update(label_parts, outputs)
            if record.step(trainer, losses, images_per_step):
                speed = images_per_step * args.log_interval / (time.time() - last_log)
                logging.info("Epoch[%d] Batch [%d]\tSpeed: %f samples/sec\taccuracy=%f\tlr=%f"
                             "\tloss-scale=%g\tskipped=%d", epoch, batch, speed, metric.get()[1],
                             trainer.learning_rate, trainer.loss_scale, trainer.skipped)
                last_log = time.time()
        seconds = time.time() - start
        average_statistics(trainer)  # of batch norms, over all devices of all workers
        top1_error, top5_error, validation_loss = images.validate(net, val_loader, devices, loss_fn)
        accuracy, speed = metric.get()[1], len(loader) * images_per_step / seconds
        logging.info("[Epoch %d] training: accuracy=%f", epoch, accuracy)
        logging.info("[Epoch %d] speed: %d samples/sec\ttime cost: %f", epoch, speed, seconds)
        logging.info("[Epoch %d] validation: err-top1=%f err-top5=%f\tloss-scale=%g\tskipped=%d",
                     epoch, top1_error, top5_error, trainer.loss_scale, trainer.skipped)
        record.epoch(accuracy=accuracy, err_top1=top1_error, err_top5=top5_error, seconds=seconds,
                     validation_loss=validation_loss, samples_per_second=speed)
        if args.benchmark:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            logging.info("%.1f samples/s, peak memory of the process %.0f MB", speed, memory)
        else:
            recipes.save(args, net, trainer, position, record)
    record.close()


def main(arguments=None):
    """Trains with the flags."""
    parser = cli.Parser(__doc__)
    add_network_flags(parser)
    add_flags(parser)
    args = parser.parse_args(arguments)
    workers, loaders = prepare(args)

    # Convert before the Trainer is created, which keeps float32 copies of 16-bit weights: updates
    # are often too small for float16
    net = convert(args, make_network(args, workers.devices))
    data, _ = next(iter(loaders[-1]))
    out = net(data[:1].as_in_context(workers.devices[0]))  # allocates all parameters
    if out.shape[1] != images.number_of_classes(args):
        raise ValueError(f"{args.model} has {out.shape[1]} classes, and the data "
                         f"{images.number_of_classes(args)}: fine_tune.py replaces the head")
    train(args, workers, loaders, net)


if __name__ == "__main__":
    cli.run(main)
