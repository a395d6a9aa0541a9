"""Weight gradients of convolutions, whose depth oneDNN gets wrong in some shapes."""
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from processes import printed
from trainers import recorded
from weight_gradients import TOLERANCE, Case, poison

pytestmark = pytest.mark.sanitize

# depth of the data, kernel, stride and padding in depth, for which oneDNN leaves a plane of the
# gradient uninitialized or adds to other planes
SHAPES = {"Convolution": [(3, 3, 2, 1), (2, 4, 2, 3), (2, 3, 3, 2), (3, 2, 3, 1), (6, 6, 2, 3),
                          (4, 4, 2, 1), (4, 6, 2, 3)],
          "Deconvolution": [(2, 4, 2, 1), (3, 4, 2, 1), (4, 4, 2, 1), (2, 3, 2, 1), (3, 5, 2, 3)]}


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("op", SHAPES)
def test_gradients_of_three_axes(op, dtype, request_, rng):
    for size, kernel, stride, pad in SHAPES[op]:
        for layer in [(16, 16, 1), (3, 16, 1), (5, 7, 1), (32, 32, 2), (8, 8, 8)]:
            case = Case(op, (size, 4, 5), (kernel, 3, 2), (stride, 1, 2), (1, 1, 1), (pad, 1, 0),
                        layer, dtype, request_)
            poison()
            assert case.error(rng) < TOLERANCE[dtype], case


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("op", SHAPES)
def test_gradients_of_data_and_bias(op, dtype, rng):
    """Adding to both, in the same pass as the weight's."""
    x, w, b = (nd.array(rng.standard_normal(shape)).astype(dtype)
               for shape in ((2, 16, 3, 4, 4), (16, 16, 4, 3, 3), (16,)))
    made = []
    for group in (x, w, b), (x,), (b,):  # each alone needs no weight gradient, which is wrong
        for array in (x, w, b):
            array.attach_grad("add" if any(array is a for a in group) else "null")
        with autograd.record():
            y = getattr(nd, op)(x, w, b, kernel=(4, 3, 3), stride=(2, 1, 1), pad=(1, 1, 1),
                                num_filter=16, no_bias=False)
        for _ in range(2):
            y.backward(nd.ones_like(y), retain_graph=True)
        made.append([a.grad.astype("float32").asnumpy() for a in group])
    np.testing.assert_allclose(made[0][0], made[1][0], rtol=2 * TOLERANCE[dtype])
    np.testing.assert_allclose(made[0][2], made[2][0], rtol=2 * TOLERANCE[dtype])
    assert made[0][2][0] == pytest.approx(2 * y.size / 16, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("policy", ["float32", "float16", "bfloat16", "mixed_bfloat16"])
def test_network_of_clips_trains(policy):
    """Twelve frames become six, three and two; each layer's gradient has a bound."""
    mx.random.seed(0)
    net = nn.HybridSequential()
    for _ in range(3):
        net.add(nn.Conv3D(16, 3, 2, 1), nn.Activation("relu"))
    net.add(nn.Dense(2))
    net.initialize(mx.init.Xavier())
    x, y = mx.random.normal(shape=(4, 3, 12, 16, 16)), nd.array([0, 1, 0, 1])
    net(x)
    amp.convert(net, policy)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05}, loss_scale=None)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(3):
        poison()
        trainer.backward(recorded(lambda: loss_fn(net(x).astype("float32"), y)))
        assert all(np.abs(p.grad().astype("float32").asnumpy()).max() < 100
                   for p in net.collect_params().values())
        trainer.step(4)


def test_gradients_if_the_allocator_fills_memory():
    """MXNet's Convolution reads the request of a bias that it does not have."""
    code = ("import numpy as np, weight_gradients as w; print(w.Case('Convolution', (3, 4, 5), "
            "(3, 3, 2), (2, 1, 2), (1, 1, 1), (1, 1, 0)).error(np.random.default_rng(0)))")
    filled = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "MALLOC_PERTURB_": "85"}
    assert float(printed(code, folder=Path(__file__).parent, **filled)) < TOLERANCE["float32"]
