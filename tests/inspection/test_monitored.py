"""`gluon-amp xray FILE`: the page of a Monitor's file, step by step."""
import json
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from cases import cases
from gluon_amp.formats import FORMATS
from gluon_amp.inspection.saved import draw, read
from gluon_amp.tools.cli import main
from mxnet import autograd, nd
from mxnet.gluon import nn

LOSS = mx.gluon.loss.SoftmaxCrossEntropyLoss()


def train(path, factors, policy="float16", **kwargs):
    """A training of a dense layer whose data have these factors, observed in every second step."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4, in_units=6, prefix="dense_"))
    net.initialize(mx.init.Normal(4))
    if policy == "float32":
        net.hybridize()
    else:
        amp.convert(net, policy)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0}, loss_scale=8.0)
    data = nd.array(np.random.default_rng(1).standard_normal((5, 6)))
    with amp.Monitor(net, trainer, path, interval=2, **kwargs) as monitor:
        for factor in np.repeat(factors, 2):
            with autograd.record():
                loss = LOSS(net(data * factor), nd.arange(5) % 4)
            trainer.backward(loss)
            trainer.step(5)
            monitor.step()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Factors whose third makes float16 outputs infinite."""
    path = tmp_path_factory.mktemp("monitored") / "statistics.jsonl"
    train(path, [1, 2 ** 4, 2 ** 14])
    return path


def page_of(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r"const data = (.*);\n", text).group(1))


def test_page_shows_each_step(file, capsys):
    assert main(["xray", str(file)]) == 0
    said = capsys.readouterr().out
    assert "error: net_dense_fwd: range above" in said
    assert "1 of 3 steps is not finite. The first is step 6, from net_dense_fwd on" in said
    assert said.endswith("statistics.html\n")
    data = page_of(file.with_suffix(".html"))
    assert data["numbers"] == [2, 4, 6]
    state, = data["states"]
    _, infinite, broken, first, bins = state["steps"]["6"]["net_dense_fwd"]
    assert infinite == 0 < broken
    assert first + data["low"] + len(bins) > 16
    one, two = (state["steps"][step]["net_dense_fwd"] for step in "24")
    assert two[3] - one[3] == 4  # the exponents of data that are 2^4 times as large
    assert "gradient of net_dense_weight" in state["steps"]["2"]
    assert state["scales"] == [3, 3, 3]


def test_counts_are_those_of_the_lines(file):
    view = read(str(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for step, (scale, counts) in zip(view.numbers, view.steps):
        own = [line for line in lines if line["step"] == step]
        assert scale == 8
        assert len(own) == len(counts) > 5
        for line, found in zip(own, counts.values()):
            shares = found.shares(FORMATS[line["format"]], rounded=True)
            assert [shares[name] for name in ("zero", "flushed", "subnormal")] \
                == [line[name] for name in ("zero", "underflow", "subnormal")]
            assert found.overflowed + found.infinite == line["overflow"] * line["numbers"]
            assert (found.numbers, found.nan) == (line["numbers"], line["nan"])


def test_another_format_and_a_float32_training(file, tmp_path, capsys):
    assert main(["xray", str(file), "--format", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "range above" not in said
    assert "statistics-bfloat16.html" in said
    train(tmp_path / "a.jsonl", [1, 2 ** 14], "float32")
    view = read(str(tmp_path / "a.jsonl"))
    assert view.name == "a.jsonl, steps 2 to 4, as if in float16"
    assert [(f.node, f.reason) for f in view.findings if f.severity == "error"] \
        == [("net_dense_fwd", "range above")]
    assert not read(str(tmp_path / "a.jsonl"), FORMATS["bfloat16"]).findings


def test_page_is_of_the_last_training_and_of_complete_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    train(path, [1, 1, 1])
    train(path, [2])
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 4, "node": "net')
    view = read(str(path))
    assert view.numbers == [2]
    assert view.notes == ["the file has 2 trainings, and this is the last one"]


def test_steps_of_long_trainings_are_left_out_evenly(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    train(path, [1] * 6, layers="net_dense_fwd")
    lines = path.read_text().count("\n")
    monkeypatch.setattr("gluon_amp.inspection.saved.MOST_BY_STEP", lines // 2)
    view = read(str(path))
    assert view.numbers == [2, 6, 10]
    assert view.notes == ["the page has one of every 2 steps of the file"]


def test_files_without_statistics_are_refused(tmp_path, file):
    def refused(text):
        (tmp_path / "b.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"b\.jsonl") as caught:
            read(str(tmp_path / "b.jsonl"))
        return str(caught.value)

    line = json.loads(file.read_text().splitlines()[0])
    assert "histograms, which a Monitor writes on CPUs only" in refused(
        json.dumps({**line, "bins": None}) + "\n")
    assert "no statistics yet" in refused("")
    for text in ("no\n", "[1]\n", '{"step": 1}\n'):
        assert "line 1 of" in refused(text)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.jsonl"]


@pytest.mark.parametrize("pair", [[], [1], [1, 2, 3], [-300, 1], ["x", 1]])
def test_files_with_wrong_bins_are_refused(tmp_path, file, pair):
    path = tmp_path / "b.jsonl"
    line = json.loads(file.read_text().splitlines()[0])
    path.write_text(json.dumps({**line, "bins": [pair]}) + "\n")
    with pytest.raises(ValueError, match=r"b\.jsonl is damaged"):
        draw(str(path))


# ---- damaged files

WRONG = (None, "x", -1, 10 ** 400, 1e300, [], [[1]], [[10 ** 9, 1]], {}, [[]], True)


def damaged(line, rng):
    """Returns a line with one field removed or replaced."""
    line = dict(line)
    key = sorted(line)[rng.integers(len(line))]
    if rng.random() < 0.2:
        del line[key]
    else:
        line[key] = WRONG[rng.integers(len(WRONG))]
    return line


@pytest.mark.parametrize("seed", cases([0], [1, 2]))
@pytest.mark.parametrize("kind", ["monitor", "xray"])
def test_damaged_files_are_errors_of_one_line(kind, seed, file, tmp_path, capsys):
    """Each file has one damaged line. Any other exception than those of the command fails."""
    path = tmp_path / "statistics.jsonl"
    given = path
    if kind == "xray":
        given, path = tmp_path / "run", tmp_path / "run" / "xray.jsonl"
        net = nn.Dense(4, in_units=6)
        net.initialize()
        amp.xray(amp.convert(net), [(nd.ones((5, 6)), nd.zeros(5))], LOSS).save(str(given))
    whole = path if kind == "xray" else file
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    rng = np.random.default_rng(seed)
    codes = []
    for i in range(50):
        at = 0 if i % 5 == 0 else rng.integers(len(lines))
        changed = [*lines[:at], damaged(lines[at], rng), *lines[at + 1:]]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in changed))
        for more in ([], ["--format", "bfloat16"]):
            codes.append(main(["xray", str(given), *more]))
            assert capsys.readouterr().err.count("\n") == codes[-1]
    assert {0, 1} == {*codes}
    path.write_text("[" * 10 ** 5 + "\n")
    assert main(["xray", str(given)]) == 1
    path.write_bytes(b"\xff\xfe\n")
    assert main(["xray", str(given)]) == 1
