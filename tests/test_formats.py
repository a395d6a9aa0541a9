"""Number formats in the roles of a policy: rounding in forward and backward passes."""
import sys

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from gluon_amp.formats import FORMATS, Format, random_bits
from gluon_amp.policy import get_policy
from halves import AT_RANDOM
from mxnet import autograd, gluon, nd
from networks import Calling

E4M3, E5M2, TF32, BFLOAT16, HALF = (FORMATS[name].round for name in (
    "float8_e4m3", "float8_e5m2", "tf32", "bfloat16", "float16"))


def exact(x):
    return x


def dense(policy, rng):
    """A dense layer under the policy: data, weight, head; output and both gradients."""
    x, w, head = (rng.standard_normal(shape).astype(np.float32)
                  for shape in ((5, 7), (3, 7), (5, 3)))
    net = gluon.nn.Dense(3, in_units=7, use_bias=False)
    net.initialize()
    net.weight.set_data(nd.array(w))
    amp.convert(net, policy)
    data = nd.array(x)
    data.attach_grad()
    with autograd.record():
        out = net(data)
    out.backward(nd.array(head))
    return (x, w, head), (out.asnumpy(), data.grad.asnumpy(), net.weight.grad().asnumpy())


# policy; rounding of inputs of products, of other tensors, and of gradients
ROLES = {
    "tf32": (get_policy("tf32"), TF32, exact, TF32),
    "bfloat16": (get_policy("mixed_bfloat16"), BFLOAT16, BFLOAT16, BFLOAT16),
    "float8 in bfloat16": (amp.Policy("f", product="float8_e4m3", activation="bfloat16",
                                      gradient="float8_e5m2"), E4M3, BFLOAT16, E5M2),
    "float8 in float32": (amp.Policy("f", product="float8_e4m3", gradient="float8_e5m2"),
                          E4M3, exact, E5M2),
    "float8 in float16": (amp.Policy("f", product="float8_e4m3", activation="float16",
                                     gradient="float8_e5m2"),
                          E4M3, HALF, E5M2),
    "float8 gradients of float32": (amp.Policy("f", gradient="float8_e5m2"), exact, exact, E5M2),
    "float8 gradients of float16 products": (
        amp.Policy("f", product="float16", gradient="float8_e5m2"), HALF, exact, E5M2),
    "float8 gradients of float32 products": (
        amp.Policy("f", product="float32", activation="bfloat16", gradient="float8_e5m2"),
        exact, BFLOAT16, E5M2)}


@pytest.mark.parametrize("name", ROLES)
def test_product_reads_its_format_and_returns_activation_format(name, rng):
    policy, product, activation, gradient = ROLES[name]
    (x, w, head), (out, dx, dw) = dense(policy, rng)
    x, w, head = product(activation(x)), product(activation(w)), gradient(activation(head))
    # Under mixed_bfloat16 the gradient of a float32 weight is float32.
    of_weight = exact if name == "bfloat16" else activation
    for ours, expected, rounded in ((out, x @ w.T, activation), (dx, head @ w, activation),
                                    (dw, head.T @ x, of_weight)):
        near = 1e-5 if rounded is exact else 2.0 ** -7  # unit roundoff of bfloat16
        np.testing.assert_allclose(ours, rounded(expected), rtol=near, atol=1e-6)
        assert rounded is exact or np.mean(ours != rounded(expected)) < 0.1


@pytest.mark.parametrize("activation", ["bfloat16", "tf32", "float8_e5m2"])
def test_float16_products_are_rounded_to_activation_format(activation, rng):
    """As between two dense layers: casts convert from float16 arrays to the format, and back."""
    net = gluon.nn.HybridLambda(lambda F, x, w: F.dot(F.dot(x, w), w))
    amp.convert(net, amp.Policy("f", product="float16", activation=activation))
    x, w = (rng.standard_normal((5, 5)).astype(np.float32) for _ in "xw")
    made = HALF(FORMATS[activation].round(HALF(HALF(x) @ HALF(w))))
    expected = FORMATS[activation].round(HALF(made @ HALF(w)))
    out = net(nd.array(x), nd.array(w)).asnumpy()
    assert np.array_equal(out, FORMATS[activation].round(out))
    assert np.mean(out == expected) > 0.8


@pytest.mark.parametrize("static", [False, True])
def test_product_rounding_does_not_affect_other_readers(static, rng):
    def forward(F, x, *dense):
        y = F.softmax(x)
        return (dense[0](y) if dense else y), F.log_softmax(y)

    x, made = nd.array(rng.standard_normal((5, 7))), []
    for product in (False, True):
        net = Calling(forward, *[gluon.nn.Dense(3, in_units=7, flatten=False)] * product)
        net.initialize()
        net.hybridize(static_alloc=static, static_shape=static)
        made.append(amp.convert(net, "mixed_bfloat16")(x)[1].asnumpy())
    assert np.array_equal(*made)


def test_gradients_have_their_own_format(rng):
    net = gluon.nn.HybridLambda(lambda F, x: F.sigmoid(x))
    amp.convert(net, amp.Policy("mine", compute="float16", gradient="float8_e5m2"))
    x = nd.array(rng.standard_normal(50), dtype="float16")
    head = nd.array(rng.standard_normal(50))
    x.attach_grad()
    with autograd.record():
        y = net(x)
    y.backward(head)
    read = HALF(1 / (1 + np.exp(-x.asnumpy().astype(np.float32))))
    expected = E5M2(E5M2(HALF(head.asnumpy())) * read * (1 - read))
    assert np.mean(x.grad.asnumpy() == expected) > 0.95
    assert np.array_equal(E5M2(x.grad.asnumpy()), x.grad.asnumpy())


def test_saved_inputs_of_operator_are_not_rounded_to_gradient_format(rng):
    net = gluon.nn.HybridLambda(lambda F, x: F.L2Normalization(x))
    amp.convert(net, amp.Policy("mine", compute="bfloat16", norm="bfloat16",
                                gradient="float8_e5m2"))
    x, head = (rng.standard_normal((40, 3)).astype(np.float32) for _ in "xg")
    data = nd.array(x)
    data.attach_grad()
    with autograd.record():
        y = net(data)
    y.backward(nd.array(head))
    length = np.linalg.norm(BFLOAT16(x), axis=1, keepdims=True)
    y, g = BFLOAT16(BFLOAT16(x) / length), E5M2(head)
    expected = E5M2((g - y * (g * y).sum(1, keepdims=True)) / BFLOAT16(length))
    assert np.mean(data.grad.asnumpy() == expected) > 0.95


@pytest.mark.parametrize(("op", "shapes"), [
    ("Convolution_v1", [(1, 2, 6, 6), (3, 2, 3, 3)]),
    ("DeformableConvolution", [(1, 2, 6, 6), (1, 18, 4, 4), (3, 2, 3, 3)])])
def test_products_without_rounding_support_are_refused(op, shapes):
    def forward(F, *arrays):
        return getattr(F if op == "Convolution_v1" else F.contrib, op)(
            *arrays, kernel=(3, 3), num_filter=3, no_bias=True)

    arrays = [nd.random.normal(shape=shape) for shape in shapes]
    net = gluon.nn.HybridLambda(forward)
    exact = net(*arrays).asnumpy()
    for policy in ("tf32", "mixed_float8"):
        amp.convert(net, policy)
        with pytest.raises(ValueError, match=f"{op} requires one format.*keep="):
            net(*arrays)
    amp.convert(net, "mixed_bfloat16")
    np.testing.assert_allclose(net(*arrays).asnumpy(), exact, atol=0.02 * np.abs(exact).max())


@pytest.mark.parametrize("policy", ["mixed_float8", amp.Policy("gpu", "float16", "float16",
                                                               accumulate="V100")],
                         ids=["float8", "as a GPU"])
@pytest.mark.parametrize(("block", "shape", "said"), [
    (lambda: gluon.rnn.LSTM(5, projection_size=3), (3, 2, 4),
     "no code for RNNs with projection_size.*keep=.*Received: projection_size=3"),
    (lambda: gluon.rnn.LSTM(5, state_clip_min=-1, state_clip_max=1), (3, 2, 4),
     "no code for RNNs with lstm_state_clip_min"),
    (lambda: gluon.rnn.LSTM(5, use_sequence_length=True), (3, 2, 4), "with use_sequence_length"),
    (lambda: gluon.rnn.LSTM(5, num_layers=2, dropout=0.5), (3, 2, 4),
     "training of RNNs with dropout between their layers.*keep=.*Received: dropout=0.5"),
    (lambda: gluon.nn.Conv2D(4, 3, layout="NHWC"), (2, 8, 8, 3),
     "no channels-last Convolution. Valid: layout NCW, .*Received: NHWC"),
    (lambda: gluon.nn.Conv2DTranspose(4, 3, layout="NHWC"), (2, 8, 8, 3),
     "no channels-last Deconvolution.*Received: NHWC")])
def test_unsupported_operators_are_refused_at_call(block, shape, said,
                                                                               policy):
    net = block()
    net.initialize()
    amp.convert(net, policy)
    lengths = {"sequence_length": nd.ones(2)} if "sequence" in said else {}
    with autograd.record(), pytest.raises(ValueError, match=said):
        net(nd.ones(shape), **lengths)


def test_rnn_dropout_is_refused_only_in_training():
    net = gluon.rnn.LSTM(5, num_layers=2, dropout=0.5)
    net.initialize()
    amp.convert(net, "tf32")
    expected = net(nd.ones((3, 2, 4))).asnumpy()
    with autograd.record(), pytest.raises(ValueError, match="no code for the training of RNNs"):
        net(nd.ones((3, 2, 4)))
    assert np.array_equal(net(nd.ones((3, 2, 4))).asnumpy(), expected)


@pytest.mark.parametrize(("roles", "said"), [
    ({"compute": "flaot16"}, "policy mine: compute takes a number format. Valid: float32, float16"),
    ({"compute": ""}, "policy mine: compute takes a number format.*Received: ''"),
    ({"activation": ""}, "policy mine: activation takes a number format.*Received: ''"),
    ({"product": 0}, "policy mine: product takes a number format.*Received: 0"),
    ({"gradient": False}, "policy mine: gradient takes a number format.*Received: False"),
    ({"norm": None}, "policy mine: norm takes a number format.*Received: None"),
    ({"compute": "float16", "activation": "bfloat16"},
     "compute sets product and activation. Valid: compute, or these two. Received: "
     "compute='float16', activation='bfloat16'"),
    ({"history": 4}, "history is for scaling=delayed. Received: history=4, scaling=None"),
    ({"margin": 1}, "margin is for scaling=delayed or current. Received: margin=1, scaling=None"),
    ({"product": "float8_e4m3", "scaling": "current", "history": 4}, "history is for scaling=dela"),
    ({"product": 8}, "policy mine: product takes a number format"),
    ({"norm": "bfloat16"}, "policy mine: norm must be float32. Received: bfloat16"),
    ({"norm": "float16", "compute": "bfloat16"}, "norm must be float32 or bfloat16"),
    ({"compute": "float16", "gradient": "bfloat16"}, "gradients of float16 arrays are float16 num"),
    ({"compute": "bfloat16", "gradient": "tf32"}, "gradients of bfloat16 arrays are bfloat16 num"),
    ({"parameter": "tf32"}, "parameter must be float32, float16 or bfloat16. Received: tf32"),
    ({"output": "tf32"}, "output must be float32, float16 or bfloat16")])
def test_policy_arguments_are_checked(roles, said):
    with pytest.raises(ValueError, match=said):
        amp.Policy("mine", **roles)


@pytest.mark.parametrize("name", ["", None, 8, ["mine"]])
def test_policy_requires_a_name(name):
    with pytest.raises(ValueError, match="a policy's name must be a string"):
        amp.Policy(name, compute="float16")


def test_policy_behaviour_depends_on_formats_not_name():
    net = gluon.nn.Dense(3, in_units=4)
    net.initialize()
    amp.convert(net, amp.Policy("float32", parameter="float16", compute="float16"))
    assert net.weight.dtype == "float16"
    half = amp.Format("half", exponent=5, fraction=10)  # equals float16 under another name
    amp.restore(net)
    amp.convert(net, amp.Policy("mine", parameter=half, compute=half))
    assert net.weight.dtype == "float16"


@pytest.mark.parametrize(("given", "said"), [
    (("f", 1, 3), "exponent must be an integer from 2 to 8. Received: 1"),
    (("f", 5, 0), "fraction must be an integer from 1 to 23. Received: 0"),
    (("f", 8, 7, False), "would go beyond float32"),
    (("f", 5, 2, True, False, "up"), "rounding must be one of nearest, zero"),
    (("f", 5, 2, True, "no"), "saturate must be True or False. Received: 'no'"),
    ((8, 5, 2), "a format's name must be a string. Received: 8"),
    (("int8", 4, 3), "int8 is a type of MXNet's arrays: choose another name"),
    (("float16", 4, 3), "float16 is a type of MXNet's arrays"),
    (("bfloat16", 4, 3), "bfloat16 is a type of MXNet's arrays")])
def test_format_arguments_are_checked(given, said):
    with pytest.raises(ValueError, match=said):
        amp.Format(*given)


def test_format_has_correct_range():
    ends = {name: (f.largest, f.smallest, f.counts_to, f.bytes) for name, f in FORMATS.items()}
    assert ends["float16"] == (65504, 2.0 ** -24, 2048, 2)
    assert ends["float8_e4m3"] == (448, 2.0 ** -9, 16, 1)
    assert ends["float8_e5m2"] == (57344, 2.0 ** -16, 8, 1)
    assert ends["bfloat16"][2:] == (256, 2)
    assert amp.Format("e3m4", exponent=3, fraction=4).largest == 15.5


@pytest.mark.parametrize("policy", ["mixed_float8", "tf32", "mixed_bfloat16", amp.Policy(
    "mine", compute="float16", gradient="float8_e5m2")], ids=["float8", "tf32", "bfloat16", "own"])
def test_other_formats_are_not_exported_as_casts(policy, tmp_path):
    net = gluon.nn.Dense(3, in_units=4)
    net.initialize()
    amp.convert(net, policy)(nd.ones((2, 4)))
    with pytest.raises(ValueError, match="support float16 and float32 only"):
        net.export(str(tmp_path / "net"), remove_amp_cast=False)
    net.export(str(tmp_path / "net"))


def test_float64_numbers_are_rounded_once():
    """After rounding to float32, the number would be a tie."""
    above = 1 + 2.0 ** -8 + 2.0 ** -40
    assert FORMATS["bfloat16"].round([above, -above]).tolist() == [1.0078125, -1.0078125]
    assert FORMATS["float16"].round(65520 - 2.0 ** -30) == 65504
    assert np.array_equal(FORMATS["float32"].round([2 ** 24 + 1, 1e300]), [2 ** 24, np.inf])
    assert np.array_equal(FORMATS["float16"].round(nd.array([0.1])), np.float32([np.float16(0.1)]))


@pytest.mark.parametrize("values", ["one", [1j], np.ones(1, np.longdouble)])
def test_round_refuses_other_types(values):
    with pytest.raises(TypeError, match="round takes numbers of 64 bits at most"):
        FORMATS["float16"].round(values)


def test_products_accumulate_as_a_gpu(rng):
    (x, w, head), (out, dx, dw) = dense(
        amp.Policy("v100", parameter="float16", compute="float16", accumulate="V100", split=4), rng)
    x, w, head = (a.astype(np.float16) for a in (x, w, head))
    for ours, (a, b) in ((out, (x, w.T)), (dx, (head, w)), (dw, (head.T, x))):
        expected = amp.tensor_core_dot(a, b, gpu="V100", split=4)
        assert np.array_equal(ours, expected.astype(np.float16))


@pytest.mark.parametrize(("roles", "said"), [
    ({"compute": "float16", "accumulate": "K80"}, "unknown GPU. Valid: V100, T4, .*'K80'"),
    ({"compute": "bfloat16", "accumulate": "V100"}, "accumulate='V100' is for float16 products"),
    ({"compute": "float16", "split": 4}, "split is for accumulate="),
    ({"compute": "float16", "accumulate": "V100", "split": 0}, "split must be an integer")])
def test_unsupported_accumulation_is_refused(roles, said):
    with pytest.raises(ValueError, match=said):
        amp.Policy("mine", **roles)


def test_policies_with_other_formats_are_cpu_only():
    assert [get_policy(name).cpu_only for name in ("float16", "mixed_bfloat16", "tf32")] \
        == [False, True, True]
    mx.nd.waitall()


# ---- stochastic rounding, and rounding toward zero

def read_by_a_product(format_, x):
    """The numbers as rounded by a product, which multiplies them by 1."""
    net = gluon.nn.HybridLambda(lambda F, x: F.batch_dot(x, F.ones_like(x)))
    amp.convert(net, amp.Policy("mine", product=format_))
    return net(nd.array(x.reshape(-1, 1, 1))).asnumpy().reshape(x.shape)


@pytest.mark.parametrize("format_", [
    AT_RANDOM, amp.Format("half_at_random", 5, 10, rounding="stochastic"),
    amp.Format("e4m3_at_random", 4, 3, infinities=False, rounding="stochastic")],
    ids=lambda f: f.name)
def test_stochastic_rounding_is_unbiased(format_):
    """Each rounding is to a neighbor, and the mean of n lies within 5 standard deviations."""
    n, tiny = 10_000, max(format_.smallest, 2.0 ** -120)  # a sum flushes float32 subnormals
    numbers = np.float32([1.003, -1.7, 0.3333, 1.1 * format_.smallest_normal, 2.6 * tiny,
                          -0.3 * tiny])
    mx.random.seed(1)
    rounded = read_by_a_product(format_, np.repeat(numbers[:, None], n, 1)).astype(np.float64)
    for number, row in zip(numbers.astype(np.float64), rounded):
        exponent = max(np.floor(np.log2(abs(number))), 1 - format_.bias)
        step = 2.0 ** (exponent - format_.fraction)
        part = number / step - np.floor(number / step)
        assert set(row / step - np.floor(number / step)) == {0.0, 1.0}
        assert abs(row.mean() - number) < 5 * step * np.sqrt(part * (1 - part) / n)


def test_two_tensors_are_rounded_independently():
    x = nd.array(np.full((2000, 1, 1), 1 + 2.0 ** -8, np.float32))
    net = gluon.nn.HybridLambda(lambda F, a, b: F.batch_dot(a, b))
    amp.convert(net, amp.Policy("mine", product=AT_RANDOM))
    mx.random.seed(2)
    both_down = (net(x, x.copy()).asnumpy() == 1).mean()
    assert abs(both_down - 0.25) < 0.05


def test_rounding_toward_zero_never_increases_magnitude(rng):
    x = rng.standard_normal(1000).astype(np.float32)
    cut = amp.Format("cut", exponent=5, fraction=10, rounding="zero")
    read = read_by_a_product(cut, x)
    assert np.array_equal(read, cut.round(x))
    assert (np.abs(read) <= np.abs(x)).all()


# ---- rounding, against numpy (float16), ml_dtypes and gfloat

NAMES = ["float16", "bfloat16", "tf32", "float8_e4m3", "float8_e5m2"]
IEEE = [Format("e4m3_with_infinities", 4, 3), Format("e3m4", 3, 4)]
ALL = [*map(FORMATS.get, NAMES), *IEEE]

# Names in numpy and ml_dtypes.
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
    """All nonnegative finite numbers in order; for large formats, those of every 13th binade."""
    steps = np.arange(2 ** format_.fraction, dtype=np.float64)
    exponents = np.arange(1 - format_.bias, int(np.log2(format_.largest)) + 1)
    if format_.fraction + format_.exponent > 15:
        exponents = exponents[np.r_[0, 1, 2:len(exponents) - 2:13, -2, -1]]
    normal = np.outer(2.0 ** exponents, 1 + steps / 2 ** format_.fraction).ravel()
    numbers = np.concatenate([steps * format_.smallest, normal])
    return numbers[numbers <= format_.largest]


def around(format_):
    """Each number, the ties above, the floats on both sides of both, infinities and NaN."""
    numbers = every_number(format_)
    step = np.diff(numbers, append=2 * numbers[-1] - numbers[-2])
    with np.errstate(over="ignore"):
        at = np.concatenate([numbers, numbers + step / 2, numbers + step]).astype(np.float32)
        beside = [np.nextafter(at, np.float32(to)) for to in (np.inf, -np.inf)]
    tiny = np.float32([1e-45, 1e-40, np.finfo(np.float32).tiny])
    most = np.finfo(np.float32).max
    rest = np.concatenate([numbers[-3:], tiny, [most, np.inf, np.nan, 0]])
    made = np.concatenate([at, *beside, rest, -rest]).astype(np.float32)
    made[1:-len(rest):2] *= -1  # others with alternating signs: the sign is a separate bit
    return made


def assert_same(ours, theirs, x):
    """Equal, including signs of zeros."""
    theirs = np.asarray(theirs).astype(np.float32)
    differs = ~(np.isnan(ours) & np.isnan(theirs)) \
        & (ours.view(np.uint32) != theirs.view(np.uint32))
    assert not differs.any(), (x[differs][:5], ours[differs][:5], theirs[differs][:5])


@pytest.mark.parametrize("format_", [f for f in ALL if f.name != "tf32"], ids=lambda f: f.name)
def test_every_code_of_format_round_trips(format_):
    dtype = dtype_of(format_)
    codes = np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}")
    values = codes.view(dtype).astype(np.float32)
    assert_same(format_.round(values), values, values)
    finite = np.unique(np.abs(values[np.isfinite(values)]))
    assert finite[-1] == format_.largest
    assert finite[1] == format_.smallest
    if dtype.itemsize == 1:
        assert np.array_equal(finite, every_number(format_))


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
    """A tenth of many numbers and the last one, as gfloat is slow."""
    return np.concatenate([x[:-100:11], x[-100:]]) if len(x) > 20000 else x


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("rounding", "mode"), [("nearest", "TiesToEven"), ("zero", "TowardZero")])
@pytest.mark.parametrize("format_", ALL, ids=lambda f: f.name)
def test_rounding_matches_gfloat(format_, rounding, mode, saturate):
    ours = variant(format_, rounding, saturate)
    x = some(around(format_))
    assert_same(ours.round(x), rounded_by_gfloat(ours, x, mode), x)


@pytest.mark.parametrize("format_", ALL, ids=lambda f: f.name)
def test_stochastic_rounding_matches_gfloat_for_same_random_bits(format_):
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
def test_engine_rounding_matches_formats_py(format_, rounding):
    key = 2 ** 63 + 12345
    for saturate in (False, True):
        ours = variant(format_, rounding, saturate)
        x = around(format_)
        numbers = mx.nd.array(x, dtype="float32")
        grid = ours._for_engine
        engines = library.call("_gluon_amp_round_to_grid", [numbers], grid=grid, key=key)
        expected = ours.round(x, key) if rounding == "stochastic" else ours.round(x)
        assert_same(engines.asnumpy(), expected, x)


# ---- RNN, LSTM and GRU with a format for products

TIME, BATCH, DATA, UNITS = 4, 3, 5, 6
MODES = {"rnn_relu": gluon.rnn.RNN, "rnn_tanh": gluon.rnn.RNN, "lstm": gluon.rnn.LSTM,
         "gru": gluon.rnn.GRU}
FINE = amp.Format("fine", exponent=8, fraction=21)


def layer(mode, **settings):
    more = {"activation": mode[4:]} if mode.startswith("rnn") else {}
    mx.random.seed(3)
    net = MODES[mode](UNITS, input_size=DATA, **more, **settings)
    net.initialize(mx.init.Uniform(0.5))
    return net


def outcome(net, rng):
    """Outputs, states, and the gradients of data, states and parameters."""
    x = nd.array(rng.standard_normal((TIME, BATCH, DATA)))
    states = [nd.array(rng.standard_normal(state.shape)) for state in net.begin_state(BATCH)]
    for one in (x, *states):
        one.attach_grad()
    with autograd.record():
        out, last = net(x, states)
    made = [out, *last]
    autograd.backward(made, [nd.array(rng.standard_normal(one.shape)) for one in made])
    gradients = [one.grad for one in (x, *states)]
    gradients += [p.grad() for p in net.collect_params().values()]
    return [one.asnumpy() for one in (*made, *gradients)]


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True}],
                         ids=["one layer", "two layers, bidirectional"])
@pytest.mark.parametrize("mode", MODES)
def test_rnn_in_fine_format_matches_float32(mode, settings, rng):
    state = rng.bit_generator.state
    exact = outcome(layer(mode, **settings), rng)
    rng.bit_generator.state = state
    ours = outcome(amp.convert(layer(mode, **settings), amp.Policy("fine", product=FINE)), rng)
    for one, other in zip(ours, exact):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * abs(other).max())
    assert any((one != other).any() for one, other in zip(ours, exact))


def test_rnn_product_reads_its_format_and_outputs_have_activation_format(rng):
    e4m3, bfloat16 = (FORMATS[name].round for name in ("float8_e4m3", "bfloat16"))
    net = layer("rnn_tanh")
    weights = {name.split("_", 1)[1]: bfloat16(p.data().asnumpy())
               for name, p in net.collect_params().items()}
    amp.convert(net, amp.Policy("mine", product="float8_e4m3", activation="bfloat16"))
    x, h = (rng.standard_normal(shape).astype(np.float32)
            for shape in ((TIME, BATCH, DATA), (1, BATCH, UNITS)))
    out = net(nd.array(x), [nd.array(h)])[0].asnumpy()
    h = bfloat16(h[0])
    for step, ours in zip(bfloat16(x), out):
        to_x = e4m3(step) @ e4m3(weights["l0_i2h_weight"]).T + weights["l0_i2h_bias"]
        to_h = e4m3(h) @ e4m3(weights["l0_h2h_weight"]).T + weights["l0_h2h_bias"]
        h = bfloat16(np.tanh(to_x + to_h))
        np.testing.assert_allclose(ours, h, rtol=2.0 ** -7)
        assert np.mean(ours == h) > 0.9
        h = ours


def test_rnn_gate_gradients_are_rounded_before_products(rng):
    """One step of tanh: the data gradient is the rounded gradient of the sum times a weight."""
    e5m2 = FORMATS["float8_e5m2"].round
    net = layer("rnn_tanh")
    weight = net.l0_i2h_weight.data().asnumpy()
    amp.convert(net, amp.Policy("mine", product=FINE, gradient="float8_e5m2"))
    x, head = (nd.array(rng.standard_normal((1, BATCH, size))) for size in (DATA, UNITS))
    x.attach_grad()
    with autograd.record():
        y = net(x)
    y.backward(head)
    of_sum = e5m2(head.asnumpy() * (1 - y.asnumpy() ** 2))
    np.testing.assert_allclose(x.grad.asnumpy(), of_sum @ weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(net.l0_h2h_bias.grad().asnumpy(), of_sum.sum((0, 1)), rtol=1e-5,
                               atol=1e-6)


@pytest.mark.parametrize("mode", ["lstm", "gru"])
@pytest.mark.parametrize("policy", ["tf32", "mixed_float8", amp.Policy(
    "float16", product="float8_e4m3", activation="float16", gradient="float8_e5m2",
    scaling="current"),
    amp.Policy("random", product=amp.Format("f", 5, 4, rounding="stochastic"))],
    ids=["tf32", "mixed_float8", "float16 activations", "stochastic"])
def test_rnn_in_low_precision_is_near_float32(policy, mode, rng):
    state = rng.bit_generator.state
    exact = outcome(layer(mode, num_layers=2, bidirectional=True), rng)
    made = []
    for _ in range(2):
        rng.bit_generator.state = state
        net = amp.convert(layer(mode, num_layers=2, bidirectional=True), policy)
        mx.random.seed(5)
        made.append(outcome(net, rng))
    closeness = 2e-3 if policy == "tf32" else 0.2
    for one, again, other in zip(*made, exact):
        assert np.array_equal(one, again)
        assert 0 < np.linalg.norm(one - other) < closeness * np.linalg.norm(other)


def test_rnn_tensors_of_any_size_fit_with_scaling(rng):
    """The effect of a small input would be lost in float8 without scaling."""
    net = amp.convert(layer("rnn_relu"), "mixed_float8")
    for p in net.collect_params(".*bias").values():
        p.set_data(nd.zeros(p.shape))
    x = nd.array(rng.standard_normal((TIME, BATCH, DATA)))
    whole = net(x).asnumpy()
    small = amp.convert(layer("rnn_relu"), "mixed_float8")
    for p in small.collect_params(".*bias").values():
        p.set_data(nd.zeros(p.shape))
    assert np.array_equal(small(x * 2.0 ** -30).asnumpy(), whole * np.float32(2.0 ** -30))


@pytest.mark.parametrize("mode", ["lstm", "gru"])
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}],
                         ids=["", "static"])
def test_recorded_rnn_prediction_has_gradients_of_training(mode, flags, rng):
    policy = amp.Policy("m", product="tf32", activation="bfloat16")
    net = amp.convert(layer(mode, num_layers=2), policy)
    net.hybridize(**flags)
    x = nd.array(rng.standard_normal((TIME, BATCH, DATA)))
    weights = net.collect_params().values()
    made = []
    for train_mode in (True, False):
        net(x)
        with autograd.record(train_mode):
            y = net(x)
        for retain in (True, False):
            y.backward(retain_graph=retain, train_mode=train_mode)
            made.append([p.grad().asnumpy() for p in weights])
    first, *others = made
    assert all(one.any() for one in first)
    for again in others:
        assert all(map(np.array_equal, first, again))
