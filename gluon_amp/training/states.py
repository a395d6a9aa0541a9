"""Files of optimizer states: what one holds, and whether it fits.

MXNet's format: a pickle of {index: state}, alone or beside the optimizer.
"""
import pickle
import re
import warnings
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from .._mxnet import mx
from ..cpu.arrays import dtype_name


def read_states(fname: str) -> Tuple[Dict[Any, Any], Any]:
    """A file's states, and its optimizer or None."""
    with open(fname, "rb") as file:
        data = file.read()
    try:
        loaded = pickle.loads(data)
    except Exception as error:  # foreign bytes may raise anything when they are unpickled
        raise ValueError(f"{fname} holds no optimizer states, or is cut short: {error!r}") \
            from error
    states, optimizer = loaded if isinstance(loaded, tuple) and len(loaded) == 2 else (loaded, None)
    if not isinstance(states, dict) \
            or not isinstance(optimizer, (mx.optimizer.Optimizer, type(None))):
        raise ValueError(f"{fname} holds no optimizer states. Received: {type(loaded).__name__}")
    return states, optimizer


def check_states(fname: str, states: Dict[Any, Any], maker: Any, mine: Any,
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


def check_order(fname: str, maker: Any, names: Sequence[str]) -> None:
    """Refuses a file whose parameters were numbered in another order."""
    saved = getattr(maker, "trainer_state", {}).get("names", ())
    if len(saved) == len(names) and _order(saved) != _order(names):
        raise ValueError(f"{fname} holds the parameters in another order, {', '.join(saved[:3])}, "
                         f"than here, {', '.join(names[:3])}: names sort dense10 before dense9. "
                         "Give the network a prefix, when saving, too")


def _order(names: Sequence[str]) -> List[int]:
    """The names' numbers in the order in which people count."""
    def natural(i: int) -> List[Any]:
        return [(int(part), "") if part.isdigit() else (0, part)
                for part in re.split(r"(\d+)", names[i])]
    return sorted(range(len(names)), key=natural)


def _layout(state: Any) -> Any:
    if isinstance(state, mx.nd.NDArray):
        return state.shape, dtype_name(state.dtype)
    if isinstance(state, (tuple, list)):
        return tuple(map(_layout, state))
    return type(state).__name__
