"""results/: rebuilt byte for byte; imagenet: matches its sources; its page in a browser."""
import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from browser import IN_BROWSER, browse, title_after
from gluon_amp.reports import read_logs
from gluon_amp.reports.colors import COLORS, DARK
from PIL import Image
from scripts import SHARED

pytestmark = pytest.mark.long

RESULTS = Path(__file__).parents[2] / "results" / "imagenet"
NO_SOURCES = pytest.mark.skipif(not (SHARED / "imagenet").is_dir(),
                                reason="needs imagenet in ../shared or $GLUON_AMP_DATA")

def table(path):
    lines = path.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if line[0] != "#"))


def errors(run):
    return [epoch.top1 for epoch in run.epochs.values()]


# ---- the files

def needs_versions_that_draw_the_same():
    versions = {"matplotlib": "3.7.5", "PIL": "10.4.0"}
    for name, version in versions.items():
        if __import__(name).__version__ != version:
            pytest.skip(f"needs {name} {version}: pip install '.[results]'")


@pytest.mark.thorough
def test_study_files_give_committed_tables_and_pictures(tmp_path):
    needs_versions_that_draw_the_same()
    folder = tmp_path / "results"
    for pattern in ("*.py", "*.md", "*.jsonl", "tasks/*.jsonl", "runs/*.jsonl", "runs/*/*.xz"):
        for path in RESULTS.parent.glob(pattern):
            copied = folder / path.relative_to(RESULTS.parent)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)
    shutil.copy(RESULTS.parents[1] / "README.md", tmp_path)
    subprocess.run([sys.executable, "-W", "ignore", folder / "table.py"], check=True, timeout=120)
    for name in ("README.md", "comparisons.md"):
        assert (folder / name).read_text() == (RESULTS.parent / name).read_text()
    assert (tmp_path / "README.md").read_text() == (RESULTS.parents[1] / "README.md").read_text()
    for drawn in folder.glob("*.png"):
        assert drawn.read_bytes() == (RESULTS.parent / drawn.name).read_bytes()


@pytest.mark.thorough
def test_make_results_reproduces_committed_files(tmp_path):
    needs_versions_that_draw_the_same()
    subprocess.run([sys.executable, "-W", "ignore", str(RESULTS / "build.py"), str(tmp_path)],
                   check=True, timeout=120)
    built = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*") if path.is_file()}
    there = {path.relative_to(RESULTS) for path in RESULTS.rglob("*")
             if path.is_file() and path.suffix != ".pyc"}
    committed = {path for path in there if path.parts[-1] != "build.py"
                 and not (path.suffix == ".csv" and len(path.parts) == 1)}
    assert built.keys() == committed
    for name, path in built.items():
        assert path.read_bytes() == (RESULTS / name).read_bytes(), name


def test_published_curves_have_results_of_tutorial():
    runs = read_logs([RESULTS / "published.csv"])
    ends = {(row["dtype"], int(row["batch_size"])): row
            for row in table(RESULTS / "published_ends.csv")}
    assert [float(row["top1_percent"]) for row in ends.values()] == [76.18, 76.34, 76.29]
    assert {(run.dtype, run.batch_size) for run in runs} == ends.keys()
    for run in runs:
        end = ends[run.dtype, run.batch_size]
        assert list(run.epochs) == list(range(90))
        assert 1 - run.last.top1 == pytest.approx(float(end["top1_percent"]) / 100, abs=0.0005)
        assert run.hours[-1] == pytest.approx(float(end["hours"]), rel=1e-3)
        assert float(end["speedup"]) == pytest.approx(11.8 / float(end["hours"]), abs=0.01)


def test_only_runs_of_one_recipe_have_a_speedup():
    rows = {row["runs"]: row for row in table(RESULTS / "published" / "verdicts.csv")}
    assert {name: (row["verdict"], row["speedup"]) for name, row in rows.items()} == {
        "float16, batch 1024": ("too few runs", "1.62"),
        "float16, batch 2048": ("recipes differ", "")}
    gluoncv = table(RESULTS / "gluoncv" / "verdicts.csv")
    assert [row["verdict"] for row in gluoncv] == ["recipes differ"] * 2
    assert "have different recipes: no verdict" in (
        RESULTS / "gluoncv" / "report.md").read_text().replace("\\", "")


def test_every_table_names_its_source():
    for path in RESULTS.glob("*.csv"):
        assert path.read_text().startswith("# Source: ")
        assert path.read_text().splitlines()[0][2:] in (RESULTS / "README.md").read_text()


@NO_SOURCES
def test_tables_match_their_sources():
    sources = SHARED / "imagenet"
    ours = read_logs([RESULTS / "gluoncv.csv"])
    theirs = read_logs([sources / "resnet50_gluoncv_fp32_vs_fp16_per_epoch.csv"])
    assert len(ours) == len(theirs) == 4
    for run in theirs:
        same, = (r for r in ours if (r.model, r.dtype) == (run.model, run.dtype))
        assert same.epochs == run.epochs
    ours = read_logs([RESULTS / "published.csv"])
    theirs = read_logs([sources / "resnet50v1b_imagenet_fp16_fp32_digitised.csv"])
    assert len(ours) == len(theirs) == 3
    for run in theirs:
        same, = (r for r in ours if (r.dtype, r.batch_size) == (run.dtype, run.batch_size))
        assert errors(same) == errors(run)
    theirs = {(row["hardware"], row["gpus"], row["fp32"], row["fp16_or_amp"], row["source_commit"])
              for row in table(sources / "nvidia_rn50v15_mxnet.csv")}
    assert {(row["hardware"].replace(" (TF32)", ""), row["gpus"], row["float32"], row["mixed"],
             row["commit"]) for row in table(RESULTS / "nvidia.csv")} <= theirs
    assert table(RESULTS / "nvidia_seeds.csv") == table(
        sources / "nvidia_rn50v15_mxnet_seeds.csv")


@NO_SOURCES
def test_gluoncv_table_matches_its_logs():
    rows = read_logs([RESULTS / "gluoncv.csv"])
    for log in read_logs(sorted((SHARED / "imagenet" / "logs").glob("*.log"))):
        row, = (r for r in rows if (r.model, r.dtype) == (log.model, log.dtype))
        assert errors(row) == errors(log)
        assert [e.speed for e in row.epochs.values()] == [e.speed for e in log.epochs.values()]
        assert row.batch_size == log.batch_size
        for name in ("label_smoothing", "no_wd"):
            assert row.arguments[name] == str(log.arguments.get(name, False))


# ---- the page in a browser

@IN_BROWSER
def test_clicks_on_header_sort_table(tmp_path):
    title = title_after(RESULTS / "gluoncv" / "report.html", """<script>
      const shown = [], runs = [...document.querySelectorAll("table")].pop();
      for (const name of ["top-1 %", "run"]) {
        const button = [...runs.querySelectorAll("th button")].find(
          b => b.textContent === name);
        for (let i = 0; i < 2; i++) {
          button.click();
          shown.push(button.parentNode.getAttribute("aria-sort"), ...[...runs.tBodies[0].rows].map(
            row => row.cells[button.parentNode.cellIndex].textContent));
        }
      }
      document.title = shown.join(";");
    </script></body>""", tmp_path)
    rows = table(RESULTS / "gluoncv" / "groups.csv")
    expected = []
    for column, kind in (("top-1 %", float), ("run", str)):
        for order in ("ascending", "descending"):
            values = sorted((row[column] for row in rows), key=kind, reverse=order[0] == "d")
            expected += [order, *values]
    assert title.split(";") == expected


@IN_BROWSER
@pytest.mark.parametrize(("dark", "colors", "paper"), [
    (False, COLORS, "#ffffff"), (True, DARK, "#16181d")])
def test_plots_are_visible_offline_in_light_and_dark(dark, colors, paper, tmp_path):
    picture = tmp_path / "page.png"
    browse(RESULTS / "published" / "report.html", tmp_path / "profile",
           "--hide-scrollbars", f"--screenshot={picture}",
           *["--blink-settings=preferredColorScheme=0"] * dark)
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)

    def count(color):
        wanted = np.array([int(color[i:i + 2], 16) for i in (1, 3, 5)])
        return int((abs(pixels - wanted).max(2) < 25).sum())

    assert count(paper) > 0.7 * pixels.shape[0] * pixels.shape[1]
    assert all(count(color) > 200 for color in (colors["float32"], colors["float16"]))


def test_page_loads_nothing_from_elsewhere():
    for path in RESULTS.rglob("*.html"):
        assert not re.search(r"(src|href)=\"?[^#\"]|url\([^#]|@import|fetch\(", path.read_text())
