"""The learning-rate range test of Smith (2015).

    for each rate, from `start` to `end` by a constant factor:
        one step; the loss, smoothed by an exponential moving average
        (a skipped step is repeated)
        stop when the smoothed loss is 4 times its smallest value, or not finite,
        or no loss scale fits
    propose the rate at which the smoothed loss falls fastest

Afterwards the network, the Trainer and the loss scale are restored. Accumulated gradients
(grad_req="add") start at 0 for each rate, and are 0 at the end.
"""
from __future__ import annotations

import copy
import math
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, List, Optional

from .._mxnet import mx, np
from ..annotations import LossFunction, Network
from ..annotations import Trainer as GluonTrainer
from ..checks import iterator, positive_number, whole_number
from .gradients import clear_added
from .loss_scale import LossScaleError
from .trainer import Trainer

_SMOOTHING = 0.9
_DIVERGED = 4.0


@dataclass(frozen=True)
class LearningRates:
    """The result of `lr_find`.

    Attributes:
        rates: the learning rates.
        losses: the smoothed loss at each.
        suggestion: the rate at which the loss falls fastest; None if it does not fall.
    """
    rates: List[float]
    losses: List[float]
    suggestion: Optional[float]


def lr_find(net: Network, trainer: GluonTrainer, loss_fn: LossFunction, batches: Iterable[Any],
            start: float = 1e-6, end: float = 10.0, steps: int = 100) -> LearningRates:
    """Runs a learning rate range test and proposes a rate.

    It stops early if the loss diverges. Network, trainer and loss scale do not change.

    Args:
        net: the network, which has run once.
        trainer: a gluon_amp.Trainer or a gluon.Trainer. With several workers, each passes its own
            batches, and all get the same result.
        loss_fn: called with the network's output and the label.
        batches: pairs of data and label, repeated if they are too few.
        start: the first learning rate.
        end: the last learning rate.
        steps: the number of rates, one step each.

    Returns:
        A `LearningRates`.

    Raises:
        TypeError: an argument has another type.
        ValueError: `start` is not below `end`, there are fewer than 10 steps, or no batches.
    """
    if not isinstance(net, mx.gluon.Block):
        raise TypeError(f"net must be a gluon Block. Received: {type(net).__name__}")
    if not isinstance(trainer, mx.gluon.Trainer):
        raise TypeError("trainer must be a gluon_amp.Trainer, or MXNet's. Received: "
                        f"{type(trainer).__name__}")
    if positive_number(start, "start") >= positive_number(end, "end"):
        raise ValueError(f"start must be below end. Received: start={start!r}, end={end!r}")
    whole_number(steps, "steps", least=10)
    rates: List[float] = []
    losses: List[float] = []
    average, best = 0.0, math.inf
    with mx.autograd.pause(), _as_before(net, trainer):
        source = _endless(batches)
        for i in range(steps):
            rate = start * (end / start) ** (i / (steps - 1))
            trainer.set_learning_rate(rate)
            try:
                loss = _step(net, trainer, loss_fn, source)
            except LossScaleError:  # the network has diverged
                break
            average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
            smooth = average / (1 - _SMOOTHING ** (i + 1))
            if not math.isfinite(smooth) or smooth > _DIVERGED * best and i >= 10:
                break
            best = min(best, smooth)
            rates.append(rate)
            losses.append(smooth)
    return LearningRates(rates, losses, _steepest(rates, losses))


def _step(net: Network, trainer: GluonTrainer, loss_fn: LossFunction,
          source: Iterator[Any]) -> float:
    """Takes a step, repeated if it is skipped, and returns the loss before it."""
    while True:
        data, label = next(source)
        clear_added(trainer._params)
        with mx.autograd.record():
            loss = loss_fn(net(data), label)
        if not isinstance(trainer, Trainer):
            loss.backward()
            trainer.step(data.shape[0])
            return loss.mean().asnumpy().item()
        value = _mean_over_ranks(trainer, loss.mean().asnumpy().item())
        trainer.backward(loss)
        if trainer.step(data.shape[0] * trainer.workers) or not math.isfinite(value):
            return value


def _mean_over_ranks(trainer: Trainer, loss: float) -> float:
    """Returns the mean loss over ranks, so that all stop at the same rate and propose the same."""
    losses = trainer.gather(struct.pack("d", loss))
    return sum(struct.unpack("d", one)[0] for one in losses) / len(losses)


def _steepest(rates: List[float], losses: List[float]) -> Optional[float]:
    """Returns the rate of steepest descent between the end of the average's warm-up and the
    lowest loss."""
    begin = min(round(1 / (1 - _SMOOTHING)), len(rates) // 3)
    lowest = int(np.argmin(losses)) if losses else 0
    if lowest < begin + 2 or losses[begin] - losses[lowest] < 0.01 * abs(losses[begin]):
        return None
    slopes = np.gradient(np.array(losses), np.log(np.array(rates)))
    return rates[begin + int(np.argmin(slopes[begin:lowest]))]


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in iterator(
                batches, "batches is a list of tuples (data, label), or an iterable of them"):
            empty = False
            yield batch
        if empty:
            raise ValueError("lr_find needs batches that can be iterated again, such as a "
                             "DataLoader or a list. Received: none")


@contextmanager
def _as_before(net: Network, trainer: GluonTrainer) -> Iterator[None]:
    """Restores parameters, optimizer, states and loss scale at the end."""
    if isinstance(trainer, Trainer):
        trainer._check_own_weights("lr_find()")
        trainer._broadcast_parameters()  # before the copies that are restored at the end
        trainer._step.weights_replaced = False  # there are no gradients of earlier weights
    elif not trainer._kv_initialized:
        trainer._init_kvstore()
    if trainer._update_on_kvstore:
        raise ValueError("lr_find cannot restore an optimizer on a kvstore: create the Trainer "
                         "with update_on_kvstore=False")
    every = dict.fromkeys([*net.collect_params().values(), *trainer._params])
    parameters = {p: [a.copy() for a in p.list_data()] for p in every if p._data is not None}
    optimizer = trainer._optimizer
    attributes = copy.deepcopy({name: value for name, value in optimizer.__getstate__().items()
                                if name != "lr_scheduler"})
    scheduler = optimizer.lr_scheduler
    states = [updater.get_states() for updater in trainer._updaters]
    steps = trainer._step.state() if isinstance(trainer, Trainer) else None
    averaged = getattr(trainer, "_averaged", [])
    if averaged:
        trainer._averaged = []  # the sweep is no training
    optimizer.lr_scheduler = None  # the sweep sets the rate
    try:
        yield
    finally:
        for parameter, arrays in parameters.items():
            for array, before in zip(parameter.list_data(), arrays):
                before.copyto(array)
        clear_added(trainer._params)
        optimizer.__dict__.update(attributes, lr_scheduler=scheduler)
        for updater, before in zip(trainer._updaters, states):
            updater.set_states(before)
        if steps is not None:
            trainer._step.load(steps)
        if averaged:
            trainer._averaged = averaged
