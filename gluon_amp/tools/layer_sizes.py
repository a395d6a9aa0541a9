"""Finds layers that do not fit Tensor Cores: their sizes are not multiples of 8.

cuDNN from version 7.6.3 and cuBLAS from version 11 use Tensor Cores for other sizes, too, but are
slower.
"""
from math import prod
from typing import Dict, List, NamedTuple, Optional, Sequence

from ..annotations import Symbol
from ..graph.graph import Graph, Node
from ..graph.operators import COLUMNS, PRODUCTS

MULTIPLE = 8


class Layer(NamedTuple):
    """A layer with matrix work.

    Attributes:
        sizes: its output and input channels; of one group for a depthwise convolution, which has
            no matrix product.
        rows: the number of input vectors of a fully connected layer. None if it is unknown, and
            for convolutions, which have a row for each pixel.
        multiply_adds: those of the forward pass; 0 if the shapes of outputs are unknown.
    """
    name: str
    sizes: Sequence[int]
    rows: Optional[int] = None
    multiply_adds: int = 0

    @property
    def fits(self) -> bool:
        return all(size % MULTIPLE == 0 for size in (*self.sizes, self.rows or 0))


def matrix_layers(symbol: Symbol, shapes: Dict[str, Sequence[int]]) -> List[Layer]:
    """Returns the convolutions and fully connected layers of a symbol.

    Args:
        shapes: the shapes of parameters by name; for rows and multiply-adds also those of outputs,
            by their names in the symbol's internals.
    """
    layers = []
    for node in Graph.read(symbol).nodes():
        if node.op in PRODUCTS and len(node.inputs) > 1:
            weight = shapes.get(node.inputs[1].node.name)
            if weight is not None and len(weight) > 1:
                layers.append(_layer(node, weight, shapes))
    return layers


def _layer(node: Node, weight: Sequence[int], shapes: Dict[str, Sequence[int]]) -> Layer:
    groups = int(node.attrs.get("num_group", "1"))
    first, second = weight[0], weight[-1 if node.attrs.get("layout", "").endswith("C") else 1]
    sizes = first, second * groups
    if groups > 1 and second == 1:
        sizes = first // groups, 1
    elif node.op == "Deconvolution":  # its weight starts with the input channels
        sizes = second * groups, first
    output, read = shapes.get(f"{node.name}_output"), node.inputs[0].node.name
    data = shapes.get(read, shapes.get(f"{read}_output", ()))
    if output is None:
        return Layer(node.name, sizes)
    convolution = node.op in COLUMNS["convolution"]
    return Layer(node.name, sizes, None if convolution else prod(output[:-1]),
                 _multiply_adds(node, data, weight, output))


def _multiply_adds(node: Node, data: Sequence[int], weight: Sequence[int],
                   output: Sequence[int]) -> int:
    """Returns the multiply-adds of one product's forward pass."""
    if node.op == "Deconvolution":
        return prod(data) * prod(weight) // max(weight[0], 1)
    if node.op in ("Convolution", "Convolution_v1", "FullyConnected"):
        return prod(output) * prod(weight) // max(weight[0], 1)
    if not data:
        return prod(output)
    transposed = node.is_set("transpose_a") and len(data) > 1
    return prod(output) * data[-2 if transposed else -1]
