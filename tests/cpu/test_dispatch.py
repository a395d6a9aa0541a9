"""MXNet's operators accept float16 arrays on a CPU and give float32's results, rounded once, in
every kind of call."""
import gluon_amp  # noqa: F401
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from halves import assert_half, halves
from mxnet import autograd, nd
from mxnet.gluon import nn
from trainers import recorded

pytestmark = [pytest.mark.sanitize, pytest.mark.isa]

F16, F32 = np.float16, np.float32


def array(values):
    return nd.array(values, dtype=values.dtype)


def backward(call, x, *head):
    """The result of a call with x, after a backward pass."""
    x.attach_grad()
    out = recorded(call, x)
    out.backward(*head)
    return out


# ---- calls outside of graphs ---------------------------------------------------------------


@pytest.mark.parametrize(("call", "expected"), [
    (lambda x: x * 0.1, lambda a, c: a * c(0.1)),
    (lambda x: x + 0.1, lambda a, c: a + c(0.1)),
    (lambda x: 0.1 - x, lambda a, c: c(0.1) - a),
    (lambda x: x / 0.3, lambda a, c: a / c(0.3)),
    (lambda x: x.clip(-0.1, 0.3), lambda a, c: np.clip(a, c(-0.1), c(0.3))),
    (lambda x: nd.LeakyReLU(x, act_type="leaky", slope=0.1),
     lambda a, c: np.where(a > 0, a, a * c(0.1))),
    (lambda x: nd.maximum(x, 0.1), lambda a, c: np.maximum(a, c(0.1))),
    (lambda x: x ** 2.0, lambda a, c: a ** 2),
])
def test_constant_is_rounded_to_float16_as_on_gpu(call, expected, rng):
    values = halves(rng, 300)
    found = call(array(values)).asnumpy()
    exact = expected(values.astype(F32), lambda number: F32(F16(number)))
    assert_half(found, exact)


def test_nan_to_num_uses_limits_of_float16():
    values = mx.np.array([np.inf, -np.inf, np.nan, 1.5], dtype="float16")
    assert mx.np.nan_to_num(values).asnumpy().tolist() == [65504, -65504, 0, 1.5]
    assert mx.np.nan_to_num(values, posinf=7).asnumpy().tolist() == [7, -65504, 0, 1.5]
    beyond = mx.np.nan_to_num(values, posinf=1e6, neginf=-1e6, nan=1e5)
    assert beyond.asnumpy().tolist()[:2] == [np.inf, -np.inf]
    unsaid = library.call("_npi_nan_to_num", [values], nan=0)
    assert unsaid.asnumpy().tolist() == [65504, -65504, 0, 1.5]


def test_gradient_of_constant_product_uses_rounded_constant(rng):
    values = halves(rng, 300)
    x = array(values)
    backward(lambda x: x * 0.1, x, array(values))
    assert_half(x.grad.asnumpy(), values.astype(F32) * F32(F16(0.1)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64",
                                   "int8", "uint8"])
def test_casts_to_and_from_float16(dtype):
    values = np.array([0, 1, 2, 3.5, 100, 0.1], F16)
    there = array(values).astype(dtype)
    assert np.array_equal(there.asnumpy(), values.astype(dtype))
    assert np.array_equal(there.astype("float16").asnumpy(), values.astype(dtype).astype(F16))


def test_out_argument_and_views_and_in_place_results(rng):
    """Into given arrays, parts of arrays, and the memory of an input."""
    a, b = halves(rng, 6, 5), halves(rng, 6, 5)
    x, y, z = array(a), array(b), nd.zeros((6, 5), dtype="float16")
    nd.broadcast_add(x, y, out=z)
    assert_half(z.asnumpy(), a.astype(F32) + b)
    z[:] = 0
    nd.broadcast_add(x[2:4], y[2:4], out=z[2:4])
    assert_half(z[2:4].asnumpy(), a[2:4].astype(F32) + b[2:4])
    assert not z[:2].asnumpy().any()
    assert not z[4:].asnumpy().any()
    nd.transpose(x[:5], out=x[:5])
    assert np.array_equal(x.asnumpy(), np.concatenate([a[:5].T, a[5:]]))
    nd.elemwise_mul(array(a), y, out=y)
    assert_half(y.asnumpy(), a.astype(F32) * b)
    x = array(a)
    x += array(b)
    assert_half(x.asnumpy(), a.astype(F32) + b)
    nd.softmax(x, axis=1, out=x)
    assert_half(x.sum(axis=1).asnumpy(), np.ones(6), 1)


@pytest.mark.parametrize("shapes", [[(5, 2, 12)], [(5, 2, 12), (4, 5, 5)]])
def test_attention_runs_in_inference_executor(shapes, rng):
    """MXNet replaces it by a subgraph of oneDNN there."""
    name = ("qk", "valatt")[len(shapes) - 1]
    variables = [mx.sym.var(f"x{i}") for i in range(len(shapes))]
    symbol = getattr(mx.sym.contrib, f"interleaved_matmul_selfatt_{name}")(*variables, heads=2)
    values, results = [halves(rng, *shape) for shape in shapes], []
    for dtype in (F16, F32):
        arrays = {f"x{i}": nd.array(v, dtype=dtype) for i, v in enumerate(values)}
        executor = symbol.bind(mx.cpu(), arrays, grad_req="null")
        first = executor.forward(is_train=False)[0].asnumpy()
        arrays["x0"][:] *= 2
        results.append([first, executor.forward(is_train=False)[0].asnumpy()])
    for found, exact in zip(*results):
        assert_half(found, exact)


@pytest.mark.parametrize("call", [nd.relu, lambda x: nd.Activation(x, act_type="relu")])
def test_relu_gradient_is_nan_at_nan_input(call):
    x = array(np.array([np.nan, 1, -1, 0], F16))
    backward(call, x)
    assert np.array_equal(x.grad.asnumpy(), [np.nan, 1, 0, 0], equal_nan=True)


def test_state_written_by_backward_pass_is_updated(rng):
    values, averages = halves(rng, 6, 3), []
    for dtype in (F16, F32):
        x, average = nd.array(values, dtype=dtype), nd.ones(3, dtype=dtype) / 2
        x.attach_grad()
        with autograd.record():
            out = library.call("IdentityAttachKLSparseReg", [x, average], momentum=0.5)
        out.backward()
        averages.append(average.asnumpy())
    assert_half(averages[0], averages[1])
    assert (averages[0] != 0.5).all()


def test_gradients_accumulate(rng):
    """With grad_req="add", and for a tensor with several readers."""
    a = halves(rng, 4, 5)
    x = array(a)
    x.attach_grad("add")
    for _ in range(2):
        recorded(lambda: nd.relu(x) + x + x * 2).backward()
    assert_half(x.grad.asnumpy(), 2 * (3 + (a > 0)))


def test_sparse_arrays_use_mxnet_code(rng):
    dense = halves(rng, 4, 3).astype(F32)
    rows = nd.array(dense).tostype("row_sparse")
    assert np.array_equal((rows * 2).asnumpy(), dense * 2)
    assert np.array_equal(nd.dot(rows, nd.ones((3, 2))).asnumpy(), dense @ np.ones((3, 2), F32))
    weight = nd.ones((5, 3))
    weight.attach_grad(stype="row_sparse")
    with autograd.record():
        out = nd.Embedding(nd.array([1, 3]), weight, input_dim=5, output_dim=3, sparse_grad=True)
    out.backward()
    assert weight.grad.stype == "row_sparse"


@pytest.mark.parametrize("call", [
    lambda x: nd.FullyConnected(x, nd.ones((3, 5)), no_bias=True, num_hidden=3),
    lambda x: nd.elemwise_add(x, nd.ones((4, 5))),
    lambda x: nd.LayerNorm(x, nd.ones(5), nd.ones(5)),
    lambda x: nd.dot(x, nd.ones((5, 3)))])
def test_mixed_types_are_refused_as_in_mxnet(call):
    with pytest.raises(mx.MXNetError, match="expected float16, got float32"):
        call(nd.ones((4, 5), dtype="float16")).wait_to_read()


@pytest.mark.parametrize(("call", "shape"), [
    (lambda x: nd.linalg.det(x), (3, 3)), (lambda x: nd.linalg.slogdet(x)[1], (3, 3)),
    (lambda x: mx.np.linalg.eigvalsh(x.as_np_ndarray()), (3, 3)),
    (lambda x: mx.np.linalg.solve(x.as_np_ndarray(), x.as_np_ndarray()), (3, 3)),
    (lambda x: mx.np.linalg.pinv(x.as_np_ndarray()), (3, 3)),
    (lambda x: mx.np.around(x.as_np_ndarray(), 1), (3, 3)),
    (lambda x: nd.contrib.MultiBoxPrior(x.reshape((1, 1, 3, 3)), sizes=(0.5, 0.2)), (3, 3)),
    (lambda x: nd.Crop(x.reshape((1, 1, 3, 3)), h_w=(2, 2)), (3, 3)),
])
def test_operators_with_needless_type_checks_accept_float16(call, shape, rng):
    values = halves(rng, *shape) + 3 * np.eye(3, dtype=F16)
    values = (values + values.T) / 2
    found, exact = call(array(values)), call(nd.array(values, dtype=F32))
    assert found.dtype == F16
    assert np.array_equal(found.asnumpy(), exact.asnumpy().astype(F16))


# ---- autograd --------------------------------------------------------------------------------


class Scale(autograd.Function):
    """Doubles its input, with a custom gradient."""

    def forward(self, x):
        assert x.dtype == F16
        return nd.dot(x, x.T)

    def backward(self, dy):
        assert dy.dtype == F16
        return nd.dot(dy, nd.ones((dy.shape[0], 3), dtype="float16"))


def test_autograd_function_accepts_float16(rng):
    values = halves(rng, 4, 3)
    x = array(values)
    out = backward(lambda x: nd.relu(Scale()(x * 1)), x)
    wide = values.astype(F32) @ values.T.astype(F32)
    assert_half(out.asnumpy(), np.maximum(wide, 0))
    assert_half(x.grad.asnumpy(), (wide.astype(F16) > 0).astype(F32) @ np.ones((4, 3)))


class Doubled(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        assert in_data[0].dtype == out_data[0].dtype == F16
        self.assign(out_data[0], req[0], nd.broadcast_mul(in_data[0], in_data[0]))

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 2 * in_data[0] * out_grad[0])


@mx.operator.register("dispatch_doubled")
class DoubledProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Doubled()


@pytest.mark.parametrize("symbolic", [False, True])
def test_custom_operator_accepts_float16(symbolic, rng):
    values = halves(rng, 4, 3)
    net = nn.HybridLambda(lambda F, x: F.relu(F.Custom(x, op_type="dispatch_doubled")) + 1)
    x = array(values)
    if symbolic:
        net.hybridize()
    out = backward(net, x)
    assert_half(out.asnumpy(), values.astype(F32) ** 2 + 1, 1)
    assert_half(x.grad.asnumpy(), 2 * values.astype(F32))


def repeated(F, x, dtype):
    zeros = F.zeros_like(F.slice_axis(x, axis=0, begin=0, end=1)).reshape((-1,))
    return F.contrib.foreach(lambda row, total: (F.relu(row) + total, total + row), x, zeros)[0]


def counted(F, x, dtype):
    return F.contrib.while_loop(lambda i, s: i < 2, lambda i, s: (s, [i + 1, s * 2]),
                                (F.zeros((1,), dtype=dtype), x), 2)[0]


def chosen(F, x, dtype):
    return F.contrib.cond(F.cast(F.sum(x) > 1e4, dtype="float32"), lambda: x * 3, lambda: x * 2)


@pytest.mark.parametrize("flow", [repeated, counted, chosen])
@pytest.mark.parametrize("hybridized", [False, True])
def test_control_flow_in_float16(flow, hybridized, rng):
    values, results = halves(rng, 3, 4), []
    for dtype in ("float16", "float32"):
        net = nn.HybridLambda(lambda F, x, dtype=dtype: flow(F, x, dtype))
        if hybridized:
            net.hybridize()
        x = nd.array(values, dtype=dtype)
        out = backward(net, x)
        results.append((out.asnumpy(), x.grad.asnumpy()))
    for found, exact in zip(*results):
        assert_half(found, exact, 1)
