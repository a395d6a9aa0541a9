"""results/tensor_cores: the rule in numpy gives the measured results of GPUs, bit for bit."""
import csv
import importlib.util
import re
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np
import pytest

STUDY = Path(__file__).parents[2] / "results" / "tensor_cores"
spec = importlib.util.spec_from_file_location("tensor_core_rule", STUDY / "rule.py")
rule = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rule)

GPUS = {"L40S": "Ada"}  # others have the name of their rule
each_gpu = pytest.mark.parametrize("gpu", rule.RULES)


def bits(text):
    """Returns float32 numbers from their bits, written without trailing zeros."""
    words = [int(word.ljust(8, "0"), 16) for word in text.split()]
    return np.array(words, "uint32").view("float32")


def measured():
    """Returns the arrays a, b, c and d by GPU, format of factors and format of sums."""
    rows = defaultdict(list)
    with open(STUDY / "measured" / "sample.csv") as file:
        for row in csv.DictReader(file):
            rows[row["gpu"], row["factors"], row["sums"]].append([bits(row[x]) for x in "abcd"])
    return {key: [np.array(x) for x in zip(*some)] for key, some in rows.items()}


MEASURED = measured()


def test_sample_has_each_measured_gpu_and_format():
    assert {gpu for gpu, _, _ in MEASURED} == {"V100", "A2", "A100", "Ada", "L40S", "H100", "H200",
                                               "B200"}
    for gpu in {gpu for gpu, _, _ in MEASURED}:
        assert {f for g, f, _ in MEASURED if g == gpu} == set(rule.RULES[GPUS.get(gpu, gpu)])


@pytest.mark.parametrize("key", MEASURED, ids=" ".join)
def test_rule_gives_the_measured_bits(key):
    (gpu, factors, sums), (a, b, c, d) = key, MEASURED[key]
    result = rule.product(a[:, None].astype("float64"), b[:, :, None].astype("float64"),
                          c[:, None].astype(sums), rule.RULES[GPUS.get(gpu, gpu)][factors],
                          rule.FORMATS[factors])
    np.testing.assert_array_equal(result.ravel().astype("float32").view("uint32"),
                                  d.ravel().view("uint32"))


def test_documented_examples():
    a, b = [[4096, 1, 1, 1]], [[4096], [1], [1], [1]]
    assert rule.dot(a, b, gpu="V100") == 16777216
    assert rule.dot(a, b, gpu="A100") == 16777218
    a, b = [[128, 0.5]], [[64], [1]]
    assert rule.dot(a, b, gpu="H100", factors="float8_e4m3") == 8192
    assert rule.dot(a, b, gpu="B200", factors="float8_e4m3") == 8192.5


@each_gpu
def test_chain_continues_with_the_sum_and_pieces_are_added(gpu, rng):
    a, b = (rng.standard_normal(shape).astype("float16") for shape in ((3, 50), (50, 4)))
    c = rng.standard_normal((3, 4)).astype("float32")
    first = rule.dot(a[:, :32], b[:32], c, gpu)
    np.testing.assert_array_equal(rule.dot(a, b, c, gpu), rule.dot(a[:, 32:], b[32:], first, gpu))
    np.testing.assert_array_equal(rule.dot(a, b, c, gpu, split=32),
                                  first + rule.dot(a[:, 32:], b[32:], 0, gpu))


@each_gpu
def test_error_of_an_instruction_is_within_its_bound(gpu, rng):
    block, fraction, _, _ = rule.RULES[gpu]["float16"]
    a, b = (rng.standard_normal((300, block)).astype("float16").astype("float64") for _ in "ab")
    c = rng.standard_normal(300).astype("float32")
    result = rule.dot(a[:, None], b[:, :, None], c[:, None, None], gpu).ravel()
    largest = np.maximum((np.frexp(a)[1] + np.frexp(b)[1] - 2).max(1), np.frexp(c)[1] - 1)
    bound = block * np.ldexp(1.0, largest - fraction) + np.spacing(abs(result)).astype("float64")
    assert np.all(abs(result - ((a * b).sum(1) + c)) < bound)


@each_gpu
def test_special_values(gpu):
    inf, nan = np.inf, np.nan
    a, b = [[[inf, 1]], [[inf, -inf]], [[nan, 1]], [[-0.0, 0]]], [[[1], [1]]] * 4
    result = rule.dot(a, b, -0.0, gpu).ravel()
    assert [hex(word) for word in result.view("uint32")] == ["0x7f800000", "0x7fffffff",
                                                             "0x7fffffff", "0x0"]


@pytest.mark.parametrize(("arguments", "valid"), [
    ({"gpu": "K80"}, "V100, T4"), ({"factors": "tf32"}, "float16"), ({"split": 0}, "1"),
    ({"sums": "float64"}, "float32"), ({"c": 0.1}, "float32"),
    ({"gpu": "A100", "factors": "tf32", "sums": "float16"}, "float32"),
    ({"gpu": "H100", "factors": "float8_e4m3"}, "float8_e4m3")])
def test_invalid_arguments_are_refused(arguments, valid):
    with pytest.raises(ValueError, match=valid):
        rule.dot([[449.0]], [[1.0]], **arguments)


def test_script_draws_the_figures_of_the_page(tmp_path, monkeypatch):
    """With short sums, which change only the curves."""
    monkeypatch.syspath_prepend(str(STUDY))
    import draw
    monkeypatch.setattr(draw, "LENGTHS", [16, 500])
    with matplotlib.rc_context():
        draw.draw(tmp_path)
    pictures = re.findall(r"\]\((\w+\.png)\)", (STUDY / "README.md").read_text())
    assert {path.name for path in tmp_path.iterdir()} == set(pictures)
    assert {path.name for path in STUDY.glob("*.png")} == set(pictures)
