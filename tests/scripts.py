"""Scripts as a user runs them, each in a fork of one process with their imports.

    process = start(EXAMPLES / "image_classification.py", "--epochs", "2")
    out, err = process.communicate()

In most tests, the imports would take longer than all the rest. Each script also runs in a new
process in some test: `new_process=True`. A fork of a process with threads may hang; a script that
does not end in time runs again in a new process.
"""
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT = 300  # seconds for a script in a fork
EXAMPLES = Path(__file__).parents[1] / "example"
SHARED = Path(os.environ.get("GLUON_AMP_DATA") or Path(__file__).parents[2] / "shared")


class Fork:
    """A running script, with the part of subprocess.Popen that tests use."""

    def __init__(self, server, job, folder):
        self._job, self._server, self._out = job, server, Path(job["out"])
        os.mkfifo(job["err"])
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        self.pid, self.returncode = int(server.stdout.readline()), None
        self.stderr = open(job["err"])  # noqa: SIM115  (communicate closes it)
        self._folder = folder

    def communicate(self):
        """Waits for its end. Returns its stdout, and the rest of its stderr."""
        with self.stderr, self._folder:
            err = self.stderr.read()
            self.returncode = int(self._server.stdout.readline())
            if self.returncode != -signal.SIGALRM:
                return self._out.read_text(), err
        arguments, folder = self._job["arguments"], self._job["cwd"]
        print(f"{arguments} hung in a fork", file=sys.__stderr__)
        again = start(*arguments, cwd=folder, new_process=True)
        results = again.communicate()
        self.returncode = again.returncode
        return results


_servers = []


def start(script, *arguments, cwd=None, new_process=False):
    """Starts a script with arguments. Only one runs at a time; call `communicate` at the end."""
    arguments = [str(script), *map(str, arguments)]
    if new_process:
        return subprocess.Popen([sys.executable, "-W", "ignore", *arguments], cwd=cwd, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if not _servers:
        _servers.append(subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE))
        atexit.register(_servers[0].communicate)  # closes its stdin, which ends it
    folder = tempfile.TemporaryDirectory()
    job = {"arguments": arguments, "cwd": str(cwd or os.getcwd()), "environment": dict(os.environ),
           "out": f"{folder.name}/out", "err": f"{folder.name}/err"}
    return Fork(_servers[0], job, folder)


def run(script, *arguments, fails=False, **options):
    """Returns the stdout and the stderr of a script that succeeds, or fails."""
    process = start(EXAMPLES / script, *arguments, **options)
    out, err = process.communicate()
    assert (process.returncode != 0) is fails, err
    return out, err


def logged(folder):
    """The lines of a log.jsonl after the first, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()][1:]
    return [{name: value for name, value in line.items()
             if name not in ("seconds", "samples_per_second")} for line in lines]


def heeds_ctrl_c():
    """Restores SIGINT, which background processes of a shell ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def serve():
    """Forks a process for each line; writes its id and its exit status."""
    sys.path.insert(0, str(EXAMPLES))
    for name in ("images", "matplotlib.figure", "gluoncv.model_zoo", "sklearn.datasets"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # or each fork copies all objects when it collects garbage at its exit
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
            return
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status),
              flush=True)


def become(job):
    """Runs the script as `python script` does. Its exceptions propagate."""
    signal.alarm(LIMIT)
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, job["out"], os.O_CREAT),
                                (2, job["err"], 0)):
        file = os.open(path, flags | (os.O_WRONLY if number else 0), 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = job["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve()
