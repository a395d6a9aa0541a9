"""Horovod as a kvstore in one process, if it is installed; test_distributed.py has several."""
import subprocess
import sys

import gluon_amp as amp
import mxnet as mx
import pytest
from gluon_amp.parallel.launch import launch_horovod
from mxnet.gluon import nn
from mxnet_alone import MXNET_ALONE
from networks import ready
from processes import printed
from ranks import needs_horovod

pytestmark = [pytest.mark.long,
              needs_horovod]

BESIDE = """
{imports}
from mxnet import autograd, gluon, nd
amp_net = gluon.nn.Dense(3, in_units=4)
amp_net.initialize()
amp.convert(amp_net)
trainer = amp.Trainer(amp_net.collect_params(), "sgd", kvstore="horovod")
for _ in range(3):
    with autograd.record():
        loss = amp_net(nd.ones((2, 4))).sum()
    trainer.backward(loss)
    trainer.step(2)
other = gluon.nn.Dense(3, in_units=4)
other.initialize()
theirs = hvd.DistributedTrainer(other.collect_params(), "sgd")
with autograd.record():
    loss = other(nd.ones((2, 4))).sum()
loss.backward()
theirs.step(2)
nd.waitall()
print("trained", trainer._kvstore.type)
"""


@pytest.mark.parametrize("imports", [
    "import gluon_amp as amp; import horovod.mxnet as hvd",
    "import horovod.mxnet as hvd; import gluon_amp as amp"])
def test_gluon_amp_and_horovod_share_process_in_either_import_order(imports):
    said = printed(MXNET_ALONE + BESIDE.format(imports=imports))
    assert said == "trained dist_sync_horovod\n"


def test_program_receives_its_flags_from_horovodrun_launch(monkeypatch):
    from horovod.runner import launch as horovodrun
    told = []
    monkeypatch.setattr(horovodrun, "_run", told.append)
    monkeypatch.setattr(sys, "argv", [])
    flags = ["--network", "resnet v1", "-H", "--num", "2"]
    launch_horovod([sys.executable, "-c", "import sys; print(sys.argv[1:])", *flags], 2)
    assert (told[0].num_proc, told[0].hosts) == (2, "localhost:2")
    assert subprocess.check_output(told[0].command, text=True) == f"{flags}\n"


def test_failed_rank_is_reported_in_one_line(monkeypatch, capfd):
    from horovod.runner import launch as horovodrun

    def fails(_):
        raise RuntimeError("one or more processes exited with non-zero status.\nExit code: 3\n")

    monkeypatch.setattr(horovodrun, "_run", fails)
    monkeypatch.setattr(sys, "argv", [])
    assert launch_horovod(["python"], 2) == 1
    assert capfd.readouterr().err == "gluon-amp launch: one or more processes exited with " \
        "non-zero status. Exit code: 3\n"


def test_unsupported_horovod_arguments_are_refused():
    with pytest.raises(ValueError, match='wire must be "float16" or "float32"'):
        amp.parallel.Horovod(wire="int8")
    net = ready(nn.Dense(1, in_units=1))
    with pytest.raises(ValueError, match="gradient compression"):
        amp.Trainer(net.collect_params(), "sgd", kvstore="horovod",
                    compression_params={"type": "2bit", "threshold": 0.5})
    net = ready(nn.Dense(1, in_units=1), ctx=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(ValueError, match="one process for each device"):
        amp.Trainer(net.collect_params(), "sgd", kvstore="horovod")
