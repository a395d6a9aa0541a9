"""Horovod as a kvstore of MXNet: `kvstore="horovod"`, as in MXNet 2.

    Trainer, Module  ->  mx.kv.create("horovod")  ->  Horovod's ring of all processes

There is no server: all processes all-reduce gradients, one process for each device.
"""
from __future__ import annotations

from typing import Any, Dict, Hashable, List, Mapping, Optional, Sequence, Tuple

from .._mxnet import mx
from ..cpu.arrays import dtype_name
from ..cpu.bfloat16 import is_bfloat16


@mx.kv.KVStoreBase.register
class Horovod(mx.kv.KVStoreBase):
    """A kvstore that sums gradients with Horovod, for `Trainer(..., kvstore=)` and `Module.fit`.

    `kvstore="horovod"` creates one with `wire="float16"`.

    Args:
        wire: "float16" sums float16 gradients in float16, and a sum above 65504 is infinite.
            "float32" sends twice as much: it sums in float32, and the update reads that sum.

    Raises:
        ImportError: Horovod for MXNet is not installed.
    """

    def __init__(self, wire: str = "float16") -> None:
        """See the class for the arguments."""
        if wire not in ("float16", "float32"):
            raise ValueError(f'wire must be "float16" or "float32". Received: {wire!r}')
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise ImportError("kvstore='horovod' needs Horovod built for MXNet: make horovod, or "
                              f"see docs/distributed.md. The import's error: {error}") from error
        hvd.init()
        self._hvd, self.wire = hvd, wire

    type = "dist_sync_horovod"

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._hvd.rank()

    @property
    def num_workers(self) -> int:
        """The number of processes."""
        return self._hvd.size()

    @property
    def may_differ(self) -> bool:
        """Whether ranks may get different bits of a sum; with Gloo they get the same."""
        return not self._hvd.gloo_enabled()

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Returns False for the optimizer, which runs on each worker."""
        if capability.lower() != mx.kv.KVStoreBase.OPTIMIZER:
            raise ValueError(f"Valid: {mx.kv.KVStoreBase.OPTIMIZER}. Received: {capability}")
        return False

    def set_gradient_compression(self, compression_params: Optional[Mapping[str, Any]]) -> None:
        """Refuses gradient compression."""
        raise ValueError("kvstore='horovod' takes no gradient compression: float16 gradients are "
                         f"sent as they are. Received: {compression_params!r}")

    def init(self, key: Hashable, value: Any) -> None:
        """Does nothing; `Module` calls it."""

    def broadcast(self, key: Hashable, value: Any, out: Any, priority: int = 0) -> None:
        """Broadcasts rank 0's value, as a sum with zeros.

        Horovod 0.28's own broadcast may read the operation's name after it has been freed.
        """
        (array,) = _one_device([(key, out)])
        if self.rank:
            array[:] = 0
        elif array is not value:
            value.copyto(array)
        sent = array.astype("float32") if is_bfloat16(array.dtype) else array  # no bfloat16
        self._hvd.allreduce_(sent, average=False, name=f"start {key}", priority=priority)
        if sent is not array:
            sent.copyto(array)

    def pushpull(self, key: Hashable, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sums an array over all ranks, into `out` or in place."""
        (value,) = _one_device([(key, value)])
        target = value if out is None else _one_device([(key, out)])[0]
        if target is not value:
            value.copyto(target)
        self._hvd.allreduce_(target, average=False, name=str(key), priority=priority)

    def sum_all(self, gradients: Sequence[Tuple[Any, Any]],
                owner: str = "") -> Dict[Any, List[Any]]:
        """Sums gradients over all ranks in one grouped all-reduce, in place.

        Args:
            gradients: their keys, and the arrays.
            owner: the owner's name, which is part of the operations' names.

        Returns:
            The float32 sums of bfloat16 gradients and, with wire="float32", of float16 gradients,
            by key. These gradients do not change.
        """
        arrays = _one_device(gradients)
        unrounded = {}
        for i, (key, _) in enumerate(gradients):
            dtype = dtype_name(arrays[i].dtype)
            if dtype == "bfloat16" or self.wire == "float32" and dtype == "float16":
                arrays[i] = arrays[i].astype("float32")
                unrounded[key] = [arrays[i]]
        for dtype in sorted({dtype_name(a.dtype) for a in arrays}):
            group = [a for a in arrays if dtype_name(a.dtype) == dtype]
            name = f"gradients {dtype} {owner}"
            self._hvd.grouped_allreduce_(group, average=False, name=name)
        return unrounded


def _one_device(pairs: Sequence[Tuple[Any, Any]]) -> List[Any]:
    """Returns the single array of each key."""
    arrays = []
    for key, value in pairs:
        several = isinstance(value, (list, tuple))
        if several and len(value) != 1:
            raise ValueError("kvstore='horovod' has one process for each device. Received: "
                             f"{len(value)} devices in one process ({key})")
        arrays.append(value[0] if several else value)
        if arrays[-1].stype != "default":
            raise ValueError(f"kvstore='horovod' sums dense arrays. Received: {key} in "
                             f"{arrays[-1].stype}")
    return arrays
