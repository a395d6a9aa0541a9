"""What a step of an X-ray adds to the parameters: nothing, a trainer's updates, or a Module's."""
from __future__ import annotations

import copy
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional

import mxnet as mx
import numpy as np

from ..annotations import Array, Network
from ..annotations import Trainer as GluonTrainer
from ..cpu import library
from ..cpu.arrays import dtype_name, is_16bit, squares, sync_master, to_float32
from ..formats import FLOAT32, FORMATS, Format
from ..training.gradients import clear_added
from ..training.loss_scale import LossScaleError
from ..training.optimizer import master_in
from ..training.trainer import Trainer
from .judge import SMALLEST_SCALE
from .modules import bound_module
from .session import Batch, NetworkCopy, Session, StepResult, mean_and_total
from .tensors import Counts
from .watch import EngineObserver, deliver_counts


@dataclass
class Weight:
    """The counts of a parameter and of its updates.

    Attributes:
        counts: the parameter's counts in the last step.
        updates: the counts of all updates; None without a trainer.
        without_master: the share of updates that would be lost without master weights; None
            without a trainer, and for a float16 parameter that has no master weight.
        format: the parameter's format.
    """
    name: str
    counts: Counts
    updates: Optional[Counts] = None
    without_master: Optional[float] = None
    format: Format = FLOAT32


def scales_down(scale: float) -> Iterator[float]:
    """Yields the loss scales that a step tries until its gradients are finite."""
    while scale > SMALLEST_SCALE:
        yield scale
        scale /= 2 ** 4
    yield SMALLEST_SCALE


class Updates:
    """Steps on copies of the parameters, without updates.

    Attributes:
        stopped: why no further step is possible; "" before.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.stopped = session, ""
        self.parameters = [p for p in session.parameters.values()
                           if p.grad_req != "null" and p._stype == "default"]
        self.added: Dict[str, np.ndarray[Any, Any]] = defaultdict(  # in all steps
            lambda: np.zeros(1, library.structure("Updates")))
        self.last: Dict[str, np.ndarray[Any, Any]] = {}  # the parameters before an update

    def step(self, low: NetworkCopy, batch: Batch, scale: float) -> StepResult:
        """Runs a step of the network in its policy."""
        return low.step(batch, scales_down(scale))

    def release(self) -> None:
        """Frees what only steps need."""

    def master(self, parameter: Any) -> Array:
        """Returns a parameter's master weight after the last step, if it has one."""
        return None

    def count(self, values: Dict[str, Any]) -> None:
        """Counts the differences between parameters and their values in `last`."""
        library.count_updates([*values.values()], [self.last[name] for name in values],
                              [self.added[name] for name in values])

    def weights(self) -> List[Weight]:
        """Returns the counts of all parameters."""
        weights = []
        for p in self.parameters:
            added, half = self.added.get(p.name), is_16bit(p.data().dtype)
            weights.append(Weight(p.name, Counts.of_array(to_float32(p.data())),
                               format=FORMATS[dtype_name(p.data().dtype)]))
            if added is not None:
                weights[-1].updates = Counts.of_engine(added["counts"])[0]
                if not half or self.master(p) is not None:  # otherwise updates are already lost
                    changed = max(added["changed"].item(), 1)
                    weights[-1].without_master = added["lost"].item() / changed
        return weights


class TrainerUpdates(Updates):
    """A trainer's own steps."""

    def __init__(self, session: Session, trainer: GluonTrainer, batch_size: Optional[int]) -> None:
        super().__init__(session)
        _check_trainer(trainer, session.net)
        self.trainer, self.batch_size = trainer, batch_size
        self.observer = EngineObserver(session.net, trainer)

    def step(self, low: NetworkCopy, batch: Batch, scale: float) -> StepResult:
        clear_added(self.trainer._params)
        if not self.last:
            self.last = {p.name: self._value(p).asnumpy() for p in self.parameters}
        with self.observer:
            loss = self.session.loss(batch)
            if isinstance(self.trainer, Trainer):
                self.trainer.backward(loss)
            else:
                loss.backward()
                deliver_counts(1.0)
        workers = getattr(self.trainer, "workers", 1)
        try:
            self.trainer.step(self.batch_size or batch.data[0].shape[0] * workers)
        except LossScaleError as error:
            self.stopped = str(error)
        clear_added(self.trainer._params)
        self.count({p.name: self._value(p) for p in self.parameters})
        # 0 is the scale of the check of loss heads
        used = [scale for scale, _ in self.observer.passes if scale][-1]
        mean, total = mean_and_total(loss)
        counts = {key: counts for key, (_, counts) in self.observer.totals().items()}
        return StepResult(used, mean, True, counts, total)

    def release(self) -> None:
        self.observer.ops.clear()

    def master(self, parameter: Any) -> Array:
        return _master_of(self.trainer._updaters[0], self.trainer._param2idx.get(parameter.name),
                          parameter.data())

    def _value(self, parameter: Any) -> Any:
        return _wide(parameter.data(), self.master(parameter))


class ModuleUpdates(Updates):
    """Steps on copies of a Module's parameters, and what its optimizer would add to them.

    Each update starts from the current parameters, master weights and states. Without an optimizer,
    or if servers update, there is none.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.module = bound_module(session.net.module)
        self.masters: Dict[str, Any] = {}  # master weights in the last step
        self.updater: Any = None
        if self.module.optimizer_initialized:
            on_store = self.module._update_on_kvstore
            self.updater = (self.module._kvstore if on_store else self.module)._updater

    def step(self, low: NetworkCopy, batch: Batch, scale: float) -> StepResult:
        ran = super().step(low, batch, scale)
        if ran.finite and self.updater is not None:
            self._would_add(low, ran.scale)
        return ran

    def master(self, parameter: Any) -> Array:
        return self.masters.get(parameter.name)

    def _would_add(self, graphs: NetworkCopy, scale: float) -> None:
        """Counts the updates by the gradients of the last run, at this loss scale."""
        group, devices = self.module._exec_group, len(self.module._context)
        by_name = self.module._update_on_kvstore
        updated = [(name, name if by_name else i * devices, weights[0].copy()) for i, (
            name, weights, own) in enumerate(zip(group.param_names, group.param_arrays,
                                                 group.grad_arrays))
                if own[0] is not None and name in graphs.arrays]
        names, indices, weights = map(list, zip(*updated))
        gradients = [graphs.arrays[name].grad.astype(weight.dtype, copy=False)
                     for name, weight in zip(names, weights)]
        updater = self._copied_updater()
        optimizer = updater.optimizer
        for name, index, weight in updated:
            master = _master_of(updater, index, weight)
            if master is not None:
                sync_master(master, weight)
            self.last[name] = _wide(weight, master).asnumpy().copy()
        optimizer.rescale_grad *= self._clipped(gradients, optimizer.rescale_grad / scale) / scale
        updater(indices, gradients, weights)
        self.masters = {name: _master_of(updater, index, weight) for name, index, weight in updated}
        self.count({name: _wide(weight, self.masters[name]) for name, _, weight in updated})

    def _copied_updater(self) -> Any:
        updater = mx.optimizer.get_updater(copy.deepcopy(self.updater.optimizer))
        fitting = getattr(self.session.net.module, "fitting_states", None)  # loaded from a file
        updater.set_states(self.updater.get_states())
        if fitting:
            updater.states = copy.deepcopy(fitting[1])
            updater.states_synced = dict.fromkeys(updater.states, False)
        return updater

    def _clipped(self, gradients: List[Any], factor: float) -> float:
        """Returns the factor by which `clip_norm` scales the gradients times `factor`."""
        max_norm = getattr(self.session.net.module, "max_norm", None)  # MXNet's Modules have none
        if max_norm is None:
            return 1.0
        norm = math.sqrt(float(squares(gradients).sum())) * factor
        return min(max_norm / norm, 1.0) if norm else 1.0


def _check_trainer(trainer: GluonTrainer, net: Network) -> None:
    """Refuses a trainer that cannot take a step of the network."""
    if not isinstance(trainer, mx.gluon.Trainer):
        raise TypeError("trainer is a gluon_amp.Trainer, or MXNet's. "
                        f"Received: {type(trainer).__name__}")
    own = {id(p) for p in net.collect_params().values()}
    if not any(id(parameter) in own for parameter in trainer._params):
        raise ValueError("the trainer has none of the network's parameters")
    if isinstance(trainer, Trainer) and trainer.pending:
        raise ValueError("gradients wait for the trainer's step: call step() before the X-ray, "
                         "which takes a step for each batch")


def _wide(weight: Array, master: Array) -> Array:
    """Returns a weight in float32: its master weight, or the weight if it has none."""
    return to_float32(weight) if master is None else master


def _master_of(updater: Any, index: Any, weight: Array) -> Array:
    return master_in(updater.optimizer, updater.states.get(index)) \
        if is_16bit(weight.dtype) else None
