"""The engine's loops, compiled for each instruction set."""
import processes
import pytest
from gluon_amp.cpu import library

# files, and the tests of them that call each loop
TESTS = {"test_bfloat16": "", "test_kernels": "", "test_engine_norms": "batch_norm_matches_numpy",
         "test_one_pass_optimizers": "clipped or settings_of"}


@pytest.mark.parametrize("isa", list(library.VARIANTS))
def test_each_instruction_set(isa):
    if isa == library.load():
        return  # this run tests it
    names = " or ".join(f"({file}.py and ({tests}))" if tests else f"{file}.py"
                        for file, tests in TESTS.items())
    done = processes.run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", names,
                         *(f"tests/cpu/{file}.py" for file in TESTS), GLUON_AMP_ISA=isa)
    if "must be one of" in done.stdout:
        pytest.skip(f"this processor has no {isa}")
    assert done.returncode == 0, done.stdout
