"""Training in several threads: networks of their own train as in one thread, and the calls of a
step may come from several threads."""
import threading
from concurrent.futures import ThreadPoolExecutor

import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from cases import cases
from mxnet import autograd, gluon, nd
from processes import printed
from trainers import One, make, ones, recorded, values, with_trainer

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
    "step": lambda trainer: trainer.step(1),
    "update": lambda trainer: (trainer.allreduce_grads(), trainer.update(1))[1],
    "unscale": lambda trainer: (trainer.unscale(), trainer.update(1))[1],
    "clip_norm": lambda trainer: (trainer.clip_norm(9), trainer.update(1))[1]}


def backward(net, trainer, how, device=None):
    """A backward pass of a network whose gradients are 2**-10, which the largest scale fits."""
    loss = recorded(net, *[ones(2.0 ** -10, device=device)] * 2)
    if how == "scale_loss":
        with autograd.record(), amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    elif how == "gluon_amp.backward":
        amp.backward(loss, [trainer])
    else:
        trainer.backward(loss)


HOW = ["backward", "scale_loss", "gluon_amp.backward"]
RATE = {"learning_rate": 2.0 ** 10}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("loss_scale", [64, "dynamic"])
def test_one_thread_steps_after_the_backward_pass_of_another(loss_scale, how, call):
    """GluonCV's `Parallel` runs the first backward pass in the main thread, later ones in another,
    and each step in the main thread."""
    net, trainer = with_trainer(One(), "sgd", RATE, loss_scale=loss_scale)
    with ThreadPoolExecutor(1) as pool:
        for done in range(3):
            if done:
                pool.submit(backward, net, trainer, how).result()
            else:
                backward(net, trainer, how)
            assert CALLS[call](trainer)
            assert all((value == -done).all() for value in values(net))
        with pytest.raises(RuntimeError, match=r"step\(\) needs new gradients"):
            trainer.step(1)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("loss_scale", [None, 64, "dynamic"])
def test_each_device_has_a_thread_for_its_backward_pass(loss_scale, how):
    devices, together = [mx.cpu(0), mx.cpu(1)], threading.Barrier(2, timeout=60)
    net, trainer = with_trainer(One(devices=devices), "sgd", RATE, loss_scale=loss_scale)

    def work(i):
        together.wait()
        backward(net, trainer, how, devices[i])

    for done in range(3):
        run(2, work)
        assert trainer.step(2)
        assert all((value == -done).all() for value in values(net))


def test_two_threads_with_the_same_trainers_do_not_block_each_other():
    nets = One(), One()
    trainers = [amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, loss_scale=64)
                for net in nets]

    def work(i):
        for _ in range(50):
            with autograd.record():
                loss = sum(net(ones(), ones()) for net in nets)
            amp.backward(loss, trainers if i else trainers[::-1])

    run(2, work)
    for net, trainer in zip(nets, trainers):
        assert trainer.step(1)
        assert all((value == 0).all() for value in values(net))


def test_call_that_waits_too_long_for_another_thread_is_an_error(monkeypatch):
    monkeypatch.setattr("gluon_amp.training.gradients._LONGEST", 0.01)
    net, trainer = with_trainer(One(), "sgd", loss_scale=64)
    loss = recorded(net, ones(), ones())
    with ThreadPoolExecutor(1) as pool, autograd.record(), amp.scale_loss(loss, trainer) as scaled:
        with pytest.raises(RuntimeError, match=r"step\(\) waited 0.01 seconds for another thread"):
            pool.submit(trainer.step, 1).result()
        scaled.backward()
    assert trainer.step(1)


def test_module_updates_after_the_backward_pass_of_another_thread():
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    module = amp.Module(mx.sym.SoftmaxOutput(net, name="softmax"), loss_scale=8)
    batch = mx.io.DataBatch([nd.ones((2, 3))], [nd.array([0, 1])])
    module.bind([("data", (2, 3))], [("softmax_label", (2,))])
    module.init_params()
    module.init_optimizer()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(module.forward_backward, batch).result()
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


@pytest.mark.parametrize("policy", cases(["float16"], ["bfloat16"]))
def test_threads_that_share_a_network_do_not_crash(policy):
    assert printed(SHARED, policy).splitlines()[-1] == "True"
