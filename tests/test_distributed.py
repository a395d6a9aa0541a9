"""Many workers, over MXNet's parameter server, on this machine."""
import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from mxnet.gluon import nn
from ranks import RANKS, STARTS, STEPS, Ranks

STORES = ["dist_sync", "dist_device_sync"]


@pytest.fixture(scope="module")
def ranks():
    with Ranks() as started:
        yield started


def same(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("deferred", [False, True])
def test_ranks_with_other_seeds_train_as_one_from_the_first_step(ranks, store, deferred):
    for _ in range(STARTS):
        results = ranks.run("begins_with_another_seed", 2, store, deferred=deferred)
        (before, stepped, held, scale), (others, other_stepped, other_held, other_scale) = results
        if not deferred:
            assert same(before, others)
        # With sizes that the first batch tells, gradients of other weights are not used.
        assert stepped == other_stepped == [not deferred, True, True]
        assert same(held, other_held)
        assert scale == other_scale


@pytest.mark.parametrize("store", STORES)
def test_modules_with_other_seeds_begin_with_rank_0s_weights_and_averages(ranks, store):
    (before, held, scale), (others, other_held, other_scale) = ranks.run(
        "module_begins_with_another_seed", 2, store)
    assert same(before, others)
    assert all((before[i] == 1).all() for i in (-1, -2))  # rank 0's moving averages
    assert same(held, other_held)
    assert scale == other_scale


def test_a_weight_that_one_rank_changed_is_named_on_all(ranks):
    results = ranks.run("changes_a_weight", 2, "dist_sync")
    assert results == ["RanksDifferError: net_dense0_weight is not the same on rank 1 as on rank "
                       "0. Has a rank changed it by itself, or loaded another file?"] * 2


@pytest.mark.parametrize(("what", "error"), [
    ("shape", "ranks train other networks: net_dense0_bias"),
    ("count", "ranks train other networks. Parameters of rank 0, 1, ...: 8, 10"),
    ("version", f"ranks have other versions of gluon_amp: {amp.__version__}, 9.9.9"),
    ("scale", "ranks have other loss scales. Rank 0, 1, ...: a dynamic loss scale, "
              "the loss scale 256")])
def test_ranks_that_do_not_fit_are_told_before_training(ranks, what, error):
    for told in ranks.run("has_another_network", 2, "dist_sync", what=what):
        assert told.startswith(f"RanksDifferError: {error}")


def agree(results):
    """Whether all ranks took the same steps and hold the same numbers."""
    (*told, held), *others = results
    return all(other[:-1] == tuple(told) and same(other[-1], held) for other in others)


@pytest.mark.parametrize("store", STORES)
def test_ranks_skip_together_whatever_is_infinite_on_any_of_them(ranks, store):
    results = ranks.run("some_are_infinite", RANKS, store, ranks=RANKS, steps=STEPS)
    told, skipped, _ = results[0]
    assert 2 < skipped < STEPS / 3
    assert len({scale for _, scale in told}) > 2
    assert agree(results)


@pytest.mark.parametrize("loss_scale", ["dynamic", 1024.0])
def test_ranks_give_up_at_the_same_step(ranks, loss_scale):
    results = ranks.run("nothing_is_finite", 2, "dist_sync", loss_scale=loss_scale)
    assert results[0] is not None
    assert agree(results)


def test_two_ranks_learn_what_one_learns_from_the_whole_batch(ranks):
    results = ranks.run("learns_its_part", 2, "dist_sync", ranks=2)
    ((told, held),) = ranks.run("learns_its_part", 1, "dist_sync", ranks=1)
    assert agree(results)
    assert results[0][0] == told
    for two, one in zip(results[0][1], held):
        np.testing.assert_allclose(two, one, atol=2e-3)


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_ends_makes_the_others_raise(ranks, how):
    (error, seconds), ended = ranks.run("dies", 2, "dist_sync", how=how)
    reason = {"killed": "rank 1 has died", "raises": "rank 1 has ended with RuntimeError"}[how]
    assert error == f"RankEndedError: rank 0 waits in vain: {reason}"
    assert seconds < 10
    assert ended == (None if how == "killed" else "RuntimeError: the data is gone")


REFUSED = {
    "kvstore='dist_sync' needs a scheduler and servers": {},
    "gradient compression leaves": {"compression_params": {"type": "2bit", "threshold": 0.5}},
    "updates on its servers: use dist_sync": {"kvstore": "dist_async"},
}


@pytest.mark.parametrize("error", REFUSED)
def test_what_cannot_work_with_many_workers_is_refused_before_there_is_a_store(error):
    net = nn.Dense(1, in_units=1)
    net.initialize()
    with pytest.raises(ValueError, match=error):
        amp.Trainer(net.collect_params(), "sgd", **{"kvstore": "dist_sync", **REFUSED[error]})


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
