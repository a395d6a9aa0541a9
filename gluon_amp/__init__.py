"""Mixed-precision training for Apache MXNet."""
from . import _mxnet  # noqa: F401  (first: every other module may then import from mxnet)
from .convert import convert, restore
from .cpu.library import KernelError
from .optimizer import optimizer
from .policy import Policy

__version__ = "0.1.0"
__all__ = ["KernelError", "Policy", "convert", "optimizer", "restore"]
