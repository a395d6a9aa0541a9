"""A `Module` as a network that an X-ray can look into.

It becomes a SymbolBlock: the module's symbol without its casts, copies of its parameters, and
`keep=` such that `convert` puts the same casts back. Its data and labels are the block's inputs.
Its losses begin gradients by themselves, at the loss scale (symbolic/binding.py), so what the
block is trained with is its own outputs.
"""
import itertools
import re
from typing import Any, Callable, Dict, Iterable, NamedTuple, Optional, Set, Tuple

from .._mxnet import mx
from ..cpu.arrays import dtype_name, to_float32
from ..gluon.convert import convert
from ..graph.casts import insert_casts
from ..graph.graph import CASTS, TYPE_FLAG, Entry, Graph
from ..graph.operators import LOSSES
from ..policy import Policy
from ..symbolic.convert import parameter_names

_MOVED_BY_CASTS = ("float16", "float32")
Types = Dict[str, str]


class ModuleBlock(mx.gluon.SymbolBlock):
    """A module's symbol, of data and labels."""


class Looked(NamedTuple):
    """What an X-ray looks at."""
    net: Any
    batches: Iterable[Any]
    loss_fn: Callable[..., Any]


def looked_at(net: Any, batches: Iterable[Any], loss_fn: Optional[Callable[..., Any]]) -> Looked:
    """A network as it is; a module as a network, its batches as tuples, and the loss that its heads
    stand for."""
    if not isinstance(net, mx.mod.BaseModule):
        if loss_fn is None:
            raise TypeError("loss_fn is called with the network's output and the label: a Module "
                            "needs none, since its losses are in its symbol. Received: loss_fn="
                            f"None, and {type(net).__name__}")
        return Looked(net, batches, loss_fn)
    module = _bound(net)
    bucket = net._curr_bucket_key if isinstance(net, mx.mod.BucketingModule) else None
    block = block_of(module)
    return Looked(block, (_as_tuple(module, bucket, batch) for batch in _single(batches)),
                  loss_fn or _loss_of_heads(Graph.read(block._cached_graph[1])))


def _bound(module: Any) -> Any:
    """The MXNet Module that holds a symbol: of a BucketingModule, the one that is bound now."""
    module = getattr(module, "_curr_module", module)
    if not isinstance(module, mx.mod.Module) or not (module.binded and module.params_initialized):
        raise ValueError("xray looks into a Module that is bound and has its parameters: call "
                         f"bind and init_params. Received: {type(module).__name__}")
    if any(context.device_type == "gpu" for context in module._context):
        raise ValueError("xray runs on CPUs, where each result is seen before it is rounded. "
                         "Received: a Module on a GPU")
    if module._state_names:
        raise ValueError("xray looks into Modules without states. Received: state_names="
                         f"{module._state_names}")
    return module


def _single(batches: Any) -> Iterable[Any]:
    """One batch may be given by itself."""
    return [batches] if isinstance(batches, mx.io.DataBatch) else batches


def _as_tuple(module: Any, bucket: Any, batch: Any) -> Tuple[Any, ...]:
    """Data and labels as the block takes them, and what the loss takes: the first label."""
    if not isinstance(batch, mx.io.DataBatch):
        raise TypeError("of a Module, batches are mx.io.DataBatch, as its iterator gives them. "
                        f"Received: {type(batch).__name__}")
    if bucket is not None and batch.bucket_key not in (None, bucket):
        raise ValueError(f"the BucketingModule is bound to the bucket {bucket!r}, and one bucket "
                         f"is looked into. Received: a batch of {batch.bucket_key!r}")
    data, labels = list(batch.data or []), list(batch.label or [])
    wanted = len(module.data_names), len(module.label_names)
    if (len(data), len(labels)) != wanted:
        raise ValueError(f"the Module takes {wanted[0]} arrays of data and {wanted[1]} labels. "
                         f"Received: {len(data)} and {len(labels)}")
    return (*data, *labels, labels[0] if labels else data[0])


# ---- the block --------------------------------------------------------------------------------


def block_of(module: Any) -> Any:
    """The module's network with copies of its parameters, converted as its symbol is."""
    mx.nd.waitall()  # MXNet's batch norm moves its averages without telling
    values = {name: array for part in module.get_params() for name, array in part.items()}
    inputs = [*module.data_names, *module.label_names]
    mixed = Graph.read(module._symbol)
    types = {**dict.fromkeys(inputs, "float32"),
             **{name: dtype_name(array.dtype) for name, array in values.items()}}
    for name, array in module._exec_group.execs[0].arg_dict.items():
        types[name] = dtype_name(array.dtype)
    clean = without_casts(mixed, types)
    policy, kept = _how_it_was_converted(mixed, clean, types)
    symbol = clean.symbol()
    block = ModuleBlock(symbol, [mx.sym.var(name) for name in inputs])
    for name, parameter in block.collect_params().items():
        value = to_float32(values[name])
        parameter.shape = value.shape
        if name in (module._fixed_param_names or ()):
            parameter.grad_req = "null"
        parameter.initialize(mx.init.Zero(), ctx=mx.cpu())
        parameter.set_data(value)
    return convert(block, policy, keep=sorted(map(re.escape, kept)))


def without_casts(graph: Graph, types: Types) -> Graph:
    """The float32 graph: without casts between float16 and float32, with float32 variables and
    constants."""
    found = graph.types(types)
    new: Dict[Entry, Entry] = {}
    for node in graph.nodes():
        if node.op in CASTS and {found[node.inputs[0]], found[Entry(node)]} \
                <= set(_MOVED_BY_CASTS):
            new[Entry(node)] = new[node.inputs[0]]
            continue
        made = node.like(new[e] for e in node.inputs)
        made.subgraphs = [without_casts(body, dict.fromkeys(body.variables(), "float32"))
                          for body in node.subgraphs]
        if made.attrs.get("dtype") == "float16":
            made.attrs["dtype"] = "float32"
        if made.attrs.get("__dtype__") == str(TYPE_FLAG["float16"]):
            made.attrs["__dtype__"] = str(TYPE_FLAG["float32"])
        for entry in found:
            if entry.node is node:
                new[entry] = Entry(made, entry.output)
    for entry in graph.outputs:  # a cast had been given the name of the output that it casts
        made = new[entry].node
        if entry.node.op in CASTS and made.name == f"{entry.node.name}_float16":
            made.name = entry.node.name
    return Graph(new[entry] for entry in graph.outputs)


def _how_it_was_converted(mixed: Graph, clean: Graph, types: Types) -> Tuple[Policy, Set[str]]:
    """A policy and the nodes to keep by which the clean graph gets the casts of the mixed one."""
    found = mixed.types(types)
    if "float16" not in found.values():
        raise ValueError("the Module has no float16 tensors: give its symbol to "
                         "gluon_amp.convert_symbol")
    parameter = "float16" if "float16" in map(types.get, parameter_names(clean)) else "float32"
    output = "float16" if "float16" in {found[e] for e in mixed.outputs} else "float32"
    wanted = _input_types(mixed, types)
    for norm, sensitive in itertools.product(("float32", "float16"), repeat=2):
        policy = Policy("as its symbol", parameter, "float16", norm, sensitive, output)
        kept = _kept(clean, types, policy, wanted)
        if kept is not None:
            return policy, kept
    raise ValueError("xray looks into symbols with casts as convert_symbol makes them, and this "
                     "one has others: give convert_symbol the float32 symbol, and name in keep= "
                     "what is to stay float32")


def _kept(clean: Graph, types: Types, policy: Policy, wanted: Dict[str, Tuple[Any, ...]]
          ) -> Optional[Set[str]]:
    """The nodes to keep under this policy so that all nodes read the types that are wanted."""
    kept: Set[str] = set()
    while True:
        now = _input_types(insert_casts(clean, types, policy, parameter_names(clean), kept), types)
        other = [name for name in now if now[name] != wanted.get(name)]
        if not other:
            return kept
        if other[0] in kept or "float16" not in now[other[0]]:
            return None
        kept.add(other[0])  # what follows it may follow of itself


def _input_types(graph: Graph, types: Types) -> Dict[str, Tuple[Any, ...]]:
    """The types that each node reads, in order of computation."""
    found = graph.types(types)
    return {node.name: tuple(found[e] for e in node.inputs) for node in graph.nodes()
            if not node.is_variable and node.op not in CASTS}


# ---- its loss ---------------------------------------------------------------------------------


def _loss_of_heads(graph: Graph) -> Callable[..., Any]:
    """What the heads stand for, to be shown: a head gives predictions, and begins its gradient by
    itself. The cross entropy of a SoftmaxOutput, half the square that a regression is off; of any
    other head the mean of its output."""
    heads = [entry.node for entry in graph.outputs]
    if not any(head.op in LOSSES for head in heads):
        raise ValueError("a Module is looked into with the losses in its symbol. Valid: "
                         f"{', '.join(sorted(LOSSES))}. Received outputs: "
                         f"{', '.join(head.name for head in heads)}")

    def loss_fn(output: Any, label: Any) -> Any:
        outputs = output if isinstance(output, (list, tuple)) else [output]
        loss = _shown(heads[0], outputs[0], label)
        for head, other in zip(heads[1:], outputs[1:]):
            if head.op in LOSSES:  # so that it begins its gradient
                loss = loss + 0 * other.astype("float32").sum()
        return loss
    return loss_fn


def _shown(head: Any, output: Any, label: Any) -> Any:
    """The loss of one head."""
    axis = 1 if head.attrs.get("multi_output") in ("True", "1") else output.ndim - 1
    if head.op == "SoftmaxOutput" \
            and label.shape == output.shape[:axis] + output.shape[axis + 1:]:
        return -(output.pick(label, axis=axis) + 1e-30).log()
    if "Regression" in head.op and label.size == output.size:
        return (output - label.reshape(output.shape)).square() / 2
    return output.astype("float32")
