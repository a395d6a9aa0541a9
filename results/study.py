"""What the studies of this folder share: where their data lies, one run of a recipe, and files of
what is done, so that a second call goes on where the first stopped."""
import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from gluon_amp.files import replace_text

CHECKOUT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("GLUON_AMP_DATA", CHECKOUT.parent / "shared")).resolve()
# What logs say of time is left out: runs are trained side by side, and not all on one machine.
TIMES = {"seconds", "samples_per_second"}
PYTHON = [sys.executable, "-W", "ignore"]


def train(script, flags, folder, launcher=()):
    """Runs a script of example/, with one thread, which saves into a folder.

    Args:
        flags: as in a command line; SHARED stands for the folder of data.
        launcher: words of the command line before the script's.
    """
    words = shlex.split(flags.replace("SHARED", shlex.quote(str(SHARED))))
    done = subprocess.run([*launcher, *PYTHON, str(CHECKOUT / "example" / script), "--save-dir",
                           str(folder), *words], env={**os.environ, "OMP_NUM_THREADS": "1"},
                          text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"{script} {flags} failed:\n{done.stderr[-2000:]}")


def lines(path):
    """The lines of a file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path, *made):
    """Adds lines to such a file, which is whole at any moment."""
    _write(path, [*lines(path), *made])


def _write(path, made):
    replace_text(str(path), "".join(json.dumps({
        name: value for name, value in line.items() if name not in TIMES}) + "\n" for line in made))


def runs(path):
    """The runs of a file that holds the log.jsonl of each, one behind the other: lines by name."""
    found = {}
    for line in lines(path):
        if "run" in line:
            of_run = found[line["run"]] = []
        of_run.append(line)
    return found


def put_run(path, name, of_run):
    """Adds a run to such a file; its first line gets the run's name."""
    head, *rest = of_run
    made = {**runs(path), name: [{"run": name, **head}, *rest]}
    _write(path, [line for _, of_run in sorted(made.items()) for line in of_run])


def left(path, wanted):
    """Those of the wanted lines that are not there yet; each is told as what it begins with."""
    for line in wanted:
        if not any(line.items() <= there.items() for there in lines(path)):
            print(", ".join(f"{name} {value}" for name, value in line.items()), flush=True)
            yield line


def parser(description, studies):
    """The command line of a study of several parts."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--only", choices=studies, help="one of them")
    made.add_argument("--tables", action="store_true", help="only print what is there")
    return made


def chosen(args, studies):
    """The parts that are to be trained."""
    return [] if args.tables else [args.only] if args.only else list(studies)
