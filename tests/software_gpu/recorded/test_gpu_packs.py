"""Packs of kernels, on recording GPUs that MXNet's wheel has no code for.

The packs have the wheel's code for 8.6 under other architectures: here, no code runs.
"""
import subprocess
import sys
from pathlib import Path

import pytest
from gluon_amp.cuda import fatbin, pack, wheel
from gluon_amp.cuda.libraries import functions
from software_gpu import environment

TRAIN = """
import ctypes
import warnings
warnings.simplefilter("error", RuntimeWarning)
import gluon_amp as amp
import mxnet as mx
from gluon_amp.cuda import load
from software_gpu import recording
from mxnet import autograd, gluon
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Conv2D(8, 3, in_channels=8), gluon.nn.BatchNorm(), gluon.nn.Dense(8))
contexts = [mx.gpu(i) for i in range(mx.context.num_gpus())]
net.initialize(ctx=contexts)
amp.convert(net)
trainer = amp.Trainer(net.collect_params(), "sgd", loss_scale=128)
for _ in range(2):
    with autograd.record():
        losses = [net(mx.nd.ones((4, 8, 6, 6), ctx=context)) for context in contexts]
    trainer.backward(losses)
    trainer.step(4)
mx.nd.waitall()
library = recording._library()
for context in contexts:
    assert library.cudaSetDevice(context.device_id) == 0
    assert library.recording_gpu_kernels_with_code() == library.recording_gpu_kernels() == 31566
assert recording.violations() == 0
"""


def relabel(path, *arguments):
    """Writes a pack from the code that a process registers, under the architecture of the name."""
    done = subprocess.run([sys.executable, "-W", "ignore", Path(__file__).with_name("relabel.py"),
                           path, path.stem, *arguments], env=with_gpus(86), capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr


def with_gpus(*capabilities):
    cudnn = 9 if max(capabilities) >= 100 else 8
    return environment.environment(devices=len(capabilities), capability=capabilities, cudnn=cudnn)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder with packs for 9.0, 10.0 and 12.0."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "kernels").mkdir()
    for arch in (90, 100, 120):
        relabel(folder / "kernels" / f"{arch}.pack")
    return folder


@pytest.fixture()
def place(tmp_path):
    """The path of a pack for 9.0 in a cache folder without packs."""
    (tmp_path / "kernels").mkdir()
    return tmp_path / "kernels" / "90.pack"


def run(code, cache, *capabilities):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**with_gpus(*capabilities), "GLUON_AMP_CACHE": str(cache)})


@pytest.mark.parametrize("capabilities", [(90,), (100,), (103,), (120,), (86, 90), (90, 70),
                                          (90, 120)])
def test_networks_train_with_kernels_of_a_pack(capabilities, cache):
    done = run(TRAIN, cache, *capabilities)
    assert done.returncode == 0, done.stderr


def test_gpus_that_the_wheel_serves_ignore_packs(place, tmp_path):
    for arch in (80, 86, 90):
        place.with_name(f"{arch}.pack").write_bytes(b"damaged")
    done = run(TRAIN + "assert load.prepared.kernels is None\n", tmp_path, 80, 89)
    assert done.returncode == 0, done.stderr


ONE_KERNEL = "mx.nd.ones((3, 4), ctx=mx.gpu({})).wait_to_read()"


def test_gpu_without_pack_warns_once_and_its_error_names_kernel_and_command(tmp_path):
    done = run("import gluon_amp\nimport mxnet as mx\n"
               f"{ONE_KERNEL.format(0)}\n{ONE_KERNEL.format(1)}", tmp_path, 86, 90)
    warned = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert len(warned) == 1
    assert "RuntimeWarning: MXNet 1.9.1 has no kernels for recording GPU sm_90 (compute " \
           "capability 9.0)" in warned[0]
    assert "gluon-amp cuda install FILE, or gluon-amp cuda build --arch 90" in warned[0]
    error = done.stderr.splitlines()[-1]
    assert "no kernel image is available for execution on the device: " in error
    assert "set_to_int<1>" in error
    assert error.endswith("gluon-amp cuda build --arch 90")


def test_kernel_that_pack_lacks_is_named_and_runs_on_gpu_that_wheel_serves(place, tmp_path):
    relabel(place, "set_to_int")
    done = run("import gluon_amp\nimport mxnet as mx\n"
               "(mx.nd.array([1], ctx=mx.gpu(0)) + 1).wait_to_read()\n"
               f"print('others run')\n{ONE_KERNEL.format(0)}", tmp_path, 90)
    assert done.stdout == "others run\n"
    error = done.stderr.splitlines()[-1]
    assert "set_to_int<1>" in error
    assert error.endswith(f"{place} lacks it: make a pack of all kernels by gluon-amp cuda build "
                          "--arch 90")
    done = run(f"import gluon_amp\nimport mxnet as mx\n{ONE_KERNEL.format(0)}", tmp_path, 86, 90)
    assert done.returncode == 0, done.stderr


def refused(cache, *capabilities):
    done = run("import gluon_amp", cache, *capabilities)
    assert done.returncode == 1
    kind, _, message = done.stderr.splitlines()[-1].partition(": ")
    assert kind == "ImportError"
    return message


def test_damaged_pack_is_refused(cache, place, tmp_path):
    data = (cache / "kernels" / "90.pack").read_bytes()
    place.write_bytes(data[:1 << 20])
    assert refused(tmp_path, 90).startswith(f"{place} is incomplete: ")
    place.write_bytes(b"")
    assert refused(tmp_path, 90) == \
        f"{place} is not a pack of MXNet's kernels, or empty. Replace it: gluon-amp cuda install " \
        "FILE, or gluon-amp cuda build --arch 90"
    place.write_bytes(data.replace(pack.LIBMXNET.encode(), b"f" * 64, 1))
    assert refused(tmp_path, 90).startswith(
        f"{place} has kernels for another libmxnet.so than that of mxnet-cu112 1.9.1")


def test_unreadable_cache_is_an_error(place, tmp_path):
    place.mkdir()
    assert "Is a directory" in refused(tmp_path, 90)


def test_pack_for_newer_driver_is_refused(place, monkeypatch, tmp_path):
    monkeypatch.setenv("RECORDING_GPU_CUDA", "12080")
    elf = fatbin.entry(b"\x7fELF\x02\x01\x01\x33\x08" + bytes(7), 90)
    pack.write(place, 90, [pack.Code("a.cu", 0, fatbin.fat_binary([elf]), ["a"])],
               libmxnet=pack.LIBMXNET, compiler="ptxas 13.0", licences=[])
    assert "needs a driver of CUDA 13 or newer. Installed: 580.65.06" in refused(tmp_path, 90)


def test_runtime_that_was_loaded_before_is_an_error(cache):
    done = run("import ctypes\nctypes.CDLL('libcudart.so.11.0', mode=ctypes.RTLD_GLOBAL)\n"
               "import gluon_amp", cache, 90)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: MXNet does not use the kernels of {cache}/kernels/90.pack, because "
        "libcudart.so.11.0 was loaded before: import gluon_amp first")


def test_table_of_functions_equals_imports_of_library():
    library = wheel.cuda_mxnet() / "mxnet" / "libmxnet.so"
    listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True,
                            text=True, check=True).stdout.split("\n")
    imported = {line.split()[-1].replace("@@", "@") for line in listed if line}
    of_cuda = {name for name in imported if name.partition("@")[2].startswith(
        ("libcu", "libnv")) or name.startswith(("cu", "nccl")) and "@" not in name}
    ours = {f.symbol for f in functions() if not (f.engine or f.forward)}
    assert ours == of_cuda

