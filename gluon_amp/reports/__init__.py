"""Reports from training logs: a verdict, tables and plots."""
from __future__ import annotations

import math
import numbers
import re
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence

from ..checks import imports_of
from ..files import replace_bytes
from .log import Log
from .read import read_logs
from .runs import Run

__all__ = ["Log", "Run", "read_logs", "report"]

MARGIN = 0.5  # points
MOST_SECTIONS = 4  # sections with plots


def report(logs: Iterable[Any], folder: Any, title: str = "Training report",
           accuracy: Optional[float] = None, margin: float = MARGIN,
           claim_speed: bool = False) -> Path:
    """Writes report.html, report.md, tables (CSV) and the plots (PNG and SVG) into a folder.

    Runs that differ only in their seed are one group. Float16 is compared with float32 of the same
    recipe: is there a difference, and is it smaller than the margin?

    Args:
        logs: a path, or several: logs of GluonCV and of MXNet's Module, log.jsonl of our recipes,
            TensorBoard's event files (with the extra `tensorboard`), CSV of errors by epoch (a
            column `epoch`, and columns such as fp16_top1_err, fp16_img_s).
        folder: the folder to write, created if needed.
        title: the title of the report.
        accuracy: the target of the time to accuracy: 0.76 for 76 %. By default the highest whole
            percent that nine in ten finished runs of a dataset reach.
        margin: the margin of equivalence in points, or in percent of float32's mean for measures
            that are not shares, such as a perplexity.
        claim_speed: whether the runs had exclusive use of the machine, so that speeds are compared.
            By default only for runs with the recipes' --claim-speed.

    Returns:
        The path of report.html.

    Raises:
        ValueError: a file is not a training log, or an argument is out of range.
    """
    if accuracy is not None and not _is_between(accuracy, 1):
        raise ValueError(f"accuracy is between 0 and 1. Received: {accuracy!r}")
    check_margin(margin)
    runs = read_logs(logs)
    if not runs:
        raise ValueError("report needs one log or more. Received: none")
    for run in runs if claim_speed else []:
        run.arguments["claim_speed"] = True

    files = _files(runs, title, accuracy, margin)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_bytes(str(folder / name), content)
    return folder / "report.html"


def check_margin(margin: object) -> None:
    """Raises ValueError for a margin that no report takes."""
    if not _is_between(margin, 100):
        raise ValueError(f"margin is a number of points between 0 and 100. Received: {margin!r}")


def _is_between(value: object, most: int) -> bool:
    """Whether a value is a number between 0 and `most`."""
    return isinstance(value, numbers.Real) and 0 < float(value) < most


def _files(runs: List[Run], title: str, accuracy: Optional[float],
           margin: float) -> Dict[str, bytes]:
    """Returns the content of each file."""
    with imports_of("tools", "a report"):  # matplotlib and scipy
        from . import compare
        from .plots import forest, plots
        from .summary import group_rows, headline, remarks, run_rows, verdict_rows
        from .write import Section, html_page, markdown, table_csv

    groups = compare.groups(runs)
    comparisons = compare.compare(groups)
    parts: List[Section] = []
    sections = compare.sections(groups)
    datasets = [of[0].section[0] for of in sections]
    for of in sections:
        dataset, measure = of[0].section
        title_of = f"{dataset}, {measure}" if datasets.count(dataset) > 1 else dataset
        target = _reached_by_most(of) if accuracy is None else accuracy
        mine = [c for c in comparisons if c.low.section == of[0].section]
        drawn = []
        if len(parts) < MOST_SECTIONS:
            drawn = [*forest(mine, margin), *plots(of)]
        parts.append(Section(title_of if dataset else measure, headline(mine, margin),
                             group_rows(of, target), run_rows(of, target), drawn))
        if len(sections) > 1:
            slug = re.sub(r"[^a-z0-9]+", "_", parts[-1].title.lower()).strip("_")[:40]
            parts[-1].prefix = f"{len(parts)}-{slug}-"
    notes = remarks(groups, comparisons)
    if len(parts) > MOST_SECTIONS:
        notes.append(f"Of {len(parts)} datasets the first {MOST_SECTIONS} are drawn: give the logs "
                     "of one to see its plots.")
    verdicts = verdict_rows(comparisons, margin)
    files = {"report.html": html_page(title, parts, verdicts, notes, groups).encode(),
             "report.md": markdown(title, parts, verdicts, notes).encode(),
             "summary.csv": table_csv([row for section in parts for row in section.runs]).encode(),
             "groups.csv": table_csv([row for section in parts for row in section.groups]).encode(),
             "verdicts.csv": table_csv(verdicts).encode()}
    for section in parts:
        for picture in section.plots:
            files[f"{section.prefix}{picture.name}.png"] = picture.png
            files[f"{section.prefix}{picture.name}.svg"] = picture.svg.encode()
    return files


def _reached_by_most(groups: Sequence[Any]) -> Optional[float]:
    """Returns the highest whole percent of accuracy that nine in ten of these groups' finished runs
    have reached, so that a single diverged run does not matter."""
    finished = [run for group in groups for run in group.finished]
    runs = finished or [run for group in groups for run in group.runs]
    best = sorted(run.best[1] for run in runs if run.best and run.is_share)
    error = best[len(best) - 1 - len(best) // 10] if best else 1
    return (math.floor(100 * (1 - error) + 1e-9) / 100 if error < 1 else 0) or None
