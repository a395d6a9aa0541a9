"""`Log`: what it writes, and what reports read of it."""
import json
import logging
import sys
from argparse import Namespace

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.reports import Log, read_logs
from mxnet import autograd, gluon, nd
from networks import ready

ARGS = Namespace(dtype="float16", seed=3)


def train(log, epochs=1, steps=5, loss_scale=128, bad=(), plain=False):
    """A loop of one's own, whose steps in `bad` overflow. Returns the losses and norms."""
    mx.random.seed(1)
    net = ready(gluon.nn.Dense(2, in_units=4), mx.init.Xavier())
    if plain:
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    else:
        amp.convert(net)
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1},
                              loss_scale=loss_scale)
    losses, norms = [], []
    for _ in range(epochs):
        for step in range(steps):
            with autograd.record():
                loss = net(nd.ones((8, 4)) * (step + 1) / 10).square() * (
                    float("inf") if step in bad else 1)
            loss.backward() if plain else trainer.backward(loss)
            trainer.step(8)
            log.step(trainer, loss, 8)
            losses.append(float(loss.mean().asscalar()))
            norms.append(None if plain else trainer.gradient_norm)
        log.epoch(validation_accuracy=0.75, validation_loss=0.5)
    return losses, norms


def trainer_of():
    net = ready(gluon.nn.Dense(1, in_units=1))
    return amp.Trainer(net.collect_params(), "sgd")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_have_loss_norm_scale_and_time(tmp_path):
    path = tmp_path / "log.jsonl"
    losses, norms = train(Log(path, ARGS, interval=2))
    head, *steps, epoch = read(path)
    assert head == {"version": 2, "arguments": {"dtype": "float16", "seed": 3}}
    assert [(s["epoch"], s["batch"]) for s in steps] == [(0, 1), (0, 3)]
    assert [s["loss"] for s in steps] == pytest.approx(
        [np.mean(losses[:2]), np.mean(losses[2:4])], rel=1e-6)
    assert [s["gradient_norm"] for s in steps] == [norms[1], norms[3]]
    assert {(s["loss_scale"], s["skipped"], s["lr"]) for s in steps} == {(128, 0, 0.1)}
    assert (epoch["loss"], epoch["err_top1"]) == (pytest.approx(np.mean(losses), rel=1e-6), 0.25)
    assert epoch["seconds"] > 0
    assert epoch["samples_per_second"] == pytest.approx(40 / epoch["seconds"])


def test_report_reads_it(tmp_path):
    paths = [tmp_path / f"{dtype}.jsonl" for dtype in ("float32", "float16")]
    for path in paths:
        train(Log(path, {"dtype": path.stem, "seed": 0}, interval=2), 3)
    runs = read_logs(paths)
    assert [(run.name, run.dtype, run.final) for run in runs] == [
        ("float32", "float32", 75.0), ("float16", "float16", 75.0)]
    assert len(runs[0].epochs) == 3
    assert "float16" in amp.report(paths, tmp_path / "page").read_text()


def test_skipped_step_has_a_line_without_numbers_that_json_lacks(tmp_path):
    path = tmp_path / "log.jsonl"
    train(Log(path, ARGS, interval=4), steps=4, bad=[1])
    _, skipped, shown, epoch = read(path)
    assert (skipped["batch"], skipped["skip"], skipped["skipped"]) == (1, True, 1)
    assert skipped["loss"] is skipped["gradient_norm"] is None
    assert (shown["batch"], shown["skipped"], "skip" in shown) == (3, 1, False)
    assert np.isfinite(shown["loss"])
    assert epoch["loss"] is None


def test_lines_are_in_the_file_as_soon_as_they_are_complete(tmp_path):
    path = tmp_path / "log.jsonl"
    log = Log(path, ARGS, interval=1)
    assert len(read(path)) == 1
    train(log, steps=3)
    assert len(read(path)) == 5
    assert log.lines == read(path)[1:]


@pytest.mark.parametrize("other", [
    {"dtype": "bfloat16", "seed": 3}, {"dtype": "float16", "seed": 4}, {"seed": 3}, None,
    {"policy": "bfloat16", "seed": 3}])
def test_log_of_another_run_is_not_continued(tmp_path, other):
    path = tmp_path / "log.jsonl"
    train(Log(path, ARGS))
    text = path.read_bytes()
    with pytest.raises(ValueError, match="another run") as error:
        Log(path, other, begin=1)
    for name, value in vars(ARGS).items():
        received = (other or {}).get(name)
        for shown in (value, received):
            assert (f"{name}={shown}" in str(error.value)) == (received != value)
    assert path.read_bytes() == text


def test_resumed_run_continues_after_its_complete_epochs(tmp_path):
    path = tmp_path / "log.jsonl"
    train(Log(path, ARGS, interval=1), epochs=3, steps=2)
    before = read(path)
    with open(path, "a") as file:
        file.write('{"epoch": 3, "ba')  # the power failed
    with pytest.raises(FileExistsError, match="begin="):
        Log(path, ARGS)
    text = path.read_bytes()
    log = Log(path, {**vars(ARGS), "epochs": 3}, begin=2, interval=1)
    assert path.read_bytes() == text  # until there is more
    train(log, steps=2)
    after = read(path)
    assert after[0]["arguments"] == {**vars(ARGS), "epochs": 3}
    assert after[1:7] == before[1:7]
    assert [line["epoch"] for line in after[1:]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [line["steps"] for line in after if "steps" in line] == [2, 4, 6]
    Log(path, ARGS, begin=0)
    assert len(read(path)) == 1


def test_damaged_file_is_refused_and_stays(tmp_path):
    path = tmp_path / "log.jsonl"
    head = '{"arguments": {}}\n'
    for text in ("", "[1]\n", head + '{"epoch": "a"}\n', head + '{"ep\n{}\n',
                 '{"arguments": 3}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is damaged"):
            Log(path, begin=2)
        assert path.read_text() == text


def test_trainer_of_mxnet_and_numbers_as_losses(tmp_path):
    train(Log(tmp_path / "plain.jsonl", interval=2), plain=True)
    _, step, *_ = read(tmp_path / "plain.jsonl")
    assert step["lr"] == 0.1
    assert step["gradient_norm"] is None
    assert "loss_scale" not in step
    log = Log(None, interval=1)
    trainer = trainer_of()
    log.step(trainer, 2.0)
    log.step(trainer, [nd.ones(3), nd.zeros(1)], lr=lambda: 7, mine=1.5)
    assert [line["loss"] for line in log.lines] == [2.0, 0.75]
    assert (log.lines[1]["lr"], log.lines[1]["mine"]) == (7, 1.5)


@pytest.mark.parametrize("loss", [2.0, float("nan"), float("inf"), None])
def test_predictions_that_are_not_finite_are_logged(loss, caplog):
    with caplog.at_level(logging.WARNING, logger="gluon_amp"):
        Log(None).epoch(validation_loss=loss)
    assert ("predictions are not finite" in caplog.text) == (loss not in (2.0, None))


def test_only_rank_0_writes(tmp_path):
    train(Log(tmp_path / "log.jsonl", ARGS, rank=1, interval=1, tensorboard=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_has_the_same_numbers(tmp_path):
    with Log(tmp_path / "log.jsonl", ARGS, interval=2, tensorboard=str(tmp_path / "t")) as log:
        train(log, 2)
    events, = (tmp_path / "t").iterdir()
    ours, theirs = read_logs([tmp_path / "log.jsonl", events])
    assert theirs.arguments == ours.arguments == vars(ARGS)
    assert [e.top1 for e in theirs.epochs.values()] == [e.top1 for e in ours.epochs.values()]
    assert theirs.dtype == "float16"


def test_missing_tensorboard_is_one_error(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install .\.\[tensorboard\]"):
        Log(None, tensorboard=str(tmp_path))


def test_closed_log_is_refused(tmp_path):
    with Log(tmp_path / "log.jsonl", interval=1) as log:
        log.epoch()
    for add in (log.epoch, lambda: log.step(trainer_of(), 1.0)):
        with pytest.raises(RuntimeError, match=r"log.jsonl is closed.*begin="):
            add()
    assert len(read(tmp_path / "log.jsonl")) == 2


@pytest.mark.parametrize(("call", "words"), [
    (lambda path: Log(None, interval=0), "interval must be an integer"),
    *((lambda path, begin=begin: Log(path, begin=begin), "begin must be an integer")
      for begin in ("1", 1.0, -1)),
    *((lambda path, wrong=wrong: Log(None).epoch(validation_accuracy=wrong),
       r"validation_accuracy must be a number\. Received: ") for wrong in ("x", np.ones(2)))])
def test_invalid_numbers_are_refused(call, words, tmp_path):
    path = tmp_path / "log.jsonl"
    Log(path).epoch()
    with pytest.raises((TypeError, ValueError), match=words):
        call(path)
    assert len(read(path)) == 2


@pytest.mark.parametrize("loss", [[], None, "3", [1.0, None], np.ones(0), [nd.array([])]])
def test_loss_that_is_no_number_is_refused(loss):
    log = Log(None, interval=1)
    with pytest.raises(TypeError, match=r"loss must be an array that is not empty.*Received: "):
        log.step(trainer_of(), loss)
    assert (log.steps, log.lines) == (0, [])


def test_numbers_of_numpy_and_mxnet_are_numbers_in_the_file(tmp_path):
    path = tmp_path / "log.jsonl"
    values = {"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True), "d": mx.np.array(2.5),
              "e": nd.array([4.0]), "f": np.arange(2), "g": [1.0, float("nan"), np.float32("inf")],
              "h": {"i": (np.float64(1), nd.ones(2))}, "j": np.float32("nan")}
    plain = {"a": 3, "b": 0.5, "c": True, "d": 2.5, "e": 4.0, "f": [0, 1], "g": [1.0, None, None],
             "h": {"i": [1.0, [1.0, 1.0]]}, "j": None}
    arguments = {"lr": np.float32(0.5), "folder": tmp_path}
    log = Log(path, arguments, interval=1)
    log.step(trainer_of(), np.ones(3), np.int64(2), **values)
    line = log.epoch(validation_accuracy=np.float32(0.75), validation_loss=nd.ones(1), **values)
    assert {name: line[name] for name in plain} == plain
    assert (line["err_top1"], line["validation_loss"]) == (0.25, 1.0)

    def refused(text):
        raise AssertionError(f"{text} is not JSON")

    for _ in range(2):
        head, *lines = (json.loads(line, parse_constant=refused)
                        for line in path.read_text().splitlines())
        assert head["arguments"] == {"lr": 0.5, "folder": str(tmp_path)}
        assert lines == log.lines
        assert {name: lines[0][name] for name in plain} == plain
        log = Log(path, arguments, begin=1)
        log.epoch()


@pytest.mark.parametrize("value", [object(), [{1}], {"a": gluon.nn.Dense}])
def test_value_that_json_lacks_is_refused_and_leaves_no_line(value, tmp_path):
    path = tmp_path / "log.jsonl"
    for begin in (None, 1):  # the second continues the file
        log = Log(path, begin=begin)
        before = path.read_bytes()
        with pytest.raises(TypeError, match="a log has numbers, strings, booleans"):
            log.epoch(mine=value)
        assert path.read_bytes() == before
        log.epoch(mine=1)
        assert log.lines == read(path)[1:]
        assert [line["mine"] for line in log.lines] == [1] * (1 if begin is None else 2)
