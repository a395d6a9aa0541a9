"""Training in several threads: networks of their own train as in one thread, and a second thread in
a step is refused."""
import threading
from concurrent.futures import ThreadPoolExecutor

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from processes import printed
from trainers import One, make, ones, recorded, values

THREADS = 3


def run(threads, function):
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, range(threads)))


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_networks_of_their_own_train_as_in_one_thread(policy):
    def trained(seed):
        rng, loss_fn = np.random.default_rng(seed), gluon.loss.SoftmaxCrossEntropyLoss()
        net, trainer = nets[seed]
        for size in (6, 7, 6, 7, 6):
            x = nd.array(rng.standard_normal((size, 3, 8, 8)))
            y = nd.array(rng.integers(0, 5, size))
            with autograd.record():
                loss = loss_fn(net(x), y)
            trainer.backward(loss)
            trainer.step(size)
        return values(net), trainer.loss_scale

    results = []
    for threads in (1, THREADS):
        nets = []
        for _ in range(THREADS):
            net = make(policy)
            nets.append((net, amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})))
        with ThreadPoolExecutor(threads) as pool:
            results.append(list(pool.map(trained, range(THREADS))))
    for (found, scale), (wanted, same_scale) in zip(*results):
        assert scale == same_scale
        assert all(map(np.array_equal, found, wanted))


CALLS = {
    "backward": lambda net, trainer: trainer.backward(recorded(net, ones(), ones())),
    "step": lambda net, trainer: trainer.step(1),
    "allreduce_grads": lambda net, trainer: trainer.allreduce_grads(),
    "update": lambda net, trainer: trainer.update(1),
    "unscale": lambda net, trainer: trainer.unscale(),
    "clip_norm": lambda net, trainer: trainer.clip_norm(1),
    "gluon_amp.backward": lambda net, trainer: amp.backward(
        recorded(net, ones(), ones()), [trainer, amp.Trainer([One().a], "sgd")])}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("loss_scale", [64, "dynamic"])
def test_second_thread_in_a_step_is_refused(call, loss_scale):
    net = One()
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, loss_scale=loss_scale)
    trainer.backward(recorded(net, ones(), ones()))
    with ThreadPoolExecutor(1, "other") as pool:
        with pytest.raises(RuntimeError, match=r"\(\) was called in the thread other_0, while the "
                                               r"thread MainThread is in a step of the same"):
            pool.submit(CALLS[call], net, trainer).result()
        assert trainer.step(1)
        assert all((value == 0).all() for value in values(net))
        # a step for each thread is one after the other
        pool.submit(CALLS["backward"], net, trainer).result()
        with pytest.raises(RuntimeError, match="thread MainThread, while the thread other_0"):
            trainer.step(1)
        assert pool.submit(CALLS["step"], net, trainer).result()
        pool.submit(CALLS["backward"], net, trainer).result()
    assert trainer.step(1)  # the other thread has ended
    assert all((value == -2).all() for value in values(net))


@pytest.mark.parametrize("loss_scale", [None, 64])
def test_backward_for_each_device_in_a_thread_is_refused(loss_scale):
    devices, together = [mx.cpu(0), mx.cpu(1)], threading.Barrier(2, timeout=60)
    net = One(devices=devices)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, loss_scale=loss_scale)

    def backward(i):
        loss = recorded(net, ones(device=devices[i]), ones(device=devices[i]))
        together.wait()
        try:
            trainer.backward(loss)
        except RuntimeError as error:
            return str(error)
        finally:
            together.wait()

    refused, = [said for said in run(2, backward) if said]
    assert "Valid: the losses of all devices in one call, as trainer.backward([loss, " in refused
    with autograd.record():
        losses = [net(ones(device=d), ones(device=d)) for d in devices]
    trainer.backward(losses)
    assert trainer.step(2)
    assert all((value == 0).all() for value in values(net))


def test_second_thread_in_a_module_is_refused():
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    module = amp.Module(mx.sym.SoftmaxOutput(net, name="softmax"), loss_scale=8)
    batch = mx.io.DataBatch([nd.ones((2, 3))], [nd.array([0, 1])])
    module.bind([("data", (2, 3))], [("softmax_label", (2,))])
    module.init_params()
    module.init_optimizer()
    module.forward_backward(batch)
    with ThreadPoolExecutor(1, "other") as pool, \
            pytest.raises(RuntimeError, match=r"update\(\) was called in the thread other_0"):
        pool.submit(module.update).result()
    assert module.update()


SHARED = """
import sys
from concurrent.futures import ThreadPoolExecutor
import gluon_amp as amp, mxnet as mx
from mxnet import autograd, nd
from mxnet.gluon import nn

sys.setswitchinterval(1e-5)
net = nn.HybridSequential()
net.add(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8), nn.Activation("relu"),
        nn.GlobalAvgPool2D(), nn.Dense(5, in_units=8))
net.initialize()
amp.convert(net, sys.argv[1])
trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

def train(seed):
    refused = 0
    for _ in range(30):
        try:
            with autograd.record():
                loss = net(nd.ones((4, 3, 8, 8)) * seed).square().sum()
            trainer.backward(loss)
            trainer.step(4)
        except (RuntimeError, UserWarning) as error:  # MXNetError, too
            refused += 1
    return refused

with ThreadPoolExecutor(3) as pool:
    refused = sum(pool.map(train, range(3)))
mx.nd.waitall()
print(0 < refused < 90)
"""


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_threads_that_share_a_network_do_not_crash(policy):
    assert printed(SHARED, policy).splitlines()[-1] == "True"
