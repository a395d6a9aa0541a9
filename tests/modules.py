"""A small network for amp.Module and mx.mod.Module, and the complete state of either."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
from arrays import numbers
from mxnet import nd
from mxnet import symbol as S

OPTIMIZERS = {"sgd": ("sgd", {"learning_rate": 0.1}),
              "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
              "adam": ("adam", {"learning_rate": 0.01})}
OVERFLOW = 3e38  # a label for which the output is finite and its scaled gradient is not
TWO = [mx.cpu(0), mx.cpu(1)]


def dynamic(initial=1024, maximum=2.0 ** 24, **kwargs):
    return amp.DynamicLossScale(initial, maximum=maximum, **kwargs)


def settled(initial):
    """A dynamic scale after its first steps."""
    return dynamic(initial, maximum=2.0 ** 40, settled=True)


def body():
    x = S.Convolution(S.var("data"), kernel=(3, 3), num_filter=4, name="conv")
    x = S.BatchNorm(x, fix_gamma=False, name="bn")
    x = S.Activation(x, act_type="relu", name="relu")
    return S.FullyConnected(x, num_hidden=3, name="fc")


def net(policy="float16", head=S.LinearRegressionOutput):
    sym = head(body(), name="head")
    return amp.convert_symbol(sym, policy) if policy else sym


def batch(seed=0, size=6, label=None):
    rng = np.random.default_rng(seed)
    labels = rng.standard_normal((size, 3)) if label is None else np.full((size, 3), label)
    return mx.io.DataBatch([nd.array(rng.standard_normal((size, 3, 6, 6)))], [nd.array(labels)])


def bound(symbol, cls=amp.Module, size=6, bind=None, shape=(3,), **kwargs):
    mod = cls(symbol, label_names=["head_label"], **kwargs)
    mod.bind([("data", (size, 3, 6, 6))], [("head_label", (size, *shape))], **(bind or {}))
    return mod


def prepared(module, data, label=None, init=None, seed=None, optimizer=(), **bind):
    """A module that is bound to data and labels of these shapes, with initial values and, unless
    `optimizer` is None, an optimizer of these settings."""
    module.bind([(name, data) for name in module.data_names],
                [(name, label) for name in module.label_names] if label else None, **bind)
    if seed is not None:
        mx.random.seed(seed)
    module.init_params(init or mx.init.Uniform(0.01))  # MXNet's default
    if optimizer is not None:
        module.init_optimizer(optimizer_params=optimizer)
    return module


def made(symbol, cls=amp.Module, optimizer="momentum", **kwargs):
    mod = bound(symbol, cls, **kwargs)
    mx.random.seed(3)
    mod.init_params(mx.init.Xavier())
    name, params = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    mod.init_optimizer(optimizer=name, optimizer_params=params)
    return mod


def learn(mod, data, out_grads=None):
    mod.forward(data, is_train=True)
    mod.backward(out_grads)
    updated = mod.update()
    nd.waitall()  # MXNet's batch norm writes its averages late, and its Module reads them too early
    return updated


def train(mod, steps=10, first=0):
    return [learn(mod, batch(seed)) for seed in range(first, first + steps)]


def values(mod):
    return {k: a.asnumpy().astype("float32") for part in mod.get_params() for k, a in part.items()}


def grads(mod):
    return {k: g.asnumpy() for k, g in mod._exec_group.execs[0].grad_dict.items() if g is not None}


def everything(mod):
    """The complete state that a step depends on."""
    scale = mod._step.loss_scale
    return {**values(mod), **dict(enumerate(numbers(mod._updater.states))),
            "scale": [mod.loss_scale, mod.skipped, getattr(scale, "finite_step", 0),
                      mod._step.skipped_in_a_row, mod._optimizer.num_update,
                      mod._optimizer.learning_rate]}


def check_moved_alike(mod, other, before, rel=0.03):
    mine, theirs = values(mod), values(other)
    for name, start in before.items():
        move = theirs[name] - start
        assert np.abs(mine[name] - theirs[name]).max() <= rel * np.abs(move).max() + 2e-3, name
