"""The startup barrier: all workers reach it before any of them creates its store.

A store waits for all workers. If one has exited, MXNet's servers wait forever, and Horovod aborts.

    MXNet's servers    the barrier of `gluon-amp launch`:
      worker             `join` connects with the job's token, and waits for a line
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
from .listener import Listener, connect
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
        self._listener = Listener(host, len(workers))
        self._waiting: Dict[int, socket.socket] = {}  # by the workers' indices
        self._until = math.inf  # when the barrier times out
        self._all_came = False

    def address_for(self, worker: int) -> str:
        """Returns the launcher's address, a worker's index, and the job's token."""
        host, port = self._listener.address
        return f"{host}:{port}:{worker}:{self._listener.token.hex()}"

    def poll(self, ended: str = "") -> None:
        """Accepts workers, and replies to all when the barrier completes or fails.

        Args:
            ended: which worker has exited, and how; "" while all run.
        """
        for worker, connection in self._listener.poll():
            if worker in self._waiting:  # it has started again
                self._waiting[worker].close()
            self._waiting[worker] = connection
            self._until = min(self._until, time.monotonic() + self._patience)
        self._all_came = self._all_came or len(self._waiting) == len(self._workers)
        if self._all_came:
            self._reply(_GO_ON)
        elif ended:
            self._reply(f"{ended} before it created its own\n".encode())
        elif time.monotonic() > self._until:
            missing = [name for i, name in enumerate(self._workers) if i not in self._waiting]
            self._reply(f"{_have_not_come(missing, self._patience)}\n".encode())

    def _reply(self, line: bytes) -> None:
        for worker in self._waiting.values():
            with worker, contextlib.suppress(OSError):
                worker.sendall(line)
        self._waiting.clear()

    def close(self) -> None:
        """Closes the barrier: workers that wait raise an error."""
        self._listener.close()
        for worker in self._waiting.values():
            worker.close()


def join() -> None:
    """Waits at the launcher's barrier; does nothing without a launcher.

    Raises:
        RankEndedError: a worker has exited, or does not reach the barrier in time.
    """
    if ADDRESS not in os.environ:
        return
    host, port, number, token = os.environ[ADDRESS].rsplit(":", 3)
    try:
        with connect(host, int(port), bytes.fromhex(token), int(number)) as connection:
            line = connection.makefile("rb").readline()
    except OSError as error:
        raise OSError(f"the launcher at {host}:{port} cannot be reached: {error}") from error
    if line != _GO_ON:
        raise RankEndedError("this worker cannot create its store: "
                             + (line.decode(errors="replace").strip() or "the launcher has exited"))


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
