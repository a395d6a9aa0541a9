"""`gluon-amp launch`: it starts workers, and leaves no process behind."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gluon_amp.tools.launch import launch, read_hosts

TRAINS = """
import os, sys, time
import gluon_amp as amp
from mxnet import autograd, gluon, nd
net = gluon.nn.Dense(2, in_units=3)
net.initialize()
trainer = amp.Trainer(net.collect_params(), "sgd", kvstore="dist_sync")
while True:
    with autograd.record():
        loss = net(nd.ones((2, 3))).sum()
    trainer.backward(loss)
    trainer.step(4)
    if sys.argv[1] == "ends":
        break
    if trainer._kvstore.rank == 1:
        os.kill(os.getpid(), 9)
trainer.check_ranks()
open(f"{sys.argv[2]}/{trainer._kvstore.rank}", "w").write("trained")
"""


@pytest.fixture()
def launcher(tmp_path):
    """Starts `gluon-amp launch -n 2` of a program, with arguments; what it left is ended."""
    started = []

    def run(program, *arguments, program_arguments=()):
        (tmp_path / "program.py").write_text(program)
        command = [sys.executable, "-W", "ignore", "-m", "gluon_amp.tools.cli", "launch", "-n",
                   "2", *arguments, sys.executable, "-W", "ignore", str(tmp_path / "program.py"),
                   *program_arguments]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                                        start_new_session=True,
                                        env={**os.environ, "OMP_NUM_THREADS": "1",
                                             "LAUNCHED_BY": str(tmp_path)}))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert wait_until(lambda: not left_behind(tmp_path))


def left_behind(tmp_path):
    """Processes that the launcher has started, or those did."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"LAUNCHED_BY={tmp_path}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass
    return found


def wait_until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def test_two_workers_train_and_all_ends(launcher, tmp_path):
    process = launcher(TRAINS, program_arguments=["ends", str(tmp_path)])
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["trained"] * 2
    assert not left_behind(tmp_path)


def test_a_worker_that_is_killed_ends_all_with_two_sentences(launcher, tmp_path):
    process = launcher(TRAINS, program_arguments=["dies", str(tmp_path)])
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGKILL
    assert "RankEndedError: rank 0 waits in vain: rank 1 has died" in errors
    assert "was killed by SIGKILL: the others are ended" in errors
    assert not left_behind(tmp_path)


SLEEPS = "import sys, time, pathlib; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_is_ended_ends_all(launcher, tmp_path, number):
    process = launcher(SLEEPS, program_arguments=[str(tmp_path / "began")])
    assert wait_until((tmp_path / "began").exists)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    assert wait_until(lambda: not left_behind(tmp_path))


def test_the_exit_code_is_that_of_the_first_that_failed(capfd):
    code = launch([sys.executable, "-c", "raise SystemExit(3)"], workers=1)
    assert code == 3
    assert "worker 0 has ended with the exit code 3: the others are ended" in capfd.readouterr().err


def test_hosts_are_read_from_a_file_and_ssh_starts_the_workers(tmp_path, monkeypatch, capfd):
    (tmp_path / "hosts").write_text("# ours\nlocalhost  # the first\nuser@localhost\n")
    ssh = tmp_path / "ssh"  # in place of ssh: runs the command here, and tells the host
    ssh.write_text('#!/bin/sh\necho "$@" | cut -d" " -f4 >> "$(dirname "$0")/asked"\n'
                   'shift 4\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = read_hosts(str(tmp_path / "hosts"))
    assert hosts == ["localhost", "user@localhost"]
    program = "import os, sys; sys.exit(os.environ['DMLC_ROLE'] != 'worker' or 4)"
    assert launch([sys.executable, "-c", program], workers=2, hosts=hosts) == 4
    assert set((tmp_path / "asked").read_text().split()) <= set(hosts)


@pytest.mark.parametrize("text", ["", "# nothing\n", "one two\n", "-oProxyCommand=x\n"])
def test_files_that_hold_no_hosts_are_refused(tmp_path, text):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match="should have a host on each line"):
        read_hosts(str(tmp_path / "hosts"))
