"""`python -m gluon_amp SCRIPT` runs a script for old versions of numpy unchanged, with
`--dtype float16` in mixed precision (tools/switch.py); anything else is the command `gluon-amp`.

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


def _is_script(arguments: List[str]) -> bool:
    return bool(arguments) and (arguments[0].endswith(".py") or "/" in arguments[0])


def _run_in(dtype: str, path: str, arguments: List[str]) -> None:
    """Runs a script in a policy."""
    from .tools.switch import install
    try:
        switch = install(dtype)
    except ValueError as error:
        sys.exit(f"gluon-amp: --dtype: {error}")
    try:
        _run(path, arguments)
    except SystemExit as done:  # sys.exit(main())
        if done.code not in (None, 0) or {"-h", "--help", "--version"} & set(arguments):
            raise
    if switch.trains is None and not switch.policy.is_float32:
        sys.exit(f"gluon-amp: --dtype {dtype} changed nothing: the script created no "
                 "gluon.Trainer, and no Module that trains. Write instead: amp.convert(net) and "
                 "amp.Trainer")


if __name__ == "__main__":
    option, equals, value = (sys.argv[1:2] or [""])[0].partition("=")
    if option == "--dtype":
        given = [value, *sys.argv[2:]] if equals else sys.argv[2:]
        if not _is_script(given[1:]):
            sys.exit("gluon-amp: --dtype takes a policy and a script: python -m gluon_amp --dtype "
                     f"float16 train.py. Received: {' '.join(sys.argv[1:])}")
        _run_in(given[0], given[1], given[2:])
    elif _is_script(sys.argv[1:]):  # no subcommand
        _run(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(main())
