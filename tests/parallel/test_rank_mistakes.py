"""Faulty rank programs: errors are raised on all ranks, and no rank deadlocks or diverges."""
import numpy as np
import pytest
from ranks import EITHER

pytestmark = pytest.mark.long


def agree(results):
    assert not any(isinstance(result, str) for result in results), results  # the error of a rank
    return all(np.array_equal(a, b) for result in results for a, b in zip(results[0], result))


@pytest.mark.parametrize(("story", "error"), [
    ("freezes_a_layer", "is frozen on some of them only"),
    ("has_different_block_names", "give the network a prefix")])
def test_different_networks_with_same_shapes_are_refused(ranks, story, error):
    for told in ranks.run(story, 2, "dist_sync"):
        assert told.startswith("RanksDifferError: ranks ")
        assert told.endswith(error)


@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize("loss_scale", [256.0, None])
def test_rank_whose_loss_misses_a_parameter_contributes_zero(ranks, store, loss_scale):
    results = ranks.run("loss_misses_a_parameter", 2, store, loss_scale=loss_scale)
    assert agree([weights for weights, _, _ in results])
    _, moved, of_rank_0 = results[0]
    np.testing.assert_allclose(moved, of_rank_0, atol=1e-4)


@pytest.mark.parametrize("loss_scale", [256.0, None])
def test_rank_whose_loss_misses_a_parameter_in_first_step(ranks, loss_scale):
    assert agree(ranks.run("loss_misses_a_parameter_in_first_step", 2, "dist_sync",
                           loss_scale=loss_scale))


@pytest.mark.parametrize(("settled", "by_hand"), [(True, False), (False, False), (True, True)])
def test_first_gradients_use_scale_of_rank_0_on_all_ranks(ranks, settled, by_hand):
    (scale, expected), _ = ranks.run("starts_at_scale", 2, "dist_sync", initial=[256, 256],
                                     settled=settled, by_hand=by_hand)
    for own_scale, trained in ranks.run("starts_at_scale", 2, "dist_sync", initial=[256, 512],
                                        settled=settled, by_hand=by_hand):
        assert own_scale == scale
        assert agree([expected, trained])


@pytest.mark.parametrize("loss_scale", [256.0, None])
def test_gradients_of_replaced_weights_are_not_used(ranks, loss_scale):
    results = ranks.run("synchronizes_before_backward", 2, "dist_sync", loss_scale=loss_scale)
    assert [told for told, _ in results] == [[False, True]] * 2
    assert agree([weights for _, weights in results])


@pytest.mark.parametrize("loss_scale", [256.0, None])
def test_module_gradients_of_replaced_weights_are_not_used(ranks, loss_scale):
    results = ranks.run("module_runs_before_its_store", 2, "dist_sync",
                        {"MXNET_UPDATE_ON_KVSTORE": "0"}, loss_scale=loss_scale)
    assert [updated for updated, _ in results] == [[False, True]] * 2
    assert agree([weights for _, weights in results])


@pytest.mark.parametrize("loss_scale", ["dynamic", 256.0])
def test_nan_loss_on_one_rank_keeps_scale_on_all(ranks, loss_scale):
    results = ranks.run("has_nan_loss", 2, "dist_sync", loss_scale=loss_scale)
    assert results == [(4 if loss_scale == "dynamic" else loss_scale, 16)] * 2


def test_ranks_agree_after_learning_rate_sweep(ranks):
    results = ranks.run("sweeps_learning_rates", 2, "dist_sync")
    assert agree([weights for _, weights in results])
    assert [updated for updated, _ in results] == [True, True]


def test_stale_gradients_are_not_all_reduced_by_hand(ranks):
    for told in ranks.run("loss_misses_a_parameter", 2, "dist_sync", loss_scale=256.0,
                          by_hand=True):
        assert told.startswith("RanksDifferError: the losses of some ranks reach parameters")


@pytest.mark.parametrize(("times", "error"), [(0, "update() before the sum over workers"),
                                              (2, "the gradients have been summed")])
def test_gradients_must_be_all_reduced_exactly_once(ranks, times, error):
    for told in ranks.run("all_reduces_wrongly", 2, "dist_sync", times=times):
        assert told.startswith(f"RuntimeError: {error}")


@pytest.mark.parametrize("count", [1, 2])
def test_two_trainers_share_parameter_servers(ranks, count):
    assert agree(ranks.run("has_two_trainers", count, "dist_sync"))


@pytest.mark.parametrize("story", ["trains_without_scale", "module_trains_without_scale"])
def test_ranks_without_loss_scale_start_from_rank_0(ranks, story):
    assert agree(ranks.run(story, 2, "dist_sync", {"MXNET_UPDATE_ON_KVSTORE": "0"}))


def test_updates_on_servers_start_from_rank_0(ranks):
    assert agree(ranks.run("updates_on_servers", 2, "dist_sync"))
    assert agree(ranks.run("module_updates_on_servers", 2, "dist_sync",
                           {"MXNET_UPDATE_ON_KVSTORE": "1"}))


def test_different_learning_rates_or_batch_sizes_are_refused(ranks):
    told, _ = results = ranks.run("has_different_settings", 2, "dist_sync")
    assert results == [told] * 2
    rate, size = told
    assert rate.startswith("the learning rate is not the same on rank 1 as on rank 0")
    assert size.startswith("ranks divide by different batch sizes. Rank 0, 1, ...: 8, 9. Give ")


def test_gradients_accumulate_over_passes_devices_and_ranks(ranks):
    several = ranks.run("accumulates", 2, "dist_sync", ranks=2, devices=2, passes=2)
    assert agree(several)
    (one,) = ranks.run("accumulates", 1, "dist_sync", ranks=1)
    for a, b in zip(several[0], one):
        np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize(("what", "named"), [("rate", "learning rate"), ("weight", "weight")])
def test_later_change_on_one_rank_is_refused(ranks, store, what, named):
    for told in ranks.run("changes_alone", 2, store, what=what):
        assert f"{named} is not the same on rank 1" in told


def test_later_change_on_one_rank_of_a_module_is_refused(ranks):
    for told in ranks.run("module_changes_alone", 2, "dist_sync"):
        assert "the learning rate is not the same on rank 1" in told
