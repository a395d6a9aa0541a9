"""Gradients summed over devices and workers, and yes or no agreed by all workers.

One process with one device has nothing to sum. With several devices or workers a kvstore
of MXNet's does it; a store of any other kind is one with the same methods.
"""
from typing import Any, Iterable, List, Optional, Tuple

from .._mxnet import mx
from ..checks import in_names


class Reduction:
    """Sums and agrees by a kvstore.

    Args:
        kvstore: of MXNet's; None for one process that sums nothing.
        flag_key: a key that no parameter has, for what workers agree on.
    """

    def __init__(self, kvstore: Any = None, flag_key: Any = "gluon_amp_flag") -> None:
        self._kvstore, self._flag_key = kvstore, flag_key
        self._flag_is_there = False

    @property
    def sums(self) -> bool:
        """Whether all devices hold the same gradient after `sum`."""
        return self._kvstore is not None

    @property
    def workers(self) -> int:
        """How many processes train together."""
        several = self.sums and "dist" in self._kvstore.type
        return self._kvstore.num_workers if several else 1

    def sum(self, gradients: Iterable[Tuple[Any, List[Any]]]) -> None:
        """Sums each gradient over its devices and all workers, in place.

        Args:
            gradients: a parameter's key in the store, and its gradient on each device.
        """
        if not self.sums:
            return
        for i, (key, on_devices) in enumerate(gradients):
            if on_devices[0].stype == "default":
                self._kvstore.pushpull(key, on_devices, priority=-i)
            else:
                self._kvstore.push(key, on_devices, priority=-i)
                self._kvstore.pull(key, out=on_devices, priority=-i, ignore_sparse=False)

    def any(self, flag: bool) -> bool:
        """Whether the flag is true for any worker. All workers have to ask."""
        if self.workers == 1:
            return flag
        array = mx.nd.full(1, float(flag))
        if not self._flag_is_there:
            self._kvstore.init(self._flag_key, mx.nd.zeros(1))
            self._flag_is_there = True
        self._kvstore.pushpull(self._flag_key, array)
        return bool(array.asscalar() > 0)


def check_kvstore(kvstore: Any, update_on_kvstore: Optional[bool], parameters: Any) -> None:
    """Refuses what would update the weights before anybody could look at the gradients."""
    name = str(getattr(kvstore, "type", kvstore))
    why = "loss scaling and clip_norm look at the gradients before the update"
    if update_on_kvstore:
        raise ValueError(f"{why}: update_on_kvstore must be False or None. Received: True")
    if "async" in name:
        raise ValueError(f"{why}, and {name} updates on its servers: use dist_sync")
    sparse = [p.name for p in parameters if getattr(p, "_stype", "default") != "default"]
    if sparse:
        raise ValueError(f"{why}, and row_sparse weights are updated on the kvstore. "
                         f"Received: row_sparse weights{in_names(sparse)}")
    sparse = [p.name for p in parameters if getattr(p, "_grad_stype", "default") != "default"]
    if sparse and "dist" in name:
        raise ValueError(f"{why}, and {name} updates those that are row_sparse on its servers. "
                         f"Received: row_sparse gradients{in_names(sparse)}")
