"""gluon_amp.reports.read: values from logs of each format."""
import json
import os
import re
import sys
import tracemalloc
from pathlib import Path
from statistics import harmonic_mean

import gluon_amp as amp
import mxnet as mx
import pytest
import training_logs as logs
from gluon_amp.reports import read_logs
from gluon_amp.reports.compare import compare, groups
from hypothesis import example, given, settings
from hypothesis import strategies as st
from networks import ready
from trainers import recorded
from training_logs import ERRORS, RECIPE, SAME_FOLDER, numbered, read_text, top1

SHARED = Path(os.environ.get("GLUON_AMP_DATA") or Path(__file__).parents[3] / "shared")


# ---- formats

@pytest.mark.parametrize("metric", ["accuracy", "top1-err"])
@pytest.mark.parametrize("prefix", ["", "INFO:root:"])
def test_gluoncv_logs_are_read(prefix, metric, tmp_path):
    run, = read_text(tmp_path, logs.gluoncv(ERRORS, prefix=prefix, metric=metric, **RECIPE))
    assert (run.name, run.dtype, run.model, run.batch_size) == (
        "a", "float16", "resnet50_v1b", 1024)
    assert run.arguments == RECIPE
    assert top1(run) == numbered(ERRORS)
    epoch = run.epochs[1]
    assert (epoch.top5, epoch.speed, epoch.seconds, epoch.lr) == (0.128086, 1000, 100, 0.05)
    assert run.best == (2, 0.3)
    assert run.hours == pytest.approx([1 / 36, 2 / 36, 3 / 36])


READ = {  # name: (a log, its top-1 errors, and values of its last epoch)
    "CIFAR": (
        "".join(f"[Epoch {n}] train=0.250000 val={1 - error:f} loss=1.500000 time: 12.500000\n"
                for n, error in enumerate(ERRORS)), numbered(ERRORS), {"seconds": 12.5}),
    "fine-tuning": (
        "".join(f"[Epoch {n}] Train-acc: 0.512, loss: 1.234 | Val-acc: {1 - error:.3f} | "
                "time: 35.1\n" for n, error in enumerate((0.5, 0.25))),
        {0: 0.5, 1: 0.25}, {"loss": 1.234, "seconds": 35.1}),
    "train_recognizer": (
        "[Epoch 000] training: acc=70.100000\t loss=1.200000\n"
        "[Epoch 000] validation: acc-top1=71.250000 acc-top5=90.500000 loss=1.100000\n",
        {0: 0.2875}, {"top5": 0.095}),
    "train_horovod": (
        logs.header("INFO:root:", model="resnet50_v1", dtype="float16") + "".join(
            f"INFO:root:Epoch[{n}] Batch[50] Loss[2.300]\n"
            f"INFO:root:Epoch[{n}] Rank[0] Batch[50]\taccuracy=0.250000\tlr=0.100000\n"
            f"INFO:root:Epoch[{n}] Rank[0] Batch[99]\tTime cost=12.50\tTrain-metric=0.300000\n"
            f"INFO:root:Epoch[{n}]\tSpeed: 1234.50 samples/sec\n"
            f"INFO:root:Epoch[{n}] Rank[0]\tValidation-accuracy={1 - error:f}\t"
            "Validation-top_k_accuracy_5=0.900000\n" for n, error in enumerate((0.5, 0.25))),
        {0: 0.5, 1: 0.25}, {"seconds": 12.5, "speed": 1234.5, "top5": 0.1}),
    "speeds of 0": (logs.module([0.5], speeds=[0, 100, 100]), {0: 0.5}, {"speed": 100}),
    "byte order mark": ("\ufeff" + logs.jsonl([0.5]), {0: 0.5}, {}),
    **{f"CRLF {i}": (text.replace("\n", "\r\n"), {0: 0.5}, {}) for i, text in enumerate(
        (logs.gluoncv([0.5]), logs.module([0.5]), "[Epoch 0] Validation: \nmAP=0.5\n"))},
    # whose measurements are impossible
    "impossible": (logs.jsonl([0.5]).replace("1000.0", "-7").replace("100.0", "-3")
                   .replace('"lr": 0.1', '"lr": 1e300'), {0: 0.5},
                   {"seconds": None, "speed": None, "lr": None}),
    "no error": (logs.jsonl([0.5, 0.4]).replace("0.4", "true"), {0: 0.5}, {"top1": None}),
    "not finite": (logs.gluoncv([0.5, float("nan"), float("inf")]), {0: 0.5}, {"top1": None}),
    "JSON, not finite": (
        '{"epoch": 0, "err_top1": NaN, "lr": Infinity, "seconds": 1%s}\n' % ("0" * 400), {},
        {"top1": None, "lr": None, "seconds": None}),
}


@pytest.mark.parametrize("name", READ)
def test_log_is_read(name, tmp_path):
    text, errors, last = READ[name]
    run, = read_text(tmp_path, text)
    assert top1(run) == errors
    found = run.epochs[max(run.epochs)]
    assert {key: getattr(found, key) for key in last} == pytest.approx(last)


@pytest.mark.parametrize("prefix", ["", "INFO:root:", logs.ASCTIME])
def test_module_logs_are_read(prefix, tmp_path):
    text = logs.module(ERRORS, prefix=prefix, network="resnet", num_layers=50, dtype="float32",
                       batch_size=256, gpus="0,1")
    run, = read_text(tmp_path, f"[08:27:50] src/io/x.cc:177: 1 threads\n{text}")
    assert (run.model, run.dtype, run.batch_size) == ("resnet50", "float32", 256)
    assert top1(run) == numbered(ERRORS)
    assert run.epochs[1].top5 == pytest.approx(0.128086)
    assert (run.epochs[1].speed, run.epochs[1].seconds) == (1000, 100)


def test_learning_rate_of_module_log_starts_where_it_changed(tmp_path):
    text = logs.module([0.5]) + "Update[5005]: Change learning rate to 1.00000e-02\n" \
        + logs.module([0.4], start=1)
    run, = read_text(tmp_path, text)
    assert [epoch.lr for epoch in run.epochs.values()] == [None, 0.01]


def test_own_jsonl_is_read(tmp_path):
    run, = read_text(tmp_path, logs.jsonl(ERRORS, scales=[1024, 512, 512], **RECIPE), "log.jsonl")
    assert (top1(run), run.arguments) == (numbered(ERRORS), RECIPE)
    assert [(epoch.loss_scale, epoch.skipped) for epoch in run.epochs.values()] == [
        (1024, 0), (512, 2), (512, 4)]


@pytest.mark.parametrize(("name", "value"), [
    ("val_accuracy", 0.75), ("test_acc", 0.75), ("validation_err_top1", 0.25), ("err_top1", 0.25),
    ("eval_top1_error", 0.25), ("val_accuracy", 75), ("val_err_top1", 25)])
def test_accuracy_in_json_lines_is_a_share(name, value, tmp_path):
    run, = read_text(tmp_path, "".join(json.dumps({"epoch": n, "accuracy": 1.0, name: value}) + "\n"
                                       for n in range(2)), "a.jsonl")
    assert (run.measured, run.is_share, top1(run)) == ("top-1 accuracy", True, {0: 0.25, 1: 0.25})


def test_other_results_of_validation_are_metrics(tmp_path):
    values = {"val_mAP@0.5": 0.5, "val_f1-score": 0.25, "test_": 1.0, "val_student_accuracy": 0.5,
              "val_teacher_accuracy": 0.75, "val_samples_per_second": 4000.0, "val_seconds": 5.0}
    run, = read_text(tmp_path, json.dumps({"epoch": 0, "samples_per_second": 1000.0,
                                           "seconds": 50.0, **values}) + "\n", "a.jsonl")
    epoch = run.epochs[0]
    assert (epoch.speed, epoch.seconds, run.is_share) == (1000, 50, False)
    assert {**epoch.metrics, run.measure: run.told(epoch.top1)} == {
        key.partition("_")[2]: value for key, value in values.items()}


@pytest.mark.parametrize("write", [logs.gluoncv, logs.module])
def test_changes_of_loss_scale_are_read(write, tmp_path):
    text = write([0.5], tail="\tloss-scale=1024\tskipped=1") \
        + write([0.4], start=1, tail="\tloss-scale=512\tskipped=2")
    run, = read_text(tmp_path, text)
    assert {(epoch, scale) for epoch, _, scale in run.steps["loss_scale"]} == {(0, 1024), (1, 512)}
    assert {(epoch, skipped) for epoch, _, skipped in run.steps["skipped"]} == {(0, 1), (1, 2)}
    assert [epoch.loss_scale for epoch in run.epochs.values()] == [1024, 512]


@pytest.mark.parametrize(("batch", "rate"), [
    ("Speed: 45.123 samples/sec, CrossEntropy=4.100, SmoothL1=2.300", None),
    ("LR: 1.00E-03, Speed: 45.123 samples/sec, ObjLoss=4.100, BoxCenterLoss=2.300", 0.001),
    ("Speed: 45.123 samples/sec, LR=0.001, loss=4.100", 0.001)])
def test_gluoncv_detection_logs_are_read(batch, rate, tmp_path):
    text = logs.header(network="resnet50_v1b", dataset="voc", amp=True) + "".join(
        f"[Epoch {n}][Batch 99], {batch}\n"
        f"[Epoch {n}] Training cost: 120.500, CrossEntropy=3.900, SmoothL1=2.000\n"
        f"[Epoch {n}] Validation: \naeroplane=0.8123456789\nmAP={value}\n"
        f"[Epoch {n}] mAP {value} higher than current best 0.0 saving to x.params\n"
        for n, value in enumerate((5.123e-05, 0.7123456789)))
    run, = read_text(tmp_path, text)
    assert (run.measure, run.final) == ("mAP", pytest.approx(71.23456789))
    assert (run.epochs[1].speed, run.epochs[1].seconds) == (pytest.approx(45.123), 120.5)
    assert run.epochs[1].lr == rate


def test_steps_of_own_jsonl_are_read(tmp_path):
    run, = read_text(tmp_path, logs.steps([0.5, 0.4], seed=3), "log.jsonl")
    assert top1(run) == {0: 0.5, 1: 0.4}
    assert run.seed == "3"
    assert (run.epochs[1].loss, run.epochs[1].validation_loss) == (0.5, pytest.approx(0.6))
    assert run.steps["loss"][:2] == [(0, 0, 2), (0, 1, 1.8)]
    assert run.steps["gradient_norm"][0] == (0, 1, 2)  # no entry for the skipped step
    assert run.steps["loss_scale"][:2] == [(0, 0, 2048), (0, 1, 1024)]


def test_runs_of_one_file_are_named_by_run_field(tmp_path):
    text = "".join(logs.steps([error], seed=seed).replace("{", f'{{"run": "seed {seed}", ', 1)
                   for seed, error in enumerate([0.5, 0.4, 0.3]))
    runs = read_text(tmp_path, text + logs.steps([0.2], seed=3))
    assert [run.name for run in runs] == ["seed 0", "seed 1", "seed 2", "a (4)"]
    assert [run.final for run in runs] == pytest.approx([50, 60, 70, 80])


def test_event_files_without_tensorboard_are_refused_in_one_line(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(bytes(21) + b"brain.Event:2")
    with pytest.raises(ValueError, match=r"host is TensorBoard's, .*: pip install tensorboard \("):
        read_logs([path])


@given(speeds=st.lists(st.integers(1, 10 ** 7).map(lambda n: n / 100), min_size=1, max_size=9))
@SAME_FOLDER
def test_speed_of_epoch_is_images_over_time(speeds, tmp_path):
    run, = read_text(tmp_path, logs.module([0.5], speeds=speeds))
    assert run.speed == pytest.approx(harmonic_mean(speeds))


# ---- arguments and names

@pytest.mark.parametrize(("arguments", "expected"), [
    ({"batch_size": 64, "num_gpus": 0}, ("", 64)), ({"batch_size": "auto"}, ("", None)),
    ({"batch_size": [1]}, ("", None)), ({"pretrained": False, "model": "vgg"}, ("vgg", None)),
    ({"pretrained": True, "model": "models/vgg"}, ("vgg", None)),
    ({"model": None, "network": "resnet", "num_layers": 20}, ("resnet20", None))])
def test_model_and_batch_size_come_from_arguments(arguments, expected, tmp_path):
    run, = read_text(tmp_path, logs.jsonl([0.5], **arguments))
    assert (run.model, run.batch_size) == expected


@pytest.mark.parametrize(("name", "dtype"), [
    ("resnet-fp16.log", "float16"), ("Float32_2.log", "float32"), ("x_bfloat16.log", "bfloat16"),
    ("bf16.log", "bfloat16"), ("conf16.log", "unknown")])
def test_dtype_comes_from_file_name_without_arguments(name, dtype, tmp_path):
    assert read_text(tmp_path, logs.gluoncv([0.5]), name)[0].dtype == dtype


@pytest.mark.parametrize(("files", "names"), [
    (["a.log", "b.log"], ["a", "b"]), (["a/log.jsonl", "b/log.jsonl"], ["a", "b"]),
    (["x/a.log", "y/a.log"], ["x/a", "y/a"]), (["a.log", "a.jsonl"], ["a", "a [2]"]),
    (["lr0.1", "lr0.2"], ["lr0.1", "lr0.2"]), (["a.log", "a.log"], ["a", "a [2]"])])
def test_runs_are_named_by_shortest_distinct_paths(files, names, tmp_path):
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(logs.gluoncv([0.5]))
    assert [run.name for run in read_logs([tmp_path / name for name in files])] == names


# ---- files that are no logs

NO_LOG = {  # texts that are no logs, and what else the message says
    "": "it has no whole epoch", "Namespace(a=1)\n[20:35:14] src/io\n": "it has no whole epoch",
    "".join(logs.gluoncv([0.5]).splitlines(True)[:3]) + "Traceback\n": "it has no whole epoch",
    "\n\nhello\nworld\n": "its first odd line is line 3: 'hello'",
    bytes(range(256)) * 99: r"its first odd line is line 1: '\\x00",
    "epoch;top1_err\n0;0.5\n": "its first odd line is line 1: 'epoch;top1_err'",
    **dict.fromkeys((
        "{\"a\":" * 9999, '{"epoch": -1, "err_top1": 0.5}', '{"epoch": true, "err_top1": 0.5}',
        f'{{"epoch": {"9" * 400}, "err_top1": 0.5}}',
        f"[Epoch {'9' * 5000}] validation: err-top1=0.5\n"), "its first odd line is line 1")}
BAD = [  # file, text, message
    *(("a.log", text, f"a.log is no training log: {words}") for text, words in NO_LOG.items()),
    *(("a.log", logs.steps([0.5]).replace('"version": 2', f'"version": {version}'),
       r"a\.log: log.jsonl of version .* Valid: 1 to 2") for version in (3, 0, -1, '"2"', "true")),
    *(("a.log", logs.jsonl([0.5, error]), r"a\.log: epoch 1 has an error of .* Valid: shares")
      for error in (-0.5, 1.5, 25.3)),
    *(("a.csv", text, message) for text, message in (
        ("epoch,val_mood\n0,good\n", "a.csv, line 2, val_mood: 'good' is not a number"),
        ("epoch,top1_err\n0,0.5\n1,half\n", "a.csv, line 3, top1_err: 'half' is not a number"),
        ("epoch,top1_err\n\n# x\n0,0.5\n1\n", "a.csv, line 5: 1 cells under 2 columns"),
        *((f"epoch,top1_err\n{number},0.5\n", f"a.csv, line 2: '{number}' is no number of an epoch")
          for number in ("", "1.5", "-1")),
        ("epoch,top1_err\n", "a.csv has no rows under its header"),
        (f"epoch,top1_err\n0,{'1' * 200000}\n", "a.csv, line 2: field larger than field limit"),
        ("epoch,top1_acc\n0,150\n", "a.csv: epoch 0 has an error of -0.5"),
        ("epoch,top1_err\n0,150\n", "a.csv: epoch 0 has an error of 1.5"),
        ("epoch,seed,top1_err\n0,0,0.5\n0,1,0.4\n",
         "a.csv, line 3: epoch 0 has another top1_err .* left of"),
        ('ep"och,top1_err\n0,1\n', r"a.csv has no column epoch in its first row: \['ep\"och', "),
        ("\r#a,epoch,top1_err\n", r"a.csv has no column epoch in its first row: \[\]"),
        ("epoch,mood\n0,1\n",
         r"a.csv has a column epoch, but right of it no quantity that is known")))]


@pytest.mark.parametrize(("file", "text", "message"), BAD, ids=range(len(BAD)))
def test_other_file_is_refused_with_its_place(file, text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path, text, file)


def test_file_of_a_monitor_is_refused_with_its_command(tmp_path):
    net = ready(mx.gluon.nn.Dense(2, in_units=2))
    net.hybridize()
    trainer = amp.Trainer(net.collect_params(), "sgd")
    path = str(tmp_path / "log.jsonl")
    with amp.Monitor(net, trainer, path, interval=1) as monitor:
        trainer.backward(recorded(lambda: net(mx.nd.ones((1, 2)))))
        trainer.step(1)
        monitor.step()
    command = re.escape(f"gluon-amp xray {path}")
    with pytest.raises(ValueError, match=f"a Monitor's file.*{command}$"):
        read_logs([path])
    with open(path, "a") as file:  # a log with other lines, too
        file.write('{"epoch": 0, "err_top1": 0.5}\n')
    for paths in ([path], path, Path(path)):
        assert top1(read_logs(paths)[0]) == numbered([0.5])
    with pytest.raises(TypeError, match=r"logs are a path, or a list of paths. Received: int"):
        read_logs(3)


def test_folders_pipes_and_missing_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", tmp_path):
        with pytest.raises(ValueError, match=r"is a folder\. Give its logs"):
            read_logs([folder])
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match="pipe is a pipe or device"):
        read_logs(["pipe"])
    with pytest.raises(FileNotFoundError, match=r"none\.log"):
        read_logs(["none.log"])


@given(content=st.binary(max_size=300) | st.text(
    st.sampled_from("Epoch[0] 1Batch:.=,\n\t{}\"'()Namespacevalidation#errtop"), max_size=200))
@settings(SAME_FOLDER, max_examples=200)
def test_arbitrary_file_is_read_or_refused_by_name(content, tmp_path):
    try:
        assert read_text(tmp_path, content)
    except ValueError as error:
        assert "a.log" in str(error)  # noqa: PT017


# ---- CSV

WIDE = """# Source: "a paper", its table 1
model,batch_size,epoch,fp32_top1_err,fp32_img_s,fp16_top1_err,fp16_img_s,unc_fp16
resnet50_v1,1024,1,0.5,100,0.6,200,0.1
resnet50_v1,1024,0,0.9,100,0.8,220,0.1
"""


def test_wide_csv_has_a_run_for_each_column_prefix(tmp_path):
    high, low = read_text(tmp_path, WIDE, "a.csv")
    assert [run.dtype for run in (high, low)] == ["float32", "float16"]
    assert (top1(high), top1(low)) == ({0: 0.9, 1: 0.5}, {0: 0.8, 1: 0.6})
    assert list(low.epochs) == [0, 1]
    assert (high.model, high.batch_size, low.speed) == ("resnet50_v1", 1024, 210)
    assert high.notes == ['Source: "a paper", its table 1']


def test_tidy_csv_has_a_run_for_each_key_combination(tmp_path):
    text = "\ufeffRun, DType ,epoch,val_acc,Seconds\r\n" + "".join(
        f"{name}, {dtype},{n},{accuracy},3600\r\n" for name, dtype in
        (("a", "float32"), ("b, c", "float16")) for n, accuracy in ((0, 0.25), (1, 0.5))
    ).replace("b, c", '"b, c"')
    runs = read_text(tmp_path, text, "a.csv")
    assert [(run.name, run.dtype, top1(run), run.hours) for run in runs] == [
        ("a", "float32", {0: 0.75, 1: 0.5}, [1, 2]), ("b, c", "float16", {0: 0.75, 1: 0.5}, [1, 2])]


@pytest.mark.parametrize(("text", "errors"), [
    ("epoch,train_acc,training_top1_err,val_acc\n0,0.9,0.1,0.75\n", [{0: 0.25}]),
    ("epoch,fp32_err,fp16_err\n0,1.25,0.75\n1,0.5,nan\n", [{0: 0.0125, 1: 0.005}, {0: 0.0075}]),
    ("epoch,fp32_err,fp16_acc\n0,1,1\n1,0,0.0\n", [{0: 1, 1: 0}, {0: 0, 1: 1}])],
    ids=["no training errors", "percentages in all columns", "1 is a share"])
def test_columns_of_errors_are_read(text, errors, tmp_path):
    assert [top1(run) for run in read_text(tmp_path, text, "a.csv")] == errors


@given(errors=st.dictionaries(st.integers(0, 10 ** 6), st.floats(0, 1), min_size=1),
       random=st.randoms())
@SAME_FOLDER
def test_csv_rows_can_be_in_any_order(errors, random, tmp_path):
    rows = [f"{epoch},{error!r}\n" for epoch, error in errors.items()]
    random.shuffle(rows)
    run, = read_text(tmp_path, "epoch,top1_err\n" + "".join(rows), "a.csv")
    first = int(min(errors) == 1)  # a table that numbers epochs from 1
    assert {number + first: epoch.top1 for number, epoch in run.epochs.items()} == errors
    assert list(run.epochs) == sorted(run.epochs)


@given(cells=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
                      min_size=1, max_size=3))
@example(cells=["0\x1f", ""])
@SAME_FOLDER
def test_arbitrary_csv_is_read_or_refused_with_line(cells, tmp_path):
    try:
        read_text(tmp_path, "epoch,top1_err\n0,0.5\n" + ",".join(cells) + "\n", "a.csv")
    except ValueError as error:
        assert "a.csv, line " in str(error)  # noqa: PT017


# ---- size, and real logs

def test_memory_does_not_grow_with_length_of_log(tmp_path):
    with open(tmp_path / "a.log", "w") as file:
        while file.tell() < 6 * 10 ** 6:
            file.write(logs.gluoncv([0.5], prefix="INFO:root:", batches=20000) + "noise\n" * 10000)
    tracemalloc.start()
    try:
        run, = read_logs([tmp_path / "a.log"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert top1(run) == {0: 0.5}
    assert peak < 2 * 2 ** 20


@pytest.mark.skipif(not (SHARED / "imagenet").is_dir(),
                    reason="needs the logs of ImageNet in ../shared or $GLUON_AMP_DATA")
def test_real_imagenet_logs_have_known_results():
    low, high = read_logs(sorted((SHARED / "imagenet" / "logs").glob("*.log")))
    assert (low.dtype, high.dtype) == ("float16", "float32")
    for run, end, speed in ((low, 0.2234, 5000), (high, 0.2290, 2800)):
        assert list(run.epochs) == list(range(120))
        assert round(run.last.top1, 4) == end
        assert run.batch_size == 1024
        assert run.speed == pytest.approx(speed, rel=0.05)
        assert all(None not in (e.top1, e.top5, e.speed, e.seconds, e.lr)
                   for e in run.epochs.values())
    csv, = (run for run in read_logs([SHARED / "imagenet" /
                                 "resnet50_gluoncv_fp32_vs_fp16_per_epoch.csv"])
            if run.model == "resnet50_v1b" and run.dtype == "float16")
    assert csv.epochs.keys() == low.epochs.keys()
    for epoch, logged in zip(csv.epochs.values(), low.epochs.values()):
        assert (epoch.top1, epoch.top5) == (logged.top1, logged.top5)


def test_arguments_with_any_characters_are_read_as_text(tmp_path):
    names = ["<script>", "a'b", 'a"b', "a, b=c", "(x)", "[y", "\\", "模型"]
    for name in names:
        run, = read_text(tmp_path, logs.gluoncv([0.5], model=name, wd=0.1))
        assert run.arguments == {"model": name, "wd": 0.1}
    run, = read_text(tmp_path, json.dumps({"arguments": {"model": "a\nb\x00\ud800"}}) + "\n"
                     + logs.jsonl([0.5]))
    assert run.model == "a b\ufffd\ufffd"


def test_gluoncv_amp_flag_is_number_type(tmp_path):
    runs = [run for amp in (False, True) for run in read_text(
        tmp_path, logs.header(network="vgg16_atrous", dataset="voc", amp=amp, seed=233)
        + "[Epoch 0] Validation: \nmAP=0.5\n", f"{amp}.log")]
    assert [run.dtype for run in runs] == ["float32", "float16"]
    comparison, = compare(groups(runs))
    assert comparison.differences == {}


# ---- valid and invalid values


# ---- CSV

@pytest.mark.parametrize("text", [
    "epoch,val_acc,val_loss,acc,loss\n0,0.5,1.2,0.9,1.1\n1,0.6,1.1,0.95,1\n",  # Keras
    "epoch,train_loss,valid_loss,accuracy,time\n0,1.1,1.2,0.5,01:20\n1,1,1.1,0.6,01:21\n",
    "epoch,step,train_loss,val_acc,val_loss\n0,9,,0.5,1.2\n0,9,1.1,,\n1,19,,0.6,1.1\n1,19,1,,\n",
    "epoch,accuracy,loss,test_loss\n1,0.5,1.1,1.2\n2,0.6,1,1.1\n"])
def test_tables_of_other_tools_are_read(text, tmp_path):
    run, = read_text(tmp_path, text, "a.csv")
    assert top1(run) == {0: 0.5, 1: 0.4}
    assert [(e.loss, e.validation_loss) for e in run.epochs.values()] == [(1.1, 1.2), (1.0, 1.1)]


# ---- truncated, resumed and concatenated logs

def values(run):
    """(epoch, value) pairs, and (epoch, loss scale) for each change."""
    return {(number, value) for number, epoch in run.epochs.items()
            for value in (epoch.top1, epoch.top5, epoch.seconds, epoch.speed, epoch.lr,
                          epoch.loss_scale)
            if value is not None} | {(number, scale) for number, _, scale in
                                     run.steps.get("loss_scale", [])}


FORMATS = pytest.mark.parametrize(("write", "arguments"), [
    (logs.gluoncv, {"tail": "\tloss-scale=1024\tskipped=12", "batches": 1}),
    (logs.gluoncv, {"model": "a", "batches": 1}), (logs.module, {"speeds": [999]}),
    (logs.jsonl, {"model": "a"})])


@FORMATS
def test_truncated_log_gives_no_wrong_values(write, arguments, tmp_path):
    text = write([0.912345, 0.512345], **arguments).encode()
    whole, = read_text(tmp_path, text)
    read_cuts = 0
    for cut in range(len(text)):
        try:
            run, = read_text(tmp_path, text[:cut])
        except ValueError as error:
            assert "is no training log" in str(error)  # noqa: PT017
        else:
            read_cuts += 1
            assert values(run) <= values(whole)
    assert read_cuts > len(text) / 4


@FORMATS
def test_truncated_log_can_be_followed_by_another(write, arguments, tmp_path):
    first = write([0.912345, 0.512345], **arguments).encode()
    second = logs.gluoncv([0.8, 0.7], prefix=logs.ASCTIME,  # its digits could continue a number
                          speed=2000, seconds=50, model="b", dtype="float32")
    known, = read_text(tmp_path, first)
    other, = read_text(tmp_path, second)
    for cut in range(first.index(b"\n") + 1, len(first)):
        runs = read_text(tmp_path, first[:cut] + second.encode())
        assert values(runs[-1]) == values(other)
        assert runs[-1].arguments == other.arguments
        assert len(runs) <= 2
        assert all(values(run) <= values(known) for run in runs[:-1])


@st.composite
def parts(draw):
    """Epochs of a run and of its resumptions, as (first, end)."""
    found = [(0, draw(st.integers(1, 6)))]
    for _ in range(draw(st.integers(0, 4))):
        first = draw(st.integers(1, found[-1][1]))
        found.append((first, draw(st.integers(first + 1, first + 6))))
    return found


@given(parts=parts(), headers=st.booleans())
@pytest.mark.parametrize("write", [logs.gluoncv, logs.module, logs.jsonl])
@SAME_FOLDER
def test_later_epochs_of_resumed_run_win(write, parts, headers, tmp_path):
    text, expected = "", {}
    for i, (first, end) in enumerate(parts):
        errors = [(100 * i + n + 1) / 1000 for n in range(first, end)]
        resumed = {"resume_epoch": first, "resume": i > 0, "start_epoch": first}
        text += write(errors, start=first, **({**RECIPE, **resumed} if headers or not i else {}))
        expected = {**{n: error for n, error in expected.items() if n < first},
                    **numbered(errors, first)}
    run, = read_text(tmp_path, text)
    assert top1(run) == expected
    assert list(run.epochs) == sorted(run.epochs)
    assert all(point[0] in run.epochs for of in run.steps.values() for point in of)


def test_resumption_is_noted(tmp_path):
    run, = read_text(tmp_path, logs.gluoncv([0.9, 0.8, 0.7]) + logs.gluoncv([0.6], start=1))
    assert run.notes == ["resumed after 1 epoch"]
    assert top1(run) == {0: 0.9, 1: 0.6}


def test_concatenated_logs_are_separate_runs(tmp_path):
    text = (logs.gluoncv([0.9, 0.8], **RECIPE) + logs.module([0.7, 0.6], network="vgg")
            + logs.jsonl([0.6, 0.5], model="a") + logs.gluoncv([0.4, 0.3]))
    runs = read_text(tmp_path, text)
    assert [(run.name, run.last.top1) for run in runs] == [
        ("a (1)", 0.8), ("a (2)", pytest.approx(0.6)), ("a (3)", 0.5), ("a (4)", 0.3)]
    assert [run.model for run in runs] == ["resnet50_v1b", "vgg", "a", ""]


def test_lines_logged_twice_count_once(tmp_path):
    text = logs.gluoncv(ERRORS, **RECIPE)
    run, = read_text(tmp_path, "".join(2 * line for line in text.splitlines(True)))
    assert (top1(run), run.hours[-1], run.notes) == (numbered(ERRORS), pytest.approx(1 / 12), [])


def test_missing_epochs_and_times_are_allowed(tmp_path):
    untimed = logs.gluoncv([0.4], start=7).replace("\ttime cost: 100.000000", "")
    run, = read_text(tmp_path, logs.gluoncv([0.5]) + untimed + logs.gluoncv([0.3], start=8))
    assert top1(run) == {0: 0.5, 7: 0.4, 8: 0.3}
    assert (run.hours, run.reached(0.1, by_time=True)) == ([], None)
    text = logs.gluoncv([0.5, 0.4]) + "[Epoch 2] training: accuracy=0.250000\n"
    run, = read_text(tmp_path, text)
    assert run.hours == pytest.approx([1 / 36, 2 / 36])


@pytest.mark.parametrize("line", ['{"step": 10, "loss": 0.5}', '{"Epoch": 1, "Loss": 0.5}',
                                  '[{"epoch": 0, "loss": 0.5}]'])
def test_json_lines_of_other_forms_are_refused_with_the_form(line, tmp_path):
    (tmp_path / "own.jsonl").write_text(f"{line}\n{line}\n")
    with pytest.raises(ValueError, match=r"log\.jsonl \(docs/recipes\.md\)") as error:
        read_logs([tmp_path / "own.jsonl"])
    lines = re.findall(r"{.*?}", str(error.value).partition("recipes.md")[2])
    (tmp_path / "own.jsonl").write_text("\n".join(lines))  # the lines in the message are valid
    (run,) = read_logs([tmp_path / "own.jsonl"])
    assert run.final == 60
