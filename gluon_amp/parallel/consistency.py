"""Many workers begin alike, and can be asked whether they still are.

A digest stands for an array: 8 bytes, so that ranks compare whole networks by a few numbers.
"""
import hashlib
import logging
import os
import pickle
import struct
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from .._mxnet import mx, np
from ..checks import order_of
from ..cpu.arrays import dtype_name
from ..version import __version__
from .horovod import Horovod
from .store import kind_of, servers
from .sync import Reduction

log = logging.getLogger("gluon_amp")

Named = Tuple[str, Any]  # a name, and what it holds


_WORKERS_VARIABLES = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER",
                      "DMLC_NUM_SERVER")
# Not among an optimizer's other settings: these have names in words, or change no weight.
_NOT_AMONG_OTHERS = ("lr", "wd", "rescale_grad", "aggregate_num")


class RanksDifferError(RuntimeError):
    """Ranks that should hold the same do not."""


def make_store(kvstore: Any, compression: Any) -> Any:
    """What `kvstore=` takes, as MXNet takes it. What cannot work with many workers is refused
    here: once there is a store, its servers and the other workers would wait."""
    name = kind_of(kvstore)
    if "dist" not in name and "horovod" not in name:
        workers = os.environ.get("DMLC_NUM_WORKER", "1")
        if os.environ.get("DMLC_ROLE") == "worker" and workers != "1":
            log.warning("%s workers were launched, but kvstore=%r sums gradients of this one "
                        "alone: each trains a network of its own. kvstore='dist_sync' trains one",
                        workers, name)
        return kvstore
    if compression:
        raise ValueError(f"gradient compression leaves {name}'s workers waiting for each other "
                         "in MXNet 1.9.1: train in float16, which halves what is sent. Received: "
                         f"compression_params={compression!r}")
    if not isinstance(kvstore, str):
        return kvstore
    if name == "horovod":
        return Horovod()  # which MXNet leaves out where there is one device
    if not all(variable in os.environ for variable in _WORKERS_VARIABLES):
        raise ValueError(f"kvstore={name!r} needs a scheduler and servers: start the program as "
                         "gluon-amp launch -n 2 python ... Or use kvstore='device', for one "
                         "process")
    return name


def updates_on_ranks(kvstore: Any, dense: bool) -> bool:
    """Whether the ranks update, rather than MXNet's servers, where the user says neither: so that
    ranks begin alike and can be compared, with or without a loss scale.

    Args:
        dense: whether no parameter and no gradient is row_sparse.
    """
    name = kind_of(kvstore)
    return "dist" in name and "async" not in name and dense \
        and not int(os.environ.get("MXNET_UPDATE_ON_KVSTORE", "0"))


def shared_store(kvstore: Any) -> Any:
    """The store of MXNet's servers, which is the same for all Trainers of a process. Anything else
    as it is."""
    native = isinstance(kvstore, (str, mx.kv.KVStore))
    return servers.store(kvstore) if native and "dist" in kind_of(kvstore) else kvstore


def check_same_network(reduction: Reduction, arrays: Iterable[Tuple[str, Any, bool]]) -> None:
    """Refuses to begin where ranks have other parameters, or other versions of this package:
    the store would wait for ever for those that only some have.

    Args:
        arrays: a parameter's name, its array, and whether it is trained.
    """
    named = list(arrays)
    layouts = [f"{a.shape} {dtype_name(a.dtype)} {'trained' if trained else 'frozen'}"
               for _, a, trained in named]
    # Names may differ, since MXNet counts blocks, but must not sort differently: 10 before 9.
    order = order_of([name for name, _, _ in named])
    everything = _digest_of_bytes(repr([__version__, *layouts, order]).encode())
    if _alike(reduction.gather(everything)):
        return
    versions = reduction.gather(__version__.encode()[:16].ljust(16))
    if not _alike(versions):
        raise RanksDifferError("ranks have different versions of gluon_amp: " + ", ".join(
            v.decode().strip() for v in versions))
    counts = [int(c) for c in reduction.gather(b"%16d" % len(named))]
    if not _alike(counts):
        raise RanksDifferError("ranks train different networks. Parameters of rank 0, 1, ...: "
                               + ", ".join(map(str, counts)))
    digests = [_digest_of_bytes(text.encode()) for text in layouts]
    if _alike(reduction.gather(b"".join(digests))):
        raise RanksDifferError(
            "ranks have their parameters in different orders. Here: "
            f"{', '.join(name for name, _, _ in named[:4])}, ... MXNet sorts them by names, in "
            "which it counts the blocks that a process has made: make as many of them on all "
            "ranks before this network, or give the network a prefix")
    first, ranks = _first_difference(reduction, digests)
    raise RanksDifferError(f"ranks train different networks: {named[first][0]}, here "
                           f"{layouts[first]}, has another shape or type on {ranks} than on rank "
                           "0, or is frozen on some of them only")


def begin_alike(reduction: Reduction, arrays: Sequence[Tuple[Any, str, List[Any]]],
                known: bool) -> bool:
    """Gives rank 0's arrays to all ranks.

    Args:
        arrays: a key in the store, a name, and the array on each device.
        known: whether MXNet has told its store of these keys.

    Returns:
        whether any rank had other ones.
    """
    before = digest([(name, on_devices[0]) for _, name, on_devices in arrays])
    reduction.take_over([(key, on_devices) for key, _, on_devices in arrays], known)
    after = digest([(name, on_devices[0]) for _, name, on_devices in arrays])
    return reduction.any(before != after)


def agree_on_scale(reduction: Reduction, loss_scale: Any) -> None:
    """Gives rank 0's dynamic loss scale to all ranks; refuses other kinds beside it."""
    if loss_scale is None:
        kind, state = "no loss scale", {}
    elif hasattr(loss_scale, "state_dict"):
        kind, state = "a dynamic loss scale", loss_scale.state_dict()
    else:
        kind, state = f"the loss scale {loss_scale.scale:g}", {}
    kinds = [k.decode().strip() for k in reduction.gather(kind.encode()[:40].ljust(40))]
    if not _alike(kinds):
        raise RanksDifferError("ranks have different loss scales. Rank 0, 1, ...: "
                               + ", ".join(kinds))
    if state:
        packed = struct.pack("!dq?", state["scale"], state["finite_steps"], state["settled"])
        scale, finite_steps, settled = struct.unpack("!dq?", reduction.gather(packed)[0])
        loss_scale.load_state_dict({"scale": scale, "finite_steps": finite_steps,
                                    "settled": settled})


def compare(reduction: Reduction, held: Sequence[Named]) -> None:
    """Raises where ranks do not hold the same, and names the first thing that differs.

    Args:
        held: names, and arrays or other things that can be pickled, alike on all ranks.
    """
    digests = [digest([one]) for one in held]
    if _alike(reduction.gather(_digest_of_bytes(b"".join(digests)))):
        return
    counts = [int(c) for c in reduction.gather(b"%16d" % len(held))]
    if not _alike(counts):
        raise RanksDifferError("ranks have different numbers of parameters and states. Rank 0, 1, "
                               f"...: {', '.join(map(str, counts))}")
    first, ranks = _first_difference(reduction, digests)
    raise RanksDifferError(f"{held[first][0]} is not the same on {ranks} as on rank 0. Has a rank "
                           "changed it by itself, or loaded another file?")


def average_statistics(trainer: Any) -> None:
    """Gives all ranks, and all devices of each, the mean of the batch norms' moving averages.

    Each rank's averages are of the data that it has seen, and rank 0's are what it saves. All
    ranks have to call this, such as before rank 0 saves or all validate.

    Args:
        trainer: a Trainer, which was given the batch norms' parameters, or a Module.
    """
    if not hasattr(trainer, "_average_statistics"):
        raise TypeError("average_statistics takes a gluon_amp Trainer or Module. "
                        f"Received: {type(trainer).__module__}.{type(trainer).__name__}")
    trainer._average_statistics()


def digest(held: Iterable[Named]) -> bytes:
    """8 bytes that differ where arrays or other things differ."""
    state = hashlib.blake2b(digest_size=8)
    for _, value in held:
        _add(state, value)
    return state.digest()


def settings_of(optimizer: Any) -> List[Named]:
    """An optimizer's kind and its numbers, in five entries whatever its kind."""
    others = {name: float(value) for name, value in vars(optimizer).items()
              if isinstance(value, (int, float)) and name not in _NOT_AMONG_OTHERS}
    return [("the optimizer", type(optimizer).__name__),
            ("the learning rate", float(optimizer.learning_rate)),
            ("the weight decay", float(optimizer.wd)),
            ("the gradients' factor, one over the batch size,", float(optimizer.rescale_grad)),
            ("one of the optimizer's settings", sorted(others.items()))]


def states_of(updater: Any, names: Dict[int, str]) -> List[Named]:
    """What an optimizer holds for each parameter: masters, momenta."""
    return [(f"the optimizer's state of {names.get(i, i)}", updater.states[i])
            for i in sorted(updater.states)]


def _add(state: Any, value: Any) -> None:
    if isinstance(value, mx.nd.NDArray):
        state.update(np.ascontiguousarray(value.asnumpy()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            _add(state, one)
    else:
        state.update(pickle.dumps(value, 4))


def _digest_of_bytes(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _alike(values: Sequence[Any]) -> bool:
    return all(v == values[0] for v in values)


def _first_difference(reduction: Reduction, digests: List[bytes]) -> Tuple[int, str]:
    """The number of the first digest that is not rank 0's everywhere, and on which ranks."""
    everyones = [[row[i:i + 8] for i in range(0, len(row), 8)]
                 for row in reduction.gather(b"".join(digests))]
    first = next(i for i in range(len(digests)) if not _alike([row[i] for row in everyones]))
    ranks = [str(rank) for rank, row in enumerate(everyones) if row[first] != everyones[0][first]]
    return first, f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"
