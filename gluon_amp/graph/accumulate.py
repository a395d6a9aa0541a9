"""The setting with which float16 products on a CPU accumulate as a GPU's Tensor Cores do."""
from typing import Optional

from ..cpu.tensor_core.gpus import check_split, of_gpu
from .graph import Node
from .operators import PRODUCTS

ATTRIBUTE = "__gluon_amp_accumulate__"

# Operators with emulated accumulation (cpu/tensor_core/products.cc), and other products.
_WITH_CODE = frozenset("""
    Convolution Deconvolution FullyConnected dot batch_dot _linalg_gemm _linalg_gemm2 RNN
    _np_dot _npi_matmul _npi_tensordot_int_axes
    _contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt
    _contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt
""".split())
_OTHERS = PRODUCTS - _WITH_CODE | frozenset("""
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
    op = node.op
    key, value = _OTHERS_WHEN.get(op, ("", ""))
    if op in _OTHERS or key and node.attrs.get(key) == value:
        raise ValueError(f"accumulate={gpu!r} has no code for {op} ({node.name}): keep it in "
                         f"float32 (keep=). Valid: {', '.join(sorted(_WITH_CODE))}")
    if op == "_linalg_gemm2" and node.attrs.get("axis", "-2") != "-2":
        raise ValueError(f"accumulate={gpu!r} has no code for a gemm2 ({node.name}) over other "
                         "axes than the last two: keep it in float32 (keep=). Valid: axis=-2. "
                         f"Received: axis={node.attrs['axis']}")
    if op in _WITH_CODE:
        core = of_gpu(gpu)
        node.attrs[ATTRIBUTE] = f"{core.block} {core.fraction} {check_split(split)}"
