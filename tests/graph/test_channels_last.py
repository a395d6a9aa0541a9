"""Images of float16 graphs on GPUs are channels-last between convolutions: the graphs' structure.
tests/software_gpu/computed/test_computed_layouts.py compares their results."""
from collections import Counter
from types import SimpleNamespace

import gluon_amp as amp
import mxnet as mx
import pytest
from gluon_amp.cuda import load
from gluon_amp.graph.channels_last import channels_last
from gluon_amp.graph.graph import Graph
from mxnet import sym
from mxnet.gluon import nn
from networks import ready


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """As with cuDNN 9."""
    chosen = SimpleNamespace(choice=SimpleNamespace(cuda=13))
    monkeypatch.setattr(load, "prepared", chosen)
    return chosen


def rewritten(symbol, types=None):
    graph = Graph.read(symbol)
    return channels_last(graph, {**dict.fromkeys(graph.variables(), "float16"), **(types or {})})


def layouts(graph):
    """The layout of each layer, by name."""
    return {node.name: node.attrs.get("layout", "NCHW") for node in graph.nodes()
            if node.op in ("Convolution", "Deconvolution", "Pooling")}


def transposes(graph):
    """How many transposes images and weights have."""
    found = [node.inputs[0].node for node in graph.nodes() if node.op == "transpose"]
    weights = sum(node.is_variable and node.name.endswith("weight") for node in found)
    return len(found) - weights, weights


def conv(x, name, kernel=3, **more):
    more = {"num_filter": 8, "pad": (kernel // 2,) * 2, **more}
    return sym.Convolution(x, kernel=(kernel, kernel), name=name, **more)


def norm(x, name):
    return sym.BatchNorm(x, name=name)


NORMS = {f"{n}_{p}": "float32" for n in ("n1", "n2")
         for p in ("gamma", "beta", "moving_mean", "moving_var")}


def block(x):
    x = sym.relu(norm(conv(x, "c1"), "n1"))
    return sym.relu(norm(conv(x, "c2"), "n2") + conv(x, "c3", 1))


def test_no_transpose_lies_between_layers():
    graph = rewritten(sym.Pooling(block(sym.var("x")), kernel=(2, 2), pool_type="max", name="p"),
                      NORMS)
    assert layouts(graph) == dict.fromkeys(("c1", "c2", "c3", "p"), "NHWC")
    assert transposes(graph) == (2, 2)  # of the data and of the output; of 3 x 3 weights
    assert [n.attrs["axis"] for n in graph.nodes() if n.op == "BatchNorm"] == ["3", "3"]


@pytest.mark.parametrize("name", ["resnet50_v1", "resnet50_v2", "mobilenetv2_0.25", "densenet121",
                                  "inceptionv3", "squeezenet1.1", "vgg11_bn"])
def test_networks_of_the_zoo_are_transposed_at_their_ends_only(name):
    net = mx.gluon.model_zoo.vision.get_model(name, prefix="net_")
    symbol = net(sym.var("data"))
    types = {n: "float32" for n in symbol.list_inputs()
             if n.endswith(("gamma", "beta", "mean", "var"))}
    graph = rewritten(symbol, types)
    assert set(layouts(graph).values()) == {"NHWC"}
    assert transposes(graph) == (2, sum(n.op == "Convolution" and n.attrs["kernel"] != "(1, 1)"
                                        for n in graph.nodes()))


def test_axes_follow_their_images():
    x = conv(sym.var("x"), "c1")
    parts = sym.split(x, num_outputs=2, axis=1)
    graph = rewritten(conv(sym.concat(
        parts[0], parts[1], sym.slice_axis(x, axis=-3, begin=0, end=2), dim=1), "c2"))
    axes = {n.op: n.attrs.get("axis", n.attrs.get("dim")) for n in graph.nodes()}
    assert {op: axes[op] for op in ("SliceChannel", "Concat", "slice_axis")} \
        == {"SliceChannel": "3", "Concat": "3", "slice_axis": "3"}
    assert transposes(graph) == (2, 2)


def test_a_heads_own_transpose_is_cancelled():
    x = conv(sym.var("x"), "c")
    graph = rewritten(sym.Flatten(sym.transpose(x, axes=(0, 2, 3, 1))))
    assert transposes(graph) == (1, 1)
    assert transposes(rewritten(sym.Flatten(sym.transpose(x, axes=(0, 3, 1, 2))))) == (3, 1)
    x = x.as_np_ndarray().transpose(0, 2, 3, 1)
    graph = rewritten(sym.npx.relu(x))
    assert transposes(graph) == (1, 1)
    assert "_np_transpose" not in {node.op for node in graph.nodes()}


@pytest.mark.parametrize("border", [
    lambda x: sym.softmax(x, axis=1), lambda x: sym.reshape(x, (0, -1)), sym.Flatten,
    lambda x: sym.mean(x, axis=1), lambda x: sym.cast(x, dtype="float32"),
    lambda x: sym.LeakyReLU(x, act_type="prelu"), lambda x: sym.Dropout(x, axes=(2, 3)),
    lambda x: sym.UpSampling(x, scale=2, sample_type="nearest"),
    lambda x: sym.Pooling(x, kernel=(2, 2), pool_type="sum"),
    lambda x: sym.BatchNorm(x, use_global_stats=True, name="n1"),
    lambda x: sym.broadcast_mul(x, sym.var("s"))])
def test_other_operators_read_mxnets_layout(border):
    graph = rewritten(border(conv(sym.var("x"), "c")), NORMS)
    last = graph.outputs[0].node
    assert last.inputs[0].node.op == "transpose"
    assert last.inputs[0].node.attrs["axes"] == "(0, 3, 1, 2)"


def test_other_layers_stay_as_they_are():
    x = sym.var("x")
    own = conv(x, "own", layout="NHWC")
    deep = sym.Convolution(x, kernel=(3, 3, 3), num_filter=4, name="deep")
    long = sym.Convolution(x, kernel=(3,), num_filter=4, name="long")
    target = sym.Deconvolution(x, kernel=(4, 4), stride=(2, 2), target_shape=(16, 12),
                               num_filter=4, name="target")
    assert layouts(rewritten(sym.Group([own, deep, long, target]))) \
        == {"own": "NHWC", "deep": "NCHW", "long": "NCHW", "target": "NCHW"}
    graph = rewritten(block(x), dict.fromkeys(block(x).list_inputs(), "float32"))
    assert set(layouts(graph).values()) == {"NCHW"}
    assert transposes(graph) == (0, 0)


def test_shapes_that_python_2_wrote_are_read():
    symbol = mx.sym.load_json(conv(sym.var("x"), "c").tojson().replace("(3, 3)", "(3L, 3L)"))
    assert layouts(rewritten(symbol)) == {"c": "NHWC"}


def test_grouped_layers_are_borders_unless_they_are_depthwise():
    x = conv(sym.var("x"), "c")
    up = {"kernel": (2, 2), "stride": (2, 2), "num_filter": 8}
    graph = rewritten(sym.Group([
        conv(x, "depthwise", num_group=8), conv(x, "grouped", num_group=2),
        sym.Deconvolution(x, name="up", **up),
        sym.Deconvolution(x, name="each", num_group=8, **up)]))
    assert layouts(graph) == {"c": "NHWC", "depthwise": "NHWC", "grouped": "NCHW", "up": "NHWC",
                              "each": "NCHW"}


def test_kept_float32_layers_are_borders():
    wide = conv(sym.cast(conv(sym.var("x"), "half"), dtype="float32"), "wide")
    graph = rewritten(wide, {"wide_weight": "float32", "wide_bias": "float32"})
    assert layouts(graph) == {"half": "NHWC", "wide": "NCHW"}


def test_parameters_keep_their_shapes():
    symbol = sym.Deconvolution(block(sym.var("x")), kernel=(2, 2), stride=(2, 2), num_filter=4,
                               name="d")
    graph = rewritten(symbol, NORMS)
    assert graph.variables() == Graph.read(symbol).variables()
    assert Counter(graph.mutated()) == Counter(Graph.read(symbol).mutated())
    shape = {"x": (2, 3, 8, 6)}
    inferred = [s.infer_shape(**shape) for s in (symbol, graph.symbol())]
    assert inferred[0] == inferred[1]


def test_weights_of_one_pixel_or_one_input_are_not_transposed():
    weight = sym.Cast(sym.var("each_weight"), dtype="float16")
    x = conv(conv(sym.var("x"), "one", 1), "each", num_group=8, weight=weight)
    x = conv(conv(x, "pairs", num_filter=4, num_group=4), "all")
    symbol = sym.Deconvolution(x, kernel=(1, 1), num_filter=8, name="up")
    shapes = symbol.infer_shape(x=(2, 3, 8, 6))
    known = dict(zip(symbol.list_arguments(), shapes[0]))
    types = {**dict.fromkeys(known, "float16"), "each_weight": "float32"}
    graph = channels_last(Graph.read(symbol), types, known)
    # `pairs` has two inputs for each output; cuDNN reads no other order of a deconvolution
    assert transposes(graph) == (2, 3)
    assert graph.symbol().infer_shape(x=(2, 3, 8, 6)) == shapes


def test_channels_last_layers_are_refused_on_a_cpu():
    net = amp.convert(ready(nn.Conv2D(4, 3, layout="NHWC", in_channels=3)))
    with pytest.raises(ValueError, match=r"no channels-last Convolution.*NCHW.*Received: NHWC"):
        net(mx.nd.ones((1, 8, 8, 3)))


@pytest.mark.parametrize("libraries_of", [None, SimpleNamespace(choice=SimpleNamespace(cuda=11))])
def test_older_cudnn_gets_the_plain_graph(libraries_of, monkeypatch):
    monkeypatch.setattr(load, "prepared", libraries_of)
    assert set(layouts(rewritten(block(sym.var("x")))).values()) == {"NCHW"}


def test_layout_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("GLUON_AMP_LAYOUT", "off")
    assert set(layouts(rewritten(block(sym.var("x")), NORMS)).values()) == {"NCHW"}
