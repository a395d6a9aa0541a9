"""Losses, and the graphs that autograd has recorded up to them."""
import functools
import json
from typing import Any, Callable, List, Optional, Sequence, Set

from .._mxnet import mx, np
from ..checks import in_names
from ..cpu.finite import squares
from ..cpu.library import free_graphs
from ..graph.operators import LOSSES
from .pending import Gradient

# MXNet's forget what they drew once a backward pass has gone through them: a second one would
# pass their gradients on as if nothing had been dropped.
_ONCE = frozenset(["Dropout"])
# What `foreach`, `while_loop` and `cond` say then: they have no rounds any more.
_FORGOTTEN = "We didn't record the computation"


def operators(losses: List[Any]) -> Set[str]:
    """Names of the operators in the graphs of these losses. What is hybridized is one operator,
    _CachedOp, or the operators in it."""
    found = set()
    for loss in losses:
        symbol = mx.autograd.get_symbol(loss.as_nd_ndarray())
        # where it may remove casts, MXNet makes a copy, which it never frees, nor what hangs on it
        made = json.loads(symbol.tojson(remove_amp_cast=False))
        found |= {node["op"] for node in made["nodes"]}
    return found


def can_go_back_again(losses: List[Any], gradients: Sequence[Gradient], converted: bool,
                      repeats: Optional[bool], go_back: Callable[[], None]) -> bool:
    """Whether a second backward pass gives the same gradients as the first.

    Args:
        converted: whether the network is a converted one, whose dropout keeps its masks.
        repeats: whether a second pass went through the graph before; None: nobody has tried.
        go_back: makes the pass once more, at the same scale: where a hybridized network hides its
            operators, this tells.
    """
    seen = operators(losses)
    if seen & _ONCE or repeats is False:
        return False
    if repeats and (converted or "_CachedOp" not in seen):
        return True
    before = [g.array.asnumpy() for g in gradients]
    try:
        go_back()
    except mx.MXNetError as error:
        if _FORGOTTEN not in str(error):
            raise
        for g, values in zip(gradients, before):
            g.array[:] = values
        return False
    return all(np.array_equal(a, g.array.asnumpy(), equal_nan=True)
               for a, g in zip(before, gradients))


def check_heads(losses: List[Any], gradients: Sequence[Gradient],
                go_back: Callable[[float], None]) -> Optional[bool]:
    """Refuses operators on the way that begin gradients by themselves, which no loss scale
    reaches: a backward pass that begins with zeros shows them. The gradients stay as they are.

    Args:
        go_back: makes a backward pass with this number as head gradient.

    Returns:
        whether it is sure, as it is not where that pass gives infinities or NaN; None where no
        second pass goes through the graph, so that nothing can tell.
    """
    kept = [g.array.copy() for g in gradients]
    for g in gradients:
        g.array[:] = 0
    try:
        go_back(0.0)
        sums = squares([g.array for g in gradients])
    except mx.MXNetError as error:
        if _FORGOTTEN not in str(error):
            raise
        return None
    finally:
        for g, before in zip(gradients, kept):
            before.copyto(g.array)
    begun = [g.name for g, s in zip(gradients, sums) if np.isfinite(s) and s > 0]
    if begun:
        seen = operators(losses) & (LOSSES | {"Custom", "IdentityAttachKLSparseReg"})
        which = ", ".join(sorted(seen)) or f"one of {', '.join(sorted(LOSSES))}, or one like them"
        raise ValueError(
            f"an operator in the network begins gradients by itself: {which}. No loss scale "
            f"reaches those gradients, which are{in_names(begun)}, so the update would divide them "
            "by a scale that they never had. Take a loss of gluon.loss instead, or amp.Module, or "
            "loss_scale=None")
    return bool(np.isfinite(sums).all())


def free(losses: List[Any]) -> None:
    """Frees graphs that were retained, as a backward pass does that retains none. Gradients
    stay as they are: without the engine, a pass computes only those of arrays added for it."""
    if free_graphs(losses):
        return
    added = [mx.nd.zeros(1, loss.context, loss.dtype) for loss in losses]
    for one in added:
        one.attach_grad()
    with mx.autograd.record():
        heads = [loss.as_nd_ndarray() + one for loss, one in zip(losses, added)]
    mx.autograd.grad(heads, added, retain_graph=False)


@functools.lru_cache(maxsize=16)
def head(shape: Any, context: Any, dtype: Any, number: float) -> Any:
    """What a backward pass begins with at a loss of this shape: so many times 1."""
    return mx.nd.full(shape, number, context, dtype)


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
