"""Which tensors have the layout of oneDNN's convolutions in memory: 16 channels are adjacent.

A tensor's shape and size do not change. Layers that share such a tensor need no reorder between
them. Variables, outputs of the graph, and all tensors of other operators are plain. A gradient has
the layout of its tensor (cpu/dispatch/gradients.cc).
"""
from typing import Dict, List, Mapping, Optional, Set

from ..cpu import library
from .channels_last import keeps_mxnets_layout
from .graph import Entry, Graph, Node
from .operators import COLUMNS, axis_of

_CHANNELS = 16
_ACTIVATIONS = ("relu", "sigmoid", "tanh", "leaky", "gelu")


def entries_in_layout(graph: Graph, types: Mapping[Entry, Optional[str]]) -> Set[Entry]:
    """The entries of a graph that have the layout; none where this processor's convolutions have
    another."""
    if keeps_mxnets_layout() or not library.keeps_layout():
        return set()
    nodes = [node for node in graph.nodes() if _is_supported(node)]
    channels: Dict[Entry, Optional[int]] = {}
    for node in nodes:
        channels[Entry(node)] = _channels(node, channels)
    users = graph.consumers()
    in_layout = {entry for entry, count in channels.items()
                 if count and count % _CHANNELS == 0 and types.get(entry) == "bfloat16"
                 and all(_reads_images(user, entry) for user in users.get(entry, []))}
    return _with_one_layout(in_layout, [node for node in nodes if _has_one_layout(node)])


def setting(node: Node, outputs: int, in_layout: Set[Entry]) -> Dict[str, str]:
    """Returns a node's setting, 1 for each input and output in the layout; none if all are 0."""
    letters = ["".join(str(int(e in in_layout)) for e in entries)
               for entries in (node.inputs, [Entry(node, i) for i in range(outputs)])]
    return {"layouts": " ".join(letters)} if "1" in "".join(letters) else {}


def _with_one_layout(in_layout: Set[Entry], nodes: List[Node]) -> Set[Entry]:
    """Without the images of nodes that have a plain one."""
    count = -1
    while count != len(in_layout):
        count = len(in_layout)
        for node in reversed(nodes):
            images = {Entry(node), *node.inputs[:_images(node)]}
            if not images <= in_layout:
                in_layout = in_layout - images
    return in_layout


def _is_supported(node: Node) -> bool:
    """Whether a node's images may have the layout."""
    if node.op in ("BatchNorm", "Concat"):
        return axis_of(node) == 1
    if node.op in ("Activation", "LeakyReLU"):
        return node.attrs.get("act_type", "leaky") in _ACTIVATIONS
    if node.op in library.operators("layout"):
        return node.attrs.get("layout", "None")[:2] in ("No", "NC")
    return _has_one_layout(node)


def _has_one_layout(node: Node) -> bool:
    """Whether all images of an operator have one layout."""
    return node.op in library.operators("any_order") or node.op in library.operators("alike")


def _images(node: Node) -> int:
    """How many of the first inputs are images."""
    return len(node.inputs) if node.op in library.operators("any_order") else 1


def _reads_images(node: Optional[Node], entry: Entry) -> bool:
    """Whether a node reads an entry as images that may have the layout."""
    return node is not None and _is_supported(node) and entry not in node.inputs[_images(node):]


def _channels(node: Node, channels: Mapping[Entry, Optional[int]]) -> Optional[int]:
    """The channels of a supported node's first output; None where the graph does not tell."""
    if node.op in COLUMNS["convolution"]:
        return int(node.attrs["num_filter"])
    of_inputs = [channels.get(e) for e in node.inputs[:_images(node)]]
    if node.op == "Concat":
        return None if None in of_inputs else sum(filter(None, of_inputs))
    return next(filter(None, of_inputs), None)
