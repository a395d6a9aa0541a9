import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gluon_amp  # noqa: F401  (before mxnet)
import pytest
from software_gpu import recording


@pytest.fixture(autouse=True)
def no_refused_calls():
    """Checks that a GPU would accept every call; overflow checks of the recording GPU pass."""
    recording.pretend_finite()
    recording.pretend("GlobalReductionKernel<mshadow::half", 2, 0.0, 0)
    recording.pretend("MultiAllFinite", 1, 1.0)
    recording.pretend("AllFinite", 1, 1.0)
    before, begin = recording.violations(), recording.position()
    yield
    if recording.violations() != before:
        refused = [call.record for call in recording.calls(begin) if call.name == "VIOLATION"]
        pytest.fail("\n".join(f"{r['of'][:200]}: {r['why'][:300]}" for r in refused[-5:]))
