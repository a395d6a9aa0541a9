"""`freeze`: excludes a part of a network from training."""
from __future__ import annotations

from typing import Any, List

from mxnet.gluon import Block, Constant, HybridBlock, SymbolBlock, nn

from ..graph.graph import Graph
from ..graph.operators import BATCH_NORMS
from .convert import blocks_around
from .converted import blocks_in, discard_traces


def freeze(block: Block, frozen: bool = True) -> Block:
    """Freezes a network or a part of it, in place, and returns it.

    Parameters get `grad_req="null"`. Batch norms get `use_global_stats=True`: in training, too,
    they normalize with their moving averages, which no longer change. With `grad_req="null"` alone,
    a converted network's batch norms still update them, as MXNet's do on GPUs.

    `freeze(block, False)` trains the whole block again: all its parameters get `grad_req="write"`,
    and all its batch norms `use_global_stats=False`, whatever they had before. Weights keep their
    master weights and the optimizer's states.

    Call it before or after `convert`, and before the Trainer's next backward pass.

    Args:
        block: a gluon Block.
        frozen: whether it is excluded.

    Raises:
        TypeError: `block` is not a Block.
        ValueError: a block of your own has moving averages. Nothing changes.
    """
    if not isinstance(block, Block):
        raise TypeError(f"freeze takes a gluon Block. Received: {type(block).__name__}")
    inside = list(blocks_in(block))
    grad_req = "null" if frozen else "write"
    _check_averages(inside, f"which freeze cannot change: pass use_global_stats={frozen} to its "
                            f"F.BatchNorm, and set grad_req={grad_req!r} on its parameters")
    averages = {name for inner in inside if isinstance(inner, SymbolBlock)
                for name in Graph.read(inner._cached_graph[1]).mutated()}
    for inner in inside:
        if isinstance(inner, nn.basic_layers._BatchNorm):
            inner._kwargs["use_global_stats"] = frozen
        elif isinstance(inner, SymbolBlock):
            inputs, symbol = inner._cached_graph
            graph = Graph.read(symbol)
            for node in graph.nodes_within():
                if node.op in BATCH_NORMS:
                    node.attrs["use_global_stats"] = str(frozen)
            inner._cached_graph = inputs, graph.symbol(like=symbol)
    for parameter in block.collect_params().values():
        if not isinstance(parameter, Constant) and parameter.name not in averages:
            parameter.grad_req = grad_req
    for inner in [*inside, *blocks_around(block, set(inside))]:
        discard_traces(inner)
        if isinstance(inner, HybridBlock):
            inner._clear_cached_op()
    return block


def _check_averages(blocks: List[Any], advice: str) -> None:
    """Refuses blocks whose batch norms this module cannot set."""
    for block in blocks:
        if isinstance(block, (nn.basic_layers._BatchNorm, SymbolBlock)):
            continue
        names = [p.name for p in block.params.values()
                 if not p._differentiable and not isinstance(p, Constant)]
        if names:
            raise ValueError(
                f"{type(block).__name__} {block.name!r} has moving averages of its own "
                f"({', '.join(names)}), {advice}")
