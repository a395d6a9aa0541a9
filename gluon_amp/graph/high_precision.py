"""Products of a layer in high precision, beside others of the same layer in low precision.

A layer makes three products: its output, the gradient of its data, and that of its weight. Those in
high precision lose the settings of low precision. The engine propagates settings to the nodes of
gradients (cpu/gradients.cc), where one attribute selects by input which of these lose them, too.
"""
from typing import Collection

from .accumulate import ATTRIBUTE
from .graph import Node

_HIGH = "__gluon_amp_high__"
_WITH_CODE = frozenset("""
    Convolution Deconvolution FullyConnected dot batch_dot _np_dot _npi_matmul
""".split())


def in_high_precision(node: Node, products: Collection[str], policy: str) -> None:
    """Selects products of a node that has its settings of low precision.

    Args:
        products: "forward", "data_gradient" (of the first input), "weight_gradient" (of others).
    """
    if node.op not in _WITH_CODE:
        raise ValueError(f"policy {policy}: high_precision has no code for {node.op} ({node.name})"
                         ": keep it in float32 (keep=). Valid: "
                         f"{', '.join(sorted(_WITH_CODE))}")
    of_data, of_weight = (str(int(f"{what}_gradient" in products)) for what in ("data", "weight"))
    node.attrs[_HIGH] = of_data + of_weight * (len(node.inputs) - 1)
    if "forward" in products:
        for key in ("__gluon_amp_reads__", "__gluon_amp_scaling__", ATTRIBUTE):
            if key in node.attrs:  # for its gradients alone
                node.attrs[key.replace("amp_", "amp_back_")] = node.attrs.pop(key)
