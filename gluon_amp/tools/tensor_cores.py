"""Which layers stay off a GPU's Tensor Cores: those with sizes that are no multiples of 8.

From version 7.6.3 cuDNN, and from version 11 cuBLAS, use them for other sizes, too, but are
slower there.
"""
from math import prod
from typing import Dict, List, NamedTuple, Optional, Sequence

from ..annotations import Symbol
from ..graph.arithmetic import of_product
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


def matrix_layers(symbol: Symbol, shapes: Dict[str, Sequence[int]]) -> List[Layer]:
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
    output, read = shapes.get(f"{node.name}_output"), node.inputs[0].node.name
    data = shapes.get(read, shapes.get(f"{read}_output", ()))
    if output is None:
        return Layer(node.name, sizes)
    convolution = node.op in ("Convolution", "Deconvolution")
    return Layer(node.name, sizes, None if convolution else prod(output[:-1]),
                 of_product(node.op, node.attrs, [data, weight], output))
