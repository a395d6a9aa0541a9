"""Logs in, tables and plots out."""
import math
from pathlib import Path
from typing import Any, Callable, Iterable, List, Optional

from ..files import replace_file
from .compare import pairs
from .read import read
from .runs import Run
from .summary import remarks, rows


def report(logs: Iterable[Any], folder: Any, title: str = "Training report",
           accuracy: Optional[float] = None) -> Path:
    """Writes report.html, report.md, summary.csv and the plots (PNG and SVG) into a folder.

    Args:
        logs: Files: logs of GluonCV and of MXNet's Module, log.jsonl of our recipes, CSV of errors
            by epoch (a column `epoch`, and such as fp16_top1_err, fp16_img_s).
        folder: Where to write; made if it is not there.
        title: Of the report.
        accuracy: The table says how long each run took to reach it: 0.76 for 76 %. By default
            the whole percent that all runs reach.

    Returns:
        The path of report.html.
    """
    from .plots import plots  # here, since importing matplotlib takes its time
    from .write import html_page, markdown, table_csv

    if accuracy is not None and not 0 < accuracy < 1:
        raise ValueError(f"accuracy is between 0 and 1. Received: {accuracy}")
    logs = [logs] if isinstance(logs, (str, Path)) else list(logs)
    if not logs:
        raise ValueError("report wants one log or more. Received: none")
    runs = read(logs)
    found = pairs(runs)
    target = _reached_by_all(runs) if accuracy is None else accuracy
    table, notes, pictures = rows(runs, found, target), remarks(runs, found), plots(runs)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"report.html": html_page(title, table, notes, pictures, runs).encode(),
             "report.md": markdown(title, table, notes, pictures).encode(),
             "summary.csv": table_csv(table).encode()}
    for picture in pictures:
        files[f"{picture.name}.png"] = picture.png
        files[f"{picture.name}.svg"] = picture.svg.encode()
    for name, content in files.items():
        replace_file(str(folder / name), _writer(content))
    return folder / "report.html"


def _writer(content: bytes) -> Callable[[str], None]:
    def write(path: str) -> None:
        Path(path).write_bytes(content)
    return write


def _reached_by_all(runs: List[Run]) -> Optional[float]:
    """The whole percent of accuracy, from 1 on, that every run reached once."""
    best = [run.best[1] for run in runs if run.best]
    return (math.floor(100 * (1 - max(best)) + 1e-9) / 100 if best and max(best) < 1 else 0) or None


__all__ = ["Run", "read", "report"]
