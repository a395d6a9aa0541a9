"""Connections between the processes of one job.

Any process on the network can connect to a port. The processes of a job send its token first, and
all other connections are closed.
"""
import contextlib
import hmac
import secrets
import socket
import struct
import time
from typing import Dict, List, Optional, Tuple

_HELLO = struct.Struct("!16sI")  # a token and the number of a process
_SECONDS = 5.0  # in which a connection sends its hello
_MOST = 128  # connections that have not sent it


class Listener:
    """A server socket for the processes of a job.

    Args:
        host: an address of this machine that all of them can reach.
        count: the numbers of the processes are below it.

    Attributes:
        token: what `connect` needs.
        address: the host and the port.
    """

    def __init__(self, host: str, count: int) -> None:
        self.token = secrets.token_bytes(16)
        self._count = count
        self._server = socket.create_server((host, 0), backlog=max(count, _MOST))
        self._server.setblocking(False)
        self.address: Tuple[str, int] = self._server.getsockname()[:2]
        self._unknown: Dict[socket.socket, float] = {}  # until when each may send its hello

    def poll(self) -> List[Tuple[int, socket.socket]]:
        """Returns the numbers and the connections of new processes of the job, without waiting."""
        now = time.monotonic()
        with contextlib.suppress(OSError):  # none waits, or this process has too many open files
            for _ in range(_MOST):
                connection = self._server.accept()[0]
                connection.setblocking(False)
                self._unknown[connection] = now + _SECONDS
        found = []
        for connection, until in list(self._unknown.items()):
            hello = _read_hello(connection)
            if hello is None and until > now and len(self._unknown) <= _MOST:
                continue
            del self._unknown[connection]
            token, number = _HELLO.unpack(hello or bytes(_HELLO.size))
            if hmac.compare_digest(token, self.token) and number < self._count:
                connection.setblocking(True)
                found.append((number, connection))
            else:
                connection.close()
        return found

    def close(self) -> None:
        """Closes the socket and the connections of unknown processes."""
        for each in [self._server, *self._unknown]:
            each.close()


def _read_hello(connection: socket.socket) -> Optional[bytes]:
    """Returns what a connection has sent: None while it is incomplete, b"" if it has closed."""
    try:
        if len(connection.recv(_HELLO.size, socket.MSG_PEEK)) in range(1, _HELLO.size):
            return None
        return connection.recv(_HELLO.size)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def connect(host: str, port: int, token: bytes, number: int) -> socket.socket:
    """Connects to a Listener as one of its processes."""
    connection = socket.create_connection((host, port))
    try:
        connection.sendall(_HELLO.pack(token, number))
    except OSError:
        connection.close()
        raise
    return connection
