"""Checks a pack of kernels and places it where it is loaded from."""
import lzma
import os
import shutil
import tempfile
from pathlib import Path
from typing import Iterator

from . import pack

_XZ = b"\xfd7zXZ\0"


def install(path: Path) -> pack.Pack:
    """Installs a pack, possibly compressed by xz, and returns the installed one.

    Raises:
        PackError: the file is no pack, damaged, or for another MXNet.
        OSError: it cannot be read, or the disk has not enough space.
    """
    folder = pack.place(0).parent
    folder.mkdir(parents=True, exist_ok=True)
    needed = sum(map(len, _blocks(path)))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{path} needs {needed / 1e6:.0f} MB in {folder}. Available: "
                      f"{free / 1e6:.0f} MB. Free some, or set GLUON_AMP_CACHE")
    with tempfile.TemporaryDirectory(dir=folder, prefix="writing-") as scratch:
        copy = Path(scratch, path.name)
        with open(copy, "wb") as file:
            for block in _blocks(path):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        try:
            new = pack.read(copy)
            new.verify()
        except pack.PackError as error:
            raise pack.PackError(str(error).replace(str(copy), str(path))) from None
        if new.manifest["libmxnet"] != pack.LIBMXNET:
            raise pack.PackError(f"{path} must be for {pack.MXNET}, whose libmxnet.so has the "
                                 f"SHA-256 {pack.LIBMXNET}. Received: {new.manifest['libmxnet']}")
        os.replace(copy, pack.place(new.arch, new.kind))
    installed = pack.installed(new.arch, new.kind)
    assert installed is not None
    return installed


def _blocks(path: Path) -> Iterator[bytes]:
    """Yields the content of a file, decompressed."""
    with open(path, "rb") as file:
        compressed = file.read(len(_XZ)) == _XZ
    try:
        with (lzma.open if compressed else open)(path, "rb") as source:
            yield from iter(lambda: source.read(1 << 20), b"")
    except (lzma.LZMAError, EOFError) as error:
        raise pack.PackError(f"{path} is truncated or damaged: {error}") from None
