"""Many workers by Horovod, on this machine, where it is installed."""
import importlib.util
import subprocess
import sys

import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet.gluon import nn
from ranks import RANKS, STARTS, STEPS, Ranks
from test_distributed import agree, same

pytestmark = pytest.mark.skipif(importlib.util.find_spec("horovod") is None,
                                reason="Horovod is not installed: make horovod")
WIRES = ["horovod float16", "horovod float32"]


@pytest.fixture(scope="module")
def ranks():
    with Ranks() as started:
        yield started


@pytest.mark.parametrize("store", WIRES)
@pytest.mark.parametrize("deferred", [False, True])
def test_ranks_with_other_seeds_train_as_one_from_the_first_step(ranks, store, deferred):
    for _ in range(STARTS):
        results = ranks.run("begins_with_another_seed", 2, store, deferred=deferred)
        (before, stepped, held, scale), (others, other_stepped, other_held, other_scale) = results
        if not deferred:
            assert same(before, others)
        assert stepped == other_stepped == [not deferred, True, True]
        assert same(held, other_held)
        assert scale == other_scale


@pytest.mark.parametrize("store", WIRES)
def test_modules_with_other_seeds_begin_with_rank_0s_weights_and_averages(ranks, store):
    (before, held, scale), (others, other_held, other_scale) = ranks.run(
        "module_begins_with_another_seed", 2, store)
    assert same(before, others)
    assert all((before[i] == 1).all() for i in (-1, -2))
    assert same(held, other_held)
    assert scale == other_scale


@pytest.mark.parametrize("store", WIRES)
def test_ranks_skip_together_whatever_is_infinite_on_any_of_them(ranks, store):
    results = ranks.run("some_are_infinite", RANKS, store, ranks=RANKS, steps=STEPS)
    assert 2 < results[0][1] < STEPS / 3
    assert agree(results)


def test_ranks_give_up_at_the_same_step(ranks):
    results = ranks.run("nothing_is_finite", 2, "horovod", loss_scale="dynamic")
    assert results[0] is not None
    assert agree(results)


@pytest.mark.parametrize("store", WIRES)
def test_two_ranks_learn_what_one_learns_from_the_whole_batch(ranks, store):
    results = ranks.run("learns_its_part", 2, store, ranks=2)
    ((told, held),) = ranks.run("learns_its_part", 1, store, ranks=1)
    assert agree(results)
    assert results[0][0] == told
    for two, one in zip(results[0][1], held):
        np.testing.assert_allclose(two, one, atol=2e-3)


def test_the_float32_wire_gives_the_update_a_sum_that_float16_cannot_hold(ranks):
    # 4 x 20000 / 40000 * learning rate 0.1
    results = ranks.run("sum_overflows", 4, "horovod float32")
    assert results == [(True, [[-np.float16(0.2).item()] * 2])] * 4
    assert ranks.run("sum_overflows", 4, "horovod float16") == [(False, [[0.0, 0.0]])] * 4


@pytest.mark.parametrize("what", ["shape", "count", "version", "scale"])
def test_ranks_that_do_not_fit_are_told_before_training(ranks, what):
    for told in ranks.run("has_another_network", 2, "horovod", what=what):
        assert told.startswith("RanksDifferError: ranks ")


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_ends_makes_the_others_raise(ranks, how):
    (error, seconds), _ = ranks.run("dies", 2, "horovod", how=how)
    assert error.startswith("RankEndedError: rank 0 waits in vain: Horovod has been shut down")
    assert seconds < 10


def test_a_rank_that_stops_makes_the_others_raise_after_gloos_time(ranks):
    told, nothing = ranks.run("dies", 2, "horovod", {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"},
                              stopped=1, how="stopped")
    assert told[0].startswith("RankEndedError: rank 0 waits in vain: Horovod has been shut down")
    assert told[1] < 15
    assert nothing is None


BESIDE = """
import numpy
numpy.bool = bool
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
def test_horovods_library_and_ours_share_a_process_in_either_order(imports):
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", BESIDE.format(imports=imports)],
                         capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "trained dist_sync_horovod\n"


def test_what_horovod_cannot_do_is_refused():
    with pytest.raises(ValueError, match='wire must be "float16" or "float32"'):
        amp.Horovod(wire="int8")
    net = nn.Dense(1, in_units=1)
    net.initialize()
    with pytest.raises(ValueError, match="gradient compression"):
        amp.Trainer(net.collect_params(), "sgd", kvstore="horovod",
                    compression_params={"type": "2bit", "threshold": 0.5})
    net = nn.Dense(1, in_units=1)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(ValueError, match="one process for each device"):
        amp.Trainer(net.collect_params(), "sgd", kvstore="horovod")
