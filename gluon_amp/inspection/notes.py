"""Notes of an X-ray on what removes a fault at its source: computed from the batches, not tried."""
from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, Optional, Sequence

import mxnet as mx
import numpy as np

from ..graph.graph import Entry, Graph, Node
from ..graph.operators import family
from .judge import Finding
from .session import Session

# The exponent of the root mean square of data and labels that are not normalized, between 2^0 of
# normalized ones and 2^7 of pixels from 0 to 255.
_FAR = 3


def remedy_of_data(session: Session, finding: Finding, batches: Sequence[int]) -> str:
    """Returns how to normalize the input that a finding names; "" if it is normalized, or if an
    operator takes it for indices."""
    for index, name in _inputs(session).items():
        if name == finding.node and not _is_index(session, name):
            text = _normalized(name, [session.batches[i].data[index] for i in batches])
            return f"normalize the input {name}: {text}" if text else ""
    return ""


def notes(session: Session, view: Any, batches: Sequence[int]) -> Iterator[str]:
    """Yields notes on data, sums, labels and the loss, as far as they can cause the findings."""
    forward = [f for f in view.findings if f.reason.startswith("range") and not f.backward]
    if forward and not any(f.remedy for f in forward):
        for index, name in _inputs(session).items():
            text = _normalized(name, [session.batches[i].data[index] for i in batches])
            if text and not _is_index(session, name):
                yield f"the input {name} is not normalized: {text}"
    nodes = {finding.node for finding in forward if finding.reason.startswith("range above")}
    for of in session.graphs.values():
        for node in of.clean.nodes():
            if node.op in family("sum") and node.name in nodes:
                yield f"{node.name} is a sum over {_terms(session, of, node):.6g} elements: " \
                      "their mean may fit"
    if view.window and view.window.high < 2 * view.training.smallest <= 2:
        yield from _of_loss(session, batches)


def _of_loss(session: Session, batches: Sequence[int]) -> Iterator[str]:
    """Yields what makes gradients large that overflow at each loss scale of the training."""
    labels = [session.batches[i].label for i in batches]
    if all(len(label) == 1 and isinstance(label[0], mx.nd.NDArray) for label in labels):
        arrays = [label[0] for label in labels]
        numbers = np.concatenate([array.asnumpy().reshape(-1) for array in arrays])
        are_indices = (numbers == np.floor(numbers)).all() and numbers.min() >= 0
        text = None if are_indices else _normalized("label", arrays)
        if text:
            yield f"the labels are not normalized: {text}"
        elements = numbers.size // max(sum(len(array) for array in arrays), 1)
        if elements > 1:
            yield f"an example has {elements} labels: if its loss is a sum over them, their mean " \
                  f"divides the gradients by {elements}"


def _inputs(session: Session) -> Dict[int, str]:
    """Returns the names of the network's inputs by number; of a plain Block, that of a single one.
    """
    graphs = [*session.graphs.values()]
    whole = next((of for of in graphs if of.block is session.net), None)
    if whole is not None:
        return dict(enumerate(whole.names))
    names = [name for of in graphs for name in of.names if name in session.data]
    return {0: names[0]} if names and len(session.batches[0].data) == 1 else {}


def _is_index(session: Session, name: str) -> bool:
    """Whether an operator takes an input of the network for indices or conditions."""
    for of in session.graphs.values():
        readers = of.clean.consumers()
        left = [Entry(node) for node in of.clean.nodes() if node.is_variable and node.name == name]
        for entry in left:
            for reader in filter(None, readers.get(entry, [])):
                if reader.op in family("selection"):
                    return True
                if reader.op in family("cast", "rearrangement"):
                    left.append(Entry(reader))
    return False


def _terms(session: Session, of: Any, node: Node) -> float:
    """Returns the number of terms of a sum."""
    symbol = Graph([node.inputs[0], Entry(node)]).symbol()
    shapes = {**{name: p.shape for name, p in session.parameters.items()},
              **dict(zip(of.names, of.shapes))}
    before, after = symbol.infer_shape_partial(
        **{name: shapes[name] for name in symbol.list_inputs() if name in shapes})[1]
    return math.prod(before) / max(math.prod(after), 1)


def _normalized(name: str, arrays: List[Any]) -> Optional[str]:
    """Returns the mean and deviation of arrays that are not normalized, and the formula."""
    numbers = np.concatenate([array.asnumpy().astype(np.float64).reshape(-1) for array in arrays])
    size = math.sqrt(np.square(numbers).mean()) if numbers.size else 0.0
    if not 0 < size < math.inf or abs(math.log2(size)) < _FAR:
        return None
    mean, deviation = float(numbers.mean()), float(numbers.std())
    if not deviation:
        return None
    return f"mean {mean:.4g}, deviation {deviation:.4g}: " \
           f"({name} {'+' if mean < 0 else '-'} {abs(mean):.4g}) / {deviation:.4g}"
