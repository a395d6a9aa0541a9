"""`--xray FOLDER`: what float16 does to every tensor, in the first steps of each epoch."""
import itertools
import logging
import os
from typing import Any, Callable

from ..checks import positive
from ..xray.view import xray

log = logging.getLogger("gluon_amp.recipes")


def add_xray_arguments(parser: Any) -> None:
    """The flags that `xray_epoch` reads."""
    add = parser.add_argument
    add("--xray", metavar="FOLDER", help="write there, for each epoch, what float16 does to every "
        "tensor in its first steps (docs/xray.md); training stays as it is, bit by bit")
    add("--xray-steps", type=positive, default=3, help="how many steps")


def xray_epoch(args: Any, epoch: int, net: Any, batches: Any,
               loss_fn: Callable[..., Any]) -> None:
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
