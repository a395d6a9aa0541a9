"""Ranks that do not do alike are told so, or counted right: none trains apart or waits for ever."""
import numpy as np
import pytest
from ranks import EITHER


def agree(results):
    assert not any(isinstance(result, str) for result in results), results  # what one raised
    return all(np.array_equal(a, b) for result in results for a, b in zip(results[0], result))


@pytest.mark.parametrize(("story", "error"), [
    ("freezes_a_layer", "is frozen on some of them only"),
    ("has_made_more_blocks", "give the network a prefix")])
def test_networks_that_only_look_alike_are_told_before_training(ranks, story, error):
    for told in ranks.run(story, 2, "dist_sync"):
        assert told.startswith("RanksDifferError: ranks ")
        assert told.endswith(error)


@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize("loss_scale", [256.0, None])
def test_a_rank_whose_loss_does_not_reach_a_parameter_adds_nothing(ranks, store, loss_scale):
    results = ranks.run("loss_reaches_less", 2, store, loss_scale=loss_scale)
    assert agree([weights for weights, _, _ in results])
    _, moved, of_rank_0 = results[0]
    np.testing.assert_allclose(moved, of_rank_0, atol=1e-4)


@pytest.mark.parametrize("loss_scale", [256.0, None])
def test_in_the_first_step_too(ranks, loss_scale):
    assert agree(ranks.run("loss_reaches_less_in_the_first_step", 2, "dist_sync",
                           loss_scale=loss_scale))


@pytest.mark.parametrize(("settled", "by_hand"), [(True, False), (False, False), (True, True)])
def test_the_first_gradients_have_rank_0s_scale_on_all_ranks(ranks, settled, by_hand):
    (scale, expected), _ = ranks.run("begins_at_a_scale", 2, "dist_sync", initial=[256, 256],
                                     settled=settled, by_hand=by_hand)
    for own_scale, trained in ranks.run("begins_at_a_scale", 2, "dist_sync", initial=[256, 512],
                                        settled=settled, by_hand=by_hand):
        assert own_scale == scale == 256
        assert agree([expected, trained])


@pytest.mark.parametrize("loss_scale", [256.0, None])
def test_gradients_of_weights_that_rank_0s_replace_are_not_used(ranks, loss_scale):
    results = ranks.run("has_predicted_and_compared", 2, "dist_sync", loss_scale=loss_scale)
    assert [told for told, _ in results] == [[False, True]] * 2
    assert agree([weights for _, weights in results])


@pytest.mark.parametrize("loss_scale", [256.0, None])
def test_nor_are_a_modules(ranks, loss_scale):
    results = ranks.run("module_begins_before_its_store", 2, "dist_sync",
                        {"MXNET_UPDATE_ON_KVSTORE": "0"}, loss_scale=loss_scale)
    assert [updated for updated, _ in results] == [[False, True]] * 2
    assert agree([weights for _, weights in results])


@pytest.mark.parametrize("loss_scale", ["dynamic", 256.0])
def test_a_loss_that_is_nan_on_one_rank_leaves_the_scale_on_all(ranks, loss_scale):
    results = ranks.run("has_a_loss_that_is_nan", 2, "dist_sync", loss_scale=loss_scale)
    assert results == [(2.0 ** 16 if loss_scale == "dynamic" else loss_scale, 16)] * 2


def test_ranks_hold_the_same_after_a_sweep_of_learning_rates(ranks):
    results = ranks.run("finds_a_rate_first", 2, "dist_sync")
    assert agree([weights for _, weights in results])
    assert [updated for updated, _ in results] == [True, True]


def test_no_rank_repeats_a_backward_pass_that_one_cannot_repeat(ranks):
    (told, skipped, _), _ = results = ranks.run("overflows_and_cannot_repeat", 2, "dist_sync")
    assert told == [False] * skipped + [True] * (12 - skipped)
    assert 0 < skipped < 12
    assert agree([weights for _, _, weights in results])


def test_what_is_left_of_a_step_before_is_not_summed_by_hand(ranks):
    for told in ranks.run("loss_reaches_less", 2, "dist_sync", loss_scale=256.0, by_hand=True):
        assert told.startswith("RanksDifferError: the losses of some ranks reach parameters")


@pytest.mark.parametrize(("times", "error"), [(0, "update() before the sum over workers"),
                                              (2, "the gradients have been summed")])
def test_gradients_are_summed_once(ranks, times, error):
    for told in ranks.run("sums_wrongly", 2, "dist_sync", times=times):
        assert told.startswith(f"RuntimeError: {error}")


@pytest.mark.parametrize("store", EITHER)
def test_ranks_that_wait_for_different_things_are_told(ranks, store):
    for told in ranks.run("makes_other_calls", 2, store):
        assert "for the mean of moving averages" in told
        assert told.endswith("all ranks must make the same calls, and as many steps")


def test_a_rank_that_ends_well_before_the_others_does_not_stay(ranks):
    told, _ = ranks.run("ends_early", 2, "dist_sync")
    assert told == "RankEndedError: rank 0 cannot continue: rank 1 has ended"


def test_two_trainers_of_a_process_share_the_servers(ranks):
    assert agree(ranks.run("has_two_trainers", 2, "dist_sync"))


@pytest.mark.parametrize("story", ["trains_without_scale", "module_trains_without_scale"])
def test_without_a_scale_ranks_get_rank_0s_weights_too(ranks, story):
    assert agree(ranks.run(story, 2, "dist_sync", {"MXNET_UPDATE_ON_KVSTORE": "0"}))


def test_ranks_whose_weights_servers_update_get_rank_0s_and_are_supervised(ranks):
    assert agree(ranks.run("begins_where_servers_update", 2, "dist_sync"))
    told, _ = ranks.run("dies_while_servers_update", 2, "dist_sync",
                        {"MXNET_UPDATE_ON_KVSTORE": "1"})
    assert told == "RankEndedError: rank 0 cannot continue: rank 1 has died"


def test_a_learning_rate_or_batch_size_of_ones_own_is_named(ranks):
    told, _ = results = ranks.run("has_settings_of_its_own", 2, "dist_sync")
    assert results == [told] * 2
    rate, size = told
    assert rate.startswith("the learning rate is not the same on rank 1 as on rank 0")
    assert size.startswith("ranks divide by different batch sizes. Rank 0, 1, ...: 8, 9. Give ")


def test_gradients_add_up_over_passes_devices_and_ranks(ranks):
    several = ranks.run("adds_up", 2, "dist_sync", ranks=2, devices=2, passes=2)
    assert agree(several)
    (one,) = ranks.run("adds_up", 1, "dist_sync", ranks=1)
    for a, b in zip(several[0], one):
        np.testing.assert_allclose(a, b, atol=2e-3)
