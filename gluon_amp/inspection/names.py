"""What a node's block is, and what `keep=` calls both. Names of nodes begin with their block's."""
import re
from typing import Any, Dict, Iterable, List, Set

from ..annotations import Block, Network
from ..gluon.converted import ConvertedBlock
from ..gluon.state import blocks_in


def _named(net: Network) -> Set[Any]:
    """The blocks that names tell from those around them: not the outermost, and none whose own
    prefix is empty."""
    return {child for parent in blocks_in(net) for child in parent._children.values()
            if child.prefix not in ("", parent.prefix)}


def owners(net: Network, node: str) -> List[Any]:
    """The blocks whose prefix a node's name has, the innermost first, the network last."""
    found = [block for block in _named(net) if node.startswith(block.prefix)]
    return [*sorted(found, key=lambda block: -len(block.prefix)), net]


def can_be_named(net: Network, block: Block) -> bool:
    """Whether `keep=` names this block for a node in it: none whose children have parameters."""
    return block in _named(net) and not any(child.collect_params().keys()
                                            for child in block._children.values())


def nodes_of(block: Block, names: Iterable[str]) -> Set[str]:
    """Those of these nodes that are in a block."""
    return {name for name in names if name.startswith(block.prefix)}


def keep_for(net: Network, node: str, names: Iterable[str]) -> Dict[str, Set[str]]:
    """What `keep=` calls the block of a node, and the block's nodes among `names`; a node of the
    outermost block goes by its own name."""
    block = owners(net, node)[0]
    if not can_be_named(net, block):
        return {re.escape(node): {node}}
    return {re.escape(block.name): nodes_of(block, names) | {node}}


def kept_already(net: Network) -> List[str]:
    """Values of `keep=` that name what the network keeps in float32."""
    converted: List[Any] = [b for b in blocks_in(net) if isinstance(b, ConvertedBlock)]
    blocks = [b for b in converted if b._amp.keep]
    nodes = sorted({name for b in converted for name in b._amp.keep_nodes
                    if not any(name.startswith(kept.prefix) for kept in blocks)})
    return list(dict.fromkeys(re.escape(n) for n in [*(b.name for b in blocks), *nodes]))


def in_groups(net: Network, names: Iterable[str]) -> List[Set[str]]:
    """Nodes that are kept together: those of a block that has parameters, since `keep=` decides
    about these by the block. Any other is alone."""
    groups: Dict[Any, Set[str]] = {}
    for name in names:
        groups.setdefault(_with_parameters(net, name) or name, set()).add(name)
    return list(groups.values())


def _with_parameters(net: Network, node: str) -> Any:
    """The innermost block around a node that has parameters of its own, and can be named."""
    for block in owners(net, node):
        if block.params.keys() and can_be_named(net, block):
            return block
    return None


def keep_line(net: Network, kept: Iterable[str], names: Iterable[str]) -> List[str]:
    """For `keep=`: the names of blocks that are kept with all their nodes, and of other nodes.

    Args:
        kept: the nodes to keep.
        names: all that could be.
    """
    made: Dict[str, None] = {}
    for node in sorted(kept):
        block = _with_parameters(net, node) or owners(net, node)[0]
        whole = can_be_named(net, block) and nodes_of(block, names) <= set(kept)
        made[re.escape(block.name if whole else node)] = None
    return list(made)
