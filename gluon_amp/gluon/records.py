"""Records of Gluon networks: what a network is, what a file requires, and comparison of both.

A converted network saves its policy and `keep=` beside its parameters (record.py). `convert` and
`load_parameters` refuse a network in which a tensor would have another 16-bit policy than recorded,
or would no longer be float32. MXNet's `load_parameters` notes the file on the block, for `convert`.
"""
import os
import re
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from .._mxnet import mx
from .._mxnet import replace as wrap
from ..annotations import Array, Block, Network, Parameter
from ..cpu.arrays import is_16bit, mean_on_cpu, to_float32
from ..graph.graph import Graph
from ..graph.keep import Kept, operator_names
from ..policy import Policy
from ..record import Record, read_record, record_in, refuse_others
from ..training.masters import trainers_of, write

# An attribute of blocks that have loaded a file: its path, and the version that was loaded.
_LOADED = "_loaded_file_of_gluon_amp"


def paths_in(net: Network) -> Dict[Any, str]:
    """Returns the path of each block in a net, such as ".body.0"; the first of a shared block."""
    paths: Dict[Any, str] = {}

    def walk(block: Block, path: str) -> None:
        if block not in paths:
            paths[block] = path
            for name, child in block._children.items():
                walk(child, f"{path}.{name}")

    walk(net, "")
    return paths


def record_of(net: Block, nodes: Optional[Iterable[str]] = None) -> Record:
    """Returns the record of a converted network.

    Args:
        nodes: the names of the float32 nodes of its symbol, if it is saved with one.
    """
    paths = paths_in(net)
    states = {path: block._amp for block, path in paths.items() if hasattr(block, "_amp")}
    record = Record({})
    for path, state in states.items():  # parents come first
        if record.given_at(path) != state.converted_to:
            record.policies[path] = state.converted_to
    kept = [path for path, state in states.items() if state.keep]
    tops = [path for path in kept if path.rpartition(".")[0] not in kept or not path]
    others = kept_in_blocks(paths)
    places = [f"{paths[block]}/{name[len(block.prefix):]}" for name in sorted(others.nodes)
              for block in owners(name, paths)[:1]]  # none: a node of another network
    if nodes is not None:  # the symbol has the nodes of all kept operators
        return Record(record.policies, (*tops, *places), tuple(sorted(nodes)))
    return Record(record.policies, (*tops, *places), operators=tuple(sorted(others.operators)))


def owners(node: str, blocks: Iterable[Block]) -> List[Any]:
    """Returns the blocks whose prefix starts a node's name, the innermost first."""
    around = [block for block in blocks if node.startswith(block.prefix)]
    return sorted(around, key=lambda block: -len(block.prefix))


def kept_in_record(record: Record, net: Block) -> List[Tuple[Any, str]]:
    """Returns what a record keeps in float32 of a network: pairs of a block and the name of one of
    its nodes, or "" for the whole block. The block is None if the network lacks it."""
    if record.nodes is not None and isinstance(net, mx.gluon.SymbolBlock):
        there = operator_names(Graph.read(net._cached_graph[1]))  # of a part of the saved network
        return [(net, name) for name in record.nodes if name in there]
    blocks = {path: block for block, path in paths_in(net).items()}
    kept: List[Tuple[Any, str]] = []
    for entry in record.keep:
        path, is_node, rest = entry.partition("/")
        block = blocks.get(path)
        kept.append((block, block.prefix + rest if block is not None and is_node else ""))
    return kept


def check(record: Record, source: str, net: Block, policy: Callable[[Block], Optional[Policy]],
          kept: Kept) -> None:
    """Refuses a network that computes in 16 bits what a record keeps in float32, or by another
    policy than it records.

    Args:
        source: the file that has the record, or "the symbol ...".
        net: the network whose parameters have it.
        policy: returns the policy by which a block computes; None for float32.
        kept: the nodes and operators that stay float32.
    """
    unkept: List[str] = []
    others: Dict[str, None] = {}
    for block, path in paths_in(net).items():
        mine, recorded = policy(block), record.policy_at(path)
        if mine is not None and recorded is None:
            unkept.append(block.name or type(block).__name__)
        elif mine is not None and recorded is not None \
                and mine != replace(recorded, name=mine.name):
            others[mine.name] = None
    unkept += [name for block, name in kept_in_record(record, net) if name
               and name not in kept.nodes and policy(block) is not None]
    unkept += [f"the operator {op}" for op in record.operators if op not in kept.operators]
    refuse_others(record, source, list(others), unkept, "convert(net")


def check_blocks(blocks: Iterable[Any], policy: Callable[[Block], Optional[Policy]],
                 kept: Kept) -> None:
    """Compares blocks that will compute so with the records of what they have loaded: of files that
    have not been replaced since, and of symbols."""
    for block in blocks:
        path, version = vars(block).get(_LOADED, ("", None))
        if version is not None and version == _version(path):
            record = read_record(path)
            if record is not None:
                check(record, path, block, policy, kept)
        if isinstance(block, mx.gluon.SymbolBlock):
            of_symbol = record_in(block._cached_graph[1])
            if of_symbol is not None:
                check(of_symbol, f"the symbol of {block.name}", block, policy, kept)


def check_file(net: Block, filename: str) -> None:
    """Compares a converted network with the record of a file before it loads the file. A float32
    network needs no record."""
    blocks = paths_in(net)
    record = read_record(filename) if any(policy_of(block) for block in blocks) else None
    if record is not None:
        check(record, filename, net, policy_of, kept_in_blocks(blocks))


def policy_of(block: Block) -> Optional[Policy]:
    """Returns the policy of a block; None if it computes in float32."""
    state = getattr(block, "_amp", None)
    policy: Optional[Policy] = None if state is None or state.keep else state.converted_to
    return None if policy is None or policy.is_float32 else policy


def kept_in_blocks(blocks: Iterable[Block]) -> Kept:
    """Returns what converted blocks keep in float32."""
    return Kept.union([Kept(), *(b._amp.kept for b in blocks if hasattr(b, "_amp"))])


def wrap_load_parameters() -> None:
    """Wraps `Block.load_parameters`: it notes the file, whose record `convert` reads."""
    @wrap(mx.gluon.Block, "load_parameters")
    def load_parameters(self: Any, filename: str, *args: Any, original: Any, **kwargs: Any) -> None:
        original(self, filename, *args, **kwargs)
        vars(self)[_LOADED] = os.path.abspath(filename), _version(filename)


def _version(path: str) -> Optional[Tuple[int, int, int]]:
    """Returns numbers that change if a file is replaced; None if there is none."""
    if not os.path.isfile(path):
        return None
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def float32_numbers(net: Block, masters: Any) -> Callable[[Parameter], Array]:
    """Returns what returns a parameter's master weights in these Trainers, or else its values.

    Moving averages may differ between devices: their mean is returned, as MXNet saves it.
    """
    trainers = trainers_of(masters, net)

    def numbers(parameter: Parameter) -> Array:
        if parameter in trainers and parameter._differentiable:
            return trainers[parameter].master(parameter)
        value = parameter._reduce() if parameter._stype != "default" else \
            mean_on_cpu(parameter.list_data())
        return to_float32(value) if is_16bit(value.dtype) else value

    return numbers


def write_masters(net: Block, filename: str, trainers: Dict[Any, Any]) -> None:
    """Sets master weights to the numbers in a file, which the weights have in rounded form."""
    saved = (mx.npx.load if mx.util.is_np_array() else mx.nd.load)(filename) if trainers else {}
    saved = {re.sub("^(arg|aux):", "", name): array for name, array in saved.items()}  # exported
    named = {name[len(net.prefix):]: p for name, p in net.collect_params().items()}
    named.update(net._collect_params_with_prefix())
    for name, parameter in named.items():
        if parameter in trainers and name in saved:
            write(trainers[parameter], parameter, saved[name])
