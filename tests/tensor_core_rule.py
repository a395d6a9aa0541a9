"""The rule of a Tensor Core's instruction, written plainly: what the fast code is held against."""
import numpy as np


def exponent(x, smallest):
    """floor(log2|x|), not below the type's smallest; zeros have none."""
    return np.where(x == 0, -10000, np.maximum(np.frexp(x)[1] - 1, smallest))


def to_float32(x):
    """Float64 numbers cut to float32, toward zero; a zero is +0."""
    near = x.astype("float32")
    return np.where(abs(near.astype("float64")) > abs(x), np.nextafter(near, np.float32(0)),
                    near) + np.float32(0)


def instruction(a, b, c, fraction):
    """c + the sum of a * b over the last axis: one instruction for each element of c."""
    with np.errstate(all="ignore"):
        a, b, c = (np.asarray(x, "float64") for x in (a, b, c[..., None]))
        exponents = exponent(a, -14) + exponent(b, -14), exponent(c, -126)
        largest = np.max(np.concatenate(exponents, -1), -1, keepdims=True)
        addends = np.concatenate([a * b, c], -1)
        unit = np.ldexp(1.0, np.maximum(largest, -400) - fraction)
        total = np.sum(np.trunc(addends / unit) * unit, -1)
        total = np.where(np.isfinite(addends).all(-1), total, np.sum(addends, -1))
        return to_float32(total)


def product(a, b, c, block, fraction, split=None):
    """c + a @ b for matrices, each element by chains of instructions along K."""
    rows, columns = a[:, None, :], b.T[None, :, :]
    depth = a.shape[1]
    total = None
    for first in range(0, depth, split or depth):
        chain = c if first == 0 else np.zeros_like(c)
        last = min(first + (split or depth), depth)
        for k in range(first, last, block):
            some = slice(k, min(k + block, last))
            chain = instruction(*np.broadcast_arrays(rows[..., some], columns[..., some]), chain,
                                fraction)
        with np.errstate(invalid="ignore"):
            total = chain if total is None else total + chain
    return total
