"""States of optimizers in files: saved, read, and fitted to weights and devices.

state_file.py has the format, old_state_file.py reads that of MXNet and of earlier versions, and
settings.py checks optimizers and schedulers.
"""
import copy
import warnings
from contextlib import contextmanager
from typing import Any, Callable, Collection, Dict, Iterator, Mapping, Optional, Sequence, Tuple

from .._mxnet import mx
from ..annotations import Optimizer, Updater
from ..checks import counted, message, order_of
from ..cpu.arrays import dtype_name, is_16bit
from . import old_state_file, state_file
from .optimizer import check_scalable, is_of_mxnet, master_in
from .settings import restored, settings_of
from .step import Step

_LONGEST_NAME = 10 ** 4  # whose numbers are compared as numbers
Contents = Tuple[Dict[Any, Any], Optimizer, Dict[str, Any]]


def save(fname: str, updater: Updater, step: Step, saves_scheduler: bool = True,
         **others: Any) -> None:
    """Writes a file of optimizer states, atomically.

    Args:
        fname: the path of the file.
        updater: MXNet's updater, with the states and the optimizer; None if servers update.
        step: the step, whose state is saved with the optimizer.
        saves_scheduler: whether the optimizer's scheduler is saved.
        others: further values that are saved.
    """
    check_here(updater)
    mx.nd.waitall()  # MXNet writes the shapes of sparse arrays before it waits for their values
    optimizer = updater.optimizer
    scheduler = settings_of(optimizer.lr_scheduler) if saves_scheduler else None
    state_file.write(fname, state_file.Saved(updater.states, settings_of(optimizer), scheduler,
                                             {**others, **step.state()}))


def read(fname: str, mine: Optimizer, keep: Collection[str] = ()) -> Contents:
    """Reads a file of optimizer states.

    Args:
        fname: the path of the file.
        mine: the optimizer in use.
        keep: its settings that stay.

    Returns:
        the states, a copy of the optimizer with the file's settings, and what `save` stored with
        them; empty in a file of MXNet.
    """
    with open(fname, "rb") as file:
        data = file.read()
    reader = state_file if data.startswith(state_file.MAGIC) else old_state_file
    try:
        saved = reader.parse(data)
    except Exception as error:  # damaged data may raise any error
        if "np shape semantics" in str(error):
            raise ValueError(f"{fname} was not written in the present mode of npx.set_np(), which "
                             f"MXNet requires: {message(error)}") from error
        raise ValueError(f"{fname} holds no optimizer states, or is cut short or damaged: "
                         f"{str(error) or repr(error)}") from error
    with one_error(fname):
        return saved.states, restored(saved, mine, keep), saved.training


def check_here(updater: Optional[Updater]) -> None:
    """Refuses states on servers."""
    if updater is None:
        raise ValueError("states on servers can be neither saved nor loaded. Valid: a Trainer with "
                         "update_on_kvstore=False, or a Module with the environment variable "
                         "MXNET_UPDATE_ON_KVSTORE=0")


def load(fname: str, saved: Contents, updaters: Sequence[Updater], step: Step,
         weights: Mapping[Any, Tuple[str, Any]], devices: Sequence[int],
         renumbered: Callable[[Dict[Any, Any]], Dict[Any, Any]] = dict) -> None:
    """Sets the states of MXNet's updaters, the attributes of their optimizer, and the state of the
    step. The optimizer, and a scheduler of the user's class, stay the script's objects. An error
    changes nothing.

    Args:
        fname: the path of the file.
        saved: the result of `read`.
        updaters: the updater of each device, or one for all; [None] if servers update.
        step: the step.
        weights: for each number of a state a parameter's name and its array.
        devices: the device ids.
        renumbered: renumbers states and counts of updates.
    """
    check_here(updaters[0])
    states, optimizer, training = saved
    with one_error(fname):
        if step.loss_scale.scales:
            check_scalable(optimizer)
        _check_order(training.get("names", []), [name for name, _ in weights.values()])
        states = _fitting(fname, renumbered(states), optimizer, weights)
        _carry_counts(optimizer, devices, renumbered)
        copies = [states, *(copy.deepcopy(states) for _ in updaters[1:])]
        step.load(training)
    mine = updaters[0].optimizer
    scheduler = mine.lr_scheduler
    if type(scheduler) is type(optimizer.lr_scheduler) and not is_of_mxnet(type(scheduler)) \
            and hasattr(scheduler, "__dict__"):
        vars(scheduler).update(vars(optimizer.lr_scheduler))
        optimizer.lr_scheduler = scheduler
    vars(mine).update(vars(optimizer), param_dict=mine.param_dict)
    for updater, of_updater in zip(updaters, copies):
        updater.states, updater.states_synced = of_updater, dict.fromkeys(of_updater, False)


@contextmanager
def one_error(fname: str) -> Iterator[None]:
    """Converts any error in a file's contents to a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and fname in str(error):
            raise
        raise ValueError(f"{fname} does not fit: {error}") from error


def _fitting(fname: str, states: Dict[Any, Any], optimizer: Optimizer,
             weights: Mapping[Any, Tuple[str, Any]]) -> Dict[Any, Any]:
    """Returns states for these weights. That of a float32 weight becomes one of a 16-bit weight,
    with a master weight; any other layout than that of a new state is refused. The optimizer gets
    the types of the weights."""
    copied = copy.deepcopy(optimizer)  # it may change in `create_state`
    fitting = {}
    for i, state in states.items():
        if i not in weights:
            raise ValueError(f"{fname} holds a state of parameter number {i}; here are "
                             f"{counted(len(weights), 'parameter')}")
        name, weight = weights[i]
        with warnings.catch_warnings():  # MXNet warns about float16 weights without master weights
            warnings.simplefilter("ignore")
            new = copied.create_state_multi_precision(i, weight)
        master = master_in(copied, new) if is_16bit(weight.dtype) else None
        if master is not None and _layout(state) == _layout(copied.create_state(i, master)):
            state = tuple(part if part is master else state for part in new)
        if _layout(state) != _layout(new):
            raise ValueError(f"{fname} does not fit {name}, {weight.shape}, "
                             f"{dtype_name(weight.dtype)}: its state should be {_layout(new)}. "
                             f"Received: {_layout(state)}. Is it a file of a network of other "
                             "types or sizes? Its parameters may load without its states")
        fitting[i] = state
    if hasattr(copied, "weight_types"):
        optimizer.weight_types = copied.weight_types
    return fitting


def renumber(numbered: Dict[Any, Any], trained: Sequence[Tuple[int, str]],
             devices: int) -> Dict[Any, Any]:
    """Renumbers the values in a Module's file for the current number of devices.

    A Module's state of parameter i on device k of n has the number i * n + k. All devices have the
    same state. If a kvstore updates, there is one for each parameter, by name.

    Args:
        numbered: the states, or counts, by number or name.
        trained: the index and name of each parameter with a state.
        devices: the number of devices; 0 if a kvstore updates.
    """
    before = max(len(numbered) // max(len(trained), 1), 1)  # the number of devices in the file
    if set(numbered) == {name for _, name in trained}:
        values = {i: numbered[name] for i, name in trained}
    elif before != devices and set(numbered) == {i * before + k for i, _ in trained
                                                 for k in range(before)}:
        values = {i: numbered[i * before] for i, _ in trained}
    else:
        return numbered
    if not devices:
        return {name: values[i] for i, name in trained}
    return {i * devices + k: copy.deepcopy(values[i]) for i, _ in trained for k in range(devices)}


def _carry_counts(optimizer: Optimizer, devices: Sequence[int],
                  renumbered: Callable[[Dict[Any, int]], Dict[Any, int]]) -> None:
    """Copies the counts of updates to each device. MXNet counts for each device; on a device that
    the file lacks, Adam's step would restart at 0."""
    saved = optimizer._all_index_update_counts
    together = {index: count for counts in saved.values() for index, count in counts.items()}
    optimizer._all_index_update_counts = {
        device: renumbered({**together, **saved.get(device, {})}) for device in {0, *devices}}
    optimizer._index_update_count = optimizer._all_index_update_counts[0]


def _check_order(saved: Sequence[str], names: Sequence[str]) -> None:
    """Refuses a file with the same number of parameters in another order."""
    if saved and len(saved) == len(names) and (max(map(len, saved)) > _LONGEST_NAME
                                     or order_of(saved) != order_of(names)):
        raise ValueError(f"it holds the parameters in another order, {', '.join(saved[:3]):.200}, "
                         f"than here, {', '.join(names[:3])}: names sort dense10 before dense9. "
                         "Give the network a prefix, when saving, too")


def _layout(state: object) -> object:
    if isinstance(state, mx.nd.NDArray):
        stype = () if state.stype == "default" else (state.stype,)
        return (state.shape, dtype_name(state.dtype), *stype)
    if isinstance(state, (tuple, list)):
        return tuple(map(_layout, state))
    return type(state).__name__
