"""Which cases `make test` runs, and how much of tests with several workers."""
import os

import pytest

ALL = os.environ.get("GLUON_AMP_TESTS") == "all"


def cases(distinct, others):
    """The cases of a test; `others` run the same code as the distinct ones: make test-all."""
    return [*distinct, *(pytest.param(*(other if isinstance(other, tuple) else (other,)),
                                      marks=pytest.mark.thorough) for other in others)]
