"""Runs and epochs of training logs."""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from statistics import median
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Tuple

from ..checks import counted
from ..policy import APEX

FLOAT32 = "float32"
ACCURACY = "top-1"
SHARES = (ACCURACY, "mAP")  # shown in percent
# Words in the names of other metrics.
LOWER = frozenset("""perplexity ppl loss entropy nll mae mse rmse mape err error distance mpd wer
                     cer bpc""".split())
HIGHER = frozenset("""accuracy acc f1 fbeta mcc pcc pearson pearsonr spearman spearmanr correlation
                      similarity cos sim auc map ap iou dice bleu psnr ssim recall precision ndcg
                      r2 score""".split())
STEPS = ("loss", "gradient_norm", "lr", "loss_scale", "skipped")  # series
RESUMING = re.compile(r"resume(_\w+)?|(load|start|begin)_epoch")  # arguments that go on with a run
OFF: Tuple[Any, ...] = (None, False, 0, "", [], "none", "None", "False")  # values of arguments


def measurable(number: float) -> bool:
    """Whether a number is finite, and so is a sum of its squares."""
    return abs(number) < 1e100


def plain(value: object) -> str:
    """Returns a value as one line of printable text."""
    text = " ".join(str(value).split())
    return text if text.isprintable() else "".join(
        c if c.isprintable() else "\ufffd" for c in text)


def direction(metric: str) -> str:
    """Returns which values of a metric are better, according to its name."""
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    if words & LOWER:
        return "lower is better"
    return "higher is better" if metric in SHARES or words & HIGHER else "direction not known"


@dataclass
class Epoch:
    """One epoch; errors are shares from 0 to 1, and None is missing in the log.

    `top1` is one minus the measured accuracy or mAP. For another metric it is the value,
    negated if higher is better.
    """
    top1: Optional[float] = None
    top5: Optional[float] = None
    speed: Optional[float] = None  # samples per second
    seconds: Optional[float] = None
    lr: Optional[float] = None
    loss_scale: Optional[float] = None  # at its end
    skipped: Optional[float] = None  # steps of the run up to its end
    loss: Optional[float] = None  # of training
    validation_loss: Optional[float] = None
    gradient_norm: Optional[float] = None
    # whether the log says of no loss that it is infinite or NaN
    finite: bool = field(default=True, init=False)
    metrics: Dict[str, float] = field(default_factory=dict, init=False)  # others, of validation

    def get(self, quantity: str) -> Optional[float]:
        """Returns one of the fields above, or a metric."""
        return getattr(self, quantity) if quantity in vars(self) else self.metrics.get(quantity)

    def put(self, quantity: str, value: float) -> None:
        if quantity in vars(self):
            setattr(self, quantity, value)
        else:
            self.metrics[quantity] = value


def headed(metric: str) -> str:
    """Returns a metric's name with its direction."""
    return f"{metric} ({direction(metric)})"


@dataclass
class Run:
    """One training: its arguments, as far as the log has them, and its epochs.

    Attributes:
        name: the name of the run.
        arguments: its flags by name.
        epochs: an `Epoch` for each number, from 0 on. Its attributes are None where the log lacks
            them: `top1` (one minus the accuracy; of another measure, the value, negated if higher
            is better), `loss`, `validation_loss`, `lr`, `loss_scale`, `skipped` and others.
        steps: what was logged between epochs (loss, gradient_norm, lr, loss_scale, skipped), each
            as (epoch, batch, value).
        notes: remarks on the log: where it was resumed, what its source is.
    """
    name: str
    arguments: Dict[str, Any] = field(default_factory=dict)
    epochs: Dict[int, Epoch] = field(default_factory=dict)
    batches: int = 1  # the most of an epoch that were logged
    steps: Dict[str, List[Tuple[int, int, float]]] = field(default_factory=dict)
    measure: str = ACCURACY  # of validation: see Epoch.top1
    notes: List[str] = field(default_factory=list)

    def get(self, *names: str) -> Any:
        """Returns the first of these arguments that is given and not empty."""
        return next((v for v in map(self.arguments.get, names) if v not in (None, "")), None)

    def started_with(self, arguments: Dict[str, Any]) -> bool:
        """Whether its arguments are these, apart from those that resume a run."""
        return all(self.arguments.get(key) == arguments.get(key)
                   for key in {*self.arguments, *arguments} if not RESUMING.fullmatch(key))

    def add_step(self, epoch: int, batch: int, values: Mapping[str, Optional[float]]) -> None:
        """Adds the values of a step to their series."""
        self.batches = max(self.batches, batch + 1)
        for name in STEPS:
            value = values.get(name)
            if value is not None:
                self.steps.setdefault(name, []).append((epoch, batch, value))

    def forget_from(self, epoch: int) -> None:
        """Removes this epoch and all later ones, because the run was resumed there."""
        self.epochs = {n: e for n, e in self.epochs.items() if n < epoch}
        for series in self.steps.values():
            series[:] = [point for point in series if point[0] < epoch]

    def go_on(self, later: Run) -> None:
        """Adds the epochs of a resumed run."""
        first = min(later.epochs)
        self.forget_from(first)
        self.arguments.update(later.arguments)
        self.epochs.update(later.epochs)
        for name, series in later.steps.items():
            self.steps[name] = self.steps.get(name, []) + series
        self.batches = max(self.batches, later.batches)
        self.notes.append(f"resumed after {counted(first, 'epoch')}")

    # ---- what it measures

    @property
    def is_share(self) -> bool:
        """Whether the metric is a share, shown in percent."""
        return self.measure in SHARES

    @property
    def heading(self) -> str:
        """The measure as the heading of a table's column."""
        return f"{self.measure} %" if self.is_share else headed(self.measure)

    @property
    def measured(self) -> str:
        """The name of its measure."""
        return "top-1 accuracy" if self.measure == ACCURACY else self.measure

    def told(self, top1: float) -> float:
        """Returns the measured value for an epoch's `top1`, in percent if it is a share."""
        if self.is_share:
            return 100 * (1 - top1)
        return -top1 if direction(self.measure) == "higher is better" else top1

    def take_measure(self) -> None:
        """Selects the first other metric of validation as its measure, or else the loss."""
        names = self.metrics
        self.measure = names[0] if names else "validation loss"
        for epoch in self.epochs.values():
            if names:
                value = epoch.metrics.pop(self.measure, None)
            else:
                value, epoch.validation_loss = epoch.validation_loss, None
            epoch.top1 = None if value is None else self.told(value)  # its own inverse
        if not names and self.final is None:
            self.measure = ACCURACY

    @property
    def metrics(self) -> List[str]:
        """The names of the other validation metrics."""
        return list(dict.fromkeys(name for epoch in self.epochs.values() for name in epoch.metrics))

    def metric_at_end(self, name: str) -> Optional[float]:
        """Returns the last validated value of a metric."""
        return next((epoch.metrics[name] for epoch in reversed(list(self.epochs.values()))
                     if name in epoch.metrics), None)

    @property
    def seed(self) -> Optional[str]:
        """The seed in its arguments or else in its name: seed3, seed-3, seed_3."""
        given = self.get("seed")
        if given is not None:
            return plain(given)
        match = re.search(r"seed[-_ ]?(\d+)", self.name, re.IGNORECASE)
        return match[1] if match else None

    @property
    def planned(self) -> Optional[int]:
        """The number of planned epochs."""
        given = self.get("num_epochs", "epochs")
        if isinstance(given, str) and re.fullmatch(r"\d{1,9}", given):  # GluonCV's R-CNNs
            given = int(given)
        return given if isinstance(given, int) and given > 0 else None

    @property
    def done(self) -> int:
        """The number of trained epochs, counted from the start of the training."""
        return max(self.epochs) + 1 if self.epochs else 0

    @property
    def validated(self) -> int:
        """The number of trained epochs at the last validation."""
        return max((n + 1 for n, epoch in self.epochs.items() if epoch.top1 is not None), default=0)

    @property
    def final(self) -> Optional[float]:
        """The measure of its last validated epoch.

        It is an accuracy in percent (0.9 in the log gives 90.0), or the value of another measure.
        """
        last = self.epochs.get(self.validated - 1)
        return None if last is None or last.top1 is None else self.told(last.top1)

    @property
    def dtype(self) -> str:
        """The policy or type of its arguments or else of its name, or "unknown"."""
        name, amp = self.get("policy", "dtype"), self.arguments.get("amp")
        if isinstance(amp, bool) and name in (None, FLOAT32):  # MXNet's own AMP, by GluonCV's flag
            return "float16" if amp else FLOAT32
        if name:
            return plain(APEX.get(name, name) if isinstance(name, str) else name)
        match = re.search(r"(b?)(?:float|fp|(?<=b)f)(16|32)", self.name, re.IGNORECASE)
        return f"{match[1].lower()}float{match[2]}" if match else "unknown"

    @property
    def model(self) -> str:
        """The network's name, or an empty string."""
        given = map(self.arguments.get, (
            "pretrained", "pretrained_symbol", "pretrained_model", "network", "model"))
        name = next((v for v in given if v and isinstance(v, str)), "")  # pretrained can be True
        layers = self.get("num_layers") if "network" in self.arguments else None
        return plain(re.split(r"[\\/]", f"{name}{layers or ''}")[-1])

    @property
    def batch_size(self) -> Optional[int]:
        """The batch size of all devices. GluonCV's argument, beside num_gpus, is for one device."""
        size, gpus = self.get("batch_size"), self.get("num_gpus")
        try:
            return int(size) * max(1, gpus if isinstance(gpus, int) else 1)
        except (TypeError, ValueError, OverflowError):
            match = re.search(r"bs(\d{1,9})", self.name)
            return int(match[1]) if match else None

    @property
    def last(self) -> Optional[Epoch]:
        """The last epoch that was validated."""
        return next((e for e in reversed(list(self.epochs.values()))
                     if (e.top1, e.top5) != (None, None)), None)

    @property
    def best(self) -> Optional[Tuple[int, float]]:
        """The epoch with the lowest error, and that error.

        None if the direction of the measure is unknown.
        """
        errors = [(n, e.top1) for n, e in self.epochs.items() if e.top1 is not None]
        has_direction = direction(self.measure) != "direction not known"
        return min(errors, key=itemgetter(1)) if errors and has_direction else None

    @property
    def speed(self) -> Optional[float]:
        """The median of the epochs' samples per second."""
        return average(median, (e.speed for e in self.epochs.values() if e.speed))

    @property
    def hours(self) -> List[float]:
        """The hours of training at the end of each epoch.

        They lack a last epoch of unknown time, and are empty if an earlier time is missing.
        """
        seconds = [epoch.seconds for epoch in self.epochs.values()]
        if seconds and seconds[-1] is None:  # killed between two lines
            seconds.pop()
        times = [s for s in seconds if s is not None]
        return [] if len(times) < len(seconds) else [s / 3600 for s in accumulate(times)]

    @property
    def dataset(self) -> str:
        """The name of its dataset, or an empty string.

        A file has its folder's name, too: cifar10/train.rec and cifar100/train.rec differ. Other
        folders depend on the machine.
        """
        name = str(self.get("dataset", "data_train", "rec_train") or "")
        parts = [part for part in re.split(r"[\\/]", name) if part not in ("", ".", "..")]
        return plain("/".join(parts[-2:] if parts and "." in parts[-1] else parts[-1:]))

    @property
    def skipped(self) -> Optional[float]:
        """The number of steps that were skipped; None if the log has no loss scale."""
        at_ends = [epoch.skipped for epoch in self.epochs.values() if epoch.skipped is not None]
        within = [value for *_, value in self.steps.get("skipped", [])]
        return max([*at_ends, *within], default=None)

    def reached(self, accuracy: float, by_time: bool = False) -> Optional[float]:
        """Returns the epochs, or the hours, of training until this validation accuracy."""
        ends = self.hours if by_time else [n + 1.0 for n in self.epochs]
        return next((end for end, e in zip(ends, self.epochs.values())
                     if e.top1 is not None and self.is_share
                     and 1 - e.top1 >= accuracy - 1e-9), None)


def average(kind: Callable[[Any], float], values: Iterable[Optional[float]]) -> Optional[float]:
    """Returns the mean or the median of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return kind(numbers) if numbers else None


def unit_of_time(runs: List[Run]) -> Tuple[str, float]:
    """Returns the largest unit of hours, minutes and seconds in which the longest run takes at
    least 1, and its number per hour."""
    longest = max((run.hours[-1] for run in runs if run.hours), default=1.0)
    return next((unit for unit in (("hours", 1.0), ("minutes", 60.0)) if longest * unit[1] >= 1),
                ("seconds", 3600.0))
