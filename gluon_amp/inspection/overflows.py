"""Warns of forward passes that overflow without a trace.

The square of 300 is infinite in float16, and the inverse of infinity is 0: a layer may return
zeros, and no gradient is infinite or NaN. The CPU engine notes the operators whose results
overflow. After an update, `warn` finds the networks that have them, and logs the line of Python of
the first, once for each network. Calls outside of networks have no names: the next forward pass is
watched call by call for their lines.
"""
import logging
from contextlib import suppress
from functools import partial
from typing import Any, Callable, List, Mapping, Optional, Tuple
from weakref import WeakSet

import mxnet as mx

from ..cpu.library import overflows
from ..gluon.observe import trace_again, traced_graphs
from ..graph.graph import Graph
from ..graph.operators import CASTS
from .network import line_of, line_of_the_user

log = logging.getLogger("gluon_amp")

_warned: "WeakSet[Any]" = WeakSet()  # networks, Modules, and the Trainers of calls without names


def warn(trained: Any, operators: List[Tuple[str, str]]) -> None:
    """Logs a warning for each network with one of these operators in its forward pass.

    Args:
        trained: the Trainer or the Module that has updated.
        operators: the result of `overflows`.
    """
    noted = {node: operator for operator, node in operators}
    is_module = isinstance(trained, mx.mod.BaseModule)
    for net, graph in [(trained, Graph.read(trained.symbol))] if is_module else traced_graphs():
        node = None if net in _warned else _first(graph, noted)
        if node is None:
            continue
        _warned.add(net)
        where = ""
        with suppress(Exception):  # of the user's code, which runs again
            where = "" if is_module else ", " + line_of(net, node, partial(trace_again, net))
        xray = "amp.xray(module, batches)" if is_module else "amp.xray(net, batches, loss_fn)"
        _log(f"{node}{where}", f"{xray} names what to keep in float32")
    if "" in noted and trained not in _warned:
        _warned.add(trained)
        _watch_calls()


def _first(graph: Graph, noted: Mapping[str, str]) -> Optional[str]:
    """Returns the first node of a graph without casts that is noted, or whose cast is."""
    casts = {node.split("_amp_cast_")[0] for node, operator in noted.items() if operator in CASTS}
    return next((node.name for node in graph.nodes_within()
                 if noted.get(node.name) == node.op or node.name in casts), None)


def _log(where: str, remedy: str) -> None:
    log.warning("the forward pass overflows at %s: numbers above 65504 are infinite in float16. "
                "The gradients are finite, so the step is not skipped, but they may be wrong. %s",
                where, remedy)


def _watch_calls() -> None:
    """Logs the line of the first call outside of networks that overflows in the next forward pass.
    """
    library = mx.base._LIB
    original: Callable[..., int] = library.MXImperativeInvokeEx
    has_begun = False

    def invoke(*args: Any) -> int:
        nonlocal has_begun
        status = original(*args)
        is_forward = mx.autograd.is_recording()
        if is_forward:
            mx.nd.waitall()
        noted = [operator for operator, node in overflows() if not node] if is_forward else []
        if noted:
            _log(f"{noted[0]}, {line_of_the_user()}", "Compute it in float32. amp.xray names such "
                 "operators of networks")
        if noted or has_begun and not is_forward:
            library.MXImperativeInvokeEx = original
        has_begun = has_begun or is_forward
        return status

    library.MXImperativeInvokeEx = invoke
