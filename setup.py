"""Compiles kernels.cc for each instruction set; everything else is in pyproject.toml."""
import importlib.util
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

FLAGS = ["-std=c++14", "-O3", "-g0", "-fopenmp", "-ffp-contract=off"]
VARIANTS = {"portable": []}  # as in gluon_amp/cpu/library.py
if platform.machine() in ("x86_64", "AMD64"):
    VARIANTS["avx2"] = ["-mavx2", "-mf16c", "-mfma"]
    VARIANTS["avx512"] = ["-mavx512f", *VARIANTS["avx2"]]


def mxnet_folder() -> Path:
    """Where MXNet's header and source are; importing it is not needed for that."""
    spec = importlib.util.find_spec("mxnet")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("compiling gluon_amp's kernels needs MXNet's headers: "
                         "pip install mxnet==1.9.1, or build with isolation")
    return Path(next(iter(spec.submodule_search_locations)))


class BuildKernels(build_ext):
    """The kernels are libraries for MXNet, not Python modules: no ABI in their names."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        mxnet = mxnet_folder()
        ext.include_dirs = [str(mxnet / "include")]
        ext.sources = [*ext.sources, str(mxnet / "src" / "lib_api.cc")]
        common, self.build_temp = self.build_temp, os.path.join(self.build_temp, ext.name)
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = common


class AnyPython3(bdist_wheel):
    """One wheel for all Python versions, on this platform."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(f"gluon_amp.cpu._kernels_{name}", ["gluon_amp/cpu/kernels.cc"], language="c++",
                  extra_compile_args=FLAGS + flags, extra_link_args=["-fopenmp"])
        for name, flags in VARIANTS.items()
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython3},
)
