"""All patches of MXNet's Python for bfloat16, which MXNet's library supports.

MXNet's dtype is `np.dtype([("bfloat16", np.uint16)])`. With the engine, the name is valid as a
type: `net.cast("bfloat16")`, `array.astype("bfloat16")`, `dtype="bfloat16"`. Values are rounded to
nearest even; `asnumpy` returns float32, and files hold float32. `mx.np` arrays do the same.
"""
import functools
import inspect
import sys
from contextlib import nullcontext
from typing import Any, Callable

from .. import numpy_names
from .._mxnet import keeping_graphs, mx, np, replace


class bfloat(np.void):
    """The scalar type of bfloat16. numpy names a dtype after its scalar type and size, and MXNet's
    functions of `mx.np` read that name."""


_NUMBER = 12  # of bfloat16 in MXNet
BFLOAT16 = np.dtype((bfloat, mx.nd.ndarray._DTYPE_MX_TO_NP[_NUMBER]))


class _Dtype(metaclass=numpy_names.StandsFor):
    """numpy's dtype for MXNet, which also accepts "bfloat16"."""
    replaced = np.dtype

    def __new__(cls, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        named = isinstance(dtype, str) and dtype == "bfloat16"
        return BFLOAT16 if named else np.dtype(dtype, *args, **kwargs)


def is_bfloat16(dtype: Any) -> bool:
    """Whether a dtype or its name is bfloat16."""
    return dtype is BFLOAT16 or isinstance(dtype, str) and dtype == "bfloat16" \
        or isinstance(dtype, np.dtype) and dtype == BFLOAT16


def _on_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that creates a numpy array: values for a bfloat16 array become float32."""
    @functools.wraps(function)
    def create(source: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return function(source, np.float32 if is_bfloat16(dtype) else dtype, *args, **kwargs)
    return create


def cast(array: Any, dtype: Any, out: Any = None) -> Any:
    """Casts an array of `mx.nd` or `mx.np`; the result has its class."""
    name = "bfloat16" if is_bfloat16(dtype) else np.dtype(dtype).name
    classic = None if out is None else out.as_nd_ndarray()
    result = mx.nd.cast(array.as_nd_ndarray(), dtype=name, out=classic)
    if out is not None:
        return out
    return result.as_np_ndarray() if isinstance(array, mx.np.ndarray) else result


def _in_files(data: Any) -> Any:
    """Converts bfloat16 arrays in lists and dictionaries to float32."""
    if isinstance(data, dict):
        return {name: _in_files(array) for name, array in data.items()}
    if isinstance(data, (list, tuple)):
        return [_in_files(array) for array in data]
    return data.astype("float32") if is_bfloat16(getattr(data, "dtype", None)) else data


def _patch_casts(array_class: Any) -> None:
    """Lets `astype` and `copyto` of an array class convert from and to bfloat16."""
    @replace(array_class, "astype")
    def astype(self: Any, dtype: Any, *args: Any, original: Any, **kwargs: Any) -> Any:
        if is_bfloat16(dtype) == (self.dtype is BFLOAT16):
            return original(self, self.dtype if is_bfloat16(dtype) else dtype, *args, **kwargs)
        return cast(self, dtype)

    @replace(array_class, "copyto")
    def copyto(self: Any, other: Any, *, original: Any) -> Any:
        if isinstance(other, mx.nd.NDArray) and other is not self \
                and (self.dtype is BFLOAT16) != (other.dtype is BFLOAT16):
            return cast(self, other.dtype, out=other)
        return original(self, other)


def _draw_into_bfloat16(name: str) -> None:
    """Lets a generator of `mx.np.random` write into bfloat16 arrays."""
    @replace(mx.np.random, name)
    def draw(*args: Any, original: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None or out.dtype is not BFLOAT16:
            return original(*args, out=out, **kwargs)
        return original(*args, **kwargs).as_in_ctx(out.ctx).copyto(out)


def _bind_without_subgraphs(name: str) -> None:
    """Binds bfloat16 symbols without MXNet's oneDNN subgraphs, whose products fail on a CPU without
    AVX-512."""
    signature = inspect.signature(getattr(mx.sym.Symbol, name))

    @replace(mx.sym.Symbol, name)
    def bind(self: Any, *args: Any, original: Any, **kwargs: Any) -> Any:
        values = [value for arg in (*args, *kwargs.values()) for value in (
            arg.values() if isinstance(arg, dict) else arg if isinstance(arg, list) else [])]
        low = "bfloat16" in self.tojson(remove_amp_cast=False) or any(
            getattr(value, "dtype", value) is BFLOAT16 for value in values)
        groups = signature.bind(self, *args, **kwargs).arguments.get("group2ctx")
        with keeping_graphs(groups) if low else nullcontext():
            return original(self, *args, **kwargs)


def install() -> None:
    """Patches MXNet's Python after the engine has started."""
    _register_type()
    for array_class in (mx.nd.NDArray, mx.np.ndarray):
        _patch_casts(array_class)
    _patch_copies_to_and_from_numpy()
    for name in ("uniform", "normal"):  # of initializers, which pass `out`
        _draw_into_bfloat16(name)
    for name in ("simple_bind", "bind"):
        _bind_without_subgraphs(name)
    _patch_gluon()
    _patch_files()


def _register_type() -> None:
    """Gives bfloat16 its number in MXNet, and numpy's functions in MXNet a dtype for it."""
    for name, module in list(sys.modules.items()):  # MXNet may have been imported before
        for key, value in list(vars(module).items()) if name.partition(".")[0] == "mxnet" else ():
            if value is np:
                setattr(module, key, numpy_names.AS_IT_WAS)
    vars(numpy_names.AS_IT_WAS)["dtype"] = _Dtype
    for name in ("array", "asarray", "ascontiguousarray"):
        vars(numpy_names.AS_IT_WAS)[name] = _on_float32(getattr(numpy_names.AS_IT_WAS, name))
    mx.nd.ndarray._DTYPE_MX_TO_NP[_NUMBER] = BFLOAT16
    for scalar in (bfloat, np.void):  # the types of BFLOAT16 and of MXNet's dtype
        mx.nd.ndarray._DTYPE_NP_TO_MX[scalar] = _NUMBER


def _patch_copies_to_and_from_numpy() -> None:
    @replace(mx.nd.NDArray, "asnumpy")
    def asnumpy(self: Any, *, original: Any) -> Any:
        return original(cast(self, "float32") if self.dtype is BFLOAT16 else self)

    @replace(mx.nd.NDArray, "_sync_copyfrom")
    def copy_from_numpy(self: Any, source: Any, *, original: Any) -> None:
        if self.dtype is not BFLOAT16:
            return original(self, source)
        wide = mx.nd.empty(self.shape, ctx=self.ctx)
        wide._sync_copyfrom(np.asarray(source, np.float32))
        cast(wide, BFLOAT16, out=self)

    @replace(mx.np.ndarray, "__repr__")
    def show(self: Any, *, original: Any) -> str:
        text: str = original(self)
        return text.replace("dtype=float32", "dtype=bfloat16") if self.dtype is BFLOAT16 else text

    @replace(mx.nd.numpy, "zeros")  # MXNet's own does not support bfloat16, as its `full` does
    def zeros(shape: Any, dtype: Any = None, order: str = "C", ctx: Any = None, *,
              original: Any) -> Any:
        if is_bfloat16(dtype):
            return mx.nd.numpy.full(shape, 0, BFLOAT16, order, ctx)
        return original(shape, dtype, order, ctx)


def _patch_gluon() -> None:
    @replace(mx.gluon.Parameter, "_load_init")
    def load(self: Any, data: Any, *args: Any, original: Any, **kwargs: Any) -> None:
        from_file = is_bfloat16(self.dtype) and data.dtype == np.float32
        original(self, cast(data, BFLOAT16) if from_file else data, *args, **kwargs)

    @replace(mx.gluon.nn.basic_layers._BatchNorm, "cast")
    def cast_norm(self: Any, dtype: Any, *, original: Any) -> None:
        original(self, "float32" if is_bfloat16(dtype) else dtype)  # the same as for float16

    @replace(mx.gluon.SymbolBlock, "__init__")
    def create(self: Any, *args: Any, original: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # `imports` leaves types to the file, which has float32 numbers of bfloat16 parameters
        attributes = self._cached_graph[1].attr_dict()
        for name, parameter in self.params.items():
            if attributes.get(name, {}).get("__dtype__") == str(_NUMBER) and not parameter._data:
                parameter._dtype = BFLOAT16


def _patch_files() -> None:
    @replace(mx.nd, "save")
    def save(fname: Any, data: Any, *, original: Any) -> None:
        original(fname, _in_files(data))

    @replace(mx.npx, "save")
    def save_numpy(file: Any, arr: Any, *, original: Any) -> None:
        original(file, _in_files(arr))

    mx.nd.utils.save, mx.npx.utils.save = save, save_numpy
