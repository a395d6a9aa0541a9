"""Lets the products of a CPU's graph add as a GPU's Tensor Cores do."""
from typing import Optional

from ..tensor_core_math import check_split, of_gpu
from .graph import Graph
from .operators import PRODUCTS

ATTRIBUTE = "__gluon_amp_accumulate__"
ENGINE = "__gluon_amp_engine__"  # of nodes of low type (cpu/engine.h)

# What makes its products so (cpu/tensor_core_products.cc), and what else multiplies matrices.
_WITH_CODE = frozenset("""
    Convolution Deconvolution FullyConnected dot batch_dot _linalg_gemm _linalg_gemm2 RNN
    _np_dot _npi_matmul _npi_tensordot_int_axes
    _contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt
    _contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt
""".split())
_OTHERS = PRODUCTS - _WITH_CODE | frozenset("""
    _linalg_syrk _linalg_trmm khatri_rao Correlation SpatialTransformer
""".split())
# These do with this value of an attribute.
_OTHERS_WHEN = {"UpSampling": ("sample_type", "bilinear"),  # a deconvolution
                "GridGenerator": ("transform_type", "affine")}


def accumulate(graph: Graph, gpu: str, split: Optional[int] = None) -> None:
    """Lets all products of a CPU's float16 graph (`graph.build.build`) add as a GPU does.

    Their gradients do so, too. Products that stay float32 are left alone.
    """
    core = of_gpu(gpu)
    said = f"{core.block} {core.fraction} {check_split(split)}"
    for node in graph.nodes():
        for inner in node.subgraphs:
            accumulate(inner, gpu, split)
        if ENGINE not in node.attrs:
            continue
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
            node.attrs[ATTRIBUTE] = said
