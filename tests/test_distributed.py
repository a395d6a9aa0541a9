"""Many workers, over MXNet's parameter server, on this machine."""
import numpy as np
import pytest
from ranks import Ranks

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
    ("version", "ranks have other versions of gluon_amp: 0.1.0, 9.9.9"),
    ("scale", "ranks have other loss scales. Rank 0, 1, ...: a dynamic loss scale, "
              "the loss scale 256")])
def test_ranks_that_do_not_fit_are_told_before_training(ranks, what, error):
    for told in ranks.run("has_another_network", 2, "dist_sync", what=what):
        assert told.startswith(f"RanksDifferError: {error}")


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_ends_makes_the_others_raise(ranks, how):
    (error, seconds), ended = ranks.run("dies", 2, "dist_sync", how=how)
    reason = {"killed": "rank 1 has died", "raises": "rank 1 has ended with RuntimeError"}[how]
    assert error == f"RankEndedError: rank 0 waits in vain: {reason}"
    assert seconds < 10
    assert ended == (None if how == "killed" else "RuntimeError: the data is gone")
