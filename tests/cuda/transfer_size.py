"""`make -C tests transfer`: what a machine without network needs for MXNet's CUDA build.

    python tests/cuda/transfer_size.py PACK.pack.xz

The pieces are compressed, except the project's own files. It fails if they exceed 62 MiB: machines
with a GPU that can be had accept 64.
"""
import io
import lzma
import subprocess
import sys
import tarfile
from pathlib import Path

from gluon_amp.cpu import library
from gluon_amp.cuda import comparison, elf

ROOT = Path(__file__).parents[2]
MOST = 62 * 2**20


def python_files(folder):
    """MXNet's Python files and the libraries beside libmxnet.so, as a tar archive."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder.parent)
            if path.is_file() and path.name != "libmxnet.so" \
                    and not {"include", "__pycache__"} & set(inside.parts):
                archive.add(path, inside)
    return made.getvalue()


def tracked_bytes():
    """The bytes of the project's files in git."""
    names = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-z"], text=True)
    return sum((ROOT / name).lstat().st_size for name in names.split("\0") if name)


def sizes(pack):
    """The bytes of each piece."""
    mxnet = comparison.libmxnet()
    return {"host part of libmxnet.so": len(lzma.compress(b"".join(elf.host_part(mxnet)),
                                                          preset=9)),
            "MXNet's Python files": len(lzma.compress(python_files(mxnet.parent), preset=9)),
            "kernels": pack.stat().st_size,
            "engine": len(lzma.compress(library.PATH.read_bytes(), preset=9)),
            "files of the project": tracked_bytes()}


def main(pack):
    found = sizes(Path(pack))
    for name, size in [*found.items(), ("together", sum(found.values()))]:
        print(f"{name:26} {size / 2**20:6.1f} MiB")
    if sum(found.values()) > MOST:
        sys.exit(f"the pieces must have at most {MOST >> 20} MiB together")


if __name__ == "__main__":
    main(*sys.argv[1:])
