"""`python -m gluon_amp SCRIPT` runs a script for old versions of numpy unchanged; anything else is
the command `gluon-amp`.

The script runs like `python SCRIPT`, with gluon_amp imported first, so MXNet imports with any
numpy. For the script, the modules in its folder and MXNet, numpy has the names that it removed.
"""
import runpy
import sys
from pathlib import Path
from typing import List

from . import _numpy
from .tools.cli import main


def _run(path: str, arguments: List[str]) -> None:
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


if __name__ == "__main__":
    if sys.argv[1:] and (sys.argv[1].endswith(".py") or "/" in sys.argv[1]):  # no subcommand
        _run(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(main())
