"""`gluon-amp diff`: where two recorded runs part."""
import json
import math
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.inspection.hooks import sketch
from gluon_amp.tools.cli import main
from gluon_amp.tools.diff import compare
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from xray_networks import LOSS, batches, images_net


def network(factor=1.0):
    """A network with a bias before a batch norm, whose gradients cancel."""
    net = nn.HybridSequential()  # MXNet numbers it, so that names differ between runs
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8), nn.Activation("relu"),
                nn.HybridLambda(lambda F, x: x * factor, prefix="factor_"), nn.GlobalAvgPool2D(),
                nn.Dense(4, in_units=8))
    return net


def record(path, policy=None, factor=1.0, seed=1, steps=3, learning_rate=0.1, data=None, net=None,
           monitored=True, numpy=False, **monitor):
    """Trains, and records each step. Returns the parameters."""
    mx.random.seed(seed)
    net = network(factor) if net is None else net
    net.initialize(mx.init.Xavier())
    if policy:
        amp.convert(net, policy)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": learning_rate})
    monitor = amp.Monitor(net, trainer, path, **{"interval": 1, "record": "checksums", **monitor}) \
        if monitored else None
    for i in range(steps):
        x, label = (data or batches())[i % 2]
        if numpy:
            x, label = x.as_np_ndarray(), label.as_np_ndarray()
        with autograd.record():
            loss = LOSS(net(x), label)
        trainer.backward(loss)
        trainer.step(len(label))
        if monitor:
            monitor.step()
    return [p.data().asnumpy() for p in net.collect_params().values()]


@pytest.fixture(scope="module")
def float32(tmp_path_factory):
    path = tmp_path_factory.mktemp("float32") / "run.jsonl"
    record(path)
    return path


@pytest.mark.parametrize("policy", [None, "float16", "bfloat16", "mixed_float8"])
@pytest.mark.parametrize("what", ["statistics", "checksums", "times"])
def test_recorded_training_is_bitwise_unchanged(policy, what, tmp_path):
    results = [record(tmp_path / "a.jsonl", policy, net=images_net(), monitored=monitored,
                      interval=2, record=what) for monitored in (False, True)]
    assert all(np.array_equal(a, b) for a, b in zip(*results))


def test_equal_runs_are_equal_bit_for_bit(float32, tmp_path, capsys):
    record(tmp_path / "b.jsonl")
    assert main(["diff", str(float32), str(tmp_path / "b.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "float32 on cpu(0)" in out
    assert "3 steps" in out
    assert out.endswith("equal bit for bit\n")


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "bfloat16", "mixed_bfloat16"])
def test_16_bit_run_is_within_rounding(policy, float32, tmp_path, capsys):
    record(tmp_path / "b.jsonl", policy)
    assert main(["diff", str(float32), str(tmp_path / "b.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "within rounding in all steps" in out
    assert "equal bit for bit before step 1" in out
    assert "only in" not in out  # casts are no difference


@pytest.mark.parametrize(("policies", "numpy"), [((None, None), False), ((None, "float16"), False),
                                                 (("float16", "float16"), False),
                                                 ((None, "float16"), True)])
def test_faulty_operator_is_found(policies, numpy, tmp_path):
    numpy = numpy or mx.util.is_np_array()  # MXNet cannot leave the mode of pytest --numpy
    with mx.util.np_shape(numpy), mx.util.np_array(numpy):
        for name, policy, factor in zip("ab", policies, (1.0, 1.1)):
            record(tmp_path / name, policy, factor, numpy=numpy)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.parted.step == 1
    assert "factor_" in found.parted.a["node"]
    assert found.parted.difference == pytest.approx(0.1 / 1.1, rel=0.3)  # a sketch estimates it
    assert found.parted.b["rms"] / found.parted.a["rms"] == pytest.approx(1.1, rel=1e-2)
    before, = found.before
    assert "relu0_fwd" in before.a["node"]
    assert before.difference < 0.01
    assert not found.missing


def test_text_and_json_name_what_parts_and_what_precedes_it(float32, tmp_path, capsys):
    record(tmp_path / "b", "float16", 1.1)
    assert main(["diff", str(float32), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert re.search(r"parts beyond rounding in step 1: \w+factor_\w+, output", out)
    assert "computed from:" in out
    assert "relu0_fwd, output" in out
    assert "the difference arises in this operator" in out
    assert main(["diff", str(float32), str(tmp_path / "b"), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert "factor_" in facts["parted"]["node"]
    assert facts["parted"]["a"]["format"] == "float32"
    assert facts["parted"]["b"]["format"] == "float16"
    assert facts["before"][0]["tensor"] == "output"
    assert main(["diff", str(float32), str(tmp_path / "b"), "--tolerance", "0.5"]) == 0
    for wrong in ("nan", "inf", "-1"):
        assert main(["diff", str(float32), str(tmp_path / "b"), f"--tolerance={wrong}"]) == 1
        assert f"must be a finite number >= 0. Received: {wrong}" in capsys.readouterr().err


def test_two_seeds_part_in_the_first_parameter(float32, tmp_path):
    record(tmp_path / "b", seed=2)
    parted = compare(float32, tmp_path / "b").parted
    assert (parted.step, parted.name.kind) == (1, "parameter")
    assert parted.a["node"].endswith("conv0_weight")


def test_other_data_of_a_later_step_are_found(float32, tmp_path):
    (x, label), (other, _) = batches()
    record(tmp_path / "b", data=[(x, label), (other + 1e-3, label)])
    found = compare(float32, tmp_path / "b")
    assert (found.parted.step, found.parted.name.kind) == (2, "data")
    assert found.parted.difference == pytest.approx(1e-3, rel=0.5)
    assert not found.before


def test_other_update_is_found_in_the_parameter_with_its_gradient(float32, tmp_path):
    record(tmp_path / "b", learning_rate=0.2)
    found = compare(float32, tmp_path / "b")
    assert (found.parted.step, found.parted.name.kind) == (2, "parameter")
    assert {one.name.kind for one in found.before} == {"parameter", "gradient"}
    assert all(one.difference == 0 for one in found.before)


def test_loss_scales_do_not_matter(tmp_path):
    for name, scale in (("a", 8.0), ("b", 1024.0)):
        mx.random.seed(1)
        net = network()
        net.initialize(mx.init.Xavier())
        amp.convert(net, "mixed_bfloat16")
        trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1},
                              loss_scale=scale)
        with amp.Monitor(net, trainer, tmp_path / name, 1, record="checksums") as monitor:
            for x, label in batches():
                with autograd.record():
                    loss = LOSS(net(x), label)
                trainer.backward(loss)
                trainer.step(8)
                monitor.step()
    assert compare(tmp_path / "a", tmp_path / "b", tolerance=1e-6).parted is None


def test_overflow_in_one_run_is_a_difference(tmp_path):
    for name, policy in (("a", None), ("b", "float16")):
        record(tmp_path / name, policy, factor=1e5, steps=1)
    parted = compare(tmp_path / "a", tmp_path / "b").parted
    assert parted.difference == math.inf
    assert parted.a["overflow"] == 0
    assert parted.b["overflow"] > 0


def test_runs_of_different_length_and_of_different_layers(float32, tmp_path, capsys):
    record(tmp_path / "b", steps=5, layers=".*(conv|dense).*fwd")
    assert main(["diff", str(float32), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "compared: 3 steps" in out
    assert "only in b: steps 4, 5" in out
    assert "only in one: step 1: " in out
    assert "batchnorm0_fwd, output" in out


def test_incomplete_last_line_is_left_out(float32, tmp_path, capsys):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(float32.read_bytes()[:-40])
    assert main(["diff", str(float32), str(cut)]) == 0
    assert f"{cut} ends within a line" in capsys.readouterr().out


@pytest.mark.parametrize(("damage", "error"), [
    (lambda lines: lines[1:], "is no recording of checksums"),
    (lambda lines: [], "is no recording of checksums"),
    (lambda lines: lines + lines, "holds several recordings"),
    (lambda lines: [lines[0], "{", *lines[1:]], "line 2 of .* is no line of a recording"),
    (lambda lines: [lines[0], "\0\xff", *lines[1:]], "line 2 of .* is no line of a recording"),
    (lambda lines: [lines[0], "[1]", *lines[1:]], "line 2 of .* is no line of a recording"),
    (lambda lines: [*lines, '{"step": 4, "node": "x"}'], "is no line of a recording"),
    (lambda lines: lines[:1], "share no step"),
    (lambda lines: [line.replace('"place": "', '"place": "other') for line in lines],
     "share no tensor"),
])
def test_damaged_files_are_refused(damage, error, float32, tmp_path):
    damaged = tmp_path / "damaged"
    lines = damage(float32.read_text().splitlines())
    damaged.write_text("".join(f"{line}\n" for line in lines), encoding="latin-1")
    with pytest.raises(ValueError, match=error):
        compare(float32, damaged)


def test_files_of_statistics_are_refused(float32, tmp_path, capsys):
    record(tmp_path / "b", record="statistics")
    assert main(["diff", str(float32), str(tmp_path / "b")]) == 1
    assert "gluon_amp.Monitor(..., record='checksums')" in capsys.readouterr().err


def test_sketch_estimates_the_norm_of_a_difference(rng):
    for size in (1, 31, 1000, 100000):
        a, b = rng.standard_normal((2, size)).astype("float32")
        for other in (b, a + 1e-3, np.where(np.arange(size) == size // 2, a + 1, a)):
            estimate = np.linalg.norm(sketch(a) - sketch(other))
            assert estimate == pytest.approx(np.linalg.norm(a - other), rel=0.6)


def test_unsupported_networks_are_refused(tmp_path):
    net = network()
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(TypeError, match=r"or a hybridized one\. Received: HybridSequential"):
        amp.Monitor(net, trainer, tmp_path / "a", record="checksums")
    net.hybridize()
    with pytest.raises(ValueError, match=r"one of statistics, checksums, times\. .*'norms'"):
        amp.Monitor(net, trainer, tmp_path / "a", record="norms")
    net.register_op_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="register_op_hook, which Monitor would replace"):
        amp.Monitor(net, trainer, tmp_path / "a", 1, record="checksums")


def test_layers_of_a_hybridized_network(tmp_path):
    record(tmp_path / "a", layers=".*dense.*fwd")
    lines = (tmp_path / "a").read_text().splitlines()
    names = {json.loads(line).get("node", "") for line in lines}
    assert any(name.endswith("dense0_fwd") for name in names)
    assert not any("relu" in name for name in names)
    with pytest.raises(ValueError, match=r"layers match no operator .*dense0_fwd"):
        record(tmp_path / "b", layers="dens0_fwd")


def test_second_monitor_of_a_hybridized_network_is_refused(tmp_path):
    net = network()
    net.initialize()
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with amp.Monitor(net, trainer, tmp_path / "a", 1), \
            pytest.raises(RuntimeError, match="observed by another Monitor"):
        amp.Monitor(net, trainer, tmp_path / "b", 1)


def test_hybridized_network_is_as_before_after_the_last_step(tmp_path):
    net = network()
    net.initialize()
    net.hybridize(static_alloc=True)
    before = {*vars(net)}
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with amp.Monitor(net, trainer, tmp_path / "a", 1) as monitor:
        with autograd.record():
            loss = net(nd.ones((2, 3, 8, 8)))
        loss.backward()
        trainer.step(2)
        monitor.step()
    assert {*vars(net)} == before
    assert type(net._cached_op) in (type(None), mx.nd.CachedOp)
    size = (tmp_path / "a").stat().st_size
    assert size > 0
    with autograd.record():
        net(nd.ones((2, 3, 8, 8))).backward()
    assert (tmp_path / "a").stat().st_size == size
