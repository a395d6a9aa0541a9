"""Networks to start from: a small one, those of model zoos, pretrained ones without heads."""
import os
import sys
from typing import Any, List, Optional, Sequence

from .._mxnet import message, mx
from ..checks import did_you_mean, nearest
from ..files import must_exist
from ..graph.graph import Entry, Graph
from ..tools.tensor_cores import matrix_layers


def small_network(classes: int) -> Any:
    """Three convolutions and a dense layer: learns small images in seconds, on a CPU."""
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    for channels, stride in ((32, 1), (64, 2), (128, 2)):
        net.add(nn.Conv2D(channels, 3, stride, 1, use_bias=False), nn.BatchNorm(),
                nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(classes))
    return net


def zoo_network(name: str, **options: Any) -> Any:
    """The network of that name, from MXNet's model zoo or else from gluoncv's.

    Args:
        options: for the zoo, such as `classes=10` or `pretrained=True`.
    """
    try:
        return _from_zoo(mx.gluon.model_zoo.vision.get_model, name, options)
    except ValueError as error:
        names = str(error).split("\n\t")[1:]
        if not names:  # it is not the name that is wrong
            raise
    try:
        model_zoo = import_gluoncv().model_zoo
    except ImportError as error:
        raise ValueError(f"MXNet's model zoo has no {name}, and gluoncv's cannot be imported "
                         f"({message(error)}): in the checkout, pip install '.[cpu,gluoncv]'"
                         f"{did_you_mean(name, names)}") from None
    names += model_zoo.get_model_list()
    if name.lower() not in names:
        raise ValueError(f"neither MXNet's nor gluoncv's model zoo has {name}"
                         f"{did_you_mean(name, names)}")
    return _from_zoo(model_zoo.get_model, name, options)


def import_gluoncv() -> Any:
    """gluoncv, which refuses to be imported beside PyTorch 2, though its networks of MXNet need no
    PyTorch: so it is imported as if there were none."""
    torch = sys.modules.pop("torch", None)
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to say that there is none
    try:
        import gluoncv
    finally:
        del sys.modules["torch"]
        if torch is not None:
            sys.modules["torch"] = torch
    return gluoncv


def _from_zoo(get_model: Any, name: str, options: Any) -> Any:
    try:
        return get_model(name, **options)
    except TypeError as error:
        raise ValueError(f"{name} does not take all of {', '.join(options)}: {error}") from None
    except (OSError, RuntimeError) as error:
        if not options.get("pretrained"):
            raise
        raise OSError(f"{name} could not be downloaded ({type(error).__name__})") from None


def check_network(symbol: "mx.sym.Symbol", image: Sequence[int],
                  prefix: Optional[str] = None) -> None:
    """It is an error if a network does not take images of this shape, or if the checkpoint that
    it goes on from is of another network or of another type."""
    try:
        asked = _signature(symbol, image)
    except mx.MXNetError as error:
        shape = ",".join(map(str, image))
        raise ValueError(f"the network does not take --image-shape {shape}: "
                         f"{message(error)}") from None
    if prefix is None:
        return
    must_exist(f"{prefix}-symbol.json")
    try:
        saved = _signature(mx.sym.load(f"{prefix}-symbol.json"), image)
    except mx.MXNetError:
        saved = None
    if saved != asked:
        raise ValueError(f"{prefix}-symbol.json is of another network, or of another --dtype, than "
                         "the flags ask for: give those that the training was begun with")


def _signature(symbol: Any, image: Sequence[int]) -> Any:
    """Names, shapes and types of what a network learns and gives."""
    return (symbol.list_arguments(), symbol.infer_shape(data=(1, *image)),
            symbol.infer_type(data="float32"))


def without_head(symbol: "mx.sym.Symbol", layer: Optional[str] = None,
                 bn_momentum: Optional[float] = None, freeze: bool = False) -> "mx.sym.Symbol":
    """A classifier's features: its symbol up to the input of its last fully connected layer.

    Args:
        layer: the features end with the output of this layer instead.
        bn_momentum: of all batch norms; in a short training their usual moving averages lag.
        freeze: batch norms use their statistics and do not move them.
    """
    graph = Graph.read(symbol)
    graph = Graph([_layer(graph, layer) if layer else _before_head(graph)])
    if "data" not in graph.variables():
        raise ValueError("the network has no argument named data. Its arguments begin with "
                         f"{', '.join(graph.variables()[:3])}")
    for node in graph.nodes():
        if node.op == "BatchNorm" and bn_momentum is not None:
            node.attrs["momentum"] = str(bn_momentum)
        if node.op == "BatchNorm" and freeze:
            node.attrs["use_global_stats"] = "True"
    return graph.symbol()


def _layer(graph: Graph, name: str) -> Entry:
    layers = {node.name: node for node in graph.nodes() if not node.is_variable}
    node = layers.get(name) or layers.get(name.replace("_output", ""))
    if node is None:
        raise ValueError(f"--layer-before-fullc: there is no layer {name}. Near it: "
                         f"{', '.join(nearest(name, list(layers)))}")
    return Entry(node)


def _before_head(graph: Graph) -> Entry:
    node = graph.outputs[0].node
    while node.op != "FullyConnected":
        if node.is_variable or not node.inputs:
            layers = [node.name for node in graph.nodes() if not node.is_variable]
            raise ValueError("the network's head is unknown: no FullyConnected lies before its "
                             "output. Choose --layer-before-fullc among "
                             f"{', '.join(layers[-5:])}")
        node = node.inputs[0].node
    return node.inputs[0]


def tensor_core_hints(net: Any, batch_size: int, devices: int) -> List[str]:
    """Sentences about what keeps a GPU's Tensor Cores from their full speed with this network."""
    hints = []
    shapes = {p.name: p.shape for p in net.collect_params().values()}
    slow = [f"{layer.name} {layer.sizes}" for layer in
            matrix_layers(net(mx.sym.var("data")), shapes) if not layer.fits]
    if slow:
        hints.append("no multiples of 8, so off Tensor Cores or slower on them: "
                     f"{', '.join(slow)}")
    if batch_size % (8 * devices):
        hints.append(f"so does a batch of {batch_size / devices:g} for each GPU")
    if os.environ.get("MXNET_CUDNN_AUTOTUNE_DEFAULT") == "0":
        hints.append("MXNET_CUDNN_AUTOTUNE_DEFAULT=0: cuDNN does not look for its fastest "
                     "algorithms")
    return hints
