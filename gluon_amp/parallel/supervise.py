"""Raises an error on all ranks if one exits, hangs, or makes different calls.

MXNet's parameter server and Horovod would wait forever.

Each rank keeps a connection to rank 0 open. The system closes it when a process exits; rank 0
detects this and informs the others. Both sides send an empty line each second as a heartbeat, which
a process that hangs does not send. `call` runs blocking functions in a second thread, so that the
main thread can raise.

Each heartbeat carries the last operations for which a rank has waited. Two ranks that wait for
different operations would deadlock.
"""
import atexit
import contextlib
import json
import logging
import os
import queue
import socket
import struct
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from ..checks import positive_number
from .listener import Listener, connect

# Seconds in which data of a rank that has exited may still arrive.
GRACE = 3.0
BEAT = 1.0  # seconds between two heartbeats
_ADDRESS = struct.Struct("!4sH16s")
_DIED, _ENDED = "has died", "has ended"
_LONGEST = 1 << 20  # bytes of a line
_POLL = 0.05  # seconds between two looks for new connections


def patience() -> float:
    """Returns the seconds without a heartbeat after which a rank counts as hung."""
    return max(2 * BEAT, seconds_of("GLUON_AMP_RANK_TIMEOUT", 30.0))


def seconds_of(variable: str, default: float) -> float:
    """Returns an environment variable as a number of seconds, or the default."""
    said: Any = os.environ.get(variable, default)
    with contextlib.suppress(ValueError):
        said = float(said)
    return positive_number(said, variable)


class RankEndedError(RuntimeError):
    """A rank that this one waits for has exited, hangs, or makes different calls."""


class Supervisor:
    """Runs functions that wait for other ranks, and raises if a rank exits or hangs.

    A rank hangs if it sends no heartbeat for GLUON_AMP_RANK_TIMEOUT seconds (30), an environment
    variable.

    Args:
        rank: the rank of this process.
        workers: the number of ranks.
        gather: gathers the bytes of all ranks; with it rank 0 sends its address.
        reach: a host and port that all ranks can reach, which selects this machine's address.
    """

    def __init__(self, rank: int, workers: int, gather: Callable[[bytes], List[bytes]],
                 reach: Tuple[str, int]) -> None:
        self.rank, self._workers = rank, workers
        self._waits: List[Tuple[int, str]] = []  # the last two operations, numbered
        self.ended: Dict[int, str] = {}
        self._patience = patience()
        self._since = 0.0
        self._raised = False
        self._end = ""  # this rank's status, once it exits
        self._changed = threading.Condition()  # of results and of `ended`
        self._connections: List[socket.socket] = []
        self._work: Any = queue.SimpleQueue()
        if rank == 0:
            listener = Listener(_own_address(reach), workers)
            host, port = listener.address
            gather(_ADDRESS.pack(socket.inet_aton(host), port, listener.token))
            self._start(self._accept, listener)
        else:
            packed, port, token = _ADDRESS.unpack(gather(bytes(_ADDRESS.size))[0])
            connection = connect(socket.inet_ntoa(packed), port, token, rank)
            _keep_alive(connection)
            self._connections.append(connection)
            self._start(self._listen, connection)
        self._start(self._run)
        self._start(self._beat)
        os.register_at_fork(after_in_child=self._close)  # a DataLoader's process is not this rank
        atexit.register(self._say_goodbye, os.getpid())

    def call(self, function: Callable[[], Any], what: str) -> Any:
        """Runs a function that waits for other ranks, and returns its result.

        Args:
            function: the function.
            what: the operation's name, the same on all ranks.

        Raises:
            RankEndedError: a rank has exited, hangs, or waits for another operation.
        """
        number = self._waits[-1][0] + 1 if self._waits else 0
        self._waits = [*self._waits[-1:], (number, what)]
        began = time.monotonic()
        result: Dict[str, Any] = {}
        self._work.put((function, result))
        with self._changed:
            while not result:
                left = max(self._since, began) + GRACE - time.monotonic() if self.ended else None
                if left is not None and left <= 0:
                    self._raised = True
                    raise RankEndedError(f"rank {self.rank} cannot continue: " + "; ".join(
                        f"rank {rank} {how}" for rank, how in sorted(self.ended.items())))
                self._changed.wait(left)
        if "error" in result:
            raise result["error"]
        return result["value"]

    # ---- threads

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=function, args=args, daemon=True).start()

    def _run(self) -> None:
        """Runs the functions of `call`."""
        while True:
            function, result = self._work.get()
            try:
                found = {"value": function()}
            except BaseException as error:  # the main thread raises it
                found = {"error": error}
            with self._changed:
                result.update(found)
                self._changed.notify_all()
            del function, result, found  # they refer to the store, which must be freed

    def _beat(self) -> None:
        """Sends heartbeats."""
        while True:
            time.sleep(BEAT)
            self._send(json.dumps(self._waits) if self.rank and not self._end else "")

    def _send(self, line: str) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.sendall(f"{line}\n".encode())

    def _accept(self, listener: Listener) -> None:
        """Accepts the connections of the other ranks, on rank 0."""
        missing = set(range(1, self._workers))
        with contextlib.closing(listener):
            while missing:
                for rank, connection in listener.poll():
                    if rank not in missing:
                        connection.close()
                        continue
                    missing.remove(rank)
                    _keep_alive(connection)
                    with self._changed:
                        self._connections.append(connection)
                        before = {**self.ended, **({0: self._end} if self._end else {})}
                    with contextlib.suppress(OSError):  # ranks that have ended before
                        for other, how in before.items():
                            connection.sendall(f"{other} {how}\n".encode())
                    self._start(self._wait_for_end, connection, rank)
                time.sleep(_POLL)

    def _wait_for_end(self, connection: socket.socket, rank: int) -> None:
        """Reads until a rank's connection closes, and informs the others, on rank 0."""
        def note(how: str) -> None:
            self._note(rank, how)
            self._send(f"{rank} {how}")

        how = _DIED
        try:
            for line in self._lines(connection, lambda: note(self._silent)):
                if how == _DIED and self.ended.get(rank) == self._silent:
                    note("")
                if line.startswith("["):
                    self._compare(rank, _operations(line))
                elif line:
                    how = _end_in(line)
                    note(how)
        except ValueError as error:
            how = f"has sent a malformed message: {error}"
        note(how)

    def _compare(self, rank: int, theirs: Dict[int, str]) -> None:
        """Checks that a rank has waited for the same operations as rank 0, on rank 0."""
        for number, what in self._waits:
            if theirs.get(number, what) != what and rank not in self.ended:
                self._note(rank, f"waits for {theirs[number]}, and rank 0 for {what}: all ranks "
                                 "must make the same calls, and as many steps")
                self._send(f"0 waits for {what}, and rank {rank} for {theirs[number]}: all ranks "
                           "must make the same calls, and as many steps")

    def _listen(self, connection: socket.socket) -> None:
        """Reads rank 0's messages until its connection closes, on other ranks."""
        how = _DIED
        try:
            for line in self._lines(connection, lambda: self._note(0, self._silent)):
                if how == _DIED:
                    self._note(0, "")
                if line:
                    rank, said = self._rank_and_end(line)
                    if rank == 0:
                        how = said
                    if rank != self.rank:
                        self._note(rank, said)
        except ValueError as error:
            how = f"has sent a malformed message: {error}"
        # after a success, rank 0 exits last
        everyone = range(self._workers) if how == _ENDED else [0]
        for other in set(everyone) - {self.rank}:
            self._note(other, how)

    def _rank_and_end(self, line: str) -> Tuple[int, str]:
        """Returns the rank and the status in a message of rank 0."""
        rank, _, said = line.partition(" ")
        if not (rank.isdecimal() and len(rank) < 10 and int(rank) < self._workers):
            raise ValueError(repr(line[:80]))
        return int(rank), said

    @property
    def _silent(self) -> str:
        return f"has sent no heartbeat for {self._patience:g} seconds"

    def _lines(self, connection: socket.socket, silent: Callable[[], None]) -> Iterator[str]:
        """Yields lines until the connection closes; calls `silent` if none arrives in time."""
        connection.settimeout(self._patience)
        rest = b""
        while True:
            try:
                received = connection.recv(4096)
            except socket.timeout:
                silent()
                continue
            except OSError:
                return
            if not received:
                return
            *lines, rest = (rest + received).split(b"\n")
            if len(rest) > _LONGEST:
                raise ValueError(f"{rest[:80]!r}...")
            for line in lines:
                yield line.decode().strip()

    def _note(self, rank: int, how: str) -> None:
        """Records that a rank has exited or hangs; an empty `how` clears the record."""
        with self._changed:
            if not how:
                self.ended.pop(rank, None)
            else:
                if not self.ended:
                    self._since = time.monotonic()
                if self.ended.get(rank, _ENDED) == _ENDED:
                    self.ended[rank] = how
            self._changed.notify_all()

    # ---- the end of this rank

    def _close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _send_end(self, how: str) -> None:
        self._send(f"0 {how}" if self.rank == 0 else how)

    def _wait_for_others(self) -> str:
        """Waits until all ranks exit. Returns this rank's status if another has failed, else ""."""
        with self._changed:
            while True:
                for rank, how in self.ended.items():
                    if how != _ENDED:
                        return f"{_ENDED} before the others: rank {rank} {how}"
                if len(self.ended) == self._workers - 1:
                    return ""
                self._changed.wait()

    def _say_goodbye(self, process: int) -> None:
        """Sends this rank's status at exit. MXNet waits for other ranks when it frees its store, so
        the process exits at once after an error on any rank."""
        if os.getpid() != process:
            return
        error: Optional[BaseException] = getattr(sys, "last_value", None)
        failed = error is not None or self._raised
        how = f"{_ENDED} with {type(error).__name__}" if error is not None else _ENDED
        with self._changed:
            self._end = how
        self._send_end(how)
        if not failed:
            how = self._wait_for_others()
            if how:
                print(f"rank {self.rank} {how}", file=sys.stderr)
                self._send_end(how)
                failed = True
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if failed:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(1)


def _operations(line: str) -> Dict[int, str]:
    """Returns the operations in a heartbeat, by number."""
    try:
        found = json.loads(line)
        if all(type(number) is int and isinstance(what, str) for number, what in found):
            return dict(found)
    except (ValueError, TypeError, RecursionError):
        pass
    raise ValueError(repr(line[:80]))


def _end_in(line: str) -> str:
    """Returns the status in a rank's message."""
    if not line.startswith(_ENDED):
        raise ValueError(repr(line[:80]))
    return line


def _own_address(reach: Tuple[str, int]) -> str:
    """Returns the address of this machine on the network of `reach`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(reach)  # sends nothing
        return probe.getsockname()[0]


def _keep_alive(connection: socket.socket) -> None:
    """Enables TCP keep-alive probes every 2 seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
