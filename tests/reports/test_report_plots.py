"""amp.report's plots: lines, labels and captions."""
import io
import re

import gluon_amp as amp
import numpy as np
import pytest
import training_logs as logs
from gluon_amp.reports import read_logs
from gluon_amp.reports.colors import COLORS, number_type
from gluon_amp.reports.compare import groups
from gluon_amp.reports.plots import charts, forest, plots
from PIL import Image
from report_runs import comparisons, made, seeds


def colors_of(png):
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    assert all((edge == 255).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))
    return pixels.reshape(-1, 3).astype(int)


def seen(pixels, color):
    wanted = np.array([int(color[i:i + 2], 16) for i in (1, 3, 5)])
    return (abs(pixels - wanted).max(1) < 40).sum() > 50


@pytest.mark.parametrize(("count", "epochs"), [(1, 2), (3, 5), (8, 2)])
@pytest.mark.parametrize("name", ["m{}", "W" * 99 + "{}"])
def test_all_groups_are_labeled_and_nothing_is_clipped(count, epochs, name):
    runs = [made(f"float{32 - 16 * (i % 2)}", np.linspace(0.9, 0.1 + i / 100, epochs),
                 model=name.format(i)) for i in range(count)]
    for plot in plots(groups(runs)):
        colors_of(plot.png)
        labels = re.findall(r"<!-- (.*?) -->", plot.svg)
        ends = [label.split(",")[0].split("…")[-1].lstrip("Wm") for label in labels]
        if count > 2:  # else dtypes are enough
            assert {str(i) for i in range(count)} <= {end[:1] for end in ends}
            assert all(name.format(i) in plot.caption for i in range(count))


def test_numbers_of_epochs_do_not_touch():
    runs = [made(dtype, np.linspace(0.9, 0.1, 120), model=model)
            for dtype in ("float32", "float16") for model in ("resnet50_v1", "resnet50_v1b")]
    ticks = [(float(x), len(number)) for x, number in re.findall(
        r'<g id="xtick_.*?<use [^>]* x="([\d.]+)".*?<!-- (\d+) -->', plots(groups(runs))[0].svg,
        re.DOTALL)]
    digit = 0.64 * 9  # points: DejaVu Sans, of size 9
    assert len(ticks) > 2
    assert all(b - a > digit * (m + n) / 2 + 3 for (a, m), (b, n) in zip(ticks, ticks[1:]))


def test_diverged_run_does_not_flatten_other_losses():
    runs = [made(dtype, seed=seed) for dtype in ("float32", "float16") for seed in range(2)]
    for run in runs:
        for n, epoch in run.epochs.items():
            epoch.loss = 1e9 * (n + 1) if run is runs[-1] else 2.0 - n
    plot, = [plot for plot in plots(groups(runs[:2] + runs[3:])) if plot.name == "loss"]
    assert re.search(r"<!-- 1e\+0\d -->", plot.svg)


def test_of_many_groups_some_of_each_type_are_drawn():
    runs = [made(dtype, [0.5, 0.3 + i / 1000], wd=i + 1) for i in range(20)
            for dtype in ("float32", "float16")]
    plot = plots(groups(runs))[0]
    assert "8 of 40 groups" in plot.caption
    assert [plot.caption.count(f"{dtype}, wd") for dtype in ("float32", "float16")] == [4, 4]


def test_runs_that_differ_in_seed_are_one_line_with_band():
    found = groups(seeds("float32", [70, 71, 72]) + seeds("float16", [70, 71, 72]))
    plot = plots(found)[0]
    assert plot.caption == (
        "Validation error. Means; bands: from the lowest to the highest run. At the end: "
        "float32 (3 runs) 29.00% (28.00% to 30.00%); float16 (3 runs) 29.00% (28.00% to 30.00%).")


def test_color_is_number_type_in_every_plot():
    for dtype, mine in (("float32", "float32"), ("float16", "float16"),
                        ("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")):
        assert number_type(dtype) == mine
        found = groups([made(dtype, policy=dtype, speed=n, seed=n) for n in (100, 200)])
        for plot in plots(found)[:1]:
            pixels = colors_of(plot.png)
            assert seen(pixels, COLORS[mine])
            others = {name for name in COLORS if name not in (mine, "float32")}  # text is ink
            assert not any(seen(pixels, COLORS[name]) for name in others)


def test_differences_are_drawn_with_margin():
    found = comparisons(*seeds("float32", [70, 80, 90]), *seeds("float16", [70.1, 80.2, 90.3]))
    plot, = forest(found, 0.5)
    assert "float16 +0.20 points (-0.05 to +0.45)" in plot.caption
    assert seen(colors_of(plot.png), COLORS["float16"])
    assert forest(comparisons(made("float32"), made("float16")), 0.5) == []


def test_times_increase_in_every_chart_and_first_epoch_ends_at_1(tmp_path):
    tail = "\tloss-scale={}\tskipped=1"
    killed = logs.gluoncv([0.4], start=2, tail=tail.format(512)).splitlines(True)[:3]
    (tmp_path / "a.log").write_text(
        logs.gluoncv([0.6, 0.5], tail=tail.format(1024)) + "".join(killed) + "Traceback:\n")
    (tmp_path / "b.jsonl").write_text(logs.steps([0.5, 0.4]))
    for run in read_logs([tmp_path / "a.log", tmp_path / "b.jsonl"]):
        for chart in charts([run]):
            times = [point.x for point in chart.points(run)]
            assert times == sorted(times)
        assert [point.x for point in charts([run])[0].points(run)] == [1, 2]
    assert all(chart.points(run) for chart in charts([run]))


def test_charts_exist_only_for_values_that_change(tmp_path):
    for text, names in ((logs.module([0.5, 0.4]),
                         {"validation_error", "validation_error_by_hours"}),
                        ("epoch,top1_err\n0,0.5\n", set()),
                        ("[Epoch 0] training: accuracy=0.500000\n", set()),
                        (logs.jsonl([0.5, 0.4], scales=[1, 1]).replace('"skipped": 2', '"x": 2'),
                         {"validation_error", "validation_error_by_hours"})):
        (tmp_path / "a").write_text(text)
        assert {plot.name for plot in plots(groups(read_logs([tmp_path / "a"])))} == names
        amp.report(tmp_path / "a", tmp_path / "out")
