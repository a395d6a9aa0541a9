"""Loss heads, which no loss scale reaches.

A loss head is an operator that ignores the incoming gradient. Its name shows it; the gradient that
the user's operators (Custom) declare shows it for these. A head counts if the loss depends on
it, and if its gradient reaches a trained variable.
"""
from typing import Any, Collection, Iterable, Iterator, List, NoReturn, Sequence, Set, Tuple

from .._mxnet import mx
from ..annotations import Array
from ..cpu.library import Facts, facts_on_gradients
from ..graph.graph import VARIABLE, Entry, Graph, Node
from ..graph.operators import HEADS, STOPS, USER_CODE

# how to train without a loss scale, for error messages
NO_LOSS_SCALE = "loss_scale=None (of python -m gluon_amp --dtype: --loss-scale none)"


def check_graphs(losses: Sequence[Any], gradients: Sequence[Array]) -> bool:
    """Refuses losses with heads whose gradients are among these. Returns whether there are other
    heads in their graphs."""
    heads: List[Tuple[Node, bool]] = []
    for loss in losses:
        symbol = mx.autograd.get_symbol(loss.as_nd_ndarray())
        facts, graph = facts_on_gradients(symbol, gradients), Graph.read(symbol)
        trained = graph.variables() if facts.trained is None else facts.trained
        heads += loss_heads(graph, trained, facts)
    operators = {node.op for node, trains in heads if trains}
    if operators:
        refuse("the network or the loss", operators, "a loss of gluon.loss, amp.Module, or ")
    return bool(heads)


def refuse(where: str, operators: Iterable[str], remedy: str = "") -> NoReturn:
    """Refuses the operators of loss heads."""
    raise ValueError(f"an operator of {where} ignores the incoming gradient, and so the loss "
                     f"scale: {', '.join(sorted(operators))}. The update would divide gradients by "
                     f"a scale that they lack. Valid: {remedy}{NO_LOSS_SCALE}")


def loss_heads(graph: Graph, trained: Collection[str], facts: Facts) -> Iterator[Tuple[Node, bool]]:
    """Yields the loss heads in a graph and in its hybridized blocks, and whether the gradient of
    each counts. Without the engine all variables count as trained, and heads in hybridized blocks
    and the user's operators are trusted.

    Args:
        graph: the graph.
        trained: the names of its trained variables.
        facts: what the engine knows of its nodes.
    """
    trains: Set[Node] = set()  # nodes through which gradients reach trained variables
    from_loss = _reached_by_gradients(graph)
    for node in graph.nodes():
        passes = [entry for entry in node.inputs if entry.node in trains and node in from_loss]
        if node.name in trained if node.op == VARIABLE else passes and node.op not in STOPS:
            trains.add(node)
        for inner, inner_facts, outside in _inner(node, facts):
            yield from loss_heads(inner, {name for name, entry in outside if entry in passes},
                                  inner_facts)
        if node.op in HEADS:  # the first input is not the label
            yield node, node.inputs[0] in passes and not node.is_set("out_grad")
        elif node.op in USER_CODE and node.name in facts.ignoring:
            yield node, bool(passes)


def _reached_by_gradients(graph: Graph) -> Set[Node]:
    reached: Set[Node] = set()
    waiting = [entry.node for entry in graph.outputs]
    while waiting:
        node = waiting.pop()
        if node not in reached and node.op not in STOPS:
            reached.add(node)
            waiting += [entry.node for entry in node.inputs]
    return reached


Inner = Tuple[Graph, Facts, Iterable[Tuple[str, Entry]]]


def _inner(node: Node, facts: Facts) -> Iterator[Inner]:
    """Yields the graphs of a loop, a condition or a hybridized block, with the node's input that is
    bound to each of their variables."""
    if node.subgraphs:
        for body in node.bodies(dict.fromkeys(node.inputs)):
            yield body.graph, facts, body.outside.items()
    if node.name in facts.blocks:
        symbol = facts.blocks[node.name]
        graph = Graph.read(symbol)
        yield graph, facts_on_gradients(symbol), zip(graph.variables(), node.inputs)
