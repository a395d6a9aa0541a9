"""Fused optimizer updates on a CPU, in one pass over memory.

The engine's operator `_gluon_amp_update` widens weights and gradients, updates the master weights
like MXNet's float32 operator, and rounds them, for several weights in one call. LAMB needs norms
first, so it takes two passes. Float32 weights are their own master weights. They get the bits of
MXNet's operator, which is several times slower.
"""
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from .._mxnet import mx
from ..annotations import Optimizer
from ..cpu import library
from . import adamw

MOST = 45  # weights in one call; the limits of MXNet's operators are 45 to 60
# Settings for which 0 or None in MXNet's optimizers, and -1 in operators, means none.
_NONE_IF_0 = ("clip_gradient", "clip_weights", "lower_bound", "upper_bound")
# Optimizers that count the updates of all weights of a call before they compute learning rates.
_IN_LISTS = (mx.optimizer.SGD, adamw.AdamW)


def _as_given(made: Optimizer, lr: float, wd: float, step: int) -> Tuple[float, float]:
    return lr, wd


def _adam(made: Optimizer, lr: float, wd: float, step: int) -> Tuple[float, float]:
    return adamw.bias_corrected(made, lr, step), wd


def _adamw(made: Optimizer, lr: float, wd: float, step: int) -> Tuple[float, float]:
    return adamw.bias_corrected(made, lr, step), lr * wd


class Row(NamedTuple):
    """The mapping of one of MXNet's optimizers to the engine's operator."""
    rule: str  # the engine's name
    settings: Dict[str, str]  # the operator's name of each -> the optimizer's
    fits: Callable[[Any, Sequence[Any]], bool] = lambda made, states: True
    rate_and_decay: Callable[[Any, float, float, int], Tuple[float, float]] = _as_given
    stateless: bool = False  # whether states, if any, do not change


def _all_there(states: Sequence[Any]) -> bool:
    return all(state is not None for state in states)


_MOMENTUM = {"momentum": "momentum"}
_MOMENTS = {"beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon"}
_AVERAGES = {"beta1": "gamma1", "epsilon": "epsilon", "clip_weights": "clip_weights"}
_BOUNDS = {name: name for name in ("lower_bound", "upper_bound", "bias_correction")}

ROWS: Dict[Any, List[Row]] = {
    mx.optimizer.SGD: [
        Row("sgd", _MOMENTUM, lambda made, states: made.momentum > 0 and _all_there(states)),
        Row("sgd", {}, lambda made, states: made.momentum == 0, stateless=True)],
    mx.optimizer.NAG: [  # MXNet goes by the state, should the momentum be changed later
        Row("nag", _MOMENTUM, lambda made, states: made.momentum >= 0 and _all_there(states)),
        Row("descent", {}, lambda made, states: all(state is None for state in states),
            stateless=True)],
    mx.optimizer.Adam: [Row("adam", _MOMENTS, rate_and_decay=_adam)],
    adamw.AdamW: [Row("adamw", _MOMENTS, rate_and_decay=_adamw)],
    mx.optimizer.RMSProp: [
        Row("rmsprop", _AVERAGES, lambda made, states: not made.centered),
        Row("centered_rmsprop", {**_AVERAGES, "momentum": "gamma2"},
            lambda made, states: made.centered)],
    # MXNet sums the norms in another order where weights do not come in lists
    mx.optimizer.LAMB: [Row("lamb", {**_MOMENTS, **_BOUNDS},
                            lambda made, states: made.aggregate_num > 1)],
}


def row_for(cls: type, made: Optimizer, states: Sequence[Any]) -> Optional[Row]:
    """Returns the row of an optimizer of exactly this class of MXNet, if any."""
    return next((row for row in ROWS.get(cls, ()) if row.fits(made, states)), None)


def update(row: Row, made: Optimizer, indices: Sequence[Any], weights: Sequence[Any],
           grads: Sequence[Any], masters: Sequence[Any], states: Sequence[Any]) -> None:
    """Updates weights, master weights, states and the optimizer's counts, in one call. Float32
    weights have no master weights."""
    lrs: List[float] = []
    wds: List[float] = []
    for part in [indices] if isinstance(made, _IN_LISTS) else [[index] for index in indices]:
        made._update_count(part)
        lrs += made._get_lrs(part)
        wds += made._get_wds(part)
    steps = [made._index_update_count[index] for index in indices]
    lrs, wds = zip(*(row.rate_and_decay(made, *numbers)  # type: ignore[assignment]
                     for numbers in zip(lrs, wds, steps)))
    settings = {name: getattr(made, its) for name, its in row.settings.items()}
    settings.update(clip_gradient=made.clip_gradient, rescale_grad=made.rescale_grad)
    for name in _NONE_IF_0:
        if name in settings:
            settings[name] = settings[name] or -1
    kept = () if row.stateless else \
        zip(*([state] if isinstance(state, mx.nd.NDArray) else state for state in states))
    library.call("_gluon_amp_update",
                 [*weights, *grads, *masters, *(array for column in kept for array in column)],
                 out=list(weights), rule=row.rule, num_weights=len(weights), lrs=_text(lrs),
                 wds=_text(wds), steps=_text(steps), masters=bool(masters), **settings)


def _text(numbers: Sequence[float]) -> str:
    return ",".join(map(str, numbers))
