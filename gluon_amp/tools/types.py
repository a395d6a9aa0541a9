"""The types that the operators of a network run in, with the reasons."""
from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any, Collection, List, Mapping, Optional, Tuple

import mxnet as mx

from ..annotations import Network
from ..checks import aligned, counted
from ..cpu.arrays import TYPES_16BIT
from ..formats import FLOAT16, Format
from ..gluon.converted import ConvertedHybridBlock, blocks_in
from ..gluon.observe import policy_in_use
from ..graph import operators
from ..graph.casts import sparse_nodes, touches_sparse
from ..graph.graph import Entry, Graph, Node
from ..graph.operators import CASTS
from ..record import record_in
from ..symbolic.convert import convert_symbol, declared_types


@dataclass(frozen=True)
class Row:
    """The types of an operator.

    Attributes:
        node: the name of its node.
        operator: the name of the operator.
        inputs: the types of its inputs.
        output: the type of its first output.
        rule: the reason for the type.
        casts: the number of inputs that are cast.
    """
    node: str
    operator: str
    inputs: Tuple[str, ...]
    output: str
    rule: str
    casts: int


class Types(List[Row]):
    """A list of rows in order of computation, which `print` shows as a table."""

    def __str__(self) -> str:
        cells = [("node", "operator", "inputs", "output", "casts", "rule"), *(
            (r.node, r.operator, ", ".join(  # in short: float16 x3, float32
                name if count == 1 else f"{name} x{count}" for name, count in (
                    (name, len([*run])) for name, run in itertools.groupby(r.inputs))),
             r.output, str(r.casts or ""), r.rule) for r in self)]
        low = sum(r.output not in ("float32", "float64") for r in self)
        casts = sum(r.casts for r in self)
        return "\n".join([*aligned(cells), f"{low} of {counted(len(self), 'node')} below float32; "
                                  f"{counted(casts, 'input')} cast."])


def types(net: Network) -> Types:
    """Returns the type that each operator runs in, with the reason.

    Args:
        net: a converted network that has run once, a symbol of `convert_symbol`, or a Module. Of a
            plain Block, the blocks in it that have run.

    Returns:
        A `Types`, which `print` shows as a table.

    Raises:
        TypeError: `net` is none of these.
        RuntimeError: the network has not run.
    """
    if isinstance(net, mx.mod.BaseModule):
        net = net.symbol
    if isinstance(net, mx.sym.Symbol):
        graph = Graph.read(net)
        declared = declared_types(graph)
        variables = {name: declared.get(name, "float32") for name in graph.variables()}
        record = record_in(net)
        return _rows(graph, variables, record.nodes or () if record else ())
    inside: List[Any] = list(blocks_in(net)) if isinstance(net, mx.gluon.Block) else []
    graphs = [block for block in inside if isinstance(block, ConvertedHybridBlock)]
    if not graphs:
        raise TypeError("types takes a converted network or a symbol. "
                        f"Received: {type(net).__name__}")
    if graphs[0] is net:  # which contains the others
        graphs = graphs[:1]
    ran = [block for block in graphs if block._cached_graph]
    if not ran:
        raise RuntimeError(f"types needs the graph: run {net.name} on data once first")
    rows = Types()
    for block in ran:
        graph, declared = block.mixed_graph(["float32"] * len(block._cached_graph[0]))
        rows += _rows(graph, declared, block.kept_nodes(), policy_in_use(block).compute)
    return rows


def types_of_file(symbol: mx.sym.Symbol, policy: Optional[str]) -> Types:
    """Returns the types of an exported network's operators under a policy; None: as its symbol
    records, or float16. A symbol in mixed precision has types already."""
    record = record_in(symbol)
    if policy is None and not set(TYPES_16BIT).isdisjoint(
            declared_types(Graph.read(symbol)).values()):
        return types(symbol)
    if policy is None and record is not None:
        return types(convert_symbol(symbol, record.policies[""],
                                    [re.escape(name) for name in record.nodes or ()]))
    return types(convert_symbol(symbol, policy, like=False))


def _rows(graph: Graph, declared: Mapping[str, str], kept: Collection[str] = (),
          activation: Format = FLOAT16) -> Types:
    """Returns the rows of a graph with casts, for its variables' types and the format of
    activations."""
    type_of, sparse = graph.types(declared), sparse_nodes(graph)
    rows = Types()
    for node in graph.nodes():
        for body in node.bodies(type_of):
            rows += _rows(body.graph, body.types, kept, activation)
        if node.is_variable or node.op in CASTS:
            continue
        inputs = tuple(type_of.get(e) or "unknown" for e in node.inputs)
        output = type_of.get(Entry(node)) or "unknown"
        casts = sum(e.node.op in CASTS for e in node.inputs)
        rule = "float32: sparse tensors" if touches_sparse(node, sparse) \
            else "kept by keep=" if node.name in kept else _rule(node, inputs, activation)
        rows.append(Row(node.name, node.op, inputs, output, rule, casts))
    return rows


def _rule(node: Node, inputs: Collection[str], activation: Format) -> str:
    rule: Optional[operators.Rule] = operators.OPERATORS.get(node.op)
    runs = operators.runs_in(node)
    if runs == operators.FLOAT32 and (rule is None or rule.runs == operators.INPUTS):
        return "float32: it mutates an input"
    if rule is None:
        return "the type of its inputs: it is not in the table"
    if runs == operators.INPUTS:
        if "float32" in inputs and not operators.holds_numbers(node, activation):
            numbers = ", ".join(f"{number:g}" for _, number in operators.numbers(node))
            return f"float32: {activation.name} cannot represent its constant {numbers}"
        return f"the type of its inputs: {rule.why}"
    if runs != rule.runs:  # sensitive with these attributes only
        return f"{runs}, with these attributes"
    return f"{rule.runs}: {rule.why}"
