"""amp.report: tables, remarks and files, in which names from logs are escaped."""
import csv
import io
import re
from xml.etree import ElementTree

import gluon_amp as amp
import matplotlib
import numpy as np
import pytest
import training_logs as logs
from gluon_amp.reports import Run
from gluon_amp.reports.compare import groups
from gluon_amp.reports.plots import CHARTS, plots
from gluon_amp.reports.runs import Epoch, plain
from gluon_amp.reports.summary import run_rows
from gluon_amp.reports.write import Section, html_page, markdown, table_csv
from hypothesis import example, given
from hypothesis import strategies as st
from report_runs import NO_DEADLINE, RECIPE, Page, made, report

ODD = ["$x_1$", "_under", "<script>alert(1)</script>", "<!--<script>", "</svg>", "a--b -->", "a|b",
       "a\nb\rc", "\x00\x07\x1b", "*a* [b](c) `d` &amp;", "模型", "\ud800", "\"'", ""]
MODELS = [plain(re.split(r"[\\/]", name)[-1]) for name in ODD]  # the last part of a path
WORDS = st.text() | st.sampled_from(ODD)


# ---- tables and remarks

def test_table_row_has_values_of_log(tmp_path):
    _, table = report(tmp_path, logs.gluoncv([0.5, 0.3], dtype="float32", save_dir="a", **RECIPE),
                      accuracy=0.7)
    assert table == [
        {"run": "a", "model": "resnet50_v1b", "batch size": "1024", "dtype": "float32",
         "epochs": "2", "top-1 %": "70.00", "top-5 %": "92.50", "best %": "70.00",
         "after epochs": "2", "samples/s": "1000", "minutes": "3.33", "epochs to 70 %": "2",
         "minutes to 70 %": "3.33"}]


@pytest.mark.parametrize(("seconds", "column", "shown"), [
    (0.5, "seconds", "1"), (29.0, "seconds", "58"), (30.0, "minutes", "1"),
    (1790.0, "minutes", "59.7"), (1800.0, "hours", "1")])
def test_unit_of_times_fits_longest_run(seconds, column, shown):
    found = groups([made("float32", seconds=seconds), made("float16", seconds=seconds / 2)])
    assert run_rows(found, None)[0][column] == shown
    axis, = (plot for plot in plots(found) if plot.name == "validation_error_by_hours")
    assert f"<!-- {column} -->" in axis.svg


def test_top_5_without_top_1_is_shown():
    run = Run("a", {}, {0: Epoch(top5=0.2), 1: Epoch(top5=0.1)})
    assert run_rows(groups([run]), None)[0]["top-5 %"] == "90.00"


@pytest.mark.parametrize("percent", range(1, 100))
def test_accuracy_reached_exactly_counts_as_reached(percent):
    run = made(errors=[1.0, 1 - percent / 100, float(f"0.{100 - percent:02}")])
    assert run.reached(percent / 100, by_time=True) == 2


def test_table_uses_highest_whole_percent_that_all_runs_reach(tmp_path):
    _, table = report(tmp_path, logs.gluoncv([0.5, 0.2]), logs.gluoncv([0.4, 0.199, 0.9]))
    assert [row["minutes to 80 %"] for row in table] == ["3.33", "3.33"]


def test_diverged_or_stopped_runs_do_not_lower_accuracy_of_table(tmp_path):
    runs = [logs.gluoncv([0.5, 0.2], seed=seed, num_epochs=2) for seed in range(9)]
    diverged = logs.gluoncv([0.9, 0.9], seed=9, num_epochs=2)
    cut = logs.gluoncv([0.7], seed=10, num_epochs=2)
    for texts, accuracy in (([*runs, diverged, cut], 80), ([*runs[1:], diverged], 10)):
        _, table = report(tmp_path, *texts, names="abcdefghijk")
        assert f"minutes to {accuracy} %" in table[0]


@pytest.mark.parametrize("errors", [[1.0], [1.0, 0.999], [0.0, 0.0]])
def test_accuracies_of_0_and_1_are_valid(errors, tmp_path):
    _, table = report(tmp_path, logs.gluoncv(errors, dtype="float16"))
    assert table[0]["top-1 %"] == f"{100 * (1 - errors[-1]):.2f}"
    reached = [column for column in table[0] if column.startswith("minutes to")]
    assert reached == (["minutes to 100 %"] if errors[0] == 0 else [])


def test_stopped_and_resumed_runs_are_noted(tmp_path):
    page, _ = report(
        tmp_path, logs.gluoncv([0.5, 0.4], model="a", num_epochs=9),
        logs.gluoncv([0.5], start=4, model="b"),
        logs.gluoncv([0.5, 0.4, 0.3], model="c") + logs.gluoncv([0.3], start=1))
    notes, facts = Page(page.read_text()).texts["li"], [
        "No comparison", "a: stopped after 2 of 9", "b: started after 4", "c: resumed after 1",
        "a: 1 of 1 runs did not finish"]
    assert len(notes) == len(facts)
    assert all(fact in note for fact, note in zip(facts, notes))


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"accuracy": 76}, "accuracy is between 0 and 1. Received: 76"),
    ({"accuracy": float("nan")}, "accuracy is between 0 and 1"), ({"logs": []}, "one log or more"),
    ({"accuracy": "0.7"}, "accuracy is between 0 and 1. Received: '0.7'"),
    ({"margin": None}, "between 0 and 100. Received: None"),
    ({"margin": 0}, "margin is a number of points between 0 and 100. Received: 0"),
    ({"margin": float("nan")}, "margin is a number of points")])
def test_bad_arguments_are_refused_and_nothing_is_written(kwargs, message, tmp_path):
    (tmp_path / "a.log").write_text(logs.gluoncv([0.5]))
    with pytest.raises(ValueError, match=message):
        amp.report(**{"logs": tmp_path / "a.log", "folder": tmp_path / "out", **kwargs})
    assert not (tmp_path / "out").exists()


# ---- the files

def test_report_files_are_complete_and_self_contained(tmp_path):
    texts = [logs.steps([0.5, 0.4 - seed / 100], dtype=dtype, seed=seed) for seed in range(3)
             for dtype in ("float32", "float16")]
    page, _ = report(tmp_path, *texts)
    names = {"validation_error", "validation_error_by_hours", *(chart.name for chart in CHARTS),
             "differences"}
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


def test_report_files_are_reproducible_under_any_matplotlib_style(tmp_path):
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


def test_odd_names_are_escaped_in_page(odd):
    page = Page((odd / "report.html").read_text())
    start = len(page.cells) - 1 - page.cells[::-1].index("run")
    columns = (odd / "groups.csv").read_text().splitlines()[0].split(",")
    cells = np.reshape(page.cells[start:], (-1, len(columns)))
    assert sorted(cells[1:, columns.index("model")]) == sorted(MODELS)
    assert page.texts["title"] == page.texts["h1"] == ["<title> & $title"]
    assert len(page.texts["script"]) == 1
    for name in filter(str.strip, ODD):
        assert plain(name) in page.texts["dd"]
        assert plain(f"x{name}") in page.texts["dt"]
    for path in odd.glob("*.svg"):
        ElementTree.parse(path)


def test_odd_names_are_escaped_in_csv(odd):
    with open(odd / "summary.csv", newline="", encoding="utf-8") as file:
        assert sorted(row["model"] for row in csv.DictReader(file)) == sorted(
            f"'{name}" if name[:1] in "=+-@" and name else name for name in MODELS)


@pytest.mark.parametrize("name", ["=1+2", "+1+2", "-2+3", "@SUM(A1)", "=cmd|'C calc'!A0"])
def test_csv_cells_are_never_formulas(name, tmp_path):
    page, table = report(tmp_path, logs.jsonl([0.5], dtype="float16", model=name, dataset=name))
    assert table[0]["model"] == f"'{name}"
    for file in page.parent.glob("*.csv"):
        with open(file, newline="") as opened:
            for row in csv.reader(opened):
                assert not any(re.match(r"[=+@]|-\D", cell) for cell in row)


def test_numbers_in_csv_stay_numbers():
    row = {"difference": "-0.17", "p": "1e-05", "name": "-x"}
    assert table_csv([row]) == "difference,p,name\n-0.17,1e-05,'-x\n"


@given(table=st.lists(st.fixed_dictionaries({"run": WORDS, "model": WORDS}), min_size=1,
                      max_size=3), notes=st.lists(WORDS, max_size=2), title=WORDS)
@example(table=[{"run": "", "model": ""}], notes=["--", "1. a", "+ a"], title="")
@NO_DEADLINE
def test_any_text_is_escaped(table, notes, title):
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
    text = markdown(title, [Section(title, [], table, [], [])], [], notes)
    markdown_it = pytest.importorskip("markdown_it")
    rendered = Page(markdown_it.MarkdownIt("commonmark").enable("table").render(text))
    assert "".join(rendered.texts.get("h1", "")).strip() == title.strip()
    cells = [tag for tag, _ in rendered.tags]
    assert cells.count("td") == len(texts)
    assert set(cells) <= {"h1", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "p"}
    assert [cell.strip() for cell in rendered.cells[2:]] == texts


# ---- size

def test_report_of_hundreds_of_runs_is_small(tmp_path):
    texts = [logs.jsonl([0.5, 0.4], dtype=("float32", "float16")[i % 2], model="<b>" * 99 + str(i),
                        note="x" * 5000, wd=i) for i in range(300)]
    page, table = report(tmp_path, *texts, names=[f"run{i}" for i in range(300)])
    assert len(table) == 300
    assert page.stat().st_size < 700_000
