"""Which layers stay off a GPU's Tensor Cores: those with sizes that are no multiples of 8."""
from typing import Any, Dict, List, NamedTuple, Sequence

from . import rules
from .graph import Graph

MULTIPLE = 8


class Layer(NamedTuple):
    """A layer with matrix work.

    Attributes:
        sizes: its input and output channels.
    """
    name: str
    sizes: Sequence[int]

    @property
    def fits(self) -> bool:
        return all(size % MULTIPLE == 0 for size in self.sizes)


def matrix_layers(symbol: Any, shapes: Dict[str, Sequence[int]]) -> List[Layer]:
    """Convolutions and fully connected layers of a symbol, for parameters of these shapes."""
    layers = []
    for node in Graph.read(symbol).nodes():
        if node.op in rules.LOW and len(node.inputs) > 1:
            weight = shapes.get(node.inputs[1].node.name)
            if weight is not None and len(weight) > 1:
                groups = int(node.attrs.get("num_group", "1"))
                layers.append(Layer(node.name, (weight[0], weight[1] * groups)))
    return layers
