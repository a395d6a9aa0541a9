"""What a file of states holds of an optimizer and its scheduler, and the checks of it.

MXNet would read numbers without checks: in the next step they would be an error, a weight of NaN,
or a loop without end. So a copy of the optimizer first updates one small weight. A class of the
user's is given again by the script, whose object gets the attributes in the file.
"""
import copy
import numbers
from typing import Any, Collection, Dict, Mapping, Optional

from .._mxnet import message, mx, np
from ..annotations import Optimizer
from .optimizer import check_scalable, is_of_mxnet
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
    others = _OTHERS.union(keep)
    _set(optimizer, {name: value for name, value in saved.optimizer.values.items()
                     if name not in others},
         {name: value for name, value in _usual(mine).items() if name not in others})
    optimizer.multi_precision = optimizer.multi_precision or mine.multi_precision
    check_scalable(optimizer)
    for counts in ({"num_update": optimizer.num_update, "begin": optimizer.begin_num_update},
                   *optimizer._all_index_update_counts.values()):
        for index, count in counts.items():
            if not (isinstance(count, (int, np.integer)) and 0 <= int(count) <= _MOST):
                raise ValueError(f"it holds {count!r:.200} as updates of parameter {index!r}")
    for factor in (*optimizer.lr_mult.values(), *optimizer.wd_mult.values()):
        if not isinstance(factor, numbers.Real):
            raise ValueError(f"it holds the factor {factor!r:.200} of a parameter")
    if is_of_mxnet(type(optimizer)):
        _check_update(optimizer)
    return optimizer


def _scheduler(saved: Optional[Settings], mine: Any) -> Any:
    """Returns a scheduler with the settings in a file."""
    if saved is None:
        return None
    module, _, name = saved.name.rpartition(".")
    if module == "mxnet.lr_scheduler" and name in _BY_NAME:
        scheduler = _BY_NAME[name].__new__(_BY_NAME[name])
    elif type(mine).__name__ == name:
        scheduler = copy.deepcopy(mine)
    else:
        raise ValueError(f"it was saved with the scheduler {saved.name}, which is given again: "
                         f"create the optimizer with lr_scheduler={name}(...), then load the "
                         f"states. Received: {type(mine).__name__}")
    _set(scheduler, saved.values, _usual(scheduler))
    return scheduler


def _usual(owner: Any) -> Mapping[str, Any]:
    """Returns the attributes of an object of MXNet's base class."""
    for cls in type(owner).__mro__:
        if cls in _SCHEDULERS:
            return _SCHEDULERS[cls]
        if is_of_mxnet(cls) and issubclass(cls, mx.optimizer.Optimizer):
            return vars(cls())
    return {}


def _set(owner: Any, values: Dict[str, Any], usual: Mapping[str, Any]) -> None:
    """Sets attributes. Refuses those that hide methods, and, of MXNet's classes, those of another
    kind than the usual ones."""
    cls, state = type(owner), values.pop("state_dict", None)
    missing = sorted(name for name in usual if name not in values and is_of_mxnet(cls))
    if missing:
        raise ValueError(f"it holds a {cls.__name__} without {', '.join(missing)}")
    for name, value in values.items():
        if not isinstance(name, str) or callable(getattr(cls, name, None)):
            raise ValueError(f"it replaces {cls.__name__}.{name}")
        if name in usual and is_of_mxnet(cls) and (_kind(value) is not _kind(usual[name])
                                                   or value != value):
            raise ValueError(f"it holds {name}={value!r:.200} of {cls.__name__}")
    vars(owner).update(values)
    if state is not None:
        owner.load_state_dict(state)


def _kind(value: Any) -> type:
    if isinstance(value, (bool, np.bool_)):
        return bool
    return float if value is None or isinstance(value, numbers.Real) else type(value)


def _check_update(optimizer: Optimizer) -> None:
    """Refuses settings with which the next update fails or loops, or whose weight is no number."""
    trial = copy.deepcopy(optimizer)
    weight = mx.nd.ones((1, 1))
    try:
        scheduler: Any = trial.lr_scheduler
        fits = all(0 <= getattr(trial, name, 0) < 1 for name in ("beta1", "beta2"))
        if type(scheduler) is mx.lr_scheduler.FactorScheduler:
            fits &= scheduler.step >= 1 and \
                trial.num_update - scheduler.count <= _MOST_AT_ONCE * scheduler.step
        if fits:
            trial._set_current_context(0)
            trial.update(0, weight, weight.copy(), trial.create_state(0, weight))
            fits = bool(np.isfinite(weight.asnumpy()).all())
    except Exception as error:  # of any kind, for values that MXNet does not check
        raise ValueError(f"it holds settings that {type(trial).__name__} refuses: {message(error)}"
                         ) from error
    if not fits:
        raise ValueError(f"it holds settings of {type(trial).__name__} without a next update: "
                         f"{settings_of(trial)!r:.500}")
