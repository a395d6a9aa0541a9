"""`make -C tests mxnet-float16 MXNET_SOURCE=FOLDER`: MXNet 1.9.1's own tests in float16 on a CPU.

They are the tests of `tests/python/gpu/test_operator_gpu.py` that compare contexts, with the
contexts float64, float32 and float16 on the CPU, and all tests of `tests/python/unittest` that have
float16 in them or in a helper that they call. mxnet_float16.txt lists each failing test with the
reason; any difference from it is an error. `--off` runs them without the engine.

Each file runs in a new process, which continues after a test that ends the process or takes longer
than LONGEST seconds. As a plugin of pytest, this file selects the tests.
"""
import inspect
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mxnets_tests

GPU = "test_operator_gpu.py"
LONGEST = 1800
WORKERS = 2


# ---- the plugin of pytest


def pytest_configure(config):
    mx = mxnets_tests.prepare()
    mx.gpu = mx.context.gpu = mx.cpu
    _scale_expected()
    compare = mx.test_utils.check_consistency
    mx.test_utils.check_consistency = lambda sym, contexts, *args, **kwargs: compare(
        *on_cpu(sym, contexts), *args, **kwargs)


def _scale_expected():
    """MXNet's tests of random numbers pass expected frequencies whose sum differs slightly from
    that of the observed ones, which old scipy allowed."""
    from scipy import stats
    chisquare = stats.chisquare
    stats.chisquare = lambda f_obs, f_exp: chisquare(
        f_obs, [e * sum(f_obs) / sum(f_exp) for e in f_exp])


def on_cpu(symbols, contexts):
    """The symbols and contexts with each case in float64, float32 and float16 on the CPU."""
    import mxnet as mx
    import numpy as np
    symbols = symbols if isinstance(symbols, list) else [symbols] * len(contexts)
    made, seen = [], set()
    for symbol, context in zip(symbols, contexts):
        shapes = {k: v for k, v in context.items() if k not in ("ctx", "type_dict")}
        case = symbol.tojson(), str(shapes)
        if case in seen:
            continue
        seen.add(case)
        types = context.get("type_dict") or dict.fromkeys(shapes, np.float32)
        made += [(symbol, {"ctx": mx.cpu(), **shapes, "type_dict": {
            name: dtype if np.dtype(old).kind == "f" else old for name, old in types.items()}})
            for dtype in (np.float64, np.float32, np.float16)]
    return [symbol for symbol, _ in made], [context for _, context in made]


def mentions(function, word, seen):
    """Whether a word occurs in a function, or in a function of the same folder that it names."""
    function = inspect.unwrap(function)
    if function in seen or not inspect.isfunction(function):
        return False
    seen.add(function)
    names = set(re.findall(r"\w+", inspect.getsource(function)))
    if word in names:
        return True
    here = os.environ["GLUON_AMP_MXNETS_TESTS"]
    called = [function.__globals__.get(name) for name in names]
    return any(mentions(f, word, seen) for f in called if inspect.isfunction(f)
               and inspect.getsourcefile(inspect.unwrap(f)).startswith(here))


def pytest_collection_modifyitems(items):
    done = set(filter(None, os.environ["GLUON_AMP_DONE"].split("\n")))

    def selected(item):
        function = inspect.unwrap(item.function)
        here = item.path.name == Path(inspect.getsourcefile(function)).name
        word = "check_consistency" if item.path.name == GPU else "float16"
        return here and item.nodeid.split("/")[-1] not in done and mentions(function, word, set())
    items[:] = filter(selected, items)


def pytest_runtest_logstart(nodeid):
    signal.alarm(LONGEST)
    mxnets_tests.note(nodeid, "started", "")


pytest_runtest_logreport = mxnets_tests.pytest_runtest_logreport


# ---- the command


def run(folder, name, off):
    """The outcome and message of each test of a file, by name."""
    made, variables = {}, {"GLUON_AMP_ENGINE": "off"} if off else {}
    path = folder / ("gpu" if name == GPU else "unittest") / name
    while True:
        code, text, ended = mxnets_tests.run_pytest(
            "mxnet_float16", folder, [path], GLUON_AMP_DONE="\n".join(made), **variables)
        open_ = [test for test, (outcome, _) in ended.items() if outcome == "started"]
        for test in open_:
            ended[test] = "failed", f"it ends the process: {code}"
        made.update(ended)
        if not open_:
            if code not in (0, 1, 5):  # 1: tests failed, 5: none was selected
                sys.exit(f"{name} did not end:\n{text}")
            return made


def main(folder, off):
    if not folder or not (Path(folder) / "tests/python/gpu" / GPU).is_file():
        sys.exit("make -C tests mxnet-float16 MXNET_SOURCE=FOLDER needs sources of MXNet 1.9.1, "
                 f"with tests/python/gpu/{GPU}. Received: {folder or 'no folder'}")
    folder = Path(folder).resolve() / "tests/python"
    files = [path.name for path in sorted((folder / "unittest").glob("test_*.py"))
             if "float16" in path.read_text()]
    outcomes = {}
    with ThreadPoolExecutor(WORKERS) as pool:
        for made in pool.map(lambda name: run(folder, name, off), [GPU, *files]):
            outcomes.update(made)
    failed = {name: said for name, (outcome, said) in outcomes.items() if outcome == "failed"}
    counts = [sum(outcome == word for outcome, _ in outcomes.values())
              for word in ("passed", "skipped")]
    print(f"{len(outcomes)} of MXNet's tests in float16: {counts[0]} pass, {len(failed)} fail, "
          f"{counts[1]} are skipped")
    if off:
        print(*(f"{name}: {said}" for name, said in sorted(failed.items())), sep="\n")
        return
    expected = mxnets_tests.expected_failures("mxnet_float16.txt")
    wrong = [f"{name} fails: {said}" for name, said in failed.items()
             if name not in expected or not re.search(expected[name], said)]
    wrong += [f"{name} is listed, and passes" for name in expected if name not in failed]
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main(os.environ.get("MXNET_SOURCE"), "--off" in sys.argv)
