"""Some steps of training on copies of a network's parameters, to compare losses."""
import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from .._mxnet import mx, np
from ..annotations import LossFunction
from ..cpu.arrays import to_float32
from .trial import FIRST_SCALE, LEAST_SCALE, Trial, split


class Place(NamedTuple):
    """Where gradients can be compared: the number of a batch, and the parameters' values; None: as
    the network has them now."""
    batch: int
    values: Optional[Dict[str, Any]] = None


class Trained(NamedTuple):
    """A training: the mean loss of the second half of its steps, infinite where a loss or gradient
    was not finite; and where that was."""
    loss: float
    failed: Optional[Place] = None


def trained(trial: Trial, batches: Sequence[Any], loss_fn: LossFunction, steps: int, seed: int,
            optimizer: str, settings: Optional[Dict[str, Any]] = None,
            disturbed: bool = False) -> Trained:
    """Trains from the network's parameters of now, with float32 masters.

    Args:
        trial: its copies are trained.
        seed: of the order of the batches, and of random numbers in the graph.
        disturbed: begin with weights changed by up to 2^-12 of themselves: what training makes
            of that is what one run cannot tell from another.
    """
    trial.copy()
    rng = np.random.default_rng(seed)
    order = rng.integers(0, len(batches), steps)
    parameters = [p for name, p in trial.parameters.items()
                  if name in trial.arrays and p.grad_req != "null"]
    masters = [to_float32(p.data()).as_nd_ndarray().copy() for p in parameters]
    if disturbed:
        for master in masters:
            factor = 1 + 2.0 ** -12 * rng.uniform(-1, 1, master.shape)
            master[:] = mx.nd.array(master.asnumpy() * factor)
            _round(trial, parameters, masters)
    update = mx.optimizer.get_updater(mx.optimizer.create(
        optimizer, param_dict=dict(enumerate(parameters)), **(settings or {})))
    scale, losses = FIRST_SCALE, []  # type: float, List[float]
    for number, which in enumerate(order):
        batch = batches[which]
        ran = None
        while ran is None or not ran.finite:
            mx.random.seed(1000 * seed + number)
            ran = trial.run(batch, loss_fn, scale)
            if not math.isfinite(ran.loss) or scale < LEAST_SCALE:
                values = {**trial.arrays, **{p.name: m for p, m in zip(parameters, masters)}}
                return Trained(math.inf, Place(which, values))
            scale = scale if ran.finite else scale / 4
        losses.append(ran.loss)
        update.optimizer.rescale_grad = 1 / (scale * split(batch)[0][0].shape[0])
        for i, (parameter, master) in enumerate(zip(parameters, masters)):
            update(i, to_float32(trial.arrays[parameter.name].grad).as_nd_ndarray(), master)
        _round(trial, parameters, masters)
    return Trained(float(np.mean(losses[steps // 2:])))


def _round(trial: Trial, parameters: List[Any], masters: List[Any]) -> None:
    """The copies become what their masters are."""
    for parameter, master in zip(parameters, masters):
        array = trial.arrays[parameter.name].as_nd_ndarray()
        array[:] = master.astype(array.dtype)
