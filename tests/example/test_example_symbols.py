"""Networks of the examples: parameter counts, and that casts written by hand match those of
convert_symbol."""
import sys
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from cases import cases
from gluon_amp.graph.graph import Graph

sys.path.insert(0, str(Path(__file__).parents[2] / "example"))
import symbols
from symbols import (
    alexnet,
    inception,
    layers,
    lstm,
    mobilenet,
    mobilenetv2,
    resnet,
    resnext,
    squeezenet,
    vgg,
)

BATCH = 2
IMAGE, SMALL, LARGER = (3, 64, 64), (3, 32, 32), (3, 139, 139)
NETWORKS = {
    "resnet18": (resnet, IMAGE, {"num_layers": 18, "image_shape": "3,64,64"}),
    "resnet18_v2": (resnet, IMAGE, {"num_layers": 18, "image_shape": "3,64,64", "version": 2}),
    "resnet50": (resnet, IMAGE, {"num_layers": 50, "image_shape": "3,64,64"}),
    "resnet50_v2": (resnet, IMAGE, {"num_layers": 50, "image_shape": "3,64,64", "version": 2}),
    "resnet20": (resnet, SMALL, {"num_layers": 20, "image_shape": "3,32,32"}),
    "resnet20_v2": (resnet, SMALL, {"num_layers": 20, "image_shape": "3,32,32", "version": 2}),
    "resnext50": (resnext, IMAGE, {"num_layers": 50}),
    "mobilenet0.25": (mobilenet, IMAGE, {"multiplier": 0.25}),
    "mobilenetv2_0.35": (mobilenetv2, IMAGE, {"multiplier": 0.35}),
    "alexnet": (alexnet, IMAGE, {}),
    "vgg11": (vgg, SMALL, {"num_layers": 11}),
    "vgg11_bn": (vgg, IMAGE, {"num_layers": 11, "batch_norm": True}),
    "squeezenet1.0": (squeezenet, SMALL, {"version": "1.0"}),
    "squeezenet1.1": (squeezenet, SMALL, {}),
    "googlenet": (inception, IMAGE, {"version": "googlenet"}),
    "inception-bn": (inception, IMAGE, {"version": "bn"}),
    "inception-v3": (inception, LARGER, {}),
    "lstm": (lstm, (7,), {"hidden": 16, "layers": 2, "seq_len": 7}),
    "lstm_vocab": (lstm, (7,), {"vocab": 3000, "hidden": 16, "layers": 1, "seq_len": 7}),
}
# Their layers are those of other networks.
ALIKE = {"resnet18", "resnet18_v2", "resnet20", "vgg11_bn", "squeezenet1.0", "googlenet"}
CLASSES = 10


def make(name, dtype):
    module, _, options = NETWORKS[name]
    return module.get_symbol(CLASSES, dtype=dtype, **options)


def shapes(symbol, data):
    """The shapes of the parameters."""
    known, _, _ = symbol.infer_shape(data=data)
    return {name: shape for name, shape in zip(symbol.list_arguments(), known)
            if name not in ("data", "softmax_label")}


def count(symbol, data):
    return sum(int(np.prod(shape)) for shape in shapes(symbol, data).values())


def operators(symbol, op):
    return [node for node in Graph.read(symbol).nodes() if node.op == op]


# ---- the architectures

@pytest.mark.parametrize(("layers", "version", "parameters"), [
    # as published with torchvision's weights (version 1) and Gluon's model zoo (version 2)
    (18, 1, 11_689_512), (34, 1, 21_797_672), (50, 1, 25_557_032), (101, 1, 44_549_160),
    (152, 1, 60_192_808),
    (18, 2, 11_687_854), (34, 2, 21_796_014), (50, 2, 25_549_486), (101, 2, 44_541_614),
    (152, 2, 60_185_262)])
def test_imagenet_resnet_has_published_number_of_parameters(layers, version, parameters):
    symbol = resnet.get_symbol(1000, layers, version=version)
    assert count(symbol, (1, 3, 224, 224)) == parameters
    main = [n for n in operators(symbol, "Convolution") if not n.name.endswith("_shortcut")]
    assert len(main) + 1 == layers


@pytest.mark.parametrize(("layers", "version", "parameters"), [
    # by the formula of the paper, with parameters in the shortcuts
    (20, 1, 272_474), (20, 2, 272_288), (56, 1, 855_770), (110, 1, 1_730_714),
    (110, 2, 1_730_528)])
def test_cifar_resnet_has_its_number_of_parameters(layers, version, parameters):
    symbol = resnet.get_symbol(10, layers, "3,32,32", version)
    assert count(symbol, (1, 3, 32, 32)) == parameters


def test_lstm_has_its_number_of_parameters():
    vocab, hidden, classes, layers = 1000, 24, 50, 2
    symbol = lstm.get_symbol(classes, vocab, hidden, layers, seq_len=5)
    one = 4 * hidden * (hidden + hidden + 2)
    assert count(symbol, (3, 5)) == vocab * hidden + layers * one + hidden * classes + classes


@pytest.mark.parametrize(("multiplier", "parameters"), [
    (1.0, 4_231_976), (0.75, 2_585_560), (0.5, 1_331_592), (0.25, 470_072)])
def test_mobilenet_has_published_number_of_parameters(multiplier, parameters):
    assert count(mobilenet.get_symbol(1000, multiplier), (1, 3, 224, 224)) == parameters


@pytest.mark.parametrize(("network", "options", "parameters"), [
    # of MXNet's model zoo
    ("alexnet", {}, 61_100_840),
    ("vgg", {"num_layers": 11}, 132_863_336), ("vgg", {"num_layers": 13}, 133_047_848),
    ("vgg", {"num_layers": 16}, 138_357_544), ("vgg", {"num_layers": 19}, 143_667_240),
    ("vgg", {"num_layers": 11, "batch_norm": True}, 132_868_840),
    ("vgg", {"num_layers": 19, "batch_norm": True}, 143_678_248),
    ("squeezenet1.0", {}, 1_248_424), ("squeezenet1.1", {}, 1_235_496),
    ("inception-v3", {}, 23_834_568),
    # of gluoncv's, and torchvision's
    ("resnext", {}, 25_028_904), ("resnext", {"num_layers": 101}, 44_177_704),
    ("resnext", {"num_layers": 101, "num_group": 64}, 83_455_272),
    ("resnext", {"num_layers": 101, "group_width": 8}, 88_791_336),
    # of Caffe's: of the second, convolutions have biases besides, one for each filter
    ("googlenet", {}, 6_998_552), ("inception-bn", {}, 11_295_240 - 10_016),
    # of Keras': with the moving averages, two for each channel of a norm
    ("mobilenetv2", {}, 3_538_984 - 2 * 17_056),
    ("mobilenetv2", {"multiplier": 0.5}, 1_987_224 - 2 * 9_272)])
def test_network_has_published_number_of_parameters(network, options, parameters):
    size = 299 if network == "inception-v3" else 224
    symbol = symbols.get_symbol(network, 1000, f"3,{size},{size}", "float32", **options)
    assert count(symbol, (1, 3, size, size)) == parameters


@pytest.mark.parametrize("network", symbols.NETWORKS)
def test_every_network_supports_other_numbers_of_classes(network):
    symbol = symbols.get_symbol(network, 7, "3,224,224", "float16", num_layers=None)
    assert symbol.infer_shape(data=(2, 3, 224, 224))[1] == [(2, 7)]


@pytest.mark.parametrize("height", [32, 33])
def test_image_size_selects_resnet_variant(height):
    wanted = {32: [64, 8], 33: [512, 2]}[height]  # channels and size before the pooling
    symbol = resnet.get_symbol(10, 20 if height == 32 else 18, f"3,{height},{height}")
    inside = symbol.get_internals()[f"stage{3 if height == 32 else 4}_unit2_relu_output"]
    assert inside.infer_shape(data=(1, 3, height, height))[1][0] == (1, *wanted, wanted[-1])


# ---- the casts

@pytest.fixture
def smaller(monkeypatch):
    """Shrinks large networks to one unit in each stage, or an eighth of the filters, on which types
    do not depend."""
    def conv(net, filters, *args, **kwargs):
        return layers.conv(net, max(8, filters // 8), *args, **kwargs)

    for module in (alexnet, inception, vgg):
        monkeypatch.setattr(module, "conv", conv)
    for module in (resnet, resnext):
        monkeypatch.setitem(module.UNITS, 50, (1, 1, 1, 1))
    monkeypatch.setattr(layers, "HIDDEN", 32)


@pytest.mark.parametrize("name", NETWORKS)
def test_types_differ_only_in_casts(name):
    wide, half = make(name, "float32"), make(name, "float16")
    assert operators(wide, "Cast") == []
    casts = [node.attrs["dtype"] for node in operators(half, "Cast")]
    assert casts == ["float32"] if "lstm" in name else ["float16", "float32"]
    assert half.list_arguments() == wide.list_arguments()
    assert half.list_auxiliary_states() == wide.list_auxiliary_states()
    assert half.list_outputs() == wide.list_outputs() == ["softmax_output"]
    rest = [[(n.op, n.name, {k: v for k, v in n.attrs.items() if k != "dtype"})
             for n in Graph.read(symbol).nodes() if n.op != "Cast"] for symbol in (wide, half)]
    assert rest[0] == rest[1]


def draw(rng, name, shape):
    """Values for a parameter that preserve the size of activations."""
    scale = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0.1
    return mx.nd.array(scale * rng.standard_normal(shape) + name.endswith("gamma"))


def run(symbol, name, arguments, auxiliary, data, label):
    """Outputs in training and in prediction, all gradients, and the statistics of the norms."""
    image = "lstm" not in name
    module = amp.Module(symbol, context=mx.cpu())
    module.bind([("data", data.shape)], [("softmax_label", label.shape)], inputs_need_grad=image)
    module.init_params(arg_params=arguments, aux_params=auxiliary)
    batch = mx.io.DataBatch([data], [label])
    module.forward(batch, is_train=False)
    found = {"predicted": module.get_outputs()[0].copy()}
    mx.nd.waitall()  # MXNet's executors apply is_train of the next call while they run
    mx.random.seed(1)  # for dropout
    module.forward_backward(batch)
    mx.nd.waitall()  # MXNet's norms write their statistics without a dependency in its engine
    executor = module._exec_group.execs[0]
    found.update(trained=module.get_outputs()[0], **executor.aux_dict,
                 **{f"{n}_grad": g.copy() for n, g in executor.grad_dict.items() if g is not None})
    module.init_optimizer(optimizer_params={"learning_rate": 0.1})
    module.update()
    found.update({f"{n}_updated": a for n, a in executor.arg_dict.items() if f"{n}_grad" in found})
    return {n: (a.dtype, a.asnumpy()) for n, a in found.items()}


@pytest.mark.parametrize("name", cases([name for name in NETWORKS if name not in ALIKE],
                                       sorted(ALIKE)))
def test_hand_written_casts_match_convert_symbol_bitwise(name, rng, smaller):
    wide = make(name, "float32")
    _, size, options = NETWORKS[name]
    words = options.get("vocab", CLASSES)
    data = rng.integers(0, words, (BATCH, *size)) if "lstm" in name else \
        rng.standard_normal((BATCH, *size))
    label = rng.integers(0, CLASSES, (BATCH, *size) if "lstm" in name else BATCH)
    data, label = mx.nd.array(data, dtype="float32"), mx.nd.array(label, dtype="float32")
    arguments = {n: draw(rng, n, shape) for n, shape in shapes(wide, data.shape).items()}
    _, _, states = wide.infer_shape(data=data.shape)
    auxiliary = {n: mx.nd.full(shape, float(n.endswith("var")))
                 for n, shape in zip(wide.list_auxiliary_states(), states)}

    hand = run(make(name, "float16"), name, arguments, auxiliary, data, label)
    converted = run(amp.convert_symbol(wide), name, arguments, auxiliary, data, label)
    float32 = run(wide, name, arguments, auxiliary, data, label)
    assert hand.keys() == converted.keys() == float32.keys()
    for key, (dtype, array) in hand.items():
        assert dtype == converted[key][0], key
        np.testing.assert_array_equal(array, converted[key][1], err_msg=key)
        assert np.isfinite(array).all(), key
        assert np.any(array) or key == "data_bn_gamma_grad", key  # which is fixed
    head = "conv10" if "squeeze" in name else "fc"
    assert hand[f"{head}_weight_grad"][0] is np.float16
    assert hand["trained"][0] is np.float32
    for key in ("predicted", "trained"):
        np.testing.assert_allclose(hand[key][1], float32[key][1], atol=0.03, err_msg=key)


# ---- refused arguments

@pytest.mark.parametrize(("module", "bad", "message"), [
    (resnet, {"num_layers": 20},
     "num_layers for images of 3,224,224. Valid: 18, 34, 50, 101, 152. Received: 20"),
    (resnet, {"num_layers": 18, "image_shape": "3,28,28"},
     "num_layers for images of 3,28,28. Valid: 20, 32, 44, 56, 110. Received: 18"),
    (resnet, {"version": 3}, "version. Valid: 1, 2. Received: 3"),
    (resnet, {"dtype": "bfloat16"}, "dtype. Valid: float32, float16. Received: 'bfloat16'"),
    (mobilenet, {"dtype": "half"}, "dtype. Valid: float32, float16. Received: 'half'"),
    (mobilenet, {"multiplier": 0}, "multiplier. Valid: numbers above 0. Received: 0"),
    (vgg, {"num_layers": 50}, "num_layers. Valid: 11, 13, 16, 19. Received: 50"),
    (resnext, {"num_layers": 18}, "num_layers. Valid: 50, 101, 152. Received: 18"),
    (squeezenet, {"version": "2"}, "version. Valid: 1.0, 1.1. Received: '2'"),
    (inception, {"version": "v4"}, "version. Valid: googlenet, bn, v3. Received: 'v4'"),
    (mobilenetv2, {"multiplier": -1}, "multiplier. Valid: numbers above 0. Received: -1"),
    (lstm, {"dtype": None}, "dtype. Valid: float32, float16. Received: None")])
def test_bad_arguments_are_refused_with_valid_ones(module, bad, message):
    with pytest.raises(ValueError, match="Valid") as error:
        module.get_symbol(10, **bad)
    assert message in str(error.value)


@pytest.mark.parametrize(("network", "flags", "message"), [
    ("alexnet", {"num_layers": 50}, "alexnet has no --num-layers. Valid: none"),
    ("mobilenet", {"num_layers": 50}, "mobilenet has no --num-layers. Valid: --multiplier"),
    ("resnet", {"multiplier": 0.5}, "resnet has no --multiplier. Valid: --num-layers"),
    ("resnet", {"batch_norm": True}, "resnet has no --batch-norm. Valid: --num-layers")])
def test_flag_of_another_network_is_refused(network, flags, message):
    flags = {"num_layers": None, "multiplier": None, "batch_norm": None, **flags}
    with pytest.raises(ValueError, match="Valid") as error:
        symbols.get_symbol(network, 10, "3,224,224", "float32", **flags)
    assert str(error.value) == message
