"""amp.report: what it says of runs, and that names from logs stay text in all of its files."""
import csv
import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import gluon_amp as amp
import matplotlib
import numpy as np
import pytest
import training_logs as logs
from gluon_amp.report import Run, read
from gluon_amp.report.colors import COLORS, DARK, INK, number_type
from gluon_amp.report.compare import compare, groups, sections
from gluon_amp.report.plots import CHARTS, forest, plots
from gluon_amp.report.runs import Epoch, plain
from gluon_amp.report.summary import group_rows, headline, remarks, run_rows, verdict_rows
from gluon_amp.report.write import Section, html_page, markdown, table_csv
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

RECIPE = {"model": "resnet50_v1b", "batch_size": 128, "num_gpus": 8, "num_epochs": 2, "wd": 0.0001}
ODD = ["$x_1$", "_under", "<script>alert(1)</script>", "</svg>", "a--b -->", "a|b", "a\nb\rc",
       "\x00\x07\x1b", "*a* [b](c) `d` &amp;", "模型", "\ud800", "\"'", ""]
MODELS = [plain(re.split(r"[\\/]", name)[-1]) for name in ODD]  # a path's last part
WORDS = st.text() | st.sampled_from(ODD)
NO_DEADLINE = settings(deadline=None, max_examples=60)


def made(dtype="float32", errors=(0.5, 0.25), speed=1000.0, seconds=3600.0, name="", **arguments):
    """A run as it is read; with `name` alone, of which the log has no arguments."""
    epochs = {n: Epoch(top1=e, speed=speed, seconds=seconds) for n, e in enumerate(errors)}
    return Run(name or dtype, {} if name else {**RECIPE, "dtype": dtype, **arguments}, epochs,
               metric="accuracy")


def report(folder, *texts, names="abcdefgh", **kwargs):
    for name, text in zip(names, texts):
        (folder / f"{name}.log").write_text(text)
    page = amp.report([folder / f"{name}.log" for name, _ in zip(names, texts)], folder / "out",
                      **kwargs)
    return page, list(csv.DictReader(io.StringIO((folder / "out" / "summary.csv").read_text())))


class Page(HTMLParser):
    """What a browser sees: its tags, the table's cells, and text by the tag it is in."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells, self.texts = [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("th", "td"):
            self.cells.append("")
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)
        if "table" in self.open and self.cells and self.open[-1] in ("td", "button"):
            self.cells[-1] += data


def comparisons(*runs):
    return compare(groups(runs))


def seeds(dtype, ends, **arguments):
    """Runs of seeds 0, 1, ... that end with these accuracies in percent."""
    return [made(dtype, [0.9, 1 - end / 100], seed=seed, **arguments)
            for seed, end in enumerate(ends)]


# ---- groups

def test_runs_that_differ_in_seed_and_paths_alone_are_one_group():
    runs = [made(dtype, seed=seed, save_dir=f"runs/{seed}", somewhere=f"/tmp/{seed}")
            for dtype in ("float16", "float32") for seed in range(3)]
    found = groups(runs)
    assert [(group.name, len(group.runs)) for group in found] == [("float32", 3), ("float16", 3)]


@pytest.mark.parametrize("arguments", [
    {"wd": 1}, {"loss_scale": 128.0}, {"batch_size": 64}, {"model": "vgg"}, {"dtype": "bfloat16"}])
def test_runs_that_differ_in_anything_else_are_groups_of_their_own(arguments):
    assert len(groups([made("float16", seed=0), made(**{"dtype": "float16", **arguments})])) == 2


def test_without_arguments_runs_of_one_name_and_several_seeds_are_one_group():
    runs = [made(name=f"{dtype}-seed{seed}") for dtype in ("fp32", "fp16") for seed in range(2)]
    assert [(len(group.runs), group.dtype) for group in groups(runs)] == [
        (2, "float32"), (2, "float16")]


def test_groups_of_several_recipes_are_named_by_what_differs():
    runs = [made(dtype, seed=seed, wd=wd) for dtype in ("float32", "float16") for wd in (1, 2)
            for seed in range(2)]
    assert [group.name for group in groups(runs)] == [
        "float32, wd 1", "float32, wd 2", "float16, wd 1", "float16, wd 2"]


def test_runs_of_different_datasets_are_sections_of_their_own():
    runs = [made(dtype, dataset=name) for name in ("digits", "/data/cifar10.rec")
            for dtype in ("float32", "float16")]
    assert [[group.first.dataset for group in section] for section in sections(groups(runs))] == [
        ["digits"] * 2, ["cifar10.rec"] * 2]
    assert all(c.low.first.dataset == c.float32.first.dataset for c in comparisons(*runs))


def test_each_dataset_has_plots_and_tables_of_its_own(tmp_path):
    page, _ = report(tmp_path, *[logs.gluoncv([0.5, 0.4 + i / 100], dtype=dtype, dataset=name)
                                 for i, (name, dtype) in enumerate([
                                     ("digits", "float32"), ("digits", "float16"),
                                     ("faces", "float32"), ("faces", "float16")])])
    names = {path.name for path in page.parent.iterdir()}
    assert {"digits-validation_error.png", "faces-validation_error.png"} <= names
    text = Page(page.read_text())
    assert text.texts["h2"][:2] == ["digits", "faces"]
    assert [row["dataset"] for row in csv.DictReader(
        (page.parent / "verdicts.csv").read_text().splitlines())] == ["digits", "faces"]


# ---- comparisons

def test_where_recipes_differ_the_differences_stand_before_any_claim():
    runs = [*seeds("float32", [75, 76]), *seeds("float16", [77, 78], label_smoothing=True, wd=0.2)]
    verdict, = headline(comparisons(*runs), 0.5)
    assert verdict.outcome == "recipes differ"
    assert verdict.text == (
        "float16 and float32 are not the same recipe, and nothing is claimed. They differ in: "
        "wd (0.0001 in float32, 0.2 in float16), "
        "label_smoothing (not given in float32, True in float16). "
        "float16 ends 2.00 points above float32, which says nothing of the type of numbers.")


@pytest.mark.parametrize("arguments", [
    {"save_dir": "b"}, {"rec_train": "x"}, {"logging_file": "b.log"}, {"data_train": "y"},
    {"somewhere": "/tmp/x"}, {"loss_scale": 128.0}, {"resume_epoch": 3, "resume_params": "x"},
    {"mixup": False, "mixup_alpha": 0.2}, {"label_smoothing": 0.0}, {"no_wd": False}, {"seed": 3},
    {"claim_speed": True}, {"tensorboard": "x"}, {"mlperf": True}])
def test_precision_paths_seeds_resuming_and_what_is_off_are_no_differences(arguments):
    found, = comparisons(made("float32", data_train="y"),
                         made("float16", **{"data_train": "y", **arguments}))
    assert found.differences == {}


@pytest.mark.parametrize("arguments", [
    {"batch_size": 256}, {"num_gpus": 4}, {"mixup": True}, {"lr_decay_epoch": "3,4"},
    {"layers": [1, 2]}, {"label_smoothing": 0.1}, {"num_epochs": 3}])
def test_everything_else_is_a_difference(arguments):
    found, = comparisons(made("float32"), made("float16", **arguments))
    assert set(arguments) <= set(found.differences)
    assert found.speedup is None


def test_other_lengths_are_a_difference_also_where_no_argument_says_so():
    found, = comparisons(made("float32", num_epochs=None), made("float16", [0.5], num_epochs=None))
    assert found.differences == {"epochs": (2, 1)}


ARGUMENTS = st.dictionaries(st.sampled_from(["wd", "mixup", "mixup_alpha", "no_wd"]),
                            st.none() | st.booleans() | st.integers(0, 2) | st.just("None"))


@given(first=ARGUMENTS, second=ARGUMENTS)
@NO_DEADLINE
def test_recipes_differ_alike_whichever_of_them_is_float32(first, second):
    one, = comparisons(made("float32", **first), made("float16", **second))
    other, = comparisons(made("float16", **first), made("float32", **second))
    assert {name: (b, a) for name, (a, b) in other.differences.items()} == one.differences


@given(order=st.permutations(range(6)))
@NO_DEADLINE
def test_the_order_of_logs_does_not_change_what_is_compared(order):
    runs = [made(dtype, wd=wd) for dtype in ("float32", "float16") for wd in (1, 2)]
    runs += [made("float16", model="vgg"), made("float16", name="fp16 alone")]
    found = comparisons(*[runs[i] for i in order])
    assert {(runs.index(c.float32.first), runs.index(c.low.first)) for c in found} == {
        (0, 2), (1, 3)}


def test_without_arguments_in_the_log_nothing_is_claimed():
    found, = comparisons(made(name="a float32"), made(name="a float16", speed=2000))
    assert found.speedup is None
    assert "recipe (not in the log in float32" in headline([found], 0.5)[0].text


def test_policies_by_apexs_names_are_compared():
    found, = comparisons(made(policy="O0"), made(policy="O2"))
    assert (found.float32.dtype, found.low.dtype) == ("float32", "float16")


# ---- verdicts

def test_seeds_are_paired_in_whatever_order_they_come():
    high, low = seeds("float32", [70, 80, 90]), seeds("float16", [70.1, 80.2, 90.3])
    for runs in ([*high, *low], [*low[::-1], *high]):
        found, = comparisons(*runs)
        assert found.difference.paired
        assert found.difference.mean == pytest.approx(0.2)
        assert found.difference.seeds == 3
        assert "(95 % interval -0.05 to 0.45, 3 paired seeds, p = 0.074)" in headline(
            [found], 0.5)[0].text


def test_runs_without_common_seeds_are_compared_as_two_samples():
    high, low = seeds("float32", [70, 80, 90]), seeds("float16", [70, 80])
    for i, run in enumerate(low):
        run.arguments["seed"] = 100 + i
    found, = comparisons(*high, *low)
    assert not found.difference.paired
    assert "2 seeds of each" in headline([found], 0.5)[0].text


def test_one_run_against_another_is_no_evidence_and_the_report_says_so():
    verdict, = headline(comparisons(*seeds("float32", [70]), *seeds("float16", [71])), 0.5)
    assert verdict.outcome == "one run each"
    assert "what chance does is not known" in verdict.text


def test_runs_that_did_not_come_to_their_end_are_in_no_verdict():
    runs = [*seeds("float32", [70, 80, 90]), *seeds("float16", [70, 80, 90])]
    runs[-1].epochs.popitem()
    found = groups(runs)
    comparison, = compare(found)
    assert comparison.difference.seeds == 2
    assert any("1 of 3 runs did not come to their end" in note
               for note in remarks(found, [comparison]))


def test_the_margin_is_the_users():
    found, = comparisons(*seeds("float32", [70, 80, 90]), *seeds("float16", [70.1, 80.2, 90.3]))
    assert [headline([found], margin)[0].outcome for margin in (0.1, 0.5)] == [
        "undecided", "the same"]
    row, = verdict_rows([found], 0.5)
    assert (row["verdict"], row["seeds"], row["difference"]) == ("the same", "3", "+0.20")


def test_where_nothing_can_be_compared_the_report_says_so(tmp_path):
    page, _ = report(tmp_path, logs.gluoncv([0.5], dtype="float16"))
    assert "Nothing is compared" in page.read_text()
    assert (page.parent / "verdicts.csv").read_text() == "\n"


# ---- speed

def test_speed_is_claimed_only_where_the_machine_was_theirs_alone():
    claimed = {"claim_speed": True}
    for high, low, speedup in ((claimed, claimed, 2), ({}, claimed, None), ({}, {}, None)):
        found, = comparisons(made("float32", speed=100, **high), made("float16", speed=200, **low))
        assert found.speedup == speedup
        assert ("2.00 times as fast" in headline([found], 0.5)[0].text) is False  # one run each
    runs = [run for dtype, speed in (("float32", 100), ("float16", 200))
            for run in seeds(dtype, [70, 80], claim_speed=True)]
    for run, speed in zip(runs, (100, 110, 200, 240)):
        for epoch in run.epochs.values():
            epoch.speed = speed
    found, = comparisons(*runs)
    assert "It trains 2.10 times as fast; images per second: float32 100 to 110, float16 200 to " \
           "240." in headline([found], 0.5)[0].text


def test_the_command_can_claim_what_logs_do_not_say(tmp_path):
    texts = [logs.gluoncv([0.5], dtype=dtype, speed=speed, model="m", wd=1)
             for dtype, speed in (("float32", 1000), ("float16", 1500))]
    for claim, speedup in ((False, None), (True, "1.50")):
        page, _ = report(tmp_path, *texts, claim_speed=claim)
        row, = csv.DictReader((page.parent / "verdicts.csv").read_text().splitlines())
        assert row.get("speedup") == speedup


@pytest.mark.parametrize(("high", "low", "speedup"), [
    ((3600, None), (1800, None), 2), ((3600, 100), (1800, 300), 3), ((0, None), (0, None), None),
    ((None, None), (1800, None), None)])
def test_a_speedup_is_of_images_per_second_or_else_of_hours(high, low, speedup):
    found, = comparisons(made("float32", seconds=high[0], speed=high[1], claim_speed=True),
                         made("float16", seconds=low[0], speed=low[1], claim_speed=True))
    assert found.speedup == speedup


# ---- time to accuracy

def test_the_share_of_runs_that_reached_an_accuracy_is_drawn_with_its_interval():
    found = groups(seeds("float32", [70, 80, 90]) + seeds("float16", [70, 71, 72]))
    plot, = (plot for plot in plots(found, 0.75) if plot.name == "share_reached")
    assert "75 %" in plot.title
    assert "float32 (3 runs) 67% (21% to 94%); float16 (3 runs) 0% (0% to 56%)" in plot.caption
    rows = group_rows(found, 0.75)
    assert [row["reach 75 %"] for row in rows] == ["2 of 3", "0 of 3"]
    assert [row["epochs to 75 %"] for row in rows] == ["2", ""]


# ---- tables and remarks

def test_a_row_has_what_a_log_says(tmp_path):
    _, table = report(tmp_path, logs.gluoncv([0.5, 0.3], dtype="float32", save_dir="a", **RECIPE),
                      accuracy=0.7)
    assert table == [
        {"run": "a", "model": "resnet50_v1b", "batch size": "1024", "dtype": "float32",
         "epochs": "2", "top-1 %": "70.00", "top-5 %": "92.50", "best %": "70.00",
         "after epochs": "2", "images/s": "1000", "minutes": "3.33", "minutes to 70 %": "3.33"}]


@pytest.mark.parametrize(("seconds", "column", "shown"), [
    (0.5, "seconds", "1"), (29.0, "seconds", "58"), (30.0, "minutes", "1"),
    (1790.0, "minutes", "59.7"), (1800.0, "hours", "1")])
def test_times_are_in_a_unit_that_fits_the_longest_run(seconds, column, shown):
    found = groups([made("float32", seconds=seconds), made("float16", seconds=seconds / 2)])
    assert run_rows(found, None)[0][column] == shown
    axis, = (plot for plot in plots(found) if plot.name == "validation_error_by_hours")
    assert f"<!-- {column} -->" in axis.svg


def test_top_5_alone_is_shown():
    run = Run("a", {}, {0: Epoch(top5=0.2), 1: Epoch(top5=0.1)})
    assert run_rows(groups([run]), None)[0]["top-5 %"] == "90.00"


@pytest.mark.parametrize("percent", range(1, 100))
def test_an_accuracy_that_was_just_reached_counts_as_reached(percent):
    run = made(errors=[1.0, 1 - percent / 100, float(f"0.{100 - percent:02}")])
    assert run.hours_to(percent / 100) == 2


def test_the_accuracy_of_the_table_is_the_whole_percent_that_all_runs_reach(tmp_path):
    _, table = report(tmp_path, logs.gluoncv([0.5, 0.2]), logs.gluoncv([0.4, 0.199, 0.9]))
    assert [row["minutes to 80 %"] for row in table] == ["3.33", "3.33"]


@pytest.mark.parametrize("errors", [[1.0], [1.0, 0.999], [0.0, 0.0]])
def test_accuracies_of_0_and_1_are_accuracies(errors, tmp_path):
    _, table = report(tmp_path, logs.gluoncv(errors, dtype="float16"))
    assert table[0]["top-1 %"] == f"{100 * (1 - errors[-1]):.2f}"
    reached = [column for column in table[0] if column.startswith("minutes to")]
    assert reached == (["minutes to 100 %"] if errors[0] == 0 else [])


@pytest.mark.parametrize(("arguments", "words"), [
    ({"label_smoothing": True}, "label_smoothing"), ({"mixup": True}, "mixup"),
    ({"label_smoothing": 0.1, "mixup": True}, "label_smoothing and mixup")])
def test_training_on_changed_labels_has_no_accuracy_and_the_report_says_so(
        arguments, words, tmp_path):
    page, _ = report(tmp_path, logs.gluoncv([0.5], model="net", **arguments))
    said = f"a was trained with {words}: the accuracy that its log gives of training is of changed"
    assert said in " ".join(Page(page.read_text()).texts["li"])
    assert said in (page.parent / "report.md").read_text().replace("\\", "")


@pytest.mark.parametrize("value", [False, 0, 0.0, None])
def test_training_on_true_labels_is_not_remarked_on(value):
    assert remarks(groups([made(label_smoothing=value, mixup=value)]), []) == []


def test_what_happened_to_runs_is_told(tmp_path):
    page, _ = report(
        tmp_path, logs.gluoncv([0.5, 0.4], model="a", num_epochs=9),
        logs.gluoncv([0.5], start=4, model="b"),
        logs.gluoncv([0.5, 0.4, 0.3], model="c") + logs.gluoncv([0.3], start=1))
    assert Page(page.read_text()).texts["li"] == [
        "Nothing is compared: that takes float32 runs, and others of lower precision, of one "
        "network and dataset.",
        "a stops after 2 of 9 epochs.", "b begins after 4 epochs; times count from there.",
        "c: resumed after 1 epochs", "a: 1 of 1 runs did not come to their end, and are in no "
        "verdict."]


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"accuracy": 76}, "accuracy is between 0 and 1. Received: 76"),
    ({"accuracy": float("nan")}, "accuracy is between 0 and 1"), ({"logs": []}, "one log or more"),
    ({"margin": 0}, "margin is a number of points between 0 and 100. Received: 0"),
    ({"margin": float("nan")}, "margin is a number of points")])
def test_bad_arguments_are_refused_and_nothing_is_written(kwargs, message, tmp_path):
    (tmp_path / "a.log").write_text(logs.gluoncv([0.5]))
    with pytest.raises(ValueError, match=message):
        amp.report(**{"logs": tmp_path / "a.log", "folder": tmp_path / "out", **kwargs})
    assert not (tmp_path / "out").exists()


# ---- the files

def test_a_report_is_one_page_that_needs_no_network_and_the_same_in_other_files(tmp_path):
    texts = [logs.steps([0.5, 0.4 - seed / 100], dtype=dtype, seed=seed) for seed in range(3)
             for dtype in ("float32", "float16")]
    page, _ = report(tmp_path, *texts)
    names = {*(chart.name for chart in CHARTS), "differences", "share_reached"}
    assert {path.name for path in page.parent.iterdir()} == {
        "report.html", "report.md", "summary.csv", "groups.csv", "verdicts.csv",
        *(f"{name}.{kind}" for name in names for kind in ("png", "svg"))}
    html = page.read_text()
    seen = Page(html)
    assert not re.search(r"(src|href)=\"?[^#\"]|url\([^#]|@import", html)
    ids = [attrs["id"] for _, attrs in seen.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:href=\"|url\()#([^\")]+)", html)) <= set(ids)
    images = [attrs for tag, attrs in seen.tags if tag == "svg"]
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in images)
    assert len(images) == len(names)
    for name in names:
        assert (page.parent / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        ElementTree.parse(page.parent / f"{name}.svg")
        assert f"]({name}.png)" in (page.parent / "report.md").read_text()


def test_what_a_pointer_shows_is_what_the_lines_are():
    found = groups(seeds("float32", [70, 80]) + seeds("float16", [75, 75]))
    hover = plots(found)[0].hover
    assert [line["name"] for line in hover["lines"]] == ["float32", "float16"]
    assert hover["lines"][1]["points"][-1] == [2.0, "25.00% (25.00% to 25.00%)"]
    assert 0 < hover["left"] < hover["right"] < 1
    assert hover["from"] == 0


def test_a_report_of_the_same_runs_is_the_same_bytes_whatever_style_is_set(tmp_path):
    text = logs.gluoncv([0.5, 0.4], dtype="float16")
    folder = report(tmp_path, text)[0].parent
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with matplotlib.rc_context({"figure.facecolor": "black", "axes.facecolor": "black",
                                "savefig.facecolor": "black", "lines.linestyle": ":",
                                "xtick.labelsize": 20, "font.weight": "bold"}):
        report(tmp_path, text)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """The report of runs with odd names and arguments."""
    folder = tmp_path_factory.mktemp("odd")
    for i, name in enumerate(ODD):
        (folder / f"{i}.jsonl").write_text(logs.jsonl(
            [0.5, 0.4], scales=[2, 4], model=name, dtype="float16", **{f"x{name}": name}))
    page = amp.report([folder / f"{i}.jsonl" for i in range(len(ODD))], folder / "out",
                      title="<title> & $title")
    return page.parent


def test_names_of_any_characters_stay_text_in_the_page(odd):
    page = Page((odd / "report.html").read_text())
    start = len(page.cells) - 1 - page.cells[::-1].index("run")
    columns = page.cells[start:page.cells.index("0", start)]
    cells = np.reshape(page.cells[start:], (-1, len(columns)))
    assert sorted(cells[1:, columns.index("model")]) == sorted(MODELS)
    assert page.texts["title"] == page.texts["h1"] == ["<title> & $title"]
    assert len(page.texts["script"]) == 1
    for name in filter(str.strip, ODD):
        assert plain(name) in page.texts["dd"]
        assert plain(f"x{name}") in page.texts["dt"]
    for path in odd.glob("*.svg"):
        ElementTree.parse(path)


def test_names_of_any_characters_stay_text_in_the_csv(odd):
    with open(odd / "summary.csv", newline="", encoding="utf-8") as file:
        assert sorted(row["model"] for row in csv.DictReader(file)) == sorted(
            f"'{name}" if name[:1] in "=+-@" and name else name for name in MODELS)


@pytest.mark.parametrize("name", ["=1+2", "+1+2", "-2+3", "@SUM(A1)", "=cmd|'C calc'!A0"])
def test_no_cell_of_the_csv_files_is_a_formula(name, tmp_path):
    page, table = report(tmp_path, logs.jsonl([0.5], dtype="float16", model=name, dataset=name))
    assert table[0]["model"] == f"'{name}"
    for file in page.parent.glob("*.csv"):
        with open(file, newline="") as opened:
            for row in csv.reader(opened):
                assert not any(re.match(r"[=+@]|-\D", cell) for cell in row)


def test_numbers_in_the_csv_files_stay_numbers():
    row = {"difference": "-0.17", "p": "1e-05", "name": "-x"}
    assert table_csv([row]) == "difference,p,name\n-0.17,1e-05,'-x\n"


@given(table=st.lists(st.fixed_dictionaries({"run": WORDS, "model": WORDS}), min_size=1,
                      max_size=3), notes=st.lists(WORDS, max_size=2), title=WORDS)
@NO_DEADLINE
def test_any_text_stays_text(table, notes, title):
    table = [{column: plain(text) for column, text in row.items()} for row in table]
    notes, title = [plain(note) for note in notes], plain(title)
    texts = [text for row in table for text in row.values()]
    runs = [Run(row["run"], {row["model"]: row["run"]}, {0: Epoch()}) for row in table]
    section = Section(title, [], [], table, [])
    shown = [text if len(text) <= 60 else f"{text[:59]}…" for text in texts]
    assert Page(html_page(title, [section], [], notes, groups(runs))).cells[2:] == shown
    with io.StringIO(table_csv(table), newline="") as file:
        assert [{name: cell.lstrip("'") for name, cell in row.items()}
                for row in csv.DictReader(file)] == [
            {name: cell.lstrip("'") for name, cell in row.items()} for row in table]
    text = markdown(title, [Section(title, [], [{"n": "1"}], table, [])], [], notes)
    markdown_it = pytest.importorskip("markdown_it")
    rendered = Page(markdown_it.MarkdownIt("commonmark").enable("table").render(text))
    assert "".join(rendered.texts.get("h1", "")).strip() == title.strip()
    cells = [tag for tag, _ in rendered.tags]
    assert cells.count("td") == 1 + len(texts)
    assert set(cells) <= {"h1", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "p"}
    assert [cell.strip() for cell in rendered.cells[4:]] == texts


# ---- the plots

def colors_of(png):
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    assert all((edge == 255).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))
    return pixels.reshape(-1, 3).astype(int)


def seen(pixels, color):
    wanted = np.array([int(color[i:i + 2], 16) for i in (1, 3, 5)])
    return (abs(pixels - wanted).max(1) < 40).sum() > 50


@pytest.mark.parametrize(("count", "epochs"), [(1, 1), (3, 5), (8, 2)])
@pytest.mark.parametrize("name", ["m{}", "W" * 99 + "{}"])
def test_all_groups_are_named_and_nothing_is_cut_off(count, epochs, name):
    runs = [made(f"float{32 - 16 * (i % 2)}", np.linspace(0.9, 0.1 + i / 100, epochs),
                 model=name.format(i)) for i in range(count)]
    for plot in plots(groups(runs)):
        colors_of(plot.png)
        labels = re.findall(r"<!-- (.*?) -->", plot.svg)
        ends = [label.split(",")[0].split("…")[-1].lstrip("Wm") for label in labels]
        if count > 2:  # else dtypes are enough
            assert {str(i) for i in range(count)} <= {end[:1] for end in ends}
            assert all(name.format(i) in plot.caption for i in range(count))


def test_more_groups_than_a_plot_can_show_are_medians_with_bands():
    runs = [made(dtype, [0.5, 0.3 + i / 1000], wd=i + 1) for i in range(20)
            for dtype in ("float32", "float16")]
    plot = plots(groups(runs))[0]
    assert plot.caption == (
        "Validation error. Medians; bands: from 5 to 95 % of the runs. At the end: "
        "float32: 20 recipes (20 runs) 30.95% (30.09% to 31.80%); "
        "float16: 20 recipes (20 runs) 30.95% (30.09% to 31.80%).")


def test_runs_that_differ_in_their_seed_are_one_line_with_a_band():
    found = groups(seeds("float32", [70, 71, 72]) + seeds("float16", [70, 71, 72]))
    plot = plots(found)[0]
    assert plot.caption == (
        "Validation error. Means; bands: 95 % intervals of the mean. At the end: "
        "float32 (3 runs) 29.00% (26.52% to 31.48%); float16 (3 runs) 29.00% (26.52% to 31.48%).")


def test_color_is_the_type_of_number_in_every_plot():
    for dtype, mine in (("float32", "float32"), ("float16", "float16"),
                        ("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")):
        assert number_type(dtype) == mine
        found = groups([made(dtype, policy=dtype, speed=n, seed=n) for n in (100, 200)])
        for plot in plots(found, charts=CHARTS[:1]):
            pixels = colors_of(plot.png)
            assert seen(pixels, COLORS[mine])
            others = {name for name in COLORS if name not in (mine, "float32")}  # ink is text's
            assert not any(seen(pixels, COLORS[name]) for name in others)


def test_the_differences_are_drawn_with_the_margin():
    found = comparisons(*seeds("float32", [70, 80, 90]), *seeds("float16", [70.1, 80.2, 90.3]))
    plot = forest(found, 0.5)
    assert "float16 +0.20 points (-0.05 to +0.45)" in plot.caption
    assert seen(colors_of(plot.png), COLORS["float16"])
    assert forest(comparisons(made("float32"), made("float16")), 0.5) is None


def test_the_colors_stand_out_from_the_paper_and_from_each_other_also_for_the_color_blind():
    def light(color):
        part = np.array([int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)])
        return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)

    def contrast(a, b):
        a, b = sorted(0.05 + light(c) @ [0.2126, 0.7152, 0.0722] for c in (a, b))
        return b / a

    # what a viewer without middle-wave cones sees (Viénot, 1999), as a cube root of light
    blind = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    assert DARK.keys() == COLORS.keys()
    for palette, paper in ((COLORS, "#ffffff"), (DARK, "#16181d")):
        colors = list(palette.values())
        assert min(contrast(color, paper) for color in colors) > 2
        assert min(contrast(color, paper) for color in colors[:4]) > 3
        for i, a in enumerate(colors):
            for b in colors[:i]:
                assert np.linalg.norm(np.cbrt(blind @ light(a)) - np.cbrt(blind @ light(b))) > 0.1
    assert COLORS["float32"] == INK
    grey = [light(COLORS[name]) @ [0.2126, 0.7152, 0.0722] for name in ("float32", "float16")]
    assert grey[1] > 5 * grey[0]  # in a grey print


def test_time_goes_forward_in_every_chart_and_the_first_epoch_ends_at_1(tmp_path):
    tail = "\tloss-scale={}\tskipped=1"
    killed = logs.gluoncv([0.4], start=2, tail=tail.format(512)).splitlines(True)[:3]
    (tmp_path / "a.log").write_text(
        logs.gluoncv([0.6, 0.5], tail=tail.format(1024)) + "".join(killed) + "Traceback:\n")
    (tmp_path / "b.jsonl").write_text(logs.steps([0.5, 0.4]))
    for run in read([tmp_path / "a.log", tmp_path / "b.jsonl"]):
        for chart in CHARTS:
            times = [point.x for point in chart.points(run)]
            assert times == sorted(times)
        assert [point.x for point in CHARTS[0].points(run)] == [1, 2]
    assert {chart.name for chart in CHARTS if chart.points(run)} == {c.name for c in CHARTS}


def test_there_are_charts_of_what_logs_have_and_none_of_what_never_changes(tmp_path):
    for text, names in ((logs.module([0.5, 0.4]),
                         {"validation_error", "validation_error_by_hours"}),
                        ("epoch,top1_err\n0,0.5\n", {"validation_error"}),
                        ("[Epoch 0] training: accuracy=0.500000\n", set()),
                        (logs.jsonl([0.5, 0.4], scales=[1, 1]),
                         {"validation_error", "validation_error_by_hours"})):
        (tmp_path / "a").write_text(text)
        assert {plot.name for plot in plots(groups(read([tmp_path / "a"])))} == names
        amp.report(tmp_path / "a", tmp_path / "out")


# ---- size

def test_hundreds_of_runs_of_odd_names_are_a_small_page(tmp_path):
    texts = [logs.jsonl([0.5, 0.4], dtype=("float32", "float16")[i % 2], model="<b>" * 99 + str(i),
                        note="x" * 5000, wd=i) for i in range(300)]
    page, table = report(tmp_path, *texts, names=[f"run{i}" for i in range(300)])
    assert len(table) == 300
    assert page.stat().st_size < 700_000
