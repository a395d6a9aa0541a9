"""Graphs with gluon_amp's casts, and the type of each entry, for inspection."""
import json

import gluon_amp as amp
import mxnet as mx
import numpy as np
from gluon_amp.graph.casts import insert_casts
from gluon_amp.graph.graph import Entry, Graph
from gluon_amp.policy import get_policy
from mxnet import nd
from networks import Calling


class Mixed:
    """The graph of a converted net, and the type of each of its entries."""

    def __init__(self, graph, variables):
        self.graph, self.variables = graph, variables
        self.types = graph.types(variables)
        self.nodes = graph.nodes()

    def ops(self, *names):
        return [node for node in self.nodes if node.op in names]

    def inputs(self, node):
        return [self.types[e] for e in node.inputs]

    def output(self, node):
        return self.types[Entry(node)]

    @property
    def outputs(self):
        return [self.types[e] for e in self.graph.outputs]

    def json(self):
        return json.loads(self.graph.symbol().tojson(remove_amp_cast=False))["nodes"]


def mixed(net, *inputs, policy="float16", keep=()):
    """Converts a net, runs it once, and returns the graph for these inputs."""
    net.initialize(mx.init.Xavier())
    amp.convert(net, policy, keep=keep)
    net(*inputs)
    return Mixed(*net.mixed_graph([np.dtype(x.dtype).name for x in inputs]))


def computing(function, *inputs, policy="float16", **parameters):
    """The graph of a function of F, its inputs and its parameters (given by their shapes)."""
    net = Calling(function, parameters={name: {"shape": of} for name, of in parameters.items()})
    return mixed(net, *inputs, policy=policy)


def some(*shape, dtype="float16"):
    return nd.ones(shape, dtype=dtype)


def casting(symbol, types, parameters=(), policy="float16", keep=()):
    """The same for a symbol, which is not run."""
    graph = insert_casts(Graph.read(symbol), types, get_policy(policy),
                         parameters, keep)
    return Mixed(graph, types)
