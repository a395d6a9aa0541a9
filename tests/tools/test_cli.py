"""The command `gluon-amp`."""
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import processes
import pytest
from gluon_amp import __version__
from gluon_amp.cpu.library import KernelError
from gluon_amp.tools import cli
from gluon_amp.tools.cli import COMMANDS, main
from modules import prepared
from mxnet.gluon import nn
from scripts import heeds_ctrl_c

ROOT = Path(__file__).parents[2]
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
    """Starts the command in a new process."""
    code = f"{before}\nfrom gluon_amp_command import main\nmain()"
    env = processes.environment(**options.pop("variables", {}))
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def run(*arguments, **options):
    """Exit code, stdout and stderr of the command."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def error_line(capsys):
    """The only line that the command has printed, an error."""
    captured = capsys.readouterr()
    assert captured.out == ""
    line, = captured.err.splitlines()
    return line


@pytest.fixture
def failing(monkeypatch):
    """Makes `gluon-amp demo` raise an exception."""
    def fail(error):
        def demo(epochs):
            raise error
        monkeypatch.setattr("gluon_amp.tools.demo.demo", demo)
    return fail


# ---- the demo


@pytest.mark.thorough
def test_demo_prints_measurements_and_a_table():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    done = processes.run(  # its memory is that of a new process
        "-c", "from gluon_amp.tools import cli, demo; demo.PIXELS = 64; "
        "cli.main(['demo', '--epochs', '2'])", **processes.WITH_ALL)
    assert done.returncode == 0, done.stderr
    assert "step/s" not in done.stderr  # the progress bar is for terminals only
    step, full, half, words, _, header, float32, float16, bfloat16, empty, note = (
        done.stdout.splitlines()[:11])
    assert step.startswith("a step of MobileNetV2, 8 images of 64x64 pixels")
    found = [re.fullmatch(r"(float\d\d) +(\d+) ms \((.*)\) +(\d+) MB \((.*)\)", line).groups()
             for line in (full, half)]
    assert [line[0] for line in found] == ["float32", "float16"]
    milliseconds, time_ratio, megabytes, memory_ratio = found[1][1:]
    assert int(milliseconds) > 0
    assert 0.2 < float(memory_ratio) < 1
    assert int(megabytes) > 20
    time = "less" if float(time_ratio) < 1 else "more"
    assert words == f"On this processor, float16 takes {time} time and less memory than float32."
    rows = [line.split() for line in (float32, float16, bfloat16)]
    assert (header.split()[0], empty, note[:4]) == ("dtype", "", "This")
    assert [row[0] for row in rows] == ["float32", "float16", "bfloat16"]
    assert all(float(row[1].rstrip("%")) > 80 for row in rows)


def test_demo_without_scikit_learn_names_install_command(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 1
    line = error_line(capsys)
    assert line.startswith("gluon-amp demo: ")
    assert all(words in line for words in ("pip install '.[demo]'", "sklearn"))


# ---- usage: exit code 2


def test_version_flag(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"gluon-amp {__version__}"


def test_command_without_subcommand_lists_subcommands(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for command in COMMANDS:
        assert f"{command.name} " in err
        assert command.help in " ".join(err.split())


@pytest.mark.parametrize("name", NAMES)
def test_help_of_subcommand_has_valid_examples(name, capsys):
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
    (["train"], "train"), (["doctr"], "invalid choice: 'doctr' (choose from "),
    (["doctor", "--image-shape", "3,x"], "--image-shape: must be an integer >= 1. Received: 'x'"),
    (["doctor", "--image-shape", "3,,4"], "--image-shape: must be an integer >= 1. Received: ''"),
    (["demo", "--epochs", "-1"], "an integer >= 1. Received: '-1'"),
    (["demo", "--epochs", "many"], "an integer >= 1. Received: 'many'"),
    (["demo", "--epoch", "8"], "unrecognized arguments: --epoch 8 ")])
def test_bad_usage_is_reported_in_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert said in error_line(capsys)


# ---- errors of the user: one line, exit code 1


@pytest.mark.parametrize("error", [
    ValueError("no such\nthing"), OSError("no such\n  thing"), ImportError("no such thing"),
    KernelError("no such thing")])
def test_errors_are_one_line_on_stderr(error, failing, capsys):
    failing(error)
    assert main(["demo"]) == 1
    assert error_line(capsys) == "gluon-amp demo: no such thing"


@pytest.mark.parametrize(("arguments", "error"), [
    (["--debug", "demo"], ValueError), (["demo", "--debug"], ValueError), (["demo"], KeyError)])
def test_debug_flag_and_internal_errors_show_traceback(arguments, error, failing):
    failing(error("no such thing"))
    with pytest.raises(error, match="no such thing"):
        main(arguments)


@pytest.mark.parametrize(("model", "said"), [
    ("resnet19", "resnet18_v1, "), ("there-is-none.json", "No such file or directory")])
def test_missing_model_is_named(model, said, capsys):
    assert main(["doctor", "--model", model]) == 1
    line = error_line(capsys)
    assert line.startswith("gluon-amp doctor: ")
    assert all(words in line for words in (said, model))


# ---- the doctor


def test_doctor_prints_a_report(capsys):
    assert main(["doctor", "--model", "squeezenet1.1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("float16 trains here")
    assert "squeezenet1.1: 1 of 26 layers are slower" in text


def test_doctor_exits_with_1_and_reason_if_float16_does_not_train():
    code, out, err = run("doctor", variables={"GLUON_AMP_ISA": "nonsense"})
    assert (code, err) == (1, "")
    assert out.startswith("float16 does not train here: GLUON_AMP_ISA must be one of ")


def test_doctor_without_mxnet_reports_reason():
    code, out, err = run("doctor", before=WITHOUT_MXNET)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("gluon-amp: gluon_amp needs MXNet 1.9.1: pip install ")
    code, _, err = run("doctor", "--debug", before=WITHOUT_MXNET)
    assert code == 1
    assert "Traceback" in err
    assert "ImportError: gluon_amp needs MXNet 1.9.1" in err


# ---- an X-ray of files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with exported networks and batches."""
    folder = tmp_path_factory.mktemp("files")
    mx.random.seed(1)
    rng = np.random.default_rng(1)
    rows, classes = rng.standard_normal((40, 6)), rng.integers(0, 4, 40)
    for name, last in (("net", []), ("ends", [nn.HybridLambda("softmax")]),
                       ("broken", [nn.HybridLambda(lambda F, x: x * 2000 * 2000,
                                                   prefix="scaled_")])):
        net = nn.HybridSequential(prefix=f"{name}_")
        with net.name_scope():
            net.add(nn.Dense(8, activation="relu"), nn.BatchNorm(), nn.Dense(4), *last)
        net.initialize(mx.init.Xavier())
        net.hybridize()
        net(mx.nd.array(rows))
        net.export(str(folder / name))
    sym = mx.sym
    dense = sym.FullyConnected(sym.var("data"), num_hidden=4, name="fc")
    label = sym.Reshape(sym.var("softmax_label"), shape=(-1,))
    module = prepared(mx.mod.Module(sym.SoftmaxOutput(dense, label, name="softmax")), (8, 6),
                      (8, 1), init=mx.init.Xavier(), optimizer=None)
    module.save_checkpoint(str(folder / "module"), 0)
    for name, arrays in {
            "batch": {"data": rows, "label": classes},
            "short": {"data": rows[:4], "label": classes[:4]},
            "column": {"data": rows, "softmax_label": classes[:, None]},
            "target": {"data": rows, "target": rng.standard_normal((40, 4))},
            "data": {"data": rows}, "image": {"image": rows, "label": classes},
            "text": {"data": np.array(["a"]), "label": classes}}.items():
        np.savez(folder / f"{name}.npz", **arrays)
    return folder


def xray(files, tmp_path, model="net", data="batch", *others):
    """The arguments of the command."""
    data = [str(files / f"{name}.npz") for name in data.split()]
    return ["xray", str(files / f"{model}-symbol.json"), "--params",
            str(files / f"{model}-0000.params"), "--data", *data, "-o", str(tmp_path / "out"),
            *others]


def steps_in(folder):
    lines = [json.loads(line) for line in (folder / "xray.jsonl").read_text().splitlines()]
    return {line["step"] for line in lines if "step" in line}


@pytest.mark.parametrize(("model", "data", "others", "steps"), [
    ("net", "batch", "", 1), ("net", "batch short", "", 2),
    ("net", "batch short", "--steps 1 --policy mixed_float16", 1),
    ("net", "target", "--label target --loss l2", 1),
    ("module", "batch batch", "", 2), ("module", "column", "", 1)])
def test_xray_of_files_prints_verdict_and_writes_page(
        model, data, others, steps, files, tmp_path, capsys):
    assert main([*xray(files, tmp_path, model, data), *others.split()]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Training runs: no operators need float32 beyond those that the policy "
                          "keeps\n")
    assert out.endswith(f"\n{tmp_path / 'out' / 'xray.html'}\n")
    assert f"<h1>X-ray of {model}</h1>" in (tmp_path / "out" / "xray.html").read_text()
    assert len(steps_in(tmp_path / "out")) == steps


def test_xray_of_files_prints_nodes_to_keep(files, tmp_path, capsys):
    assert main(xray(files, tmp_path, "broken")) == 0
    out = capsys.readouterr().out
    assert "overflow begins in scaled__mulscalar1" in out
    assert "amp.convert(net, keep=['scaled__mulscalar1'" in out
    assert main(["xray", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == out.rpartition(str(tmp_path))[0]


@pytest.mark.parametrize(("model", "data", "others", "said"), [
    ("net", "data", "", "has no loss, so --loss needs a label: an array called 'label'"),
    ("net", "image", "", "must have arrays called data, label. Received: image (40, 6), label"),
    ("net", "batch", "--label target", "must have arrays called data, target. Received: data"),
    ("module", "data", "", "must have arrays called data, softmax_label or label. Received: data"),
    ("net", "text", "", "arrays must hold numbers. Received: data of <U1"),
    ("net", "none", "", "does not exist"),
    ("net", "batch", "--loss l3", "--loss is one of softmax, sigmoid, l1, l2. Received: l3"),
    ("module", "batch", "--loss l2", "this one has its own: softmax_output. Received: --loss l2"),
    ("ends", "batch", "", "takes logits, and the symbol ends in softmax"),
    ("net", "batch", "--policy float32", "such as float16. Received: --policy float32"),
    ("net", "batch", "--policy float17", "unknown policy. Valid: float32, float16,"),
    ("net", "batch", "--format bfloat16", "a new one takes --policy"),
    ("net", "batch", "--params nothing", "nothing does not exist"),
    ("none", "batch", "", "No such file")])
def test_xray_refuses_unfit_files(model, data, others, said, files, tmp_path,
                                                    capsys):
    assert main([*xray(files, tmp_path, model, data), *others.split()]) == 1
    assert said in error_line(capsys)
    assert not (tmp_path / "out").exists()


def test_parameters_of_another_network_are_refused(files, tmp_path, capsys):
    other, larger = str(files / "module-0000.params"), str(tmp_path / "larger.params")
    arrays = mx.nd.load(other)
    arrays["arg:fc_weight"] = mx.nd.ones((3, 9))
    mx.nd.save(larger, arrays)
    symbol, batch = (str(files / name) for name in ("net-symbol.json", "batch.npz"))
    for model, flag, file, said in (
            ("net", "--params", other, [f"{other} lacks net_batchnorm0_beta, ",
                                        "net-symbol.json has no fc_bias, fc_weight"]),
            ("net", "--params", batch, ["MXNet cannot read parameters from"]),
            ("net", "--params", symbol, ["MXNet cannot read parameters from"]),
            ("net", "--data", other, ["must be a file of numpy.savez"]),
            ("module", "--params", larger,
             ["the parameters do not fit the symbol with this data: "])):
        assert main([*xray(files, tmp_path, model), flag, file]) == 1
        error = capsys.readouterr().err
        assert all(words in error for words in said)


def test_existing_output_is_refused(files, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert main(xray(files, tmp_path)) == 1
    assert "--output must be a new folder. Received: " in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    ("a.json", "an X-ray of a.json needs --params and --data"),
    ("a.json --params b", "an X-ray of a.json needs --data"),
    ("folder --steps 3 --policy float16", "--policy, --steps: only for a new X-ray")])
def test_flags_of_new_and_saved_xrays_are_not_mixed(arguments, said, capsys):
    assert main(["xray", *arguments.split()]) == 1
    assert said in error_line(capsys)


# ---- signals


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--help"]])
def test_closed_stdout_is_no_error(arguments):
    with start(*arguments, variables={"PYTHONUNBUFFERED": ""}) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.thorough
def test_ctrl_c_exits_with_130():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    process = start("demo", "--epochs", "1000", preexec_fn=heeds_ctrl_c,
                    variables=processes.WITH_ALL,
                    before="import logging\nlogging.basicConfig(level=logging.INFO)")
    shown = ""
    while shown.count("hybridized") < 3:  # the last before the training
        read = process.stderr.read(1)
        assert read, shown
        shown += read
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, "dtype" in out) == (130, False)
    assert "Traceback" not in err


def test_python_m_gluon_amp_is_same_command():
    done = processes.run("-m", "gluon_amp", "--version")
    assert done.stdout == f"gluon-amp {__version__}\n", done.stderr
