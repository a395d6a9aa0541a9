"""Settings of nodes: entries of a table in the engine, which graphs name by number."""
import copy
import gc
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from cases import cases
from gluon_amp.cpu import library
from gluon_amp.graph.graph import Entry, Graph, Node
from mxnet import autograd, nd
from mxnet.gluon import nn
from processes import printed

POLICIES = {name: name for name in ("float16", "mixed_float16", "pure_float16", "bfloat16",
                                    "mixed_bfloat16", "tf32")}
X = np.random.RandomState(3).standard_normal((2, 3, 8, 8)).astype(np.float32)


def network(policy):
    """A converted network with convolutions, a norm, dropout and a dense layer."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, in_channels=3), nn.BatchNorm(in_channels=16), nn.Activation("relu"),
            nn.Conv2D(16, 1, in_channels=16), nn.Dropout(0.5), nn.Dense(3, in_units=576))
    mx.random.seed(1)
    net.initialize()
    return amp.convert(net, policy)


def losses(net):
    with autograd.record():
        return net(nd.array(X)).sum()


def gradients(net):
    """The network's loss and gradients."""
    mx.random.seed(2)
    loss = losses(net)
    loss.backward()
    return [loss.asnumpy(), *(p.grad().asnumpy() for p in net.collect_params().values()
                              if p.grad_req != "null")]


def assert_equal(some, others):
    for one, other in zip(some, others):
        np.testing.assert_array_equal(one.astype(np.float32), other.astype(np.float32))


def test_networks_share_entries():
    """The number of entries depends on the kinds of nodes, not on the number of networks."""
    def train_all():
        for policy in POLICIES.values():
            gradients(network(policy))
    train_all()
    count = library.table().settings_count()
    assert count > 1
    train_all()
    for number in range(10_000):
        library.settings_attribute({"in_engine": "1", "watch": f"dense{number}"})
    assert library.table().settings_count() <= count + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_and_files_have_no_settings(policy, tmp_path):
    net = network(POLICIES[policy])
    expected = gradients(net)
    pickled = pickle.dumps(net)
    assert library.SETTINGS.encode() not in pickled
    assert_equal(expected, gradients(pickle.loads(pickled)))
    assert_equal(expected, gradients(copy.deepcopy(net)))
    net(nd.array(X))
    net.export(str(tmp_path / "net"))
    assert "__gluon_amp" not in (tmp_path / "net-symbol.json").read_text()


def test_symbols_of_executors_have_no_settings():
    data = mx.sym.Dropout(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="dense"))
    net = amp.convert_symbol(mx.sym.SoftmaxOutput(data, name="softmax"), "float16")
    mod = amp.Module(net, loss_scale=8.0)
    mod.bind([("data", (2, 5))], [("softmax_label", (2,))])
    executor, = mod._exec_group.execs
    symbols = mod.symbol, executor._symbol, executor.get_optimized_symbol()
    assert not any(library.SETTINGS in symbol.tojson() for symbol in symbols)


@pytest.mark.parametrize("policy", cases(["mixed_bfloat16"], [
    name for name in POLICIES if name != "mixed_bfloat16"]))
def test_backward_pass_after_deletion_of_network(policy):
    expected = gradients(network(POLICIES[policy]))
    net = network(POLICIES[policy])
    mx.random.seed(2)
    loss = losses(net)
    arrays = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
    del net
    gc.collect()
    for other in POLICIES.values():
        gradients(network(other))
    loss.backward()
    assert_equal(expected[1:], [array.asnumpy() for array in arrays])


def test_networks_of_different_settings_on_threads():
    expected = {name: network(policy)(nd.array(X)).asnumpy() for name, policy in POLICIES.items()}
    nets = [(name, network(POLICIES[name])) for name in [*POLICIES] * 3]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda named: (named[0], named[1](nd.array(X)).asnumpy()), nets))
    assert len(made) == 18
    for name, output in made:
        np.testing.assert_array_equal(output, expected[name])


FORKED = """
import os, sys
sys.path[:0] = ["tests", "tests/cpu"]
from test_settings import POLICIES, assert_equal, gradients, network
nets = {name: network(POLICIES[name]) for name in ("float16", "mixed_bfloat16")}
expected = {name: gradients(net) for name, net in nets.items()}
child = os.fork()
if child == 0:
    for name in nets:
        assert_equal(expected[name], gradients(network(POLICIES[name])))
        assert_equal(expected[name], gradients(nets[name]))
    print("equal", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="fork warns of threads")
def test_forked_process_reads_and_adds_entries():
    assert printed(FORKED).strip() == "equal"


def test_unknown_names_and_numbers_are_refused():
    with pytest.raises(ValueError, match="no setting has this name: outptus"):
        library.settings_attribute({"outptus": "1"})
    node = Node("Dropout", "drop", {library.SETTINGS: "999999"}, [Entry(Node("null", "x"))])
    symbol = Graph([Entry(node)]).symbol()
    with pytest.raises(mx.MXNetError, match="settings of another process"):
        mx.nd.CachedOp(symbol)
