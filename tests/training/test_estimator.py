"""MXNet's Estimator trains with a gluon_amp.Trainer."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.training.estimator import BatchProcessor
from mxnet import gluon, nd
from mxnet.gluon import nn
from mxnet.gluon.contrib.estimator import Estimator
from trainers import LOSS, fit, same, with_trainer

pytestmark = pytest.mark.numpy


def network():
    mx.random.seed(3)
    net = nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu", in_units=8), nn.Dense(3, in_units=16))
    net.initialize(mx.init.Xavier())
    return amp.convert(net)


@pytest.fixture()
def batches(rng):
    x = rng.standard_normal((96, 8)).astype(np.float32)
    data = gluon.data.ArrayDataset(nd.array(x), nd.array(x[:, :3].argmax(axis=1)))
    return gluon.data.DataLoader(data, batch_size=16)


def estimator(net, trainer, **kwargs):
    metric = None
    if mx.util.is_np_array():  # whose arrays MXNet's own metrics do not take
        metric = mx.metric.CustomMetric(lambda label, out: (out.argmax(axis=1) == label).mean())
    made = Estimator(net, LOSS, metric, trainer=trainer, batch_processor=BatchProcessor(),
                     **kwargs)
    made.logger.disabled = True
    return made


def test_estimator_matches_training_loop(batches):
    (by_hand, trainer), (fitted, its_trainer) = (
        with_trainer(network(), "sgd", {"learning_rate": 0.5, "momentum": 0.9}, loss_scale=1024,
                     clip_norm=1.0) for _ in range(2))
    for _ in range(3):
        fit(by_hand, trainer, batches)
    made = estimator(fitted, its_trainer)
    made.fit(batches, val_data=batches, epochs=3)
    assert same(by_hand, fitted)
    assert made.val_metrics[0].get()[1] > 0.8


def test_estimator_with_mxnets_batch_processor_is_refused_with_ours(batches):
    net = network()
    made = Estimator(net, LOSS, trainer=amp.Trainer(net.collect_params(), "sgd"))
    made.logger.disabled = True
    with pytest.raises(RuntimeError, match=r"pass batch_processor=BatchProcessor\(\) of gluon_amp"):
        made.fit(batches, epochs=1)


def test_several_devices_share_a_step(batches):
    net = network()
    devices = [mx.cpu(0), mx.cpu(1)]
    net.collect_params().reset_ctx(devices)
    trainer = amp.Trainer(net.collect_params(), "adam")
    estimator(net, trainer, context=devices).fit(batches, epochs=1)
    one, two = net[0].weight.list_data()
    assert np.array_equal(one.asnumpy(), two.asnumpy())


def test_gluon_trainer_is_refused(batches):
    net = network()
    made = estimator(net, gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True}))
    with pytest.raises(TypeError, match=r"Valid: a gluon_amp\.Trainer\. "
                                        r"Received: mxnet\.gluon\.trainer\.Trainer"):
        made.fit(batches, epochs=1)
