"""Which layers stay off a GPU's Tensor Cores: those with sizes that are no multiples of 8.

From version 7.6.3 cuDNN, and from version 11 cuBLAS, use them for other sizes, too, but are
slower there.
"""
from math import prod
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from ..graph.graph import Graph, Node
from ..graph.operators import PRODUCTS

MULTIPLE = 8


class Layer(NamedTuple):
    """A layer with matrix work.

    Attributes:
        sizes: its output and input channels. A depthwise convolution, which has no matrix
            product, has those of one group.
        rows: how many vectors a fully connected layer takes: the batch. None if that is
            not known, and for convolutions, which have a row for each pixel.
        multiply_adds: of the forward pass; 0 if the shapes of outputs are not known.
    """
    name: str
    sizes: Sequence[int]
    rows: Optional[int] = None
    multiply_adds: int = 0

    @property
    def fits(self) -> bool:
        return all(size % MULTIPLE == 0 for size in (*self.sizes, self.rows or 0))


def matrix_layers(symbol: Any, shapes: Dict[str, Sequence[int]]) -> List[Layer]:
    """Convolutions and fully connected layers of a symbol.

    Args:
        shapes: of the parameters; and of outputs, under the names that the symbol's
            internals have, where rows and multiply-adds are to be known.
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
    elif node.op == "Deconvolution":  # its weight begins with the channels of the input
        sizes = second * groups, first
    # Each of these numbers takes part in one product for each number of a filter.
    counted = f"{node.name}_output"
    if node.op == "Deconvolution":
        read = node.inputs[0].node.name
        counted = read if read in shapes else f"{read}_output"
    shape = shapes.get(counted)
    if shape is None:
        return Layer(node.name, sizes)
    convolution = node.op in ("Convolution", "Deconvolution")
    filters, rows = (weight[0], None) if convolution else (shape[-1], prod(shape[:-1]))
    return Layer(node.name, sizes, rows, prod(shape) * prod(weight) // filters)
