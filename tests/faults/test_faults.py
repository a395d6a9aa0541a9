"""An allocation or a write that fails is an error with its cause; make -C tests faults has all."""
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"


@pytest.mark.parametrize("story", [
    "dense step", "convolutional bfloat16 step", "save checkpoint", "xray"])
def test_calls_that_fail_raise_errors_and_damage_nothing(story):
    trials = subprocess.run([sys.executable, "-W", "ignore", RUN, "--most", "2", "--limit", "120",
                             story],
                            capture_output=True, text=True)
    assert trials.returncode == 0, trials.stdout + trials.stderr
    assert "1 error" in trials.stdout or "2 error" in trials.stdout, trials.stdout
