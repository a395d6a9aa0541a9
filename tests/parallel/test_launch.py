"""`gluon-amp launch` starts workers and leaves no process behind."""
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
from gluon_amp.parallel import launch as launch_module
from gluon_amp.parallel.launch import launch, read_hosts
from scripts import heeds_ctrl_c

pytestmark = pytest.mark.long

TRAINS = """
import os, sys, threading
import gluon_amp as amp
from mxnet import autograd, gluon, nd
how, folder = sys.argv[1:]
net = gluon.nn.Dense(2, in_units=3)
net.initialize()
on_servers = {"loss_scale": None, "update_on_kvstore": True} if how == "is killed" else {}
trainer = amp.Trainer(net.collect_params(), "sgd", kvstore="dist_sync", **on_servers)
while True:
    with autograd.record():
        loss = net(nd.ones((2, 3))).sum()
    trainer.backward(loss)
    trainer.step(4)
    open(f"{folder}/stepped {trainer.rank}", "w").close()
    if how == "ends":
        break
    if trainer.rank == 1:
        if how == "is killed":
            os.kill(os.getpid(), 9)
        if how == "raises":
            raise RuntimeError("the data is gone")
        if how == "exits":
            sys.exit()
        if how == "waits":
            threading.Event().wait()
trainer.check_ranks()
open(f"{folder}/{trainer.rank}", "w").write("trained")
"""


@pytest.fixture()
def launcher(tmp_path):
    """Starts `gluon-amp launch -n 2` with a program and arguments; kills remaining processes."""
    started = []

    def run(program, *arguments, program_arguments=()):
        (tmp_path / "program.py").write_text(program)
        command = [sys.executable, "-W", "ignore", "-m", "gluon_amp", "launch", "-n",
                   "2", *arguments, sys.executable, "-W", "ignore", str(tmp_path / "program.py"),
                   *program_arguments]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                                        start_new_session=True, preexec_fn=heeds_ctrl_c,
                                        env=processes.environment(
                                            OMP_NUM_THREADS="1", LAUNCHED_BY=str(tmp_path))))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert wait_until(lambda: not left_behind(tmp_path))


def left_behind(tmp_path, role=""):
    """Remaining processes of the launcher and their children: all, or those of a role."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().decode()
        except OSError:
            continue
        role_fits = not role or f"DMLC_ROLE={role}" in environment
        if f"LAUNCHED_BY={tmp_path}" in environment and role_fits:
            found.append(int(folder.name))
    return found


def wait_until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


ENDS_EARLY = """
import os, sys
try:
    os.mkdir(sys.argv[2] + "/one ended")
except FileExistsError:
    import gluon_amp as amp
    from mxnet import gluon
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize()
    amp.Trainer(net.collect_params(), "sgd", kvstore="dist_sync")
"""


@pytest.mark.parametrize(("program", "how", "flags", "code", "told"), [
    (TRAINS, "is killed", [], 128 + signal.SIGKILL, "was killed by SIGKILL"),
    pytest.param(TRAINS, "raises", [], 1, "exited with code 1", marks=pytest.mark.thorough),
    pytest.param(TRAINS, "exits", ["--exit-timeout", "1"], 1, "exited with code 0",
                 marks=pytest.mark.thorough),
    (ENDS_EARLY, "before its store exists", ["--exit-timeout", "1"], 1, "exited with code 0")])
def test_failed_worker_ends_all_and_is_named(program, how, flags, code, told, launcher, tmp_path):
    process = launcher(program, *flags, program_arguments=[how, str(tmp_path)])
    _, errors = process.communicate(timeout=90)
    assert process.returncode == code
    assert re.search(f"launch: worker [01] {told}", errors)
    assert (how == "raises") == ("RuntimeError: the data is gone" in errors)
    assert not left_behind(tmp_path)


ENDS_LAST = TRAINS + """
import contextlib, time
other = f"{folder}/process"
if trainer.rank == 1:
    with open(other + " 1", "w") as file:
        file.write(str(os.getpid()))
    os.rename(other + " 1", other)
while trainer.rank == 0:
    with contextlib.suppress(FileNotFoundError):
        if not os.path.exists("/proc/" + open(other).read()):
            break
    time.sleep(0.02)
"""


@pytest.mark.parametrize("program", [
    pytest.param(TRAINS, id="together"),
    pytest.param(ENDS_LAST, id="one after another", marks=pytest.mark.thorough)])
def test_two_workers_train_and_all_processes_end(program, launcher, tmp_path):
    process = launcher(program, program_arguments=["ends", str(tmp_path)])
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["trained"] * 2
    assert not left_behind(tmp_path)


SLEEPS = "import sys, time, pathlib; pathlib.Path(sys.argv[-1]).touch(); time.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(("program", "arguments", "began"), [
    pytest.param(TRAINS, ["waits", "{}"], "stepped 0", marks=pytest.mark.thorough),
    (SLEEPS, ["{}/began"], "began")])
def test_killed_or_interrupted_launcher_ends_all(program, arguments, began, number, launcher,
                                                 tmp_path):
    """Also workers that wait for others."""
    process = launcher(program, program_arguments=[text.format(tmp_path) for text in arguments])
    assert wait_until((tmp_path / began).exists, 90)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    assert wait_until(lambda: not left_behind(tmp_path))


@pytest.mark.parametrize(("number", "handler", "program", "code"), [
    (signal.SIGTERM, signal.SIG_DFL, SLEEPS, 130),
    (signal.SIGHUP, signal.SIG_IGN, "raise SystemExit(3)", 3)])  # nohup: it ends nothing
def test_signal_while_a_process_starts_loses_no_process(monkeypatch, tmp_path, number, handler,
                                                        program, code):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **settings):
            started.append(self)
            super().__init__(*arguments, **settings)
            signal.raise_signal(number)

    before = signal.signal(number, handler)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    try:
        command = [sys.executable, "-c", program, str(tmp_path / "began")]
        assert launch(command, workers=1) == code
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert [process.poll() is not None for process in started] == [True] * 3


def test_exit_code_is_that_of_first_failed_worker(capfd):
    code = launch([sys.executable, "-c", "raise SystemExit(3)"], workers=1)
    assert code == 3
    assert "worker 0 exited with code 3: terminating the others" in capfd.readouterr().err


def test_hosts_file_is_read_and_ssh_starts_workers(tmp_path, monkeypatch, capfd):
    (tmp_path / "hosts").write_text("# ours\nlocalhost  # the first\nuser@localhost\n")
    ssh = tmp_path / "ssh"  # replaces ssh: runs the command here, and records the host
    ssh.write_text('#!/bin/sh\necho "$@" | cut -d" " -f4 >> "$(dirname "$0")/asked"\n'
                   'shift 4\nexec env -i sh -c "$*"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = read_hosts(str(tmp_path / "hosts"))
    assert hosts == ["localhost", "user@localhost"]
    passed = {"GLUON_AMP_ISA": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "NVIDIA_TF32_OVERRIDE": "0"}
    for name, value in passed.items():
        monkeypatch.setenv(name, value)
    program = "import os, sys; sys.exit(os.environ['DMLC_ROLE'] == 'worker' and " \
        f"{passed}.items() <= os.environ.items() and 'PATH_OF_DATA' not in os.environ and 4)"
    monkeypatch.setenv("PATH_OF_DATA", "here")
    assert launch([sys.executable, "-c", program], workers=2, hosts=hosts) == 4
    assert set((tmp_path / "asked").read_text().split()) <= set(hosts)


def test_server_address_is_reachable_from_all_hosts(monkeypatch):
    seen_as = {"localhost": "127.0.0.1", "gpu2": "10.0.0.7"}
    monkeypatch.setattr(launch_module, "_address_for", seen_as.get)
    assert launch_module._address_for_all(["localhost", "gpu2"]) == "10.0.0.7"
    assert launch_module._address_for_all(["localhost"]) == "127.0.0.1"


def test_host_without_address_is_named():
    with pytest.raises(OSError, match="the host user@::1 cannot be reached"):
        launch([], workers=2, hosts=["user@::1"])


@pytest.mark.parametrize("text", ["", "# nothing\n", "one two\n", "-oProxyCommand=x\n"])
def test_invalid_hosts_files_are_refused(tmp_path, text):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match="should have a host on each line"):
        read_hosts(str(tmp_path / "hosts"))
