"""Modules whose ranks, on one machine or many, begin alike and can be asked whether they
still are."""
from typing import Any, Dict, List, Tuple

from ..checks import in_names
from ..parallel import consistency
from ..parallel.store import servers
from ..parallel.sync import LOOKS_FIRST, Reduction
from ..training.ranks import ComparedRanks


class RanksModule(ComparedRanks):
    """What a Module does so that many workers train one network."""

    _instead: str = "MXNET_UPDATE_ON_KVSTORE=0"
    _number = 0  # among this process's Modules on many ranks

    def _module(self) -> Any:
        raise NotImplementedError

    def _weights(self) -> Dict[int, Tuple[str, Any]]:
        raise NotImplementedError

    def _check_workers(self, kvstore: Any) -> Any:
        """Makes a store over many workers, before MXNet gives it parameters."""
        group = self._module()._exec_group
        sparse = self._sparse()
        if sparse and self._steps.looking:
            raise ValueError(f"{LOOKS_FIRST}, and many workers update those on servers that are "
                             f"row_sparse. Received: row_sparse{in_names(sparse)}")
        kvstore = consistency.shared_store(kvstore)
        self._number = servers.take_module(kvstore)
        if "async" in kvstore.type:
            return kvstore
        reduction = Reduction(kvstore, names=True)
        consistency.check_same_network(reduction, [
            (name, arrays[0], grads[0] is not None) for name, arrays, grads in
            zip(group.param_names, group.param_arrays, group.grad_arrays)])
        consistency.agree_on_scale(reduction, self._steps.loss_scale)
        return kvstore

    def _sparse(self) -> List[str]:
        """Names of the parameters that are row_sparse, or whose gradients are."""
        group = self._module()._exec_group
        return [name for name, arrays, grads in zip(group.param_names, group.param_arrays,
                                                    group.grad_arrays)
                if {a.stype for a in (arrays[0], grads[0]) if a is not None} != {"default"}]

    def _mxnet_updates(self) -> bool:
        """Whether MXNet's own update does all that there is to do without a look at gradients."""
        module = self._module()
        return not self._steps.reduction.sums_at_once \
            and (module._update_on_kvstore or self._steps.reduction.workers == 1)

    def update(self) -> Any:
        """As MXNet's; where servers update, waits for them, but for no rank that has ended."""
        if self._steps.reduction.workers == 1:
            super().update()
            return
        group = self._module()._exec_group
        trained = [(weights, grads) for weights, grads in zip(group.param_arrays,
                                                              group.grad_arrays)
                   if grads[0] is not None]
        self._steps.reduction.lay_out(g for _, grads in trained for g in grads)
        super().update()
        self._steps.reduction.wait(lambda: [w.wait_to_read() for weights, _ in trained
                                            for w in weights],
                                   f"the servers' update of {len(trained)} weights")

    def _begin_alike(self) -> None:
        """Every rank gets rank 0's parameters and moving averages, by the store that MXNet has."""
        module = self._module()
        group = module._exec_group
        reduction = self._steps.reduction = Reduction(
            module._kvstore, names=True, updates=bool(module._update_on_kvstore))
        if reduction.workers == 1:
            return
        reduction.owner = f"Module {self._number}"
        if reduction.tells:
            consistency.begin_alike(reduction, [
                (name, name, arrays) for name, arrays in zip(group.param_names,
                                                             group.param_arrays)], True)
        reduction.take_over([(f"statistics {name}", arrays) for name, arrays in
                             zip(group.aux_names, group.aux_arrays)], False)
        self._params_dirty = module._params_dirty = True

    def _average_statistics(self) -> None:
        self._check_tells("average_statistics()")
        module = self._module()
        self._steps.reduction.average(module._exec_group.aux_arrays)
        self._params_dirty = module._params_dirty = True

    def _held(self) -> List[Tuple[str, Any]]:
        module = self._module()
        group = module._exec_group
        names = {i: name for i, (name, _) in self._weights().items()}
        return [*consistency.settings_of(module._optimizer),
                *((name, arrays[0]) for name, arrays in zip(group.param_names,
                                                            group.param_arrays)),
                *consistency.states_of(module._updater, names)]
