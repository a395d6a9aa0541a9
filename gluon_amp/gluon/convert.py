"""`convert` and `restore`: convert a Gluon network to a policy in place, and back."""
from __future__ import annotations

import gc
import re
from collections import OrderedDict
from functools import partial
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, Union

from mxnet.gluon import Block, HybridBlock, Parameter, nn
from mxnet.gluon.block import _flatten

from .._mxnet import mx
from ..checks import listed
from ..cpu.arrays import TYPES_16BIT, beyond_float16, dtype_name, is_16bit, small_in_float16
from ..formats import FLOAT32
from ..graph.casts import float32_variables
from ..graph.graph import Graph
from ..graph.keep import Kept, Operators, matches_none, matches_nothing, matching, operators_in
from ..graph.operators import CASTS, NORMS
from ..policy import Policy, get_policy
from ..record import record_like
from ..training.masters import trainers_of
from .converted import (
    NOT_TRACED,
    ConvertedBlock,
    PolicyBlock,
    State,
    blocks_in,
    check_backend,
    converted_class,
    discard_traces,
    inputs_of,
    log,
    name_of,
    original_class,
    restore_blocks,
)
from .parameter import cast, make_repeatable
from .records import check_blocks, kept_in_blocks, kept_in_record, paths_in, policy_of

# Elements cast between waits, so that few parameters exist in both types at a time.
MOST_UNDER_WAY = 2 ** 22

_NORM_BLOCKS = tuple(getattr(nn, op) for op in NORMS if hasattr(nn, op))


def convert(net: Block, policy: Union[str, Policy, None] = None, keep: Iterable[Any] = (),
            like: Union[str, bool, None] = None) -> Block:
    """Converts a network to mixed precision, or to float32, in place, and returns it.

    Parameters get the policy's type. Those of norms stay float32, and so do those with values
    beyond float16's range, which the log names. The converted network takes float32 or 16-bit
    inputs and returns float32 (under "pure_float16" float16). `save_parameters` and `export` write
    float32 files, under every policy also of master weights (`masters=`). Convert the outermost
    block, before its Trainer takes a step. Children that are added later are converted, too.

    Args:
        net: a gluon Block.
        policy: "float16", the default (float16 parameters, for optimizers with master weights),
            "mixed_float16" (float32 parameters, cast where used) or "pure_float16"; on CPUs
            "bfloat16" or "mixed_bfloat16"; "float32" or "tf32", which compute as MXNet does;
            Apex's "O0" to "O3"; or a `gluon_amp.Policy`.
        keep: what stays float32: blocks, classes of blocks, operators (`gluon_amp.ops`), and
            regular expressions for the whole name of a block or of a node (an operator of the
            graph). A network that has not run is traced for the names of its nodes. A kept block
            that was never hybridized may read shapes and values, and then runs imperatively.
        like: a file of parameters of a converted network, such as "net.params": converts with the
            policy and `keep` recorded in net.params.json. By default, parameters that the network
            has loaded must have the same policy, and what they keep must be kept. False does not
            compare, also when files are loaded later.

    Returns:
        The network.

    Raises:
        TypeError: `net` is not a Block, or an entry of `keep` has another type.
        ValueError: the policy is unknown, `keep` matches nothing, a trained parameter is float64,
            or a SymbolBlock has casts and 16-bit parameters; or the policy or `keep` is not that of
            the loaded parameters. The network does not change.
    """
    if not isinstance(net, Block):
        for_symbols = isinstance(net, mx.sym.Symbol)
        hint = " Use gluon_amp.convert_symbol for symbols." if for_symbols else ""
        raise TypeError(f"convert takes a gluon Block.{hint} Received: {type(net).__name__}")
    if like not in (None, False):
        return _convert_like(net, policy, keep, like)
    policy = get_policy("float16" if policy is None else policy)
    if isinstance(keep, (str, Block, type)) or not isinstance(keep, Iterable):
        keep = [keep]
    keep = tuple(keep)
    blocks = list(blocks_in(net))
    graphs = _Graphs(blocks)
    kept_blocks, kept = _resolve_keep(graphs, keep)
    mixed = not policy.is_float32
    for block in blocks:
        if mixed and isinstance(block, HybridBlock):
            check_backend(block._backend)
        _check_symbol(block)
    asleep = any(isinstance(b, HybridBlock) and not b._active for b in blocks)
    around = list(blocks_around(net, set(blocks)))
    if mixed and like is None:
        policies = dict.fromkeys(blocks, policy)
        check_blocks(
            [*blocks, *around],
            lambda block: None if block in kept_blocks else policies.get(block) or policy_of(block),
            Kept.union([kept, kept_in_blocks(around)]))
    _convert_blocks(graphs, kept_blocks, kept, policy, keep, like is None)
    for outer in around:
        if isinstance(outer, HybridBlock) and not isinstance(outer, ConvertedBlock):
            outer._clear_cached_op()  # it holds the float32 graph
    if not mixed:
        return net
    if not any(isinstance(block, HybridBlock) for block in blocks):
        log.warning("convert changed nothing: %s (%s) has no HybridBlock. float16 runs as a graph, "
                    "so move the layers into HybridBlocks (hybrid_forward), in a plain Block or "
                    "not", name_of(net), type(net).__name__)
    if asleep:
        log.info("%s: hybridized, because mixed precision runs as a graph (gluon_amp.restore "
                 "undoes it)", name_of(net))
    return net


def _convert_like(net: Block, policy: object, keep: object, like: object) -> Block:
    """Converts a network as the record of a file states."""
    path, record = record_like(like, policy, keep)
    kept = kept_in_record(record, net)
    blocks = {path: block for block, path in paths_in(net).items()}
    missing = [at for at in record.policies if at not in blocks]
    if missing or any(block is None for block, _ in kept):
        raise ValueError(f"{path} records {record.text()}, of a network with other blocks than "
                         f"{net.name}")
    operators = [Operators(record.operators, frozenset(record.operators), must_match=False)]
    for at, recorded in record.policies.items():
        inside = set(blocks_in(blocks[at]))
        convert(blocks[at], recorded, [*operators, *(
            re.escape(name) if name else block for block, name in kept if block in inside)])
    return net


def restore(net: Block, masters: Any = None) -> Block:
    """Converts a network back to float32, in place, and returns it.

    16-bit parameters keep their rounded values, unless `masters` has the float32 ones.

    Args:
        net: a gluon Block.
        masters: a Trainer, or a list of Trainers: 16-bit parameters get their master weights, which
            are not rounded.

    Raises:
        TypeError: `net` is not a Block, or `masters` has others than gluon_amp.Trainers.
        ValueError: MXNet's own Trainer has taken a step with its 16-bit parameters (a
            gluon_amp.Trainer refuses its next step instead); or `masters` has none of the
            parameters, or no master weights. The network does not change.
    """
    if not isinstance(net, Block):
        raise TypeError(f"restore takes a gluon Block. Received: {type(net).__name__}")
    converted: List[Any] = [b for b in blocks_in(net) if isinstance(b, PolicyBlock)]
    types = {p: "float32" for block in converted for p in block.params.values()
             if is_16bit(p.dtype)}
    _check_trainers(types)
    trainers = trainers_of(masters, net)
    values = {p: trainers[p].master(p) for p in types if p in trainers}
    restore_blocks(converted)
    _cast(types)
    for parameter, value in values.items():
        parameter.set_data(value)
    return net


def _convert_blocks(graphs: _Graphs, kept_blocks: Set[Block], kept: Kept, policy: Policy,
                    keep: Sequence[Any], compares: bool) -> None:
    """Sets the classes and states of blocks, and the types of their parameters.

    Args:
        graphs: the graphs of the blocks.
        kept_blocks: the blocks that stay float32.
        kept: what else stays float32.
        keep: what stays float32 in new children.
        compares: whether files must have the same policy and keep=.
    """
    blocks = graphs.blocks
    types = _parameter_types(graphs, policy, kept_blocks, kept)
    _check_parameters(types)
    for trainer in {p._trainer for p in types if p.grad_req != "null"}:
        if hasattr(trainer, "check_policy"):
            trainer.check_policy(policy)
    states = [State(
        policy=policy, converted_to=policy,
        active=block._amp.active if isinstance(block, ConvertedBlock)
        else getattr(block, "_active", False),
        keep=block in kept_blocks, kept=kept,
        convert_child=partial(_convert_new_child, policy, keep, block in kept_blocks, compares),
        compares=compares) for block in blocks]
    mixed = not policy.is_float32
    if not mixed:
        restore_blocks(blocks)
    _give_classes(blocks, mixed)
    for block, state in zip(blocks, states):
        is_hybrid = isinstance(block, HybridBlock)
        discard_traces(block)
        block._amp = state
        for parameter in block.params.values():
            make_repeatable(parameter)
            if mixed:
                parameter.converted_by_gluon_amp = policy if is_hybrid else None  # for Trainers
        if is_hybrid and (mixed or any(is_16bit(p.dtype)
                                       for p in block.collect_params().values())):
            block._clear_cached_op()  # it declares the types
        if is_hybrid and mixed:
            block._active = True
    _cast(types)


def _convert_new_child(policy: Policy, keep: Sequence[Any], inside_kept: bool, compares: bool,
                       child: Block) -> None:
    """Converts a block that becomes the child of a converted one, with the arguments of `convert`.
    Converted blocks inside it do not change."""
    new = [b for b in blocks_in(child) if not isinstance(b, PolicyBlock)]
    if new:
        kept_blocks, kept = _resolve_keep(
            _Graphs(list(blocks_in(child))), [child] if inside_kept else keep, must_match=False)
        _convert_blocks(_Graphs(new), kept_blocks, kept, policy, keep, compares)


def blocks_around(block: Block, seen: Set[Block]) -> Iterator[Block]:
    """Yields the blocks that contain this one. A block has no reference to its parents, so this
    searches the referrers that Python's garbage collector lists."""
    for children in gc.get_referrers(block):
        if not isinstance(children, OrderedDict):
            continue
        for holder in gc.get_referrers(children):
            # a block or, in older versions of Python, its dictionary of attributes
            for outer in [holder] if isinstance(holder, Block) else gc.get_referrers(holder):
                if isinstance(outer, Block) and outer._children is children and outer not in seen:
                    seen.add(outer)
                    yield outer
                    yield from blocks_around(outer, seen)


def _give_classes(blocks: List[Block], mixed: bool) -> None:
    """Makes blocks instances of their converted classes: all of them or, on an error, none."""
    before = [type(block) for block in blocks]
    for done, (block, cls) in enumerate(zip(blocks, before)):
        try:
            block.__class__ = converted_class(original_class(cls), mixed)
        except TypeError as error:
            for other, theirs in zip(blocks[:done], before):
                other.__class__ = theirs
            raise TypeError(f"convert makes a subclass of each block's class, which {cls.__name__} "
                            "does not allow. Valid: classes whose first base is a block, not "
                            f"abc.ABC or typing.Generic. Received: {error}") from error


class _Graphs:
    """The blocks of a network, and graphs of them: those that they have run, and those that `trace`
    has traced."""

    def __init__(self, blocks: List[Block]) -> None:
        self.blocks = blocks
        self.graphs = [graph for block in blocks for graph in _graphs_of(block)]
        self._traced: Dict[Block, Optional[Graph]] = {}

    def operators(self) -> Dict[str, str]:
        """Returns the operators of the graphs so far, by the names of their nodes."""
        return {name: op for graph in self.graphs for name, op in operators_in(graph).items()}

    def trace(self, block: HybridBlock) -> Optional[Graph]:
        """Returns the graph of a block, which it traces once; None if it cannot be traced."""
        if block not in self._traced:
            self._traced[block] = None
            data = [mx.sym.var(name) for name in inputs_of(block)[0]]
            try:
                with mx.name.NameManager():  # the outer one counts the names of later traces
                    results = block(*(d.as_np_ndarray() if mx.util.is_np_array() else d
                                      for d in data))
                outputs, _ = _flatten(results, "output")
                graph = Graph.read(mx.sym.Group([o.as_nd_ndarray() for o in outputs]))
                self._traced[block] = graph
                self.graphs.append(graph)
            except NOT_TRACED as error:
                log.debug("%s cannot be traced: %r", block.name, error)
        return self._traced[block]

    def trace_all(self) -> List[str]:
        """Traces the outermost blocks that can be traced; returns the names of those that cannot.
        """
        traced: Set[Block] = set()
        untraced = []
        for block in self.blocks:
            if isinstance(block, HybridBlock) and block not in traced:
                if self.trace(block):
                    traced.update(blocks_in(block))
                else:
                    untraced.append(name_of(block))
        return untraced

    def mutated(self) -> Set[str]:
        """Returns the parameters that operators of these blocks mutate.

        Besides MXNet's batch norms, only blocks of the user's own classes with parameters of their
        own may have such operators. Those that have not run are traced.
        """
        seen: Set[str] = set().union(*(graph.variables() for graph in self.graphs))
        for block in self.blocks:
            of_user = isinstance(block, HybridBlock) \
                and type(block).__module__.split(".")[0] != "mxnet"
            if of_user and not {p.name for p in block._reg_params.values()} <= seen:
                graph = self.trace(block)
                seen.update(graph.variables() if graph else ())
        return set().union(*(graph.mutated() for graph in self.graphs))


def _graphs_of(block: Block) -> List[Graph]:
    """Returns all graphs that a converted block has run, or the last one of any other block."""
    last = getattr(block, "_cached_graph", None)
    traced = block._amp.traces.values() if isinstance(block, ConvertedBlock) else ()
    return [trace.clean for trace in traced] or ([Graph.read(last[1])] if last else [])


def _resolve_keep(graphs: _Graphs, keep: Iterable[Any],
                  must_match: bool = True) -> Tuple[Set[Block], Kept]:
    """Returns the blocks that `keep` lists, with those inside them, and what else it lists. It
    traces blocks that have not run only if the names of their nodes decide."""
    blocks, operators = graphs.blocks, graphs.operators()
    untraced: List[str] = []
    kept_blocks: Set[Block] = set()
    nodes: Set[str] = set()
    for entry in keep:
        matched: Set[Block] = set()
        names: Set[str] = set()
        if isinstance(entry, Block):
            matched = {b for b in blocks if b is entry}
        elif isinstance(entry, type) and issubclass(entry, Block):
            matched = {b for b in blocks if isinstance(b, entry)}
        elif isinstance(entry, (str, Operators)):
            if isinstance(entry, str):
                (of_blocks,) = matching(entry, {b.name for b in blocks})
                matched = {b for b in blocks if b.name in of_blocks}
            if must_match and not matched and not operators:
                untraced = graphs.trace_all()
                operators = graphs.operators()
            if isinstance(entry, Operators):
                if must_match and not untraced and entry.must_match and not entry.among(operators):
                    raise ValueError(matches_none(entry, operators))
                continue  # Kept.operators
            (names,) = matching(entry, set(operators))
        else:
            raise TypeError("keep takes blocks, classes of blocks, regular expressions and "
                            f"gluon_amp.ops(...). Received: {entry!r}")
        if must_match and not matched and not names:
            raise ValueError(_matches_nothing(entry, blocks, operators, untraced))
        kept_blocks.update(inner for block in matched for inner in blocks_in(block))
        nodes |= names
    return kept_blocks, Kept(frozenset(nodes), frozenset().union(
        *(entry.names for entry in keep if isinstance(entry, Operators))))


def _matches_nothing(entry: Any, blocks: List[Block], operators: Dict[str, str],
                     untraced: List[str]) -> str:
    """Returns the error message for an entry of `keep` that matches nothing; `untraced` names
    blocks whose nodes have no names yet."""
    if isinstance(entry, str) and untraced:
        return f"keep: {entry!r} matches nothing yet. These blocks cannot be traced for names of " \
               "nodes before the first call: hybridize the network, run it on data, and convert " \
               f"it then. Received: {listed(untraced)}"
    if isinstance(entry, str):
        what, word, there = repr(entry), entry, {b.name for b in blocks} | {*operators}
    elif isinstance(entry, Block):
        what, word, there = f"block {name_of(entry)}", entry.name, {b.name for b in blocks}
    else:
        what, word = f"class {entry.__name__}", entry.__name__
        there = {type(b).__name__ for b in blocks}
    return matches_nothing(what, word, there)


def _parameter_types(graphs: _Graphs, policy: Policy, kept_blocks: Set[Block],
                     kept: Kept) -> Dict[Parameter, str]:
    """Returns the type of each floating-point parameter that hybrid blocks own.

    A shared parameter is float32 if any of its blocks requires it. Statistics (not differentiable),
    other parameters that operators mutate, and sparse parameters stay float32 under every policy:
    MXNet supports no other type for them. Constants stay float32, because they may be ids or beyond
    float16's range. Parameters in float64 that nothing can train keep their type.
    """
    float32: Set[Parameter] = {p for block in kept_blocks for p in block.params.values()}
    mutated = graphs.mutated()
    owned: Dict[Parameter, None] = {}
    for block in graphs.blocks:
        parameters = list(block.params.values())
        if not isinstance(block, HybridBlock):
            float32.update(parameters)  # a plain Block computes in float32
            continue
        owned.update(dict.fromkeys(parameters))
        if isinstance(block, _NORM_BLOCKS) and policy.norm == FLOAT32 \
                or isinstance(block, nn.basic_layers._BatchNorm):
            float32.update(parameters)
        elif isinstance(block, mx.gluon.SymbolBlock):
            graph = Graph.read(block._cached_graph[1])
            names = float32_variables(graph, policy, kept.in_graph(graph))
            float32.update(p for p in parameters if p.name in names)
        float32.update(p for p in parameters if not _can_train(p) or p.name in mutated
                       or "default" not in (p._stype, p._grad_stype)
                       or p._stype != p._grad_stype)
    types = {p: "float32" if p in float32 else policy.parameter.name for p in owned
             if "float" in dtype_name(p.dtype)
             and (_can_train(p) or dtype_name(p.dtype) != "float64")}
    return {**types, **dict.fromkeys(_beyond_float16(types), "float32")}


def _can_train(parameter: Parameter) -> bool:
    return parameter._differentiable and not isinstance(parameter, mx.gluon.Constant)


def _beyond_float16(types: Dict[Parameter, str]) -> List[Parameter]:
    """Returns the parameters with values beyond float16's range. The log names these, and those
    that are small in float16."""
    cast = [p for p, dtype in types.items() if dtype == "float16" and p._data
            and dtype_name(p.dtype) == "float32"]
    largest = beyond_float16([p._data[0] for p in cast])
    beyond = {p: size for p, size in zip(cast, largest) if size}
    if beyond:
        log.warning("these parameters stay float32, because float16 ends at 65504: %s. Operators "
                    "that read them in float16 read infinities: keep them in float32 (keep=)",
                    listed([f"{p.name} (up to {size:.6g})" for p, size in beyond.items()]))
    small = small_in_float16({p.name: p._data[0] for p in cast})
    for p in cast:
        p.was_small = p.name in small
    return list(beyond)


def _check_symbol(block: Block) -> None:
    """Refuses a symbol in mixed precision: its casts would remain in what `export` writes."""
    if not isinstance(block, mx.gluon.SymbolBlock) or isinstance(block, ConvertedBlock):
        return
    casts = [node.name for node in Graph.read(block._cached_graph[1]).nodes()
             if node.op in CASTS and node.attrs.get("dtype") in TYPES_16BIT]
    low = [p.name for p in block.params.values() if is_16bit(p.dtype)]
    if casts and low:
        raise ValueError(f"the symbol of {block.name} is in mixed precision already. Valid: its "
                         "float32 symbol, which takes the same parameters. Received: casts "
                         f"{listed(casts)}, 16-bit parameters {listed(low)}")


def _check_parameters(types: Dict[Parameter, str]) -> None:
    double = [p.name for p in types if dtype_name(p.dtype) == "float64"]
    if double:
        raise ValueError("convert takes float32, float16 and bfloat16 parameters; cast these "
                         f"first, with net.cast('float32'). Received float64: {listed(double)}")
    _check_trainers(types)


def _check_trainers(types: Dict[Parameter, str]) -> None:
    """Refuses to change the type of a parameter whose Trainer has stepped.

    The Trainer's momenta and master weights would no longer fit. Our optimizers raise an error at
    the next step; MXNet's do not.
    """
    held = [p.name for p, dtype in types.items()
            if dtype_name(p.dtype) != dtype and p.grad_req != "null"
            and p._trainer is not None and _has_stepped(p._trainer)]
    if held:
        raise ValueError("a Trainer has already stepped with these parameters, and its state "
                         "would silently undo the change of type: make a new Trainer, which takes "
                         f"its place, then convert or restore. Received: {listed(held)}")


def _has_stepped(trainer: mx.gluon.Trainer) -> bool:
    """Whether the Trainer has optimizer states and does not check the types of weights."""
    if not hasattr(trainer, "_update_on_kvstore"):
        return False  # its construction failed
    if trainer._update_on_kvstore:
        return trainer._kv_initialized
    if hasattr(trainer._optimizer, "weight_types"):
        return False
    return any(updater.states for updater in trainer._updaters)


def _cast(types: Dict[Parameter, str]) -> None:
    under_way = 0
    for parameter, dtype in types.items():
        if dtype_name(parameter.dtype) != dtype:
            under_way += sum(array.size for array in parameter._data or ())
        cast(parameter, dtype)
        if under_way > MOST_UNDER_WAY:
            mx.nd.waitall()
            under_way = 0
