"""Builds the software GPU as the CUDA libraries that MXNet's CUDA build loads.

`record/` checks and records calls; `compute/` executes them. All libraries are links to one
file. It has each function under the symbol version that libmxnet.so requires. Functions without an
implementation record their names and return 0. Another such file is a machine with cuDNN 9: it
lacks the functions that cuDNN 9 removed, and needs forward/ as libcudnn.so.8.
"""
import hashlib
import os
import shutil
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Dict, List

from ..files import new_folder
from .libraries import functions

SOURCES = [Path(__file__).with_name(name) for name in ("record", "compute")]
# What the engine for CPUs computes in the same way.
SHARED = [Path(__file__).parents[1] / "cpu" / name
          for name in ("kernels/rnn_cell.h", "tensor_core/rule.h")]
CUDNN, CUDNN_9 = "libcudnn.so.8", "libcudnn.so.9"
# Wheels of cu113 to cu117 name libcusparse.so.11, and import nothing from it.
LIBRARIES = ("libcuda.so.1", "libcudart.so.11.0", "libcublas.so.11", "libcufft.so.10",
             "libcusolver.so.11", "libcusparse.so.11", "libcurand.so.10", "libnvrtc.so.11.2",
             "libnvToolsExt.so.1", "libnccl.so.2", "libnvidia-ml.so.1")
_FLAGS = ["-std=c++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
          "-Wno-unused-parameter"]
# Functions that libmxnet.so does not import: `gluon-amp doctor`, recording.py and devices.py call
# them.
_UNVERSIONED = ("recording_gpu_*", "nvml*", "cuInit", "cuDriverGetVersion", "cuDeviceGetCount",
                "cuDeviceGetName", "cuDeviceGetAttribute", "cuDeviceTotalMem_v2")


def build(cache: Path, cudnn: int = 8) -> Path:
    """Returns the folder with the stubs, for LD_LIBRARY_PATH; builds it if needed.

    Args:
        cudnn: the major version of cuDNN, 8 or 9.
    """
    compiler = os.environ.get("CXX", "g++")
    for command in (compiler, "nm"):
        if shutil.which(command) is None:
            raise FileNotFoundError(f"building the recording GPU needs {command}: apt install g++")
    sources = sorted(path for folder in SOURCES for path in folder.glob("*.cc"))
    digest = hashlib.sha256(repr((functions(), _FLAGS)).encode())
    headers = sorted(path for folder in SOURCES for path in folder.glob("*.h"))
    for path in (*sources, *headers, *SHARED, Path(__file__)):
        digest.update(path.read_bytes())
    folder = cache / f"recording-gpu-{digest.hexdigest()[:16]}"
    if not folder.exists():
        # Another process may build it, too. The first one's folder stays.
        with suppress(FileExistsError), new_folder(str(folder)) as made:
            _build(compiler, sources, Path(made))
    return folder / f"cudnn-{cudnn}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command[0]} fails: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _build(compiler: str, sources: List[Path], folder: Path) -> None:
    def compile_one(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        _run(compiler, *_FLAGS, "-c", str(source), "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    written = {line.split()[-1] for line in _run("nm", *objects).splitlines() if " T " in line}
    defaults = folder / "defaults.cc"
    names = sorted({function.name for function in functions()} - written)
    defaults.write_text("\n".join(
        ['extern "C" int recording_gpu_default(const char*);',
         '#define NAMED(name) extern "C" __attribute__((visibility("default"))) int name() \\',
         "  { return recording_gpu_default(#name); }",
         *(f"NAMED({name})" for name in names), ""]))
    objects.append(compile_one(defaults))
    _link(compiler, objects, [function.symbol for function in functions()], CUDNN,
          folder / "cudnn-8")
    # libmxnet.so's references to libcudnn.so.8 do not match the plain names of cuDNN 9.
    _link(compiler, objects, [function.name if function.library == CUDNN else function.symbol
                              for function in functions() if not function.removed],
          CUDNN_9, folder / "cudnn-9")


def _link(compiler: str, objects: List[str], symbols: List[str], cudnn: str, folder: Path) -> None:
    """Links a library with these symbols, `name` or `name@version`."""
    folder.mkdir()
    nodes: Dict[str, List[str]] = defaultdict(list)
    for name in symbols:
        nodes[name.partition("@")[2]].append(name.partition("@")[0])
    plain = [*nodes.pop("", []), *_UNVERSIONED]
    script = folder / "versions"
    script.write_text("".join(
        [f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in nodes.items()]
        + [f"RECORDING_GPU_1 {{ global: {'; '.join(plain)}; local: *; }};\n"]))
    _run(compiler, "-shared", "-o", str(folder / "librecording_gpu.so"), *objects,
         f"-Wl,--version-script={script}", "-Wl,-soname,librecording_gpu.so", "-ldl", "-lpthread")
    for name in (*LIBRARIES, cudnn):
        (folder / name).symlink_to("librecording_gpu.so")
