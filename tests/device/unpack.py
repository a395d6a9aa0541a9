"""Restores the pieces of pieces.py: python3 tests/device/unpack.py PIECES TARGET

It compares all check sums first. libmxnet.so gets a hole in place of its own machine code, which
its host code does not read where a pack replaces all kernels. It prints the environment of
processes with MXNet's CUDA build, as JSON.
"""
import hashlib
import io
import json
import lzma
import os
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def unpack(pieces, target):
    described = json.loads((pieces / "pieces.json").read_text())
    for name, digest in described["sha256"].items():
        if hashlib.sha256((pieces / name).read_bytes()).hexdigest() != digest:
            sys.exit(f"the check sum of {name} differs")

    def content(name):
        return lzma.decompress((pieces / name).read_bytes())

    kernels = target / "cache" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    for name, folder in (("python.tar.xz", target), ("libraries.tar.xz", target),
                         ("built.tar.xz", ROOT)):
        with tarfile.open(fileobj=io.BytesIO(content(name))) as tar:
            tar.extractall(folder)
    host, code = content("host.xz"), described["code"]
    with open(target / "mxnet" / "libmxnet.so", "wb") as file:
        file.write(host[:code["offset"]])
        file.seek(code["size"], os.SEEK_CUR)
        file.write(host[code["offset"]:])
    (kernels / "90.pack").write_bytes(content("kernels.pack.xz"))


def environment(target):
    """The variables of a process."""
    made = {"GLUON_AMP_CACHE": str(target / "cache"), "PYTHONUNBUFFERED": "1"}
    for name, first in (("PYTHONPATH", f"{target}{os.pathsep}{ROOT}"),
                        ("LD_LIBRARY_PATH", str(target / "lib"))):
        made[name] = os.pathsep.join(filter(None, [first, os.environ.get(name)]))
    return made


if __name__ == "__main__":
    where = Path(sys.argv[2]).resolve()
    unpack(Path(sys.argv[1]), where)
    print(json.dumps(environment(where)))
