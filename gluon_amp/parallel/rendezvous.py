"""The startup barrier: all workers reach it before any of them creates its store.

A store waits for all workers. If one has exited, MXNet's servers wait forever, and Horovod aborts.

    MXNet's servers    the barrier of `gluon-amp launch`:
      worker             `join` sends its index, and waits for a line
      launcher           `Rendezvous.poll` sends a line to all: continue, or the worker that exited
                         or is missing
    Horovod            `join_horovod`: each rank writes its number to Horovod's HTTP store, and
                       rank 0 writes "all" when it has read every number
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
# The address of Horovod's HTTP store in the environment of ranks with Gloo.
HOROVOD_MEETS_AT = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_GO_ON = b"go on\n"
_POLL = 0.05  # seconds between two requests


def patience() -> float:
    """Returns the barrier's timeout in seconds."""
    return seconds_of("GLUON_AMP_START_TIMEOUT", 300.0)


class Rendezvous:
    """The launcher's side of the barrier.

    Args:
        host: an address of this machine that all workers can reach.
        workers: the names of the workers.
    """

    def __init__(self, host: str, workers: Sequence[str]) -> None:
        self._workers, self._patience = workers, patience()
        self._listener = socket.create_server((host, 0), backlog=len(workers))
        self._listener.setblocking(False)
        self._waiting: Dict[str, socket.socket] = {}  # by the workers' indices
        self._until = math.inf  # when the barrier times out
        self._all_came = False

    def address_for(self, worker: int) -> str:
        """Returns the launcher's address and a worker's index."""
        return "{}:{}:{}".format(*self._listener.getsockname(), worker)

    def poll(self, ended: str = "") -> None:
        """Accepts workers, and replies to all when the barrier completes or fails.

        Args:
            ended: which worker has exited, and how; "" while all run.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take(self._listener.accept()[0])
        self._all_came = self._all_came or len(self._waiting) >= len(self._workers)
        if self._all_came:
            self._reply(_GO_ON)
        elif ended:
            self._reply(f"{ended} before it created its own\n".encode())
        elif time.monotonic() > self._until:
            missing = [name for i, name in enumerate(self._workers) if str(i) not in self._waiting]
            self._reply(f"{_have_not_come(missing, self._patience)}\n".encode())

    def _take(self, worker: socket.socket) -> None:
        worker.settimeout(1)  # a worker sends its index at once
        with contextlib.suppress(OSError):
            self._waiting[worker.recv(32).decode().strip()] = worker
            self._until = min(self._until, time.monotonic() + self._patience)

    def _reply(self, line: bytes) -> None:
        for worker in self._waiting.values():
            with worker, contextlib.suppress(OSError):
                worker.sendall(line)
        self._waiting.clear()

    def close(self) -> None:
        """Closes the barrier: workers that wait raise an error."""
        for one in [self._listener, *self._waiting.values()]:
            one.close()


def join() -> None:
    """Waits at the launcher's barrier; does nothing without a launcher.

    Raises:
        RankEndedError: a worker has exited, or does not reach the barrier in time.
    """
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
        raise RankEndedError("this worker cannot create its store: "
                             + (line.decode().strip() or "the launcher has exited"))


def join_horovod() -> None:
    """Waits at the barrier of ranks that horovodrun has started with Gloo, unless elastic.

    Raises:
        RankEndedError: a rank does not reach the barrier in time.
    """
    host, port, rank, size = (os.environ.get(name, "") for name in (
        *HOROVOD_MEETS_AT, "HOROVOD_RANK", "HOROVOD_SIZE"))
    if not (host and port and rank and size) or "HOROVOD_ELASTIC" in os.environ:
        return

    def request(method: str, key: str) -> bool:
        """Writes a key (PUT), or returns whether it is written (GET)."""
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
                raise RankEndedError(f"rank {rank} cannot create its store: "
                                     + _have_not_come(missing, seconds))
            time.sleep(_POLL)


def _have_not_come(names: Sequence[str], seconds: float) -> str:
    """Returns a message about workers that have not reached the barrier."""
    its = "their" if len(names) > 1 else "its"
    return f"{listed(names)} did not start within {seconds:g} seconds " \
           f"(GLUON_AMP_START_TIMEOUT): see {its} output"
