"""Common code of the studies in this folder: their data, runs of recipes, and files of completed
runs, with which another call continues."""
import argparse
import json
import lzma
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from gluon_amp.files import replace_file
from gluon_amp.parallel.launch import ending_with_parent

CHECKOUT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("GLUON_AMP_DATA", CHECKOUT.parent / "shared")).resolve()
# Times in logs are dropped: runs are parallel, and not all on one machine.
TIMES = {"seconds", "samples_per_second"}
OUTSIDE = signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM
PYTHON = [sys.executable, "-W", "ignore"]


def train(script, flags, folder, launcher=(), before=(), seconds=None, threads=1):
    """Runs a script of the checkout, and saves to a folder.

    Args:
        flags: its flags; SHARED stands for the folder of data.
        launcher: the command before Python.
        before: the Python script that runs it, if any.
        seconds: its time limit.
        threads: the number of threads of its operators.

    Raises:
        RuntimeError: it fails.
        ChildProcessError: a signal from outside ends it.
        subprocess.TimeoutExpired: the time is over.
    """
    words = shlex.split(flags.replace("SHARED", shlex.quote(str(SHARED))))
    command = [*launcher, *PYTHON, *before, CHECKOUT / script, "--save-dir", folder, *words]
    process = subprocess.Popen(
        list(map(str, command)), env={**os.environ, "OMP_NUM_THREADS": str(threads)}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=ending_with_parent())
    try:
        _, errors = process.communicate(timeout=seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
        process.wait()
    if -process.returncode in OUTSIDE:
        raise ChildProcessError(f"{script} {flags}: signal {-process.returncode}")
    if process.returncode:
        raise RuntimeError(f"{script} {flags} failed with {process.returncode}:\n{errors[-2000:]}")


def lines(path):
    """Returns the lines of a file of JSON lines, compressed if it ends in .xz; none without the
    file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    text = lzma.decompress(data) if path.suffix == ".xz" else data
    return [json.loads(line) for line in text.splitlines()]


def add(path, *made):
    """Appends lines to such a file atomically."""
    _write(path, [*lines(path), *made])


def _write(path, made):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({name: value for name, value in line.items() if name not in TIMES})
                   + "\n" for line in made).encode()
    if path.suffix == ".xz":
        data = lzma.compress(data)
    replace_file(str(path), lambda beside: Path(beside).write_bytes(data))


def runs(path):
    """Returns the runs of a file of concatenated log.jsonl files: lines by name."""
    found = {}
    for line in lines(path):
        if "run" in line:
            of_run = found[line["run"]] = []
        of_run.append(line)
    return found


def put_run(path, name, of_run):
    """Appends a run to such a file; its first line gets the run's name."""
    head, *rest = of_run
    made = {**runs(path), name: [{"run": name, **head}, *rest]}
    _write(path, [line for _, of_run in sorted(made.items()) for line in of_run])


def left(path, wanted):
    """Yields and prints the wanted runs that a file lacks."""
    for line in wanted:
        if not any(line.items() <= there.items() for there in lines(path)):
            print(", ".join(f"{name} {value}" for name, value in line.items()), flush=True)
            yield line


def parser(description, studies):
    """Returns the argument parser of a study with several parts."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--only", choices=studies, help="run only this part")
    made.add_argument("--tables", action="store_true",
                      help="only print the tables of completed runs")
    return made


def chosen(args, studies):
    """Returns the parts to train."""
    return [] if args.tables else [args.only] if args.only else list(studies)
