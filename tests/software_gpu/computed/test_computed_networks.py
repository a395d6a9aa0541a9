"""Networks give the same results on a GPU as on a CPU."""
import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from arrays import flat
from mxnet import autograd, nd

TABLE = {**networks.ZOO, **networks.OTHERS}
# Some minutes each: `make -C tests results-gpu` runs them.
LARGE = {"alexnet", "densenet121", "inceptionv3", "resnet50_v1", "resnet50_v2", "vgg11", "vgg11_bn",
         "squeezenet1.1", "mobilenet0.25", "resnet18_v2"}


def without_dropout(block):
    """Disables dropout, since each device draws its own random numbers."""
    for name in "_rate", "_dropout":
        if hasattr(block, name):
            setattr(block, name, 0)


def put(data, context):
    return [put(x, context) if isinstance(x, list) else x.as_in_context(context) for x in data]


def made(name, policy, context):
    """A network that has run once, its parameters, and data."""
    make, inputs = TABLE[name]
    mx.random.seed(1)
    np.random.seed(1)
    net = make()
    net.apply(without_dropout)
    net.initialize(mx.init.Xavier(), ctx=context)
    data = put(inputs(np.random.default_rng(0)), context)
    if policy != "float32":
        amp.convert(net, policy)
    net(*data)
    mx.nd.waitall()  # MXNet on a CPU reorders weights in prediction without a dependency
    return net, list(net.collect_params().values()), data


def drawn(name):
    """Weights for all runs of a network."""
    _, parameters, _ = made(name, "float32", mx.cpu())
    return [parameter.data().asnumpy() for parameter in parameters]


def computed(name, policy, context, weights, nudge=0):
    """Outputs, and gradients of the weights.

    Args:
        nudge: the relative increase of weights.
    """
    net, parameters, data = made(name, policy, context)
    for parameter, weight in zip(parameters, weights):
        parameter.set_data(nd.array(weight * np.float32(1 + nudge)).astype(parameter.dtype))
    with autograd.record():
        outputs = list(flat(net(*data)))
        heads = np.random.RandomState(3)
        losses = [(out.astype("float32") * nd.array(heads.randn(*out.shape), ctx=context)).mean()
                  for out in outputs]
    scale = 1024
    autograd.backward(losses, [nd.full((1,), scale, ctx=context) for _ in losses])
    gradients = [p.grad(context).asnumpy().astype("float64").ravel() / scale
                 for p in parameters if p.grad_req != "null"]
    return (np.concatenate([out.asnumpy().astype("float64").ravel() for out in outputs]),
            np.concatenate(gradients))


def distance(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def compare(name):
    """Distances from float32 on a CPU, for outputs and gradients: of float32 on a GPU; of float32
    on a CPU with weights that differ in their last bits; of float16 on a CPU and on a GPU."""
    weights = drawn(name)
    cpu = computed(name, "float32", mx.cpu(), weights)
    others = [computed(name, "float32", mx.gpu(0), weights),
              computed(name, "float32", mx.cpu(), weights, nudge=2.0 ** -21),
              *(computed(name, "float16", context, weights) for context in (mx.cpu(), mx.gpu(0)))]
    return [[distance(a, b) for a, b in zip(other, cpu)] for other in others]


@pytest.mark.parametrize("name", [name for name in TABLE if name not in LARGE])
def test_gpu_results_are_as_near_to_float32_as_cpu_results(name):
    for gpu, nudged, half, half_on_gpu in zip(*compare(name)):
        assert nudged < 0.02
        assert gpu < 10 * nudged + 1e-6
        assert half_on_gpu < 1.5 * half + 2e-4
