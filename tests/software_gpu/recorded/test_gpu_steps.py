"""The cost of a step on a GPU, compared to float32 training of the same network."""
import subprocess
import sys

import gluon_amp as amp
import mxnet as mx
import networks
import numpy as np
import pytest
from model_zoo import zoo_network
from software_gpu import recording
from steps import GPU, Training, calls_of, comparisons, counted, layers, numbers, own_log, settled

HALVES = "GlobalReductionKernel<mshadow::half"
COPY = "MultiSGDKernel<float, false, false>"  # copies moving averages
DATA = numbers(4, 8, 6, 6)
OPTIMIZERS = ["sgd", "nag", "adam", "adamw", "lamb", "rmsprop", "ftrl", "signum"]


def update_of(count, policy, optimizer):
    training = Training(layers(count), policy, optimizer)
    _, update = settled(training, DATA)
    return counted(update)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_update_takes_few_launches_more_than_float32(optimizer):
    float32, float16 = (update_of(10, policy, optimizer) for policy in (None, "float16"))
    # LAMB takes six launches for each type of weights, and norms have float32 weights; one launch
    # copies moving averages; four and a copy are for the norm of the gradients
    assert float16["launches"] <= float32["launches"] + 4 + (7 if optimizer == "lamb" else 5)
    assert float16["casts"] == 0
    assert float16["copies"] <= float32["copies"] + 1 + (optimizer == "adamw")
    assert float16["synchronizations"] <= max(float32["synchronizations"], 7)


def test_step_runs_with_gpu_as_current_context():
    training = Training(layers(2))
    with GPU:
        training.after(2, numbers(4, 8, 6, 6))
    assert training.trainer.skipped == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
def test_launches_of_update_do_not_depend_on_number_of_weights(optimizer):
    few, many = (update_of(count, "float16", optimizer) for count in (2, 12))
    assert few["launches"] == many["launches"] <= 17
    assert few["synchronizations"] == many["synchronizations"]


@pytest.mark.parametrize(("norms", "launches"), [(20, 1), (30, 1), (31, 2)])
def test_copy_of_averages_takes_a_launch_for_each_60(norms, launches):
    training = Training(layers(norms), "float16", "adam")
    settled(training, DATA)
    calls = calls_of(lambda: training.step(DATA))
    copies = [call for call in calls if COPY in call.kernel]
    assert len(copies) == launches


@pytest.mark.parametrize("name", ["resnet18_v1", "resnet50_v1", "encoder", "lstm"])
def test_step_costs_nearly_as_in_float32(name):
    make, inputs = {**networks.ZOO, **networks.OTHERS}[name]
    float32, float16 = (
        counted([call for calls in settled(Training(make(), policy),
                                           *inputs(np.random.default_rng(0))) for call in calls])
        for policy in (None, "float16"))
    assert float16["copies"] == 1
    assert float16["synchronizations"] <= float32["synchronizations"] + 1
    if "resnet" in name:
        assert float16["launches"] <= float32["launches"] * 1.06


def test_unwritten_weights_of_static_graph_are_not_compared():
    net = zoo_network("ssd_512_mobilenet1.0_custom", classes=["one", "two"],
                      pretrained_base=False)
    _, update = settled(Training(net), numbers(2, 3, 128, 128))
    assert not comparisons(update)


@pytest.mark.parametrize("how", ["set_data", "in place", "loaded"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_master_weight_follows_only_a_written_weight(how, optimizer, tmp_path):
    training = Training(layers(3), optimizer=optimizer)
    settled(training, DATA)
    weight = training.net[0].weight
    training.net.save_parameters(str(tmp_path / "net.params"))
    training.backward(DATA)

    def write():
        if how == "set_data":
            weight.set_data(mx.nd.ones(weight.shape))
        elif how == "in place":
            weight.data()[0] = 2
        else:
            training.net.load_parameters(str(tmp_path / "net.params"))

    write()
    mx.nd.waitall()
    followed = {"set_data": 1, "in place": 1, "loaded": 5}[how]
    assert len(comparisons(calls_of(lambda: training.trainer.step(4)))) == followed
    training.backward(DATA)
    assert not comparisons(calls_of(lambda: training.trainer.step(4)))


def settled_scale():
    return amp.DynamicLossScale(1024, settled=True)


def test_accumulated_gradients_are_checked_once_per_step():
    training = Training(layers(3), loss_scale=settled_scale())
    training.net.collect_params().setattr("grad_req", "add")
    training.after(3, DATA)
    update = calls_of(lambda: (training.backward(DATA), training.backward(DATA),
                               training.trainer.step(8)))
    assert counted(update)["copies"] == 1


def test_clipping_reuses_sums_of_squares():
    training = Training(layers(3), clip_norm=1.0).after(3, DATA)
    assert counted(calls_of(lambda: training.step(DATA)))["copies"] == 1


def test_scale_loss_costs_as_backward():
    training, data = Training(layers(3)), DATA.as_in_context(GPU)

    def step():
        with mx.autograd.record():
            loss = (training.net(data) ** 2).mean()
            with amp.scale_loss(loss, training.trainer) as scaled:
                scaled.backward()
        training.trainer.step(4)
    for _ in range(3):
        step()
    assert counted(calls_of(step))["copies"] == 1


def test_first_step_compares_no_weights():
    training = Training(layers(2))
    assert not comparisons(calls_of(lambda: training.step(DATA)))


def test_overflow_skips_update_and_lowers_scale_and_the_next_step_compares_no_weights():
    training = Training(layers(2), loss_scale=settled_scale()).after(3, DATA)
    scale = training.trainer.loss_scale
    recording.pretend_finite(False, HALVES)
    update = calls_of(lambda: training.step(DATA))
    assert training.trainer.skipped == 1
    assert training.trainer.loss_scale == scale / 2
    assert not [call for call in update if "SGD" in call.kernel and COPY not in call.kernel]
    recording.pretend(HALVES, 2, 0.0, 0)
    assert not comparisons(calls_of(lambda: training.step(DATA)))
    assert training.trainer.skipped == 1


PEAK = """
import gluon_amp
import mxnet as mx
from software_gpu import steps
steps.begin({how!r})
net = mx.gluon.model_zoo.vision.resnet18_v1(classes=16)
net.initialize(ctx=mx.gpu(0))
data, labels = mx.nd.ones((8, 3, 224, 224), mx.gpu(0)), mx.nd.zeros(8, mx.gpu(0))
loss_fn = mx.gluon.loss.SoftmaxCrossEntropyLoss()
print(steps.record(net, [data], {how!r}, loss_fn, labels, {optimizer!r})["peak"])
"""


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_memory_is_at_most_that_of_contrib_amp(optimizer):
    ours, mxnets = (int(subprocess.check_output(
        [sys.executable, "-W", "ignore", "-c", PEAK.format(how=how, optimizer=optimizer)],
        stderr=subprocess.DEVNULL, env=own_log())) for how in ("gluon_amp", "mx.contrib.amp"))
    assert 0 < ours <= mxnets


@pytest.mark.parametrize(("optimizer", "launches"), [
    ("sgd", 3), ("adamw", 3), ("lamb", 18), ("nag", 122)])
def test_only_the_update_follows_the_check(optimizer, launches):
    training = Training(layers(40), optimizer=optimizer, loss_scale=settled_scale())
    _, update = settled(training, DATA)
    check = min(i for i, call in enumerate(update) if call.is_copy_to_host)
    kernels = [call.kernel for call in update[check:] if call.is_launch and COPY not in call.kernel]
    # of 41 float16 weights and 81 float32 ones, at most 45 together
    assert len(kernels) == launches, kernels
    waits = sum(call.is_synchronization for call in update[check:])
    # for the check, the update and the averages; AdamW's operator reads a number in each launch
    assert waits == (6 if optimizer == "adamw" else 3)


def test_step_without_loss_scale_reads_nothing():
    training = Training(layers(2), loss_scale=None)
    calls = [call for part in settled(training, DATA) for call in part]
    assert counted(calls)["copies"] == 0


def test_static_graphs_synchronize_rarely_unless_told():
    def passes(**flags):
        training = Training(layers(20))
        training.net.hybridize(static_alloc=True, static_shape=True, **flags)
        return counted(settled(training, DATA)[0])

    ours, mxnets = passes(), passes(forward_bulk_size=15, backward_bulk_size=15)
    assert ours["launches"] == mxnets["launches"]
    assert ours["synchronizations"] <= mxnets["synchronizations"] - 8
