"""example/fine_tune.py and example/lr_find.py, as a user runs them."""
import re
import tempfile
from argparse import Namespace

import fine_tune
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
import scripts
from cases import cases
from mxnet import gluon, nd
from scripts import SHARED

pytestmark = pytest.mark.long

SMALL = ["--dataset", "dummy", "--image-size", "32", "--classes", "3", "--batch-size", "4",
         "--epochs", "1", "--dtype", "float16"]


def run(script, *arguments, **options):
    with tempfile.TemporaryDirectory() as folder:
        return "".join(reversed(scripts.run(script, *arguments, cwd=folder, **options)))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A small network of the model zoo: parameter files in both types, and an export."""
    folder = tmp_path_factory.mktemp("pretrained")
    net = gluon.model_zoo.vision.get_model("mobilenet0.25", classes=7)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net(nd.zeros((1, 3, 32, 32)))
    net.save_parameters(str(folder / "float32.params"))
    net.export(str(folder / "net"))
    arrays = mx.nd.load(str(folder / "float32.params"))
    mx.nd.save(str(folder / "float16.params"), {n: a.astype("float16") for n, a in arrays.items()})
    return folder


@pytest.mark.parametrize("kind", cases(["float32"], ["float16", "exported"]))
def test_fine_tuning_from_parameter_files_and_exported_networks(kind, pretrained):
    files = ["--pretrained-symbol", str(pretrained / "net-symbol.json"), "--pretrained-params",
             str(pretrained / "net-0000.params")] if kind == "exported" else \
        ["--pretrained", "mobilenet0.25", "--pretrained-params", str(pretrained / f"{kind}.params")]
    log = run("fine_tune.py", *files, *SMALL, "--freeze", "2", "--head-lr-mult", "5",
              "--bn-momentum", "0.5", new_process=kind == "exported")
    assert re.search(r"^before: err-top1=\d\.\d{6}", log, re.M)
    assert re.search(r"^\[Epoch 0\] validation: err-top1=\d\.\d{6} .*skipped=\d+$", log, re.M)


def test_pretrained_features_and_freezing_and_bn_momentum(pretrained):
    args = Namespace(
        pretrained_symbol=str(pretrained / "net-symbol.json"), pretrained="mobilenet0.25",
        pretrained_params=str(pretrained / "net-0000.params"), bn_momentum=0.5,
        layer_before_fullc=None, freeze=2)
    features = fine_tune.pretrained_features(args, [mx.cpu()])
    args.pretrained_symbol, args.pretrained_params = None, str(pretrained / "float16.params")
    other = fine_tune.pretrained_features(args, [mx.cpu()])
    x = nd.random.normal(shape=(2, 3, 32, 32))
    np.testing.assert_allclose(features(x).asnumpy(), other(x).asnumpy(), rtol=0.02, atol=1e-3)
    for net in (features, other):
        fine_tune.freeze(net, 2)
        trained = [n for n, p in net.collect_params().items() if p.grad_req == "null"
                   and "running" not in n]
        assert [re.sub(r".*?((conv|batchnorm)0_)", r"\1", n) for n in trained] == [
            "conv0_weight", "batchnorm0_gamma", "batchnorm0_beta"]
        statistic = next(p for n, p in net.collect_params().items() if n.endswith("running_mean"))
        before = statistic.data().asnumpy()
        amp.convert(net)
        with mx.autograd.record():
            net(x)
        mx.nd.waitall()
        assert np.array_equal(statistic.data().asnumpy(), before)


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "pass a network: --pretrained NAME, or --pretrained-symbol"),
    (["--pretrained", "resnet18_v1", "--pretrained-params", "nowhere"],
     "nowhere is not a file of parameters: "),
    (["--pretrained", "resnet18_v9"], "model zoo has resnet18_v9. Did you mean resnet18_v")])
def test_bad_arguments_are_one_line(arguments, message):
    assert message in run("fine_tune.py", *arguments, *SMALL, fails=True).splitlines()[-1]


def test_network_without_fully_connected_layer_is_refused_in_one_line(tmp_path):
    path = str(tmp_path / "net.params")
    mx.nd.save(path, {"arg:conv_weight": nd.ones((2, 3, 1, 1))})
    error = run("fine_tune.py", "--pretrained", "squeezenet1.1", "--pretrained-params", path,
                *SMALL, fails=True)
    assert f"{path} has no weight of a fully connected layer" in error.splitlines()[-1]


@pytest.mark.thorough
def test_lr_find_proposes_rate_and_draws_plot(tmp_path):
    log = run("lr_find.py", "--dtype", "float16", "--steps", "60", "--plot",
              str(tmp_path / "rates.png"), new_process=True)
    assert 1e-4 < float(re.search(r"proposed: (\S+)", log)[1]) < 1
    assert (tmp_path / "rates.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.thorough
@pytest.mark.skipif(not (SHARED / "models").is_dir(),
                    reason="needs cifar_resnet20_v1 in ../shared or $GLUON_AMP_DATA")
def test_gluoncv_network_is_fine_tuned_on_photos():
    log = run("fine_tune.py", "--pretrained", "cifar_resnet20_v1", "--pretrained-params",
              str(SHARED / "models" / "cifar_resnet20_v1-0000.params"),
              "--dataset", str(SHARED / "data" / "caltech10_128_train.rec"),
              "--val", str(SHARED / "data" / "caltech10_128_test.rec"), "--classes", "10",
              "--image-size", "32", "--dtype", "float16", "--bn-momentum", "0.8", "--epochs", "2")
    assert float(re.findall(r"validation: err-top1=(\S+)", log)[-1]) < 0.5
