"""Rounding against what others wrote: numpy (float16), ml_dtypes, gfloat."""
import sys

import numpy as np
import pytest
from gluon_amp._mxnet import mx
from gluon_amp.cpu import library
from gluon_amp.formats import FORMATS, Format, random_bits

NAMES = ["float16", "bfloat16", "tf32", "float8_e4m3", "float8_e5m2"]
IEEE = [Format("e4m3_with_infinities", 4, 3), Format("e3m4", 3, 4)]
ALL = [*map(FORMATS.get, NAMES), *IEEE]

# What numpy and ml_dtypes call them.
THEIRS = {"bfloat16": "bfloat16", "float8_e4m3": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
          "e4m3_with_infinities": "float8_e4m3", "e3m4": "float8_e3m4"}


def dtype_of(format_):
    if format_.name == "float16":
        return np.dtype(np.float16)
    if sys.version_info < (3, 9):
        pytest.skip("ml_dtypes is for Python 3.9 on")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return np.dtype(getattr(ml_dtypes, THEIRS[format_.name]))


def every_number(format_):
    """All finite numbers from 0 on, in order; of formats with many, those of every 13th binade."""
    steps = np.arange(2 ** format_.fraction, dtype=np.float64)
    exponents = np.arange(1 - format_.bias, int(np.log2(format_.largest)) + 1)
    if format_.fraction + format_.exponent > 15:
        exponents = exponents[np.r_[0, 1, 2:len(exponents) - 2:13, -2, -1]]
    normal = np.outer(2.0 ** exponents, 1 + steps / 2 ** format_.fraction).ravel()
    numbers = np.concatenate([steps * format_.smallest, normal])
    return numbers[numbers <= format_.largest]


def around(format_):
    """Each number, the ties above it, the floats on both sides of both, and what is no number."""
    numbers = every_number(format_)
    step = np.diff(numbers, append=2 * numbers[-1] - numbers[-2])
    with np.errstate(over="ignore"):
        at = np.concatenate([numbers, numbers + step / 2, numbers + step]).astype(np.float32)
        beside = [np.nextafter(at, np.float32(to)) for to in (np.inf, -np.inf)]
    tiny = np.float32([1e-45, 1e-40, np.finfo(np.float32).tiny])
    most = np.finfo(np.float32).max
    rest = np.concatenate([numbers[-3:], tiny, [most, np.inf, np.nan, 0]])
    made = np.concatenate([at, *beside, rest, -rest]).astype(np.float32)
    made[1:-len(rest):2] *= -1  # others with either sign in turn: the sign is a bit of its own
    return made


def assert_same(ours, theirs, x):
    """Equal, zeros by their signs, too."""
    theirs = np.asarray(theirs).astype(np.float32)
    differs = ~(np.isnan(ours) & np.isnan(theirs)) \
        & (ours.view(np.uint32) != theirs.view(np.uint32))
    assert not differs.any(), (x[differs][:5], ours[differs][:5], theirs[differs][:5])


@pytest.mark.parametrize("format_", [f for f in ALL if f.name != "tf32"], ids=lambda f: f.name)
def test_every_code_of_the_format_is_a_number_of_it(format_):
    dtype = dtype_of(format_)
    codes = np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}")
    values = codes.view(dtype).astype(np.float32)
    assert_same(format_.round(values), values, values)
    finite = np.unique(np.abs(values[np.isfinite(values)]))
    assert finite[-1] == format_.largest
    assert finite[1] == format_.smallest
    if dtype.itemsize == 1:
        assert np.array_equal(finite, every_number(format_))


@pytest.mark.parametrize("format_", [f for f in ALL if f.name != "tf32"], ids=lambda f: f.name)
def test_numbers_round_as_numpy_and_ml_dtypes_round_them(format_):
    x = around(format_)
    dtype = dtype_of(format_)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same(format_.round(x), x.astype(dtype), x)


def gfloats(format_):
    if sys.version_info < (3, 10):
        pytest.skip("gfloat is for Python 3.10 on")
    gfloat = pytest.importorskip("gfloat")
    extended = format_.infinities
    return gfloat, gfloat.FormatInfo(
        format_.name, k=1 + format_.exponent + format_.fraction, precision=format_.fraction + 1,
        bias=format_.bias, is_signed=True, has_nz=True, has_subnormals=True,
        domain=gfloat.Domain.Extended if extended else gfloat.Domain.Finite,
        num_high_nans=2 ** format_.fraction - 1 if extended else 1, is_twos_complement=False)


def rounded_by_gfloat(format_, x, mode, **more):
    gfloat, info = gfloats(format_)
    with np.errstate(over="ignore", invalid="ignore"):
        return gfloat.round_ndarray(info, x.astype(np.float64), gfloat.RoundMode[mode],
                                    sat=format_.saturate, **more)


def some(x):
    """Of many numbers a tenth and the last, for gfloat is slow."""
    return np.concatenate([x[:-100:11], x[-100:]]) if len(x) > 20000 else x


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("rounding", "mode"), [("nearest", "TiesToEven"), ("zero", "TowardZero")])
@pytest.mark.parametrize("format_", ALL, ids=lambda f: f.name)
def test_numbers_round_as_gfloat_rounds_them(format_, rounding, mode, saturate):
    ours = variant(format_, rounding, saturate)
    x = some(around(format_))
    assert_same(ours.round(x), rounded_by_gfloat(ours, x, mode), x)


@pytest.mark.parametrize("format_", ALL, ids=lambda f: f.name)
def test_the_same_random_bits_round_to_the_same_numbers_as_gfloats(format_):
    ours, key = variant(format_, "stochastic"), 0x123456789abcdef0
    x = np.random.default_rng(1).permutation(some(around(format_)))
    bits, dropped = random_bits(key, x.size).astype(np.int64), 23 - ours.fraction
    normal = rounded_by_gfloat(ours, x, "StochasticFastest", srbits=bits % 2 ** dropped,
                               srnumbits=dropped)
    small = rounded_by_gfloat(ours, x, "StochasticFast", srbits=2 ** 23 - 1 - (bits >> 9),
                              srnumbits=23)
    expected = np.where(np.abs(x) < ours.smallest_normal, small, normal)
    assert_same(ours.round(x, key), expected, x)


def variant(format_, rounding, saturate=False):
    return Format(f"{format_.name}_{rounding}", format_.exponent, format_.fraction,
                  format_.infinities, saturate, rounding)


@pytest.mark.parametrize("rounding", ["nearest", "zero", "stochastic"])
@pytest.mark.parametrize("format_", ALL, ids=lambda f: f.name)
def test_the_engine_rounds_as_formats_py_says(format_, rounding):
    key = 2 ** 63 + 12345
    for saturate in (False, True):
        ours = variant(format_, rounding, saturate)
        x = around(format_)
        numbers = mx.nd.array(x, dtype="float32")
        engines = library.call("_gluon_amp_round_to_grid", [numbers], grid=ours.for_engine, key=key)
        expected = ours.round(x, key) if rounding == "stochastic" else ours.round(x)
        assert_same(engines.asnumpy(), expected, x)
