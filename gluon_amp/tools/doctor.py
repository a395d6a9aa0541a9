"""`gluon-amp doctor`: reports what float16 does on this machine.

Float16 trains here if one step succeeds on at least one device that MXNet supports; if not, the
reason is the error on the CPU.
"""
import ctypes
import os
import platform
from ctypes import byref
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import mxnet as mx
import numpy as np

from ..annotations import Context
from ..checks import aligned, counted, message, pip_install
from ..cpu import library
from ..cuda import load, wheel
from ..cuda.devices import GPU
from ..gluon.convert import convert
from ..training.trainer import Trainer
from ..version import __version__
from .layers import layers_of
from .layers import load as load_network

_DRIVER = "libcuda.so.1"
_TF32 = "NVIDIA_TF32_OVERRIDE"  # NVIDIA's libraries read it
_FEATURES = ("CUDA", "CUDNN", "NCCL", "MKLDNN", "ONEDNN", "OPENMP", "F16C", "CPU_AVX", "CPU_AVX2",
             "INT64_TENSOR_SIZE")
# Name, MXNet's default, and what the values do.
_VARIABLES = (
    ("MXNET_SAFE_ACCUMULATION", "0", "1: float16 sums accumulate in float32 (gluon_amp sets it)"),
    ("MXNET_CUDNN_AUTOTUNE_DEFAULT", "1",
     "cuDNN searches for its fastest algorithms; 1: in a limited workspace; 0: it does not"),
    ("MXNET_CUDA_ALLOW_TENSOR_CORE", "1", "1: GPUs use their Tensor Cores for float16"),
    (_TF32, "on", "0: float32 products do not use TF32, as they do on GPUs from A100 on"),
    ("MXNET_FC_TRUE_FP16", "0", "1: fully connected layers on GPUs accumulate in float16"),
    ("OMP_NUM_THREADS", "half", "half: of the logical CPUs, on x86"),
    ("GLUON_AMP_ISA", "best", "best: the fastest CPU kernels that this processor supports"))
_MOST_LAYERS = 10  # that are listed


class Step(NamedTuple):
    """A training step on a device: the device with its GPU, and the error, if any."""
    device: Context
    gpu: Optional[GPU]
    error: Optional[str]


# ---- GPUs

def is_served(gpu: GPU) -> bool:
    """Whether MXNet's CUDA build has kernels for a GPU: its own, or those of a pack in use."""
    packs = load.prepared.packs if load.prepared else ()
    return wheel.code_for(gpu.capability) is not None \
        or any(one.serves(gpu.capability) for one in packs)


def gpus() -> List[GPU]:
    """Returns the GPUs of the CUDA driver; raises OSError if it is missing or fails."""
    cuda = ctypes.CDLL(_DRIVER)

    def query(function: str, *arguments: Any) -> int:
        """Returns what a function of the driver writes to its first argument."""
        value = ctypes.c_size_t()  # or an int, in its first bytes
        status = getattr(cuda, function)(byref(value), *arguments)
        if status:
            raise OSError(f"the NVIDIA driver's {function} fails with error {status}")
        return value.value

    def gpu(number: int) -> GPU:
        device, name = query("cuDeviceGet", number), ctypes.create_string_buffer(100)
        cuda.cuDeviceGetName(name, len(name), device)
        major, minor = (query("cuDeviceGetAttribute", what, device) for what in (75, 76))
        return GPU(name.value.decode(), 10 * major + minor,
                   bytes=query("cuDeviceTotalMem_v2", device))

    status = cuda.cuInit(0)
    if status:
        raise OSError("the NVIDIA driver finds no GPU" if status == 100 else
                      f"the NVIDIA driver's cuInit fails with error {status}")
    return [gpu(number) for number in range(query("cuDeviceGetCount"))]


# ---- the examination

def examine(model: Optional[str] = None,
            image_shape: Tuple[int, ...] = (3, 224, 224)) -> Tuple[bool, str]:
    """Returns whether float16 trains here, and the report as text, conclusions first.

    Args:
        model: a network of MXNet's model zoo, or the file of an exported symbol.
    """
    network = [*_network(model, image_shape)] if model else []
    features = {feature.name for feature in mx.runtime.feature_list() if feature.enabled}
    why_none = ""
    found: List[GPU] = []
    try:
        found = gpus()
    except OSError as error:
        missing = f"no NVIDIA driver ({_DRIVER}) is installed"
        why_none = missing if _DRIVER in str(error) else str(error)
    steps = [Step(mx.gpu(i), gpu, _error_of_a_step(mx.gpu(i))) for i, gpu in enumerate(found)
             if "CUDA" in features and is_served(gpu)]
    steps.append(Step(mx.cpu(), None, _error_of_a_step(mx.cpu())))
    lines = [_conclusion(steps), *_notes(found, steps, "CUDA" in features), "",
             *aligned(_machine(found, why_none, features)), "", *aligned(_environment()), *network]
    return any(step.error is None for step in steps), "\n".join(lines)


def _error_of_a_step(device: Context) -> Optional[str]:
    """Trains a float16 layer for one step; returns the error, or None."""
    try:
        net = mx.gluon.nn.Dense(8, in_units=8)
        net.initialize(mx.init.One(), ctx=device)
        convert(net)
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, loss_scale=128)
        with mx.autograd.record():
            loss = net(mx.nd.ones((8, 8), ctx=device)).mean()
        trainer.backward(loss)
        trainer.step(1)
        weight = net.weight.data().asnumpy()
    except Exception as error:  # any error is the result
        return message(error)
    right = 1 - 0.5 / 8  # the gradient of each weight is 1/8
    if weight.dtype != np.float16 or (weight != right).any():
        return f"a training step gives a {weight.dtype} weight of {weight.flat[0]}. Expected: " \
               f"a float16 weight of {right}"
    return None


def _conclusion(steps: Sequence[Step]) -> str:
    where = [f"{device} ({gpu.name}, {'' if gpu.tensor_cores else 'no '}Tensor Cores)" if gpu else
             f"the CPU ({library.load()} kernels)" for device, gpu, error in steps if error is None]
    if not where:
        return f"float16 does not train here: {steps[-1].error}"
    return f"float16 trains here: on {' and '.join(where)}."


def _notes(found: Sequence[GPU], steps: Sequence[Step], is_cuda: bool) -> Iterator[str]:
    for gpu in found:
        if not is_served(gpu):
            yield f"{gpu.name}: its compute capability is {gpu.version}, and MXNet 1.9.1's CUDA " \
                  "builds support 5.0 to 8.x; float16 runs on the CPU. Kernels for it: " \
                  f"{load.commands(load.arch_for(gpu.capability))}"
        elif not is_cuda:
            yield f"{gpu.name} is not used, because this MXNet is a CPU build: pip uninstall " \
                  f"-y {' '.join(wheel.installed_builds())}; {pip_install('cu112')}"
        elif not gpu.tensor_cores:
            yield f"{gpu.name} has no Tensor Cores: float16 saves memory, not time"
    if is_cuda and not found:
        yield "this MXNet is a CUDA build, and there is no GPU; float16 runs on the CPU"
    trains = any(step.error is None for step in steps)
    for step in steps if trains else steps[:-1]:  # the conclusion has the last one
        if step.error:
            yield f"not on {step.device}: {step.error}"


def _machine(found: Sequence[GPU], why_none: str, features: Set[str]) -> Iterator[Tuple[str, str]]:
    yield "Python", f"{platform.python_version()}, numpy {np.__version__}, gluon_amp {__version__}"
    yield "MXNet", f"{mx.__version__} ({', '.join(wheel.installed_builds())}) with " \
                   f"{', '.join(name for name in _FEATURES if name in features)}"
    yield "cuDNN", _cudnn() if "CUDNN" in features else "not in this build"
    for gpu in found:
        yield "GPU", f"{gpu.name}, {gpu.bytes / 1e9:.1f} GB, compute capability {gpu.version}, " \
                     f"{'' if gpu.tensor_cores else 'no '}Tensor Cores"
        override = os.environ.get(_TF32)
        tf32 = "TF32" in gpu.formats and override != "0"
        if gpu.formats:
            yield "", f"formats: {', '.join(gpu.formats)}; MXNet 1.9.1 uses " \
                      f"float16{' and TF32' if tf32 else ''}"
        if "TF32" in gpu.formats:
            yield "", f"TF32 is {'on' if tf32 else 'off'} for products of float32 arrays: " \
                      f"{_TF32} is {override or 'unset'}"
    if not found:
        yield "GPU", f"none: {why_none}"
    yield from _cuda()
    try:
        variant = library.load()
        instructions = ", ".join(library.VARIANTS[variant]) or "no vector instructions: slow"
        yield "CPU kernels", f"{variant} ({instructions})"
        yield "", str(library.PATH)
    except library.KernelError:
        yield "CPU kernels", "do not load"


def _cudnn() -> str:
    """Returns the version of the cuDNN that MXNet loads: 8.5.0 for 8500."""
    version = getattr(mx.base._LIB, "cudnnGetVersion", None)
    if version is None:
        return "of unknown version"
    version.restype = ctypes.c_size_t
    number = version()
    thousand = 10_000 if number >= 90_000 else 1000  # cuDNN 9 numbers its versions 9MMPP
    return f"{number // thousand}.{number % thousand // 100}.{number % 100}"


def _cuda() -> Iterator[Tuple[str, str]]:
    """Yields the driver, the libraries and the packs that MXNet's CUDA build uses."""
    if load.prepared is None:
        return
    devices, choice = load.prepared.devices, load.prepared.choice
    if devices:
        yield "driver", f"{devices.driver}, for CUDA up to {devices.cuda // 1000}." \
                        f"{devices.cuda % 1000 // 10}"
    yield "CUDA libraries", choice.why
    for name, path in choice.paths.items():
        yield "", f"{name}: {path}"
    for pack in load.prepared.packs:
        yield "GPU kernels", str(pack)
    for problem in load.prepared.problems:
        yield "problem", problem


def _environment() -> Iterator[Tuple[str, str, str]]:
    for name, default, meaning in _VARIABLES:
        yield name, os.environ.get(name) or f"unset ({default})", meaning
    yield "OPENBLAS_CORETYPE", os.environ.get("OPENBLAS_CORETYPE") or "unset", _openblas()


def _openblas() -> str:
    """Returns which kernels OpenBLAS uses, and a remedy where it does not recognize the CPU."""
    path = Path(mx.__file__).with_name("libopenblas.so.0")
    if not path.exists():
        return ""
    openblas = ctypes.CDLL(str(path))
    openblas.openblas_get_corename.restype = ctypes.c_char_p
    core = openblas.openblas_get_corename().decode()
    text = f"MXNet's float32 matrix products use OpenBLAS's kernels for {core}"
    flags = Path("/proc/cpuinfo").read_text()
    best = "SkylakeX" if "avx512f" in flags else "Haswell" if "avx2" in flags else ""
    return f"{text}, which are slow here: set {best}" if best and core == "Prescott" else text


# ---- a network

def _network(model: str, image_shape: Tuple[int, ...]) -> Iterator[str]:
    """Yields the layers of a network that do not fit Tensor Cores."""
    layers = layers_of(load_network(model), (1, *image_shape))
    off = [layer for layer in layers if not layer.fits]
    yield ""
    if not off:
        yield f"{model}: {counted(len(layers), 'layer')}, which fit Tensor Cores."
        return
    yield f"{model}: {len(off)} of {counted(len(layers), 'layer')} are slower, or off Tensor " \
          "Cores, because channels are not multiples of 8:"
    yield from aligned((f"  {layer.name}", f"{layer.outputs} from {layer.inputs}",
                        f"{layer.share:.1%} of the work") for layer in off[:_MOST_LAYERS])
    if len(off) > _MOST_LAYERS:
        yield f"  and {len(off) - _MOST_LAYERS} more"
    if any(layer.outputs == layer.inputs == 1 for layer in off):
        yield "1 from 1: depthwise convolutions, without a matrix product; float16 halves their " \
              "memory traffic."
