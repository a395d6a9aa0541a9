"""Unary operators over all 65,536 numbers of a 16-bit type (docs/numbers.md)."""
import numpy as np
import pytest

pytest.importorskip("scipy.special", exc_type=ImportError)  # processes.py hides it
import every_number

pytestmark = pytest.mark.isa


@pytest.mark.parametrize("operator", sorted(every_number.REFERENCES))
def test_float16_is_nearest_number_or_next_to_it(operator):
    errors = every_number.errors(operator, "float16")
    assert errors.min() >= 0, "NaN in one of result and reference"
    assert errors.max() <= 1
    assert (errors > 0).mean() < 1e-3


@pytest.mark.parametrize("operator", sorted(set(every_number.REFERENCES) - {"sigmoid"}))
def test_bfloat16_is_nearest_number(operator):
    """Or the next one, for a few numbers in a C library with larger errors in float32."""
    errors = every_number.errors(operator, "bfloat16")
    assert errors.min() >= 0, "NaN in one of result and reference"
    assert errors.max() <= 1
    assert errors.sum() <= 3


def test_bfloat16_sigmoid_is_nearest_number_where_float32_holds_it():
    errors, values = every_number.errors("sigmoid", "bfloat16"), every_number.ALL["bfloat16"]
    far = values[errors != 0]
    assert ((far > -104) & (far < -88)).all()


def test_page_lists_every_operator():
    text = every_number.PAGE.read_text()
    assert all(f"`{operator}`" in text for operator in every_number.REFERENCES)


def test_reference_is_rounded_once():
    """1 + 2^-8 + 2^-40 lies above the middle of two numbers, where float32 would have it."""
    middle = np.array([1 + 2.0 ** -8, 1 + 2.0 ** -8 + 2.0 ** -40, 1 + 2.0 ** -8 - 2.0 ** -40])
    assert every_number.rounded(middle, "bfloat16").tolist() == [1, 1 + 2.0 ** -7, 1]
