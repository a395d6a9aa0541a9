"""Memory and work of a network in each policy, as reported by `gluon-amp doctor`."""
import re

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.cpu import library
from gluon_amp.policy import POLICIES
from gluon_amp.tools.doctor import describe, examine, fit_width
from gluon_amp.tools.footprint import footprint, load
from mxnet import gluon, nd
from mxnet.gluon import nn
from networks import ready
from trainers import recorded

BATCH = (8, 3, 4, 4)


def net():
    made = nn.HybridSequential(prefix="net_")
    with made.name_scope():
        made.add(nn.Conv2D(16, 3, padding=1, use_bias=False, in_channels=3),
                 nn.BatchNorm(in_channels=16), nn.Activation("relu"),
                 nn.Dense(10, in_units=256))
    return made


def costs(block, batch=BATCH):
    return footprint(block(mx.sym.var("data")), batch)


# A weight of 16x3x3x3 and one of 10x256 with its bias; of the norm gamma and beta, and two
# statistics.
WEIGHTS, TRAINED_OF_NORM, STATISTICS = 432 + 2570, 32, 32
# Of the convolution, the norm and the activation; of the dense layer; the batch.
IMAGES, OUTPUT, DATA = 3 * 8 * 16 * 4 * 4, 8 * 10, 8 * 3 * 4 * 4


@pytest.mark.parametrize(("policy", "parameters", "gradients", "masters", "activations"), [
    ("float32", 4 * (WEIGHTS + TRAINED_OF_NORM + STATISTICS), 4 * (WEIGHTS + TRAINED_OF_NORM), 0,
     4 * (IMAGES + OUTPUT)),
    ("float16", 2 * WEIGHTS + 4 * (TRAINED_OF_NORM + STATISTICS),
     2 * WEIGHTS + 4 * TRAINED_OF_NORM, 4 * WEIGHTS, 2 * (DATA + IMAGES + OUTPUT) + 4 * OUTPUT),
    ("mixed_float16", 4 * (WEIGHTS + TRAINED_OF_NORM + STATISTICS),
     4 * (WEIGHTS + TRAINED_OF_NORM), 0, 2 * (WEIGHTS + DATA + IMAGES + OUTPUT) + 4 * OUTPUT),
    ("pure_float16", 2 * WEIGHTS + 4 * (TRAINED_OF_NORM + STATISTICS),
     2 * WEIGHTS + 4 * TRAINED_OF_NORM, 4 * WEIGHTS, 2 * (DATA + IMAGES + OUTPUT)),
    ("mixed_bfloat16", 4 * (WEIGHTS + TRAINED_OF_NORM + STATISTICS),
     4 * (WEIGHTS + TRAINED_OF_NORM), 0, 2 * (WEIGHTS + DATA + IMAGES + OUTPUT) + 4 * OUTPUT),
])
def test_bytes_of_small_network(policy, parameters, gradients, masters, activations):
    assert costs(net())["bytes"][policy] == {
        "parameters": parameters, "gradients": gradients, "masters": masters,
        "activations": activations, "total": parameters + gradients + masters + activations}


@pytest.mark.parametrize("policy", list(POLICIES))
def test_bytes_match_those_of_training(policy):
    expected = costs(net())["bytes"][policy]
    made = ready(net())
    amp.convert(made, policy)
    trainer = amp.Trainer(made.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=1)
    trainer.backward(recorded(lambda: made(nd.ones(BATCH)).astype("float32").sum()))
    trainer.step(8)
    parameters = list(made.collect_params().values())
    assert sum(size(p.data()) for p in parameters) == expected["parameters"]
    assert sum(size(p.grad()) for p in parameters if p.grad_req != "null") == expected["gradients"]
    masters = [s for s in trainer._updaters[0].states.values() if s is not None]
    assert sum(size(a) for s in masters for a in s if a is not None) == expected["masters"]


def size(array):
    return array.size * np.dtype(array.dtype).itemsize


def test_layers_unfit_for_tensor_cores_are_named_with_share():
    made = nn.HybridSequential(prefix="net_")
    with made.name_scope():
        made.add(nn.Conv2D(16, 3, padding=1), nn.Conv2D(16, 3, padding=1), nn.Dense(10))
    found = costs(made)
    first, second, last = 8 * 16 * 16 * 27, 8 * 16 * 16 * 144, 8 * 10 * 256
    assert found["layers"] == 3
    assert found["multiply_adds"] == first + second + last
    assert found["off_tensor_cores"] == [
        {"name": "net_conv0_fwd", "sizes": [16, 3], "rows": None,
         "share": pytest.approx(first / (first + second + last))},
        {"name": "net_dense0_fwd", "sizes": [10, 256], "rows": 8,
         "share": pytest.approx(last / (first + second + last))}]
    assert found["share_off"] == pytest.approx((first + last) / (first + second + last))


def test_network_without_layers_has_no_work(tmp_path):
    found = costs(nn.Activation("relu"))
    assert (found["layers"], found["multiply_adds"], found["share_off"]) == (0, 0, 0)
    mx.sym.softmax(mx.sym.var("data")).save(str(tmp_path / "net-symbol.json"))
    text = describe(examine(str(tmp_path / "net-symbol.json")))
    assert "No convolutions and no fully connected layers" in text
    assert "fit Tensor Cores" not in text


def test_text_matches_json():
    facts = examine("resnet18_v1")
    text = describe(facts)
    assert "resnet18_v1, batches of 32x3x224x224: 21 layers, 58.1 billion multiply-adds" in text
    assert "1 layer, 6.5% of the work" in text
    (line,) = [line for line in text.splitlines() if "conv0_fwd" in line]
    assert "64 from 3 " in line
    assert line.endswith(" 6.5%")
    for policy, parts in facts["network"]["bytes"].items():
        row = [line.split()[1:] for line in text.splitlines() if line.startswith(f"{policy} ")]
        assert [f"{count / 1e6:.1f}" for count in parts.values()] in row
    # 11,689,512 parameters and 9,600 statistics
    assert facts["network"]["bytes"]["float32"]["parameters"] == 4 * (11_689_512 + 9_600)


def test_units_fit_small_network():
    text = describe(examine("mobilenet0.25", 1, (3, 32, 32)))
    assert re.search(r"28 layers, \d\.?\d* million multiply-adds", text), text
    assert "of float32's memory. In kB:" in text


def test_ten_layers_with_most_work_are_shown():
    text = describe(examine("mobilenet0.25", 8, (3, 32, 32)))
    shown = [line for line in text.splitlines() if "_fwd" in line]
    assert len(shown) == 10
    shares = [float(line.split()[-1].rstrip("%")) for line in shown]
    assert shares == sorted(shares, reverse=True)
    assert "  and 4 more" in text


def test_report_if_all_layers_fit_tensor_cores(tmp_path):
    made = nn.Dense(16, in_units=16)
    made(mx.sym.var("data")).save(str(tmp_path / "net.json"))
    text = describe(examine(str(tmp_path / "net.json"), 8, (16,)))
    assert "All of them fit Tensor Cores" in text
    assert "not multiples of 8" not in text


def test_exported_network_has_same_costs(tmp_path):
    made = ready(gluon.model_zoo.vision.squeezenet1_1(prefix="net_"))
    made.hybridize()
    made(nd.zeros((1, 3, 224, 224)))
    made.export(str(tmp_path / "net"))
    exported = footprint(load(str(tmp_path / "net-symbol.json")), (8, 3, 224, 224))
    assert exported == costs(made, (8, 3, 224, 224))


def test_labels_of_loss_head_are_no_parameters():
    body = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="fc")
    found = footprint(mx.sym.SoftmaxOutput(body, name="softmax"), (4, 16))["bytes"]
    assert found["float16"]["parameters"] == 2 * (8 * 16 + 8)
    assert found["float32"]["activations"] == 4 * 2 * 4 * 8


@pytest.mark.parametrize(("symbol", "message"), [
    (lambda: mx.sym.FullyConnected(mx.sym.var("words"), num_hidden=8, name="fc"),
     "must be called data. Received: inputs words, fc_weight, fc_bias"),
    (lambda: mx.sym.broadcast_add(mx.sym.var("data"), mx.sym.var("extra")), "unknown: extra"),
    (lambda: amp.convert_symbol(net()(mx.sym.var("data"))), "is float16 already"),
    (lambda: nn.MaxPool2D(9)(mx.sym.var("data")),
     r"does not take a batch of \(8, 3, 4, 4\): Error in operator .*fwd: kernel size"),
])
def test_networks_of_unknown_cost_are_refused(symbol, message):
    with pytest.raises(ValueError, match=message):
        footprint(symbol(), BATCH)


def test_unknown_model_lists_valid_ones():
    with pytest.raises(ValueError, match=r"NAME-symbol\.json.* alexnet, .*resnet50_v1.*"
                                         r"Received: resnet19"):
        load("resnet19")


def test_file_that_is_no_symbol_is_named(tmp_path):
    for content in (b"{}", b"no json", b"", b"\xff\x00"):
        tmp_path.joinpath("net.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot read this .*Received: .*net\.json"):
            load(str(tmp_path / "net.json"))


def test_operators_in_float32_due_to_constants_are_named():
    dense = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="dense")
    small = dense + 1e-12
    assert footprint(small, (8, 8))["constants"] == [small.name]
    assert footprint(dense, (8, 8))["constants"] == []


def test_text_fits_80_columns_without_losing_words():
    text = describe(examine("mobilenet1.0", 20))
    fitted = fit_width(text)
    paths = [str(library.PATH)]  # cannot be broken
    assert [line for line in fitted.splitlines()
            if len(line) > 80 and line.strip() not in paths] == []
    assert fitted.split() == text.split()
    assert "depthwise convolutions: they have no matrix product" in text


def test_mistyped_network_suggests_correct_name():
    with pytest.raises(ValueError, match=r"Received: resnet18v1\. Did you mean resnet18_v1"):
        examine("resnet18v1")
