"""A store of MXNet's servers waits for all workers, for ever where one has ended before. So those
that `gluon-amp launch` starts ask it first.

    worker     `answer`: connects to the launcher before it makes its store, and waits for a line
    launcher   `RollCall.look`: tells all to go on once each has come, or who has ended instead
"""
import contextlib
import os
import socket
from typing import List

from .watch import RankEndedError

ADDRESS = "GLUON_AMP_LAUNCHER"  # in the environment of the workers
_GO_ON = b"go on\n"


class RollCall:
    """The launcher's list of workers that are about to make their stores.

    Args:
        host: an address of this machine that all workers can reach.
        workers: how many there are.
    """

    def __init__(self, host: str, workers: int) -> None:
        self._listener = socket.create_server((host, 0), backlog=workers)
        self._listener.setblocking(False)
        self._workers, self._all_came = workers, False
        self._waiting: List[socket.socket] = []
        self.address = "{}:{}".format(*self._listener.getsockname())

    def look(self, ended: str = "") -> None:
        """Takes those that have come, and answers them if it is time.

        Args:
            ended: which worker has ended, and how; "" while all are there.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                self._waiting.append(self._listener.accept()[0])
        self._all_came = self._all_came or len(self._waiting) >= self._workers
        if self._all_came or ended:
            answer = _GO_ON if self._all_came else f"{ended} before it made its own\n".encode()
            for worker in self._waiting:
                with worker, contextlib.suppress(OSError):
                    worker.sendall(answer)
            self._waiting.clear()

    def close(self) -> None:
        """Ends it: who waits is told that the launcher has ended."""
        for one in [self._listener, *self._waiting]:
            one.close()


def answer() -> None:
    """Of a worker that a launcher has started: waits until all others are about to make their
    stores, too; raises where one has ended."""
    if ADDRESS not in os.environ:
        return
    host, _, port = os.environ[ADDRESS].rpartition(":")
    try:
        with socket.create_connection((host, int(port))) as connection:
            told = connection.makefile("rb").readline()
    except OSError as error:
        raise OSError(f"the launcher at {host}:{port} cannot be reached: {error}") from error
    if told != _GO_ON:
        raise RankEndedError("this worker waits in vain to make its store: "
                             + (told.decode().strip() or "the launcher has ended"))
