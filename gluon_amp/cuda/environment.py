"""The environment of a process with MXNet's CUDA build on a recording GPU."""
import os
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Dict, Optional, Sequence, Union

from ..files import new_folder
from .stubs import build as build_stubs

BUILDS = ("cu112", "cu113", "cu114", "cu115", "cu116", "cu117")
_VERSIONS = {8: 8101, 9: 91900}  # of cuDNN on a software GPU


def cache() -> Path:
    """Returns the cache folder of this package."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GLUON_AMP_CACHE") or Path(root, "gluon_amp"))


def cuda_mxnet(build: str = "cu112") -> Path:
    """Returns the folder with the package `mxnet` of MXNet's wheel of a build; unpacks it if
    needed."""
    folder = cache() / f"mxnet-{build}"
    if not folder.exists():
        wheel = next(iter(sorted(cache().glob(f"mxnet_{build}-1.9.1-*.whl"))), None)
        if wheel is None:
            raise FileNotFoundError(
                "recording GPU calls needs the host code of MXNet's CUDA wheel (499 MB; no GPU, no "
                "driver, nothing is installed): pip download --no-deps --only-binary :all: "
                f"--dest {cache()} mxnet-{build}==1.9.1")
        # Another process may unpack it, too. The first one's folder stays.
        with suppress(FileExistsError), new_folder(str(folder)) as made, \
                zipfile.ZipFile(wheel) as file:  # without .dist-info: the wheel is not installed
            file.extractall(made, [n for n in file.namelist() if n.startswith("mxnet/")])
    return folder


def environment(log: Optional[Path] = None, devices: int = 1,
                capability: Union[int, Sequence[int]] = 70, gigabytes: int = 16,
                compute: bool = False, cudnn: int = 8, build: str = "cu112") -> Dict[str, str]:
    """Returns the environment variables of a new process.

    Args:
        log: the file of recorded calls.
        devices: the number of GPUs.
        capability: their compute capability: 70 for 7.0; or one for each, the last for the rest.
        gigabytes: the memory of each.
        compute: whether to execute the calls on the host.
        cudnn: the major version of cuDNN: 8, or 9, which forward/ adapts.
        build: MXNet's wheel, one of `BUILDS`.
    """
    mxnet = cuda_mxnet(build)
    capabilities = [capability] if isinstance(capability, int) else capability
    made = {**os.environ, "RECORDING_GPU_COUNT": str(devices),
            "RECORDING_GPU_SM": ",".join(map(str, capabilities)),
            "RECORDING_GPU_GB": str(gigabytes), "RECORDING_GPU_LOG": str(log or ""),
            "RECORDING_GPU_COMPUTES": str(int(compute)), "RECORDING_GPU_CACHE": str(cache()),
            "RECORDING_GPU_CUDNN": str(_VERSIONS[cudnn])}
    for name, first in (("PYTHONPATH", mxnet), ("LD_LIBRARY_PATH", build_stubs(cache(), cudnn))):
        made[name] = os.pathsep.join(filter(None, [str(first), os.environ.get(name)]))
    return made
