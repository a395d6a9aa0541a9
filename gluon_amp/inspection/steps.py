"""A trainer's own steps under an X-ray, which otherwise runs steps on copies (session.py)."""
from __future__ import annotations

from typing import Optional

import mxnet as mx

from ..annotations import Network
from ..annotations import Trainer as GluonTrainer
from ..training.gradients import clear_added
from ..training.loss_scale import LossScaleError
from ..training.trainer import Trainer
from .session import Batch, Session, StepResult, mean_and_total
from .watch import EngineObserver, deliver_counts


class TrainerSteps:
    """Steps of a trainer on batches of a session.

    Attributes:
        stopped: why no further step is possible; "" before.
        observer: what counts the values of a step.
    """

    def __init__(self, session: Session, trainer: GluonTrainer, batch_size: Optional[int]) -> None:
        _check_trainer(trainer, session.net)
        self.session, self.trainer, self.batch_size = session, trainer, batch_size
        self.stopped = ""
        self.observer = EngineObserver(session.net, trainer)

    def step(self, batch: Batch) -> StepResult:
        clear_added(self.trainer._params)
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
        used = self.observer.passes[-1][0]
        mean, total = mean_and_total(loss)
        counts = {key: counts for key, (_, counts) in self.observer.totals().items()}
        return StepResult(used, mean, True, counts, total)


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
