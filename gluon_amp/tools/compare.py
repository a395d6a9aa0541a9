"""`gluon-amp compare`: trains a script in several types and seeds, and reports the difference."""
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List, Sequence

from ..checks import counted, imports_of
from ..files import new_folder, replace_text, sha256
from ..parallel.launch import ending_with_parent
from ..policy import POLICIES
from ..reports import check_margin, read_logs, report

_LAST = 2000  # characters of a failed run's output in the error


def compare(script: str, policies: Sequence[str], seeds: int, flags: Sequence[str], folder: str,
            margin: float = 0.5) -> Path:
    """Runs a script once for each policy and seed, and writes a report.

    A run is `python SCRIPT --dtype POLICY --seed N --save-dir FOLDER/POLICY-seedN FLAGS`, and
    writes log.jsonl into that folder. Finished runs are skipped; the folder of a run exists when it
    has finished. `gluon-amp compare --help` describes the arguments; `folder` is --output.

    Returns:
        The path of report.html.

    Raises:
        ImportError: a package of the extra `tools` is not installed.
        ValueError: the folder has runs of another script or of other flags, or a run fails.
    """
    _check(policies, flags)
    check_margin(margin)
    with imports_of("tools", "a report"):
        import_module("gluon_amp.reports.plots")
    _remember(Path(folder), script, flags)
    runs = {Path(folder, f"{policy}-seed{seed}"): (policy, seed)
            for seed in range(seeds) for policy in policies}
    left = [path for path in runs if not path.exists()]
    print(f"{counted(len(runs), 'run')}: {len(runs) - len(left)} finished, {len(left)} left",
          flush=True)
    for path in left:
        _run(script, *runs[path], flags, path)
        print(f"finished {path.name}", flush=True)
    logs = [path / "log.jsonl" for path in runs]
    return report(logs, Path(folder, "report"), f"{Path(script).name}: {', '.join(policies)}",
                  margin=margin)


def verdicts(page: Path) -> str:
    """Returns the verdicts of a report as text, without its tables and plots."""
    text = page.with_suffix(".md").read_text(encoding="utf-8")
    return text.partition("\n\n|")[0].partition("\n\n")[2]


def _check(policies: Sequence[str], flags: Sequence[str]) -> None:
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown or "float32" not in policies or len(set(policies)) < max(len(policies), 2):
        raise ValueError("--policies takes float32 and others, each once. Valid: "
                         f"{', '.join(POLICIES)}. Received: {','.join(policies)}")
    own = [flag for flag in flags
           if flag.partition("=")[0] in ("--dtype", "--seed", "--save-dir")]
    if own:
        raise ValueError(f"compare sets --dtype, --seed and --save-dir. Received: {' '.join(own)}")


def _remember(folder: Path, script: str, flags: Sequence[str]) -> None:
    """Writes compare.json, or refuses a folder of another script or of other flags."""
    mine = {"script": Path(script).name, "sha256": sha256(script), "flags": list(flags)}
    record = folder / "compare.json"
    if record.exists():
        before: Dict[str, Any] = json.loads(record.read_text())
        differ = [name for name in mine if before.get(name) != mine[name]]
        if differ:
            raise ValueError(f"{folder} has runs with other {' and '.join(differ)}: pass another "
                             f"--output, or remove the folder. Received: {mine}. Before: {before}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(str(record), json.dumps(mine, indent=2) + "\n")


def _run(script: str, policy: str, seed: int, flags: Sequence[str], folder: Path) -> None:
    """Runs the script into a new folder, which gets its name when the run has finished."""
    command: List[str] = [sys.executable, script, "--dtype", policy, "--seed", str(seed)]
    with new_folder(str(folder)) as beside:
        with open(os.path.join(beside, "output.txt"), "w+b") as output:
            done = subprocess.run([*command, "--save-dir", beside, *flags], check=False,
                                  stdin=subprocess.DEVNULL, stdout=output,
                                  stderr=subprocess.STDOUT, preexec_fn=ending_with_parent())
            output.seek(0)
            text = output.read().decode(errors="replace")
        what = f"{Path(script).name} with --dtype {policy} --seed {seed}"
        if done.returncode:
            raise ValueError(f"{what} failed with exit code {done.returncode}:\n{text[-_LAST:]}")
        log = Path(beside, "log.jsonl")
        if not log.exists():
            raise ValueError(f"{what} wrote no log.jsonl into its --save-dir: use "
                             "gluon_amp.reports.Log")
        read_logs([log])
        _add_arguments(log, script=Path(script).name, flags=" ".join(flags))


def _add_arguments(log: Path, **arguments: str) -> None:
    """Adds what all runs have in common to a log's arguments, by which a report compares runs."""
    head, _, lines = log.read_text(encoding="utf-8").partition("\n")
    facts = json.loads(head)
    facts["arguments"] = {**facts.get("arguments", {}), **arguments}
    replace_text(str(log), f"{json.dumps(facts)}\n{lines}")
