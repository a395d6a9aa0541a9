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
from gluon_amp.report.compare import pairs
from gluon_amp.report.plots import CHARTS, INK, PALETTE, plots
from gluon_amp.report.runs import Epoch, plain
from gluon_amp.report.summary import remarks, rows
from gluon_amp.report.write import DARK, html_page, markdown, table_csv
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
        if tag not in ("meta", "link", "br", "img"):
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


# ---- pairs

def test_a_pair_of_one_recipe_has_a_speedup(tmp_path):
    high = logs.gluoncv([0.5, 0.3], dtype="float32", save_dir="a", **RECIPE)
    low = logs.gluoncv([0.6, 0.2], dtype="float16", save_dir="b", speed=1500, seconds=80, **RECIPE)
    _, table = report(tmp_path, high, low, accuracy=0.7)
    assert table == [
        {"run": "a", "model": "resnet50_v1b", "batch size": "1024", "dtype": "float32",
         "epochs": "2", "top-1 %": "70.00", "top-5 %": "92.50", "best top-1 %": "70.00",
         "best epoch": "1", "images/s": "1000", "minutes": "3.33", "speedup": "1.00",
         "minutes to 70 %": "3.33"},
        {"run": "b", "model": "resnet50_v1b", "batch size": "1024", "dtype": "float16",
         "epochs": "2", "top-1 %": "80.00", "top-5 %": "95.00", "best top-1 %": "80.00",
         "best epoch": "1", "images/s": "1500", "minutes": "2.67", "speedup": "1.50",
         "minutes to 70 %": "2.67"}]


def test_where_recipes_differ_the_differences_stand_there_and_no_speedup():
    runs = [made("float32"), made("float16", label_smoothing=True, wd=0.0002, speed=3000)]
    found = pairs(runs)
    assert found[0].speedup is None
    assert [row["speedup"] for row in rows(runs, found, None)] == ["", "recipes differ"]
    assert remarks(runs, found)[0] == (
        "float16 and float32 are not the same recipe, and no speedup is claimed. They differ in: "
        "wd (0.0001 in float32, 0.0002 in float16), "
        "label_smoothing (not given in float32, True in float16).")


@pytest.mark.parametrize("arguments", [
    {"save_dir": "b"}, {"rec_train": "x"}, {"logging_file": "b.log"}, {"data_train": "y"},
    {"somewhere": "/tmp/x"}, {"loss_scale": 128.0}, {"resume_epoch": 3, "resume_params": "x"},
    {"mixup": False, "mixup_alpha": 0.2}, {"label_smoothing": 0.0}, {"no_wd": False}])
def test_precision_paths_resuming_and_what_is_off_are_no_differences(arguments):
    pair, = pairs([made("float32"), made("float16", **arguments)])
    assert pair.differences == {}
    assert pair.speedup == 1


@pytest.mark.parametrize("arguments", [
    {"batch_size": 256}, {"num_gpus": 4}, {"seed": 3}, {"mixup": True}, {"lr_decay_epoch": "3,4"},
    {"layers": [1, 2]}, {"label_smoothing": 0.1}, {"num_epochs": 3}])
def test_everything_else_is_a_difference(arguments):
    pair, = pairs([made("float32"), made("float16", **arguments)])
    assert set(arguments) <= set(pair.differences)
    assert pair.speedup is None


ARGUMENTS = st.dictionaries(st.sampled_from(["wd", "mixup", "mixup_alpha", "seed", "no_wd"]),
                            st.none() | st.booleans() | st.integers(0, 2) | st.just("None"))


@given(first=ARGUMENTS, second=ARGUMENTS)
@NO_DEADLINE
def test_a_pair_differs_alike_whichever_of_the_recipes_is_float32(first, second):
    one, = pairs([made("float32", **first), made("float16", **second)])
    other, = pairs([made("float16", **first), made("float32", **second)])
    assert {name: (b, a) for name, (a, b) in other.differences.items()} == one.differences


@given(order=st.permutations(range(6)))
@NO_DEADLINE
def test_the_order_of_logs_does_not_change_the_pairs(order):
    runs = [made(dtype, seed=seed, name="") for dtype in ("float32", "float16") for seed in (1, 2)]
    runs += [made("float16", model="vgg"), made("float16", name="fp16 alone")]
    found = pairs([runs[i] for i in order])
    assert {(runs.index(pair.float32), runs.index(pair.low)) for pair in found} == {(0, 2), (1, 3)}


def test_without_arguments_in_the_log_there_is_no_speedup():
    runs = [made(name="a float32"), made(name="a float16", speed=2000)]
    pair, = pairs(runs)
    assert pair.speedup is None
    assert "recipe (not in the log in float32" in remarks(runs, [pair])[0]


@pytest.mark.parametrize(("high", "low", "speedup"), [
    ((3600, None), (1800, None), 2), ((3600, 100), (1800, 300), 3), ((0, None), (0, None), None),
    ((None, None), (1800, None), None)])
def test_a_speedup_is_of_images_per_second_or_else_of_hours(high, low, speedup):
    pair, = pairs([made("float32", seconds=high[0], speed=high[1]),
                   made("float16", seconds=low[0], speed=low[1])])
    assert pair.speedup == speedup


@pytest.mark.parametrize(("seconds", "column", "shown"), [
    (0.5, "seconds", "1"), (29.0, "seconds", "58"), (30.0, "minutes", "1"),
    (1790.0, "minutes", "59.7"), (1800.0, "hours", "1")])
def test_times_are_in_a_unit_that_fits_the_longest_run(seconds, column, shown):
    runs = [made("float32", seconds=seconds), made("float16", seconds=seconds / 2)]
    assert rows(runs, pairs(runs), None)[0][column] == shown
    axis, = (plot for plot in plots(runs) if plot.name == "validation_error_by_hours")
    assert f"<!-- {column} -->" in axis.svg


def test_other_datasets_are_other_recipes_wherever_they_lie():
    float32 = made("float32", data_train="/a/imagenet.rec")
    for path, differences in (("/b/imagenet.rec", set()), ("/a/cifar10.rec", {"dataset"})):
        pair, = pairs([float32, made("float16", data_train=path)])
        assert set(pair.differences) == differences
        assert (pair.speedup is None) is bool(differences)


def test_policies_by_apexs_names_are_pairs():
    runs = [made(policy="O0"), made(policy="O2")]
    assert [run.dtype for run in runs] == ["float32", "float16"]
    assert pairs(runs)[0].speedup == 1


def test_top_5_alone_is_shown():
    run = Run("a", {}, {0: Epoch(top5=0.2), 1: Epoch(top5=0.1)})
    assert rows([run], [], None)[0]["top-5 %"] == "90.00"


def test_datasets_are_told_apart():
    runs = [made("float32", dataset="/data/cifar10.rec"), made("float16", dataset="digits")]
    assert [row["dataset"] for row in rows(runs, [], None)] == ["cifar10.rec", "digits"]
    assert "dataset" not in rows(runs[:1], [], None)[0]


def test_hours_of_different_epochs_are_no_speedup():
    pair, = pairs([made("float32", speed=None), made("float16", errors=[0.5], speed=None)])
    assert pair.speedup is None


# ---- the table and the remarks

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
    runs = [made(label_smoothing=value, mixup=value)]
    assert remarks(runs, []) == []


def test_what_happened_to_runs_is_told(tmp_path):
    page, _ = report(
        tmp_path, logs.gluoncv([0.5, 0.4], model="a", num_epochs=9),
        logs.gluoncv([0.5], start=4, model="b"),
        logs.gluoncv([0.5, 0.4, 0.3], model="c") + logs.gluoncv([0.3], start=1))
    assert Page(page.read_text()).texts["li"] == [
        "a stops after epoch 1, of 0 to 8.", "b begins with epoch 4; times count from there.",
        "c: resumed at epoch 1"]


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"accuracy": 76}, "accuracy is between 0 and 1. Received: 76"),
    ({"accuracy": float("nan")}, "accuracy is between 0 and 1"), ({"logs": []}, "one log or more")])
def test_bad_arguments_are_refused_and_nothing_is_written(kwargs, message, tmp_path):
    (tmp_path / "a.log").write_text(logs.gluoncv([0.5]))
    with pytest.raises(ValueError, match=message):
        amp.report(**{"logs": tmp_path / "a.log", "folder": tmp_path / "out", **kwargs})
    assert not (tmp_path / "out").exists()


# ---- the files

def test_a_report_is_one_page_that_needs_no_network_and_the_same_in_other_files(tmp_path):
    text = logs.gluoncv([0.5, 0.4], dtype="float16", tail="\tloss-scale=1024\tskipped=1")
    page, _ = report(tmp_path, text, logs.gluoncv([0.5, 0.3], dtype="float32"))
    names = [chart.name for chart in CHARTS]
    assert {path.name for path in page.parent.iterdir()} == {
        "report.html", "report.md", "summary.csv",
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
    columns = page.cells[:page.cells.index("0")]
    cells = np.reshape(page.cells, (-1, len(columns)))
    assert list(cells[1:, columns.index("model")]) == MODELS
    assert page.texts["title"] == page.texts["h1"] == ["<title> & $title"]
    assert len(page.texts["script"]) == 1
    for name in filter(str.strip, ODD):
        assert plain(name) in page.texts["dd"]
        assert plain(f"x{name}") in page.texts["dt"]
    for path in odd.glob("*.svg"):
        ElementTree.parse(path)


def test_names_of_any_characters_stay_text_in_the_csv(odd):
    with open(odd / "summary.csv", newline="", encoding="utf-8") as file:
        assert [row["model"] for row in csv.DictReader(file)] == MODELS


@given(table=st.lists(st.fixed_dictionaries({"run": WORDS, "model": WORDS}), min_size=1,
                      max_size=3), notes=st.lists(WORDS, max_size=2), title=WORDS)
@NO_DEADLINE
def test_any_text_stays_text(table, notes, title):
    table = [{column: plain(text) for column, text in row.items()} for row in table]
    notes, title = [plain(note) for note in notes], plain(title)
    texts = [text for row in table for text in row.values()]
    runs = [Run(row["run"], {row["model"]: row["run"]}) for row in table]
    assert Page(html_page(title, table, notes, [], runs)).cells[2:] == texts
    with io.StringIO(table_csv(table), newline="") as file:
        assert list(csv.DictReader(file)) == table
    text = markdown(title, table, notes, [])
    markdown_it = pytest.importorskip("markdown_it")
    rendered = Page(markdown_it.MarkdownIt("commonmark").enable("table").render(text))
    assert "".join(rendered.texts.get("h1", "")).strip() == title.strip()
    cells = [tag for tag, _ in rendered.tags]
    assert cells.count("td") == len(texts)
    assert set(cells) <= {"h1", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "p"}
    assert [cell.strip() for cell in rendered.cells[2:]] == texts


# ---- the plots

def colors_of(png):
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    assert all((edge == 255).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))
    return pixels.reshape(-1, 3).astype(int)


def seen(pixels, color):
    wanted = np.array([int(color[i:i + 2], 16) for i in (1, 3, 5)])
    return (abs(pixels - wanted).max(1) < 40).sum() > 50


@pytest.mark.parametrize(("count", "epochs"), [(1, 1), (2, 1), (3, 5), (8, 2), (9, 2), (40, 3)])
@pytest.mark.parametrize("name", ["m{}", "W" * 99 + "{}"])
def test_all_runs_are_named_and_nothing_is_cut_off(count, epochs, name):
    runs = [made(f"float{32 - 16 * (i % 2)}", np.linspace(0.9, 0.1 + i / 100, epochs),
                 model=name.format(i)) for i in range(count)]
    for plot in plots(runs):
        pixels = colors_of(plot.png)
        assert all(seen(pixels, color) for color in PALETTE[:count] if epochs > 1)
        labels = re.findall(r"<!-- (.*?) -->", plot.svg)
        ends = [label.split(",")[0].split("…")[-1].lstrip("Wm") for label in labels]
        if count > 2:  # else dtypes are enough
            assert {str(i) for i in range(count)} <= set(ends)
            assert all(name.format(i) in plot.alt for i in range(count))


def test_runs_that_differ_in_their_seed_are_one_name_and_one_color():
    runs = [made(dtype, [0.5, 0.3 + seed / 100], seed=seed)
            for dtype in ("float32", "float16") for seed in range(3)]
    plot = plots(runs)[0]
    assert plot.alt == ("Validation error by epoch. At the end: float32 (3 runs) 30.00% to 32.00%; "
                        "float16 (3 runs) 30.00% to 32.00%.")
    assert not seen(colors_of(plot.png), PALETTE[2])


def test_a_line_of_several_runs_is_not_named_as_if_it_were_one():
    runs = [made("float16", seed=seed, wd=wd, name="") for wd in (1, 2) for seed in range(3)]
    for i, run in enumerate(runs):
        run.name = f"run{i}"
    assert "run0 and 2 more (3 runs)" in plots(runs)[0].alt


def test_float32_is_dashed_so_that_grey_prints_tell_it_apart():
    dashed = [run.svg.count("stroke-dasharray") for run in (
        plots([made("float32")])[0], plots([made("float16")])[0])]
    assert dashed[0] > dashed[1]


def test_the_colors_stand_out_from_the_paper_and_from_each_other_also_for_the_color_blind():
    def light(color):
        part = np.array([int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)])
        return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)

    def contrast(a, b):
        a, b = sorted(0.05 + light(c) @ [0.2126, 0.7152, 0.0722] for c in (a, b))
        return b / a

    # what a viewer without middle-wave cones sees (Viénot, 1999), as a cube root of light
    blind = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    assert len(DARK) == len(PALETTE)
    for colors, paper in ((PALETTE, "#ffffff"), (DARK, "#16181d")):
        assert min(contrast(color, paper) for color in colors) > 2
        assert min(contrast(color, paper) for color in colors[:4]) > 3
        for i, a in enumerate(colors):
            for b in colors[:i]:
                assert np.linalg.norm(np.cbrt(blind @ light(a)) - np.cbrt(blind @ light(b))) > 0.1
    assert PALETTE[0] == INK


def test_time_goes_forward_in_every_chart(tmp_path):
    tail = "\tloss-scale={}\tskipped=1"
    killed = logs.gluoncv([0.4], start=2, tail=tail.format(512)).splitlines(True)[:3]
    (tmp_path / "a.log").write_text(
        logs.gluoncv([0.6, 0.5], tail=tail.format(1024)) + "".join(killed) + "Traceback:\n")
    run, = read([tmp_path / "a.log"])
    for chart in CHARTS:
        times = [time for time, _ in chart.points(run)]
        assert times == sorted(times)
        assert times


def test_there_are_charts_of_what_logs_have_and_no_others(tmp_path):
    for text, names in ((logs.module([0.5, 0.4]),
                         {"validation_error", "validation_error_by_hours", "throughput"}),
                        ("epoch,top1_err\n0,0.5\n", {"validation_error"}),
                        ("[Epoch 0] training: accuracy=0.500000\n", set()),
                        (logs.jsonl([0.5], scales=[1]),
                         {chart.name for chart in CHARTS} - {"loss_scale", "skipped_steps"})):
        (tmp_path / "a").write_text(text)
        assert {plot.name for plot in plots(read([tmp_path / "a"]))} == names
        amp.report(tmp_path / "a", tmp_path / "out")
