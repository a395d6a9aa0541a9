"""Trains an image classifier with Gluon, in float32 or float16.

    python image_classification.py --dataset digits --dtype float16
    python image_classification.py --dataset cifar10 --model cifar_resnet20_v1 --dtype float16 \\
        --batch-size 128 --epochs 60 --lr-mode cosine --warmup-epochs 2 --gpus 0
    python image_classification.py --dataset train.rec --val test.rec --model resnet18_v1

Log lines are GluonCV's, with the loss scale and the skipped steps at their ends; SAVE_DIR/log.jsonl
(records.py says what is in it) holds more for machines. Killed at any moment, `--resume` goes on
behind the last whole epoch as if nothing had been: bit by bit, with --num-workers 0.
"""
import argparse
import functools
import json
import logging
import os
import random
import resource
import time

import gluon_amp as amp
import mxnet as mx
import numpy as np
import records
from command import Help, decimals, devices_of, numbers, positive, run
from gluon_amp._mxnet import message
from gluon_amp.files import replace_file
from gluon_amp.policy import APEX, POLICIES, get_policy
from gluon_amp.tools.tensor_cores import matrix_layers
from gluon_data import check_labels, classes_of, loaders
from mxnet import autograd, gluon
from mxnet.gluon import nn
from tqdm import tqdm

log = logging.getLogger("image_classification")
MAY_DIFFER = ("resume", "save_dir", "log_interval", "num_workers", "gpus", "data_dir",
              "tensorboard", "mlperf", "claim_speed")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add_arguments(parser)
    return parser.parse_args(arguments)


def loss_scale(text):
    if text in ("dynamic", "none"):
        return text if text == "dynamic" else None
    return amp.StaticLossScale(float(text)).scale


def add_arguments(parser):
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--dataset", default="digits",
        help="digits, cifar10, mnist, caltech101, imagenet, dummy, a folder of folders, or a .rec")
    add("--val", help="validation data, where the dataset is a folder or a .rec")
    add("--data-dir", help="where the dataset lies, if not in MXNet's own place")
    add("--examples", type=positive, help="how many training images to use, if not all")
    add("--model", default="small", help="small, or a name of MXNet's or gluoncv's model zoo")
    add("--classes", type=positive, help="if not the dataset's")
    add("--image-size", type=positive, help="if not the dataset's, or 224")
    add("--dtype", default="float32", choices=("float32", "float16"))
    add("--policy", choices=[*POLICIES, *APEX], help="of gluon_amp.convert, if not --dtype")
    add("--loss-scale", type=loss_scale, default="dynamic", help="dynamic, a number or none")
    add("--batch-size", type=positive, default=64)
    add("--epochs", type=positive, default=10)
    add("--lr", type=float, default=0.1)
    add("--lr-mode", default="cosine", choices=("step", "cosine"))
    add("--lr-decay-epoch", type=numbers, default=[], help="of step: such as 30,60, a tenth each")
    add("--warmup-epochs", type=float, default=0)
    add("--wd", type=float, default=1e-4)
    add("--momentum", type=float, default=0.9)
    add("--label-smoothing", type=float, default=0)
    add("--mode", default="hybrid", choices=("hybrid", "imperative"))
    add("--gpus", type=numbers, default=[], help="such as 0,1; none: the CPU")
    add("--num-workers", type=int, default=0, help="processes that load images")
    add("--save-dir", default="runs/image_classification")
    add("--resume", action="store_true", help="go on from the last epoch in --save-dir")
    add("--log-interval", type=positive, default=20)
    add("--seed", type=int, default=0)
    add("--mean", type=decimals, default=[0.45],
        help="of pixels from 0 to 1: one number, or one each channel")
    add("--std", type=decimals, default=[0.25])
    records.add_arguments(parser)
    add("--benchmark", action="store_true", help="random images; samples/s and peak memory")


# ---- network

def network(args):
    """The classifier, not initialized."""
    classes = classes_of(args)
    if args.model == "small":
        net = nn.HybridSequential()
        for channels, stride in ((32, 1), (64, 2), (128, 2)):
            net.add(nn.Conv2D(channels, 3, stride, 1, use_bias=False), nn.BatchNorm(),
                    nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(classes))
        return net
    try:
        return gluon.model_zoo.vision.get_model(args.model, classes=classes)
    except ValueError:
        pass
    try:
        from gluoncv.model_zoo import get_model
    except ImportError as error:
        raise SystemExit(f"MXNet's model zoo has no {args.model}, and gluoncv's cannot be imported "
                         f"({message(error)}): in the checkout, pip install '.[cpu,gluoncv]'") \
            from None
    try:
        return get_model(args.model, classes=classes)
    except ValueError:
        raise SystemExit(f"neither MXNet's nor gluoncv's model zoo has {args.model}") from None


def schedule(args, steps):
    total, warmup = args.epochs * steps, int(args.warmup_epochs * steps)
    if args.lr_mode == "cosine":
        return mx.lr_scheduler.CosineScheduler(total, args.lr, warmup_steps=warmup)
    decays = [epoch * steps for epoch in args.lr_decay_epoch]
    return mx.lr_scheduler.MultiFactorScheduler(decays or [total + 1], 0.1, args.lr,
                                                warmup_steps=warmup)


def trainer_of(args, net, **schedule):
    options = {"momentum": args.momentum, "wd": args.wd, **schedule}
    return amp.Trainer(net.collect_params(), "sgd", options, loss_scale=args.loss_scale,
                       enabled=get_policy(args.policy or args.dtype).name != "float32")


def loss_of(args):
    """Softmax cross entropy in float32, of smoothed labels if they are to be."""
    smooth, classes = args.label_smoothing, classes_of(args)
    loss = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=not smooth)

    def loss_fn(out, label):
        if smooth:
            label = label.one_hot(classes) * (1 - smooth) + smooth / classes
        return loss(out.astype("float32"), label)  # under pure_float16 the network's is float16
    return loss_fn


# ---- training

def train_epoch(args, net, trainer, loss_fn, loader, devices, epoch, record):
    """One pass; the training accuracy, the mean loss and the seconds."""
    metric, start, tic = mx.metric.Accuracy(), time.time(), time.time()
    total, count = 0.0, 0
    record.start_epoch(epoch)
    for i, (data, label) in enumerate(tqdm(loader, disable=None, leave=False)):
        check_labels(args, label)
        datas, labels = (gluon.utils.split_and_load(x, devices, even_split=False)
                         for x in (data, label))
        with autograd.record():
            outputs = [net(x) for x in datas]
            losses = [loss_fn(out, y) for out, y in zip(outputs, labels)]
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
    return records.norm([p.list_grad()[0] for p in net.collect_params().values()
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


def point_out(args, net, devices):
    """Says what keeps a GPU's Tensor Cores from their full speed."""
    shapes = {p.name: p.shape for p in net.collect_params().values()}
    slow = [f"{layer.name} {layer.sizes}" for layer in
            matrix_layers(net(mx.sym.var("data")), shapes) if not layer.fits]
    if slow:
        log.info("no multiples of 8, so off Tensor Cores or slower on them: %s", ", ".join(slow))
    if args.batch_size % (8 * len(devices)):
        log.info("so does a batch of %g for each GPU", args.batch_size / len(devices))
    if os.environ.get("MXNET_CUDNN_AUTOTUNE_DEFAULT") == "0":
        log.info("MXNET_CUDNN_AUTOTUNE_DEFAULT=0: cuDNN does not look for its fastest algorithms")


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
    write(os.path.join(folder, "last.json"), json.dumps({"epoch": epoch}))
    for old in (f"epoch-{epoch - 1}.params", f"epoch-{epoch - 1}.states"):
        if os.path.exists(os.path.join(folder, old)):
            os.remove(os.path.join(folder, old))


def write(path, text):
    def put(beside):
        with open(beside, "w") as file:
            file.write(text)
    replace_file(path, put)


def start(args):
    """Log, place and seeds; returns the devices. A run that is there is not written over."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    devices = devices_of(args.gpus)
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
        return 0, []
    if not os.path.exists(last):
        log.info("nothing to resume in %s", args.save_dir)
        return 0, []
    with open(last) as file:
        epoch = json.load(file)["epoch"]
    was, lines = records.read(os.path.join(args.save_dir, "log.jsonl"))
    now = json.loads(json.dumps(vars(args)))
    differ = [f"{name} was {was.get(name, 'not there')}, is {now.get(name, 'not there')}"
              for name in {**was, **now} if name not in MAY_DIFFER
              and was.get(name) != now.get(name)]
    if differ:
        raise SystemExit(f"--resume goes on with the run as it was begun: {'; '.join(differ)}")
    net.load_parameters(os.path.join(args.save_dir, f"epoch-{epoch}.params"))
    trainer.load_states(os.path.join(args.save_dir, f"epoch-{epoch}.states"))
    if epoch + 1 >= args.epochs:
        log.info("all %d epochs are done", args.epochs)
    return epoch + 1, [line for line in lines if line["epoch"] <= epoch]


def fit(args, net, order, loader, val_loader, devices):
    """Trains a converted network, from where --resume finds it."""
    trainer = trainer_of(args, net, lr_scheduler=schedule(args, len(loader)))
    loss_fn = loss_of(args)
    if args.gpus:
        point_out(args, net, devices)
    begin, lines = resume(args, net, trainer)
    path = None if args.benchmark else os.path.join(args.save_dir, "log.jsonl")
    record = records.Records(args, path, lines, begin * len(loader))
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
    net.initialize(mx.init.MSRAPrelu(), ctx=devices)
    amp.convert(net, args.policy or args.dtype)
    if args.mode == "hybrid":
        net.hybridize(static_alloc=True, static_shape=True)
    net(next(iter(val_loader))[0][:1].as_in_context(devices[0]))  # shapes of all parameters
    return fit(args, net, order, loader, val_loader, devices)


if __name__ == "__main__":
    run(main)
