import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads leave busy cores to others
sys.path.insert(0, str(Path(__file__).parent))

import gluon_amp  # noqa: F401  (before mxnet: it makes numpy 1.24 and later fit)
import mxnet as mx
import numpy as np
import pytest
from ranks import Ranks

# They run on a software GPU: make test-gpu.
collect_ignore = [] if "RECORDING_GPU_LOG" in os.environ else ["gpu", "gpu_computing"]

# Beside the stories: files of few tests that take long.
LONG = ("test_docs", "test_tutorial", "test_launch", "test_distributed", "test_horovod",
        "test_rank_mistakes", "test_networks", "test_zoo", "test_xray")


def pytest_collection_modifyitems(items):
    """Long files first: where two processes take file by file, neither waits for the last one."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (
        item.path.name != "test_packaging.py", "stories" not in item.path.parts,
        item.path.stem not in LONG, -tests[item.path], item.path))


@pytest.fixture(autouse=True)
def same_numbers():
    """Every test draws the same random numbers, and none leaves work undone in MXNet."""
    mx.random.seed(7)
    np.random.seed(7)
    yield
    mx.nd.waitall()


@pytest.fixture(scope="module")
def ranks():
    with Ranks() as started:
        yield started


@pytest.fixture()
def rng():
    return np.random.default_rng(7)


@pytest.fixture()
def x(rng):
    """Four small images."""
    return mx.nd.array(rng.standard_normal((4, 3, 8, 8)))
