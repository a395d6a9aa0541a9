"""What a report says in words and numbers: a row for each run, and what has to be said besides."""
from typing import Dict, List, Optional

from .compare import Pair, recipe
from .runs import Run, unit_of_time

SMOOTHED = ("label_smoothing", "mixup")
Row = Dict[str, str]  # column: text, empty where the log does not say


def rows(runs: List[Run], pairs: List[Pair], accuracy: Optional[float]) -> List[Row]:
    """One row for each run. Errors and accuracies are of the last epoch, the speed is the median
    over epochs, times are of training without validation."""
    speedups = {id(pair.low): pair for pair in pairs}
    unit, per_hour = unit_of_time(runs)
    several = len({run.dataset for run in runs}) > 1
    references = {id(pair.float32) for pair in pairs if pair.speedup}
    found = []
    for run in runs:
        last, best, hours, pair = run.last, run.best, run.hours, speedups.get(id(run))
        speedup = _text(1.0 if id(run) in references else pair.speedup if pair else None, ".2f")
        if pair and pair.differences:
            speedup = "recipes differ"
        to = run.hours_to(accuracy) if accuracy else None
        found.append({
            "run": run.name,
            "model": run.model,
            "dataset": run.dataset if several else "",
            "batch size": _text(run.batch_size, "d"),
            "dtype": run.dtype,
            "epochs": str(len(run.epochs)),
            "top-1 %": _accuracy(last.top1 if last else None),
            "top-5 %": _accuracy(last.top5 if last else None),
            "best top-1 %": _accuracy(best[1] if best else None),
            "best epoch": _text(best[0] if best else None, "d"),
            "images/s": _text(run.speed, ".0f" if (run.speed or 0) >= 100 else ".1f"),
            unit: _text(hours[-1] * per_hour if hours else None, ".3g"),
            "speedup": speedup,
            f"{unit} to {100 * (accuracy or 0):g} %": _text(
                None if to is None else to * per_hour, ".3g")})
    return [{column: row[column] for column in found[0] if any(r[column] for r in found)}
            for row in found]


def _accuracy(error: Optional[float]) -> str:
    return "" if error is None else f"{100 * (1 - error):.2f}"


def _text(value: Optional[float], form: str) -> str:
    return "" if value is None else format(value, form)


def remarks(runs: List[Run], pairs: List[Pair]) -> List[str]:
    """What a reader must know before comparing."""
    found = []
    for pair in pairs:
        if pair.differences:
            found.append(f"{pair.low.name} and {pair.float32.name} are not the same recipe, and no "
                         f"speedup is claimed. They differ in: {pair.explain()}.")
    for run in runs:
        smoothed = [name for name in SMOOTHED if name in recipe(run)]
        if smoothed and run.metric:
            found.append(f"{run.name} was trained with {' and '.join(smoothed)}: the {run.metric} "
                         "that its log gives of training is of changed labels. It is no accuracy, "
                         "and is left out.")
        planned = run.get("num_epochs", "epochs")
        if isinstance(planned, int) and run.epochs and max(run.epochs) + 1 < planned:
            found.append(f"{run.name} stops after epoch {max(run.epochs)}, of 0 to {planned - 1}.")
        if run.epochs and min(run.epochs) > 0 and not run.get("load_epoch", "resume_epoch"):
            found.append(f"{run.name} begins with epoch {min(run.epochs)}; times count from there.")
    sources: Dict[str, List[str]] = {}
    for run in runs:
        for note in run.notes:
            sources.setdefault(note, []).append(run.name)
    found += [note if len(names) == len(runs) else f"{', '.join(names)}: {note}"
              for note, names in sources.items()]
    if any(pair.speedup for pair in pairs):
        found.append("Speedup: images per second, or else time, against the float32 run of the "
                     "same recipe. Whether both had the machine to themselves, logs do not say.")
    return found
