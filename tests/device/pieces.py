"""Collects what a machine with a GPU, but without network, needs to run MXNet's CUDA build.

    python tests/device/pieces.py FOLDER PACK.pack.xz

The folder gets compressed pieces and their check sums, without the project's own tracked files.
`unpack.py` restores them. The wheel mxnet-cu112 is in GLUON_AMP_CACHE.
"""
import hashlib
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda"))

import gluon_amp
from gluon_amp.cuda import comparison, elf
from transfer_size import python_files

# MXNet's CUDA build loads these. Other libraries of CUDA are forwarded to the machine's.
RUNTIME = "nvidia-cuda-runtime-cu11==11.8.89"
SYSTEM = ("libquadmath.so.0", "libgomp.so.1")
PACKAGE = Path(gluon_amp.__file__).parent
METADATA = "Metadata-Version: 2.1\nName: mxnet-cu112\nVersion: 1.9.1\n"


def runtime():
    """libcudart.so.11.0, from PyPI."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder,
                        RUNTIME], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            name, = (each for each in wheel.namelist() if each.endswith("/libcudart.so.11.0"))
            return wheel.read(name)


def system_library(name):
    listing = subprocess.check_output(["ldconfig", "-p"], text=True).splitlines()
    return Path(next(line for line in listing if name in line).split()[-1]).read_bytes()


def archive(files):
    """A tar archive of files: {name: content}."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def main(folder, pack):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mxnet = comparison.libmxnet()
    head, tail = elf.host_part(mxnet)
    pieces = {"host.xz": head + tail, "python.tar.xz": python_files(mxnet.parent),
              "libraries.tar.xz": archive({
                  "lib/libcudart.so.11.0": runtime(),
                  **{f"lib/{name}": system_library(name) for name in SYSTEM},
                  "mxnet_cu112-1.9.1.dist-info/METADATA": METADATA.encode()}),
              "built.tar.xz": archive({
                  str(path.relative_to(PACKAGE.parent)): path.read_bytes()
                  for path in sorted(PACKAGE.glob("c*/_*.so"))})}
    for name, content in pieces.items():
        (folder / name).write_bytes(lzma.compress(content, preset=9))
    shutil.copy(pack, folder / "kernels.pack.xz")
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.glob("*.xz"))}
    code = {"offset": len(head), "size": mxnet.stat().st_size - len(head) - len(tail)}
    (folder / "pieces.json").write_text(json.dumps({"sha256": sums, "code": code}, indent=1) + "\n")
    for name in sums:
        print(f"{name:18} {(folder / name).stat().st_size / 2**20:6.1f} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
