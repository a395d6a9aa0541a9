"""Float16 images with their channels last, the layout of Tensor Cores' convolutions on GPUs.

Regions begin at convolutions. Operators that work on each number, norms, pooling, concatenations
and slices continue them. Before any other operator, and before an output of the graph, a transpose
restores MXNet's order. Parameters keep theirs: a transpose of the weight precedes its convolution,
unless both orders are the same memory (cpu/gpu.cc).
"""
import os
from collections import Counter
from typing import Dict, List, Mapping, Optional, Sequence, Union

from .._mxnet import has_cudnn_9
from ..annotations import Shape
from ..cpu import library
from .graph import Entry, Graph, Node, integers
from .operators import AXES, CASTS, COLUMNS, axis_of

_LAST, _FIRST = [0, 2, 3, 1], [0, 3, 1, 2]  # the axes of transposes to channels-last, and back


def keeps_mxnets_layout() -> bool:
    """Whether the user has switched off other layouts within graphs, on any device."""
    return os.environ.get("GLUON_AMP_LAYOUT") == "off"


def channels_last(graph: Graph, types: Mapping[str, str],
                  shapes: Optional[Mapping[str, Optional[Shape]]] = None) -> Graph:
    """Returns the graph for a GPU, with channels-last regions.

    It is the given graph where cuDNN is older than 9: its batch norms of such images are slow.
    The bodies of loops and conditions stay as they are.

    Args:
        types: the dtype of each variable.
        shapes: shapes of variables, as far as they are known.
    """
    if not has_cudnn_9() or keeps_mxnets_layout():
        return graph
    return graph.rewrite(_ChannelsLast(graph, types, shapes or {}).make)


class _ChannelsLast:
    def __init__(self, graph: Graph, types: Mapping[str, str],
                 shapes: Mapping[str, Optional[Shape]]):
        self.types, self.shapes = graph.types(types), shapes
        self.inputs = {node: node.inputs for node in graph.nodes()}
        self.count = Counter(entry.node for entry in self.types)  # outputs of each node
        self.images: Dict[Entry, Entry] = {}  # of an image in MXNet's order, its channels-last copy

    def make(self, node: Node, inputs: List[Entry]) -> Union[Node, Sequence[Entry]]:
        if node.op in COLUMNS["transpose"] and inputs[0] in self.images \
                and integers(node, "axes") == _LAST:
            return [self.images[inputs[0]]]
        images = self._images(node, inputs)
        if not images:
            return node.like(inputs)
        new = node.like([self._last(e) if i < images else e for i, e in enumerate(inputs)])
        if node.op in COLUMNS["convolution"]:
            if self._reads_mxnets_order(node):
                new.settings["plain_weight"] = "1"
            else:
                new.inputs[1] = _transpose(inputs[1], _LAST, f"{node.name}_weight")
        if node.op in (*COLUMNS["convolution"], "Pooling"):
            new.attrs["layout"] = "NHWC"
        elif node.op in AXES:
            new.attrs[AXES[node.op][0]] = str(_LAST.index(axis_of(node) % 4))
        return [self._first(Entry(new, i)) if i < _results(node) else Entry(new, i)
                for i in range(self.count[node])]

    def _images(self, node: Node, inputs: Sequence[Entry]) -> int:
        """Returns how many of the first inputs are images that the node reads channels-last."""
        of_node = self.inputs[node]
        if node.subgraphs or not of_node or self.types[of_node[0]] != "float16" \
                or self.types[Entry(node)] != "float16":
            return 0
        if node.op in COLUMNS["convolution"]:
            # MXNet computes the padding for a target_shape from the last two axes: W and C. cuDNN
            # has no algorithm for depthwise deconvolutions; other groups were not tried on a GPU.
            groups = node.attrs.get("num_group", "1")
            depthwise = node.op == "Convolution" and groups == node.attrs["num_filter"]
            is_one = len(integers(node, "kernel")) == 2 and _has_mxnets_layout(node) \
                and not node.is_set("cudnn_off") and self.types[of_node[1]] == "float16" \
                and not any(integers(node, "target_shape")) \
                and (groups == "1" or depthwise)
            return int(is_one)
        are_images = [e in self.images for e in inputs]
        if node.op in COLUMNS["elementwise"]:
            has_axes = node.attrs.get("act_type") in ("prelu", "rrelu") or integers(node, "axes")
            return len(inputs) if any(are_images) and not has_axes else 0
        if node.op in COLUMNS["broadcasting"]:
            return len(inputs) if all(are_images) else 0
        if node.op in ("Concat", "_npi_concatenate"):
            return len(inputs) if any(are_images) and node.attrs.get("axis") != "None" else 0
        if node.op == "Pooling":
            is_one = _has_mxnets_layout(node) and not node.is_set("cudnn_off") \
                and node.attrs.get("pool_type", "max") in ("max", "avg")
        elif node.op == "SliceChannel":
            is_one = not node.is_set("squeeze_axis")
        elif node.op == "BatchNorm":
            # MXNet's own kernel, which frozen norms have, uses one thread for each channel
            is_one = axis_of(node) == 1 and not node.is_set("cudnn_off") \
                and not node.is_set("use_global_stats")
        else:
            is_one = node.op == "slice_axis"
        return int(is_one and are_images[0])

    def _reads_mxnets_order(self, node: Node) -> bool:
        """Whether both orders of a convolution's weight are the same memory: that of one pixel, or
        of one input."""
        if node.op != "Convolution" or not library.started():
            return False
        weight = self.inputs[node][1].node
        shape = self.shapes.get((weight.inputs[0].node if weight.op in CASTS else weight).name)
        return integers(node, "kernel") == [1, 1] or shape is not None and shape[1] == 1

    def _last(self, entry: Entry) -> Entry:
        if entry not in self.images:
            self.images[entry] = _transpose(entry, _LAST, entry.node.name)
        return self.images[entry]

    def _first(self, image: Entry) -> Entry:
        """Returns a channels-last image in MXNet's order. Without readers, it is in no graph."""
        first = _transpose(image, _FIRST, image.node.name)
        self.images[first] = image
        return first


def _transpose(entry: Entry, axes: Sequence[int], name: str) -> Entry:
    suffix = "channels_last" if axes == _LAST else "channels_first"
    name = f"{name}{entry.output or ''}_{suffix}"
    return Entry(Node("transpose", name, {"axes": str(tuple(axes))}, [entry]))


def _results(node: Node) -> int:
    """Returns how many of the first outputs are images."""
    return int(node.attrs["num_outputs"]) if node.op == "SliceChannel" else 1


def _has_mxnets_layout(node: Node) -> bool:
    return node.attrs.get("layout", "None") in ("None", "NCHW")
