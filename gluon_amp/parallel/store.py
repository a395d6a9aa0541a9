"""Stores: what `kvstore=` takes, and the one store of MXNet's servers that a process has. Servers
identify arrays by keys alone: whatever a process trains shares them."""
import atexit
import logging
import os
from typing import Any, Mapping, Optional, Sequence, Set

from .._mxnet import mx
from ..annotations import KVStore, Parameter
from ..checks import in_names
from . import rendezvous
from .horovod import Horovod

log = logging.getLogger("gluon_amp")

# Why a step with a loss scale or clip_norm refuses updates by others.
CHECKS_FIRST = "loss scaling and clip_norm check the gradients before the update"
_WORKERS_VARIABLES = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER",
                      "DMLC_NUM_SERVER")


def kind_of(kvstore: KVStore) -> str:
    """A store's type, or the name of one that is still to be made, in small letters."""
    return str(getattr(kvstore, "type", kvstore)).lower()


class Servers:
    """What MXNet's servers hold for this process.

    Attributes:
        numbers: the keys that are initialized of arrays of numbers that ranks exchange.
    """

    def __init__(self) -> None:
        self.numbers: Set[Any] = set()
        self._store: Any = None
        self._trainers = self._modules = 0
        self._update = False

    def store(self, kvstore: KVStore) -> Any:
        """The one store that this process has of MXNet's servers, which would wait for ever with a
        second one. The first that is given by its name is made here, once all other workers are
        about to make theirs.

        Args:
            kvstore: a store, or the name of one.
        """
        kind = kind_of(kvstore)
        if self._store is None:
            if isinstance(kvstore, str):
                rendezvous.join()
                kvstore = mx.kv.create(kvstore)
            self._store = kvstore
        elif kind != self._store.type or kvstore not in (kind, self._store):
            raise ValueError(f"a process has one store of MXNet's servers, here {self._store.type}:"
                             f" give it, or its name. Received: another one, {kind}")
        return self._store

    def free(self) -> None:
        """Forgets the store, which MXNet wants freed before the interpreter ends."""
        self._store = None

    def add_trainer(self, kvstore: KVStore, update: bool) -> int:
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

    def add_module(self, kvstore: KVStore) -> int:
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


def make_store(kvstore: KVStore, compression: Optional[Mapping[str, Any]]) -> Any:
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


def updates_on_ranks(kvstore: KVStore, dense: bool) -> bool:
    """Whether the ranks update, rather than MXNet's servers, where the user says neither: so that
    ranks get rank 0's weights and can be compared, with or without a loss scale.

    Args:
        dense: whether no parameter and no gradient is row_sparse.
    """
    name = kind_of(kvstore)
    return "dist" in name and "async" not in name and dense \
        and not int(os.environ.get("MXNET_UPDATE_ON_KVSTORE", "0"))


def shared_store(kvstore: KVStore) -> Any:
    """The store of MXNet's servers, which is the same for all Trainers of a process. Anything else
    as it is."""
    native = isinstance(kvstore, (str, mx.kv.KVStore))
    return servers.store(kvstore) if native and "dist" in kind_of(kvstore) else kvstore


def check_kvstore(kvstore: KVStore, update_on_kvstore: Optional[bool],
                  parameters: Sequence[Parameter]) -> None:
    """Refuses what would update the weights before the gradients are checked."""
    if update_on_kvstore:
        raise ValueError(f"{CHECKS_FIRST}: update_on_kvstore must be False or None. Received: True")
    check_not_async(kvstore)
    name = kind_of(kvstore)
    sparse = [p.name for p in parameters if getattr(p, "_stype", "default") != "default"]
    if sparse:
        raise ValueError(f"{CHECKS_FIRST}, and row_sparse weights are updated on the kvstore. "
                         f"Received: row_sparse weights{in_names(sparse)}")
    sparse = [p.name for p in parameters if getattr(p, "_grad_stype", "default") != "default"]
    if sparse and "dist" in name:
        raise ValueError(f"{CHECKS_FIRST}, and {name} updates those that are row_sparse on its "
                         f"servers. Received: row_sparse gradients{in_names(sparse)}")


def check_not_async(kvstore: KVStore) -> None:
    """Refuses servers that update the weights with each rank's gradients as they come."""
    name = kind_of(kvstore)
    if "async" in name:
        raise ValueError(f"{CHECKS_FIRST}, and {name} updates on its servers: use dist_sync")
