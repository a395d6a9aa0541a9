"""Losses, and the graphs that autograd has recorded up to them."""
import json
from typing import Any, List, Set

from .._mxnet import mx, np

# MXNet's forget what they drew once a backward pass has gone through them: a second one would
# pass their gradients on as if nothing had been dropped.
_ONCE = frozenset(["Dropout"])


def operators(losses: List[Any]) -> Set[str]:
    """Names of the operators in the graphs of these losses. What is hybridized is one operator,
    _CachedOp, or the operators in it."""
    found = set()
    for loss in losses:
        symbol = mx.autograd.get_symbol(loss.as_nd_ndarray())
        found |= {node["op"] for node in json.loads(symbol.tojson())["nodes"]}
    return found


def can_go_back_again(losses: List[Any]) -> bool:
    """Whether a second backward pass gives the same gradients as the first."""
    return not operators(losses) & _ONCE


def free(losses: List[Any]) -> None:
    """Frees graphs that were retained, as a backward pass does that retains none. Gradients
    stay as they are: this pass computes only that of an array added for it."""
    classic = [loss.as_nd_ndarray() for loss in losses]
    added = mx.nd.zeros(1, ctx=classic[0].context)
    added.attach_grad()
    with mx.autograd.record():
        heads = [loss + added.as_in_context(loss.context).astype(loss.dtype) for loss in classic]
    mx.autograd.grad(heads, [added], retain_graph=False)


def check_losses(losses: List[Any]) -> None:
    """Refuses what is no loss, and losses in float16."""
    if not losses:
        raise ValueError("backward takes a loss or a list of losses. Received: an empty list")
    for loss in losses:
        if not isinstance(loss, mx.nd.NDArray):
            raise TypeError("backward takes a loss or a list of losses. "
                            f"Received: {type(loss).__name__}")
        if loss.dtype is np.float16:
            raise ValueError("the loss is float16, where a sum above 65504 is infinite: take it "
                             "in float32, as loss_fn(net(data).astype('float32'), label); "
                             "converted networks return float32, but under pure_float16")
