"""Dedicated kernels for broadcasting, or for blocks of values, match the generic operator."""
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from halves import generic_code, halves
from test_engine_own_code import (
    ANY_SHAPE,
    GATHERS,
    MOVES,
    X,
    Y,
    Z,
    compare,
    fixed,
    heads_for,
    moved,
    outcome,
)
from trainers import recorded

pytestmark = pytest.mark.isa

sym = mx.sym

ARITHMETIC = {
    "broadcast_add": sym.broadcast_add, "broadcast_sub": sym.broadcast_sub,
    "broadcast_mul": sym.broadcast_mul, "broadcast_div": sym.broadcast_div,
    "_npi_add": lambda x, y: x.as_np_ndarray() + y.as_np_ndarray(),
    "_npi_subtract": lambda x, y: x.as_np_ndarray() - y.as_np_ndarray(),
    "_npi_multiply": lambda x, y: x.as_np_ndarray() * y.as_np_ndarray(),
    "_npi_true_divide": lambda x, y: x.as_np_ndarray() / y.as_np_ndarray(),
}
# a value per channel, per row, a mask; both broadcast; few and short rows; a scalar
PAIRS = [((2, 17, 5, 7), (2, 17, 1, 1)), ((2, 17, 5, 7), (1, 17, 1, 1)),
         ((6, 8, 9, 9), (1, 1, 9, 9)), ((3, 1, 20), (1, 4, 20)), ((1, 9), (9, 1)),
         ((70, 3), (70, 1)), ((3, 5, 7), (1, 1, 1)), ((4, 1), (4, 1)), ((3, 5, 7), (3, 5, 7)),
         ((2, 1500), (2, 1)), ((260, 1030), (1, 1030))]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_broadcast_arithmetic_matches_generic_operator(name, rng):
    symbol = ARITHMETIC[name](X, Y)
    with mx.util.np_shape("npi" in name):
        for shapes in PAIRS:
            for one, other in (shapes, shapes[::-1])[:1 if "npi" in name else 2]:
                arrays = {"x": halves(rng, *one, scale=3), "y": halves(rng, *other) + np.float16(2)}
                heads = heads_for(symbol, arrays, rng)
                for request in ("write", "add")[:1 if "npi" in name else 2]:
                    own = outcome(symbol, arrays, heads, request)
                    with generic_code():
                        generic = outcome(symbol, arrays, heads, request)
                    assert np.array_equal(own[0][0], generic[0][0], equal_nan=True)
                    compare(own, generic, 0, 1 + (request == "add"))


def test_broadcast_gradient_of_many_numbers_is_exact(rng):
    """Rounded once, although float32 errors of so many terms would accumulate."""
    arrays = {"x": halves(rng, 30_000, 8), "y": halves(rng, 1, 8)}
    head = np.full((30_000, 8), 0.01, np.float16)
    _, gradients, _ = outcome(sym.broadcast_add(X, Y), arrays, [head])
    assert np.array_equal(gradients["y"], head.astype(np.float64).sum(0, keepdims=True)
                          .astype(np.float16))


# more values than one block has
MANY = 150_001
ONE_AT_A_TIME = {
    **{name: getattr(sym, name)(X) for name in (
        "abs", "sign", "round", "rint", "ceil", "floor", "trunc", "fix", "negative", "sqrt",
        "square", "hard_sigmoid", "softsign")},
    "_maximum_scalar": sym.maximum(X, 0.3), "_minimum_scalar": sym.minimum(X, 0.3),
    "_maximum": sym.maximum(X, Y), "_minimum": sym.minimum(X, Y),
    "elemwise_sub": X - Y, "elemwise_div": X / Y, "elemwise_mul": X * Y,
    "elemwise_mul of itself": X * X, "where": sym.where(Y, X, Z),
}


@pytest.mark.parametrize("name", ONE_AT_A_TIME)
def test_processing_in_blocks_is_bitwise_identical(name, rng):
    symbol = ONE_AT_A_TIME[name]
    y = halves(rng, MANY)
    y[::3] = 1 if name == "elemwise_div" else 0
    arrays = {"x": halves(rng, MANY), "y": y, "z": halves(rng, MANY)}
    moved(symbol, {n: arrays[n] for n in symbol.list_inputs()}, rng)


MORE_MOVES = {
    **{f"SwapAxis {a} {b}": (sym.swapaxes(X, a, b), fixed((7, 3, 35, 40)))
       for a, b in ((1, 2), (0, 3), (3, 2), (1, 1))},
    **{f"Pad {mode} of {len(shape)} axes": (
        sym.Pad(X, mode=mode, constant_value=0.3, pad_width=width), fixed(shape))
       for mode in ("constant", "edge", "reflect")
       for shape, width in (((2, 3, 5, 7), (0, 0, 0, 0, 1, 3, 4, 2)),
                            ((2, 3, 4, 5, 40), (0, 0, 0, 0, 1, 2, 0, 3, 4, 0)))},
    **{f"Pad cropped by {width}": (sym.Pad(X, mode="edge", pad_width=(0, 0, 0, 0, *width)),
                                   fixed((2, 3, 5, 40)))
       for width in ((0, 0, -3, -4), (0, 0, -1, 2), (0, 0, 2, -1), (-1, -2, 0, 0),
                     (1, -1, -40, 3), (0, 0, 50, -45), (0, 0, -45, 50))},
    "reverse": (sym.reverse(X, axis=1), fixed((3, 40))),
    "repeat": (sym.repeat(X, repeats=3, axis=1), fixed((3, 4))),
    "broadcast_to": (sym.broadcast_to(X, shape=(3, 4, 5)), fixed((3, 1, 5))),
    "broadcast_axis": (sym.broadcast_axis(X, axis=0, size=4), fixed((1, 3, 5))),
    "broadcast_like": (sym.broadcast_like(X, Y), fixed((1, 5), (3, 5))),
    "depth_to_space": (sym.depth_to_space(X, block_size=2), fixed((2, 8, 3, 5))),
    "space_to_depth": (sym.space_to_depth(X, block_size=2), fixed((2, 3, 4, 6))),
    **{f"slice_axis along {axis}": (sym.slice_axis(X, axis=axis, begin=begin, end=end),
                                    fixed((4, 6, 40)))
       for axis, begin, end in ((0, 1, 3), (1, -5, None), (-1, 0, 30), (2, 7, -1))},
    **{f"UpSampling by {scale}": (sym.UpSampling(X, scale=scale, sample_type="nearest",
                                                 num_args=1), fixed((3, 5, 20, 31)))
       for scale in (1, 2, 3)},
    "UpSampling of two": (sym.UpSampling(X, Y, scale=2, sample_type="nearest", num_args=2),
                          fixed((2, 3, 6, 8), (2, 3, 12, 16))),
    "gather_nd": (sym.gather_nd(X, sym.cast(Y, "int32")),
                  lambda rng: {"x": halves(rng, 5, 6), "y": np.int32([[0, 1, 1], [2, 5, 2]])}),
}


@pytest.mark.parametrize("name", MORE_MOVES)
def test_more_operators_that_move_values_are_bitwise_exact(name, rng):
    symbol, make = MORE_MOVES[name]
    moved(symbol, make(rng), rng)


@pytest.mark.parametrize("settings", [{}, {"axis": 1}, {"mode": "wrap"}], ids=str)
@pytest.mark.parametrize("request_", ["write", "add"])
def test_take_gradient_matches_generic_operator(settings, request_, rng):
    symbol = sym.take(X, sym.BlockGrad(Y), **settings)
    arrays = {"x": halves(rng, 7, 5, 3), "y": rng.integers(-2, 9, (50, 3)).astype("float32")}
    heads = heads_for(symbol, arrays, rng)
    own = outcome(symbol, arrays, heads, request_)
    with generic_code():
        compare(own, outcome(symbol, arrays, heads, request_), 0, 0)


# more values than one block has
MAXIMA = [{"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}, {"kernel": (2, 2), "stride": (2, 2)},
          {"kernel": (3, 3), "pad": (1, 1)}, {"kernel": (5, 4), "stride": (2, 2), "pad": (2, 3)},
          {"kernel": (2, 3), "stride": (3, 1), "pad": (0, 1)}, {"kernel": (3, 1), "stride": (1, 2)},
          {"kernel": (3, 3), "stride": (2, 2), "pooling_convention": "full"},
          {"kernel": (4, 4), "stride": (3, 3), "pad": (1, 1), "pooling_convention": "full"}]


@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (2, 16, 33, 34), (1, 17, 20, 65)], ids=str)
@pytest.mark.parametrize("settings", MAXIMA, ids=str)
def test_max_pooling_prediction_is_bitwise_identical(settings, shape, rng):
    """With many equal values; of 0 and -0 the first one is the maximum, and NaN is ignored."""
    x = rng.choice(np.float16([-0.0, 0, 1, -1, np.inf, -np.inf, np.nan, 65504]), shape)
    x[:, ::2] = halves(rng, *x[:, ::2].shape)
    symbol = sym.Pooling(X, pool_type="max", **settings)
    (own,), _, _ = outcome(symbol, {"x": x}, training=False)
    with generic_code():
        (generic,), _, _ = outcome(symbol, {"x": x}, training=False)
    assert np.array_equal(own.view(np.int16), generic.view(np.int16))


def test_every_dedicated_kernel_is_tested():
    rows = library.operators("own_code")
    assert len(rows) > 50
    here = {name.split()[0] for name in (*ANY_SHAPE, *MOVES, *GATHERS, *ARITHMETIC, *MORE_MOVES,
                                         *ONE_AT_A_TIME)}
    elsewhere = {"Convolution", "Deconvolution", "FullyConnected", "BatchNorm",
                 "_contrib_BatchNormWithReLU", "LayerNorm", "Dropout", "Pooling"}
    elsewhere |= {"add_n", "mp_nag_mom_update", "mp_sgd_mom_update", "mp_sgd_update",
                  "multi_mp_sgd_mom_update", "multi_mp_sgd_update"}  # test_dispatch*.py
    elsewhere |= {"Reshape", "Flatten", "expand_dims", "squeeze", "BlockGrad", "_npx_reshape",
                  "_np_reshape", "_np_squeeze"}  # test_engine_operators.py
    elsewhere |= {"batch_dot", "dot"}  # test_bfloat16_products.py
    elsewhere |= {"reset_arrays"}  # test_bfloat16.py
    forward = {row for row in rows if not row.startswith("_backward")}
    assert forward <= here | elsewhere
    gradients = {"_backward_" + re.sub("^(elemwise)?_", "", name) for name in here | elsewhere}
    gradients |= {name.replace("npi_", "npi_broadcast_").replace("subtract", "sub")
                  .replace("multiply", "mul") for name in gradients}
    assert rows - forward <= gradients | {"_backward_add", "_backward_cast", "_backward_reshape"}


def test_deconvolution_to_one_channel_has_gradients():
    """With AVX2 alone, MXNet's float32 has none: the reference has a second channel of zeros."""
    rng = np.random.default_rng(1)
    data, head = rng.standard_normal((4, 16, 5, 5)), rng.standard_normal((4, 1, 10, 10))
    weight = rng.standard_normal((16, 1, 4, 4))

    def gradients(channels, dtype):
        x, w = (mx.nd.array(a, dtype="float16").astype(dtype)
                for a in (data, np.pad(weight, ((0, 0), (0, channels - 1), (0, 0), (0, 0)))))
        net = amp.convert(mx.gluon.nn.Conv2DTranspose(channels, 4, 2, 1, in_channels=16,
                                                      use_bias=False))
        if dtype == "float32":
            amp.restore(net)
        net.initialize()
        net.weight.set_data(w)
        x.attach_grad()
        y = recorded(net, x)
        y.backward(mx.nd.array(np.repeat(head, channels, 1), dtype=y.dtype))
        return x.grad.asnumpy(), net.weight.grad().asnumpy()[:, :1]

    for ours, theirs in zip(gradients(1, "float16"), gradients(2, "float32")):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3 * np.abs(theirs).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cropping_with_pad_is_a_slice(dtype):
    """Of float32 arrays, MXNet leaves parts of this gradient unwritten."""
    x = mx.nd.arange(2 * 3 * 4 * 6).reshape((2, 3, 4, 6)).astype(dtype)
    x.attach_grad()
    cropped = recorded(lambda: mx.nd.pad(x, mode="constant", pad_width=(0, 0, 0, 0, -1, 0, -2, -1)))
    cropped.backward()
    assert np.array_equal(cropped.astype("float32").asnumpy(),
                          x[:, :, 1:, 2:5].astype("float32").asnumpy())
    inside = np.zeros(x.shape)
    inside[:, :, 1:, 2:5] = 1
    assert np.array_equal(x.grad.astype("float32").asnumpy(), inside)


def test_reflection_beyond_the_array_is_refused():
    x = mx.nd.ones((1, 1, 2, 2, 3), dtype="float16")
    with pytest.raises(mx.MXNetError, match="reflect needs a padding below the size"):
        mx.nd.pad(x, mode="reflect", pad_width=(0, 0, 0, 0, 0, 0, 1, 1, 4, 1)).wait_to_read()


@pytest.mark.parametrize("begin", [2 ** 24 + 3, -37])
def test_slice_axis_begins_at_any_integer(begin):
    size = 2 ** 24 + 40
    x = mx.nd.tile(mx.nd.arange(64, dtype="float16"), (size // 64 + 1,))[:size]
    x.attach_grad()
    some = recorded(lambda: mx.nd.slice_axis(x, axis=0, begin=begin, end=begin + 5))
    some.backward()
    assert some.asnumpy().tolist() == [3, 4, 5, 6, 7]
    assert np.flatnonzero(x.grad.asnumpy()).tolist() == list(range(2 ** 24 + 3, 2 ** 24 + 8))
