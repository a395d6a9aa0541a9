"""What Python does with arrays outside any graph: casts between 16-bit arrays and their float32
master weights, and the overflow check, by sums of squares of gradients.

A CPU uses our kernels, because MXNet's are not vectorized. A GPU uses MXNet's operators, with many
arrays in one launch.

A sum of squares is finite only if all values are, and gives the norm. MXNet's `multi_all_finite`
refuses a mix of float16 and float32 arrays, checks the first 200 only, and is not vectorized for
float16 on a CPU.

A GPU accumulates in float32, so a norm above 1.8e19 counts as an overflow. Float16 gradients do not
reach it. Float32 gradients reach it if training diverges: at the largest loss scale, 2^24, it is an
unscaled norm of 1e12.
"""
import functools
import itertools
import logging
import math
from ctypes import c_double, c_float
from typing import Any, Callable, Dict, Iterable, List, Mapping, Sequence, Set, Tuple

from .._mxnet import mx, np
from ..annotations import Array, Context, DType
from ..checks import listed
from . import library
from .bfloat16 import BFLOAT16, cast, is_bfloat16

log = logging.getLogger("gluon_amp")

TYPES_16BIT = ("float16", "bfloat16")
ROUNDED_TO_INFINITY = 65520.0  # the smallest number that float16 rounds to infinity
SMALLEST = 2.0 ** -14  # the smallest number with all digits of float16
ADDED = ("bias", "beta")  # ends of names of parameters that are only added: they may be small


@functools.lru_cache(maxsize=None)
def dtype_name(dtype: DType) -> str:
    return "bfloat16" if is_bfloat16(dtype) else np.dtype(dtype).name


def array_type(name: str) -> DType:
    """Returns MXNet's dtype of a name."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name).type


def is_16bit(dtype: Any) -> bool:
    """Whether a dtype is a 16-bit type."""
    return dtype_name(dtype) in TYPES_16BIT


def to_float32(array: "mx.nd.NDArray") -> "mx.nd.NDArray":
    """Returns an array in float32; a float32 array unchanged."""
    if is_16bit(array.dtype) and _on_cpu(array):
        return cast(array, "float32")
    return array.astype("float32", copy=False)


def to_16bit(array: "mx.nd.NDArray", dtype: str) -> "mx.nd.NDArray":
    """Returns an array in a 16-bit type; an array of that type unchanged."""
    if dtype_name(array.dtype) == "float32" and _on_cpu(array):
        return cast(array, dtype)
    return array.astype(dtype, copy=False)


def mean_on_cpu(arrays: Sequence["mx.nd.NDArray"]) -> "mx.nd.NDArray":
    """Returns the mean of arrays on several devices, on a CPU, of 16-bit arrays in float32.

    Equal arrays of 16 or 32 bits are their mean, bit for bit: their sum is exact.
    """
    copies = [array.copyto(mx.cpu()) for array in arrays]
    if is_16bit(copies[0].dtype):
        copies = [to_float32(copy) for copy in copies]
    elif len(copies) > 1 and dtype_name(copies[0].dtype) == "float32":
        return (sum(copy.astype("float64") for copy in copies) / len(copies)).astype("float32")
    return copies[0] if len(copies) == 1 else sum(copies) / len(copies)


def on_device(array: Any, device: Any) -> Any:
    """Returns an array on a device; an array there unchanged. MXNet has no one method for arrays
    of `mx.nd` and `mx.np`."""
    return array if array.ctx == device else array.copyto(device)


def copy_into(held: Sequence["mx.nd.NDArray"], arrays: Sequence["mx.nd.NDArray"]) -> None:
    """Copies arrays into existing ones, in the types of these."""
    if not library.copy_all(arrays, held):
        for to, array in zip(held, arrays):
            array.astype(to.dtype, copy=False).copyto(to)


def widen_all(arrays: Sequence["mx.nd.NDArray"]) -> List["mx.nd.NDArray"]:
    """Returns arrays in float32; float32 arrays unchanged."""
    if not on_gpu_in_float16(arrays):
        return [to_float32(array) for array in arrays]
    sizes = [array.size for array in arrays]
    flat, at = mx.nd.zeros(sum(sizes), arrays[0].ctx), 0
    wide = []
    for array, size in zip(arrays, sizes):
        wide.append(flat[at:at + size].reshape(array.shape))
        at += size
    # 0 - (-1) * array; each array is its own weight, which the operator does not change
    _descents(arrays, wide, -1.0)()
    return wide


def narrow_all(masters: Sequence["mx.nd.NDArray"], weights: Sequence["mx.nd.NDArray"]) -> None:
    """Rounds master weights into their 16-bit weights."""
    if on_gpu_in_float16(weights):
        narrowing(masters, weights)()
        return
    for master, weight in zip(masters, weights):
        narrow(master, weight)


def narrowing(masters: Sequence["mx.nd.NDArray"], weights: Sequence["mx.nd.NDArray"]
              ) -> Callable[[], None]:
    """Returns a function that rounds master weights into their float16 weights on a GPU."""
    # The weight replaces the gradient. It is clipped to 0, because an infinite one times the
    # learning rate 0 would be NaN.
    return _descents(weights, masters, 0.0, clip_gradient=0.0)


def in_launches(rows: Sequence[Any]) -> List[Sequence[Any]]:
    """Divides weights, or rows of their arrays, into as many as one launch of MXNet updates."""
    most = 60  # the limit of MXNet's kernel
    return [rows[i:i + most] for i in range(0, len(rows), most)]


def _descents(arrays: Sequence[Any], masters: Sequence[Any], rate: float,
              **attrs: Any) -> Callable[[], None]:
    """Returns a function that computes masters -= rate * arrays and arrays = masters, rounded, by
    the only operator of MXNet that reads and writes many arrays of both types in one launch."""
    launches = in_launches(list(zip(arrays, masters)))
    name = "multi_mp_sgd_update"
    calls = library.Calls([
        (name, [each for array, master in rows for each in (array, array, master)],
         [array for array, _ in rows]) for rows in launches])
    return functools.partial(calls.run, [
        library.Attributes(name, num_weights=len(rows), lrs=[rate] * len(rows),
                           wds=[0.0] * len(rows), **attrs) for rows in launches])


def on_gpu_in_float16(arrays: Sequence["mx.nd.NDArray"]) -> bool:
    """Whether these are dense float16 arrays on one GPU."""
    first = arrays[0].ctx
    return first.device_type == "gpu" and all(
        dtype_name(a.dtype) == "float16" and a.stype == "default" and a.ctx == first
        for a in arrays)


def narrow(master: "mx.nd.NDArray", weight: "mx.nd.NDArray") -> None:
    """Rounds a master weight into its 16-bit weight."""
    cast(master, weight.dtype, out=weight)


def sync_master(master: "mx.nd.NDArray", weight: "mx.nd.NDArray") -> None:
    """Updates a master weight after a write to its weight: if the weight is no longer the rounded
    master weight, copies it."""
    if _on_cpu(weight):
        library.call("_gluon_amp_follow", [master, weight], out=master)
    else:
        unchanged = master.astype("float16") == weight
        mx.nd.where(unchanged, master, weight.astype("float32"), out=master)
        master.wait_to_read()  # so that few weights have temporary arrays at a time


def _on_cpu(array: "mx.nd.NDArray") -> bool:
    return array.ctx.device_type != "gpu" and array.stype == "default"


def multiply(arrays: Iterable[Any], factor: float) -> None:
    """Multiplies arrays by a factor, in place."""
    for array in arrays:
        (array * factor).copyto(array)


# ---- the overflow check


class Squares:
    """The sum of squares of each array of floating numbers, dense or row_sparse. `start` computes
    them without waiting.

    It accumulates in float64 on a CPU and in float32 on a GPU. A sum is infinite or NaN if the
    array has such a value, or if the sum on a GPU exceeds 3.4e38.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays = arrays
        # for each device the indices of its arrays, and what computes their sums
        self._groups: List[Tuple[List[int], Callable[[], Array]]] = []
        if arrays and library.on_one_cpu(arrays):  # grouping is slower than the sums
            groups: Dict[Any, List[int]] = {mx.cpu(): list(range(len(arrays)))}
        else:
            groups = {}
            for i, array in enumerate(arrays):
                groups.setdefault(array.ctx, []).append(i)
        for context, group in groups.items():
            if context.device_type == "gpu":  # whose kernel requires arrays of one type
                group.sort(key=lambda i: str(arrays[i].dtype))
            self._groups.append((group, _squares_on(context, [arrays[i] for i in group])))

    def __reduce__(self) -> Any:
        """Copies and pickles are of the copied arrays."""
        return Squares, (self.arrays,)

    def start(self) -> None:
        """Computes the sums."""
        self._started = [start() for _, start in self._groups]

    def read(self) -> "np.ndarray[Any, Any]":
        """Returns the sums of `start`, when they are there."""
        sums = np.zeros(len(self.arrays))
        for (group, _), result in zip(self._groups, self._started):
            sums[group] = library.read(  # the only synchronization
                result, c_float if result.ctx.device_type == "gpu" else c_double)
        return sums


def squares(arrays: Sequence[Any]) -> "np.ndarray[Any, Any]":
    """Returns the sum of squares of each array; see `Squares`."""
    sums = Squares(arrays)
    sums.start()
    return sums.read()


def beyond_float16(arrays: Sequence[Any]) -> "np.ndarray[Any, Any]":
    """Returns for each float32 array its largest finite magnitude that float16 rounds to infinity,
    or 0 if there is none."""
    magnitudes = np.zeros(len(arrays))
    # without the engine, reads all arrays
    sums = squares(arrays) if library.started() else np.full(len(arrays), np.inf)
    for i in np.flatnonzero(~(sums < ROUNDED_TO_INFINITY ** 2)):
        sizes = np.abs(arrays[i].asnumpy())
        largest = sizes[np.isfinite(sizes)].max(initial=0)
        magnitudes[i] = largest if largest >= ROUNDED_TO_INFINITY else 0
    return magnitudes


def small_in_float16(named: Mapping[str, Any]) -> Set[str]:
    """Returns the names of float32 parameters that consist of numbers too small for float16. The
    log names them."""
    names = [name for name in named if not name.endswith(ADDED)]
    sums = squares([named[name] for name in names]) if library.started() else \
        np.array([np.square(named[name].asnumpy(), dtype="float64").sum() for name in names])
    small = {name: f"{name} (root mean square {math.sqrt(total / named[name].size):.2g})"
             for name, total in zip(names, sums) if 0 < total < SMALLEST ** 2 * named[name].size}
    if small:
        log.warning("float16 rounds most numbers of these parameters to 0, or to fewer than 11 "
                    "binary digits, because they are below %.2g: %s. Keep what reads them in "
                    "float32 (keep=), or store them times a power of two", SMALLEST,
                    listed(list(small.values())))
    return {*small}


def all_finite(arrays: Sequence[Any]) -> bool:
    """Whether no array has an infinity or a NaN."""
    return bool(np.isfinite(squares(arrays)).all())


def not_finite(names: Iterable[str], sums: "np.ndarray[Any, Any]") -> Tuple[str, ...]:
    """Returns the names, each once, whose sums of squares are not finite."""
    if math.isfinite(sum(sums.tolist())):  # none is negative; numpy is slower for few values
        return ()
    finite = np.isfinite(sums)
    return tuple(dict.fromkeys(name for name, is_finite in zip(names, finite) if not is_finite))


def _dense(array: Array) -> Array:
    if array.stype != "row_sparse":
        return array
    return array.data if array.indices.size else mx.nd.zeros(1, array.ctx)


def _squares_on(context: Context, arrays: List[Any]) -> Callable[[], Array]:
    """Returns a function that computes the sums of squares of arrays on a device."""
    if any(array.stype != "default" for array in arrays):  # whose rows differ in each step
        return lambda: _squares_on(context, [_dense(array) for array in arrays])()
    if context.device_type != "gpu":
        return lambda: library.call("_gluon_amp_squares", arrays, num_arrays=len(arrays))
    sums, rows, at = mx.nd.empty(len(arrays), context), [], 0  # one array for one copy to the host
    for _, group in itertools.groupby(arrays, key=lambda array: array.dtype):
        some = list(group)
        rows.append(("multi_sum_sq", some, [sums[at:at + len(some)]]))
        at += len(some)
    calls = library.Calls(rows)
    attributes = [library.Attributes(name, num_arrays=len(some)) for name, some, _ in rows]

    def start() -> Array:
        calls.run(attributes)
        return sums
    return start
