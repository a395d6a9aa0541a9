"""Graphs for a GPU: the type in which each operator computes."""
import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from gluon_amp.graph.graph import Entry, Graph, Node, bindings, loop_states
from mixed_graphs import casting, computing, mixed, some
from mxnet import gluon, nd
from mxnet.gluon import nn

var = mx.sym.var


# Norms


NORMS = {"LayerNorm": lambda x, g, b: mx.sym.LayerNorm(x, g, b),
         "GroupNorm": lambda x, g, b: mx.sym.GroupNorm(x, g, b, num_groups=2),
         "InstanceNorm": lambda x, g, b: mx.sym.InstanceNorm(x, g, b),
         "L2Normalization": lambda x, g, b: mx.sym.L2Normalization(x),
         "LRN": lambda x, g, b: mx.sym.LRN(x, nsize=3)}


@pytest.mark.parametrize("parameters", ["float16", "float32"])
@pytest.mark.parametrize("data", ["float16", "float32"])
@pytest.mark.parametrize("op", NORMS)
def test_norms_run_in_float32_and_return_type_of_data(op, data, parameters):
    norm = NORMS[op](var("x"), var("g"), var("b"))
    graph = casting(mx.sym.relu(norm), {"x": data, "g": parameters, "b": parameters}, "gb")
    (node,) = graph.ops(op)
    assert set(graph.inputs(node)) == {"float32"}
    (relu,) = graph.ops("relu")
    assert graph.inputs(relu) == [data]


def test_layer_norm_between_float16_layers_returns_float16():
    net = nn.HybridSequential()
    net.add(nn.Dense(8), nn.LayerNorm(), nn.Dense(8))
    graph = mixed(net, nd.ones((2, 4)))
    (norm,) = graph.ops("LayerNorm")
    assert graph.inputs(norm) == ["float32"] * 3
    assert all(e.node.is_variable for e in norm.inputs[1:])
    casts = [n.inputs[0].node.op for n in graph.ops("amp_cast")]
    assert casts == ["null", "FullyConnected", "LayerNorm", "FullyConnected"]
    assert [graph.inputs(n) for n in graph.ops("FullyConnected")] == [["float16"] * 3] * 2


def test_other_outputs_of_norm_stay_float32():
    norm = mx.sym.LayerNorm(var("x"), var("g"), var("b"), output_mean_var=True)
    graph = casting(mx.sym.Group([norm[0] + 1, norm[1] + 1, norm[2] + 1]),
                    {"x": "float16", "g": "float32", "b": "float32"}, "gb")
    first, mean, std = (graph.inputs(n) for n in graph.ops("_plus_scalar"))
    assert (first, mean, std) == (["float16"], ["float32"], ["float32"])


# Operators


OPERATORS = {
    "softmax": (lambda F, x: F.softmax(x), "float32"),
    "log_softmax": (lambda F, x: F.log_softmax(x), "float32"),
    "exp": (lambda F, x: F.exp(x), "float32"), "log": (lambda F, x: F.log(x), "float32"),
    "norm": (lambda F, x: F.norm(x), "float32"), "sum": (lambda F, x: F.sum(x), "float32"),
    "mean": (lambda F, x: F.mean(x, axis=1), "float32"),
    "square": (lambda F, x: F.square(x), "float32"),
    "smooth_l1": (lambda F, x: F.smooth_l1(x), "float32"),
    "_power_scalar": (lambda F, x: x ** 3, "float32"),
    "_rdiv_scalar": (lambda F, x: 1 / x, "float32"),
    **{f"Activation {act}": (lambda F, x, act=act: F.Activation(x, act_type=act), dtype)
       for act, dtype in (("softrelu", "float32"), ("relu", "float16"), ("tanh", "float16"))},
    **{f"LeakyReLU {act}": (lambda F, x, act=act: F.LeakyReLU(x, act_type=act), dtype)
       for act, dtype in (("selu", "float32"), ("leaky", "float16"), ("gelu", "float16"))}}


@pytest.mark.parametrize("name", OPERATORS)
def test_exponentials_and_sums_run_in_float32_and_other_activations_in_float16(name):
    function, dtype = OPERATORS[name]
    graph = computing(function, some(2, 3))
    (node,) = graph.ops(name.split()[0])
    assert graph.inputs(node) == [dtype]
    assert graph.outputs == ["float32"]


def test_losses_run_in_float32_with_unrounded_labels():
    graph = computing(lambda F, x, label, w: F.SoftmaxOutput(F.dot(x, w), label), some(2, 3),
                      some(2, dtype="float32"), w=(3, 4))
    (node,) = graph.ops("SoftmaxOutput")
    assert graph.inputs(node) == ["float32", "float32"]
    assert node.inputs[1].node.is_variable


MATRIX = {
    "dot": lambda s: s.dot(var("x"), var("y")),
    "FullyConnected": lambda s: s.FullyConnected(var("x"), var("y"), num_hidden=3, no_bias=True),
    "Convolution": lambda s: s.Convolution(var("x"), var("y"), kernel=(3, 3), num_filter=3,
                                           no_bias=True),
    "Deconvolution": lambda s: s.Deconvolution(var("x"), var("y"), kernel=(3, 3), num_filter=3),
    "_contrib_interleaved_matmul_selfatt_qk":
        lambda s: s.contrib.interleaved_matmul_selfatt_qk(var("x"), heads=2),
    "_contrib_interleaved_matmul_selfatt_valatt":
        lambda s: s.contrib.interleaved_matmul_selfatt_valatt(var("x"), var("y"), heads=2)}


@pytest.mark.parametrize("y", ["float32", "float16"])
@pytest.mark.parametrize("x", ["float32", "float16"])
@pytest.mark.parametrize("op", MATRIX)
def test_matrix_products_run_in_float16(op, x, y):
    graph = casting(mx.sym.relu(MATRIX[op](mx.sym)), {"x": x, "y": y})
    (node,) = graph.ops(op)
    assert set(graph.inputs(node)) == {"float16"}
    assert graph.inputs(graph.ops("relu")[0]) == ["float16"]
    assert graph.outputs == ["float32"]


@pytest.mark.parametrize(("op", "make", "batched", "dtype"), [
    *(("batch_dot", lambda: mx.sym.batch_dot(var("x"), var("y")), *types)
      for types in ((None, "float32"), ("float16", "float16"))),
    *(("_linalg_gemm2", lambda: mx.sym.linalg.gemm2(var("x"), var("y")), *types)
      for types in ((None, "float32"), ("float16", "float32"))),
    # which have no float16 kernel on a GPU
    ("_linalg_makediag", lambda: mx.sym.linalg.makediag(var("x")), None, "float32"),
    ("Crop", lambda: mx.sym.Crop(var("x"), num_args=1, h_w=(2, 2)), None, "float32")])
def test_batched_products_run_in_policy_type_and_return_float16(op, make, batched, dtype):
    policy = amp.Policy("mine", parameter="float16", compute="float16", batched=batched)
    graph = casting(mx.sym.relu(make()), {"x": "float16", "y": "float16"}, policy=policy)
    (node,) = graph.ops(op)
    assert set(graph.inputs(node)) == {dtype}
    assert graph.inputs(graph.ops("relu")[0]) == ["float16"]


def test_other_formats_for_batched_products_are_refused():
    with pytest.raises(ValueError, match="must be float32 or float16"):
        amp.Policy("mine", compute="float16", batched="bfloat16")
    assert amp.Policy("mine", compute="bfloat16").batched.name == "bfloat16"


@pytest.mark.parametrize("op", ["RNN", "_rnn_param_concat"])
def test_fused_rnn_and_the_concatenation_of_its_parameters_run_in_float16(op):
    """MXNet's float32 concatenation takes longer than all casts."""
    graph = mixed(networks.fused(gluon.rnn.LSTM(4, 2)), nd.ones((5, 2, 3)))
    (node,) = graph.ops(op)
    assert set(graph.inputs(node)) == {"float16"}


def test_sequence_lengths_of_rnn_are_not_cast():
    rnn = mx.sym.RNN(data=var("x"), parameters=var("p"), state=var("h"), state_size=4, mode="gru",
                     sequence_length=var("length"), num_layers=1, use_sequence_length=True)
    for dtype in ("int32", "float32"):
        graph = casting(rnn, {**dict.fromkeys("xph", "float32"), "length": dtype}, "p")
        (node,) = graph.ops("RNN")
        assert graph.inputs(node) == ["float16"] * 3 + [dtype]


def test_float16_arithmetic_stays_float16():
    graph = casting(var("x") * 2 + var("y"), {"x": "float16", "y": "float16"},
                    policy="pure_float16")
    assert not graph.ops("amp_cast")
    assert graph.outputs == ["float16"]


PAIRS = [lambda a, b: a + b, lambda a, b: mx.sym.broadcast_mul(a, b),
         lambda a, b: mx.sym.concat(a, b, dim=0), lambda a, b: mx.sym.where(a > 0, a, b),
         lambda a, b: mx.sym.broadcast_maximum(b, a), lambda a, b: mx.sym.stack(b, a)]


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_float32_parameter_is_cast_to_float16_activations(pair, computed):
    other = mx.sym.relu(var("p") * 2) if computed else var("p")
    graph = casting(pair(mx.sym.relu(var("x")), other), {"x": "float16", "p": "float32"}, "p",
                    "pure_float16")
    assert graph.outputs == ["float16"]
    if not computed:
        assert [n.inputs[0].node.name for n in graph.ops("amp_cast")] == ["p"]


@pytest.mark.parametrize("pair", PAIRS)
def test_float32_data_promotes_float16_activations(pair):
    graph = casting(pair(mx.sym.relu(var("x")), mx.sym.relu(var("y"))),
                    {"x": "float16", "y": "float32"})
    assert {n.attrs["dtype"] for n in graph.ops("amp_cast")} == {"float32"}
    assert graph.outputs == ["float32"]
    assert graph.graph.outputs[0].node.op != "amp_cast"


def test_float16_parameter_is_cast_to_float32_data():
    graph = casting(mx.sym.broadcast_add(var("x"), var("p")), {"x": "float32", "p": "float16"}, "p")
    assert graph.inputs(graph.ops("broadcast_add")[0]) == ["float32"] * 2


def test_constants_take_type_of_activations():
    graph = casting(var("x") + mx.sym.ones((2, 3)), {"x": "float16"}, policy="pure_float16")
    assert graph.outputs == ["float16"]
    assert not graph.ops("amp_cast")
    assert graph.ops("_ones")[0].attrs["dtype"] == "float16"


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int8"])
def test_integers_are_never_cast(dtype):
    for function in (lambda x: x + 1, mx.sym.exp, mx.sym.relu, lambda x: x.reshape((-1,)),
                     lambda x: mx.sym.dot(x, x), mx.sym.sum, mx.sym.softmax):
        for name in ("float16", "mixed_float16", "pure_float16"):
            graph = casting(mx.sym.identity(var("x")), {"x": dtype}, policy=name)
            assert not graph.ops("amp_cast", "Cast")
            assert graph.outputs == [dtype]
            graph = casting(function(var("x")), {"x": dtype}, policy=name)
            assert not [n for n in graph.ops("amp_cast", "Cast") if n.inputs[0].node.is_variable]


INDEXING = {
    "Embedding": lambda F, i, w: F.Embedding(i, w, input_dim=9, output_dim=4),
    "take": lambda F, i, w: F.take(w, i), "one_hot": lambda F, i, w: F.dot(F.one_hot(i, 9), w),
    "pick": lambda F, i, w: F.pick(F.slice_axis(w, axis=0, begin=0, end=2), i),
    "gather_nd": lambda F, i, w: F.gather_nd(w, i.reshape((1, -1)))}


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "pure_float16"])
@pytest.mark.parametrize("op", INDEXING)
def test_float32_ids_are_not_cast(op, policy):
    graph = computing(INDEXING[op], some(2, dtype="float32"), w=(9, 4), policy=policy)
    assert not [n for n in graph.ops("amp_cast") if n.inputs[0].node.name == "data"]
    ids = [e for n in graph.nodes for e in n.inputs if e.node.name == "data"]
    assert [graph.types[e] for e in ids] == ["float32"]


def test_one_cast_serves_all_readers():
    x = mx.sym.relu(var("x"))
    graph = casting(mx.sym.Group([mx.sym.exp(x), mx.sym.log(x), mx.sym.softmax(x)]),
                    {"x": "float16"})
    assert len(graph.ops("amp_cast")) == 1


def test_kept_nodes_run_in_float32():
    x = mx.sym.FullyConnected(var("x"), var("w"), num_hidden=3, no_bias=True, name="one")
    x = mx.sym.FullyConnected(x, var("v"), num_hidden=3, no_bias=True, name="two")
    graph = casting(x, dict.fromkeys("xwv", "float32"), "wv", keep=["two"])
    one, two = graph.ops("FullyConnected")
    assert (graph.inputs(one), graph.inputs(two)) == (["float16"] * 2, ["float32"] * 2)


def test_float64_data_is_cast_for_products():
    graph = casting(mx.sym.FullyConnected(var("x"), var("w"), num_hidden=3, no_bias=True),
                    {"x": "float64", "w": "float16"}, "w")
    assert graph.inputs(graph.ops("FullyConnected")[0]) == ["float16"] * 2
    assert graph.outputs == ["float32"]


# ---- whole networks and control flow

# Whole networks


@pytest.fixture(scope="module", params=["resnet18_v1", "mobilenet1.0"])
def image_graph(request):
    net = gluon.model_zoo.vision.get_model(request.param, classes=10)
    return mixed(net, nd.ones((1, 3, 32, 32)))


def test_convolutional_net_has_two_casts(image_graph):
    casts = image_graph.ops("amp_cast")
    assert len(casts) == 2
    assert image_graph.inputs(casts[0]) == ["float32"]  # the data
    assert casts[0].inputs[0].node.name == "data"
    assert image_graph.graph.outputs[0].node is casts[1]
    assert [n["op"] for n in image_graph.json()].count("amp_cast") == 2
    assert not [n for n in image_graph.json() if "gluon_amp" in n["op"] + n["name"]]
    assert not [n for n in image_graph.nodes if "multicast" in n.op or n.op == "Cast"]


def test_batch_norms_read_float16_data_and_float32_statistics(image_graph):
    norms = image_graph.ops("BatchNorm")
    assert len(norms) in (20, 27)
    for norm in norms:
        assert image_graph.inputs(norm) == ["float16"] + ["float32"] * 4
        assert all(e.node.is_variable for e in norm.inputs[1:])
        assert image_graph.output(norm) == "float16"


def test_other_nodes_of_convolutional_net_run_in_float16(image_graph):
    for node in image_graph.nodes:
        if not node.is_variable and node.op not in ("amp_cast", "BatchNorm"):
            assert set(image_graph.inputs(node)) == {"float16"}, node
    assert image_graph.outputs == ["float32"]


def test_mixed_float16_casts_each_weight_once():
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


def test_mixed_float16_casts_tied_weight_once():
    graph = mixed(networks.Tied(), nd.zeros((2, 3)), policy="mixed_float16")
    assert len([n for n in graph.ops("amp_cast") if "embedding0_weight" in n.name]) == 1
    (product,) = [n for n in graph.ops("FullyConnected") if n.name.endswith("dense1_fwd")]
    assert graph.inputs(product) == ["float16"] * 3


def test_pure_float16_runs_and_returns_float16():
    graph = mixed(networks.Encoder(), some(2, 7, 32), some(2, 7, 7), policy="pure_float16")
    assert graph.outputs == ["float16"]
    assert not graph.ops("amp_cast")


def test_float32_policy_inserts_no_casts():
    var = mx.sym.var
    y = mx.sym.softmax(mx.sym.FullyConnected(var("x"), var("w"), var("b"), num_hidden=3))
    graph = casting(y, dict.fromkeys("xwb", "float32"), "wb", "float32")
    assert not graph.ops("amp_cast")


ALL = {**networks.OTHERS, "cond": (networks.condition, networks.floats(3, 4)),
       "resnet18_v1": (networks.zoo("resnet18_v1"), networks.images(32, 1))}


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "pure_float16"])
@pytest.mark.parametrize("name", sorted(set(ALL) - {"plain", "nested"}))
def test_mxnet_infers_the_types_of_graph(name, policy, rng):
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
    """With a float16 state."""

    def hybrid_forward(self, F, x, state):
        return super().hybrid_forward(F, x, self.cell(state))


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
@pytest.mark.parametrize(("cls", "state"), [(networks.Loop, "float32"), (Loop, "float16")])
def test_loop_body_is_converted_and_states_keep_their_type(cls, state, policy):
    graph = mixed(cls(), nd.ones((5, 3, 8)), nd.ones((3, 8)), policy=policy)
    loop, body, types = body_of(graph)
    (dense,) = [n for n in body.nodes() if n.op == "FullyConnected"]
    assert {types[e] for e in dense.inputs} == {"float16"}
    (norm,) = [n for n in body.nodes() if n.op == "LayerNorm"]
    assert {types[e] for e in norm.inputs} == {"float32"}
    assert [graph.types[e] for e in loop_states(loop)] == [state]
    assert [types[e] for e in body.outputs[int(loop.attrs["num_out_data"]):]] == [state]
    assert graph.outputs == ["float32"] * 2


def test_kept_block_in_loop_runs_in_float32():
    net = networks.Loop()
    graph = mixed(net, nd.ones((5, 3, 8)), nd.ones((3, 8)), keep=net.cell)
    _, body, types = body_of(graph)
    (dense,) = [n for n in body.nodes() if n.op == "FullyConnected"]
    assert {types[e] for e in dense.inputs} == {"float32"}


def test_branches_of_condition_return_same_types():
    graph = mixed(networks.condition(), nd.ones((3, 4)))
    (node,) = graph.ops("_cond")
    found = []
    for body, numbers in list(zip(node.subgraphs, bindings(node)))[1:]:
        known = dict(zip(body.variables(), (graph.types[node.inputs[i]] for i in numbers)))
        found.append([body.types(known)[e] for e in body.outputs])
    assert found[0] == found[1]


def while_small(F, x, first, dense):
    return F.contrib.while_loop(lambda state: F.max(state) < 1e3,
                                lambda state: (state, [F.tanh(dense(state))]),
                                [first(x)], max_iterations=3)[1][0]


def test_condition_can_depend_on_float16():
    graph = mixed(networks.condition("max", 1e3), nd.ones((3, 4)))
    assert graph.inputs(graph.ops("max")[0]) == ["float16"]
    assert graph.outputs == ["float32"]
    assert mixed(networks.two_layers(while_small), nd.ones((3, 4))).outputs == ["float32"]


CREATED = {"_zeros": {"shape": (3, 3)}, "_npi_zeros": {"shape": (3, 3)}, "_ones": {"shape": (3, 3)},
           "_npi_ones": {"shape": (3, 3)}, "_full": {"shape": (3, 3), "value": 2},
           "_arange": {"start": 0, "stop": 9}, "_npi_arange": {"start": 0, "stop": 9},
           "_eye": {"N": 3}, "_npi_eye": {"N": 3, "M": 3}, "_npi_identity": {"shape": (3, 3)},
           "_linspace": {"start": 0, "stop": 1, "num": 9},
           "_npi_logspace": {"start": 0, "stop": 1, "num": 9}, "_npi_blackman": {"M": 9},
           "_npi_hamming": {"M": 9}, "_npi_hanning": {"M": 9}}


@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "bfloat16", "mixed_bfloat16"])
@pytest.mark.parametrize("op", CREATED)
def test_product_reads_an_array_that_an_operator_creates(op, policy):
    node = Node(op, "made", {name: str(value) for name, value in CREATED[op].items()})
    flat = Graph([Entry(node)]).symbol().as_nd_ndarray()
    symbol = mx.sym.dot(mx.sym.var("data"), mx.sym.reshape(flat, shape=(3, 3)), name="product")
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected, found = (
        gluon.SymbolBlock(symbol, mx.sym.var("data")) for _ in range(2))
    amp.convert(found, policy)
    x = nd.array(data)
    np.testing.assert_allclose(found(x).asnumpy(), expected(x).asnumpy(), rtol=2 ** -6)
