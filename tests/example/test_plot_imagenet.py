"""example/plot_imagenet.py draws logs in the colors of reports."""
import runpy
from pathlib import Path

import pytest
import training_logs as logs
from gluon_amp.reports.colors import COLORS

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "example" / "plot_imagenet.py"))


def test_colors_match_reports():
    assert SCRIPT["COLORS"] == {"" if name == "other" else name: color
                                for name, color in COLORS.items() if name != "error"}


def test_legend_and_axis_show_types_and_measures(tmp_path):
    for dtype in ("mixed_bfloat16", "float32", "e3m4"):
        (tmp_path / f"{dtype}.log").write_text(logs.header(policy=dtype) + "".join(
            f"[Epoch {n}] Validation: \nmAP=0.{n + 5}\n" for n in range(3)))
    SCRIPT["main"]([*map(str, sorted(tmp_path.glob("*.log"))), "-o", str(tmp_path / "a.svg")])
    drawn = (tmp_path / "a.svg").read_text()
    assert all(color in drawn for color in ("#009e73", "#1f2329", "#e69f00"))
    assert "mAP validation error, %" in drawn


def test_measure_that_is_no_percentage_is_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"arguments": {"dtype": "float32"}}\n'
                                      '{"epoch": 0, "validation_perplexity": 50.0}\n')
    with pytest.raises(SystemExit):
        SCRIPT["main"]([str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "a.png")])
    assert "errors in percent. Received: perplexity" in capsys.readouterr().err


def test_logs_without_results_are_refused(tmp_path, capsys):
    (tmp_path / "a.log").write_text("[Epoch 0] Training cost: 9.500, loss=1.000\n")
    with pytest.raises(SystemExit):
        SCRIPT["main"]([str(tmp_path / "a.log"), "-o", str(tmp_path / "a.png")])
    assert "the logs have no validation results" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()
