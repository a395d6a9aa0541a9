"""`export_onnx`: writes a network as an ONNX file, in float32 or with the casts that a GPU runs.

    trace the network in prediction, or take the symbol
    insert casts (graph/casts.py) for the types of its parameters
    fold constants, which operators that copy or round values compute from parameters
    write each operator by its row (operators.py), or refuse it by name
    compare the type and shape that ONNX infers for each tensor with MXNet's
"""
from __future__ import annotations

import itertools
import numbers
import re
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..annotations import Array, Network, Symbol
from ..checks import imports_of, listed, message
from ..cpu.arrays import TYPES_16BIT, dtype_name
from ..files import replace_file
from ..formats import FORMATS
from ..gluon.converted import ConvertedHybridBlock, blocks_kept, recording_names
from ..gluon.observe import policy_in_use
from ..gluon.parameter import value_of
from ..graph.casts import float32_variables, insert_casts
from ..graph.graph import Entry, Graph, Node
from ..graph.keep import operator_names
from ..graph.operators import CASTS, LOSSES, family
from ..policy import POLICIES, Policy, get_policy
from ..record import record_in
from ..symbolic.convert import check_parameters, convert_model, declared_types
from .batch import SIZES, any_batch, refuse_batch
from .calibrate import nodes_to_keep
from .operators import ROWS
from .writer import OPSET, Writer, as_type, element_type, refuse, type_name

DTYPES = ("float16", "bfloat16", "float32")
_IR_VERSION = 8  # of the file's format, which ONNX 1.10 and later read

Shape = Tuple[int, ...]
Shapes = Union[Shape, Sequence[Shape], Mapping[str, Shape]]


@dataclass
class _Network:
    """The network to export."""
    graph: Graph
    types: Dict[str, str]     # of its variables
    arrays: Dict[str, Any]    # of its parameters
    inputs: List[str]         # the data, of a block in the order of its call
    outputs: List[str]        # their names
    kept: List[str] = field(default_factory=list)  # nodes that calibration keeps in float32


def export_onnx(net: Network, path: str, shapes: Shapes, dtype: str = "float16",
                params: Any = None, calibration: Optional[Iterable[Any]] = None) -> List[str]:
    """Writes a network for prediction as an ONNX file, atomically.

    Inputs are float32, and so are outputs unless the policy sets another type. Norms, softmax and
    all else that `gluon_amp.convert` keeps in float32 is float32 in the file. It needs the extra
    `onnx`.

    Args:
        net: a HybridBlock, converted or not, or a symbol.
        path: the path of the file.
        shapes: the shapes of the inputs: a tuple, a list of tuples, or a dict of names and tuples.
            None for the batch size exports for any batch size.
        dtype: "float16" writes the graph that a GPU runs, by the policy of a converted block or
            else by the policy float16; "bfloat16" the same in bfloat16, with operators that
            compute in float32 between casts; "float32" the network without casts.
        params: a symbol's parameters: a dict, or `(arg_params, aux_params)`.
        calibration: batches, each an array or a sequence of arrays, one for each input. The
            float32 network predicts them on a CPU. A node stays in float32 if a tensor that it
            reads or writes exceeds half the type's largest number, or would lose 1 % of its norm
            to underflow.

    Returns:
        The names of the nodes that calibration keeps in float32.

    Raises:
        ImportError: the package onnx is not installed.
        TypeError: `net` is neither a HybridBlock nor a symbol.
        ValueError: ONNX has no equivalent of an operator, or an argument is invalid.
        RuntimeError: parameters are not initialized.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}. "
                         f"Received: {dtype!r}")
    if calibration is not None and dtype == "float32":
        raise ValueError("calibration is for float16 and bfloat16. Received: dtype='float32'")
    onnx = _import_onnx()
    if isinstance(net, mx.sym.Symbol):
        network = _symbol(net, params, dtype, calibration)
    elif isinstance(net, mx.gluon.HybridBlock):
        if params is not None:
            raise ValueError("params are for symbols; a block has its own. Received: "
                             f"{type(net).__name__} and params")
        network = _block(net, len(shapes) if _are_several(shapes) else 1, dtype, calibration)
    else:
        raise TypeError("export_onnx takes a HybridBlock or a symbol. Received: "
                        f"{type(net).__name__}")
    try:
        model = _model_of_any_batch(onnx, network, shapes) if _has_none(shapes) else \
            _model(onnx, network, shapes)
    except mx.MXNetError as error:
        raise ValueError(f"the network takes inputs of other shapes: {message(error)}. "
                         f"Received: shapes={shapes!r}") from error
    replace_file(path, lambda beside: onnx.save(model, beside))
    return network.kept


def _import_onnx() -> ModuleType:
    with imports_of("onnx", "export_onnx"):
        import onnx
        import onnx.checker
        import onnx.numpy_helper
        import onnx.shape_inference
    return onnx


# ---- the network -------------------------------------------------------------


def _block(net: Network, count: int, dtype: str,
           calibration: Optional[Iterable[Any]] = None) -> _Network:
    names = [f"data{i}" for i in range(count)] if count > 1 else ["data"]
    parameters = net.collect_params()
    if any(p._data is None for p in parameters.values()):
        raise RuntimeError("export_onnx needs all parameters initialized: run "
                           f"{net.name} on data once first")
    numpy_mode = mx.util.is_np_array()
    data = [mx.sym.var(name) for name in names]
    recorded: List[str] = []
    with autograd.pause(), recording_names(blocks_kept(net), recorded.append):
        results = _flat(net(*(x.as_np_ndarray() if numpy_mode else x for x in data)))
    clean = Graph.read(mx.sym.Group([x.as_nd_ndarray() if numpy_mode else x for x in results]))
    outputs = _unique_outputs(clean.symbol())
    # in their own types; MXNet's files would hold float32
    arrays = {p.name: value_of(p) for p in parameters.values()}
    types = {**dict.fromkeys(names, "float32"),
             **{name: dtype_name(array.dtype) for name, array in arrays.items()}}
    kept = _calibrated(clean, arrays, calibration, dtype, names)
    if dtype == "float32":
        types = {name: "float32" if t in TYPES_16BIT else t for name, t in types.items()}
        graph = clean
    elif isinstance(net, ConvertedHybridBlock):
        _check_policy(policy_in_use(net), dtype)
        graph = net.with_casts(clean, types, [*recorded, *kept])
    else:
        policy = get_policy(dtype)
        wide = float32_variables(clean, policy, kept)
        types.update((p.name, dtype) for p in parameters.values()
                     if p._differentiable and p.name not in wide and types[p.name] == "float32")
        graph = insert_casts(clean, types, policy, parameters, kept)
    return _Network(graph, types, {name: _numbers(array, types[name])
                                   for name, array in arrays.items()}, names, outputs, kept)


def _check_policy(policy: Policy, dtype: str) -> None:
    if policy.compute.name != dtype:
        names = [name for name, each in POLICIES.items() if each.compute.name == dtype]
        types = [repr(name) for name in dict.fromkeys([policy.compute.name, "float32"])]
        raise ValueError(f"a network under policy {policy.name} has no equivalent in ONNX with "
                         f"{dtype}. Valid: dtype={' or '.join(types)}, or a network that is "
                         f"converted to {' or '.join(names)}")


def _calibrated(graph: Graph, arrays: Mapping[str, Array], calibration: Optional[Iterable[Any]],
                dtype: str, inputs: Sequence[str]) -> List[str]:
    if calibration is None:
        return []
    exact = {name: _numbers(array, "float32") for name, array in arrays.items()}
    return nodes_to_keep(graph, exact, inputs, calibration, FORMATS[dtype])


def _symbol(symbol: Symbol, params: Any, dtype: str,
            calibration: Optional[Iterable[Any]] = None) -> _Network:
    parts = params if isinstance(params, (tuple, list)) else ({} if params is None else params, {})
    if len(parts) != 2 or not all(isinstance(part, Mapping) for part in parts):
        raise TypeError("params must be a dict of arrays, or (arg_params, aux_params). "
                        f"Received: {params!r}")
    arg_params, aux_params = parts
    everything = {**arg_params, **aux_params}
    auxiliary = set(symbol.list_auxiliary_states())
    args = {n: a for n, a in everything.items() if n not in auxiliary}
    aux = {n: a for n, a in everything.items() if n in auxiliary}
    check_parameters(symbol, args, aux)
    clean, outputs = Graph.read(symbol), _unique_outputs(symbol)
    inputs = _inputs(clean, everything)
    kept = _calibrated(clean, everything, calibration, dtype, inputs)
    if dtype != "float32":
        recorded = record_in(symbol)
        wide = operator_names(clean).intersection(
            [*kept, *(recorded.nodes or () if recorded else ())])
        symbol, args, aux = convert_model(symbol, args, aux, dtype, map(re.escape, sorted(wide)),
                                          like=False)
    graph = Graph.read(symbol)
    arrays = {**args, **aux}
    declared = declared_types(graph)
    given = {name: dtype_name(array.dtype) for name, array in arrays.items()}
    types = {**dict.fromkeys(graph.variables(), "float32"), **declared, **given}
    low = sorted({name for of in (declared, given) for name, t in of.items() if t in TYPES_16BIT})
    if dtype == "float32" and low:
        raise ValueError("this symbol has float16 variables: export the float32 symbol that was "
                         f"converted. Received float16: {listed(low)}")
    return _Network(graph, types, {n: _numbers(a, types[n]) for n, a in arrays.items()}, inputs,
                    outputs, kept)


def _numbers(array: Array, dtype: str) -> Any:
    return as_type(array.asnumpy(), dtype)


def _unique_outputs(symbol: Symbol) -> List[str]:
    """Returns a name for each output: an output may be an input, or be there twice."""
    taken, unique = set(symbol.list_inputs()), []
    for name in symbol.list_outputs():
        numbered = (f"{name}_{i}" for i in itertools.count(1))
        unique.append(next(n for n in itertools.chain([name], numbered) if n not in taken))
        taken.add(unique[-1])
    return unique


def _flat(outputs: Union[Symbol, Sequence[Any]]) -> List[Any]:
    if isinstance(outputs, mx.sym.Symbol):
        return [outputs]
    return [one for part in outputs for one in _flat(part)]


# ---- the graph ---------------------------------------------------------------


def _model_of_any_batch(onnx: ModuleType, network: _Network, shapes: Any) -> object:
    sizes = _sizes(network.inputs, shapes, (numbers.Integral, type(None)))
    models = []
    for batch in SIZES:
        try:
            models.append(_model(onnx, network, {
                name: tuple(batch if n is None else n for n in shape)
                for name, shape in sizes.items()}))
        except mx.MXNetError as error:
            raise refuse_batch(f"MXNet refuses a batch of {batch}: {message(error)}") from None
    model = any_batch(onnx, models, sizes)
    _inferred(onnx, model)
    return model


def _model(onnx: ModuleType, network: _Network, shapes: Shapes) -> object:
    graph = network.graph
    inputs = network.inputs
    sizes = _sizes(inputs, shapes)
    types = graph.types(network.types)
    measured = _measure(graph, {**sizes, **{n: a.shape for n, a in network.arrays.items()}})
    constants = _constants(graph, network.arrays, types, measured)
    writer = Writer(onnx, types, measured, constants, network.outputs)
    for node in graph.nodes():
        if node.is_variable:
            if node.name in sizes:
                writer.names[Entry(node)] = writer.unique(node.name)
        elif Entry(node) not in constants:
            if node.op not in ROWS:
                refuse(node, "there is no ONNX rule for this operator")
            writer.write(node, ROWS[node.op])
    writer.nodes += [onnx.helper.make_node("Identity", [writer.read(entry)], [name])
                     for entry, name in zip(graph.outputs, network.outputs)]

    def described(name: str, dtype: Optional[str], shape: Shape) -> object:
        return onnx.helper.make_tensor_value_info(name, element_type(onnx, dtype), shape)

    writer.remove_unread()
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            writer.nodes, "network",
            [described(name, network.types[name], shape) for name, shape in sizes.items()],
            [described(name, types[entry], measured[entry])
             for name, entry in zip(network.outputs, graph.outputs)], writer.initializers),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION,
        producer_name="gluon_amp")
    _check(onnx, model, writer)
    return model


def _inputs(graph: Graph, arrays: Mapping[str, Any]) -> List[str]:
    """Returns the names of a symbol's data variables."""
    read = [entry for node in graph.nodes()
            for entry in (node.inputs[:1] if node.op in LOSSES else node.inputs)]  # no labels
    data = {entry.node.name for entry in [*read, *graph.outputs] if entry.node.is_variable}
    return [name for name in graph.variables() if name in data and name not in arrays]


def _are_several(shapes: Any) -> bool:
    return isinstance(shapes, Mapping) or _is_list(shapes) and any(map(_is_list, shapes))


def _is_list(value: object) -> bool:
    return isinstance(value, (tuple, list))


def _has_none(shapes: Any) -> bool:
    several = list(shapes.values()) if isinstance(shapes, Mapping) else shapes
    return _is_list(several) and (None in several or any(map(_has_none, several)))


def _sizes(names: List[str], shapes: Any, valid: Any = numbers.Integral) -> Dict[str, Shape]:
    """Returns the shape of each input."""
    several = shapes if _are_several(shapes) else [shapes]
    given = dict(several) if isinstance(several, Mapping) else dict(zip(names, several))
    if len(several) != len(names) or set(given) != set(names) or not all(
            _is_list(shape) and len(shape) and shape.count(None) < 2
            and all(isinstance(n, valid) and not isinstance(n, bool) and (n is None or n > 0)
                    for n in shape)
            for shape in given.values()):
        raise ValueError("shapes must be a tuple of sizes >= 1, with one None for any batch "
                         f"size, for each input: {', '.join(names)}. Received: {shapes!r}")
    return {name: tuple(size and int(size) for size in given[name]) for name in names}


def _measure(graph: Graph, sizes: Mapping[str, Shape]) -> Dict[Entry, Shape]:
    """Returns the shape of each tensor with a reader, as MXNet infers it."""
    entries = list(graph.consumers())
    symbol = Graph(entries).symbol()
    there = {*symbol.list_arguments(), *symbol.list_auxiliary_states()}
    _, shapes, _ = symbol.infer_shape_partial(**{n: s for n, s in sizes.items() if n in there})
    for entry, shape in zip(entries, shapes):
        if shape is None or 0 in shape:
            refuse(entry.node, f"MXNet infers no shape for it. Received: {shape}")
    return dict(zip(entries, shapes))


def _arange(node: Node, count: int) -> Any:
    begin = 0.0 if node.attrs.get("stop", "None") == "None" else float(node.attrs["start"])
    repeat, step = int(node.attrs.get("repeat", 1)), float(node.attrs.get("step", 1))
    return begin + np.arange(count) // repeat * step


# Constant folding of operators that copy or round values: from inputs, node and output shape.
_FOLDED: Dict[str, Callable[[List[Any], Node, Any, Any], Any]] = {
    **dict.fromkeys(CASTS, lambda x, node, shape, dtype: as_type(x[0], dtype)),
    **dict.fromkeys(family("reshape"), lambda x, node, shape, dtype: x[0].reshape(shape)),
    "_rnn_param_concat": lambda x, node, shape, dtype: np.concatenate([a.ravel() for a in x]),
    **dict.fromkeys(("_arange", "_npi_arange"), lambda x, node, shape, dtype: as_type(
        _arange(node, shape[0]), dtype)),
    **dict.fromkeys(("_zeros", "zeros_like"),
                    lambda x, node, shape, dtype: as_type(np.zeros(shape), dtype)),
    **dict.fromkeys(("_ones", "ones_like"),
                    lambda x, node, shape, dtype: as_type(np.ones(shape), dtype)),
}


def _constants(graph: Graph, arrays: Mapping[str, Any], types: Mapping[Entry, Optional[str]],
               shapes: Mapping[Entry, Shape]) -> Dict[Entry, Any]:
    """Returns the values of all tensors that depend on parameters alone."""
    values: Dict[Entry, Any] = {}
    for node in graph.nodes():
        entry = Entry(node)
        if node.is_variable:
            if node.name in arrays:
                values[entry] = arrays[node.name]
        elif node.op in _FOLDED and all(e in values for e in node.inputs):
            values[entry] = _FOLDED[node.op]([values[e] for e in node.inputs], node, shapes[entry],
                                           types[entry])
    return values


def _check(onnx: ModuleType, model: object, writer: Writer) -> None:
    """Checks that ONNX infers MXNet's type and shape of each tensor."""
    inferred = _inferred(onnx, model)
    inferred_types = {info.name: info.type.tensor_type for info in inferred.graph.value_info}
    for entry, name in writer.names.items():
        if name not in inferred_types or entry not in writer.shapes:
            continue
        shape = tuple(d.dim_value for d in inferred_types[name].shape.dim)
        dtype = type_name(onnx, inferred_types[name].elem_type)
        if (shape, dtype) != (writer.shapes[entry], writer.types[entry]):
            refuse(entry.node, f"it would be {dtype} {shape} there. Expected: "
                               f"{writer.types[entry]} {writer.shapes[entry]}")


def _inferred(onnx: ModuleType, model: object) -> Any:
    """Returns the model with the types and shapes that ONNX infers."""
    try:
        onnx.checker.check_model(model)
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True,
                                                 data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ValueError(f"ONNX refuses the graph that export_onnx has written: {error}") \
            from error
