"""Runs all benchmarks, without a time limit: `make -C tests bench-all`.

Each line runs in a separate process, and its result is appended to out/COMMIT.jsonl. Another call
continues an interrupted run.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import List, NamedTuple, Sequence, Tuple

import bfloat16_time
import harness
import optimizer_time
import step_time

HERE = Path(__file__).parent
ISAS = ("avx2", "portable")


class Line(NamedTuple):
    """A benchmark: a script of this folder, its arguments, and environment variables."""
    name: str
    command: Sequence[str]
    variables: Sequence[Tuple[str, str]] = ()


def lines() -> List[Line]:
    """Returns all lines, long ones last."""
    found = [Line("start", ["start_time.py"]), Line("loss scaling", ["scaler_time.py"]),
             Line("report", ["report_speed.py"]), Line("ranks", ["ranks_time.py"])]
    found += [Line(f"optimizer: {name}", ["optimizer_time.py", name])
              for name in optimizer_time.OPTIMIZERS]
    for name in harness.NETWORKS:
        found.append(Line(name, ["step_time.py", "--only", name, "--pairs", "50", "--seconds",
                                 "120", "--columns", *step_time.COLUMNS]))
    found += [Line(f"bfloat16: {name}", ["bfloat16_time.py", name])
              for name in bfloat16_time.NETWORKS]
    for isa in ISAS:
        found += [Line(f"{isa}: {name}", ["step_time.py", "--only", name, "--columns", "step",
                                          "prediction"], [("GLUON_AMP_ISA", isa)])
                  for name in harness.NETWORKS]
    if find_spec("torch"):
        found += [Line("PyTorch", ["torch_nets.py"]),
                  Line("PyTorch bfloat16", ["torch_nets.py", "--compared"],
                       [("OMP_NUM_THREADS", "1")])]
    else:
        print("PyTorch is skipped: it is not installed (pip install '.[bench]')")
    return found


def measure(line):
    """Returns the rows that the line's script prints."""
    command = [sys.executable, "-W", "ignore", str(HERE / line.command[0]), *line.command[1:],
               "--json"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True,
                             env={**os.environ, **dict(line.variables)}).stdout
    return [json.loads(row) for row in printed.splitlines() if row.startswith("{")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restart", action="store_true", help="start over")
    parser.add_argument("--only", default="", help="run only lines with this text in their name")
    parser.add_argument("--list", action="store_true", help="only print the names of lines")
    args = parser.parse_args()
    path = HERE / "out" / f"{step_time.commit()}.jsonl"
    path.parent.mkdir(exist_ok=True)
    if args.restart and not args.list:
        path.unlink(missing_ok=True)
    done = {json.loads(row)["name"]: json.loads(row)["rows"]
            for row in (path.read_text().splitlines() if path.exists() else [])}
    failed = 0
    for line in lines():
        if args.only not in line.name:
            continue
        if line.name not in done and not args.list:
            start = time.perf_counter()
            try:
                done[line.name] = measure(line)
            except subprocess.CalledProcessError as error:
                failed += 1
                print(f"{line.name}: failed with status {error.returncode}", flush=True)
                continue
            with open(path, "a") as file:
                file.write(json.dumps({
                    "name": line.name, "date": str(datetime.date.today()),
                    "machine": harness.machine(), "rows": done[line.name],
                    "seconds": round(time.perf_counter() - start)}) + "\n")
        print(line.name, flush=True)
        for row in done.get(line.name, []):
            print("   ", ", ".join(f"{key}: {harness.shown(value)}" for key, value in row.items()),
                  flush=True)
    print(f"in {path}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
