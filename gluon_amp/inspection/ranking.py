"""Which nodes float16 harms most, as one float32 step tells: rounding times what depends on it.

The step's histograms tell what the format would do to each tensor, undisturbed by what it has done
to those before. How much depends on a tensor is its size times that of its gradient.
"""
import math
from typing import Any, Dict, List, Mapping

from .advice import window
from .statistics import Counted, Counts, Key
from .tensors import Layout, Tensor, fill

_HIGHEST_SCALE = 2.0 ** 24


def ranked(layout: Layout, counts: Counted, scale: float,
           variables: Mapping[str, Any]) -> Dict[str, float]:
    """A score for each node that may stay float32, the worst first; infinite where numbers lie
    beyond the format.

    Args:
        layout: of the graph with its casts.
        counts: of a float32 step at this loss scale.
        variables: the arrays that the graph reads, by name.
    """
    tensors = [t for t in layout.tensors() if t.is_low]
    fill(tensors, [(scale, counts)], scale)
    fits = window([t for t in tensors if t.counts], scale, 0.01)
    factor = (min(fits.high, _HIGHEST_SCALE) if fits else scale) / scale
    depends = _dependence(layout, counts)
    scores: Dict[str, float] = {}
    for tensor in tensors:
        found = tensor.counts or _of_cast(layout, tensor, counts, variables)
        if found is None:
            continue
        at = factor if tensor.key.backward else 1.0
        harm = found.noise(tensor.format, at)
        harm = harm * depends.get(_what(layout, tensor), 0.0) if math.isfinite(harm) else harm
        for name in layout.kept_for(tensor.key):
            scores[name] = scores.get(name, 0.0) + harm
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


def _what(layout: Layout, tensor: Tensor) -> Key:
    """The output that a gradient is of; of weights the gradient itself stands for it."""
    if not tensor.key.backward:
        return tensor.key
    entry = layout.root(layout.nodes[tensor.key.node].inputs[tensor.key.which])
    made: List[Key] = layout.source(entry)
    return made[0] if made else tensor.key


def _dependence(layout: Layout, counts: Mapping[Key, Counts]) -> Dict[Key, float]:
    """How much of the loss depends on each output, as a share of the most."""
    made: Dict[Key, float] = {}
    for key, gradient in counts.items():
        node = layout.nodes.get(key.node)
        if not key.backward or node is None or key.which >= len(node.inputs):
            continue
        output = layout.source(layout.root(node.inputs[key.which]))
        if not output:
            made[key] = 1.0  # a weight: all of its gradient is wanted
        elif output[0] in counts:
            size = math.sqrt(counts[output[0]].squares * gradient.squares)
            made[output[0]] = max(made.get(output[0], 0.0), size)
    most = max((s for key, s in made.items() if not key.backward), default=0.0) or 1.0
    return {key: size if key.backward else size / most for key, size in made.items()}


def _of_cast(layout: Layout, tensor: Tensor, counts: Mapping[Key, Counts],
             variables: Mapping[str, Any]) -> Any:
    """The counts of what a cast casts, since no float32 graph has casts."""
    if tensor.key.backward:
        return None
    entry = layout.root(layout.nodes[tensor.key.node].inputs[0]) \
        if layout.nodes[tensor.key.node].inputs else None
    if entry is None:
        return None
    if entry.node.is_variable:
        array = variables.get(entry.node.name)
        return None if array is None else Counts.of_array(array.astype("float32"))
    return counts.get(Key(entry.node.name, False, entry.output))
