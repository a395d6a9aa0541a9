"""What a file of states holds of an optimizer and its scheduler, and the checks of it.

MXNet would read numbers without checks: in the next step they would be an error, a weight of NaN,
or a loop without end. A class of the user's is given again by the script, whose object gets the
attributes in the file.
"""
import copy
import math
import numbers
import sys
from contextlib import suppress
from typing import Any, Collection, Dict, Mapping, Optional

from .._mxnet import mx, np
from ..annotations import Optimizer
from .optimizer import is_of_mxnet
from .state_file import Saved, Settings

_MOST = 2 ** 31 - 1  # updates
_MOST_AT_ONCE = 10 ** 6  # steps of a FactorScheduler in one update
# Attributes of an optimizer that belong to this process, or that files hold elsewhere.
_OTHERS = {"param_dict", "idx2name", "sym_info", "aggregate_num", "allow_np_array", "weight_types",
           "_master_sync", "_launches", "_index_update_count", "lr_scheduler"}
_SCHEDULERS: Dict[Any, Mapping[str, Any]] = {type(scheduler): vars(scheduler) for scheduler in (
    mx.lr_scheduler.FactorScheduler(1), mx.lr_scheduler.MultiFactorScheduler([1]),
    mx.lr_scheduler.PolyScheduler(1), mx.lr_scheduler.CosineScheduler(1),
    mx.lr_scheduler.LRScheduler())}
_BY_NAME = {cls.__name__: cls for cls in _SCHEDULERS if cls is not mx.lr_scheduler.LRScheduler}
_COUNTS = ("num_update", "begin_num_update", "cur_step_ind")
_BELOW_1 = 1 - 2 ** -53
_LIMITS = {"step": (1, _MOST), "max_update": (1, _MOST), "count": (0, _MOST),
           "warmup_steps": (0, _MOST), "beta1": (0, _BELOW_1), "beta2": (0, _BELOW_1),
           "schedule_decay": (0, math.inf)}  # Nadam computes 0.96 ** (t * schedule_decay)


def settings_of(owner: Any) -> Optional[Settings]:
    """Returns the settings of an optimizer or a scheduler for a file."""
    if owner is None:
        return None
    values = {name: value for name, value in vars(owner).items() if name not in _OTHERS}
    if hasattr(owner, "state_dict"):
        values = {name: values[name] for name in _usual(owner) if name in values}
        values["state_dict"] = owner.state_dict()
    return Settings(f"{type(owner).__module__}.{type(owner).__qualname__}", values)


def restored(saved: Saved, mine: Optimizer, keep: Collection[str]) -> Optimizer:
    """Returns a copy of an optimizer with the settings and the scheduler in a file.

    Args:
        saved: the file's contents.
        mine: the optimizer in use.
        keep: attributes that stay those of the optimizer in use.

    Raises:
        ValueError: the file has an optimizer or a scheduler of another class, or with settings
            that none of its class has.
    """
    optimizer = copy.copy(mine)
    if saved.optimizer is None:
        return optimizer
    name = saved.optimizer.name.rpartition(".")[2]
    if name != type(mine).__name__:
        raise ValueError(f"it holds the states of {name}, not of {type(mine).__name__}")
    if "lr_scheduler" not in keep:
        optimizer.lr_scheduler = _scheduler(saved.scheduler, mine.lr_scheduler)
    usual = {name: value for name, value in _usual(mine).items() if name not in _OTHERS}
    _set(optimizer, mine, {name: value for name, value in saved.optimizer.values.items()
                           if name not in keep and name not in _OTHERS},
         # MXNet's lr may be None with a scheduler
         {**usual, "lr": None} if optimizer.lr_scheduler is not None else usual, keep)
    optimizer.multi_precision = optimizer.multi_precision or mine.multi_precision
    _check_items("lr_mult", optimizer.lr_mult, _is_number)
    _check_items("wd_mult", optimizer.wd_mult, _is_number)
    for counts in optimizer._all_index_update_counts.values():
        _check_items("updates", counts, _is_count)
    _check_schedule(optimizer.lr_scheduler, optimizer.num_update)
    return optimizer


def _scheduler(saved: Optional[Settings], mine: Any) -> Any:
    """Returns a scheduler with the settings in a file."""
    if saved is None:
        return None
    module, _, name = saved.name.rpartition(".")
    if module == "mxnet.lr_scheduler" and name in _BY_NAME:
        scheduler = mine = _BY_NAME[name].__new__(_BY_NAME[name])
    elif type(mine).__name__ == name:
        scheduler = copy.deepcopy(mine)
    else:
        raise ValueError(f"it was saved with the scheduler {saved.name}, which is given again: "
                         f"create the optimizer with lr_scheduler={name}(...), then load the "
                         f"states. Received: {type(mine).__name__}")
    _set(scheduler, mine, saved.values, _usual(scheduler))
    return scheduler


def _usual(owner: Any) -> Mapping[str, Any]:
    """Returns the attributes of an object of MXNet's base class."""
    for cls in type(owner).__mro__:
        if cls in _SCHEDULERS:
            return _SCHEDULERS[cls]
        if is_of_mxnet(cls) and issubclass(cls, mx.optimizer.Optimizer):
            return vars(cls())
    return {}


def _set(owner: Any, mine: Any, values: Dict[str, Any], usual: Mapping[str, Any],
         keep: Collection[str] = ()) -> None:
    """Sets attributes. Refuses those that hide methods, and, unless the user's class has others,
    values of another type than the usual ones, or beyond their limits."""
    cls, values = type(owner), dict(values)
    state = values.pop("state_dict", None)
    missing = sorted(name for name in usual if name not in values and name not in keep
                     and (is_of_mxnet(cls) or hasattr(mine, name)))
    if missing:
        raise ValueError(f"it holds a {cls.__name__} without {', '.join(missing)}")
    for name, value in values.items():
        if not isinstance(name, str) or callable(getattr(cls, name, None)):
            raise ValueError(f"it replaces {cls.__name__}.{name}")
        if name in usual and not _fits(name, value, usual[name]) \
                and (is_of_mxnet(cls)
                     or _fits(name, getattr(mine, name, usual[name]), usual[name])):
            raise ValueError(f"it holds {name}={value!r:.200} of {cls.__name__}")
    vars(owner).update(values)
    if state is not None:
        owner.load_state_dict(state)


def _fits(name: str, value: Any, usual: Any) -> bool:
    if name in _COUNTS:
        return _is_count(value)
    if isinstance(usual, bool):
        return isinstance(value, (int, np.bool_)) and value in (False, True)
    if usual is None:
        return value is None or _is_number(value) or value == math.inf
    if not isinstance(usual, numbers.Real):
        return isinstance(value, type(usual))
    least, most = _LIMITS.get(name, (-math.inf, math.inf))
    return _is_number(value) and least <= value <= most


def _check_items(what: str, items: Any, fits: Any) -> None:
    for index, value in items.items():
        if not fits(value):
            raise ValueError(f"it holds {value!r:.200} as {what} of parameter {index!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) \
        and not isinstance(value, bool) \
        and math.isfinite(value) and (value == 0 or abs(float(value)) >= sys.float_info.min)


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and 0 <= int(value) <= _MOST


def _check_schedule(scheduler: Any, num_update: int) -> None:
    """Refuses a scheduler of MXNet whose next rate is no number, or takes a loop of many steps."""
    cls = type(scheduler)
    if cls not in _BY_NAME.values():
        return
    fits = scheduler.warmup_mode in ("linear", "constant")
    if cls is mx.lr_scheduler.FactorScheduler:
        fits &= num_update - scheduler.count <= _MOST_AT_ONCE * scheduler.step
    elif cls is mx.lr_scheduler.MultiFactorScheduler:
        fits &= all(map(_is_number, scheduler.step))
    elif fits:
        for update in {max(num_update, scheduler.warmup_steps), scheduler.max_update}:
            with suppress(ArithmeticError):
                fits &= not scheduler.warmup_steps <= update <= scheduler.max_update \
                    or _is_number(copy.copy(scheduler)(update))
                continue
            fits = False
    if not fits:
        raise ValueError(f"it holds a {cls.__name__} that has no rate after {num_update} updates: "
                         f"{vars(scheduler)!r:.500}")
