"""The context manager of `mx.contrib.amp`, for a Trainer of ours."""
from contextlib import contextmanager
from typing import Any, Iterator

from .._mxnet import mx
from ..annotations import Array
from .optimizer import weights_unwritten
from .trainer import Trainer, begin


@contextmanager
def scale_loss(loss: Array, trainer: Trainer) -> Iterator[Any]:
    """Scales a loss for a backward pass in the `with` block, as `mx.contrib.amp.scale_loss` does.

    Prefer `trainer.backward(loss)`: it searches the first dynamic scale without a skipped step,
    and refuses loss heads that no scale reaches.

        with gluon_amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    """
    if not isinstance(trainer, Trainer):
        raise TypeError("scale_loss takes a gluon_amp.Trainer. Received: "
                        f"{type(trainer).__module__}.{type(trainer).__name__}")
    if not trainer._step.scaling:
        yield loss
        return
    several = isinstance(loss, (list, tuple))
    losses = list(loss) if several else [loss]
    with trainer._step.in_thread("scale_loss()"):
        with mx.autograd.pause():
            scale = begin([trainer], losses)
        with mx.autograd.record(mx.autograd.is_training()):
            scaled = [one * scale for one in losses]
        with weights_unwritten(trainer._optimizer):
            yield scaled if several else scaled[0]
        trainer._step.note_written()
        trainer._step.end(scale, [one.detach() for one in losses])
        trainer._step.guard(trainer._step.new())
