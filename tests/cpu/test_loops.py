"""`while_loop` and `cond`: gradients and outputs that MXNet leaves uninitialized."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import nn
from networks import Calling
from trainers import recorded

pytestmark = pytest.mark.sanitize

RTOL = {"float32": 1e-6, "float16": 5e-3, "bfloat16": 4e-2}


def forget(*shapes):
    """Fills the memory that MXNet reuses with NaN."""
    held = [nd.full(shape, np.nan, dtype=dtype) for shape in shapes
            for dtype in ("float32", "float16") for _ in range(50)]
    nd.waitall()
    del held


def embedded(F, i, h, cell, table):
    """A round whose loop variable is an index."""
    return F.tanh(F.broadcast_add(cell(h), table(i)))


def loop(F, x, cell, table, out):
    _, (_, h) = F.contrib.while_loop(
        lambda i, h: i < 3, lambda i, h: ([], [i + 1, embedded(F, i, h, cell, table)]),
        [F.zeros((1,)), x], max_iterations=5)
    return out(h)


def unrolled(F, x, cell, table, out):
    for i in range(3):
        x = embedded(F, F.zeros((1,)) + i, x, cell, table)
    return out(x)


def condition(F, x, cell, out):
    other = out(x)
    return F.contrib.cond((F.sum(x) < 1e6).astype("float32"), lambda: cell(x) * 1,
                          lambda: other * 1)


def gradients(function, policy, *others):
    mx.random.seed(1)
    net = Calling(function, nn.Dense(6, in_units=6), *others, nn.Dense(6, in_units=6))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    amp.convert(net, policy)
    data = nd.array(np.random.RandomState(0).normal(size=(8, 6)))
    for _ in range(2):
        forget((8, 6), (6, 6), (6,), (5, 6), (1,))
        recorded(lambda: (net(data) ** 2).sum()).backward()
    return [p.grad().astype("float32").asnumpy() for p in net.collect_params().values()]


@pytest.mark.parametrize("policy", RTOL)
def test_data_may_be_the_first_value_of_a_loop_variable(policy):
    """The gradient of a variable is needed although its first value has none."""
    made = zip(gradients(loop, policy, nn.Embedding(5, 6)),
               gradients(unrolled, "float32", nn.Embedding(5, 6)))
    for found, expected in made:
        np.testing.assert_allclose(found, expected, atol=RTOL[policy] * np.abs(expected).max())


@pytest.mark.parametrize("policy", RTOL)
def test_gradients_of_the_other_branch_are_zero(policy):
    weight, bias, *others = gradients(condition, policy)
    assert weight.any()
    assert bias.any()
    assert not any(one.any() for one in others)


@pytest.mark.parametrize("policy", RTOL)
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_rows_of_rounds_that_do_not_run_are_zero(rounds, policy):
    net = Calling(lambda F, x: F.contrib.while_loop(
        lambda i, y: i < rounds, lambda i, y: (y + 1, [i + 1, y * 2]), [F.zeros((1,)), x],
        max_iterations=5)[0])
    net.hybridize()
    amp.convert(net, policy)
    for _ in range(2):
        forget((5, 3, 4))
        made = net(nd.ones((3, 4))).asnumpy()
    expected = [2.0 ** i + 1 if i < rounds else 0 for i in range(5)]
    assert np.array_equal(made, np.broadcast_to(np.reshape(expected, (5, 1, 1)), (5, 3, 4)))
