"""For tests of `convert`: a small network, and inspection of its types and graph."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet import gluon, nd
from mxnet.gluon import nn
from networks import ready
from trainers import recorded


class Net(gluon.HybridBlock):
    """Features with a norm, and an output layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.features = nn.HybridSequential()
            self.features.add(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8),
                              nn.Activation("relu"), nn.GlobalAvgPool2D())
            self.output = nn.Dense(5, in_units=8)

    def hybrid_forward(self, F, x):
        return self.output(self.features(x))


def make(cls=Net, **kwargs):
    net = ready(cls(**kwargs), mx.init.Xavier())
    return net


def holding(*children, cls=nn.HybridSequential):
    net = cls()
    net.add(*children)
    net.initialize(mx.init.Xavier())
    return net


def types(net):
    return {name: np.dtype(p.dtype).name for name, p in net.collect_params().items()}


def values(net):
    """Values of parameters, by name without the net's prefix."""
    return {name[len(net.prefix):]: p.data().asnumpy() for name, p in net.collect_params().items()}


def saved_types(path):
    """The types of the arrays in a file."""
    return {np.dtype(array.dtype).name for array in nd.load(str(path)).values()}


def rounded(arrays):
    return {name: a.astype(np.float16).astype(np.float32) for name, a in arrays.items()}


def step(net, x):
    trainer = gluon.Trainer(net.collect_params(), amp.optimizer("sgd", learning_rate=0.1))
    recorded(lambda: (net(x) ** 2).mean()).backward()
    trainer.step(1)


def mixed(net):
    """The graph for a GPU, its nodes by name, and the types of its entries."""
    graph, variables = net.mixed_graph(["float32"])
    return {n.name: n for n in graph.nodes()}, graph.types(variables)


def runs_in(net, name):
    """The type of the first input of the only node whose name ends with `name`."""
    nodes, entries = mixed(net)
    (node,) = [n for key, n in nodes.items() if key.endswith(name)]
    return entries[node.inputs[0]]
