"""`make -C tests mxnet MXNET_TESTS=FOLDER`: runs MXNet 1.9.1's own tests with `amp.Trainer` and
`amp.Module` in place of MXNet's, without a loss scale and with one.

Tests that pass with MXNet alone pass after the import of gluon_amp, too. Those that pass with
MXNet's Trainer and Module pass without a loss scale. With one, a test may fail with an error listed
in mxnets_tests.txt: MXNet's tests call `loss.backward()`, for example.

`make -C tests mxnet-numpy MXNET_TESTS=FOLDER`: runs MXNet's tests that involve numpy, unmodified,
with the installed numpy. Tests that fail with it are listed in mxnets_tests_numpy.txt.

As a plugin of pytest, this file runs them as GLUON_AMP_IN_PLACE selects: "alone" without
gluon_amp, "mxnet" with MXNet's Trainer and Module, "None" or a loss scale; or "numpy".
"""
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent))
from mxnet_alone import MXNET_ALONE  # noqa: E402

FILES = ("test_gluon_trainer.py", "test_module.py", "test_loss.py", "test_gluon.py")
NEEDED = (*(f"unittest/{name}" for name in (*FILES, "common.py")), "common/models.py",
          "train/test_bucketing.py")
# test_gluon.py is about blocks: of its tests, those that have a Trainer or a Module
APPLIES = re.compile(r"\b(Trainer|Module)\b")
ARMS = ("None", "1024", "dynamic")  # values of loss_scale
PARTS = ("unittest", "gpu", "common", "train")  # folders that tests import from
NO_NETWORK = r"ConnectionError|URLError|gaierror"  # some download data
# their modules are imported without assertion rewriting by pytest
PYTEST = (sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--tb=short", "--no-header",
          "--assert=plain", "-p", "no:cacheprovider", "-c", os.devnull)
NUMPY_FILES = tuple(f"test_{name}.py" for name in """
    attr autograd base contrib_text dlpack gluon_contrib gluon_data gluon_data_vision
    gluon_estimator gluon_event_handler gluon_rnn gluon_utils image infer_type init io
    kvstore_custom metric ndarray numpy_gluon numpy_interoperability numpy_ndarray recordio rnn
    runtime sparse_ndarray symbol test_utils thread_local viz""".split())


# ---- the plugin of pytest


def prepare(alone=False):
    """Imports MXNet so that its tests can be imported; `alone`: not gluon_amp."""
    _make_nose()
    if alone:
        exec(MXNET_ALONE)
        numpy_names = sys.modules["numpy_names"]
    else:
        from gluon_amp import numpy_names
    folder = Path(os.environ["GLUON_AMP_MXNETS_TESTS"])
    numpy_names.PACKAGES.update(
        path.stem for part in PARTS for path in (folder / part).glob("*.py"))
    _wrap_around(numpy_names.AS_IT_WAS)
    import mxnet as mx
    return mx


def pytest_configure(config):
    arm = os.environ["GLUON_AMP_IN_PLACE"]
    mx = prepare(arm == "alone")
    if arm == "alone":
        return
    import gluon_amp as amp
    if arm in ("mxnet", "numpy"):
        return
    scale = {"None": None, "1024": 1024}.get(arm, arm)

    def scaled(cls):
        def init(self, *args, **kwargs):
            cls.__init__(self, *args, **{"loss_scale": scale, **kwargs})
        return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__})

    mx.gluon.Trainer = mx.gluon.trainer.Trainer = scaled(amp.Trainer)
    mx.mod.Module, mx.mod.BucketingModule = scaled(amp.Module), scaled(amp.BucketingModule)


def pytest_collection_modifyitems(items):
    if os.environ["GLUON_AMP_IN_PLACE"] == "numpy":
        return
    items[:] = [item for item in items if item.path.name != "test_gluon.py"
                or APPLIES.search(inspect.getsource(inspect.unwrap(item.function)))]


def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed or report.skipped:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message if report.failed and crash else ""
        note(report.nodeid, report.outcome, said)


def note(test, outcome, said):
    with open(os.environ["GLUON_AMP_OUTCOMES"], "a") as file:
        file.write(f"{json.dumps([test.split('/')[-1], outcome, said])}\n")


def _wrap_around(numpy):
    """MXNet's tests contain 200 as int8, which numpy 1 wrapped and numpy 2 refuses."""
    refusing = numpy.array

    def wrapping(object, dtype=None, **kwargs):
        try:
            return refusing(object, dtype, **kwargs)
        except OverflowError:
            return refusing(object).astype(dtype)
    numpy.array = wrapping


def _make_nose():
    """The part of nose that MXNet's tests use; nose does not run on current Python."""
    def decorator(original):
        def as_original(made):
            made.__name__, made.__doc__ = original.__name__, original.__doc__
            made.__wrapped__ = original
            return made
        return as_original

    def raises(*errors):
        def expecting(test):
            def run(*args, **kwargs):
                try:
                    test(*args, **kwargs)
                except errors:
                    return
                raise AssertionError(f"{test.__name__} did not raise {errors}")
            return decorator(test)(run)
        return expecting

    tools = types.ModuleType("nose.tools")
    tools.make_decorator, tools.raises = decorator, raises
    tools.assert_raises = unittest.TestCase().assertRaises
    tools.ok_ = unittest.TestCase().assertTrue
    nose = types.ModuleType("nose")
    nose.tools = tools
    sys.modules.update({"nose": nose, "nose.tools": tools})


# ---- the command


def run_pytest(plugin, folder, files, **variables):
    """Runs files of MXNet's tests with a plugin. Returns the exit code, what pytest said, and the
    outcome (passed, skipped, failed) and message of each test, by name."""
    path = [ROOT, HERE, *(folder / part for part in PARTS)]
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = Path(scratch) / "outcomes"
        outcomes.touch()
        done = subprocess.run(
            [*PYTEST, "-p", plugin, "--rootdir", str(folder), *map(str, files)], cwd=scratch,
            capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)),
                 "GLUON_AMP_MXNETS_TESTS": str(folder), "GLUON_AMP_OUTCOMES": str(outcomes),
                 "MXNET_TEST_SEED": "7", **variables})
        lines = outcomes.read_text().splitlines()
    return done.returncode, done.stdout + done.stderr, {
        name: (outcome, said) for name, outcome, said in map(json.loads, lines)}


def run(folder, arm, files=FILES):
    """The outcome and message of each test."""
    code, said, outcomes = run_pytest("mxnets_tests", folder, [
        folder / "unittest" / name for name in files], GLUON_AMP_IN_PLACE=arm)
    if code not in (0, 1) or not outcomes:  # 1: tests failed
        sys.exit(f"the tests did not end:\n{said}")
    return outcomes


def expected_failures(listed, arm=None):
    """For each test that may fail in an arm, a pattern of its error message."""
    words, arms, expected = "", None, {}
    for line in (HERE / listed).read_text().splitlines():
        if line.startswith("words: "):
            words = line[len("words: "):]
        elif line.startswith("scales: "):
            arms = line[len("scales: "):].split()
        elif line and not line.startswith("#"):
            file, *tests = line.split()
            if arms is None or arm in arms:
                expected.update({f"{file}::{test}": words for test in tests})
    return expected


def with_this_numpy(folder):
    import numpy
    outcomes = run(folder, "numpy", NUMPY_FILES)
    expected = expected_failures("mxnets_tests_numpy.txt")
    failed = {name: said for name, (outcome, said) in outcomes.items() if outcome == "failed"}
    unexpected = [f"{name}: {said}" for name, said in failed.items()
                  if not re.search(expected.get(name, NO_NETWORK), said)]
    passed = sum(outcome == "passed" for outcome, _ in outcomes.values())
    print(f"numpy {numpy.__version__}: {passed} of MXNet's tests pass, {len(failed)} fail, "
          f"{len(unexpected)} of these unexpectedly")
    sys.exit("\n".join(unexpected) or 0)


def main(folder, what):
    missing = [name for name in NEEDED if not folder or not (Path(folder) / name).is_file()]
    if missing:
        sys.exit("make -C tests mxnet MXNET_TESTS=FOLDER needs MXNet 1.9.1's own tests: the folder "
                 f"tests/python of its sources, with {', '.join(NEEDED)}. "
                 f"Missing in {folder or 'no folder'}: {', '.join(missing)}")
    folder = Path(folder).resolve()
    if what == "numpy":
        with_this_numpy(folder)
    alone, with_mxnet = (
        {name for name, (outcome, _) in run(folder, arm).items() if outcome == "passed"}
        for arm in ("alone", "mxnet"))
    print(f"with MXNet alone {len(alone)} tests pass, and with its Trainer and Module after the "
          f"import of gluon_amp {len(with_mxnet)}", flush=True)
    wrong = [f"{name} passes with MXNet alone only" for name in sorted(alone - with_mxnet)]
    for arm in ARMS:
        outcomes = run(folder, arm)
        failed = {name: outcomes.get(name, ("", "it did not run"))[1] for name in with_mxnet
                  if outcomes.get(name, ("",))[0] != "passed"}
        expected = expected_failures("mxnets_tests.txt", arm)
        unexpected = {name: said for name, said in failed.items()
                      if name not in expected or not re.search(expected[name], said)}
        print(f"loss_scale={arm}: {len(with_mxnet) - len(failed)} of them pass, "
              f"{len(failed) - len(unexpected)} are refused, {len(unexpected)} fail", flush=True)
        wrong += [f"loss_scale={arm}: {name}: {said}" for name, said in unexpected.items()]
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main(os.environ.get("MXNET_TESTS"), *sys.argv[1:] or ["in place"])
