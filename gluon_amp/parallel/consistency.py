"""Broadcasts rank 0's parameters and checks that all ranks have the same state.

Ranks compare digests of 8 bytes for each array.
"""
from __future__ import annotations

import hashlib
import pickle
import struct
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from .._mxnet import mx, np
from ..annotations import Trainer, Updater
from ..checks import order_of
from ..cpu.arrays import dtype_name
from ..version import __version__
from .sync import Workers

Named = Tuple[str, Any]  # a name and a value
# Settings of an optimizer that are compared separately, or do not affect weights.
_NOT_AMONG_OTHERS = ("lr", "wd", "rescale_grad", "aggregate_num")


class RanksDifferError(RuntimeError):
    """The state of ranks differs that must be equal."""


def check_same_network(workers: Workers, arrays: Iterable[Tuple[str, Any, bool]]) -> None:
    """Checks that all ranks have the same parameters and the same version of this package.

    The store would deadlock on parameters that only some ranks have.

    Args:
        arrays: a parameter's name, its array, and whether it is trained.
    """
    named = list(arrays)
    layouts = [f"{a.shape} {dtype_name(a.dtype)} {'trained' if trained else 'frozen'}"
               for _, a, trained in named]
    # MXNet numbers blocks, so names may differ, but must sort alike: "10" sorts before "9".
    order = order_of([name for name, _, _ in named])
    everything = _digest_of_bytes(repr([__version__, *layouts, order]).encode())
    if _alike(workers.gather(everything)):
        return
    versions = workers.gather(__version__.encode()[:16].ljust(16))
    if not _alike(versions):
        raise RanksDifferError("ranks have different versions of gluon_amp: " + ", ".join(
            v.decode().strip() for v in versions))
    counts = [int(c) for c in workers.gather(b"%16d" % len(named))]
    if not _alike(counts):
        raise RanksDifferError("ranks train different networks. Parameters of rank 0, 1, ...: "
                               + ", ".join(map(str, counts)))
    digests = [_digest_of_bytes(text.encode()) for text in layouts]
    if _alike(workers.gather(b"".join(digests))):
        raise RanksDifferError(
            "ranks have their parameters in different orders. Here: "
            f"{', '.join(name for name, _, _ in named[:4])}, ... MXNet sorts them by name, and "
            "numbers the blocks of a process in their names: create the same number of blocks on "
            "all ranks before this network, or give the network a prefix")
    first, ranks = _first_difference(workers, digests)
    raise RanksDifferError(f"ranks train different networks: {named[first][0]}, here "
                           f"{layouts[first]}, has another shape or type on {ranks} than on rank "
                           "0, or is frozen on some of them only")


def broadcast(workers: Workers, arrays: Sequence[Tuple[Any, str, List[Any]]],
              initialized: bool) -> bool:
    """Broadcasts rank 0's arrays to all ranks.

    Args:
        arrays: a key in the store, a name, and the array on each device.
        initialized: whether MXNet has initialized these keys of its store.

    Returns:
        Whether any rank had different arrays.
    """
    before = digest([(name, on_devices[0]) for _, name, on_devices in arrays])
    workers.broadcast([(key, on_devices) for key, _, on_devices in arrays], initialized)
    after = digest([(name, on_devices[0]) for _, name, on_devices in arrays])
    return workers.any(before != after)


def agree_on_scale(workers: Workers, loss_scale: Any) -> Any:
    """Returns rank 0's dynamic loss scale; refuses ranks with different kinds of loss scale."""
    state = loss_scale.state_dict()
    kind = "'dynamic'" if loss_scale.changes else str(loss_scale)
    kinds = [k.decode().strip() for k in workers.gather(kind.encode()[:40].ljust(40))]
    if not _alike(kinds):
        raise RanksDifferError("ranks have different loss scales. Rank 0, 1, ...: "
                               + ", ".join(kinds))
    if not state:
        return loss_scale
    packed = struct.pack("!dqq?", *state.values())
    of_rank_0 = struct.unpack("!dqq?", workers.gather(packed)[0])
    return loss_scale.load_state_dict(dict(zip(state, of_rank_0)))


def compare(workers: Workers, held: Sequence[Named]) -> None:
    """Raises an error that names the first value that differs between ranks.

    Args:
        held: names, and arrays or picklable values, in the same order on all ranks.
    """
    digests = [digest([one]) for one in held]
    if _alike(workers.gather(_digest_of_bytes(b"".join(digests)))):
        return
    counts = [int(c) for c in workers.gather(b"%16d" % len(held))]
    if not _alike(counts):
        raise RanksDifferError("ranks have different numbers of parameters and states. Rank 0, 1, "
                               f"...: {', '.join(map(str, counts))}")
    first, ranks = _first_difference(workers, digests)
    raise RanksDifferError(f"{held[first][0]} is not the same on {ranks} as on rank 0. Has one "
                           "rank changed it, or loaded another file?")


def check_batch_size(workers: Workers, rescale_grad: float, given: float) -> None:
    """Checks that all ranks divide by the same batch size. All ranks must call it.

    Args:
        rescale_grad: the factor of gradients: `given` over the batch size.
        given: the optimizer's initial `rescale_grad`.
    """
    multipliers = [struct.unpack("d", one)[0] for one in workers.gather(
        struct.pack("d", rescale_grad))]
    if len(set(multipliers)) > 1:
        sizes = ", ".join(f"{given / one:g}" for one in multipliers)
        raise RanksDifferError(
            f"ranks divide by different batch sizes. Rank 0, 1, ...: {sizes}. Give step() "
            "the number of examples of all ranks together, the same on all")


def average_statistics(trainer: Trainer) -> None:
    """Averages the moving averages of batch norms over all ranks and devices.

    Each rank computes moving averages from its own data, and rank 0 saves its own. All ranks must
    call this, for example before validation and before rank 0 saves. First it compares all other
    state of the ranks, as `check_ranks` does.

    Args:
        trainer: a Trainer with the batch norms' parameters, or a Module.

    Raises:
        TypeError: `trainer` is neither.
        RuntimeError: servers update the weights.
        RanksDifferError: the optimizer, weights or loss scale of ranks differ.
    """
    if not hasattr(trainer, "_average_statistics"):
        raise TypeError("average_statistics takes a gluon_amp Trainer or Module. "
                        f"Received: {type(trainer).__module__}.{type(trainer).__name__}")
    trainer.check_ranks()
    trainer._average_statistics()


def digest(held: Iterable[Named]) -> bytes:
    """Returns a digest of 8 bytes of arrays and other values."""
    state = hashlib.blake2b(digest_size=8)
    for _, value in held:
        _add(state, value)
    return state.digest()


def state_of(updater: Updater, loss_scale: Any, weights: Iterable[Named], names: Dict[int, str]
             ) -> List[Named]:
    """Returns the settings and arrays that are the same on all ranks, in the same order.

    Args:
        updater: MXNet's updater, with the optimizer and its states: master weights, momenta.
        loss_scale: the state of the loss scale.
        weights: names and weights.
        names: the names of parameters by the numbers of their states.
    """
    optimizer = updater.optimizer
    others = {name: float(value) for name, value in vars(optimizer).items()
              if isinstance(value, (int, float)) and name not in _NOT_AMONG_OTHERS}
    return [("the optimizer", type(optimizer).__name__),
            ("the learning rate", float(optimizer.learning_rate)),
            ("the weight decay", float(optimizer.wd)),
            # between steps; `check_batch_size` compares the value of a Trainer's step
            ("the gradients' factor, one over the batch size,", float(optimizer.rescale_grad)),
            ("one of the optimizer's settings", sorted(others.items())),
            ("the loss scale", loss_scale), *weights,
            *((f"the optimizer's state of {names.get(i, i)}", updater.states[i])
              for i in sorted(updater.states))]


def _add(state: Any, value: object) -> None:
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


def _first_difference(workers: Workers, digests: List[bytes]) -> Tuple[int, str]:
    """Returns the index of the first digest that differs from rank 0's, and the ranks."""
    everyones = [[row[i:i + 8] for i in range(0, len(row), 8)]
                 for row in workers.gather(b"".join(digests))]
    first = next(i for i in range(len(digests)) if not _alike([row[i] for row in everyones]))
    ranks = [str(rank) for rank, row in enumerate(everyones) if row[first] != everyones[0][first]]
    return first, f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"
