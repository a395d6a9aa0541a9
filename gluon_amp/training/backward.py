"""One call of `trainer.backward`: a backward pass through the graphs of its losses, and further
ones that check it or search the loss scale."""
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

# MXNet's operators that lose what they drew once a backward pass has gone through them: a second
# one would pass their gradients on as if nothing had been dropped.
_ONCE = frozenset(["Dropout"])
# MXNet's error of a second pass through `foreach`, `while_loop` and `cond`: it frees their rounds.
_FREED = "We didn't record the computation"


class Backward:
    """The passes of one call of `trainer.backward`.

    Args:
        scale: the loss scale of the first pass.
        repeats: whether a second pass went through such a graph before; None: nobody has tried.
        after_pass: called after each pass, with its scale.

    Attributes:
        repeats: also as the passes of this call show it.
    """

    def __init__(self, losses: List["mx.nd.NDArray"], gradients: Gradients, scale: float,
                 repeats: Optional[bool], after_pass: Optional[Callable[[float], None]]) -> None:
        self._losses, self._gradients, self._scale = losses, gradients, scale
        self.repeats, self._after_pass = repeats, after_pass
        # of before the first pass, which `repeat` puts back
        self._before: List[Tuple[mx.nd.NDArray, mx.nd.NDArray]] = []
        self._averages: Optional[List[Tuple[mx.nd.NDArray, mx.nd.NDArray]]] = None

    def keep_gradients(self) -> None:
        """Before the first pass, where others may repeat it."""
        self._before = self._gradients.kept()

    def run(self, scale: float, retain_graph: bool = True) -> None:
        """One pass, with this number as head gradient."""
        heads = [_head(one.shape, one.context, one.dtype, scale) for one in self._losses]
        try:
            mx.autograd.backward(self._losses, heads, retain_graph)
        finally:
            self._gradients.note_written()
        if self._after_pass is not None:
            self._after_pass(scale)

    def gradients(self) -> Sequence[Gradient]:
        """Those that wait for a step."""
        return self._gradients.waiting()

    def check_heads(self) -> Optional[bool]:
        """Refuses operators on the way that begin gradients by themselves, which no loss scale
        reaches: a pass that begins with zeros shows them. The gradients stay as they are.

        Returns:
            whether it is sure, as it is not where that pass gives infinities or NaN; None where no
            second pass goes through the graph, so that it stays open.
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
        """Whether another pass gives the same gradients. Where a hybridized network hides its
        operators, one is tried."""
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
        """The pass again, at this loss scale."""
        self._keep_averages()
        for gradient, before in self._before:
            (before * (scale / self._scale)).copyto(gradient)
        self.run(scale)

    def finish(self, retain_graph: bool) -> None:
        """After the last pass."""
        if self._averages:
            mx.nd.waitall()
            for average, after_first in self._averages:
                after_first.copyto(average)
        if not retain_graph:
            _free(self._losses)

    def _keep_averages(self) -> None:
        """Keeps the moving averages as the first pass leaves them: MXNet's batch norms update them
        in the backward pass, so that each further one would. Waits, since MXNet's engine has no
        record of these writes."""
        if self._averages is None:
            mx.nd.waitall()
            self._averages = [(a, a.copy()) for p in self._gradients.parameters
                              if p.grad_req == "null" and p._data is not None
                              for a in p.list_data()]


def _operators(losses: List[Any]) -> Set[str]:
    """Names of the operators in the graphs of these losses. What is hybridized is one operator,
    _CachedOp, or the operators in it."""
    found = set()
    for loss in losses:
        symbol = mx.autograd.get_symbol(loss.as_nd_ndarray())
        # where it may remove casts, MXNet makes a copy, which it never frees, nor what hangs on it
        made = json.loads(symbol.tojson(remove_amp_cast=False))
        found |= {node["op"] for node in made["nodes"]}
    return found


def _free(losses: List[Any]) -> None:
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
def _head(shape: Shape, context: Context, dtype: DType, number: float) -> Array:
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
        if is_half(loss.dtype):
            why = "a sum above 65504 is infinite" if loss.dtype is np.float16 \
                else "a number has 8 bits"
            raise ValueError(f"the loss is {dtype_name(loss.dtype)}, where {why}: take it "
                             "in float32, as loss_fn(net(data).astype('float32'), label); "
                             "converted networks return float32, but under pure_float16")
