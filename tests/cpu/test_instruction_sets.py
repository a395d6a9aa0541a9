"""The engine's loops, compiled for each instruction set: the tests with the marker `vectorized`."""
from pathlib import Path

import processes
import pytest
from gluon_amp.cpu import library

pytestmark = pytest.mark.long

FILES = [file for file in sorted(Path(__file__).parent.glob("test_*.py"))
         if "pytest.mark.vectorized" in file.read_text()]  # the others take time to import


@pytest.mark.parametrize("isa", list(library.VARIANTS))
def test_each_instruction_set(isa, pytestconfig, monkeypatch):
    if isa == library.load():
        return  # this run tests it
    monkeypatch.setenv("GLUON_AMP_ISA", isa)
    try:
        library.choose()
    except library.KernelError:
        pytest.skip(f"this processor has no {isa}")
    done = processes.run_tests(pytestconfig, "-m", "vectorized", *FILES, GLUON_AMP_ISA=isa)
    assert done.returncode == 0, done.stdout
