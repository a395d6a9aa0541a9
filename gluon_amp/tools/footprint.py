"""The costs of a network: multiply-adds of its layers, and bytes under each policy.

The bytes of one training step of one batch:

    parameters    in their stored type, with the statistics of batch norms
    gradients     one for each parameter except statistics, in the parameter's type
    masters       the optimizer's float32 master weights of float16 parameters with gradients
    activations   the outputs of operators, in their type after the policy's casts, and casts of
                  parameters

MXNet infers types and shapes of the graph of `convert_symbol`, which inserts the casts of
`convert`. Activations are an upper bound, because MXNet computes some in-place. The bytes exclude
the batch, gradients of activations, momenta, and buffers within operators (workspaces, dropout
masks, batch statistics).

float16 counts as two bytes, also on a CPU. Policies of other formats run on CPUs only and round
float32 arrays (see graph/build.py), which count as four.
"""
from math import prod
from typing import Any, Dict, Set, Tuple

import mxnet as mx
import numpy as np

from ..checks import did_you_mean, listed, message
from ..formats import FLOAT16
from ..graph.graph import Graph
from ..graph.operators import holds_numbers
from ..policy import POLICIES, Policy
from ..symbolic.convert import convert_symbol, declared_types, parameter_names
from .layer_sizes import matrix_layers

_DATA = "data"  # the input's name in Gluon's exported networks, and in most others


def load(name: str) -> "mx.sym.Symbol":
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


def footprint(symbol: "mx.sym.Symbol", batch: Tuple[int, ...]) -> Dict[str, Any]:
    """Returns the costs of a network for a batch of this shape, as JSON-serializable values."""
    inputs = set(symbol.list_inputs())
    if _DATA not in inputs:
        raise ValueError(f"the input of a network must be called {_DATA}. Received: inputs "
                         f"{listed(symbol.list_inputs())}")
    graph = Graph.read(symbol)
    if "float16" in declared_types(graph).values():
        raise ValueError("the network is float16 already: pass the float32 network")
    parameters = parameter_names(graph) | set(symbol.list_auxiliary_states())
    data = inputs - parameters
    layers = matrix_layers(symbol, {  # data counts as an output: it is not a weight
        f"{name}_output" if name in data else name: shape
        for name, shape in _shapes(symbol, batch).items()})
    total = sum(layer.multiply_adds for layer in layers)
    off = [{"name": layer.name, "sizes": list(layer.sizes), "rows": layer.rows,
            "share": layer.multiply_adds / max(total, 1)} for layer in layers if not layer.fits]
    constants = [node.name for node in graph.nodes() if not holds_numbers(node, FLOAT16)]
    return {"batch": list(batch), "layers": len(layers), "multiply_adds": total,
            "constants": constants, "rnns": sum(node.op == "RNN" for node in graph.nodes()),
            "off_tensor_cores": off, "share_off": sum(layer["share"] for layer in off),
            "bytes": {name: _bytes(symbol, batch, policy, parameters)
                      for name, policy in POLICIES.items()}}


def _shapes(symbol: "mx.sym.Symbol", batch: Tuple[int, ...]) -> Dict[str, Tuple[int, ...]]:
    """Returns the shapes of all variables and outputs, by name."""
    internals = symbol.get_internals()
    try:
        _, shapes, _ = internals.infer_shape_partial(**{_DATA: batch})
    except mx.MXNetError as error:
        raise ValueError(f"the network does not take a batch of {batch}: {message(error)}") \
            from None
    named = dict(zip(internals.list_outputs(), shapes))
    unknown = [name for name, shape in named.items() if not shape or min(shape) < 1]
    if unknown:
        raise ValueError(f"the shapes of some variables do not follow from a batch of {batch}; "
                         f"unknown: {listed(unknown)}")
    return named


def _bytes(symbol: "mx.sym.Symbol", batch: Tuple[int, ...], policy: Policy,
           parameters: Set[str]) -> Dict[str, int]:
    mixed = convert_symbol(symbol, policy, like=False)
    internals, declared = mixed.get_internals(), declared_types(Graph.read(mixed))
    _, types, _ = internals.infer_type(
        **{name: declared.get(name, "float32") for name in mixed.list_inputs()})
    shapes = _shapes(mixed, batch)
    widths = {name: np.dtype(t).itemsize for name, t in zip(internals.list_outputs(), types)}
    stored = {name: prod(shape) * widths[name] for name, shape in shapes.items()}
    trained = parameters - set(mixed.list_auxiliary_states())
    counted = {
        "parameters": sum(stored[name] for name in parameters),
        "gradients": sum(stored[name] for name in trained),
        "masters": sum(4 * prod(shapes[name]) for name in trained if widths[name] == 2),
        "activations": sum(stored[name] for name in set(stored) - set(mixed.list_inputs())),
    }
    return {**counted, "total": sum(counted.values())}
