"""The folder of a training run: what it was begun with, its parameters, states and log.

    epoch-3.params, epoch-3.states   of the last whole epoch
    best.params                      of the epoch with the lowest error
    log.jsonl                        what was begun, and what happened
    last.json                        written at the end: the files of its epoch belong together
    .lock                            held by the run that writes here

Killed at any moment, what stands there is the last whole epoch.
"""
import fcntl
import glob
import json
import logging
import os
from typing import Any, Dict, List, Tuple

from .._mxnet import message, mx
from ..checks import positive
from ..files import must_exist, replace_text
from .command import whole
from .ranks import Ranks
from .training_log import TrainingLog, read_log

log = logging.getLogger("gluon_amp.recipes")

# Flags that a run may go on with other values of.
MAY_DIFFER = ("resume", "save_dir", "log_interval", "log_seconds", "num_workers", "gpus",
              "data_dir", "tensorboard", "mlperf", "claim_speed", "logging_file", "save_period",
              "kvstore", "workers", "xray", "xray_steps", "teacher_params")


def add_arguments(parser: Any, folder: str) -> None:
    """The flags that a `RunFolder` reads, and GluonCV's names of some."""
    add = parser.add_argument
    add("--save-dir", default=folder, help="where all files of the run go")
    add("--save-period", "--save-frequency", type=positive, metavar="N",
        help="keep the parameters of each so many epochs; those of the last one are always there")
    add("--resume", action="store_true", help="go on from the last epoch in --save-dir; "
        "where there is none, begin")
    add("--resume-params", metavar="FILE", help="begin with these parameters")
    add("--resume-states", metavar="FILE", help="and with this state of the Trainer")
    add("--resume-epoch", type=whole, default=0, help="and with this epoch, from 0 on")


def hold(folder: str) -> None:
    """Takes a folder for this process: another that asks for it is refused until this one has
    ended, however it ends."""
    os.makedirs(folder, exist_ok=True)
    file = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)  # stays open
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a loader's processes do not inherit it
    except OSError:
        os.close(file)
        raise ValueError(f"another run writes into {folder}: --save-dir names another "
                         "place") from None


class RunFolder:
    """What `args.save_dir` holds. Rank 0 writes, all read.

    Args:
        args: a script's flags; those of `add_arguments`, `epochs` and `batch_size` are read.
        writes: whether anything is to be written at all.
    """
    add_arguments = staticmethod(add_arguments)

    def __init__(self, args: Any, ranks: Ranks, writes: bool = True):
        self.args, self.path, self.ranks = args, args.save_dir, ranks
        self.writes = writes and ranks.rank == 0
        if not writes:
            return
        if os.path.exists(self._file("last.json")) and not args.resume:
            raise ValueError(f"{self.path} has a run: --resume goes on with it, --save-dir names "
                             "another place")
        if self.writes:
            hold(self.path)

    def start_record(self, lines: List[Dict[str, Any]], steps: int) -> TrainingLog:
        """The run's log, which goes on behind the lines and steps of before."""
        path = self._file("log.jsonl") if self.writes else None
        return TrainingLog(self.args, path, lines, steps, writes=self.ranks.rank == 0)

    def save(self, net: Any, trainer: Any, epoch: int, record: TrainingLog) -> None:
        """Parameters, states and log of an epoch."""
        if not self.writes:
            return
        net.save_parameters(self._file(f"epoch-{epoch}.params"))
        trainer.save_states(self._file(f"epoch-{epoch}.states"))
        record.save()
        replace_text(self._file("last.json"), json.dumps({"epoch": epoch}))
        errors = [line["err_top1"] for line in record.lines if line.get("err_top1") is not None]
        if errors and errors[-1] == min(errors):
            net.save_parameters(self._file("best.params"))
        kept = self.args.save_period and epoch % self.args.save_period == 0
        for old in (f"epoch-{epoch - 1}.params", f"epoch-{epoch - 1}.states"):
            if os.path.exists(self._file(old)) and not (kept and old.endswith(".params")):
                os.remove(self._file(old))

    def resume(self, net: Any, trainer: Any) -> Tuple[int, List[Dict[str, Any]]]:
        """Puts a network and its Trainer where the run has stopped, or where `--resume-params`
        and the like say. Returns the epochs that are done, and their lines of the log."""
        args = self.args
        if not args.resume:
            return self._begin(net, trainer)
        if not os.path.exists(self._file("last.json")):
            self._check_nothing_is_there()
            log.info("nothing to resume in %s", self.path)
            return self._begin(net, trainer)
        epoch = self._last_epoch()
        must_exist(self._file("log.jsonl"), self._file(f"epoch-{epoch}.params"),
                   self._file(f"epoch-{epoch}.states"))
        was, lines = read_log(self._file("log.jsonl"))
        self._check_same_run(was, epoch)
        done = [line["epoch"] for line in lines if "batch" not in line]
        if epoch not in done:
            raise ValueError(f"{self._file('log.jsonl')} has no end of epoch {epoch}, which "
                             f"{self._file('last.json')} names: one of them is of another run")
        _load_parameters(net, self._file(f"epoch-{epoch}.params"))
        _load_states(trainer, self._file(f"epoch-{epoch}.states"))
        if epoch + 1 >= args.epochs:
            log.info("no epoch is left to train; a number above --epochs %d goes on", args.epochs)
        return epoch + 1, [line for line in lines if line["epoch"] <= epoch]

    def _begin(self, net: Any, trainer: Any) -> Tuple[int, List[Dict[str, Any]]]:
        """Begins a run: anew, or with what `--resume-params` and the like name."""
        args = self.args
        if args.resume_epoch >= args.epochs:
            raise ValueError(f"--resume-epoch {args.resume_epoch} leaves none of the {args.epochs} "
                             "epochs to train: --epochs counts those before it, too")
        if args.resume_params:
            must_exist(args.resume_params)
            _load_parameters(net, args.resume_params)
        if args.resume_states:
            must_exist(args.resume_states)
            _load_states(trainer, args.resume_states)
        return args.resume_epoch, []

    def _file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _check_nothing_is_there(self) -> None:
        """Without last.json there may be files of a first epoch whose saving was cut short."""
        found = sorted(os.path.basename(path) for pattern in ("epoch-*.params", "best.params")
                       for path in glob.glob(self._file(pattern)))
        later = [name for name in found if name != f"epoch-{self.args.resume_epoch}.params"]
        if later:
            raise ValueError(f"{self._file('last.json')} is missing, and there is {later[0]}: "
                             "nothing is started over. Put it back, such as "
                             '{"epoch": 3} beside epoch-3.params and epoch-3.states')

    def _last_epoch(self) -> int:
        path = self._file("last.json")
        try:
            with open(path) as file:
                epoch = json.load(file)["epoch"]
            if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f'{path} is damaged: it should hold {{"epoch": 3}}, with the number '
                             "of the last whole epoch") from None
        return epoch

    def _check_same_run(self, was: Dict[str, Any], epoch: int) -> None:
        """`--resume` goes on with the run as it was begun; a finished one may get more epochs."""
        args, now = self.args, json.loads(json.dumps(vars(self.args)))
        for run in (was, now):  # as many ranks as one likes go on with it, if a step is as large
            sizes = run.get("batch_size", 0), run.get("workers", 1)
            if any(type(size) is not int for size in sizes):
                raise ValueError(f"{self._file('log.jsonl')} is damaged: batch_size and workers "
                                 f"should be whole numbers. Received: {sizes}")
            run["batch_size"] = sizes[0] * sizes[1]
        if epoch + 1 == was.get("epochs") < args.epochs:
            log.info("epochs done: %d; to follow: %d, at their rates in a run of %d",
                     epoch + 1, args.epochs - epoch - 1, args.epochs)
            was["epochs"] = args.epochs
        differ = [f"{name} was {was.get(name, 'not there')}, is {now.get(name, 'not there')}"
                  for name in {**was, **now} if name not in MAY_DIFFER
                  and was.get(name) != now.get(name)]
        if differ:
            raise ValueError("--resume goes on with the run as it was begun: "
                             f"{'; '.join(differ)}")


def _load_parameters(net: Any, path: str) -> None:
    try:
        net.load_parameters(path)
    except (mx.MXNetError, AssertionError, ValueError) as error:  # which name no file
        raise ValueError(f"{path} holds other parameters, or is damaged: {message(error)}") \
            from None


def _load_states(trainer: Any, path: str) -> None:
    """Loads states, but keeps this run's own schedule, which may have more epochs than the one
    before."""
    schedule = trainer.optimizer.lr_scheduler
    trainer.load_states(path)
    trainer.optimizer.lr_scheduler = schedule
