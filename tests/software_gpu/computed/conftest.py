import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gluon_amp  # noqa: F401  (before mxnet)
import pytest
from software_gpu import recording


@pytest.fixture()
def calls():
    """The calls of the test so far, all of which a GPU would accept."""
    begin, before = recording.position(), recording.violations()

    def so_far():
        recording.mark("")
        return list(recording.calls(begin))

    yield so_far
    assert recording.violations() == before
