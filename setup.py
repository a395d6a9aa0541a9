"""Compiles the engine and the libraries that load CUDA; pyproject.toml has the rest."""
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext

CPU, CUDA = Path("gluon_amp", "cpu"), Path("gluon_amp", "cuda")
FLAGS = ["-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-g0", "-ffp-contract=off",
         "-Wall", "-Wextra"]
# Without warnings about MXNet's TShape, moved before it has a size.
OF_MXNET = ["-O2", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
# The macros of MXNet's wheels: see gluon_amp/cpu/native.h.
MACROS = [("_GLIBCXX_USE_CXX11_ABI", "0"), ("MSHADOW_USE_CBLAS", "0"), ("MSHADOW_USE_MKL", "0"),
          ("MSHADOW_USE_CUDA", "0"), ("MSHADOW_USE_F16C", "0"), ("MXNET_USE_MKLDNN", "1")]
VARIANTS = json.loads((CPU / "variants.json").read_text())  # sets of instructions
TYPES = {"": "FLOAT32", "_float16": "FLOAT16", "_bfloat16": "BFLOAT16"}  # of kernels' tensors
# Libraries of CUDA 11 that newer ones replace, with the files of forward/ that begin like them.
FORWARDED = {"cublas": "libcublas.so.11", "cusolver": "libcusolver.so.11",
             "cufft": "libcufft.so.10", "cudnn": "libcudnn.so.8", "nvrtc": "libnvrtc.so.11.2",
             "nvToolsExt": "libnvToolsExt.so.1"}
NEEDS = "compiling gluon_amp's engine needs "
PROBE = "#include <omp.h>\n#include <optional>\n#ifndef __GLIBCXX__\n#error of clang\n#endif"


def mxnet_folder(folder):
    """Returns the folder of MXNet's headers and library: installed, or unpacked without numpy."""
    spec = importlib.util.find_spec("mxnet")
    if spec is not None and spec.origin:
        return Path(spec.origin).parent
    if not folder.exists() and subprocess.run([
            sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:",
            "--target", str(folder), "mxnet==1.9.1"]).returncode:
        raise SystemExit(f"{NEEDS}MXNet's headers, and pip cannot fetch them: pip install "
                         "--no-deps mxnet==1.9.1, and build with --no-build-isolation")
    return folder / "mxnet"


def check_machine(compiler):
    """Checks the build requirements and reports the first that is missing."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise SystemExit("gluon_amp's engine supports x86-64 only, like the wheels of MXNet "
                         f"1.9.1. Received: {platform.machine()}")
    cc = compiler.compiler_so
    if shutil.which(cc[0]) is None:
        raise SystemExit(f"{NEEDS}a C++ compiler, and there is no {cc[0]}: apt install g++")
    tried = subprocess.run([*cc, *FLAGS, "-fsyntax-only", "-x", "c++", "-"],
                           input=PROBE, capture_output=True, text=True)
    if tried.returncode:
        why = next((line for line in tried.stderr.splitlines() if "error" in line), "it fails")
        raise SystemExit(f"{NEEDS}a compiler with C++17, OpenMP and GCC's standard library: apt "
                         f"install g++, or for clang also its libomp-dev. Received: {cc[0]}: {why}")


class BuildLibraries(build_ext):
    """Builds libraries that are no Python modules, so their names have no ABI. The engine's objects
    are in $GLUON_AMP_OBJECTS, or else in build/, under names with a digest of what they compile."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        check_machine(self.compiler)
        folder = Path(self.build_temp, ext.name)
        folder.mkdir(parents=True, exist_ok=True)
        build = self.engine if ext.name.startswith("gluon_amp.cpu.") else self.of_cuda
        objects, exports, flags = build(ext, folder)
        (folder / "exports").write_text(f"{exports} local: *; }};\n")
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), target_lang="c++",
            extra_postargs=[f"-Wl,--version-script={folder / 'exports'}", *flags])

    def of_cuda(self, ext, folder):
        """Compiles a library that precedes, or replaces, one of CUDA's."""
        library, macros, flags = FORWARDED.get(ext.name.rpartition("_lib")[2]), [], []
        exports = "{ global: __cuda*; cuda*; gluon_amp_*;"  # without versions, they match any
        if library is not None:
            rows = map(str.split, (CUDA / "functions.txt").read_text().splitlines())
            rows = [row for row in rows if row[0] == library]
            names = "; ".join(row[1] for row in rows if "forward" not in row[2:])
            (folder / "functions.h").write_text("".join(f"FUNCTION({row[1]})\n" for row in rows))
            exports = f"{library} {{ global: {names}; gluon_amp_*;"
            macros = [("FUNCTIONS", f'"{(folder / "functions.h").resolve()}"')]
            flags = ["-Wl,-Bsymbolic", f"-Wl,-soname,{library}"]
        objects = self.compiler.compile(ext.sources, str(folder), macros,
                                        extra_postargs=[*FLAGS, "-O2"])
        return objects, exports, [*flags, "-Wl,--no-as-needed,-ldl"]

    def engine(self, ext, folder):
        """Compiles the engine, its kernels for each set of instructions and each type. It binds
        names to itself, because other libraries of the process have the same templates."""
        cache = Path(os.environ.get("GLUON_AMP_OBJECTS") or self.build_temp)
        cache.mkdir(parents=True, exist_ok=True)
        mxnet = mxnet_folder(cache / "mxnet-1.9.1")
        version = subprocess.check_output([self.compiler.compiler_so[0], "--version"])
        headers = [*sorted(CPU.glob("**/*.h")), mxnet / "libinfo.py"]
        include = [f"-isystem{mxnet / path}" for path in ("include", "include/mkldnn")]

        def compile_one(source, macros, flags, *before, end=".o", included=()):
            kernel = source.parent.name == "kernels"
            read = [path.read_bytes() for path in (*headers, source)
                    if not kernel or path.parent.name == "kernels"]
            command = self.compiler.compiler_so, version, macros, flags, before, read
            digest = hashlib.sha256(repr(command).encode()).hexdigest()
            target = cache / f"{source.stem}-{digest}{end}"
            if not target.exists():
                flags = [*FLAGS, *flags, *included, f"-I{CPU}", *([] if kernel else include)]
                built, = self.compiler.compile([str(source)], str(folder / digest), macros,
                                               extra_preargs=before, extra_postargs=flags)
                shutil.move(built, f"{target}.{os.getpid()}")  # from another file system
                os.replace(f"{target}.{os.getpid()}", target)
            return target

        kernels = sorted((CPU / "kernels").glob("*.cc"))
        (folder / "headers.cc").write_text('#include "native.h"\n')
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [pool.submit(compile_one, source, [("ISA", isa + of), (macro, "1")],
                                ["-O3", *variant["flags"]])
                    for source in kernels for isa, variant in VARIANTS.items()
                    for of, macro in TYPES.items() if source.stem != "rnn" or of == "_bfloat16"]
            gch = compile_one(folder / "headers.cc", MACROS, OF_MXNET, "-x", "c++-header",
                              end=".h.gch")  # half of the time of a file with MXNet's headers
            jobs += [pool.submit(compile_one, source, MACROS, OF_MXNET,
                                 included=["-include", str(gch)[:-len(".gch")]])
                     for source in map(Path, ext.sources) if source not in kernels]
            objects = [str(job.result()) for job in jobs]
        for path in {*cache.glob("*.o"), *cache.glob("*.gch")} - {gch, *map(Path, objects)}:
            path.unlink(missing_ok=True)  # of other sources
        return objects, "{ global: gluon_amp_functions;", [
            "-fopenmp", "-Wl,-Bsymbolic", f"-L{mxnet}", "-l:libmxnet.so"]


SOURCES = {  # of each library
    "cpu._engine": CPU.glob("**/*.cc"), "cuda._kernels": [CPU / "portable.cc", CUDA / "kernels.cc"],
    **{f"cuda._lib{name}": [CPU / "portable.cc", CUDA / "forward" / "forward.cc",
                            *(CUDA / "forward").glob(f"{name}*.cc")] for name in FORWARDED}}
setuptools.setup(
    license="Apache-2.0", cmdclass={"build_ext": BuildLibraries},
    options={"bdist_wheel": {"py_limited_api": "cp38"}, "build_ext": {"parallel": True}},
    ext_modules=[setuptools.Extension(f"gluon_amp.{name}", sorted(map(str, of)), language="c++")
                 for name, of in SOURCES.items()])
