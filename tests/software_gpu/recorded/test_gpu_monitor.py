"""Monitor on a GPU: its launches, and that training does not change."""
import json

import gluon_amp as amp
import mxnet as mx
import pytest
from gluon_amp.inspection.hooks import Statistics
from steps import Training, calls_of, counted, layers, numbers

DATA = (4, 8, 6, 6)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def observed(training, monitor=None):
    def run():
        training.step(numbers(*DATA))
        if monitor:
            monitor.step()
    return counted(calls_of(run))


@pytest.mark.parametrize("policy", [None, "float16", "mixed_float16"])
@pytest.mark.parametrize("count", [2, 8])
def test_statistics_take_few_launches_for_each_tensor(policy, count, tmp_path):
    training = Training(layers(count), policy)
    for _ in range(3):
        training.step(numbers(*DATA))
    training.net.hybridize(static_alloc=False, static_shape=False)  # as in an observed step
    for _ in range(2):
        training.step(numbers(*DATA))
    plain = observed(training)
    with amp.Monitor(training.net, training.trainer, tmp_path / "a.jsonl", 1) as monitor:
        observed(training, monitor)  # the check of loss heads may repeat its backward pass
        seen = observed(training, monitor)
    tensors = sum(line["step"] == 2 for line in lines(tmp_path / "a.jsonl"))
    assert tensors > 8 * count
    outputs = 1  # an identity behind it, and its gradient
    assert seen["launches"] - plain["launches"] <= Statistics.LAUNCHES * tensors + 2 * outputs + 4
    assert seen["copies"] - plain["copies"] <= 1


@pytest.mark.parametrize("policy", [None, "float16"])
def test_other_steps_have_the_same_calls(policy, tmp_path):
    training = Training(layers(2), policy)
    for _ in range(3):
        training.step(numbers(*DATA))
    plain = observed(training)
    with amp.Monitor(training.net, training.trainer, tmp_path / "a.jsonl", 3) as monitor:
        assert observed(training, monitor) == plain
        for _ in range(3):
            observed(training, monitor)
        assert observed(training, monitor) == plain
    assert {line["step"] for line in lines(tmp_path / "a.jsonl")} == {3}


def test_two_gpus_add_up(tmp_path):
    training = Training(layers(2), "float16", context=[mx.gpu(0), mx.gpu(1)])
    training.step(numbers(*DATA))
    with amp.Monitor(training.net, training.trainer, tmp_path / "a.jsonl", 1,
                     ".*conv.*_fwd") as monitor:
        observed(training, monitor)
    assert {line["numbers"] for line in lines(tmp_path / "a.jsonl")
            if line["kind"] == "output"} == {2 * 4 * 8 * 6 * 6}
