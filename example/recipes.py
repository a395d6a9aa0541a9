"""The common code of the training scripts: flags, ranks, logs, and folders of runs."""
import argparse
import contextlib
import difflib
import fcntl
import glob
import inspect
import itertools
import json
import logging
import math
import os
import random
import re
import sys
import time

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
        if "(default" in action.help or action.default is False or action.default in (None, "", []):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line, and with `--config FILE`: flags in a YAML or JSON file.

    Flags on the command line override those of the file.
    """

    def __init__(self, description):
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS,
                          help="a YAML or JSON file of flags, such as `batch-size: 64`; flags on "
                               "the command line override it")

    def parse_args(self, args=None, namespace=None):
        """Parses the flags of the file, then those of the command line."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config")
        found, rest = first.parse_known_args(args)
        of_file = []
        if found.config:
            try:
                of_file = self._words(found.config)
            except (OSError, ValueError, ImportError) as error:
                self.error(f"--config: {' '.join(str(error).split())}")
        flags = super().parse_args([*of_file, *rest], namespace)
        if hasattr(flags, "config"):
            self.error("--config must be spelled out, and on the command line")
        return flags

    def _words(self, path):
        """Returns the flags of a file as words of a command line."""
        must_exist(path)
        with open(path) as file:
            text = file.read()
        flags = json.loads(text) if path.endswith(".json") else _parse_yaml(path, text)
        if not isinstance(flags, dict):
            raise ValueError(f"{path} must map names of flags to values. "
                             f"Received: {type(flags).__name__}")
        words = []
        for name, value in flags.items():
            flag = "--" + str(name).lstrip("-").replace("_", "-")
            if flag not in self._option_string_actions:
                raise ValueError(f"{path}: there is no flag {flag}"
                                 f"{did_you_mean(flag, self._option_string_actions)}")
            if value is True:
                words.append(flag)
            elif value is not None and value is not False:
                values = value if isinstance(value, list) else [value]
                words.append(f"{flag}={','.join(map(str, values))}")
        return words

    def error(self, message):
        """Exits with a message of one line, and the names that a mistyped one may mean."""
        flag = re.match(r"unrecognized arguments: ([^\s=]+)", message)
        choice = re.match(r"argument (\S+?)[/:].*invalid choice: '(.*?)'", message)
        if flag:
            message += did_you_mean(flag[1], self._option_string_actions)
        elif choice:
            message += did_you_mean(choice[2], self._option_string_actions[choice[1]].choices)
        self.exit(2, f"{self.prog}: error: {message} (--help shows more)\n")


def _parse_yaml(path, text):
    try:
        import yaml
    except ImportError:
        raise ImportError("YAML needs a package: pip install pyyaml, or write JSON into a file "
                          "that ends with .json") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None


def did_you_mean(name, names):
    """Returns a text such as ". Did you mean a or b?", or "" if no name is similar."""
    bare = {one.lstrip("-"): one for one in names}  # the dashes would make all flags similar
    close = [bare[one] for one in difflib.get_close_matches(name.lstrip("-"), list(bare))]
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
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None


def first_line(error):
    """Returns the message of an error, without MXNet's traceback and source location."""
    lines = [line for line in str(error).splitlines()
             if line.strip() and not line.startswith(("Traceback", "  File"))]
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"^MXNetError: |\[[\d:]+\] \S+: ", "", text).rstrip(" .")


# ---- types of flags

def flag_type(parse, is_valid, valid):
    """Returns the `type=` of a flag: what `parse` returns for its text, if that is valid."""
    def of(text):
        try:
            value = parse(text)
            if is_valid(value):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{valid}. Received: {text!r}")
    return of


def _floats(text):
    return [float(part) for part in text.split(",") if part]


def _above_0(values):
    return all(value > 0 for value in values)


positive = flag_type(int, lambda n: n >= 1, "must be an integer >= 1")
new_file = flag_type(str, lambda path: not os.path.isdir(path) and os.path.isdir(
    os.path.dirname(os.path.realpath(path))), "must be a file in a folder that exists")
whole = flag_type(int, lambda n: n >= 0, "must be an integer >= 0")
seed = flag_type(int, lambda n: 0 <= n < 2**31, "must be an integer from 0 to 2147483647")
decimal = flag_type(float, lambda x: 0 <= x < math.inf, "must be a finite number >= 0")
above_0 = flag_type(float, lambda x: 0 < x < math.inf, "must be a finite number > 0")
share = flag_type(float, lambda x: 0 <= x <= 1, "must be a number from 0 to 1")
numbers = flag_type(lambda text: [int(part) for part in text.split(",") if part],
                    lambda values: min(values, default=0) >= 0,
                    "must be integers >= 0, such as 0,2")
decimals = flag_type(
    _floats, lambda values: len(values) in (1, 3) and all(map(math.isfinite, values)),
    "must be one finite number or three, such as 0.5 or 0.5,0.4,0.4")
shares = flag_type(decimals, lambda values: all(0 <= value <= 1 for value in values),
                   "must be from 0 to 1; --rgb-mean and --rgb-std take pixels from 0 to 255")
deviations = flag_type(decimals, _above_0, "must be above 0")
share_deviations = flag_type(shares, _above_0, "must be above 0")
three_numbers = flag_type(str, lambda text: len(decimals(text)) == 3,
                          "takes three numbers, of red, green and blue")
three_deviations = flag_type(three_numbers, lambda text: _above_0(decimals(text)),
                             "must be above 0")


def loss_scale(text):
    """Parses the `loss_scale` of `Trainer` and `Module`."""
    if text in ("auto", "dynamic", "none"):
        return None if text == "none" else text
    try:
        return amp.StaticLossScale(float(text)).scale
    except ValueError:
        raise argparse.ArgumentTypeError("takes auto, dynamic, none or a positive number. "
                                         f"Received: {text}") from None


# ---- flags and settings of several scripts

def add_device_flags(parser):
    """Adds `--seed`, `--gpus 0,1`, and GluonCV's equivalent `--num-gpus 2`."""
    add = parser.add_argument
    add("--seed", type=seed, default=0, help="seed of all random numbers")
    add("--gpus", type=numbers, default=[],
        help="GPUs to use, such as 0 or 0,2,5 (default: the CPU)")
    add("--num-gpus", dest="gpus", metavar="N", default=argparse.SUPPRESS,
        type=lambda text: list(range(whole(text))), help="use the first N GPUs")


def add_step_flags(training, output, log_interval):
    """Adds the flags of the scripts that count steps instead of epochs."""
    add = training.add_argument
    add("--dtype", default="float32", choices=("float32", "float16", "bfloat16"),
        help="type of the network")
    add("--loss-scale", type=loss_scale, default="auto",
        help="loss scale: auto, dynamic, a number or none")
    add_device_flags(training)
    add = output.add_argument
    add("--log-interval", type=positive, default=log_interval,
        help="number of steps between two log lines")
    add("--save", metavar="FILE", type=new_file, help="file to save the parameters to")


def devices_of(gpus):
    """Returns the GPUs with these numbers; without numbers the CPU."""
    if gpus and max(gpus) >= mx.context.num_gpus():
        raise ValueError(f"--gpus {max(gpus)}: MXNet finds {mx.context.num_gpus()} GPUs")
    return [mx.gpu(i) for i in gpus] or [mx.cpu()]


def one_device(parser, args):
    """Returns the device of `--gpus`, which must be one."""
    if len(args.gpus) > 1:
        parser.error("--gpus: one is enough")
    return devices_of(args.gpus)[0]


def seed_all(seed):
    """Seeds all random numbers."""
    mx.random.seed(seed)
    np.random.seed(seed % 2 ** 32)
    random.seed(seed)


def momentum_of(optimizer, momentum):
    """Returns the argument `momentum`, if the optimizer has one."""
    takes = inspect.signature(type(amp.optimizer(optimizer))).parameters
    return {"momentum": momentum} if "momentum" in takes else {}


def schedule(lr, steps, epochs, mode="step", decay_epochs=(), decay=0.1, warmup_epochs=0,
             warmup_lr=0.0, warmup_strategy="linear"):
    """Returns a learning rate schedule with warm-up and decay.

    Args:
        steps: updates in an epoch.
        mode: `step` multiplies the rate by `decay` after each of `decay_epochs`; `cosine` decays
            it to 0 over `epochs`.
        warmup_strategy: `linear` rises from `warmup_lr` to `lr`; `constant` stays at `warmup_lr`.
    """
    warmup_steps = int(warmup_epochs * steps)
    warmup = {"warmup_steps": warmup_steps, "warmup_begin_lr": warmup_lr,
              "warmup_mode": warmup_strategy}
    if warmup_lr > lr:
        raise ValueError(f"--warmup-lr must be at most --lr {lr:g}. Received: {warmup_lr:g}")
    if mode == "step":
        if any(a >= b for a, b in zip([0, *decay_epochs], decay_epochs)):
            raise ValueError("the epochs after which the rate decays must rise, from 1 on. "
                             f"Received: {', '.join(map(str, decay_epochs))}")
        after = [int(epoch * steps) for epoch in decay_epochs] or [1 << 60]
        return mx.lr_scheduler.MultiFactorScheduler(after, decay, lr, **warmup)
    if decay_epochs:
        raise ValueError("--lr-decay-epoch is for --lr-mode step. Received: --lr-mode cosine")
    if warmup_steps >= epochs * steps:
        raise ValueError(f"no epochs are left to the cosine: --warmup-epochs must be below the "
                         f"{epochs} epochs of the training. Received: {warmup_epochs:g}")
    return mx.lr_scheduler.CosineScheduler(epochs * steps, lr, **warmup)


# ---- many ranks

MANY = ("dist_sync", "dist_device_sync", "horovod")


def add_kvstore_flag(parser):
    """Adds the flag that selects the kvstore of `Ranks`."""
    parser.add_argument(
        "--kvstore", "--kv-store", dest="kvstore", default="device",
        choices=("local", "device", *MANY),
        help="all-reduce of gradients: local or device in one process; dist_sync or "
             "dist_device_sync by MXNet's parameter server (gluon-amp launch -n 2 python ...); "
             "horovod (horovodrun -np 2 python ...). Each process reads a part of the training "
             "data, in batches of --batch-size; --lr is not scaled")


class Ranks:
    """The processes that train one network: one, unless the kvstore is distributed.

    Attributes:
        store: the `kvstore=` of a Trainer, or of `Module.fit`.
        rank: the rank of this process. Rank 0 logs and saves.
        workers: the number of ranks.
    """

    def __init__(self, kvstore="device"):
        self.store, self.rank, self.workers = kvstore, 0, 1
        if kvstore not in MANY:
            return
        if kvstore != "horovod" and "DMLC_PS_ROOT_URI" not in os.environ:
            raise ValueError(f"--kvstore {kvstore} needs a scheduler and servers: start the script "
                             "as gluon-amp launch -n 2 python ...")
        os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"  # updating servers report no overflow
        self.store = mx.kv.create(kvstore)
        self.rank, self.workers = self.store.rank, self.store.num_workers

    def devices(self, gpus):
        """Returns the devices of this process: with Horovod one GPU, by its local rank."""
        if gpus and isinstance(self.store, Horovod):
            import horovod.mxnet as hvd
            if hvd.local_size() > len(gpus):
                raise ValueError(f"--gpus: Horovod runs {hvd.local_size()} processes here, and "
                                 f"each needs a GPU. Received: {','.join(map(str, gpus))}")
            gpus = [gpus[hvd.local_rank()]]
        return devices_of(gpus)

    def start_log(self, format):
        """Sets up logging: rank 0 logs everything, other ranks errors only."""
        logging.basicConfig(level=logging.ERROR if self.rank else logging.INFO, format=format,
                            force=True)


class Part(gluon.data.Sampler):
    """A sampler of a rank's part of training data: equal, disjoint parts.

    Each epoch has its own order, which is the same in every run.

    Attributes:
        epoch: the epoch; set it before each epoch.
    """

    def __init__(self, length, seed, ranks):
        self.length, self.seed, self.ranks, self.epoch = length, seed, ranks, 0

    def __iter__(self):
        order = np.random.RandomState([self.seed, self.epoch]).permutation(self.length)
        workers = self.ranks.workers
        return iter(order[:len(self) * workers][self.ranks.rank::workers])

    def __len__(self):
        return self.length // self.ranks.workers


# ---- log.jsonl, and TensorBoard's files

def add_log_flags(parser):
    """Adds the flags of `start_log`."""
    add = parser.add_argument
    add("--tensorboard", metavar="FOLDER",
        help="write TensorBoard event files to this folder (pip install tensorboard)")
    add("--claim-speed", action="store_true",
        help="confirm that nothing else runs on this machine: reports compare the speed")


def start_log(args, path, interval, begin, rank=0):
    """Returns the log of a run with these flags."""
    return Log(path, args, interval=interval, tensorboard=args.tensorboard, begin=begin, rank=rank)


# ---- the folder of a run

# Flags that may change when a run is resumed.
MAY_DIFFER = ("resume", "save_dir", "log_interval", "log_seconds", "num_workers", "gpus",
              "data_dir", "tensorboard", "claim_speed", "logging_file", "save_period",
              "kvstore", "workers", "xray", "xray_steps", "teacher_params")


def add_folder_flags(parser, folder):
    """Adds the flags of a `RunFolder`, some with GluonCV's names, too."""
    add = parser.add_argument
    add("--save-dir", default=folder, help="folder for all files of the run")
    add("--save-period", "--save-frequency", type=positive, metavar="N",
        help="keep the parameters of every Nth epoch, besides the last")
    add("--resume", action="store_true", help="resume from the last epoch in "
        "--save-dir; without one start a new run")
    add("--resume-params", metavar="FILE", help="start with these parameters")
    add("--resume-states", metavar="FILE", help="start with these states of the Trainer")
    add("--resume-epoch", type=whole, default=0, help="start with this epoch, counted from 0")


def check_flags(path, was, args, may_differ=MAY_DIFFER):
    """Refuses flags of a resumed run that differ from those in the log of the original run."""
    now = json.loads(json.dumps(vars(args)))
    for run in (was, now):  # the number of ranks may change, not the size of a step
        sizes = run.get("batch_size", 0), run.get("workers", 1)
        if any(type(size) is not int for size in sizes):
            raise ValueError(f"{path} is damaged: batch_size and workers must be integers. "
                             f"Received: {sizes}")
        run["batch_size"] = sizes[0] * sizes[1]
    differ = [f"{name} was {was.get(name, 'unset')}, is {now.get(name, 'unset')}"
              for name in {**was, **now} if name not in may_differ
              and was.get(name) != now.get(name)]
    if differ:
        raise ValueError(f"--resume needs the flags of the original run: {'; '.join(differ)}")


def replace_text(path, text):
    """Replaces a text file atomically."""
    with open(f"{path}.writing", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.writing", path)


def must_exist(*paths):
    """Raises an error for a missing file."""
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} does not exist")


def hold(folder):
    """Locks a folder until this process ends; raises an error if another process has it."""
    os.makedirs(folder, exist_ok=True)
    file = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)  # stays open
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a loader's processes do not inherit it
    except OSError:
        os.close(file)
        raise ValueError(f"another run writes to {folder}: pass another "
                         "--save-dir") from None


class RunFolder:
    """The folder `args.save_dir`. Rank 0 writes to it, all ranks read it.

    Args:
        args: a script's flags; it reads those of `add_folder_flags`, `epochs` and `batch_size`.
        rank: the rank of this process.
        writes: whether the run writes files.
    """

    def __init__(self, args, rank=0, writes=True):
        self.args, self.rank, self.writes = args, rank, writes and rank == 0
        self.last, self.log = self.file("last.json"), self.file("log.jsonl")
        if writes and os.path.exists(self.last) and not args.resume:
            raise ValueError(f"{args.save_dir} has a run: pass --resume to continue it, or another "
                             "--save-dir")
        if self.writes:
            hold(args.save_dir)

    def file(self, name):
        """Returns the path of a file."""
        return os.path.join(self.args.save_dir, name)

    def start_log(self, begin):
        """Returns the run's log, which continues that of completed epochs."""
        return start_log(self.args, self.log if self.writes else None, self.args.log_interval,
                         begin, self.rank)

    def save(self, net, trainer, epoch, record):
        """Saves the parameters and states of an epoch."""
        if not self.writes:
            return
        net.save_parameters(self.file(f"epoch-{epoch}.params"))
        trainer.save_states(self.file(f"epoch-{epoch}.states"))
        errors = [line["err_top1"] for line in record.lines if line.get("err_top1") is not None]
        if errors and errors[-1] == min(errors):
            net.save_parameters(self.file("best.params"))
        replace_text(self.last, json.dumps({"epoch": epoch}))
        old = [f"epoch-{epoch - 1}.states"]
        if not self.args.save_period or epoch % self.args.save_period:
            old += [f"epoch-{epoch - 1}.params", f"epoch-{epoch - 1}.params.json"]
        for path in map(self.file, old):
            if os.path.exists(path):
                os.remove(path)

    def resume(self, net, trainer):
        """Loads a network and its Trainer from the last epoch, or from the files of the flags.
        Returns the number of completed epochs."""
        args = self.args
        if not args.resume or not self._has_run():
            return self._start(net, trainer)
        epoch = self._last_epoch()
        files = self.file(f"epoch-{epoch}.params"), self.file(f"epoch-{epoch}.states")
        must_exist(self.log, *files)
        flags, lines = Log.read(self.log)
        self._check_flags(flags, epoch)
        if epoch not in [line["epoch"] for line in lines if "batch" not in line]:
            raise ValueError(f"{self.log} has no end of epoch {epoch}, which {self.last} has: the "
                             "files are of different runs")
        _load(net, trainer, *files)
        if epoch + 1 >= args.epochs:
            log.info("no epochs are left to train; --epochs above %d continues", args.epochs)
        return epoch + 1

    def _start(self, net, trainer):
        """Starts a run: from scratch, or from the files of `--resume-params` and the like."""
        args = self.args
        if args.resume_epoch >= args.epochs:
            raise ValueError(f"--resume-epoch {args.resume_epoch} leaves none of the {args.epochs} "
                             "epochs to train: --epochs includes earlier epochs")
        must_exist(*filter(None, (args.resume_params, args.resume_states)))
        _load(net, trainer, args.resume_params, args.resume_states)
        return args.resume_epoch

    def _has_run(self):
        """Returns whether the folder has a complete epoch; refuses others without last.json."""
        if os.path.exists(self.last):
            return True
        names = sorted(os.path.basename(path) for pattern in ("epoch-*.params", "best.params")
                       for path in glob.glob(self.file(pattern)))
        first = f"epoch-{self.args.resume_epoch}.params"
        later = set(names) - ({first, "best.params"} if first in names else set())
        if later:  # the first epoch may have been interrupted
            raise ValueError(f"{self.last} is missing, and there is {min(later)}: no new run is "
                             'started. Restore last.json, such as {"epoch": 3} for '
                             "epoch-3.params and epoch-3.states")
        log.info("nothing to resume in %s", self.args.save_dir)
        return False

    def _last_epoch(self):
        try:
            with open(self.last) as file:
                epoch = json.load(file)["epoch"]
            if type(epoch) is int and epoch >= 0:
                return epoch
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise ValueError(f'{self.last} is damaged: it must be {{"epoch": 3}}, with the number of '
                         "the last complete epoch")

    def _check_flags(self, was, epoch):
        """Refuses flags that differ from the original run's, except more epochs at its end."""
        args = self.args
        if epoch + 1 == was.get("epochs") < args.epochs:
            log.info("completed epochs: %d; remaining: %d, with the schedule of %d epochs",
                     epoch + 1, args.epochs - epoch - 1, args.epochs)
            was["epochs"] = args.epochs
        check_flags(self.log, was, args)


def _load(net, trainer, params, states):
    """Loads the files that are given. The Trainer keeps the schedule of this run, which may have
    more epochs."""
    try:
        if params:
            net.load_parameters(params)
    except (mx.MXNetError, AssertionError, ValueError) as error:  # the errors lack the path
        raise ValueError(f"{params} has other parameters, or is damaged: {first_line(error)}") \
            from None
    if states:
        schedule = trainer.optimizer.lr_scheduler
        trainer.load_states(states)
        trainer.optimizer.lr_scheduler = schedule


# ---- the progress bar

def add_progress_flags(parser):
    """Adds the flags of a `Progress`."""
    add = parser.add_argument
    add("--log-interval", type=positive, default=20, help="number of batches between two log lines")
    add("--log-seconds", type=decimal, default=60.0,
        help="maximum seconds between two lines of the text log, but not of log.jsonl")


class Progress:
    """Iterates over the batches of an epoch. On a terminal a bar shows epoch, loss, scale,
    samples/s and the remaining time.

    Args:
        args: a script's flags; it reads those of `add_progress_flags` and `epochs`.
        samples: the number of examples of a step over all ranks.
        rank: the rank of this process; rank 0 shows the bar.
    """

    def __init__(self, args, batches, epoch, samples, rank=0):
        from tqdm import tqdm
        self.args, self.samples, self.rank = args, samples, rank
        self.bar = tqdm(batches, f"epoch {epoch + 1}/{args.epochs}", leave=False,
                        disable=True if rank else None, unit=" samples", unit_scale=samples,
                        dynamic_ncols=True, mininterval=0.2)
        self._start, self._batches = time.time(), 0

    def __iter__(self):
        from tqdm.contrib.logging import logging_redirect_tqdm
        terminal = self.rank == 0 and sys.stderr.isatty()
        with logging_redirect_tqdm() if terminal else contextlib.nullcontext():
            yield from enumerate(self.bar)

    def step(self, loss, scale, due):
        """Shows a step.

        Returns:
            The samples/s since the last line of text if one is due, by --log-interval (`due`) or
            by --log-seconds; else 0.
        """
        self.bar.set_postfix_str(f"loss {loss:.3g}, scale {scale:g}", refresh=False)
        self._batches += 1
        seconds = time.time() - self._start
        if not due and seconds < self.args.log_seconds:
            return 0.0
        speed = self.samples * self._batches / max(seconds, 1e-9)
        self._start, self._batches = time.time(), 0
        return speed


# ---- --xray

def add_xray_flags(parser):
    """Adds the flags of `xray_epoch`."""
    add = parser.add_argument
    add("--xray", metavar="FOLDER", help="write an X-ray of each epoch's first steps to this "
        "folder (docs/xray.md), without any effect on training")
    add("--xray-steps", type=positive, default=3, help="number of steps of an X-ray")


def xray_epoch(args, epoch, net, batches, loss_fn=None):
    """X-rays copies of an epoch's first batches, into FOLDER/epoch-0 and so on. Call it before the
    epoch, and before its random seed is set."""
    folder = os.path.join(args.xray, f"epoch-{epoch}")
    if os.path.exists(folder):
        log.info("%s exists", folder)
        return
    os.makedirs(args.xray, exist_ok=True)
    view = amp.xray(net, itertools.islice(batches, args.xray_steps), loss_fn, steps=args.xray_steps)
    log.info("X-ray of epoch %d: %s\n%s", epoch, view.save(folder), view)
