"""The software GPU of this process, and its log.

A process with the variables of `environment` has one. Each line of its log is a `Call`; marks
divide them into sections.
"""
import ctypes
import json
import os
import re

import gluon_amp  # noqa: F401  (before mxnet)
import mxnet as mx

# Library functions that compute, without those that create and configure handles.
_COMPUTES = re.compile(r"(cudnn|cublas|cusolverDn|cufftExec|ncclReduce|ncclBcast)"
                       r"(?!.*(Create|Destroy|Set|Restore|_bufferSize|Plan))")
_PRODUCT = re.compile(r"cudnnConvolution(Forward|BackwardData|BackwardFilter)|cudnnRNN|"
                      r"cublas.*[gG]emm")
_HALF, _FLOAT = re.compile("half_t|__half"), re.compile(r"\bfloat\b")


class Call:
    """A line of the log: a kernel launch or a library call."""

    def __init__(self, record):
        self.record = record
        self.name = record["call"]

    @property
    def kernel(self):
        """The kernel's C++ name; "" for other calls."""
        return self.record.get("name", "") if self.name == "kernel" else ""

    @property
    def operator(self):
        """The calling function of MXNet, without namespaces."""
        return re.sub(r"mxnet::|op::|mshadow::|<gpu>", "", self.record["op"])

    @property
    def is_launch(self):
        return self.name == "kernel" or bool(_COMPUTES.match(self.name))

    @property
    def is_cast(self):
        """Whether it only converts the type of values."""
        return "TypecastExp" in self.kernel

    @property
    def is_product(self):
        return bool(_PRODUCT.match(self.name))

    @property
    def is_synchronization(self):
        """Whether the host synchronizes with the GPU."""
        return self.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize")

    @property
    def is_copy_to_host(self):
        return self.record.get("way") == "D2H"

    @property
    def factors(self):
        """The type of a product's inputs."""
        tensor = self.record.get("x") or self.record.get("dy") or self.record.get("y")
        return self.record["A"] if tensor is None else tensor["type"]

    @property
    def sums(self):
        """The type in which a product accumulates."""
        return self.record["compute"]

    @property
    def on_tensor_cores(self):
        """Whether a float16 product may use Tensor Cores and accumulates in float32."""
        return self.is_product and self.factors == "half" and self.sums == "float" and (
            self.record["math"].startswith("TENSOR_OP")
            or self.record.get("algorithm", -1) >= 99)  # CUBLAS_GEMM_DEFAULT_TENSOR_OP

    @property
    def adds_in_half(self):
        """Whether it accumulates in float16."""
        if self.is_product:
            return self.sums == "half"
        # matches up to the accumulation type; for an embedding it follows the type of loads
        found = re.search(r"reduce_kernel<.*?red::sum, \d+, [\w:]+|"
                          r"EmbeddingGradKernel<[\w:]+, [\w:]+|"
                          r"AddTakeGrad\w*<\w+, \d+, [\w:]+", self.kernel)
        return bool(found and _HALF.search(found.group(0)))

    @property
    def types(self):
        """The types of its arrays: half, float or both."""
        text = self.kernel or json.dumps(self.record)
        found = [name for name, pattern in (("half", _HALF), ("float", _FLOAT))
                 if pattern.search(text) or f'"{name}"' in text]
        return "+".join(found)

    def __str__(self):
        if self.kernel:
            name = re.sub(r"mxnet::op::|mxnet_op::|mshadow::|half::|\bvoid |cuda::|expr::", "",
                          self.kernel)
            return f"kernel {name}"
        said = {k: v for k, v in self.record.items()
                if k not in ("i", "thread", "device", "call", "op", "algorithm", "beta")}
        words = [f"{k}={v['type']}{v['dims']}" if isinstance(v, dict) else f"{k}={v}"
                 for k, v in said.items()]
        return " ".join([self.name, *words]).replace(" ", " ")


def active():
    """Whether this process has a software GPU."""
    return "RECORDING_GPU_COUNT" in os.environ


def _library():
    if not active():
        raise RuntimeError("this process has no software GPU: start it by "
                           "python tests/software_gpu")
    library = ctypes.CDLL("libcudart.so.11.0")
    for name in ("violations", "peak", "used", "kernels", "kernels_with_code"):
        getattr(library, f"recording_gpu_{name}").restype = ctypes.c_longlong
    return library


def mark(text):
    """Starts a section of the log after all pending operations."""
    mx.nd.waitall()
    _library().recording_gpu_mark(text.encode())


def violations():
    """Returns the number of calls that a GPU would have refused."""
    mx.nd.waitall()
    return int(_library().recording_gpu_violations())


def peak(device=0):
    """Returns the peak of a GPU's memory in bytes."""
    mx.nd.waitall()
    return int(_library().recording_gpu_peak(device))


def begin_peak(device=0):
    """Resets the peak of a GPU's memory."""
    mx.nd.waitall()
    _library().recording_gpu_begin_peak(device)


def pretend(kernel, argument, value, count=1):
    """Makes kernels with matching names write `count` floats to the array of an argument.

    -1 writes as many as the launch has blocks; 0 writes none.
    """
    mx.nd.waitall()
    _library().recording_gpu_poke(kernel.encode(), argument, ctypes.c_float(value), count)


def pretend_finite(finite=True, kernel="GlobalReductionKernel"):
    """Makes sums of squares of gradients finite or infinite."""
    pretend(kernel, 2, 0.0 if finite else float("inf"), -1)


def position():
    """Returns the length of this process's log after all pending operations."""
    mark("")
    return os.path.getsize(os.environ["RECORDING_GPU_LOG"])


def calls(since=0, path=None):
    """Yields the calls after a position in a log, by default this process's."""
    with open(path or os.environ["RECORDING_GPU_LOG"], encoding="utf-8", errors="replace") as lines:
        lines.seek(since)
        for line in lines:
            if not line.endswith("\n"):  # the process is still writing it
                break
            yield Call(json.loads(line, strict=False))


def sections(path=None):
    """Returns the calls of each section of a log, by default this process's."""
    found = {}
    name = "start"
    for call in calls(path=path):
        if call.name == "MARK":
            name = call.record["text"]
        else:
            found.setdefault(name, []).append(call)
    return found
