"""gluon_amp.report.read: what others' scripts and tools write is read as they mean it."""
import pytest
import training_logs as logs
from gluon_amp.report.compare import compare, groups
from training_logs import read_text, top1

# ---- GluonCV

def test_gluoncvs_amp_flag_is_the_type_of_number(tmp_path):
    runs = [run for amp in (False, True) for run in read_text(
        tmp_path, logs.header(network="vgg16_atrous", dataset="voc", amp=amp, seed=233)
        + "[Epoch 0] Validation: \nmAP=0.5\n", f"{amp}.log")]
    assert [run.dtype for run in runs] == ["float32", "float16"]
    comparison, = compare(groups(runs))
    assert comparison.differences == {}


def test_a_mean_precision_of_nearly_nothing_is_read(tmp_path):
    run, = read_text(tmp_path, "[Epoch 0] Validation: \na=nan\nmAP=5.123e-05\n")
    assert top1(run) == {0: pytest.approx(1 - 5.123e-05)}


def test_mask_rcnns_precision_is_that_of_its_masks(tmp_path):
    run, = read_text(tmp_path, "[Epoch 0] Validation: \n~~~~ Mean AP for bbox ~~~~\n=38.3\n"
                               "~~~~ Summary segm metrics ~~~~\n=x\n"
                               "~~~~ Mean AP for segm ~~~~\n=34.7\n")
    assert (run.measure, run.final) == ("mask mAP", pytest.approx(34.7))


def test_train_recognizers_percent_are_percent(tmp_path):
    run, = read_text(tmp_path, "[Epoch 000] training: acc=70.100000\t loss=1.200000\n"
                               "[Epoch 000] validation: acc-top1=71.250000 acc-top5=90.500000 "
                               "loss=1.100000\n")
    assert (top1(run), run.epochs[0].top5) == ({0: 0.2875}, pytest.approx(0.095))


def test_train_horovods_log_is_read(tmp_path):
    text = logs.header("INFO:root:", model="resnet50_v1", dtype="float16") + "".join(
        f"INFO:root:Epoch[{n}] Batch[50] Loss[2.300]\n"
        f"INFO:root:Epoch[{n}] Rank[0] Batch[50]\taccuracy=0.250000\tlr=0.100000\n"
        f"INFO:root:Epoch[{n}] Rank[0] Batch[99]\tTime cost=12.50\tTrain-metric=0.300000\n"
        f"INFO:root:Epoch[{n}]\tSpeed: 1234.50 samples/sec\n"
        f"INFO:root:Epoch[{n}] Rank[0]\tValidation-accuracy={1 - error:f}\t"
        "Validation-top_k_accuracy_5=0.900000\n" for n, error in enumerate((0.5, 0.25)))
    run, = read_text(tmp_path, text)
    assert top1(run) == {0: 0.5, 1: 0.25}
    last = run.epochs[1]
    assert (last.seconds, last.speed, last.top5) == (12.5, 1234.5, pytest.approx(0.1))


def test_a_log_with_a_carriage_return_in_each_line_is_read(tmp_path):
    for text in ("Epoch 0 iteration 0099/0100: training loss 1.250\n"
                 "Epoch 0 validation pixAcc: 0.900, mIoU: 0.500\n",
                 logs.gluoncv([0.5]), logs.module([0.5]), "[Epoch 0] Validation: \nmAP=0.5\n"):
        run, = read_text(tmp_path, text.replace("\n", "\r\n"))
        assert top1(run) == {0: 0.5}


# ---- what counts, and what cannot be

@pytest.mark.parametrize("write", [logs.gluoncv, logs.jsonl])
def test_epochs_that_a_log_counts_from_1_are_as_many_as_were_trained(write, tmp_path):
    run, = read_text(tmp_path, write([0.5, 0.4, 0.3], start=1, model="a", num_epochs=4))
    assert (run.done, list(run.epochs)) == (3, [0, 1, 2])
    resumed, = read_text(tmp_path, write([0.5, 0.4], start=1, model="a", resume_epoch=1))
    assert list(resumed.epochs) == [1, 2]


@pytest.mark.parametrize("error", [-0.5, 1.5, 25.3])
def test_what_is_no_share_is_refused(error, tmp_path):
    with pytest.raises(ValueError, match=r"a\.log: epoch 1 has an error of .* Valid: shares"):
        read_text(tmp_path, logs.jsonl([0.5, error]))


def test_what_cannot_be_measured_is_not_known(tmp_path):
    text = logs.jsonl([0.5, 0.4]).replace("1000.0", "-7").replace("100.0", "-3")
    text = text.replace('"lr": 0.1', '"lr": 1e300')
    run, = read_text(tmp_path, text.replace("0.4", "true"))
    assert [(epoch.seconds, epoch.speed, epoch.lr) for epoch in run.epochs.values()] == [
        (None, None, None)] * 2
    assert run.epochs[1].top1 is None


def test_a_file_that_begins_with_a_byte_order_mark_is_read_from_its_first_line(tmp_path):
    run, = read_text(tmp_path, "\ufeff" + logs.jsonl([0.5], dtype="float16"))
    assert run.dtype == "float16"


# ---- CSV

@pytest.mark.parametrize("text", [
    "epoch,val_acc,val_loss,acc,loss\n0,0.5,1.2,0.9,1.1\n1,0.6,1.1,0.95,1\n",  # Keras
    "epoch,train_loss,valid_loss,accuracy,time\n0,1.1,1.2,0.5,01:20\n1,1,1.1,0.6,01:21\n",
    "epoch,step,train_loss,val_acc,val_loss\n0,9,,0.5,1.2\n0,9,1.1,,\n1,19,,0.6,1.1\n1,19,1,,\n",
    "epoch,accuracy,loss,test_loss\n1,0.5,1.1,1.2\n2,0.6,1,1.1\n"])
def test_the_tables_of_other_tools_are_read(text, tmp_path):
    run, = read_text(tmp_path, text, "a.csv")
    assert top1(run) == {0: 0.5, 1: 0.4}
    assert [(e.loss, e.validation_loss) for e in run.epochs.values()] == [(1.1, 1.2), (1.0, 1.1)]


def test_rows_of_one_epoch_that_say_different_things_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"line 3: epoch 0 has another top1_err .* left of"):
        read_text(tmp_path, "epoch,seed,top1_err\n0,0,0.5\n0,1,0.4\n", "a.csv")


def test_a_cell_that_is_no_share_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.csv, line 2: top1_acc 150 is no share"):
        read_text(tmp_path, "epoch,top1_acc\n0,150\n", "a.csv")
