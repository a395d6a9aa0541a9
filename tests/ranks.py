"""Ranks for tests: processes on this machine that train together, all forked from one process.

    with Ranks() as ranks:  # stories of rank_stories.py and rank_mistakes.py
        results = ranks.run("becomes_infinite", 2, store="dist_sync", loss_scale="dynamic")

The result of a rank that raises is the text of its error. No process outlives `with`.
"""
import contextlib
import gc
import importlib.util
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest
from cases import ALL

PATIENCE = 120
RANKS, STEPS, STARTS = ([2, 4], 500, 20) if ALL else ([2], 150, 2)

needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None,
                                   reason="Horovod is not installed: make horovod")
SERVERS = ["dist_sync", "dist_device_sync"]
WIRES = ["horovod float16", "horovod float32"]
STORES = [*SERVERS, *(pytest.param(wire, marks=needs_horovod) for wire in WIRES)]
EITHER = [SERVERS[0], pytest.param(WIRES[0], marks=needs_horovod)]


class Ranks:
    """Starts the process that ranks are forked from."""

    def __enter__(self):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=env,
                                        start_new_session=True)
        self.folder = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.folder.cleanup()

    def run(self, story, count, store, environment=None, stopped=0, **arguments):
        """Runs a story on each rank, and returns their results in order: None for one that died.

        Args:
            stopped: number of ranks that stop and must be killed.
        """
        job = {"story": story, "count": count, "store": store, "arguments": arguments,
               "environment": environment or {}, "stopped": stopped,
               "folder": tempfile.mkdtemp(dir=self.folder.name)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        assert answer == "done", f"{story} on {count} ranks: {answer or 'no answer'}"
        files = [Path(job["folder"], str(i)) for i in range(count)]
        return [pickle.loads(f.read_bytes()) if f.exists() else None for f in files]


def serve():
    """Main loop of the process that ranks are forked from: one line for each story."""
    sys.path.insert(0, str(Path(__file__).parent))
    import rank_mistakes
    import rank_stories
    vars(rank_stories).update({name: story for name, story in vars(rank_mistakes).items()
                               if not hasattr(rank_stories, name)})
    gc.freeze()  # or each fork copies all objects when it collects garbage at its exit
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        processes, cleanup = start(job, rank_stories)
        if processes is None:  # in a fork
            return
        waited = wait_for(processes, job)
        cleanup()
        answers.write(waited + "\n")
        answers.flush()


def start(job, stories):
    """Forks the ranks. Returns None in a fork, at the end of its story."""
    cleanup = print
    if job["store"].startswith("horovod"):
        roles, cleanup = horovod_roles(job["count"])
    else:
        roles = server_roles(job["count"])
    processes = []
    for environment in roles:
        pid = os.fork()
        if pid == 0:
            os.environ.update({**environment, **job["environment"]})
            if environment.get("DMLC_ROLE", "worker") == "worker":
                tell(job, stories)
            else:
                from mxnet.kvstore import kvstore_server
                with contextlib.suppress(SystemExit):
                    kvstore_server._init_kvstore_server_module()
            return None, None
        processes.append(pid)
    return processes, cleanup


def tell(job, stories):
    """Runs a rank's story; errors propagate as in a program."""
    store = stories.store_of(job["store"])
    path = Path(job["folder"], str(store.rank))

    def keep(value):
        path.with_suffix(".new").write_bytes(pickle.dumps(value))
        path.with_suffix(".new").rename(path)

    try:
        keep(getattr(stories, job["story"])(store, store.rank, **job["arguments"]))
    except Exception as error:
        keep(f"{type(error).__name__}: {error}")
        if os.environ.get("RANKS_TRACEBACK"):
            traceback.print_exc()
        raise


def server_roles(count):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
              "DMLC_NODE_HOST": "127.0.0.1", "DMLC_NUM_WORKER": str(count),
              "DMLC_NUM_SERVER": "1"}
    return [{**common, "DMLC_ROLE": role} for role in ["scheduler", "server"] + ["worker"] * count]


def horovod_roles(count):
    """Environment of ranks as horovodrun with Gloo sets it."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer
    slots = get_host_assignments(parse_hosts(f"127.0.0.1:{count}"), count)
    server = RendezvousServer(0)
    port = server.start()
    server.init(slots)

    def stop():
        server.stop()
        server._httpd.server_close()

    common = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
              "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
              "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
              "HOROVOD_GLOO_IFACE": "lo", "HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}
    return [{**common, "HOROVOD_HOSTNAME": slot.hostname, "HOROVOD_RANK": str(slot.rank),
             "HOROVOD_SIZE": str(slot.size), "HOROVOD_LOCAL_RANK": str(slot.local_rank),
             "HOROVOD_LOCAL_SIZE": str(slot.local_size), "HOROVOD_CROSS_RANK": str(slot.cross_rank),
             "HOROVOD_CROSS_SIZE": str(slot.cross_size)} for slot in slots], stop


def wait_for(processes, job):
    """Waits until the workers end; servers that wait for a dead rank are killed."""
    until, left = time.monotonic() + PATIENCE, list(processes)
    codes = {}
    workers = processes[-job["count"]:]
    while left and time.monotonic() < until:
        left = [pid for pid in left if not has_ended(pid, codes)]
        running = len(set(workers) & set(left))
        if running <= job["stopped"] and (running or any(codes[pid] for pid in workers)):
            break
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    hanging = len(set(left) & set(workers))
    return f"{hanging} ranks did not end in {PATIENCE} s" if hanging > job["stopped"] else "done"


def has_ended(pid, codes):
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        codes[pid] = status
    return bool(ended)


if __name__ == "__main__":
    serve()
