"""Many workers on this machine: MXNet's parameter server, and Horovod where it is installed."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import same
from gluon_amp.parallel import average_statistics
from gluon_amp.parallel.supervise import patience
from gluon_amp.parallel.sync import Workers
from mxnet import gluon, nd
from mxnet.gluon import nn
from ranks import ALL, EITHER, RANKS, STARTS, STEPS, STORES, needs_horovod


def agree(results):
    """Whether all ranks took the same steps and hold the same numbers."""
    (*told, held), *others = results
    return all(other[:-1] == tuple(told) and same(other[-1], held) for other in others)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("deferred", [False, True])
def test_ranks_with_other_seeds_train_as_one_from_the_first_step(ranks, store, deferred):
    for _ in range(STARTS):
        results = ranks.run("begins_with_another_seed", 2, store, deferred=deferred)
        (before, stepped, _, _), (others, _, _, _) = results
        if not deferred:
            assert same(before, others)
        # With sizes that the first batch tells, gradients of other weights are not used.
        assert stepped == [not deferred, True, True]
        assert agree([told[1:] for told in results])


@pytest.mark.parametrize("store", STORES)
def test_modules_with_other_seeds_begin_with_rank_0s_weights_and_averages(ranks, store):
    for _ in range(STARTS):
        results = ranks.run("module_begins_with_another_seed", 2, store)
        (before, _, _), (others, _, _) = results
        assert same(before, others)
        assert all((before[i] == 1).all() for i in (-1, -2))  # rank 0's moving averages
        assert agree([told[1:] for told in results])


@pytest.mark.parametrize("store", EITHER)
def test_float32_networks_that_have_predicted_train_too(ranks, store):
    for count in (1, 2):
        results = ranks.run("has_predicted_in_float32", count, store)
        assert agree(results)
        assert results[0][0] == 0


@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_a_weight_that_one_rank_changed_is_named_on_all(ranks, store, when):
    results = ranks.run("changes_a_weight", 2, store, when=when)
    assert results == ["RanksDifferError: net_dense0_weight is not the same on rank 1 as on rank "
                       "0. Has one rank changed it, or loaded another file?"] * 2


@pytest.mark.parametrize(("what", "error"), [
    ("shape", "ranks train different networks: net_dense0_bias"),
    ("count", "ranks train different networks. Parameters of rank 0, 1, ...: 8, 10"),
    ("version", f"ranks have different versions of gluon_amp: {amp.__version__}, 9.9.9"),
    ("scale", "ranks have different loss scales. Rank 0, 1, ...: a dynamic loss scale, "
              "the loss scale 256")])
@pytest.mark.parametrize("store", EITHER)
def test_ranks_that_do_not_fit_are_told_before_training(ranks, store, what, error):
    for told in ranks.run("has_another_network", 2, store, what=what):
        assert told.startswith(f"RanksDifferError: {error}")


@pytest.mark.parametrize(("what", "error"), [
    ("shape", "ranks train different networks: dense_weight, here "),
    ("version", f"ranks have different versions of gluon_amp: {amp.__version__}, 9.9.9")])
def test_modules_that_do_not_fit_are_told_before_training(ranks, what, error):
    for told in ranks.run("module_has_another_network", 2, "dist_sync", what=what):
        assert told.startswith(f"RanksDifferError: {error}")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("count", RANKS)
def test_ranks_skip_together_whatever_is_infinite_on_any_of_them(ranks, store, count):
    results = ranks.run("some_are_infinite", count, store, ranks=count, steps=STEPS)
    told, skipped, _ = results[0]
    assert 2 < skipped < STEPS / 3
    assert len({scale for _, scale in told}) > 2
    assert agree(results)


@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize("loss_scale", ["dynamic", 1024.0])
def test_ranks_give_up_at_the_same_step(ranks, store, loss_scale):
    results = ranks.run("nothing_is_finite", 2, store, loss_scale=loss_scale)
    assert results[0] is not None
    assert agree(results)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("count", RANKS)
def test_ranks_learn_what_one_learns_from_the_whole_batch(ranks, store, count):
    results = ranks.run("learns_its_part", count, store, ranks=count)
    ((told, held),) = ranks.run("learns_its_part", 1, store, ranks=1)
    assert agree(results)
    assert results[0][0] == told
    for several, one in zip(results[0][1], held):
        np.testing.assert_allclose(several, one, atol=2e-3)


@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize("count", [2, 1, 4] if ALL else [2, 1])
def test_all_go_on_from_what_rank_0_saved(ranks, store, count, tmp_path):
    went_on = ranks.run("saves_and_goes_on", 2, store, folder=str(tmp_path))
    results = ranks.run("resumes", count, store, folder=str(tmp_path))
    assert agree(results)
    if count == 2:
        assert agree([went_on[0], *results])  # bit by bit as if they had not stopped


@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize(("story", "arguments"), [
    ("averages_statistics", {}), ("averages_statistics", {"symbol": True}),
    ("module_averages_statistics", {})])
def test_moving_averages_can_be_averaged_over_ranks(ranks, store, story, arguments):
    results = ranks.run(story, 2, store, **arguments)
    (mine, mean), (other, other_mean) = results
    assert not same(mine, other)
    assert same(mean, other_mean)
    assert same(mean, [(a + b) / 2 for a, b in zip(mine, other)])


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_ends_makes_the_others_raise(ranks, how):
    (error, seconds), ended = ranks.run("dies", 2, "dist_sync", how=how)
    reason = {"killed": "rank 1 has died", "raises": "rank 1 has ended with RuntimeError"}[how]
    assert error == f"RankEndedError: rank 0 cannot continue: {reason}"
    assert seconds < 10
    assert ended == (None if how == "killed" else "RuntimeError: the data is gone")


def test_a_rank_that_stops_makes_the_others_raise(ranks):
    told, nothing = ranks.run("dies", 2, "dist_sync", {"GLUON_AMP_RANK_TIMEOUT": "4"}, stopped=1,
                              how="stopped")
    assert told[0] == "RankEndedError: rank 0 cannot continue: rank 1 has sent no heartbeat for " \
        "4 seconds"
    assert told[1] < 4 + 10
    assert nothing is None


def test_a_rank_that_only_paused_is_waited_for(ranks):
    results = ranks.run("pauses", 2, "dist_sync", {"GLUON_AMP_RANK_TIMEOUT": "4"})
    assert agree(results)


@needs_horovod
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_ends_makes_the_others_raise_with_horovod(ranks, how):
    (error, seconds), _ = ranks.run("dies", 2, "horovod", how=how)
    assert error.startswith("RankEndedError: rank 0 cannot continue: Horovod has been shut down")
    assert seconds < 10


@needs_horovod
def test_a_rank_that_stops_makes_the_others_raise_after_gloos_time(ranks):
    told, nothing = ranks.run("dies", 2, "horovod", {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3"},
                              stopped=1, how="stopped")
    assert told[0].startswith("RankEndedError: rank 0 cannot continue: Horovod has been shut down")
    assert told[1] < 3 + 10
    assert nothing is None


@needs_horovod
def test_the_float32_wire_gives_the_update_a_sum_that_float16_cannot_hold(ranks):
    # 80000 / 40000 * learning rate 0.1
    count = RANKS[-1]
    results = ranks.run("sum_overflows", count, "horovod float32", gradient=80000 / count)
    assert results == [(True, [[-np.float16(0.2).item()] * 2])] * count
    results = ranks.run("sum_overflows", count, "horovod float16", gradient=80000 / count)
    assert results == [(False, [[0.0, 0.0]])] * count


@needs_horovod
def test_the_float16_wire_sends_half_the_bytes(ranks):
    sent = {wire: ranks.run("counts_bytes", 2, f"horovod {wire}")[0]
            for wire in ("float16", "float32")}
    assert sent["float16"] / sent["float32"] == pytest.approx(0.5, rel=0.1)


REFUSED = {
    "kvstore='dist_sync' needs a scheduler and servers": {},
    "gradient compression deadlocks": {"compression_params": {"type": "2bit", "threshold": 0.5}},
    "dist_async updates on its servers: use dist_sync": {"kvstore": "DIST_ASYNC"},
}


@pytest.mark.parametrize("error", REFUSED)
def test_what_cannot_work_with_many_workers_is_refused_before_there_is_a_store(error):
    net = nn.Dense(1, in_units=1)
    net.initialize()
    with pytest.raises(ValueError, match=error):
        amp.Trainer(net.collect_params(), "sgd", **{"kvstore": "dist_sync", **REFUSED[error]})


def test_launched_workers_that_each_train_alone_are_told(monkeypatch, caplog):
    for name, value in {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"}.items():
        monkeypatch.setenv(name, value)
    net = nn.Dense(1, in_units=1)
    net.initialize()
    amp.Trainer(net.collect_params(), "sgd")
    assert "2 workers were launched, but kvstore='device' sums the gradients of one" in caplog.text


@pytest.mark.parametrize("error", REFUSED)
def test_a_module_refuses_the_same(error):
    arguments = dict(REFUSED[error])
    store = arguments.pop("kvstore", "dist_sync")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2),
                                  name="softmax")
    module = amp.Module(symbol, loss_scale="dynamic", **arguments)
    module.bind([("data", (2, 3))], [("softmax_label", (2,))])
    module.init_params()
    with pytest.raises(ValueError, match=error):
        module.init_optimizer(kvstore=store)


def test_parameters_that_are_row_sparse_are_refused_with_many_workers():
    embedding = nn.Embedding(4, 2, sparse_grad=True)
    embedding.initialize()
    with pytest.raises(ValueError, match="row_sparse"):
        amp.Trainer(embedding.collect_params(), "sgd", kvstore="dist_sync")


def test_one_process_is_alike():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    amp.Trainer(net.collect_params(), "sgd").check_ranks()


def test_devices_of_one_process_get_the_mean_of_their_moving_averages():
    net = nn.BatchNorm(in_channels=2)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = amp.Trainer(net.collect_params(), "sgd")
    trainer.check_ranks()
    for i, array in enumerate(net.running_mean.list_data()):
        array[:] = i
    average_statistics(trainer)
    assert [a.asnumpy().tolist() for a in net.running_mean.list_data()] == [[0.5, 0.5]] * 2


def test_averages_of_another_trainer_are_refused():
    net = nn.BatchNorm(in_channels=2)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(TypeError, match=r"a gluon_amp Trainer or Module. Received: mxnet.*Trainer"):
        average_statistics(trainer)


def test_a_timeout_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("GLUON_AMP_RANK_TIMEOUT", "30s")
    with pytest.raises(ValueError, match=r"GLUON_AMP_RANK_TIMEOUT must be a positive.* '30s'"):
        patience()
    monkeypatch.setenv("GLUON_AMP_RANK_TIMEOUT", "45")
    assert patience() == 45


class OfTwo(mx.kv.KVStoreBase):
    """A store like Horovod's, of which this process is one of two."""
    type, rank, num_workers = "dist_sync_test", 0, 2

    def pushpull(self, key, value, out=None, priority=0):
        for array in value if isinstance(value, list) else [value]:
            array.wait_to_read()


@pytest.mark.parametrize("stype", ["default", "row_sparse"])
def test_an_operators_own_error_is_no_other_ranks_end(stype):
    workers = Workers(OfTwo())
    failed = nd.linalg.potrf(nd.array([[-1.0]])).tostype(stype)  # of no positive matrix
    with pytest.raises(mx.MXNetError, match="potrf"):
        workers.sum([(0, [failed])])
