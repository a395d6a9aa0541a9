"""Reads training logs: GluonCV's, MXNet Module's, our log.jsonl, and CSV of errors by epoch.

A log is gone through line by line, whatever stands before it in a line (a time, a logger's name).
What it says of each epoch is kept, so memory grows with epochs, not with lines:

    Namespace(...)                     the arguments of a run
    Epoch[3] Batch [99]  Speed: ...    its speed, learning rate, loss scale
    [Epoch 3] validation: ...          results, GluonCV's
    Epoch[3] Validation-accuracy=...   results, Module's
    {"epoch": 3, ...}                  results, ours

An epoch that comes again replaces the former one and all behind it: the run was resumed. A new run
begins with other arguments, and with epoch 0 behind later ones.
"""
import ast
import json
import math
import re
from functools import partial
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence

from . import tables
from .runs import Epoch, Run, plain

LONGEST_LINE = 2 ** 16  # a file without line ends is read in pieces
AT_ONCE = 1000  # lines
HEADER = re.compile(rb"Namespace\((.*)\)")
BATCH = re.compile(rb"Epoch\[(\d{1,9})\] Batch \[(?:\d+-)?(\d{1,9})\]\s+"
                   rb"Speed: (\d+(?:\.\d+)?) samples/sec(.*)")
RESULTS = re.compile(rb"\[Epoch (\d{1,9})\] (training: |validation: )?(.*)|"
                     rb"Epoch\[(\d{1,9})\] (Train-|Validation-)?((?:\S+|Time cost)=.*)")
RATE = re.compile(rb"Update\[\d+\]: Change learning rate to (\S+)")
# What was cut off in the middle of a number must not pass for a shorter number, nor, where another
# log goes on in the same line, for a longer one.
WHOLE = re.compile(rb"\.\d{6}$|Time cost=\d+\.\d{3}$")
VALUE = re.compile(r"([A-Za-z][\w-]*(?: cost)?)(?:=|: )"
                   r"([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))(?=s?(?:[\s,;)]|$))")
ARGUMENT = re.compile(r"""(\w+)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\[[^]]*\]|\([^)]*\)|[^,]*)""")
ENDING = r"\.(log|jsonl?|csv|txt)$"  # of a file's name: no part of a run's
# Names of errors, and of accuracies.
TOP1 = (("err-top1", "top1-err", "err_top1", "top1_err"), ("accuracy", "acc", "top1-acc", "val"))
TOP5 = (("err-top5", "top5-err", "err_top5", "top5_err"), ("top_k_accuracy_5", "top5-acc"))


def read(paths: Iterable[Any]) -> List[Run]:
    """All runs of these files; ValueError names a file that is no log, and its first odd line."""
    paths = [Path(path) for path in paths]
    runs: List[Run] = []
    for path, name in zip(paths, _names(paths)):
        if path.is_dir():
            raise ValueError(f"{path} is a folder. Give its logs, such as {path / '*.log'}")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is a pipe or device, and logs are read twice. Give a file")
        runs += tables.read(path, name) if tables.is_table(path) else _Log(path, name).runs
    for i, run in enumerate(runs):
        run.name = plain(run.name)
        same = sum(other.name == run.name for other in runs[:i])
        run.name += f" [{same + 1}]" if same else ""
    return runs


def _names(paths: List[Path]) -> List[str]:
    """Without endings and folders, or with as much of both as tells them apart."""
    for ending, parts in product((ENDING, "$"), range(1, 20)):
        names = [re.sub(ending, "", "/".join(path.parts[-parts:])) for path in paths]
        if len(set(names)) == len(set(paths)) and "log" not in names:
            break
    return [name[:-len("/log")] if name.endswith("/log") else name for name in names]


class _Log:
    """The runs of one file."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.runs: List[Run] = []
        self.header: Optional[Dict[str, Any]] = None  # arguments that no epoch has followed yet
        self.number, self.epoch = -1, Epoch()
        self.inverse, self.intervals = 0.0, 0  # of the speeds in the epoch's lines of batches
        self.lr: Optional[float] = None
        odd = ""
        batches: List[bytes] = []
        with open(path, "rb") as file:
            for count, line in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), 1):
                batch = b"] Batch [" in line and b"Namespace(" not in line
                if batches and not (batch and len(batches) < AT_ONCE):
                    self._batches(batches)
                if batch:
                    batches.append(line)
                elif not self._other(line) and line.strip() and not odd:
                    odd = f"line {count}: {line.decode(errors='replace').strip()!r:.80}"
        began = bool(self.runs or batches or self.header)
        self.runs = [run for run in self.runs if run.epochs]
        if not self.runs:
            raise ValueError(f"{path} is no training log: " + (
                "it has no whole epoch" if began or not odd else f"its first odd line is {odd}") +
                ". Known: logs of GluonCV and MXNet's Module, log.jsonl, CSV with a column epoch")
        for i, run in enumerate(self.runs):
            run.name += f" ({i + 1})" if len(self.runs) > 1 else ""

    def _batches(self, lines: List[bytes]) -> None:
        """Lines of batches, one behind the other: at once, since most lines of a log are such."""
        for number, entries in groupby(BATCH.findall(b"".join(lines)), itemgetter(0)):
            self._go_to(int(number))
            speeds, scaling = [], b""
            for _, batch, speed, tail in entries:
                speeds.append(float(speed))
                at = tail.find(b"loss-scale=")
                if at >= 0 and tail[at:] != scaling:
                    scaling, values = tail[at:], _values(tail)
                    self.runs[-1].follow(self.number, int(batch), values.get("loss-scale"),
                                         values.get("skipped"))
            self.intervals += sum(speed > 0 for speed in speeds)
            self.inverse += sum(1 / speed for speed in speeds if speed)
            values = _values(tail)
            self.epoch.lr = values.get("lr", self.lr)
            self.epoch.scale, self.epoch.skipped = values.get("loss-scale"), values.get("skipped")
            self.runs[-1].batches = max(self.runs[-1].batches, int(batch) + 1)
        lines.clear()

    def _other(self, line: bytes) -> bool:
        """Whether the line says something."""
        if not line.endswith(b"\n") and not WHOLE.search(line) and not line.startswith(b"{"):
            return False
        if line.startswith(b"{") and self._json(line):
            return True
        found = HEADER.search(line)
        if found:
            self.header = {name: _literal(value) for name, value in
                           ARGUMENT.findall(found[1].decode(errors="replace"))}
            return True
        found = RESULTS.match(line, max(line.rfind(b"[Epoch "), line.rfind(b"Epoch["), 0))
        if found:
            number, kind, text = found.group(1, 2, 3) if found[1] else found.group(4, 5, 6)
            values = _values(text)
            if not values:
                return False
            self._go_to(int(number))
            self._results((kind or b"").lower(), values)
            return True
        found = RATE.search(line)
        if found:
            self.lr = _number(found[1].decode())
        return found is not None

    def _json(self, line: bytes) -> bool:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if isinstance(entry.get("arguments"), dict):
            self.header = entry["arguments"]
        elif type(entry.get("epoch")) is int and entry["epoch"] >= 0:
            self._go_to(entry["epoch"])
            run, values = self.runs[-1], {key: _number(value) for key, value in entry.items()}
            run.epochs[self.number] = epoch = Epoch(*(values.get(key) for key in (
                "err_top1", "err_top5", "samples_per_second", "seconds", "lr", "loss_scale",
                "skipped")))
            run.metric = "accuracy" if "accuracy" in entry else ""
            run.follow(self.number, run.batches - 1, epoch.scale, epoch.skipped)
        else:
            return False
        return True

    def _results(self, kind: bytes, values: Dict[str, float]) -> None:
        epoch, run = self.epoch, self.runs[-1]
        run.epochs[self.number] = epoch
        if self.inverse and epoch.speed is None:  # each line's images are as many
            epoch.speed = self.intervals / self.inverse
        if kind.startswith(b"train") or "train" in values:
            run.metric = run.metric or ("accuracy" if "train" in values else next(iter(values)))
        if kind.startswith(b"validation") or "val" in values:
            top1, top5 = _error(values, *TOP1), _error(values, *TOP5)
            epoch.top1 = epoch.top1 if top1 is None else top1
            epoch.top5 = epoch.top5 if top5 is None else top5
        epoch.seconds = values.get("time cost", values.get("time", epoch.seconds))
        epoch.speed = values.get("speed", epoch.speed)
        if "loss-scale" in values:
            epoch.scale, epoch.skipped = values["loss-scale"], values.get("skipped")
            run.follow(self.number, run.batches - 1, epoch.scale, epoch.skipped)

    def _go_to(self, number: int) -> None:
        """The line is of this epoch: of the run at hand, or of a new one."""
        if number == self.number and self.header is None:
            return
        run = self.runs[-1] if self.runs else None
        back = run is not None and number <= self.number
        if run is None or number == 0 or (
                self.header is not None and not run.started_with(self.header)):
            self.runs.append(Run(self.name, self.header or {}))
            self.lr = None
        elif back or self.header is not None:
            run.notes.append(f"resumed at epoch {number}")
            run.epochs = {n: epoch for n, epoch in run.epochs.items() if n < number}
            run.trace = [point for point in run.trace if point[0] < number]
        self.header, self.number, self.epoch = None, number, Epoch()
        self.inverse, self.intervals = 0.0, 0


def _values(text: bytes) -> Dict[str, float]:
    """All `name=number` and `name: number` that are numbers."""
    found = VALUE.findall(text.decode("ascii", "replace"))
    values = {name.lower(): _number(value) for name, value in found}
    return {name: value for name, value in values.items() if value is not None}


def _number(value: Any) -> Optional[float]:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _error(values: Dict[str, float], errors: Sequence[str],
           accuracies: Sequence[str]) -> Optional[float]:
    return next((values[name] for name in errors if name in values),
                next((1 - values[name] for name in accuracies if name in values), None))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
