"""Sums gradients over devices and workers, and exchanges values between workers.

With several devices or workers a kvstore sums: MXNet's, or any other with the methods of
`mx.kv.KVStoreBase`, such as Horovod's (horovod.py).
"""
import ctypes
import math
import struct
from typing import Any, Dict, Hashable, Iterable, List, Optional, Sequence, Tuple

from mxnet.base import _LIB, check_call
from mxnet.kvstore import KVStoreBase

from .._mxnet import mx, np
from ..cpu.arrays import narrow, on_device, to_float32
from ..cpu.bfloat16 import is_bfloat16
from .store import servers

# Keys of MXNet's servers are 32-bit integers, and an initialized key keeps its shape.
# Trainer n of a process, from 0 on, has _KEYS_OF_A_TRAINER keys from n * _KEYS_OF_A_TRAINER on.
_KEYS_OF_A_TRAINER = 2 ** 16
# + i: parameter i in the broadcast before servers get an optimizer. A server with an optimizer
# treats each later value of a key as a gradient.
BROADCAST_KEYS = 2 ** 29
_EXCHANGE_KEYS = 2 ** 30  # + n: arrays of n numbers that ranks exchange


class Workers:
    """The workers of a training: all-reduce and exchange of values with their kvstore.

    Args:
        kvstore: None for one process that sums nothing.
        names: whether the store identifies parameters by names; else by numbers.
        updates: whether the store updates weights; then it can sum nothing else.

    Attributes:
        sums: whether all devices have the same gradient after `sum`.
        exchange: whether they can exchange values: there are several, and servers do not update.
        updates: whether the store updates weights.
        owner: the owner of the gradients, such as "Trainer 1"; the same on all ranks.
    """

    def __init__(self, kvstore: Optional[KVStoreBase] = None, names: bool = False,
                 updates: bool = False) -> None:
        self._names = names
        self._first_key, self.owner = 0, ""
        self.connect(kvstore, updates)

    def connect(self, kvstore: Optional[KVStoreBase], updates: bool = False) -> None:
        """Sets the store."""
        self._kvstore: Any = kvstore
        self.sums = kvstore is not None
        self._native = isinstance(kvstore, mx.kv.KVStore)
        self.exchange = self.count > 1 and not updates
        self.updates = updates and not self.sums_at_once

    @property
    def sums_at_once(self) -> bool:
        """Whether the store sums all gradients in one call, and may return the sums instead."""
        return hasattr(self._kvstore, "sum_all")

    @property
    def count(self) -> int:
        """The number of workers."""
        several = self.sums and "dist" in self._kvstore.type
        return self._kvstore.num_workers if several else 1

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._kvstore.rank if self.count > 1 else 0

    def register_trainer(self, servers_update: bool = False) -> None:
        """Reserves keys for a new Trainer of this process."""
        number = servers.add_trainer(self._kvstore, servers_update)
        self.owner = f"Trainer {number}"
        if self._native:
            self._first_key = (number - 1) * _KEYS_OF_A_TRAINER

    def sum(self, step: Any) -> None:
        """Sums the gradients of a `Step` over devices and workers: in place, or in new arrays that
        the step uses instead, if the store does not round 16-bit sums."""
        gradients = step.gradients.read()
        step.begin_sum(self.adds(gradients))
        on_devices: Dict[Any, List[Any]] = {}
        for gradient in gradients:
            on_devices.setdefault(gradient.key, []).append(gradient)
        arrays = [(key, [g.own for g in same]) for key, same in on_devices.items()]
        if self._native:
            arrays = self._without_bfloat16(arrays)
        self.lay_out(array for _, some in arrays for array in some)
        if self.sums_at_once:
            for key, sums in self._kvstore.sum_all(arrays, self.owner).items():
                for gradient, array in zip(on_devices[key], sums):
                    gradient.array = array
            return
        for i, (number, some) in enumerate(arrays):
            key = self._key(number)
            if some[0].stype == "default":
                self._kvstore.pushpull(key, some, priority=-i)
            else:
                self._kvstore.push(key, some, priority=-i)
                self._kvstore.pull(key, out=some, priority=-i, ignore_sparse=False)

    def adds(self, gradients: Sequence[Any]) -> bool:
        """Whether a sum over devices and workers changes gradients."""
        return self.sums and (self.count > 1 or any(g.device for g in gradients))

    def _without_bfloat16(self, gradients: List[Tuple[Any, List[Any]]]
                          ) -> List[Tuple[Any, List[Any]]]:
        """Sums bfloat16 gradients over the devices of this process in float32, in place, because
        MXNet's stores truncate such sums. Returns the other gradients."""
        others = []
        for key, on_devices in gradients:
            if not is_bfloat16(on_devices[0].dtype) or "dist" in self._kvstore.type:
                others.append((key, on_devices))
                continue
            total = sum(on_device(to_float32(gradient), on_devices[0].ctx)
                        for gradient in on_devices)
            for gradient in on_devices:
                narrow(on_device(total, gradient.ctx), gradient)
        return others

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any worker. All workers must call it."""
        if not self.exchange:
            return flag
        return bool(self.sum_numbers(np.array([flag])).any())

    def largest_after_sum(self, norm: float) -> float:
        """Returns the largest of the workers' norms of summed gradients, NaN and infinity first.

        Workers exchange it only if the store may return different bits to them (`may_differ`).
        """
        if not getattr(self._kvstore, "may_differ", False):
            return norm
        norms = [struct.unpack("d", packed)[0] for packed in self.gather(struct.pack("d", norm))]
        return max(norms, key=lambda norm: math.inf if math.isnan(norm) else norm)

    def gather(self, mine: bytes) -> List[bytes]:
        """Returns the bytes of all workers, of one length, by rank. All workers must call it."""
        if not self.exchange:
            return [mine]
        numbers = np.zeros((self.count, len(mine)))
        numbers[self.rank] = np.frombuffer(mine, np.uint8)
        return [bytes(row) for row in self.sum_numbers(numbers).astype(np.uint8)]

    def average(self, arrays: Sequence[List[Any]]) -> None:
        """Averages each array over all devices of all workers, in place. All workers must call it.
        """
        mx.nd.waitall()  # MXNet's engine does not track the writes of batch norms to averages
        means = [np.mean([a.asnumpy() for a in on_devices], axis=0, dtype="float32").ravel()
                 for on_devices in arrays]
        if not means:
            return
        mean = np.concatenate(means)
        if self.exchange:
            mean = self.sum_numbers(mean) / self.count
        for on_devices, one in zip(arrays, np.split(mean, np.cumsum([m.size for m in means])[:-1])):
            for array in on_devices:
                array[:] = one.reshape(array.shape)

    def broadcast(self, arrays: Iterable[Tuple[Any, List[Any]]], initialized: bool) -> None:
        """Broadcasts rank 0's arrays to all workers, in place, and waits for them.

        Args:
            arrays: a key of the store, and the array on each device.
            initialized: whether MXNet has initialized these keys of its store.
        """
        arrays = list(arrays)
        self.lay_out((array for _, on_devices in arrays for array in on_devices), predicted=True)
        for number, on_devices in arrays:
            key = self._key(number)
            if initialized and self._native:
                self._kvstore.pull(key, out=on_devices)
            else:
                self._kvstore.broadcast(key, on_devices[0], on_devices)
        # Otherwise a faster rank would sum gradients into keys that another has not read.
        mx.nd.waitall()

    def lay_out(self, arrays: Iterable[Any], predicted: bool = False) -> None:
        """Reorders float32 arrays from oneDNN's layouts to the plain layout.

        MXNet's servers and Horovod require it. Weights after a prediction and gradients may be
        blocked. Errors of the operators that compute the arrays are raised here.

        Args:
            arrays: the arrays.
            predicted: whether pending predictions may reorder these weights: waits for them.
        """
        if not self.sums or "dist" not in self._kvstore.type:
            return
        arrays = list(arrays)
        if self._native and any(is_bfloat16(a.dtype) for a in arrays):
            raise ValueError("MXNet's servers do not support bfloat16. Valid: kvstore='horovod', "
                             "or mixed_bfloat16, whose parameters and gradients are float32. "
                             f"Received: bfloat16 arrays, kvstore={self._kvstore.type!r}")
        if predicted:
            mx.nd.waitall()
        for array in arrays:
            array.wait_to_read()
            if array.stype == "default" and array.ctx.device_type == "cpu":
                address = ctypes.c_void_p()  # unused: the call reorders the array
                check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))

    def sum_numbers(self, numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Returns the float32 sum of an array over workers. All workers must call it."""
        # one key for each size, because a key of a store has one size
        key: Any = f"gluon_amp {numbers.size}" if self._names else _EXCHANGE_KEYS + numbers.size
        array = mx.nd.array(numbers.reshape(-1), ctx=mx.cpu(), dtype="float32")
        if self._native and key not in servers.numbers:
            self._kvstore.init(key, mx.nd.zeros(array.shape))
            servers.numbers.add(key)
        self._kvstore.pushpull(key, array)
        return array.asnumpy().reshape(numbers.shape)

    def _key(self, key: Any) -> Hashable:
        return key if self._names else self._first_key + key
