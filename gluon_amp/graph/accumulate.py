"""The setting with which float16 products on a CPU accumulate as a GPU's Tensor Cores do."""
from typing import Optional

from ..cpu import library
from ..cpu.tensor_core.gpus import check_split, of_gpu
from .graph import Node
from .operators import PRODUCTS

# Products that run in another format by the table of operators.
_OTHERS = frozenset("""
    _linalg_syrk _linalg_trmm khatri_rao Correlation SpatialTransformer
""".split())
# Operators that are products for this value of an attribute.
_OTHERS_WHEN = {"UpSampling": ("sample_type", "bilinear"),  # a deconvolution
                "GridGenerator": ("transform_type", "affine")}


def accumulate(node: Node, gpu: str, split: Optional[int] = None) -> None:
    """Sets how the products of a float16 node and of its gradient accumulate.

    Raises:
        ValueError: the operator has no such kernel.
    """
    op, valid = node.op, library.operators("accumulate")
    key, value = _OTHERS_WHEN.get(op, ("", ""))
    if op in (PRODUCTS | _OTHERS) - valid or key and node.attrs.get(key) == value:
        raise ValueError(f"accumulate={gpu!r} has no code for {op} ({node.name}): keep it in "
                         f"float32 (keep=). Valid: {', '.join(sorted(PRODUCTS & valid))}")
    if op == "_linalg_gemm2" and node.attrs.get("axis", "-2") != "-2":
        raise ValueError(f"accumulate={gpu!r} has no code for a gemm2 ({node.name}) over other "
                         "axes than the last two: keep it in float32 (keep=). Valid: axis=-2. "
                         f"Received: axis={node.attrs['axis']}")
    if op in valid:
        core = of_gpu(gpu)
        node.settings["accumulate"] = f"{core.block} {core.fraction} {check_split(split)}"
