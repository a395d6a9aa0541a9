"""A pytest plugin, for coverage.py: which tests run a line, and how long each test takes.

    coverage run -m pytest -p contexts

Records the name of the running test with each line, and writes the seconds of processors of each
test beside the data.
"""
import json
import os
from pathlib import Path

import coverage
import pytest

FOLDER = Path(__file__).parents[1] / "build" / "coverage"
seconds = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    measured, start = coverage.Coverage.current(), sum(os.times()[:4])
    if measured is not None:
        measured.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        seconds[item.nodeid] = sum(os.times()[:4]) - start
        if measured is not None:
            measured.switch_context("")


def pytest_sessionfinish():
    if seconds:
        (FOLDER / f"seconds.{os.getpid()}.json").write_text(json.dumps(seconds))
