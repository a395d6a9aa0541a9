"""The C++ kernels, against numpy, with each instruction set this processor has."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gluon_amp._mxnet import mx
from gluon_amp.cpu import library
from gluon_amp.formats import FORMATS, Format
from halves import assert_half, halves, run
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

ALL_HALVES = np.arange(65536, dtype=np.uint16).view(np.float16)
HALF_GRID = FORMATS["float16"].for_engine
SIZES = [0, 1, 2, 7, 15, 16, 17, 31, 33, 4095, 4096, 4097, 32768, 100003]


def same_bits(a, b):
    """Equal, NaN to NaN and signed zeros apart."""
    a, b = np.asarray(a), np.asarray(b)
    nan = np.isnan(a) & np.isnan(b)
    bits = f"u{a.dtype.itemsize}"
    return a.dtype == b.dtype and bool((nan | (a.view(bits) == b.view(bits))).all())


def call(name, *arrays, dtype=None, **attrs):
    operator = name if name in library.dispatched() else library.PREFIX + name
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
    assert same_bits(call("widen", ALL_HALVES), ALL_HALVES.astype(np.float32))


def test_narrow_gives_every_half_back():
    assert same_bits(call("narrow", ALL_HALVES.astype(np.float32)), ALL_HALVES)


def test_narrow_rounds_ties_to_even_everywhere():
    points = around_every_half()
    assert same_bits(call("narrow", points), to_half(points))


def test_a_master_follows_where_its_weight_is_not_it_rounded():
    masters = around_every_half()
    rounded = to_half(masters)
    assert same_bits(call("follow", masters, rounded), masters)
    written = np.roll(rounded, 1)
    changed = written != rounded  # 0 and -0 are no change
    written[5], changed[5] = np.nan, True
    followed = np.where(changed, written.astype(np.float32), masters)
    assert changed.mean() > 0.9
    assert same_bits(call("follow", masters, written), followed)


def test_round_is_narrow_then_widen():
    points = np.concatenate([around_every_half(), np.float32([np.inf, -np.inf, np.nan, 1e-45])])
    rounded = call("round_to_grid", points, grid=HALF_GRID)
    assert same_bits(rounded, to_half(points).astype(np.float32))


@pytest.mark.parametrize(("value", "expected"), [
    (65504, 65504), (65519.996, 65504), (65520, np.inf), (-65520, -np.inf), (1e38, np.inf),
    (2**-24, 2**-24), (2**-25, 0), (2**-25 * 1.0001, 2**-24), (-(2**-26), -0.0), (np.nan, np.nan)])
def test_what_overflows_and_underflows(value, expected):
    assert same_bits(call("narrow", np.float32([value])), np.float16([expected]))


@pytest.mark.parametrize("size", SIZES)
def test_any_size(size, rng):
    x = rng.standard_normal(size).astype(np.float32)
    half = x.astype(np.float16)
    with mx.util.np_shape(True):  # without it, MXNet reads 0 as "unknown"
        assert same_bits(call("narrow", x), half)
        assert same_bits(call("round_to_grid", x, grid=HALF_GRID), half.astype(np.float32))
        assert same_bits(call("elemwise_add", half, half), half + half)
        assert same_bits(call("widen", half), half.astype(np.float32))


@given(npst.arrays(np.float32, st.integers(1, 70), elements=st.floats(width=32)))
@settings(deadline=None)
def test_any_float(x):
    assert same_bits(call("narrow", x), to_half(x))


@given(npst.arrays(np.float32, st.integers(1, 70), elements=st.floats(width=32)))
@settings(deadline=None)
def test_any_float_to_bfloat16(x):
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & 0xFFFF0000)
    expected = rounded.astype(np.uint32).view(np.float32)
    expected = np.where(np.isnan(x), x, expected)
    assert same_bits(call("round_to_grid", x, grid=FORMATS["bfloat16"].for_engine), expected)


@st.composite
def formats(draw):
    exponent = draw(st.integers(2, 8))
    return Format("drawn", exponent, draw(st.integers(1, 23)),
                  infinities=exponent == 8 or draw(st.booleans()), saturate=draw(st.booleans()),
                  rounding=draw(st.sampled_from(["nearest", "zero"])))


def boundaries(format_):
    """Numbers of the format, the points halfway between two, and the floats beside each."""
    mantissas = 1 + np.arange(0, 2, 2.0 ** -min(format_.fraction + 1, 5))
    powers = 2.0 ** np.arange(max(-126, 1 - format_.bias), min(126, format_.bias + 2))
    numbers = np.concatenate([
        np.outer(powers, mantissas).ravel()[::7], format_.smallest * np.arange(0, 20, 0.5),
        [format_.largest, format_.largest * (1 + 2.0 ** -(format_.fraction + 2))]])
    with np.errstate(over="ignore"):
        at = numbers.astype(np.float32)
        around = np.concatenate([at, np.nextafter(at, np.float32(np.inf)),
                                 np.nextafter(at, np.float32(-np.inf)), [np.inf, np.nan, 0]])
    return np.concatenate([around, -around]).astype(np.float32)


@pytest.mark.parametrize("format_", [*FORMATS.values()], ids=list(FORMATS))
def test_the_engine_rounds_as_formats_py_says_at_every_boundary(format_):
    x = boundaries(format_)
    rounded = call("round_to_grid", x, grid=format_.for_engine)
    assert same_numbers(rounded, format_.round(x))
    assert same_numbers(call("round_to_grid", rounded, grid=format_.for_engine), rounded)


@given(formats(), npst.arrays(np.float32, st.integers(1, 70), elements=st.floats(width=32)))
@settings(deadline=None)
def test_any_float_to_any_format(format_, x):
    x = np.concatenate([x, boundaries(format_)])
    assert same_numbers(call("round_to_grid", x, grid=format_.for_engine), format_.round(x))


def same_numbers(a, b):
    """All equal, signs of zero too; one NaN is as good as another."""
    return np.array_equal(a, b, equal_nan=True) and \
        np.array_equal(np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)]))


@pytest.mark.parametrize(("name", "attributes", "function"), [
    ("relu", {}, lambda z: np.maximum(z, 0)),
    ("clip", {"a_min": 0, "a_max": 6}, lambda z: np.clip(z, 0, 6)),
    ("clip", {"a_min": -1.5, "a_max": 2}, lambda z: np.clip(z, -1.5, 2))])
def test_activations_of_halves(name, attributes, function, rng):
    x = (rng.standard_normal(1003) * 5).astype(np.float16)
    assert np.array_equal(call(name, x, **attributes), function(x))
    assert np.isnan(call(name, np.float16([np.nan]), **attributes)).all()


def test_a_sum_of_halves_is_rounded_once(rng):
    a, b = (halves(rng, 1003, scale=100) for _ in range(2))
    assert np.array_equal(call("elemwise_add", a, b), a + b)


def batch_norm(x, gamma, beta, eps, residual=None, act=None, mean=None, var=None):
    """Forward in float64 with one rounding of the norm and one of the sum."""
    axes = (0, *range(2, x.ndim))
    x = x.astype(np.float64)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    mean = x.mean(axes) if mean is None else mean
    var = x.var(axes) if var is None else var
    hat = (x - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + eps)
    y = (gamma.reshape(shape) * hat + beta.reshape(shape)).astype(np.float16)
    if residual is not None:
        y = y + residual
    return np.maximum(y, np.float16(0)) if act else y


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 17, 7, 7), (4, 5), (2, 3, 50), (1, 2, 33, 65),
                                   (2, 2, 3, 4, 5), (5, 1, 1, 1)])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("act", [False, True])
def test_batch_norm_with_addition_and_activation(shape, residual, act, rng):
    sym = mx.sym
    out = sym.BatchNorm(sym.var("x"), sym.var("gamma"), sym.var("beta"), sym.var("mean"),
                        sym.var("var"), fix_gamma=False, eps=1e-3, momentum=0.75)
    if residual:
        out = out + sym.var("r")
    if act:
        out = sym.Activation(out, act_type="relu")
    channels = shape[1]
    arrays = {"x": halves(rng, *shape), "gamma": rng.uniform(0.5, 2, channels).astype(np.float32),
              "beta": rng.standard_normal(channels).astype(np.float32),
              "mean": np.zeros(channels, np.float32), "var": np.ones(channels, np.float32)}
    if residual:
        arrays["r"] = halves(rng, *shape)
    dy = halves(rng, *shape)
    x, gamma, beta = arrays["x"], arrays["gamma"], arrays["beta"]
    (y,), gradients = run(out, arrays, [dy])
    expected = batch_norm(x, gamma, beta, 1e-3, arrays.get("r"), act)
    # A float32 value next to a tie may fall on its other side: one step of the norm, seldom.
    assert y.dtype == np.float16
    size = np.abs(expected) + (np.abs(arrays["r"]) if residual else np.float16(0))
    assert (np.abs(y - expected) <= np.spacing(size)).all()
    assert np.mean(y != expected) < 0.02

    axes = (0, *range(2, len(shape)))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(arrays["mean"], 0.25 * wide.mean(axes), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(arrays["var"], 0.75 + 0.25 * wide.var(axes), rtol=1e-4)

    g = np.where(y > 0, dy, 0).astype(np.float64) if act else dy.astype(np.float64)
    if residual:
        assert_half(gradients["r"], g)
    along = (1, -1) + (1,) * (len(shape) - 2)
    inv = 1 / np.sqrt(wide.var(axes) + 1e-3)
    hat = (wide - wide.mean(axes).reshape(along)) * inv.reshape(along)
    np.testing.assert_allclose(gradients["beta"], g.sum(axes), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradients["gamma"], (g * hat).sum(axes), rtol=1e-3, atol=1e-3)
    dx = (gamma * inv).reshape(along) * (g - g.mean(axes).reshape(along)
                                         - hat * (g * hat).mean(axes).reshape(along))
    np.testing.assert_allclose(gradients["x"].astype(np.float64), dx, rtol=2e-3, atol=2e-3)


def test_batch_norm_with_relu_keeps_its_relu_before_what_follows(rng):
    sym = mx.sym
    names = ("x", "gamma", "beta", "mean", "var")
    out = sym.contrib.BatchNormWithReLU(*(sym.var(n) for n in names), fix_gamma=False, eps=1e-3)
    arrays = {"x": halves(rng, 4, 3, 5, 5), "gamma": np.ones(3, np.float32),
              "beta": np.zeros(3, np.float32), "mean": np.zeros(3, np.float32),
              "var": np.ones(3, np.float32), "r": halves(rng, 4, 3, 5, 5)}
    expected = batch_norm(arrays["x"], arrays["gamma"], arrays["beta"], 1e-3, act=True)
    residual = arrays.pop("r")
    (y,), _ = run(out, dict(arrays))
    assert_half(y, expected, 1)
    (y,), _ = run(out + sym.var("r"), {**arrays, "r": residual})
    np.testing.assert_allclose(y.astype(float), (expected + residual).astype(float), atol=4e-3)
    (y,), _ = run(sym.clip(out, 0, 1), dict(arrays))
    assert_half(y, np.clip(expected, 0, 1), 1)


@pytest.mark.parametrize("settings_", [{"use_global_stats": True}, {"fix_gamma": True}])
def test_batch_norm_with_given_statistics_and_fixed_gamma(settings_, rng):
    sym = mx.sym
    out = sym.BatchNorm(*(sym.var(n) for n in ("x", "gamma", "beta", "mean", "var")),
                        **{"fix_gamma": False, "eps": 1e-5, **settings_})
    arrays = {"x": halves(rng, 4, 3, 5, 5), "gamma": np.float32([2, 3, 4]),
              "beta": np.float32([0, 1, -1]), "mean": np.float32([0.1, 0.2, 0.3]),
              "var": np.float32([1, 2, 3])}
    dy = halves(rng, 4, 3, 5, 5)
    given_ = settings_.get("use_global_stats")
    mean, var = (arrays[n].astype(np.float64) if given_ else None for n in ("mean", "var"))
    gamma = np.ones(3) if settings_.get("fix_gamma") else arrays["gamma"].astype(np.float64)
    (y,), gradients = run(out, arrays, [dy])
    assert_half(y, batch_norm(arrays["x"], gamma, arrays["beta"], 1e-5, mean=mean, var=var), 1)
    if given_:
        slope = (gamma / np.sqrt(var + 1e-5)).reshape(1, 3, 1, 1)
        assert_half(gradients["x"], dy * slope, 1)
    else:
        assert not gradients["gamma"].any()


def test_prediction_uses_the_moving_statistics(rng):
    sym = mx.sym
    out = sym.BatchNorm(*(sym.var(n) for n in ("x", "gamma", "beta", "mean", "var")),
                        fix_gamma=False, eps=1e-5)
    arrays = {"x": halves(rng, 4, 3, 5, 5), "gamma": np.float32([2, 3, 4]),
              "beta": np.float32([0, 1, -1]), "mean": np.float32([0.1, 0.2, 0.3]),
              "var": np.float32([1, 2, 3])}
    before = arrays["mean"].copy()
    (y,), _ = run(out, arrays, training=False)
    expected = batch_norm(arrays["x"], arrays["gamma"], arrays["beta"], 1e-5,
                          mean=arrays["mean"].astype(float), var=arrays["var"].astype(float))
    assert_half(y, expected, 1)
    assert np.array_equal(arrays["mean"], before)


@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("clip", [None, 0, 0.5])
def test_sgd_equals_mxnets_bit_by_bit(momentum, clip, rng):
    import gluon_amp as amp
    settings_ = {"learning_rate": 0.1, "momentum": momentum, "wd": 1e-2,
                 "rescale_grad": 1 / 128, "clip_gradient": clip, "multi_precision": True}
    results = []
    for optimizer in (amp.optimizer("sgd", **settings_), mx.optimizer.SGD(**settings_)):
        generator = np.random.default_rng(1)
        weight = mx.nd.array(halves(generator, 1003), dtype="float16")
        state = optimizer.create_state_multi_precision(0, weight)
        for _ in range(5):
            gradient = mx.nd.array(halves(generator, 1003, scale=100), dtype="float16")
            optimizer.update_multi_precision([0], [weight], [gradient], [state])
        results.append((weight.asnumpy(), state[1].asnumpy(),
                        state[0].asnumpy() if momentum else 0))
    for ours, theirs in zip(*results):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("isa", list(library.VARIANTS))
def test_each_instruction_set(isa):
    """This file again, in a process that loads that variant."""
    if os.environ.get("GLUON_AMP_ISA"):
        pytest.skip("this is the inner run")
    if isa == library.load():
        return  # tested by this very run
    env = {**os.environ, "GLUON_AMP_ISA": isa}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                           str(Path(__file__))], env=env, capture_output=True, text=True)
    if "must be one of" in done.stdout:
        pytest.skip(f"this processor has no {isa}")
    assert done.returncode == 0, done.stdout
