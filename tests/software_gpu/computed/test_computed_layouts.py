"""Float16 images are channels-last between convolutions on GPUs with cuDNN 9: outputs, moving
averages and gradients are those of MXNet's layout, in which they are otherwise."""
import os

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from arrays import flat
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from software_gpu import recording

GPU = mx.gpu(0)
pytestmark = pytest.mark.skipif(os.environ["RECORDING_GPU_CUDNN"] < "9",
                                reason="channels-last images need cuDNN 9: newer_gpus.py")


class Of(gluon.HybridBlock):
    """A network of a function of F, layers and data."""

    def __init__(self, forward, *layers):
        super().__init__()
        self.forward_of = forward
        with self.name_scope():
            self.layers = nn.HybridSequential()
            self.layers.add(*layers)

    def hybrid_forward(self, F, x):
        return self.forward_of(F, list(self.layers), x)


def convolution(width, kernel=3, **more):
    return nn.Conv2D(width, kernel, padding=kernel // 2, **more)


def residual(F, layers, x):
    first, norm, second, shortcut = layers
    return F.relu(norm(second(F.relu(norm(first(x))))) + shortcut(x))


def inverted(F, layers, x):
    first, wide, depthwise, narrow = layers
    x = first(x)
    return x + narrow(F.clip(depthwise(F.clip(wide(x), 0, 6)), 0, 6))


def squeezed(F, layers, x):
    first, pool, down, up = layers
    x = first(x)
    return F.broadcast_mul(x, up(down(pool(x))))


def joined(F, layers, x):
    first, second, up, last = layers
    x, half = first(x), second(x)
    return last(F.concat(x, up(half), F.slice_axis(x, axis=-3, begin=2, end=6), dim=1))


def split(F, layers, x):
    first, last = layers
    one, other = F.split(first(x), num_outputs=2, axis=1)
    return last(one * F.sigmoid(other)), other.reshape((0, -1))


def heads(F, layers, x):
    first, boxes, classes = layers
    x = first(x)
    return F.flatten(F.transpose(boxes(x), axes=(0, 2, 3, 1))), F.softmax(classes(x), axis=1)


def pooled(F, layers, x):
    return F.mean(layers[1](layers[0](x)), axis=(2, 3))


def grouped(F, layers, x):
    return layers[1](F.LeakyReLU(layers[0](x), act_type="leaky"))


def enlarged(F, layers, x):
    weight = F.ones((8, 3, 4, 4)) / 64
    return F.Deconvolution(layers[0](x), weight, kernel=(4, 4), stride=(2, 2),
                           target_shape=(16, 12), num_filter=3, no_bias=True)


NETWORKS = {
    "residual": lambda: Of(residual, convolution(8), nn.BatchNorm(), convolution(8),
                           convolution(8, 1)),
    "inverted": lambda: Of(inverted, convolution(4), convolution(8, 1),
                           convolution(8, groups=8, use_bias=False), convolution(4, 1)),
    "squeezed": lambda: Of(squeezed, convolution(8), nn.GlobalAvgPool2D(), convolution(4, 1),
                           convolution(8, 1, activation="sigmoid")),
    "joined": lambda: Of(joined, convolution(8), convolution(16, strides=2),
                         nn.Conv2DTranspose(8, 2, 2), convolution(4)),
    "split": lambda: Of(split, convolution(8), convolution(3)),
    "heads": lambda: Of(heads, convolution(8, strides=2), convolution(12), convolution(6)),
    "pooled": lambda: Of(pooled, convolution(8), nn.MaxPool2D(3, 2, 1, ceil_mode=True)),
    "enlarged": lambda: Of(enlarged, convolution(8)),
    "grouped": lambda: Of(grouped, convolution(8), convolution(4, groups=2)),
}


def results(name, layout, monkeypatch, policy="float16", request="write"):
    """Arrays of a training step and of a prediction."""
    monkeypatch.setenv("GLUON_AMP_LAYOUT", "on" if layout == "NHWC" else "off")
    mx.random.seed(0)
    np.random.seed(0)
    random = np.random.RandomState(0)
    net = NETWORKS[name]()
    net.initialize(mx.init.Xavier(), ctx=GPU)
    x = nd.array(random.rand(2, 3, 8, 6), ctx=GPU)
    net(x)
    amp.convert(net, policy)
    net.hybridize()
    parameters = list(net.collect_params().values())
    trained = [p for p in parameters if p.grad_req != "null"]
    for p in trained:
        p.grad_req = request
    x.attach_grad()
    for _ in range(2 if request == "add" else 1):
        with autograd.record():
            outputs = list(flat(net(x)))
            loss = sum((o.astype("float32") * nd.array(
                np.random.RandomState(i).rand(*o.shape), ctx=GPU)).sum()
                for i, o in enumerate(outputs))
        loss.backward()
    arrays = [*outputs, x.grad, *(p.grad() for p in trained), *(p.data() for p in parameters),
              *flat(net(x))]
    return [array.asnumpy() for array in arrays]


def compare(made, wanted):
    for one, other in zip(made, wanted):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype(float), other.astype(float), rtol=4e-3,
                                   atol=4e-3 * max(1, np.abs(other).max()))


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_step_and_prediction_are_those_of_mxnets_layout(name, policy, monkeypatch, calls):
    compare(*(results(name, layout, monkeypatch, policy) for layout in ("NHWC", "NCHW")))


def test_prediction_has_mxnets_layout():
    net = NETWORKS["residual"]()
    net.initialize(ctx=GPU)
    amp.convert(net)
    net.hybridize()
    for training in True, False:
        begin = recording.position()
        with autograd.record() if training else autograd.pause():
            net(nd.ones((2, 3, 8, 6), ctx=GPU))
        recording.position()
        transposed = any("transpose" in call.kernel for call in recording.calls(begin))
        assert transposed == training


def test_gradients_are_added_in_either_layout(monkeypatch):
    compare(*(results("residual", layout, monkeypatch, request="add")
              for layout in ("NHWC", "NCHW")))


def test_symbolic_module_is_trained_in_either_layout(monkeypatch):
    def trained(layout):
        monkeypatch.setenv("GLUON_AMP_LAYOUT", layout)
        x = mx.sym.Cast(mx.sym.var("data"), dtype="float16")
        x = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=8, name="c")
        x = mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False, name="n"), act_type="relu")
        x = mx.sym.FullyConnected(mx.sym.Convolution(x, kernel=(1, 1), num_filter=4, name="d"),
                                  num_hidden=3, name="f")
        net = mx.sym.SoftmaxOutput(mx.sym.Cast(x, dtype="float32"), name="softmax")
        random = np.random.RandomState(0)
        data = mx.io.NDArrayIter(random.rand(8, 3, 6, 6), random.randint(0, 3, 8), 4)
        module = amp.Module(net, context=GPU)
        module.bind(data.provide_data, data.provide_label)
        mx.random.seed(0)
        module.init_params(mx.init.Xavier())
        executor = module._exec_group.execs[0]
        operators = executor.get_optimized_symbol().get_internals().list_outputs()
        assert ("n_output" not in operators) == (layout == "on")  # its ReLU includes it
        module.init_optimizer(optimizer_params={"learning_rate": 0.1})
        for batch in data:
            module.forward_backward(batch)
            module.update()
        return {k: v.asnumpy() for part in module.get_params() for k, v in part.items()}

    plain, last = trained("off"), trained("on")
    assert plain.keys() == last.keys()
    for name, array in plain.items():
        np.testing.assert_allclose(last[name].astype(float), array.astype(float), rtol=4e-3,
                                   atol=4e-3, err_msg=name)
