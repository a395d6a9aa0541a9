"""What ranks do in tests (ranks.py) that they should not, or not alike."""
import sys

import gluon_amp as amp
import numpy as np
from gluon_amp._mxnet import mx
from mxnet import autograd, nd
from mxnet.gluon import nn


def network(layers=2):
    net = nn.HybridSequential()
    for _ in range(layers):
        net.add(nn.Dense(4, in_units=4))
    net.initialize(mx.init.Xavier())
    return amp.convert(net)


def trainer_for(net, store, **kwargs):
    return amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store,
                       loss_scale=256.0, **kwargs)


def backward(net, trainer, rng):
    with autograd.record():
        loss = net(nd.array(rng.standard_normal((4, 4)))).square().sum()
    trainer.backward(loss)


def weights(trainer):
    return [p.data().asnumpy() for p in trainer._params]


def freezes_a_layer(store, rank):
    net = network()
    if rank == 1:
        net[0].weight.grad_req = "null"
    trainer_for(net, store)


def has_made_more_blocks(store, rank):
    """Its names go on from 9 to 10, which sorts before 9; the other's do not."""
    while rank == 0 and not nn.Dense(1).name.endswith("8"):
        pass
    trainer_for(network(), store)


def loss_reaches_less(store, rank, enabled, by_hand=False):
    """On rank 1 the loss does not reach the second layer. What it held there is left of a step
    before, and is no part of the sum."""
    net = network()
    trainer = trainer_for(net, store, enabled=enabled)
    rng = np.random.default_rng(rank)
    backward(net, trainer, rng)
    trainer.step(8)
    before = net[1].bias.data().asnumpy()
    backward(net[0] if rank else net, trainer, rng)
    own = net[1].bias.grad().asnumpy() / trainer.loss_scale
    if by_hand:
        trainer.allreduce_grads()
        trainer.update(8, ignore_stale_grad=True)
    else:
        trainer.step(8, ignore_stale_grad=True)
    trainer.check_ranks()
    return weights(trainer), before - net[1].bias.data().asnumpy(), own * 0.01 / 8


def sums_wrongly(store, rank, times):
    net = network()
    trainer = trainer_for(net, store)
    backward(net, trainer, np.random.default_rng(rank))
    for _ in range(times):
        trainer.allreduce_grads()
    trainer.update(8)


def makes_other_calls(store, rank):
    """Rank 1 is through with its data, and averages, while rank 0 makes another step."""
    net = network()
    trainer = trainer_for(net, store)
    rng = np.random.default_rng(rank)
    for _ in range(2 - rank):
        backward(net, trainer, rng)
        trainer.step(8)
    trainer._steps.reduction.average([net[0].bias.list_data()])


def ends_early(store, rank):
    net = network()
    trainer = trainer_for(net, store)
    rng = np.random.default_rng(rank)
    for _ in range(2):
        backward(net, trainer, rng)
        trainer.step(8)
        if rank == 1:
            sys.exit(3)


def has_two_trainers(store, rank):
    mx.random.seed(rank)
    nets = network(1), network(2)
    trainers = [trainer_for(net, store) for net in nets]
    rng = np.random.default_rng(rank)
    for net, trainer in zip(nets, trainers):
        backward(net, trainer, rng)
        trainer.step(8)
        trainer.check_ranks()
    return [w for trainer in trainers for w in weights(trainer)]


def trains_without_scale(store, rank):
    """What float32 weights are before the first step, and whether ranks can be compared."""
    mx.random.seed(rank)
    net = nn.Dense(4, in_units=4)
    net.initialize()
    trainer = amp.Trainer(net.collect_params(), "sgd", kvstore=store, enabled=False)
    before = weights(trainer)
    backward(net, trainer, np.random.default_rng(rank))
    trainer.step(8)
    trainer.check_ranks()
    return before
