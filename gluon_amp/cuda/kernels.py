"""Passes packs of kernels to `_kernels.so`, which precedes the CUDA runtime of libmxnet.so."""
import ctypes
from pathlib import Path
from typing import Any, List, Sequence

import numpy as np

from . import wheel
from .pack import Pack

PATH = Path(__file__).with_name("_kernels.so")


class _Part(ctypes.Structure):  # kernels.cc
    _fields_ = [("wrapper", ctypes.c_uint64), ("code", ctypes.c_void_p),
                ("names", ctypes.c_void_p), ("count", ctypes.c_uint64)]


class Kernels:
    """The kernels that libmxnet.so finds when it is loaded next.

    Args:
        packs: open packs, whose files stay mapped.
        kept: architectures of the wheel whose code remains beside theirs.
        advice: what a user can do about a kernel without code; ends its error message.
    """

    def __init__(self, packs: Sequence[Pack], kept: Sequence[int], advice: str) -> None:
        parts = [_Part(wheel.wrapper(part.index), _address(part.fat_binary),
                       _address(part.names), _count(part.names))
                 for pack in packs for part in pack.parts]
        self._held: List[Any] = list(packs)  # keeps the files mapped
        self._library = ctypes.CDLL(str(PATH), mode=ctypes.RTLD_GLOBAL)
        self._library.gluon_amp_set_kernels(
            (_Part * len(parts))(*parts), len(parts),
            (ctypes.c_uint32 * len(kept))(*kept), len(kept), advice.encode())

    def registered(self, replaced: bool = False) -> int:
        """Returns the number of fat binaries that libmxnet.so has registered, or of those that
        parts of packs have replaced."""
        return int(self._library.gluon_amp_registered(int(replaced)))


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0


def _count(names: memoryview) -> int:
    return bytes(names).count(b"\0")
