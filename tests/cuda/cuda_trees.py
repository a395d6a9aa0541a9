"""A small tree of sources and of compilers for `gluon-amp cuda build`.

The files of the tree are PTX, so nvcc copies, and `cuda_files.py` is ptxas.
"""
import sys
from pathlib import Path

import cuda_files
from cuda_files import kernel, module
from gluon_amp.cuda import fatbin, sources, toolkit

NAMESPACE = "_GLOBAL__N__0a1b2c3d_6_two_cu_7b532da7"  # as nvcc 13 names it
WHEELS_NAMESPACE = "_GLOBAL__N__38_tmpxft_00005f4c_00000000_10_two_compute_86_cpp1_ii_7b532da7"
TABLE = ".global .align 4 .b8 table[4] = {1, 2, 3, 4};\n"
UNUSED = ".global .align 1 .b8 unused[1];\n"
HELPER = (".func (.param .b32 out) helper(\n\t.param .b32 in\n)\n{\n\tld.global.u32 %r1, "
          "[table];\n\tret;\n}\n")
DEVICE = {
    "src/operator/one.cu": module(
        TABLE, UNUSED, HELPER, kernel("one", "u64", "u32", uses="call (out), helper, (in);"),
        kernel("shared", "u64")),
    "src/operator/two.cu": module(
        UNUSED, kernel("shared", "u64"), kernel(f"_ZN{len(NAMESPACE)}{NAMESPACE}3twoEv", "u32")),
}
# What the wheel has of each file: kernels and the sizes of their parameters.
WHEEL = [{"one": [8, 4], "shared": [8]},
         {"shared": [8], f"_ZN{len(WHEELS_NAMESPACE)}{WHEELS_NAMESPACE}3twoEv": [4]}]
_HEADERS = {"include/mxnet/base.h": "#define MXNET_MINOR 9\n#define MXNET_PATCH 1\n",
            "3rdparty/nvidia_cub/cub/version.cuh": "#define CUB_VERSION 101000\n",
            "3rdparty/thrust/thrust/version.h": "#define THRUST_VERSION 101000\n"}


def content(repository):
    """The files of a repository, by their paths in it."""
    every = {**_HEADERS, **DEVICE}
    found = {}
    for path in repository.paths:
        inside = str(Path(repository.folder, path))
        below = [name for name in every if name.startswith(f"{inside}/")]
        for name in below or [inside if "LICENSE" in path else f"{inside}/file.h"]:
            found[str(Path(name).relative_to(repository.folder))] = every.get(name, "")
    return found


def make(folder):
    """Writes a tree as `sources.fetch` does."""
    for repository in sources.REPOSITORIES:
        for path, text in content(repository).items():
            (folder / repository.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / repository.folder / path).write_text(text)
    return folder


def wheel(folder, kernels=WHEEL, registers=None):
    """Writes libmxnet.so with these kernels for capability 8.6 and empty ones for 8.0."""
    path = folder / "mxnet-cu112" / "mxnet" / "libmxnet.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cuda_files.library([
        fatbin.fat_binary([fatbin.entry(cuda_files.cubin(names), 80),
                           fatbin.entry(cuda_files.cubin(each, registers), 86)])
        for each, names in [*((each, {}) for each in kernels), ({}, {})]]))
    return path


def tools(folder, nvcc="V=0", ptxas=""):
    """Makes a folder of NVIDIA's packages with small compilers; `nvcc` and `ptxas` are commands of
    the shell that run first."""
    for name, header in toolkit._PACKAGES.items():
        path = folder / name / "include" / header
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (folder / "cuda_runtime" / "include" / "cuda_runtime_api.h").write_text(
        "#define CUDART_VERSION 11080\n")
    copy = 'for last; do :; done\nwhile [ "$1" != -o ]; do shift; done\ncp "$last" "$2"'
    cuda_files.compiler(folder / "cu13" / "bin", "nvcc", "13.0.88", f"{nvcc}\n{copy}")
    assemble = f'{ptxas}\nexec {sys.executable} {cuda_files.__file__} "$@"'
    cuda_files.compiler(folder / "cu13" / "bin", "ptxas", "13.0.88", assemble)
    cuda_files.compiler(folder / "cuda_nvcc" / "bin", "ptxas", "11.8.89", assemble)
    return folder
