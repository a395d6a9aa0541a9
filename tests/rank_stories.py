"""Rank programs for test_distributed.py, run by ranks.py. Each returns values to check."""
import contextlib
import os
import signal
import socket
import struct
import time

import gluon_amp as amp
import mxnet as mx
import numpy as np
from arrays import numbers
from gluon_amp.parallel import average_statistics, consistency
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from networks import ready, sequence
from trainers import recorded

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def network(deferred=False, units=5):
    known = {} if deferred else {"in_channels": 3}
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, **known), nn.BatchNorm(in_channels=0 if deferred else 8),
                nn.Activation("relu"), nn.GlobalAvgPool2D(),
                nn.Dense(units, in_units=0 if deferred else 8))
    net.initialize(mx.init.Xavier())
    return amp.convert(net)


def held(trainer):
    """Weights and master weights."""
    return numbers([[p.data() for p in trainer._params if p.grad_req != "null"],
                    trainer._updaters[0].states])


def store_of(store):
    """ "horovod float32" means amp.parallel.Horovod(wire="float32")."""
    if store.startswith("horovod "):
        return amp.parallel.Horovod(wire=store.split()[1])
    return mx.kv.create(store)


def trainer_for(net, store, **kwargs):
    return amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9},
                       kvstore=store, **kwargs)


def backward(net, trainer, x, y):
    trainer.backward(recorded(lambda: LOSS(net(nd.array(x)), nd.array(y))))


def step(net, trainer, rng, ranks=2):
    backward(net, trainer, rng.standard_normal((4, 3, 8, 8)), rng.integers(0, 5, 4))
    return trainer.step(4 * ranks)


def predicts_before_training(store, rank):
    """After prediction, oneDNN stores weights and gradients in its own blocked layout."""
    net = ready(sequence(nn.Conv2D(32, 3, padding=1, in_channels=16), nn.Conv2D(32, 3, padding=1),
                         nn.GlobalAvgPool2D(), nn.Dense(5)), mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    x = nd.random.normal(shape=(4, 16, 16, 16))
    net(x)
    trainer = trainer_for(net, store)
    for _ in range(3):
        backward(net, trainer, x, nd.zeros(4))
        trainer.step(8)
    trainer.check_ranks()
    return trainer.skipped, held(trainer)


class Squared(autograd.Function):
    """Counts its passes and frees what it saved."""
    passes = 0

    def forward(self, x):
        self.save_for_backward(x)
        return x * x

    def backward(self, gradient):
        x, = self.saved_tensors
        self.save_for_backward()
        Squared.passes += 1
        return 2 * x * gradient


def counts_passes(store, rank):
    """Backward passes and updates of a moving average in ten steps."""
    mx.random.seed(rank)
    net = ready(sequence(nn.Dense(4, in_units=3), nn.BatchNorm(momentum=0.5, in_channels=4)),
                mx.init.Constant(1))
    amp.convert(net)
    trainer = trainer_for(net, store)
    Squared.passes, seen = 0, []
    for _ in range(10):
        trainer.backward(recorded(lambda: Squared()(net(nd.ones((2, 3)) * rank)).sum()))
        trainer.step(4)
        seen.append((Squared.passes, float(net[1].running_mean.data()[0].asscalar())))
    return seen


def starts_with_different_seeds(store, rank, deferred):
    """Values of a rank before and after its first steps."""
    mx.random.seed(rank)
    net = network(deferred)
    trainer = trainer_for(net, store)
    before = None if deferred else [p.data().asnumpy() for p in trainer._params]
    rng = np.random.default_rng(rank)
    stepped = [step(net, trainer, rng) for _ in range(3)]
    trainer.check_ranks()
    return before, stepped, trainer.loss_scale, held(trainer)


def module_for(rank, units=3):
    """A Module whose parameters and moving averages depend on the rank, and its data."""
    mx.random.seed(rank)
    rng = np.random.default_rng(rank)
    data = mx.io.NDArrayIter(rng.standard_normal((8, 6)).astype("float32"),
                             rng.integers(0, 3, 8), batch_size=4, label_name="softmax_label")
    net = mx.sym.FullyConnected(mx.sym.BatchNorm(mx.sym.var("data"), name="norm"),
                                num_hidden=units, name="dense")
    symbol = amp.convert_symbol(mx.sym.SoftmaxOutput(net, name="softmax"))
    module = amp.Module(symbol, loss_scale="dynamic")
    module.bind(data.provide_data, data.provide_label)
    module.init_params(mx.init.Uniform(0.5))
    for array in module._exec_group.aux_arrays[0]:
        array[:] = rank + 1
    return module, data


def module_starts_with_different_seeds(store, rank):
    module, data = module_for(rank)
    module.init_optimizer(kvstore=store, optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    args, statistics = module.get_params()
    before = [a.asnumpy() for a in (*args.values(), *statistics.values())]
    for batch in data:
        module.forward_backward(batch)
        module.update()
    module.check_ranks()
    return before, module.loss_scale, [a.asnumpy() for a in module.get_params()[0].values()]


def changes_weight_on_rank_1(store, rank, when):
    """Rank 1 changes a weight. The first step detects it, also after an earlier comparison; later,
    `check_ranks` does."""
    net = network()
    trainer = trainer_for(net, store)
    rng = np.random.default_rng(0)
    if when == "after a comparison":
        trainer.check_ranks()
    if when == "later":
        step(net, trainer, rng)
    if rank == 1:
        weight = net[4].weight.data()
        weight[:] = weight * 1.5
    if when == "later":
        trainer.check_ranks()
    else:
        step(net, trainer, rng)


def has_different_network(store, rank, what):
    units = 5 + rank if what == "shape" else 5
    if what == "version" and rank:
        consistency.__version__ = "9.9.9"
    net = network(units=units)
    if what == "count" and rank:
        net.add(nn.Dense(5, in_units=5))
        net.initialize()
    scale = 2.0 ** 8 if what == "scale" and rank else "dynamic"
    trainer = trainer_for(net, store, loss_scale=scale)
    step(net, trainer, np.random.default_rng(0))


def module_has_different_network(store, rank, what):
    consistency.__version__ = "9.9.9" if what == "version" and rank else amp.__version__
    module, _ = module_for(rank, units=3 + rank if what == "shape" else 3)
    module.init_optimizer(kvstore=store)


def has_nonfinite_inputs(store, rank, ranks, steps):
    """Infinities, NaNs and values that overflow, on any rank at any step."""
    mx.random.seed(rank)
    net = network()
    trainer = trainer_for(net, store, loss_scale=amp.DynamicLossScale(growth_interval=4))
    rng = np.random.default_rng(rank)
    told = []
    for _ in range(steps):
        x, y = rng.standard_normal((4, 3, 8, 8)), rng.integers(0, 5, 4)
        if rng.random() < 0.03:
            x[0, 0, 0, 0] = rng.choice([np.inf, -np.inf, np.nan, 1e12, -1e12])
        backward(net, trainer, x, y)
        told.append((trainer.step(4 * ranks), trainer.loss_scale))
    trainer.check_ranks()
    return told, trainer.skipped, held(trainer)


def trained(net, trainer, steps, rng):
    """Whether each step updated, the loss scale, the number of skipped steps, and all values."""
    told = []
    for i in steps:
        x, y = rng.standard_normal((4, 3, 8, 8)), rng.integers(0, 5, 4)
        if i % 4 == 2:
            x[0, 0, 0, 0] = np.inf
        backward(net, trainer, x, y)
        told.append(trainer.step(8))
    trainer.check_ranks()
    return told, trainer.loss_scale, trainer.skipped, held(trainer)


def saves_and_continues(store, rank, folder):
    """Rank 0 saves after some steps; all ranks continue."""
    mx.random.seed(rank)
    net = network()
    trainer = trainer_for(net, store, loss_scale=amp.DynamicLossScale(growth_interval=2))
    trained(net, trainer, range(5), np.random.default_rng(10 + rank))
    if rank == 0:
        net.save_parameters(f"{folder}/net.params")
        trainer.save_states(f"{folder}/trainer.states")
    return trained(net, trainer, range(5), np.random.default_rng(20 + rank))


def resumes(store, rank, folder):
    """The part of `saves_and_continues` after the save."""
    mx.random.seed(100 + rank)
    net = network()
    net.load_parameters(f"{folder}/net.params")
    trainer = trainer_for(net, store, loss_scale=amp.DynamicLossScale(growth_interval=2))
    trainer.load_states(f"{folder}/trainer.states")
    return trained(net, trainer, range(5), np.random.default_rng(20 + rank))


def checkpoints(store, rank, folder, stop):
    """Trains from a folder's checkpoint. Returns all values, and the next random number."""
    mx.random.seed(rank)
    np.random.seed(rank)
    net = network()
    trainer = trainer_for(net, store)
    position = amp.load_checkpoint(folder, net, trainer)
    for _ in range(position.epoch, 2):
        for batch in position.batches(range(3)):
            backward(net, trainer, np.random.standard_normal((4, 3, 8, 8)),
                     np.random.randint(0, 5, 4))
            trainer.step(8)
            amp.save_checkpoint(folder, net, trainer, position)
            if batch + 1 == stop:
                return None
    return held(trainer), np.random.standard_normal()


def averages_statistics(store, rank, symbol=False):
    """Moving averages before and after, of a network or of a SymbolBlock with its symbol."""
    net = network()
    if symbol:
        x = mx.sym.var("data")
        net = ready(gluon.SymbolBlock(net(x), x))
        amp.convert(net)(nd.zeros((1, 3, 8, 8)))
    trainer = trainer_for(net, store)
    step(net, trainer, np.random.default_rng(rank))
    averages = [p.data() for name, p in sorted(net.collect_params().items()) if "running" in name]
    before = [a.asnumpy() for a in averages]
    average_statistics(trainer)
    return before, [a.asnumpy() for a in averages]


def module_averages_statistics(store, rank):
    module, data = module_for(rank)
    module.init_optimizer(kvstore=store)
    for batch in data:
        module.forward_backward(batch)
        module.update()

    def averages():
        return [a.asnumpy() for _, a in sorted(module.get_params()[1].items())]

    before = averages()
    average_statistics(module)
    return before, averages()


def counts_bytes(store, rank):
    """Bytes that a rank receives for the gradients of a step, 200,100 numbers."""
    net = amp.convert(ready(nn.Dense(100, in_units=2000)))
    trainer = trainer_for(net, store, loss_scale=1.0)

    def step():
        trainer.backward(recorded(lambda: net(nd.ones((1, 2000))).sum()))
        trainer.step(2)
        nd.waitall()

    step()
    before = received_bytes()
    for _ in range(5):
        step()
    return (received_bytes() - before) / 5


def times_steps(store, rank, dtype, ranks, steps):
    """Median seconds of a step of ResNet-18, and bytes that a rank receives in it."""
    mx.random.seed(1)
    net = ready(gluon.model_zoo.vision.resnet18_v1(classes=10))
    if dtype == "float16":
        amp.convert(net)
    net.hybridize(static_alloc=True, static_shape=True)
    x, y = nd.random.normal(shape=(8, 3, 64, 64)), nd.zeros(8)
    net(x)
    trainer = trainer_for(net, store, loss_scale="dynamic" if dtype == "float16" else None,
                          update_on_kvstore=False)

    def step():
        began = time.monotonic()
        backward(net, trainer, x, y)
        trainer.step(8 * ranks)
        nd.waitall()
        return time.monotonic() - began

    step(), step()
    before = received_bytes()
    seconds = [step() for _ in range(steps)]
    return float(np.median(seconds)), (received_bytes() - before) / steps


def received_bytes():
    """Bytes that this process has received over TCP, counted by the system."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family == socket.AF_INET and copy.type == socket.SOCK_STREAM:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 128)[0]  # tcpi_bytes_received
    return total


def becomes_infinite(store, rank, loss_scale):
    """The loss is infinite on rank 1 from the fourth step on. Returns the step that raises."""
    net = network()
    trainer = trainer_for(net, store, loss_scale=loss_scale)
    rng = np.random.default_rng(rank)
    for i in range(100):
        x = rng.standard_normal((4, 3, 8, 8))
        if rank == 1 and i > 2:
            x[:] = np.inf
        backward(net, trainer, x, nd.zeros(4))
        try:
            trainer.step(8)
        except amp.LossScaleError:
            return i, trainer.skipped, held(trainer)


def trains_on_its_part(store, rank, ranks, steps=20):
    """Each rank trains on its part of each batch; one process trains on all of it."""
    mx.random.seed(3)
    net = ready(sequence(nn.Dense(16, in_units=12, activation="relu"), nn.Dense(5, in_units=16)),
                mx.init.Xavier())
    amp.convert(net)
    trainer = trainer_for(net, store, loss_scale=2.0 ** 8, clip_norm=1.0)
    rng = np.random.default_rng(0)
    told = []
    for i in range(steps):
        x, y = rng.standard_normal((8, 12)), rng.integers(0, 5, 8)
        if i % 7 == 5:
            x[i % 8] = np.nan
        mine = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        backward(net, trainer, x[mine], y[mine])
        told.append(trainer.step(8))
    return told, held(trainer)


def sum_overflows(store, rank, gradient):
    """Gradients whose sum may overflow, at a scale of 1: whether they updated, and the weight."""
    net = amp.convert(ready(nn.Dense(1, in_units=2, use_bias=False), mx.init.Zero()))
    trainer = trainer_for(net, store, loss_scale=1.0)
    trainer.backward(recorded(lambda: net(nd.full((1, 2), gradient)).sum()))
    return trainer.step(40000), net.weight.data().asnumpy().tolist()


def ends_on_rank_1(store, rank, how):
    """Rank 1 ends after some steps; rank 0 makes more steps."""
    net = network()
    trainer = trainer_for(net, store)
    rng = np.random.default_rng(rank)
    for _ in range(3):
        step(net, trainer, rng)
    while rank == 0:
        step(net, trainer, rng)
    if how == "raises":
        raise RuntimeError("the data is gone")
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
