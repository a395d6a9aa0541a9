"""Parameters that a format rounds: a finding, with a `keep=` that changes their type."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from modules import prepared
from mxnet import gluon, nd
from mxnet import symbol as S
from mxnet.gluon import nn
from networks import ready, sequence
from xray_networks import LOSS

STORED, CAST = "float16", "mixed_float16"  # float16 parameters; float32 ones with casts


class Layer(gluon.HybridBlock):
    """Layers with a small factor, a parameter of the block around them."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.body = sequence(nn.Dense(32, activation="relu"), nn.Dense(16))
            self.gamma = self.params.get("gamma", shape=(16,), init=mx.init.Constant(size))

    def hybrid_forward(self, F, x, gamma):
        return F.broadcast_mul(self.body(x), gamma)


class Net(gluon.HybridBlock):
    def __init__(self, size):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.layer, self.out = Layer(size, prefix="layer_"), nn.Dense(4)

    def hybrid_forward(self, F, x):
        return self.out(x + self.layer(x) * 2.0 ** 18)


rng = np.random.default_rng(0)
BATCHES = [(nd.array(rng.standard_normal((8, 16))), nd.arange(8) % 4) for _ in range(2)]


def network(size, policy, keep=(), net=Net):
    mx.random.seed(1)
    made = ready(net(size), mx.init.Xavier())
    made.hybridize()
    made(BATCHES[0][0])
    return amp.convert(made, policy, keep=keep) if policy else made


def largest_error(net, size):
    right = network(size, None)(BATCHES[0][0])
    return float(nd.abs(net(BATCHES[0][0]) - right).max().asscalar())


@pytest.mark.parametrize("policy", [STORED, CAST])
@pytest.mark.parametrize("size", [1.1e-6, 2e-8])
def test_keep_of_small_parameter_changes_its_error(size, policy):
    view = amp.xray(network(size, policy), BATCHES, LOSS)
    finding = view.findings[0]
    assert (finding.reason, "net_layer_gamma" in finding.tensor) == ("range below", True)
    mended = network(size, policy, view.keep)
    assert amp.xray(mended, BATCHES, LOSS).findings == []
    assert largest_error(mended, size) < largest_error(network(size, policy), size) / 3


def test_parameter_of_0_is_no_finding():
    assert amp.xray(network(0.0, STORED), BATCHES, LOSS).findings == []


@pytest.mark.parametrize("policy", [STORED, CAST])
def test_small_parameter_that_is_added_is_no_finding(policy):
    net = network(1.0, None)
    net.layer.gamma.set_data(nd.ones(16) * 2.0 ** -18)
    for name, parameter in net.collect_params(".*bias").items():
        parameter.set_data(nd.array(rng.standard_normal(parameter.shape) * 1e-6))
        assert name.endswith("bias")
    findings = amp.xray(amp.convert(net, policy), BATCHES, LOSS).findings
    assert not any("bias" in finding.tensor for finding in findings)


class Outermost(Layer):
    def __init__(self, size):
        super().__init__(size, prefix="net_")

    def hybrid_forward(self, F, x, gamma):
        return F.broadcast_mul(self.body(x), gamma) * 2.0 ** 18


def test_parameter_of_outermost_block_needs_another_policy():
    view = amp.xray(network(1.1e-6, STORED, net=Outermost), BATCHES, LOSS)
    assert view.findings[0].tensor == "net_gamma"
    assert any("mixed_float16" in note for note in view.notes)
    keep = amp.xray(network(1.1e-6, CAST, net=Outermost), BATCHES, LOSS).keep
    assert amp.xray(network(1.1e-6, CAST, keep, Outermost), BATCHES, LOSS).findings == []


def test_small_parameter_of_module_is_kept_with_its_reader():
    def module(keep):
        x = S.FullyConnected(S.var("data"), num_hidden=16, name="fc1") * 2.0 ** 10
        x = S.SoftmaxOutput(S.FullyConnected(x, num_hidden=4, name="fc2"), name="softmax")
        made = prepared(amp.Module(amp.convert_symbol(x, keep=keep)), (8, 16), (8,),
                        init=mx.init.Xavier(), seed=1, optimizer=None)
        arguments, others = made.get_params()
        arguments["fc1_weight"] = arguments["fc1_weight"] * 2.0 ** -18
        made.set_params(arguments, others)
        return made
    given = [mx.io.DataBatch([data], [label]) for data, label in BATCHES]
    view = amp.xray(module(()), given)
    assert view.findings[0].tensor == "fc1_weight"
    assert amp.xray(module(view.keep), given).findings == []
