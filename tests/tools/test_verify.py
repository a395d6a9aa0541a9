"""`gluon-amp doctor --verify`: it compares a device with the CPU. Here, a second CPU context stands
for a GPU."""
import json

import gluon_amp  # noqa: F401  (before mxnet)
import mxnet as mx
import pytest
from gluon_amp.tools import cli, demo, verify

DEVICE = mx.cpu(1)


@pytest.fixture
def few(monkeypatch):
    """Leaves the cases of two operators, dot and sum."""
    operators = verify._operators()
    monkeypatch.setattr(verify, "_operators",
                        lambda: [each for each in operators if each[0] in ("dot", "sum")])
    monkeypatch.setattr(verify, "_networks", list)


def errors(facts):
    return {(row["case"], row["type"]): row["error"] for row in facts["cases"] if row["error"]}


def test_right_device_agrees_in_all_cases():
    facts = verify.verify(DEVICE)
    assert errors(facts) == {}
    assert facts["failed"] == 0
    assert len(facts["cases"]) > 50
    assert json.loads(json.dumps(facts)) == facts
    text = verify.describe(facts)
    assert text.startswith(f"cpu(1): all {len(facts['cases'])} cases agree with the CPU")


def test_wrong_results_and_gradients_and_errors_fail(few, monkeypatch):
    class Doubled(mx.autograd.Function):
        """An identity whose gradient is twice too large."""

        def forward(self, x):
            return x.copy()

        def backward(self, head):
            return 2 * head

    def wrong(name, run):
        return name, run, [(3, 4)]

    made = [*verify._operators(),
            wrong("result", lambda a: a * (1.1 if a.context == DEVICE else 1)),
            wrong("gradient", lambda a: Doubled()(a) if a.context == DEVICE else a * 1),
            wrong("NaN", lambda a: a * (float("nan") if a.context == DEVICE else 1)),
            wrong("shapes", lambda a: mx.nd.dot(a, a))]
    monkeypatch.setattr(verify, "_operators", lambda: made)
    found = errors(verify.verify(DEVICE))
    assert {name for name, _ in found} == {"result", "gradient", "NaN", "shapes"}
    assert found["gradient", "float32"] == found["NaN", "float16"] == "differs from the CPU"
    assert "Incompatible" in found["shapes", "float32"] or "shape" in found["shapes", "float32"]


def test_wrong_training_fails(few, monkeypatch):
    network = "dense", lambda: mx.gluon.nn.Dense(10), (8, 16)
    monkeypatch.setattr(verify, "_networks", lambda: [network])
    assert errors(verify.verify(DEVICE)) == {}
    trainer = demo.Trainer

    def forgetful(parameters, optimizer, settings):
        on_device = DEVICE in next(iter(parameters.values())).list_ctx()
        return trainer(parameters, optimizer,
                       {**settings, "learning_rate": 0.01 if on_device else 0.1})

    monkeypatch.setattr(demo, "Trainer", forgetful)
    assert errors(verify.verify(DEVICE)) == {
        ("dense", dtype): "differs from the CPU" for dtype in verify.TYPES}


def test_cases_beyond_time_limit_fail(few, monkeypatch):
    monkeypatch.setattr(verify, "SECONDS", -1.0)
    facts = verify.verify(DEVICE)
    assert facts["failed"] == len(facts["cases"])
    assert "not run" in verify.describe(facts)


def test_command_writes_table_and_file(few, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 1)
    monkeypatch.setattr(mx, "gpu", lambda i: DEVICE)
    path = tmp_path / "facts.json"
    assert cli.main(["doctor", "--verify", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {path}"
    facts = json.loads(path.read_text())
    assert facts["failed"] == 0
    assert facts["machine"][0].startswith("float16 trains here")
    monkeypatch.setattr(verify, "SECONDS", -1.0)
    assert cli.main(["doctor", "--verify", str(path)]) == 1
    assert json.loads(path.read_text())["failed"] > 0


@pytest.mark.skipif(mx.context.num_gpus() > 0, reason="this machine has a GPU")
def test_command_without_gpu_is_refused(capsys, tmp_path):
    assert cli.main(["doctor", "--verify", str(tmp_path / "facts.json")]) == 1
    assert "--verify needs a GPU that MXNet finds" in capsys.readouterr().err
    assert not (tmp_path / "facts.json").exists()
