"""The C++ kernels against numpy, for each instruction set of this processor."""

import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from gluon_amp.formats import BFLOAT16, FLOAT16
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

pytestmark = [pytest.mark.sanitize, pytest.mark.isa, pytest.mark.vectorized]

ALL_HALVES = np.arange(65536, dtype=np.uint16).view(np.float16)
SIZES = [0, 1, 2, 7, 15, 16, 17, 31, 33, 4095, 4096, 4097, 32768, 100003]


def same_bits(a, b):
    """Bitwise equal, except that any NaN equals any NaN."""
    a, b = np.asarray(a), np.asarray(b)
    nan = np.isnan(a) & np.isnan(b)
    bits = f"u{a.dtype.itemsize}"
    return a.dtype == b.dtype and bool((nan | (a.view(bits) == b.view(bits))).all())


def call(name, *arrays, **attrs):
    operator = name if name in library.operators() else library.PREFIX + name
    return library.call(operator, [mx.nd.array(a, dtype=a.dtype) for a in arrays],
                        **attrs).asnumpy()


def to_half(x):
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def around_every_half():
    """Each half, the ties above it, and the floats on both sides of both."""
    finite = ALL_HALVES[np.isfinite(ALL_HALVES)].astype(np.float32)
    with np.errstate(over="ignore"):
        up = np.nextafter(finite.astype(np.float16), np.float16(np.inf)).astype(np.float32)
    up[np.isinf(up)] = 65536.0
    tie = (finite + up) / 2
    points = np.concatenate([finite, tie])
    return np.concatenate([points, np.nextafter(points, np.float32(np.inf)),
                           np.nextafter(points, np.float32(-np.inf))])


def test_widen_is_exact_for_every_half():
    assert same_bits(call("Cast", ALL_HALVES, dtype="float32"), ALL_HALVES.astype(np.float32))


def test_narrow_round_trips_every_half():
    exact = ALL_HALVES.astype(np.float32)
    assert same_bits(call("Cast", exact, dtype="float16"), ALL_HALVES)


def test_narrow_rounds_ties_to_even():
    points = around_every_half()
    assert same_bits(call("Cast", points, dtype="float16"), to_half(points))


def test_master_weight_follows_written_weight():
    masters = around_every_half()
    rounded = to_half(masters)
    assert same_bits(call("follow", masters, rounded), masters)
    written = np.roll(rounded, 1)
    changed = written != rounded  # 0 and -0 are equal
    written[5], changed[5] = np.nan, True
    followed = np.where(changed, written.astype(np.float32), masters)
    assert changed.mean() > 0.9
    assert same_bits(call("follow", masters, written), followed)


@pytest.mark.parametrize("size", SIZES)
def test_any_size(size, rng):
    x = rng.standard_normal(size).astype(np.float32)
    half = x.astype(np.float16)
    with mx.util.np_shape(True):  # without it, MXNet reads 0 as "unknown"
        assert same_bits(call("Cast", x, dtype="float16"), half)
        assert same_bits(call("elemwise_add", half, half), half + half)
        assert same_bits(call("Cast", half, dtype="float32"), half.astype(np.float32))


def boundaries(format_):
    """Numbers of the format, the midpoints between them, and the adjacent floats."""
    mantissas = 1 + np.arange(0, 2, 2.0 ** -min(format_.fraction + 1, 5))
    powers = 2.0 ** np.arange(round(np.log2(format_.smallest_normal)), min(126, 129))
    numbers = np.concatenate([
        np.outer(powers, mantissas).ravel()[::7], format_.smallest * np.arange(0, 20, 0.5),
        [format_.largest, format_.largest * (1 + 2.0 ** -(format_.fraction + 2))]])
    with np.errstate(over="ignore"):
        at = numbers.astype(np.float32)
        around = np.concatenate([at, np.nextafter(at, np.float32(np.inf)),
                                 np.nextafter(at, np.float32(-np.inf)), [np.inf, np.nan, 0]])
    return np.concatenate([around, -around]).astype(np.float32)


def rounded_by_engine(x, format_):
    return mx.nd.array(x).astype(format_.name).astype("float32").asnumpy()


@pytest.mark.parametrize("format_", [FLOAT16, BFLOAT16], ids=lambda format_: format_.name)
def test_engine_rounding_matches_formats_py_at_boundaries(format_):
    x = boundaries(format_)
    rounded = rounded_by_engine(x, format_)
    assert same_numbers(rounded, format_.round(x))
    assert same_numbers(rounded_by_engine(rounded, format_), rounded)


@given(st.sampled_from([FLOAT16, BFLOAT16]),
       npst.arrays(np.float32, st.integers(1, 70), elements=st.floats(width=32)))
@settings(deadline=None)
def test_any_float_to_either_format(format_, x):
    assert same_numbers(rounded_by_engine(x, format_), format_.round(x))


def same_numbers(a, b):
    """Equal, including signs of zero; any NaN equals any NaN."""
    return np.array_equal(a, b, equal_nan=True) and \
        np.array_equal(np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)]))
