"""A Gluon Trainer whose ranks, on one machine or many, begin alike and can be asked whether
they still are."""
from typing import Any, List, Optional, Tuple

from .._mxnet import mx
from . import distributed
from .reduction import Reduction
from .step import Steps


class ComparedRanks:
    """What a Trainer and a Module do alike so that ranks can be asked whether they are alike."""

    _steps: Steps
    _ranks_checked = False
    _instead: str = "update_on_kvstore=False"  # how it is said that no server updates

    def _make_ready(self) -> None:
        """Does what comes before ranks can exchange anything."""

    def _held(self) -> List[Tuple[str, Any]]:
        """Names and arrays of what all ranks must hold alike."""
        raise NotImplementedError

    def check_ranks(self) -> None:
        """Raises where the ranks of several machines do not hold the same weights, masters and
        loss scale, and names the first parameter. All ranks have to call it; the first step or
        update does. Moving averages are each rank's own, of the data that it has seen."""
        self._check_tells("check_ranks()")
        distributed.compare(self._steps.reduction,
                            [*self._held(), ("the loss scale", self._steps.state())])

    def _check_ranks_once(self) -> None:
        if self._steps.reduction.tells and not self._ranks_checked:
            self._ranks_checked = True
            self.check_ranks()

    def _check_tells(self, call: str) -> None:
        self._make_ready()
        reduction = self._steps.reduction
        if reduction.workers > 1 and not reduction.tells:
            raise RuntimeError(f"{call} needs {self._instead}")


class RanksTrainer(ComparedRanks, mx.gluon.Trainer):
    """What the Trainer does so that many workers train one network."""

    _params_to_init: List[Any]

    def __init__(self, params: Any, optimizer: Any, optimizer_params: Any, kvstore: Any,
                 compression_params: Any, update_on_kvstore: Optional[bool]) -> None:
        kvstore = distributed.make_store(kvstore, compression_params)
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params,
                         update_on_kvstore)
        several = "dist" in str(getattr(kvstore, "type", kvstore))
        native = isinstance(kvstore, (str, mx.kv.KVStore))
        if several and (update_on_kvstore is False or not native) \
                and all(p._data is not None for p in self._params):
            self._begin_alike()
            self._steps.forget()

    def _init_kvstore(self) -> None:
        super()._init_kvstore()
        self._steps.reduction = Reduction(self._kvstore, updates=bool(self._update_on_kvstore))

    def _begin_store(self) -> None:
        if not self._kv_initialized:
            self._init_kvstore()

    def _begin_alike(self) -> None:
        self._begin_store()
        if self._params_to_init:
            self._init_params()

    def _init_params(self) -> None:
        reduction = self._steps.reduction
        there = [p for p in self._params_to_init if not p._deferred_init]
        if not reduction.tells:
            reduction.lay_out((array for p in there for array in p.list_data()), predicted=True)
            super()._init_params()
            return
        distributed.check_same_network(reduction, [(p.name, p.list_data()[0]) for p in there])
        distributed.agree_on_scale(reduction, self._steps.loss_scale)
        self._steps.pending.moved = distributed.begin_alike(
            reduction, [(self._param2idx[p.name], p.name, p.list_data()) for p in there], False)
        self._params_to_init = [p for p in self._params_to_init if p._deferred_init]

    @property
    def workers(self) -> int:
        """How many processes train together."""
        self._begin_store()
        return self._steps.reduction.workers

    @property
    def rank(self) -> int:
        """This process's number among them, from 0 on."""
        self._begin_store()
        return self._steps.reduction.rank

    def _average_statistics(self) -> None:
        self._check_tells("average_statistics()")
        self._steps.reduction.average([p.list_data() for p in self._params
                                       if not p._differentiable and p._data is not None])

    def _make_ready(self) -> None:
        self._begin_alike()

    def _held(self) -> List[Tuple[str, Any]]:
        return [*((p.name, p.list_data()[0]) for p in self._params if p._differentiable),
                *distributed.states_of(self._updaters[0],
                                       {i: p.name for i, p in enumerate(self._params)})]
