"""Networks of the model zoo and exported ones, and their layers that do not fit Tensor Cores.

Tensor Cores need sizes that are multiples of 8. cuDNN from version 7.6.3 and cuBLAS from version 11
use them for other sizes, too, but are slower.
"""
from ast import literal_eval
from math import prod
from typing import List, NamedTuple, Tuple

import mxnet as mx

from ..annotations import Symbol
from ..checks import did_you_mean, listed, message
from ..graph.graph import Graph

MULTIPLE = 8
_DATA = "data"  # the input's name in Gluon's exported networks, and in most others


class Layer(NamedTuple):
    """A convolution or a fully connected layer.

    Attributes:
        outputs, inputs: its channels, of one group.
        share: of all layers' multiply-adds.
    """
    name: str
    outputs: int
    inputs: int
    share: float

    @property
    def fits(self) -> bool:
        return self.outputs % MULTIPLE == self.inputs % MULTIPLE == 0


def load(name: str) -> Symbol:
    """Returns the symbol of a file, or of a network in MXNet's model zoo."""
    if name.endswith(".json"):
        with open(name, "rb") as file:
            content = file.read()
        try:
            return mx.sym.load_json(content.decode())
        except (mx.MXNetError, UnicodeDecodeError):  # in the file, or in MXNet's message
            raise ValueError(f"MXNet cannot read this as a symbol. Received: {name}") from None
    try:
        return mx.gluon.model_zoo.vision.get_model(name)(mx.sym.var(_DATA))
    except ValueError as error:
        names = str(error).split("\n\t")[1:]
        raise ValueError("a network is an exported symbol (NAME-symbol.json), or in MXNet's "
                         f"model zoo: {', '.join(names)}. Received: {name}"
                         f"{did_you_mean(name, names)}") from None


def layers_of(symbol: Symbol, batch: Tuple[int, ...]) -> List[Layer]:
    """Returns the convolutions and fully connected layers of a network for a batch of this shape,
    those with the most work first."""
    if _DATA not in symbol.list_inputs():
        raise ValueError(f"the input of a network must be called {_DATA}. Received: inputs "
                         f"{listed(symbol.list_inputs())}")
    internals = symbol.get_internals()
    try:
        _, inferred, _ = internals.infer_shape_partial(**{_DATA: batch})
    except mx.MXNetError as error:
        raise ValueError(f"the network does not take a batch of {batch}: {message(error)}") \
            from None
    shapes = dict(zip(internals.list_outputs(), inferred))
    layers = []
    for node in Graph.read(symbol).nodes():
        if node.op in ("Convolution", "Deconvolution", "FullyConnected"):
            weight, output = shapes[node.inputs[1].node.name], shapes[f"{node.name}_output"]
            if not weight or min(*weight, *output) < 1:
                raise ValueError(f"the shapes of {node.name} do not follow from a batch of {batch}")
            groups, strides = int(node.attrs.get("num_group", "1")), 1
            outputs = weight[0] // groups
            inputs = weight[-1 if node.attrs.get("layout", "").endswith("C") else 1]
            if node.op == "Deconvolution":  # its weight starts with the input channels
                outputs, inputs = inputs, outputs
                strides = prod(literal_eval(node.attrs.get("stride", "(1,)")))
            pixels = prod(output) // (groups * outputs * strides)
            layers.append(Layer(node.name, outputs, inputs, pixels * prod(weight)))
    total = sum(layer.share for layer in layers)
    layers = [layer._replace(share=layer.share / total) for layer in layers]
    return sorted(layers, key=lambda layer: -layer.share)
