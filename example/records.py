"""What a training writes about itself: log.jsonl, TensorBoard's event files, MLPerf's log lines.

log.jsonl, version 2, has one JSON object in each line:

    {"version": 2, "arguments": {...}}           the flags, first
    {"epoch": 0, "batch": 19, "loss": 2.1, ...}  a step: each --log-interval, and each skipped one
    {"epoch": 0, "err_top1": 0.4, ...}           the end of an epoch

Steps have loss (the mean since the last step's line), gradient_norm (of the gradient that updates;
null where the step was skipped), lr, loss_scale, skipped (so far), and "skip": true where it was
skipped. Epochs have err_top1, err_top5, accuracy, loss, validation_loss, samples_per_second,
seconds, lr, loss_scale, skipped. Version 1 had no version, no steps and no losses.
"""
import json
import math
import os
import time

from gluon_amp.files import replace_file

VERSION = 2


def add_arguments(parser):
    add = parser.add_argument
    add("--tensorboard", metavar="FOLDER",
        help="also write TensorBoard's event files there: pip install tensorboard, or mxboard")
    add("--mlperf", action="store_true", help="also print MLPerf's :::MLLOG lines")
    add("--claim-speed", action="store_true",
        help="nothing else runs on this machine: reports may compare the speed")


class Records:
    """Of one run: takes in its steps and epochs, and writes them where they were asked for.

    `path` is that of log.jsonl, or None for none. `lines` are those of a run that is resumed, and
    `steps` how many it had made.
    """

    def __init__(self, args, path, lines=(), steps=0):
        self.args, self.path, self.lines = args, path, list(lines)
        self.losses, self.steps = [], steps
        self.writer = _tensorboard(args.tensorboard) if args.tensorboard else None
        self._say("run_start")
        for name, key in (("batch_size", "global_batch_size"), ("seed", "seed"),
                          ("lr", "opt_base_learning_rate")):
            self._say(key, getattr(args, name), event="POINT_IN_TIME")

    def add_step(self, epoch, batch, loss, updated, shown, **values):
        """`loss` is that of the step; `shown`: whether a line of the log is due; `values` are lr,
        loss_scale, skipped and gradient_norm, each a number or a function that gives it."""
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

    def add_epoch(self, line):
        self.lines.append({name: _finite(value) for name, value in line.items()})
        self._draw("epoch", line, line["epoch"])
        number = line["epoch"]
        self._say("epoch_stop", event="INTERVAL_END", epoch_num=number)
        if "err_top1" in line:
            self._say("eval_accuracy", 1 - line["err_top1"], "POINT_IN_TIME", epoch_num=number)

    def save(self):
        """Writes log.jsonl; killed at any moment, the old one or the new one is there."""
        if not self.path:
            return
        arguments = {"version": VERSION, "arguments": vars(self.args)}

        def write(beside):
            with open(beside, "w") as file:
                file.writelines(json.dumps(line) + "\n" for line in [arguments, *self.lines])
        replace_file(self.path, write)

    def start_epoch(self, number):
        self.losses = []
        self._say("epoch_start", event="INTERVAL_START", epoch_num=number)

    def end(self):
        self._say("run_stop", event="INTERVAL_END", status="success")
        if self.writer:
            self.writer.close()

    def _draw(self, place, line, at):
        for name, value in line.items() if self.writer else ():
            if name not in ("epoch", "batch", "skip") and isinstance(value, (int, float)):
                self.writer.add_scalar(f"{place}/{name}", value, at)

    def _say(self, key, value=None, event="INTERVAL_START", **metadata):
        if self.args.mlperf:
            print(":::MLLOG " + json.dumps({
                "namespace": "", "time_ms": int(1000 * time.time()), "event_type": event,
                "key": key, "value": value, "metadata": {
                    "file": os.path.basename(__file__), "lineno": 1, **metadata}}), flush=True)


class FitCallbacks:
    """Records what MXNet's Module.fit trains: its callbacks are methods of this."""

    def __init__(self, records, module, interval, batch_size):
        self.records, self.module, self.interval = records, module, interval
        self.batch_size = batch_size
        self.scale, self.skipped = module.loss_scale, module.skipped
        self.start()

    def start(self):
        self.began, self.batches, self.losses, self.training = time.time(), 0, [], {}

    def batch_end(self, param):
        if param.nbatch == 0:
            self.records.start_epoch(param.epoch)
        module, optimizer = self.module, self.module._optimizer
        scale, updated = self.scale, module.skipped == self.skipped
        self.scale, self.skipped, self.batches = module.loss_scale, module.skipped, param.nbatch + 1
        factor = optimizer.rescale_grad / scale
        gradients = [grads[0] for grads in module._exec_group.grad_arrays if grads[0] is not None]
        loss = cross_entropy(module.get_outputs()[0], param.locals["data_batch"].label[0])
        self.losses.append(loss)
        self.training = dict(param.eval_metric.get_global_name_value())
        self.records.add_step(
            param.epoch, param.nbatch, loss, updated, (param.nbatch + 1) % self.interval == 0,
            gradient_norm=lambda: factor * norm(gradients), lr=optimizer.learning_rate,
            loss_scale=scale, skipped=self.skipped)

    def epoch_end(self, *_):
        """Of training; validation follows."""
        self.seconds, self.validation = time.time() - self.began, []

    def validation_batch_end(self, param):
        self.validation.append(cross_entropy(self.module.get_outputs()[0],
                                             param.locals["eval_batch"].label[0]))

    def validation_end(self, param):
        found = dict(param.eval_metric.get_global_name_value())
        line = {"epoch": param.epoch, "accuracy": self.training.get("accuracy"),
                "err_top1": 1 - found["accuracy"], "loss": _mean(self.losses),
                "validation_loss": _mean(self.validation),
                "samples_per_second": self.batches * self.batch_size / self.seconds,
                "seconds": self.seconds, "lr": self.module._optimizer.learning_rate,
                "loss_scale": self.module.loss_scale, "skipped": self.module.skipped}
        top5 = found.get("top_k_accuracy_5")
        if top5 is not None:
            line["err_top5"] = 1 - top5
        self.records.add_epoch(line)
        self.records.save()
        self.start()


def cross_entropy(probabilities, label):
    """The mean over a batch, of a softmax's outputs."""
    likely = probabilities.astype("float32").pick(label.as_in_context(probabilities.context))
    return float(-(likely + 1e-12).log().mean().asscalar())


def norm(gradients):
    """Of the whole gradient."""
    return math.sqrt(sum(float(g.astype("float32").norm().asscalar()) ** 2 for g in gradients))


def read(path):
    """The arguments and the lines of a log.jsonl, of either version."""
    with open(path) as file:
        begun, *lines = [json.loads(line) for line in file]
    return begun.get("arguments", {}), lines


def _tensorboard(folder):
    """TensorBoard's own writer, or else MXBoard's."""
    try:
        from tensorboard.summary import Writer
        return Writer(folder)
    except ImportError:
        pass
    try:
        from mxboard import SummaryWriter
        return SummaryWriter(folder)
    except ImportError:
        raise SystemExit("--tensorboard needs a package: pip install tensorboard (or mxboard)") \
            from None


def _mean(values):
    return sum(values) / len(values) if values else math.nan


def _finite(value):
    """JSON knows no others."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
