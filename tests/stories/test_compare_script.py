"""`gluon-amp compare` with the script of docs/howto.md."""
import re
from pathlib import Path

import gluon_amp as amp
import pytest
from gluon_amp.tools.cli import main

pytestmark = pytest.mark.long

HOWTO = Path(__file__).parents[2] / "docs" / "howto.md"


@pytest.mark.thorough
def test_script_of_the_docs_is_compared(tmp_path, monkeypatch, capsys):
    section = HOWTO.read_text().partition("## Compare types")[2]
    Path(tmp_path, "train.py").write_text(re.search(r"(?s)```python process\n(.*?)```", section)[1])
    monkeypatch.chdir(tmp_path)
    flags = ["compare", "train.py", "--policies", "float32,float16", "--flags=--epochs=2"]
    assert main([*flags, "--seeds", "1"]) == 0
    assert main([*flags, "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert "4 runs: 2 finished, 2 left" in out
    assert "float16, top-1 accuracy" in out
    assert "2 paired seeds" in out
    runs = amp.reports.read_logs(sorted(tmp_path.glob("compare/*/log.jsonl")))
    assert [run.dtype for run in runs] == ["float16", "float16", "float32", "float32"]
    assert all(run.final > 75 for run in runs)
