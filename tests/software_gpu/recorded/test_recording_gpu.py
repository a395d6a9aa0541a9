"""The recording GPU refuses calls that a GPU refuses."""
import ctypes
import os
import subprocess
import sys

import mxnet as mx
import pytest
from software_gpu import environment, recording
from steps import GPU, calls_of

FLOAT, HALF = 0, 2


@pytest.fixture(autouse=True)
def no_refused_calls():
    """Overrides the check of conftest.py: calls are refused here."""


@pytest.fixture(scope="module")
def cuda():
    return ctypes.CDLL("libcudart.so.11.0")


def refused(run):
    """The message of a refused call, or an empty string."""
    found = [call.record["why"] for call in calls_of(run) if call.name == "VIOLATION"]
    return found[0] if found else ""


@pytest.fixture()
def memory(cuda):
    p = ctypes.c_void_p()
    assert cuda.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(1024)) == 0
    yield p
    cuda.cudaFree(p)


@pytest.fixture()
def gemm(cuda, memory):
    handle = ctypes.c_void_p()
    cuda.cublasCreate_v2(ctypes.byref(handle))

    def run(a=memory, types=(HALF, HALF, HALF), sums=FLOAT, n=8):
        one = ctypes.c_float(1)
        return cuda.cublasGemmEx(
            handle, 0, 0, n, n, n, ctypes.byref(one), a, types[0], n, memory, types[1], n,
            ctypes.byref(one), memory, types[2], n, sums, -1)
    return run


def test_supported_cublas_product_is_accepted(gemm):
    assert refused(gemm) == ""
    assert gemm() == 0


@pytest.mark.parametrize(("types", "sums"), [((HALF, FLOAT, FLOAT), FLOAT),
                                             ((FLOAT, FLOAT, HALF), FLOAT),
                                             ((HALF, HALF, FLOAT), HALF)])
def test_unsupported_cublas_types_are_refused(gemm, types, sums):
    assert gemm(types=types, sums=sums) == 15
    assert refused(lambda: gemm(types=types, sums=sums)).startswith("types: ")


def test_matrix_larger_than_its_memory_is_refused(gemm):
    assert "bytes needed, 1024 there" in refused(lambda: gemm(n=32))


def test_misaligned_address_is_refused(gemm, memory):
    odd = ctypes.c_void_p(memory.value + 1)
    assert refused(lambda: gemm(a=odd)) == "A is not aligned to 2 bytes"


def test_freed_memory_is_refused(cuda, gemm):
    p = ctypes.c_void_p()
    cuda.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(1024))
    cuda.cudaFree(p)
    assert refused(lambda: gemm(a=p)) == "A is memory that was freed or never allocated"
    assert "freed" in refused(lambda: cuda.cudaFree(p))


def test_host_memory_is_refused_as_device_memory(gemm):
    assert refused(lambda: gemm(a=ctypes.create_string_buffer(1024))) == "A is no device memory"


def test_copy_beyond_end_of_memory_is_refused(cuda, memory):
    host = ctypes.create_string_buffer(2048)
    assert "bytes needed" in refused(
        lambda: cuda.cudaMemcpy(memory, host, ctypes.c_size_t(2048), 1))


def test_destroyed_stream_is_refused(cuda):
    stream = ctypes.c_void_p()
    cuda.cudaStreamCreate(ctypes.byref(stream))
    assert refused(lambda: cuda.cudaStreamSynchronize(stream)) == ""
    cuda.cudaStreamDestroy(stream)
    assert "destroyed" in refused(lambda: cuda.cudaStreamSynchronize(stream))


def descriptor(cuda, kind, *settings, call=None):
    made = ctypes.c_void_p()
    getattr(cuda, f"cudnnCreate{kind}Descriptor")(ctypes.byref(made))
    assert getattr(cuda, call or f"cudnnSet{kind}4dDescriptor")(made, *settings) == 0
    return made


@pytest.mark.parametrize(("weight", "sums", "workspace", "why"), [
    (HALF, FLOAT, 1 << 16, ""), (FLOAT, FLOAT, 1 << 16, "types differ"),
    (HALF, 1, 1 << 16, "type of the sums"), (HALF, FLOAT, 100, "workspace: 65536 bytes needed")])
def test_convolution_with_wrong_types_or_small_workspace_is_refused(
        cuda, weight, sums, workspace, why):
    big = ctypes.c_void_p()
    cuda.cudaMalloc(ctypes.byref(big), ctypes.c_size_t(1 << 20))
    x = descriptor(cuda, "Tensor", 0, HALF, 2, 8, 6, 6)
    w = descriptor(cuda, "Filter", weight, 0, 4, 8, 3, 3)
    y = descriptor(cuda, "Tensor", 0, HALF, 2, 4, 4, 4)
    c = descriptor(cuda, "Convolution", 0, 0, 1, 1, 1, 1, 1, sums,
                   call="cudnnSetConvolution2dDescriptor")
    one = ctypes.c_float(1)
    said = refused(lambda: cuda.cudnnConvolutionForward(
        None, ctypes.byref(one), x, big, w, big, c, 1, big, ctypes.c_size_t(workspace),
        ctypes.byref(one), y, big))
    assert said.startswith(why)
    assert bool(said) == bool(why)


def process(code, **kwargs):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", f"import gluon_amp\n{code}"],
                          capture_output=True, text=True, env=environment.environment(**kwargs))


def test_host_cannot_read_gpu_memory():
    done = process("""import ctypes
p = ctypes.c_void_p()
ctypes.CDLL('libcudart.so.11.0').cudaMalloc(ctypes.byref(p), ctypes.c_size_t(64))
ctypes.string_at(p, 4)""")
    assert "Segmentation fault" in done.stderr
    assert done.returncode


@pytest.mark.parametrize("capability", [70, 75, 80, 86])
def test_wheel_has_kernels_for_gpus_from_7_0_to_8_6(capability):
    done = process("""import mxnet as mx
from software_gpu import recording
(mx.nd.ones((3, 4), ctx=mx.gpu(0)) * 2).wait_to_read()
library = recording._library()
assert library.recording_gpu_kernels() == library.recording_gpu_kernels_with_code() == 31566
assert recording.violations() == 0""", capability=capability)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("capability", [37, 90])
def test_gpu_without_kernels_in_wheel_is_refused(capability):
    done = process("import mxnet as mx; mx.nd.ones((3, 4), ctx=mx.gpu(0)).wait_to_read()",
                   capability=capability)
    assert "no kernel image is available for execution on the device" in done.stderr


def test_host_reads_written_values_and_memory_is_freed():
    array = mx.nd.array([1, 2, 3], ctx=GPU)
    assert array.asnumpy().tolist() == [1, 2, 3]
    recording.begin_peak()
    before = recording.peak()
    held = mx.nd.ones((1 << 20,), ctx=GPU)
    held.wait_to_read()
    assert recording.peak() >= before
    assert os.environ["RECORDING_GPU_COUNT"] == "2"
