"""Settings of products: sums as a GPU's Tensor Cores make them, and products in high precision."""
from typing import Collection

from ..cpu import library
from ..cpu.tensor_core.gpus import of_gpu
from ..policy import GEMMS, Policy
from .graph import Node
from .operators import PRODUCTS

# Products that run in another format by the table of operators.
_OTHERS = frozenset("""
    _linalg_syrk _linalg_trmm khatri_rao Correlation SpatialTransformer
""".split())
# Operators that are products for this value of an attribute.
_OTHERS_WHEN = {"UpSampling": ("sample_type", "bilinear"),  # a deconvolution
                "GridGenerator": ("transform_type", "affine")}


def set_products(node: Node, policy: Policy) -> None:
    """Sets how the products of a low-precision node and of its gradient accumulate, and which of
    them run in high precision: its output, its data's gradient, and its weight's gradient.

    Raises:
        ValueError: the engine has no code for it.
    """
    if policy.accumulate is not None:
        _accumulate(node, policy.accumulate, policy.split or 0)
    if policy.high_precision and (node.rounds_inputs or "accumulate" in node.settings):
        valid = library.operators("high_precision")
        if node.op not in valid:
            _refuse(f"policy {policy.name}: high_precision", node, valid)
        forward, data, weight = (str(int(each in policy.high_precision)) for each in GEMMS)
        node.settings["high"] = f"{forward} {data}{weight * (len(node.inputs) - 1)}"


def _accumulate(node: Node, gpu: str, split: int) -> None:
    op, valid = node.op, library.operators("accumulate")
    key, value = _OTHERS_WHEN.get(op, ("", ""))
    if op in (PRODUCTS | _OTHERS) - valid or key and node.attrs.get(key) == value:
        _refuse(f"accumulate={gpu!r}", node, PRODUCTS & valid)
    if op == "_linalg_gemm2" and node.attrs.get("axis", "-2") != "-2":
        raise ValueError(f"accumulate={gpu!r} has no code for a gemm2 ({node.name}) over other "
                         "axes than the last two: keep it in float32 (keep=). Valid: axis=-2. "
                         f"Received: axis={node.attrs['axis']}")
    if op in valid:
        core = of_gpu(gpu)
        node.settings["accumulate"] = f"{core.block} {core.fraction} {split}"


def _refuse(what: str, node: Node, valid: Collection[str]) -> None:
    raise ValueError(f"{what} has no code for {node.op} ({node.name}): keep it in float32 (keep=). "
                     f"Valid: {', '.join(sorted(valid))}")
