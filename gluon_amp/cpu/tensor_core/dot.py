"""Bit-exact products of a GPU's Tensor Cores on a CPU.

One Tensor Core instruction adds a block of products to an accumulator, all truncated to a number of
bits below the largest exponent. docs/tensor_cores.md states the rule; gpus.py has its parameters
for each GPU.
"""
from __future__ import annotations

from typing import Any, Optional

from ..._mxnet import mx, np
from ...annotations import AnyArray, Shape
from ...formats import FORMATS
from .. import library
from .gpus import GPUS, INPUTS, Sum, TensorCore, check_split, of_gpu

_NANS = {"float32": np.array(0x7fffffff, "uint32").view("float32"),  # an NVIDIA GPU's
         "float16": np.array(0x7fff, "uint16").view("float16")}


def tensor_core_dot(a: AnyArray, b: AnyArray, c: Optional[AnyArray] = None, gpu: str = "V100",
                    split: Optional[int] = None, format: str = "float16",
                    sums: str = "float32") -> AnyArray:
    """Returns the product of two matrices or vectors with the bits of a GPU's Tensor Cores.

    Each element is a chain of instructions along K, the common length: the first adds a block of
    products to `c`, the next adds another block to that sum, and so on. Instructions have the bits
    measured on the GPU; docs/tensor_cores.md lists what has not been measured. This function has
    no gradient; in a network, set `accumulate=` in the policy.

    Args:
        a, b: arrays of MXNet or numpy with the shapes of `numpy.matmul`: matrices, vectors, or
            stacks of matrices. float16 arrays; for other formats, floating-point arrays with
            values of that format (`amp.Format` rounds to it).
        c: the accumulator's initial value: an array that broadcasts to the result's shape, with
            values of the format `sums`. None: zeros.
        gpu: "V100", "A2", "A100", "Ada", "H100", "H200" or "B200", as measured on these GPUs.
            "A10" and "RTX 30" use Ada's rule and "T4" a published model, without measurements.
        split: the largest number of products in a chain. Longer chains are split; only the first
            part starts with `c`, and the sums of all parts are added in the format `sums`, in
            order. None: one chain.
        format: the format of `a` and `b`: "float16", "bfloat16", "tf32", "float8_e4m3" or
            "float8_e5m2".
        sums: "float32", or for float16 products "float16": an instruction then rounds its sum to
            float16, to nearest.

    Returns:
        An array of the type `sums`: an MXNet array if `a` or `b` is one, else a numpy array.

    Raises:
        TypeError: an array has values of another format.
        ValueError: shapes do not fit, or the GPU does not support the format.
    """
    core, split = of_gpu(gpu), check_split(split)
    how = _sum_of(core, gpu, format, sums)
    given = [array for array in (a, b) if isinstance(array, mx.nd.NDArray)]
    left, right = _values("a", a, format), _values("b", b, format)
    if left.ndim == 0 or right.ndim == 0:
        raise ValueError("tensor_core_dot takes matrices and vectors. Received: a number")
    rows = left[None, :] if left.ndim == 1 else left
    columns = right[:, None] if right.ndim == 1 else right
    if rows.shape[-1] != columns.shape[-2]:
        raise ValueError("a's last axis must be as long as b's last but one (or a vector b). "
                         f"Received: {left.shape} and {right.shape}")
    try:
        stack = np.broadcast(np.empty(rows.shape[:-2]), np.empty(columns.shape[:-2])).shape
    except ValueError:
        raise ValueError("a and b must be stacks of the same shape, or of shapes that numpy "
                         f"broadcasts. Received: {left.shape} and {right.shape}") from None
    shape = stack + (rows.shape[-2],) * (left.ndim > 1) + (columns.shape[-1],) * (right.ndim > 1)
    start = _start(c, shape, sums)
    full = (*stack, rows.shape[-2], columns.shape[-1])
    made = _product(np.broadcast_to(rows, stack + rows.shape[-2:]),
                    np.broadcast_to(columns, stack + columns.shape[-2:]),
                    start.reshape(full), how, format, split).reshape(shape)
    if not given:
        return made[()]
    if shape == () and not mx.util.is_np_shape():  # MXNet then has no 0-d arrays
        made = made.reshape(1)
    make = mx.np.array if isinstance(given[0], mx.np.ndarray) else mx.nd.array
    return make(made, dtype=sums, ctx=given[0].ctx)


def _sum_of(core: TensorCore, gpu: str, format_: str, sums: str) -> Sum:
    """Returns the rule of a GPU for such products, or raises ValueError if there is none."""
    if format_ not in INPUTS:
        raise ValueError(f"unknown format. Valid: {', '.join(INPUTS)}. Received: {format_!r}")
    how = core.sum_of(format_)
    if how is None:
        valid = [name for name, other in GPUS.items() if other.sum_of(format_)]
        raise ValueError(f"a {gpu}'s Tensor Cores do not multiply {format_} numbers. "
                         f"Valid: {', '.join(valid)}")
    if sums not in ("float32", "float16"):
        raise ValueError(f"sums must be 'float32' or 'float16'. Received: {sums!r}")
    if sums == "float16" and format_ != "float16":
        raise ValueError("no rule is known for float16 sums of other than float16 products. "
                         f"Received: format={format_!r}")
    return how


def _values(name: str, array: AnyArray, format_: str) -> np.ndarray[Any, Any]:
    values = array.asnumpy() if isinstance(array, mx.nd.NDArray) else np.asarray(array)
    if format_ == "float16" and values.dtype != np.float16:
        raise TypeError(f"Tensor Cores multiply float16 numbers: {name} must be a float16 array. "
                        f"Received: {values.dtype}")
    if values.dtype.kind != "f":
        raise TypeError(f"{name} must be an array of floating numbers. Received: {values.dtype}")
    rounded = FORMATS[format_].round(values)
    if not np.all((rounded == values) | (values != values)):
        raise TypeError(f"{name} must hold numbers of {format_}. Received: {values.dtype}, with "
                        f"others. Round them first: amp.Format(...).round")
    return values if format_ == "float16" else rounded


def _start(c: Optional[AnyArray], shape: Shape, sums: str) -> np.ndarray[Any, Any]:
    """Returns the accumulator's initial values as an array of this shape and type."""
    if c is None:
        return np.zeros(shape, sums)
    given = c.asnumpy() if isinstance(c, mx.nd.NDArray) else np.asarray(c)
    if given.dtype.kind not in "fiub":
        raise TypeError(f"c must hold {sums} numbers. Received: {given.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        values = given.astype(sums)
        same = (values == given) | (given != given)
    if not np.all(same):
        raise TypeError(f"c must hold {sums} numbers. Received: {given.dtype}, with numbers that "
                        f"{sums} does not have")
    if shape == () and values.size == 1:
        values = values.reshape(())  # there are no 0-d NDArrays
    try:
        return np.broadcast_to(values, shape)
    except ValueError:
        raise ValueError(f"c must have the result's shape, {shape}, or one that numpy broadcasts "
                         f"to it. Received: {given.shape}") from None


def _product(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], c: np.ndarray[Any, Any],
             how: Sum, format_: str, split: int) -> np.ndarray[Any, Any]:
    depth, half_sums = a.shape[-1], c.dtype == np.float16
    if c.size == 0 or depth == 0:  # MXNet has no empty arrays
        made = c + c.dtype.type(0)
    else:
        factors = "float16" if format_ == "float16" and not half_sums else "float32"
        stacks = [mx.nd.array(x.reshape(-1, *x.shape[-2:]), mx.cpu(), dtype)
                  for x, dtype in ((a, factors), (b, factors), (c, "float32"))]
        made = library.call("_gluon_amp_tensor_core_dot", stacks, **how._asdict(),
                            split=min(split, depth), smallest=1 - FORMATS[format_].bias,
                            half_sums=half_sums).asnumpy().reshape(c.shape).astype(c.dtype)
    return np.where(np.isnan(made), _NANS[c.dtype.name], made)
