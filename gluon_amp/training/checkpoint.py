"""Files of optimizer states: reading, writing and validation.

The format is MXNet's: a pickle of {index: state}, alone or with the optimizer. A checksum follows,
which MXNet does not read. A pickle may call any function, so only the names that optimizer states
need are allowed.
"""
import copy
import hashlib
import io
import pickle
import re
import sys
import warnings
from contextlib import contextmanager
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

from .._mxnet import message, mx, np
from .._numpy import CORE
from ..annotations import Optimizer, Updater
from ..checks import counted, order_of
from ..cpu.arrays import dtype_name
from ..files import replace_file
from .step import Step

_SEAL = b"\ngluon_amp sha256 "  # followed by 64 digits
_MOVED = {"gluon_amp.optimizer": "gluon_amp.training.optimizer",  # in files of 0.1.0
          "gluon_amp.adamw": "gluon_amp.training.adamw"}
_KINDS = (mx.optimizer.Optimizer, mx.lr_scheduler.LRScheduler, mx.nd.NDArray, np.generic)
_ATTRIBUTES = ("lr", "lr_scheduler", "wd", "rescale_grad", "num_update", "begin_num_update",
               "_index_update_count", "clip_gradient", "multi_precision", "lr_mult", "wd_mult")
_NAMES = frozenset(f"""
    gluon_amp.training.optimizer._revive gluon_amp.training.optimizer._Decimal
    builtins.set builtins.frozenset builtins.bytearray builtins.bytes builtins.complex
    builtins.range builtins.slice builtins.object collections.OrderedDict collections.defaultdict
    numpy.ndarray numpy.dtype {CORE}.multiarray._reconstruct {CORE}.multiarray.scalar
    {CORE}.numeric._frombuffer _codecs.encode
""".split())


class _Unpickler(pickle.Unpickler):
    """An unpickler that allows only the classes of optimizer states.

    Args:
        file: the file.
        mine: allowed classes of the user, by module and name.
    """

    def __init__(self, file: BinaryIO, mine: Mapping[Tuple[str, str], Any]) -> None:
        super().__init__(file)
        self.mine = mine

    def find_class(self, module: str, name: str) -> Any:
        # Files of numpy 1 have numpy.core and those of numpy 2 numpy._core; each reads both.
        module = re.sub(r"^numpy\._?core\b", CORE, _MOVED.get(module, module))
        if (module, name) in self.mine:
            return self.mine[module, name]
        # Nothing is imported for a file.
        found = getattr(sys.modules.get(module), name, None)
        known = module.split(".")[0] in ("mxnet", "numpy", "gluon_amp") \
            and isinstance(found, type) and issubclass(found, _KINDS)
        if not known and (f"{module}.{name}" not in _NAMES or found is None):
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which was not called. Valid: optimizers, schedulers "
                "and arrays of MXNet's, and the classes of the optimizer and scheduler in use")
        return found


class Checkpoint:
    """The files of optimizer states of a Trainer or a Module, with the state of its steps."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def save(self, fname: str, optimizer: Optimizer, write: Callable[[str], None],
             **others: Any) -> None:
        """Writes a file with a checksum, atomically.

        Args:
            fname: the path of the file.
            optimizer: the optimizer.
            write: writes the optimizer and its states to a path, in MXNet's format.
            others: further values that are saved with the optimizer.
        """
        optimizer.trainer_state = {**others, **self._step.state()}

        def write_sealed(path: str) -> None:
            write(path)
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()
            with open(path, "ab") as file:
                file.write(_SEAL + digest.encode())
        replace_file(fname, write_sealed)

    def load_step(self, optimizer: Optimizer) -> None:
        """Loads the state of steps that was saved with an optimizer, if any."""
        self._step.load(getattr(optimizer, "trainer_state", {}))


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
    stream = io.BytesIO(data[:end] if sealed else data)
    try:
        loaded = _Unpickler(stream, _own_classes(mine)).load()
        if stream.read(1):
            raise ValueError("it has data after its end")
    except Exception as error:  # unpickling foreign bytes may raise any error
        if "np shape semantics" in str(error):
            raise ValueError(f"{fname} was not written in the present mode of npx.set_np(), which "
                             f"MXNet requires: {message(error)}") from error
        raise ValueError(f"{wrong}: {str(error) or repr(error)}") from error
    states, optimizer = loaded if isinstance(loaded, tuple) and len(loaded) == 2 else (loaded, None)
    if not isinstance(states, dict) \
            or not isinstance(optimizer, (mx.optimizer.Optimizer, type(None))):
        raise ValueError(f"{wrong}. Received: {type(loaded).__name__}")
    return states, optimizer


def _own_classes(optimizer: Optimizer) -> Dict[Tuple[str, str], Any]:
    """Returns the classes of the optimizer and its scheduler, by module and name. Our subclass has
    the name of the user's class; the latter comes last and wins."""
    return {(cls.__module__, cls.__qualname__): cls
            for made in (optimizer, optimizer.lr_scheduler) for cls in type(made).__mro__}


@contextmanager
def one_error(fname: str) -> Iterator[None]:
    """Converts any error in a file's contents to a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and fname in str(error):
            raise
        raise ValueError(f"{fname} does not fit: {error}") from error


def check_states(fname: str, states: Dict[Any, Any], maker: Optimizer, mine: Optimizer,
                 weights: Mapping[Any, Tuple[str, Any]]) -> None:
    """Refuses states whose layout differs from that of new states for these weights.

    Args:
        fname: the path of the file.
        states: its states.
        maker: its optimizer.
        mine: the optimizer in use.
        weights: for each index a parameter's name and its array, or None if it has none yet.
    """
    if type(maker).__name__ != type(mine).__name__:
        raise ValueError(f"{fname} holds the states of {type(maker).__name__}, not of "
                         f"{type(mine).__name__}")
    missing = [name for name in _ATTRIBUTES if not hasattr(maker, name)]
    if missing:
        raise ValueError(f"{fname} holds an optimizer without {', '.join(missing)}")
    for i, state in states.items():
        if i not in weights:
            raise ValueError(f"{fname} holds a state of parameter number {i}; here are "
                             f"{counted(len(weights), 'parameter')}")
        name, weight = weights[i]
        if weight is None:
            continue
        with warnings.catch_warnings():  # MXNet warns about float16 weights without master weights
            warnings.simplefilter("ignore")
            expected = _layout(maker.create_state_multi_precision(i, weight))
        if _layout(state) != expected:
            raise ValueError(f"{fname} does not fit {name}, {weight.shape}, "
                             f"{dtype_name(weight.dtype)}: its state should be {expected}. "
                             f"Received: {_layout(state)}. Is it a file of a network of other "
                             "types or sizes? Its parameters may load without its states")


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
    saved = getattr(maker, "trainer_state", {}).get("names", ())
    if len(saved) == len(names) and order_of(saved) != order_of(names):
        raise ValueError(f"{fname} holds the parameters in another order, {', '.join(saved[:3])}, "
                         f"than here, {', '.join(names[:3])}: names sort dense10 before dense9. "
                         "Give the network a prefix, when saving, too")


def histories_in(maker: Optimizer, networks: int) -> List[str]:
    """Returns the float8 histories of each network in a file, or empty ones if it has none."""
    found = getattr(maker, "trainer_state", {}).get("scales") or [""] * networks
    if len(found) != networks:
        raise ValueError(f"it holds float8 histories of {counted(len(found), 'network')}; here: "
                         f"{networks} (scaling='delayed'). Convert the networks before, as when it "
                         "was saved")
    return list(found)


def _layout(state: object) -> object:
    if isinstance(state, mx.nd.NDArray):
        return state.shape, dtype_name(state.dtype)
    if isinstance(state, (tuple, list)):
        return tuple(map(_layout, state))
    return type(state).__name__
