"""Products as a GPU's Tensor Cores make them, bit by bit, on a CPU.

A Tensor Core does not add in float32 as a CPU does. One instruction adds a block of products to an
accumulator, all of them cut to so many bits under the largest one; docs/tensor_cores.md states the
rule, and tensor_core_rule.py has its numbers for each GPU.
"""
from typing import Any, Optional

from ._mxnet import mx, np
from .annotations import AnyArray, Shape
from .cpu import library
from .formats import FORMATS
from .tensor_core_rule import GPUS, INPUTS, Sum, TensorCore, check_split, of_gpu, product

_NANS = {"float32": np.array(0x7fffffff, "uint32").view("float32"),  # an NVIDIA GPU's
         "float16": np.array(0x7fff, "uint16").view("float16")}


def tensor_core_dot(a: AnyArray, b: AnyArray, c: Optional[AnyArray] = None, gpu: str = "V100",
                    split: Optional[int] = None, format: str = "float16",
                    sums: str = "float32") -> AnyArray:
    """The product of two matrices or vectors as a GPU's Tensor Cores make it.

    Each element of the result is a chain of instructions along K, the length that both arguments
    share: the first adds the first block of products to `c`, the next adds the second block to
    what came out of the first, and so on. An instruction gives the bits that were measured on that
    GPU; docs/tensor_cores.md tells what of it nobody has measured. Gradients do not go back
    through this function; in a network they do, whose policy has `accumulate=`.

    Args:
        a, b: arrays of MXNet or numpy, with the shapes that `numpy.matmul` takes: matrices,
            vectors, stacks of matrices. float16 arrays; of other formats, arrays of any floating
            type that hold numbers of that format (`amp.Format` rounds to it).
        c: the accumulator's first value: an array of the result's shape, or one that
            `numpy.broadcast_to` makes so, with numbers of the format `sums`. None: zeros.
        gpu: "V100", "A2", "A100", "Ada", "H100", "H200" or "B200", as measured on these GPUs;
            "A10" and "RTX 30" compute by Ada's rule and "T4" by a published model's, which is
            assumed, not measured.
        split: how many products a chain has at most. Longer ones are cut into pieces of that
            length; only the first piece begins with `c`, and the results of all pieces are
            added in the format `sums`, one after the other. None: one chain.
        format: of `a` and `b`: "float16", "bfloat16", "tf32", "float8_e4m3" or "float8_e5m2".
        sums: "float32", or for float16 products "float16": then an instruction rounds its sum to
            float16 once, to nearest.

    Returns:
        An array of the type `sums`, one of MXNet's, of its kind, if `a` or `b` is, else numpy's.
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
                    start.reshape(full), core, how, format, split).reshape(shape)
    if not given:
        return made[()]
    if shape == () and not mx.util.is_np_shape():  # MXNet's arrays then have one axis at least
        made = made.reshape(1)
    make = mx.np.array if isinstance(given[0], mx.np.ndarray) else mx.nd.array
    return make(made, dtype=sums, ctx=given[0].context)


def _sum_of(core: TensorCore, gpu: str, format_: str, sums: str) -> Sum:
    """How that GPU adds such products; an error where it does not, or nobody has measured it."""
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


def _values(name: str, array: AnyArray, format_: str) -> "np.ndarray[Any, Any]":
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


def _start(c: Optional[AnyArray], shape: Shape, sums: str) -> "np.ndarray[Any, Any]":
    """What the chains begin with, as an array of that shape and type."""
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
        values = values.reshape(())  # an NDArray has one axis at least
    try:
        return np.broadcast_to(values, shape)
    except ValueError:
        raise ValueError(f"c must have the result's shape, {shape}, or one that numpy broadcasts "
                         f"to it. Received: {given.shape}") from None


def _product(a: "np.ndarray[Any, Any]", b: "np.ndarray[Any, Any]", c: "np.ndarray[Any, Any]",
             core: TensorCore, how: Sum, format_: str, split: int) -> "np.ndarray[Any, Any]":
    depth = a.shape[-1]
    if c.size == 0 or depth == 0:  # MXNet has no empty arrays
        made = c + c.dtype.type(0)
    elif format_ != "float16" or c.dtype == np.float16:
        made = product(a, b, c, how, FORMATS[format_], FORMATS[c.dtype.name], split)
    else:
        stacks = [mx.nd.array(x.reshape(-1, *x.shape[-2:]), mx.cpu(), x.dtype) for x in (a, b, c)]
        return library.call("_gluon_amp_tensor_core_dot", stacks, block=core.block,
                            fraction=core.fraction,
                            split=min(split, depth)).asnumpy().reshape(c.shape)
    return np.where(np.isnan(made), _NANS[c.dtype.name], made)
