"""How a training shows where it is: a bar on a terminal, and lines of the log."""
import contextlib
import sys
import time
from typing import Any, Iterator, Tuple

from ..checks import positive
from .command import decimal


def add_arguments(parser: Any) -> None:
    """The flags that a `Progress` reads."""
    add = parser.add_argument
    add("--log-interval", type=positive, default=20, help="batches of a line of the log")
    add("--log-seconds", type=decimal, default=60.0,
        help="seconds after which there is a line in any case; in the text, not in log.jsonl")


class Progress:
    """Goes through the batches of an epoch. On a terminal a bar shows epoch, loss, scale,
    samples/s and the time left.

    Args:
        args: a script's flags; those of `add_arguments` and `epochs` are read.
        samples: how many examples a step takes in, of all ranks together.
        shows: False on ranks that do not log.
    """
    add_arguments = staticmethod(add_arguments)

    def __init__(self, args: Any, batches: Any, epoch: int, samples: int, shows: bool = True):
        from tqdm import tqdm  # which takes a tenth of gluon_amp's import
        self.args, self.samples, self.shows = args, samples, shows
        self.bar = tqdm(batches, f"epoch {epoch + 1}/{args.epochs}", leave=False,
                        disable=None if shows else True, unit=" samples", unit_scale=samples,
                        dynamic_ncols=True, mininterval=0.2)
        self._begun, self._batches = time.time(), 0

    def __iter__(self) -> Iterator[Tuple[int, Any]]:
        from tqdm.contrib.logging import logging_redirect_tqdm
        terminal = self.shows and sys.stderr.isatty()
        with logging_redirect_tqdm() if terminal else contextlib.nullcontext():
            yield from enumerate(self.bar)

    def step(self, batch: int, loss: float, scale: float) -> Tuple[bool, float]:
        """After each step: shows it.

        Returns:
            whether --log-interval asks for a line in both logs; and the samples/s since the line
            before, where one of text is due; else 0.
        """
        self.bar.set_postfix_str(f"loss {loss:.3g}, scale {scale:g}", refresh=False)
        self._batches += 1
        seconds = time.time() - self._begun
        due = (batch + 1) % self.args.log_interval == 0
        if not due and seconds < self.args.log_seconds:
            return False, 0.0
        speed = self.samples * self._batches / max(seconds, 1e-9)
        self._begun, self._batches = time.time(), 0
        return due, speed
