"""Faulty rank programs: errors are raised on all ranks, and no rank deadlocks or diverges."""
import re

import numpy as np
import pytest
from ranks import EITHER

pytestmark = pytest.mark.long


def agree(results):
    assert not any(isinstance(result, str) for result in results), results  # the error of a rank
    return all(np.array_equal(a, b) for result in results for a, b in zip(results[0], result))


UPDATES_ON_RANKS, ON_SERVERS = ({"MXNET_UPDATE_ON_KVSTORE": number} for number in "01")


@pytest.mark.parametrize(("story", "count", "environment", "arguments"), [
    ("loss_misses_a_parameter_in_first_step", 2, {}, {"loss_scale": 256.0}),
    ("loss_misses_a_parameter_in_first_step", 2, {}, {"loss_scale": None}),
    ("has_two_trainers", 1, {}, {}), ("has_two_trainers", 2, {}, {}),
    ("trains_without_scale", 2, UPDATES_ON_RANKS, {}),
    ("module_trains_without_scale", 2, UPDATES_ON_RANKS, {}),
    ("updates_on_servers", 2, {}, {}), ("module_updates_on_servers", 2, ON_SERVERS, {})])
def test_ranks_have_the_same_weights(story, count, environment, arguments, ranks):
    assert agree(ranks.run(story, count, "dist_sync", environment, **arguments))


@pytest.mark.parametrize(("story", "arguments", "error"), [
    ("freezes_a_layer", {}, "RanksDifferError: ranks .*is frozen on some of them only$"),
    ("has_different_block_names", {}, "RanksDifferError: ranks .*give the network a prefix$"),
    ("loss_misses_a_parameter", {"loss_scale": 256.0, "by_hand": True},
     "RanksDifferError: the losses of some ranks reach parameters"),
    ("all_reduces_wrongly", {"times": 0}, r"RuntimeError: update\(\) before the sum over workers"),
    ("all_reduces_wrongly", {"times": 2}, "RuntimeError: the gradients have been summed")])
def test_mistakes_raise_an_error_on_all_ranks(story, arguments, error, ranks):
    for told in ranks.run(story, 2, "dist_sync", **arguments):
        assert re.match(error, told, re.S)


@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize("loss_scale", [256.0, None])
def test_rank_whose_loss_misses_a_parameter_contributes_zero(ranks, store, loss_scale):
    results = ranks.run("loss_misses_a_parameter", 2, store, loss_scale=loss_scale)
    assert agree([weights for weights, _, _ in results])
    _, moved, of_rank_0 = results[0]
    np.testing.assert_allclose(moved, of_rank_0, atol=1e-4)


@pytest.mark.parametrize(("settled", "by_hand"), [(True, False), (False, False), (True, True)])
def test_first_gradients_use_scale_of_rank_0_on_all_ranks(ranks, settled, by_hand):
    (scale, expected), _ = ranks.run("starts_at_scale", 2, "dist_sync", initial=[256, 256],
                                     settled=settled, by_hand=by_hand)
    for own_scale, trained in ranks.run("starts_at_scale", 2, "dist_sync", initial=[256, 512],
                                        settled=settled, by_hand=by_hand):
        assert own_scale == scale
        assert agree([expected, trained])


@pytest.mark.parametrize("loss_scale", [256.0, None])
@pytest.mark.parametrize(("story", "environment"), [
    ("synchronizes_before_backward", {}), ("module_runs_before_its_store", UPDATES_ON_RANKS)])
def test_gradients_of_replaced_weights_are_not_used(ranks, story, environment, loss_scale):
    results = ranks.run(story, 2, "dist_sync", environment, loss_scale=loss_scale)
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


@pytest.mark.thorough
@pytest.mark.parametrize("store", EITHER)
@pytest.mark.parametrize(("story", "arguments", "named"), [
    ("changes_alone", {"what": "rate"}, "learning rate"),
    ("changes_alone", {"what": "weight"}, "weight"), ("module_changes_alone", {}, "learning rate")])
def test_later_change_on_one_rank_is_refused(ranks, store, story, arguments, named):
    for told in ranks.run(story, 2, store, **arguments):
        assert f"{named} is not the same on rank 1" in told
