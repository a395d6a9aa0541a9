"""Python in a new process."""
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# MXNet imports scipy, scikit-learn and onnx if they are installed, which is a third of the time
# of its import. This folder hides them.
WITHOUT = str(Path(__file__).with_name("without"))
WITH_ALL = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # shows them again


def environment(**variables):
    """The variables of this process and others, for processes that need none of these packages."""
    path = [WITHOUT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def run(*arguments, folder=ROOT, **variables):
    """Runs Python with these arguments and environment variables."""
    return subprocess.run([sys.executable, "-W", "ignore", *map(str, arguments)], text=True,
                          cwd=folder, capture_output=True, timeout=300,
                          env=environment(**variables))


def run_tests(config, *arguments, **variables):
    """Runs tests in a new process, of the cases that this run of pytest selects."""
    quick = ["--quick"] * config.getoption("quick")
    return run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *quick, *arguments,
               **variables)


def printed(code, *arguments, **variables):
    """The output of this code in a new process."""
    done = run("-c", code, *arguments, **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
