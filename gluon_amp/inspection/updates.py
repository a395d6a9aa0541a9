"""A trainer's own step under an X-ray, and what it adds to the parameters."""
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from .._mxnet import mx, np
from ..annotations import Array, Batch, LossFunction, Network, Parameter
from ..annotations import Trainer as GluonTrainer
from ..cpu import library
from ..cpu.arrays import to_float32
from ..formats import FLOAT16, FLOAT32, Format
from ..training.gradients import clear_added
from ..training.loss_scale import LossScaleError
from ..training.optimizer import master_in
from ..training.trainer import Trainer
from .statistics import Counted, Counts, both_ways, read
from .trial import Ran, Watched, loss_of, mean_and_total, split, standing_in


@dataclass
class Weight:
    """A parameter: its numbers, and its updates.

    Attributes:
        counts: of its numbers, in the last step.
        updates: of what the steps added to it; None without a trainer.
        without_master: the share of these that would have changed nothing in float16 alone; None
            without a trainer, and of a float16 parameter without a master: it has lost them.
        format: the format that the parameter has.
    """
    name: str
    counts: Counts
    updates: Optional[Counts] = None
    without_master: Optional[float] = None
    format: Format = FLOAT32


def check_trainer(trainer: GluonTrainer, net: Network) -> None:
    """Refuses what can take no step of a network."""
    if isinstance(net, mx.mod.BaseModule):
        raise TypeError("of a Module, an X-ray makes steps on copies: trainer= is for Gluon")
    if not isinstance(trainer, mx.gluon.Trainer):
        raise TypeError("trainer is a gluon_amp.Trainer, or MXNet's. "
                        f"Received: {type(trainer).__name__}")
    own = {id(p) for p in net.collect_params().values()} if hasattr(net, "collect_params") else ()
    if not any(id(parameter) in own for parameter in trainer._params):
        raise ValueError("the trainer has none of the network's parameters")
    if isinstance(trainer, Trainer) and trainer._step.begun:
        raise ValueError("gradients wait for the trainer's step: take it before the X-ray, each "
                         "look of which is a step")


class Updates:
    """The parameters, and what a trainer's steps add to them.

    Attributes:
        gave_up: what the trainer said when it took no step any more; "" until then.
    """

    def __init__(self, net: Network, trainer: Optional[GluonTrainer],
                 batch_size: Optional[int] = None) -> None:
        self.net, self.batch_size = net, batch_size
        self.trainer: Any = trainer
        self.parameters = [p for p in net.collect_params().values()
                           if p.grad_req != "null" and p._stype == "default"]
        self.added: Dict[str, library.Updates] = defaultdict(library.Updates)  # by all steps
        self.watched = Watched(net)
        self.gave_up = ""
        self.last: Dict[str, np.ndarray[Any, Any]] = {}  # the parameters after the last step

    def step(self, batch: Batch, loss_fn: LossFunction) -> Tuple[float, Ran]:
        """The user's own step, watched: its loss scale, and what was counted."""
        passes: List[Tuple[float, Counted]] = []

        def passed(scale: float) -> None:
            passes.append((scale, read()))
        clear_added(self.trainer._params)
        read()
        if not self.last:
            self.last = {p.name: self._value(p).asnumpy() for p in self.parameters}
        with mx.autograd.record(), standing_in(self.net, self.watched.make):
            loss = loss_of(self.net, batch, loss_fn)
        if isinstance(self.trainer, Trainer):
            self.trainer.after_pass = passed
            try:
                self.trainer.backward(loss)
            finally:
                self.trainer.after_pass = None
        else:
            loss.backward()
            passed(1.0)
        workers = getattr(self.trainer, "workers", 1)
        try:
            self.trainer.step(self.batch_size or split(batch)[0][0].shape[0] * workers)
        except LossScaleError as error:
            self.gave_up = str(error)
        clear_added(self.trainer._params)
        self.count({p.name: self._value(p) for p in self.parameters})
        scale, backward = [one for one in passes if one[0]][-1]  # a look at heads begins with 0
        mean, total = mean_and_total(loss)
        return scale, Ran(mean, True, both_ways(passes[0][1], backward), total)

    def count(self, values: Mapping[str, Any]) -> None:
        """Counts what was added to parameters since they were what `last` has."""
        library.count_updates([*values.values()], [self.last[name] for name in values],
                              [self.added[name] for name in values])

    def _value(self, parameter: Parameter) -> Any:
        """A parameter's master, or itself where it has none."""
        master = self._master(parameter)
        return to_float32(parameter.data()) if master is None else master

    def _master(self, parameter: Parameter) -> Array:
        if parameter.data().dtype is not np.float16 or self.trainer is None:
            return None
        state = self.trainer._updaters[0].states.get(
            self.trainer._param2idx.get(parameter.name))
        return master_in(self.trainer._optimizer, state)

    def _keeps_all(self, parameter: Parameter) -> bool:
        """Whether what is added to a parameter stays: float16 alone loses some of it."""
        return parameter.data().dtype is not np.float16 or self._master(parameter) is not None

    def weights(self) -> List[Weight]:
        """What was counted."""
        made = []
        for p in self.parameters:
            added, counts, share = self.added.get(p.name), None, None
            if added is not None:
                counts = Counts.of_engine(added.counts)
                share = added.lost / max(added.changed, 1) if self._keeps_all(p) else None
            format_ = FLOAT16 if p.data().dtype is np.float16 else FLOAT32
            made.append(Weight(p.name, Counts.of_array(to_float32(p.data())), counts, share,
                               format_))
        return made
