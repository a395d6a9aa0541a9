"""Scripts of the Symbolic API, as a user runs them, with small images and a small checkpoint."""
import io
import json
import logging
import re
import sys
from pathlib import Path

import command_line
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
import scripts
from gluon_amp.reports import read_logs
from PIL import Image
from scripts import EXAMPLES, SHARED

sys.path.insert(0, str(EXAMPLES))
import train_imagenet

pytestmark = pytest.mark.long

SMALL = ["--num-layers", "20", "--image-shape", "3,32,32", "--num-classes", "4",
         "--batch-size", "20", "--lr", "0.05", "--disp-batches", "1", "--lr-step-epochs", ""]


def run(script, *arguments, fails=False, **options):
    """Runs the script and returns its log."""
    _, log = scripts.run(script, *arguments, fails=fails, **options)
    assert fails or "Traceback" not in log, log
    return log


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A RecordIO file of 40 images of 36 pixels, in four colors."""
    path = tmp_path_factory.mktemp("images") / "images.rec"
    record = mx.recordio.MXRecordIO(str(path), "w")
    rng = np.random.default_rng(0)
    for i in range(40):
        pixels = rng.integers(0, 100, (36, 36, 3), dtype=np.uint8)
        pixels[..., :3] += np.array([(0, 0, 0), (150, 0, 0), (0, 150, 0), (0, 0, 150)][i % 4],
                                    np.uint8)
        jpeg = io.BytesIO()
        Image.fromarray(pixels).save(jpeg, "JPEG")
        header = mx.recordio.IRHeader(0, i % 4, i, 0)
        record.write(mx.recordio.pack(header, jpeg.getvalue()))
    record.close()
    return str(path)


def train(images, *arguments, **kwargs):
    return run("train_imagenet.py", *SMALL, "--data-train", images, "--data-val", images,
               *arguments, **kwargs)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_train_imagenet_logs_in_format_of_mxnet_example(dtype, images, tmp_path):
    log = train(images, "--dtype", dtype, "--num-epochs", "2", "--top-k", "2", "--save-dir",
                str(tmp_path), new_process=dtype == "float16")
    ours, = read_logs([tmp_path / "log.jsonl"])  # for machines, with steps and losses
    assert ours.dtype == dtype
    assert list(ours.epochs) == [0, 1]
    assert all(0 < epoch.loss < 10 and epoch.validation_loss > 0 for epoch in ours.epochs.values())
    validated = re.findall(r"Validation-accuracy=(\S+)", log)
    assert [1 - epoch.top1 for epoch in ours.epochs.values()] == pytest.approx(
        [float(accuracy) for accuracy in validated], abs=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines if "batch" in line] == [0, 1, 0, 1]
    assert sum(line.get("skip", False) for line in lines) == log.count("step skipped")
    head = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ Node\[0\] "
    assert re.search(head + r"start with arguments Namespace\(.*dtype='" + dtype, log)
    speed = r"Epoch\[1\] Batch \[0-1\]\tSpeed: \d+\.\d\d samples/sec\taccuracy=\d\.\d{6}" \
            r"\ttop_k_accuracy_2=\d\.\d{6}"
    scale = r"\tloss-scale=\d+\.\d+\tskipped=\d+\.\d+" if dtype == "float16" else ""
    assert re.search(head + speed + scale + "\n", log), log
    for line in (r"Epoch\[1\] Train-accuracy=\d\.\d{6}", r"Epoch\[1\] Time cost=\d+\.\d{3}",
                 r"Epoch\[1\] Validation-accuracy=\d\.\d{6}"):
        assert re.search(head + line + "\n", log), log


def test_each_image_is_validated_once(images):
    batches = mx.io.ImageRecordIter(
        path_imgrec=images, data_shape=(3, 8, 8), batch_size=16, round_batch=False)
    for _ in range(2):
        labels = [batch.label[0].asnumpy()
                  for batch in train_imagenet.without_padding(batches, 40)]
        assert [len(label) for label in labels] == [16, 16, 8]
        assert sorted(np.concatenate(labels)) == sorted([0, 1, 2, 3] * 10)


def test_training_continues_from_checkpoint(images, tmp_path):
    options = ["--dtype", "float16", "--lr-step-epochs", "2", "--loss-scale", "64"]
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    train(images, *options, "--num-epochs", "3", "--model-prefix", whole)
    train(images, *options, "--num-epochs", "1", "--model-prefix", cut)
    train(images, *options, "--num-epochs", "3", "--model-prefix", cut, "--load-epoch", "1")
    unbroken, resumed = (mx.nd.load(f"{p}-0003.params") for p in (whole, cut))
    # A new process reads images in another order, so the results are not bitwise identical.
    assert set(unbroken) == set(resumed)
    assert all(np.isfinite(v.asnumpy()).all() for v in resumed.values())
    assert "_gluon_amp" not in Path(f"{cut}-symbol.json").read_text()


def test_epoch_with_incomplete_save_is_trained_again(tmp_path):
    prefix = str(tmp_path / "net")
    assert train_imagenet.last_whole_epoch(prefix) == 0
    for name in ("0001.params", "0001.states", "0002.params"):
        (tmp_path / f"net-{name}").write_bytes(b"")
    assert train_imagenet.last_whole_epoch(prefix) == 1
    (tmp_path / "net-0001.states").unlink()
    with pytest.raises(ValueError, match=r"net-0002\.states does not exist.*-epoch 2 continues"):
        train_imagenet.last_whole_epoch(prefix)


@pytest.mark.parametrize(("dtype", "scale"), [
    ("float32", "none"), ("float16", "64"), ("float16", "dynamic")])
def test_macrobatch_matches_large_batch(dtype, scale, rng, images, monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)  # global
    net = mx.sym.Convolution(mx.sym.var("data"), num_filter=8, kernel=(3, 3), name="conv")
    net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), num_hidden=4, name="fc")
    net = amp.convert_symbol(mx.sym.SoftmaxOutput(net, name="softmax"), dtype)
    shapes, _, _ = net.infer_shape(data=(1, 3, 6, 6))
    begin = {n: mx.nd.array(0.3 * rng.standard_normal(shape)) for n, shape in
             zip(net.list_arguments(), shapes) if n not in ("data", "softmax_label")}
    trained = []
    for size in ("20", "5"):
        parser = command_line.Parser("")
        train_imagenet.add_flags(parser)
        args = train_imagenet.parse_flags(parser, [
            "--data-train", images, "--image-shape", "3,6,6", "--num-classes", "4",
            "--rgb-std", "99", "--batch-size", size, "--macrobatch-size", "20", "--lr", "0.1",
            "--lr-step-epochs", "", "--wd", "0", "--loss-scale", scale, "--dtype", dtype,
            "--num-epochs", "3"])
        module = train_imagenet.fit(args, net, begin, {})
        assert module._optimizer.num_update == 3 * 40 / 20
        trained.append({n: w.asnumpy().astype("float32")
                        for n, w in module.get_params()[0].items()})
    tolerance = 1e-5 if dtype == "float32" else 4e-3
    for name, weight in trained[0].items():
        np.testing.assert_allclose(trained[1][name], weight, atol=tolerance, err_msg=name)
        assert np.abs(weight - begin[name].asnumpy()).max() > 10 * tolerance, name


def test_benchmark_needs_no_data_and_supports_xray(tmp_path):
    log = run("train_imagenet.py", *SMALL, "--benchmark", "1", "--num-examples", "60",
              "--num-epochs", "1", "--dtype", "float16", "--network", "resnet-v2",
              "--xray", str(tmp_path), "--xray-steps", "1")
    assert "Epoch[0] Train-accuracy=" in log
    assert "X-ray of epoch 0: " in log
    assert (tmp_path / "epoch-0" / "xray.html").exists()


@pytest.mark.parametrize(("arguments", "message"), [
    (["--data-train", "nowhere.rec"], "No such file or directory: 'nowhere.rec'"),
    (["--num-layers", "21"], "num_layers"),
    (["--macrobatch-size", "60"], "an epoch has 40 images, which is less"),
    (["--loss-scale", "big"], "takes auto, dynamic, none or a positive number. Received: 'big'"),
    (["--gpus", "0"], "--gpus 0: MXNet finds 0 GPUs"),
    (["--load-epoch", "3", "--model-prefix", "nowhere"],
     'Open "nowhere-symbol.json": No such file or directory'),
    (["--batch-size", "41"], "has 40 images, fewer than one batch of 41"),
    (["--gpus", "0,1,2"], "--batch-size 20 does not divide over 3 GPUs"),
    (["--num-classes", "3"], "has a label 3, and the network 3 classes, from 0 on"),
])
def test_bad_arguments_are_one_line(arguments, message, images):
    last = train(images, *arguments, fails=True).strip().splitlines()[-1]
    assert message in last


@pytest.mark.parametrize(("arguments", "message"), [
    (["--network", "rexnet"], "invalid choice: 'rexnet' (choose from "),
    (["--network", "mobilenet", "--num-layers", "20"],
     "mobilenet has no --num-layers. Valid: --multiplier"),
    (["--num-layers", "18", "--macrobatch-size", "50", "--batch-size", "20"],
     "--macrobatch-size must be a multiple of --batch-size 20"),
    (["--num-layers", "18", "--resume"], "--resume needs --model-prefix"),
    (["--num-layers", "18", "--load-epoch", "3"], "--load-epoch needs --model-prefix"),
    (["--num-layers", "18", "--load-epoch", "3", "--resume"], "--resume exclude each other")])
def test_unfit_flags_are_refused_before_data_is_read(arguments, message, capsys,
                                                               monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)
    with pytest.raises((SystemExit, ValueError)) as error:
        train_imagenet.main(["--data-train", "nowhere.rec", *arguments])
    assert message in f"{error.value}{capsys.readouterr().err}"


@pytest.mark.parametrize(("content", "message"), [
    (lambda b: b"", "is damaged: empty"),
    (lambda b: b[:-5], "is damaged: its last record is cut"),
    (lambda b: b[:4] + b"\xff" * 4 + b[8:], "is damaged: its last record is cut"),
    (lambda b: b"\x89PNG" + b, "is damaged: no record starts at byte 0")])
def test_damaged_record_file_is_refused_before_first_epoch(content, message, images,
                                                                 tmp_path):
    damaged = tmp_path / "damaged.rec"
    damaged.write_bytes(content(Path(images).read_bytes()))
    log = train(images, "--data-val", str(damaged), "--model-prefix", str(tmp_path / "net"),
                fails=True)
    assert re.search(message, log.strip().splitlines()[-1]), log
    assert "Epoch[0]" not in log
    assert list(tmp_path.iterdir()) == [damaged]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A checkpoint with "fc" in the names of layers of its body, too."""
    net = mx.sym.var("data")
    for i in range(2):
        net = mx.sym.Convolution(net, num_filter=8, kernel=(3, 3), name=f"fconv{i}")
        net = mx.sym.BatchNorm(net, name=f"bnfc{i}")
        net = mx.sym.Activation(net, act_type="relu", name=f"relu{i}")
    net = mx.sym.Flatten(mx.sym.Pooling(net, global_pool=True, pool_type="avg", kernel=(1, 1)))
    net = mx.sym.FullyConnected(net, num_hidden=16, name="fc_hidden")
    net = mx.sym.FullyConnected(net, num_hidden=7, name="fc_old")
    net = mx.sym.SoftmaxOutput(net, name="softmax")
    shapes, _, auxiliary = net.infer_shape(data=(1, 3, 32, 32))
    args = {n: mx.nd.random.normal(0, 0.3, s) for n, s in zip(net.list_arguments(), shapes)
            if n not in ("data", "softmax_label")}
    aux = {n: mx.nd.ones(s) for n, s in zip(net.list_auxiliary_states(), auxiliary)}
    prefix = str(tmp_path_factory.mktemp("pretrained") / "net")
    mx.model.save_checkpoint(prefix, 2, net, args, aux)
    return prefix


def fine_tune(pretrained, images, *arguments, **kwargs):
    return run("symbolic_fine_tune.py", "--pretrained-model", pretrained, "--num-classes", "4",
               "--image-shape", "3,32,32", "--batch-size", "20", "--data-train", images,
               "--num-epochs", "1", *arguments, **kwargs)


@pytest.mark.parametrize("options", [[], ["--freeze", "3"], ["--freeze", "9"],
                                     ["--layer-before-fullc", "fc_hidden_output"]])
def test_fine_tuning_keeps_body_and_replaces_head(options, pretrained, images,
                                                                  tmp_path):
    prefix = str(tmp_path / "tuned")
    fine_tune(f"{pretrained},2", images, "--dtype", "float16", "--model-prefix", prefix,
              "--bn-momentum", "0.5", "--loss-scale", "64", *options, new_process=not options)
    before, after = mx.nd.load(f"{pretrained}-0002.params"), mx.nd.load(f"{prefix}-0001.params")
    assert set(before) - set(after) == {"arg:fc_old_weight", "arg:fc_old_bias"}
    assert set(after) - set(before) == {"arg:new_fc_weight", "arg:new_fc_bias"}
    assert after["arg:fc_hidden_weight"].dtype == np.float16
    frozen = {name for name in set(before) & set(after) if np.array_equal(
        after[name].asnumpy(), before[name].asnumpy().astype(after[name].dtype))}
    layers = ["fconv0", "bnfc0", "fconv1", "bnfc1", "fc_hidden"]
    count = int(options[1]) if options[:1] == ["--freeze"] else 0
    assert {layer for layer in layers if f"arg:{layer}_weight" in frozen
            or f"aux:{layer}_moving_mean" in frozen} == set(layers[:count])
    assert '"momentum": "0.5"' in Path(f"{prefix}-symbol.json").read_text()


def test_bad_checkpoints_and_heads_are_one_line(pretrained, images, tmp_path):
    def last(*args):
        return fine_tune(*args, fails=True).strip().splitlines()[-1]

    assert "nothing-symbol.json does not exist" in last("nothing", images)
    assert "net-0007.params does not exist" in last(f"{pretrained},7", images)
    assert "there is no layer fc_hiden. Similar: fc_hidden" in last(
        f"{pretrained},2", images, "--layer-before-fullc", "fc_hiden")
    symbol, args, aux = mx.model.load_checkpoint(pretrained, 2)
    del args["fconv1_weight"]
    mx.model.save_checkpoint(str(tmp_path / "less"), 0, symbol, args, aux)
    assert "less lacks parameters: fconv1_weight" in last(str(tmp_path / "less"), images)
    headless = mx.sym.Activation(mx.sym.var("data"), act_type="relu", name="only")
    mx.model.save_checkpoint(str(tmp_path / "headless"), 0, headless, {}, {})
    assert "no FullyConnected layer before its output" in last(str(tmp_path / "headless"), images)


@pytest.mark.thorough
@pytest.mark.skipif(not (SHARED / "models").is_dir(),
                    reason="needs efficientnet_lite0 in ../shared or $GLUON_AMP_DATA")
def test_efficientnet_fine_tunes_on_photos_in_float16():
    data = SHARED / "data"
    log = run("symbolic_fine_tune.py", "--dtype", "float16", "--num-classes", "10",
              "--pretrained-model", str(SHARED / "models" / "efficientnet_lite0"),
              "--image-shape", "3,112,112", "--rgb-mean", "127,127,127", "--rgb-std", "128,128,128",
              "--random-crop", "1", "--random-mirror", "1", "--bn-momentum", "0.8",
              "--num-epochs", "1", "--lr-step-epochs", "",
              "--data-train", str(data / "caltech10_128_train.rec"),
              "--data-val", str(data / "caltech10_128_test.rec"))
    assert float(re.findall(r"Validation-accuracy=(\d\.\d+)", log)[-1]) > 0.85  # of ten classes


def test_mxnet_example_flags_have_their_effects(images, tmp_path):
    prefix = str(tmp_path / "net")
    log = train(images, "--dtype", "float16", "--num-epochs", "2", "--save-period", "2", "--loss",
                "ce,nll", "--initializer", "msra", "--use-imagenet-data-augmentation", "1",
                "--warmup-epochs", "1", "--warmup-strategy", "constant", "--warmup-lr", "0.01",
                "--macrobatch-size", "40",
                "--model-prefix", prefix)
    for name in ("cross-entropy", "nll-loss"):
        assert re.search(rf"Epoch\[1\] Train-{name}=\d+\.\d{{6}}", log)
    assert sorted(path.name for path in tmp_path.glob("*.params")) == ["net-0002.params"]


def test_imagenet_augmentation_keeps_given_flags():
    parser = command_line.Parser("")
    train_imagenet.add_flags(parser)
    args = train_imagenet.parse_flags(parser, ["--use-imagenet-data-augmentation", "1",
                                         "--brightness", "0", "--random-mirror", "0"])
    assert (args.brightness, args.random_mirror) == (0, 0)
    assert (args.random_resized_crop, args.min_random_area, args.saturation) == (1, 0.08, 0.4)
    assert args.rgb_std == [58.393, 57.12, 57.375]
    args = train_imagenet.parse_flags(parser, ["--use-imagenet-data-augmentation", "1", "--rgb-std",
                                         "1,1,1"])
    assert args.rgb_std == [1, 1, 1]


def test_test_io_times_reading_alone(images):
    log = train(images, "--test-io", "1")
    assert re.search(r"Batch \[2\]\tSpeed: \d+\.\d\d samples/sec", log)
    assert "2 batches in" in log
    assert "Epoch[0]" not in log


def test_gradient_compression_is_refused_with_reason(images):
    last = train(images, "--gc-type", "2bit", fails=True).strip().splitlines()[-1]
    assert "MXNet cannot compress float16 gradients" in last
