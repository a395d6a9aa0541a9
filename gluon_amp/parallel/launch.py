"""Launches the workers, servers and scheduler of MXNet's parameter server.

    scheduler, servers   Python processes that import this package and run MXNet's code
    workers              the program, locally or by ssh on the hosts of a file

It terminates all processes when one of them fails, when the scheduler or a server sends no
heartbeat, on Ctrl-C, and when it is killed itself. Workers detect other workers that hang.
"""
import contextlib
import ctypes
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

from .rendezvous import ADDRESS, Rendezvous
from .supervise import BEAT, patience

# Seconds for other processes to report their errors, and to exit after SIGTERM.
_TO_SPEAK, _TO_END = 8.0, 2.0
# The scheduler and the servers. MXNet would run them during its import; here they run after it,
# so that servers can load this package's optimizers. A thread prints an empty line each second as
# a heartbeat.
_HELPER = f"""
import os, threading, time
def beat():
    while True:
        os.write(1, bytes([10]))
        time.sleep({BEAT})
threading.Thread(target=beat, daemon=True).start()
role = os.environ.pop("DMLC_ROLE")
import gluon_amp
from mxnet.kvstore import kvstore_server
os.environ["DMLC_ROLE"] = role
kvstore_server._init_kvstore_server_module()
"""


class _Process(NamedTuple):
    name: str
    popen: "subprocess.Popen[bytes]"


def launch(command: Sequence[str], workers: int, servers: int = 1,
           hosts: Optional[Sequence[str]] = None) -> int:
    """Launches all processes and waits for them.

    Args:
        command: the program and its arguments.
        workers: the number of workers.
        servers: the number of servers.
        hosts: the hosts on which ssh starts the workers, in turn; None for this machine.

    Returns:
        The exit code: 0 if all workers returned 0, else that of the first that failed; 1 if the
        scheduler or a server hung, 130 after Ctrl-C.
    """
    with contextlib.ExitStack() as stack:
        root = _address_for_all(hosts or [])
        where = [hosts[i % len(hosts)] for i in range(workers)] if hosts else [""] * workers
        names = [f"worker {i} on {host}" if host else f"worker {i}" for i, host in enumerate(where)]
        rendezvous = stack.enter_context(contextlib.closing(Rendezvous(root, names)))
        settings = {"DMLC_PS_ROOT_URI": root, "DMLC_PS_ROOT_PORT": str(_free_port(root)),
                    "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers)}
        here = {**settings, "DMLC_NODE_HOST": root}
        run_helper = [sys.executable, "-W", "ignore", "-c", _HELPER]
        seconds = patience()
        helpers: List[_Process] = []
        started: List[_Process] = []
        signals = stack.enter_context(_received_signals())
        try:
            helpers.append(_start("the scheduler", run_helper, {**here, "DMLC_ROLE": "scheduler"},
                                  subprocess.PIPE))
            for i in range(servers):
                helpers.append(_start(f"server {i}", run_helper, {**here, "DMLC_ROLE": "server"},
                                      subprocess.PIPE))
            for i, (name, host) in enumerate(zip(names, where)):
                its = {"DMLC_ROLE": "worker", ADDRESS: rendezvous.address_for(i)}
                if host:
                    started.append(_start(name, _by_ssh(host, command, {**settings, **its}), {}))
                else:
                    started.append(_start(name, command, {**here, **its}))
            return _wait(started, helpers, seconds, rendezvous, signals)
        finally:
            _end(started + helpers)


def launch_horovod(command: Sequence[str], workers: int,
                   hosts: Optional[Sequence[str]] = None) -> int:
    """Runs horovodrun. It imports MXNet, which needs this package's numpy patches first."""
    try:
        from horovod.runner.launch import run_commandline
    except ImportError as error:
        raise ImportError("Horovod is not installed: make horovod, or see docs/distributed.md. "
                          f"The import's error: {error}") from error
    hosts = hosts or ["localhost"]
    turns = [hosts[i % len(hosts)] for i in range(workers)]
    slots = ",".join(f"{host}:{turns.count(host)}" for host in dict.fromkeys(turns))
    # One word: horovodrun would parse the program's flags as abbreviations of its own.
    program = f"exec {' '.join(map(shlex.quote, command))}"
    sys.argv = ["horovodrun", "-np", str(workers), "-H", slots, "sh", "-c", program]
    try:
        return run_commandline() or 0
    except RuntimeError as error:  # a rank has failed and printed its error, or Ctrl-C
        _log(" ".join(str(error).split()))
        return 1


def read_hosts(path: str) -> List[str]:
    """Reads the hosts in a file, one on each line; # starts a comment."""
    with open(path) as file:
        hosts = [line.partition("#")[0].strip() for line in file]
    hosts = [host for host in hosts if host]
    if not hosts or any(len(host.split()) > 1 or host.startswith("-") for host in hosts):
        raise ValueError(f"{path} should have a host on each line, such as gpu1 or user@gpu1. "
                         f"Received: {', '.join(hosts) or 'none'}")
    return hosts


@contextlib.contextmanager
def _received_signals() -> Iterator[List[int]]:
    """Collects the signals that end the job, except those that are ignored (nohup).

    An exception of their handlers could be raised while a process is started or waited for: the
    process would be lost, or its lock would stay locked.
    """
    received: List[int] = []
    ends_job = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: received.append(number))
              for number in ends_job}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(workers: List[_Process], helpers: List[_Process], seconds: float,
          rendezvous: Rendezvous, signals: Sequence[int]) -> int:
    """Waits until all workers exit, a signal arrives, or a process fails or sends no heartbeat
    for `seconds`."""
    silence = _Silence(helpers)
    while not signals:
        ended = [w for w in workers if w.popen.poll() is not None]
        all_ended = len(ended) == len(workers)
        rendezvous.poll(f"{ended[0].name} {_how(ended[0].popen.returncode)}" if ended else "")
        failed = next((p for p in workers + helpers if p.popen.poll()), None)
        if failed is not None:
            _log(f"{failed.name} {_how(failed.popen.returncode)}: terminating the others")
            if failed in workers:
                _wait_for(workers, _TO_SPEAK, signals)
            code = failed.popen.returncode
            return 128 - code if code < 0 else code
        if all_ended:
            _wait_for(helpers, _TO_SPEAK, signals)
            return 0
        silent = silence.longer_than(seconds)
        if silent is not None:
            _log(f"{silent.name} has sent no heartbeat for {seconds:g} seconds: terminating all "
                 "processes")
            return 1
        time.sleep(0.05)
    _log("interrupted: terminating all processes")
    return 130


class _Silence:
    """Tracks the heartbeats of the scheduler and the servers."""

    def __init__(self, helpers: List[_Process]) -> None:
        self._seconds = dict.fromkeys(helpers, 0.0)
        self._last = time.monotonic()

    def longer_than(self, seconds: float) -> Optional[_Process]:
        """Reads heartbeats; returns a process that has sent none for longer, if any."""
        # If this process was suspended, the others may have been too.
        passed = min(time.monotonic() - self._last, BEAT)
        self._last = time.monotonic()
        for helper in self._seconds:
            if helper.popen.poll() is None:
                self._seconds[helper] += passed
                if _has_written(helper):
                    self._seconds[helper] = 0.0
                elif self._seconds[helper] > seconds:
                    return helper
        return None


def _has_written(helper: _Process) -> bool:
    """Whether it has written since the last call."""
    output: Any = helper.popen.stdout
    return bool(select.select([output], [], [], 0)[0]) and bool(os.read(output.fileno(), 4096))


def _wait_for(processes: List[_Process], seconds: float, signals: Sequence[int] = ()) -> None:
    """Waits until all processes exit, a signal arrives, or the seconds have passed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not signals and any(
            p.popen.poll() is None for p in processes):
        time.sleep(0.05)


def _end(processes: List[_Process]) -> None:
    """Terminates each process and its children: by SIGTERM first, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, number)
        if number == signal.SIGTERM:
            _wait_for(processes, _TO_END)
    for process in processes:
        process.popen.wait()
        if process.popen.stdout:
            process.popen.stdout.close()


def _start(name: str, command: Sequence[str], settings: Dict[str, str],
           output: Optional[int] = None) -> _Process:
    """Starts a process."""
    return _Process(name, subprocess.Popen(list(command), env={**os.environ, **settings},
                                           stdout=output, start_new_session=True,
                                           preexec_fn=ending_with_parent()))


def ending_with_parent() -> Callable[[], None]:
    """Returns the `preexec_fn=` of a process that the system kills when the thread that starts it
    exits, even by SIGKILL."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def before() -> None:
        if libc is not None:
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)
    return before


def _by_ssh(host: str, command: Sequence[str], settings: Dict[str, str]) -> List[str]:
    """Returns the ssh command that runs `command` in the same folder on a host. A terminal (-tt)
    terminates the program when the connection closes."""
    passed = {key: value for key, value in os.environ.items()
              if key in ("PYTHONPATH", "PATH") or key.startswith(("MXNET_", "OMP_", "GLUON_AMP_"))}
    words = ["cd", os.getcwd(), "&&", "exec", "env",
             *(f"{key}={value}" for key, value in {**passed, **settings}.items()), *command]
    return ["ssh", "-tt", "-o", "BatchMode=yes", host,
            " ".join(word if word == "&&" else shlex.quote(word) for word in words)]


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _address_for_all(hosts: Sequence[str]) -> str:
    """Returns the address of this machine that all hosts can reach: the loopback address only
    if all are local."""
    addresses = [_address_for(host) for host in hosts]
    return next((a for a in addresses if not a.startswith("127.")), "127.0.0.1")


def _address_for(host: str) -> str:
    """Returns the address of this machine that a host can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.rpartition("@")[2], 22))  # sends nothing
        except OSError as error:
            raise OSError(f"the host {host} cannot be reached: {error}") from error
        return probe.getsockname()[0]


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _log(text: str) -> None:
    print(f"gluon-amp launch: {text}", file=sys.stderr, flush=True)
