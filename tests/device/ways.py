"""Ways to train a network in speed.py, and variables of their environments."""

BEFORE, GRAPHS = "before", "gluon_amp, CUDA graphs"
# The ways that are measured by default, and the others.
WAYS = ("float32 without TF32", "float32", "mx.contrib.amp", "gluon_amp")
OTHERS = (GRAPHS, BEFORE)
ENVIRONMENT = {"float32 without TF32": {"NVIDIA_TF32_OVERRIDE": "0"},
               GRAPHS: {"MXNET_ENABLE_CUDA_GRAPHS": "1"}}
