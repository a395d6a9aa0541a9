"""Loads the compiled kernels, the best that this processor has.

`setup.py` compiles kernels.cc once for each entry of `VARIANTS`. They are loaded
into MXNet when the first CPU graph is built. `GLUON_AMP_ISA` picks one by name.
"""
import functools
import os
from ctypes import byref, c_char_p, c_uint, c_void_p
from pathlib import Path
from typing import Any, Sequence

from mxnet._ctypes.ndarray import _imperative_invoke
from numpy.core._multiarray_umath import __cpu_features__  # what the processor and kernel allow

from .._mxnet import mx

VARIANTS = {  # best first: name -> the processor features that it was compiled for
    "avx512": ("AVX512F", "AVX2", "F16C", "FMA3"),
    "avx2": ("AVX2", "F16C", "FMA3"),
    "portable": (),
}


class KernelError(RuntimeError):
    """The compiled kernels cannot be loaded."""


def choose() -> str:
    """The name of the variant to load."""
    fit = [name for name, needs in VARIANTS.items()
           if all(__cpu_features__.get(feature, False) for feature in needs)]
    wanted = os.environ.get("GLUON_AMP_ISA") or fit[0]
    if wanted not in fit:
        raise KernelError(f"GLUON_AMP_ISA must be one of {', '.join(fit)} on this processor. "
                          f"Received: {wanted!r}")
    return wanted


def path_of(variant: str) -> Path:
    return Path(__file__).with_name(f"_kernels_{variant}.so")


@functools.lru_cache(maxsize=None)
def load() -> str:
    """Loads the kernels into MXNet, once, and returns the variant's name."""
    variant = choose()
    path = path_of(variant)
    rebuild = "Rebuild them with: pip install --force-reinstall --no-deps gluon-amp " \
              "(in a checkout: make -B setup, or run outside of it); that needs a C++ compiler."
    if not path.exists():
        raise KernelError(f"gluon_amp's CPU kernels are missing: {path}. {rebuild}")
    try:
        # Not mx.library.load: it rebinds the functions of mx.nd and mx.sym for everybody.
        mx.base.check_call(mx.base._LIB.MXLoadLib(c_char_p(str(path).encode()), c_uint(0)))
    except (mx.MXNetError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise KernelError(f"gluon_amp's CPU kernels do not load: {path}: {reason}. {rebuild}") \
            from error
    return variant


@functools.lru_cache(maxsize=None)
def _operator(name: str) -> c_void_p:
    load()
    handle = c_void_p()
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(c_char_p(name.encode()), byref(handle)))
    return handle


def call(name: str, inputs: Sequence["mx.nd.NDArray"], out: Any = None, **attrs: Any) -> Any:
    """Runs one of the kernels on arrays, outside any graph."""
    return _imperative_invoke(_operator(name).value, inputs, list(attrs), list(attrs.values()),
                              out, False, False)
