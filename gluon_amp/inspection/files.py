"""The files of an X-ray: a page, a table, a line for each tensor and step, pictures."""
import csv
import json
import os
import shutil
from typing import Any, Dict, Iterable, List, Union

from .statistics import Counts
from .table import as_number, row, rows_of_weights

_COLUMNS = ("place", "tensor", "kind", "operator", "format", "numbers", "zero", "flushed",
            "subnormal", "overflowed", "not_finite", "smallest", "largest", "bits_below",
            "bits_above", "own_snr", "snr", "inherited_snr", "without_master")


def save(view: Any, folder: Union[str, "os.PathLike[str]"]) -> str:
    """Writes the files into a new folder: whole, or not there. Returns the path of the page."""
    folder = os.fspath(folder)
    if os.path.exists(folder):
        raise FileExistsError(f"{folder} exists: xray writes into a new folder")
    beside = f"{folder.rstrip(os.sep)}.writing"
    shutil.rmtree(beside, ignore_errors=True)
    os.makedirs(beside)
    try:
        _write_all(view, beside)
        os.rename(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return os.path.join(folder, "xray.html")


def _write_all(view: Any, folder: str) -> None:
    from .page import page
    _write(os.path.join(folder, "xray.html"), page(view))
    _summary(view, os.path.join(folder, "summary.csv"))
    _write(os.path.join(folder, "xray.jsonl"), "".join(json.dumps(line, allow_nan=False) + "\n"
                                                     for line in lines(view)))
    try:
        from .pictures import draw
    except ImportError:  # matplotlib is in the extra `results`
        return
    draw(view, folder)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _summary(view: Any, path: str) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        for line in (*(row(view, tensor) for tensor in view.worst()), *rows_of_weights(view)):
            writer.writerow({key: _cell(value) for key, value in line.items()})


def _cell(value: object) -> Any:
    if isinstance(value, str) and value[:1] in "=+-@":
        return "'" + value  # a spreadsheet would take it for a formula
    return f"{value:.6g}" if isinstance(value, float) else value


def lines(view: Any) -> Iterable[Dict[str, Any]]:
    """The lines of xray.jsonl: one of the run; one for each tensor and step; then one for each
    parameter, and one for what all steps added to it. `bins` holds pairs of an exponent and how
    many numbers have it."""
    found: List[Dict[str, Any]] = [
        {"node": f.node, "tensor": f.tensor, "reason": f.reason, "detail": f.detail}
        for f in view.findings]
    yield {"version": 1, "network": view.name, "loss_scale": view.loss_scale, "keep": view.keep,
           "findings": found, "left_out": view.left_out, "lost": view.lost,
           "first_overflow": str(view.first_overflow) if view.first_overflow else None}
    for number, (scale, counted) in enumerate(view.steps):
        for tensor in view.tensors:
            counts = counted.get(tensor.key)
            if counts is None:
                continue
            yield {"step": number, "scale": scale, "node": tensor.key.node,
                   "backward": tensor.key.backward, "index": tensor.key.which,
                   "place": tensor.place, "kind": tensor.kind, "operator": tensor.op,
                   "format": tensor.format.name, "overflowed": counts.overflowed,
                   "flushed": counts.flushed, "own_snr": as_number(counts.own_snr),
                   **_histogram(counts)}
    for weight in view.weights:
        yield {"kind": "weight", "parameter": weight.name, "format": weight.format.name,
               **_histogram(weight.counts)}
        if weight.updates is not None:
            yield {"kind": "update", "parameter": weight.name,
                   "without_master": weight.without_master, **_histogram(weight.updates)}


def _histogram(counts: Counts) -> Dict[str, Any]:
    return {"zero": counts.zero, "infinite": counts.infinite, "nan": counts.nan,
            "bins": [[int(i) - 127, int(counts.bins[i])] for i in counts.bins.nonzero()[0]]}
