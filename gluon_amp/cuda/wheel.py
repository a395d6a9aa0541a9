"""MXNet's CUDA wheel that packs of kernels are for: mxnet-cu112 1.9.1."""
import importlib.util
import os
import re
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import List, Optional

from ..files import new_folder

DISTRIBUTION = "mxnet-cu112"
# Of its libmxnet.so, whose SHA-256, of 900 MB, takes seconds.
BUILD_ID = "9523fbda21d9ef14722537c1896afda0cdd1778e"
# The address of .nvFatBinSegment: a wrapper of 24 bytes for each source file, in link order.
_WRAPPERS, _WRAPPER_BYTES = 0x35415770, 24
# The capabilities of its machine code. It has no PTX.
CODE_FOR = (50, 60, 70, 80, 86)
_PT_NOTE, _NT_GNU_BUILD_ID = 4, 3


def cache() -> Path:
    """Returns the cache folder of this package."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GLUON_AMP_CACHE") or Path(root, "gluon_amp"))


def cuda_mxnet() -> Path:
    """Returns the folder with the contents of the wheel in the cache; unpacks it if needed."""
    folder = cache() / DISTRIBUTION
    if not folder.exists():
        wheel = next(iter(sorted(cache().glob("mxnet_cu112-1.9.1-*.whl"))), None)
        if wheel is None:
            raise FileNotFoundError(
                "this needs MXNet's CUDA wheel (499 MB; no GPU, no driver, nothing is installed): "
                "pip download --no-deps --only-binary :all: "
                f"--dest {cache()} {DISTRIBUTION}==1.9.1")
        # Another process may unpack it, too. The first one's folder stays.
        with suppress(FileExistsError), new_folder(str(folder)) as unpacked, \
                zipfile.ZipFile(wheel) as file:
            file.extractall(unpacked)
    return folder


def code_for(capability: int) -> Optional[int]:
    """Returns the architecture whose code in the wheel runs on GPUs of a capability, or None."""
    return max((arch for arch in CODE_FOR
                if arch // 10 == capability // 10 and arch <= capability), default=None)


def wrapper(index: int) -> int:
    """Returns the address in libmxnet.so of the wrapper of a fat binary."""
    return _WRAPPERS + _WRAPPER_BYTES * index


def package() -> Optional[Path]:
    """Returns the folder of the package that `import mxnet` would load, or None."""
    spec = None
    with suppress(ImportError):  # of an import hook
        spec = importlib.util.find_spec("mxnet")
    folders = spec.submodule_search_locations if spec else None
    return next((Path(folder) for folder in folders or ()), None)


def library() -> Optional[Path]:
    """Returns the libmxnet.so that `import mxnet` would load, or None."""
    folder = package()
    return folder / "libmxnet.so" if folder and (folder / "libmxnet.so").exists() else None


def build_id(path: Path) -> Optional[str]:
    """Returns the build ID of a library, or None if it has none."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if not head.startswith(b"\x7fELF"):
                return None
            start, = struct.unpack_from("<Q", head, 32)
            size, count = struct.unpack_from("<HH", head, 54)
            file.seek(start)
            table = file.read(size * count)
            for i in range(count):
                kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", table, size * i)
                if kind == _PT_NOTE:
                    file.seek(offset)
                    note = _gnu_build_id(file.read(length))
                    if note:
                        return note
    except struct.error:  # the file is truncated
        pass
    return None


def _gnu_build_id(notes: bytes) -> Optional[str]:
    at = 0
    while at + 12 <= len(notes):
        name, value, kind = struct.unpack_from("<III", notes, at)
        start = at + 12 + name + -name % 4
        if kind == _NT_GNU_BUILD_ID and notes[at + 12:at + 12 + name] == b"GNU\0":
            return notes[start:start + value].hex()
        at = start + value + -value % 4
    return None


def installed_builds() -> List[str]:
    """Returns the MXNet distributions of the package that `import mxnet` loads, such as
    ['mxnet-cu112']: those in its entry of `sys.path`."""
    folder = package()
    if folder is None:
        return []
    # by folder names: reading the metadata of all distributions takes 20 ms
    names = {path.name.split("-")[0].lower().replace("_", "-")
             for path in folder.parent.glob("mxnet*-info")}
    return sorted(n for n in names if re.fullmatch(r"mxnet(-mkl|-native|-cu\d+(mkl)?)?", n))
