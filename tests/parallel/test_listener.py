"""Connections to the launcher and to rank 0 from outside the job, and malformed messages."""
import contextlib
import socket
import struct
import time

import pytest
from gluon_amp.parallel.listener import Listener, connect
from gluon_amp.parallel.rendezvous import Rendezvous
from processes import printed

STRANGERS = {
    "nothing": b"", "an index": b"0\n", "no UTF-8": b"\xff\xfe\xfd\n",
    "HTTP": b"GET / HTTP/1.0\r\n\r\n", "another token": struct.pack("!16sI", bytes(16), 0),
    "half a hello": bytes(10), "much": bytes(1 << 20), "an empty line": b"\n", "NUL": b"\0"}


def stranger(address, data=b"", reset=False):
    """A connection that sends this, and is cut if `reset`."""
    connection = socket.create_connection(address, timeout=10)
    with contextlib.suppress(OSError):  # the listener may have closed it
        connection.sendall(data)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    return connection


def worker_of(launcher, i):
    host, port, number, token = launcher.address_for(i).rsplit(":", 3)
    return connect(host, int(port), bytes.fromhex(token), int(number))


def polled(launcher, connections):
    """The lines that the launcher sends to these connections."""
    for connection in connections:
        connection.setblocking(False)
    lines, end = {}, time.monotonic() + 30
    while len(lines) < len(connections) and time.monotonic() < end:
        launcher.poll()
        for i, connection in enumerate(connections):
            with contextlib.suppress(BlockingIOError):
                lines.setdefault(i, connection.recv(100))
    return [lines.get(i) for i in range(len(connections))]


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize("reset", [True, False])
def test_stranger_neither_opens_the_barrier_nor_ends_the_job(data, reset):
    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(contextlib.closing(
            Rendezvous("127.0.0.1", ["worker 0", "worker 1"])))
        first = stack.enter_context(worker_of(launcher, 0))
        host, port = launcher.address_for(0).split(":")[:2]
        for _ in range(3):
            stack.enter_context(stranger((host, int(port)), data, reset))
        first.settimeout(0.01)
        for _ in range(10):
            launcher.poll()
            with pytest.raises(socket.timeout):
                first.recv(100)
        second = stack.enter_context(worker_of(launcher, 1))
        assert polled(launcher, [first, second]) == [b"go on\n"] * 2


def test_member_with_an_invalid_number_is_closed():
    with contextlib.closing(Listener("127.0.0.1", 2)) as listener, \
            connect(*listener.address, listener.token, 2) as connection:
        assert not listener.poll()
        assert connection.recv(1) == b""


def test_many_silent_strangers_do_not_keep_workers_out():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(Listener("127.0.0.1", 2)))
        for i in range(300):
            stack.enter_context(stranger(listener.address))
            if i % 50 == 0:
                assert not listener.poll()
        stack.enter_context(connect(*listener.address, listener.token, 1))
        found = []
        while not found:
            found = listener.poll()
        (number, connection), = found
        connection.close()
        assert number == 1


def test_worker_that_starts_again_replaces_its_connection():
    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(contextlib.closing(
            Rendezvous("127.0.0.1", ["worker 0", "worker 1"])))
        old = stack.enter_context(worker_of(launcher, 0))
        launcher.poll()
        again = stack.enter_context(worker_of(launcher, 0))
        assert polled(launcher, [old]) == [b""]
        other = stack.enter_context(worker_of(launcher, 1))
        assert polled(launcher, [again, other]) == [b"go on\n"] * 2


# Two supervisors for each message: rank 0, whose other rank sends it, and rank 1 of 3, whose rank 0
# sends it. GRACE is the time for which a rank waits for results of others.
RANKS = """
import os, socket, sys, threading, time
from gluon_amp.parallel import supervise
from gluon_amp.parallel.listener import Listener, connect
supervise.GRACE = 0.1
kept = []

def error_of(rank, workers, gather):
    supervisor = supervise.Supervisor(rank, workers, gather, ("127.0.0.1", 9))
    kept.append(supervisor)
    try:
        supervisor.call(threading.Event().wait, "the sum of gradients")
    except supervise.RankEndedError as error:
        return str(error)

def rank_0(data):
    def gather(mine):
        host, port, token = supervise._ADDRESS.unpack(mine)
        host = socket.inet_ntoa(host)
        for hello in (b"", b"\\xff", bytes(20), b"GET / HTTP/1.0"):
            kept.append(socket.create_connection((host, port)))
            kept[-1].sendall(hello)
        kept.append(connect(host, port, token, 0))  # rank 0 is another process
        kept.append(connect(host, port, token, 1))
        kept[-1].sendall(data)
        return [mine]
    return error_of(0, 2, gather)

def rank_1(data):
    listener = Listener("127.0.0.1", 3)
    host, port = listener.address
    def serve():
        while not (found := listener.poll()):
            time.sleep(0.01)
        kept.append(found)
        found[0][1].sendall(data)
    threading.Thread(target=serve, daemon=True).start()
    return error_of(1, 3, lambda mine: [supervise._ADDRESS.pack(
        socket.inet_aton(host), port, listener.token)])

to_rank_0, to_rank_1 = eval(open(sys.argv[1]).read())
for data in to_rank_0:
    print(rank_0(data))
for data in to_rank_1:
    print(rank_1(data))
sys.stdout.flush()
os._exit(0)
"""
BOTH = [b"\xff\xfe\n", b"has gone\n", b"x" * (2 << 20)]
TO_RANK_0 = [b"[1\n", b"[[1, 2, 3]]\n", b'[["a", "b"]]\n', b"[[0]]\n", b"[7]\n", b"[[1, []]]\n",
             b"[" * 100_000 + b"\n", b'\n[[99, "a"]]\n{}\n', *BOTH]
TO_RANK_1 = [b"9 has ended\n", b"-1 has died\n", b"1e0 has died\n", b"9" * 5000 + b" x\n", *BOTH]


def test_malformed_messages_raise_and_strangers_are_ignored(tmp_path):
    (tmp_path / "messages").write_text(repr((TO_RANK_0, TO_RANK_1)))
    lines = printed(RANKS, tmp_path / "messages").splitlines()
    assert len(lines) == len(TO_RANK_0) + len(TO_RANK_1)
    for i, line in enumerate(lines):
        here, there = (0, 1) if i < len(TO_RANK_0) else (1, 0)
        assert line.startswith(f"rank {here} cannot continue: rank {there} has sent a malformed "
                               "message: ")
        assert len(line) < 200
