"""Numpy with removed names, for MXNet 1.9.1 and packages that depend on it.

MXNet uses names that numpy has removed since 1.20: `np.bool` (1.24), `np.PZERO` (2.0), `np.trapz`
(2.4). numpy itself does not change. The modules of `PACKAGES` import this module instead: each has
its own `__import__` among its builtins, which returns numpy's contents and the removed names.
MXNet's modules have it only while they are imported: its functions use no removed name of a numpy
that they import themselves, and make 10 to 50 other imports in a step.
"""
import builtins
import functools
import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from typing import Any, Callable, Dict, Optional

import numpy

NUMPY_2 = int(numpy.__version__.split(".")[0]) >= 2
# The package that pickles refer to: numpy.core, since numpy 2 numpy._core.
CORE = numpy.empty(0).__reduce__()[0].__module__.rpartition(".")[0]
# Packages that need the removed names; `python -m gluon_amp SCRIPT` adds the script's modules.
PACKAGES = {"mxnet", "gluoncv", "gluoncv2", "gluonnlp", "gluonts", "mxboard", "d2l", "horovod"}

# Python's types, which these names meant; numpy 2 has other types under some of them.
_TYPES = {"bool": bool, "int": int, "long": int, "float": float, "complex": complex,
          "object": object, "str": str, "unicode": str}
_NUMBERS = {"Inf": numpy.inf, "Infinity": numpy.inf, "infty": numpy.inf, "PINF": numpy.inf,
            "NINF": -numpy.inf, "NaN": numpy.nan, "NAN": numpy.nan, "PZERO": 0.0, "NZERO": -0.0}
# old name -> new name
_RENAMED = {
    "float_": "float64", "complex_": "complex128", "unicode_": "str_", "string_": "bytes_",
    "cfloat": "complex128", "singlecomplex": "complex64", "longfloat": "longdouble",
    "clongfloat": "clongdouble", "longcomplex": "clongdouble", "alltrue": "all",
    "sometrue": "any", "product": "prod", "cumproduct": "cumprod", "round_": "round",
    "row_stack": "vstack", "trapz": "trapezoid", "mat": "asmatrix", "core": "_core"}
_EXCEPTIONS = ("AxisError", "ComplexWarning", "ModuleDeprecationWarning", "RankWarning",
               "TooHardError", "VisibleDeprecationWarning")
_FINANCIAL = ("fv", "ipmt", "irr", "mirr", "nper", "npv", "pmt", "ppmt", "pv", "rate")


def _asfarray(a: Any, dtype: Any = numpy.float64) -> Any:
    inexact = numpy.issubdtype(numpy.dtype(dtype), numpy.inexact)
    return numpy.asarray(a, dtype=dtype if inexact else numpy.float64)


def _in1d(ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False) -> Any:
    return numpy.isin(numpy.ravel(ar1), ar2, assume_unique=assume_unique, invert=invert)


_FUNCTIONS: Dict[str, Callable[..., Any]] = {
    "asfarray": _asfarray,
    "asscalar": lambda a: a.item(),
    "in1d": _in1d,
    "issubsctype": lambda arg1, arg2: numpy.issubdtype(numpy.dtype(arg1), numpy.dtype(arg2)),
    "msort": lambda a: numpy.sort(a, axis=0),
    "obj2sctype": lambda rep: numpy.dtype(rep).type,
}


def _array(object: Any, dtype: Any = None, *, copy: Any = True, **kwargs: Any) -> Any:
    """numpy.array with the old meaning of `copy=False`: copies only if needed."""
    if copy is False:
        copy = None
    return numpy.array(object, dtype, copy=copy, **kwargs)


def _financial(name: str) -> Callable[..., Any]:
    def removed(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"numpy 1.20 removed numpy.{name}; the package numpy-financial has it")
    return removed


class _Numpy(types.ModuleType):
    """numpy's current and removed names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)  # loaded lazily, or raises numpy's error


def _as_it_was() -> types.ModuleType:
    there = {name: value for name, value in vars(numpy).items() if name != "__getattr__"}
    exceptions = getattr(numpy, "exceptions", numpy)
    restored: Dict[str, Any] = {
        **_NUMBERS, **_FUNCTIONS, **{name: _financial(name) for name in _FINANCIAL},
        "compat": types.SimpleNamespace(basestring=str, unicode=str, long=int)}
    restored.update((old, there[new]) for old, new in _RENAMED.items() if new in there)
    restored.update((name, getattr(exceptions, name)) for name in _EXCEPTIONS
                    if hasattr(exceptions, name))
    if NUMPY_2:
        del there["array"]
        restored["array"] = functools.wraps(numpy.array)(_array)
        there.pop("core", None)  # access gives a deprecation warning
    made = _Numpy("numpy", numpy.__doc__)
    vars(made).update({**restored, **there, **_TYPES})
    return made


AS_IT_WAS = _as_it_was()


def _import(name: str, *args: Any, **kwargs: Any) -> Any:
    found = builtins.__import__(name, *args, **kwargs)
    return AS_IT_WAS if found is numpy else found


BUILTINS = {**vars(builtins), "__import__": _import}


class StandsFor(type):
    """The metaclass of a class that replaces another in MXNet's modules: `isinstance` tests the
    class `replaced`."""
    replaced: Any

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.replaced)


class _Str(str, metaclass=StandsFor):  # type: ignore[misc]
    """`str` for the attributes that MXNet passes to its library. numpy 2 writes a shape as
    `(np.int64(4),)`, which the library cannot parse."""
    replaced = str

    def __new__(cls, value: object) -> str:  # type: ignore[misc]
        text = str(value)
        if "np." not in text:
            return text
        with numpy.printoptions(legacy="1.25"):  # type: ignore[arg-type]
            return str(value)


_WRITERS = ("mxnet._ctypes.ndarray", "mxnet._ctypes.symbol", "mxnet.symbol.symbol", "mxnet.io.io")


def _execute(execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    # functions keep a reference to it
    module_builtins = vars(module)["__builtins__"] = dict(BUILTINS)
    if NUMPY_2 and module.__name__ in _WRITERS:
        vars(module)["str"] = _Str
    execute(module)
    if module.__name__.partition(".")[0] == "mxnet":
        module_builtins["__import__"] = builtins.__import__


class _Finder:
    """Finds the modules of `PACKAGES` with the finders after it, and patches their import."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        if name.partition(".")[0] not in PACKAGES:
            return None
        behind = sys.meta_path[sys.meta_path.index(_Finder) + 1:]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in behind)), None)
        loader = spec and spec.loader
        if isinstance(loader, (SourceFileLoader, SourcelessFileLoader)):
            loader.exec_module = functools.partial(  # type: ignore[method-assign]
                _execute, loader.exec_module)
        return spec


def install() -> None:
    """Installs the finder for `PACKAGES`."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
