"""Formats: what they hold, and rounding to them, against numpy and ml_dtypes."""
import numpy as np
import pytest
from gluon_amp.formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, get_format

ml_dtypes = pytest.importorskip("ml_dtypes")
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EACH = pytest.mark.parametrize("format_", FORMATS.values(), ids=list(FORMATS))


@EACH
def test_limits_are_those_of_the_type(format_):
    info = ml_dtypes.finfo(TYPES[format_.name])
    assert format_.largest == float(info.max)
    assert format_.smallest_normal == float(info.smallest_normal)
    assert format_.smallest == float(info.smallest_subnormal)
    counted = np.arange(format_.counts_to - 3, format_.counts_to + 2, dtype=np.float64)
    kept = counted.astype(TYPES[format_.name]).astype(np.float64) == counted
    assert kept.tolist() == [True] * 4 + [False]


@pytest.mark.parametrize("format_", [FLOAT16, BFLOAT16], ids=lambda format_: format_.name)
def test_every_number_and_tie_is_rounded_as_by_the_type(format_):
    dtype = TYPES[format_.name]
    numbers = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    assert np.array_equal(format_.round(numbers), numbers, equal_nan=True)
    finite = np.sort(numbers[np.isfinite(numbers)].astype(np.float64))
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    for near in (ties, *(np.nextafter(ties, np.float32(end)) for end in (np.inf, -np.inf)),
                 np.float32([65519.9, 65520, 3.4e38, 3.3961e38, -3.4e38, 1e-45])):
        with np.errstate(over="ignore"):
            expected = near.astype(dtype).astype(np.float32)
        rounded = format_.round(near)
        assert np.array_equal(rounded, expected)
        assert np.array_equal(np.signbit(rounded), np.signbit(expected))


def test_float64_is_rounded_once():
    between = 1 + 2.0 ** -11 + 2.0 ** -40  # above the tie, which float32 does not hold
    assert FLOAT16.round(between) == np.float32(1 + 2.0 ** -10)


@pytest.mark.parametrize(("numbers", "kept"), [
    ([1, 0, 65504, np.inf, np.nan], True), ([1e-9], False), ([1e5], False)])
def test_keeps_numbers_in_its_range(numbers, kept):
    assert FLOAT16.keeps(numbers) is kept
    assert FLOAT32.keeps(numbers)


@pytest.mark.parametrize("name", ["float8_e4m3", "tf32", "float64", None, 16])
def test_other_formats_are_refused(name):
    with pytest.raises(ValueError, match="the role must be float32, float16, bfloat16") as error:
        get_format(name, "the role")
    assert repr(name) in str(error.value)
