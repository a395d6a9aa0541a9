"""Random networks of 5 to 30 operators: a converted one is as near to the exact results as MXNet's
float64 operators with each result rounded to float16.

GLUON_AMP_GRAPHS is the number of networks (6), GLUON_AMP_GRAPHS_FROM the first seed. No network
takes a maximum over numbers, since rounding may create ties, which change gradients.
"""
import os
import random

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

FIRST = int(os.environ.get("GLUON_AMP_GRAPHS_FROM", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("GLUON_AMP_GRAPHS", "6")))
ROWS, WIDTH = 6, 12  # all tensors between operators have this shape


def unary(name, **kwargs):
    return lambda F, x, w: getattr(F, name)(x, **kwargs)


def four(apply):
    """On images."""
    def on_images(F, x, w):
        y = apply(F, F.reshape(x, shape=(ROWS, 3, 2, 2)), w)
        return F.reshape(y, shape=(ROWS, WIDTH))
    return on_images


# name: function of one tensor and its weights; shapes of weights
ONE = {
    "relu": (unary("relu"), ()), "tanh": (unary("tanh"), ()), "sigmoid": (unary("sigmoid"), ()),
    "softsign": (unary("softsign"), ()), "abs": (unary("abs"), ()), "erf": (unary("erf"), ()),
    "negative": (unary("negative"), ()), "arctan": (unary("arctan"), ()),
    "square": (lambda F, x, w: F.square(x * 0.5), ()),
    "cube": (lambda F, x, w: (x * 0.5) ** 3, ()),
    "exp": (lambda F, x, w: F.exp(-F.abs(x)), ()),
    "log": (lambda F, x, w: F.log(F.abs(x) + 1), ()),
    "sqrt": (lambda F, x, w: F.sqrt(F.abs(x) + 0.5), ()),
    "rsqrt": (lambda F, x, w: F.rsqrt(F.square(x) + 0.5), ()),
    "reciprocal": (lambda F, x, w: 1 / (F.square(x) + 1), ()),
    "epsilon": (lambda F, x, w: F.broadcast_div(
        x, F.abs(x).sum(axis=1, keepdims=True) + 1e-10), ()),
    "clip": (unary("clip", a_min=-0.7, a_max=1.1), ()),
    "scalars": (lambda F, x, w: (3 - x) * 0.3 + 0.1, ()),
    "smooth_l1": (unary("smooth_l1", scalar=1.0), ()),
    "hard_sigmoid": (unary("hard_sigmoid"), ()),
    "softrelu": (unary("Activation", act_type="softrelu"), ()),
    "leaky": (unary("LeakyReLU", act_type="leaky", slope=0.2), ()),
    "elu": (unary("LeakyReLU", act_type="elu", slope=0.7), ()),
    "selu": (unary("LeakyReLU", act_type="selu"), ()),
    "gelu": (unary("LeakyReLU", act_type="gelu"), ()),
    "prelu": (lambda F, x, w: F.LeakyReLU(x, w[0], act_type="prelu"), ((WIDTH,),)),
    "dense": (lambda F, x, w: F.FullyConnected(x, w[0], w[1], num_hidden=WIDTH),
              ((WIDTH, WIDTH), (WIDTH,))),
    "dense without bias": (lambda F, x, w: F.FullyConnected(x, w[0], num_hidden=WIDTH,
                                                            no_bias=True), ((WIDTH, WIDTH),)),
    "dot": (lambda F, x, w: F.dot(x, w[0]), ((WIDTH, WIDTH),)),
    "batch_dot": (lambda F, x, w: F.reshape(F.batch_dot(
        F.reshape(x, shape=(ROWS, 3, 4)), F.reshape(x, shape=(ROWS, 3, 4)), transpose_a=True)
        .slice_axis(axis=1, begin=0, end=3), shape=(ROWS, WIDTH)), ()),
    "linalg": (lambda F, x, w: F.linalg_gemm2(x, w[0]), ((WIDTH, WIDTH),)),
    "convolution": (four(lambda F, x, w: F.Convolution(
        x, w[0], w[1], kernel=(3, 3), pad=(1, 1), num_filter=3)), ((3, 3, 3, 3), (3,))),
    "grouped": (four(lambda F, x, w: F.Convolution(
        x, w[0], kernel=(1, 1), num_filter=3, num_group=3, no_bias=True)), ((3, 1, 1, 1),)),
    "pooling": (four(lambda F, x, w: F.Pooling(
        x, kernel=(3, 3), pad=(1, 1), pool_type="avg")), ()),
    "layer norm": (lambda F, x, w: F.LayerNorm(x, w[0], w[1]), ((WIDTH,), (WIDTH,))),
    "instance norm": (four(lambda F, x, w: F.InstanceNorm(x, w[0], w[1])), ((3,), (3,))),
    "l2 norm": (unary("L2Normalization"), ()),
    "softmax": (lambda F, x, w: F.softmax(x, axis=1) * 3, ()),
    "log_softmax": (unary("log_softmax", axis=1), ()),
    "transpose": (lambda F, x, w: F.reshape(F.transpose(x), shape=(ROWS, WIDTH)), ()),
    "swap": (lambda F, x, w: F.reshape(F.swapaxes(F.reshape(
        x, shape=(ROWS, 3, 4)), 1, 2), shape=(ROWS, WIDTH)), ()),
    "reverse": (unary("reverse", axis=1), ()),
    "tile": (lambda F, x, w: F.tile(x.slice_axis(axis=1, begin=2, end=6), reps=(1, 3)), ()),
    "repeat": (lambda F, x, w: F.repeat(x.slice_axis(axis=1, begin=0, end=6), repeats=2, axis=1),
               ()),
    "pad": (lambda F, x, w: four(lambda F, y, w: F.pad(
        y.slice_axis(axis=2, begin=0, end=1), mode="edge",
        pad_width=(0, 0, 0, 0, 0, 1, 0, 0)))(F, x, w), ()),
    "expand": (lambda F, x, w: F.squeeze(F.expand_dims(x, axis=1), axis=1), ()),
    "split": (lambda F, x, w: F.concat(*[y * (i + 1) * 0.4 for i, y in enumerate(
        F.split(x, num_outputs=3, axis=1))], dim=1), ()),
    "sum": (lambda F, x, w: F.broadcast_mul(x, F.sum(x, axis=1, keepdims=True) * 0.2), ()),
    "mean": (lambda F, x, w: F.broadcast_sub(x, F.mean(x, axis=1, keepdims=True)), ()),
    "norm": (lambda F, x, w: F.broadcast_div(x, F.norm(x, axis=1, keepdims=True) + 0.5), ()),
    "stop": (lambda F, x, w: F.BlockGrad(x) * 0.5 + x, ()),
    "weight": (lambda F, x, w: F.broadcast_mul(x, F.tanh(w[0])), ((1, WIDTH),)),
    "take": (lambda F, x, w: x + F.take(w[0], F.arange(3, 3 + ROWS)), ((WIDTH, WIDTH),)),
}
TWO = {
    "add": lambda F, x, y: x + y, "subtract": lambda F, x, y: x - y,
    "multiply": lambda F, x, y: x * y, "divide": lambda F, x, y: x / (F.square(y) + 1),
    "maximum": lambda F, x, y: F.maximum(x, y), "minimum": lambda F, x, y: F.minimum(x, y),
    "hypot": lambda F, x, y: F.broadcast_hypot(x + 0.1, y),
    "concat": lambda F, x, y: F.concat(x.slice_axis(axis=1, begin=0, end=5),
                                       y.slice_axis(axis=1, begin=5, end=WIDTH), dim=1),
    "stack": lambda F, x, y: F.mean(F.stack(x, y, axis=2), axis=2),
    "where": lambda F, x, y: F.where(F.BlockGrad(x) > 0, x, y),
    "add_n": lambda F, x, y: F.add_n(x, y, x),
    "masked": lambda F, x, y: F.softmax(F.where(
        F.BlockGrad(x) > -1, y, -1e18 * F.ones_like(y)), axis=1),
    "dot": lambda F, x, y: F.dot(x, F.dot(y, x, transpose_a=True)) * 0.1,
}


def plan(seed):
    """Operators and their inputs: the network, and positions of inputs."""
    draw = random.Random(seed)
    steps = []
    for i in range(draw.randint(5, 30)):
        near = max(0, i - 3)  # the input is number 0
        if draw.random() < 0.3:
            name = draw.choice(list(TWO))
            steps.append((name, (draw.randint(near, i), draw.randint(0, i))))
        else:
            steps.append((draw.choice(list(ONE)), (draw.randint(near, i),)))
    return steps


class RandomNet(gluon.HybridBlock):
    def __init__(self, seed):
        super().__init__(prefix="net_")
        self.steps = plan(seed)
        self.used = {place for _, of in self.steps for place in of}
        self.ends = len(self.steps) + 1 - len(self.used)
        with self.name_scope():
            for i, (name, of) in enumerate(self.steps):
                for k, shape in enumerate(ONE[name][1] if len(of) == 1 else ()):
                    self.params.get(f"w{i}_{k}", shape=shape)
        self._reg_params = {key[len("net_"):]: p for key, p in self.params.items()}

    def hybrid_forward(self, F, x, **weights):
        results = [x]
        for i, (name, of) in enumerate(self.steps):
            if len(of) == 2:
                results.append(TWO[name](F, results[of[0]], results[of[1]]))
            else:
                apply, shapes = ONE[name]
                results.append(apply(F, results[of[0]],
                                     [weights[f"w{i}_{k}"] for k in range(len(shapes))]))
        return F.concat(*(r for i, r in enumerate(results) if i not in self.used), dim=1)


class Eager:
    """MXNet's float64 operators, called one by one. (Its own backward pass crashes for some graphs,
    such as a deconvolution without a gradient.)

    Args:
        rounds: whether each result and each gradient is rounded to float16.
    """

    def __init__(self, rounds):
        self.rounds = rounds

    def __getattr__(self, name):
        def call(*args, **kwargs):
            arrays = [a.array if isinstance(a, Array) else a for a in args]
            if name in ("InstanceNorm", "L2Normalization"):  # which do not support float64
                out = getattr(nd, name)(*(a.astype("float32") for a in arrays), **kwargs)
                return Array(out.astype("float64"), self.rounds)
            out = getattr(nd, name)(*arrays, **kwargs)
            return [Array(a, self.rounds) for a in out] if isinstance(out, list) \
                else Array(out, self.rounds)
        return call


class Array:
    def __init__(self, array, rounds):
        self.array = array.astype("float16").astype("float64") if rounds else array
        self.rounds = rounds

    def __getattr__(self, name):
        def call(*args, **kwargs):
            return Array(getattr(self.array, name)(*args, **kwargs), self.rounds)
        return call


for _name in "add sub mul truediv radd rsub rmul rtruediv pow neg gt".split():
    def _operator(self, *args, name=f"__{_name}__"):
        arrays = [a.array if isinstance(a, Array) else a for a in args]
        return Array(getattr(self.array, name)(*arrays), self.rounds)
    setattr(Array, f"__{_name}__", _operator)


def run(net, x, head, scale, eager=None):
    """The output and the gradients, of the network or of its operators called one by one."""
    x = x.copy()
    x.attach_grad()
    parameters = net.collect_params()
    with autograd.record():
        if eager:
            weights = {key: Array(p.data(), eager.rounds) for key, p in net._reg_params.items()}
            out = net.hybrid_forward(eager, Array(x, eager.rounds), **weights).array
        else:
            out = net(x)
    out.backward((head * scale).astype(out.dtype))
    grads = {name: p.grad().asnumpy().astype(np.float64) / scale for name, p in parameters.items()}
    return {"output": out.asnumpy(), "input": x.grad.asnumpy() / scale, **grads}


def difference(found, exact):
    return np.linalg.norm(found - exact) / (np.linalg.norm(exact) + 1e-30)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs_are_as_exact_as_rounding_allows(seed):
    draw = random.Random(seed)
    policy = draw.choice(["float16", "float16", "mixed_float16", "pure_float16"])
    mx.random.seed(seed)
    net = RandomNet(seed)
    net.initialize(mx.init.Normal(0.3))
    net.cast("float16")
    net.cast("float64")
    x = nd.random.normal(shape=(ROWS, WIDTH)).astype("float16").astype("float64")
    head = nd.random.normal(shape=(ROWS, WIDTH * net.ends)).astype("float16").astype("float64")
    exact = run(net, x, head, 1, Eager(rounds=False))
    scale = 2.0 ** 6
    coarse = run(net, x, head, scale, Eager(rounds=True))
    net.cast("float32")
    amp.convert(net, policy)
    x, head = x.astype("float32"), head.astype("float32")
    if draw.random() < 0.3:
        net.hybridize(static_alloc=True, static_shape=True)
    for _ in range(draw.choice([1, 2])):
        found = run(net, x, head, scale)
    for name, value in found.items():
        wide = exact[name]
        size = np.abs(wide).max()
        if not np.isfinite(coarse[name]).all() or not np.isfinite(wide).all() or size < 1e-6:
            continue
        allowed = 10 * difference(coarse[name], wide) + 4e-3
        assert difference(value, wide) <= allowed, \
            f"{name} under {policy}: {difference(value, wide):.3g} > {allowed:.3g}\n{net.steps}"
