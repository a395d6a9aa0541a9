"""Batch norms with the ReLU that follows, and with an addition between them, on GPUs.

cuDNN has such functions for channels-last float16 images. The engine's operator calls them
(cpu/gpu_norms.cc), and separate ones for images that they do not support.
"""
import os
from typing import Dict, List, Mapping, Optional, Tuple

from .._mxnet import has_cudnn_9
from ..cpu import library
from .channels_last import keeps_mxnets_layout
from .graph import Entry, Graph, Node
from .operators import is_relu


def fuse_norms(graph: Graph, types: Mapping[str, str]) -> Graph:
    """Returns the graph for a GPU, in which ReLUs include batch norms.

    It is the given graph where cuDNN is older than 9, whose functions were not measured, and where
    the backward pass repeats operators, because batch norms update their averages.

    Args:
        types: the dtype of each variable.
    """
    if not (library.started() and has_cudnn_9()) or keeps_mxnets_layout() \
            or os.environ.get("MXNET_BACKWARD_DO_MIRROR", "0") != "0":
        return graph
    fused = _norms_before_relus(graph, graph.types(types))

    def make(node: Node, inputs: List[Entry]) -> Node:
        if node not in fused:
            return node.like(inputs)
        norm, added = fused[node]
        attrs = {key: norm.attrs[key] for key in ("eps", "momentum", "axis") if key in norm.attrs}
        if added is None:
            return Node("_gluon_amp_norm_relu", node.name, attrs, inputs[0].node.inputs)
        addition = inputs[0].node
        attrs["added"] = "last" if added else "first"
        of_norm = addition.inputs[1 - added].node.inputs
        entries = [*of_norm, addition.inputs[1]] if added else [addition.inputs[0], *of_norm]
        return Node("_gluon_amp_norm_relu", node.name, attrs, entries)
    return graph.rewrite(make)


def _norms_before_relus(graph: Graph, types: Mapping[Entry, Optional[str]]
                        ) -> Dict[Node, Tuple[Node, Optional[int]]]:
    """Returns for each ReLU that can include a batch norm the batch norm, and which input of the
    addition between them is not the batch norm; None for no addition."""
    users = graph.consumers()

    def is_read_once(entry: Entry) -> bool:
        return len(users[entry]) == 1 and users[entry][0] is not None

    def norm_before(entry: Entry) -> Optional[Tuple[Node, Optional[int]]]:
        if not is_read_once(entry):
            return None
        if _is_norm(entry, types):
            return entry.node, None
        if entry.node.op == "elemwise_add" and not entry.node.settings:
            for i, one in enumerate(entry.node.inputs):
                if is_read_once(one) and _is_norm(one, types):
                    return one.node, 1 - i
        return None

    relus = [node for node in graph.nodes() if not node.settings and is_relu(node)]
    norms = {relu: norm_before(relu.inputs[0]) for relu in relus}
    return {relu: norm for relu, norm in norms.items() if norm is not None}


def _is_norm(entry: Entry, types: Mapping[Entry, Optional[str]]) -> bool:
    """Whether an entry is the result of a channels-last batch norm of trained statistics."""
    node = entry.node
    return node.op == "BatchNorm" and entry.output == 0 \
        and {*node.settings} <= {"finite_averages"} \
        and types[node.inputs[0]] == "float16" and types[node.inputs[1]] == "float32" \
        and node.attrs.get("axis", "1") in ("3", "-1") \
        and not node.is_set("fix_gamma", True) \
        and not any(map(node.is_set, ("use_global_stats", "output_mean_var", "cudnn_off")))
