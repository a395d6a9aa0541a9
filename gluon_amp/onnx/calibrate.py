"""Selects the nodes that stay in float32 in a 16-bit file, from float32 predictions of batches.

The engine counts the exponents of each tensor, as for an X-ray. A node stays in float32 if it reads
or writes a tensor that the format does not hold: the largest number exceeds it with a headroom of a
factor of two, or underflow removes more than a share of the norm.
"""
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Set

import mxnet as mx
from mxnet import autograd

from ..checks import iterator
from ..cpu import library
from ..formats import Format
from ..graph.build import build, cached_op
from ..graph.graph import Entry, Graph
from ..inspection.tensors import Counts, Key, add_counts
from ..inspection.watch import read
from ..policy import POLICIES

_ROOM = 1  # headroom in powers of two
_LOST = 0.01  # share of a tensor's norm
_IDS = {"Embedding": 0, "take": 1}  # operators, and the index of their integer input


def nodes_to_keep(graph: Graph, arrays: Mapping[str, Any], data: Sequence[str],
                  batches: Iterable[Any], format_: Format) -> List[str]:
    """Returns the names of the nodes that stay in float32.

    Args:
        graph: the float32 graph.
        arrays: its parameters, by name.
        data: the names of its inputs.
        batches: for each an array, or a sequence of arrays.
    """
    parameters = {name: mx.nd.array(array, dtype="float32") for name, array in arrays.items()}
    counts = _counted(graph, parameters, data, batches)
    counts.update((Key(name, False, 0), Counts.of_array(array))
                  for name, array in parameters.items())
    unfit: Set[Entry] = set()
    kept: Dict[str, None] = {}
    for node in graph.nodes():
        outputs = [key.which for key in counts if key.node == node.name]
        unfit.update(Entry(node, i) for i in outputs
                     if not _fits(counts[Key(node.name, False, i)], format_, node.name))
        if node.is_variable:
            continue
        reads = [e in unfit for i, e in enumerate(node.inputs) if i != _IDS.get(node.op)]
        if not outputs and any(reads):  # it copies values, which the engine does not count
            unfit.add(Entry(node))
        elif any(reads) or any(Entry(node, i) in unfit for i in outputs):
            kept[node.name] = None
    return list(kept)


def _fits(counts: Counts, format_: Format, name: str) -> bool:
    if not counts.finite:
        raise ValueError(f"calibration: {name} is not finite in float32. Valid: batches and "
                         "parameters of finite numbers")
    if counts.range is None:  # all are 0
        return True
    return format_.last_exponent - counts.range[1] >= _ROOM and counts.underflow(format_) <= _LOST


def _counted(graph: Graph, parameters: Mapping[str, Any], data: Sequence[str],
             batches: Iterable[Any]) -> Dict[Key, Counts]:
    """Returns the counts of the float32 network's predictions and of their data."""
    library.load()
    names = graph.variables()
    symbol = build(graph, dict.fromkeys(names, "float32"), POLICIES["float32"],
                   watch=True).symbol()
    fed = [name for name in names if name not in parameters]
    run, inputs = cached_op(symbol, fed, parameters)
    total: Dict[Key, Counts] = {}
    read()  # discards earlier counts
    for batch in iterator(
            batches, "calibration is an iterable of arrays, or of sequences of arrays"):
        given = _arrays(batch, data)
        labels = [name for name in fed if name not in given]  # not read in predictions
        sizes = {name: array.shape for name, array in {**parameters, **given}.items()
                 if name in names}
        shapes = dict(zip(symbol.list_arguments(), symbol.infer_shape(**sizes)[0]))
        given.update((name, mx.nd.zeros(shapes[name])) for name in labels)
        with autograd.pause():
            run(*(given[fed[at]] if is_data else at for is_data, at in inputs))
        add_counts(total, read())
        add_counts(total, {Key(name, False, 0): Counts.of_array(given[name]) for name in data})
    if not total:
        raise ValueError("calibration holds no batch. Valid: an iterable of arrays, or of "
                         "sequences of arrays")
    return total


def _arrays(batch: Any, data: Sequence[str]) -> Dict[str, Any]:
    several = batch if isinstance(batch, (tuple, list)) else [batch]
    if len(several) != len(data):
        raise ValueError("a batch of calibration must be an array for each input: "
                         f"{', '.join(data)}. Received: {len(several)}")
    return {name: mx.nd.array(array.as_nd_ndarray() if isinstance(array, mx.nd.NDArray) else array,
                              dtype="float32") for name, array in zip(data, several)}
