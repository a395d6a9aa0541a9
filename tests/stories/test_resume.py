"""A run that is killed and resumed in a new process is bitwise identical to an unbroken run."""
import json
import os
import signal

import mxnet as mx
import numpy as np
import pytest
import scripts

pytestmark = pytest.mark.long

SCRIPT = """
import sys
import gluon_amp as amp
import numpy as np
from mxnet import autograd, gluon, lr_scheduler, nd
from mxnet.gluon import nn
import mxnet as mx

folder, first, last, overflows, saves = sys.argv[1], *map(eval, sys.argv[2:6])
mx.random.seed(5)
net = nn.HybridSequential()
net.add(nn.Conv2D(8, 3, in_channels=1), nn.BatchNorm(in_channels=8), nn.Activation("relu"),
        nn.Flatten(), nn.Dense(4, in_units=8 * 16))
net.initialize(mx.init.Xavier())
amp.convert(net)
trainer = amp.Trainer(
    net.collect_params(), "adam",
    {"learning_rate": 0.01, "lr_scheduler": lr_scheduler.FactorScheduler(3, 0.9, base_lr=0.01)},
    loss_scale=amp.DynamicLossScale(initial=1024, growth_interval=3, maximum=4096), clip_norm=0.5)
if first:
    net.load_parameters(folder + "/net.params")
    trainer.load_states(folder + "/trainer.states")
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for i in range(first, last):
    rng = np.random.default_rng(i)
    x, y = nd.array(rng.standard_normal((8, 1, 6, 6))), nd.array(rng.integers(0, 4, 8))
    with autograd.record():
        loss = loss_fn(net(x), y) * (1e8 if i in overflows else 1)
    trainer.backward(loss)
    assert trainer.step(8) is (i not in overflows), (i, trainer.loss_scale, trainer.overflowed)
    if saves:
        net.save_parameters(folder + "/net.params")
        trainer.save_states(folder + "/trainer.states")
        print(i, file=sys.stderr, flush=True)
net.save_parameters(folder + "/net.params")
trainer.save_states(folder + "/trainer.states")
"""


def run(folder, first, last, overflows=(), saves=False, **options):
    folder.mkdir(exist_ok=True)
    script = folder.with_name("script.py")
    script.write_text(SCRIPT)
    return scripts.start(script, folder, first, last, repr(tuple(overflows)), saves, **options)


def result(folder):
    """Parameters, the complete state of the trainer in bytes, and its counters."""
    parameters = mx.nd.load(str(folder / "net.params"))
    states = (folder / "trainer.states").read_bytes()
    saved = json.loads(states.split(b"\n")[1])
    return ([parameters[name].asnumpy() for name in sorted(parameters)], states,
            saved["training"]["skipped"], saved["optimizer"][1]["num_update"])


def same(a, b):
    return all(map(np.array_equal, a[0], b[0])) and a[1:] == b[1:]


# none, just before and after the cut, and many
@pytest.mark.parametrize("overflows", [
    pytest.param((), marks=pytest.mark.thorough), pytest.param((9, 10), marks=pytest.mark.thorough),
    pytest.param((2, 9, 10, 11, 15), marks=pytest.mark.thorough)])
def test_resumed_run_is_bitwise_identical(overflows, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, first, last in ((whole, 0, 20), (cut, 0, 10), (cut, 10, 20)):
        process = run(folder, first, last, overflows, new_process=len(overflows) > 2)
        process.communicate()
        assert process.returncode == 0
    expected = result(whole)
    assert same(result(cut), expected)
    assert expected[2] == len(overflows)
    assert expected[3] == 20 - len(overflows)


def test_files_are_complete_if_killed_while_saving(tmp_path):
    """They are those of the last step or of the one before it."""
    for kill_after in (3, 5, 8):
        process = run(tmp_path / "cut", 0, 10 ** 6, saves=True)
        for line in process.stderr:
            if line.strip().isdigit() and int(line) >= kill_after:
                os.kill(process.pid, signal.SIGKILL)
                break
        process.communicate()
        parameters, _, skipped, updates = result(tmp_path / "cut")
        assert updates > kill_after
        assert skipped == 0
        assert all(np.isfinite(p).all() for p in parameters)
    names = {p.name for p in (tmp_path / "cut").iterdir()}
    assert {name for name in names if not name.endswith(".writing")} == {
        "net.params", "net.params.json", "trainer.states"}
