"""Which block a node belongs to, and what `keep=` calls it."""
import re
from typing import Any, Collection, Dict, Iterable, List, Set

from ..annotations import Block, Module, Network
from ..gluon.converted import ConvertedBlock
from ..gluon.state import blocks_in


def owners(net: Network, node: str) -> List[Any]:
    """The blocks whose prefix a node's name has, the innermost first, the network last."""
    found, stack = [], list(net._children.values())
    while stack:
        block = stack.pop()
        if node.startswith(block.prefix):
            found.append(block)
        stack += block._children.values()
    return [*sorted(found, key=lambda block: -len(block.prefix)), net]


def owner(net: Network, node: str) -> Block:
    """The innermost of them."""
    return owners(net, node)[0]


def can_be_named(net: Network, block: Block) -> bool:
    """Whether `keep=` names this block for a node in it: not the outermost, and none whose
    children have parameters."""
    return block is not net and not any(child.collect_params().keys()
                                        for child in block._children.values())


def nodes_of(block: Block, names: Iterable[str]) -> Set[str]:
    """Those of these nodes that are in a block."""
    return {name for name in names if name.startswith(block.prefix)}


def keep_for(net: Network, node: str, names: Iterable[str]) -> Dict[str, Set[str]]:
    """What `keep=` calls the block of a node, and the block's nodes among `names`; a node of the
    outermost block goes by its own name."""
    block = owner(net, node)
    if not can_be_named(net, block):
        return {re.escape(node): {node}}
    return {re.escape(block.name): nodes_of(block, names) | {node}}


def kept_already(net: Network) -> List[str]:
    """What `keep=` would name, to keep what `convert` was told to keep."""
    converted: List[Any] = [b for b in blocks_in(net) if isinstance(b, ConvertedBlock)]
    blocks = [b for b in converted if b._amp.keep]
    nodes = sorted({name for b in converted for name in b._amp.keep_nodes
                    if not any(name.startswith(kept.prefix) for kept in blocks)})
    return list(dict.fromkeys(re.escape(n) for n in [*(b.name for b in blocks), *nodes]))


def in_groups(net: Network, names: Collection[str]) -> List[Set[str]]:
    """Nodes that are kept together: those of a block that has parameters, since `keep=` decides
    about these by the block. Any other is alone."""
    groups: Dict[Any, Set[str]] = {}
    for name in names:
        groups.setdefault(_with_parameters(net, name) or name, set()).add(name)
    return list(groups.values())


def _with_parameters(net: Network, node: str) -> Module:
    """The innermost block around a node that has parameters of its own, and can be named."""
    for block in owners(net, node):
        if block.params.keys() and can_be_named(net, block):
            return block
    return None


def keep_line(net: Network, kept: Collection[str], names: Collection[str]) -> List[str]:
    """For `keep=`: the names of blocks that are kept with all their nodes, and of other nodes.

    Args:
        kept: the nodes to keep.
        names: all that could be.
    """
    made: Dict[str, None] = {}
    for node in sorted(kept):
        block = _with_parameters(net, node) or owner(net, node)
        whole = can_be_named(net, block) and nodes_of(block, names) <= set(kept)
        made[re.escape(block.name if whole else node)] = None
    return list(made)
