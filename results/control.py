"""Runs a script of example/ with one weight changed by one unit in the last place.

    python results/control.py SCRIPT [FLAG ...]

The change follows the first update. Rounding alone makes such a run differ from its pair, so the
differences of many pairs are the band of chance of a study.
"""
import runpy
import sys
from pathlib import Path

import gluon_amp as amp
import numpy as np


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


if __name__ == "__main__":
    nudge_trainers()
    nudge_modules()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
