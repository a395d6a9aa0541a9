"""`--xray FOLDER`: what float16 does to every tensor, in the first steps of each epoch."""
import itertools
import logging
import os
from typing import Any, Callable, List, Optional

from .._mxnet import mx
from ..checks import positive
from ..inspection.view import xray

log = logging.getLogger("gluon_amp.recipes")


def add_xray_arguments(parser: Any) -> None:
    """The flags that `xray_epoch` reads."""
    add = parser.add_argument
    add("--xray", metavar="FOLDER", help="write there, for each epoch, what float16 does to every "
        "tensor in its first steps (docs/xray.md); training stays as it is, bit by bit")
    add("--xray-steps", type=positive, default=3, help="how many steps")


class XrayedIter(mx.io.DataIter):
    """An iterator of a Module's batches that has the first of each epoch X-rayed before it hands
    them out, as they are and in their order.

    Args:
        batches: the iterator itself.
        epoch: the number of the first epoch.
    """

    def __init__(self, args: Any, epoch: int, module: Any, batches: Any) -> None:
        super().__init__(batches.batch_size)
        self.args, self.epoch, self.module, self.batches = args, epoch, module, batches
        self.first: Optional[List[Any]] = None  # of this epoch; None before they are read

    @property
    def provide_data(self) -> Any:
        return self.batches.provide_data

    @property
    def provide_label(self) -> Any:
        return self.batches.provide_label

    def reset(self) -> None:
        self.batches.reset()
        if self.first is not None:
            self.first, self.epoch = None, self.epoch + 1

    def next(self) -> Any:
        if self.first is None:
            self.first = [_copied(batch) for batch in
                          itertools.islice(self.batches, self.args.xray_steps)]
            xray_epoch(self.args, self.epoch, self.module, self.first)
        return self.first.pop(0) if self.first else self.batches.next()


def _copied(batch: Any) -> Any:
    """An iterator may use the arrays of a batch again for the next."""
    return mx.io.DataBatch([array.copy() for array in batch.data],
                           [array.copy() for array in batch.label], batch.pad, batch.index,
                           batch.bucket_key, batch.provide_data, batch.provide_label)


def xray_epoch(args: Any, epoch: int, net: Any, batches: Any,
               loss_fn: Optional[Callable[..., Any]] = None) -> None:
    """X-rays an epoch's first batches before it is trained, on copies: FOLDER/epoch-0 and so on.
    To be called before the epoch's random numbers are seeded."""
    if not args.xray:
        return
    folder = os.path.join(args.xray, f"epoch-{epoch}")
    if os.path.exists(folder):
        log.info("%s is there already", folder)
        return
    os.makedirs(args.xray, exist_ok=True)
    view = xray(net, itertools.islice(batches, args.xray_steps), loss_fn, steps=args.xray_steps)
    log.info("X-ray of epoch %d: %s\n%s", epoch, view.save(folder), view)
