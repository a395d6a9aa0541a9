"""Files of optimizer states: reading, writing and validation.

The format is MXNet's: a pickle of {index: state}, alone or with the optimizer. A checksum follows,
which MXNet does not read. unpickle.py reads it, and check_optimizer.py checks it.
"""
import copy
import hashlib
import warnings
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from .._mxnet import message, mx, np
from ..annotations import Array, Optimizer, Updater
from ..checks import counted, order_of
from ..cpu.arrays import dtype_name, is_16bit
from ..files import replace_file
from .check_optimizer import check_settings
from .optimizer import master_in, with_masters
from .step import Step
from .unpickle import load

_SEAL = b"\ngluon_amp sha256 "  # followed by 64 digits


def save(fname: str, step: Step, optimizer: Optimizer, write: Callable[[str], None],
         **others: Any) -> None:
    """Writes a file of optimizer states with a checksum, atomically.

    Args:
        fname: the path of the file.
        step: the step, whose state is saved with the optimizer.
        optimizer: the optimizer.
        write: writes the optimizer and its states to a path, in MXNet's format.
        others: further values that are saved with the optimizer.
    """
    mx.nd.waitall()  # MXNet writes the shapes of sparse arrays before it waits for their values
    optimizer.trainer_state = {**others, **step.state()}

    def write_sealed(path: str) -> None:
        write(path)
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        with open(path, "ab") as file:
            file.write(_SEAL + digest.encode())
    replace_file(fname, write_sealed)


def step_state(optimizer: Optional[Optimizer]) -> Dict[str, Any]:
    """Returns what `save` stored with an optimizer; empty in a file of MXNet."""
    return getattr(optimizer, "trainer_state", {})


def give_states(updater: Updater, states: Dict[Any, Any]) -> None:
    """Sets the states of an updater of MXNet, on any device."""
    updater.states, updater.states_synced = states, dict.fromkeys(states, False)


def read_states(fname: str, mine: Optimizer) -> Tuple[Dict[Any, Any], Any]:
    """Reads the states in a file, and its optimizer or None.

    Args:
        fname: the path of the file.
        mine: the optimizer in use.
    """
    with open(fname, "rb") as file:
        data = file.read()
    wrong = f"{fname} holds no optimizer states, or is cut short or damaged"
    end = len(data) - len(_SEAL) - 64
    sealed = data[max(end, 0):].startswith(_SEAL)
    if sealed and hashlib.sha256(data[:end]).hexdigest().encode() != data[-64:]:
        raise ValueError(f"{wrong}: its checksum does not fit")
    try:
        loaded = load(data[:end] if sealed else data, _own_classes(mine))
    except Exception as error:  # damaged data may raise any error
        if "np shape semantics" in str(error):
            raise ValueError(f"{fname} was not written in the present mode of npx.set_np(), which "
                             f"MXNet requires: {message(error)}") from error
        raise ValueError(f"{wrong}: {str(error) or repr(error)}") from error
    states, optimizer = loaded if isinstance(loaded, tuple) and len(loaded) == 2 else (loaded, None)
    if not isinstance(states, dict) \
            or not isinstance(optimizer, (mx.optimizer.Optimizer, type(None))):
        raise ValueError(f"{wrong}. Received: {type(loaded).__name__}")
    if optimizer is not None:
        if type(optimizer).__name__ != type(mine).__name__:
            raise ValueError(f"{fname} holds the states of {type(optimizer).__name__}, not of "
                             f"{type(mine).__name__}")
        with one_error(fname):
            check_settings(optimizer, mine)
        # What belongs to this process: with 0, MXNet's Updater may loop forever.
        optimizer.aggregate_num = mine.aggregate_num
        optimizer.multi_precision = optimizer.multi_precision or mine.multi_precision
        if hasattr(optimizer, "weight_types"):  # set in the next step
            optimizer.weight_types = {}
    return states, optimizer


def _own_classes(optimizer: Optimizer) -> Dict[Tuple[str, str], Any]:
    """Returns the user's classes of the optimizer and its scheduler, by module and name. Our
    subclass has the name of the user's class; the latter comes last and wins."""
    return {(cls.__module__, cls.__qualname__): cls
            for made in (optimizer, optimizer.lr_scheduler) for cls in type(made).__mro__
            if cls.__module__.partition(".")[0] not in ("builtins", "mxnet", "gluon_amp")}


@contextmanager
def one_error(fname: str) -> Iterator[None]:
    """Converts any error in a file's contents to a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and fname in str(error):
            raise
        raise ValueError(f"{fname} does not fit: {error}") from error


def fit_states(fname: str, states: Dict[Any, Any], maker: Optimizer,
               weights: Mapping[Any, Tuple[str, Any]]) -> Dict[Any, Any]:
    """Returns states for these weights. That of a float32 weight becomes one of a 16-bit weight,
    with a master weight; any other layout than that of a new state is refused.

    Args:
        fname: the path of the file.
        states: its states.
        maker: its optimizer.
        weights: for each index a parameter's name, and its array, or the Parameter if it has none
            yet.
    """
    made = with_masters(copy.deepcopy(maker))  # it may change in `create_state`
    fitting = {}
    for i, state in states.items():
        if i not in weights:
            raise ValueError(f"{fname} holds a state of parameter number {i}; here are "
                             f"{counted(len(weights), 'parameter')}")
        name, weight = weights[i]
        if isinstance(weight, mx.gluon.Parameter):
            weight = _stand_in(weight, state)
        with warnings.catch_warnings():  # MXNet warns about float16 weights without master weights
            warnings.simplefilter("ignore")
            new = made.create_state_multi_precision(i, weight)
        master = master_in(made, new) if is_16bit(weight.dtype) else None
        if master is not None and _layout(state) == _layout(made.create_state(i, master)):
            state = tuple(part if part is master else state for part in new)
        if _layout(state) != _layout(new):
            raise ValueError(f"{fname} does not fit {name}, {weight.shape}, "
                             f"{dtype_name(weight.dtype)}: its state should be {_layout(new)}. "
                             f"Received: {_layout(state)}. Is it a file of a network of other "
                             "types or sizes? Its parameters may load without its states")
        fitting[i] = state
    return fitting


def _stand_in(parameter: "mx.gluon.Parameter", state: object) -> Array:
    """Returns an array for a parameter whose shape is not complete yet: zeros in the shape of the
    largest array of its state."""
    known = parameter.shape
    shapes = [array.shape for array in _arrays_in(state) if known is None or
              len(array.shape) == len(known)
              and all(n in (0, -1, here) for n, here in zip(known, array.shape))]
    shape = max(shapes or [(1,) * len(known or (1,))], key=np.prod)
    return mx.nd.zeros(shape, stype=parameter._stype).astype(parameter.dtype)


def _arrays_in(state: object) -> Iterator[Array]:
    if isinstance(state, mx.nd.NDArray):
        yield state
    elif isinstance(state, (tuple, list)):
        for one in state:
            yield from _arrays_in(one)


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
        own = {i: numbered[name] for i, name in trained}
    elif before != devices and set(numbered) == {i * before + k for i, _ in trained
                                                 for k in range(before)}:
        own = {i: numbered[i * before] for i, _ in trained}
    else:
        return numbered
    if not devices:
        return {name: own[i] for i, name in trained}
    return {i * devices + k: copy.deepcopy(own[i]) for i, _ in trained for k in range(devices)}


def carry_counts(maker: Optimizer, devices: Sequence[int],
                 numbered: Callable[[Dict[Any, int]], Dict[Any, int]] = dict) -> None:
    """Copies the counts of updates to each device. MXNet counts for each device; on a device that
    the file lacks, Adam's step would restart at 0.

    Args:
        maker: the file's optimizer.
        devices: the device ids.
        numbered: renumbers the counts.
    """
    saved = getattr(maker, "_all_index_update_counts", {0: maker._index_update_count})
    together = {index: count for counts in saved.values() for index, count in counts.items()}
    maker._all_index_update_counts = {
        device: numbered({**together, **saved.get(device, {})}) for device in {0, *devices}}
    maker._index_update_count = maker._all_index_update_counts[0]


def check_order(fname: str, maker: Optimizer, names: Sequence[str]) -> None:
    """Refuses a file with another order of parameters."""
    saved = step_state(maker).get("names", ())
    if len(saved) == len(names) and order_of(saved) != order_of(names):
        raise ValueError(f"{fname} holds the parameters in another order, {', '.join(saved[:3])}, "
                         f"than here, {', '.join(names[:3])}: names sort dense10 before dense9. "
                         "Give the network a prefix, when saving, too")


def histories_in(maker: Optimizer, networks: int) -> List[str]:
    """Returns the float8 histories of each network in a file, or empty ones if it has none."""
    found = step_state(maker).get("scales") or [""] * networks
    if len(found) != networks:
        raise ValueError(f"it holds float8 histories of {counted(len(found), 'network')}; here: "
                         f"{networks} (scaling='delayed'). Convert the networks before, as when it "
                         "was saved")
    return list(found)


def _layout(state: object) -> object:
    if isinstance(state, mx.nd.NDArray):
        stype = () if state.stype == "default" else (state.stype,)
        return (state.shape, dtype_name(state.dtype), *stype)
    if isinstance(state, (tuple, list)):
        return tuple(map(_layout, state))
    return type(state).__name__
