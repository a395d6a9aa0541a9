"""gluon_amp.report.read: logs that were cut, resumed or joined are read as what was trained."""
import pytest
import training_logs as logs
from hypothesis import given
from hypothesis import strategies as st
from training_logs import ERRORS, RECIPE, SAME_FOLDER, numbered, read_text, top1


def values(run):
    """(number of an epoch, value), and the loss scale whenever it changed."""
    return {(number, value) for number, epoch in run.epochs.items()
            for value in (epoch.top1, epoch.top5, epoch.seconds, epoch.speed, epoch.lr, epoch.scale)
            if value is not None} | {(number, scale) for number, _, scale, _ in run.trace}


FORMATS = pytest.mark.parametrize(("write", "arguments"), [
    (logs.gluoncv, {"tail": "\tloss-scale=1024\tskipped=12", "batches": 1}),
    (logs.gluoncv, {"model": "a", "batches": 1}), (logs.module, {"speeds": [999]}),
    (logs.jsonl, {"model": "a"})])


@FORMATS
def test_a_log_cut_anywhere_gives_no_number_that_it_did_not_have(write, arguments, tmp_path):
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
def test_a_log_cut_anywhere_may_be_followed_by_another_one(write, arguments, tmp_path):
    first = write([0.912345, 0.512345], **arguments).encode()
    second = logs.gluoncv([0.8, 0.7], prefix=logs.ASCTIME,  # its digits could go on with a number
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
    """The epochs of a run and of its resumptions, as (first, end)."""
    found = [(0, draw(st.integers(1, 6)))]
    for _ in range(draw(st.integers(0, 4))):
        first = draw(st.integers(1, found[-1][1]))
        found.append((first, draw(st.integers(first + 1, first + 6))))
    return found


@given(parts=parts(), headers=st.booleans())
@pytest.mark.parametrize("write", [logs.gluoncv, logs.module, logs.jsonl])
@SAME_FOLDER
def test_however_a_run_was_resumed_the_later_epochs_win(write, parts, headers, tmp_path):
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
    assert run.trace == [point for point in run.trace if point[0] in run.epochs]


def test_a_resumed_run_says_where(tmp_path):
    run, = read_text(tmp_path, logs.gluoncv([0.9, 0.8, 0.7]) + logs.gluoncv([0.6], start=1))
    assert run.notes == ["resumed after 1 epoch"]
    assert top1(run) == {0: 0.9, 1: 0.6}


def test_joined_logs_of_all_formats_are_runs_of_their_own(tmp_path):
    text = (logs.gluoncv([0.9, 0.8], **RECIPE) + logs.module([0.7, 0.6], network="vgg")
            + logs.jsonl([0.6, 0.5], model="a") + logs.gluoncv([0.4, 0.3]))
    runs = read_text(tmp_path, text)
    assert [(run.name, run.last.top1) for run in runs] == [
        ("a (1)", 0.8), ("a (2)", pytest.approx(0.6)), ("a (3)", 0.5), ("a (4)", 0.3)]
    assert [run.model for run in runs] == ["resnet50_v1b", "vgg", "a", ""]


def test_lines_that_were_logged_twice_count_once(tmp_path):
    text = logs.gluoncv(ERRORS, **RECIPE)
    run, = read_text(tmp_path, "".join(2 * line for line in text.splitlines(True)))
    assert (top1(run), run.hours[-1], run.notes) == (numbered(ERRORS), pytest.approx(1 / 12), [])


def test_epochs_may_be_missing_and_times_too(tmp_path):
    untimed = logs.gluoncv([0.4], start=7).replace("\ttime cost: 100.000000", "")
    run, = read_text(tmp_path, logs.gluoncv([0.5]) + untimed + logs.gluoncv([0.3], start=8))
    assert top1(run) == {0: 0.5, 7: 0.4, 8: 0.3}
    assert run.hours == []
    assert run.hours_to(0.1) is None


def test_a_run_killed_before_its_last_time_keeps_the_hours_before(tmp_path):
    text = logs.gluoncv([0.5, 0.4]) + "[Epoch 2] training: accuracy=0.250000\n"
    run, = read_text(tmp_path, text)
    assert run.hours == pytest.approx([1 / 36, 2 / 36])


def test_what_is_not_finite_is_not_known(tmp_path):
    text = logs.gluoncv([0.5, float("nan"), float("inf")])
    run, = read_text(tmp_path, text)
    assert top1(run) == {0: 0.5}
    assert run.best == (0, 0.5)
    line = '{"epoch": 0, "err_top1": NaN, "lr": Infinity, "seconds": 1%s}\n' % ("0" * 400)
    run, = read_text(tmp_path, line)
    assert run.epochs[0].top1 is run.epochs[0].lr is run.epochs[0].seconds is None
