"""Training steps on a recording GPU, and their calls."""
import os
from collections import Counter

import gluon_amp as amp
import mxnet as mx
import numpy as np
from arrays import flat
from mxnet import gluon
from mxnet.gluon import nn
from software_gpu import recording

GPU = mx.gpu(0)


def put(data, context=GPU):
    if isinstance(data, (list, tuple)):
        return [put(one, context) for one in data]
    return data.as_in_context(context)


def mean_square(outputs):
    return sum((out.astype("float32") ** 2).mean() for out in flat(outputs))


def layers(count=3, norm=True):
    """A network with this number of convolutions."""
    net = nn.HybridSequential()
    for _ in range(count):
        net.add(nn.Conv2D(8, 3, padding=1, in_channels=8, use_bias=False))
        if norm:
            net.add(nn.BatchNorm(in_channels=8))
        net.add(nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(8, in_units=8))
    return net


class Training:
    """A network and its trainer.

    Args:
        policy: None for float32 and MXNet's Trainer.
    """

    def __init__(self, net, policy="float16", optimizer="sgd", context=GPU, **kwargs):
        self.net, self.policy = net, policy
        self.contexts = context if isinstance(context, list) else [context]
        net.initialize(ctx=self.contexts)
        if policy:
            amp.convert(net, policy)
        if isinstance(net, gluon.HybridBlock):
            net.hybridize(static_alloc=True, static_shape=True)
        settings = {"learning_rate": 0.1, **({"momentum": 0.9} if optimizer == "sgd" else {})}
        make = amp.Trainer if policy else gluon.Trainer
        self.trainer = make(net.collect_params(), optimizer, settings, **kwargs)

    def backward(self, *data):
        with mx.autograd.record():
            losses = [mean_square(self.net(*put(list(data), context)))
                      for context in self.contexts]
        if self.policy:
            self.trainer.backward(losses)
        else:
            mx.autograd.backward(losses)

    def step(self, *data):
        self.backward(*data)
        self.trainer.step(4)

    def after(self, steps, *data):
        """This training, after some steps."""
        for _ in range(steps):
            self.step(*data)
        return self


def calls_of(run):
    """The GPU calls of `run`."""
    begin = recording.position()
    run()
    recording.position()
    return [call for call in recording.calls(begin) if call.name != "MARK"]


def settled(training, *data):
    """Calls of the third step: of its forward and backward pass, and of its update."""
    for _ in range(2):
        training.step(*data)
    forward = calls_of(lambda: training.backward(*data))
    update = calls_of(lambda: training.trainer.step(4))
    return forward, update


def counted(calls):
    """Counts of launches, casts, synchronizations, copies to the host."""
    return Counter(launches=sum(c.is_launch for c in calls), casts=sum(c.is_cast for c in calls),
                   synchronizations=sum(c.is_synchronization for c in calls),
                   copies=sum(c.is_copy_to_host for c in calls))


def comparisons(calls):
    """The calls that look for weights that a user has written."""
    return [call for call in calls if "where" in call.kernel.lower()]


def multiset(calls):
    """The calls that compute or copy, in any order."""
    return Counter(str(c) for c in calls if c.is_launch or "way" in c.record)


def own_log():
    """An environment for processes that do not write into the log of this one."""
    return {**os.environ, "RECORDING_GPU_LOG": ""}


def numbers(*shape):
    return mx.nd.array(np.random.default_rng(0).standard_normal(shape))
