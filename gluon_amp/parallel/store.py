"""What this process has told MXNet's servers. They know keys, and nothing of stores, Trainers or
Modules: whatever a process trains shares them."""
import atexit
from typing import Any, Set

from .._mxnet import mx
from . import rendezvous


def kind_of(kvstore: Any) -> str:
    """A store's type, or the name of one that is still to be made, in small letters."""
    return str(getattr(kvstore, "type", kvstore)).lower()


class Servers:
    """What MXNet's servers know from this process.

    Attributes:
        numbers: keys of arrays by which ranks tell each other something.
    """

    def __init__(self) -> None:
        self.numbers: Set[Any] = set()
        self._store: Any = None
        self._trainers = self._modules = 0
        self._update = False

    def store(self, kvstore: Any) -> Any:
        """The one store that this process has of MXNet's servers, which would wait for ever with a
        second one. The first that is given by its name is made here, once all other workers are
        about to make theirs.

        Args:
            kvstore: a store, or the name of one.
        """
        kind = kind_of(kvstore)
        if self._store is None:
            if isinstance(kvstore, str):
                rendezvous.answer()
                kvstore = mx.kv.create(kvstore)
            self._store = kvstore
        elif kind != self._store.type or kvstore not in (kind, self._store):
            raise ValueError(f"a process has one store of MXNet's servers, here {self._store.type}:"
                             f" give it, or its name. Received: another one, {kind}")
        return self._store

    def free(self) -> None:
        """Forgets the store, which MXNet wants freed before the interpreter ends."""
        self._store = None

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
atexit.register(servers.free)
