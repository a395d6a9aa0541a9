"""`python -m gluon_amp SCRIPT` runs a script for old versions of numpy unchanged, with
`--dtype float16` in mixed precision (tools/switch.py), and with `--loss-scale none` without a loss
scale; anything else is the command `gluon-amp`.

The script runs like `python SCRIPT`, with gluon_amp imported first, so MXNet imports with any
numpy. For the script, the modules in its folder and MXNet, numpy has the names that it removed.
"""
import runpy
import sys
from pathlib import Path
from typing import Dict, List, Tuple

from . import numpy_names
from .tools.cli import main


def _run(path: str, arguments: List[str]) -> None:
    """Runs a script as the main program. Its folder replaces the working folder in sys.path."""
    if not Path(path).is_file():
        sys.exit(f"gluon-amp: there is no script {path}")
    folder = Path(path).resolve().parent
    numpy_names.PACKAGES.update(module.stem for module in folder.iterdir()
                                if module.suffix == ".py" or module.is_dir())
    sys.argv = [path, *arguments]
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(folder))
    else:
        sys.path[0] = str(folder)
    runpy.run_path(path, {"__builtins__": numpy_names.BUILTINS}, "__main__")


def _is_script(arguments: List[str]) -> bool:
    return bool(arguments) and (arguments[0].endswith(".py") or "/" in arguments[0])


def _run_in(dtype: str, loss_scale: str, path: str, arguments: List[str]) -> None:
    """Runs a script in a policy."""
    from .tools.switch import install
    try:
        switch = install(dtype, loss_scale)
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


def _options(arguments: List[str]) -> Tuple[Dict[str, str], List[str]]:
    """Returns the values of --dtype and --loss-scale before the script, and what follows them."""
    values: Dict[str, str] = {}
    while arguments:
        option, equals, value = arguments[0].partition("=")
        if option not in ("--dtype", "--loss-scale"):
            break
        values[option] = value if equals else "".join(arguments[1:2])
        arguments = arguments[1 if equals else 2:]
    return values, arguments


if __name__ == "__main__":
    options, rest = _options(sys.argv[1:])
    if options:
        if "--dtype" not in options or not _is_script(rest):
            sys.exit("gluon-amp: --dtype takes a policy and a script: python -m gluon_amp --dtype "
                     "float16 [--loss-scale none] train.py. Received: "
                     f"{' '.join(sys.argv[1:])}")
        _run_in(options["--dtype"], options.get("--loss-scale", "auto"), rest[0], rest[1:])
    elif _is_script(rest):  # no subcommand
        _run(rest[0], rest[1:])
    else:
        sys.exit(main())
