"""Runs a script of example/ and writes which images of its last validation it classifies correctly.

    python results/observe.py ARM FILE SCRIPT [FLAG ...]

FILE receives a line of 0 and 1, in the order of the images. In the arm `control`, one weight
changes by one unit in the last place after the first update: rounding alone makes such a run differ
from its pair, so the differences of many pairs are the band of chance of a study.
"""
import runpy
import sys
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon


def nudged(array):
    """Returns float32 values, the largest of which is one unit in the last place farther from 0."""
    values = array.asnumpy()
    place = np.unravel_index(np.argmax(np.abs(values)), values.shape)
    values[place] = np.nextafter(values[place], np.copysign(np.float32(np.inf), values[place]))
    return values


def nudge_trainers():
    """Makes each Trainer change its first weight after its first update."""
    step = amp.Trainer.step

    def nudging(self, *args, **kwargs):
        applied = step(self, *args, **kwargs)
        amp.Trainer.step = step
        weight = self._params[0]
        weight.set_data(nudged(weight.list_data()[0]))
        return applied

    amp.Trainer.step = nudging


def nudge_modules():
    """Makes each Module change its first weight after its first update."""
    update = amp.Module.update

    def nudging(self, *args, **kwargs):
        done = update(self, *args, **kwargs)
        amp.Module.update = update
        parameters, states = self.get_params()
        first = min(parameters)
        changed = {**parameters, first: parameters[first].copy()}
        changed[first][:] = nudged(parameters[first])
        self.set_params(changed, states)
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
