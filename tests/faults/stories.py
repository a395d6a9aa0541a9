"""What runs while a call fails: steps, saves, loads and an X-ray of small networks.

    result = STORIES[name](folder, failing)

A story prepares, enters `with failing():`, where a call fails, and returns bytes that must be the
same in each run. A story that writes files has a reader: it loads each file in a new process, takes
a step, and returns the bits.
"""
import hashlib
import os

import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

BATCH = 32
DEVICE = mx.gpu() if "RECORDING_GPU_COUNT" in os.environ else mx.cpu()


def dense():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(256, activation="relu"), gluon.nn.LayerNorm(), gluon.nn.Dense(128))
    return net, (BATCH, 512)


def convolutional():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(16, 3, padding=1), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"),
            gluon.nn.MaxPool2D(), gluon.nn.Conv2D(32, 3), gluon.nn.Flatten(), gluon.nn.Dense(10))
    return net, (BATCH, 3, 16, 16)


def recurrent():
    net = gluon.nn.HybridSequential()
    net.add(gluon.rnn.LSTM(64, layout="NTC"), gluon.nn.Dense(32))
    return net, (BATCH, 12, 64)


def create(kind, policy):
    """Returns a network that has run, its Trainer, data and labels."""
    mx.random.seed(3)
    np.random.seed(3)
    net, shape = kind()
    net.initialize(mx.init.Xavier(), ctx=DEVICE)
    net.hybridize()
    amp.convert(net, policy)
    data = mx.nd.array(np.random.standard_normal(shape), DEVICE)
    label = mx.nd.array(np.arange(BATCH) % 10, DEVICE)
    net(data).wait_to_read()
    trainer = amp.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
    return net, trainer, data, label


def step(net, trainer, data, label, steps=1):
    for _ in range(steps):
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(data), label)
        trainer.backward(loss)
        trainer.step(BATCH)
        loss.asnumpy()
    mx.nd.waitall()


def digest(net, trainer):
    """Returns the bits of the weights, the master weights and the loss scale."""
    bits = hashlib.sha256(repr(trainer.loss_scale).encode())
    for parameter in net._collect_params_with_prefix().values():
        master = trainer.master(parameter) if parameter.grad_req != "null" else parameter.data()
        bits.update(master.asnumpy().tobytes() + parameter.data().astype("float32").asnumpy()
                    .tobytes())
    return bits.digest()


def steps(kind, policy="float16"):
    def story(folder, failing):
        training = create(kind, policy)
        with failing():
            step(*training, steps=2)
        return digest(*training[:2])
    return story


def save_all(net, trainer, folder):
    net.save_parameters(f"{folder}/net.params")
    trainer.save_states(f"{folder}/trainer.states")


def save_files(folder, failing):
    net, trainer, data, label = create(dense, "float16")
    step(net, trainer, data, label)
    save_all(net, trainer, folder)
    step(net, trainer, data, label)
    with failing():
        save_all(net, trainer, folder)
    return b""


def save_checkpoint(folder, failing):
    net, trainer, data, label = create(dense, "float16")
    position = amp.load_checkpoint(f"{folder}/run", net, trainer)
    step(net, trainer, data, label)
    amp.save_checkpoint(f"{folder}/run", net, trainer, position)
    step(net, trainer, data, label)
    with failing():
        amp.save_checkpoint(f"{folder}/run", net, trainer, position)
    return b""


def export(folder, failing):
    net, *_ = create(dense, "float16")
    net.export(f"{folder}/net")
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() * 2)
    mx.nd.waitall()
    with failing():
        net.export(f"{folder}/net")
    return b""


def load_files(folder, failing):
    net, trainer, data, label = create(dense, "float16")
    step(net, trainer, data, label)
    save_all(net, trainer, folder)
    net, trainer, data, label = create(dense, "float16")
    with failing():
        net.load_parameters(f"{folder}/net.params", masters=trainer)
        trainer.load_states(f"{folder}/trainer.states")
        step(net, trainer, data, label)
    return digest(net, trainer)


def load_checkpoint(folder, failing):
    net, trainer, data, label = create(dense, "float16")
    position = amp.load_checkpoint(f"{folder}/run", net, trainer)
    step(net, trainer, data, label)
    amp.save_checkpoint(f"{folder}/run", net, trainer, position)
    net, trainer, data, label = create(dense, "float16")
    with failing():
        amp.load_checkpoint(f"{folder}/run", net, trainer)
        step(net, trainer, data, label)
    return digest(net, trainer)


def xray(folder, failing):
    net, _, data, label = create(convolutional, "float16")
    with failing():
        view = amp.xray(net, [(data, label)], gluon.loss.SoftmaxCrossEntropyLoss())
        view.save(f"{folder}/view")
    return str(view).encode()


def read_files(folder):
    net, trainer, data, label = create(dense, "float16")
    net.load_parameters(f"{folder}/net.params")
    step(net, trainer, data, label)
    of_parameters = digest(net, trainer)
    net, trainer, data, label = create(dense, "float16")
    trainer.load_states(f"{folder}/trainer.states")
    step(net, trainer, data, label)
    return of_parameters, digest(net, trainer)


def read_checkpoint(folder):
    net, trainer, data, label = create(dense, "float16")
    amp.load_checkpoint(f"{folder}/run", net, trainer)
    step(net, trainer, data, label)
    return (digest(net, trainer),)


def read_export(folder):
    net = gluon.SymbolBlock.imports(f"{folder}/net-symbol.json", "data",
                                    f"{folder}/net-0000.params", DEVICE)
    return (net(mx.nd.ones((2, 512), DEVICE)).asnumpy().tobytes(),)


STORIES = {
    "dense step": steps(dense), "convolutional step": steps(convolutional),
    "recurrent step": steps(recurrent), "convolutional bfloat16 step": steps(convolutional,
                                                                             "bfloat16"),
    "save files": save_files, "save checkpoint": save_checkpoint, "export": export,
    "load files": load_files, "load checkpoint": load_checkpoint, "xray": xray}
READERS = {"save files": read_files, "save checkpoint": read_checkpoint, "export": read_export}
ON_CPU = ("convolutional bfloat16 step", "xray")  # not on GPUs
