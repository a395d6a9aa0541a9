"""What a network costs: multiply-adds of its layers, and bytes under each policy.

Counted are, for one training step of one batch,

    parameters    as they are stored, with the statistics of batch norms
    gradients     one for each parameter but statistics, in the parameter's type
    masters       the optimizer's float32 copies of the float16 parameters that have gradients
    activations   what operators return, each output once, in its type after the policy's
                  casts; what a cast makes of a parameter is among them

Types and shapes are those that MXNet infers for the graph of `convert_symbol`, which casts as
`convert` does. Activations are an upper bound of what their outputs take: MXNet writes some in
place of others. Not counted are the batch itself, gradients of activations, momenta, and what
operators keep for themselves (workspaces, masks of dropout, statistics of the batch).

float16 counts two bytes, on a CPU as on a GPU. Policies of other formats, which are for CPUs only,
round float32 arrays (see graph/build.py), and are counted so.
"""
from math import prod
from typing import Any, Dict, Set, Tuple

from .._mxnet import message, mx, np
from ..checks import did_you_mean
from ..formats import FLOAT16
from ..graph.graph import Graph
from ..graph.operators import holds_numbers
from ..policy import POLICIES, Policy
from ..symbolic.convert import convert_symbol, declared_types, parameter_names
from .tensor_cores import matrix_layers

_DATA = "data"  # the input of Gluon's exported networks, and of most others


def load(name: str) -> "mx.sym.Symbol":
    """The symbol in a file, or of a network in MXNet's model zoo."""
    if name.endswith(".json"):
        with open(name, "rb") as file:
            content = file.read()
        try:
            return mx.sym.load_json(content.decode())
        except (mx.MXNetError, UnicodeDecodeError):  # of the file, or of MXNet's own message
            raise ValueError(f"MXNet cannot read this as a symbol. Received: {name}") from None
    try:
        return mx.gluon.model_zoo.vision.get_model(name)(mx.sym.var(_DATA))
    except ValueError as error:
        names = str(error).split("\n\t")[1:]
        raise ValueError("a network is an exported symbol (NAME-symbol.json), or one of MXNet's "
                         f"model zoo: {', '.join(names)}. Received: {name}"
                         f"{did_you_mean(name, names)}") from None


def footprint(symbol: "mx.sym.Symbol", batch: Tuple[int, ...]) -> Dict[str, Any]:
    """What the network costs for a batch of this shape, as numbers and names."""
    inputs = set(symbol.list_inputs())
    if _DATA not in inputs:
        raise ValueError(f"the input of a network must be called {_DATA}. Received: one with "
                         f"{', '.join(symbol.list_inputs()[:5])}")
    graph = Graph.read(symbol)
    if "float16" in declared_types(graph).values():
        raise ValueError("the network is in float16 already: give the float32 one")
    parameters = parameter_names(graph) | set(symbol.list_auxiliary_states())
    data = inputs - parameters
    layers = matrix_layers(symbol, {  # data is an output, of nobody: it is no weight
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
    """The shapes of all variables and outputs, by name."""
    internals = symbol.get_internals()
    try:
        _, shapes, _ = internals.infer_shape_partial(**{_DATA: batch})
    except mx.MXNetError as error:
        raise ValueError(f"the network does not take a batch of {batch}: {message(error)}") \
            from None
    named = dict(zip(internals.list_outputs(), shapes))
    unknown = [name for name, shape in named.items() if not shape or min(shape) < 1]
    if unknown:
        raise ValueError(f"a batch of {batch} does not tell the shapes of the whole network; "
                         f"unknown: {', '.join(unknown[:5])}")
    return named


def _bytes(symbol: "mx.sym.Symbol", batch: Tuple[int, ...], policy: Policy,
           parameters: Set[str]) -> Dict[str, int]:
    if policy.is_emulated:  # of its formats, those of arrays alone take less memory
        policy = Policy(policy.name, compute=policy.between if policy.between.is_array_type
                        else "float32")
    mixed = convert_symbol(symbol, policy)
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
