"""What the training scripts share: folders of runs, progress, distillation."""
import io
import json
import logging
import os
import sys
from argparse import Namespace
from pathlib import Path

import image_classification as recipe
import numpy as np
import pytest
import recipes
from gluon_amp._mxnet import mx
from symbols import get_symbol

PNG = b"\x89PNG"  # how an image begins
EXAMPLES = Path(__file__).parents[1] / "example"


def flags(folder, **values):
    return Namespace(**{"save_dir": str(folder), "save_period": None, "resume": True,
                        "resume_params": None, "resume_states": None, "resume_epoch": 0,
                        "epochs": 5, "batch_size": 8, **values})


@pytest.fixture()
def cut(tmp_path):
    """A run of which two epochs are done."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "last.json").write_text(json.dumps({"epoch": 1}))
    lines = [{"version": 2, "arguments": vars(flags(folder))}, {"epoch": 0, "batch": 4},
             {"epoch": 0, "err_top1": 0.5}, {"epoch": 1, "err_top1": 0.4}]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("epoch-1.params", "epoch-1.states", "best.params"):
        (folder / name).write_bytes(b"")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.mark.parametrize(("name", "text", "message"), [
    ("last.json", None, "last.json is missing, and there is best.params: nothing is started over"),
    ("last.json", "", "last.json is damaged: it should hold"),
    ("last.json", "[" * 100000, "last.json is damaged: it should hold"),
    ("last.json", "[1]", "last.json is damaged: it should hold"),
    ("last.json", '{"epoch": "1"}', "last.json is damaged: it should hold"),
    ("last.json", '{"epoch": 2}', "epoch-2.params does not exist"),
    ("log.jsonl", None, "log.jsonl does not exist"),
    ("log.jsonl", "", "log.jsonl is damaged: it should hold a run's arguments"),
    ("log.jsonl", "\0\0", "log.jsonl is damaged: line 1 is no JSON"),
    ("log.jsonl", '{"arguments": []}', "log.jsonl is damaged: its first line"),
    ("log.jsonl", "[" * 100000, "log.jsonl is damaged: line 1 is no JSON"),
    ("log.jsonl", '{"arguments": {}}\n[]', "log.jsonl is damaged: line 2 is of no step"),
    ("log.jsonl", '{}\n{"epoch": "1"}', "log.jsonl is damaged: line 2 is of no step"),
    ("log.jsonl", '{}\n{"epoch": 1, "err_top1": "0.4"}', "log.jsonl is damaged: line 2 is of"),
    ("log.jsonl", '{"arguments": {"batch_size": null}}', "log.jsonl is damaged: batch_size and"),
    ("epoch-1.params", None, "epoch-1.params does not exist"),
    ("epoch-1.states", None, "epoch-1.states does not exist")])
def test_resume_says_which_file_is_missing_or_damaged_and_leaves_all_as_it_is(name, text, message,
                                                                             cut):
    (cut / name).unlink()
    if text is not None:
        (cut / name).write_text(text)
    before = contents(cut)
    folder = recipes.RunFolder(flags(cut), recipes.Ranks())
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        folder.resume(None, None)
    assert contents(cut) == before


def test_a_log_without_the_last_epoch_is_of_another_run(cut):
    log = cut / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(True)[:-1]))
    with pytest.raises(ValueError, match=r"log.jsonl has no end of epoch 1, which .*last.json"):
        recipes.RunFolder(flags(cut), recipes.Ranks()).resume(None, None)


def test_a_run_that_was_killed_in_its_first_save_begins_again(tmp_path):
    (tmp_path / "epoch-0.params").write_bytes(b"half")
    assert recipes.RunFolder(flags(tmp_path), recipes.Ranks()).resume(None, None) == (0, [])


def test_a_run_that_resumes_by_itself_begins_with_the_parameters_and_the_epoch_that_it_is_given(
        tmp_path):
    def network():
        net = recipes.small_network(2)
        net.initialize()
        net(mx.nd.zeros((1, 1, 8, 8)))
        return net

    given, net = network(), network()
    given.save_parameters(str(tmp_path / "given.params"))
    values = flags(tmp_path / "run", resume_params=str(tmp_path / "given.params"), resume_epoch=3)
    assert recipes.RunFolder(values, recipes.Ranks()).resume(net, None) == (3, [])
    assert np.array_equal(net[0].weight.data().asnumpy(), given[0].weight.data().asnumpy())


def test_a_step_of_a_resumed_run_is_as_large_as_before_on_as_many_ranks_as_one_likes(cut):
    message = "begun: batch_size was 8, is 16"
    for values in ({"batch_size": 16}, {"workers": 2}):
        with pytest.raises(ValueError, match=message):
            recipes.RunFolder(flags(cut, **values), recipes.Ranks()).resume(None, None)
    folder = recipes.RunFolder(flags(cut, batch_size=4, workers=2), recipes.Ranks())
    with pytest.raises(ValueError, match=r"epoch-1.params holds other parameters, or is damaged"):
        folder.resume(recipes.small_network(2), None)


def test_a_second_run_on_one_folder_is_refused_until_the_first_has_ended(tmp_path):
    (read, told), (end, ended) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        recipes.hold(str(tmp_path))
        os.write(told, b"!")
        os.close(ended)
        os.read(end, 1)
        os._exit(0)
    os.read(read, 1)
    try:
        with pytest.raises(ValueError, match=r"another run writes into .*: --save-dir names"):
            recipes.RunFolder(flags(tmp_path), recipes.Ranks())
    finally:
        os.close(ended)
        os.waitpid(child, 0)
    recipes.RunFolder(flags(tmp_path), recipes.Ranks())


def test_lines_of_the_log_are_due_by_batches_and_by_time():
    for seconds, due in ((60.0, [(False, False), (True, True)]), (0.0, [(False, True),
                                                                       (True, True)])):
        args = Namespace(epochs=2, log_interval=2, log_seconds=seconds)
        progress = recipes.Progress(args, [None] * 2, 0, samples=8)
        told = [progress.step(i, 0.5, 128.0) for i, _ in progress]
        assert [(shown, speed > 0) for shown, speed in told] == due


def test_a_terminal_shows_epoch_loss_scale_speed_and_the_time_left(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    args = Namespace(epochs=3, log_interval=20, log_seconds=60.0)
    progress = recipes.Progress(args, [None] * 4, 1, samples=8)
    progress.bar.mininterval = 0
    for i, _ in progress:
        progress.step(i, 0.25, 128.0)
    shown = sys.stderr.getvalue().split("\r")
    line = next(text for text in reversed(shown) if "loss" in text)
    assert line.startswith("epoch 2/3:")
    assert "loss 0.25, scale 128" in line
    assert "/32 [" in line  # of 32 samples; then the time, and the time left
    assert "samples/s" in line


def test_what_a_teacher_says_is_learned_as_hinton_has_it():
    args = recipe.parse(["--temperature", "3", "--hard-weight", "0.25", "--classes", "4"])
    rng = np.random.default_rng(0)
    out, taught = rng.standard_normal((2, 5, 4))
    label = np.arange(5) % 4

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    hard = -log_softmax(out)[np.arange(5), label]
    soft = -(np.exp(log_softmax(taught / 3)) * log_softmax(out / 3)).sum(1)
    found = recipe.loss_of(args)(*map(mx.nd.array, (out, label, taught)))
    np.testing.assert_allclose(found.asnumpy(), 0.25 * hard + 0.75 * 9 * soft, rtol=1e-5)


def test_a_teacher_of_other_classes_is_refused():
    loss_fn = recipe.loss_of(recipe.parse(["--teacher", "resnet18_v1"]))
    with pytest.raises(ValueError, match="resnet18_v1 has 1000 classes, and the network 10"):
        loss_fn(mx.nd.ones((2, 10)), mx.nd.ones(2), mx.nd.ones((2, 1000)))


def test_a_checkpoint_of_another_network_or_type_is_not_gone_on_with(tmp_path):

    def network(dtype, **flags):
        return get_symbol("resnet-v1", 10, "3,32,32", dtype, **flags)

    prefix = str(tmp_path / "net")
    network("float16", num_layers=20).save(f"{prefix}-symbol.json")
    recipes.check_network(network("float16", num_layers=20), (3, 32, 32), prefix)
    for other in (network("float32", num_layers=20), network("float16", num_layers=32)):
        with pytest.raises(ValueError, match=r"net-symbol.json is of another network, or of "):
            recipes.check_network(other, (3, 32, 32), prefix)


def test_images_that_are_too_small_for_a_network_are_one_line():
    with pytest.raises(ValueError, match=r"does not take --image-shape 3,48,48: .*exceeds"):
        recipes.check_network(get_symbol("alexnet", 10, "3,48,48", "float16"), (3, 48, 48))


@pytest.mark.parametrize("flags", [["--last-gamma"], ["--use-pretrained"]])
def test_what_the_small_network_does_not_have_is_refused(flags):
    with pytest.raises(ValueError, match=r"are for a model zoo's networks\. Received: .*small"):
        recipe.network(recipe.parse(flags), [mx.cpu()])


@pytest.mark.parametrize(("label", "contents", "message"), [
    (float("nan"), PNG, "has a label nan"), (-1, PNG, "has a label -1"),
    (0.5, PNG, "has a label 0.5"),
    (0, b"no image", "has a record at byte 36 that is no image"),
    (0, b"", "has a record at byte 36 that is no image"),
    (1, PNG, None)])
def test_a_record_that_is_no_image_or_of_no_class_is_told_before_training(label, contents, message,
                                                                         tmp_path):
    path = str(tmp_path / "a.rec")
    record = mx.recordio.MXRecordIO(path, "w")
    for of, what in ((0, PNG), (label, contents)):
        record.write(mx.recordio.pack(mx.recordio.IRHeader(0, of, 0, 0), what))
    record.close()
    if message is None:
        assert list(recipes.records(path, 2)) == [0, 36]
    else:
        with pytest.raises(ValueError, match=f"a.rec {message}"):
            recipes.records(path, 2)


def test_an_index_that_is_missing_is_named(tmp_path):
    record = mx.recordio.MXRecordIO(str(tmp_path / "a.rec"), "w")
    record.write(mx.recordio.pack(mx.recordio.IRHeader(0, 1, 0, 0), PNG))
    record.close()
    args = recipe.parse(["--dataset", str(tmp_path / "a.rec"), "--batch-size", "1"])
    with pytest.raises(ValueError, match=r"a.rec needs its index, a file beside it .* .idx"):
        recipes.image_loaders(args, recipes.Ranks())
    args.rec_train_idx = "b.idx"
    with pytest.raises(ValueError, match=r"Valid: .*a\.idx\. Received: b\.idx"):
        recipes.image_loaders(args, recipes.Ranks())
    whole = (tmp_path / "a.rec").read_bytes()
    (tmp_path / "a.rec").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"a.rec is cut short"):
        recipes.image_loaders(args, recipes.Ranks())


@pytest.mark.parametrize("loss", [2.0, float("nan"), float("inf"), None])
def test_an_epoch_whose_predictions_are_not_finite_is_told(loss, caplog):
    args = Namespace(tensorboard=None, batch_size=1, seed=0, lr=0.1)
    recipes.TrainingLog(args, None).add_epoch({"epoch": 3, "validation_loss": loss})
    told = "epoch 3: the network's predictions are not finite" in caplog.text
    assert told == (loss not in (2.0, None))


def test_epochs_that_are_skipped_count_for_the_learning_rate(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)  # it is the process's
    line, = recipe.main(["--examples", "16", "--batch-size", "8", "--epochs", "4", "--lr", "0.8",
                         "--resume-epoch", "3", "--lr-decay-epoch", "2"])
    assert line["epoch"] == 3
    assert line["lr"] == pytest.approx(0.08)


def test_a_run_that_begins_behind_its_last_epoch_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)  # it is the process's
    with pytest.raises(ValueError, match=r"--resume-epoch 4 leaves none of the 4 epochs"):
        recipe.main(["--examples", "16", "--batch-size", "8", "--epochs", "4", "--resume-epoch",
                     "4"])


def test_without_a_package_that_writes_tensorboards_files_a_line_says_why(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    args = Namespace(tensorboard=str(tmp_path / "events"), batch_size=1, seed=0, lr=0.1)
    with pytest.raises(ValueError, match=r"pip install tensorboard\. .*tensorboard"):
        recipes.TrainingLog(args, None)
