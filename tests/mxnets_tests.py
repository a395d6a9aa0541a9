"""`make test-mxnet MXNET_TESTS=FOLDER`: runs MXNet 1.9.1's own tests with `amp.Trainer` and
`amp.Module` in place of MXNet's, without a loss scale and with one.

What passes with MXNet's passes without a loss scale. With one, a test may fail by a refusal that
stands in mxnets_tests.txt: MXNet's tests call `loss.backward()`, for one.

As a plugin of pytest, this file runs them with what GLUON_AMP_IN_PLACE says: "mxnet", "None", or a
loss scale.
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

ROOT = Path(__file__).parent.parent
FILES = ("test_gluon_trainer.py", "test_module.py", "test_loss.py", "test_gluon.py")
NEEDED = (*(f"unittest/{name}" for name in (*FILES, "common.py")), "common/models.py",
          "train/test_bucketing.py")
# test_gluon.py is about blocks: of its tests, those that have a Trainer or a Module
APPLIES = re.compile(r"\b(Trainer|Module)\b")
ARMS = ("None", "1024", "dynamic")  # of loss_scale


# ---- a plugin of pytest


def pytest_configure(config):
    _make_nose()
    import gluon_amp as amp
    from gluon_amp._mxnet import mx
    arm = os.environ["GLUON_AMP_IN_PLACE"]
    if arm == "mxnet":
        return
    scale = {"None": None, "1024": 1024}.get(arm, arm)

    def scaled(cls):
        def init(self, *args, **kwargs):
            cls.__init__(self, *args, **{"loss_scale": scale, **kwargs})
        return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__})

    mx.gluon.Trainer = mx.gluon.trainer.Trainer = scaled(amp.Trainer)
    mx.mod.Module, mx.mod.BucketingModule = scaled(amp.Module), scaled(amp.BucketingModule)


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.path.name != "test_gluon.py"
                or APPLIES.search(inspect.getsource(inspect.unwrap(item.function)))]


def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed or report.skipped:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message if report.failed and crash else ""
        line = json.dumps([report.nodeid.split("/")[-1], report.outcome, said])
        with open(os.environ["GLUON_AMP_OUTCOMES"], "a") as file:
            file.write(f"{line}\n")


def _make_nose():
    """What MXNet's tests take of nose, which no Python of today runs."""
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
    nose = types.ModuleType("nose")
    nose.tools = tools
    sys.modules.update({"nose": nose, "nose.tools": tools})


# ---- the command


def run(folder, arm):
    """The outcome of each test, by its name: passed, skipped or failed, and with which words."""
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = Path(scratch) / "outcomes"
        path = [str(ROOT), str(ROOT / "tests"),
                *(str(folder / part) for part in ("unittest", "common", "train"))]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--tb=short", "--no-header",
             "-p", "mxnets_tests", "-p", "no:cacheprovider", "-c", os.devnull,
             "--rootdir", str(folder), *(str(folder / "unittest" / name) for name in FILES)],
            cwd=scratch, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "GLUON_AMP_IN_PLACE": arm,
                 "GLUON_AMP_OUTCOMES": str(outcomes), "MXNET_TEST_SEED": "7"})
        if not outcomes.exists():
            sys.exit(f"no test ran:\n{done.stdout}{done.stderr}")
        lines = outcomes.read_text().splitlines()
    return {name: (outcome, said) for name, outcome, said in map(json.loads, lines)}


def expected_refusals():
    """For each test that a loss scale refuses, a pattern of the error's words."""
    words, expected = "", {}
    for line in (ROOT / "tests" / "mxnets_tests.txt").read_text().splitlines():
        if line.startswith("words: "):
            words = line[len("words: "):]
        elif line and not line.startswith("#"):
            file, *tests = line.split()
            expected.update({f"{file}::{test}": words for test in tests})
    return expected


def main(folder):
    missing = [name for name in NEEDED if not folder or not (Path(folder) / name).is_file()]
    if missing:
        sys.exit("make test-mxnet MXNET_TESTS=FOLDER needs MXNet 1.9.1's own tests: the folder "
                 f"tests/python of its sources, with {', '.join(NEEDED)}. "
                 f"Missing in {folder or 'no folder'}: {', '.join(missing)}")
    folder = Path(folder).resolve()
    with_mxnet = {name for name, (outcome, _) in run(folder, "mxnet").items()
                  if outcome == "passed"}
    print(f"with MXNet's Trainer and Module {len(with_mxnet)} tests pass", flush=True)
    wrong = []
    for arm in ARMS:
        outcomes = run(folder, arm)
        failed = {name: outcomes.get(name, ("", "it did not run"))[1] for name in with_mxnet
                  if outcomes.get(name, ("",))[0] != "passed"}
        expected = {} if arm == "None" else expected_refusals()
        unexpected = {name: said for name, said in failed.items()
                      if name not in expected or not re.search(expected[name], said)}
        print(f"loss_scale={arm}: {len(with_mxnet) - len(failed)} of them pass, "
              f"{len(failed) - len(unexpected)} are refused, {len(unexpected)} fail", flush=True)
        wrong += [f"loss_scale={arm}: {name}: {said}" for name, said in unexpected.items()]
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main(os.environ.get("MXNET_TESTS"))
