"""Faulty rank programs for test_rank_mistakes.py, run by ranks.py."""
import gluon_amp as amp
import mxnet as mx
import numpy as np
import pytest
from gluon_amp.parallel import average_statistics, consistency
from mxnet import autograd, nd
from mxnet.gluon import nn
from networks import ready, sequence
from trainers import recorded


def network(layers=2, in_units=4):
    net = nn.HybridSequential()
    for _ in range(layers):
        net.add(nn.Dense(4, in_units=in_units))
    net.initialize(mx.init.Xavier())
    return amp.convert(net)


def trainer_for(net, store, loss_scale=256.0):
    return amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store,
                       loss_scale=loss_scale)


def backward(net, trainer, rng):
    trainer.backward(recorded(lambda: net(nd.array(rng.standard_normal((4, 4)))).square().sum()))


def weights(trainer):
    return [p.data().asnumpy() for p in trainer._params]


def freezes_a_layer(store, rank):
    net = network()
    if rank == 1:
        net[0].weight.grad_req = "null"
    trainer_for(net, store)


def has_different_block_names(store, rank):
    """Rank 0's names continue from 9 to 10, which sorts before 9; rank 1's do not."""
    while rank == 0 and not nn.Dense(1).name.endswith("8"):
        pass
    trainer_for(network(), store)


def loss_misses_a_parameter(store, rank, loss_scale, by_hand=False):
    """On rank 1 the loss does not reach the second layer, whose gradients are stale and must not
    enter the sum."""
    net = network()
    trainer = trainer_for(net, store, loss_scale=loss_scale)
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


def loss_misses_a_parameter_in_first_step(store, rank, loss_scale):
    """The same with deferred sizes of layers, and a store created in the first step."""
    mx.random.seed(3)
    net = network(in_units=0)
    trainer = trainer_for(net, store, loss_scale=loss_scale)
    net(nd.ones((4, 4)))
    backward(net[0] if rank else net, trainer, np.random.default_rng(rank))
    trainer.step(8, ignore_stale_grad=True)
    trainer.check_ranks()
    return weights(trainer)


def starts_at_scale(store, rank, initial, settled, by_hand):
    """Training from a dynamic scale, with sizes of layers deferred until the Trainer exists."""
    mx.random.seed(3)
    net = network(in_units=0)
    loss_scale = amp.DynamicLossScale(initial[rank], settled=settled)
    trainer = trainer_for(net, store, loss_scale=loss_scale)
    rng = np.random.default_rng(rank)
    if by_hand:
        loss = recorded(lambda: net(nd.array(rng.standard_normal((4, 4)))).square().sum())
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    else:
        backward(net, trainer, rng)
    trainer.step(8)
    trainer.check_ranks()
    return trainer.loss_scale, weights(trainer)


def synchronizes_before_backward(store, rank, loss_scale):
    """Ranks with different weights synchronize them between a forward pass and its backward pass.
    Returns whether steps updated."""
    mx.random.seed(rank)
    net = network(in_units=0)
    trainer = trainer_for(net, store, loss_scale=loss_scale)
    loss = recorded(lambda: net(nd.ones((4, 4))).square().sum())
    trainer.check_ranks()
    trainer.backward(loss)
    told = [trainer.step(8)]
    backward(net, trainer, np.random.default_rng(rank))
    return [*told, trainer.step(8)], weights(trainer)


def sweeps_learning_rates(store, rank):
    """Weights after a sweep of learning rates and a step; ranks start with different weights."""
    mx.random.seed(rank)
    net = network(in_units=0)
    trainer = trainer_for(net, store)
    net(nd.ones((4, 4)))
    batches = [(nd.ones((4, 4)), nd.zeros((4, 4)))]
    amp.lr_find(net, trainer, mx.gluon.loss.L2Loss(), batches, start=1e-3, end=1e-1, steps=10)
    backward(net, trainer, np.random.default_rng(rank))
    updated = trainer.step(8)
    trainer.check_ranks()
    return updated, weights(trainer)


def has_nan_loss(store, rank, loss_scale):
    """The loss scale and skipped steps after 16 steps with a NaN loss on rank 1."""
    net = network()
    trainer = trainer_for(net, store, loss_scale=loss_scale)
    for i in range(16):
        trainer.backward(recorded(
            lambda: net(nd.ones((4, 4))).square().sum() * (np.nan if rank else 1)))
        if i < 15:
            trainer.step(8)
    with pytest.raises(amp.LossScaleError, match="16 steps skipped in a row: the loss itself"):
        trainer.step(8)
    return trainer.loss_scale, trainer.skipped


def all_reduces_wrongly(store, rank, times):
    net = network()
    trainer = trainer_for(net, store)
    backward(net, trainer, np.random.default_rng(rank))
    for _ in range(times):
        trainer.allreduce_grads()
    trainer.update(8)


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
    """Float32 weights before the first step; check_ranks passes after it."""
    mx.random.seed(rank)
    net = ready(nn.Dense(4, in_units=4))
    trainer = amp.Trainer(net.collect_params(), "sgd", kvstore=store, loss_scale=None)
    before = weights(trainer)
    backward(net, trainer, np.random.default_rng(rank))
    trainer.step(8)
    trainer.check_ranks()
    return before


def module_for(rank, store=None, loss_scale=None):
    """A float32 Module, and a batch that depends on the rank."""
    mx.random.seed(rank)
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="dense")
    module = amp.Module(mx.sym.SoftmaxOutput(net, name="softmax"), loss_scale=loss_scale)
    module.bind([("data", (4, 6))], [("softmax_label", (4,))])
    module.init_params(mx.init.Uniform(0.5))
    if store:
        module.init_optimizer(kvstore=store)
    rng = np.random.default_rng(rank)
    return module, mx.io.DataBatch([nd.array(rng.standard_normal((4, 6)))], [nd.zeros(4)])


def module_weights(module):
    return [array.asnumpy() for array in module.get_params()[0].values()]


def module_step(module, batch):
    module.forward_backward(batch)
    return module.update()


def module_runs_before_its_store(store, rank, loss_scale):
    """The first gradients are of weights that rank 0's replace. Returns whether steps updated."""
    module, batch = module_for(rank, loss_scale=loss_scale)
    module.forward_backward(batch)
    module.init_optimizer(kvstore=store)
    updated = [module.update(), module_step(module, batch)]
    module.check_ranks()
    return updated, module_weights(module)


def module_trains_without_scale(store, rank):
    """Weights before the first update; then calls that the servers would confuse are refused."""
    module, batch = module_for(rank, store)
    before = module_weights(module)
    module_step(module, batch)
    module.check_ranks()
    with pytest.raises(ValueError, match=r"a process has one Module, whose init_optimizer is "
                                         r"called once, and no Trainer\. kvstore='horovod' takes"):
        module_for(rank, store)
    with pytest.raises(ValueError, match="in use by a Module of this process"):
        trainer_for(network(), "dist_sync")
    with pytest.raises(ValueError, match="servers, here dist_sync: pass that store"):
        trainer_for(network(), "dist_device_sync")
    return before


def module_updates_on_servers(store, rank):
    """Weights after updates on servers."""
    module, batch = module_for(rank, store)
    for _ in range(3):
        module_step(module, batch)
    return module_weights(module)


def updates_on_servers(store, rank):
    """Weights of ranks with different seeds before and after updates on servers; a second Trainer
    is refused."""
    mx.random.seed(rank)
    net = ready(nn.Dense(4, in_units=4))
    trainer = amp.Trainer(net.collect_params(), "sgd", kvstore=store, loss_scale=None,
                          update_on_kvstore=True)
    held = weights(trainer)
    rng = np.random.default_rng(rank)
    for _ in range(2):
        backward(net, trainer, rng)
        trainer.step(4 * trainer.workers)
        held += weights(trainer)
    with pytest.raises(ValueError, match="MXNet's servers update the weights of one Trainer"):
        trainer_for(network(), store)
    return held


def has_different_settings(store, rank):
    """Errors for a learning rate, then a batch size, that differs between ranks. A smaller last
    batch on all ranks is allowed."""
    net = network()
    trainer = trainer_for(net, store)
    rng = np.random.default_rng(rank)
    told = []
    for rate, batch_size in ((0.01, 8), (0.01, 4), (0.01 + rank, 4), (0.01, 8 + rank)):
        trainer.set_learning_rate(rate)
        try:
            trainer.check_ranks()
            backward(net, trainer, rng)
            trainer.step(batch_size)
        except consistency.RanksDifferError as error:
            told.append(str(error))
    return told


def changes_alone(store, rank, what):
    """Rank 1 changes its learning rate or a weight after the first step."""
    mx.random.seed(3)
    net = network()
    trainer = trainer_for(net, store)
    rng = np.random.default_rng(rank)
    for step in range(3):
        backward(net, trainer, rng)
        trainer.step(8)
        if step == 0 and rank == 1 and what == "rate":
            trainer.set_learning_rate(0.001)
        if step == 0 and rank == 1 and what == "weight":
            net[1].weight.set_data(net[1].weight.data() / 2)
    with pytest.raises(consistency.RanksDifferError) as refused:
        average_statistics(trainer)
    return str(refused.value)


def module_changes_alone(store, rank):
    """The same for a Module's learning rate."""
    module, batch = module_for(3, store)
    for _ in range(3):
        module_step(module, batch)
        if rank == 1:
            module._optimizer.set_learning_rate(0.5)
    with pytest.raises(consistency.RanksDifferError) as refused:
        module.check_ranks()
    return str(refused.value)


def accumulates(store, rank, ranks, devices=1, passes=1, steps=3):
    """Each rank trains on its part of each batch, split over devices and backward passes."""
    mx.random.seed(3)
    net = sequence(nn.Dense(8, in_units=4, activation="relu"), nn.Dense(4, in_units=8))
    contexts = [mx.cpu(i) for i in range(devices)]
    net.initialize(mx.init.Xavier(), ctx=contexts)
    amp.convert(net)
    net.collect_params().setattr("grad_req", "add" if passes > 1 else "write")
    trainer = trainer_for(net, store)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        batch = rng.standard_normal((16, 4)).reshape(ranks, passes, devices, -1, 4)[rank]
        for part in batch:
            with autograd.record():
                losses = [net(nd.array(x, ctx)).square().sum() for x, ctx in zip(part, contexts)]
            trainer.backward(losses)
        trainer.step(16)
        net.collect_params().zero_grad()
    trainer.check_ranks()
    return weights(trainer)
