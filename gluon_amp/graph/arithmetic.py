"""Counts the multiply-adds of a graph's products."""
from math import prod
from typing import Any, Dict, List, Mapping

from .graph import Entry, Graph
from .operators import PRODUCTS

Shape = Any  # a tuple


def multiply_adds(graph: Graph, shapes: Mapping[str, Shape]) -> Dict[str, int]:
    """Returns the multiply-adds of each product's forward pass, by the product's name.

    Args:
        graph: a graph without casts.
        shapes: the shapes of its variables.
    """
    products = [n for n in graph.nodes() if n.op in PRODUCTS]
    if not products:
        return {}
    read = [*dict.fromkeys(e for n in products for e in (Entry(n), *n.inputs))]
    symbol = Graph(read).symbol()
    sizes = {name: shapes[name] for name in symbol.list_inputs() if name in shapes}
    shape_of = dict(zip(read, symbol.infer_shape_partial(**sizes)[1]))
    return {n.name: of_product(n.op, n.attrs, [shape_of[e] for e in n.inputs], shape_of[Entry(n)])
            for n in products}


def of_product(op: str, attrs: Mapping[str, str], inputs: List[Any], output: Shape) -> int:
    """Returns the multiply-adds of one product's forward pass."""
    if op == "RNN":  # one multiply-add for each weight, step and sequence
        return prod(inputs[1]) * prod(inputs[0][:2])
    if op == "Deconvolution":
        return prod(inputs[0]) * prod(inputs[1]) // max(inputs[1][0], 1)
    if op in ("Convolution", "Convolution_v1", "FullyConnected"):
        return prod(output) * prod(inputs[1]) // max(inputs[1][0], 1)
    if op.startswith("_contrib_interleaved"):
        return prod(inputs[0]) * output[-1]
    if len(inputs) < 2 or not inputs[0]:
        return prod(output)
    transposed = attrs.get("transpose_a") in ("True", "1")
    return prod(output) * inputs[0][-2 if transposed and len(inputs[0]) > 1 else -1]
