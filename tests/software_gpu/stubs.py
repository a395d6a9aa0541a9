"""Builds the software GPU as the CUDA libraries that MXNet's CUDA build loads.

`record/` checks and records calls; `compute/` executes them. All libraries are links to one
file. It has each function under the symbol version that libmxnet.so requires. Functions without an
implementation record their names and return 0. Another such file is a machine with CUDA 12 and
cuDNN 9: its libraries have their names of CUDA 12, and lack the functions that cuDNN 9 removed.
"""
import hashlib
import os
import shutil
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import gluon_amp
from gluon_amp.cuda.libraries import NEEDED, REPLACED, functions
from gluon_amp.files import new_folder

SOURCES = [Path(__file__).with_name(name) for name in ("record", "compute")]
# What the engine for CPUs computes in the same way.
PACKAGE = Path(gluon_amp.__file__).parent
SHARED = PACKAGE / "cpu" / "kernels" / "rnn_cell.h"
CUDA_OF_CUDNN = {8: 11, 9: 12}
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvToolsExt.so.1")
FLAGS = [f"-I{PACKAGE}", "-std=c++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall",
         "-Wextra", "-Wno-unused-parameter"]
# Functions that libmxnet.so does not import: `gluon-amp doctor`, recording.py, devices.py,
# libraries.py and forward/nvrtc.cc call them.
UNVERSIONED = ("recording_gpu_*", "nvml*", "cuInit", "cuDriverGetVersion", "cuDeviceGetCount",
               "cuDeviceGetName", "cuDeviceGetAttribute", "cuDeviceTotalMem_v2", "nvrtcVersion",
               "nvrtcGetNumSupportedArchs", "nvrtcGetSupportedArchs")


def build(cache, cudnn=8):
    """Returns the folder with the stubs, for LD_LIBRARY_PATH; builds it if needed.

    Args:
        cudnn: the major version of cuDNN, 8 or 9.
    """
    compiler = os.environ.get("CXX", "g++")
    for command in (compiler, "nm"):
        if shutil.which(command) is None:
            raise FileNotFoundError(f"building the software GPU needs {command}: apt install g++")
    sources = sorted(path for folder in SOURCES for path in folder.glob("*.cc"))
    digest = hashlib.sha256(repr((functions(), FLAGS)).encode())
    headers = sorted(path for folder in SOURCES for path in folder.glob("*.h"))
    for path in (*sources, *headers, SHARED, Path(__file__)):
        digest.update(path.read_bytes())
    folder = cache / f"software-gpu-{digest.hexdigest()[:16]}"
    if not folder.exists():
        # Another process may build it, too. The first one's folder stays.
        with suppress(FileExistsError), new_folder(str(folder)) as unfinished:
            _build(compiler, sources, Path(unfinished))
    return folder / f"cuda-{CUDA_OF_CUDNN[cudnn]}"


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command[0]} fails: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _build(compiler, sources, folder):
    def compile_one(source):
        target = str(folder / f"{source.stem}.o")
        _run(compiler, *FLAGS, "-c", str(source), "-o", target)
        return target

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
    for cuda in CUDA_OF_CUDNN.values():
        _link(compiler, objects, cuda, folder / f"cuda-{cuda}")


def _link(compiler, objects, cuda, folder):
    """Links the libraries of a version of CUDA. References of libmxnet.so do not match the plain
    names of libraries that replace those of CUDA 11."""
    folder.mkdir()
    replaced = REPLACED[cuda]
    symbols = [function.name if function.library in replaced else function.symbol
               for function in functions() if cuda == 11 or not function.removed]
    nodes = defaultdict(list)
    for name in symbols:
        nodes[name.partition("@")[2]].append(name.partition("@")[0])
    plain = [*nodes.pop("", []), *UNVERSIONED]
    script = folder / "versions"
    script.write_text("".join(
        [f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in nodes.items()]
        + [f"SOFTWARE_GPU_1 {{ global: {'; '.join(plain)}; local: *; }};\n"]))
    _run(compiler, "-shared", "-o", str(folder / "libsoftware_gpu.so"), *objects,
         f"-Wl,--version-script={script}", "-Wl,-soname,libsoftware_gpu.so", "-ldl", "-lpthread")
    for name in (*DRIVER, *(replaced.get(name, name) for name in NEEDED)):
        (folder / name).symlink_to("libsoftware_gpu.so")
