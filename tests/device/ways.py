"""Ways to train a network in speed.py, and variables of their environments."""
import os

BEFORE = "before"  # another version of gluon_amp
WAYS = ("float32 without TF32", "float32", "mx.contrib.amp", "gluon_amp")


def environment(way, before, given):
    """The environment of a way's process: a given one with changes. `before` is the folder of the
    way BEFORE."""
    if way == BEFORE:
        path = os.pathsep.join([str(before), given.get("PYTHONPATH", "")])
        return {**given, "PYTHONPATH": path}
    return {**given, "NVIDIA_TF32_OVERRIDE": "0"} if way == WAYS[0] else given
