"""Ways to train a network in speed.py, and variables of their environments."""
import os

BEFORE, GRAPHS = "before", "gluon_amp, CUDA graphs"
# The ways that are measured by default, and the others.
WAYS = ("float32 without TF32", "float32", "mx.contrib.amp", "gluon_amp")
OTHERS = (GRAPHS, BEFORE)
_VARIABLES = {"float32 without TF32": {"NVIDIA_TF32_OVERRIDE": "0"},
              GRAPHS: {"MXNET_ENABLE_CUDA_GRAPHS": "1"}}


def environment(way, before, given):
    """The environment of a way's process: a given one with changes. `before` is the folder of the
    way BEFORE."""
    path = {"PYTHONPATH": os.pathsep.join([str(before), given.get("PYTHONPATH", "")])}
    return {**given, **(path if way == BEFORE else _VARIABLES.get(way, {}))}
