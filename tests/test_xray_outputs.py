"""The graph that a GPU would run for an X-ray: looked at, and run on a CPU by our engine."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
from gluon_amp.graph.build import build
from gluon_amp.graph.graph import Graph
from gluon_amp.inspection.outputs import watched_on_gpu, with_outputs
from gluon_amp.inspection.statistics import Counts
from gluon_amp.policy import get_policy
from halves import as_function
from mxnet import autograd, nd
from mxnet.gluon import nn
from xray_networks import LOSS


def network():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Flatten(), nn.Dense(3))
    mx.random.seed(1)
    net.initialize(mx.init.Xavier())
    return amp.convert(net)


def data():
    rng = np.random.default_rng(0)
    return nd.array(rng.standard_normal((4, 2, 5, 5))), nd.array([0, 1, 2, 0])


def test_a_gpu_would_run_mxnets_operators_with_each_watched_tensor_as_an_output():
    net = network()
    net(data()[0])
    plain, _ = net.mixed_graph(["float32"])
    symbol = watched_on_gpu(net)
    graph = Graph.read(symbol)
    assert not any("gluon_amp" in node.op for node in graph.nodes())
    names = symbol.list_outputs()
    assert names[0] == plain.symbol().list_outputs()[0]
    assert {"net_conv0_fwd_shown0_output", "net_dense0_fwd_shown0_output"} <= set(names)
    arguments, outputs, _ = symbol.infer_type(data="float32")
    made = dict(zip(symbol.list_arguments(), arguments))
    assert made["gluon_amp_gradient_net_conv0_fwd_input1"] is np.float16  # the weight's gradient
    assert made["gluon_amp_gradient_net_batchnorm0_fwd_input1"] is np.float32
    assert dict(zip(names, outputs))["net_conv0_fwd_shown0_output"] is np.float16
    shapes, _, _ = symbol.infer_shape(data=(4, 2, 5, 5))  # no shape of a variable need be given
    assert dict(zip(symbol.list_arguments(), shapes))[
        "gluon_amp_gradient_net_dense0_fwd_input0"] == (4, 36)


def test_its_outputs_are_what_the_engine_counts_and_the_rest_keeps_its_bits():
    net, (x, label) = network(), data()
    net(x)
    view = amp.xray(net, [(x, label)], LOSS, reference=False)
    scale, counted = view.steps[0]
    graph, types = net.mixed_graph(["float32"])
    parameters = net.collect_params()
    watched = with_outputs(graph, types, get_policy("float16"), parameters)
    symbol = build(watched.graph, watched.types).symbol()
    values = {"data": x, **{name: p.data() for name, p in parameters.items()}}
    shapes, _, _ = symbol.infer_shape(data=x.shape)
    for name, shape in zip(symbol.list_arguments(), shapes):
        if name in watched.gradients:
            values[name] = nd.full(shape, -0.0, dtype=watched.types[name])
            values[name].attach_grad()
    names = symbol.list_inputs()
    op = as_function(symbol)
    with autograd.record():
        output, *shown = op(*(values[name] for name in names))
        loss = LOSS(output, label)
    autograd.backward([loss], [nd.ones_like(loss) * scale])
    with autograd.record():
        own = LOSS(net(x), label)
    autograd.backward([own], [nd.ones_like(own) * scale])
    np.testing.assert_array_equal(loss.asnumpy(), own.asnumpy())
    found = dict(zip(watched.outputs, shown))
    found.update((key, values[name].grad) for name, key in watched.gradients.items())
    for name, parameter in parameters.items():
        for variable, key in watched.gradients.items():
            if parameter.grad_req != "null" and graph_reads(graph, key, name):
                np.testing.assert_array_equal(values[variable].grad.asnumpy(),
                                              parameter.grad().asnumpy())
    for tensor in view.tensors:  # the engine's are of numbers before they are rounded
        right, counts = Counts.of_array(found[tensor.key]), counted[tensor.key]
        assert counts.numbers == right.numbers
        np.testing.assert_allclose(counts.squares, right.squares, rtol=2e-3)


def graph_reads(graph, key, name):
    """Whether a tensor is the gradient of this variable."""
    return any(node.name == key.node and node.inputs[key.which].node.name == name
               for node in graph.nodes())
