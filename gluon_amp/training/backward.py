"""Backward passes of one or several steps, and the losses where they start."""
import functools
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Sequence

from .._mxnet import GRAPH_LOCK, mx
from ..annotations import Array, Context, DType, Shape
from ..cpu.arrays import TYPES_16BIT, dtype_name
from ..cpu.library import graph_operators
from .heads import check_graphs
from .step import Stage, Step


def run_backward(losses: List["mx.nd.NDArray"], scale: Optional[float] = None,
                 retain_graph: bool = False) -> None:
    """Runs MXNet's backward pass, in one thread at a time, with head gradients of the scale."""
    head_gradients = None if scale is None else [
        _head_gradient(loss.shape, loss.ctx, loss.dtype, scale) for loss in losses]
    with GRAPH_LOCK:
        mx.autograd.backward(losses, head_gradients, retain_graph)


@functools.lru_cache(maxsize=16)
def _head_gradient(shape: Shape, context: Context, dtype: DType, number: float) -> Array:
    """Returns the head gradient of a loss: an array filled with a number."""
    return mx.nd.full(shape, number, context, dtype)


def scale_of_pass(steps: Sequence[Step]) -> float:
    """Returns the scale of the next backward pass for these steps: that of earlier passes since the
    last update, or the smallest of the steps."""
    begun = {step.scale for step in steps if step.stage is not Stage.EMPTY}
    if len(begun) > 1:
        raise RuntimeError("these Trainers have had backward passes at different loss scales since "
                           "their last steps: call gluon_amp.backward for all of them, or "
                           f"step before. Received: {', '.join(map(str, sorted(begun)))}")
    return min(begun or {step.loss_scale.scale for step in steps})


@contextmanager
def backward_pass(steps: Sequence[Step], losses: Sequence["mx.nd.NDArray"]) -> Iterator[float]:
    """Yields the scale of the backward pass in the `with` block, which belongs to these steps and
    starts at these losses."""
    scale = scale_of_pass(steps)
    with mx.autograd.pause():  # operations on gradients are not recorded
        for step in steps:
            step.begin(scale)
    ended: Optional[Sequence[mx.nd.NDArray]] = None
    try:
        yield scale
        ended = losses
    finally:
        for step in steps:
            step.end(scale, ended)


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


def check_loss_heads(steps: Sequence[Step], losses: Sequence[Any]) -> None:
    """Refuses graphs with loss heads that ignore the incoming gradient, and so the loss scale.

    A graph is read if it has an operator that is in no earlier graph without any loss head.
    """
    operators = graph_operators(losses)
    if all(operators <= step.checked for step in steps):
        return
    gradients = [gradient.own for step in steps for gradient in step.read()]
    if not check_graphs(losses, gradients):
        for step in steps:
            step.checked |= operators
