"""`gluon-amp doctor --model`: layers whose channels do not fit Tensor Cores."""
import mxnet as mx
import pytest
from gluon_amp.tools.doctor import examine
from gluon_amp.tools.layers import layers_of, load
from mxnet import gluon, nd
from mxnet.gluon import nn
from networks import ready


def test_layers_are_listed_with_their_share_of_the_work():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1), nn.Conv2D(16, 3, padding=1), nn.Dense(10))
    works = {"net_conv0_fwd": 16 * 16 * 27, "net_conv1_fwd": 16 * 16 * 144,
             "net_dense0_fwd": 10 * 256}
    layers = layers_of(net(mx.sym.var("data")), (1, 3, 4, 4))
    assert [(layer.name, layer.outputs, layer.inputs, layer.fits) for layer in layers] == [
        ("net_conv1_fwd", 16, 16, True), ("net_conv0_fwd", 16, 3, False),
        ("net_dense0_fwd", 10, 256, False)]
    assert [layer.share for layer in layers] == pytest.approx(
        [works[layer.name] / sum(works.values()) for layer in layers])


@pytest.mark.parametrize(("block", "shape", "expected"), [
    (lambda: nn.Conv2D(16, 3, groups=2, in_channels=8), (2, 8, 6, 6), (8, 4, False)),
    (lambda: nn.Conv2D(16, 3, in_channels=8, layout="NHWC"), (2, 6, 6, 8), (16, 8, True)),
    (lambda: nn.Conv2D(16, 3, groups=16, in_channels=16), (2, 16, 6, 6), (1, 1, False)),
    (lambda: nn.Conv2DTranspose(8, 4, 2, 1, in_channels=16), (1, 16, 4, 4), (8, 16, True)),
    (lambda: nn.Dense(32, in_units=16), (8, 16), (32, 16, True)),
    (lambda: nn.Dense(32, in_units=16, flatten=False), (2, 4, 16), (32, 16, True))])
def test_channels_are_those_of_a_group(block, shape, expected):
    (layer,) = layers_of(block()(mx.sym.var("data")), shape)
    assert (layer.outputs, layer.inputs, layer.fits) == expected


def test_transposed_convolution_has_the_work_of_its_input():
    net = nn.HybridSequential()
    net.add(nn.Conv2DTranspose(8, 4, 2, 1, in_channels=16), nn.Conv2D(8, 3, in_channels=8))
    transposed, plain = 4 * 4 * 16 * 8 * 16, 6 * 6 * 8 * 8 * 9
    shares = {layer.inputs: layer.share for layer in layers_of(net(mx.sym.var("data")),
                                                               (1, 16, 4, 4))}
    assert shares[16] / shares[8] == pytest.approx(transposed / plain)


def test_report_lists_ten_layers_with_most_work():
    lines = examine("mobilenet0.25", (3, 32, 32))[1].splitlines()
    shares = [float(line.split()[-4].rstrip("%")) for line in lines if "_fwd" in line]
    assert len(shares) == 10
    assert shares == sorted(shares, reverse=True)
    assert "  and 4 more" in lines
    assert any("depthwise convolutions" in line for line in lines)


def test_report_if_all_layers_fit_tensor_cores(tmp_path):
    nn.Dense(16, in_units=16)(mx.sym.var("data")).save(str(tmp_path / "net.json"))
    text = examine(str(tmp_path / "net.json"), (16,))[1]
    assert "1 layer, which fit Tensor Cores" in text
    assert "not multiples of 8" not in text
    mx.sym.softmax(mx.sym.var("data")).save(str(tmp_path / "net.json"))
    assert "0 layers" in examine(str(tmp_path / "net.json"))[1]


def test_exported_network_has_same_layers(tmp_path):
    net = ready(gluon.model_zoo.vision.squeezenet1_1(prefix="net_"))
    net.hybridize()
    net(nd.zeros((1, 3, 224, 224)))
    net.export(str(tmp_path / "net"))
    assert layers_of(load(str(tmp_path / "net-symbol.json")), (1, 3, 224, 224)) == layers_of(
        net(mx.sym.var("data")), (1, 3, 224, 224))


@pytest.mark.parametrize(("symbol", "message"), [
    (lambda: mx.sym.FullyConnected(mx.sym.var("words"), num_hidden=8, name="fc"),
     "must be called data. Received: inputs words, fc_weight, fc_bias"),
    (lambda: mx.sym.FullyConnected(mx.sym.broadcast_add(mx.sym.var("data"), mx.sym.var("extra")),
                                   num_hidden=8, name="fc"), "shapes of fc do not follow"),
    (lambda: nn.MaxPool2D(9)(mx.sym.var("data")),
     r"does not take a batch of \(8, 3, 4, 4\): Error in operator .*fwd: kernel size"),
])
def test_networks_of_unknown_shapes_are_refused(symbol, message):
    with pytest.raises(ValueError, match=message):
        layers_of(symbol(), (8, 3, 4, 4))


def test_unknown_model_lists_valid_ones():
    with pytest.raises(ValueError, match=r"NAME-symbol\.json.* alexnet, .*resnet50_v1.*"
                                         r"Received: resnet18v1\. Did you mean resnet18_v1"):
        load("resnet18v1")


def test_file_that_is_no_symbol_is_named(tmp_path):
    for content in (b"{}", b"no json", b"", b"\xff\x00"):
        tmp_path.joinpath("net.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot read this .*Received: .*net\.json"):
            load(str(tmp_path / "net.json"))
