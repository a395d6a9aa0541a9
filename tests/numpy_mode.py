"""Runs tests that are written for `mx.nd` in numpy mode: `pytest --numpy`, `make -C tests np`.

In test modules, `nd` and `mx.nd` become functions that return `mx.np` arrays, and `mx.sym`
functions that return its symbols. `F` of their networks becomes functions that take them.
Everything else, gluon_amp included, is as users have it after `npx.set_np()`. The marker `mx_nd`
names what does not exist in numpy mode, with the reason: these tests must fail.
"""
import functools
import inspect
import sys
from pathlib import Path
from types import ModuleType

import mxnet as mx
import pytest

HERE = Path(__file__).parent


def classic(value):
    """Replaces arrays and symbols of numpy mode in a value by those of `mx.nd` and `mx.sym`. A
    function, such as the body of a loop, has the arrays of numpy mode as arguments."""
    if inspect.isfunction(value):
        return lambda *args: classic(value(*numpy(args)))
    return _replaced(value, (mx.np.ndarray, mx.sym.numpy._Symbol), "as_nd_ndarray")


def numpy(value):
    """The reverse of `classic`. Sparse arrays do not change."""
    return _replaced(value, (mx.nd.NDArray, mx.sym.Symbol), "as_np_ndarray")


def _replaced(value, classes, method):
    if inspect.isfunction(value):  # the body of a loop
        there, back = (classic, numpy) if method == "as_nd_ndarray" else (numpy, classic)
        return lambda *args: there(value(*back(args)))
    if isinstance(value, dict):
        return {name: _replaced(one, classes, method) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        made = [_replaced(one, classes, method) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, classes) and getattr(value, "stype", "default") == "default":
        return getattr(value, method)()
    return value


class Functions:
    """A module of MXNet whose functions take and return arrays, or symbols, of numpy mode."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        found = getattr(self._module, name)
        if name in ("np", "npx") or inspect.isclass(found) or not mx.util.is_np_array():
            return found
        if isinstance(found, ModuleType):
            return Functions(found)
        if not callable(found):
            return found

        @functools.wraps(found)
        def call(*args, **kwargs):
            return numpy(found(*classic(args), **classic(kwargs)))
        return call


class Mxnet:
    """MXNet for tests."""
    nd, sym = Functions(mx.nd), Functions(mx.sym)

    def __getattr__(self, name):
        return getattr(mx, name)


def _forward(theirs):
    """Wraps a `hybrid_forward` of a test."""
    @functools.wraps(theirs)
    def hybrid_forward(self, F, *args, **kwargs):
        return theirs(self, Functions(F) if mx.util.is_np_array() else F, *args, **kwargs)
    return hybrid_forward


def _is_ours(name):
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return HERE in Path(file).parents


def prepare_networks():
    """Wraps `hybrid_forward` of each class that a test defines from now on."""
    def __init_subclass__(cls, **kwargs):
        super(mx.gluon.HybridBlock, cls).__init_subclass__(**kwargs)
        if "hybrid_forward" in vars(cls) and _is_ours(cls.__module__):
            cls.hybrid_forward = _forward(cls.hybrid_forward)
    mx.gluon.HybridBlock.__init_subclass__ = classmethod(__init_subclass__)
    mx.gluon.nn.HybridLambda.hybrid_forward = _forward(mx.gluon.nn.HybridLambda.hybrid_forward)


def prepare_modules():
    """Replaces MXNet in all modules of tests that are imported."""
    for name, module in list(sys.modules.items()):
        if _is_ours(name) and name != __name__:
            for key, value in list(vars(module).items()):
                if value is mx:
                    setattr(module, key, Mxnet())
                elif value is mx.nd or value is mx.sym:
                    setattr(module, key, Functions(value))


def mark_differences(items):
    """Tests with the marker `mx_nd` must fail."""
    for item in items:
        for mark in item.iter_markers("mx_nd"):
            item.add_marker(pytest.mark.xfail(reason=mark.args[0], strict=True))
