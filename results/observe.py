"""Runs a script of example/ and writes which images of its last validation it classifies correctly.

    python results/observe.py ARM FILE SCRIPT [FLAG ...]

FILE receives a line of 0 and 1, in the order of the images. In the arm `control`, all weights
change by one unit in the last place after the first update: rounding alone makes such a run differ
from its pair, so the differences of many pairs are the band of chance of a study.
"""
import runpy
import sys
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon


def nudge(weights):
    """Moves all numbers of float32 arrays one unit in the last place away from 0."""
    for weight in weights:
        values = weight.asnumpy()
        weight[:] = mx.nd.array(np.nextafter(values, np.copysign(np.float32(np.inf), values)))


def nudge_trainer(trainer):
    """Changes the weights of a Trainer on one device."""
    nudge([p.data() for p in trainer._params if p.grad_req != "null"])


def nudge_trainers():
    """Changes the weights after the first update of each Trainer."""
    step = amp.Trainer.step

    def nudging(self, *args, **kwargs):
        applied = step(self, *args, **kwargs)
        amp.Trainer.step = step
        nudge_trainer(self)
        return applied

    amp.Trainer.step = nudging


def nudge_modules():
    """Changes the weights after the first update of each Module on one device."""
    update = amp.Module.update

    def nudging(self, *args, **kwargs):
        done = update(self, *args, **kwargs)
        amp.Module.update = update
        group = self._exec_group
        nudge([weights[0] for weights, gradients in zip(group.param_arrays, group.grad_arrays)
               if gradients[0] is not None])
        return done

    amp.Module.update = nudging


class Hits:
    """The images of the last validation as 1, if classified correctly, or 0."""

    def __init__(self):
        self.line = ""
        self._watch_losses()
        self._watch_modules()

    def _add(self, label, prediction):
        found = prediction.asnumpy().argmax(axis=1) == label.asnumpy()
        self.line += "".join(map(str, found.astype(int)))

    def _watch_losses(self):
        """Reads the loss of validation, which is not recorded."""
        call = gluon.loss.SoftmaxCrossEntropyLoss.__call__

        def calling(loss, prediction, label):
            if autograd.is_recording():
                self.line = ""
            else:
                self._add(label, prediction)
            return call(loss, prediction, label)

        gluon.loss.SoftmaxCrossEntropyLoss.__call__ = calling

    def _watch_modules(self):
        """Reads what `Module.score` passes to its metric."""
        score, update = mx.mod.BaseModule.score, mx.metric.Accuracy.update
        scores = []

        def scoring(module, *args, **kwargs):
            self.line = ""
            scores.append(module)
            try:
                return score(module, *args, **kwargs)
            finally:
                scores.pop()

        def updating(metric, labels, predictions):
            for label, prediction in zip(labels, predictions) if scores else ():
                self._add(label, prediction)
            update(metric, labels, predictions)

        mx.mod.BaseModule.score, mx.metric.Accuracy.update = scoring, updating


if __name__ == "__main__":
    arm, file, *sys.argv = sys.argv[1:]
    if arm == "control":
        nudge_trainers()
        nudge_modules()
    hits = Hits()
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    Path(file).write_text(hits.line)
