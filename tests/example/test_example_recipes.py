"""The recipes for a language model and for detection train, in each type; logs of gradients."""
import json
import logging
import re

import command_line
import gluon_amp as amp
import image_classification
import language_model
import mxnet as mx
import numpy as np
import object_detection
import pytest
import train_imagenet
from arrays import same
from cases import cases
from traces import at_most_traces

SMALL = ("--layers 1 --width 32 --length 32 --batch-size 16 --steps 60 --warmup 5 --lr 0.01 "
         "--log-interval 10 --characters 20").split()
QUICK = ("--width 8 --batch-size 16 --steps 60 --log-interval 20 --validation-images 16").split()


def losses(out):
    return [float(loss) for loss in re.findall(r" loss=(\S+)", out)]


@pytest.mark.parametrize("dtype", cases(["bfloat16"], ["float32", "float16"]))
def test_language_model_learns_next_character(dtype, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    file = tmp_path / "net.params"
    with at_most_traces(2):  # of training and of prediction
        language_model.main(["--text", str(text), "--dtype", dtype, "--save", str(file), *SMALL])
    out = capsys.readouterr().out
    first, *_, last = losses(out)
    assert last < first / 3
    assert float(re.findall(r"validation-loss=(\S+)", out)[-1]) < first / 3
    assert file.exists()
    written = out.split("ms/step\n")[-1].rstrip("\n")
    assert len(written) <= 20
    assert set(written) <= set(text.read_text())


def test_file_that_cannot_be_saved_is_refused_before_the_training(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none" / "net.params"):
        with pytest.raises(SystemExit):
            language_model.main(["--save", str(path), *SMALL])
        assert "--save: must be a file in a folder that exists" in capsys.readouterr().err


def test_log_interval_does_not_change_the_training(tmp_path):
    parameters = []
    for interval in ("3", "20"):
        path = str(tmp_path / interval)
        language_model.main(["--save", path, *SMALL, "--steps", "10", "--log-interval", interval])
        parameters.append({name: array.asnumpy() for name, array in mx.nd.load(path).items()})
    assert same(*parameters)


def test_language_model_defaults_to_text_of_python_help(capsys):
    language_model.main([*SMALL, "--steps", "2", "--characters", "0"])
    assert int(capsys.readouterr().out.split()[0]) > 100_000


@pytest.mark.parametrize("dtype", cases(["float16"], ["float32", "bfloat16"]))
def test_detector_learns_to_find_objects(dtype, tmp_path, capsys):
    file = tmp_path / "net.params"
    with at_most_traces(2):  # of training and of prediction
        object_detection.main(["--dtype", dtype, "--save", str(file), *QUICK])
    out = capsys.readouterr().out
    first, *_, last = losses(out)
    assert last < first / 1.5
    assert 0 < float(re.search(r"mAP@0.5=(\S+)", out)[1]) <= 1
    assert file.exists()


def test_boxes_match_their_objects():
    images, labels = object_detection.draw(np.random.RandomState(0), 8, 64)
    for image, label in zip(images, labels):
        boxes = label[label[:, 0] >= 0, 1:]
        assert 1 <= len(boxes) <= object_detection.MAX_OBJECTS
        inside = np.zeros((64, 64), bool)
        for left, top, right, bottom in np.round(boxes * 64).astype(int):
            assert 0 <= left < right <= 64
            assert 0 <= top < bottom <= 64
            inside[top:bottom, left:right] = True
        assert np.abs(image[:, inside]).mean() > 1.5 * np.abs(image[:, ~inside]).mean()


def test_average_precision_is_area_under_precision_recall_curve():
    labels = np.array([[[0, 0, 0, .5, .5], [0, .5, .5, 1, 1]], [[1, 0, 0, 1, 1], [-1] * 5]])
    right, wrong = [0, .9, 0, 0, .5, .5], [0, .8, 0, .5, .5, 1]
    late, twice = [0, .7, .5, .5, 1, 1], [0, .6, .5, .5, 1, 1]

    def precision(*first):
        return object_detection.average_precision([np.array(first), np.empty((0, 6))], labels, 0)

    assert precision(right, late) == 1
    assert precision(right, wrong, late) == pytest.approx(1 / 2 + 1 / 2 * 2 / 3)
    assert precision(right, late, twice) == 1
    assert precision(wrong) == 0
    assert object_detection.average_precision([np.empty((0, 6))] * 2, labels, 1) == 0
    assert np.isnan(object_detection.average_precision([np.empty((0, 6))] * 2, labels, 2))


@pytest.mark.parametrize(("main", "flags", "message"), [
    (language_model.main, "--heads 3", "--width must be a multiple of --heads 3. Received: 128"),
    (language_model.main, "--text {empty}", "--text is too short: a tenth of it must have more"),
    (language_model.main, "--gpus 0,1", "--gpus: this script uses one GPU"),
    (object_detection.main, "--image-size 50", "--image-size must be a multiple of 16. Rec"),
    (object_detection.main, "--gpus 0,1", "--gpus: this script uses one GPU")])
def test_invalid_flag_is_one_line(main, flags, message, tmp_path, capsys):
    (tmp_path / "empty").write_text("a text")
    with pytest.raises(SystemExit):
        main(flags.format(empty=tmp_path / "empty").split())
    line, = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("batches", [1, 2])
def test_log_has_norms_of_unscaled_gradients_while_scale_changes(batches, rng, tmp_path,
                                                                 monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)  # global
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    net = amp.convert_symbol(mx.sym.SoftmaxOutput(net, name="softmax"), "float16")
    weights = {"fc_weight": mx.nd.array(0.5 * rng.standard_normal((3, 6))),
               "fc_bias": mx.nd.zeros(3)}
    norms = []
    for loss_scale in ("1", "dynamic"):
        parser = command_line.Parser("")
        train_imagenet.add_flags(parser)
        args = train_imagenet.parse_flags(parser, [
            "--benchmark", "1", "--num-examples", "16", "--image-shape", "1,2,3", "--num-classes",
            "3", "--batch-size", "4", "--macrobatch-size", str(4 * batches), "--num-epochs", "1",
            "--disp-batches", "1", "--loss-scale", loss_scale, "--save-dir",
            str(tmp_path / loss_scale)])
        train_imagenet.fit(args, net, weights, {})
        lines = amp.reports.Log.read(tmp_path / loss_scale / "log.jsonl")[1]
        norms.append([line["gradient_norm"] for line in lines if "batch" in line])
    assert lines[-1]["loss_scale"] != 1
    assert len(norms[0]) == 4 // batches
    np.testing.assert_allclose(norms[1], norms[0], rtol=5e-3)


@pytest.mark.thorough
def test_first_gradient_norm_is_unscaled(tmp_path):
    first = []
    for scale in ("1", "dynamic"):
        folder = tmp_path / scale
        image_classification.main(["--dtype", "float16", "--loss-scale", scale, "--epochs", "1",
                                   "--log-interval", "1", "--save-dir", str(folder)])
        lines = (folder / "log.jsonl").read_text().splitlines()
        first.append(next(line for line in map(json.loads, lines) if "batch" in line))
    assert first[1]["loss_scale"] != 1
    assert first[1]["gradient_norm"] == pytest.approx(first[0]["gradient_norm"], rel=0.01)
