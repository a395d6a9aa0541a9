"""`gluon-amp profile`: time and memory of a step by block."""
import itertools
import json
import re

import gluon_amp as amp
import mxnet as mx
import pytest
from gluon_amp.inspection import hooks
from gluon_amp.tools.cli import main
from gluon_amp.tools.profile import read
from mxnet import autograd, nd
from mxnet.gluon import nn
from xray_networks import LOSS

ROWS, INPUTS, HIDDEN, CLASSES = 8, 6, 32, 4


def network():
    net = nn.HybridSequential()
    body = nn.HybridSequential()
    body.add(nn.Dense(HIDDEN, in_units=INPUTS, use_bias=False), nn.Activation("relu"))
    net.add(body, nn.Dense(CLASSES, in_units=HIDDEN, use_bias=False))
    return net


def record(path, policy, steps=6, interval=2, what="times", net=None):
    mx.random.seed(1)
    net = net or network()
    net.initialize()
    amp.convert(net, policy)
    net.hybridize(static_alloc=True)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with amp.Monitor(net, trainer, path, interval, record=what) as monitor:
        for _ in range(steps):
            with autograd.record():
                loss = LOSS(net(nd.ones((ROWS, INPUTS))), nd.zeros(ROWS))
            trainer.backward(loss)
            trainer.step(ROWS)
            monitor.step()
    return path


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("times")
    return [str(record(folder / policy, policy)) for policy in ("float32", "float16")]


def profiled(capsys, *arguments):
    assert main(["profile", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_blocks_have_time_and_memory_in_both_types(recordings, capsys):
    profiles = profiled(capsys, *recordings)
    assert [one["run"]["policy"] for one in profiles] == ["float32", "float16"]
    for one, width in zip(profiles, (4, 2)):
        assert one["steps"] == 3
        blocks = {block["block"]: block for block in one["blocks"]}
        hidden, relu, output = (blocks[name] for name in ("0.0", "0.1", "1"))
        assert (hidden["class"], relu["class"]) == ("Dense", "Activation")
        assert hidden["forward_bytes"] == relu["forward_bytes"] == width * ROWS * HIDDEN
        assert relu["backward_bytes"] == width * ROWS * HIDDEN
        assert hidden["backward_bytes"] == width * HIDDEN * INPUTS  # of the weight, not of data
        gradients = HIDDEN * CLASSES + ROWS * HIDDEN
        casts = 0 if width == 4 else width * ROWS * CLASSES  # of the gradient of the output
        assert output["backward_bytes"] == width * gradients + casts
        for block in (hidden, relu, output):
            assert block["forward_seconds"] > 0
            assert block["backward_seconds"] > 0
        assert 0 < one["attributed_seconds"] < one["observed_seconds"]
        assert one["plain_seconds"] > 0


def test_loss_and_marks_have_no_time_in_blocks(tmp_path, monkeypatch):
    """With a clock of one second for each reading, each output of an operator takes a second."""
    ticks = itertools.count()
    monkeypatch.setattr(hooks.time, "perf_counter", lambda: float(next(ticks)))
    path = record(tmp_path / "a", "float16", steps=1, interval=1)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    seconds = {(line["node"], line["kind"]): line["seconds"] for line in lines if "node" in line}
    assert len(seconds) == 9  # data have no gradient
    several = {key: taken for key, taken in seconds.items() if taken != 1}
    (node, kind), = several
    assert kind == "backward"
    assert re.fullmatch(r"dense\d+_fwd", node)
    assert several[node, kind] == 2  # the gradients of data and weight


def test_depth_joins_blocks(recordings, capsys):
    deep, = profiled(capsys, recordings[0])
    joined, = profiled(capsys, recordings[0], "--depth", 1)
    assert [block["block"] for block in joined["blocks"]] == ["0", "1"]
    assert joined["blocks"][0]["class"] == "HybridSequential"
    for key in ("forward_bytes", "backward_bytes"):
        assert joined["blocks"][0][key] == sum(block[key] for block in deep["blocks"][:2])


def test_many_blocks_are_joined(tmp_path, capsys):
    net = nn.HybridSequential()
    for _ in range(4):
        part = nn.HybridSequential()
        for _ in range(10):
            part.add(nn.Dense(6, in_units=6))
        net.add(part)
    one, = profiled(capsys, record(tmp_path / "a", "float32", 2, 1, net=net))
    assert [block["block"] for block in one["blocks"]] == ["0", "1", "2", "3"]


def test_text_and_files(recordings, tmp_path, capsys):
    assert main(["profile", *recordings, "-o", str(tmp_path / "made")]) == 0
    out = capsys.readouterr().out
    assert "float16 on cpu(0): a step takes" in out
    assert "(medians of 3 steps)" in out
    assert "backward ms float16" in out
    assert "all blocks" in out
    page = (tmp_path / "made" / "profile.html").read_text()
    assert "<svg" in page
    assert "0.0 Dense" in page
    assert (tmp_path / "made" / "profile.csv").read_text().startswith("block,forward ms float32,")
    assert (tmp_path / "made" / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert main(["profile", *recordings, "-o", str(tmp_path / "made")]) == 1
    assert "must be a new folder" in capsys.readouterr().err
    assert main(["profile", recordings[0]]) == 0
    assert "share" in capsys.readouterr().out


def test_few_steps_and_runs_of_one_policy_are_named(tmp_path, capsys):
    paths = [record(tmp_path / name, "float32", 1, 1) for name in "ab"]
    assert main(["profile", *map(str, paths)]) == 0
    out = capsys.readouterr().out
    assert "forward ms 1" in out
    assert "forward ms 2" in out
    assert "Fewer than 3 observed steps" in out


@pytest.mark.parametrize(("damage", "error"), [
    (lambda lines: lines[1:], "is no recording of times"),
    (lambda lines: ["\0", *lines], "is no recording of times"),
    (lambda lines: lines + lines, "holds several recordings"),
    (lambda lines: lines[:1], "has no observed step"),
    (lambda lines: [*lines[:3], "{}", *lines[3:]], "line 4 of .* is no line of a recording"),
])
def test_damaged_files_are_refused(damage, error, recordings, tmp_path):
    damaged = tmp_path / "damaged"
    with open(recordings[0]) as file:
        lines = damage(file.read().splitlines())
    damaged.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ValueError, match=error):
        read(str(damaged))


def test_checksums_are_refused(tmp_path, capsys):
    path = record(tmp_path / "a", "float16", 1, 1, "checksums")
    assert main(["profile", str(path)]) == 1
    assert "record='times'" in capsys.readouterr().err
