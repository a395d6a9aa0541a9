"""Mixed-precision training for Apache MXNet."""
from .convert import convert, restore
from .cpu.library import KernelError
from .optimizer import optimizer
from .policy import Policy

__version__ = "0.1.0"
__all__ = ["KernelError", "Policy", "convert", "optimizer", "restore"]
