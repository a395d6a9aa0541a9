"""`python -m gluon_amp SCRIPT`: runs a script for old versions of numpy unchanged.

The script runs like `python SCRIPT`, with gluon_amp imported first, so MXNet imports with any
numpy. For the script, the modules in its folder and MXNet, numpy has the names that it removed.
"""
import runpy
import sys
from pathlib import Path
from typing import List

from .. import _numpy


def is_script(name: str) -> bool:
    """Returns whether an argument is a script's path instead of a subcommand."""
    return name.endswith(".py") or "/" in name


def run(path: str, arguments: List[str]) -> None:
    """Runs a script as the main program. Its folder replaces the working folder in sys.path."""
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
