import faulthandler
import itertools
import logging
import os
import sys
from collections import Counter, defaultdict
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

STDERR = pytest.StashKey()
HANDLERS = logging.StreamHandler, logging.FileHandler  # those of basicConfig
LIMIT = 600  # seconds, after which a test that hangs ends its process: pytest-xdist names it

# They run on a software GPU: make -C tests gpu.
collect_ignore = [] if "RECORDING_GPU_LOG" in os.environ else ["software_gpu"]

def pytest_addoption(parser):
    parser.addoption("--numpy", action="store_true", help="run tests in npx.set_np()")
    parser.addoption("--quick", action="store_true", help="run each value of each parameter once, "
                     "not all combinations, and no test with the marker thorough (make test)")


def pytest_configure(config):
    config.stash[STDERR] = os.dup(2)  # before pytest captures what tests write
    if config.getoption("numpy"):
        numpy_mode.prepare_networks()


def values(item):
    """The values of a test's parameters: a row of each of its `parametrize`, others by name."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    together = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        together.append(names.replace(",", " ").split() if isinstance(names, str) else [*names])
    alone = set(params) - {name for names in together for name in names}
    return {(*names, *(id(params[name]) for name in names))
            for names in (*map(tuple, together), *((name,) for name in alone))} or {()}


def with_each_value(items):
    """Few cases of each test that have each value of each parameter at least once."""
    kept, tests = set(), defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append((item, values(item)))
    for cases in tests.values():
        left = set().union(*(of for _, of in cases))
        while left:
            item, of = max(cases, key=lambda case: len(left & case[1]))
            kept.add(item)
            left -= of
    return kept


def leave_out(config, items):
    """Leaves out what `make test` leaves out."""
    quick = [item for item in items if item.get_closest_marker("thorough") is None]
    kept = with_each_value(quick)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_modifyitems(config, items):
    """Runs long files first, so that two processes that share the files end together."""
    if config.getoption("--quick"):
        leave_out(config, items)
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (
        item.path.name != "test_packaging.py", "stories" not in item.path.parts,
        item.get_closest_marker("long") is None, -tests[item.path], item.path))
    if config.getoption("numpy"):
        numpy_mode.prepare_modules()
        numpy_mode.mark_differences(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Selects the mode before fixtures of any scope run."""
    if item.config.getoption("numpy"):
        mx.npx.set_np()


class Names(mx.name.NameManager):
    """Numbers blocks from another multiple of 1,000 in each test.

    MXNet keeps constants and synchronized batch norms by name until the process ends, and names of
    several lengths in one test would change the order of parameters: dense10 sorts before dense9.
    """
    begins = itertools.count(10 ** 6, 1000)

    def __init__(self):
        super().__init__()
        self.begin = next(self.begins)

    def get(self, name, hint):
        self._counter.setdefault(hint, self.begin)
        return super().get(name, hint)


@pytest.fixture(autouse=True)
def same_numbers():
    """Seeds random numbers before each test, and waits for MXNet after it."""
    mx.random.seed(7)
    np.random.seed(7)
    with Names():
        yield
    mx.npx.reset_np()
    mx.nd.waitall()


@pytest.fixture(autouse=True)
def same_logs():
    """Restores the levels of logs, and removes the handlers of `logging.basicConfig`."""
    logs = [logging.getLogger(), logging.getLogger("gluon_amp")]
    before = [(log.level, list(log.handlers)) for log in logs]
    yield
    for log, (level, handlers) in zip(logs, before):
        log.setLevel(level)
        for handler in log.handlers[:]:
            if handler not in handlers and type(handler) in HANDLERS:
                log.removeHandler(handler)


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
