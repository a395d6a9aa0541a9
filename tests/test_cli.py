"""The command `gluon-amp`, as one types it."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest
from gluon_amp import KernelError, __version__
from gluon_amp.tools import cli
from gluon_amp.tools.cli import COMMANDS, main
from scripts import heeds_ctrl_c

ROOT = Path(__file__).parents[1]
NAMES = [command.name for command in COMMANDS]
WITHOUT_MXNET = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name == "mxnet":
            raise ModuleNotFoundError("No module named 'mxnet'", name=name)
sys.meta_path.insert(0, Absent())
"""


def start(*arguments, before="", **options):
    """The command in a process of its own."""
    code = f"{before}\nfrom gluon_amp_command import main\nmain()"
    env = {**os.environ, **options.pop("variables", {})}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def run(*arguments, **options):
    """Its exit code, and what it writes to stdout and stderr."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture
def failing(monkeypatch):
    """Makes `gluon-amp demo` raise an exception."""
    def fail(error):
        def demo(epochs):
            raise error
        monkeypatch.setattr("gluon_amp.tools.demo.demo", demo)
    return fail


# ---- the demo


def test_the_demo_ends_with_a_table(capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    assert main(["demo", "--epochs", "2"]) == 0
    captured = capsys.readouterr()
    assert "step/s" not in captured.err  # the bar is for terminals
    header, float32, float16 = (line.split() for line in captured.out.splitlines())
    assert header[0] == "dtype"
    assert (float32[0], float16[0]) == ("float32", "float16")
    assert float(float16[1].rstrip("%")) > 80
    assert float32[3] == "1.00"
    whole, half = (int(row[4].replace(",", "")) for row in (float32, float16))
    assert 0.5 <= half / whole < 0.51


def test_the_demo_without_scikit_learn_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "gluon-amp demo: the demo's images come with scikit-learn: " \
                           "pip install 'gluon-amp[demo]'\n"


# ---- usage: exit code 2


def test_it_tells_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"gluon-amp {__version__}"


def test_without_a_subcommand_it_lists_them(capsys):
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for command in COMMANDS:
        assert f"{command.name} " in captured.err
        assert command.help in " ".join(captured.err.split())


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_subcommand_has_examples_that_it_takes(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    (command,) = [c for c in COMMANDS if c.name == name]
    assert f"{command.help[:1].upper()}{command.help[1:]}." in " ".join(text.split())
    shown = text.partition("examples:\n")[2].splitlines()
    assert [line.strip() for line in shown] == list(command.examples)
    assert command.examples
    for example in command.examples:
        assert cli.make_parser().parse_args(example.split()[1:]).command == name


@pytest.mark.parametrize(("arguments", "said"), [
    (["train"], "train"), (["doctr"], "Did you mean doctor?"),
    (["doctor", "--batch-size", "0"], "a whole number from 1 on. Received: '0'"),
    (["doctor", "--image-shape", "3,x"], "whole numbers, such as 3,224,224. Received: '3,x'"),
    (["doctor", "--image-shape", "3,,4"], "such as 3,224,224. Received: '3,,4'"),
    (["demo", "--epochs", "-1"], "a whole number from 1 on. Received: '-1'"),
    (["demo", "--epochs", "many"], "a whole number from 1 on. Received: 'many'"),
    (["demo", "--epoch", "8"], "unrecognized arguments: --epoch 8. Did you mean --epochs?")])
def test_bad_usage_is_named(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line, = captured.err.splitlines()
    assert said in line


# ---- what a user can mend: one line, exit code 1


@pytest.mark.parametrize("error", [
    ValueError("no such\nthing"), OSError("no such\n  thing"), ImportError("no such thing"),
    KernelError("no such thing")])
def test_errors_are_one_line_on_stderr(error, failing, capsys):
    failing(error)
    assert main(["demo"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "gluon-amp demo: no such thing\n")


@pytest.mark.parametrize("arguments", [["--debug", "demo"], ["demo", "--debug"]])
def test_debug_shows_the_traceback(arguments, failing):
    failing(ValueError("no such thing"))
    with pytest.raises(ValueError, match="no such thing"):
        main(arguments)


def test_a_fault_of_ours_shows_its_traceback_anyway(failing):
    failing(KeyError("a fault"))
    with pytest.raises(KeyError, match="a fault"):
        main(["demo"])


@pytest.mark.parametrize(("model", "said"), [
    ("resnet19", "resnet18_v1, "), ("there-is-none.json", "No such file or directory")])
def test_a_model_that_is_not_there_is_named(model, said, capsys):
    assert main(["doctor", "--model", model]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("gluon-amp doctor: ")
    assert said in line
    assert model in line


# ---- the doctor


def test_the_doctors_json_has_what_its_text_has(capsys):
    arguments = ["doctor", "--model", "squeezenet1.1", "--batch-size", "8"]
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert facts["trains"]
    assert text.startswith("float16 trains here")
    assert "squeezenet1.1, batches of 8x3x224x224" in text
    assert facts["network"]["batch"] == [8, 3, 224, 224]
    assert f"{facts['network']['bytes']['float16']['activations'] / 1e6:.1f}" in text


def test_where_float16_does_not_train_the_exit_code_is_1_and_the_reason_comes_first():
    code, out, err = run("doctor", variables={"GLUON_AMP_ISA": "nonsense"})
    assert (code, err) == (1, "")
    assert out.startswith("float16 does not train here: GLUON_AMP_ISA must be one of ")


def test_without_an_mxnet_that_can_be_imported_the_reason_is_a_line():
    code, out, err = run("doctor", before=WITHOUT_MXNET)
    assert (code, out) == (1, "")
    assert err.startswith("gluon-amp: gluon_amp needs MXNet 1.9.1: pip install ")
    assert err.count("\n") == 1

    code, out, err = run("doctor", "--json", before=WITHOUT_MXNET)
    assert code == 1
    assert json.loads(out) == {"trains": False, "reason": err.strip().partition(": ")[2]}


def test_with_debug_its_traceback_is_shown():
    code, _, err = run("doctor", "--debug", before=WITHOUT_MXNET)
    assert code == 1
    assert "Traceback" in err
    assert "ImportError: gluon_amp needs MXNet 1.9.1" in err


# ---- signals


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--help"]])
def test_a_reader_who_goes_away_is_no_error(arguments):
    with start(*arguments, variables={"PYTHONUNBUFFERED": ""}) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_ctrl_c_ends_it_with_130():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    process = start("demo", "--epochs", "1000", preexec_fn=heeds_ctrl_c,
                    before="import logging\nlogging.basicConfig(level=logging.INFO)")
    shown = ""
    while "loss scale" not in shown:  # found by the first step: it trains
        read = process.stderr.read(1)
        assert read, shown
        shown += read
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def test_python_m_gluon_amp_is_the_same_command():
    done = processes.run("-m", "gluon_amp", "--version")
    assert done.stdout == f"gluon-amp {__version__}\n", done.stderr
