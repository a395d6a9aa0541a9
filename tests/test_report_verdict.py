"""What a report claims of two kinds of runs: against scipy's own tests, simulation, and NVIDIA."""
import csv
from pathlib import Path

import numpy as np
import pytest
from gluon_amp.report.verdict import Difference, Sample, outcome, paired, sentence, unpaired
from report_runs import comparisons, seeds
from scipy import stats

NVIDIA = Path(__file__).parents[1] / "results" / "imagenet" / "nvidia_seeds.csv"
FLOAT32 = [53.85, 54.55, 56.85, 54.75, 54.70, 53.25, 56.15, 56.00, 54.70, 53.05]
FLOAT16 = [51.95, 53.55, 55.75, 54.00, 53.95, 55.50, 54.65, 58.20, 55.75, 52.85]


def test_pairs_are_judged_as_scipy_judges_them():
    found, theirs = paired(FLOAT16, FLOAT32), stats.ttest_rel(FLOAT16, FLOAT32)
    assert found.p == pytest.approx(theirs.pvalue)
    assert found.interval() == pytest.approx(theirs.confidence_interval(0.95))
    for margin in (0.5, 1.1, 3):
        lower = stats.ttest_rel(np.add(FLOAT16, margin), FLOAT32, alternative="greater").pvalue
        upper = stats.ttest_rel(np.subtract(FLOAT16, margin), FLOAT32, alternative="less").pvalue
        assert found.p_equivalent(margin) == pytest.approx(max(lower, upper))


def test_runs_that_no_seed_pairs_are_judged_as_scipy_judges_them():
    found = unpaired(Sample.from_values(FLOAT16), Sample.from_values(FLOAT32[:6]))
    assert found.p == pytest.approx(stats.ttest_ind(FLOAT16, FLOAT32[:6], equal_var=False).pvalue)
    lower = stats.ttest_ind(np.add(FLOAT16, 0.5), FLOAT32[:6], equal_var=False,
                            alternative="greater").pvalue
    upper = stats.ttest_ind(np.subtract(FLOAT16, 0.5), FLOAT32[:6], equal_var=False,
                            alternative="less").pvalue
    assert found.p_equivalent(0.5) == pytest.approx(max(lower, upper))


def test_what_ten_seeds_of_cifar10_say():
    assert sentence("float16", "float32", paired(FLOAT16, FLOAT32), 0.5) == (
        "float16 ends 0.17 points below float32 (95 % interval -1.24 to 0.90, 10 paired seeds, "
        "p = 0.73): the same within 1.04 points, not shown within 0.5 points (two one-sided "
        "tests, p = 0.25); 78 paired seeds would show 0.5, were there no difference.")


def test_the_smallest_margin_is_where_equivalence_begins():
    found = paired(FLOAT16, FLOAT32)
    assert found.p_equivalent(found.smallest_margin) == pytest.approx(0.05)


@pytest.mark.parametrize("last", np.linspace(50, 54, 9))
def test_the_margin_that_is_told_is_one_that_the_seeds_show(last):
    found = paired([*FLOAT16[:-1], last], FLOAT32)
    assert found.p_equivalent(float(found.shown_within)) <= 0.05


@pytest.mark.parametrize("pairs", [True, False])
def test_so_many_seeds_show_the_margin_four_times_in_five(pairs):
    random = np.random.default_rng(0)
    seeds = Difference(0, 1, 9, 0.9, 10, pairs).seeds_for(0.5)
    deviation = 0.9 if pairs else 0.9 / 2 ** 0.5

    def shown():
        low, high = random.normal(0, deviation, (2, seeds))
        found = paired(low, np.zeros(seeds)) if pairs else unpaired(
            Sample.from_values(low), Sample.from_values(high))
        return found.p_equivalent(0.5) < 0.05
    assert 0.77 < np.mean([shown() for _ in range(2000)]) < 0.85


@pytest.mark.parametrize(("differences", "word"), [
    ([0.1, -0.1, 0.05, -0.05], "the same"),
    ([0.2, 0.21, 0.19, 0.2], "different, within the margin"),
    ([2.0, 2.1, 1.9, 2.0], "different"), ([3.0, -3.0, 2.0, -2.0], "undecided"),
    ([0.0, 0.0, 0.0], "the same"), ([0.25, 0.25], "different, within the margin"),
    ([5.0, 5.0], "different")])
def test_the_four_outcomes(differences, word):
    found = paired(differences, np.zeros(len(differences)))
    assert outcome(found, 0.5) == word
    assert sentence("float16", "float32", found, 0.5)


@pytest.mark.parametrize(("apart", "seeds_of_each", "word"), [
    (0.0, 2, "undecided"), (0.5, 2, "undecided"), (0.0, 6, "the same")])
@pytest.mark.parametrize("same_seeds", [True, False])
def test_two_seeds_that_end_alike_to_the_image_are_no_proof(same_seeds, apart, seeds_of_each, word):
    """Of 200 images one is worth half a point: two pairs are often as far apart by chance."""
    ends = [98.5, 98.0, *[98.5] * 4][:seeds_of_each] if same_seeds else [98.5] * seeds_of_each
    runs = seeds("float32", [*ends, 98.0][:seeds_of_each])
    low = seeds("float16", np.add([*ends, 98.0][:seeds_of_each], apart))
    for run in low if not same_seeds else []:
        run.arguments["seed"] += 100
        run.epochs[0].top1 = 0.895  # so one image shows what it is worth
    found, = comparisons(*runs, *low)
    assert found.difference.paired is same_seeds
    assert outcome(found.difference, 0.6) == word


def test_nvidias_seeds_differ_at_90_epochs_and_are_equivalent_within_a_quarter_point_at_all():
    lines = NVIDIA.read_text().splitlines()
    rows = {int(row["epochs"]): row for row in
            csv.DictReader(line for line in lines if not line.startswith("#"))}
    assert set(rows) == {50, 90, 250}
    found = {epochs: unpaired(*(Sample(int(row["seeds"]), float(row[f"{kind}_mean"]),
                                       float(row[f"{kind}_sd"])) for kind in ("mixed", "float32")))
             for epochs, row in rows.items()}
    assert round(found[90].p, 3) == 0.003
    assert found[90].interval(0.9) == pytest.approx((-0.244, -0.082), abs=0.001)
    assert found[50].p > 0.5
    assert found[250].p > 0.5
    for difference in found.values():
        assert difference.p_equivalent(0.25) < 0.05
    assert outcome(found[90], 0.25) == "different, within the margin"
    assert outcome(found[50], 0.25) == "the same"
