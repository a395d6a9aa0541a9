"""Selects the products of a layer that run in high precision.

A layer has three products: its output, its data's gradient and its weight's gradient. The engine
ignores the low-precision settings for those in high precision.
"""
from typing import Collection

from ..cpu import library
from .graph import Node


def in_high_precision(node: Node, products: Collection[str], policy: str) -> None:
    """Selects the high-precision products of a node that has low-precision settings.

    Args:
        products: "forward", "data_gradient" (of the first input), "weight_gradient" (of others).
    """
    valid = library.operators("high_precision")
    if node.op not in valid:
        raise ValueError(f"policy {policy}: high_precision has no code for {node.op} ({node.name})"
                         f": keep it in float32 (keep=). Valid: {', '.join(sorted(valid))}")
    forward, data, weight = (str(int(what in products))
                             for what in ("forward", "data_gradient", "weight_gradient"))
    node.settings["high"] = f"{forward} {data}{weight * (len(node.inputs) - 1)}"
