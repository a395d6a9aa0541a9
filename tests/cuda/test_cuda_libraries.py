"""The choice of CUDA libraries, and functions that call those of newer libraries."""
import ctypes
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import gluon_amp
import pytest
from gluon_amp.cuda import libraries, load, wheel
from gluon_amp.cuda.devices import GPU, Devices

CUDA = Path(gluon_amp.__file__).parent / "cuda"
A100, H100, B200, V100, RTX = (GPU(name, capability, f"GPU-{name}") for name, capability in (
    ("A100", 80), ("H100", 90), ("B200", 100), ("V100", 70), ("RTX 5090", 120)))
COMMON = ("libcudart.so.11.0", "libcurand.so.10", "libnccl.so.2")
OF = {11: ("libcublas.so.11", "libcusolver.so.11", "libcufft.so.10", "libnvrtc.so.11.2",
           "libcudnn.so.8"),
      12: ("libcublas.so.12", "libcusolver.so.11", "libcufft.so.11", "libnvrtc.so.12",
           "libcudnn.so.9"),
      13: ("libcublas.so.13", "libcusolver.so.12", "libcufft.so.12", "libnvrtc.so.13",
           "libcudnn.so.9")}
VERSIONS = {"libnvrtc.so.11.2": (11, 8), "libnvrtc.so.12": (12, 9), "libnvrtc.so.13": (13, 0)}


@pytest.fixture()
def chosen(tmp_path, monkeypatch):
    """The choice for GPUs on a machine with some versions of CUDA; its files are empty."""
    def choose(installed, *gpus, driver=13000, cudnn=8906, nvrtc=VERSIONS, without=()):
        for name in {*COMMON, *(name for cuda in installed for name in OF[cuda])} - set(without):
            (tmp_path / name).touch()
        monkeypatch.setattr(libraries, "folders", lambda: [tmp_path])
        monkeypatch.setattr(libraries, "_nvrtc_version", lambda path: nvrtc[path.name])
        monkeypatch.setattr(libraries, "_cudnn_version", lambda path: cudnn)
        return libraries.choose(Devices(list(gpus), "580.1", driver))
    return choose


@pytest.mark.parametrize(("installed", "gpus", "cuda"), [
    ((11, 12, 13), (A100,), 11), ((11, 13), (H100,), 11), ((11, 13), (B200,), 13),
    ((11, 12), (RTX,), 12), ((11, 12, 13), (H100, RTX), 13), ((13,), (A100,), 13),
    ((12,), (H100,), 12), ((12, 13), (V100, B200), 12), ((11, 13), (), 11), ((13,), (), 13)])
def test_oldest_libraries_that_serve_all_gpus_are_chosen(installed, gpus, cuda, chosen):
    choice = chosen(installed, *gpus)
    assert (choice.cuda, choice.problem) == (cuda, "")
    assert [path.name for path in choice.paths.values() if path.name not in COMMON] == \
        list(OF[cuda])


@pytest.mark.parametrize(("installed", "gpus", "settings", "reason"), [
    ((11,), (B200,), {}, "not CUDA 11: B200 needs CUDA 12.8 or newer"),
    ((11,), (H100,), {"cudnn": 8500}, "H100 needs cuDNN 8.6 or newer"),
    ((13,), (B200,), {"driver": 12080}, "the driver 580.1 supports CUDA 12"),
    ((13,), (V100, B200), {}, "it has no code for V100 (compute capability 7.0)"),
    ((12,), (B200,), {"nvrtc": {"libnvrtc.so.12": (12, 4)}}, "B200 needs CUDA 12.8 or newer"),
    ((13,), (RTX,), {"without": ["libnccl.so.2", "libcudart.so.11.0"]},
     "libcudart.so.11.0, libnccl.so.2 not found")])
def test_problem_names_gpu_reason_and_command(installed, gpus, settings, reason, chosen):
    choice = chosen(installed, *gpus, **settings)
    assert reason in choice.problem
    assert "pip install '.[cu" in choice.problem


def test_newer_cuda_without_runtime_of_cuda_11_needs_that_alone(chosen):
    """As on Colab, whose CUDA 12 and PyTorch stay."""
    choice = chosen((12,), A100, without=["libcudart.so.11.0"])
    assert choice.problem.endswith(
        "libcudart.so.11.0 not found): pip install nvidia-cuda-runtime-cu11==11.8.89")


def test_unreadable_folders_have_no_libraries(tmp_path, monkeypatch):
    """As a folder of another user in LD_LIBRARY_PATH, which the linker skips."""
    def stat(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(libraries, "folders", lambda: [tmp_path])
    monkeypatch.setattr(os, "stat", stat)
    choice = libraries.choose(None)
    monkeypatch.undo()
    assert choice.cuda == 11


def test_libraries_come_from_the_folders_that_the_user_names_alone(tmp_path, monkeypatch):
    for folder, names in {"elsewhere": OF[11] + COMMON, "cuda": OF[12][:-1] + COMMON,
                          "cudnn": OF[12][-1:]}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "elsewhere"))
    assert libraries.choose(None).cuda == 11
    monkeypatch.setenv("GLUON_AMP_CUDA_LIBRARIES",
                       os.pathsep.join(str(tmp_path / name) for name in ("cuda", "cudnn")))
    choice = libraries.choose(None)
    assert choice.cuda == 12
    assert {path.parent for path in choice.paths.values()} == {tmp_path / "cuda",
                                                               tmp_path / "cudnn"}
    monkeypatch.setenv("GLUON_AMP_CUDA_LIBRARIES", "")
    assert libraries.choose(None).cuda == 11


def test_libraries_of_cuda_11_are_loaded_from_the_folder_that_the_user_names(tmp_path):
    """In its own process, whose libraries do not reach others."""
    compiled(tmp_path, "libcufft.so.10", "int here() { return 7; }")
    code = "import ctypes; from gluon_amp.cuda import libraries; " \
           "libraries.load(libraries.cuda_11()); print(ctypes.CDLL(None).here())"
    variables = {"PYTHONPATH": str(CUDA.parents[1]), "GLUON_AMP_CUDA_LIBRARIES": str(tmp_path)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], text=True,
                          capture_output=True, env={**os.environ, **variables})
    assert done.stdout == "7\n", done.stderr


def test_setting_that_names_no_folder_is_refused(tmp_path, monkeypatch):
    for value in (tmp_path / "absent", f"{tmp_path}{os.pathsep}{__file__}"):
        monkeypatch.setenv("GLUON_AMP_CUDA_LIBRARIES", str(value))
        with pytest.raises(ImportError, match=r"GLUON_AMP_CUDA_LIBRARIES.*no folder"):
            libraries.choose(None)


def test_why_says_what_was_not_chosen(chosen):
    before, _, after = chosen([13], H100).why.partition("not found")
    assert all(name in before for name in ("CUDA 11", *OF[11]))
    assert "CUDA 13 serves H100 (compute capability 9.0)" in after


# ---- functions that call a newer library

# cuDNN 9, as far as these tests call it. A function has 19 arguments here, of both kinds of
# registers and the stack.
CUDNN = """
static double sum;
const char* cudnnGetErrorString(int status) { return status == 3007 ? "ARCH of 9" : "text of 9"; }
size_t cudnnGetVersion(void) { return 92801; }
int cudnnSetStream(void* handle, void* stream) { return (int)(size_t)stream; }
int cudnnPoolingBackward(long a, long b, long c, long d, long e, long f, long g, long h,
    long i, long j, double x, long k, long l, long m, long n, long o, long p, double y, long q) {
  sum = a + 2*b + 3*c + 4*d + 5*e + 6*f + 7*g + 8*h + 9*i + 10*j + 11*k + 12*l + 13*m + 14*n
      + 15*o + 16*p + 17*q + x / 2 + y / 4;
  return 0;
}
double last_sum(void) { return sum; }
"""


def compiled(folder, name, source, *options):
    (folder / f"{name}.c").write_text(f"#include <stdlib.h>\n#include <string.h>\n{source}")
    subprocess.run(["gcc", "-shared", "-fPIC", *options, "-o", folder / name,
                    folder / f"{name}.c"], check=True)
    return folder / name


IN_EACH = """
const char* cudnnGetErrorString(int status) { return "text of 9"; }
size_t cudnnGetVersion(void) { return 91900; }
"""


def newer_library(folder, name, older, source):
    """The path of a newer library in C; functions that the source lacks return 0."""
    if older == "libcudnn.so.8" and "cudnnGetVersion(" not in source:
        source += IN_EACH
    written = re.findall(r"\b(\w+)\(", source)
    return compiled(folder, name, source + "".join(
        f"int {function.name}(void) {{ return 0; }}\n" for function in libraries.functions()
        if function.library == older and not function.removed and function.name not in written))


def forwarded(folder, source):
    """cuDNN 8's functions by those of a cuDNN 9 in C; and that one."""
    newer = newer_library(folder, "libcudnn.so.9", "libcudnn.so.8", source)
    library = ctypes.CDLL(shutil.copy(CUDA / "_libcudnn.so", folder / "libcudnn.so.8"))
    for function in (library.gluon_amp_forward_open, library.gluon_amp_forward_missing,
                     library.cudnnGetErrorString):
        function.restype = ctypes.c_char_p
    assert library.gluon_amp_forward_open(str(newer).encode()) is None
    return library, ctypes.CDLL(str(newer))


@pytest.fixture(scope="module")
def cudnn(tmp_path_factory):
    """cuDNN 8's functions by those of a cuDNN 9."""
    library, library.newer = forwarded(tmp_path_factory.mktemp("cudnn"), CUDNN)
    return library


def test_only_functions_that_cudnn_9_removed_are_missing(cudnn):
    removed = [function.name for function in libraries.functions() if function.removed]
    assert cudnn.gluon_amp_forward_missing().decode().split() == removed
    assert len(removed) == 12
    assert all(hasattr(cudnn, name) for name in removed)  # written in C++


def test_arguments_reach_newer_function(cudnn):
    words = [ctypes.c_long(2 ** i) for i in range(17)]
    cudnn.cudnnPoolingBackward(*words[:10], ctypes.c_double(3), *words[10:16],
                               ctypes.c_double(5), words[16])
    last = cudnn.newer.last_sum
    last.restype = ctypes.c_double
    assert last() == sum((i + 1) * 2 ** i for i in range(17)) + 3 / 2 + 5 / 4


@pytest.mark.parametrize(("of_9", "of_8"), [
    (0, 0), (1001, 1), (1002, 14), (1005, 10), (1006, 12), (1007, 13), (1008, 11), (2000, 3),
    (2001, 5), (2003, 3), (3000, 9), (3002, 9), (3007, 6), (3008, 11), (4000, 4), (4002, 4),
    (4003, 2), (4004, 2), (4006, 7), (5000, 8), (5003, 8)])
def test_status_codes_of_cudnn_9_become_those_of_8(of_9, of_8, cudnn):
    assert cudnn.cudnnSetStream(None, of_9) == of_8


def test_error_text_is_that_of_the_newer_library(cudnn):
    assert cudnn.cudnnGetErrorString(cudnn.cudnnSetStream(None, 3007)) == b"ARCH of 9"
    assert cudnn.cudnnGetErrorString(3) == b"CUDNN_STATUS_BAD_PARAM"
    assert cudnn.cudnnGetErrorString(0) == b"CUDNN_STATUS_SUCCESS"
    cudnn.cudnnGetVersion.restype = ctypes.c_size_t
    assert cudnn.cudnnGetVersion() == 92801


# cuDNN 9 with one layer of tanh, 7 inputs and 5 states in float16; `gap` elements are between its
# matrices and its biases. A tensor's descriptor is its shape. The function named `fails` fails.
RECURRENT = """
#define FAILS(name) if (!strcmp(fails, #name)) return 3000
char fails[99];
int gap, opened, settings[13];
int cudnnCreateTensorDescriptor(int** d) { *d = calloc(3, sizeof(int)); opened++; return 0; }
int cudnnDestroyTensorDescriptor(int* d) { free(d); opened--; return 0; }
int cudnnCreateRNNDataDescriptor(void** d) { FAILS(CreateRNNData); opened++; return 0; }
int cudnnDestroyRNNDataDescriptor(void* d) { opened--; return 0; }
int cudnnSetRNNDescriptor_v8(void* rnn, int a, int b, int c, int d, int e, int f, int g, int h,
                             int i, int j, int k, int l, void* dropout, unsigned flags) {
  int all[13] = {a, b, c, d, e, f, g, h, i, j, k, l, flags};
  memcpy(settings, all, sizeof all);
  return 0;
}
int cudnnGetRNNDescriptor_v8(void* rnn, int* a, int* b, int* c, int* d, int* e, int* f, int* g,
                             int* h, int* i, int* j, int* k, int* l, void** dropout, int* flags) {
  int* all[13] = {a, b, c, d, e, f, g, h, i, j, k, l, flags};
  for (int n = 0; n < 13; n++) *all[n] = settings[n];
  return 0;
}
int cudnnGetTensorNdDescriptor(int* d, int wanted, int* type, int* count, int* dims, int* steps) {
  FAILS(GetTensorNd);
  *type = 2;
  *count = 3;
  memcpy(dims, d, 3 * sizeof(int));
  return 0;
}
int cudnnSetRNNDataDescriptor(void* d, int type, int layout, int steps, int batch, int width,
                              const int* lengths, void* padding) {
  FAILS(SetRNNData);
  return 3000 * (type != 2 || layout == settings[12] || batch != 4 || width != 7
                 || lengths[3] != 6);
}
int cudnnGetRNNTempSpaceSizes(void* handle, void* rnn, int training, void* x, size_t* work,
                              size_t* reserve) {
  FAILS(GetRNNTempSpaceSizes);
  *work = training ? 90 : 101;
  *reserve = training ? 55 : 0;
  return 0;
}
int cudnnGetRNNWeightSpaceSize(void* handle, void* rnn, size_t* bytes) {
  *bytes = 2 * (70 + gap);
  return 0;
}
int cudnnGetRNNWeightParams(void* handle, void* rnn, int layer, size_t bytes, char* weights,
                            int gate, int* m, void** matrix, int* b, void** bias) {
  int shape[3] = {1, 5, gate ? 5 : 7}, of_bias[3] = {1, 5, 1};
  FAILS(GetRNNWeightParams);
  memcpy(m, shape, sizeof shape);
  memcpy(b, of_bias, sizeof of_bias);
  *matrix = weights + gate * 70;
  *bias = weights + 120 + 2 * gap + gate * 10;
  return 0;
}
"""


TANH, BIASES, HALF, TENSOR_OP = 1, 2, 2, 1  # cuDNN's numbers


@pytest.fixture()
def recurrent(tmp_path):
    """cuDNN 8's functions by those of a cuDNN 9 with recurrent layers; and variables of that."""
    return forwarded(tmp_path, RECURRENT)


def configured(library, padded=0):
    """The status of each function that MXNet calls before the first forward pass, and the sizes of
    the workspace, the reserve space and the weights."""
    x, sizes = (ctypes.c_int * 3)(4, 7, 1), [ctypes.c_size_t() for _ in range(3)]
    steps = (ctypes.c_void_p * 6)(*[ctypes.addressof(x)] * 6)
    return [library.cudnnSetRNNDescriptor_v6(None, None, 5, 1, None, 0, 0, 1, 0, 0),
            library.cudnnSetRNNMatrixMathType(None, 0),
            library.cudnnSetRNNPaddingMode(None, padded),
            library.cudnnGetRNNWorkspaceSize(None, None, 6, steps, ctypes.byref(sizes[0])),
            library.cudnnGetRNNTrainingReserveSize(None, None, 6, steps, ctypes.byref(sizes[1])),
            library.cudnnGetRNNParamsSize(None, None, x, ctypes.byref(sizes[2]), 2)], \
        [size.value for size in sizes]


@pytest.mark.parametrize("padded", [0, 1])
def test_recurrent_layer_is_configured_for_cudnn_9(padded, recurrent):
    library, newer = recurrent
    statuses, sizes = configured(library, padded)
    assert (statuses, sizes) == ([0] * 6, [104, 55, 140])  # the workspace: whole elements of it
    algorithm = direction = linear = single = 0
    assert [*(ctypes.c_int * 13).in_dll(newer, "settings")] == [
        algorithm, TANH, BIASES, direction, linear, HALF, single, TENSOR_OP, 7, 5, 5, 1, padded]
    assert ctypes.c_int.in_dll(newer, "opened").value == 0


def test_other_order_of_weights_is_refused(recurrent):
    library, newer = recurrent
    ctypes.c_int.in_dll(newer, "gap").value = 3
    statuses, _ = configured(library)
    assert statuses == [0] * 5 + [9]
    assert b"weights of recurrent layers in another order" in library.cudnnGetErrorString(9)
    assert ctypes.c_int.in_dll(newer, "opened").value == 0


@pytest.mark.parametrize(("name", "failing"), [
    ("CreateRNNData", {3, 4}), ("SetRNNData", {3, 4}), ("GetRNNTempSpaceSizes", {3, 4}),
    ("GetTensorNd", {3, 4, 5}), ("GetRNNWeightParams", {5})])
def test_errors_of_cudnn_9_are_returned_and_leave_no_descriptor(name, failing, recurrent):
    library, newer = recurrent
    (ctypes.c_char * 99).in_dll(newer, "fails").value = name.encode()
    statuses, _ = configured(library)
    assert statuses == [9 if i in failing else 0 for i in range(6)]
    assert library.cudnnGetErrorString(9) == b"text of 9"
    assert ctypes.c_int.in_dll(newer, "opened").value == 0


# cuDNN 9 with batch norms. A descriptor has a type, a format and a shape. `called` has the name of
# the function that computes, and `described` the descriptor of x.
NORMS = """
typedef int Tensor[6];
size_t reserve, space = 64;
int opened, refuses;
char called[99];
Tensor described;
int cudnnCreateTensorDescriptor(Tensor** d) { *d = calloc(1, sizeof(Tensor)); opened++; return 0; }
int cudnnDestroyTensorDescriptor(Tensor* d) { free(d); opened--; return 0; }
int cudnnSetTensor4dDescriptor(Tensor d, int format, int type, int n, int c, int h, int w) {
  Tensor set = {type, format, n, c, h, w};
  memcpy(d, set, sizeof set);
  return 0;
}
int cudnnGetTensorNdDescriptor(Tensor d, int wanted, int* type, int* count, int* dims, int* steps) {
  int n = d[4] * d[5], c = d[3];
  int nchw[4] = {c * n, n, d[5], 1}, nhwc[4] = {c * n, 1, c * d[5], c};
  *type = d[0];
  *count = 4;
  memcpy(dims, d + 2, sizeof nchw);
  memcpy(steps, d[1] ? nhwc : nchw, sizeof nchw);
  return 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void* handle, int mode, int operation,
                                                         void* activation, void* x, size_t* n) {
  *n = reserve;
  return 0;
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void* handle, int mode, int operation, void* x, void* z, void* y, void* p, void* a, size_t* n) {
  *n = space;
  return 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    void* handle, int mode, int operation, void* x, void* y, void* dy, void* dz, void* dx, void* p,
    void* activation, size_t* n) {
  *n = 2 * space;
  return 0;
}
static int call(const char* name, Tensor x) {
  strcpy(called, name);
  memcpy(described, x, sizeof(Tensor));
  return refuses && strstr(name, "Ex") ? refuses : 0;
}
int cudnnBatchNormalizationForwardInference(void* handle, int mode, void* a, void* b, Tensor x) {
  return call("Inference", x);
}
int cudnnBatchNormalizationForwardTraining(void* handle, int mode, void* a, void* b, Tensor x) {
  return call("Training", x);
}
int cudnnBatchNormalizationForwardTrainingEx(void* handle, int mode, int operation, void* a,
                                             void* b, Tensor x) {
  return call("TrainingEx", x);
}
int cudnnBatchNormalizationBackward(void* handle, int mode, void* a, void* b, void* c, void* d,
                                    Tensor x) {
  return call("Backward", x);
}
int cudnnBatchNormalizationBackwardEx(void* handle, int mode, int operation, void* a, void* b,
                                      void* c, void* d, Tensor x) {
  return call("BackwardEx", x);
}
"""
RUNTIME = """
int allocations, full;
int cudaMalloc(void** p, size_t bytes) {
  if (full) return 2;
  allocations++;
  *p = malloc(bytes);
  return 0;
}
int cudaFree(void* p) { allocations--; free(p); return 0; }
int cudaGetLastError(void) { return 2; }
int device, driver, measured;
float milliseconds[8];  // of measurements, in order
int cudaGetDevice(int* d) { *d = device; return 0; }
int cudaDriverGetVersion(int* version) { *version = driver; return 0; }
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) { return 0; }
int cudaStreamSynchronize(void* stream) { return 0; }
int cudaEventCreate(void** event) { *event = malloc(1); return 0; }
int cudaEventDestroy(void* event) { free(event); return 0; }
int cudaEventRecord(void* event, void* stream) { return 0; }
int cudaEventSynchronize(void* event) { return 0; }
int cudaEventElapsedTime(float* ms, void* a, void* b) { *ms = milliseconds[measured++]; return 0; }
"""
NCHW, NHWC, FLOAT, SPATIAL, PERSISTENT, EXECUTION_FAILED = 0, 1, 0, 1, 2, 8  # cuDNN's numbers


@pytest.fixture(scope="module")
def cudart(tmp_path_factory):
    """A CUDA runtime as far as cuDNN's workspaces need it; it stays loaded."""
    path = compiled(tmp_path_factory.mktemp("cudart"), "libcudart.so.11.0", RUNTIME,
                    "-Wl,-soname,libcudart.so.11.0")
    return ctypes.CDLL(str(path))


@pytest.fixture()
def norms(tmp_path, cudart):
    """A function that calls a batch norm of cuDNN 8 and returns its status, what cuDNN 9 then
    called, and its description of x; the older library, the newer one; and the CUDA runtime."""
    library, newer = forwarded(tmp_path, NORMS)

    def norm(part, shape, dtype=HALF, mode=PERSISTENT, handle=1, saved=7, same=True):
        handle, x = ctypes.c_void_p(handle), (ctypes.c_int * 6)(dtype, NCHW, *shape)
        other = x if same else (ctypes.c_int * 6)(dtype, NCHW, *shape)
        some, double = ctypes.c_void_p(1), ctypes.c_double(0.5)
        saved = ctypes.c_void_p(saved)
        status = {
            "Inference": lambda: library.cudnnBatchNormalizationForwardInference(
                handle, mode, *[some] * 2, x, some, other, *[some] * 6, double),
            "Training": lambda: library.cudnnBatchNormalizationForwardTraining(
                handle, mode, *[some] * 2, x, some, other, *[some] * 4, double, *[some] * 2, double,
                saved, saved),
            "Backward": lambda: library.cudnnBatchNormalizationBackward(
                handle, mode, *[some] * 4, x, some, other, some, other, *[some] * 5, double, saved,
                saved)}[part]()
        assert ctypes.c_int.in_dll(newer, "opened").value == 0
        called = (ctypes.c_char * 99).in_dll(newer, "called").value.decode()
        return status, called, [*(ctypes.c_int * 6).in_dll(newer, "described")]

    yield norm, library, newer, cudart
    ctypes.c_int.in_dll(cudart, "full").value = 0


PARTS = ["Inference", "Training", "Backward"]
ROWS, AS_ROWS = (40, 8, 1, 1), [HALF, NHWC, 1, 8, 40, 1]  # a shape, and its description as NHWC


@pytest.mark.parametrize("part", PARTS)
def test_rows_of_channels_are_described_as_channels_last(part, norms):
    fast = part if part == "Inference" else f"{part}Ex"
    assert norms[0](part, ROWS) == (0, fast, AS_ROWS)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("shape", "settings"), [
    ((40, 8, 2, 1), {}), ((40, 8, 1, 3), {}), (ROWS, {"dtype": FLOAT}), (ROWS, {"same": False})])
def test_other_data_is_described_as_before(part, shape, settings, norms):
    dtype = settings.get("dtype", HALF)
    assert norms[0](part, shape, **settings) == (0, part, [dtype, NCHW, *shape])


@pytest.mark.parametrize("part", PARTS[1:])
@pytest.mark.parametrize("reason", ["mode", "reserve", "no workspace", "memory", "bad parameter",
                                    "refused"])
def test_norm_without_fast_kernels_computes_as_before(part, reason, norms):
    norm, _, newer, cudart = norms
    if reason == "reserve":
        ctypes.c_size_t.in_dll(newer, "reserve").value = 8
    elif reason == "no workspace":
        ctypes.c_size_t.in_dll(newer, "space").value = 0
    elif reason == "memory":
        ctypes.c_int.in_dll(cudart, "full").value = 1
    elif reason in ("bad parameter", "refused"):
        ctypes.c_int.in_dll(newer, "refuses").value = 2000 if reason == "bad parameter" else 3000
    mode = SPATIAL if reason == "mode" else PERSISTENT
    assert norm(part, ROWS, mode=mode) == (0, part, AS_ROWS)


def test_gradients_of_a_prediction_have_no_saved_mean(norms):
    assert norms[0]("Backward", ROWS, saved=None) == (0, "Backward", AS_ROWS)


def test_errors_of_fast_kernels_are_returned(norms):
    ctypes.c_int.in_dll(norms[2], "refuses").value = 5003
    assert norms[0]("Training", ROWS)[:2] == (EXECUTION_FAILED, "TrainingEx")


def test_workspaces_of_a_handle_stay_until_it_is_destroyed(norms):
    """A CUDA graph may have the address of the smaller one, which the forward pass allocates."""
    norm, library, newer, cudart = norms
    ctypes.c_size_t.in_dll(newer, "space").value = 12 << 20  # bytes, and twice as many backward
    allocations = ctypes.c_int.in_dll(cudart, "allocations")
    before = allocations.value
    for handle in (1, 2, 1):
        for part in ("Training", "Backward", "Training"):
            norm(part, ROWS, handle=handle)
    assert allocations.value == before + 4
    for handle in (1, 2):
        assert library.cudnnDestroy(ctypes.c_void_p(handle)) == 0
    assert allocations.value == before


# cuDNN 9 with convolutions by plans, of which a heuristic lists two. A handle has the number of its
# device, and a tensor's descriptor its shape. `ran` has the place in that list, the device of the
# plan, and that of the handle; the place is -1 for the function that MXNet calls.
CONVOLUTIONS = """
enum { CONFIGURATION = 3, PLAN = 5 };
typedef struct { int kind, place, device; } Descriptor;
int plans, ran[3];
int cudnnGetStream(int* handle, void** stream) { *stream = 0; return 0; }
int cudnnGetTensorNdDescriptor(int* d, int wanted, int* type, int* count, int* dims, int* steps) {
  int nhwc[4] = {d[1] * d[2] * d[3], 1, d[1] * d[3], d[1]};
  *type = 2;
  *count = 4;
  memcpy(dims, d, sizeof nhwc);
  memcpy(steps, nhwc, sizeof nhwc);
  return 0;
}
int cudnnGetFilterNdDescriptor(int* d, int wanted, int* type, int* format, int* count, int* dims) {
  *type = 2;
  *format = 1;
  *count = 4;
  memcpy(dims, d, 4 * sizeof(int));
  return 0;
}
int cudnnGetConvolutionNdDescriptor(void* d, int wanted, int* count, int* pads, int* strides,
                                    int* dilations, int* mode, int* type) {
  *count = 2;
  *mode = 1;
  *type = 0;
  for (int i = 0; i < 2; i++) pads[i] = 0, strides[i] = dilations[i] = 1;
  return 0;
}
int cudnnGetConvolutionMathType(void* d, int* math) { *math = 1; return 0; }
int cudnnBackendCreateDescriptor(int kind, Descriptor** d) {
  *d = calloc(1, sizeof(Descriptor));
  (*d)->kind = kind;
  plans += kind == PLAN;
  return 0;
}
int cudnnBackendDestroyDescriptor(Descriptor* d) { plans -= d->kind == PLAN; free(d); return 0; }
int cudnnBackendFinalize(Descriptor* d) { return 0; }
int cudnnBackendSetAttribute(Descriptor* d, int attribute, int type, long count, void** value) {
  if (attribute == 400) d->device = *(int*)*value;
  if (attribute == 401) d->place = ((Descriptor*)*value)->place;
  return 0;
}
int cudnnBackendGetAttribute(Descriptor* d, int attribute, int type, long wanted, long* count,
                             void* value) {
  *count = attribute == 202 ? 2 : 1;
  if (attribute == 402) *(long*)value = 1000;
  else if (value) for (int i = 0; i < 2; i++) ((Descriptor**)value)[i]->place = i;
  return 0;
}
static int run(int place, int of_plan, int* handle) {
  ran[0] = place, ran[1] = of_plan, ran[2] = *handle;
  return 0;
}
int cudnnBackendExecute(int* handle, Descriptor* plan, void* pack) {
  return run(plan->place, plan->device, handle);
}
int cudnnConvolutionForward(int* handle) { return run(-1, *handle, handle); }
int cudnnConvolutionBackwardBias(int* handle) { return run(-1, *handle, handle); }
"""
# `multiplied` has the devices of the handle and of the call.
CUBLAS = """
int cudaGetDevice(int* device);
typedef struct { int device, math; } Blas;
int handles, math, multiplied[2];
int cublasCreate_v2(Blas** made) {
  *made = calloc(1, sizeof(Blas));
  handles++;
  return cudaGetDevice(&(*made)->device);
}
int cublasDestroy_v2(Blas* blas) { handles--; free(blas); return 0; }
int cublasSetMathMode(Blas* blas, int mode) { blas->math = mode; return 0; }
int cublasSetStream_v2(Blas* blas, void* stream) { return 0; }
int cublasGemmEx(Blas* blas) {
  multiplied[0] = blas->device;
  math = blas->math;
  return cudaGetDevice(multiplied + 1);
}
"""
DISALLOW_REDUCED_PRECISION_REDUCTION = 16  # cuBLAS's number


@pytest.fixture(scope="module")
def cublas(tmp_path_factory, cudart):
    """cuBLAS as far as sums of biases need it; it stays loaded."""
    path = compiled(tmp_path_factory.mktemp("cublas"), "libcublas.so.11", CUBLAS,
                    "-Wl,-soname,libcublas.so.11,--no-as-needed", cudart._name)
    return ctypes.CDLL(str(path))


class Convolutions:
    """cuDNN 8's functions by those of a cuDNN 9 with plans."""

    def __init__(self, folder, cudart, cublas):
        self.library, self.newer = forwarded(folder, CONVOLUTIONS)
        self.cudart, self.cublas = cudart, cublas
        for name in ("device", "measured"):
            ctypes.c_int.in_dll(cudart, name).value = 0

    def number(self, name, of=None):
        return ctypes.c_int.in_dll(of or self.newer, name).value

    def times(self, *milliseconds):
        """Sets the times of the next measurements."""
        values = (ctypes.c_float * 8).in_dll(self.cudart, "milliseconds")
        begin = self.number("measured", self.cudart)
        values[begin:begin + len(milliseconds)] = milliseconds

    def handle(self, device, at=None):
        """A handle of a device, which the thread selects; at the address of a destroyed one."""
        ctypes.c_int.in_dll(self.cudart, "device").value = device
        made = at or ctypes.c_int()
        made.value = device
        return made

    def run(self, handle):
        """Runs a convolution; returns the plan's place and device, and the handle's device."""
        shape, some = (ctypes.c_int * 4)(2, 16, 4, 4), ctypes.c_void_p(4096)
        one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
        assert self.library.cudnnConvolutionForward(
            ctypes.byref(handle), one, shape, some, (ctypes.c_int * 4)(16, 16, 1, 1), some, some, 0,
            None, ctypes.c_size_t(0), zero, shape, some) == 0
        return [*(ctypes.c_int * 3).in_dll(self.newer, "ran")]

    def add_rows(self, handle):
        """Runs the gradient of a bias; returns the devices of cuBLAS's handle and of the call."""
        shape, some = (ctypes.c_int * 4)(2, 16, 4, 4), ctypes.c_void_p(4096)
        one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
        assert self.library.cudnnConvolutionBackwardBias(
            ctypes.byref(handle), one, shape, some, zero, shape, some) == 0
        return [*(ctypes.c_int * 2).in_dll(self.cublas, "multiplied")]

    def destroy(self, handle):
        assert self.library.cudnnDestroy(ctypes.byref(handle)) == 0


@pytest.fixture()
def convolutions(tmp_path, cudart, cublas):
    return Convolutions(tmp_path, cudart, cublas)


def test_handle_at_the_address_of_a_destroyed_one_shares_nothing(convolutions):
    """MXNet destroys its handles at each fork; later ones have their addresses, on other GPUs."""
    allocations = convolutions.number("allocations", convolutions.cudart)
    handle = convolutions.handle(0)
    convolutions.run(handle)
    convolutions.add_rows(handle)
    ones = 1  # of a GPU, which stay
    convolutions.destroy(handle)
    assert convolutions.number("plans") == convolutions.number("handles", convolutions.cublas) == 0
    assert convolutions.number("allocations", convolutions.cudart) == allocations + ones
    handle = convolutions.handle(1, at=handle)
    assert convolutions.run(handle)[1:] == [1, 1]
    assert convolutions.add_rows(handle) == [1, 1]
    convolutions.destroy(handle)


def test_cuda_graphs_keep_what_a_destroyed_handle_had(convolutions, monkeypatch):
    monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", "true")
    before = [convolutions.number(name, of) for name, of in (
        ("allocations", convolutions.cudart), ("handles", convolutions.cublas))]
    handle = convolutions.handle(0)
    convolutions.run(handle)
    convolutions.add_rows(handle)
    convolutions.destroy(handle)
    workspace = ones = products = 1
    assert convolutions.number("plans") == 1
    assert [convolutions.number(name, of) for name, of in (
        ("allocations", convolutions.cudart), ("handles", convolutions.cublas))] == \
        [before[0] + workspace + ones, before[1] + products]
    handle = convolutions.handle(1, at=handle)
    assert convolutions.run(handle)[1:] == convolutions.add_rows(handle) == [1, 1]


def test_threads_of_a_gpu_run_the_same_plan(convolutions):
    """Each has a handle. Other plans could round differently."""
    convolutions.times(5, 3)
    first, second = (convolutions.handle(0) for _ in range(2))
    assert convolutions.run(first) == [1, 0, 0]
    convolutions.times(3, 5)
    assert [convolutions.run(each) for each in (second, first)] == [[1, 0, 0]] * 2
    convolutions.destroy(first)
    assert convolutions.run(convolutions.handle(0, at=first)) == [1, 0, 0]
    assert convolutions.number("measured", convolutions.cudart) == 2
    assert convolutions.run(convolutions.handle(1)) == [0, 1, 1]  # of another GPU, measured


def test_sums_of_biases_are_added_in_float32(convolutions):
    convolutions.add_rows(convolutions.handle(0))
    assert convolutions.number("math", convolutions.cublas) == DISALLOW_REDUCED_PRECISION_REDUCTION


@pytest.mark.parametrize(("name", "value", "plan"), [
    ("ENFORCE_DETERMINISM", "1", False), ("ENFORCE_DETERMINISM", "true", False),
    ("ENFORCE_DETERMINISM", "False", True), ("ENFORCE_DETERMINISM", "", True),
    ("CUDA_ALLOW_TENSOR_CORE", "0", False), ("CUDA_ALLOW_TENSOR_CORE", "FALSE", False),
    ("CUDA_ALLOW_TENSOR_CORE", "True", True), ("CUDA_ALLOW_TENSOR_CORE", "", True)])
def test_settings_of_mxnet_select_its_convolutions(name, value, plan, convolutions, monkeypatch):
    monkeypatch.setenv(f"MXNET_{name}", value)
    assert (convolutions.run(convolutions.handle(0))[0] >= 0) is plan


@pytest.mark.parametrize(("value", "place"), [("0", 0), ("1", 1), ("2", 1), ("", 1)])
def test_search_of_plans_follows_setting_of_mxnet(value, place, convolutions, monkeypatch):
    monkeypatch.setenv("MXNET_CUDNN_AUTOTUNE_DEFAULT", value)
    convolutions.times(5, 3)
    assert convolutions.run(convolutions.handle(0))[0] == place


NVRTC = """
static char options[1000];
int nvrtcGetNumSupportedArchs(int* n) { *n = 3; return 0; }
int nvrtcGetSupportedArchs(int* archs) { archs[0] = 75; archs[1] = 90; archs[2] = 120; return 0; }
int nvrtcCompileProgram(void* program, int n, const char* const* given) {
  options[0] = 0;
  for (int i = 0; i < n; i++) strcat(strcat(options, given[i]), " ");
  return 7;
}
const char* last_options(void) { return options; }
"""


@pytest.mark.parametrize(("arch", "becomes"), [(90, 90), (103, 90), (120, 120), (121, 120),
                                               (70, 70)])
def test_fused_kernels_compile_with_options_that_newer_nvrtc_has(arch, becomes, tmp_path):
    newer = newer_library(tmp_path, "libnvrtc.so.13", "libnvrtc.so.11.2", NVRTC)
    code = f"""
        import ctypes
        library = ctypes.CDLL({str(CUDA / "_libnvrtc.so")!r})
        library.gluon_amp_forward_open({str(newer).encode()!r})
        options = (ctypes.c_char_p * 3)(b"--gpu-architecture=compute_{arch}", b"--std=c++11", b"-G")
        assert library.nvrtcCompileProgram(None, 3, options) == 7
        last = ctypes.CDLL({str(newer)!r}).last_options
        last.restype = ctypes.c_char_p
        print(last().decode())"""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True,
                          text=True)
    assert done.stdout.split() == [f"--gpu-architecture=compute_{becomes}", "--std=c++17", "-G"], \
        done.stderr


PTX = r"""
char version[9];
int nvrtcGetPTX(void* program, char* text) {
  strcat(strcat(strcpy(text, "// Generated by NVIDIA NVVM Compiler\n\n.version "), version),
         "\n.target sm_90\n");
  return 0;
}
"""


@pytest.mark.parametrize(("nvrtc", "driver", "becomes"), [
    ("9.2", 13000, "9.0"), ("9.0", 13000, "9.0"), ("9.0", 13020, "9.0"), ("8.8", 12060, "8.5"),
    ("8.8", 12080, "8.7"), ("8.4", 12000, "8.0"), ("7.8", 11020, "7.2"), ("9.2", 0, "9.2")])
def test_fused_kernels_compile_for_the_driver(nvrtc, driver, becomes, tmp_path, cudart):
    """A driver refuses PTX of a newer NVRTC, also of its own CUDA's major version."""
    newer = newer_library(tmp_path, "libnvrtc.so.13", "libnvrtc.so.11.2", PTX)
    library = ctypes.CDLL(shutil.copy(CUDA / "_libnvrtc.so", tmp_path / "libnvrtc.so.11.2"))
    library.gluon_amp_forward_open(str(newer).encode())
    (ctypes.c_char * 9).in_dll(ctypes.CDLL(str(newer)), "version").value = nvrtc.encode()
    ctypes.c_int.in_dll(cudart, "driver").value = driver
    text = ctypes.create_string_buffer(200)
    assert library.nvrtcGetPTX(None, text) == 0
    assert text.value.decode().splitlines()[2:] == [f".version {becomes}", ".target sm_90"]


def test_library_without_a_needed_function_is_refused(tmp_path):
    newer = compiled(tmp_path, "libcufft.so.12", "int cufftDestroy(int plan) { return 0; }")
    with pytest.raises(ImportError, match=r"libcufft\.so\.12 lacks functions that MXNet calls: "
                                          "cufftExecC2C, cufftPlanMany"):
        libraries._forward("libcufft.so.10", newer)
    with pytest.raises(ImportError, match=r"does not load: .*absent\.so"):
        libraries._forward("libcufft.so.10", tmp_path / "absent.so")


# ---- kernels for GPUs that the wheel does not serve

def test_other_builds_of_mxnet_are_named():
    found = Devices([A100, H100], "580.1", 13000)
    packs, path, (problem,) = load._kernels(found, "mxnet-cu117, /site/mxnet/libmxnet.so")
    assert (packs, path) == ([], None)
    for fact in ("H100 (compute capability 9.0)", "mxnet-cu112 1.9.1",
                 "Installed: mxnet-cu117, /site/mxnet/libmxnet.so"):
        assert fact in problem
    assert "A100" not in problem
    served_or_too_old = Devices([A100, GPU("K80", 37, "GPU-K80")], "580.1", 13000)
    assert load._kernels(served_or_too_old, "mxnet-cu117") == ([], None, [])


def test_build_id_identifies_a_library(tmp_path):
    library = wheel.library()
    notes = subprocess.run(["readelf", "-n", library], capture_output=True, text=True, check=True)
    found = wheel.build_id(library)
    assert f"Build ID: {found}" in notes.stdout
    assert found != wheel.BUILD_ID
    for content in (b"", b"\x7fELF", b"text" * 100):
        (tmp_path / "libmxnet.so").write_bytes(content)
        assert wheel.build_id(tmp_path / "libmxnet.so") is None


def test_mxnet_must_not_be_imported_before():
    packs, path, (problem,) = load._kernels(Devices([H100], "580.1", 13000), "")
    assert (packs, path) == ([], None)
    assert "H100 (compute capability 9.0)" in problem
    assert "import gluon_amp first" in problem


def test_cpu_builds_prepare_nothing():
    load.prepare(["mxnet"])
    assert load.prepared is None
