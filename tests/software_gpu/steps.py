"""Records the calls of one training step on this process's recording GPU, after warm-up steps.

The first steps allocate memory, select cuDNN's algorithms and search for the loss scale.
"""
import gluon_amp as amp
import mxnet as mx
from mxnet import gluon

from . import recording

PARTS = ("forward", "backward", "update")
HOW = ("float32", "mx.contrib.amp", "gluon_amp")
STEPS_BEFORE = 3


def _contrib_amp():
    """mx.contrib.amp, imported only by a step that runs under it."""
    from mxnet.contrib import amp
    return amp


def begin(how):
    """Prepares MXNet before a network is created."""
    recording.pretend_finite()  # kernels do not compute the sums that steps read
    for kernel in ("MultiAllFinite", "AllFinite"):
        recording.pretend(kernel, 1, 1.0)
    if how == "mx.contrib.amp":
        _contrib_amp().init()


def record(net, data, how, loss_fn, labels=None, optimizer="sgd"):
    """Trains an initialized network, with momentum by SGD, in float32 or in float16. The last
    step's calls follow the marks PARTS of the log.

    Returns the peak of memory, and the number of calls that a GPU would have refused.
    """
    if how == "gluon_amp":
        amp.convert(net, "float16")
    net.hybridize(static_alloc=True, static_shape=True)
    settings = {"learning_rate": 0.1, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    if how == "gluon_amp":
        trainer = amp.Trainer(net.collect_params(), optimizer, settings,
                              loss_scale=amp.DynamicLossScale(1024, settled=True))
    else:
        trainer = gluon.Trainer(net.collect_params(), optimizer, settings)
    if how == "mx.contrib.amp":
        _contrib_amp().init_trainer(trainer)

    def step(mark):
        mark("forward")
        with mx.autograd.record():
            loss = loss_fn(net(*data), labels)
            if how == "mx.contrib.amp":
                with _contrib_amp().scale_loss(loss, trainer) as scaled:
                    mark("backward")
                    mx.autograd.backward(scaled)
        if how != "mx.contrib.amp":
            mark("backward")
            loss.backward() if how == "float32" else trainer.backward(loss)
        mark("update")
        trainer.step(data[0].shape[0])

    for _ in range(STEPS_BEFORE):
        step(lambda name: None)
        mx.nd.waitall()
    step(recording.mark)
    recording.mark("end")
    return {"peak": recording.peak(), "violations": recording.violations()}


def counts(calls):
    """The numbers of launches, casts, synchronizations, copies to the host, products, products on
    Tensor Cores, and sums in float16."""
    return {
        "launches": sum(c.is_launch for c in calls),
        "casts": sum(c.is_cast for c in calls),
        "synchronizations": sum(c.is_synchronization for c in calls),
        "copies to the host": sum(c.is_copy_to_host for c in calls),
        "products": sum(c.is_product for c in calls),
        "on Tensor Cores": sum(c.on_tensor_cores for c in calls),
        "sums in float16": sum(c.adds_in_half for c in calls)}
