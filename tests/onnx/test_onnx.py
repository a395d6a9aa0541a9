"""`export_onnx`: results of onnxruntime match those of MXNet.

GLUON_AMP_ONNX=1 adds larger networks.
"""
import os
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.onnx import export
from gluon_amp.onnx.operators import ROWS
from model_zoo import zoo_network
from mxnet import gluon, nd, sym
from mxnet.gluon import nn
from networks import ready, sequence

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx_models import cut, engine_tensors, off_by, run, settle  # noqa: E402
from test_onnx_detection import CASES as DETECTORS  # noqa: E402

DATA = np.random.RandomState(0).normal(size=(2, 4, 6, 6)).astype(np.float32)
x = sym.var("data")


def rows_data(name):
    """The data for the test of a row."""
    shapes = {"flat": (2, 4), "ids": (2, 3), "positive": (2, 4, 6, 6), "steps": (5, 2, 3),
              "batches": (3, 4, 5), "triple": (2, 3, 4), "line": (2, 4, 9), "cube": (1, 2, 4, 5, 3)}
    made = np.random.RandomState(1).normal(size=shapes.get(name, DATA.shape)).astype(np.float32)
    if name == "positive":
        made = np.abs(made) + 0.1
    if name == "ids":  # the first and last ones are out of range
        made = np.array([[-3, 0, 5], [2, 9, 1]], np.float32)
    return made


def norm(op, **attributes):
    return op(x, sym.var("gamma"), sym.var("beta"), name="op", **attributes)


def batch_norm(**attributes):
    return sym.BatchNorm(x, name="op", **attributes)


def rnn(mode, layers, bidirectional, outputs):
    states = [sym.zeros((layers * (1 + bidirectional), 2, 6))] * (2 if mode == "lstm" else 1)
    return sym.RNN(x, sym.var("rnn_parameters"), *states, mode=mode, num_layers=layers,
                   state_size=6, bidirectional=bidirectional, state_outputs=outputs, name="op")


X = x.as_np_ndarray()
NUMPY_CASES = {name: (made.as_nd_ndarray(), *data) for name, made, *data in (
    *((f"np.{name}", getattr(sym.np, name)(X)) for name in (
        "abs", "cos", "ceil", "exp", "floor", "sin", "square", "tanh")),
    *((f"np.{name}", getattr(sym.np, name)(X), "positive") for name in (
        "log", "reciprocal", "sqrt")),
    ("np.copy", sym.np.copy(X) + 1), ("npx.relu", sym.npx.relu(X)),
    ("npx.sigmoid", sym.npx.sigmoid(X)),
    ("np x + y", X + sym.np.tanh(X)), ("np x - y", X - sym.np.tanh(X)),
    ("np x * y", X * sym.np.tanh(X)), ("np x / y", X / sym.np.exp(X)),
    ("np x ** y", X ** sym.np.tanh(X), "positive"),
    ("np x + 2", X + 2), ("np x - 2", X - 2), ("np 2 - x", 2 - X), ("np -x", -X),
    ("np x / 3", X / 3), ("np 3 / x", 3 / X, "positive"), ("np x ** 3", X ** 3),
    ("np.reshape", X.reshape(2, -1)), ("npx.reshape", sym.npx.reshape(X, (-2, -1))),
    ("np.squeeze", sym.np.squeeze(sym.np.expand_dims(X, 1), 1)),
    ("np.transpose", X.transpose(0, 2, 3, 1)), ("np.transpose all", sym.np.transpose(X)),
    ("np.concatenate", sym.np.concatenate([X, X * 2], axis=1)),
    ("np.stack", sym.np.stack([X, X * 2], axis=1)),
    ("np x[:, 1:3]", X[:, 1:3]), ("np x[:, 0]", X[:, 0]),
    ("np.sum", X.sum(axis=1)), ("np.mean", X.mean(axis=(2, 3), keepdims=True)),
    *((f"np.{name}", getattr(X, f"__{name}__")(0.3)) for name in ("gt", "lt", "ge", "le")),
    ("np x > y", (sym.np.tanh(X * 2) < X).astype("float32")),
    ("np.where", sym.np.where(X > 0, X, X * 2)), ("np.ones_like", sym.np.ones_like(X) + X),
    ("np.negative", sym.np.negative(X)), ("np.maximum", sym.np.maximum(X, X * X)),
    ("np.clip", sym.np.clip(X, -0.3, 0.6)), ("np.swapaxes", sym.np.swapaxes(X, 1, 3)),
    ("np.moveaxis", sym.np.moveaxis(X, 1, -1)), ("np.tile", sym.np.tile(X, (1, 2, 1, 3))),
    ("np.repeat", sym.np.repeat(X, 2, axis=1)), ("np.vstack", sym.np.vstack([X, X * 2])),
    ("np.var", sym.np.var(X, axis=(1, 2))), ("np.std", sym.np.std(X, axis=-1, keepdims=True)),
    ("np.arange", X + sym.np.arange(6)),
    ("np.broadcast_to", sym.np.broadcast_to(X.mean(axis=1, keepdims=True), (2, 4, 6, 6))),
    ("np.max", X.max(axis=-1)), ("np.min", X.min(axis=-1)),
    ("np.dot", sym.np.dot(X, sym.var("b_weight", shape=(6, 3)).as_np_ndarray())),
    ("np.matmul", sym.np.matmul(X, sym.np.transpose(X, (0, 1, 3, 2)))))}


# For each operator: its symbol, and the name of its data, unless it has four axes of numbers.
CASES = {
    **{name: (getattr(sym, name)(x),) for name in (
        "relu sigmoid tanh exp sin cos softsign floor ceil erf negative abs square "
        "Flatten").split()},
    **{name: (getattr(sym, name)(x), "positive") for name in "log sqrt reciprocal".split()},
    **{name: (getattr(sym, name)(x, x + 1),) for name in (
        "elemwise_add elemwise_sub elemwise_mul broadcast_add broadcast_sub broadcast_mul "
        "broadcast_maximum broadcast_minimum add_n").split()},
    **{name: (getattr(sym, name)(x, x + 1), "positive") for name in
       "elemwise_div broadcast_div broadcast_power".split()},
    **{f"{name} a channel's": (getattr(sym, name)(x, sym.var("b_weight", shape=(1, 4, 1, 1))),)
       for name in "broadcast_add broadcast_mul".split()},
    "identity": (sym.identity(x) + 1,), "BlockGrad": (sym.BlockGrad(x) + 1,),
    "+": (x + 0.3,), "-": (x - 0.3,), "from": (0.3 - x,), "*": (x * 0.3,), "/": (x / 0.3,),
    "over": (0.3 / x, "positive"), "**": (x ** 1.7, "positive"),
    "max with": (sym.maximum(x, 0.3),), "min with": (sym.minimum(x, 0.3),),
    "clip": (sym.clip(x, -0.3, 0.6),), "Dropout": (sym.Dropout(x) + 1,),
    "Cast": (sym.Cast(sym.Cast(x, dtype="int32"), dtype="float32"),),
    "amp_cast": (sym.amp_cast(x, dtype="float16"),),
    "div_sqrt_dim": (sym.contrib.div_sqrt_dim(x),),
    **{f"Activation {kind}": (sym.Activation(x, act_type=kind),) for kind in
       "relu sigmoid tanh softrelu softsign".split()},
    **{f"LeakyReLU {kind}": (sym.LeakyReLU(x, act_type=kind, slope=0.1, name="op"),) for kind in
       "leaky elu selu gelu prelu".split()},
    "hard_sigmoid": (sym.hard_sigmoid(x),),
    "softmax": (sym.softmax(x),), "softmax over channels": (sym.softmax(x, axis=1),),
    "log_softmax": (sym.log_softmax(x),), "SoftmaxActivation": (sym.SoftmaxActivation(x), "flat"),
    "SoftmaxActivation of channels": (sym.SoftmaxActivation(x, mode="channel"),),
    "SoftmaxOutput": (sym.SoftmaxOutput(x, name="softmax"), "flat"),
    "SoftmaxOutput of channels": (sym.SoftmaxOutput(x, multi_output=True, name="softmax"),),
    "LinearRegressionOutput": (sym.LinearRegressionOutput(x, name="lin"),),
    "MAERegressionOutput": (sym.MAERegressionOutput(x, name="mae"),),
    "LogisticRegressionOutput": (sym.LogisticRegressionOutput(x, name="logistic"),),
    "Convolution": (sym.Convolution(x, kernel=(3, 3), num_filter=5, pad=(1, 1), stride=(2, 2),
                                    name="op"),),
    "Convolution in groups": (sym.Convolution(x, kernel=(3, 2), num_filter=4, num_group=4,
                                              dilate=(2, 1), no_bias=True, name="op"),),
    "Convolution of lines": (sym.Convolution(x, kernel=(3,), num_filter=5, name="op"), "line"),
    "Convolution of cubes": (sym.Convolution(x, kernel=(2, 2, 2), num_filter=3, name="op"), "cube"),
    "Deconvolution": (sym.Deconvolution(x, kernel=(3, 3), num_filter=5, stride=(2, 2), pad=(1, 1),
                                        adj=(1, 1), name="op"),),
    "FullyConnected": (sym.FullyConnected(x, num_hidden=7, name="op"),),
    "FullyConnected of the last axis": (sym.FullyConnected(x, num_hidden=7, flatten=False,
                                                           no_bias=True, name="op"),),
    "dot": (sym.dot(x, sym.var("b_weight", shape=(5, 4)), transpose_b=True), "flat"),
    "batch_dot": (sym.batch_dot(x, x * 2, transpose_b=True), "batches"),
    "batch_dot turned": (sym.batch_dot(x, x * 2, transpose_a=True), "batches"),
    **{f"RNN {mode} {layers} {both}": (sym.Group(list(rnn(mode, layers, both, True))), "steps")
       for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu")
       for layers, both in ((1, False), (2, False), (2, True))},
    "RNN without its states": (rnn("lstm", 1, False, False), "steps"),
    "Embedding": (sym.Embedding(x, input_dim=5, output_dim=3, name="op"), "ids"),
    "take": (sym.take(sym.var("b_weight", shape=(5, 3)), x, axis=0), "ids"),
    "BatchNorm": (batch_norm(fix_gamma=False),),
    "BatchNorm with its gamma fixed": (batch_norm(eps=1e-5),),
    "LayerNorm": (norm(sym.LayerNorm),), "InstanceNorm": (norm(sym.InstanceNorm),),
    "LRN": (sym.LRN(x, nsize=3),),
    "Pooling": (sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max"),),
    "Pooling to the end": (sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type="max",
                                       pooling_convention="full"),),
    "Pooling, mean": (sym.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="avg"),),
    "Pooling, mean within": (sym.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="avg",
                                         count_include_pad=False),),
    "Pooling, mean by default": (sym.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="avg",
                                             count_include_pad=None),),
    "Pooling, mean, full": (sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="avg",
                                        pooling_convention="full"),),
    "Pooling, all": (sym.Pooling(x, global_pool=True, kernel=(7, 7), pool_type="avg"),),
    "Pooling, largest": (sym.Pooling(x, global_pool=True, pool_type="max"),),
    "AdaptiveAvgPooling2D": (sym.contrib.AdaptiveAvgPooling2D(x, output_size=1),),
    "mean": (sym.mean(x, axis=(2, 3), keepdims=True),), "sum": (sym.sum(x, axis=1),),
    "mean of all": (sym.mean(x),), "max": (sym.max(x, axis=-1),), "min": (sym.min(x, axis=2),),
    "Reshape": (sym.Reshape(x, shape=(0, -4, 2, -1, -3)),),
    "reshape_like": (sym.reshape_like(x, sym.reshape(x, (6, 4, 2, 6))),),
    "expand_dims": (sym.expand_dims(x, axis=1),),
    "squeeze": (sym.squeeze(sym.expand_dims(x, axis=1)),),
    "transpose": (sym.transpose(x, axes=(0, 2, 3, 1)),), "transpose all": (sym.transpose(x),),
    "SwapAxis": (sym.SwapAxis(x, dim1=1, dim2=-1),), "Concat": (sym.concat(x, x * 2, dim=1),),
    "stack": (sym.stack(x, x * 2, axis=1),),
    "slice_axis": (sym.slice_axis(x, axis=1, begin=1, end=None),),
    "slice": (sym.slice(x, begin=(None, 1, -4), end=(None, 3, None), step=(None, 1, 2)),),
    "_split_v2": (sym.split_v2(x, (1, 3), axis=1),),
    "_split_v2 sections": (sym.split_v2(x, 2, axis=2),),
    "_split_v2 squeezed": (sym.split_v2(x, 6, axis=3, squeeze_axis=True),),
    **NUMPY_CASES,
    "where": (sym.where(x > 0.1, x, x * 2),), "zeros_like": (sym.zeros_like(x) + x,),
    "ones_like": (sym.ones_like(x) + x,), "== 0": (sym.relu(x) == 0,),
    "broadcast_lesser": (sym.broadcast_lesser(x, sym.mean(x, axis=1, keepdims=True)),),
    "tile": (sym.tile(x, (1, 2, 1, 1)),), "tile with an axis": (sym.tile(x, (3, 1, 1, 1, 1)),),
    "repeat": (sym.repeat(x, repeats=2, axis=2),),
    "slice_like": (sym.slice_like(x, sym.Pooling(x, kernel=(3, 2), pool_type="max"),
                                  axes=(-2, -1)),),
    "_arange": (sym.broadcast_add(x, sym.arange(1, 13, 2)),),
    "amp_multicast": (sym.add_n(*sym.amp_multicast(x, x * 2, num_outputs=2)),),
    "slice_axis from the end": (sym.slice_axis(x, axis=-1, begin=-3, end=-1),),
    "SliceChannel": (sym.Group(list(sym.SliceChannel(x, num_outputs=2, axis=1))),),
    "SliceChannel, squeezed": (sym.SliceChannel(x, num_outputs=3, axis=1, squeeze_axis=True)[1],
                               "triple"),
    "Pad": (sym.Pad(x, mode="constant", constant_value=0.5, pad_width=(0, 0, 0, 0, 1, 2, 3, 0)),),
    "Pad with its edge": (sym.Pad(x, mode="edge", pad_width=(0, 0, 0, 0, 1, 2, 3, 0)),),
    "Pad, reflected": (sym.Pad(x, mode="reflect", pad_width=(0, 0, 0, 0, 1, 2, 3, 0)),),
    "UpSampling": (sym.UpSampling(x, scale=2, sample_type="nearest"),),
    "BilinearResize2D": (sym.contrib.BilinearResize2D(x, height=11, width=9),),
    "BilinearResize2D, smaller": (sym.contrib.BilinearResize2D(x, height=4, width=1),),
    "BilinearResize2D, of pixels": (sym.contrib.BilinearResize2D(
        x, height=13, width=4, align_corners=False),),
    "BilinearResize2D, scaled": (sym.contrib.BilinearResize2D(
        x, scale_height=1.5, scale_width=2.5, mode="odd_scale"),),
    "BilinearResize2D, like": (sym.contrib.BilinearResize2D(
        x, sym.Pooling(x, kernel=(3, 2), pool_type="max"), mode="like"),),
    "Crop": (sym.Crop(x, num_args=1, offset=(1, 2), h_w=(3, 4)),),
    "Crop, centered": (sym.Crop(x, num_args=1, center_crop=True, h_w=(3, 4)),),
    "Crop, like": (sym.Crop(x, sym.Pooling(x, kernel=(3, 2), pool_type="max"), num_args=2),),
}
NOT_AS_PARAMETERS = {"data", "lin_label", "mae_label", "logistic_label", "softmax_label"}


def parameters(symbol, shape):
    """Random parameters, with positive variances."""
    draw = np.random.RandomState(2)
    arguments, _, auxiliary = symbol.infer_shape(data=shape)
    found = [{name: nd.array(draw.normal(size=size) * 0.3 + ("var" in name) * 2)
              for name, size in zip(names, shapes) if name not in NOT_AS_PARAMETERS}
             for names, shapes in ((symbol.list_arguments(), arguments),
                                   (symbol.list_auxiliary_states(), auxiliary))]
    return tuple(found)


def mxnets(symbol, params, data):
    """Results of MXNet's operators."""
    arrays = {**params[0], **params[1], "data": nd.array(data)}
    executor = symbol.simple_bind(mx.cpu(), grad_req="null", data=data.shape, type_dict={
        name: array.dtype for name, array in arrays.items()})
    for found in (executor.arg_dict, executor.aux_dict):
        for name in set(found) & set(arrays):
            found[name][:] = arrays[name]
    return [array.asnumpy() for array in executor.forward(is_train=False)]


def check_alone(network, data):
    """Checks that each operator of a float16 network alone is within one rounding of the engine's.

    Returns:
        the number of compared tensors.
    """
    shape = {name: array.shape for name, array in data.items()}
    model, tensors = cut(export._model(onnx, network, shape), engine_tensors(network, data))
    if not tensors:
        return 0
    made = run(model, {**data, **{f"{name} as read": array for name, array in tensors.items()
                                  if f"{name} as read" in [i.name for i in model.graph.input]}})
    off = {name: off_by(made[name], array) for name, array in tensors.items()}
    assert max(off.values()) <= 1, max(off, key=off.get)
    return len(off)


# ---- operators ---------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_operator_matches_mxnet(case, tmp_path):
    symbol, data = CASES[case][0], rows_data((*CASES[case], "")[1])
    params = parameters(symbol, data.shape)
    file = str(tmp_path / "one.onnx")
    amp.export_onnx(symbol, file, data.shape, "float32", params=params)
    found = run(file, {"data": data})
    assert list(found) == symbol.list_outputs()
    for one, expected in zip(found.values(), mxnets(symbol, params, data)):
        np.testing.assert_allclose(one, expected, rtol=2e-5, atol=2e-6)
    amp.export_onnx(symbol, file, data.shape, params=params)
    compared = check_alone(export._symbol(symbol, params, "float16"), {"data": data})
    # the former are identities in prediction, the latter are float32
    assert compared or case.endswith("RegressionOutput") or case in ("np.var", "np.std")


def test_every_exported_operator_is_tested():
    tested = {node.op for case in (*CASES.values(), *DETECTORS.values())
              for node in export.Graph.read(case[0]).nodes()}
    aliases = {name for name, row in ROWS.items()
               for other in tested if ROWS.get(other) is row}
    assert sorted(set(ROWS) - tested - aliases) == []


# ---- networks ----------------------------------------------------------------

SMALL = ["cifar_resnet20_v1", "cifar_resnet20_v2", "mobilenetv2_0.25"]
LARGE = ["resnet18_v1", "resnet18_v2", "resnet50_v1", "resnet50_v2", "mobilenetv2_1.0",
         "mobilenet1.0", "vgg11"]
NETWORKS = SMALL + LARGE * bool(os.environ.get("GLUON_AMP_ONNX"))


def classifier(name):
    size = 32 if name.startswith("cifar") else 64
    mx.random.seed(1)
    net = ready(zoo_network(name, classes=10), mx.init.Xavier(magnitude=2))
    data = nd.random.uniform(shape=(2, 3, size, size))
    settle(net, data)
    return net, data


@pytest.mark.parametrize("name", NETWORKS)
def test_float32_network_predicts_as_in_mxnet(name, tmp_path, capfd):
    net, data = classifier(name)
    file = str(tmp_path / "net.onnx")
    amp.export_onnx(net, file, data.shape, "float32")
    found, = run(file, {"data": data.asnumpy()}).values()
    assert capfd.readouterr().err == ""  # onnxruntime's warnings
    expected = net(data).asnumpy()
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", NETWORKS)
def test_each_operator_of_float16_network_is_within_one_rounding(name):
    net, data = classifier(name)
    amp.convert(net)
    assert check_alone(export._block(net, 1, "float16"), {"data": data.asnumpy()}) > 20


def test_converted_and_unconverted_networks_give_same_file(tmp_path):
    net, data = classifier("mobilenetv2_0.25")
    files = [tmp_path / "before.onnx", tmp_path / "after.onnx"]
    amp.export_onnx(net, str(files[0]), data.shape)
    amp.convert(net)
    amp.export_onnx(net, str(files[1]), data.shape)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {t.data_type for t in onnx.load(str(files[1])).graph.initializer} >= {
        onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT}


def test_lstm_with_embedding_is_exported(tmp_path):
    net = ready(sequence(nn.Embedding(20, 6), gluon.rnn.LSTM(8, num_layers=2, bidirectional=True),
                         nn.Dense(20, flatten=False)), mx.init.Xavier())
    ids = nd.array(np.arange(10).reshape(5, 2))
    expected = net(ids).asnumpy()
    file = str(tmp_path / "words.onnx")
    amp.export_onnx(net, file, ids.shape, "float32")
    found, = run(file, {"data": ids.asnumpy()}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    amp.convert(net)
    half = net(ids).asnumpy()
    amp.export_onnx(net, file, ids.shape)
    found, = run(file, {"data": ids.asnumpy()}).values()
    assert off_by(found.astype(np.float16), half.astype(np.float16)) <= 2  # after two products
    assert check_alone(export._block(net, 1, "float16"), {"data": ids.asnumpy()})


def test_kept_layers_are_float32_in_file(tmp_path):
    net = ready(sequence(nn.Dense(4, in_units=3), nn.Dense(4, in_units=4)))
    amp.convert(net, keep=[net[1]])
    file = str(tmp_path / "net.onnx")
    amp.export_onnx(net, file, (2, 3))
    types = {t.name: t.data_type for t in onnx.load(file).graph.initializer}
    assert types[net[0].weight.name] == onnx.TensorProto.FLOAT16
    assert types[net[1].weight.name] == onnx.TensorProto.FLOAT


@pytest.mark.filterwarnings("ignore:.*is not used by any computation")  # MXNet's
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("forward", [
    lambda F, a, b: F.broadcast_mul(b, F.sum(a, axis=1, keepdims=True)),  # which reads b first
    lambda F, a, b: (b * 2, b, b * 3), lambda F, a, b: (lambda r: (r, r))(b - a * 2),
    lambda F, a, b: a, lambda F, a, b: (F.concat(a, b, dim=1), F.relu(a))],
    ids=["order", "output is input", "output twice", "no operator", "two outputs"])
def test_inputs_are_those_of_the_call_in_its_order(forward, dtype, rng, tmp_path):
    net, file = amp.convert(nn.HybridLambda(forward)), str(tmp_path / "net.onnx")
    given = [rng.standard_normal((4, 5)).astype("float32") for _ in range(2)]
    expected = net(*map(nd.array, given))
    expected = expected if isinstance(expected, (list, tuple)) else [expected]
    for shapes in ([(4, 5)] * 2, [(np.int64(4), 5)] * 2, [(None, 5)] * 2):
        amp.export_onnx(net, file, shapes, dtype)
        names = [one.name for one in onnx.load(file).graph.input]
        assert names == ["data0", "data1"]
        found = run(file, dict(zip(names, given))).values()
        for one, other in zip(found, expected):
            np.testing.assert_allclose(one, other.asnumpy(), rtol=1e-2, atol=1e-2)
        assert len(found) == len(expected)


@pytest.mark.filterwarnings("ignore:.*is not used by any computation")  # MXNet's
def test_calibration_batches_are_in_the_order_of_the_call(tmp_path):
    net = nn.HybridLambda(lambda F, a, b, unused: F.exp(b) * F.dot(a, a, transpose_b=True))
    batch = nd.ones((4, 4)) * 300, nd.ones((4, 4)) / 10, nd.ones((4, 4))
    net(*batch)
    kept = amp.export_onnx(net, str(tmp_path / "net.onnx"), [(4, 4)] * 3, calibration=[batch])
    assert any("dot" in name for name in kept)  # its results are beyond float16


# ---- any batch size ----------------------------------------------------------

# cases without an axis of any size, and the reason
REFUSED = {"np.broadcast_to": "MXNet refuses a batch of 3",
           "reshape_like": "MXNet refuses a batch of 3: .*Cannot reshape",
           "squeeze": "the shape .* has fewer axes for a batch of 1",
           **dict.fromkeys((case for case in CASES if case.startswith("RNN")), "Shape inconsist")}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_file_for_any_batch_size_predicts_each_size(case, dtype, tmp_path):
    symbol, data = CASES[case][0], rows_data((*CASES[case], "")[1])
    axis = 1 if case.startswith("RNN") else 0
    params, file = parameters(symbol, data.shape), str(tmp_path / "any.onnx")
    shape = tuple(None if i == axis else n for i, n in enumerate(data.shape))
    if case in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[case]):
            amp.export_onnx(symbol, file, shape, dtype, params=params)
        return
    amp.export_onnx(symbol, file, shape, dtype, params=params)
    for batch in (1, 2, 4):
        many = np.take(data, np.arange(batch) % data.shape[axis], axis)
        found = run(file, {"data": many})
        for one, expected in zip(found.values(), mxnets(symbol, params, many)):
            assert one.shape == expected.shape
            if dtype == "float32":
                np.testing.assert_allclose(one, expected, rtol=2e-5, atol=2e-6)
            else:
                amp.export_onnx(symbol, str(tmp_path / "one.onnx"), many.shape, params=params)
                same = run(str(tmp_path / "one.onnx"), {"data": many})
                assert all(np.array_equal(a, b) for a, b in zip(found.values(), same.values()))


def test_network_for_any_batch_size(tmp_path):
    net, data = classifier("cifar_resnet20_v1")
    file = str(tmp_path / "net.onnx")
    amp.export_onnx(net, file, (None, *data.shape[1:]), "float32")
    size = onnx.load(file).graph.output[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in size] == ["batch", 10]
    for batch in (1, 7):
        many = nd.random.uniform(shape=(batch, *data.shape[1:]))
        found, = run(file, {"data": many.asnumpy()}).values()
        np.testing.assert_allclose(found, net(many).asnumpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_initial_lstm_states_fit_any_batch_size(dtype, tmp_path):
    net = ready(sequence(gluon.rnn.LSTM(8, num_layers=2, bidirectional=True),
                         nn.Dense(5, flatten=False)), mx.init.Xavier())
    net(nd.ones((5, 2, 3)))
    file = str(tmp_path / "net.onnx")
    amp.export_onnx(net, file, (5, None, 3), dtype)
    error = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
    for batch in (1, 2, 7):
        data = nd.random.normal(shape=(5, batch, 3))
        found, = run(file, {"data": data.asnumpy()}).values()
        np.testing.assert_allclose(found, net(data).asnumpy(), rtol=error, atol=error)


@pytest.mark.parametrize("shapes", [(None, None, 6, 6), (None, 0, 6, 6), (None, 4.0, 6, 6)])
def test_shape_has_at_most_one_batch_axis(shapes, tmp_path):
    with pytest.raises(ValueError, match=r"with one None for any batch size, .*Received"):
        amp.export_onnx(sym.relu(x), str(tmp_path / "net.onnx"), shapes, params={})


# ---- bfloat16 ----------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_operator_matches_engine(case, tmp_path):
    symbol, data = CASES[case][0], rows_data((*CASES[case], "")[1])
    params = parameters(symbol, data.shape)
    file = str(tmp_path / "one.onnx")
    amp.export_onnx(symbol, file, data.shape, "bfloat16", params=params)
    converted, *params = amp.convert_model(symbol, *params, "bfloat16")
    for one, expected in zip(run(file, {"data": data}).values(), mxnets(converted, params, data)):
        # roundings of 2 ** -9 in an operator, or in several of them
        np.testing.assert_allclose(one, expected, rtol=0.02, atol=0.02 * np.abs(expected).max())


def test_bfloat16_network_stores_weights_in_two_bytes(tmp_path):
    net, data = classifier("cifar_resnet20_v1")
    files = {dtype: tmp_path / dtype for dtype in ("float32", "bfloat16")}
    for dtype, file in files.items():
        amp.export_onnx(net, str(file), data.shape, dtype)
    assert files["bfloat16"].stat().st_size < 0.7 * files["float32"].stat().st_size
    found, = run(str(files["bfloat16"]), {"data": data.asnumpy()}).values()
    expected = amp.convert(net, "bfloat16")(data).asnumpy()
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    again = tmp_path / "again"
    amp.export_onnx(net, str(again), data.shape, "bfloat16")
    assert again.read_bytes() == files["bfloat16"].read_bytes()


# ---- calibration -------------------------------------------------------------


def chain(*factors):
    """Dense layers whose results change by these factors."""
    net = nn.HybridSequential()
    for _ in factors:
        net.add(nn.Dense(16, in_units=16, use_bias=False))
    net.initialize(mx.init.Orthogonal(1))
    for layer, factor in zip(net, factors):
        layer.weight.set_data(layer.weight.data() * factor)
    return net, nd.random.normal(shape=(8, 16))


@pytest.mark.parametrize(("factors", "of_float16"), [
    ((1, 1, 1, 1), []), ((1e3, 1e3, 1e-3, 1e-3), [1, 2]), ((1e-4, 1e-4, 1e4, 1e4), [1, 2]),
    ((1, 1e5, 1e-5, 1), [1, 2])])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("convert", [False, True])
def test_calibration_keeps_tensors_beyond_range_of_type(factors, of_float16, dtype, convert,
                                                       tmp_path):
    net, data = chain(*factors)
    expected = net(data).asnumpy()
    if convert:
        if max(factors) > 65504:
            return  # such a weight stays float32
        amp.convert(net, f"mixed_{dtype}")
    file = str(tmp_path / "net.onnx")
    kept = amp.export_onnx(net, file, (None, 16), dtype, calibration=[data, data / 2])
    assert kept == [net[i].name + "_fwd" for i in (of_float16 if dtype == "float16" else [])]
    found, = run(file, {"data": data.asnumpy()}).values()
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


def test_calibration_result_is_valid_keep_argument(tmp_path):
    net, data = chain(1e3, 1e3, 1e-3, 1e-3)
    net.hybridize()
    expected = net(data).asnumpy()
    kept = amp.export_onnx(net, str(tmp_path / "net.onnx"), data.shape, calibration=[data])
    assert not np.isfinite(amp.convert(net)(data).asnumpy()).any()
    amp.restore(net)(data)
    found = amp.convert(net, keep=kept)(data).asnumpy()
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()


def test_large_inputs_are_kept_and_ids_are_ignored_by_calibration(tmp_path):
    net = ready(sequence(nn.Embedding(70_000, 4), nn.Dense(2)))
    ids = nd.array([[1, 69_999]])
    net(ids)
    assert amp.export_onnx(net, str(tmp_path / "a.onnx"), (1, 2), calibration=[ids]) == []
    net, data = chain(1, 1)
    kept = amp.export_onnx(net, str(tmp_path / "b.onnx"), (8, 16), calibration=[1e5 * data])
    assert kept == [layer.name + "_fwd" for layer in net]


def test_symbol_is_calibrated_on_batches_of_all_inputs(tmp_path):
    a, b = sym.var("a"), sym.var("b")
    big = sym.FullyConnected(sym.concat(a, b), num_hidden=4, no_bias=True, name="big")
    small = sym.FullyConnected(big, num_hidden=4, no_bias=True, name="small")
    symbol = sym.SoftmaxOutput(small, name="softmax")
    params = {"big_weight": nd.ones((4, 5)) * 1e5, "small_weight": nd.ones((4, 4)) * 1e-5}
    file, shapes = str(tmp_path / "net.onnx"), {"a": (2, 3), "b": (2, 2)}
    kept = amp.export_onnx(symbol, file, shapes, params=params,
                           calibration=[(np.ones((2, 3)), np.ones((2, 2)))])
    assert kept == ["big", "small"]
    found, = run(file, {n: np.ones(s, np.float32) for n, s in shapes.items()}).values()
    np.testing.assert_allclose(found, 0.25)


@pytest.mark.parametrize(("batches", "message"), [
    ([], "calibration holds no batch"),
    ([(np.ones((8, 16)), 1)], r"must be an array for each input: data\. Received: 2"),
    ([np.full((8, 16), np.nan)], "data is not finite in float32"),
    ([np.full((8, 16), 1e38)], r"dense\w* is not finite in float32")])
def test_useless_calibration_batches_are_refused(batches, message, tmp_path):
    net, _ = chain(1, 1e3)
    with pytest.raises(ValueError, match=message):
        amp.export_onnx(net, str(tmp_path / "net.onnx"), (8, 16), calibration=batches)
    with pytest.raises(ValueError, match="calibration is for float16 and bfloat16"):
        amp.export_onnx(net, str(tmp_path / "net.onnx"), (8, 16), "float32", calibration=batches)


# ---- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(("symbol", "said"), [
    (sym.topk(x, name="best"), r"cannot export best \(topk\)"),
    (sym.Convolution(x, kernel=(3, 3), num_filter=2, layout="NHWC", name="op"),
     r"op \(Convolution\): layout must be None or NCHW. Received: NHWC"),
    (sym.softmax(x, temperature=2.0, name="op"), r"op \(softmax\): temperature"),
    (sym.BatchNorm(x, axis=3, name="op"), r"op \(BatchNorm\): axis must be 1. Received: 3"),
    (sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type="avg", pooling_convention="full",
                 name="op"), r"op \(Pooling\): ONNX has no equivalent of an average"),
    (sym.Pooling(x, kernel=(3, 3), pool_type="lp", p_value=2, name="op"), r"pool_type must be max"),
    (sym.sum(x, axis=1, exclude=True, name="op"), r"op \(sum\): exclude"),
])
def test_unsupported_operators_are_refused_and_no_file_is_left(symbol, said, tmp_path):
    file = tmp_path / "net.onnx"
    params = parameters(symbol, (1, 6, 6, 4))
    with pytest.raises(ValueError, match=said):
        amp.export_onnx(symbol, str(file), (1, 6, 6, 4), "float32", params=params)
    assert list(tmp_path.iterdir()) == []


def test_numpy_mode_networks_are_exported_or_refused_by_name(tmp_path):
    mx.npx.set_np()
    try:
        net = ready(sequence(nn.Dense(8, activation="relu"), nn.Dense(3)))
        data = mx.np.random.normal(size=(4, 5))
        net(data)
        expected = amp.convert(net)(data).asnumpy()
        amp.export_onnx(net, str(tmp_path / "net.onnx"), (4, 5))
        net.add(nn.HybridLambda(lambda F, x: F.np.sinh(x)))
        with pytest.raises(ValueError, match=r"cannot export .* \(_npi_sinh\)"):
            amp.export_onnx(net, str(tmp_path / "no.onnx"), (4, 5))
        data = data.asnumpy()
    finally:
        mx.npx.reset_np()
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    np.testing.assert_allclose(session.run(None, {"data": data})[0], expected, rtol=2 ** -9,
                               atol=2 ** -9)
    assert len(list(tmp_path.iterdir())) == 1


def test_wrong_calls_are_refused(tmp_path):
    net = nn.Dense(2)
    file = str(tmp_path / "net.onnx")
    net.initialize()
    with pytest.raises(RuntimeError, match=r"run dense\w+ on data once first"):
        amp.export_onnx(net, file, (1, 3))
    net(nd.ones((1, 3)))
    with pytest.raises(ValueError, match=r"dtype must be float16, bfloat16 or float32\. Rec"):
        amp.export_onnx(net, file, (1, 3), "int8")
    for shapes in ((0, 3), 3, {"data": 3}, [], (), [()], (True, 3)):
        with pytest.raises(ValueError, match=r"for each input: data.*\. Received: "
                                             + re.escape(repr(shapes))):
            amp.export_onnx(net, file, shapes)
    with pytest.raises(ValueError, match="params are for symbols"):
        amp.export_onnx(net, file, (1, 3), params={})
    with pytest.raises(TypeError, match=r"HybridBlock or a symbol\. Received: Sequential"):
        amp.export_onnx(nn.Sequential(), file, (1, 3))
    with pytest.raises(ValueError, match=r"missing fullyconnected\w*_weight"):
        amp.export_onnx(sym.FullyConnected(x, num_hidden=2), file, (1, 3))
    for params in (3, [{}], ["x", {}]):
        with pytest.raises(TypeError, match=r"must be a dict of arrays, or \(arg_params, a"):
            amp.export_onnx(sym.FullyConnected(x, num_hidden=2), file, (1, 3), params=params)
    converted = amp.convert_symbol(sym.FullyConnected(x, num_hidden=2, name="fc"))
    params = {"fc_weight": nd.ones((2, 3)), "fc_bias": nd.zeros(2)}
    with pytest.raises(ValueError, match=r"export the float32 symbol .*: fc_bias, fc_weight"):
        amp.export_onnx(converted, file, (1, 3), "float32", params=params)
    with pytest.raises(TypeError, match=r"calibration is an iterable of arrays.*Received: int"):
        amp.export_onnx(net, file, (1, 3), calibration=3)
    amp.convert(net, "mixed_bfloat16")
    with pytest.raises(ValueError, match=r"Valid: dtype='bfloat16' or 'float32', or .* float16 or"):
        amp.export_onnx(net, file, (1, 3))
    amp.export_onnx(net, file, (1, 3), "float32")


def test_attribute_not_read_by_rule_is_refused(tmp_path, monkeypatch):
    write = ROWS["clip"].write
    monkeypatch.setitem(ROWS, "clip", ROWS["clip"]._replace(
        write=lambda node: (write(node), node.unread.add("a_max"))[0]))
    with pytest.raises(ValueError, match=r"ONNX has no equivalent of its attribute a_max=1"):
        amp.export_onnx(sym.clip(x, 0, 1), str(tmp_path / "a"), (1, 3), "float32")


def test_tensor_with_wrong_shape_or_type_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(ROWS, "relu", ROWS["Flatten"]._replace(
        write=lambda node: node.reshape(node.input(0), (1, 4))))
    with pytest.raises(ValueError, match=r"it would be float32 \(1, 4\) there. Expected: float32"):
        amp.export_onnx(sym.reshape(sym.relu(x), (-1,)), str(tmp_path / "a"), (2, 2), "float32")
    with pytest.raises(ValueError, match="ONNX refuses the graph"):
        amp.export_onnx(sym.relu(x), str(tmp_path / "a"), (2, 2), "float32")


@pytest.mark.parametrize("shapes", [(4,), (4, 7), (None, 7)])
def test_shapes_of_another_network_are_refused(shapes, tmp_path):
    net = ready(nn.Dense(3, in_units=5))
    net(nd.ones((2, 5)))
    with pytest.raises(ValueError, match=r"dense.*Shape inconsistent"):
        amp.export_onnx(net, str(tmp_path / "net.onnx"), shapes)
