"""Files of optimizer states: what one holds, and whether it fits.

MXNet's format: a pickle of {index: state}, alone or beside the optimizer.
"""
import pickle
import re
from typing import Any, Dict, List, Sequence, Tuple

from ._mxnet import mx
from .halves import dtype_name


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
                 parameters: Sequence[Any]) -> None:
    """Refuses states that are not as their optimizer makes them for these parameters.

    Args:
        maker: the file's optimizer.
        mine: the Trainer's.
    """
    names = getattr(maker, "trainer_state", {}).get("names", ())
    if len(names) == len(parameters) and _order(names) != _order([p.name for p in parameters]):
        raise ValueError(f"{fname} holds the parameters in another order, {', '.join(names[:3])}, "
                         f"than this Trainer, {', '.join(p.name for p in parameters[:3])}: names "
                         "sort dense10 before dense9. Give the network a prefix, when saving, too")
    if type(maker).__name__ != type(mine).__name__:
        raise ValueError(f"{fname} holds the states of {type(maker).__name__}; this Trainer has "
                         f"{type(mine).__name__}")
    for i, state in states.items():
        if i not in range(len(parameters)):
            raise ValueError(f"{fname} holds a state of parameter number {i}; this Trainer has "
                             f"{len(parameters)} parameters")
        parameter = parameters[i]
        if parameter._data is None:
            continue  # not initialized yet: of unknown shape
        expected = _layout(maker.create_state_multi_precision(i, parameter.list_data()[0]))
        if _layout(state) != expected:
            raise ValueError(f"{fname} does not fit {parameter.name}, {parameter.shape}, "
                             f"{dtype_name(parameter.dtype)}: its state should be {expected}. "
                             f"Received: {_layout(state)}")


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
