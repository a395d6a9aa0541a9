"""Backward passes of Trainers: losses, and loss heads that no loss scale reaches.

A loss head is an operator that ignores the incoming gradient. Its name shows it; the gradient that
the user's operators (Custom) declare shows it for these. A head counts if the loss depends on
it, and if its gradient reaches a trained variable.
"""
import functools
from contextlib import contextmanager
from typing import (
    AbstractSet,
    Any,
    Collection,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from .._mxnet import GRAPH_LOCK, mx
from ..annotations import Array, Context, DType, Shape, Symbol
from ..cpu.arrays import TYPES_16BIT, dtype_name
from ..cpu.library import Facts, facts_on_gradients, graph_operators
from ..graph.graph import VARIABLE, Entry, Graph, Node
from ..graph.operators import HEADS, STOPS, USER_CODE
from .step import Stage, Step

# how to train without a loss scale, for error messages
NO_LOSS_SCALE = "loss_scale=None (of python -m gluon_amp --dtype: --loss-scale none)"


def run_backward(losses: List["mx.nd.NDArray"], scale: Optional[float] = None,
                 retain_graph: bool = False) -> None:
    """Runs MXNet's backward pass, in one thread at a time, with head gradients of the scale."""
    head_gradients = None if scale is None else [
        _head_gradient(loss.shape, loss.ctx, loss.dtype, scale) for loss in losses]
    with GRAPH_LOCK:
        mx.autograd.backward(losses, head_gradients, retain_graph)


@functools.lru_cache(maxsize=16)
def _head_gradient(shape: Shape, context: Context, dtype: DType, number: float) -> Array:
    """Returns the head gradient of a loss: an array filled with a number."""
    return mx.nd.full(shape, number, context, dtype)


def scale_of_pass(steps: Sequence[Step]) -> float:
    """Returns the scale of the next backward pass for these steps: that of earlier passes since the
    last update, or the smallest of the steps."""
    begun = {step.scale for step in steps if step.stage is not Stage.EMPTY}
    if len(begun) > 1:
        raise RuntimeError("these Trainers have had backward passes at different loss scales since "
                           "their last steps: call gluon_amp.backward for all of them, or "
                           f"step before. Received: {', '.join(map(str, sorted(begun)))}")
    return min(begun or {step.loss_scale.scale for step in steps})


@contextmanager
def backward_pass(steps: Sequence[Step], losses: Sequence["mx.nd.NDArray"]) -> Iterator[float]:
    """Yields the scale of the backward pass in the `with` block, which belongs to these steps and
    starts at these losses."""
    scale = scale_of_pass(steps)
    with mx.autograd.pause():  # operations on gradients are not recorded
        for step in steps:
            step.begin(scale)
    ended: Optional[Sequence[mx.nd.NDArray]] = None
    try:
        yield scale
        ended = losses
    finally:
        for step in steps:
            step.end(scale, ended)


def check_losses(losses: List[Any]) -> None:
    """Refuses values that are not losses, and 16-bit losses."""
    if not losses:
        raise ValueError("backward takes a loss or a list of losses. Received: an empty list")
    for loss in losses:
        if not isinstance(loss, mx.nd.NDArray):
            raise TypeError("backward takes a loss or a list of losses. "
                            f"Received: {type(loss).__name__}")
        dtype = dtype_name(loss.dtype)
        if dtype in TYPES_16BIT:
            why = "a sum above 65504 is infinite" if dtype == "float16" else "a number has 8 bits"
            raise ValueError(f"the loss is {dtype}, where {why}: take it "
                             "in float32, as loss_fn(net(data).astype('float32'), label); "
                             "converted networks return float32, but under pure_float16")


# ---- loss heads

def check_loss_heads(steps: Sequence[Step], losses: List[Any]) -> None:
    """Refuses graphs with loss heads that ignore the incoming gradient, and so the loss scale.

    A graph is read if it has an operator that is in no earlier graph without any loss head.
    """
    new = graph_operators(losses)
    if all(new <= step.checked for step in steps):
        return
    gradients = [gradient.own for step in steps for gradient in step.read()]
    heads: Set[str] = set()
    has_heads = False  # also those whose gradients reach nothing that is trained
    for loss in losses:
        symbol = mx.autograd.get_symbol(loss.as_nd_ndarray())
        facts, graph = facts_on_gradients(symbol, gradients), Graph.read(symbol)
        heads |= heads_within(graph, graph.variables() if facts.trained is None else facts.trained,
                              facts)
        has_heads = has_heads or _has_heads(graph, facts)
    if heads:
        raise ValueError(unscaled_head_error("the network or the loss", heads,
                                             "a loss of gluon.loss, amp.Module, or "))
    if not has_heads:
        for step in steps:
            step.checked |= new


def unscaled_head_error(where: str, operators: Iterable[str], remedy: str = "") -> str:
    """Returns the message for loss heads."""
    return f"an operator of {where} ignores the incoming gradient, and so the loss scale: " \
           f"{', '.join(sorted(operators))}. The update would divide gradients by a scale that " \
           f"they lack. Valid: {remedy}{NO_LOSS_SCALE}"


def heads_within(graph: Graph, trained: Collection[str], facts: Facts,
                 scaled: AbstractSet[Node] = frozenset()) -> Set[str]:
    """Returns the operators of loss heads in a graph, and in its hybridized blocks, whose gradients
    reach a trained variable, besides those that are `scaled`. Without the engine all variables
    count as trained, and heads in hybridized blocks and the user's operators are trusted.

    Args:
        graph: the graph.
        trained: the names of its trained variables.
        facts: what the engine knows of its nodes.
        scaled: nodes that scale their gradients.
    """
    heads: Set[str] = set()
    trains: Set[Node] = set()  # nodes through which gradients reach trained variables
    from_loss = _reached_by_gradients(graph)
    for node in graph.nodes():
        passes = [entry for entry in node.inputs if entry.node in trains]
        if node.name in trained if node.op == VARIABLE else passes and node.op not in STOPS:
            trains.add(node)
        if node not in from_loss or not passes:
            continue
        for inner, inner_facts, outside in _inner(node, facts):
            names = {name for name, entry in outside if entry in passes}
            heads |= heads_within(inner, names, inner_facts)
        if node not in scaled and _ignores(node, facts, passes):
            heads.add(node.op)
    return heads


def _has_heads(graph: Graph, facts: Facts) -> bool:
    """Whether an operator of a graph or of its hybridized blocks ignores the incoming gradient."""
    return any(node.op in HEADS or node.op in USER_CODE and node.name in facts.ignoring
               or any(_has_heads(inner[0], inner[1]) for inner in _inner(node, facts))
               for node in graph.nodes())


def _reached_by_gradients(graph: Graph) -> Set[Node]:
    reached: Set[Node] = set()
    waiting = [entry.node for entry in graph.outputs]
    while waiting:
        node = waiting.pop()
        if node not in reached and node.op not in STOPS:
            reached.add(node)
            waiting += [entry.node for entry in node.inputs]
    return reached


def _ignores(node: Node, facts: Facts, passes: Collection[Entry]) -> bool:
    """Whether the node's gradient ignores the incoming one, and `passes` are not labels alone."""
    if node.op in USER_CODE:
        return node.name in facts.ignoring
    return node.op in HEADS and node.inputs[0] in passes \
        and not node.is_set("out_grad")


Inner = Tuple[Graph, Facts, Iterable[Tuple[str, Entry]]]


def _inner(node: Node, facts: Facts) -> Iterator[Inner]:
    """Yields the graphs of a loop, a condition or a hybridized block, with the node's input that is
    bound to each of their variables."""
    if node.subgraphs:
        for body in node.bodies(dict.fromkeys(node.inputs)):
            yield body.graph, facts, body.outside.items()
    symbol: Optional[Symbol] = facts.blocks.get(node.name)
    if symbol is not None:
        graph = Graph.read(symbol)
        yield graph, facts_on_gradients(symbol), zip(graph.variables(), node.inputs)
