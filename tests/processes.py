"""Python in a new process."""
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*arguments, folder=ROOT, **variables):
    """Runs Python with these arguments and environment variables."""
    return subprocess.run([sys.executable, "-W", "ignore", *map(str, arguments)], text=True,
                          cwd=folder, capture_output=True, timeout=300,
                          env={**os.environ, **variables})


def printed(code, *arguments, **variables):
    """The output of this code in a new process."""
    done = run("-c", code, *arguments, **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
