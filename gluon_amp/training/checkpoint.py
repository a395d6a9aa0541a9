"""Files of optimizer states: what one holds, and whether it fits.

MXNet's format: a pickle of {index: state}, alone or beside the optimizer. Behind it, where MXNet
does not read any more, stands a checksum. A pickle may name any function to be called, so only
those names are looked up that such states need.
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

from .._mxnet import mx, np
from .._numpy import CORE
from ..annotations import Optimizer, Updater
from ..checks import order_of
from ..cpu.arrays import dtype_name
from ..files import replace_file
from .step import Step

_SEAL = b"\ngluon_amp sha256 "  # then 64 digits
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
    """Looks up nothing but what states of optimizers hold.

    Args:
        mine: classes of the user's own that they may hold, by module and name.
    """

    def __init__(self, file: BinaryIO, mine: Mapping[Tuple[str, str], Any]) -> None:
        super().__init__(file)
        self.mine = mine

    def find_class(self, module: str, name: str) -> Any:
        # Files of numpy 1 name numpy.core, those of numpy 2 numpy._core: both are read with both.
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
        """Writes a file that is whole or not there, with a checksum.

        Args:
            write: writes the optimizer and its states to a path, in MXNet's format.
            others: what else is saved with the optimizer.
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
        """Takes over the state of steps that was saved with an optimizer, if any was."""
        self._step.load(getattr(optimizer, "trainer_state", {}))


def give_states(updater: Updater, states: Dict[Any, Any]) -> None:
    """Gives an updater of MXNet's these states, on any device."""
    updater.states, updater.states_synced = states, dict.fromkeys(states, False)


def read_states(fname: str, mine: Optimizer) -> Tuple[Dict[Any, Any], Any]:
    """A file's states, and its optimizer or None.

    Args:
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
            raise ValueError("it goes on behind its end")
    except Exception as error:  # foreign bytes may raise anything when they are unpickled
        raise ValueError(f"{wrong}: {str(error) or repr(error)}") from error
    states, optimizer = loaded if isinstance(loaded, tuple) and len(loaded) == 2 else (loaded, None)
    if not isinstance(states, dict) \
            or not isinstance(optimizer, (mx.optimizer.Optimizer, type(None))):
        raise ValueError(f"{wrong}. Received: {type(loaded).__name__}")
    return states, optimizer


def _own_classes(optimizer: Optimizer) -> Dict[Tuple[str, str], Any]:
    """Classes of the optimizer and its scheduler, by module and name. The last one of a name is
    the user's own: ours in front of it goes by its name, too."""
    return {(cls.__module__, cls.__qualname__): cls
            for made in (optimizer, optimizer.lr_scheduler) for cls in type(made).__mro__}


@contextmanager
def one_error(fname: str) -> Iterator[None]:
    """Whatever goes wrong with a file's contents is a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and fname in str(error):
            raise
        raise ValueError(f"{fname} does not fit: {error}") from error


def check_states(fname: str, states: Dict[Any, Any], maker: Optimizer, mine: Optimizer,
                 weights: Mapping[Any, Tuple[str, Any]]) -> None:
    """Refuses states that are not as their optimizer makes them for these weights.

    Args:
        maker: the file's optimizer.
        mine: the one that is to go on.
        weights: for each index a parameter's name and its array, or None where it has none yet.
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
                             f"{len(weights)} parameters")
        name, weight = weights[i]
        if weight is None:
            continue
        with warnings.catch_warnings():  # MXNet's, of float16 weights without masters
            warnings.simplefilter("ignore")
            expected = _layout(maker.create_state_multi_precision(i, weight))
        if _layout(state) != expected:
            raise ValueError(f"{fname} does not fit {name}, {weight.shape}, "
                             f"{dtype_name(weight.dtype)}: its state should be {expected}. "
                             f"Received: {_layout(state)}. Is it a file of a network of other "
                             "types or sizes? Its parameters may load without its states")


def renumber(numbered: Dict[Any, Any], trained: Sequence[Tuple[int, str]],
             devices: int) -> Dict[Any, Any]:
    """What a Module's file has for each state, numbered as the states are here.

    A Module's state of parameter i on device k of n is number i * n + k. All devices have the
    same. Where a kvstore updates there is one for each parameter, by its name.

    Args:
        numbered: the states, or what is counted of each.
        trained: number and name of each parameter that has a state.
        devices: how many are here; 0 where a kvstore updates.
    """
    before = max(len(numbered) // max(len(trained), 1), 1)  # devices, when it was saved
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
    """Gives each device what an optimizer has counted: how often it has updated each parameter.
    MXNet counts for each device; one that the file lacks would begin at 0, and Adam with it.

    Args:
        devices: their numbers.
        numbered: gives the counts the numbers that states have here.
    """
    saved = getattr(maker, "_all_index_update_counts", {0: maker._index_update_count})
    together = {index: count for counts in saved.values() for index, count in counts.items()}
    maker._all_index_update_counts = {
        device: numbered({**together, **saved.get(device, {})}) for device in {0, *devices}}
    maker._index_update_count = maker._all_index_update_counts[0]


def check_order(fname: str, maker: Optimizer, names: Sequence[str]) -> None:
    """Refuses a file whose parameters were numbered in another order."""
    saved = getattr(maker, "trainer_state", {}).get("names", ())
    if len(saved) == len(names) and order_of(saved) != order_of(names):
        raise ValueError(f"{fname} holds the parameters in another order, {', '.join(saved[:3])}, "
                         f"than here, {', '.join(names[:3])}: names sort dense10 before dense9. "
                         "Give the network a prefix, when saving, too")


def histories_in(maker: Optimizer, networks: int) -> List[str]:
    """What so many networks remember of their float8 tensors. A file of networks that have none
    says nothing of it: then they begin anew."""
    found = getattr(maker, "trainer_state", {}).get("scales") or [""] * networks
    if len(found) != networks:
        raise ValueError(f"it holds float8 histories of {len(found)} networks; here are {networks} "
                         "(scaling='delayed'). Convert the networks before, as when it was saved")
    return list(found)


def _layout(state: object) -> object:
    if isinstance(state, mx.nd.NDArray):
        return state.shape, dtype_name(state.dtype)
    if isinstance(state, (tuple, list)):
        return tuple(map(_layout, state))
    return type(state).__name__
