"""Tests run one case for each path of the code; `make test-all` runs all cases."""
import os

ALL = os.environ.get("GLUON_AMP_TESTS") == "all"


def cases(distinct, others):
    """The cases of a test: `others` run the same code as the distinct ones."""
    return [*distinct, *others] if ALL else [*distinct]
