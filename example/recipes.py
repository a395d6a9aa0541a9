"""What the training scripts share: flags, learning rates, workers, and the folder of a run."""
import argparse
import difflib
import inspect
import json
import logging
import math
import os
import random
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
from gluon_amp.parallel import Horovod
from gluon_amp.reports import Log
from mxnet import gluon

log = logging.getLogger("recipes")


# ---- the command line

class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints the description verbatim, and the defaults of flags that have one."""

    def _get_help_string(self, action):
        if "(default" in action.help or action.default in (False, None, "", []):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line, which suggest the names of mistyped flags."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)

    def error(self, message):
        flag = re.match(r"unrecognized arguments: ([^\s=]+)", message)
        choice = re.match(r"argument (\S+?)[/:].*invalid choice: '(.*?)'", message)
        if flag:
            message += did_you_mean(flag[1], self._option_string_actions)
        elif choice:
            message += did_you_mean(choice[2], self._option_string_actions[choice[1]].choices)
        self.exit(2, f"{self.prog}: error: {message} (--help shows more)\n")


def did_you_mean(name, names):
    """Returns a text such as ". Did you mean a or b?", or "" if no name is similar."""
    bare = {other.lstrip("-"): other for other in names}  # the dashes make all flags similar
    close = [bare[other] for other in difflib.get_close_matches(name.lstrip("-"), list(bare))]
    return f". Did you mean {' or '.join(close)}?" if close else ""


def run(main):
    """Runs a script's `main`; prints user errors in one line, without a traceback."""
    try:
        main()
    except (ValueError, AssertionError, OSError, ImportError, mx.MXNetError,
            amp.LossScaleError) as error:
        if os.environ.get("DEBUG"):
            raise
        raise SystemExit(f"{first_line(error)} (DEBUG=1 shows where)") from None


def first_line(error):
    """Returns the message of an error, without MXNet's traceback and source location."""
    lines = [line for line in str(error).splitlines()
             if line.strip() and not line.startswith(("Traceback", "  File"))]
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"^MXNetError: |\[[\d:]+\] \S+: ", "", text).rstrip(" .")


def must_exist(path):
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist")


def add_flags(parser, title, rows):
    """Adds a group of flags: rows of names, type, default, help and, for some, further options.
    The type `bool` is that of a flag without a value, and a tuple has the valid values."""
    group = parser.add_argument_group(title)
    for names, kind, default, text, *options in rows:
        type_of = {"action": "store_true"} if kind is bool else \
            {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        group.add_argument(*names.split(), default=default, help=text, **type_of,
                           **(options[0] if options else {}))


# ---- types of flags

def flag_type(parse, is_valid, valid):
    """Returns the `type=` of a flag: what `parse` returns for its text, if that is valid."""
    def parsed(text):
        try:
            value = parse(text)
            if is_valid(value):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{valid}. Received: {text!r}")
    return parsed


def list_of(number):
    return lambda text: [number(part) for part in text.split(",") if part]


positive_int = flag_type(int, lambda n: n >= 1, "must be an integer >= 1")
non_negative_int = flag_type(int, lambda n: n >= 0, "must be an integer >= 0")
seed = flag_type(int, lambda n: 0 <= n < 2**31, "must be an integer from 0 to 2147483647")
non_negative_float = flag_type(float, lambda x: 0 <= x < math.inf, "must be a finite number >= 0")
positive_float = flag_type(float, lambda x: 0 < x < math.inf, "must be a finite number > 0")
fraction = flag_type(float, lambda x: 0 <= x <= 1, "must be a number from 0 to 1")
numbers = flag_type(list_of(int), lambda values: min(values, default=0) >= 0,
                    "must be integers >= 0, such as 0,2")
decimals = flag_type(
    list_of(float), lambda values: len(values) in (1, 3) and all(map(math.isfinite, values)),
    "must be one finite number or three, such as 0.5 or 0.5,0.4,0.4")
new_file = flag_type(str, lambda path: not os.path.isdir(path) and os.path.isdir(
    os.path.dirname(os.path.realpath(path))), "must be a file in a folder that exists")
deviations = flag_type(decimals, lambda values: min(values) > 0, "must be above 0")
loss_scale = flag_type(
    lambda text: text if text in ("auto", "dynamic") else
    None if text == "none" else amp.StaticLossScale(float(text)).scale,
    lambda value: True, "takes auto, dynamic, none or a positive number")


# ---- flags and settings of several scripts

DISTRIBUTED = ("dist_sync", "dist_device_sync", "horovod")


def add_device_flags(parser):
    """Adds `--loss-scale`, `--seed`, `--gpus 0,1`, and GluonCV's equivalent `--num-gpus 2`."""
    add_flags(parser, "devices and numbers", (
        ("--loss-scale", loss_scale, "auto", "loss scale: auto, dynamic, a number or none"),
        ("--seed", seed, 0, "seed of all random numbers"),
        ("--gpus", numbers, [], "GPUs to use, such as 0 or 0,2,5 (default: the CPU)"),
        ("--num-gpus", lambda text: list(range(non_negative_int(text))), argparse.SUPPRESS,
         "use the first N GPUs", {"dest": "gpus", "metavar": "N"})))


def add_training_flags(parser):
    """Adds the flags of scripts that count epochs, under MXNet's and GluonCV's names."""
    add_device_flags(parser)
    add_flags(parser, "training", (
        ("--batch-size", positive_int, 64, "batch size of a process, over all its GPUs"),
        ("--epochs --num-epochs", positive_int, 10,
         "epochs; more with --resume extend a finished run"),
        ("--optimizer", str, "sgd", "an optimizer of MXNet, or adamw"),
        ("--momentum --mom", fraction, 0.9, "momentum, for optimizers that have one"),
        ("--wd", non_negative_float, 1e-4, "weight decay"),
        ("--lr", non_negative_float, 0.1, "learning rate"),
        ("--lr-mode", ("step", "cosine"), None, "step if there is --lr-decay-epoch, else cosine"),
        ("--lr-decay-epoch --lr-step-epochs", numbers, [], "epochs after which step decays it"),
        ("--lr-decay --lr-factor", non_negative_float, 0.1, "decay factor of step"),
        ("--warmup-epochs", non_negative_float, 0, "number of warm-up epochs"),
        ("--warmup-lr", non_negative_float, 0.0, "learning rate at the start of warm-up"),
        ("--warmup-strategy", ("linear", "constant"), "linear", "constant stays at --warmup-lr"),
        ("--kvstore --kv-store", ("local", "device", *DISTRIBUTED), "device", "all-reduce in one "
         "process, or of many that read a part of the data each (docs/distributed.md)")))
    add_flags(parser, "logs and X-rays", (
        ("--log-interval --disp-batches", positive_int, 20,
         "number of batches between two log lines"),
        ("--tensorboard", str, None, "folder for TensorBoard's files (pip install tensorboard)"),
        ("--claim-speed", bool, False, "nothing else runs on this machine: reports compare speed"),
        ("--xray", str, None, "folder for an X-ray of each epoch's first steps (docs/xray.md)"),
        ("--xray-steps", positive_int, 3, "number of steps of an X-ray")))


def devices_of(gpus):
    """Returns the GPUs with these numbers; without numbers the CPU."""
    if gpus and max(gpus) >= mx.context.num_gpus():
        raise ValueError(f"--gpus {max(gpus)}: MXNet finds {mx.context.num_gpus()} GPUs")
    return [mx.gpu(i) for i in gpus] or [mx.cpu()]


def seed_all(seed):
    """Seeds all random numbers."""
    mx.random.seed(seed)
    np.random.seed(seed % 2 ** 32)
    random.seed(seed)


def momentum_of(optimizer, momentum):
    """Returns the argument `momentum`, if the optimizer has one."""
    takes = inspect.signature(type(amp.optimizer(optimizer))).parameters
    return {"momentum": momentum} if "momentum" in takes else {}


def schedule(args, steps):
    """Returns the learning rate schedule of the flags, for epochs with so many updates."""
    warmup_steps = int(args.warmup_epochs * steps)
    warmup = {"warmup_steps": warmup_steps, "warmup_begin_lr": args.warmup_lr,
              "warmup_mode": args.warmup_strategy}
    if (args.lr_mode or ("step" if args.lr_decay_epoch else "cosine")) == "step":
        after = [int(epoch * steps) for epoch in args.lr_decay_epoch] or [1 << 60]
        return mx.lr_scheduler.MultiFactorScheduler(after, args.lr_decay, args.lr, **warmup)
    if args.lr_decay_epoch:
        raise ValueError("--lr-decay-epoch is for --lr-mode step. Received: --lr-mode cosine")
    if warmup_steps >= args.epochs * steps:
        raise ValueError("no epochs are left to the cosine: --warmup-epochs must be below the "
                         f"{args.epochs} epochs of the training. Received: {args.warmup_epochs:g}")
    return mx.lr_scheduler.CosineScheduler(args.epochs * steps, args.lr, **warmup)


# ---- many workers

class Workers:
    """The processes that train one network: the number, the `rank` and `devices` of this one, and
    the `kvstore=` of a Trainer or of `Module.fit`. Rank 0 logs and saves."""

    def __init__(self, args, format="%(message)s"):
        self.store, self.rank, self.count, gpus = args.kvstore, 0, 1, args.gpus
        if args.kvstore in DISTRIBUTED:
            if args.kvstore != "horovod" and "DMLC_PS_ROOT_URI" not in os.environ:
                raise ValueError(f"--kvstore {args.kvstore} needs a scheduler and servers: start "
                                 "the script as gluon-amp launch -n 2 python ...")
            os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"  # updating servers report no overflow
            self.store = mx.kv.create(args.kvstore)
            self.rank, self.count = self.store.rank, self.store.num_workers
        if gpus and isinstance(self.store, Horovod):
            import horovod.mxnet as hvd
            if hvd.local_size() > len(gpus):
                raise ValueError(f"--gpus: Horovod runs {hvd.local_size()} processes here, and "
                                 f"each needs a GPU. Received: {','.join(map(str, gpus))}")
            gpus = [gpus[hvd.local_rank()]]
        self.devices = devices_of(gpus)
        logging.basicConfig(level=logging.ERROR if self.rank else logging.INFO, force=True,
                            format=format.format(self.rank))


class WorkerSampler(gluon.data.Sampler):
    """A worker's part of the training data: equal, disjoint parts, in an order for each `epoch`."""

    def __init__(self, length, seed, workers):
        self.length, self.seed, self.workers, self.epoch = length, seed, workers, 0

    def __iter__(self):
        order = np.random.RandomState([self.seed, self.epoch]).permutation(self.length)
        return iter(order[:len(self) * self.workers.count][self.workers.rank::self.workers.count])

    def __len__(self):
        return self.length // self.workers.count


# ---- the folder of a run, and X-rays

# Flags that may change when a run is resumed
MAY_DIFFER = ("resume", "save_dir", "log_interval", "num_workers", "gpus", "data_dir",
              "tensorboard", "claim_speed", "logging_file", "save_period", "kvstore", "xray",
              "xray_steps", "teacher_params")


def check_flags(path, args, may_differ=MAY_DIFFER):
    """Refuses flags of a resumed run that differ from those in the log of the original run. Only a
    run that has ended may get more epochs."""
    must_exist(path)
    before, lines = Log.read(path)
    now = json.loads(json.dumps(vars(args)))
    completed = max((line["epoch"] + 1 for line in lines if "batch" not in line), default=0)
    if before.get("epochs") == completed < now.get("epochs", 0):
        log.info("completed epochs: %d; remaining: %d, with the schedule of %d epochs", completed,
                 now["epochs"] - completed, now["epochs"])
        may_differ = (*may_differ, "epochs")
    differ = [f"{name} was {before.get(name, 'unset')}, is {now.get(name, 'unset')}"
              for name in {**before, **now} if name not in may_differ
              and before.get(name) != now.get(name)]
    if differ:
        raise ValueError(f"--resume needs the flags of the original run: {'; '.join(differ)}")


def xray_epoch(args, epoch, net, batches, loss_fn=None):
    """X-rays copies of an epoch's first batches, before the epoch and before its random seed."""
    folder = os.path.join(args.xray, f"epoch-{epoch}")
    if os.path.exists(folder):  # of a run that was resumed
        return
    os.makedirs(args.xray, exist_ok=True)
    view = amp.xray(net, batches, loss_fn, steps=args.xray_steps)
    log.info("X-ray of epoch %d: %s\n%s", epoch, view.save(folder), view)
