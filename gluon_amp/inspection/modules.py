"""A `Module` as a network that an X-ray can look into.

It becomes a SymbolBlock: the module's symbol without its casts, copies of its parameters, and
`keep=` such that `convert` puts the same casts back. Its data and labels are the block's inputs.
Its losses begin gradients by themselves, at the loss scale (symbolic/binding.py): heads.py
knows which losses these are. The labels that the heads compare with are outputs of the block, too.
"""
import itertools
import re
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Optional,
    Set,
    Tuple,
)

from .._mxnet import mx
from ..annotations import Batch, Block, Module, Network
from ..cpu.arrays import dtype_name, to_float32
from ..gluon.convert import convert
from ..graph.casts import insert_casts
from ..graph.graph import CASTS, TYPE_FLAG, Entry, Graph, Node, bindings
from ..policy import Policy
from ..symbolic.convert import parameter_names
from .heads import HeadLosses

_MOVED_BY_CASTS = ("float16", "float32")
Types = Dict[str, str]


class ModuleBlock(mx.gluon.SymbolBlock):
    """A module's symbol, of data and labels.

    Attributes:
        module: the module itself.
    """

    module: Any


class Looked(NamedTuple):
    """What an X-ray looks at."""
    net: Any
    batches: Iterable[Any]
    loss_fn: Callable[..., Any]


def looked_at(net: Network, batches: Iterable[Any],
              loss_fn: Optional[Callable[..., Any]]) -> Looked:
    """A network as it is; a module as a network, its batches as tuples, and the loss that its heads
    stand for."""
    if not isinstance(net, mx.mod.BaseModule):
        if loss_fn is None:
            raise TypeError("loss_fn is called with the network's output and the label: a Module "
                            "needs none, since its losses are in its symbol. Received: loss_fn="
                            f"None, and {type(net).__name__}")
        return Looked(net, batches, loss_fn)
    module = bound_module(net)
    bucket = net._curr_bucket_key if isinstance(net, mx.mod.BucketingModule) else None
    clean, policy, kept = _as_converted(module)
    if loss_fn is None:
        loss_fn = HeadLosses(clean)
        clean.outputs += loss_fn.labels
    block = _block_of(module, clean, policy, kept)
    block.module = net
    return Looked(block, (_as_tuple(module, bucket, batch) for batch in _single(batches)), loss_fn)


def bound_module(module: Module) -> Module:
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


def _single(batches: Iterable[Batch]) -> Iterable[Any]:
    """One batch may be given by itself."""
    return [batches] if isinstance(batches, mx.io.DataBatch) else batches


def _as_tuple(module: Module, bucket: Hashable, batch: Batch) -> Tuple[Any, ...]:
    """Data and labels as the block takes them, and what a loss of the user's own takes: the first
    label."""
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


def _as_converted(module: Module) -> Tuple[Graph, Policy, Set[str]]:
    """A module's float32 graph, and what gives it the casts of the module's symbol: a policy, and
    the nodes to keep."""
    mixed = Graph.read(module._symbol)
    types = dict.fromkeys([*module.data_names, *module.label_names], "float32")
    executor = module._exec_group.execs[0]
    for name, array in [*executor.arg_dict.items(), *executor.aux_dict.items()]:
        types[name] = dtype_name(array.dtype)
    clean = without_casts(mixed, types)
    return clean, *_how_it_was_converted(mixed, clean, types)


def _block_of(module: Module, clean: Graph, policy: Policy, kept: Set[str]) -> Block:
    """The module's network with copies of its parameters, converted as its symbol is."""
    mx.nd.waitall()  # MXNet's batch norm moves its averages without telling
    values = {name: array for part in module.get_params() for name, array in part.items()}
    inputs = [*module.data_names, *module.label_names]
    block = ModuleBlock(clean.symbol(), [mx.sym.var(name) for name in inputs])
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
        made.subgraphs = [without_casts(body, inside) for body, inside in _bodies(node, found)]
        if made.attrs.get("dtype") == "float16":
            made.attrs["dtype"] = "float32"
        if made.attrs.get("__dtype__") == str(TYPE_FLAG["float16"]):
            made.attrs["__dtype__"] = str(TYPE_FLAG["float32"])
        for entry in found:
            if entry.node is node:
                new[entry] = Entry(made, entry.output)
    before = _names_without_casts(graph)
    for entry in graph.outputs:
        made = new[entry].node
        made.name = before.get(made.name, made.name)
    return Graph(new[entry] for entry in graph.outputs)


def _names_without_casts(graph: Graph) -> Dict[str, str]:
    """The names that outputs had before a cast was given them, by those that they have now."""
    casts = [entry.node for entry in graph.outputs if entry.node.op in CASTS]
    return {f"{cast.name}_float16": cast.name for cast in casts
            if cast.inputs[0].node.name == f"{cast.name}_float16"}


def _how_it_was_converted(mixed: Graph, clean: Graph, types: Types) -> Tuple[Policy, Set[str]]:
    """A policy and the nodes to keep by which the clean graph gets the casts of the mixed one."""
    found = mixed.types(types)
    if "float16" not in found.values():
        raise ValueError("the Module has no float16 tensors: give its symbol to "
                         "gluon_amp.convert_symbol")
    names = _names_without_casts(mixed)
    parameter = "float16" if "float16" in map(types.get, parameter_names(clean)) else "float32"
    output = "float16" if "float16" in {found[e] for e in mixed.outputs} else "float32"
    wanted = {names.get(name, name): read for name, read in _input_types(mixed, types).items()}
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
    """The types that each node reads, in order of computation, with the nodes of loops."""
    found = graph.types(types)
    read: Dict[str, Tuple[Any, ...]] = {}
    for node in graph.nodes():
        for body, inside in _bodies(node, found):
            read.update(_input_types(body, inside))
        if not node.is_variable and node.op not in CASTS:
            read[node.name] = tuple(found[e] for e in node.inputs)
    return read


def _bodies(node: Node, found: Mapping[Entry, Optional[str]]) -> Iterator[Tuple[Graph, Types]]:
    """The bodies of a loop, and the types of their variables."""
    for body, places in zip(node.subgraphs, bindings(node) if node.subgraphs else ()):
        yield body, {name: found[node.inputs[i]] or "float32"
                     for name, i in zip(body.variables(), places)}
