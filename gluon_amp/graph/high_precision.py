"""Selects the products of a layer that run in high precision.

A layer has three products: its output, its data's gradient and its weight's gradient. This module
removes the low-precision settings of those in high precision. The engine propagates settings to
gradient nodes (cpu/dispatch/gradients.cc). There one attribute selects the inputs whose gradients
lose them.
"""
from typing import Collection

from .accumulate import ATTRIBUTE
from .graph import Node

_HIGH = "__gluon_amp_high__"
_WITH_CODE = frozenset("""
    Convolution Deconvolution FullyConnected dot batch_dot _np_dot _npi_matmul
""".split())


def in_high_precision(node: Node, products: Collection[str], policy: str) -> None:
    """Selects the high-precision products of a node that has low-precision settings.

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
            if key in node.attrs:  # moved to a key that only its gradients read
                node.attrs[key.replace("amp_", "amp_back_")] = node.attrs.pop(key)
