"""`convert` and `restore`: a Gluon network to mixed precision, in place, and back."""
from typing import Any, Dict, Iterable, Iterator, List, Set, Tuple, Union

from mxnet.gluon import Block, HybridBlock, Parameter, nn

from .._mxnet import mx
from ..cpu.arrays import dtype_name
from ..formats import FLOAT32
from ..graph.casts import float32_variables
from ..graph.graph import Graph
from ..graph.keep import matches_nothing, matching
from ..policy import Policy, get_policy
from .converted import ConvertedBlock, State, converted_class, log

NORM_BLOCKS = (nn.basic_layers._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm)


def convert(net: Block, policy: Union[str, Policy] = "float16",
            keep: Iterable[Any] = ()) -> Block:
    """Converts a network to mixed precision, in place, and returns it.

    Parameters get the policy's type; those of norms stay float32. From then on the
    network takes float32 or float16 inputs, and returns float32 (under "pure_float16"
    float16). Files of `save_parameters` and `export` are float32's. Convert the
    outermost block, before its Trainer takes a step.

    Args:
        policy: "float16" (parameters in float16, for optimizers with float32 masters),
            "mixed_float16" (float32 parameters, cast where they are used),
            "pure_float16", "mixed_bfloat16" (CPU only), "float32" (undoes a conversion);
            or Apex's "O0" to "O3".
        keep: what stays float32: blocks, classes of blocks, and regular expressions for
            the whole name of a block, or of a node: in a SymbolBlock, or in a network that
            has run since it was last converted or hybridized.
    """
    policy = get_policy(policy)
    if not isinstance(net, Block):
        hint = " Use gluon_amp.convert_symbol for symbols." * isinstance(net, mx.sym.Symbol)
        raise TypeError(f"convert takes a gluon Block.{hint} Received: {type(net).__name__}")
    if isinstance(keep, (str, Block, type)) or not isinstance(keep, Iterable):
        keep = [keep]
    kept_blocks, kept_nodes = _resolve_keep(net, list(keep))
    types = _parameter_types(net, policy, kept_blocks, kept_nodes)
    _check_parameters(types)
    if policy.is_float32:
        return restore(net)

    blocks = list(_blocks(net))
    asleep = [b.name for b in blocks if isinstance(b, HybridBlock) and not b._active]
    for block in blocks:
        _swap(block, policy, block in kept_blocks, kept_nodes)
    if asleep:
        log.info("%s: hybridized, since mixed precision runs as a graph (gluon_amp.restore "
                 "undoes it)", net.name)
    _cast(types)
    return net


def restore(net: Block) -> Block:
    """Makes a converted network float32 again, as it was before, and returns it."""
    if not isinstance(net, Block):
        raise TypeError(f"restore takes a gluon Block. Received: {type(net).__name__}")
    converted: List[Any] = [b for b in _blocks(net) if isinstance(b, ConvertedBlock)]
    types = {p: "float32" for block in converted for p in block.params.values()
             if dtype_name(p.dtype) == "float16"}
    _check_trainers(types)
    for block in converted:
        if isinstance(block, HybridBlock):
            block._clear_cached_op()
            block._active = block._amp.active
        block.__class__ = type(block).__bases__[1]
        del block._amp
    _cast(types)
    return net


def _blocks(net: Block) -> Iterator[Block]:
    """The net's blocks, each once, parents first."""
    seen: Set[int] = set()
    stack = [net]
    while stack:
        block = stack.pop()
        if id(block) not in seen:
            seen.add(id(block))
            yield block
            stack.extend(reversed(list(block._children.values())))


def _swap(block: Any, policy: Policy, keep: bool, kept_nodes: Set[str]) -> None:
    hybrid = isinstance(block, HybridBlock)
    converted = isinstance(block, ConvertedBlock)
    active = block._amp.active if converted else hybrid and block._active
    if not converted:
        block.__class__ = converted_class(block.__class__)
    block._amp = State(policy, active, keep, frozenset(kept_nodes))
    if hybrid:
        block._clear_cached_op()
        if not block._active:
            block._active = True
            block._flags = block._flags or []


def _resolve_keep(net: Block, keep: List[Any]) -> Tuple[Set[Block], Set[str]]:
    """The blocks that `keep` names, and the nodes: of SymbolBlocks, and of blocks that have run."""
    blocks = list(_blocks(net))
    nodes = {node.name for block in blocks if getattr(block, "_cached_graph", None)
             for node in Graph.read(block._cached_graph[1]).nodes() if not node.is_variable}
    kept_blocks: Set[Block] = set()
    kept_nodes: Set[str] = set()
    for entry in keep:
        if isinstance(entry, Block):
            found = {b for b in blocks if b is entry}
            names: Set[str] = set()
        elif isinstance(entry, type) and issubclass(entry, Block):
            found, names = {b for b in blocks if isinstance(b, entry)}, set()
        elif isinstance(entry, str):
            matched = matching(entry, {b.name for b in blocks})
            found = {b for b in blocks if b.name in matched}
            names = matching(entry, nodes)
        else:
            raise TypeError("keep takes blocks, classes of blocks and regular expressions. "
                            f"Received: {entry!r}")
        if not found and not names:
            raise ValueError(_matches_nothing(entry, blocks, nodes))
        kept_blocks |= found
        kept_nodes |= names
    return kept_blocks, kept_nodes


def _matches_nothing(entry: Any, blocks: List[Block], nodes: Set[str]) -> str:
    if isinstance(entry, str):
        what, word, there = repr(entry), entry, {b.name for b in blocks} | nodes
    elif isinstance(entry, Block):
        what, word, there = f"block {entry.name!r}", entry.name, {b.name for b in blocks}
    else:
        what, word = f"class {entry.__name__}", entry.__name__
        there = {type(b).__name__ for b in blocks}
    return matches_nothing(what, word, there)


def _parameter_types(net: Block, policy: Policy, kept_blocks: Set[Block],
                     kept_nodes: Set[str]) -> Dict[Parameter, str]:
    """The type of each floating parameter that hybrid blocks own.

    Float32 wins where a parameter is shared. Statistics (not differentiable) and sparse
    parameters stay float32 under every policy: MXNet computes with them in nothing else.
    So do constants: they may be ids, or beyond float16's range.
    """
    float32: Set[Parameter] = set()
    for block in kept_blocks:
        float32.update(block.collect_params().values())
    owned: Dict[Parameter, None] = {}
    for block in _blocks(net):
        parameters = list(block.params.values())
        if not isinstance(block, HybridBlock):
            float32.update(parameters)  # a plain Block computes with its own in float32
            continue
        owned.update(dict.fromkeys(parameters))
        if isinstance(block, NORM_BLOCKS) and policy.norm == FLOAT32 \
                or isinstance(block, nn.basic_layers._BatchNorm):
            float32.update(parameters)
        elif isinstance(block, mx.gluon.SymbolBlock):
            names = float32_variables(Graph.read(block._cached_graph[1]), policy, kept_nodes)
            float32.update(p for p in parameters if p.name in names)
        float32.update(p for p in parameters if not p._differentiable
                       or isinstance(p, mx.gluon.Constant)
                       or "default" not in (p._stype, p._grad_stype)
                       or p._stype != p._grad_stype)
    return {p: "float32" if p in float32 else policy.parameter.type_name for p in owned
            if dtype_name(p.dtype).startswith("float")}


def _check_parameters(types: Dict[Parameter, str]) -> None:
    double = [p.name for p in types if dtype_name(p.dtype) == "float64"]
    if double:
        raise ValueError("convert takes float32 and float16 parameters; cast these first, with "
                         f"net.cast('float32'). Received float64: {', '.join(double)}")
    _check_trainers(types)


def _check_trainers(types: Dict[Parameter, str]) -> None:
    """A trainer that has stepped holds momenta and float32 masters that would no longer fit.
    Our optimizers say so themselves at the next step; MXNet's go on."""
    held = [p.name for p, dtype in types.items()
            if dtype_name(p.dtype) != dtype and p.grad_req != "null"
            and p._trainer is not None and _has_stepped(p._trainer)]
    if held:
        raise ValueError("a Trainer has already stepped with these parameters, and its state "
                         "would silently undo the change of type: make a new Trainer, which takes "
                         f"its place, then convert or restore. Received: {', '.join(held[:5])}"
                         f"{' and more' * (len(held) > 5)}")


def _has_stepped(trainer: mx.gluon.Trainer) -> bool:
    if trainer._update_on_kvstore:
        return trainer._kv_initialized
    if hasattr(trainer._optimizer, "weight_types"):
        return False
    return any(updater.states for updater in trainer._updaters)


def _cast(types: Dict[Parameter, str]) -> None:
    for parameter, dtype in types.items():
        if dtype_name(parameter.dtype) != dtype:
            parameter.cast(dtype)
