"""What a training writes about itself: log.jsonl, TensorBoard's event files, MLPerf's log lines.

docs/recipes.md says what stands in log.jsonl.
"""
import json
import logging
import math
import time
from typing import Any, Dict, Iterable, List, Optional, Tuple

from ..files import replace_text
from ..parallel.consistency import average_statistics
from .ranks import Ranks

VERSION = 2
log = logging.getLogger("gluon_amp.recipes")


def add_arguments(parser: Any) -> None:
    """The flags that a `TrainingLog` reads."""
    add = parser.add_argument
    add("--tensorboard", metavar="FOLDER",
        help="also write TensorBoard's event files there: pip install tensorboard, or mxboard")
    add("--mlperf", action="store_true", help="also print MLPerf's :::MLLOG lines")
    add("--claim-speed", action="store_true",
        help="nothing else runs on this machine: reports may compare the speed")


class TrainingLog:
    """Takes in the steps and epochs of a run, and writes them where they were asked for.

    Args:
        args: the script's flags. `batch_size`, `seed` and `lr` are read, and those of
            `TrainingLog.add_arguments`: `tensorboard`, `mlperf`.
        path: of log.jsonl; None for none.
        lines: those of a run that is resumed.
        steps: how many steps it had made.
        writes: False for a rank that only takes in; rank 0 writes.
    """
    add_arguments = staticmethod(add_arguments)

    def __init__(self, args: Any, path: Optional[str], lines: Iterable[Dict[str, Any]] = (),
                 steps: int = 0, writes: bool = True):
        self.args, self.path, self.lines = args, path if writes else None, list(lines)
        self.writes = writes
        self.losses: List[float] = []
        self.steps = steps
        self.writer = None
        if writes and args.tensorboard:
            self.writer = _tensorboard(args.tensorboard)
            self.writer.add_text("arguments", json.dumps(vars(args)))
        self._say("run_start")
        for name, key in (("batch_size", "global_batch_size"), ("seed", "seed"),
                          ("lr", "opt_base_learning_rate")):
            self._say(key, getattr(args, name), event="POINT_IN_TIME")

    def add_step(self, epoch: int, batch: int, loss: float, updated: bool, shown: bool,
                 **values: Any) -> None:
        """Takes in a step.

        Args:
            loss: of the step.
            updated: whether it updated the network.
            shown: whether a line of the log is due.
            values: lr, loss_scale, skipped and gradient_norm, each a number or a function that
                gives it.
        """
        self.steps += 1
        self.losses.append(loss)
        if updated and not shown:
            return
        values = {name: value() if callable(value) else value for name, value in values.items()}
        line = {"epoch": epoch, "batch": batch, "loss": _finite(_mean(self.losses)),
                **{name: _finite(value) for name, value in values.items()}}
        if not updated:
            line["skip"] = True
        if shown:
            self.losses = []
        self.lines.append(line)
        self._draw("step", line, self.steps - 1)

    def add_epoch(self, line: Dict[str, Any]) -> None:
        """Takes in the end of an epoch; warns where the network predicted infinities or NaNs."""
        if self.writes and not math.isfinite(line.get("validation_loss") or 0):
            log.warning("epoch %d: the network's predictions are not finite. They use the batch "
                        "norms' moving averages, which lag behind in the first steps: a deep "
                        "float16 network may then pass 65504, until it has trained more steps",
                        line["epoch"])
        self.lines.append({name: _finite(value) for name, value in line.items()})
        self._draw("epoch", line, line["epoch"])
        number = line["epoch"]
        self._say("epoch_stop", event="INTERVAL_END", epoch_num=number)
        if "err_top1" in line:
            self._say("eval_accuracy", 1 - line["err_top1"], "POINT_IN_TIME", epoch_num=number)

    def save(self) -> None:
        """Writes log.jsonl; killed at any moment, the old one or the new one is there."""
        if not self.path:
            return
        arguments = {"version": VERSION, "arguments": vars(self.args)}

        replace_text(self.path, "".join(
            json.dumps(line) + "\n" for line in [arguments, *self.lines]))

    def start_epoch(self, number: int) -> None:
        """To be called before an epoch's first step."""
        self.losses = []
        self._say("epoch_start", event="INTERVAL_START", epoch_num=number)

    def end(self) -> None:
        """To be called when the run is over."""
        self._say("run_stop", event="INTERVAL_END", status="success")
        if self.writer:
            self.writer.close()

    def _draw(self, place: str, line: Dict[str, Any], at: int) -> None:
        if not self.writer:
            return
        for name, value in line.items():
            if name not in ("epoch", "batch", "skip") and isinstance(value, (int, float)):
                self.writer.add_scalar(f"{place}/{name}", value, at)

    def _say(self, key: str, value: Any = None, event: str = "INTERVAL_START",
             **metadata: Any) -> None:
        if self.writes and self.args.mlperf:
            print(":::MLLOG " + json.dumps({
                "namespace": "", "time_ms": int(1000 * time.time()), "event_type": event,
                "key": key, "value": value, "metadata": {
                    "file": "training_log.py", "lineno": 1, **metadata}}), flush=True)


class ModuleLog:
    """Writes what `Module.fit` trains into a `TrainingLog`: the callbacks of `fit` are methods of
    this.

    Args:
        interval: batches from one line of the log to the next.
        ranks: those that train; all have to use these callbacks.
    """

    def __init__(self, log: TrainingLog, module: Any, interval: int, batch_size: int,
                 ranks: Optional[Ranks] = None):
        self.log, self.module, self.interval = log, module, interval
        self.batch_size, self.ranks = batch_size, ranks or Ranks()
        self.scale, self.skipped = module.loss_scale, module.skipped
        self.validation: List[float] = []
        self._start()

    def _start(self) -> None:
        self.began, self.batches = time.time(), 0
        self.losses: List[float] = []
        self.training: Dict[str, float] = {}

    def batch_end(self, param: Any) -> None:
        """fit's `batch_end_callback`."""
        if param.nbatch == 0:
            self.log.start_epoch(param.epoch)
        module, optimizer = self.module, self.module._optimizer
        scale, updated = self.scale, module.skipped == self.skipped
        self.scale, self.skipped, self.batches = module.loss_scale, module.skipped, param.nbatch + 1
        factor = optimizer.rescale_grad / scale
        gradients = [grads[0] for grads in module._exec_group.grad_arrays if grads[0] is not None]
        loss = cross_entropy(module.get_outputs()[0], param.locals["data_batch"].label[0])
        self.losses.append(loss)
        self.metric = param.eval_metric
        self.log.add_step(
            param.epoch, param.nbatch, loss, updated, (param.nbatch + 1) % self.interval == 0,
            gradient_norm=lambda: factor * gradient_norm(gradients), lr=optimizer.learning_rate,
            loss_scale=scale, skipped=self.skipped)

    def epoch_end(self, *_: Any) -> None:
        """fit's `epoch_end_callback`: validation follows. The first of these callbacks, so that
        others save what ranks agree on."""
        self.seconds, self.validation = time.time() - self.began, []
        self.ranks.sum_metric(self.metric)
        self.training = dict(self.metric.get_global_name_value())
        if self.ranks.workers > 1:
            self.module.check_ranks()
            average_statistics(self.module)

    def validation_batch_end(self, param: Any) -> None:
        """fit's `eval_batch_end_callback`."""
        self.validation.append(cross_entropy(self.module.get_outputs()[0],
                                             param.locals["eval_batch"].label[0]))

    def validation_end(self, param: Any) -> None:
        """fit's `eval_end_callback`."""
        self.ranks.sum_metric(param.eval_metric)
        found = dict(param.eval_metric.get_global_name_value())
        line = {"epoch": param.epoch, "accuracy": self.training.get("accuracy"),
                "err_top1": 1 - found["accuracy"], "loss": self._mean(self.losses),
                "validation_loss": self._mean(self.validation),
                "samples_per_second":
                    self.batches * self.batch_size * self.ranks.workers / self.seconds,
                "seconds": self.seconds, "lr": self.module._optimizer.learning_rate,
                "loss_scale": self.module.loss_scale, "skipped": self.module.skipped}
        top5 = found.get("top_k_accuracy_5")
        if top5 is not None:
            line["err_top5"] = 1 - top5
        self.log.add_epoch(line)
        self.log.save()
        self._start()

    def _mean(self, losses: List[float]) -> float:
        total, count = self.ranks.sum(sum(losses), len(losses))
        return total / count if count else math.nan


def cross_entropy(probabilities: Any, label: Any) -> float:
    """The mean over a batch, of a softmax's outputs."""
    likely = probabilities.astype("float32").pick(label.as_in_context(probabilities.context))
    return float(-(likely + 1e-12).log().mean().asscalar())


def gradient_norm(gradients: Iterable[Any]) -> float:
    """The norm of the whole gradient, which is given as the arrays of all parameters."""
    return math.sqrt(sum(float(g.astype("float32").norm().asscalar()) ** 2 for g in gradients))


def read_log(path: str) -> Tuple[Dict[str, Any], List[Dict[str, Any]]]:
    """The arguments and the lines of a log.jsonl, of either version."""
    found = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                raise ValueError(f"{path} is damaged: line {number} is no JSON") from None
    if not found or not isinstance(found[0], dict):
        raise ValueError(f"{path} is damaged: it should hold a run's arguments, and then a line "
                         "for each step and epoch")
    for number, line in enumerate(found[1:], 2):
        if not _is_step_or_epoch(line):
            raise ValueError(f"{path} is damaged: line {number} is of no step and no epoch")
    arguments = found[0].get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"{path} is damaged: its first line should hold a run's arguments")
    return arguments, found[1:]


def _is_step_or_epoch(line: Any) -> bool:
    if not isinstance(line, dict):
        return False
    epoch, error = line.get("epoch"), line.get("err_top1")
    return type(epoch) is int and (error is None or type(error) in (int, float))


def _tensorboard(folder: str) -> Any:
    """TensorBoard's own writer, or else MXBoard's."""
    failed = []
    for writer in (_EventFile, _mxboard):
        try:
            return writer(folder)
        except (ImportError, TypeError) as error:  # TypeError: older than the protobuf beside it
            failed.append(str(error).splitlines()[0])
    raise ValueError("--tensorboard needs a package: pip install tensorboard (or mxboard). "
                     f"{'; '.join(failed)}")


def _mxboard(folder: str) -> Any:
    from mxboard import SummaryWriter
    return SummaryWriter(folder)


class _EventFile:
    """What TensorBoard's own `summary.Writer` does, and texts."""

    def __init__(self, folder: str):
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self.event, self.summary, self.tensor = event_pb2.Event, summary_pb2, tensor_pb2.TensorProto
        self.file = EventFileWriter(folder)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._add(step, tag=tag, simple_value=value)

    def add_text(self, tag: str, text: str) -> None:
        kind = self.summary.SummaryMetadata.PluginData(plugin_name="text")
        self._add(0, tag=tag, metadata=self.summary.SummaryMetadata(plugin_data=kind),
                  tensor=self.tensor(dtype="DT_STRING", string_val=[text.encode()]))

    def _add(self, step: int, **value: Any) -> None:
        values = [self.summary.Summary.Value(**value)]
        self.file.add_event(self.event(step=step, wall_time=time.time(),
                                       summary=self.summary.Summary(value=values)))

    def close(self) -> None:
        self.file.close()


def _mean(values: List[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _finite(value: Any) -> Any:
    """The value; None for a number that is not finite, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
