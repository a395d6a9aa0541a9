"""SyncBatchNorm over several devices, which deadlocks on CPUs."""
import gluon_amp as amp
import mxnet as mx
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn


def network(devices):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, in_channels=3),
            gluon.contrib.nn.SyncBatchNorm(in_channels=4, num_devices=devices), nn.Dense(2))
    net.initialize(ctx=[mx.cpu(i) for i in range(devices)])
    return amp.convert(net)


def test_several_cpus_are_refused_in_training_and_predict(x):
    net = network(2)
    with autograd.record(), pytest.raises(ValueError, match="Received: num_devices=2"):
        net(x)
    assert net(x).shape == (4, 2)
    with autograd.record(), pytest.raises(ValueError, match="waits for ever on CPUs"):
        net(x)


def test_module_refuses_several_cpus():
    symbol = mx.sym.contrib.SyncBatchNorm(mx.sym.var("data"), ndev=2, key="norm", name="norm")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(symbol, num_hidden=2), name="softmax")
    module = amp.Module(amp.convert_symbol(symbol), context=[mx.cpu(0), mx.cpu(1)],
                        loss_scale="dynamic")
    module.bind([("data", (4, 3))], [("softmax_label", (4,))])
    module.init_params()
    batch = mx.io.DataBatch([nd.ones((4, 3))], [nd.zeros(4)])
    with pytest.raises(ValueError, match="num_devices=2"):
        module.forward(batch, is_train=True)
    module.forward(batch, is_train=False)
    assert module.get_outputs()[0].shape == (4, 2)
