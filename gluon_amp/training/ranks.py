"""A Gluon Trainer whose ranks, on one machine or many, begin alike and can be asked whether
they still are."""
import struct
from typing import Any, Callable, Dict, List, Optional, Tuple

from .._mxnet import mx
from ..parallel import consistency
from ..parallel.store import kind_of
from ..parallel.sync import Reduction
from .pending import Gradient
from .step import Steps

_BEFORE_UPDATES = 2 ** 29  # from here on keys of weights that servers have only once
_AVERAGES = ("running_mean", "running_var", "moving_mean", "moving_var")


class ComparedRanks:
    """What a Trainer and a Module do alike so that ranks can be asked whether they are alike."""

    _steps: Steps
    _ranks_checked = False
    _instead: str = "update_on_kvstore=False"  # how it is said that no server updates

    def _make_ready(self) -> None:
        """Does what comes before ranks can exchange anything."""

    def _held(self) -> List[Tuple[str, Any]]:
        """What all ranks must hold alike, and what it is called."""
        raise NotImplementedError

    def check_ranks(self) -> None:
        """Raises where the ranks of several machines do not hold the same optimizer, weights,
        masters and loss scale, and names the first that differs. All ranks have to call it; the
        first step or update does. Moving averages are each rank's own, of the data that it has
        seen."""
        self._check_tells("check_ranks()")
        consistency.compare(self._steps.reduction,
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
    _met = False  # whether ranks have begun alike where servers update
    _factor: Optional[float] = None  # of the last step: one over its batch size

    def __init__(self, params: Any, optimizer: Any, optimizer_params: Any, kvstore: Any,
                 compression_params: Any, update_on_kvstore: Optional[bool]) -> None:
        kvstore = consistency.make_store(kvstore, compression_params)
        several = params.values() if hasattr(params, "values") else params
        dense = all(p._stype == p._grad_stype == "default" for p in several
                    if isinstance(p, mx.gluon.Parameter))
        if update_on_kvstore is None and consistency.updates_on_ranks(kvstore, dense):
            update_on_kvstore = False
        super().__init__(params, optimizer, optimizer_params, kvstore, compression_params,
                         update_on_kvstore)
        if "dist" in kind_of(kvstore) and all(p._data is not None for p in self._params):
            if update_on_kvstore is False or not isinstance(kvstore, (str, mx.kv.KVStore)):
                self._begin_alike()
                self._steps.forget()
            else:
                self._meet()

    def _init_kvstore(self) -> None:
        self._meet()
        super()._init_kvstore()
        reduction = self._steps.reduction = Reduction(self._kvstore,
                                                      updates=bool(self._update_on_kvstore))
        if reduction.tells:
            reduction.belongs_to_trainer()

    def _meet(self) -> None:
        """Makes a store of MXNet's servers. If these are to update, they do nothing else once they
        have the optimizer: ranks compare their networks, begin alike and begin to watch each other
        before that."""
        if self._met or not self._servers_update():
            return
        self._met = True
        store = self._kvstore_params["kvstore"]
        if "async" in store.type:
            return
        reduction = Reduction(store)
        there = [(i, p) for i, p in enumerate(self._params) if p._data is not None]
        if reduction.tells:
            reduction.belongs_to_trainer(servers_update=True)
            consistency.check_same_network(reduction, [
                (p.name, p._data[0], p.grad_req != "null") for _, p in there])
            consistency.begin_alike(reduction, [
                (_BEFORE_UPDATES + i, p.name, p.list_data()) for i, p in there
                if p._stype == "default"], False)

    def _servers_update(self) -> bool:
        """Whether MXNet's servers are to update weights."""
        config = self._kvstore_params
        store = config["kvstore"] = consistency.shared_store(config["kvstore"])
        return isinstance(store, mx.kv.KVStore) and "dist" in store.type \
            and config["update_on_kvstore"] is not False

    def _ranks(self) -> Reduction:
        """By what this rank and the others know each other."""
        if self._kv_initialized or not self._servers_update():
            self._begin_store()
            return self._steps.reduction
        self._meet()  # the optimizer, which cannot change any more on servers, waits for a step
        return Reduction(self._kvstore_params["kvstore"], updates=True)

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
        consistency.check_same_network(reduction, [
            (p.name, p.list_data()[0], p.grad_req != "null") for p in there])
        consistency.agree_on_scale(reduction, self._steps.loss_scale)
        self._steps.pending.moved = consistency.begin_alike(
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

    def _update_on_servers(self) -> None:
        """Gives servers the gradients, and takes the weights."""
        trained = [p for p in self._params if p.grad_req != "null"]
        self._steps.reduction.lay_out(g for p in trained for g in p.list_grad())
        super()._allreduce_grads()
        if self._steps.reduction.workers > 1:
            self._steps.reduction.wait(lambda: [w.wait_to_read() for p in trained for w in p._data],
                                       f"the servers' update of {len(trained)} weights")

    def _check_sum(self) -> None:
        """Refuses to update with this rank's own gradients, or with another rank's batch size."""
        reduction = self._steps.reduction
        if not reduction.tells:
            return
        if not self._steps.pending.are_summed:
            raise RuntimeError("update() before the sum over workers: call trainer."
                               "allreduce_grads(), then update(batch_size), or step(batch_size)")
        factor = self._optimizer.rescale_grad
        if factor != self._factor:
            # Where another rank keeps its own, it does not ask: the watch tells that they differ.
            self._factor = factor
            factors = [struct.unpack("d", one)[0] for one in reduction.gather(
                struct.pack("d", factor), "all ranks' batch sizes, since step() got a new one")]
            if len(set(factors)) > 1:
                sizes = ", ".join(f"{self._scale / one:g}" for one in factors)
                raise consistency.RanksDifferError(
                    f"ranks divide by different batch sizes. Rank 0, 1, ...: {sizes}. Give step() "
                    "the number of examples of all ranks together, the same on all")

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
            raise consistency.RanksDifferError(
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
        return self._ranks().workers

    @property
    def rank(self) -> int:
        """This process's number among them, from 0 on."""
        return self._ranks().rank

    def _average_statistics(self) -> None:
        self._check_tells("average_statistics()")
        self._steps.reduction.average([p.list_data() for p in self._params
                                       if _is_average(p) and p._data is not None])

    def _make_ready(self) -> None:
        self._begin_alike()

    def _held(self) -> List[Tuple[str, Any]]:
        return [*consistency.settings_of(self._optimizer),
                *((p.name, p.list_data()[0]) for p in self._params if not _is_average(p)),
                *consistency.states_of(self._updaters[0],
                                       {i: p.name for i, p in enumerate(self._params)})]


def _is_average(parameter: "mx.gluon.Parameter") -> bool:
    """Whether it is a batch norm's moving average, which is each rank's own. A SymbolBlock's are
    known by their names alone."""
    if parameter._differentiable:
        return parameter.grad_req == "null" and parameter.name.endswith(_AVERAGES)
    return not isinstance(parameter, mx.gluon.Constant)
