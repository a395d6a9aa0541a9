"""All workers meet before any of them makes its store. A store waits for all, without an error
where one has ended before or never comes: MXNet's servers wait for ever, Horovod ends the process.

    MXNet's servers    workers that `gluon-amp launch` has started meet at the launcher:
      worker             `join` sends its number, and waits for a line
      launcher           `Rendezvous.poll` sends all a line: to go on, or which one has ended or is
                         missing
    Horovod            `join_horovod`: each rank writes its number where they all can read it,
                       and rank 0 "all", once it has found every number
"""
import contextlib
import http.client
import math
import os
import socket
import time
from typing import Dict, Sequence

from ..checks import listed
from .supervise import RankEndedError, seconds_of

ADDRESS = "GLUON_AMP_LAUNCHER"  # in the environment of the workers
# In the environment of the ranks that horovodrun has started with Gloo: where they meet.
HOROVOD_MEETS_AT = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_GO_ON = b"go on\n"
_POLL = 0.05  # seconds between two requests


def patience() -> float:
    """For how many seconds workers wait for others to begin."""
    return seconds_of("GLUON_AMP_START_TIMEOUT", 300.0)


class Rendezvous:
    """The launcher's list of workers that are about to make their stores.

    Args:
        host: an address of this machine that all workers can reach.
        workers: their names.
    """

    def __init__(self, host: str, workers: Sequence[str]) -> None:
        self._workers, self._patience = workers, patience()
        self._listener = socket.create_server((host, 0), backlog=len(workers))
        self._listener.setblocking(False)
        self._waiting: Dict[str, socket.socket] = {}  # by their numbers
        self._until = math.inf  # for so long others may come
        self._all_came = False

    def address_for(self, worker: int) -> str:
        """Where this worker finds the launcher, and its number."""
        return "{}:{}:{}".format(*self._listener.getsockname(), worker)

    def poll(self, ended: str = "") -> None:
        """Takes those that have come, and replies once it is time.

        Args:
            ended: which worker has ended, and how; "" while all are there.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take(self._listener.accept()[0])
        self._all_came = self._all_came or len(self._waiting) >= len(self._workers)
        if self._all_came:
            self._reply(_GO_ON)
        elif ended:
            self._reply(f"{ended} before it made its own\n".encode())
        elif time.monotonic() > self._until:
            missing = [name for i, name in enumerate(self._workers) if str(i) not in self._waiting]
            self._reply(f"{_have_not_come(missing, self._patience)}\n".encode())

    def _take(self, worker: socket.socket) -> None:
        worker.settimeout(1)  # it says at once who it is
        with contextlib.suppress(OSError):
            self._waiting[worker.recv(32).decode().strip()] = worker
            self._until = min(self._until, time.monotonic() + self._patience)

    def _reply(self, line: bytes) -> None:
        for worker in self._waiting.values():
            with worker, contextlib.suppress(OSError):
                worker.sendall(line)
        self._waiting.clear()

    def close(self) -> None:
        """Ends it: workers that wait raise, since the launcher has ended."""
        for one in [self._listener, *self._waiting.values()]:
            one.close()


def join() -> None:
    """Of a worker that a launcher has started: waits until all others are about to make their
    stores, too; raises where one has ended or does not come."""
    if ADDRESS not in os.environ:
        return
    host, port, number = os.environ[ADDRESS].rsplit(":", 2)
    try:
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{number}\n".encode())
            line = connection.makefile("rb").readline()
    except OSError as error:
        raise OSError(f"the launcher at {host}:{port} cannot be reached: {error}") from error
    if line != _GO_ON:
        raise RankEndedError("this worker waits in vain to make its store: "
                             + (line.decode().strip() or "the launcher has ended"))


def join_horovod() -> None:
    """Of a rank that horovodrun has started with Gloo: waits until all others are about to begin,
    too; raises where one does not come. (Elastic ranks come and go as they like.)"""
    host, port, rank, size = (os.environ.get(name, "") for name in (
        *HOROVOD_MEETS_AT, "HOROVOD_RANK", "HOROVOD_SIZE"))
    if not (host and port and rank and size) or "HOROVOD_ELASTIC" in os.environ:
        return

    def request(method: str, key: str) -> bool:
        """PUT writes a key; GET returns whether it is written."""
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        with contextlib.closing(connection), contextlib.suppress(OSError,
                                                                 http.client.HTTPException):
            connection.request(method, f"/gluon_amp_start/{key}", "come")
            return connection.getresponse().status == http.client.OK
        return False

    seconds = patience()
    end = time.monotonic() + seconds
    others = [str(other) for other in range(int(size)) if str(other) != rank]
    requests = [("GET", other) for other in others] + [("PUT", "all")] if rank == "0" \
        else [("GET", "all")]
    for one in [("PUT", rank), *requests]:
        while not request(*one):
            if time.monotonic() > end:
                missing = [f"rank {other}" for other in others if not request("GET", other)]
                if not missing:
                    return
                raise RankEndedError(f"rank {rank} waits in vain to make its store: "
                                     + _have_not_come(missing, seconds))
            time.sleep(_POLL)


def _have_not_come(names: Sequence[str], seconds: float) -> str:
    """The sentence about workers that have not come."""
    has, it = ("have", "they") if len(names) > 1 else ("has", "it")
    return f"{listed(names)} {has} not come within {seconds:g} seconds " \
           f"(GLUON_AMP_START_TIMEOUT): look at what {it} printed last"
