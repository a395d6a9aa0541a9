"""`Log`: writes log.jsonl, and TensorBoard's event files, for a training loop of one's own."""
from __future__ import annotations

import json
import logging
import math
import numbers
import os
import sys
import time
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Optional, Sequence, Tuple, Union

import numpy as np

from ..checks import counted, whole_number
from ..files import errors_of_damage, replace_text
from .events import EventFile
from .read import VERSION

log = logging.getLogger("gluon_amp")

_IDENTITY = ("dtype", "policy", "amp", "seed")  # arguments that a resumed run keeps
_NOT_DRAWN = ("epoch", "batch", "skip", "steps")  # fields of lines that TensorBoard does not show


class Log:
    """A training's log, which `gluon-amp report` reads: log.jsonl, and TensorBoard's files.

        log = gluon_amp.reports.Log("log.jsonl", args)
        for epoch in range(args.epochs):
            for data, label in batches:
                ...
                trainer.step(len(label))
                log.step(trainer, loss, len(label))
            log.epoch(validation_accuracy=accuracy)

    Each line is written when it is complete.

    Args:
        path: the file; None writes none.
        arguments: the training's settings, as a dict or the Namespace of argparse. Reports group
            runs by them: give `seed`, and `dtype` such as "float16".
        interval: the number of steps between two lines. Skipped steps have a line each.
        tensorboard: a folder for TensorBoard's files.
        begin: the number of epochs that a resumed training has completed, or the position that
            `load_checkpoint` returned: their lines in the file stay, and later ones are removed.
            By default the file must not exist.
        rank: the rank of this worker. Only rank 0 writes.

    Raises:
        FileExistsError: the file exists, and `begin` is not given.
        ValueError: the file that is resumed is damaged, or of a run with another type or seed than
            in `arguments`, or an argument is invalid.
    """

    def __init__(self, path: Union[str, os.PathLike[str], None], arguments: Any = None, *,
                 interval: int = 20, tensorboard: Optional[str] = None,
                 begin: Any = None, rank: int = 0) -> None:
        """See the class for the arguments."""
        given = {} if arguments is None else arguments
        self.arguments: Dict[str, Any] = dict(given if isinstance(given, Mapping) else vars(given))
        self.path = None if path is None or rank else os.fspath(path)
        self._interval = whole_number(interval, "interval", 1)
        self.lines: List[Dict[str, Any]] = []
        self._resumes = self._closed = False
        state = getattr(begin, "log", None)
        begin = getattr(begin, "epoch", begin)
        self._epoch = 0 if begin is None else whole_number(begin, "begin", 0)
        if self.path is not None:
            # of a checkpoint, `_load_state` removes the later lines, also within an epoch
            self._start_file(self.path, begin if state is None else sys.maxsize)
        self.steps: int = next((line["steps"] for line in reversed(self.lines)
                                if "steps" in line), 0)
        self._last: Any = None  # the Trainer or Module of the last step
        self._start_epoch()
        if state is not None:
            self._load_state(state)
        self._events = None
        if tensorboard is not None and rank == 0:
            self._events = EventFile(tensorboard)
            self._events.add(0, "arguments", _json(self.arguments, str))

    def _start_file(self, path: str, begin: Optional[int]) -> None:
        if begin is None and os.path.exists(path):
            raise FileExistsError(f"{path} is the log of another run. Valid: another path, or "
                                  "begin=, the number of epochs that a resumed run has completed")
        if begin and os.path.exists(path):
            arguments, lines = self.read(path)
            self._check_run(path, arguments)
            self.lines = [line for line in lines if line["epoch"] < begin]
            self._resumes = True  # the file does not change before the first line
        else:
            self._write_file(path)

    def _check_run(self, path: str, arguments: Mapping[str, Any]) -> None:
        """Refuses to continue the log of a run of another type or seed."""
        names = [name for name in _IDENTITY
                 if str(arguments.get(name)) != str(self.arguments.get(name))]
        if names:
            in_file, received = (", ".join(f"{name}={values.get(name)}" for name in names)
                                 for values in (arguments, self.arguments))
            raise ValueError(f"{path} is the log of another run, with {in_file}. Valid: the "
                             f"arguments of that run, or another path. Received: {received}")

    def _write_file(self, path: str) -> None:
        head = _json({"version": VERSION, "arguments": self.arguments}, str)
        replace_text(path, "".join(f"{line}\n" for line in (head, *map(_json, self.lines))))

    def _start_epoch(self) -> None:
        self._batch = self._samples = self._due = 0
        self._losses: List[Any] = []  # means of steps since the last line
        self._sum = self._count = 0.0  # of earlier losses of the epoch
        self._began = self._ended = time.time()

    def state_dict(self) -> Dict[str, Any]:
        """Returns where the log stands, for a checkpoint."""
        self._losses = [_number(one) for one in self._losses]
        return {"lines": len(self.lines), "losses": self._losses,
                "sums": [self._sum, self._count], "seconds": time.time() - self._began,
                "counts": [self._epoch, self.steps, self._batch, self._samples, self._due]}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        with errors_of_damage("the log's state in the checkpoint"):
            if self.path is not None and len(self.lines) < state["lines"]:
                raise ValueError(f"{self.path} has {counted(len(self.lines), 'line')}, and had "
                                 f"{state['lines']} when the checkpoint was saved")
            del self.lines[state["lines"]:]
            self._losses = list(map(float, state["losses"]))
            self._sum, self._count = map(float, state["sums"])
            self._epoch, self.steps, self._batch, self._samples, self._due = state["counts"]
            self._began -= state["seconds"]

    def step(self, trainer: Any, loss: Any, samples: int = 0, **values: Any) -> bool:
        """Records a step, after `trainer.step`. Returns True in every `interval`-th step.

        Args:
            trainer: the Trainer or Module, which has `lr`, `loss_scale`, `skipped` and
                `gradient_norm`.
            loss: the loss: an array, a list of arrays, or a number. Arrays are read with the line.
            samples: the number of examples of the step.
            values: further fields, or other values of those; each may be a function.

        Raises:
            TypeError: a value is none that JSON has, and no array.
            RuntimeError: the log is closed.
        """
        self._check_open()
        self._losses.append(_mean(loss))
        updated = getattr(trainer, "updated", True)  # MXNet's Trainers skip no step
        self._last = trainer
        self._batch += 1
        self._samples += samples
        self.steps += 1
        shown = self._due + 1 >= self._interval
        self._due = 0 if shown else self._due + 1
        if shown or not updated:
            fields = {**_state_of(trainer, updated), **values}
            line = {"epoch": self._epoch, "batch": self._batch - 1, "loss": self._read_losses(), **{
                name: value() if callable(value) else value for name, value in fields.items()}}
            self._add("step", line if updated else {**line, "skip": True}, self.steps - 1)
        self._ended = time.time()
        return shown

    def _read_losses(self) -> float:
        """Reads the losses since the last line, and returns their mean."""
        losses = [_number(one) for one in self._losses]
        self._sum, self._count = self._sum + sum(losses), self._count + len(losses)
        self._losses = []
        return sum(losses) / len(losses) if losses else math.nan

    def epoch(self, **values: Any) -> Dict[str, Any]:
        """Ends an epoch, and returns its line.

        Besides the given values it has the mean `loss` of its steps, `seconds` and
        `samples_per_second` from its beginning to its last step, and the last step's `lr`,
        `loss_scale` and `skipped`.

        Args:
            values: results, such as `validation_accuracy` (the line has `err_top1`, 1 minus
                it), `validation_loss`, `accuracy` (of the training) or a measure of your own, such
                as `validation_perplexity`.

        Raises:
            TypeError, RuntimeError: as `step`.
        """
        self._check_open()
        if self._losses:
            self._read_losses()
        seconds = self._ended - self._began
        fields: Dict[str, Any] = {"epoch": self._epoch}
        if self._count:
            fields.update(loss=self._sum / self._count, seconds=seconds)
        if self._samples and seconds > 0:
            fields["samples_per_second"] = self._samples / seconds
        if self._last is not None:
            fields.update(_state_of(self._last, updated=False))
            del fields["gradient_norm"]
        fields.update(values)
        if "validation_accuracy" in fields:
            accuracy = _plain(fields.pop("validation_accuracy"))
            if accuracy is not None and not isinstance(accuracy, (int, float)):
                raise TypeError(f"validation_accuracy must be a number. Received: {accuracy!r}")
            fields["err_top1"] = None if accuracy is None else 1 - accuracy
        if fields.get("validation_loss") is not None and _plain(fields["validation_loss"]) is None:
            log.warning("epoch %d: the network's predictions are not finite. They use the batch "
                        "norms' moving averages, which lag in the first steps: a deep float16 "
                        "network may exceed 65504 until they have converged", self._epoch)
        line = self._add("epoch", {**fields, "steps": self.steps}, self._epoch)
        self._epoch += 1
        self._start_epoch()
        return line

    def _add(self, kind: str, line: Dict[str, Any], at: int) -> Dict[str, Any]:
        """Adds a line, and returns it as the file has it."""
        text = _json(line)
        if self.path is not None and self._resumes:
            self._write_file(self.path)
            self._resumes = False
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        line = json.loads(text)
        self.lines.append(line)
        if self._events is not None:
            for name, value in line.items():
                if name not in _NOT_DRAWN and isinstance(value, (int, float)):
                    self._events.add(at, f"{kind}/{name}", value)
        return line

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the log {self.path or ''} is closed. Valid: another Log, with "
                               "begin= to continue the file")

    def close(self) -> None:
        """Ends the log: closes TensorBoard's files."""
        self._closed = True
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @staticmethod
    def read(path: Union[str, os.PathLike[str]]) -> Tuple[Dict[str, Any], List[Dict[str, Any]]]:
        """Returns the arguments and the lines of a log.jsonl.

        A last line that was cut is left out.

        Args:
            path: the file.

        Raises:
            ValueError: the file is damaged.
        """
        with open(path, encoding="utf-8", errors="replace") as file:
            texts = file.read().splitlines(keepends=True)
        if len(texts) > 1 and not texts[-1].endswith("\n"):
            del texts[-1]
        parsed: List[Any] = []
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
                right = isinstance(line.get("arguments", {}), dict) if number == 1 else \
                    type(line["epoch"]) is int and isinstance(
                        line.get("err_top1"), (int, float, type(None)))
            except (ValueError, RecursionError, AttributeError, KeyError):
                right = False
            if not right:
                raise ValueError(f"{path} is damaged at line {number}: its first line has a run's "
                                 "arguments, each other one a step or an epoch")
            parsed.append(line)
        if not parsed:
            raise ValueError(f"{path} is damaged: it is empty")
        return parsed[0].get("arguments", {}), parsed[1:]


def _plain(value: Any) -> Any:
    """Returns a value of Python for a scalar or an array. JSON has no infinities and no NaN: they
    become None."""
    if hasattr(value, "asnumpy"):
        value = value.asnumpy()
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.item() if value.size == 1 else value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_plain(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _refuse(value: object) -> NoReturn:
    raise TypeError("a log has numbers, strings, booleans, None, arrays, and lists and dicts of "
                    f"these. Received: {value!r}")


def _json(line: Mapping[str, Any], other: Callable[[Any], Any] = _refuse) -> str:
    """Returns a line of JSON. `other` returns what to write for values that JSON lacks."""
    return json.dumps(_plain(line), default=other, allow_nan=False)


def _mean(loss: Any) -> Any:
    """Returns the mean of a loss, on its device; reading it is left to the next line."""
    losses: Sequence[Any] = loss if isinstance(loss, (list, tuple)) else [loss]
    sizes = [getattr(part, "size", 1) for part in losses]
    if not losses or not all(size and (hasattr(part, "asnumpy") or isinstance(
            part, (numbers.Real, np.ndarray))) for part, size in zip(losses, sizes)):
        raise TypeError("loss must be an array that is not empty, a list of such arrays, or a "
                        f"number. Received: {loss!r}")
    means = [part.astype("float32").mean() if hasattr(part, "asnumpy") else float(np.mean(part))
             for part in losses]
    if len(means) == 1:
        return means[0]
    return sum(_number(part) * size for part, size in zip(means, sizes)) / sum(sizes)


def _number(mean: Any) -> float:
    return float(mean.asnumpy().item() if hasattr(mean, "asnumpy") else mean)


def _state_of(trainer: Any, updated: bool) -> Dict[str, Any]:
    """Returns the fields that a Trainer or Module has; those of MXNet have no scale."""
    optimizer = getattr(trainer, "_optimizer", None)
    servers = getattr(trainer, "_update_on_kvstore", False)
    fields = {"lr": getattr(optimizer, "learning_rate", None),
              **{name: getattr(trainer, name) for name in ("loss_scale", "skipped")
                 if hasattr(trainer, name)}}
    norm = getattr(trainer, "gradient_norm", None) if updated and not servers else None
    return {**fields, "gradient_norm": norm}
