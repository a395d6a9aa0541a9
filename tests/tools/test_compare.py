"""`gluon-amp compare`: runs of a script in several types, resumed, and their report."""
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gluon_amp.tools.cli import main

# Stands for a training: writes a log at once. Flags make it fail, or end without a log.
SCRIPT = '''
import argparse, json, os, sys
parser = argparse.ArgumentParser()
for name in ("--dtype", "--save-dir", "--fail"):
    parser.add_argument(name)
parser.add_argument("--seed", type=int)
args = parser.parse_args()
with open("calls.txt", "a") as calls:
    calls.write(f"{args.dtype}-{args.seed} ")
if args.fail == f"{args.dtype}-{args.seed}":
    with open(os.path.join(args.save_dir, "log.jsonl"), "w") as file:
        file.write("{}\\n")
    sys.exit("it ran out of memory")
if args.fail != "silent":
    with open(os.path.join(args.save_dir, "log.jsonl"), "w") as file:
        file.write(json.dumps({"version": 2, "arguments": vars(args)}) + "\\n")
        for epoch in range(3):
            error = 0.5 - epoch / 10 + args.seed / 1000 + (args.dtype == "bfloat16") / 10
            file.write(json.dumps({"epoch": epoch, "err_top1": error, "loss": 1.0}) + "\\n")
'''
FLAGS = ["train.py", "--policies", "float32,float16,bfloat16", "--seeds", "3"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    return tmp_path


def compare(*flags, code=0):
    assert main(["compare", *FLAGS, *flags]) == code


def calls():
    return Path("calls.txt").read_text().split()


def test_all_runs_and_their_verdicts(capsys):
    compare()
    assert sorted(calls()) == sorted(f"{dtype}-{seed}" for seed in range(3)
                                     for dtype in ("float32", "float16", "bfloat16"))
    out = capsys.readouterr().out
    assert "9 runs: 0 finished, 9 left" in out
    assert "finished bfloat16-seed2" in out
    assert "float16, top-1 accuracy +0.00 points (equal)" in out
    assert "bfloat16, top-1 accuracy -10.00 points (lower)" in out
    assert "|" not in out
    assert out.rstrip().endswith("compare/report/report.html")
    assert Path("compare/report/report.html").exists()
    assert Path("compare/float16-seed1/output.txt").exists()


def test_finished_runs_are_not_repeated(capsys):
    for seeds, count in (("1", 3), ("2", 6), ("2", 6)):
        compare("--seeds", seeds)
        assert len(calls()) == count
    assert "6 runs: 3 finished, 3 left" in capsys.readouterr().out


def test_failed_run_is_named_and_leaves_nothing(capsys):
    compare("--flags=--fail float16-1", code=1)
    error = capsys.readouterr().err
    assert "train.py with --dtype float16 --seed 1 failed with exit code 1" in error
    assert "it ran out of memory" in error
    assert sorted(path.name for path in Path("compare").iterdir()) == [
        "bfloat16-seed0", "compare.json", "float16-seed0", "float32-seed0", "float32-seed1"]
    assert len(calls()) == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_trainings_end_with_their_comparison(number):
    os.mkfifo("alive")
    Path("train.py").write_text("import signal; alive = open('alive', 'w')\n"
                                "print('started', file=alive, flush=True)\n"
                                "signal.alarm(120); signal.pause()\n")
    alive = os.open("alive", os.O_RDONLY | os.O_NONBLOCK)
    process = subprocess.Popen([sys.executable, "-m", "gluon_amp", "compare", *FLAGS])

    def received():
        select.select([alive], [], [], 60)
        return os.read(alive, 99)

    try:
        assert received() == b"started\n"
        process.send_signal(number)
        assert received() == b""  # the training's end has closed it
        assert process.wait() == -number
    finally:
        process.kill()
        os.close(alive)


def test_script_without_a_log_is_refused(capsys):
    compare("--flags=--fail silent", code=1)
    assert "use gluon_amp.reports.Log" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "message"), [
    (lambda: compare("--flags=--fail none", code=1), "has runs with other flags"),
    (lambda: (Path("train.py").write_text(SCRIPT + "# changed\n"), compare(code=1)),
     "has runs with other sha256")])
def test_runs_of_another_script_or_of_other_flags_are_not_mixed(change, message, capsys):
    compare("--seeds", "1")
    change()
    assert message in capsys.readouterr().err
    assert json.loads(Path("compare/compare.json").read_text())["flags"] == []


@pytest.mark.parametrize(("flags", "message"), [
    (["--policies", "float16,bfloat16"], "takes float32 and others"),
    (["--policies", "float32"], "takes float32 and others"),
    (["--policies", "float32,float16,float16"], "takes float32 and others"),
    (["--policies", "float32,float17"], "Received: float32,float17"),
    (["--flags=--seed 3"], "compare sets --dtype, --seed and --save-dir"),
    (["--flags=--dtype=float16"], "compare sets --dtype, --seed and --save-dir"),
    (["--margin", "0"], "margin is a number of points between 0 and 100")])
def test_invalid_flags_start_no_run(flags, message, capsys):
    compare(*flags, code=1)
    assert message in capsys.readouterr().err
    assert not Path("calls.txt").exists()
    assert not Path("compare").exists()


def test_missing_script_is_one_line(capsys):
    Path("train.py").unlink()
    compare(code=1)
    assert "No such file" in capsys.readouterr().err
    assert not Path("compare").exists()
