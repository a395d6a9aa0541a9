"""Reads CSV of results by epoch.

    model,batch_size,epoch,fp32_top1_err,fp32_img_s,fp16_top1_err,fp16_img_s

Columns left of `epoch` are arguments. Each combination of their values is a run, or several if
the quantities have different prefixes (fp32, fp16). A column `run` names them. Columns right of
`epoch` are quantities or other validation metrics (val_perplexity); others, and errors of training,
are ignored. If there is a `val_acc`, `acc` is of training.

An epoch may have several rows, each with some of its cells; contradictory rows are refused. Epochs
start at 0 or 1. If an error or accuracy is above 1, all are percent. Lines that start with # are
remarks of the report.
"""
import csv
import re
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple, TypeVar

from .runs import Epoch, Run, measurable

Key = TypeVar("Key")
QUANTITIES = {
    "top5": r"top5_err(or)?|err(or)?_top5",
    "top5 accuracy": r"top5_acc(uracy)?|acc(uracy)?_top5",
    "top1": r"top1_err(or)?|err(or)?_top1|err(or)?",
    "top1 accuracy": r"top1_acc(uracy)?|acc(uracy)?_top1|acc(uracy)?",
    "speed": r"img_s|images_per_second|samples_per_second|speed",
    "seconds": r"seconds|time_cost",
    "lr": r"lr|learning_rate",
    "validation_loss": r"(val|valid|validation|test|eval)_loss",
    "loss": r"(?:train(?:ing)?_)?loss",
    "gradient_norm": r"grad(ient)?_norm",
    "loss_scale": r"loss_scale",
    "skipped": r"skipped"}
VALIDATION = re.compile(r"(^|_)(val|valid|validation|test|eval)[_-]", re.IGNORECASE)


def is_table(path: Path) -> bool:
    with open(path, "rb") as file:
        for line in iter(lambda: file.readline(2 ** 16), b""):
            if line.strip() and not line.startswith(b"#"):
                cells = re.sub(rb'[\s"]|\xef\xbb\xbf', b"", line.lower()).split(b",")
                return b"epoch" in cells[:-1]
    return False


def read(path: Path, name: str) -> List[Run]:
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        lines = list(file)
    remarks = [line[1:].strip() for line in lines if line.startswith("#")]
    reader = csv.reader(line if not line.startswith("#") else "\n" for line in lines)
    try:
        rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    header = [cell.strip() for cell in rows.pop(0)[1]] if rows else []
    names = [cell.lower() for cell in header]
    if "epoch" not in names:  # `is_table` reads a line of bytes, and a CSV row may be another
        raise ValueError(f"{path} has no column epoch in its first row: {header}")
    at = names.index("epoch")
    columns = known({i: cell for i, cell in enumerate(header) if i > at})
    if not columns:
        raise ValueError(f"{path} has a column epoch, but right of it no quantity that is known: "
                         f"{header}. Known: top1_err, top5_err, accuracy, img_s, seconds, lr, "
                         "loss_scale, skipped, each with any run's name before it (fp16_top1_err)")
    for line, row in rows:
        if len(row) != len(header):
            raise ValueError(f"{path}, line {line}: {len(row)} cells under {len(header)} columns")
    if not rows:
        raise ValueError(f"{path} has no rows under its header")
    numbers = [_epoch(row[at], f"{path}, line {line}") for line, row in rows]
    if min(numbers) == 1:
        numbers = [number - 1 for number in numbers]
    cells = {i: [_number(row[i], f"{path}, line {line}, {header[i]}") for line, row in rows]
             for i in columns}
    runs: Dict[Tuple[str, ...], Run] = {}
    values: Dict[Any, float] = {}
    results: List[Tuple[Epoch, str, float]] = []
    for i, (prefix, quantity) in columns.items():
        for (line, row), number, value in zip(rows, numbers, cells[i]):
            settings = [cell.strip() for cell in row[:at]]
            if (*settings, prefix) not in runs:
                arguments = dict(zip(map(str.lower, header), settings))
                runs[(*settings, prefix)] = _run(arguments, prefix, name, remarks)
            epoch = runs[(*settings, prefix)].epochs.setdefault(number, Epoch())
            if value is None:
                continue
            results.append((epoch, quantity, value))
            if values.setdefault((*settings, prefix, number, quantity), value) != value:
                raise ValueError(f"{path}, line {line}: epoch {row[at].strip()} has another "
                                 f"{header[i]} than a line before. What tells runs apart stands "
                                 "left of the column epoch")
    put_all(results)
    for run in runs.values():
        run.epochs = dict(sorted(run.epochs.items()))
    return list(runs.values())


def known(names: Mapping[Key, str]) -> Dict[Key, Tuple[str, str]]:
    """Returns the run's name and the quantity of each column that has one. If there are both
    `val_acc` and `acc`, `acc` is of training and is left out."""
    quantities = {key: quantity_of(name) for key, name in names.items()}
    columns = {key: of for key, of in quantities.items() if of}
    validated = {of for key, of in columns.items() if VALIDATION.search(names[key])}
    return {key: of for key, of in columns.items() if not (
        of[1].startswith("top") and of in validated and not VALIDATION.search(names[key]))}


def put_all(values: Iterable[Tuple[Epoch, str, float]]) -> None:
    """Puts values into their epochs, by the quantities of `quantity_of`, the last one of each;
    accuracies become errors. If an error or accuracy is above 1, all are percent."""
    values = list(values)
    whole = 100 if any(value > 1 for _, name, value in values if name.startswith("top")) else 1
    for epoch, quantity, value in values:
        name, _, accuracy = quantity.partition(" ")
        if name.startswith("top"):
            value = 1 - value / whole if accuracy else value / whole
        epoch.put(name, value)


def quantity_of(column: str) -> Optional[Tuple[str, str]]:
    """Returns the run's name, if it precedes the quantity, and the quantity: one of QUANTITIES, or
    the name of another validation metric."""
    name = re.sub("[ -]", "_", column)
    for quantity, pattern in QUANTITIES.items():
        match = re.fullmatch(r"(?!(?:.+_)?train(?:ing)?_(?!loss$))(?:(.+?)_)??"
                             rf"(?:(?:val|valid|validation|test|eval)_)?(?:{pattern})", name,
                             re.IGNORECASE)
        if match:
            return match[1] or "", quantity
    match = re.fullmatch(r"(?:(.+?)_)??(?:val|valid|validation|test|eval)_([\w-]+)", column,
                         re.IGNORECASE)
    return (match[1] or "", match[2].lower()) if match else None


def _run(arguments: Dict[str, str], prefix: str, name: str, remarks: List[str]) -> Run:
    given = {key: value for key, value in arguments.items() if value}
    parts = [given.pop("run")] if "run" in given else [*given.values()]
    run = Run(" ".join([*parts, prefix]).strip() or name, dict(given), notes=list(remarks))
    if prefix and "dtype" not in given:
        run.arguments["dtype"] = Run(prefix).dtype
    return run


def _epoch(cell: str, place: str) -> int:
    if not re.fullmatch(r"\s*\d{1,9}(\.0*)?\s*", cell):
        raise ValueError(f"{place}: {cell!r} is no number of an epoch")
    return int(float(cell.strip()))


def _number(cell: str, place: str) -> Optional[float]:
    """Returns the number in a cell; None if it is empty or not finite."""
    try:
        number = float(cell.strip() or "nan")
    except ValueError:
        raise ValueError(f"{place}: {cell!r} is not a number") from None
    return number if measurable(number) else None
