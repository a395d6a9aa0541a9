"""Compiles the engine, one library for all instruction sets, and the libraries that load CUDA;
pyproject.toml has the rest."""
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPU, CUDA = Path("gluon_amp", "cpu"), Path("gluon_amp", "cuda")
# Loops over plain memory, compiled for each set of instructions.
KERNELS = set((CPU / "kernels").glob("*.cc"))
FLAGS = ["-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-g0", "-ffp-contract=off",
         "-Wall", "-Wextra"]
# `make sanitize` detects out-of-bounds accesses and undefined behaviour with these flags, except
# invalid bools: the engine copies MXNet's OpContext, which is partly uninitialized.
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=bool", "-fno-sanitize-recover=undefined",
            "-g1"] if os.environ.get("GLUON_AMP_SANITIZE") else []
# Warnings about MXNet's TShape, moved before it has a size. Precompiled headers lose pragmas.
NO_WARNINGS = ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
KEPT = os.environ.get("GLUON_AMP_OBJECTS")
# Sets of instructions; library.py chooses one by the processor's features.
VARIANTS = json.loads((CPU / "variants.json").read_text())
TYPES = {"": "FLOAT32", "_float16": "FLOAT16", "_bfloat16": "BFLOAT16"}  # of tensors
OF_ONE_TYPE = {"rnn": "_bfloat16"}  # files of KERNELS
# Libraries of CUDA 11 that newer ones replace, with the functions that are written in C++, if any.
FORWARDED = {"libcublas.so.11": (), "libcusolver.so.11": (), "libcufft.so.10": (),
             "libcudnn.so.8": ("cudnn.cc", "cudnn_bias.cc", "cudnn_convolution.cc", "cudnn_norm.cc",
                               "cudnn_rnn.cc", "cudnn_workspace.cc"),
             "libnvrtc.so.11.2": ("nvrtc.cc",), "libnvToolsExt.so.1": ("nvtx.cc",)}
# An SPDX expression has a field of its own since setuptools 77, which Python 3.8 does not have.
LICENSE_FIELD = "license_expression" if int(setuptools.__version__.partition(".")[0]) >= 77 \
    else "license"
# The macros of MXNet's wheels: see gluon_amp/cpu/native.h.
AS_MXNET = [("_GLIBCXX_USE_CXX11_ABI", "0"), ("MSHADOW_USE_CBLAS", "0"), ("MSHADOW_USE_MKL", "0"),
            ("MSHADOW_USE_CUDA", "0"), ("MSHADOW_USE_F16C", "0"), ("MXNET_USE_MKLDNN", "1")]


def mxnet_folder() -> Path:
    """Returns the folder of MXNet's headers and library: installed, or unpacked from its wheel.

    The build does not install the wheel, which requires numpy below 2: some Pythons would have to
    compile that.
    """
    spec = importlib.util.find_spec("mxnet")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    folder = Path(KEPT or "build", "mxnet-1.9.1")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            tried = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps",
                                    "--only-binary", ":all:", "-d", scratch, "mxnet==1.9.1"])
            if tried.returncode:
                raise SystemExit("compiling gluon_amp's engine needs MXNet's headers, and pip "
                                 "cannot fetch them: pip install --no-deps mxnet==1.9.1, and "
                                 "build with --no-build-isolation")
            wheel, = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch, [
                    name for name in archive.namelist() if name.startswith("mxnet/include/")
                    or name in ("mxnet/libinfo.py", "mxnet/libmxnet.so")])
            with contextlib.suppress(OSError):  # another build has unpacked it
                Path(scratch, "mxnet").replace(folder)
    return folder


# The requirements for the compiler: C++17, OpenMP, and MXNet's standard library.
PROBE = """#include <omp.h>
#include <optional>
#if __cplusplus < 201703L || !defined(_OPENMP) || !defined(__GLIBCXX__)
#error "requirements are missing"
#endif
"""


def check_machine(compiler) -> None:
    """Checks the build requirements and reports the first that is missing."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise SystemExit("gluon_amp's engine supports x86-64 only, like the wheels of MXNet "
                         f"1.9.1. Received: {platform.machine()}")
    for command in (compiler.compiler_so, compiler.compiler_cxx):
        if shutil.which(command[0]) is None:
            raise SystemExit(f"compiling gluon_amp's engine needs a C++ compiler, and there is no "
                             f"{command[0]}: apt install g++")
    tried = subprocess.run([*compiler.compiler_so, *FLAGS, "-fsyntax-only", "-x", "c++", "-"],
                           input=PROBE, capture_output=True, text=True)
    if tried.returncode:
        why = next((line for line in tried.stderr.splitlines() if "error" in line), "it fails")
        raise SystemExit("compiling gluon_amp's engine needs a compiler with C++17, OpenMP and "
                         "GCC's standard library: apt install g++, or for clang also its "
                         f"libomp-dev. Received: {compiler.compiler_so[0]}: {why}")


def keep(made: str, kept: Path) -> None:
    """Copies an object to the cache atomically, and removes its old version."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    new = kept.with_suffix(f".{os.getpid()}")
    shutil.copy(made, new)
    for old in kept.parent.glob(f"{kept.name.rpartition('-')[0]}-*.o"):
        old.unlink()
    new.replace(kept)


class BuildLibraries(build_ext):
    """Builds libraries that are no Python modules, so their names have no ABI.

    The folder $GLUON_AMP_OBJECTS caches the engine's objects by the digest of their sources, flags
    and compiler.
    """

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or True  # libraries at the same time

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        check_machine(self.compiler)
        if ext.name.startswith("gluon_amp.cpu."):
            self.build_engine(ext)
        else:
            self.build_cuda(ext)

    def build_cuda(self, ext):
        """Builds a library that precedes, or replaces, one of CUDA's."""
        folder = Path(self.build_temp, ext.name)
        folder.mkdir(parents=True, exist_ok=True)
        exports, macros, linked = folder / "exports", [], []
        library = next((name for name in FORWARDED if ext.name.endswith(module(name))), None)
        if library is None:  # without symbol versions, its functions match references with any
            exports.write_text("{ global: __cuda*; cuda*; gluon_amp_*; local: *; };\n")
        else:
            rows = [line.split() for line in (CUDA / "functions.txt").read_text().splitlines()]
            rows = [row for row in rows if row[0] == library]
            names = [row[1] for row in rows if "forward" not in row[2:]]
            listed = folder / "functions.h"
            listed.write_text("".join(f"FUNCTION({row[1]})\n" for row in rows))
            exports.write_text(f"{library} {{ global: {'; '.join(names)}; gluon_amp_*; local: *; "
                               "};\n")
            macros = [("FUNCTIONS", f'"{listed.resolve()}"')]
            linked = ["-Wl,-Bsymbolic", f"-Wl,-soname,{library}"]
        objects = self.compiler.compile(ext.sources, output_dir=str(folder), macros=macros,
                                        extra_postargs=[*FLAGS, "-O2"], depends=ext.depends)
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name),
                                         target_lang="c++", extra_postargs=[
                                             *linked, f"-Wl,--version-script={exports}",
                                             "-Wl,--no-as-needed,-ldl"])

    def precompile(self, flags):
        """Precompiles MXNet's headers, half of the time of each file that includes them. Returns
        the flags with which such files are compiled."""
        folder = Path(self.build_temp, "mxnet")
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "headers.cc"
        source.write_text('#include "native.h"\n')
        made, = self.compiler.compile([str(source)], output_dir=self.build_temp, macros=AS_MXNET,
                                      extra_preargs=["-x", "c++-header"], extra_postargs=flags)
        Path(made).replace(folder / "headers.h.gch")  # the name that -include looks for
        return ["-include", str(folder / "headers.h")]

    def build_engine(self, ext):
        mxnet = mxnet_folder()
        headers = ["-I", str(CPU)]
        for folder in (mxnet / "include", mxnet / "include" / "mkldnn"):
            headers += ["-isystem", str(folder)]
        ours = sorted(CPU.glob("**/*.h"))
        depends = [str(path) for path in ours]
        shared = hashlib.sha256(repr((self.compiler.compiler_so, FLAGS, SANITIZE)).encode())
        shared.update(subprocess.check_output([self.compiler.compiler_so[0], "--version"]))
        of_kernels = shared.copy()  # kernels include only their own headers
        for path in (*ours, mxnet / "libinfo.py"):
            kernels = path.parent.name == "kernels"
            for digest in (shared, of_kernels) if kernels else (shared,):
                digest.update(path.name.encode() + path.read_bytes())
        of_engine = ["-O2", *NO_WARNINGS, *headers]
        jobs = [(source, isa + of, [("ISA", isa + of), (macro, "1")],
                 ["-O3", "-I", str(CPU), *variant["flags"]])
                for source in sorted(KERNELS)
                for isa, variant in VARIANTS.items()
                for of, macro in TYPES.items()
                if of == OF_ONE_TYPE.get(source.stem, of)]
        jobs += [(source, source.parent.name, AS_MXNET, of_engine)
                 for source in sorted(CPU.glob("**/*.cc")) if source not in KERNELS]

        def cached(job):
            source, folder, macros, flags = job
            digest = (of_kernels if source in KERNELS else shared).copy()
            digest.update(repr((macros, [flag for flag in flags if flag not in headers])).encode())
            digest.update(source.read_bytes())
            return Path(KEPT or self.build_temp,
                        f"{folder}-{source.stem}-{digest.hexdigest()}.o")

        def compile_one(job):
            source, folder, macros, flags = job
            if source not in KERNELS:
                flags = [*flags, *precompiled.result()]
            made, = self.compiler.compile(
                [str(source)], output_dir=os.path.join(self.build_temp, folder), macros=macros,
                extra_postargs=[*FLAGS, *flags, *SANITIZE], depends=depends)
            keep(made, cached(job))

        missing = [job for job in jobs if not cached(job).exists()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            if not KERNELS.issuperset(job[0] for job in missing):
                precompiled = pool.submit(self.precompile, [*FLAGS, *of_engine, *SANITIZE])
            list(pool.map(compile_one, missing))
        # Exports one name, and binds internal names to this library: other libraries for MXNet
        # in the process instantiate the same templates.
        exports = Path(self.build_temp, "exports")
        exports.parent.mkdir(parents=True, exist_ok=True)  # missing if all objects are cached
        exports.write_text("{ global: gluon_amp_functions; local: *; };\n")
        self.compiler.link_shared_object(
            [str(cached(job)) for job in jobs], self.get_ext_fullpath(ext.name), target_lang="c++",
            extra_postargs=[*SANITIZE, "-fopenmp", "-Wl,-Bsymbolic",
                            f"-Wl,--version-script={exports}", f"-L{mxnet}", "-l:libmxnet.so"])


def wheel_command():
    """Returns the command for a wheel of this platform for all Python versions; empty without
    the package wheel, which `setup.py build_ext` does not need."""
    try:
        from setuptools.command.bdist_wheel import bdist_wheel
    except ImportError:  # setuptools before 70.1
        try:
            from wheel.bdist_wheel import bdist_wheel
        except ImportError:
            return {}

    class AnyPython3(bdist_wheel):
        def get_tag(self):
            return ("py3", "none", super().get_tag()[2])

    return {"bdist_wheel": AnyPython3}


def module(library):
    """Returns the file, without suffix, that replaces a library of CUDA."""
    return "_" + library.partition(".")[0]


def cuda_extension(name, *sources):
    return Extension(f"gluon_amp.cuda.{name}", language="c++",
                     sources=[str(CPU / "portable.cc"), *(str(CUDA / name) for name in sources)],
                     depends=[str(CUDA / name) for name in ("functions.txt", "dl.h",
                                                            "forward/forward.h")])


setup(
    ext_modules=[
        Extension("gluon_amp.cpu._engine",
                  [str(path) for path in sorted(CPU.glob("**/*.cc"))], language="c++"),
        cuda_extension("_kernels", "kernels.cc"),
        *(cuda_extension(module(library), "forward/forward.cc",
                         *(f"forward/{name}" for name in own))
          for library, own in FORWARDED.items())],
    cmdclass={"build_ext": BuildLibraries, **wheel_command()},
    **{LICENSE_FIELD: "Apache-2.0"},
)
