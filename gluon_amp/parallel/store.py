"""Creates stores from `kvstore=`, and keeps a process's one store of MXNet's servers.

Servers identify arrays by key only, so all Trainers and Modules of a process share the keys.
"""
import atexit
import contextlib
import ctypes
import logging
import os
import sys
from typing import Any, Mapping, Optional, Sequence, Set

from mxnet.base import _LIB, check_call

from .._mxnet import mx
from ..annotations import KVStore, Parameter
from ..checks import in_names
from .horovod import Horovod

log = logging.getLogger("gluon_amp")

# Why a step with a loss scale or clip_norm refuses updates on the kvstore.
CHECKS_FIRST = "loss scaling and clip_norm check the gradients before the update"
LAUNCHED = "GLUON_AMP_LAUNCHED"  # set in the environment of the launcher's workers
_WORKERS_VARIABLES = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER",
                      "DMLC_NUM_SERVER")


def kind_of(kvstore: KVStore) -> str:
    """Returns a store's type, or its name in lower case."""
    return str(getattr(kvstore, "type", kvstore)).lower()


class Servers:
    """This process's use of MXNet's servers.

    Attributes:
        numbers: the initialized keys of arrays that ranks exchange.
    """

    def __init__(self) -> None:
        self.numbers: Set[Any] = set()
        self._store: Any = None
        self._trainers = self._modules = 0
        self._update = False

    def store(self, kvstore: KVStore) -> Any:
        """Returns the process's one store of MXNet's servers; a second one would deadlock.

        The first call with a name creates it. Under `gluon-amp launch`, MXNet does not wait for
        the other workers when it frees the store: the launcher sees this worker exit, and ends the
        servers.

        Args:
            kvstore: a store, or the name of one.

        Raises:
            ValueError: the process has another store.
        """
        kind = kind_of(kvstore)
        if self._store is None:
            if isinstance(kvstore, str):
                kvstore = mx.kv.create(kvstore)
            self._store = kvstore
            if LAUNCHED in os.environ:
                check_call(_LIB.MXKVStoreSetBarrierBeforeExit(kvstore.handle, ctypes.c_int(0)))
        elif kind != self._store.type or kvstore not in (kind, self._store):
            raise ValueError(f"a process has one store of MXNet's servers, here {self._store.type}:"
                             f" pass that store or its name. Received: another one, {kind}")
        return self._store

    def free(self) -> None:
        """Frees the store, which MXNet requires before the interpreter exits. After an error, exits
        at once: MXNet would wait for workers that wait for this one."""
        if self._store is not None and self._store.num_workers > 1 and hasattr(sys, "last_value"):
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(1)
        self._store = None

    def add_trainer(self, kvstore: KVStore, update: bool) -> int:
        """Returns the number of a new Trainer, from 1 on.

        Args:
            kvstore: the store.
            update: whether the servers update its weights.

        Raises:
            ValueError: its keys would collide with those of a Module or of another Trainer.
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
        """Returns the number of a new Module, from 1 on, or raises ValueError."""
        if isinstance(kvstore, mx.kv.KVStore) and self._trainers + self._modules:
            raise ValueError("MXNet's servers identify a Module's parameters by name: with "
                             f"kvstore={kvstore.type!r} a process has one Module, whose "
                             "init_optimizer is called once, and no Trainer. kvstore='horovod' "
                             "takes several")
        self._modules += 1
        return self._modules


servers = Servers()
atexit.register(servers.free)


def make_store(kvstore: KVStore, compression: Optional[Mapping[str, Any]]) -> Any:
    """Returns the value of `kvstore=` for MXNet's classes.

    It refuses invalid settings before a store exists, whose servers and workers would wait.
    """
    name = kind_of(kvstore)
    if compression:
        raise ValueError("gradient compression compares scaled gradients with its threshold, and "
                         "deadlocks several workers in MXNet 1.9.1: train in float16, which halves "
                         f"the traffic. Received: compression_params={compression!r}")
    if "dist" not in name and "horovod" not in name:
        workers = os.environ.get("DMLC_NUM_WORKER", "1")
        if os.environ.get("DMLC_ROLE") == "worker" and workers != "1":
            log.warning("%s workers were launched, but kvstore=%r sums the gradients of one worker "
                        "only: each trains its own network. kvstore='dist_sync' trains one network",
                        workers, name)
        return kvstore
    if not isinstance(kvstore, str):
        return kvstore
    if name == "horovod":
        return Horovod()  # MXNet creates no store for the name if there is one device
    if not all(variable in os.environ for variable in _WORKERS_VARIABLES):
        raise ValueError(f"kvstore={name!r} needs a scheduler and servers: start the program as "
                         "gluon-amp launch -n 2 python ... Or use kvstore='device', for one "
                         "process")
    return name


def updates_on_ranks(kvstore: KVStore, dense: bool) -> bool:
    """Whether the ranks and devices update by default, instead of the store.

    Gradients can then be read and clipped by hand, and ranks can be compared.

    Args:
        kvstore: a store, or the name of one.
        dense: whether no parameter and no gradient is row_sparse.
    """
    return dense and "async" not in kind_of(kvstore) \
        and not int(os.environ.get("MXNET_UPDATE_ON_KVSTORE", "0"))


def shared_store(kvstore: KVStore) -> Any:
    """Returns the process's store for MXNet's servers, and any other value unchanged."""
    native = isinstance(kvstore, (str, mx.kv.KVStore))
    return servers.store(kvstore) if native and "dist" in kind_of(kvstore) else kvstore


def check_kvstore(kvstore: KVStore, update_on_kvstore: Optional[bool],
                  parameters: Sequence[Parameter]) -> None:
    """Refuses stores that would update weights before the gradients are checked."""
    if update_on_kvstore:
        raise ValueError(f"{CHECKS_FIRST}: update_on_kvstore must be False or None. Received: True")
    check_not_async(kvstore)
    name = kind_of(kvstore)
    sparse = [p.name for p in parameters if getattr(p, "_stype", "default") != "default"]
    if sparse:
        raise ValueError(f"{CHECKS_FIRST}, and row_sparse weights are updated on the kvstore. "
                         "Valid: loss_scale=None without clip_norm, or sparse_grad=True of an "
                         f"Embedding. Received: row_sparse weights{in_names(sparse)}")
    sparse = [p.name for p in parameters if getattr(p, "_grad_stype", "default") != "default"]
    if sparse and "dist" in name:
        raise ValueError(f"{CHECKS_FIRST}, and {name} updates row_sparse weights on its servers. "
                         f"Received: row_sparse gradients{in_names(sparse)}")


def check_not_async(kvstore: KVStore) -> None:
    """Refuses asynchronous stores, whose servers update weights with unchecked gradients."""
    name = kind_of(kvstore)
    if "async" in name:
        raise ValueError(f"{CHECKS_FIRST}, and {name} updates on its servers: use dist_sync")
