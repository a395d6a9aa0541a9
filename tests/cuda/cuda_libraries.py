"""Compares NVIDIA's libraries of CUDA 11.8 and 13 as far as MXNet calls them. No GPU is needed.

    python tests/cuda/cuda_libraries.py FOLDER

FOLDER gets NVIDIA's wheels (3.7 GB) and their unpacked files. For each function that libmxnet.so
imports: it exists in both; its declarations in both versions' headers have the same types; and its
arguments fit what forward.cc copies. NVRTC 13 compiles a kernel with MXNet's options. cuDNN 9
stores the weights of recurrent layers in MXNet's order.
"""
import ctypes
import itertools
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

from gluon_amp.cuda import libraries

OLD = ["nvidia-cuda-runtime-cu11==11.8.89", "nvidia-cublas-cu11==11.11.3.6",
       "nvidia-cudnn-cu11==8.9.6.50", "nvidia-cufft-cu11==10.9.0.58",
       "nvidia-cusolver-cu11==11.4.1.48", "nvidia-curand-cu11==10.3.0.86",
       "nvidia-cuda-nvrtc-cu11==11.8.89", "nvidia-cusparse-cu11==11.7.5.86",
       "nvidia-nvtx-cu11==11.8.86"]
NEW = ["nvidia-cuda-runtime>=13,<14", "nvidia-cublas>=13,<14", "nvidia-cudnn-cu13>=9,<10",
       "nvidia-cufft>=12,<13", "nvidia-cusolver>=12,<13", "nvidia-curand>=10,<11",
       "nvidia-cuda-nvrtc>=13,<14", "nvidia-cusparse>=12,<13", "nvidia-nvjitlink>=13,<14"]
IN_BOTH = ("libcublas.so.11", "libcusolver.so.11", "libcufft.so.10", "libcurand.so.10",
           "libnvrtc.so.11.2", "libcudnn.so.8")
LSTM = 2  # cudnnRNNMode_t
REGISTERS, COPIED = 6, 32  # words of arguments in registers, and on the stack: forward.cc
KERNEL = b'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'


def unpacked(folder, wheels):
    """The folder `nvidia` of some wheels; downloads them if it does not exist."""
    made = folder / "nvidia"
    if not made.exists():
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps",
                        "--only-binary", ":all:", "--dest", folder, *wheels], check=True)
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            wheel.unlink()
    return made


def opened(folder, name):
    return ctypes.CDLL(str(next(folder.glob(f"*/lib/{name}"))))


def declarations(folder):
    """The text of all headers without comments, and the macros that rename functions."""
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob(
        "*/include/*.h")) if re.match("cu(blas|dnn|solver|fft|rand)|nvrtc|nvTools", path.name))
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)


def signature(text, name):
    """The types of a function's result and parameters; None if no header declares it."""
    found = re.search(r"(\w+[\s*]+)(?:\w+API\s+|CUDNNWINAPI\s+|CURANDAPI\s+)?" + name
                      + r"\s*\(([^;{]*?)\)\s*;", text)
    if found is None:
        return None
    parameters = [part for part in found.group(2).split(",") if part.strip() not in ("", "void")]
    return tuple(map(canonical, [found.group(1), *(f"{part} " for part in parameters)]))


def canonical(declaration):
    """A type without the parameter's name, `const` and spaces; arrays are pointers."""
    arrays = declaration.count("[")
    words = re.findall(r"\w+|\*", re.sub(r"\[[^]]*\]", "", declaration))
    words = [word for word in words if word not in ("const", "struct", "enum")]
    types = [word for word in words if word != "*"]
    base = types[:-1] if len(types) > 1 and types[-1] not in ("int", "long", "char") else types
    return " ".join(base) + "*" * (words.count("*") + arrays)


def fused_kernel(folder):
    """Compiles with MXNet's options by NVRTC 13, through NVRTC 11.2's functions; returns PTX."""
    nvrtc = ctypes.CDLL(str(libraries._forwarder("libnvrtc.so.11.2")))
    nvrtc.gluon_amp_forward_open(str(next(folder.glob("*/lib/libnvrtc.so.13"))).encode())
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), KERNEL, b"twice.cu", 0, None, None)
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=compute_90", b"--std=c++11")
    assert nvrtc.nvrtcCompileProgram(program, 2, options) == 0
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, text)
    return text.value.decode()


def recurrent_weights(folder):
    """Configures recurrent layers by cuDNN 8's functions. The library compares the order of
    weights with MXNet's; their size is compared here. Returns the number of layers."""
    cudnn = ctypes.CDLL(str(libraries._forwarder("libcudnn.so.8")))
    cudnn.gluon_amp_forward_open(str(next(folder.glob("*/lib/libcudnn.so.9"))).encode())
    cudnn.cudnnGetErrorString.restype = ctypes.c_char_p
    handle = ctypes.create_string_buffer(1 << 20)  # cudnnCreate needs a GPU; these functions do not
    rnn, dropout, x = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    size = ctypes.c_size_t()

    def call(name, *arguments):
        status = getattr(cudnn, name)(*arguments)
        assert status == 0, f"{name}: {cudnn.cudnnGetErrorString(status).decode()}"

    call("cudnnCreateRNNDescriptor", ctypes.byref(rnn))
    call("cudnnCreateDropoutDescriptor", ctypes.byref(dropout))
    call("cudnnCreateTensorDescriptor", ctypes.byref(x))
    layers = 0
    for cell, ways, depth, (dtype, width), (inputs, hidden), projection in itertools.product(
            range(4), (1, 2), (1, 3), ((0, 4), (1, 8), (2, 2)), ((7, 5), (5, 5), (64, 32)),
            (None, 3)):
        if projection and cell != LSTM:
            continue
        gates, out = (1, 1, 4, 3)[cell], projection or hidden
        call("cudnnSetTensorNdDescriptor", x, dtype, 3, (ctypes.c_int * 3)(4, inputs, 1),
             (ctypes.c_int * 3)(inputs, 1, 1))
        call("cudnnSetRNNDescriptor_v6", handle, rnn, hidden, depth, dropout, 0, ways - 1, cell, 0,
             dtype % 2)
        call("cudnnSetRNNMatrixMathType", rnn, 0)
        if projection:
            call("cudnnSetRNNProjectionLayers", handle, rnn, projection, 0)
        call("cudnnSetRNNPaddingMode", rnn, 1)
        call("cudnnGetRNNParamsSize", handle, rnn, x, ctypes.byref(size), dtype)
        weights = sum(ways * (gates * hidden * ((out * ways if layer else inputs) + out + 2)
                              + (hidden * projection if projection else 0))
                      for layer in range(depth))
        assert size.value == weights * width
        layers += 1
    return layers


def main(folder):
    old, new = unpacked(folder / "cuda-11.8", OLD), unpacked(folder / "cuda-13", NEW)
    texts = declarations(old), declarations(new)
    counts, failed = Counter(), []
    for library in IN_BOTH:
        newer = libraries.REPLACED[13].get(library, library)
        of_11, of_13 = opened(old, library), opened(new, newer)
        for function in libraries.functions():
            if function.library != library:
                continue
            before, after = (signature(text, function.name) for text in texts)
            if not hasattr(of_11, function.name) or before is None:
                failed.append(f"{function.name}: not in CUDA 11.8")
            elif hasattr(of_13, function.name) == function.removed:
                failed.append(f"{function.name}: {'' if function.removed else 'not '}in {newer}")
            elif not function.removed and before != after:
                failed.append(f"{function.name}: {before} became {after}")
            elif len(before) - 1 > REGISTERS + COPIED:
                failed.append(f"{function.name}: {len(before) - 1} arguments")
            else:
                counts[f"{library} -> {newer}",
                       "removed" if function.removed else "same signature"] += 1
    for (pair, what), count in counts.items():
        print(f"{pair}: {count} {what}")
    print("\n".join(failed))
    assert ".target sm_90" in fused_kernel(new)
    print("NVRTC 13 compiles a fused kernel for 9.0")
    print(f"cuDNN 9 stores weights in MXNet's order: {recurrent_weights(new)} kinds of layers")
    sys.exit(bool(failed))


main(Path(sys.argv[1]))
