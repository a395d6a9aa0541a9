"""Batch norms with the ReLU that follows, and with an addition between them, on GPUs.

cuDNN has such functions for channels-last float16 images. The engine's operator calls them
(cpu/gpu_norms.cc), and separate ones for images that they do not support.
"""
import os
from typing import Dict, List, Mapping, NamedTuple, Optional

from .._mxnet import has_cudnn_9
from ..cpu import library
from .graph import Entry, Graph, Node

_RELUS = ("relu", "_npx_relu")


class _Fused(NamedTuple):
    """A batch norm that a ReLU includes.

    Attributes:
        norm: the batch norm.
        added: which input of the addition between them is not the batch norm; None: there is none.
    """
    norm: Node
    added: Optional[int]


def fuse_norms(graph: Graph, types: Mapping[str, str]) -> Graph:
    """Returns the graph for a GPU, in which ReLUs include batch norms.

    It is the given graph where cuDNN is older than 9, whose functions were not measured, and where
    the backward pass repeats operators, because batch norms update their averages.

    Args:
        types: the dtype of each variable.
    """
    if not (library.started() and has_cudnn_9()) or os.environ.get("GLUON_AMP_BLOCKS") == "off" \
            or os.environ.get("MXNET_BACKWARD_DO_MIRROR", "0") != "0":
        return graph
    found = _Search(graph, types).found

    def make(node: Node, inputs: List[Entry]) -> Node:
        if node not in found:
            return node.like(inputs)
        norm, added = found[node]
        attrs = {key: norm.attrs[key] for key in ("eps", "momentum", "axis") if key in norm.attrs}
        if added is None:
            return Node("_gluon_amp_norm_relu", node.name, attrs, inputs[0].node.inputs)
        one = inputs[0].node.inputs  # of the addition
        its_inputs = one[1 - added].node.inputs
        attrs["added"] = "last" if added else "first"
        return Node("_gluon_amp_norm_relu", node.name, attrs,
                    [*its_inputs, one[1]] if added else [one[0], *its_inputs])
    return graph.rewrite(make)


class _Search:
    def __init__(self, graph: Graph, types: Mapping[str, str]):
        self.types = graph.types(types)
        self.users = graph.consumers()
        self.found: Dict[Node, _Fused] = {}
        for node in graph.nodes():
            if not node.settings and (node.op in _RELUS or node.op == "Activation"
                                      and node.attrs.get("act_type") == "relu"):
                fused = self._fused(node)
                if fused is not None:
                    self.found[node] = fused

    def _fused(self, relu: Node) -> Optional[_Fused]:
        before = relu.inputs[0]
        if self._is_norm(before):
            return _Fused(before.node, None)
        if before.node.op != "elemwise_add" or before.node.settings \
                or not self._is_read_once(before):
            return None
        for i, entry in enumerate(before.node.inputs):
            if self._is_norm(entry) and entry != before.node.inputs[1 - i]:
                return _Fused(entry.node, 1 - i)
        return None

    def _is_norm(self, entry: Entry) -> bool:
        """Whether an entry is a channels-last batch norm of trained statistics, with one reader."""
        node = entry.node
        return node.op == "BatchNorm" and entry.output == 0 and not node.settings \
            and self.types[node.inputs[0]] == "float16" \
            and self.types[node.inputs[1]] == "float32" \
            and node.attrs.get("axis", "1") in ("3", "-1") and self._is_read_once(entry) \
            and node.attrs.get("fix_gamma", "True") in ("False", "0") \
            and not any(node.attrs.get(key, "False") in ("True", "1")
                        for key in ("use_global_stats", "output_mean_var", "cudnn_off"))

    def _is_read_once(self, entry: Entry) -> bool:
        return len(self.users[entry]) == 1 and self.users[entry][0] is not None
