"""Reads training logs: GluonCV's, MXNet Module's, our log.jsonl, and CSV of errors by epoch.

A log is read line by line; prefixes of lines (a time, a logger's name) are ignored. Results of each
epoch are kept, so memory grows with epochs, not with lines:

    Namespace(...)                     the arguments of a run
    Epoch[3] Batch [99]  Speed: ...    its speed, learning rate, loss scale
    [Epoch 3] validation: ...          results, GluonCV's
    mAP=0.7 (behind [Epoch 3])         results of detection, GluonCV's
    Epoch[3] Validation-accuracy=...   results, Module's
    {"arguments": {...}, "run": ...}   the arguments of a run and, if it has one, its name, ours
    {"epoch": 3, ...}                  results, ours
    {"epoch": 3, "batch": 19, ...}     a step, ours

A repeated epoch replaces the former one and all later ones: the run was resumed. Other arguments
start a new run, and so does an epoch 0 after later ones.
"""
from __future__ import annotations

import ast
import codecs
import json
import os
import re
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

from ..checks import counted, iterator
from . import events, tables
from .runs import Epoch, Run, measurable, plain

LONGEST_LINE = 2 ** 16  # a file without line ends is read in pieces
HEADER = re.compile(rb"Namespace\((.*)\)")
BATCH = re.compile(rb"Epoch[\[ ](\d{1,9})\](?: Batch \[|\[Batch )(?:\d+-)?(\d{1,9})\],?\s+"
                   rb"((?:LR: \S+ )?)Speed: (\d+(?:\.\d+)?) samples/sec(.*)")
RESULTS = re.compile(rb"\[Epoch (\d{1,9})\] (training: |validation: )?(.*)|"
                     rb"Epoch\[(\d{1,9})\](?: |(?: Rank\[0\](?: Batch\[\d+\])?)?\t(?=Validation-|"
                     rb"Time cost=|Speed: [\d.]+ samples/sec\r?$))"
                     rb"(Train-|Validation-)?((?:\S+|Time cost)=.*|Speed: .*)")
RATE = re.compile(rb"(?:Update\[\d+\]: Change|\[Epoch \d+\] Set) learning rate to (\S+)")
MEAN_PRECISION = re.compile(rb"mAP=(\d{1,3}(?:\.\d+)?(?:e-\d+)?)")
VERSION = 2  # of log.jsonl
EPOCH_LINE = '{"epoch": 0, "err_top1": 0.4, "loss": 1.2}'
STEP_LINE = '{"epoch": 0, "batch": 19, "loss": 2.1}'
# A number that was cut off must not pass for a shorter number nor, if another log continues in the
# same line, for a longer one.
WHOLE = re.compile(rb"\.\d{6}$|Time cost=\d+\.\d{3}$")
VALUE = re.compile(r"([A-Za-z][\w-]*(?: cost)?)(?:=|: )"
                   r"([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))(?=s?(?:[\s,;)]|$))")
ARGUMENT = re.compile(r"""(\w+)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\[[^]]*\]|\([^)]*\)|[^,]*)""")
ENDING = r"\.(log|jsonl?|csv|txt)$"  # of a file's name: no part of a run's
# Names in lines of GluonCV and of MXNet's Module, and those of the same quantities in tables.
COLUMNS = {"val": "val_acc", "train": "train_acc", "top_k_accuracy_5": "top5_acc",
           "cross-entropy": "loss", "time": "seconds", "training cost": "seconds"}
# Other formats than logs of lines: functions that detect and read them.
READERS = ((events.is_events, events.read), (tables.is_table, tables.read))


def read_logs(paths: Union[Iterable[Any], str, os.PathLike[str]]) -> List[Run]:
    """Returns the runs of these logs.

    Args:
        paths: as `logs` of `report`: one path, or several.

    Returns:
        A list of `Run`.

    Raises:
        ValueError: a file is no log, or is damaged; the message names its first unreadable line.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    paths = [Path(path) for path in iterator(paths, "logs are a path, or a list of paths")]
    runs: List[Run] = []
    folder: Optional[Path] = None  # of the last run, if it is of TensorBoard's files
    for path, name in zip(paths, _names(paths)):
        if path.is_dir():
            raise ValueError(f"{path} is a folder. Give its logs, such as {path / '*.log'}")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is a pipe or device, and logs are read twice. Give a file")
        read_one = next((read_ for fits, read_ in READERS if fits(path)), read_log)
        runs_in_file = read_one(path, name)
        if all(run.final is None for run in runs_in_file):
            for run in runs_in_file:
                run.take_measure()
        for run in runs_in_file:
            _check(run, path)
        same_folder = read_one is events.read and path.parent == folder
        folder = path.parent if read_one is events.read else None
        if same_folder and events.continues(runs_in_file[0], runs[-1]):
            runs[-1].go_on(runs_in_file[0])
        else:
            runs += runs_in_file
    same: Counter[str] = Counter()
    for run in runs:
        run.name = plain(run.name)
        same[run.name] += 1
        run.name += f" [{same[run.name]}]" if same[run.name] > 1 else ""
    return runs


def _check(run: Run, path: Path) -> None:
    """Refuses an error rate that is not a share. Removes impossible times and speeds."""
    for number, epoch in run.epochs.items():
        for error in (epoch.top1 if run.is_share else None, epoch.top5):
            if error is not None and not -1e-6 <= error <= 1 + 1e-6:
                raise ValueError(f"{path}: epoch {number} has an error of {error:g} (an accuracy "
                                 f"of {1 - error:g}). Valid: shares from 0 to 1")
        if epoch.seconds is not None and epoch.seconds < 0:  # the clock was set back
            epoch.seconds = None
        if epoch.speed is not None and epoch.speed <= 0:
            epoch.speed = None


def _names(paths: List[Path]) -> List[str]:
    """Returns a name for each file: its own without the ending, or that of its folder for a log.*
    and for TensorBoard's files; with further folders if names are not unique."""
    places = [path.absolute().parent if re.match(r"log\.|events\.", path.name) else
              path.parent / re.sub(ENDING, "", path.name) for path in paths]
    for parts in range(1, 20):
        names = ["/".join(place.parts[-parts:]) for place in places]
        if len({*names}) == len({*places}):
            break
    return names


def read_log(path: Path, name: str) -> List[Run]:
    """Reads the runs of a log. Without one, a ValueError names the first invalid line."""
    reader, odd, is_json, of_monitor = _Reader(path, name), "", False, False
    with open(path, "rb") as file:
        for count, line in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), 1):
            line = line[3:] if count == 1 and line.startswith(codecs.BOM_UTF8) else line
            if (b"] Batch [" in line or b"][Batch " in line) and b"Namespace(" not in line:
                if line.endswith(b"\n"):  # else it was cut, maybe in the middle of a number
                    reader.batch(line)
            elif not reader.other(line) and line.strip() and not odd:
                odd = f"line {count}: {line.decode(errors='replace').strip()!r:.80}"
                is_json = line.lstrip().startswith((b"{", b"["))
                of_monitor = b'"node": ' in line and b'"bins": ' in line
    tables.put_all(reader.results)
    began = bool(reader.runs or reader.header)
    runs = [run for run in reader.runs if run.epochs]
    if not runs and of_monitor:
        raise ValueError(f"{path} is no training log: it is a Monitor's file. Use: "
                         f"gluon-amp xray {path}")
    if not runs:
        json_lines = ". JSON lines of your own need the fields of log.jsonl (docs/recipes.md): " \
            f"{EPOCH_LINE} for an epoch, {STEP_LINE} for a step" if is_json and not began else ""
        raise ValueError(f"{path} is no training log: " + (
            "it has no whole epoch" if began or not odd else f"its first odd line is {odd}") +
            ". Known: logs of GluonCV and MXNet's Module, log.jsonl, TensorBoard's event files, "
            f"CSV with a column epoch{json_lines}")
    for i, run in enumerate(runs):
        run.name += f" ({i + 1})" if len(runs) > 1 and run.name == name else ""
    return runs


class _Reader:
    """Parses the lines of one file into runs."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.runs: List[Run] = []
        self.header: Optional[Dict[str, Any]] = None  # arguments before the first epoch
        self.run_name = ""  # the run's name, if the line of its arguments has one
        self.results: List[Tuple[Epoch, str, float]] = []  # which may be percent
        self.number, self.epoch = -1, Epoch()
        self.inverse, self.intervals = 0.0, 0  # of the speeds in the epoch's lines of batches
        self.lr: Optional[float] = None

    def batch(self, line: bytes) -> None:
        """Parses a line of a batch."""
        match = BATCH.search(line)
        if match is None:
            return
        number, batch, rate, speed, tail = match.groups()
        self._go_to(int(number))
        run, values = self.runs[-1], _values(rate + b" " + tail)
        if float(speed) > 0:
            self.intervals += 1
            self.inverse += 1 / float(speed)
        self.epoch.lr = values.get("lr", self.lr)
        self.epoch.loss_scale, self.epoch.skipped = values.get("loss-scale"), values.get("skipped")
        run.add_step(self.number, int(batch), {
            "loss_scale": self.epoch.loss_scale, "skipped": self.epoch.skipped})

    def other(self, line: bytes) -> bool:
        """Parses any other line; returns whether it has information."""
        if not line.endswith(b"\n") and not WHOLE.search(line) and not line.startswith(b"{"):
            return False
        if line.startswith(b"{") and self._json(line):
            return True
        begin = max(line.rfind(b"[Epoch "), line.rfind(b"Epoch["), 0)
        for match, read in ((HEADER.search(line), self._arguments),
                            (RATE.search(line), self._rate),
                            (RESULTS.match(line, begin), self._line_of_results)):
            if match and read(match):
                return True
        return self._precision(line)

    def _arguments(self, match: re.Match[bytes]) -> bool:
        self.header = {name: _literal(value) for name, value in
                       ARGUMENT.findall(match[1].decode(errors="replace"))}
        return True

    def _rate(self, match: re.Match[bytes]) -> bool:
        self.lr = _number(match[1].decode())
        return True

    def _line_of_results(self, match: re.Match[bytes]) -> bool:
        number, kind, text = match.group(1, 2, 3) if match[1] else match.group(4, 5, 6)
        values = _values(text.replace(b"Validation-", b""))
        of_detection = text.strip() == b"Validation:"  # what follows is its
        if values or of_detection:
            self._go_to(int(number))
        if values:
            self._results((kind or b"").lower(), values)
        return bool(values or of_detection)

    def _precision(self, line: bytes) -> bool:
        """Parses a line of detection: mAP follows the lines of the classes."""
        match = MEAN_PRECISION.fullmatch(line.strip())
        if not self.runs or not match or not line.endswith(b"\n"):
            return False
        self.epoch.top1, self.runs[-1].measure = 1 - float(match[1]), "mAP"
        self.runs[-1].epochs[self.number] = self.epoch
        return True

    def _json(self, line: bytes) -> bool:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if isinstance(entry.get("arguments"), dict):
            version = entry.get("version", 1)
            if type(version) is not int or not 1 <= version <= VERSION:
                raise ValueError(f"{self.path}: log.jsonl of version {version!r:.20}. Valid: 1 to "
                                 f"{VERSION}")
            self.header, self.run_name = entry["arguments"], str(entry.get("run", ""))
        elif type(entry.get("epoch")) is int and 0 <= entry["epoch"] < 10 ** 9:
            values = {key: _number(value) for key, value in entry.items()}
            self._go_to(entry["epoch"])
            if "batch" in entry:
                self.runs[-1].add_step(self.number, int(values["batch"] or 0), values)
            else:
                self._epoch(values, entry)
        else:
            return False
        return True

    def _epoch(self, values: Dict[str, Optional[float]], entry: Dict[str, Any]) -> None:
        run = self.runs[-1]
        run.epochs[self.number] = epoch = Epoch(*(values.get(key) for key in (
            "err_top1", "err_top5", "samples_per_second", "seconds", "lr", "loss_scale",
            "skipped", "loss", "validation_loss")))
        for key, value in values.items():
            if value is not None and tables.VALIDATION.match(key):
                prefix, quantity = tables.quantity_of(key) or ("", "")
                if quantity.startswith("top") and not prefix:
                    if epoch.get(quantity.split()[0]) is None:  # beside err_top1
                        self.results.append((epoch, quantity, value))
                elif quantity != "validation_loss":
                    epoch.metrics[tables.VALIDATION.sub("", key, 1)] = value
        epoch.finite = None not in [values[name] for name in ("loss", "validation_loss")
                                    if isinstance(entry.get(name), float)]

    def _results(self, kind: bytes, values: Dict[str, float]) -> None:
        epoch, run = self.epoch, self.runs[-1]
        run.epochs[self.number] = epoch
        if self.inverse and epoch.speed is None:  # each line's images are as many
            epoch.speed = self.intervals / self.inverse
        prefix = "val_" if kind.startswith(b"validation") else ""
        for name, value in values.items():
            column = prefix + COLUMNS.get(name, name)
            quantity = (tables.quantity_of(column) or ("", ""))[1]
            if quantity and (tables.VALIDATION.match(column) or not quantity.startswith("top")):
                self.results.append((epoch, quantity, value))

    def _go_to(self, number: int) -> None:
        """Sets the current epoch, of the current run or of a new one."""
        if number == self.number and self.header is None:
            return
        run = self.runs[-1] if self.runs else None
        back = run is not None and number <= self.number
        if run is None or number == 0 or (
                self.header is not None and not run.started_with(self.header)):
            self.runs.append(Run(self.run_name or self.name, self.header or {}))
            self.lr = None
        elif back or self.header is not None:
            run.notes.append(f"resumed after {counted(number, 'epoch')}")
            run.forget_from(number)
        self.header, self.run_name, self.number, self.epoch = None, "", number, Epoch()
        self.inverse, self.intervals = 0.0, 0


def _values(text: bytes) -> Dict[str, float]:
    """Returns all numbers of the form `name=number` and `name: number`."""
    values = {}
    for name, value in VALUE.findall(text.decode("ascii", "replace")):
        number = _number(value)
        if number is not None:
            values[name.lower()] = number
    return values


def _number(value: Any) -> Optional[float]:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if measurable(number) else None


@lru_cache(maxsize=10_000)  # runs have most of their arguments in common
def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
