"""The backward passes of one call of `trainer.backward`: the first, and those that check it or
search the loss scale."""
import functools
import json
from typing import Any, Callable, List, Optional, Sequence, Set, Tuple

from .._mxnet import mx, np
from ..annotations import Array, Context, DType, Shape
from ..checks import in_names
from ..cpu.arrays import dtype_name, is_half
from ..cpu.finite import squares
from ..cpu.library import free_graphs
from ..graph.operators import LOSSES, MAY_BEGIN
from .gradients import Gradients
from .step import Gradient

# MXNet's operators whose mask is valid for one backward pass only: a second pass would propagate
# gradients as if nothing had been dropped.
_ONCE = frozenset(["Dropout"])
# MXNet's error in a second pass through `foreach`, `while_loop` and `cond`, whose graphs are freed.
_FREED = "We didn't record the computation"


class Backward:
    """The passes of one call of `trainer.backward`.

    Args:
        losses: the losses.
        gradients: the gradients of the Trainer's parameters.
        scale: the loss scale of the first pass.
        repeats: whether a second pass through this graph is possible; None: not known.
        after_pass: called after each pass, with its scale.

    Attributes:
        repeats: the same, updated by the passes of this call.
    """

    def __init__(self, losses: List["mx.nd.NDArray"], gradients: Gradients, scale: float,
                 repeats: Optional[bool], after_pass: Optional[Callable[[float], None]]) -> None:
        self._losses, self._gradients, self._scale = losses, gradients, scale
        self.repeats, self._after_pass = repeats, after_pass
        # gradients before the first pass, which `repeat` restores
        self._before: List[Tuple[mx.nd.NDArray, mx.nd.NDArray]] = []
        self._averages: Optional[List[Tuple[mx.nd.NDArray, mx.nd.NDArray]]] = None

    def keep_gradients(self) -> None:
        """Copies gradients before the first pass, so that it can be repeated."""
        self._before = self._gradients.kept()

    def run(self, scale: float, retain_graph: bool = True) -> None:
        """Runs a pass with this number as head gradient."""
        heads = [_head(one.shape, one.context, one.dtype, scale) for one in self._losses]
        try:
            mx.autograd.backward(self._losses, heads, retain_graph)
        finally:
            self._gradients.note_written()
        if self._after_pass is not None:
            self._after_pass(scale)

    def gradients(self) -> Sequence[Gradient]:
        """Returns the pending gradients."""
        return self._gradients.waiting()

    def check_heads(self) -> Optional[bool]:
        """Refuses operators that start gradients without the loss scale.

        It finds them with a backward pass at scale 0, which does not change the gradients.

        Returns:
            Whether the check is complete: False if that pass has infinities or NaN; None if the
            graph allows no second pass.
        """
        self._keep_averages()
        gradients = self.gradients()
        kept = [g.array.copy() for g in gradients]
        for g in gradients:
            g.array[:] = 0
        try:
            self.run(0.0)
            sums = squares([g.array for g in gradients])
        except mx.MXNetError as error:
            if _FREED not in str(error):
                raise
            self.repeats = False
            return None
        finally:
            for g, before in zip(gradients, kept):
                before.copyto(g.array)
        self.repeats = True
        begin = [g.name for g, s in zip(gradients, sums) if np.isfinite(s) and s > 0]
        if begin:
            seen = _operators(self._losses) & (LOSSES | MAY_BEGIN)
            which = ", ".join(sorted(seen)) \
                or f"one of {', '.join(sorted(LOSSES))}, or one like them"
            raise ValueError(
                f"an operator in the network starts gradients without the loss scale: {which}. "
                f"The update would divide the gradients{in_names(begin)} by a scale that they "
                "lack. Valid: a loss of gluon.loss, amp.Module, or loss_scale=None")
        return bool(np.isfinite(sums).all())

    def can_repeat(self) -> bool:
        """Whether another pass computes the same gradients. If a hybridized network hides its
        operators, a pass is tried."""
        seen = _operators(self._losses)
        if seen & _ONCE or self.repeats is False:
            return False
        converted = all(getattr(p, "converted_by_gluon_amp", False)  # whose dropout keeps masks
                        for p in self._gradients.parameters)
        if self.repeats and (converted or "_CachedOp" not in seen):
            return True
        gradients = self.gradients()
        before = [g.array.asnumpy() for g in gradients]
        try:
            self.repeat(self._scale)
        except mx.MXNetError as error:
            if _FREED not in str(error):
                raise
            same = False
        else:
            same = all(np.array_equal(a, g.array.asnumpy(), equal_nan=True)
                       for a, g in zip(before, gradients))
        if not same:
            for g, values in zip(gradients, before):
                g.array[:] = values
        return same

    def repeat(self, scale: float) -> None:
        """Repeats the pass at this loss scale."""
        self._keep_averages()
        for gradient, before in self._before:
            (before * (scale / self._scale)).copyto(gradient)
        self.run(scale)

    def finish(self, retain_graph: bool) -> None:
        """Restores moving averages and frees the graphs after the last pass."""
        if self._averages:
            mx.nd.waitall()
            for average, after_first in self._averages:
                after_first.copyto(average)
        if not retain_graph:
            _free(self._losses)

    def _keep_averages(self) -> None:
        """Copies the moving averages after the first pass, because MXNet's batch norms update them
        in each backward pass. It waits, because MXNet's engine does not track these writes."""
        if self._averages is None:
            mx.nd.waitall()
            self._averages = [(a, a.copy()) for p in self._gradients.parameters
                              if p.grad_req == "null" and p._data is not None
                              for a in p.list_data()]


def _operators(losses: List[Any]) -> Set[str]:
    """Returns the operators in the graphs of these losses. A hybridized block is one operator,
    _CachedOp, or its operators."""
    found = set()
    for loss in losses:
        symbol = mx.autograd.get_symbol(loss.as_nd_ndarray())
        # to remove casts, MXNet would create a copy that it never frees
        made = json.loads(symbol.tojson(remove_amp_cast=False))
        found |= {node["op"] for node in made["nodes"]}
    return found


def _free(losses: List[Any]) -> None:
    """Frees retained graphs without changing gradients. Without the engine, it runs a backward pass
    that computes only the gradients of arrays added for it."""
    if free_graphs(losses):
        return
    added = [mx.nd.zeros(1, loss.context, loss.dtype) for loss in losses]
    for one in added:
        one.attach_grad()
    with mx.autograd.record():
        heads = [loss.as_nd_ndarray() + one for loss, one in zip(losses, added)]
    mx.autograd.grad(heads, added, retain_graph=False)


@functools.lru_cache(maxsize=16)
def _head(shape: Shape, context: Context, dtype: DType, number: float) -> Array:
    """Returns the head gradient of a loss: an array filled with a number."""
    return mx.nd.full(shape, number, context, dtype)


def check_losses(losses: List[Any]) -> None:
    """Refuses values that are not losses, and 16-bit losses."""
    if not losses:
        raise ValueError("backward takes a loss or a list of losses. Received: an empty list")
    for loss in losses:
        if not isinstance(loss, mx.nd.NDArray):
            raise TypeError("backward takes a loss or a list of losses. "
                            f"Received: {type(loss).__name__}")
        if is_half(loss.dtype):
            why = "a sum above 65504 is infinite" if dtype_name(loss.dtype) == "float16" \
                else "a number has 8 bits"
            raise ValueError(f"the loss is {dtype_name(loss.dtype)}, where {why}: take it "
                             "in float32, as loss_fn(net(data).astype('float32'), label); "
                             "converted networks return float32, but under pure_float16")
