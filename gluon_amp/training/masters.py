"""Master weights of a Trainer: read, written, and in files of parameters."""
from typing import Any, Dict, List, Sequence, Union

from .._mxnet import mx
from ..annotations import Parameter
from ..cpu.arrays import TYPES_16BIT, is_16bit, narrow, sync_master, to_float32
from .optimizer import has_masters, master_in

Trainer = Any  # trainer.py imports this module


def check(trainer: Trainer, parameter: Parameter) -> None:
    """Refuses a 16-bit parameter whose master weights the Trainer does not have."""
    optimizer = trainer._optimizer
    reason = ""
    if trainer._update_on_kvstore or trainer._kvstore_params["update_on_kvstore"]:
        reason = "servers update it"
    elif not optimizer.multi_precision:
        reason = "its optimizer has multi_precision=False"
    elif not has_masters(optimizer):
        reason = f"{type(optimizer).__name__} manages them itself, and does not show them"
    if reason:
        raise ValueError(f"{parameter.name} has no master weights here, because {reason}")


def live(trainer: Trainer, parameter: Parameter, create: bool = False) -> List[Any]:
    """Returns the arrays of a parameter's master weights on each device, which updates write.

    The weights themselves are returned if they are float32, and, without `create` or if they are
    not trained, if no step has created master weights yet.

    Raises:
        ValueError: the Trainer does not have the parameter or its master weights.
    """
    name = getattr(parameter, "name", None)
    number = trainer._param2idx.get(name)
    if number is None or trainer._params[number] is not parameter:
        raise ValueError(f"this Trainer does not have the parameter {name or repr(parameter)}")
    weights: List[Any] = parameter.list_data()
    if not is_16bit(weights[0].dtype) \
            or parameter.grad_req == "null" and not _was_trained(trainer, number):
        return weights
    check(trainer, parameter)
    masters = []
    for updater, weight in zip(trainer._updaters, weights):
        if create and number not in updater.states:
            updater.states[number] = \
                trainer._optimizer.create_state_multi_precision(number, weight)
        elif number in updater.states and not updater.states_synced[number]:  # of a file
            updater.states[number] = updater.sync_state_context(updater.states[number], weight.ctx)
        updater.states_synced[number] = True
        master = master_in(trainer._optimizer, updater.states.get(number))
        masters.append(weight if master is None else master)
    return masters


def _was_trained(trainer: Trainer, number: int) -> bool:
    """Whether steps have created master weights of a parameter: a float32 one has none."""
    types = getattr(trainer._optimizer, "weight_types", {})
    return types.get(number) in TYPES_16BIT and trainer._optimizer.multi_precision \
        and all(number in updater.states for updater in trainer._updaters)


def read(trainer: Trainer, parameter: Parameter) -> Any:
    """Returns a float32 copy of a parameter's master weights on its first device."""
    master, weight = live(trainer, parameter)[0], parameter.list_data()[0]
    if master is weight:
        copied = to_float32(weight) if is_16bit(weight.dtype) else weight.copy()
    else:
        copied = master.copy()
        sync_master(copied, weight)  # as the next step does after a write to the weight
    classic = copied.as_nd_ndarray()
    return classic.as_np_ndarray() if isinstance(weight, mx.np.ndarray) else classic


def write(trainer: Trainer, parameter: Parameter, value: Any) -> None:
    """Sets a parameter's master weights on all devices, and its weights to their rounded values."""
    weights, masters = parameter.list_data(), live(trainer, parameter, create=True)
    classic = value.as_nd_ndarray()
    if masters[0] is weights[0]:
        is_np = isinstance(weights[0], mx.np.ndarray)
        parameter.set_data(classic.as_np_ndarray() if is_np else classic)
        return
    for master, weight in zip(masters, weights):
        classic.copyto(master.as_nd_ndarray())
        narrow(master, weight)


def trainers_of(masters: Union[Trainer, Sequence[Trainer], None],
                net: mx.gluon.Block) -> Dict[Any, Trainer]:
    """Returns the Trainer of each parameter, of one or several Trainers in `masters=`."""
    if masters is None:
        return {}
    trainers = list(masters) if isinstance(masters, (list, tuple)) else [masters]
    wrong = [type(trainer).__name__ for trainer in trainers if not hasattr(trainer, "master")]
    if wrong:
        raise TypeError("masters takes a gluon_amp.Trainer, or a list of these. Received: "
                        f"{', '.join(wrong)}")
    by_parameter = {parameter: trainer for trainer in trainers for parameter in trainer._params}
    if by_parameter and not by_parameter.keys() & set(net.collect_params().values()):
        raise ValueError("masters takes the Trainer of this network. Received: one that trains "
                         "none of its parameters")
    return by_parameter
