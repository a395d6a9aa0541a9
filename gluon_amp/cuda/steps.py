"""Runs one training step on this process's recording GPU, after warm-up steps.

The first steps allocate memory, select cuDNN's algorithms and search for the loss scale.
`python -m gluon_amp.cuda.steps FILE` runs the step that a file of `trace.py` describes.
"""
import json
import pickle
import sys
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence

from mxnet import gluon

from .._mxnet import mx
from ..annotations import Array
from ..gluon.convert import convert
from ..policy import Policy
from ..training.loss_scale import DynamicLossScale
from ..training.trainer import Trainer
from . import recording

PARTS = ("forward", "backward", "update")
HOW = ("float32", "mx.contrib.amp", "gluon_amp")
_STEPS_BEFORE = 3


def _contrib_amp() -> ModuleType:
    """mx.contrib.amp, imported only by a step that runs under it."""
    from mxnet.contrib import amp
    return amp


def begin(how: str) -> None:
    """Prepares MXNet before a network is created."""
    recording.pretend_finite()  # kernels do not compute the sums that steps read
    for kernel in ("MultiAllFinite", "AllFinite"):
        recording.pretend(kernel, 1, 1.0)
    if how == "mx.contrib.amp":
        _contrib_amp().init()


def record(net: "gluon.HybridBlock", data: Sequence["mx.nd.NDArray"], how: str, *,
           policy: Policy, optimizer: str = "sgd", loss_fn: Callable[..., Any],
           keep: Sequence[str] = (), labels: Optional[Sequence[Array]] = None) -> Dict[str, int]:
    """Trains an initialized network; the last step's calls follow the marks PARTS of the log.

    Returns the peak of memory, and the number of calls that a GPU would have refused.
    """
    if how == "gluon_amp":
        convert(net, policy, keep=list(keep))
    net.hybridize(static_alloc=True, static_shape=True)
    settings = {"learning_rate": 0.1, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    if how == "gluon_amp":
        scale = DynamicLossScale(1024)
        scale.settled = True
        trainer: Any = Trainer(net.collect_params(), optimizer, settings, loss_scale=scale)
    else:
        trainer = gluon.Trainer(net.collect_params(), optimizer, settings)
    if how == "mx.contrib.amp":
        _contrib_amp().init_trainer(trainer)

    def step(mark: Callable[[str], None]) -> None:
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

    for _ in range(_STEPS_BEFORE):
        step(lambda name: None)
        mx.nd.waitall()
    step(recording.mark)
    recording.mark("end")
    return {"peak": recording.peak(), "violations": recording.violations()}


def mean_square(outputs: Sequence[Array], labels: Optional[Sequence[Array]] = None) -> Array:
    """Returns a loss that needs no labels."""
    flat: List[Any] = []
    left = [outputs]
    while left:
        one = left.pop()
        if isinstance(one, (list, tuple)):
            left += one
        else:
            flat.append(one)
    return sum((one.astype("float32") ** 2).mean() for one in flat)


def main(path: str) -> None:
    with open(path, "rb") as file:
        said = pickle.load(file)
    begin(said["how"])
    device = mx.gpu(0)
    net = gluon.SymbolBlock(mx.sym.load_json(said["symbol"]),
                            [mx.sym.var(name) for name in said["names"]])
    net.initialize(ctx=device)
    data = [mx.nd.zeros(shape, device, dtype) for shape, dtype in said["data"]]
    print(json.dumps(record(net, data, said["how"], policy=said["policy"], loss_fn=mean_square,
                            optimizer=said["optimizer"], keep=said["keep"])))


if __name__ == "__main__":
    main(sys.argv[1])
