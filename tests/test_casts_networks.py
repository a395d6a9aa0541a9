"""The graphs that a GPU would run: where whole networks and control flow are cast."""
import networks
import numpy as np
import pytest
from gluon_amp._mxnet import mx
from gluon_amp.graph.graph import bindings, loop_states
from mixed_graphs import casting, mixed, some
from mxnet import gluon, nd

# Whole networks


@pytest.fixture(scope="module", params=["resnet18_v1", "mobilenet1.0"])
def image_graph(request):
    net = gluon.model_zoo.vision.get_model(request.param, classes=10)
    return mixed(net, nd.ones((1, 3, 32, 32)))


def test_a_convolutional_net_holds_two_casts(image_graph):
    casts = image_graph.ops("amp_cast")
    assert len(casts) == 2
    assert image_graph.inputs(casts[0]) == ["float32"]  # the data
    assert casts[0].inputs[0].node.name == "data"
    assert image_graph.graph.outputs[0].node is casts[1]
    assert [n["op"] for n in image_graph.json()].count("amp_cast") == 2
    assert not [n for n in image_graph.nodes if "multicast" in n.op or n.op == "Cast"]


def test_a_gpus_graph_holds_none_of_our_operators(image_graph):
    assert not [n for n in image_graph.json() if "gluon_amp" in n["op"] + n["name"]]


def test_batch_norms_read_float16_data_and_float32_statistics(image_graph):
    norms = image_graph.ops("BatchNorm")
    assert len(norms) in (20, 27)
    for norm in norms:
        assert image_graph.inputs(norm) == ["float16"] + ["float32"] * 4
        assert all(e.node.is_variable for e in norm.inputs[1:])
        assert image_graph.output(norm) == "float16"


def test_all_else_in_a_convolutional_net_runs_in_float16(image_graph):
    for node in image_graph.nodes:
        if not node.is_variable and node.op not in ("amp_cast", "BatchNorm"):
            assert set(image_graph.inputs(node)) == {"float16"}, node
    assert image_graph.outputs == ["float32"]


def test_mixed_float16_casts_every_weight_once_at_its_use():
    net = gluon.model_zoo.vision.resnet18_v1(classes=10)
    graph = mixed(net, nd.ones((1, 3, 32, 32)), policy="mixed_float16")
    assert set(graph.variables.values()) == {"float32"}
    cast = [n.inputs[0].node.name for n in graph.ops("amp_cast") if n.inputs[0].node.is_variable]
    weights = [e.node.inputs[0].node.name for n in graph.ops("Convolution", "FullyConnected")
               for e in n.inputs[1:]]
    assert sorted(cast) == sorted([*weights, "data"])
    assert len(set(cast)) == len(cast)
    for node in graph.ops("Convolution", "FullyConnected"):
        assert set(graph.inputs(node)) == {"float16"}


def test_mixed_float16_casts_a_tied_weight_once():
    graph = mixed(networks.Tied(), nd.zeros((2, 3)), policy="mixed_float16")
    assert len([n for n in graph.ops("amp_cast") if "embedding0_weight" in n.name]) == 1
    (product,) = [n for n in graph.ops("FullyConnected") if n.name.endswith("dense1_fwd")]
    assert graph.inputs(product) == ["float16"] * 3


def test_pure_float16_returns_float16_and_runs_all_in_it():
    graph = mixed(networks.Encoder(), some(2, 7, 32), some(2, 7, 7), policy="pure_float16")
    assert graph.outputs == ["float16"]
    assert not graph.ops("amp_cast")


def test_float32_inserts_nothing():
    var = mx.sym.var
    y = mx.sym.softmax(mx.sym.FullyConnected(var("x"), var("w"), var("b"), num_hidden=3))
    graph = casting(y, dict.fromkeys("xwb", "float32"), "wb", "float32")
    assert not graph.ops("amp_cast")


ALL = {**networks.OTHERS, "cond": (networks.Cond, networks.floats(3, 4)),
       "resnet18_v1": (networks.zoo("resnet18_v1"), networks.images(32, 1))}


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "pure_float16"])
@pytest.mark.parametrize("name", sorted(set(ALL) - {"plain", "nested"}))
def test_mxnet_infers_the_types_of_the_graph(name, policy, rng):
    make, inputs = ALL[name]
    graph = mixed(make(), *inputs(rng), policy=policy)
    symbol = graph.graph.symbol()
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    assert set(names) <= set(graph.variables)
    known = {n: np.dtype(graph.variables[n]) for n in symbol.list_arguments()}
    arguments, outputs, auxiliary = symbol.infer_type(**known)
    assert None not in (arguments, outputs)
    found = dict(zip(names, (np.dtype(t).name for t in [*arguments, *auxiliary])))
    assert found == {n: graph.variables[n] for n in names}
    assert {np.dtype(t).name for t in outputs} \
        == {"float16" if policy == "pure_float16" else "float32"}


# Control flow


def body_of(graph):
    (loop,) = graph.ops("_foreach")
    body, (numbers,) = loop.subgraphs[0], bindings(loop)
    known = dict(zip(body.variables(), (graph.types[loop.inputs[i]] for i in numbers)))
    return loop, body, body.types(known)


class Loop(networks.Loop):
    """With a state that is float16."""

    def hybrid_forward(self, F, x, state):
        return super().hybrid_forward(F, x, self.cell(state))


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
@pytest.mark.parametrize(("cls", "state"), [(networks.Loop, "float32"), (Loop, "float16")])
def test_the_body_of_a_loop_is_converted_and_its_states_keep_their_type(cls, state, policy):
    graph = mixed(cls(), nd.ones((5, 3, 8)), nd.ones((3, 8)), policy=policy)
    loop, body, types = body_of(graph)
    (dense,) = [n for n in body.nodes() if n.op == "FullyConnected"]
    assert {types[e] for e in dense.inputs} == {"float16"}
    (norm,) = [n for n in body.nodes() if n.op == "LayerNorm"]
    assert {types[e] for e in norm.inputs} == {"float32"}
    assert [graph.types[e] for e in loop_states(loop)] == [state]
    assert [types[e] for e in body.outputs[int(loop.attrs["num_out_data"]):]] == [state]
    assert graph.outputs == ["float32"] * 2


def test_a_kept_block_in_a_loop_runs_in_float32():
    net = networks.Loop()
    graph = mixed(net, nd.ones((5, 3, 8)), nd.ones((3, 8)), keep=net.cell)
    _, body, types = body_of(graph)
    (dense,) = [n for n in body.nodes() if n.op == "FullyConnected"]
    assert {types[e] for e in dense.inputs} == {"float32"}


def test_the_branches_of_a_condition_return_the_same_types():
    graph = mixed(networks.Cond(), nd.ones((3, 4)))
    (node,) = graph.ops("_cond")
    found = []
    for body, numbers in list(zip(node.subgraphs, bindings(node)))[1:]:
        known = dict(zip(body.variables(), (graph.types[node.inputs[i]] for i in numbers)))
        found.append([body.types(known)[e] for e in body.outputs])
    assert found[0] == found[1]


class Undecided(networks.Cond):
    def hybrid_forward(self, F, x):
        h = self.a(x)
        return F.contrib.cond(F.max(h) < 1e3, lambda: self.b(h), lambda: h * 2)


def test_a_condition_may_be_made_of_float16():
    graph = mixed(Undecided(), nd.ones((3, 4)))
    assert graph.inputs(graph.ops("max")[0]) == ["float16"]
    assert graph.outputs == ["float32"]


class WhileSmall(networks.While):
    def hybrid_forward(self, F, x):
        return F.contrib.while_loop(lambda state: F.max(state) < 1e3,
                                    lambda state: (state, [F.tanh(self.dense(state))]),
                                    [self.first(x)], max_iterations=3)[1][0]


def test_a_loops_condition_may_be_made_of_float16():
    graph = mixed(WhileSmall(), nd.ones((3, 4)))
    assert graph.outputs == ["float32"]
