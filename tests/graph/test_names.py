"""Names of nodes and attributes that JSON escapes, and MXNet does not."""
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.graph.graph import Graph
from mxnet import nd
from mxnet.gluon import nn
from networks import imported
from trainers import recorded

PREFIXES = ("größe_", "层_", "🎉_", "x\x01\b\f\x1f\x7f_", "tab\tline\nend\r_",
            'quote"back\\slash\\u_')


@pytest.mark.parametrize("policy", ["float32", "float16", "mixed_bfloat16"])
@pytest.mark.parametrize("prefix", PREFIXES, ids=ascii)
def test_network_trains_and_its_files_are_loaded(prefix, policy, tmp_path):
    path, x = str(tmp_path / "net"), nd.ones((2, 3))
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4), nn.Dense(2, in_units=4))
    net.initialize()
    amp.convert(net, policy, keep=f"{re.escape(prefix)}dense1")
    trainer = amp.Trainer(net.collect_params(), "sgd")
    trainer.backward(recorded(lambda: (net(x) ** 2).mean()))
    trainer.step(1)
    net.export(path)
    served = imported(path)
    amp.convert(served, like=f"{path}-0000.params")
    assert np.array_equal(served(x).asnumpy(), net(x).asnumpy())
    assert all(name.startswith(prefix) for name in served.collect_params())


@pytest.mark.parametrize("prefix", PREFIXES, ids=ascii)
def test_symbols_keep_names_and_attributes(prefix):
    with mx.AttrScope(__note__=prefix):
        symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name=f"{prefix}fc")
    again = Graph.read(symbol).symbol()
    assert again.list_arguments() == symbol.list_arguments()
    assert again.attr_dict() == symbol.attr_dict()
    converted = amp.convert_symbol(symbol)
    assert converted.list_arguments() == symbol.list_arguments()
    assert converted.attr_dict()["data"]["__note__"] == prefix
