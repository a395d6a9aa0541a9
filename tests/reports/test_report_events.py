"""TensorBoard's event files are read, and refused if they are damaged."""
import io

import pytest
from gluon_amp.reports import read_logs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("tensorboard")
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.record_writer import RecordWriter

VERSION = Event(file_version="brain.Event:2").SerializeToString()
# Written by tensorboard 2.21: err_top1 0.5 at step 0, 0.25 at step 1.
REAL = bytes.fromhex(
    "4800000000000000fe92489d091f17c1a78fc0da411a0d627261696e2e4576656e743a32522e0a2c74656e736f7262"
    "6f6172642e73756d6d6172792e7772697465722e6576656e745f66696c655f777269746572b35e9aa2320000000000"
    "0000241956ec096120c1a78fc0da412a270a250a086572725f746f7031420a080112002a040000003f4a0d0a090a07"
    "7363616c61727320011822" "94d034000000000000005e33175c091724c1a78fc0da4110012a270a250a08657272"
    "5f746f7031420a080112002a040000803e4a0d0a090a077363616c6172732001" "8fd8b427")


def records(*messages):
    """An event file of these messages."""
    file = io.BytesIO()
    for message in messages:
        RecordWriter(file).write(message)
    return file.getvalue()


def value(step=0, **of):
    """An event with a value."""
    return Event(step=step, summary=Summary(value=[Summary.Value(**of)])).SerializeToString()


def events(**scalars):
    """An event file of these series: tag (__ for /): {step: value}."""
    return records(VERSION, *(
        value(step, tag=tag.replace("__", "/"), simple_value=number)
        for tag, series in scalars.items() for step, number in series.items()))


def read_bytes(folder, content, name="run-fp16"):
    path = folder / name / "events.out.tfevents.1.host"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return read_logs([path])[0]


def errors(run):
    return [epoch.top1 for epoch in run.epochs.values()]


def test_file_written_by_tensorboard_is_read(tmp_path):
    run = read_bytes(tmp_path, REAL)
    assert (run.name, run.dtype, list(run.epochs), errors(run)) == (
        "run-fp16", "float16", [0, 1], [0.5, 0.25])


@pytest.mark.parametrize("steps", [(0, 1), (1, 2), (500, 1000)])
@pytest.mark.parametrize("tag", ["validation__accuracy", "val_acc", "epoch_accuracy", "Accuracy"])
def test_accuracies_are_read_with_any_step_numbering(tag, steps, tmp_path):
    run = read_bytes(tmp_path, events(**{tag: dict(zip(steps, (0.5, 0.75)))}))
    assert (list(run.epochs), errors(run)) == ([0, 1], [0.5, 0.25])
    assert run.notes == (["its 2 results stand at steps 500 to 1,000; each is taken for an epoch"]
                         if steps[0] == 500 else [])


def test_steps_within_epochs_become_series(tmp_path):
    run = read_bytes(tmp_path, events(
        epoch__err_top1={0: 0.5, 1: 0.25}, epoch__validation_loss={0: 2, 1: 1.5},
        step__loss={0: 3, 4: 2, 9: 1}, step__gradient_norm={0: 1.5}, train__accuracy={0: 0.25},
        step__loss_scale={0: 1024, 4: 512}, step__skipped={0: 0, 4: 1}))
    assert [epoch.validation_loss for epoch in run.epochs.values()] == [2, 1.5]
    assert run.batches == 5
    assert run.steps == {"loss": [(0, 0, 3), (0, 4, 2), (1, 4, 1)], "gradient_norm": [(0, 0, 1.5)],
                         "loss_scale": [(0, 0, 1024), (0, 4, 512)],
                         "skipped": [(0, 0, 0), (0, 4, 1)]}


def test_truncated_last_record_is_ignored(tmp_path):
    whole = events(err_top1={0: 0.5, 1: 0.25})
    assert list(read_bytes(tmp_path, whole[:-3]).epochs) == [0]


def test_damaged_file_is_refused_with_byte_offset(tmp_path):
    whole = events(err_top1={0: 0.5, 1: 0.25})
    second = len(records(VERSION))
    for place in (0, 20):  # in the length of the second record, and in its message
        damaged = bytearray(whole)
        damaged[second + place] ^= 255
        with pytest.raises(ValueError, match=f"is damaged at byte {second}"):
            read_bytes(tmp_path, bytes(damaged))


@pytest.mark.parametrize("tags", [("val_acc", "acc"), ("Accuracy__val", "Accuracy__train"),
                                  ("eval_accuracy", "accuracy")])
def test_training_accuracy_is_not_mistaken_for_validation(tags, tmp_path):
    run = read_bytes(tmp_path, events(**{tag: {0: value} for tag, value in zip(tags, (0.5, 0.9))}))
    assert errors(run) == [0.5]


def test_names_of_folders_and_tags_tell_what_a_curve_is(tmp_path):
    for tag, message in (
            ("epoch_accuracy", "epoch_accuracy is of training, as the folder's name"),
            ("mood", r"no scalar of validation by epoch.*Its tags: mood")):
        with pytest.raises(ValueError, match=message):
            read_bytes(tmp_path, events(**{tag: {0: 0.5}}), "train")
    assert errors(read_bytes(tmp_path, events(epoch__err_top1={0: 0.5}), "train")) == [0.5]
    curve = events(accuracy_curves={0: 0.5, 1: 0.75})
    assert errors(read_bytes(tmp_path, curve, "valid_acc")) == [0.5, 0.25]


def test_arguments_are_read_from_text_summary(tmp_path):
    text = TensorProto(dtype="DT_STRING", string_val=[b'{"dtype": "bfloat16", "seed": 3}'])
    run = read_bytes(tmp_path, events(epoch__err_top1={0: 0.5})
                     + records(value(tag="arguments", tensor=text)))
    assert (run.dtype, run.seed) == ("bfloat16", "3")


def test_files_of_resumed_run_are_one_run(tmp_path):
    folder = tmp_path / "float16-a"
    folder.mkdir()
    parts = [{0: 0.5, 1: 0.4, 2: 0.9}, {2: 0.3, 3: 0.2}, {0: 0.6, 1: 0.5}]
    for i, part in enumerate(parts):
        (folder / f"events.out.tfevents.{i}.host").write_bytes(events(epoch__err_top1=part))
    run, other = read_logs(sorted(folder.iterdir()))
    assert errors(run) == pytest.approx([0.5, 0.4, 0.3, 0.2])
    assert (run.name, run.notes) == ("float16-a", ["resumed after 2 epochs"])
    assert list(other.epochs) == [0, 1]


@given(content=st.binary(max_size=200))
@settings(deadline=None, max_examples=100,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_bytes_in_record_are_read_or_refused(content, tmp_path):
    tensor = TensorProto(dtype="DT_FLOAT", tensor_content=content)
    for message in (content, value(tag="acc", tensor=tensor)):
        try:
            read_bytes(tmp_path, records(VERSION, message))
        except ValueError as error:
            assert "tfevents" in str(error)  # noqa: PT017
