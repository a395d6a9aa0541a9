"""Products as a GPU's Tensor Cores make them, bit by bit, on a CPU.

A Tensor Core does not add in float32 as a CPU does. One instruction adds a block of products of
float16 numbers to a float32 number, all of them cut to so many bits under the largest one;
docs/tensor_cores.md tells the rule. `GPUS` has its numbers for each GPU; nothing else has them.
"""
from typing import Any, NamedTuple, Optional

from ._mxnet import mx, np
from .annotations import AnyArray, Shape
from .cpu import library


class TensorCore(NamedTuple):
    """How a GPU's Tensor Cores multiply and add float16 numbers."""
    block: int      # how many products one instruction adds to its float32 number
    fraction: int   # bits of fraction, under the largest exponent, that it keeps of each of them
    measured: bool  # on that GPU; otherwise assumed to be as on one of the same kind


GPUS = {
    "V100": TensorCore(block=4, fraction=23, measured=True),
    "A2": TensorCore(block=8, fraction=24, measured=True),
    "A10": TensorCore(block=8, fraction=24, measured=False),
    "A100": TensorCore(block=8, fraction=24, measured=True),
    "RTX 30": TensorCore(block=8, fraction=24, measured=False),
    "Ada": TensorCore(block=8, fraction=24, measured=True),
    "H100": TensorCore(block=16, fraction=25, measured=True),
}
_NAN = np.array(0x7fffffff, "uint32").view("float32")  # an NVIDIA GPU's
_NOT_MEASURED = ("T4",)  # known by name; nobody's measurements are here


def tensor_core_dot(a: AnyArray, b: AnyArray, c: Optional[AnyArray] = None, gpu: str = "V100",
                    split: Optional[int] = None) -> AnyArray:
    """The product of two float16 matrices or vectors as a GPU's Tensor Cores make it.

    Each element of the result is a chain of instructions along K, the length that both arguments
    share: the first adds the first block of products to `c`, the next adds the second block to
    what came out of the first, and so on. An instruction gives the bits that were measured on that
    GPU; docs/tensor_cores.md tells what of it nobody has measured. Gradients do not go back
    through this function; in a network they do, whose policy has `accumulate=`.

    Args:
        a, b: float16 arrays of MXNet or numpy, with the shapes that `numpy.matmul` takes:
            matrices, vectors, stacks of matrices.
        c: what is there already: a float32 array of the result's shape, or one that
            `numpy.broadcast_to` makes so. None: zeros.
        gpu: "V100", "A2", "A100", "Ada" or "H100", as measured on these GPUs; "A10" and
            "RTX 30" compute by Ada's rule, which is assumed, not measured.
        split: how many products a chain has at most. Longer ones are cut into pieces of that
            length; only the first piece begins with `c`, and the results of all pieces are
            added in float32, one after the other. None: one chain.

    Returns:
        An array of float32, one of MXNet's, of its kind, if `a` or `b` is, else numpy's.
    """
    core, split = of_gpu(gpu), check_split(split)
    given = [array for array in (a, b) if isinstance(array, mx.nd.NDArray)]
    left, right = _values("a", a), _values("b", b)
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
    start = _start(c, shape)
    full = (*stack, rows.shape[-2], columns.shape[-1])
    made = _product(np.broadcast_to(rows, stack + rows.shape[-2:]),
                    np.broadcast_to(columns, stack + columns.shape[-2:]),
                    start.reshape(full), core, split).reshape(shape)
    if not given:
        return made[()]
    if shape == () and not mx.util.is_np_shape():  # MXNet's arrays then have one axis at least
        made = made.reshape(1)
    make = mx.np.array if isinstance(given[0], mx.np.ndarray) else mx.nd.array
    return make(made, dtype="float32", ctx=given[0].context)


def of_gpu(gpu: str) -> TensorCore:
    """The row of `GPUS` with that name, in any case and with or without blanks."""
    for name, core in GPUS.items():
        if isinstance(gpu, str) and gpu.replace(" ", "").lower() == name.replace(" ", "").lower():
            return core
    known = isinstance(gpu, str) and gpu.upper() in _NOT_MEASURED
    why = f"nobody has measured a {gpu} for us" if known else "unknown GPU"
    raise ValueError(f"{why}. Valid: {', '.join(GPUS)}. Received: {gpu!r}")


def check_split(split: Optional[int]) -> int:
    """How long a chain may be; 0 for any length."""
    if split is None:
        return 0
    if isinstance(split, bool) or not isinstance(split, (int, np.integer)) or split < 1:
        raise ValueError("split must be a whole number of products, 1 or more, or None. "
                         f"Received: {split!r}")
    return int(split)


def _values(name: str, array: AnyArray) -> "np.ndarray[Any, Any]":
    values = array.asnumpy() if isinstance(array, mx.nd.NDArray) else np.asarray(array)
    if values.dtype != np.float16:
        raise TypeError(f"Tensor Cores multiply float16 numbers: {name} must be a float16 array. "
                        f"Received: {values.dtype}")
    return values


def _start(c: Optional[AnyArray], shape: Shape) -> "np.ndarray[Any, Any]":
    """What the chains begin with, as float32 of that shape."""
    if c is None:
        return np.zeros(shape, "float32")
    given = c.asnumpy() if isinstance(c, mx.nd.NDArray) else np.asarray(c)
    if given.dtype.kind not in "fiub":
        raise TypeError(f"c must hold float32 numbers. Received: {given.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        values = given.astype("float32")
        same = (values == given) | (given != given)
    if not np.all(same):
        raise TypeError(f"c must hold float32 numbers. Received: {given.dtype}, with numbers that "
                        "float32 does not have")
    if shape == () and values.size == 1:
        values = values.reshape(())  # an NDArray has one axis at least
    try:
        return np.broadcast_to(values, shape)
    except ValueError:
        raise ValueError(f"c must have the result's shape, {shape}, or one that numpy broadcasts "
                         f"to it. Received: {given.shape}") from None


def _product(a: "np.ndarray[Any, Any]", b: "np.ndarray[Any, Any]", c: "np.ndarray[Any, Any]",
             core: TensorCore, split: int) -> "np.ndarray[Any, Any]":
    depth = a.shape[-1]
    if c.size == 0 or depth == 0:  # MXNet has no empty arrays
        return np.where(np.isnan(c), _NAN, c + np.float32(0))
    stacks = [mx.nd.array(x.reshape(-1, *x.shape[-2:]), mx.cpu(), x.dtype) for x in (a, b, c)]
    made = library.call("_gluon_amp_tensor_core_dot", stacks, block=core.block,
                        fraction=core.fraction, split=min(split, depth))
    return made.asnumpy().reshape(c.shape)
