"""Wraps a `Module` as a network for an X-ray, and computes the losses of its heads.

The module becomes a SymbolBlock: its symbol without casts, copies of its parameters, and a `keep=`
with which `convert` inserts the same casts. Its data and labels are the block's inputs.
Its heads give predictions, and begin gradients by themselves, at the loss scale
(symbolic/binding.py): of a loss that the graph does not compute, which `HeadLosses` does. The
labels that they compare with are outputs of the block, too.
"""
import math
import re
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple, Union

import mxnet as mx

from ..annotations import Array, Batch, Block, Module, Network
from ..checks import listed
from ..cpu.arrays import TYPES_16BIT, dtype_name, to_float32
from ..gluon.convert import convert
from ..graph.casts import insert_casts, sparse_nodes
from ..graph.graph import TYPE_FLAG, Entry, Graph, Node
from ..graph.operators import CASTS, LOSSES, NORM, SENSITIVE, runs_in
from ..policy import Policy
from ..record import record_in
from ..symbolic.convert import parameter_names
from .tensors import Key

_WIDE = "float32"
Types = Dict[str, str]
Reads = Dict[str, Tuple[Node, Tuple[Any, ...]]]  # operators and the types of their inputs, by name


class ModuleBlock(mx.gluon.SymbolBlock):
    """A module's symbol as a block of data and labels.

    Attributes:
        module: the module.
        weak: the parameters that are cast to the type of the data they meet.
    """

    module: Any
    weak: Set[str]


def as_block(net: Network, batches: Iterable[Any],
             loss_fn: Optional[Callable[..., Any]]
             ) -> Tuple[Any, Iterable[Any], Callable[..., Any]]:
    """Returns a network, its batches and its loss. Of a module, they are a block, batches as
    tuples, and the losses of its heads."""
    if not isinstance(net, mx.mod.BaseModule):
        if loss_fn is None:
            raise TypeError("loss_fn is required, except for a Module, whose symbol has the losses."
                            f" Received: loss_fn=None, and {type(net).__name__}")
        return net, batches, loss_fn
    module = bound_module(net)
    bucket = net._curr_bucket_key if isinstance(net, mx.mod.BucketingModule) else None
    clean, policy, kept = _as_converted(module)
    if loss_fn is None:
        loss_fn = HeadLosses(clean)
        clean.outputs += loss_fn.further
    block = _block_of(module, clean, policy, kept)
    block.module = net
    several = [batches] if isinstance(batches, mx.io.DataBatch) else batches
    return block, (_as_tuple(module, bucket, batch) for batch in several), loss_fn


def bound_module(module: Module) -> Module:
    """Returns the MXNet Module with the symbol; of a BucketingModule, the current one."""
    module = getattr(module, "_curr_module", module)
    if not isinstance(module, mx.mod.Module) or not (module.binded and module.params_initialized):
        raise ValueError("the Module must be bound and have parameters: call bind and "
                         f"init_params. Received: {type(module).__name__}")
    if any(context.device_type == "gpu" for context in module._context):
        raise ValueError("the Module must be on CPUs, where results are counted before they are "
                         "rounded. Received: a Module on a GPU")
    if module._state_names:
        raise ValueError("a Module with states is not supported. Received: state_names="
                         f"{module._state_names}")
    sparse = sorted(node.name for node in sparse_nodes(Graph.read(module._symbol))
                    if node.is_variable)
    if sparse:
        raise ValueError("the Module must have dense arrays only. Received: the sparse "
                         f"variables {listed(sparse)}")
    return module


def _as_tuple(module: Module, bucket: Any, batch: Batch) -> Tuple[Any, ...]:
    """Returns the block's inputs (data and labels) and the label for `loss_fn`: the first one."""
    if not isinstance(batch, mx.io.DataBatch):
        raise TypeError("batches of a Module are mx.io.DataBatch, as its iterator returns them. "
                        f"Received: {type(batch).__name__}")
    if bucket is not None and batch.bucket_key not in (None, bucket):
        raise ValueError("batches must be of the current bucket of the BucketingModule, "
                         f"{bucket!r}. Received: a batch of {batch.bucket_key!r}")
    data, labels = list(batch.data or []), list(batch.label or [])
    wanted = len(module.data_names), len(module.label_names)
    if (len(data), len(labels)) != wanted:
        raise ValueError(f"the Module takes {wanted[0]} arrays of data and {wanted[1]} labels. "
                         f"Received: {len(data)} and {len(labels)}")
    return (*data, *labels, labels[0] if labels else data[0])


# ---- the block --------------------------------------------------------------------------------


def _as_converted(module: Module) -> Tuple[Graph, Policy, Set[str]]:
    """Returns a module's float32 graph, and the policy and the kept nodes of its symbol: those that
    convert_symbol has recorded, or those that have the casts of MXNet's own scripts."""
    record, mixed = record_in(module._symbol), Graph.read(module._symbol)
    for entry in mixed.outputs:  # a cast at an output has the name of its input
        cast = entry.node
        if cast.op in CASTS and cast.inputs[0].node.name == f"{cast.name}_float16":
            cast.inputs[0].node.name = cast.name
    types = dict.fromkeys([*module.data_names, *module.label_names], _WIDE)
    executor = module._exec_group.execs[0]
    for name, array in [*executor.arg_dict.items(), *executor.aux_dict.items()]:
        types[name] = dtype_name(array.dtype)
    wanted, clean = _reads(mixed, types), _without_casts(mixed, types)
    parameters = parameter_names(clean)
    policy = record.policies[""] if record else _policy_of_casts(mixed, types, parameters, wanted)
    kept = set(record.nodes or ()) if record else set()
    others = _others(clean, types, policy, parameters, kept, wanted)
    while not record and others and not others <= kept:
        kept |= others
        others = _others(clean, types, policy, parameters, kept, wanted)
    if others:
        raise ValueError("the symbol must have no casts but those of convert_symbol: "
                         "convert the float32 symbol with convert_symbol, and list in keep= what "
                         f"stays float32. Received: other types in {listed(sorted(others))}")
    return clean, policy, kept


def _policy_of_casts(mixed: Graph, types: Types, parameters: Set[str], wanted: Reads) -> Policy:
    """Returns the policy that has a symbol's casts, besides kept nodes."""
    inferred = mixed.types(types)
    low = next((name for name in TYPES_16BIT if name in inferred.values()), "")
    if not low:
        raise ValueError("the Module is all float32: convert its symbol with "
                         "gluon_amp.convert_symbol")

    def low_if(is_low: bool) -> str:
        return low if is_low else _WIDE

    def low_in(rule: str) -> str:
        return low_if(any(low in read and runs_in(node) == rule for node, read in wanted.values()))

    return Policy("as its symbol", low_if(low in map(types.get, parameters)), low, low_in(NORM),
                  low_in(SENSITIVE), low_if(low in map(inferred.get, mixed.outputs)))


def _others(clean: Graph, types: Types, policy: Policy, parameters: Set[str], kept: Set[str],
            wanted: Reads) -> Set[str]:
    """Returns the first nodes that read other types than in the module's symbol: those whose
    inputs do not come from such nodes."""
    mixed = insert_casts(clean, types, policy, parameters, kept)
    others = {name for name, (_, read) in _reads(mixed, types).items() if read != wanted[name][1]}
    return {name for name in others if not any(
        e.node.name in others for before in wanted[name][0].inputs
        for e in (before.node.inputs if before.node.op in CASTS else [before]))}


def _without_casts(graph: Graph, types: Types) -> Graph:
    """Returns the float32 graph: without casts between 16-bit types and float32, and with float32
    variables and constants."""
    inferred = graph.types(types)

    def make(node: Node, inputs: List[Entry]) -> Union[Node, List[Entry]]:
        if node.op in CASTS \
                and {inferred[node.inputs[0]], inferred[Entry(node)]} <= {*TYPES_16BIT, _WIDE}:
            return inputs
        copy = node.like(inputs)
        copy.subgraphs = [_without_casts(b.graph, b.types) for b in node.bodies(inferred)]
        if copy.attrs.get("dtype") in TYPES_16BIT:
            copy.attrs["dtype"] = _WIDE
        return copy

    for node in graph.nodes():
        if node.is_variable and node.attrs.get("__dtype__") in [
                str(TYPE_FLAG[name]) for name in TYPES_16BIT]:
            node.attrs["__dtype__"] = str(TYPE_FLAG[_WIDE])
    return graph.rewrite(make)


def _reads(graph: Graph, types: Types) -> Reads:
    """Returns operators and the types of their inputs, by name, those in loops included."""
    inferred, reads = graph.types(types), {}
    for node in graph.nodes():
        for body in node.bodies(inferred):
            reads.update(_reads(body.graph, body.types))
        if not node.is_variable and node.op not in CASTS:
            reads[node.name] = node, tuple(inferred[e] for e in node.inputs)
    return reads


def _block_of(module: Module, clean: Graph, policy: Policy, kept: Set[str]) -> Block:
    """Returns the module's network with copies of its parameters, converted like its symbol."""
    mx.nd.waitall()  # MXNet's batch norm updates its averages without a dependency
    values = {name: array for part in module.get_params() for name, array in part.items()}
    inputs = [*module.data_names, *module.label_names]
    missing = sorted({*clean.variables()} - {*inputs, *values})
    if missing:
        raise ValueError("the Module does not name all inputs of its symbol: pass them as "
                         f"data_names= or label_names= to Module. Missing: {listed(missing)}")
    block = ModuleBlock(clean.symbol(), [mx.sym.var(name, dtype=_WIDE) for name in inputs])
    block.weak = parameter_names(clean)
    for name, parameter in block.collect_params().items():
        value = to_float32(values[name])
        parameter.shape = value.shape
        if name in (module._fixed_param_names or ()):
            parameter.grad_req = "null"
        parameter.initialize(mx.init.Zero(), ctx=mx.cpu())
        if name in block.weak:
            parameter.set_data(value)
    convert(block, policy, keep=sorted(map(re.escape, kept)), like=False)
    for name, parameter in block.collect_params().items():
        if name not in block.weak:
            parameter.cast(_WIDE)
            parameter.set_data(to_float32(values[name]))
    return block


# ---- the losses of heads ------------------------------------------------------------------------

_LEAST = 1e-30  # lower bound of a logarithm's argument


# A head's loss: its terms, and the gradient of their sum by the head's input, or None if unknown.
_Loss = Tuple[Any, Optional[Any]]


class HeadLosses:
    """A loss function of a `ModuleBlock`'s outputs: the sum of its heads' mean losses.

    A head is an output, or computes what an output reads:

        SoftmaxOutput   the cross entropy          regressions   half the square, the distance, or
        SVMOutput       the hinge loss                           the cross entropy of two classes
        MakeLoss        its output

    A backward pass from the sum starts all heads.

    Attributes:
        further: the heads and their labels, which become outputs of the block too: a graph may
            compute labels from a batch, such as by `reshape`.
    """

    def __init__(self, graph: Graph) -> None:
        self.heads = [node for node in graph.nodes() if node.op in LOSSES]
        self.further: List[Entry] = [entry for head in self.heads for entry in
                                     (Entry(head), *head.inputs[1:2])]
        self._outputs = len(graph.outputs)
        self._last: List[_Loss] = []  # of each head
        if not self.heads:
            raise ValueError("the Module must have losses in its symbol. Valid: "
                             f"{', '.join(sorted(LOSSES))}. Received outputs: "
                             f"{', '.join(entry.node.name for entry in graph.outputs)}")

    def __call__(self, outputs: Any, label: Array) -> Any:
        further = iter(outputs[self._outputs:])
        with mx.autograd.pause():
            self._last = [_loss(head, next(further).astype("float32"),
                                *(next(further).astype("float32") for _ in head.inputs[1:2]))
                          for head in self.heads]
            shown = mx.nd.add_n(*(numbers.mean() for numbers, _ in self._last))
        begun = mx.nd.add_n(*(out.astype("float32").sum() for out in outputs[:self._outputs]))
        return shown + (begun - begun.detach())

    def total(self, counts: Any) -> float:
        """Returns the sum of the heads' losses in the last call, each scaled like its gradient by
        `grad_scale` and `normalization`. Returns 0 if a head's loss is unknown."""
        total = 0.0
        for head, (numbers, slopes) in zip(self.heads, self._last):
            begun = counts.get(Key(head.name, True, 0))
            if slopes is None or begun is None:
                return 0.0
            squares = float(slopes.square().sum().asscalar())
            if squares:
                factor = math.sqrt(begun.squares / squares)
                total += factor * float(numbers.abs().sum().asscalar())
        return total


def _loss(head: Node, output: Array, label: Any = None) -> _Loss:
    """Returns a head's loss in float32, or its output if the label has another shape."""
    loss: Optional[_Loss] = None
    if head.op == "SoftmaxOutput":
        loss = _of_softmax(head, output, label)
    elif head.op in _REGRESSIONS and label.size == output.size:
        loss = _REGRESSIONS[head.op](output, label.reshape(output.shape))
    elif head.op == "SVMOutput" and label.size == len(output):
        loss = _of_svm(head, output, label.reshape(-1))
    elif head.op in ("MakeLoss", "make_loss"):
        loss = output, mx.nd.ones_like(output)
    return loss or (output, None)


_REGRESSIONS: Dict[str, Callable[[Array, Array], _Loss]] = {
    "LinearRegressionOutput": lambda out, label: ((out - label).square() / 2, out - label),
    "MAERegressionOutput": lambda out, label: ((out - label).abs(), (out - label).sign()),
    "LogisticRegressionOutput": lambda out, label: (
        -label * (out + _LEAST).log() - (1 - label) * (1 - out + _LEAST).log(), out - label)}


def _of_softmax(head: Node, output: Array, label: Array) -> Optional[_Loss]:
    axis = 1 if head.is_set("multi_output") else output.ndim - 1
    if not head.is_set("multi_output") and not head.is_set("preserve_shape"):
        output, axis = output.reshape((output.shape[0], -1)), 1
    if label.size == output.size:
        label = label.reshape(output.shape)
        return -(label * (output + _LEAST).log()).sum(axis=axis), output - label
    places = output.shape[:axis] + output.shape[axis + 1:]
    if label.size != math.prod(places):
        return None
    label = label.reshape(places)
    counted = mx.nd.ones_like(label)
    if head.is_set("use_ignore"):
        counted = label != float(head.attrs.get("ignore_label", -1))
    target = mx.nd.moveaxis(mx.nd.one_hot(label, output.shape[axis]), -1, axis)
    numbers = -((output * target).sum(axis=axis) + _LEAST).log() * counted
    return numbers, (output - target) * counted.expand_dims(axis)


def _of_svm(head: Node, output: Array, label: Array) -> _Loss:
    sides = 2 * mx.nd.one_hot(label, output.shape[1]) - 1
    off = (float(head.attrs.get("margin", 1)) - sides * output).relu()
    if head.is_set("use_linear"):
        return off, -sides * (off > 0)
    return off.square(), -2 * sides * off
