"""The compilers and headers that build MXNet's kernels.

nvcc 13.0 compiles to PTX with the headers of CUDA 11.8. It comes from the extra `cuda-build`, else
from PATH. ptxas compiles PTX for one architecture: for 9.0 that of CUDA 11.8, whose code drivers
from 520 on load, else that of nvcc.
"""
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import List, NamedTuple, Optional

from ..checks import pip_install

HERE = Path(__file__).with_name("headers")
# beside CUDA 12 or 13, it would overwrite their libnccl.so.2
INSTALL = f"{pip_install('cuda-build')} and a new virtual environment"
# Headers that MXNet's CUDA files include, by the package that has them.
_PACKAGES = {"cuda_runtime": "cuda_runtime.h", "cuda_nvcc": "crt/host_config.h",
             "cublas": "cublas_v2.h", "cudnn": "cudnn.h", "cufft": "cufft.h",
             "curand": "curand_kernel.h", "cusolver": "cusolverDn.h", "cuda_nvrtc": "nvrtc.h"}


class Compiler(NamedTuple):
    path: Path
    version: str  # such as 13.0.88


class Toolkit(NamedTuple):
    """Compilers and folders of headers."""
    nvcc: Compiler
    ptxas: Compiler  # of the same version as nvcc
    old_ptxas: Optional[Compiler]  # of CUDA 11.8
    headers: List[Path]

    def assembler(self, architecture: int) -> Compiler:
        """Returns the ptxas for an architecture."""
        return self.old_ptxas if architecture == 90 and self.old_ptxas else self.ptxas


def find(packages: Optional[Path] = None) -> Toolkit:
    """Returns the compilers and headers of this machine.

    Args:
        packages: the folder `nvidia` of NVIDIA's packages. Default: that of this Python.
    """
    packages = packages or _packages()
    missing = [header for name, header in _PACKAGES.items()
               if not (packages / name / "include" / header).exists()]
    if missing:
        raise FileNotFoundError(f"building kernels needs the headers of CUDA 11.8, and {packages} "
                                f"lacks {', '.join(missing)}: {INSTALL}")
    runtime = (packages / "cuda_runtime" / "include" / "cuda_runtime_api.h").read_text(
        encoding="utf-8", errors="replace")
    version = re.search(r"#define CUDART_VERSION\s+(\d+)", runtime)
    if version is None or version.group(1) != "11080":
        raise ValueError(f"{packages}/cuda_runtime must be of CUDA 11.8 (CUDART_VERSION 11080). "
                         f"Received: {version.group(1) if version else 'no version'}. "
                         f"{INSTALL}")
    nvcc = compiler(_nvcc(packages))
    if not nvcc.version.startswith("13."):
        raise ValueError(f"building kernels needs nvcc 13. Received: {nvcc.path}, version "
                         f"{nvcc.version}. {INSTALL}")
    old = packages / "cuda_nvcc" / "bin" / "ptxas"
    return Toolkit(nvcc, compiler(nvcc.path.with_name("ptxas")),
                   compiler(old) if old.exists() else None,
                   [packages / name / "include" for name in _PACKAGES])


def _packages() -> Path:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    return next((root for root in roots if (root / "cuda_runtime").exists()),
                Path(sysconfig.get_path("purelib"), "nvidia"))


def _nvcc(packages: Path) -> Path:
    installed = packages / "cu13" / "bin" / "nvcc"
    if installed.exists():
        return installed
    command = shutil.which("nvcc")
    if command is None:
        raise FileNotFoundError(f"building kernels needs nvcc 13: {INSTALL}")
    # A command on PATH may be a script that starts nvcc.
    top = re.search(r"(?m)^#\$ TOP=(.*)$", run([command, "--dryrun", "-x", "cu", os.devnull]))
    return Path(top.group(1), "bin", "nvcc").resolve() if top else Path(command)


def compiler(path: Path) -> Compiler:
    """Returns nvcc or ptxas with its version."""
    text = run([str(path), "--version"])
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    if match is None:
        raise ValueError(f"{path} must be a compiler of CUDA. Received: {' '.join(text.split())}")
    return Compiler(path, match.group(1))


def run(command: List[str]) -> str:
    """Runs a command and returns what it prints, to either stream; raises OSError if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise OSError(f"{command[0]} fails: {done.stdout.strip()[-2000:]}")
    return done.stdout
