"""The environment of a process whose MXNet is the CUDA build on a recording GPU."""
import os
import zipfile
from pathlib import Path
from typing import Dict, Optional

from .stubs import build

WHEEL = "mxnet_cu112-1.9.1-*.whl"


def cache() -> Path:
    """The folder in which this package keeps what is large, or was built."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GLUON_AMP_CACHE") or Path(root, "gluon_amp"))


def cuda_mxnet() -> Path:
    """The folder that has the package `mxnet` of the wheel mxnet-cu112, unpacked if need be."""
    folder = cache() / "mxnet-cu112"
    if not folder.exists():
        wheel = next(iter(sorted(cache().glob(WHEEL))), None)
        if wheel is None:
            raise FileNotFoundError(
                "recording what a GPU runs needs the host code of MXNet's CUDA wheel (499 MB; no "
                "GPU, no driver, nothing is installed): pip download --no-deps --only-binary :all: "
                f"--dest {cache()} mxnet-cu112==1.9.1")
        made = folder.with_name(f"{folder.name}.{os.getpid()}")
        with zipfile.ZipFile(wheel) as file:  # without its .dist-info: it is not installed
            file.extractall(made, [n for n in file.namelist() if n.startswith("mxnet/")])
        made.rename(folder)
    return folder


def environment(log: Optional[Path] = None, devices: int = 1, capability: int = 70,
                gigabytes: int = 16, compute: bool = False) -> Dict[str, str]:
    """Environment variables for a new process.

    Args:
        log: the file to which it writes what the recording GPU is called for.
        devices: how many GPUs there are.
        capability: their compute capability: 70 for 7.0.
        gigabytes: the memory of each.
        compute: whether they compute, on the host.
    """
    mxnet = cuda_mxnet()
    made = {**os.environ, "RECORDING_GPU_COUNT": str(devices), "RECORDING_GPU_SM": str(capability),
            "RECORDING_GPU_GB": str(gigabytes), "RECORDING_GPU_LOG": str(log or ""),
            "RECORDING_GPU_COMPUTES": str(int(compute)), "RECORDING_GPU_CACHE": str(cache())}
    for name, first in (("PYTHONPATH", mxnet),
                        ("LD_LIBRARY_PATH", build(mxnet / "mxnet" / "libmxnet.so", cache()))):
        made[name] = os.pathsep.join(filter(None, [str(first), os.environ.get(name)]))
    return made
