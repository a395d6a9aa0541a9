"""What this process has told MXNet's servers. They know keys, and nothing of stores, Trainers or
Modules: whatever a process trains shares them."""
from typing import Any, Set

from .._mxnet import mx


class Servers:
    """What MXNet's servers know from this process.

    Attributes:
        numbers: keys of arrays by which ranks tell each other something.
    """

    def __init__(self) -> None:
        self.numbers: Set[Any] = set()
        self._kind = ""
        self._trainers = self._modules = 0
        self._update = False

    def check_kind(self, kind: str) -> None:
        """Refuses a second kind of store, such as `dist_device_sync` beside `dist_sync`."""
        if self._kind and kind != self._kind:
            raise ValueError(f"a process has one store of MXNet's servers, here {self._kind}. "
                             f"Received: kvstore={kind!r}")
        self._kind = kind

    def take_trainer(self, kvstore: Any, update: bool) -> int:
        """The number of a new Trainer, from 1 on. Refuses it where its parameters would be mixed
        up with others'.

        Args:
            update: whether the servers update its weights.
        """
        if isinstance(kvstore, mx.kv.KVStore):
            if self._modules:
                raise ValueError(f"kvstore={kvstore.type!r} is in use by a Module of this "
                                 "process: its servers do not take a Trainer, too")
            if self._trainers and (update or self._update):
                raise ValueError("MXNet's servers update the weights of one Trainer of a process: "
                                 "make several with update_on_kvstore=False")
            self._update = update
        self._trainers += 1
        return self._trainers

    def take_module(self, kvstore: Any) -> int:
        """The number of a new Module, from 1 on; or refuses it."""
        if isinstance(kvstore, mx.kv.KVStore) and self._trainers + self._modules:
            raise ValueError("MXNet's servers know a Module's parameters by their names: with "
                             f"kvstore={kvstore.type!r} a process has one Module, whose "
                             "init_optimizer is called once, and no Trainer. kvstore='horovod' "
                             "takes several")
        self._modules += 1
        return self._modules


servers = Servers()
