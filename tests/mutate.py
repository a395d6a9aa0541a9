"""Mutants: changes of the package, at random places, that tests should notice.

    make mutate N=200 SEED=1                       # the whole package, a tenth of them C++
    make mutate N=60 FILES=gluon_amp/training      # files or folders
    make -C tests mutate-bodies FILES=gluon_amp/graph PART=0/4    # the body of each function

Each mutant runs the tests that cover its place until one fails: `make coverage` has recorded them.
Those that all tests pass are listed, with the exit status 1.

Changes of functions are applied in a fork of a process that has collected the tests. Other changes
are applied to a copy of the checkout, whose engine is compiled again for C++.
"""
import ast
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections import defaultdict
from pathlib import Path

import contexts
import pytest
from coverage import CoverageData
from mutants import ROOT, PythonFile, cpp_mutants, first

ENGINE = Path("gluon_amp", "cpu", "_engine.so")
ELSEWHERE = "only a copy of the checkout can have this change"
PATIENCE, LONGEST = 100, 120  # seconds of a mutant's tests, as recorded, and of a test
PYTEST = ["-q", "-x", "--quick", "-p", "no:cacheprovider", "-p", "no:xdist"]


class Covering:
    """The tests that run lines of Python files."""

    def __init__(self):
        self._data = CoverageData(str(contexts.FOLDER / "data"))
        self._data.read()
        self._seconds = {}
        for file in contexts.FOLDER.glob("seconds.*.json"):
            self._seconds.update(json.loads(file.read_text()))

    def tests(self, mutant):
        """Those of a mutant, in PATIENCE: one case of each test before others, and those first that
        run lines of its function that few tests run."""
        lines = self._data.contexts_by_lineno(mutant.path)
        found = {test for line in self._lines(mutant) for test in lines.get(line, ())}
        found &= self._seconds.keys()
        fewest = dict.fromkeys(found, len(found))
        for line in self._around(mutant):
            for test in found.intersection(lines.get(line, ())):
                fewest[test] = min(fewest[test], len(lines[line]))
        cases = defaultdict(list)
        for test in sorted(found, key=lambda test: (fewest[test], self._seconds[test])):
            cases[test.partition("[")[0]].append(test)
        ranked = sorted((number, fewest[test], self._seconds[test], test) for of in cases.values()
                        for number, test in enumerate(of))
        total, kept = 0, []
        for *_, seconds, test in ranked:
            total += seconds
            if total < PATIENCE:
                kept.append(test)
        return kept

    @staticmethod
    def _around(mutant):
        """The lines of a mutant's outermost function."""
        for node in ast.walk(PythonFile(mutant.path).tree):
            if isinstance(node, ast.FunctionDef) and first(node) == mutant.function:
                return range(node.body[0].lineno, node.end_lineno + 1)
        return ()

    @staticmethod
    def _lines(mutant):
        """Outside functions: the lines that use the assigned names, or all lines of the file."""
        if mutant.function is not None:
            return mutant.place
        tree = PythonFile(mutant.path).tree
        names = {name.id for node in tree.body if isinstance(node, ast.Assign)
                 and node.lineno <= mutant.place[0] <= node.end_lineno
                 for name in node.targets if isinstance(name, ast.Name)}
        uses = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name)
                and node.id in names and isinstance(node.ctx, ast.Load)}
        return uses or range(1, 10000)


class Forks:
    """A plugin of pytest: runs the tests of each mutant in a fork, instead of all tests."""

    def __init__(self, jobs, report):
        self._jobs, self._report, self._passing = jobs, report, {}

    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        for mutant, tests in self._jobs:
            while True:
                tests = [test for test in tests if self._passing.get(test, True) and test in items]
                killer = self._run(session, [items[test] for test in tests], mutant)
                if killer not in items or self._passes(session, items[killer]):
                    break
            self._report(mutant, killer, tests)
        return True

    def _passes(self, session, item):
        """Whether a test passes in a fork without a change."""
        if item.nodeid not in self._passing:
            self._passing[item.nodeid] = self._run(session, [item], None) is None
        return self._passing[item.nodeid]

    def _run(self, session, items, mutant):
        """Returns the id of the first test that fails or does not end, None, or ELSEWHERE."""
        with tempfile.TemporaryFile("w+") as answer:
            pid = os.fork()
            if pid == 0:
                status = 2
                try:
                    if mutant is not None:
                        change(mutant)
                    status = 1
                    for item, following in zip(items, [*items[1:], None]):
                        answer.seek(0)
                        answer.truncate()
                        answer.write(item.nodeid)
                        answer.flush()
                        signal.alarm(LONGEST)  # ends this process
                        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                        if session.testsfailed:
                            break
                    else:
                        status = 0
                finally:
                    os._exit(status)
            _, status = os.waitpid(pid, 0)
            if status == 2 << 8:
                return ELSEWHERE
            answer.seek(0)
            return answer.read() if status else None


def change(mutant):
    """Replaces the code of a function of this process."""
    def within(code):
        """The code objects in a code object, by name and line."""
        for of in code.co_consts:
            if isinstance(of, types.CodeType):
                yield (of.co_name, of.co_firstlineno), of
                yield from within(of)

    path = str(ROOT / mutant.path)
    code = dict(within(compile(mutant.source(), path, "exec")))[mutant.function]
    new = {mutant.function: code, **dict(within(code))}  # functions that it has returned, too
    functions = [(of, new[of.__code__.co_name, of.__code__.co_firstlineno])
                 for of in gc.get_objects() if isinstance(of, types.FunctionType)
                 and of.__code__.co_filename == path
                 and (of.__code__.co_name, of.__code__.co_firstlineno) in new]
    assert functions
    for function, code in functions:
        function.__code__ = code


def in_copy(copy, mutant, tests):
    """Runs tests in the copy of the checkout with a change; returns what notices it, or None."""
    file, before = copy / mutant.path, Path(ROOT, mutant.path).read_bytes()
    environment = {**os.environ, "PYTHONPATH": str(copy), "GLUON_AMP_OBJECTS": f"{copy}/objects"}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    file.write_bytes(mutant.source())
    try:
        if file.suffix == ".cc" and subprocess.run(build, cwd=copy, env=environment,
                                                   capture_output=True).returncode:
            return "the compiler"
        done = subprocess.run([sys.executable, "-m", "pytest", *PYTEST, *tests], cwd=copy,
                              env=environment, capture_output=True, text=True, timeout=3000)
        noticed = [line for line in done.stdout.splitlines()
                   if line.startswith(("FAILED", "ERROR"))]
        return (noticed or ["a test"])[0] if done.returncode else None
    finally:
        file.write_bytes(before)
        shutil.copy2(ROOT / ENGINE, copy / ENGINE)


def make_copy(copy):
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for file in [*(ROOT / name for name in files), *ROOT.glob("gluon_amp/**/*.so")]:
        target = copy / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    objects = Path(os.environ.get("GLUON_AMP_OBJECTS", ROOT / "build" / "objects"))
    if objects.is_dir():
        shutil.copytree(objects, copy / "objects")


def sample(files, covering, number, seed):
    """Random mutants with their tests: of Python, and a tenth of them of C++, if there are both."""
    pool = {suffix: [mutant for path in files if path.endswith(suffix)
                     for mutant in (PythonFile(path).mutants() if suffix == ".py"
                                    else cpp_mutants(path))] for suffix in (".py", ".cc")}
    rng, jobs = random.Random(seed), []
    while len(jobs) < number and any(pool.values()):
        cpp = not pool[".py"] or pool[".cc"] and rng.random() < 0.1
        of = pool[".cc" if cpp else ".py"]
        mutant = of.pop(rng.randrange(len(of)))
        tests = ["tests/cpu"] if cpp else covering.tests(mutant)
        if tests:  # others are lines that `make coverage` lists
            jobs.append((mutant, tests))
    return jobs


def main(number, of, *paths):
    """Runs a number of mutants of a seed, or "bodies" of a part such as 0/4."""
    names = subprocess.check_output(["git", "ls-files", *(paths or ["gluon_amp"])], cwd=ROOT,
                                    text=True).split()
    covering, survivors, count = Covering(), [], 0
    if number == "bodies":
        part, parts = map(int, of.split("/"))
        jobs = [(mutant, covering.tests(mutant)) for path in names if path.endswith(".py")
                for mutant in PythonFile(path).bodies()][part::parts]
    else:
        jobs = sample(names, covering, int(number), int(of))

    def report(mutant, killer, tests):
        nonlocal count
        if killer == ELSEWHERE:
            others.append((mutant, tests))
            return
        if killer is None:
            survivors.append(f"{mutant} ({len(tests)} tests)")
        count += 1
        print(f"\n{count}/{len(jobs)} {mutant}: {killer or 'SURVIVES'}", file=output, flush=True)

    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(1), "w") as output:
        forked = [job for job in jobs if job[0].function is not None]
        others = [job for job in jobs if job[0].function is None]
        files = sorted({test.partition("::")[0] for _, tests in forked for test in tests})
        if forked:
            os.chdir(ROOT)
            pytest.main([*PYTEST, *files], plugins=[Forks(forked, report)])
        if others:
            make_copy(Path(folder))
        for mutant, tests in others:
            report(mutant, in_copy(Path(folder), mutant, tests), tests)
    print(f"{len(survivors)} of {len(jobs)} survive:", *survivors, sep="\n")
    return bool(survivors)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork has no threads of the process before it
    sys.exit(main(*sys.argv[1:]))
