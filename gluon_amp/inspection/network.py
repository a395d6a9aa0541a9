"""A user's network: calls, names of its nodes for `keep=`, and the lines of code that create them.

The name of a node starts with its block's prefix.
"""
import inspect
import linecache
import re
from contextlib import suppress
from types import FrameType
from typing import Any, Callable, Dict, Iterable, List, Optional, Set

import mxnet as mx

from ..annotations import Block, Network
from ..checks import message
from ..cpu.library import random_numbers_kept
from ..gluon.converted import ConvertedBlock, Op, blocks_in, blocks_kept, recording_names
from ..gluon.observe import hybrid_blocks, observed, traced_again
from ..gluon.records import kept_in_blocks
from ..gluon.records import owners as owners_among
from ..graph.keep import Operators


def call_again(net: Network, data: List[Any], make: Callable[..., Op]) -> None:
    """Calls a network, which traces its graphs again. `make` returns the CachedOps meanwhile."""
    blocks = hybrid_blocks(net)
    with traced_again(blocks), random_numbers_kept(), observed(blocks, make):
        outputs_of(net, data)


def outputs_of(net: Network, data: List[Any]) -> object:
    """Returns the network's outputs for data."""
    try:
        return net(*data)
    except (mx.MXNetError, TypeError, ValueError) as error:
        shapes = ", ".join(str(a.shape) for a in data)
        raise ValueError(f"{net.name} does not take this batch: {message(error)}. "
                         f"Received: data of {shapes}") from None


# ---- names --------------------------------------------------------------------------------------


def _named(net: Network) -> Set[Any]:
    """Returns the blocks that names of nodes identify: not the outermost, and none with an empty
    prefix."""
    return {child for parent in blocks_in(net) for child in parent._children.values()
            if child.prefix not in ("", parent.prefix)}


def owner(net: Network, node: str) -> Any:
    """Returns the innermost block whose prefix starts a node's name; else the network."""
    return next(iter(owners_among(node, _named(net))), net)


def can_be_named(net: Network, block: Block) -> bool:
    """Whether `keep=` may list this block for a node in it: not if its children have parameters."""
    return block in _named(net) and not any(child.collect_params().keys()
                                            for child in block._children.values())


def _nodes_of(block: Block, names: Iterable[str]) -> Set[str]:
    """Returns those of these nodes that are in a block."""
    return {name for name in names if name.startswith(block.prefix)}


def keep_for(net: Network, node: str, names: Iterable[str]) -> Dict[str, Set[str]]:
    """Returns the name in `keep=` of a node's block, and the block's nodes among `names`.

    A node of the outermost block has its own name. For a parameter, it is the block that has it,
    with all its parameters; none for a parameter of the outermost block.
    """
    if node in net.collect_params():
        return {re.escape(block.name): {*_nodes_of(block, names), *block.collect_params()}
                for block in _named(net) if node in block.params}
    block = owner(net, node)
    if not can_be_named(net, block):
        return {re.escape(node): {node}}
    return {re.escape(block.name): _nodes_of(block, names) | {node}}


def kept_already(net: Network) -> List[Any]:
    """Returns the entries of `keep=` for what the network already keeps in float32."""
    blocks, kept = blocks_kept(net), kept_in_blocks(blocks_in(net))
    nodes = sorted(name for name in kept.nodes
                   if not any(name.startswith(block.prefix) for block in blocks))
    names = dict.fromkeys(re.escape(n) for n in [*(b.name for b in blocks), *nodes])
    operators = Operators(tuple(sorted(kept.operators)), kept.operators)
    return [*names, *([operators] if kept.operators else [])]


# ---- lines of code -------------------------------------------------------------------------------

_NOT_THE_USERS = ("mxnet", "gluon_amp")


def line_of_the_user() -> str:
    """Returns the innermost line of the call stack that is neither MXNet's nor this package's."""
    frame: Optional[FrameType] = inspect.currentframe()
    while frame is not None and frame.f_code is not line_of.__code__:
        if frame.f_globals.get("__name__", "").split(".")[0] not in _NOT_THE_USERS:
            path, number = frame.f_code.co_filename, frame.f_lineno
            text = linecache.getline(path, number).strip()
            return f"{path}, line {number}" + (f": {text}" if text else "")
        frame = frame.f_back
    return ""


def line_of(net: Network, node: str, trace: Callable[[], object]) -> str:
    """Returns a node's block and the line of the user's code that created the node.

    If MXNet's code created it, returns the location of the block's code. `trace` traces the network
    again, and the call stack of each node is inspected.
    """
    if isinstance(net, mx.gluon.SymbolBlock):
        return ""
    lines: Dict[str, str] = {}
    blocks = [b for b in blocks_in(net) if isinstance(b, ConvertedBlock)]
    with mx.autograd.record(), recording_names(
            blocks, lambda name: lines.setdefault(name, line_of_the_user())):
        trace()
    line, block = lines.get(node.split("_amp_cast_")[0]), owner(net, node)
    if line:
        return f"block {block.name}, {line}"
    code = getattr(type(block), "hybrid_forward", type(block).forward)
    code = inspect.unwrap(code)  # use_np wraps the methods of a class
    with suppress(OSError, TypeError):
        return f"block {block.name}, {inspect.getsourcefile(code)}, line " \
               f"{inspect.getsourcelines(code)[1]}"
    return f"block {block.name}"
