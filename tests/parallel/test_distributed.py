"""Several workers on this machine: MXNet's parameter server, and Horovod if it is installed."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import same
from cases import ALL
from gluon_amp.parallel import average_statistics
from gluon_amp.parallel.sync import Workers
from mxnet import gluon, nd
from mxnet.gluon import nn
from networks import ready
from ranks import EITHER, RANKS, STARTS, STEPS, STORES, needs_horovod

pytestmark = pytest.mark.long


def agree(results):
    """Whether all ranks made the same steps and have the same values."""
    (*told, held), *others = results
    return all(other[:-1] == tuple(told) and same(other[-1], held) for other in others)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("deferred", [False, True])
def test_ranks_with_different_seeds_start_from_rank_0(ranks, store, deferred):
    for _ in range(STARTS):
        results = ranks.run("starts_with_different_seeds", 2, store, deferred=deferred)
        (before, stepped, _, _), (others, _, _, _) = results
        if not deferred:
            assert same(before, others)
        # With deferred sizes, gradients of the weights that rank 0's replace are not used.
        assert stepped == [not deferred, True, True]
        assert agree([told[1:] for told in results])


@pytest.mark.parametrize("store", STORES)
def test_module_ranks_start_with_weights_and_averages_of_rank_0(ranks, store):
    for _ in range(STARTS):
        results = ranks.run("module_starts_with_different_seeds", 2, store)
        (before, _, _), (others, _, _) = results
        assert same(before, others)
        assert all((before[i] == 1).all() for i in (-1, -2))  # rank 0's moving averages
        assert agree([told[1:] for told in results])


@pytest.mark.parametrize("store", EITHER)
def test_float32_networks_train_after_prediction(ranks, store):
    for count in (1, 2):
        results = ranks.run("predicts_before_training", count, store)
        assert agree(results)
        assert results[0][0] == 0


VERSIONS = f"ranks have different versions of gluon_amp: {amp.__version__}, 9.9.9"
CHANGED = ("net_dense0_weight is not the same on rank 1 as on rank 0. Has one rank changed it, or "
           "loaded another file?")


@pytest.mark.parametrize(("story", "arguments", "error"), [
    ("changes_weight_on_rank_1", {"when": "before the first step"}, CHANGED),
    ("changes_weight_on_rank_1", {"when": "after a comparison"}, CHANGED),
    ("changes_weight_on_rank_1", {"when": "later"}, CHANGED),
    ("has_different_network", {"what": "shape"}, "ranks train different networks: net_dense0_bias"),
    ("has_different_network", {"what": "count"},
     "ranks train different networks. Parameters of rank 0, 1, ...: 8, 10"),
    ("has_different_network", {"what": "version"}, VERSIONS),
    ("has_different_network", {"what": "scale"},
     "ranks have different loss scales. Rank 0, 1, ...: 'dynamic', StaticLossScale(scale=256.0)"),
    ("module_has_different_network", {"what": "shape"},
     "ranks train different networks: dense_weight, here "),
    ("module_has_different_network", {"what": "version"}, VERSIONS)])
@pytest.mark.parametrize("store", EITHER)
def test_ranks_that_differ_are_refused_on_all(ranks, store, story, arguments, error):
    for told in ranks.run(story, 2, store, **arguments):
        assert told.startswith(f"RanksDifferError: {error}")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("count", RANKS)
def test_nonfinite_gradients_on_any_rank_skip_step_on_all(ranks, store, count):
    results = ranks.run("has_nonfinite_inputs", count, store, ranks=count, steps=STEPS)
    told, skipped, _ = results[0]
    assert 2 < skipped < STEPS / 3
    assert len({scale for _, scale in told}) > 2
    assert agree(results)


@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize("loss_scale", ["dynamic", 1024.0])
def test_ranks_stop_at_same_step(ranks, store, loss_scale):
    results = ranks.run("becomes_infinite", 2, store, loss_scale=loss_scale)
    assert results[0] is not None
    assert agree(results)


@pytest.mark.parametrize("store", EITHER)
def test_each_call_of_backward_is_one_pass_on_each_rank(ranks, store):
    of_rank_0, of_rank_1 = ranks.run("counts_passes", 2, store)
    assert [passes for passes, _ in of_rank_0] == list(range(1, 11))
    assert [passes for passes, _ in of_rank_1] == list(range(1, 11))
    assert all(average == 0 for _, average in of_rank_0)  # its data are 0
    first, second = (average for _, average in of_rank_1[:2])
    assert second == pytest.approx(1.5 * first, rel=0.1)  # one update each; the weights changed


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("count", RANKS)
def test_ranks_match_one_process_with_whole_batch(ranks, store, count):
    results = ranks.run("trains_on_its_part", count, store, ranks=count)
    ((told, held),) = ranks.run("trains_on_its_part", 1, store, ranks=1)
    assert agree(results)
    assert results[0][0] == told
    for several, one in zip(results[0][1], held):
        np.testing.assert_allclose(several, one, atol=2e-3)


@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize("count", [2, 1, 4] if ALL else [2, 1])
def test_all_ranks_resume_from_files_of_rank_0(ranks, store, count, tmp_path):
    went_on = ranks.run("saves_and_continues", 2, store, folder=str(tmp_path))
    results = ranks.run("resumes", count, store, folder=str(tmp_path))
    assert agree(results)
    if count == 2:
        assert agree([went_on[0], *results])  # bitwise as without a stop


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


@needs_horovod
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_ended_rank_raises_on_others_with_horovod(ranks, how):
    error, ended = ranks.run("ends_on_rank_1", 2, "horovod", how=how)
    assert "Horovod has been shut down" in error
    assert ended == (None if how == "killed" else "RuntimeError: the data is gone")


@needs_horovod
def test_stopped_rank_raises_on_others_after_gloo_timeout(ranks):
    error, nothing = ranks.run("ends_on_rank_1", 2, "horovod",
                               {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3"}, stopped=1, how="stopped")
    assert "Horovod has been shut down" in error
    assert nothing is None


@needs_horovod
def test_float32_wire_holds_sum_that_overflows_float16(ranks):
    # 80000 / 40000 * learning rate 0.1
    count = RANKS[-1]
    results = ranks.run("sum_overflows", count, "horovod float32", gradient=80000 / count)
    assert results == [(True, [[-np.float16(0.2).item()] * 2])] * count
    results = ranks.run("sum_overflows", count, "horovod float16", gradient=80000 / count)
    assert results == [(False, [[0.0, 0.0]])] * count


@needs_horovod
def test_float16_wire_sends_half_the_bytes(ranks):
    sent = {wire: ranks.run("counts_bytes", 2, f"horovod {wire}")[0]
            for wire in ("float16", "float32")}
    assert sent["float16"] / sent["float32"] == pytest.approx(0.5, rel=0.1)


REFUSED = {
    "kvstore='dist_sync' needs a scheduler and servers": {},
    "gradient compression compares": {"compression_params": {"type": "2bit", "threshold": 0.5}},
    "dist_async updates on its servers: use dist_sync": {"kvstore": "DIST_ASYNC"},
}


@pytest.mark.parametrize("error", REFUSED)
def test_unsupported_arguments_are_refused_before_store_exists(error):
    net = ready(nn.Dense(1, in_units=1))
    with pytest.raises(ValueError, match=error):
        amp.Trainer(net.collect_params(), "sgd", loss_scale="dynamic",
                    **{"kvstore": "dist_sync", **REFUSED[error]})


def test_launched_workers_with_local_kvstore_log_warning(monkeypatch, caplog):
    for name, value in {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"}.items():
        monkeypatch.setenv(name, value)
    net = ready(nn.Dense(1, in_units=1))
    amp.Trainer(net.collect_params(), "sgd")
    assert "2 workers were launched, but kvstore='device' sums the gradients of one" in caplog.text


@pytest.mark.parametrize("error", REFUSED)
def test_module_refuses_unsupported_arguments(error):
    arguments = dict(REFUSED[error])
    store = arguments.pop("kvstore", "dist_sync")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2),
                                  name="softmax")
    module = amp.Module(symbol, loss_scale="dynamic", **arguments)
    module.bind([("data", (2, 3))], [("softmax_label", (2,))])
    module.init_params()
    with pytest.raises(ValueError, match=error):
        module.init_optimizer(kvstore=store)


def test_row_sparse_parameters_are_refused_with_several_workers():
    embedding = ready(nn.Embedding(4, 2, sparse_grad=True))
    with pytest.raises(ValueError, match="row_sparse"):
        amp.Trainer(embedding.collect_params(), "sgd", kvstore="dist_sync", loss_scale=8)


def test_check_ranks_of_one_process_passes():
    net = ready(nn.Dense(1, in_units=1))
    amp.Trainer(net.collect_params(), "sgd").check_ranks()


def test_moving_averages_are_averaged_over_devices_of_one_process():
    net = ready(nn.BatchNorm(in_channels=2), ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = amp.Trainer(net.collect_params(), "sgd")
    trainer.check_ranks()
    for i, array in enumerate(net.running_mean.list_data()):
        array[:] = i
    average_statistics(trainer)
    assert [a.asnumpy().tolist() for a in net.running_mean.list_data()] == [[0.5, 0.5]] * 2


def test_average_statistics_refuses_gluon_trainer():
    net = ready(nn.BatchNorm(in_channels=2))
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(TypeError, match=r"a gluon_amp Trainer or Module. Received: mxnet.*Trainer"):
        average_statistics(trainer)


class OfTwo(mx.kv.KVStoreBase):
    """A store like Horovod's with two workers, of which this process is the first."""
    type, rank, num_workers = "dist_sync_test", 0, 2

    def pushpull(self, key, value, out=None, priority=0):
        for array in value if isinstance(value, list) else [value]:
            array.wait_to_read()


@pytest.mark.parametrize("stype", ["default", "row_sparse"])
def test_operator_error_is_raised_before_the_sum(stype):
    workers = Workers(OfTwo())
    failed = nd.linalg.potrf(nd.array([[-1.0]])).tostype(stype)  # of a matrix that is not positive
    with pytest.raises(mx.MXNetError, match="potrf"):
        workers.lay_out([failed])
