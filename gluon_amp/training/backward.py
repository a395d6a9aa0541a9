"""The backward passes of one call of `trainer.backward`: the first, and those that check it or
search the loss scale."""
import contextlib
import functools
import json
from typing import Any, Callable, Iterator, List, Optional, Sequence, Set, Tuple

from .._mxnet import GRAPHS, mx, np
from ..annotations import Array, Context, DType, Shape
from ..checks import in_names
from ..cpu.arrays import dtype_name, is_half
from ..cpu.finite import squares
from ..cpu.library import free_graphs, other_gradients
from ..graph.operators import LOSSES, MAY_BEGIN, NESTED, OPERATORS, USER_CODE
from .gradients import Gradients
from .step import Gradient

# MXNet's operators whose mask is valid for one backward pass only: a second pass would propagate
# gradients as if nothing had been dropped.
_ONCE = frozenset(["Dropout"])
# MXNet's error in a second pass through `foreach`, `while_loop` and `cond`, whose graphs are freed.
_FREED = "We didn't record the computation"
_ONE_PASS = "loss_scale=None, or gluon_amp.scale_loss(loss, trainer), which make one pass"

Copies = List[Tuple["mx.nd.NDArray", "mx.nd.NDArray"]]  # arrays, and copies of them


class Backward:
    """The passes of one call of `trainer.backward`.

    Args:
        losses: the losses.
        gradients: the gradients of the Trainer's parameters.
        scale: the loss scale of the first pass.
        after_pass: called after each pass, with its scale.

    Attributes:
        user_error: the warning for an operator of the user's that fails in a second pass, if any.
    """

    user_error = ""

    def __init__(self, losses: List["mx.nd.NDArray"], gradients: Gradients, scale: float,
                 after_pass: Optional[Callable[[float], None]]) -> None:
        self._losses, self._gradients, self._scale = losses, gradients, scale
        self._after_pass = after_pass
        self._before: Copies = []  # gradients before the first pass, which `repeat` restores
        self._averages: Optional[Copies] = None

    def keep_gradients(self) -> None:
        """Copies gradients before the first pass, so that it can be repeated."""
        self._before = self._gradients.kept()

    def run(self, scale: float, retain_graph: bool = True) -> None:
        """Runs a pass with this number as head gradient."""
        heads = [_head(one.shape, one.ctx, one.dtype, scale) for one in self._losses]
        try:
            run_backward(self._losses, heads, retain_graph)
        finally:
            self._gradients.note_written()
        if self._after_pass is not None:
            self._after_pass(scale)

    def gradients(self) -> Sequence[Gradient]:
        """Returns the pending gradients."""
        return self._gradients.waiting()

    def check_heads(self) -> bool:
        """Refuses operators that start gradients without the loss scale.

        If the graph may have such operators, it finds them with a backward pass at scale 0. That
        changes no gradients. If the graph allows no second pass, heads stay unchecked.

        Returns:
            Whether the check is over: False if that pass has infinities or NaN.
        """
        seen = self._operators
        if not seen & (LOSSES | MAY_BEGIN | USER_CODE | NESTED) and seen <= {*OPERATORS, "null"}:
            return True
        sums = self._sums_at_zero
        if sums is None:
            return True
        begin = [g.name for g, s in zip(self.gradients(), sums) if np.isfinite(s) and s > 0]
        if begin:
            which = ", ".join(sorted(seen & (LOSSES | MAY_BEGIN | USER_CODE))) \
                or f"one of {', '.join(sorted(LOSSES))}, or one like them"
            raise ValueError(
                f"an operator in the network starts gradients without the loss scale: {which}. "
                f"The update would divide the gradients{in_names(begin)} by a scale that they "
                "lack. Valid: a loss of gluon.loss, amp.Module, or loss_scale=None")
        return bool(np.isfinite(sums).all())

    def refusal(self) -> str:
        """Returns why another pass does not compute the same gradients; "" if it does. If user code
        or a hybridized network may compute others, a pass is tried."""
        seen, none = self._operators, "allows no second backward pass: steps are skipped until " \
                                      "the loss scale fits"
        if seen & _ONCE:
            return f"MXNet's own Dropout {none}"
        if self._sums_at_zero is None:
            return self.user_error or f"a loop of this graph {none}"
        converted = all(getattr(p, "converted_by_gluon_amp", False)  # whose dropout keeps masks
                        for p in self._gradients.parameters)
        if not seen & USER_CODE and (converted or "_CachedOp" not in seen):
            return ""
        kept = self._copies()
        self.repeat(self._scale)
        gradients = [g.array for g in self.gradients()]
        if all(np.array_equal(array.asnumpy(), before.asnumpy(), equal_nan=True)
               for array, (_, before) in zip(gradients, kept)):
            return ""
        _restore(kept)
        return f"this graph {none}, because that has other gradients, as MXNet's own Dropout has"

    @functools.cached_property
    def _operators(self) -> Set[str]:
        return _operators(self._losses)

    @functools.cached_property
    def _sums_at_zero(self) -> Optional["np.ndarray[Any, Any]"]:
        """The sums of squares of gradients in a pass at scale 0, which keeps gradients. None if
        the graph allows no second pass."""
        self._keep_averages()
        kept = self._copies()
        gradients = [g.array for g in self.gradients()]
        for array in gradients:
            array[:] = 0
        with _errors_of_user_code() as errors:
            try:
                self.run(0.0)
                mx.nd.waitall()
                return squares(gradients)
            except mx.MXNetError as error:
                with contextlib.suppress(mx.MXNetError):  # which other arrays may have, too
                    mx.nd.waitall()
                if errors:
                    self.user_error = _describe(errors[0])
                elif _FREED not in str(error):
                    raise mx.MXNetError("the loss scale needs a second backward pass, which "
                                        f"failed. Valid: {_ONE_PASS}. MXNet's error: {error}"
                                        ) from error
                return None
            finally:
                _restore(kept)

    def _copies(self) -> Copies:
        """Copies all gradients that a pass writes: first the Trainer's, then others."""
        own = [g.array for g in self.gradients()]
        return [(array, array.copy()) for array in [*own, *other_gradients(self._losses, own)]]

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
            _restore(self._averages)
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


def run_backward(losses: List["mx.nd.NDArray"], heads: Optional[List["mx.nd.NDArray"]] = None,
                 retain_graph: bool = False) -> None:
    """Runs MXNet's backward pass, in one thread at a time."""
    with GRAPHS:
        mx.autograd.backward(losses, heads, retain_graph)


def _restore(copies: Copies) -> None:
    for array, before in copies:
        before.copyto(array)


@contextlib.contextmanager
def _errors_of_user_code() -> Iterator[List[str]]:
    """Collects the errors of user code (autograd.Function, CustomOp), which MXNet would print."""
    errors: List[str] = []
    modules = mx.autograd, mx.operator
    for module in modules:
        module.print = errors.append
    try:
        yield errors
    finally:
        for module in modules:
            del module.print


def _describe(error: str) -> str:
    """Returns the warning for an error of user code that MXNet would print, with a traceback."""
    return "an autograd.Function or a CustomOp fails in a second backward pass, as one that " \
           f"frees what it saved does: {error.strip().splitlines()[-1]}. The network is not " \
           "checked for operators that start gradients without the loss scale, and no first " \
           "scale is searched: steps are skipped until a dynamic one fits. To avoid this " \
           f"warning: {_ONE_PASS}"


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
    added = [mx.nd.zeros(1, loss.ctx, loss.dtype) for loss in losses]
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
