"""Number formats as parts of a policy: what each role rounds, forward and backward."""
import gluon_amp as amp
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from gluon_amp.formats import FORMATS
from gluon_amp.policy import get_policy
from mxnet import autograd, gluon, nd

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


# policy; what rounds the inputs of products, what lies between, gradients
ROLES = {
    "tf32": (get_policy("tf32"), TF32, exact, TF32),
    "bfloat16": (get_policy("mixed_bfloat16"), BFLOAT16, BFLOAT16, BFLOAT16),
    "float8 in bfloat16": (amp.Policy("f", product="float8_e4m3", between="bfloat16",
                                      gradient="float8_e5m2"), E4M3, BFLOAT16, E5M2),
    "float8 in float32": (amp.Policy("f", product="float8_e4m3", gradient="float8_e5m2"),
                          E4M3, exact, E5M2),
    "float8 in float16": (amp.Policy("f", product="float8_e4m3", between="float16",
                                     gradient="float8_e5m2"),
                          E4M3, HALF, E5M2),
    "float8 gradients of float32": (amp.Policy("f", gradient="float8_e5m2"), exact, exact, E5M2),
    "float8 gradients of float16 products": (
        amp.Policy("f", product="float16", gradient="float8_e5m2"), HALF, exact, E5M2),
    "float8 gradients of float32 products": (
        amp.Policy("f", product="float32", between="bfloat16", gradient="float8_e5m2"),
        exact, BFLOAT16, E5M2)}


@pytest.mark.parametrize("name", ROLES)
def test_a_product_reads_its_format_and_gives_what_lies_between(name, rng):
    policy, product, between, gradient = ROLES[name]
    (x, w, head), (out, dx, dw) = dense(policy, rng)
    x, w, head = product(between(x)), product(between(w)), gradient(between(head))
    for ours, expected in ((out, x @ w.T), (dx, head @ w), (dw, head.T @ x)):
        near = 1e-5 if between is exact else 2.0 ** -7  # the unit of bfloat16
        np.testing.assert_allclose(ours, between(expected), rtol=near, atol=1e-6)
        assert between is exact or np.mean(ours != between(expected)) < 0.1


@pytest.mark.parametrize("between", ["bfloat16", "tf32", "float8_e5m2"])
def test_float16_products_give_float16_and_then_what_lies_between(between, rng):
    """As between two dense layers: casts lead from float16 arrays to the format, and back."""
    net = gluon.nn.HybridLambda(lambda F, x, w: F.dot(F.dot(x, w), w))
    amp.convert(net, amp.Policy("f", product="float16", between=between))
    x, w = (rng.standard_normal((5, 5)).astype(np.float32) for _ in "xw")
    made = HALF(FORMATS[between].round(HALF(HALF(x) @ HALF(w))))
    expected = FORMATS[between].round(HALF(made @ HALF(w)))
    out = net(nd.array(x), nd.array(w)).asnumpy()
    assert np.array_equal(out, FORMATS[between].round(out))
    assert np.mean(out == expected) > 0.8


@pytest.mark.parametrize("static", [False, True])
def test_what_a_product_reads_rounded_others_read_as_it_is(static, rng):
    class Net(gluon.HybridBlock):
        def __init__(self, product):
            super().__init__()
            self.dense = gluon.nn.Dense(3, in_units=7, flatten=False) if product else None

        def hybrid_forward(self, F, x):
            y = F.softmax(x)
            return (self.dense(y) if self.dense else y), F.log_softmax(y)

    x, made = nd.array(rng.standard_normal((5, 7))), []
    for product in (False, True):
        net = Net(product)
        net.initialize()
        net.hybridize(static_alloc=static, static_shape=static)
        made.append(amp.convert(net, "mixed_bfloat16")(x)[1].asnumpy())
    assert np.array_equal(*made)


def test_gradients_have_a_format_of_their_own(rng):
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


def test_what_an_operator_reads_again_does_not_get_the_gradients_format(rng):
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
def test_products_that_would_not_be_rounded_are_refused(op, shapes):
    def forward(F, *arrays):
        return getattr(F if op == "Convolution_v1" else F.contrib, op)(
            *arrays, kernel=(3, 3), num_filter=3, no_bias=True)

    arrays = [nd.random.normal(shape=shape) for shape in shapes]
    net = gluon.nn.HybridLambda(forward)
    exact = net(*arrays).asnumpy()
    for policy in ("tf32", "mixed_float8"):
        amp.convert(net, policy)
        with pytest.raises(ValueError, match=f"{op} has one format.*keep="):
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
     "no Convolution with channels last. Valid: layout NCW, .*Received: NHWC"),
    (lambda: gluon.nn.Conv2DTranspose(4, 3, layout="NHWC"), (2, 8, 8, 3),
     "no Deconvolution with channels last.*Received: NHWC")])
def test_what_has_no_code_is_refused_by_the_call_and_not_when_results_are_read(block, shape, said,
                                                                               policy):
    net = block()
    net.initialize()
    amp.convert(net, policy)
    lengths = {"sequence_length": nd.ones(2)} if "sequence" in said else {}
    with autograd.record(), pytest.raises(ValueError, match=said):
        net(nd.ones(shape), **lengths)


def test_dropout_between_layers_of_an_rnn_is_no_matter_for_predictions():
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
    ({"between": ""}, "policy mine: between takes a number format.*Received: ''"),
    ({"product": 0}, "policy mine: product takes a number format.*Received: 0"),
    ({"gradient": False}, "policy mine: gradient takes a number format.*Received: False"),
    ({"norm": None}, "policy mine: norm takes a number format.*Received: None"),
    ({"compute": "float16", "between": "bfloat16"},
     "compute sets product and between. Valid: compute, or these two. Received: "
     "compute='float16', between='bfloat16'"),
    ({"history": 4}, "history is for scaling=delayed. Received: history=4, scaling=None"),
    ({"margin": 1}, "margin is for scaling=delayed or current. Received: margin=1, scaling=None"),
    ({"product": "float8_e4m3", "scaling": "current", "history": 4}, "history is for scaling=dela"),
    ({"product": 8}, "policy mine: product takes a number format"),
    ({"norm": "bfloat16"}, "policy mine: norm must be float32. Received: bfloat16"),
    ({"norm": "float16", "compute": "bfloat16"}, "norm must be float32 or bfloat16"),
    ({"compute": "float16", "gradient": "bfloat16"}, "gradients of float16 arrays are float16 num"),
    ({"parameter": "bfloat16"}, "parameter must be float32 or float16. Received: bfloat16"),
    ({"output": "tf32"}, "output must be float32 or float16")])
def test_a_policy_is_checked_when_it_is_made(roles, said):
    with pytest.raises(ValueError, match=said):
        amp.Policy("mine", **roles)


@pytest.mark.parametrize("name", ["", None, 8, ["mine"]])
def test_a_policy_has_a_name(name):
    with pytest.raises(ValueError, match="a policy's name must be a string"):
        amp.Policy(name, compute="float16")


def test_what_a_policy_does_depends_on_its_formats_and_not_on_its_name():
    net = gluon.nn.Dense(3, in_units=4)
    net.initialize()
    amp.convert(net, amp.Policy("float32", parameter="float16", compute="float16"))
    assert net.weight.dtype == "float16"
    half = amp.Format("half", exponent=5, fraction=10)  # is float16, whatever it is called
    amp.restore(net)
    amp.convert(net, amp.Policy("mine", parameter=half, compute=half))
    assert net.weight.dtype == "float16"


@pytest.mark.parametrize(("given", "said"), [
    (("f", 1, 3), "exponent must be a whole number of bits from 2 to 8. Received: 1"),
    (("f", 5, 0), "fraction must be a whole number of bits from 1 to 23. Received: 0"),
    (("f", 8, 7, False), "would go beyond float32"),
    (("f", 5, 2, True, False, "up"), "rounding must be one of nearest, zero"),
    (("f", 5, 2, True, "no"), "saturate must be True or False. Received: 'no'"),
    ((8, 5, 2), "a format's name must be a string. Received: 8"),
    (("int8", 4, 3), "int8 is a type of MXNet's arrays: choose another name"),
    (("float16", 4, 3), "float16 is a type of MXNet's arrays")])
def test_a_format_is_checked_when_it_is_made(given, said):
    with pytest.raises(ValueError, match=said):
        amp.Format(*given)


def test_a_format_knows_its_range():
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
    with pytest.raises(ValueError, match="no other formats than float16 and float32"):
        net.export(str(tmp_path / "net"), remove_amp_cast=False)
    net.export(str(tmp_path / "net"))


def test_float64_numbers_are_rounded_once():
    """Made float32 first, the number would be a tie."""
    above = 1 + 2.0 ** -8 + 2.0 ** -40
    assert FORMATS["bfloat16"].round([above, -above]).tolist() == [1.0078125, -1.0078125]
    assert FORMATS["float16"].round(65520 - 2.0 ** -30) == 65504
    assert np.array_equal(FORMATS["float32"].round([2 ** 24 + 1, 1e300]), [2 ** 24, np.inf])
    assert np.array_equal(FORMATS["float16"].round(nd.array([0.1])), np.float32([np.float16(0.1)]))


@pytest.mark.parametrize("values", ["one", [1j], np.ones(1, np.longdouble)])
def test_what_is_no_number_is_not_rounded(values):
    with pytest.raises(TypeError, match="round takes numbers of 64 bits at most"):
        FORMATS["float16"].round(values)


def test_products_may_add_as_a_gpu_does(rng):
    (x, w, head), (out, dx, dw) = dense(
        amp.Policy("v100", parameter="float16", compute="float16", accumulate="V100", split=4), rng)
    x, w, head = (a.astype(np.float16) for a in (x, w, head))
    for ours, (a, b) in ((out, (x, w.T)), (dx, (head, w)), (dw, (head.T, x))):
        expected = amp.tensor_core_dot(a, b, gpu="V100", split=4)
        assert np.array_equal(ours, expected.astype(np.float16))


@pytest.mark.parametrize(("roles", "said"), [
    ({"compute": "float16", "accumulate": "T4"}, "nobody has measured a T4"),
    ({"compute": "bfloat16", "accumulate": "V100"}, "accumulate='V100' is for float16 products"),
    ({"compute": "float16", "split": 4}, "split is for accumulate="),
    ({"compute": "float16", "accumulate": "V100", "split": 0}, "split must be a whole number")])
def test_what_cannot_add_as_a_gpu_does_is_refused(roles, said):
    with pytest.raises(ValueError, match=said):
        amp.Policy("mine", **roles)


def test_every_half_is_a_float16_and_rounds_as_numpy_says():
    every = np.arange(2 ** 16, dtype=np.uint16).view(np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.concatenate([every.astype(np.float32), np.float32([65519.9, 65520, 2.0 ** -25])])
        expected = x.astype(np.float16).astype(np.float32)
    assert np.array_equal(FORMATS["float16"].round(x), expected, equal_nan=True)


def test_a_gpu_has_no_arrays_of_such_formats():
    assert [get_policy(name).cpu_only for name in ("float16", "mixed_bfloat16", "tf32")] \
        == [False, True, True]
    mx.nd.waitall()


# ---- at random, and toward zero

RANDOM = amp.Format("bfloat16_at_random", exponent=8, fraction=7, rounding="stochastic")


def read_by_a_product(format_, x):
    """What a product reads of numbers: it multiplies them by 1."""
    net = gluon.nn.HybridLambda(lambda F, x: F.batch_dot(x, F.ones_like(x)))
    amp.convert(net, amp.Policy("mine", product=format_))
    return net(nd.array(x.reshape(-1, 1, 1))).asnumpy().reshape(x.shape)


@pytest.mark.parametrize("format_", [
    RANDOM, amp.Format("half_at_random", 5, 10, rounding="stochastic"),
    amp.Format("e4m3_at_random", 4, 3, infinities=False, rounding="stochastic")],
    ids=lambda f: f.name)
def test_stochastic_rounding_is_right_on_average(format_):
    """The mean of n roundings lies within 5 of its standard deviations, each to a neighbor."""
    n, tiny = 10_000, max(format_.smallest, 2.0 ** -120)  # a sum flushes float32's own subnormals
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


def test_two_tensors_are_rounded_at_random_apart():
    x = nd.array(np.full((2000, 1, 1), 1 + 2.0 ** -8, np.float32))
    net = gluon.nn.HybridLambda(lambda F, a, b: F.batch_dot(a, b))
    amp.convert(net, amp.Policy("mine", product=RANDOM))
    mx.random.seed(2)
    both_down = (net(x, x.copy()).asnumpy() == 1).mean()
    assert abs(both_down - 0.25) < 0.05


def test_toward_zero_never_rounds_away(rng):
    x = rng.standard_normal(1000).astype(np.float32)
    cut = amp.Format("cut", exponent=5, fraction=10, rounding="zero")
    read = read_by_a_product(cut, x)
    assert np.array_equal(read, cut.round(x))
    assert (np.abs(read) <= np.abs(x)).all()
