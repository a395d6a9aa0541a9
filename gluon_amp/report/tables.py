"""Reads CSV of results by epoch.

    model,batch_size,epoch,fp32_top1_err,fp32_img_s,fp16_top1_err,fp16_img_s

Columns left of `epoch` are arguments: each combination of their values is a run, or several, when
what stands before the names of the quantities differs (fp32, fp16). A column `run` names them.
Columns right of `epoch` that are no quantity are passed over. Errors and accuracies above 1 are
percent. Lines that begin with # are remarks, and stand in the report.
"""
import csv
import re
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from .runs import Epoch, Run

QUANTITIES = {
    "top5": r"(val_)?(top5_err(or)?|err(or)?_top5)",
    "top5 accuracy": r"(val_)?(top5_acc(uracy)?|acc(uracy)?_top5)",
    "top1": r"(val_)?(top1_err(or)?|err(or)?_top1|err(or)?)",
    "top1 accuracy": r"(val_)?(top1_acc(uracy)?|acc(uracy)?_top1|acc(uracy)?)",
    "speed": r"img_s|images_per_second|samples_per_second|speed",
    "seconds": r"seconds|time_cost",
    "lr": r"lr|learning_rate",
    "scale": r"loss_scale",
    "skipped": r"skipped"}


def is_table(path: Path) -> bool:
    with open(path, "rb") as file:
        for line in iter(lambda: file.readline(2 ** 16), b""):
            if line.strip() and not line.startswith(b"#"):
                return b"epoch" in re.sub(rb'[\s"]|\xef\xbb\xbf', b"", line.lower()).split(b",")
    return False


def read(path: Path, name: str) -> List[Run]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        lines = list(file)
    remarks = [line[1:].strip() for line in lines if line.startswith("#")]
    reader = csv.reader(line if not line.startswith("#") else "\n" for line in lines)
    rows = [(reader.line_num, row) for row in reader if row]
    header = [cell.strip() for cell in rows.pop(0)[1]]
    at = [cell.lower() for cell in header].index("epoch")
    columns = {i: found for i, cell in enumerate(header[at + 1:], at + 1)
               for found in [_quantity(cell)] if found}
    if not columns:
        raise ValueError(f"{path} has a column epoch, but right of it no quantity that is known: "
                         f"{header}. Known: top1_err, top5_err, accuracy, img_s, seconds, lr, "
                         "loss_scale, skipped, each with any run's name before it (fp16_top1_err)")
    for line, row in rows:
        if len(row) != len(header):
            raise ValueError(f"{path}, line {line}: {len(row)} cells under {len(header)} columns")
    runs: Dict[Tuple[str, ...], Run] = {}
    for i, (prefix, quantity) in columns.items():
        values = [_number(row[i], f"{path}, line {line}, {header[i]}") for line, row in rows]
        if quantity.startswith("top"):
            whole = 100 if max(v for v in (*values, 0) if v is not None) > 1 else 1
            values = [v if v is None else 1 - v / whole if "accuracy" in quantity else v / whole
                      for v in values]
        for (line, row), value in zip(rows, values):
            key = (*row[:at], prefix)
            if key not in runs:
                runs[key] = _run(dict(zip(header, row[:at])), prefix, name, remarks)
            number = _number(row[at], f"{path}, line {line}, epoch")
            epoch = runs[key].epochs.setdefault(int(number or 0), Epoch())
            setattr(epoch, quantity.split()[0], value)
    for run in runs.values():
        run.epochs = dict(sorted(run.epochs.items()))
    return list(runs.values())


def _quantity(column: str) -> Optional[Tuple[str, str]]:
    """The run's name, as far as it stands before the quantity, and the quantity."""
    for quantity, pattern in QUANTITIES.items():
        found = re.fullmatch(rf"(?:(.+?)_)??(?:{pattern})", column, re.IGNORECASE)
        if found:
            return found[1] or "", quantity
    return None


def _run(arguments: Dict[str, str], prefix: str, name: str, remarks: List[str]) -> Run:
    given = {key: value for key, value in arguments.items() if value}
    parts = [given.pop("run")] if "run" in given else [*given.values()]
    run = Run(" ".join([*parts, prefix]).strip() or name, dict(given), notes=list(remarks))
    if prefix and "dtype" not in given:
        run.arguments["dtype"] = Run(prefix).dtype
    return run


def _number(cell: str, place: str) -> Optional[float]:
    if not cell.strip():
        return None
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"{place}: {cell!r} is not a number") from None
