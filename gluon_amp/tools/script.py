"""`python -m gluon_amp SCRIPT`: a script of MXNet's time, unchanged.

It runs as `python SCRIPT` does, with gluon_amp imported first; so MXNet imports with any numpy. It
and the modules of its folder see the names that numpy has removed, as MXNet does.
"""
import runpy
import sys
from pathlib import Path
from typing import List

from .. import _numpy


def is_script(name: str) -> bool:
    """Whether this is a script's path, and no subcommand."""
    return name.endswith(".py") or "/" in name


def run(path: str, arguments: List[str]) -> None:
    """Runs a script as the main program. Its folder takes the place of the working folder in the
    modules' path."""
    if not Path(path).is_file():
        sys.exit(f"gluon-amp: there is no script {path}")
    folder = Path(path).resolve().parent
    _numpy.PACKAGES.update(module.stem for module in folder.iterdir()
                           if module.suffix == ".py" or module.is_dir())
    sys.argv = [path, *arguments]
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(folder))
    else:
        sys.path[0] = str(folder)
    runpy.run_path(path, {"__builtins__": _numpy.BUILTINS}, "__main__")
