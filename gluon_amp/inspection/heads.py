"""The loss of a Module: its heads give predictions, and begin their gradients by themselves.

What they begin is the gradient of a loss that the graph does not compute. Here it is, by head:

    SoftmaxOutput   the cross entropy          regressions   half the square, the distance, or the
    SVMOutput       the hinge loss                           cross entropy of two classes
    MakeLoss        its output
"""
import math
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence

from .._mxnet import mx
from ..annotations import Array
from ..graph.graph import Entry, Graph, Node
from ..graph.operators import LOSSES
from .statistics import Counts, Key

_LEAST = 1e-30  # what a logarithm is taken of, so that it is finite


class _Loss(NamedTuple):
    """A head's loss.

    Attributes:
        numbers: its parts.
        slopes: how their sum changes with what the head reads; None where that is not known.
    """
    numbers: Any
    slopes: Optional[Any]


class HeadLosses:
    """Called with the outputs of a `ModuleBlock`, it gives the sum of its heads' mean losses, from
    which a backward pass begins all heads.

    Attributes:
        labels: what the heads compare with, to become outputs of the block, too: a graph may
            compute that from what a batch gives, such as by `reshape`.
    """

    def __init__(self, graph: Graph) -> None:
        self.heads: List[Node] = [entry.node for entry in graph.outputs]
        self.labels: List[Entry] = [head.inputs[1] for head in self.heads if _has_label(head)]
        self._last: List[_Loss] = []  # by head, of those that begin gradients
        if not any(head.op in LOSSES for head in self.heads):
            raise ValueError("a Module is looked into with the losses in its symbol. Valid: "
                             f"{', '.join(sorted(LOSSES))}. Received outputs: "
                             f"{', '.join(head.name for head in self.heads)}")

    def __call__(self, outputs: Sequence[Array], label: Array) -> Any:
        given = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        outputs, labels = given[:len(self.heads)], iter(given[len(self.heads):])
        with mx.autograd.pause():
            self._last = [_loss(head, out, next(labels) if _has_label(head) else None)
                          for head, out in zip(self.heads, outputs) if head.op in LOSSES]
            shown = mx.nd.add_n(*(loss.numbers.mean() for loss in self._last))
        begun = mx.nd.add_n(*(out.astype("float32").sum() for out in outputs))
        return shown + (begun - begun.detach())

    def total(self, counts: Mapping[Key, Counts]) -> float:
        """The sum of what the heads' gradients are of, in the last call: each head's loss, times
        what its own settings make of the gradient that it begins (`grad_scale`, `normalization`).
        0 where a head's loss is not known."""
        total = 0.0
        for head, loss in zip((h for h in self.heads if h.op in LOSSES), self._last):
            begun = counts.get(Key(head.name, True, 0))
            if loss.slopes is None or begun is None:
                return 0.0
            slopes = float(loss.slopes.square().sum().asscalar())
            if slopes:
                factor = math.sqrt(begun.squares / slopes)
                total += factor * float(loss.numbers.abs().sum().asscalar())
        return total


def _has_label(head: Node) -> bool:
    return head.op in LOSSES and len(head.inputs) > 1


def _loss(head: Node, output: Array, label: Array) -> _Loss:
    output = output.astype("float32")
    found = None
    if head.op in ("SoftmaxOutput", "Softmax"):
        found = _of_softmax(head, output, label.astype("float32"))
    elif "Regression" in head.op and label.size == output.size:
        found = _of_regression(head.op, output, label.astype("float32").reshape(output.shape))
    elif head.op == "SVMOutput" and label.size == len(output):
        found = _of_svm(head, output, label.astype("float32").reshape(-1))
    elif head.op in ("MakeLoss", "make_loss"):
        found = _Loss(output, mx.nd.ones_like(output))
    return found or _Loss(output, None)  # MXNet takes other labels, too: the outputs are shown


def _of_softmax(head: Node, output: Array, label: Array) -> Optional[_Loss]:
    axis = 1 if _is_on(head, "multi_output") else output.ndim - 1
    if not _is_on(head, "multi_output") and not _is_on(head, "preserve_shape"):
        output, axis = output.reshape((output.shape[0], -1)), 1
    if label.size == output.size:
        label = label.reshape(output.shape)
        return _Loss(-(label * (output + _LEAST).log()).sum(axis=axis), output - label)
    places = output.shape[:axis] + output.shape[axis + 1:]
    if label.size != math.prod(places):
        return None
    label = label.reshape(places)
    counted = mx.nd.ones_like(label)
    if _is_on(head, "use_ignore"):
        counted = label != float(head.attrs.get("ignore_label", -1))
    right = mx.nd.moveaxis(mx.nd.one_hot(label, output.shape[axis]), -1, axis)
    numbers = -((output * right).sum(axis=axis) + _LEAST).log() * counted
    return _Loss(numbers, (output - right) * counted.expand_dims(axis))


def _of_regression(op: str, output: Array, label: Array) -> _Loss:
    off = output - label
    if op == "MAERegressionOutput":
        return _Loss(off.abs(), off.sign())
    if op == "LogisticRegressionOutput":
        return _Loss(-label * (output + _LEAST).log()
                     - (1 - label) * (1 - output + _LEAST).log(), off)
    return _Loss(off.square() / 2, off)


def _of_svm(head: Node, output: Array, label: Array) -> _Loss:
    sides = 2 * mx.nd.one_hot(label, output.shape[1]) - 1
    off = (float(head.attrs.get("margin", 1)) - sides * output).relu()
    if _is_on(head, "use_linear"):
        return _Loss(off, -sides * (off > 0))
    return _Loss(off.square(), -2 * sides * off)


def _is_on(head: Node, setting: str) -> bool:
    return head.attrs.get(setting) in ("True", "true", "1")

