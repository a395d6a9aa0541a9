"""The tutorial's notebooks run with the results that their text states."""
import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import mxnet as mx
import numpy as np
import pytest
from markdown_it import MarkdownIt

pytestmark = pytest.mark.long

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial"


@pytest.fixture()
def run(tmp_path, monkeypatch):
    """Runs the cells of a notebook in an empty folder. Returns its names and its output."""
    monkeypatch.chdir(tmp_path)
    backend = matplotlib.get_backend()
    matplotlib.use("agg")

    def run(name):
        page, names, printed = TUTORIAL / f"{name}.md", {"__name__": "__main__"}, io.StringIO()
        with mx.name.NameManager(), contextlib.redirect_stdout(printed):
            for token in MarkdownIt("commonmark").parse(page.read_text()):
                if token.type == "fence" and token.info.startswith("{code-cell}"):
                    code = "\n" * (token.map[0] + 1) + re.sub("(?m)^%", "# %", token.content)
                    exec(compile(code, str(page), "exec"), names)
        return names, printed.getvalue()

    yield run
    import matplotlib.pyplot as plt
    plt.close("all")
    matplotlib.use(backend)


def test_ten_minutes_reaches_same_accuracy_in_both_types(run):
    names, _ = run("ten_minutes")
    accuracy = names["accuracy"]
    assert min(accuracy.values()) > 0.95
    assert abs(accuracy["float32"] - accuracy["float16"]) < 0.02
    assert names["trainer"].skipped == 0


@pytest.mark.thorough
def test_fine_tune_learns_new_digits_from_few_images(run):
    names, _ = run("fine_tune")
    assert len(names["few"]._dataset) == 24
    assert names["tuned"] > 0.8  # chance level is 1/3
    old = mx.nd.load("module-0001.params")["arg:conv_weight"].astype("float32")
    change = names["body"].collect_params()["conv_weight"].data().astype("float32") - old
    assert 0 < change.abs().max() < 0.1  # trained from the checkpoint's weights


@pytest.mark.thorough
def test_symbolic_trains_and_float16_softmax_loses_small_probabilities(run):
    names, _ = run("symbolic")
    assert min(names["accuracy"].values()) > 0.9
    whole, half = names["smallest"].values()
    assert (half[whole < 2.0 ** -25] == 0).all()
    for name, ratio in ("without_batch_size", 64), ("with_batch_size", 1):
        ratios = names[name] / names["float32_update"]
        assert np.median(ratios) == pytest.approx(ratio, rel=0.01)
    assert names["scores"]["accuracy"] > 0.9
    assert names["scores"]["mse"] < 0.5 * names["ink_label"].var()
    subprocess.run([Path(sys.executable).with_name("gluon-amp"), "xray",
                    "digits32-symbol.json", "--params", "digits-0003.params", "--data",
                    "batch.npz", "--output", "xray"], check=True, stdout=subprocess.DEVNULL)
    assert Path("xray", "xray.html").exists()


@pytest.mark.thorough
def test_when_it_goes_wrong_finds_and_fixes_the_network(run):
    names, printed = run("when_it_goes_wrong")
    assert "LossScaleError: 16 steps skipped in a row" in printed
    assert names["view"].keep == ["net_pool"]
    assert "net_pool_batch_dot0 (batch_dot) is the first that is not finite" in printed
    for accuracy in "in_float32", "kept", "normalized":
        assert names[accuracy] > 0.93
    assert "-1e+09: [[nan nan nan nan nan]]" in printed


@pytest.mark.thorough
def test_workers_accumulates_and_uses_devices_and_processes(run):
    names, printed = run("workers")
    assert names["added_up"] > 0.93
    assert names["on_two_devices"] > 0.93
    assert "worker 0 of 2" in printed
    assert "worker 1 of 2" in printed


def test_reading_results_prints_verdict_of_ten_seeds(run):
    names, printed = run("reading_results")
    assert names["verdict"].startswith("- **DIFFERENT: float16, scale dynamic")
    assert "10 paired seeds, p = 0.024" in names["verdict"]
    assert "5 seeds: mean +0.62" in printed


@pytest.mark.thorough
def test_text_classification_matches_float32(run):
    names, printed = run("text")
    labels = names["labels"][:600]
    for predicted in names["predicted"].values():
        assert (predicted == labels).mean() > 0.95
    assert "SequenceMask    float32" in printed
    assert "RNN             float16" in printed
    assert names["difference"] < 0.01


@pytest.mark.thorough
def test_gan_trains_and_covers_every_cluster(run):
    names, _ = run("gan")
    for points in names["generated"].values():
        inside, shares = names["judge"](points)
        assert inside > 0.65
        assert min(shares) > 0.02
