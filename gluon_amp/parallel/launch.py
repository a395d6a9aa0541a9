"""Launches the workers, servers and scheduler of MXNet's parameter server.

    scheduler, servers   Python processes that import this package and run MXNet's code
    workers              the program, locally or by ssh on the hosts of a file

It terminates all processes when one of them fails, when a worker still runs a minute after another
has exited, on Ctrl-C, and when it is killed itself. It does not detect processes that hang.
"""
import contextlib
import ctypes
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

from ..checks import listed
from .store import LAUNCHED

EXIT_TIMEOUT = 60.0  # seconds that workers may run after one has exited with code 0
_TO_END = 2.0  # seconds from SIGTERM to SIGKILL
# the environment variables that workers on other hosts get
_PASSED = re.compile("PATH|PYTHONPATH|NVIDIA_TF32_OVERRIDE|(MXNET|GLUON_AMP|OMP|OPENBLAS|DNNL)_.*")
# The scheduler and the servers. MXNet would run them during its import; here they run after it,
# so that servers can load this package's optimizers.
_HELPER = """
import os
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
           hosts: Optional[Sequence[str]] = None, exit_timeout: float = EXIT_TIMEOUT) -> int:
    """Launches all processes and waits for them.

    Args:
        command: the program and its arguments.
        workers: the number of workers.
        servers: the number of servers.
        hosts: the hosts on which ssh starts the workers, in turn; None for this machine.
        exit_timeout: seconds that workers may run after one has exited with code 0.

    Returns:
        The exit code: 0 if all workers returned 0, else that of the first process that failed; 1
        after the timeout, 130 after Ctrl-C.
    """
    with contextlib.ExitStack() as stack:
        root = _address_for_all(hosts or [])
        where = [hosts[i % len(hosts)] for i in range(workers)] if hosts else [""] * workers
        names = [f"worker {i} on {host}" if host else f"worker {i}" for i, host in enumerate(where)]
        settings = {"DMLC_PS_ROOT_URI": root, "DMLC_PS_ROOT_PORT": str(_free_port(root)),
                    "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers)}
        here = {**settings, "DMLC_NODE_HOST": root}
        run_helper = [sys.executable, "-W", "ignore", "-c", _HELPER]
        worker = {"DMLC_ROLE": "worker", LAUNCHED: "1"}
        helpers: List[_Process] = []
        started: List[_Process] = []
        signals = stack.enter_context(_received_signals())
        try:
            helpers.append(_start("the scheduler", run_helper, {**here, "DMLC_ROLE": "scheduler"}))
            for i in range(servers):
                helpers.append(_start(f"server {i}", run_helper, {**here, "DMLC_ROLE": "server"}))
            for name, host in zip(names, where):
                if host:
                    started.append(_start(name, _by_ssh(host, command, {**settings, **worker}), {}))
                else:
                    started.append(_start(name, command, {**here, **worker}))
            return _wait(started, helpers, exit_timeout, signals)
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


def _wait(workers: List[_Process], helpers: List[_Process], exit_timeout: float,
          signals: Sequence[int]) -> int:
    """Waits until all workers exit, a process fails, a signal arrives, or some workers still run
    `exit_timeout` seconds after the first has exited."""
    first_exit: Optional[float] = None
    while not signals:
        failed = next((p for p in workers + helpers if p.popen.poll()), None)
        if failed is not None:
            code = failed.popen.returncode
            _log(f"{failed.name} {_how(code)}: terminating the others")
            return 128 - code if code < 0 else code
        exited = [worker.name for worker in workers if worker.popen.poll() is not None]
        if len(exited) == len(workers):
            return 0
        if exited:
            first_exit = first_exit or time.monotonic()
            if time.monotonic() - first_exit > exit_timeout:
                _log(f"{listed(exited)} exited with code 0, and others still run after "
                     f"{exit_timeout:g} seconds (--exit-timeout): terminating them")
                return 1
        time.sleep(0.05)
    _log("interrupted: terminating all processes")
    return 130


def _end(processes: List[_Process]) -> None:
    """Terminates each process and its children: by SIGTERM first, then by SIGKILL."""
    _kill(processes, signal.SIGTERM)
    end = time.monotonic() + _TO_END
    while time.monotonic() < end and any(p.popen.poll() is None for p in processes):
        time.sleep(0.05)
    _kill(processes, signal.SIGKILL)
    for process in processes:
        process.popen.wait()


def _kill(processes: List[_Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.popen.pid, number)


def _start(name: str, command: Sequence[str], settings: Dict[str, str]) -> _Process:
    """Starts a process."""
    return _Process(name, subprocess.Popen(list(command), env={**os.environ, **settings},
                                           start_new_session=True,
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
    passed = {key: value for key, value in os.environ.items() if _PASSED.fullmatch(key)}
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
