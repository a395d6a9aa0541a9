"""A Gluon Trainer whose ranks, on one machine or many, begin alike and can be asked whether
they still are."""
from typing import Any, Callable, Dict, List, Optional, Tuple

from .._mxnet import mx
from . import distributed
from .pending import Gradient
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

    _params_to_init: List["mx.gluon.Parameter"]
    _kvstore_params: Dict[str, Any]
    _gradients: Callable[..., List[Gradient]]
    _note_written: Callable[[], None]

    def __init__(self, params: Any, optimizer: Any, optimizer_params: Any, kvstore: Any,
                 compression_params: Any, update_on_kvstore: Optional[bool]) -> None:
        kvstore = distributed.make_store(kvstore, compression_params)
        if update_on_kvstore is None and distributed.updates_on_ranks(kvstore, params):
            update_on_kvstore = False
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params,
                         update_on_kvstore)
        several = "dist" in str(getattr(kvstore, "type", kvstore))
        native = isinstance(kvstore, (str, mx.kv.KVStore))
        if several and (update_on_kvstore is False or not native) \
                and all(p._data is not None for p in self._params):
            self._begin_alike()
            self._steps.forget()

    def _init_kvstore(self) -> None:
        self._kvstore_params["kvstore"] = distributed.shared_store(self._kvstore_params["kvstore"])
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
        distributed.check_same_network(reduction, [
            (p.name, p.list_data()[0], p.grad_req != "null") for p in there])
        distributed.agree_on_scale(reduction, self._steps.loss_scale)
        self._steps.pending.moved = distributed.begin_alike(
            reduction, [(self._param2idx[p.name], p.name, p.list_data()) for p in there], False)
        self._params_to_init = [p for p in self._params_to_init if p._deferred_init]

    def _begin_sum(self) -> None:
        """Before gradients are summed over devices and workers; they are summed once."""
        steps = self._steps
        several = steps.reduction.sums and len(self._contexts) * steps.reduction.workers > 1
        if several and steps.scaling and steps.pending.are_summed:
            steps.forget()
            raise RuntimeError("the gradients have been summed since the last backward(), by "
                               "allreduce_grads(): call update(batch_size), not step(), after it")
        steps.begin_sum(len(self._contexts))
        steps.pending.are_summed = True

    def _check_sum(self) -> None:
        """Refuses to update with this rank's own gradients."""
        if self._steps.reduction.tells and not self._steps.pending.are_summed:
            raise RuntimeError("update() before the sum over workers: call trainer."
                               "allreduce_grads(), then update(batch_size), or step(batch_size)")

    def _reach_alike(self) -> None:
        """Where the losses of some ranks reach a parameter, the others' gradients of it count, as
        zeros: else only some ranks would update it, with what was left in the others."""
        reached, anywhere = self._reached()
        for i in set(anywhere) - set(reached):
            self._params[i].zero_grad()
            for weight in self._params[i].list_data():
                weight._fresh_grad = True
        if self._steps.scaling:
            self._note_written()

    def _check_reached(self) -> None:
        """As that, once it is too late: what was left is in the sum."""
        reached, anywhere = self._reached()
        if self._steps.reduction.any(reached != anywhere):
            raise distributed.RanksDifferError(
                "the losses of some ranks reach parameters that those of others do not, and what "
                "these held is in the sum: call step(batch_size, ignore_stale_grad=True), which "
                "counts their gradients as zeros")

    def _reached(self) -> Tuple[List[int], List[int]]:
        """The numbers of the parameters with new gradients, here and on any rank."""
        reached = {g.place[0] for g in self._gradients()}
        if not self._steps.reduction.tells:
            return sorted(reached), sorted(reached)
        rows = self._steps.reduction.gather(bytes(i in reached for i in range(len(self._params))))
        return sorted(reached), [i for i, flags in enumerate(zip(*rows)) if any(flags)]

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
