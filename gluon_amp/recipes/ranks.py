"""A training script on many ranks: processes that train one network together.

Each reads its own part of the data. What was counted in the parts is summed; one rank logs and
saves.
"""
import logging
import os
import struct
from typing import Any, Iterator, List, Sequence

from .._mxnet import mx, np
from ..parallel.store import make_store, shared_store
from ..parallel.sync import Workers

MANY = ("dist_sync", "dist_device_sync", "horovod")


def add_arguments(parser: Any) -> None:
    """The flag that says how `Ranks` are made."""
    parser.add_argument(
        "--kvstore", "--kv-store", dest="kvstore", default="device",
        choices=("local", "device", *MANY),
        help="how gradients are summed: in one process by local or device; by dist_sync or "
             "dist_device_sync, MXNet's parameter server (gluon-amp launch -n 2 python ...), or "
             "by horovod (horovodrun -np 2 python ...), over processes that each read a part of "
             "the data in batches of --batch-size: scale --lr yourself")


class Ranks:
    """The processes that train one network: a single one, unless the kvstore is for many.

    Args:
        kvstore: a name of `add_arguments`.
        names: True for a Module, whose stores know parameters by names; a Trainer's, by numbers.

    Attributes:
        store: the `kvstore=` of a Trainer, or of `Module.fit`.
        rank: this process's number, from 0 on. Rank 0 logs and saves.
        workers: how many there are.
    """
    add_arguments = staticmethod(add_arguments)

    def __init__(self, kvstore: str = "device", names: bool = False):
        self.store: Any = kvstore
        if kvstore in MANY:
            os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"  # servers that update tell ranks nothing
            self.store = shared_store(make_store(kvstore, None))
        self._workers = Workers(self.store if kvstore in MANY else None, names)
        self.rank, self.workers = self._workers.rank, self._workers.count
        self._by_horovod = kvstore == "horovod"

    def devices(self, gpus: Sequence[int]) -> Sequence[int]:
        """Which of these GPUs are this process's: with Horovod one, by its number here."""
        if not self._by_horovod or not gpus:
            return gpus
        import horovod.mxnet as hvd
        if hvd.local_size() > len(gpus):
            raise ValueError(f"--gpus: Horovod runs {hvd.local_size()} processes here, and each "
                             f"needs a GPU. Received: {','.join(map(str, gpus))}")
        return [gpus[hvd.local_rank()]]

    def start_log(self, format: str) -> None:
        """Rank 0 logs; the others only say what went wrong."""
        logging.basicConfig(level=logging.ERROR if self.rank else logging.INFO, format=format,
                            force=True)

    def sum(self, *numbers: float) -> List[float]:
        """Each number, summed over all ranks in their order: all get the same bits."""
        layout = struct.Struct(f"{len(numbers)}d")
        rows = self._workers.gather(layout.pack(*map(float, numbers)))
        return [sum(column) for column in zip(*map(layout.unpack, rows))]

    def check_same(self, number: int, what: str) -> None:
        """Raises an error where ranks hold different numbers, since they would wait for each other.
        """
        numbers = [int(row) for row in self._workers.gather(b"%20d" % number)]
        if len(set(numbers)) > 1:
            raise ValueError(f"ranks have different numbers of {what}. Rank 0, 1, ...: "
                             f"{', '.join(map(str, numbers))}. All must read the same files")

    def sum_metric(self, metric: Any) -> None:
        """Sums a metric, or those of a CompositeEvalMetric, since it was reset."""
        for one in getattr(metric, "metrics", [metric]):
            one.sum_metric, one.num_inst = self.sum(one.global_sum_metric, one.global_num_inst)
            one.global_sum_metric, one.global_num_inst = one.sum_metric, one.num_inst


class Part(mx.gluon.data.Sampler):
    """A rank's part of training data: all ranks have as many, and none has another's.

    The order of an epoch is its own, and the same in every run.

    Args:
        length: of all data.

    Attributes:
        epoch: to be set before each.
    """

    def __init__(self, length: int, seed: int, ranks: Ranks):
        self.length, self.seed, self.ranks, self.epoch = length, seed, ranks, 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.RandomState([self.seed, self.epoch]).permutation(self.length)
        workers = self.ranks.workers
        return iter(order[:len(self) * workers][self.ranks.rank::workers])

    def __len__(self) -> int:
        return self.length // self.ranks.workers


class ValidationPart(mx.gluon.data.Sampler):
    """A rank's part of validation data: together the ranks have all of it, each example once."""

    def __init__(self, length: int, ranks: Ranks):
        if length < ranks.workers:
            raise ValueError(f"{length} images to validate are too few for {ranks.workers} ranks")
        self.mine = range(ranks.rank, length, ranks.workers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.mine)

    def __len__(self) -> int:
        return len(self.mine)
