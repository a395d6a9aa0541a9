"""Backward passes for the steps of one Trainer, of several, or of a Module.

A pass runs at one loss scale. It may run again in the same call:

    check of loss heads    for graphs with new operators, which may ignore the incoming gradient,
                           and so the loss scale: a pass at scale 0 must give gradients of 0
    search                 until the first scale is found: passes at lower scales after an overflow
"""
import contextlib
import functools
import logging
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from .._mxnet import GRAPH_LOCK, mx, np
from ..annotations import Array, Context, DType, Shape
from ..checks import in_names
from ..cpu.arrays import TYPES_16BIT, dtype_name, squares
from ..cpu.library import SETTINGS, free_graphs, graph_operators, other_gradients, updated_inputs
from ..graph.graph import facts_of
from ..graph.operators import LOSSES, NESTED, OPERATORS, POSSIBLE_LOSSES, USER_CODE
from .loss_scale import as_power
from .step import Gradient, Step

log = logging.getLogger("gluon_amp")

# MXNet's operators whose mask is valid for one backward pass only: a second pass would propagate
# gradients as if nothing had been dropped.
_ONCE = frozenset(["Dropout"])
_STOPS = frozenset(["BlockGrad"])  # operators through which no gradient passes
# MXNet's error in a second pass through `foreach`, `while_loop` and `cond`, whose graphs are freed.
_FREED = "We didn't record the computation"
_ONE_PASS = "loss_scale=None, or gluon_amp.scale_loss(loss, trainer), which make one pass"

Copies = List[Tuple["mx.nd.NDArray", "mx.nd.NDArray"]]  # arrays, and copies of them


class BackwardPass:
    """A backward pass. `run_once` runs it, and `run_again` repeats it.

    Args:
        steps: the steps that use its gradients.
        scale: the loss scale of the first run.
        checking: whether to check for loss heads that ignore the incoming gradient.

    Attributes:
        repeats: whether the pass may run again.
        user_error: the warning for an operator of the user's that fails then, if any.
    """

    user_error = ""

    def __init__(self, steps: Sequence[Step], scale: float, checking: bool) -> None:
        self.steps, self.scale, self.checking = steps, scale, checking
        self._searching = [step for step in steps if step.searching]
        self.repeats = checking or bool(self._searching)
        self._before: Copies = []  # gradients before the first run, which `repeat` restores

    def run_once(self, scale: float) -> None:
        """Runs the pass at a loss scale."""
        raise NotImplementedError

    def run_again(self, scale: float) -> None:
        """Runs the same pass at another loss scale."""
        self.run_once(scale)

    def losses(self) -> List["mx.nd.NDArray"]:
        """Returns the arrays at which the pass starts, without graphs."""
        raise NotImplementedError

    def refusal(self) -> str:
        """Returns why another pass does not compute the same gradients; "" if it does."""
        return ""

    def may_have_unscaled_heads(self) -> bool:
        """Whether the graph may have loss heads that ignore the incoming gradient."""
        return True

    def unscaled_head_error(self, names: Sequence[str]) -> str:
        """Returns the message for such a loss head, whose gradients reach these parameters."""
        raise NotImplementedError

    def end_check(self) -> None:
        """Records that the graph needs no other check of loss heads."""
        raise NotImplementedError

    def copies(self) -> Copies:
        """Copies all gradients that the pass writes, those of the steps first."""
        return [(g.own, g.own.copy()) for g in self.gradients]

    def finish(self) -> None:
        """Ends after the last run."""

    @property
    def gradients(self) -> List[Gradient]:
        """The gradients that wait for the update."""
        return [gradient for step in self.steps for gradient in step.new()]

    def run_and_check(self) -> None:
        """Runs the pass, the check of loss heads and the search of the loss scale."""
        if self.repeats:
            self._before = [(g, g.copy()) for step in self.steps for g in step.kept()]
        self.run_once(self.scale)
        losses = self.losses()
        for step in self.steps:
            step.end(self.scale, losses)
        if self.checking:
            self._check_loss_heads()
        if self._searching:
            least = _least(self._searching)
            self._search(least)
            for step in self._searching:
                if step.scale == least.loss_scale.scale:
                    step.loss_scale._lower_to(step.scale)
        if self.repeats:
            self.finish()
        for step in self.steps:
            step.guard(step.new())

    def repeat(self, scale: float) -> None:
        """Repeats the pass at another loss scale, with all earlier ones of the step."""
        for step in self.steps:
            step.set_scale(scale)
        for gradient, before in self._before:
            (before * (scale / self.scale)).copyto(gradient)
        self.run_again(scale)

    def _search(self, step: Step) -> None:
        """Checks the gradients. If they overflow, repeats the pass at lower scales, and keeps the
        scale that fits."""
        if step.weights_replaced:  # the step will be skipped
            return
        if not step.overflow_anywhere(self.gradients) or step.loss_is_to_blame():
            return
        refusal = self.refusal()
        if step.workers.any(bool(refusal)):
            step.warn_once("no second pass", refusal or "another rank's graph allows no second "
                           "backward pass: steps are skipped until the loss scale fits")
            return

        def overflows(scale: float) -> bool:
            self.repeat(scale)
            return step.overflow_anywhere(self.gradients)

        before, passes = step.loss_scale.scale, step.loss_scale._search(overflows)
        if passes:
            found = as_power(step.loss_scale.scale)
            log.info("loss scale %s found in %d backward passes", found, passes)
        elif step.loss_scale.scale == before:  # and all were tried
            step.nothing_fits(self.gradients)

    def _check_loss_heads(self) -> None:
        """Refuses loss heads that ignore the incoming gradient, which a pass at scale 0 finds. If
        that pass has infinities or NaN, the next pass is checked, too."""
        try:
            sums = self.sums_at_zero if self.may_have_unscaled_heads() else None
            if self.user_error:
                _least(self.steps).warn_once("no second pass", self.user_error)
            if sums is not None:
                unscaled = [g.name for g, s in zip(self.gradients, sums)
                            if np.isfinite(s) and s > 0]
                if unscaled:
                    raise ValueError(self.unscaled_head_error(unscaled))
            if sums is None or np.isfinite(sums).all():
                self.end_check()
        except (ValueError, mx.MXNetError):
            for step in self.steps:
                step.reset()
            raise

    @functools.cached_property
    def sums_at_zero(self) -> Optional["np.ndarray[Any, Any]"]:
        """The sums of squares of gradients in a pass at scale 0, which keeps gradients. None if
        the graph allows no second pass; then loss heads are refused by their names."""
        mx.nd.waitall()  # raises errors of the first run, which are not those of a second one
        kept = self.copies()
        gradients = [g.own for g in self.gradients]
        for array in gradients:
            array[:] = 0
        try:
            return self.squares_at_zero(gradients)
        finally:
            restore(kept)

    def squares_at_zero(self, gradients: List["mx.nd.NDArray"]
                        ) -> Optional["np.ndarray[Any, Any]"]:
        """Runs the pass at scale 0, and returns the sums of squares, or None."""
        self.run_again(0.0)
        mx.nd.waitall()
        return squares(gradients)


class AutogradPass(BackwardPass):
    """A backward pass through graphs that autograd has recorded.

    Args:
        steps: the steps.
        scale: the loss scale.
        losses: the losses.
        parameters: the parameters of the steps' Trainers.
        after_pass: called after each run, with its scale.
        retain_graph: whether the graphs are kept.
    """

    def __init__(self, steps: Sequence[Step], scale: float, losses: List["mx.nd.NDArray"],
                 parameters: Sequence["mx.gluon.Parameter"],
                 after_pass: Callable[[float], None], retain_graph: bool) -> None:
        self._losses, self._parameters, self._after_pass = losses, parameters, after_pass
        self._retain_graph = retain_graph
        self._averages: Optional[Copies] = None
        self._new = frozenset() if scale == 1 else graph_operators(losses)
        super().__init__(steps, scale, any(self._new - step.checked for step in steps))

    def run_once(self, scale: float) -> None:
        head_gradients = [_head_gradient(loss.shape, loss.ctx, loss.dtype, scale)
                          for loss in self._losses]
        try:
            run_backward(self._losses, head_gradients, self._retain_graph or self.repeats)
        finally:
            for step in self.steps:
                step.note_written()
        self._after_pass(scale)

    def run_again(self, scale: float) -> None:
        """Runs the pass again. Before the first time, it copies the moving averages of the graphs
        and of the Trainers, because MXNet's batch norms update them in each backward pass. It
        waits, because MXNet's engine does not track these writes."""
        if self._averages is None:
            mx.nd.waitall()
            own = [array for p in self._parameters if p.grad_req == "null" and p._data is not None
                   for array in p.list_data()]
            self._averages = [(a, a.copy()) for a in [*own, *updated_inputs(self._losses)]]
        self.run_once(scale)

    def losses(self) -> List["mx.nd.NDArray"]:
        return [loss.detach() for loss in self._losses]

    def may_have_unscaled_heads(self) -> bool:
        seen = self._operators
        return bool(seen & (LOSSES | POSSIBLE_LOSSES | USER_CODE | NESTED)) \
            or not seen <= {*OPERATORS, "null"}

    def end_check(self) -> None:
        for step in self.steps:
            step.checked |= self._new

    def unscaled_head_error(self, names: Sequence[str]) -> str:
        return _unscaled_head_error(
            self._operators & (LOSSES | POSSIBLE_LOSSES | USER_CODE)
            or [f"one of {', '.join(sorted(LOSSES))}, or one like them"], names)

    def refusal(self) -> str:
        """If user code or a hybridized network may compute other gradients, a pass is tried."""
        seen, none = self._operators, "allows no second backward pass: steps are skipped until " \
                                      "the loss scale fits"
        if seen & _ONCE:
            return f"MXNet's own Dropout {none}"
        if self.sums_at_zero is None:
            return self.user_error or f"a loop of this graph {none}"
        converted = all(getattr(p, "converted_by_gluon_amp", False)  # whose dropout keeps masks
                        for p in self._parameters)
        if not seen & USER_CODE and (converted or "_CachedOp" not in seen):
            return ""
        kept = self.copies()
        self.repeat(self.scale)
        gradients = [g.own for g in self.gradients]
        if all(np.array_equal(array.asnumpy(), before.asnumpy(), equal_nan=True)
               for array, (_, before) in zip(gradients, kept)):
            return ""
        restore(kept)
        return f"this graph {none}, because that has other gradients, as MXNet's own Dropout has"

    def squares_at_zero(self, gradients: List["mx.nd.NDArray"]
                        ) -> Optional["np.ndarray[Any, Any]"]:
        with _errors_of_user_code() as errors:
            try:
                return super().squares_at_zero(gradients)
            except mx.MXNetError as error:
                with contextlib.suppress(mx.MXNetError):  # which other arrays may have, too
                    mx.nd.waitall()
                if errors:
                    self.user_error = _describe(errors[0])
                elif _FREED not in str(error):
                    raise mx.MXNetError("the loss scale needs a second backward pass, which "
                                        f"failed. Valid: {_ONE_PASS}. MXNet's error: {error}"
                                        ) from error
                refuse_loss_heads(self._losses)
                return None

    @functools.cached_property
    def _operators(self) -> Set[str]:
        return _operators(self._losses)

    def copies(self) -> Copies:
        own = [g.own for g in self.gradients]
        return [(array, array.copy()) for array in [*own, *other_gradients(self._losses, own)]]

    def finish(self) -> None:
        """Restores moving averages and frees the graphs."""
        if self._averages:
            mx.nd.waitall()
            restore(self._averages)
        if not self._retain_graph:
            _free(self._losses)


def _least(steps: Sequence[Step]) -> Step:
    """Returns the step with the smallest loss scale."""
    return min(steps, key=lambda step: step.loss_scale.scale)


def run_backward(losses: List["mx.nd.NDArray"],
                 head_gradients: Optional[List["mx.nd.NDArray"]] = None,
                 retain_graph: bool = False) -> None:
    """Runs MXNet's backward pass, in one thread at a time."""
    with GRAPH_LOCK:
        mx.autograd.backward(losses, head_gradients, retain_graph)


def restore(copies: Iterable[Tuple["mx.nd.NDArray", "mx.nd.NDArray"]]) -> None:
    """Restores arrays from their copies."""
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
           "checked for operators that ignore the incoming gradient, and no first scale is " \
           "searched: steps are skipped until a dynamic one fits. To avoid this " \
           f"warning: {_ONE_PASS}"


def _unscaled_head_error(operators: Iterable[str], names: Sequence[str]) -> str:
    return "an operator of the network or the loss ignores the incoming gradient, and so the " \
           f"loss scale: {', '.join(sorted(operators))}. The update would divide the gradients" \
           f"{in_names(names)} by a scale that they lack. Valid: a loss of gluon.loss, " \
           "amp.Module, or loss_scale=None"


def refuse_loss_heads(losses: List[Any]) -> None:
    """Refuses loss heads by their names, without a backward pass. It does not see those in
    hybridized blocks."""
    heads = set()
    for nodes, outputs in map(_nodes, losses):
        for head in _reached(nodes, outputs):
            node = nodes[head]
            if node["op"] in LOSSES and node.get("attrs", {}).get("out_grad") != "True" \
                    and any(nodes[i]["op"] == "null"
                            for i in _reached(nodes, [node["inputs"][0][0]])):
                heads.add(node["op"])
    if heads:
        raise ValueError(_unscaled_head_error(heads, []))


def _reached(nodes: List[Any], begin: Iterable[int]) -> Set[int]:
    """Returns the nodes that gradients reach from these."""
    found, waiting = set(), list(begin)
    while waiting:
        one = waiting.pop()
        if one not in found and nodes[one]["op"] not in _STOPS:
            found.add(one)
            waiting += [entry[0] for entry in nodes[one]["inputs"]]
    return found


def _nodes(loss: Any) -> Tuple[List[Any], List[int]]:
    """Returns the nodes of a loss's graph, and the numbers of its outputs."""
    facts = facts_of(mx.autograd.get_symbol(loss.as_nd_ndarray()))
    return facts["nodes"], [entry[0] for entry in facts["heads"]]


def _operators(losses: List[Any]) -> Set[str]:
    """Returns the operators in the graphs of these losses, without the engine's Dropout, which
    keeps its mask. A hybridized block is one operator, _CachedOp, or its operators."""
    return {node["op"] for loss in losses for node in _nodes(loss)[0]
            if node["op"] not in _ONCE or SETTINGS not in node.get("attrs", {})}


def _free(losses: List[Any]) -> None:
    """Frees retained graphs without changing gradients. Without the engine, it runs a backward pass
    that computes only the gradients of arrays added for it."""
    if free_graphs(losses):
        return
    added = [mx.nd.zeros(1, loss.ctx, loss.dtype) for loss in losses]
    for one in added:
        one.attach_grad()
    with mx.autograd.record():
        sums = [loss.as_nd_ndarray() + one for loss, one in zip(losses, added)]
    mx.autograd.grad(sums, added, retain_graph=False)


@functools.lru_cache(maxsize=16)
def _head_gradient(shape: Shape, context: Context, dtype: DType, number: float) -> Array:
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
        dtype = dtype_name(loss.dtype)
        if dtype in TYPES_16BIT:
            why = "a sum above 65504 is infinite" if dtype == "float16" else "a number has 8 bits"
            raise ValueError(f"the loss is {dtype}, where {why}: take it "
                             "in float32, as loss_fn(net(data).astype('float32'), label); "
                             "converted networks return float32, but under pure_float16")
