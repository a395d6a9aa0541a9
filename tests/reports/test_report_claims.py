"""Claims of amp.report about runs, made only if they differ in nothing but precision."""
import csv
import json
from pathlib import Path

import numpy as np
import pytest
import training_logs as logs
from gluon_amp.reports import read_logs
from gluon_amp.reports.compare import compare, groups, sections
from gluon_amp.reports.plots import plots
from gluon_amp.reports.summary import group_rows, headline, remarks, run_rows, verdict_rows
from gluon_amp.reports.verdict import Difference, Sample, outcome, paired, sentence, unpaired
from hypothesis import given
from hypothesis import strategies as st
from report_runs import NO_DEADLINE, Page, comparisons, made, report, seeds
from scipy import stats

# ---- groups

def test_runs_that_differ_only_in_seed_and_paths_are_grouped():
    runs = [made(dtype, seed=seed, save_dir=f"runs/{seed}", somewhere=f"/tmp/{seed}")
            for dtype in ("float16", "float32") for seed in range(3)]
    found = groups(runs)
    assert [(group.name, len(group.runs)) for group in found] == [("float32", 3), ("float16", 3)]


@pytest.mark.parametrize("arguments", [
    {"wd": 1}, {"loss_scale": 128.0}, {"batch_size": 64}, {"model": "vgg"}, {"dtype": "bfloat16"}])
def test_runs_that_differ_otherwise_are_separate_groups(arguments):
    assert len(groups([made("float16", seed=0), made(**{"dtype": "float16", **arguments})])) == 2


def test_runs_without_arguments_are_grouped_by_name():
    runs = [made(name=f"{dtype}-seed{seed}") for dtype in ("fp32", "fp16") for seed in range(2)]
    assert [(len(group.runs), group.dtype) for group in groups(runs)] == [
        (2, "float32"), (2, "float16")]


def test_groups_are_named_by_differing_arguments():
    runs = [made(dtype, seed=seed, wd=wd) for dtype in ("float32", "float16") for wd in (1, 2)
            for seed in range(2)]
    assert [group.name for group in groups(runs)] == [
        "float32, wd 1", "float32, wd 2", "float16, wd 1", "float16, wd 2"]
    runs += [made(dtype, wd=wd, model="net") for dtype in ("float32", "float16") for wd in (1, 2)]
    assert "net, float16, wd 2" in [group.name for group in groups(runs)]


def test_datasets_are_separate_sections():
    runs = [made(dtype, dataset=name) for name in ("digits", "/data/cifar10.rec")
            for dtype in ("float32", "float16")]
    assert [[group.first.dataset for group in section] for section in sections(groups(runs))] == [
        ["digits"] * 2, ["data/cifar10.rec"] * 2]
    assert all(c.low.first.dataset == c.float32.first.dataset for c in comparisons(*runs))


def test_datasets_with_same_file_name_are_named_with_folder(tmp_path):
    def datasets(*paths):
        for i, path in enumerate(paths):
            (tmp_path / f"{i}.log").write_text(logs.jsonl([0.5], dtype="float16", data_train=path))
        return [run.dataset for run in
                read_logs([tmp_path / f"{i}.log" for i in range(len(paths))])]

    assert datasets("/data/cifar10/train.rec", "../cifar100/train.rec", "/data/digits/") == [
        "cifar10/train.rec", "cifar100/train.rec", "digits"]
    assert datasets("/scratch/1/imagenet/train.rec", "/scratch/2/imagenet/train.rec") == [
        "imagenet/train.rec"] * 2  # of one dataset, whose path depends on the machine


def test_each_dataset_has_its_own_plots_and_tables(tmp_path):
    page, _ = report(tmp_path, *[logs.gluoncv([0.5, 0.4 + i / 100], dtype=dtype, dataset=name)
                                 for i, (name, dtype) in enumerate([
                                     ("digits", "float32"), ("digits", "float16"),
                                     ("faces", "float32"), ("faces", "float16")])])
    names = {path.name for path in page.parent.iterdir()}
    assert {"1-digits-validation_error.png", "2-faces-validation_error.png"} <= names
    text = Page(page.read_text())
    assert text.texts["h2"][:2] == ["digits", "faces"]
    assert [row["dataset"] for row in csv.DictReader(
        (page.parent / "verdicts.csv").read_text().splitlines())] == ["digits", "faces"]


# ---- comparisons

def test_two_measures_of_one_dataset_are_separate_sections(tmp_path):
    detection = logs.header(dataset="voc") + "[Epoch 0] Validation: \nmAP=0.5\n"
    page, _ = report(tmp_path, logs.gluoncv([0.5], dataset="voc"), detection)
    text = page.with_name("report.md").read_text()
    assert {line for line in text.splitlines() if line[:3] == "## "} == {
        "## voc, top-1", "## voc, mAP"}


def test_recipe_differences_precede_any_claim():
    runs = [*seeds("float32", [75, 76]), *seeds("float16", [77, 78], label_smoothing=True, wd=0.2)]
    verdict, = headline(comparisons(*runs), 0.5)
    assert verdict.outcome == "recipes differ"
    for fact in ("no verdict", "wd (0.0001 in float32, 0.2 in float16)",
                 "label_smoothing (not given in float32, True in float16)", "2.00 points above"):
        assert fact in verdict.text


@pytest.mark.parametrize("arguments", [
    {"save_dir": "b"}, {"rec_train": "x"}, {"logging_file": "b.log"}, {"data_train": "y"},
    {"somewhere": "/tmp/x"}, {"loss_scale": 128.0}, {"resume_epoch": 3, "resume_params": "x"},
    {"mixup": False, "mixup_alpha": 0.2}, {"label_smoothing": 0.0}, {"no_wd": False}, {"seed": 3},
    {"claim_speed": True}, {"tensorboard": "x"}, {"mlperf": True}, {"xray": "x", "xray_steps": 2},
    {"log_seconds": 9.0}, {"num_workers": 4}, {"data_nthreads": 2}, {"logdir": "b"},
    {"teacher_params": "a.params"}, {"weights": "models\\a"}])
def test_precision_paths_seeds_and_disabled_options_are_no_differences(arguments):
    found, = comparisons(made("float32", data_train="y"),
                         made("float16", **{"data_train": "y", **arguments}))
    assert found.differences == {}


@pytest.mark.parametrize("arguments", [
    {"batch_size": 256}, {"num_gpus": 4}, {"mixup": True}, {"lr_decay_epoch": "3,4"},
    {"layers": [1, 2]}, {"label_smoothing": 0.1}, {"num_epochs": 3},
    {"optimizer_params": {"learning_rate": 0.1}}, {"hyperparams": "momentum=0.9"},
    {"lr_profile": "linear"}, {"rec_loss": 0.5}, {"ratio": "1/2"}])
def test_other_arguments_are_differences(arguments):
    found, = comparisons(made("float32"), made("float16", **arguments))
    assert set(arguments) <= set(found.differences)
    assert found.speedup is None


def test_only_a_flag_that_is_off_disables_its_options():
    found, = comparisons(made("float32", lr=None, lr_max=0.1), made("float16", lr=None, lr_max=0.5))
    assert found.differences == {"lr_max": (0.1, 0.5)}


def test_different_number_of_epochs_is_a_difference_without_arguments():
    found, = comparisons(made("float32", num_epochs=None), made("float16", [0.5], num_epochs=None))
    assert found.differences == {"epochs": (2, 1)}


ARGUMENTS = st.dictionaries(st.sampled_from(["wd", "mixup", "mixup_alpha", "no_wd"]),
                            st.none() | st.booleans() | st.integers(0, 2) | st.just("None"))


@given(first=ARGUMENTS, second=ARGUMENTS)
@NO_DEADLINE
def test_recipe_differences_are_symmetric(first, second):
    one, = comparisons(made("float32", **first), made("float16", **second))
    other, = comparisons(made("float16", **first), made("float32", **second))
    assert {name: (b, a) for name, (a, b) in other.differences.items()} == one.differences


@given(order=st.permutations(range(6)))
@NO_DEADLINE
def test_order_of_logs_does_not_change_comparisons(order):
    runs = [made(dtype, wd=wd) for dtype in ("float32", "float16") for wd in (1, 2)]
    runs += [made("float16", model="vgg"), made("float16", name="fp16 alone")]
    found = comparisons(*[runs[i] for i in order])
    assert {(runs.index(c.float32.first), runs.index(c.low.first)) for c in found} == {
        (0, 2), (1, 3)}


def test_logs_without_arguments_give_no_claim():
    found, = comparisons(made(name="a float32"), made(name="a float16", speed=2000))
    assert found.speedup is None
    verdict, = headline([found], 0.5)
    assert verdict.outcome == "recipe not known"
    assert "have the same recipe: no verdict" in verdict.text


def test_policies_with_apex_names_are_compared():
    found, = comparisons(made(policy="O0"), made(policy="O2"))
    assert (found.float32.dtype, found.low.dtype) == ("float32", "float16")


# ---- verdicts

def test_seeds_are_paired_in_any_order():
    high, low = seeds("float32", [70, 80, 90]), seeds("float16", [70.1, 80.2, 90.3])
    for runs in ([*high, *low], [*low[::-1], *high]):
        found, = comparisons(*runs)
        assert found.difference.paired
        assert found.difference.mean == pytest.approx(0.2)
        assert found.difference.seeds == 3
        assert "(95 % interval -0.05 to 0.45, 3 paired seeds, p = 0.074)" in headline(
            [found], 0.5)[0].text


def test_runs_without_common_seeds_are_compared_unpaired():
    high, low = seeds("float32", [70, 80, 90]), seeds("float16", [70, 80])
    for i, run in enumerate(low):
        run.arguments["seed"] = 100 + i
    found, = comparisons(*high, *low)
    assert not found.difference.paired
    assert ", 2 and 3 seeds, p" in headline([found], 0.5)[0].text
    assert verdict_rows([found], 0.5)[0]["seeds"] == "2 and 3"


def test_unpaired_comparison_is_used_if_most_runs_lack_a_partner():
    high = seeds("float32", [70, 80, 90, 71, 81, 91])
    for first, is_paired, said in ((4, False, 0), (3, True, 1), (0, True, 0)):
        low = seeds("float16", [70, 80, 90, 71, 81, 91])
        for i, run in enumerate(low):
            run.arguments["seed"] = first + i
        comparison, = comparisons(*high, *low)
        assert comparison.difference.paired is is_paired
        assert comparison.difference.seeds == (6 - first if is_paired else 6)
        notes = [note for note in remarks([], [comparison]) if "6 runs have no partner" in note]
        assert len(notes) == said


def test_run_in_two_files_counts_once(tmp_path):
    ends = ((0.3, 0.31, 0.2900000499), (0.301, 0.3120005, 0.29512345))
    for dtype, errors in zip(("float32", "float16"), ends):
        for seed, error in enumerate(errors):
            arguments = {"model": "net", "dtype": dtype, "seed": seed}
            (tmp_path / f"{dtype}{seed}.log").write_text(logs.gluoncv([0.9, error], **arguments))
            (tmp_path / f"{dtype}{seed}.jsonl").write_text(logs.jsonl([0.9, error], **arguments))
    found = groups(read_logs(sorted(tmp_path.iterdir())))
    comparison, = compare(found)
    assert [len(group.runs) for group in found] == [3, 3]
    assert (comparison.difference.paired, comparison.difference.seeds) == (True, 3)
    assert any("it counts once" in note for note in remarks(found, [comparison]))


def test_run_without_final_validation_is_in_no_verdict():
    runs = [*seeds("float32", [70, 80, 90]), *seeds("float16", [70, 80, 90])]
    for without, count in ((runs[-1:], 2), (runs, 3)):  # then all are validated every second epoch
        for run in without:
            run.epochs[1].top1 = None
        comparison, = comparisons(*runs)
        assert comparison.difference.seeds == count


def test_differing_comparisons_come_first_with_expected_chance_count():
    runs = []
    for wd in range(1, 7):
        runs += seeds("float32", [70, 70.1, 70.2], wd=wd)
        runs += seeds("float16", [60, 60.2, 60.1] if wd == 6 else [70.1, 70, 70.2], wd=wd)
    first, second, *others = headline(comparisons(*runs), 0.5)
    for fact in ("5 the same, 1 different", "0.3 of 6", "The first 5:"):
        assert fact in first.text
    assert (second.outcome, len(others)) == ("different", 4)


def test_single_runs_give_no_verdict():
    verdict, = headline(comparisons(*seeds("float32", [70]), *seeds("float16", [71])), 0.5)
    assert verdict.outcome == "too few runs"
    assert "There is one finished run of float16 and of float32" in verdict.text
    verdict, = headline(comparisons(*seeds("float32", [70]), *seeds("float16", [71, 72])), 0.5)
    assert "one finished run of float32: the variance between runs is unknown" in verdict.text


def test_unfinished_runs_are_in_no_verdict():
    runs = [*seeds("float32", [70, 80, 90]), *seeds("float16", [70, 80, 90])]
    runs[-1].epochs.popitem()
    found = groups(runs)
    comparison, = compare(found)
    assert comparison.difference.seeds == 2
    assert any("1 of 3 runs did not finish" in note for note in remarks(found, [comparison]))


def test_margin_argument_changes_verdict():
    found, = comparisons(*seeds("float32", [70, 80, 90]), *seeds("float16", [70.1, 80.2, 90.3]))
    assert [headline([found], margin)[0].outcome for margin in (0.1, 0.5)] == [
        "undecided", "the same"]
    row, = verdict_rows([found], 0.5)
    assert (row["verdict"], row["seeds"], row["difference"]) == ("the same", "3", "+0.20")


def test_report_without_comparisons_has_a_note(tmp_path):
    page, _ = report(tmp_path, logs.gluoncv([0.5], dtype="float16"))
    assert "No comparison" in page.read_text()
    assert (page.parent / "verdicts.csv").read_text() == "\n"


# ---- speed

@pytest.mark.parametrize(("high", "low", "speedup"), [
    ({"claim_speed": True}, {"claim_speed": True}, 2), ({}, {"claim_speed": True}, None),
    ({}, {}, None)])
def test_speedup_requires_claim_speed(high, low, speedup):
    found, = comparisons(made("float32", speed=100, **high), made("float16", speed=200, **low))
    assert found.speedup == speedup
    assert "2.00 times as fast" not in headline([found], 0.5)[0].text  # single runs


def test_speedup_has_the_speeds_of_all_runs():
    runs = [run for dtype in ("float32", "float16")
            for run in seeds(dtype, [70, 80], claim_speed=True)]
    for run, speed in zip(runs, (100, 110, 200, 240)):
        for epoch in run.epochs.values():
            epoch.speed = speed
    assert "It trains 2.10 times as fast; samples per second: float32 100 to 110, float16 200 to " \
           "240." in headline(comparisons(*runs), 0.5)[0].text


def test_claim_speed_argument_of_report(tmp_path):
    texts = [logs.gluoncv([0.5], dtype=dtype, speed=speed, model="m", wd=1)
             for dtype, speed in (("float32", 1000), ("float16", 1500))]
    for claim, speedup in ((False, None), (True, "1.50")):
        page, _ = report(tmp_path, *texts, claim_speed=claim)
        row, = csv.DictReader((page.parent / "verdicts.csv").read_text().splitlines())
        assert row.get("speedup") == speedup


@pytest.mark.parametrize(("high", "low", "speedup"), [
    ((3600, None), (1800, None), 2), ((3600, 100), (1800, 300), 3), ((0, None), (0, None), None),
    ((None, None), (1800, None), None)])
def test_speedup_uses_images_per_second_else_hours(high, low, speedup):
    found, = comparisons(made("float32", seconds=high[0], speed=high[1], claim_speed=True),
                         made("float16", seconds=low[0], speed=low[1], claim_speed=True))
    assert found.speedup == speedup


# ---- time to accuracy

def test_killed_runs_do_not_count_among_those_that_reach_an_accuracy():
    killed = made("float16", [0.9], seed=3, num_epochs=2)  # it might have reached it
    found = groups([*seeds("float32", [70, 80, 90]), *seeds("float16", [70, 71, 72]), killed])
    rows = group_rows(found, 0.75)
    assert [row["reach 75 %"] for row in rows] == ["2 of 3", "0 of 3"]
    assert [row["epochs to 75 %"] for row in rows] == ["2", ""]


def test_diverged_run_without_paired_seed_is_not_left_out():
    ends = [90.0, 91.0, 90.5, 89.5]
    for more, is_paired, verdict in (90.7, True, "the same"), (10.0, False, "undecided"):
        found = comparisons(*seeds("float32", ends), *seeds("float16", [*ends, more]))
        assert found[0].difference.paired == is_paired
        assert verdict_rows(found, 0.5)[0]["verdict"] == verdict


def test_notes_name_dataset_if_there_are_several():
    runs = [made(dtype, dataset=name, seed=seed) for name in ("digits", "faces")
            for dtype in ("float32", "float16") for seed in range(3)]
    del runs[-1].epochs[1]
    found = groups(runs)
    assert any("faces: float16: 1 of 3 runs" in note for note in remarks(found, compare(found)))


def test_nonfinite_losses_are_noted(tmp_path):
    ends = [{"epoch": n, "err_top1": 0.5, "loss": loss} for n, loss in enumerate(
        [2.0, float("nan"), float("inf")])]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [
        {"version": 2, "arguments": {"epochs": 3}}, *ends]))
    run, = read_logs([tmp_path / "log.jsonl"])
    note, = remarks(groups([run]), [])
    assert note.startswith(run.name)
    assert "2 of 3 epochs, first in epoch 2" in note


# ---- statistical tests and intervals against scipy, simulation, and NVIDIA's results

RESULTS = Path(__file__).parents[2] / "results"
NVIDIA = RESULTS / "imagenet" / "nvidia_seeds.csv"
FLOAT32 = [53.85, 54.55, 56.85, 54.75, 54.70, 53.25, 56.15, 56.00, 54.70, 53.05]
FLOAT16 = [51.95, 53.55, 55.75, 54.00, 53.95, 55.50, 54.65, 58.20, 55.75, 52.85]


def test_paired_test_matches_scipy():
    found, theirs = paired(FLOAT16, FLOAT32), stats.ttest_rel(FLOAT16, FLOAT32)
    assert found.p == pytest.approx(theirs.pvalue)
    assert found.interval() == pytest.approx(theirs.confidence_interval(0.95))
    for margin in (0.5, 1.1, 3):
        lower = stats.ttest_rel(np.add(FLOAT16, margin), FLOAT32, alternative="greater").pvalue
        upper = stats.ttest_rel(np.subtract(FLOAT16, margin), FLOAT32, alternative="less").pvalue
        assert found.p_equivalent(margin) == pytest.approx(max(lower, upper))


def test_unpaired_test_matches_scipy():
    found = unpaired(Sample.from_values(FLOAT16), Sample.from_values(FLOAT32[:6]))

    def theirs(shift=0, alternative="two-sided"):
        return stats.ttest_ind(np.add(FLOAT16, shift), FLOAT32[:6], equal_var=False,
                               alternative=alternative).pvalue

    assert found.p == pytest.approx(theirs())
    both = theirs(0.5, "greater"), theirs(-0.5, "less")
    assert found.p_equivalent(0.5) == pytest.approx(max(both))


def test_sentence_for_ten_seeds_of_cifar10():
    text = sentence("float16", "float32", paired(FLOAT16, FLOAT32), 0.5)
    for fact in ("0.17 points below", "interval -1.24 to 0.90, 10 paired seeds, p = 0.73",
                 "same within 1.04", "not shown within 0.5", "p = 0.25", "78 paired seeds"):
        assert fact in text


def test_smallest_margin_is_where_equivalence_begins():
    found = paired(FLOAT16, FLOAT32)
    assert found.p_equivalent(found.smallest_margin) == pytest.approx(0.05)


@pytest.mark.parametrize("last", np.linspace(50, 54, 9))
def test_stated_margin_is_shown_by_seeds(last):
    found = paired([*FLOAT16[:-1], last], FLOAT32)
    assert found.p_equivalent(np.ceil(100 * found.smallest_margin) / 100) <= 0.05


@pytest.mark.parametrize("pairs", [True, False])
def test_proposed_number_of_seeds_has_power_of_80_percent(pairs):
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
def test_four_outcomes(differences, word):
    found = paired(differences, np.zeros(len(differences)))
    assert outcome(found, 0.5) == word
    assert sentence("float16", "float32", found, 0.5)


@pytest.mark.parametrize(("apart", "seeds_of_each", "word"), [
    (0.0, 2, "undecided"), (0.5, 2, "undecided"), (0.0, 6, "the same")])
@pytest.mark.parametrize("same_seeds", [True, False])
def test_two_equal_seeds_do_not_prove_equivalence(same_seeds, apart, seeds_of_each, word):
    """One of 200 images is worth half a point, and two pairs often agree by chance."""
    ends = [98.5, 98.0, *[98.5] * 4][:seeds_of_each] if same_seeds else [98.5] * seeds_of_each
    runs = seeds("float32", [*ends, 98.0][:seeds_of_each])
    low = seeds("float16", np.add([*ends, 98.0][:seeds_of_each], apart))
    for run in low if not same_seeds else []:
        run.arguments["seed"] += 100
        run.epochs[0].top1 = 0.895  # which shows the worth of one image
    found, = comparisons(*runs, *low)
    assert found.difference.paired is same_seeds
    assert outcome(found.difference, 0.6) == word


def test_nvidia_seeds_differ_at_90_epochs_and_are_equivalent_within_margin():
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


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_study_on_different_machines_has_no_speed_columns(path):
    found = groups(read_logs([path]))
    columns = {column for row in group_rows(found, 0.5) for column in row}
    assert not columns & {"images/s", "samples/s", "slowest", "fastest", "seconds", "minutes",
                          "hours"}
    assert len(found) > 1


# ---- other metrics than accuracies

def language_log(perplexities, metric="perplexity", **arguments):
    """A log of MXNet's Module for a language model."""
    lines = [logs.header("start with arguments ", **arguments)]
    for epoch, value in enumerate(perplexities):
        lines += [f"Epoch[{epoch}] Batch [0-20]\tSpeed: 1000.00 samples/sec\t{metric}=900.0\n",
                  f"Epoch[{epoch}] Train-{metric}={2 * value:f}\n",
                  f"Epoch[{epoch}] Time cost=10.000\n",
                  f"Epoch[{epoch}] Validation-{metric}={value:f}\n",
                  f"Epoch[{epoch}] Validation-cross-entropy={np.log(abs(value) + 1):f}\n"]
    return "".join(lines)


def language_runs(folder, values, **options):
    for dtype, of in values.items():
        for seed, ends in enumerate(of):
            (folder / f"{dtype}-{seed}.log").write_text(language_log(
                ends, dtype=dtype, seed=seed, network="lstm", num_epochs=len(ends), **options))
    return sorted(folder.glob("*.log"))


def test_finished_perplexity_runs_are_compared(tmp_path):
    paths = language_runs(tmp_path, {"float32": [[300, 100], [310, 102], [290, 101]],
                                     "float16": [[300, 100.1], [310, 101.9], [290, 101.1]]})
    found = groups(read_logs(paths))
    compared = compare(found)
    assert not any("end" in said for said in remarks(found, compared))
    verdict, = headline(compared, 0.5)
    assert verdict.outcome == "the same"
    assert verdict.text.startswith("The perplexity of float16 ends 0.03 % above float32 (95 % ")
    assert "the same within 0.5 % (two one-sided tests" in verdict.text
    assert group_rows(found, None)[0]["perplexity (lower is better)"] == "101"
    captions = {plot.name: plot.caption for plot in plots(found)}
    assert captions["validation_perplexity"].startswith("Validation: perplexity")
    assert "101" in captions["validation_perplexity"]
    assert "validation_perplexity_by_hours" in captions
    page, _ = report(tmp_path, *(path.read_text() for path in paths))
    assert "images" not in page.read_text()
    assert "perplexity (lower is better)" in page.read_text()


@pytest.mark.parametrize(("metric", "heading", "best"), [
    ("perplexity", "perplexity (lower is better)", "90"), ("rmse", "rmse (lower is better)", "90"),
    ("f1", "f1 (higher is better)", "120"), ("my-number", "my-number (direction not known)", None)])
def test_any_metric_is_reported_with_its_direction(metric, heading, best, tmp_path):
    path = tmp_path / "a.log"
    path.write_text(language_log([120, 90, 100], metric, dtype="float32"))
    row, = run_rows(groups(read_logs([path])), None)
    assert row[heading] == "100"
    assert row.get(f"best {metric}") == best


def test_metrics_beside_accuracy_are_reported(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(logs.module([0.5, 0.25], dtype="float32") + "Epoch[1] Validation-mcc=0.5\n")
    row, = run_rows(groups(read_logs([path])), None)
    assert (row["top-1 %"], row["mcc (higher is better)"]) == ("75.00", "0.5")


@pytest.mark.parametrize("text", [
    "epoch,dtype,fp32_val_perplexity,fp16_val_perplexity,note\n",
    '{"arguments": {"dtype": "float32"}}\n'])
def test_metrics_of_csv_and_json_lines_are_reported(text, tmp_path):
    path = tmp_path / ("a.csv" if "," in text.split(":")[0] else "a.jsonl")
    rows = "0,,200.5,201,good\n1,,100,100.5,bad\n" if path.suffix == ".csv" else "".join(
        json.dumps({"epoch": n, "loss": 5.0, "validation_perplexity": 200.0 - 100 * n,
                    "seconds": 1.0}) + "\n" for n in range(2))
    path.write_text(text + rows)
    found = run_rows(groups(read_logs([path])), None)
    assert [row["perplexity (lower is better)"] for row in found] in (["100"], ["100", "100.5"])


@pytest.mark.parametrize(("name", "text", "note"), [
    ("a.jsonl", '{"arguments": {"dtype": "float32"}}\n' + "".join(
        f'{{"epoch": {n}, "loss": 5.0, "validation_loss": {3.0 - n}}}\n' for n in range(2)), None),
    ("a.log", "Epoch[0] Train-perplexity=2.0\nEpoch[0] Time cost=1.000\n",
     "a: 1 of 1 runs was never validated")])
def test_run_without_an_accuracy_is_not_reported_as_stopped(name, text, note, tmp_path):
    (tmp_path / name).write_text(text)
    found = groups(read_logs([tmp_path / name]))
    notes = remarks(found, [])
    assert len(notes) == (note is not None)
    assert all(note in each for each in notes)
    loss = group_rows(found, None)[0].get("validation loss (lower is better)")
    assert loss == ("2" if note is None else None)
