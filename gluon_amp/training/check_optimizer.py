"""Checks of the settings of an optimizer from a file, and of its scheduler.

MXNet reads them without checks: in the next step they would be an error, a weight of NaN, or a loop
without end.
"""
import copy
import math
import numbers
import re
import sys
from typing import Any, Callable, Dict, Iterable, Mapping

from .._mxnet import mx, np
from ..annotations import Optimizer
from .optimizer import check_scalable, is_of_mxnet

_MOST = 2 ** 31 - 1  # updates
_MOST_AT_ONCE = 10 ** 6  # steps of a FactorScheduler in one update
_LONGEST_NAME = 10 ** 4  # whose numbers are compared as numbers
_OPTIONAL = {"aggregate_num", "allow_np_array", "param_dict", "_all_index_update_counts"}
_SCHEDULERS: Dict[Any, Mapping[str, Any]] = {type(made): vars(made) for made in (
    mx.lr_scheduler.FactorScheduler(1), mx.lr_scheduler.MultiFactorScheduler([1]),
    mx.lr_scheduler.PolyScheduler(1), mx.lr_scheduler.CosineScheduler(1),
    mx.lr_scheduler.LRScheduler())}
_COUNTS = ("num_update", "begin_num_update", "cur_step_ind")
_LEAST = {"step": 1, "max_update": 1, "count": 0, "warmup_steps": 0}
_HISTORIES = re.compile(r"(-?\d{1,3}( \d{1,10})*\t[^\t\n]* cpu\d{1,6}\n)*")


def check_settings(maker: Optimizer, mine: Optimizer) -> None:
    """Refuses an optimizer of a file whose settings no optimizer of its class has.

    Of the user's class those are checked that MXNet's base class has, unless the optimizer in use
    has another type there.

    Args:
        maker: the file's optimizer.
        mine: the optimizer in use, of the same class.
    """
    check_scalable(maker)
    usual = vars(_base_of_mxnet(maker)())
    _check_there(maker, mine, set(usual) - _OPTIONAL)
    if maker.lr_scheduler is not None:  # MXNet's lr may be None then
        usual = {**usual, "lr": None, "lr_scheduler": maker.lr_scheduler}
    _check_values(maker, mine, usual)
    for name in ("lr_mult", "wd_mult"):
        _check_items(name, getattr(maker, name), _is_number)
    devices = getattr(maker, "_all_index_update_counts", {})
    for counts in (*devices.values(), maker._index_update_count):
        _check_items("updates", counts, _is_count)
    _check_scheduler(maker.lr_scheduler, mine.lr_scheduler, maker.num_update)
    _check_trainer_state(getattr(maker, "trainer_state", {}))


def _base_of_mxnet(made: Optimizer) -> Any:
    return next(cls for cls in type(made).__mro__
                if is_of_mxnet(cls) and issubclass(cls, mx.optimizer.Optimizer))


def _check_there(made: Any, mine: Any, names: Iterable[str]) -> None:
    missing = [name for name in sorted(names) if not hasattr(made, name)
               and (is_of_mxnet(type(made)) or hasattr(mine, name))]
    if missing:
        raise ValueError(f"it holds a {type(made).__name__} without {', '.join(missing)}")


def _check_values(made: Any, mine: Any, usual: Mapping[str, Any]) -> None:
    """Refuses attributes of another type than the usual ones, and those beyond their limits."""
    for name in usual:
        value: Any = getattr(made, name, usual[name])
        fits = _is_count(value) if name in _COUNTS else _fits(value, usual[name])
        if fits and name in _LEAST and not isinstance(value, list):
            fits = _LEAST[name] <= value <= _MOST
        if fits and name in ("beta1", "beta2"):
            fits = 0 <= value < 1
        if fits and name == "schedule_decay":  # Nadam computes 0.96 ** (t * schedule_decay)
            fits = value >= 0
        if not fits and (is_of_mxnet(type(made))
                         or _fits(getattr(mine, name, usual[name]), usual[name])):
            raise ValueError(f"it holds {name}={value!r:.200} of {type(made).__name__}")


def _check_items(what: str, items: Any, fits: Callable[[Any], bool]) -> None:
    for index, value in items.items():
        if not fits(value):
            raise ValueError(f"it holds {value!r:.200} as {what} of parameter {index!r}")


def _fits(value: Any, usual: Any) -> bool:
    if isinstance(usual, bool):
        return value in (False, True)
    if usual is None:
        return value is None or value == math.inf or _is_number(value)
    if isinstance(usual, numbers.Real):
        return _is_number(value)
    return isinstance(value, type(usual))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) \
        and not isinstance(value, bool) \
        and math.isfinite(value) and (value == 0 or abs(float(value)) >= sys.float_info.min)


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and 0 <= int(value) <= _MOST


def _check_scheduler(made: Any, mine: Any, num_update: int) -> None:
    if made is None:
        return
    base: Any = next((cls for cls in type(made).__mro__ if cls in _SCHEDULERS), None)
    if base is None or type(made) is mx.lr_scheduler.LRScheduler:
        raise ValueError(f"it holds the scheduler {type(made).__name__}")
    _check_there(made, mine, _SCHEDULERS[base])
    _check_values(made, mine, _SCHEDULERS[base])
    if base is not type(made):
        return
    if made.warmup_mode not in ("linear", "constant"):
        raise ValueError(f"it holds warmup_mode={made.warmup_mode!r:.200}")
    if base is mx.lr_scheduler.FactorScheduler \
            and num_update - made.count > _MOST_AT_ONCE * made.step:
        raise ValueError(f"it holds num_update={num_update!r} and a FactorScheduler with "
                         f"step={made.step!r}, count={made.count!r}, which are too far apart")
    if base in (mx.lr_scheduler.PolyScheduler, mx.lr_scheduler.CosineScheduler):
        for update in {max(num_update, made.warmup_steps), made.max_update}:
            if made.warmup_steps <= update <= made.max_update:
                _check_rate(copy.copy(made), update)
    if base is mx.lr_scheduler.MultiFactorScheduler and not all(map(_is_number, made.step)):
        raise ValueError(f"it holds step={made.step!r:.200} of MultiFactorScheduler")


def _check_rate(scheduler: Any, num_update: int) -> None:
    try:
        rate = scheduler(num_update)
    except ArithmeticError as error:
        rate = error
    if not _is_number(rate):
        raise ValueError(f"it holds a {type(scheduler).__name__} whose rate of update {num_update} "
                         f"is {rate!r:.200}")


def _check_trainer_state(state: Any) -> None:
    """Refuses values other than those that `checkpoint.save` writes; `Step.load` checks others."""
    if not isinstance(state, dict):
        raise ValueError(f"it holds trainer_state={state!r:.200}")
    for name in ("names", "scales"):
        texts = state.get(name, [])
        if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise ValueError(f"it holds {name}={texts!r:.200}")
    for text in state.get("names", []):
        if len(text) > _LONGEST_NAME:
            raise ValueError(f"it holds a parameter with a name of {len(text)} characters")
    for text in state.get("scales", []):
        if not _HISTORIES.fullmatch(text):
            raise ValueError("it holds no float8 histories")
    scale = state.get("loss_scale")
    if scale is not None and not (isinstance(scale, dict) and _is_number(scale.get("scale"))):
        raise ValueError(f"it holds loss_scale={scale!r:.200}")
