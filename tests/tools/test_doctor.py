"""`gluon-amp doctor`: its report about the machine."""
import platform
import shutil
import subprocess

import gluon_amp as amp
import mxnet as mx
import numpy as np
import processes
import pytest
from gluon_amp.cpu import library
from gluon_amp.cuda.devices import GPU
from gluon_amp.tools import doctor
from gluon_amp.tools.doctor import examine, gpus, is_served
from mxnet import nd

T4 = GPU("Tesla T4", 75, bytes=15_843_721_216)
H100 = GPU("NVIDIA H100 PCIe", 90, bytes=85_028_765_696)
P100 = GPU("Tesla P100-PCIE-16GB", 60, bytes=17_071_734_784)


# ---- GPUs


AMPERE = ["float16", "TF32", "bfloat16"]


@pytest.mark.parametrize(("name", "capability", "served", "formats"), [
    ("Tesla K80", 37, False, []), ("NVIDIA GeForce GTX 750", 50, True, []),
    ("NVIDIA GeForce GTX 980", 52, True, []), ("Tesla P100", 60, True, []),
    ("NVIDIA GeForce GTX 1080", 61, True, []), ("Tesla V100-SXM2-16GB", 70, True, ["float16"]),
    ("Tesla T4", 75, True, ["float16"]), ("NVIDIA GeForce RTX 2060", 75, True, ["float16"]),
    ("Quadro T2000", 75, True, []), ("NVIDIA T600", 75, True, []), ("GTX 1650", 75, True, []),
    ("NVIDIA GeForce GTX 1660 Ti", 75, True, []), ("NVIDIA GeForce MX450", 75, True, []),
    ("A100", 80, True, AMPERE), ("NVIDIA A10", 86, True, AMPERE), ("RTX 4090", 89, True, AMPERE),
    ("NVIDIA H100 PCIe", 90, False, AMPERE), ("NVIDIA B200", 100, False, AMPERE),
    ("NVIDIA GeForce RTX 5090", 120, False, AMPERE)])
def test_what_a_gpu_has(name, capability, served, formats):
    gpu = GPU(name, capability)
    assert (is_served(gpu), gpu.tensor_cores, gpu.formats) == (served, formats != [], formats)


DRIVER = r"""
#include <cstring>
extern "C" {
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int number) { *device = 40 + number; return 0; }
int cuDeviceGetName(char* name, int size, int device) {
  strncpy(name, device == 40 ? "Tesla T4" : "NVIDIA H100 PCIe", size);
  return 0;
}
int cuDeviceGetAttribute(int* value, int what, int device) {
  if (what != 75 && what != 76) return 1;
  *value = device == 40 ? (what == 75 ? 7 : 5) : (what == 75 ? 9 : 0);
  return MEMORY && 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = device == 40 ? 15843721216 : 85028765696;
  return MEMORY;
}
}
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Installs a CUDA driver with two GPUs."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to make a driver with")

    def install(init=0, memory=0):
        path = tmp_path / f"libcuda-{init}-{memory}.so"
        path.with_suffix(".cc").write_text(DRIVER)
        subprocess.run([compiler, "-shared", "-fPIC", f"-DINIT={init}", f"-DMEMORY={memory}",
                        "-o", path, path.with_suffix(".cc")], check=True)
        monkeypatch.setattr(doctor, "_DRIVER", str(path))
    return install


def test_gpus_are_those_of_driver(driver):
    driver()
    assert gpus() == [T4, H100]


def test_driver_error_is_reported(driver):
    driver(memory=2)
    with pytest.raises(OSError, match="cuDeviceTotalMem_v2 fails with error 2"):
        gpus()
    driver(init=999)
    with pytest.raises(OSError, match="cuInit fails with error 999"):
        gpus()


def test_missing_driver_and_missing_gpus_are_reported(driver, monkeypatch):
    driver(init=100)
    assert "GPU          none: the NVIDIA driver finds no GPU" in examine()[1]
    monkeypatch.setattr(doctor, "_DRIVER", "libcuda-of-nobody.so.1")
    assert "none: no NVIDIA driver (libcuda-of-nobody.so.1) is installed" in examine()[1]


def test_tf32_is_reported_for_gpus_that_have_it(monkeypatch):
    a100 = GPU("NVIDIA A100-SXM4-40GB", 80, bytes=40 * 10 ** 9)
    text = machine(monkeypatch, a100, cuda=True)
    assert "formats: float16, TF32, bfloat16; MXNet 1.9.1 uses float16 and TF32" in text
    assert "TF32 is on" in text
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert "TF32 is off" in examine()[1]
    assert "TF32 is" not in machine(monkeypatch, T4, cuda=True)


def machine(monkeypatch, *found, cuda, error=None):
    """The report on a machine with these GPUs, on which a step succeeds or fails with `error`."""
    features = [f for f in mx.runtime.feature_list() if f.name not in ("CUDA", "CUDNN")]
    features += [type("Feature", (), {"name": n, "enabled": cuda}) for n in ("CUDA", "CUDNN")]
    step = doctor._error_of_a_step
    monkeypatch.setattr(doctor, "gpus", lambda: list(found))
    monkeypatch.setattr(mx.runtime, "feature_list", lambda: features)
    monkeypatch.setattr(doctor, "_error_of_a_step",
                        lambda device: error if device.device_type == "gpu" else step(device))
    trains, text = examine()
    assert trains
    return text


def notes(text):
    """The conclusion, and the notes on it."""
    return text.partition("\n\n")[0].splitlines()


@pytest.mark.parametrize(("gpu", "options", "words"), [
    (T4, {"cuda": False}, ["Tesla T4 is not used",
                           "pip uninstall -y mxnet; pip install '.[cu112]' in a checkout"]),
    (H100, {"cuda": True}, ["H100 PCIe: its compute capability is 9.0",
                            "float16 runs on the CPU"]),
    (T4, {"cuda": True, "error": "out of memory"}, ["not on gpu(0): out of memory"])])
def test_gpu_on_which_float16_does_not_train_is_noted(gpu, options, words, monkeypatch):
    conclusion, note = notes(machine(monkeypatch, gpu, **options))
    assert conclusion.startswith("float16 trains here: on the CPU (")
    assert all(word in note for word in words)


def test_supported_gpus_are_first_and_keep_their_ids(monkeypatch):
    conclusion, *others = notes(machine(monkeypatch, H100, T4, P100, cuda=True))
    assert conclusion.startswith("float16 trains here: on gpu(1) (Tesla T4, Tensor Cores) and "
                                 "gpu(2) (Tesla P100-PCIE-16GB, no Tensor Cores) and the CPU (")
    assert any("P100" in note and "saves memory, not time" in note for note in others)


def test_slow_kernels_of_openblas_are_reported():
    done = processes.run("-m", "gluon_amp", "doctor", OPENBLAS_CORETYPE="Prescott")
    row = " ".join(done.stdout[done.stdout.index("OPENBLAS_CORETYPE"):].split())
    assert "kernels for Prescott" in row
    assert ("which are slow here: set" in row) == (library.load() in ("avx2", "avx512"))


@pytest.mark.parametrize(("number", "version"), [
    (7605, "7.6.5"), (8500, "8.5.0"), (8907, "8.9.7"), (90100, "9.1.0")])
def test_cudnn_version_of_cuda_build(number, version, monkeypatch):
    assert "cuDNN        not in this build" in machine(monkeypatch, T4, cuda=False)
    assert "cuDNN        of unknown version" in machine(monkeypatch, T4, cuda=True)
    monkeypatch.setattr(mx.base._LIB, "cudnnGetVersion", lambda: number, raising=False)
    assert f"cuDNN        {version}" in machine(monkeypatch, T4, cuda=True)


def test_cuda_build_without_gpu_runs_on_cpu(monkeypatch):
    _, note = notes(machine(monkeypatch, cuda=True))
    assert "CUDA build, and there is no GPU" in note


# ---- this machine


def test_report_of_this_machine():
    trains, text = examine()
    assert trains
    assert text.startswith("float16 trains here: on ")
    for fact in (platform.python_version(), f"numpy {np.__version__}", "MXNet        1.9.1",
                 str(library.PATH), f"{library.load()} kernels"):
        assert fact in text


def test_missing_kernels_are_the_reason(monkeypatch):
    def fails():
        raise amp.cpu.library.KernelError("gluon_amp's CPU kernels are missing: rebuild them")
    monkeypatch.setattr(library, "load", fails)
    trains, text = examine()
    assert not trains
    lines = text.splitlines()
    assert lines[0] \
        == "float16 does not train here: gluon_amp's CPU kernels are missing: rebuild them"
    assert "CPU kernels  do not load" in lines


def reason():
    trains, text = examine()
    assert not trains
    return text.splitlines()[0].partition(": ")[2]


def test_wrong_result_of_step_is_the_reason(monkeypatch):
    monkeypatch.setattr(doctor, "convert", lambda net: net)
    assert reason() == "a training step gives a float32 weight of 0.9375. " \
                       "Expected: a float16 weight of 0.9375"


def fails_with_a_traceback():
    raise mx.MXNetError('Traceback (most recent call last):\n  File "../src/operator/nn/./../'
                        'linalg_impl.h", line 166\nMXNetError: FP16 gemm on cpu not implemented!')


@pytest.mark.parametrize(("fails", "said"), [
    (fails_with_a_traceback, "FP16 gemm on cpu not implemented!"),
    (lambda: nd.ones((2,)) + nd.ones((3,)),
     "operands could not be broadcast together with shapes [2] [3]"),
    (lambda: nd.Pooling(nd.ones((1, 1, 2, 2)), kernel=(3, 3), pool_type="max"),
     "kernel size (3) exceeds input (2 padded to 2)"),
])
def test_mxnet_error_is_one_line(fails, said, monkeypatch):
    monkeypatch.setattr(doctor, "convert", lambda net: fails())
    assert reason() == said


@pytest.mark.parametrize(("value", "shown"), [(None, "unset (1)"), ("0", "0"), ("7", "7")])
def test_environment_variables_are_explained(monkeypatch, value, shown):
    name = "MXNET_CUDNN_AUTOTUNE_DEFAULT"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    (line,) = [line for line in examine()[1].splitlines() if line.startswith(name)]
    assert f"{name}  {shown}  " in line
    assert "0: it does not" in line
