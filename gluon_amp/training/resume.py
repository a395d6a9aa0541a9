"""`save_checkpoint` and `load_checkpoint`: a whole training in a folder.

    folder/checkpoint.json   the position, states of random numbers, and checksums
    folder/checkpoint-7/     network.params and trainer.states of the seventh checkpoint

checkpoint.json is replaced last: a process that is killed leaves the checkpoint of before.
"""
from __future__ import annotations

import base64
import itertools
import json
import os
import random
import re
import shutil
import struct
import zlib
from typing import Any, Dict, Iterable, Iterator, Optional, Union

from .._mxnet import mx, np
from ..checks import whole_number
from ..files import errors_of_damage, must_exist, new_folder, replace_text, sha256
from .trainer import Trainer

_INDEX, _NETWORK, _TRAINER = "checkpoint.json", "network.params", "trainer.states"
_VERSION = 1
# Words of Python's generator and its next normal number; the same of numpy's; MXNet's seed.
_RANDOM = struct.Struct("<625I?d624II?dI")

Folder = Union[str, "os.PathLike[str]"]


class Position:
    """Where a training stands. `load_checkpoint` returns it, and `save_checkpoint` takes it.

    Attributes:
        epoch: the number of completed epochs.
        batch: the number of batches of the next epoch that `batches` has returned.
        log: the state of the log in the checkpoint; None without one.
    """

    def __init__(self, epoch: int = 0, batch: int = 0, log: Optional[Dict[str, Any]] = None,
                 epoch_random: bytes = b"", batch_random: bytes = b"") -> None:
        """Creates the position of a new training, or of a checkpoint."""
        self.epoch, self.batch, self.log = epoch, batch, log
        self._epoch_random = epoch_random  # random numbers at the beginning of the epoch
        self._batch_random = batch_random  # and after its last batch, in a checkpoint within it

    @property
    def random(self) -> bytes:
        """The state of random numbers at the beginning of the epoch of `batch`."""
        return self._epoch_random or random_state("")

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Returns the batches of an epoch, and counts them.

        After a checkpoint within the epoch these are the remaining ones: the completed ones are
        read again, in the same random order. To end an epoch early, give fewer batches, such as
        `itertools.islice(loader, 100)`: a `break` leaves the epoch incomplete, and a checkpoint
        after it continues there.

        Args:
            batches: all batches of the epoch.

        Raises:
            ValueError: the epoch of the checkpoint has fewer batches than it had.
        """
        if self._batch_random:
            set_random_state(self._epoch_random)
        else:
            self.epoch += self.batch > 0  # after a break
            self.batch, self._epoch_random = 0, random_state(str(self.epoch))
        rest = iter(batches)
        if self._batch_random:
            count = sum(1 for _ in itertools.islice(rest, self.batch))
            if count < self.batch:
                raise ValueError(f"the checkpoint has completed {self.batch} batches of its epoch. "
                                 f"Received: {count} batches")
            set_random_state(self._batch_random)
            self._batch_random = b""
        for batch in rest:
            self.batch += 1
            yield batch
        self.epoch += 1
        self.batch, self._epoch_random = 0, b""


def save_checkpoint(folder: Folder, net: Any, trainer: Trainer, position: Position,
                    log: Any = None) -> None:
    """Saves a training, which `load_checkpoint` continues bit for bit. Call it after a step.

    The folder holds the network, the Trainer's states (optimizer, master weights, loss scale,
    averages), the position, and the states of random numbers of Python and numpy. MXNet does not
    return the state of its own generators: they are seeded here with a number that
    `load_checkpoint` seeds them with again. A DataLoader's processes have generators of their own,
    which are not saved.

    The checkpoint replaces the folder's last one when it is complete. With several workers all
    must call it, and rank 0 writes.

    Args:
        folder: the folder; it is created.
        net: the network.
        trainer: its Trainer.
        position: what `load_checkpoint` returned.
        log: a `gluon_amp.reports.Log`, which `Log(path, begin=position)` continues.
    """
    folder = os.fspath(folder)
    now = random_state(f"{position.epoch}, {position.batch}, {trainer.rank}")
    states = trainer.gather(position.random + now)
    if trainer.rank == 0:
        _write(folder, net, trainer, {
            "version": _VERSION, "epoch": position.epoch, "batch": position.batch,
            "log": None if log is None else log.state_dict(),
            "random": [base64.b64encode(state).decode() for state in states]})
    trainer.gather(b"\0")  # no worker goes on before the files are written
    set_random_state(now)


def load_checkpoint(folder: Folder, net: Any, trainer: Trainer) -> Position:
    """Loads the checkpoint of a folder into a network and its Trainer.

        position = amp.load_checkpoint("run", net, trainer)
        for epoch in range(position.epoch, epochs):
            for data, label in position.batches(loader):
                ...
                trainer.step(len(label))
            amp.save_checkpoint("run", net, trainer, position)

    Args:
        folder: the folder of `save_checkpoint`.
        net: the network, converted as when it was saved.
        trainer: its Trainer, created as when it was saved, with its AveragedWeights.

    Returns:
        the position, which is epoch 0 and batch 0 if the folder has no checkpoint.

    Raises:
        ValueError: the checkpoint is damaged, or of another network, Trainer or number of workers.
        FileNotFoundError: a file of the checkpoint is missing.
    """
    folder = os.fspath(folder)
    index = os.path.join(folder, _INDEX)
    if not os.path.exists(index):
        return Position()
    saved = _read(index)
    files = [os.path.join(folder, saved["folder"], name) for name in (_NETWORK, _TRAINER)]
    must_exist(*files)
    for path, total in zip(files, saved["sha256"]):
        if sha256(path) != total:
            raise ValueError(f"{path} is damaged: its checksum is not that of {index}")
    net.load_parameters(files[0])
    if len(saved["random"]) != trainer.workers:
        raise ValueError(f"{index} is of {len(saved['random'])} workers. "
                         f"Received: {trainer.workers}")
    trainer.load_states(files[1])
    states = base64.b64decode(saved["random"][trainer.rank])
    of_epoch, now = states[:_RANDOM.size], states[_RANDOM.size:]
    set_random_state(now)
    return Position(saved["epoch"], saved["batch"], saved["log"],
                    *((of_epoch, now) if saved["batch"] else ()))


def _write(folder: str, net: Any, trainer: Trainer, saved: Dict[str, Any]) -> None:
    os.makedirs(folder, exist_ok=True)
    index = os.path.join(folder, _INDEX)
    last = _number(_read(index)["folder"]) if os.path.exists(index) else 0
    name = f"checkpoint-{last + 1}"
    path = os.path.join(folder, name)
    shutil.rmtree(path, ignore_errors=True)  # of a process that was killed before it was complete
    with new_folder(path) as beside:
        files = [os.path.join(beside, file) for file in (_NETWORK, _TRAINER)]
        net.save_parameters(files[0])
        trainer.save_states(files[1])
        totals = [sha256(file) for file in files]
    replace_text(index, json.dumps({**saved, "folder": name, "sha256": totals}))
    for other in os.listdir(folder):
        if _number(other) and other != name:
            shutil.rmtree(os.path.join(folder, other), ignore_errors=True)


def _number(name: str) -> int:
    """Returns the number of a checkpoint's folder; 0 for other names."""
    match = re.fullmatch(r"checkpoint-([1-9][0-9]{0,8})", name)
    return int(match[1]) if match else 0


def _read(index: str) -> Dict[str, Any]:
    """Returns the contents of checkpoint.json. Raises ValueError if they are damaged."""
    with open(index, encoding="utf-8") as file, errors_of_damage(index):
        try:
            return _parsed(file.read())
        except ValueError as error:
            raise ValueError(f"{index} is damaged: {error}") from error


def _parsed(text: str) -> Dict[str, Any]:
    saved = json.loads(text)
    if saved["version"] != _VERSION:
        raise ValueError(f"version must be {_VERSION}. Received: {saved['version']!r}")
    for name in ("epoch", "batch"):
        whole_number(saved[name], name, 0)
    states = [base64.b64decode(state, validate=True) for state in saved["random"]]
    if not (_number(saved["folder"]) and len(saved["sha256"]) == 2
            and isinstance(saved["log"], (dict, type(None))) and states
            and all(len(state) == 2 * _RANDOM.size for state in states)):
        raise ValueError("its fields are not those of a checkpoint")
    return dict(saved)


def random_state(text: str) -> bytes:
    """Returns the states of Python's and numpy's generators, and a seed for MXNet's, which depends
    on them and on a text."""
    _, words, normal = random.getstate()
    _, keys, place, has_normal, next_normal = np.random.get_state()
    values = (*words, normal is not None, normal or 0.0, *map(int, keys), int(place),
              bool(has_normal), next_normal)
    seed = zlib.crc32(repr((values, text)).encode()) >> 1  # MXNet's seeds have 31 bits
    return _RANDOM.pack(*values, seed)


def set_random_state(state: bytes) -> None:
    """Sets the generators of Python and numpy, and seeds those of MXNet."""
    values = _RANDOM.unpack(state)
    words, (has_normal, normal), rest = values[:625], values[625:627], values[627:]
    random.setstate((3, words, normal if has_normal else None))
    np.random.set_state(("MT19937", np.array(rest[:624], np.uint32), rest[624], int(rest[625]),
                         rest[626]))
    mx.random.seed(rest[627])
