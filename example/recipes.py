"""What the training scripts do alike: learning rates, workers, checkpoints, and X-rays."""
import json
import logging
import os
import random

import gluon_amp as amp  # before mxnet
import mxnet as mx
import numpy as np
from gluon_amp.reports import Log
from gluon_amp.training.resume import Position
from mxnet import gluon

# ---- devices, random numbers and learning rates

def devices_of(gpus):
    """Returns the GPUs with these numbers; without numbers the CPU."""
    if gpus and max(gpus) >= mx.context.num_gpus():
        raise ValueError(f"--gpus {max(gpus)}: MXNet finds {mx.context.num_gpus()} GPUs")
    return [mx.gpu(i) for i in gpus] or [mx.cpu()]


def seed_all(seed):
    """Seeds the random numbers of MXNet, numpy and Python."""
    mx.random.seed(seed)
    np.random.seed(seed % 2 ** 32)
    random.seed(seed)


def optimizer_options(args):
    """Returns the optimizer's learning rate, its weight decay, and its momentum if it has one."""
    options = {"learning_rate": args.lr, "wd": args.wd}
    if hasattr(amp.optimizer(args.optimizer), "momentum"):
        options["momentum"] = args.momentum
    return options


def lr_schedule(args, steps_per_epoch):
    """Returns the schedule of the learning rate."""
    warmup_steps = int(args.warmup_epochs * steps_per_epoch)
    warmup = {"warmup_steps": warmup_steps, "warmup_begin_lr": args.warmup_lr,
              "warmup_mode": args.warmup_strategy}
    mode = args.lr_mode or ("step" if args.lr_decay_epoch else "cosine")
    if mode == "step":
        never = 1 << 60
        decays = [int(epoch * steps_per_epoch) for epoch in args.lr_decay_epoch] or [never]
        return mx.lr_scheduler.MultiFactorScheduler(decays, args.lr_decay, args.lr, **warmup)
    if args.lr_decay_epoch:
        raise ValueError("--lr-decay-epoch is for --lr-mode step. Received: --lr-mode cosine, "
                         "which needs --lr-decay-epoch ''")
    if warmup_steps >= args.epochs * steps_per_epoch:
        raise ValueError("no epochs are left to the cosine: --warmup-epochs must be below the "
                         f"{args.epochs} epochs of the training. Received: {args.warmup_epochs:g}")
    return mx.lr_scheduler.CosineScheduler(args.epochs * steps_per_epoch, args.lr, **warmup)


# ---- several processes that train one network

class Workers:
    """The processes that train one network.

    Attributes:
        count, rank: the number of processes, and that of this one. Rank 0 logs and saves.
        devices: the devices of this process.
        store: the `kvstore=` of a Trainer or Module, which sums gradients over the processes.
    """

    def __init__(self, args):
        self.store, self.rank, self.count, gpus = args.kvstore, 0, 1, args.gpus
        if args.kvstore not in ("local", "device"):
            if args.kvstore != "horovod" and "DMLC_PS_ROOT_URI" not in os.environ:
                raise ValueError(f"--kvstore {args.kvstore} needs a scheduler and servers: start "
                                 "the script as gluon-amp launch -n 2 python ...")
            self.store = mx.kv.create(args.kvstore)
            self.rank, self.count = self.store.rank, self.store.num_workers
        if gpus and args.kvstore == "horovod":
            import horovod.mxnet as hvd
            if hvd.local_size() > len(gpus):
                raise ValueError(f"--gpus: Horovod runs {hvd.local_size()} processes here, and "
                                 f"each needs a GPU. Received: {','.join(map(str, gpus))}")
            gpus = [gpus[hvd.local_rank()]]
        self.devices = devices_of(gpus)


def log_to_stderr(rank, log_format="%(message)s"):
    """Logs to stderr; only errors if the rank is not 0."""
    logging.basicConfig(format=log_format, level="ERROR" if rank else "INFO", force=True)


class WorkerSampler(gluon.data.Sampler):
    """The numbers of a worker's examples: an equal part, in another order for each `epoch`."""

    def __init__(self, length, seed, workers):
        self.length, self.seed, self.workers, self.epoch = length, seed, workers, 0

    def __iter__(self):
        order = np.random.RandomState([self.seed, self.epoch]).permutation(self.length)
        return iter(order[:len(self) * self.workers.count][self.workers.rank::self.workers.count])

    def __len__(self):
        return self.length // self.workers.count


# ---- checkpoints

# Flags that may change when a run is resumed
MAY_DIFFER = ("resume", "save_dir", "log_interval", "num_workers", "gpus", "data_dir",
              "tensorboard", "claim_speed", "logging_file", "save_period", "kvstore", "xray",
              "xray_steps", "teacher_params")


def check_same_flags(path, args, may_differ=MAY_DIFFER):
    """Refuses flags of a resumed run that differ from those in the log of the original run. Only a
    run that has ended may get more epochs."""
    before, lines = Log.read(path)
    now = json.loads(json.dumps(vars(args)))
    completed = max((line["epoch"] + 1 for line in lines if "batch" not in line), default=0)
    if before.get("epochs") == completed < now.get("epochs", 0):
        logging.info("completed epochs: %d; remaining: %d, with the schedule of %d epochs",
                     completed, now["epochs"] - completed, now["epochs"])
        may_differ = (*may_differ, "epochs")
    differ = [f"{name} was {before.get(name, 'unset')}, is {now.get(name, 'unset')}"
              for name in {**before, **now} if name not in may_differ
              and before.get(name) != now.get(name)]
    if differ:
        raise ValueError(f"--resume needs the flags of the original run: {'; '.join(differ)}")


def resume(args, net, trainer, steps_per_epoch):
    """Loads --save-dir's checkpoint, or the --resume-* files. Returns the position in training."""
    schedule = trainer.optimizer.lr_scheduler  # may have more epochs than the checkpoint's
    if not args.benchmark and os.path.exists(os.path.join(args.save_dir, "checkpoint.json")):
        if not args.resume:
            raise ValueError(f"{args.save_dir} has a run: pass --resume to continue it, or "
                             "another --save-dir")
        check_same_flags(os.path.join(args.save_dir, "log.jsonl"), args)
        position = amp.load_checkpoint(args.save_dir, net, trainer)
        if position.epoch >= args.epochs:
            logging.info("no epochs are left to train; --epochs above %d continues", args.epochs)
    else:
        if args.resume:
            logging.info("nothing to resume in %s", args.save_dir)
        if args.resume_epoch >= args.epochs:
            raise ValueError(f"--resume-epoch {args.resume_epoch} leaves none of the {args.epochs} "
                             "epochs to train: --epochs includes earlier epochs")
        position = Position(args.resume_epoch)
        if args.resume_params:
            net.load_parameters(args.resume_params)
        if args.resume_states:
            trainer.load_states(args.resume_states)
        else:
            completed_steps = args.resume_epoch * steps_per_epoch
            trainer.optimizer.begin_num_update = trainer.optimizer.num_update = completed_steps
    trainer.optimizer.lr_scheduler = schedule
    return position


def save(args, net, trainer, position, record):
    """Saves a checkpoint for --resume, and under GluonCV's names the best parameters, and those of
    each --save-period epochs and of the last."""
    name = os.path.join(args.save_dir, f"epoch-{position.epoch - 1}")
    if trainer.rank == 0:
        errors = [line["err_top1"] for line in record.lines if line.get("err_top1") is not None]
        if errors and errors[-1] == min(errors):
            net.save_parameters(os.path.join(args.save_dir, "best.params"))
        if position.epoch == args.epochs or position.epoch % (args.save_period or args.epochs) == 0:
            net.save_parameters(f"{name}.params")
            trainer.save_states(f"{name}.states")
    amp.save_checkpoint(args.save_dir, net, trainer, position, record)


# ---- X-rays

def xray_epoch(args, epoch, net, batches, loss_fn=None):
    """X-rays the network with an epoch's first batches, on copies: the training is the same."""
    folder = os.path.join(args.xray, f"epoch-{epoch}")
    if os.path.exists(folder):  # of a run that was resumed
        return
    view = amp.xray(net, batches, loss_fn, steps=args.xray_steps)
    logging.info("X-ray of epoch %d: %s\n%s", epoch, view.save(folder), view)
