"""example/minimal_*.py: complete scripts of at most 60 lines, without a module of their own."""
import re
import runpy
import sys

import mxnet as mx
import numpy as np
import pytest
import scripts
from mxnet import gluon
from mxnet.gluon.model_zoo import model_store
from PIL import Image
from scripts import EXAMPLES

MINIMAL = sorted(EXAMPLES.glob("minimal_*.py"))


@pytest.mark.parametrize("path", MINIMAL, ids=lambda path: path.name)
def test_script_stands_alone_in_60_lines(path):
    text = path.read_text()
    assert text.count("\n") <= 60
    names = {other.stem for other in EXAMPLES.glob("*.py")}
    assert not names & set(re.findall(r"^(?:import|from) (\w+)", text, re.M))


@pytest.mark.parametrize("name", ["minimal_gluon.py", "minimal_module.py", "minimal_estimator.py"])
def test_digits_are_learned_and_a_second_run_only_predicts(name, tmp_path):
    first, second = (scripts.run(name, cwd=tmp_path)[0] for _ in range(2))
    predicted, labels = (np.array(re.findall(r"\d", text)) for text in
                         re.search(r"predicted \[(.*)\] labels \[(.*)\]", first).groups())
    assert (predicted == labels).sum() >= 8
    assert first.splitlines()[-1] == second.splitlines()[-1]


def test_pretrained_network_learns_photos(tmp_path, monkeypatch, capsys):
    net = gluon.model_zoo.vision.get_model("mobilenetv2_1.0", prefix="")
    net.initialize(mx.init.MSRAPrelu())
    net(mx.nd.zeros((1, 3, 32, 32)))
    net.save_parameters(str(tmp_path / "zoo.params"))
    monkeypatch.setattr(model_store, "get_model_file",
                        lambda *_, **__: str(tmp_path / "zoo.params"))
    write_photos(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minimal_fine_tune.py", "train", "test"])
    runpy.run_path(str(EXAMPLES / "minimal_fine_tune.py"))
    first = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in first[:3]] == ["epoch 0", "epoch 1", "epoch 2"]
    runpy.run_path(str(EXAMPLES / "minimal_fine_tune.py"))
    assert capsys.readouterr().out.splitlines() == first[3:]


@pytest.mark.parametrize("arguments", [["train"], ["train", "other"]])
def test_fine_tuning_refuses_a_missing_or_another_folder(arguments, tmp_path, monkeypatch):
    write_photos(tmp_path)
    (tmp_path / "other" / "blue").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["minimal_fine_tune.py", *arguments])
    with pytest.raises(SystemExit, match=r"python minimal_fine_tune.py|blue"):
        runpy.run_path(str(EXAMPLES / "minimal_fine_tune.py"))


def write_photos(folder):
    """Bright and dark images: of each class two for training, and one for the test."""
    for part, count in (("train", 2), ("test", 1)):
        for label, brightness in (("bright", 220), ("dark", 30)):
            path = folder / part / label
            path.mkdir(parents=True)
            for i in range(count):
                pixels = np.random.randint(brightness, brightness + 30, (64, 64, 3), np.uint8)
                Image.fromarray(pixels).save(path / f"{i}.png")
