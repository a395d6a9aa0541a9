import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads do not occupy cores
sys.path.insert(0, str(Path(__file__).parent))

import gluon_amp  # noqa: F401  (before mxnet: it makes numpy 1.24 and later fit)
import mxnet as mx
import numpy as np
import numpy_mode
import pytest
from ranks import Ranks

# They run on a software GPU: make test-gpu.
collect_ignore = [] if "RECORDING_GPU_LOG" in os.environ else ["software_gpu"]

def pytest_addoption(parser):
    parser.addoption("--numpy", action="store_true", help="run tests in npx.set_np()")


def pytest_configure(config):
    if config.getoption("numpy"):
        numpy_mode.prepare_networks()


def pytest_collection_modifyitems(config, items):
    """Runs long files first, so that two processes that share the files end together."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (
        item.path.name != "test_packaging.py", "stories" not in item.path.parts,
        item.get_closest_marker("long") is None, -tests[item.path], item.path))
    if config.getoption("numpy"):
        numpy_mode.prepare_modules()
        numpy_mode.mark_differences(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Selects the mode before fixtures of any scope run."""
    if item.config.getoption("numpy"):
        mx.npx.set_np()


@pytest.fixture(autouse=True)
def same_numbers():
    """Seeds random numbers before each test, and waits for MXNet after it."""
    mx.random.seed(7)
    np.random.seed(7)
    yield
    mx.npx.reset_np()
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
