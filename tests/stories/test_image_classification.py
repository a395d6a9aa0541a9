"""example/image_classification.py, as a user runs it."""
import json
import os
import re
import signal

import gluon_amp  # noqa: F401  (before mxnet)
import mxnet as mx
import numpy as np
import pytest
import scripts
from gluon_amp.reports import read_logs
from PIL import Image
from scripts import EXAMPLES, SHARED

pytestmark = pytest.mark.long

def run(folder, *arguments, **options):
    """Runs the script, and returns its log."""
    return scripts.run("image_classification.py", "--save-dir", folder, "--log-interval", "5",
                       *arguments, **options)[1]


def result(folder, epoch):
    """Results that do not depend on the clock."""
    return scripts.logged(folder), {
        name: array.asnumpy() for name, array in
        mx.nd.load(str(folder / f"epoch-{epoch}.params")).items()}


def same(a, b):
    return a[0] == b[0] and all(np.array_equal(a[1][n], b[1][n]) for n in a[1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_digits_are_learned_and_logged_in_gluoncv_format(dtype, tmp_path):
    log = run(tmp_path, "--dtype", dtype, "--epochs", "2", new_process=dtype == "float16")
    number = r"\d+\.\d{6}"
    scale = r"\tloss-scale=\d+\tskipped=\d+"
    assert re.search(r"Namespace\(.*dataset='digits'", log)
    assert re.search(rf"^Epoch\[1\] Batch \[4\]\tSpeed: {number} samples/sec\taccuracy={number}"
                     rf"\tlr={number}{scale}$", log, re.M)
    assert re.search(rf"^\[Epoch 1\] training: accuracy={number}$", log, re.M)
    assert re.search(rf"^\[Epoch 1\] speed: \d+ samples/sec\ttime cost: {number}$", log, re.M)
    errors = re.search(rf"^\[Epoch 1\] validation: err-top1=({number}) err-top5={number}{scale}$",
                       log, re.M)
    assert float(errors[1]) < 0.1
    lines, _ = result(tmp_path, 1)
    epochs = [line for line in lines if "batch" not in line]
    assert [line["epoch"] for line in epochs] == [0, 1]
    assert epochs[1]["err_top1"] == pytest.approx(float(errors[1]), abs=1e-6)
    assert 0 < epochs[1]["validation_loss"] < epochs[0]["validation_loss"]


def test_log_jsonl_has_steps_and_none_is_skipped_at_start(tmp_path):
    output = run(tmp_path, "--dtype", "float16", "--epochs", "2")
    run_read, = read_logs([tmp_path / "log.jsonl"])
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[0]["version"] == 2
    steps = [line for line in lines if "batch" in line]
    assert "step skipped" not in output
    assert "hybridized, because" not in output  # the script hybridizes
    assert not any(line.get("skip") for line in steps)
    assert [line["batch"] for line in steps] == [4, 9, 14, 19, 4, 9, 14, 19]
    assert all(0 < line["gradient_norm"] < 100 for line in steps)
    assert {line["loss_scale"] for line in steps} == {run_read.epochs[1].loss_scale}
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert len(run_read.steps["loss"]) == len(steps)


def test_tensorboard_files_match_log_jsonl(tmp_path):
    pytest.importorskip("tensorboard")
    for epochs in "2", "3":  # the resumed run writes a second file
        run(tmp_path / "run", "--dtype", "float16", "--epochs", epochs, "--resume",
            "--tensorboard", str(tmp_path / "events"))
    theirs, = read_logs(sorted((tmp_path / "events").iterdir()))
    ours, = read_logs([tmp_path / "run" / "log.jsonl"])
    assert (theirs.dtype, theirs.seed, theirs.model) == (ours.dtype, ours.seed, ours.model)
    assert theirs.steps["loss_scale"] == ours.steps["loss_scale"]
    assert [e.top1 for e in theirs.epochs.values()] == pytest.approx(
        [e.top1 for e in ours.epochs.values()])
    assert len(theirs.steps["loss"]) == len(ours.steps["loss"])


def test_run_killed_at_any_moment_resumes_bitwise(tmp_path):
    options = ["--dtype", "float16", "--epochs", "4", "--label-smoothing", "0.1"]
    run(tmp_path / "whole", *options)
    for stop in (r"Epoch\[0\] Batch \[4\]", r"\[Epoch 0\] validation", r"Epoch\[2\] Batch \[9\]"):
        process = scripts.start(EXAMPLES / "image_classification.py", "--save-dir",
                                tmp_path / "cut", "--log-interval", "5", *options, "--resume")
        for line in process.stderr:
            if re.match(stop, line):
                os.kill(process.pid, signal.SIGKILL)
                break
        process.communicate()
    run(tmp_path / "cut", *options, "--resume", "--xray", str(tmp_path / "xray"), "--xray-steps",
        "1")
    assert (tmp_path / "xray" / "epoch-3" / "xray.html").exists()  # bitwise identical
    assert same(result(tmp_path / "whole", 3), result(tmp_path / "cut", 3))


def test_run_is_not_overwritten_and_resumes_only_with_same_arguments(tmp_path):
    begun = ["--epochs", "2", "--dtype", "float16"]
    assert "nothing to resume" in run(tmp_path, *begun, "--resume")
    before = (tmp_path / "log.jsonl").read_bytes()
    for arguments, message in (
            (begun, "has a run: pass --resume to continue it, or another --save-dir"),
            ([*begun, "--resume", "--epochs", "1"], "original run: epochs was 2, is 1"),
            ([*begun, "--resume", "--lr", "1", "--seed", "5"], "seed was 0, is 5; lr was 0.1")):
        assert message in run(tmp_path, *arguments, fails=True).splitlines()[-1]
    assert "--epochs above 2 continues" in run(tmp_path, *begun, "--resume", "--num-workers", "1")
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_run_of_another_script_is_not_resumed(tmp_path):
    run(tmp_path, "--epochs", "1")
    log = (tmp_path / "log.jsonl").read_text().splitlines(True)
    (tmp_path / "log.jsonl").write_text(log[0].replace('"lr"', '"rate"') + log[1])
    error = run(tmp_path, "--epochs", "1", "--resume", fails=True).splitlines()[-1]
    assert "rate was 0.1, is unset" in error
    assert "lr was unset, is 0.1" in error


def test_random_crops_depend_on_seed_only(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(16):
        folder = tmp_path / "images" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (72, 72, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    options = ["--dataset", str(tmp_path / "images"), "--val", str(tmp_path / "images"),
               "--image-size", "64", "--classes", "2", "--batch-size", "8", "--epochs", "1"]
    for name in ("first", "second"):
        run(tmp_path / name, *options)
    assert same(result(tmp_path / "first", 0), result(tmp_path / "second", 0))


def test_every_policy_trains(tmp_path):
    for flags in ("--policy pure_float16", "--policy mixed_float16",
                  "--dtype bfloat16 --loss-scale none"):
        log = run(tmp_path / flags, *flags.split(), "--epochs=1", "--label-smoothing", "0.1")
        assert float(re.search(r"validation: err-top1=(\S+)", log)[1]) < 0.3


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model", "resnet18_v1", "--dataset", "dummy", "--image-size", "32"], "samples/s, peak"),
    (["--model", "cifar_resnet20_v1", "--dataset", "dummy", "--image-size", "32", "--mode",
      "imperative", "--policy", "mixed_float16"], "samples/s, peak memory")])
def test_benchmark_needs_no_data(arguments, message, tmp_path):
    log = run(tmp_path, *arguments, "--benchmark", "--epochs", "1", "--batch-size", "4", "--dtype",
              "float16")
    assert message in log


@pytest.mark.parametrize(("arguments", "message"), [
    (["--dataset", "nowhere"], "nowhere does not exist. --dataset takes digits"),
    (["--dataset", "imagenet"], "pass --data-dir FOLDER"),
    (["--gpus", "99"], "--gpus 99: MXNet finds"),
    (["--classes", "3"], "the data has a label 9, and the network 3 classes"),
    (["--save-dir", __file__], "File exists"),
    (["--model", "resnet19"], "gluoncv's model zoo has resnet19. Did you mean "),
    (["--batch-size", "5000"], "images make no batch of 5000")])
def test_bad_arguments_are_one_line(arguments, message, tmp_path):
    assert message in run(tmp_path, *arguments, fails=True).strip().splitlines()[-1]


def test_missing_data_without_download_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MXNET_GLUON_REPO", "http://localhost:1/")  # no server there
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"damaged")
    error = run(tmp_path / "save", "--dataset", "mnist", "--data-dir", str(tmp_path), fails=True)
    assert f"not be downloaded (ConnectionError), and {tmp_path} lacks" in error.splitlines()[-1]


@pytest.mark.skipif(not (SHARED / "data").is_dir(),
                    reason="needs cifar10 in ../shared or $GLUON_AMP_DATA")
def test_record_file_trains(tmp_path):
    data = SHARED / "data"
    log = run(tmp_path, "--dataset", str(data / "cifar10_test.rec"), "--val",
              str(data / "cifar10_test.rec"), "--image-size", "32", "--dtype", "float16",
              "--epochs", "1")
    assert "[Epoch 0] validation: err-top1=0." in log


def test_finished_run_continues_to_more_epochs(tmp_path):
    run(tmp_path, "--dtype", "float16", "--epochs", "2")
    log = run(tmp_path, "--dtype", "float16", "--epochs", "3", "--resume")
    assert "completed epochs: 2; remaining: 1, with the schedule of 3 epochs" in log
    lines, _ = result(tmp_path, 2)
    assert [line["epoch"] for line in lines if "batch" not in line] == [0, 1, 2]
    rates = [line["lr"] for line in lines if "batch" in line and line["epoch"] == 2]
    assert 0.01 < rates[0] < 0.1  # a cosine schedule that ends with the third epoch
    assert (tmp_path / "best.params").exists()


def test_gluoncv_flags_have_their_effects(tmp_path):
    log = run(tmp_path / "run", "--dtype", "float16", "--epochs", "3", "--mixup", "--no-wd",
              "--mixup-off-epoch", "1", "--save-period", "2", "--optimizer", "adam", "--lr",
              "0.01", "--warmup-epochs", "1", "--warmup-lr", "0.001",
              "--logging-file", str(tmp_path / "train.log"))
    assert {path.name for path in (tmp_path / "run").glob("*.params")} == {
        "epoch-1.params", "epoch-2.params", "best.params"}  # the second, the last, the best
    assert (tmp_path / "train.log").read_text().splitlines() == [
        line for line in log.splitlines() if not line.startswith("\r")]
    log, = read_logs([tmp_path / "run" / "log.jsonl"])
    losses = [epoch.loss for epoch in log.epochs.values()]
    assert losses[1] > 2 * losses[2]  # with mixed labels, and with those of the last epoch
    again = run(tmp_path / "again", "--epochs", "4", "--optimizer", "adam", "--resume-epoch", "3",
                "--dtype", "float16", "--resume-params", str(tmp_path / "run" / "epoch-2.params"),
                "--resume-states", str(tmp_path / "run" / "epoch-2.states"), "--lr", "0.01",
                "--teacher", "small", "--teacher-params", str(tmp_path / "run" / "best.params"))
    epochs = re.findall(r"\[Epoch (\d)\] validation: err-top1=(\S+)", again)
    assert [number for number, _ in epochs] == ["3"]
    assert float(epochs[0][1]) < 0.1
