"""Networks by their names: MXNet's model zoo, gluoncv's, and a small network."""
import difflib
import sys

import gluon_amp  # noqa: F401  (before mxnet)
from command_line import first_line
from mxnet import gluon
from mxnet.gluon import nn


def zoo_network(name, **options):
    """Returns a network by its name. Options are its arguments, such as `classes=10`."""
    get_model, names = gluon.model_zoo.vision.get_model, ["small", *mxnet_names()]
    if name.lower() not in names:
        try:
            zoo = import_gluoncv().model_zoo
        except ImportError as error:
            raise ValueError(f"MXNet's model zoo has no {name}, and gluoncv's cannot be imported "
                             f"({first_line(error)}): in the checkout, pip install "
                             f"'.[cpu,gluoncv]'{did_you_mean(name, names)}") from None
        get_model, names = zoo.get_model, [*names, *zoo.get_model_list()]
    if name.lower() not in names:
        raise ValueError(f"neither MXNet's nor gluoncv's model zoo has {name}"
                         f"{did_you_mean(name, names)}")
    try:
        return small_network(**options) if name == "small" else get_model(name, **options)
    except TypeError as error:
        raise ValueError(f"{name} does not take all of {', '.join(options)}: {error}") from None


def did_you_mean(name, names):
    """Returns a text such as ". Did you mean a or b?", or "" if no name is similar."""
    close = difflib.get_close_matches(name, dict.fromkeys(names))
    return f". Did you mean {' or '.join(close)}?" if close else ""


def small_network(classes):
    """A network of three convolutions and a dense layer, which trains in seconds on a CPU."""
    net = nn.HybridSequential()
    for channels, stride in ((32, 1), (64, 2), (128, 2)):
        net.add(nn.Conv2D(channels, 3, stride, 1, use_bias=False), nn.BatchNorm(),
                nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(classes))
    return net


def mxnet_names():
    """Returns the names of MXNet's model zoo, which only its error message lists."""
    try:
        gluon.model_zoo.vision.get_model("")
    except ValueError as error:
        return str(error).split("\n\t")[1:]


def import_gluoncv():
    """Imports gluoncv without PyTorch: it refuses PyTorch 2, which MXNet's networks do not need."""
    torch = sys.modules.pop("torch", None)
    sys.modules["torch"] = None  # makes `import torch` raise ImportError
    try:
        import gluoncv
    finally:
        del sys.modules["torch"]
        if torch is not None:
            sys.modules["torch"] = torch
    return gluoncv
