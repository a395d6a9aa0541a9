"""`gluon-amp doctor`: reports what float16 does on this machine.

`examine` inspects the machine, trains one float16 step on each device that MXNet supports, and
computes the costs of a network. `describe` formats its result as text.

Float16 trains here if the step succeeds on at least one device; if not, the reason is the error on
the CPU.
"""
import ctypes
import os
import platform
import re
import textwrap
from ctypes import byref
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import mxnet as mx
import numpy as np

from ..annotations import Context
from ..checks import aligned, counted, in_names, message, pip_install
from ..cpu import library
from ..cuda import load, wheel
from ..cuda.devices import GPU
from ..cuda.libraries import Choice
from ..gluon.convert import convert
from ..policy import POLICIES
from ..training.trainer import Trainer
from ..version import __version__
from .footprint import footprint
from .footprint import load as load_network

_DRIVER = "libcuda.so.1"
# Functions that write a library's version to their argument.
_VERSION_OF = {"libcudart.so.11.0": "cudaRuntimeGetVersion", "libcufft.so.10": "cufftGetVersion",
               "libcusolver.so.11": "cusolverGetVersion", "libcurand.so.10": "curandGetVersion",
               "libnccl.so.2": "ncclGetVersion"}
_TF32 = "NVIDIA_TF32_OVERRIDE"  # NVIDIA's libraries read it
_FEATURES = ("CUDA", "CUDNN", "NCCL", "MKLDNN", "ONEDNN", "OPENMP", "F16C", "CPU_AVX", "CPU_AVX2",
             "INT64_TENSOR_SIZE")
# Name: MXNet's default, and the effect of each value.
_VARIABLES: Dict[str, Tuple[str, Dict[str, str]]] = {
    "MXNET_SAFE_ACCUMULATION": ("0", {
        "0": "float16 sums accumulate in float16: expect worse results",
        "1": "float16 sums accumulate in float32 (gluon_amp sets it)"}),
    "MXNET_CUDNN_AUTOTUNE_DEFAULT": ("1", {
        "0": "cuDNN does not search for its fastest algorithms",
        "1": "cuDNN searches for its fastest algorithms in a limited workspace",
        "2": "cuDNN searches for its fastest algorithms in any workspace"}),
    "MXNET_CUDA_ALLOW_TENSOR_CORE": ("1", {
        "0": "GPUs do not use their Tensor Cores for float16",
        "1": "GPUs use their Tensor Cores for float16"}),
    _TF32: ("on", {
        "0": "float32 products do not use TF32",
        "on": "GPUs from A100 on round the inputs of float32 products to TF32"}),
    "MXNET_FC_TRUE_FP16": ("0", {
        "0": "fully connected layers on GPUs accumulate in float32",
        "1": "fully connected layers on GPUs accumulate in float16: expect worse results"}),
    "OMP_NUM_THREADS": ("half", {"half": "MXNet uses half of the logical CPUs on x86"}),
    "GLUON_AMP_ISA": ("best", {"best": "the fastest CPU kernels that this processor supports"}),
}


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


def version_of_cudnn(number: int) -> str:
    """Returns cuDNN's version as text: 8.5.0 for 8500."""
    thousand = 10_000 if number >= 90_000 else 1000  # cuDNN 9 numbers its versions 9MMPP
    return f"{number // thousand}.{number % thousand // 100}.{number % 100}"


# ---- the examination

def examine(model: Optional[str] = None, batch_size: int = 32,
            image_shape: Tuple[int, ...] = (3, 224, 224)) -> Dict[str, Any]:
    """Returns all facts as JSON-serializable values.

    Args:
        model: a network of MXNet's model zoo, or the file of an exported symbol.
    """
    network = model and {"model": model,
                         **footprint(load_network(model), (batch_size, *image_shape))}
    enabled = {feature.name for feature in mx.runtime.feature_list() if feature.enabled}
    features = [name for name in _FEATURES if name in enabled]
    facts = {
        "trains": False, "reason": None, "devices": [], "notes": [],
        "gluon_amp": __version__, "python": platform.python_version(), "numpy": np.__version__,
        "mxnet": {"version": mx.__version__, "builds": wheel.installed_builds(),
                  "features": features},
        "cudnn": _cudnn() if "CUDNN" in features else None,
        **_gpus(), "cuda": _cuda(), "kernels": _kernels(), "environment": [*_environment()],
        "network": network}
    served = [mx.gpu(i) for i, gpu in enumerate(facts["gpus"]) if gpu["served"]]
    for device in [*(served if "CUDA" in features else []), mx.cpu()]:
        error = _error_of_a_step(device)
        name = "cpu" if device.device_type == "cpu" else str(device)
        facts["devices"].append({"device": name, "error": error})
        facts["trains"] |= error is None
    facts["reason"] = None if facts["trains"] else facts["devices"][-1]["error"]
    facts["notes"] = [*_notes(facts)]
    return facts


def _gpus() -> Dict[str, Any]:
    try:
        devices, why_none = gpus(), None
    except OSError as error:
        devices, why_none = [], str(error)
        if _DRIVER in why_none:
            why_none = f"no NVIDIA driver ({_DRIVER}) is installed"
    return {"gpus": [{"name": gpu.name, "capability": gpu.version, "bytes": gpu.bytes,
                      "served": is_served(gpu), "tensor_cores": gpu.tensor_cores,
                      "formats": gpu.formats, "tf32": _uses_tf32(gpu)} for gpu in devices],
            "why_no_gpus": why_none}


def _uses_tf32(gpu: GPU) -> bool:
    """Whether MXNet's CUDA build computes products of float32 arrays in TF32."""
    return "TF32" in gpu.formats and os.environ.get(_TF32) != "0"


def _cuda() -> Optional[Dict[str, Any]]:
    """Returns the driver, the libraries and the packs that MXNet's CUDA build uses; None without
    that build."""
    prepared = load.prepared
    if prepared is None:
        return None
    devices, choice = prepared.devices, prepared.choice
    return {
        "driver": devices and {"version": devices.driver,
                               "cuda": f"{devices.cuda // 1000}.{devices.cuda % 1000 // 10}"},
        "libraries": [
            {"name": name, "path": str(path), "version": _version(name, choice)}
            for name, path in choice.paths.items()],
        "why": choice.why,
        "packs": [{"path": str(one.path), "arch": one.arch, "kind": one.kind,
                   "kernels": sum(len(part.kernels()) for part in one.parts),
                   "versions": one.manifest["versions"]} for one in prepared.packs],
        "problems": list(prepared.problems)}


def _version(name: str, choice: Choice) -> Optional[str]:
    """Returns the version of a loaded library as it numbers it, or None."""
    try:
        loaded = ctypes.CDLL(str(choice.paths[name]))
        if name == "libcudnn.so.8":
            loaded.cudnnGetVersion.restype = ctypes.c_size_t
            return version_of_cudnn(loaded.cudnnGetVersion())
        numbers = [ctypes.c_int() for _ in range(3)]
        if name == "libcublas.so.11":
            failed = any(loaded.cublasGetProperty(i, byref(n)) for i, n in enumerate(numbers))
            return None if failed else ".".join(str(n.value) for n in numbers)
        if name == "libnvrtc.so.11.2":
            failed = loaded.nvrtcVersion(byref(numbers[0]), byref(numbers[1]))
            return None if failed else f"{numbers[0].value}.{numbers[1].value}"
        return None if getattr(loaded, _VERSION_OF[name])(byref(numbers[0])) \
            else str(numbers[0].value)
    except (OSError, AttributeError):  # it does not load, or lacks the function
        return None


def _cudnn() -> str:
    version = getattr(mx.base._LIB, "cudnnGetVersion", None)  # of a library that MXNet loads
    if version is None:
        return "of unknown version"
    version.restype = ctypes.c_size_t
    return version_of_cudnn(version())


def _kernels() -> Dict[str, Any]:
    try:
        variant = library.load()
    except library.KernelError as error:
        return {"variant": None, "instructions": [], "path": None, "error": str(error)}
    return {"variant": variant, "instructions": list(library.VARIANTS[variant]),
            "path": str(library.PATH), "error": None}


def _environment() -> Iterator[Dict[str, Any]]:
    for name, (default, meanings) in _VARIABLES.items():
        value = os.environ.get(name) or None
        effective = {"true": "1", "false": "0"}.get((value or default).lower(), value or default)
        yield {"name": name, "value": value, "default": default,
               "meaning": meanings.get(effective, "")}
    yield {"name": "OPENBLAS_CORETYPE", "value": os.environ.get("OPENBLAS_CORETYPE") or None,
           "default": "automatic", "meaning": _openblas()}


def _openblas() -> str:
    """Returns which kernels OpenBLAS uses, and a remedy where it does not recognize the CPU."""
    path = Path(mx.__file__).with_name("libopenblas.so.0")
    if not path.exists():
        return ""
    library_of = ctypes.CDLL(str(path))
    library_of.openblas_get_corename.restype = ctypes.c_char_p
    core = library_of.openblas_get_corename().decode()
    best = {"avx512": "SkylakeX", "avx2": "Haswell"}.get(_kernels()["variant"])
    if core != "Prescott" or not best:  # what it falls back to
        return f"MXNet's float32 matrix products use OpenBLAS's kernels for {core}"
    return f"MXNet's float32 matrix products use OpenBLAS's kernels for {core}, which are slow " \
           f"here: set {best}"


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


def _notes(facts: Dict[str, Any]) -> Iterator[str]:
    cuda = "CUDA" in facts["mxnet"]["features"]
    for gpu in facts["gpus"]:
        if not gpu["served"]:
            arch = load.arch_for(int(gpu["capability"].replace(".", "")))
            yield f"{gpu['name']}: its compute capability is {gpu['capability']}, and MXNet " \
                  "1.9.1's CUDA builds support 5.0 to 8.x; float16 runs on the CPU. Kernels for " \
                  f"it: {load.commands(arch)}"
        elif not cuda:
            yield f"{gpu['name']} is not used, because this MXNet is a CPU build: pip uninstall " \
                  f"-y {' '.join(facts['mxnet']['builds'])}; {pip_install('cu112')}"
        elif not gpu["tensor_cores"]:
            yield f"{gpu['name']} has no Tensor Cores: float16 saves memory, not time"
    if cuda and not facts["gpus"]:
        yield "this MXNet is a CUDA build, and there is no GPU; float16 runs on the CPU"
    for device in facts["devices"]:
        if device["error"] not in (None, facts["reason"]):
            yield f"not on {device['device']}: {device['error']}"


# ---- as text

def describe(facts: Dict[str, Any]) -> str:
    """Returns the facts as text, conclusions first."""
    lines = [_conclusion(facts), *facts["notes"], "", *aligned(_machine(facts)), "",
             *aligned((v["name"], v["value"] or f"unset ({v['default']})", v["meaning"])
                      for v in facts["environment"])]
    return "\n".join([*lines, *_network(facts["network"])])


def fit_width(text: str, width: int = 80) -> str:
    """Wraps longer lines, with the rest aligned to the last column."""
    lines: List[str] = []
    for line in text.splitlines():
        columns = [gap.end() for gap in re.finditer(r"  +", line) if gap.end() < width - 20]
        lines += textwrap.wrap(
            line, width, subsequent_indent=" " * (columns[-1] if columns else 2),
            break_long_words=False, break_on_hyphens=False) if len(line) > width else [line]
    return "\n".join(lines)


def _conclusion(facts: Dict[str, Any]) -> str:
    if not facts["trains"]:
        return f"float16 does not train here: {facts['reason']}"
    where = []
    for device in facts["devices"]:
        if device["error"] is None:
            number = re.sub(r"\D", "", device["device"])
            gpu = facts["gpus"][int(number)] if number else None
            where.append(f"{device['device']} ({gpu['name']}, {_tensor_cores(gpu)})" if gpu else
                         f"the CPU ({facts['kernels']['variant']} kernels)")
    return f"float16 trains here: on {' and '.join(where)}."


def _machine(facts: Dict[str, Any]) -> Iterator[Tuple[str, str]]:
    mxnet, kernels = facts["mxnet"], facts["kernels"]
    yield "Python", f"{facts['python']}, numpy {facts['numpy']}, gluon_amp {facts['gluon_amp']}"
    yield "MXNet", f"{mxnet['version']} ({', '.join(mxnet['builds'])}) with " \
                   f"{', '.join(mxnet['features'])}"
    yield "cuDNN", facts["cudnn"] or "not in this build"
    for gpu in facts["gpus"]:
        yield "GPU", f"{gpu['name']}, {gpu['bytes'] / 1e9:.1f} GB, compute capability " \
                     f"{gpu['capability']}, {_tensor_cores(gpu)}"
        if gpu["formats"]:
            yield "", f"formats: {', '.join(gpu['formats'])}; MXNet 1.9.1 uses " \
                      f"float16{' and TF32' if gpu['tf32'] else ''}"
        if "TF32" in gpu["formats"]:
            override = os.environ.get(_TF32)
            set_to = "is unset" if override is None else f"is {override}"
            yield "", f"TF32 is {'on' if gpu['tf32'] else 'off'} for products of float32 arrays: " \
                      f"{_TF32} {set_to}"
    if not facts["gpus"]:
        yield "GPU", f"none: {facts['why_no_gpus']}"
    yield from _cuda_lines(facts["cuda"])
    if kernels["error"]:
        yield "CPU kernels", "do not load"
    else:
        instructions = ", ".join(kernels["instructions"]) or "no vector instructions: slow"
        yield "CPU kernels", f"{kernels['variant']} ({instructions})"
        yield "", kernels["path"]


def _cuda_lines(cuda: Optional[Dict[str, Any]]) -> Iterator[Tuple[str, str]]:
    if cuda is None:
        return
    if cuda["driver"]:
        yield "driver", f"{cuda['driver']['version']}, for CUDA up to {cuda['driver']['cuda']}"
    yield "CUDA libraries", cuda["why"]
    for each in cuda["libraries"]:
        yield "", f"{each['name']}: {each['path']}" + (
            f" ({each['version']})" if each["version"] else "")
    for one in cuda["packs"]:
        code = "PTX" if one["kind"] == "ptx" else "machine code"
        yield "GPU kernels", f"{one['path']}: {one['kernels']:,} kernels, {code} for " \
                             f"{one['arch'] // 10}.{one['arch'] % 10}"
    for problem in cuda["problems"]:
        yield "problem", problem


def _tensor_cores(gpu: Dict[str, Any]) -> str:
    return "Tensor Cores" if gpu["tensor_cores"] else "no Tensor Cores"


def _network(costs: Optional[Dict[str, Any]]) -> Iterator[str]:
    if not costs:
        return
    off = sorted(costs["off_tensor_cores"], key=lambda layer: -layer["share"])
    work = costs["multiply_adds"]
    amount = f"{work / 1e9:.1f} billion" if work >= 1e9 else f"{work / 1e6:.3g} million"
    yield ""
    yield f"{costs['model']}, batches of {'x'.join(map(str, costs['batch']))}: " \
          f"{counted(costs['layers'], 'layer')}, {amount} multiply-adds forward."
    if not costs["layers"]:
        yield "No convolutions and no fully connected layers; others, such as RNN, are not counted."
    elif off:
        yield "Slower, or off Tensor Cores, because sizes are not multiples of 8: " \
              f"{counted(len(off), 'layer')}, {costs['share_off']:.1%} of " \
              "the work."
        yield from aligned([("  layer", "channels", "rows", "share"), *(
            (f"  {layer['name']}", "{} from {}".format(*layer["sizes"]),
             str(layer["rows"] or ""), f"{layer['share']:.1%}") for layer in off[:10])])
        if len(off) > 10:
            yield f"  and {len(off) - 10} more"
        if any(list(layer["sizes"]) == [1, 1] for layer in off):
            yield "Layers with channels \"1 from 1\" are depthwise convolutions: they have no " \
                  "matrix product for Tensor Cores. They are memory-bound, and float16 halves " \
                  "their memory traffic."
    else:
        yield "All of them fit Tensor Cores: their sizes are multiples of 8."
    if costs["rnns"]:
        yield f"Off Tensor Cores on a GPU: {counted(costs['rnns'], 'RNN')}. MXNet runs cuDNN's " \
              "RNNs with default math."
    table = costs["bytes"]
    whole, half = table["float32"]["total"], table["float16"]["total"]
    yield ""
    unit, size = ("MB", 1e6) if whole >= 1e7 else ("kB", 1e3)
    yield f"On a GPU, float16 needs {half / whole:.0%} of float32's memory. In {unit}:"
    yield f"{'':14}" + "".join(f"{kind:>13}" for kind in table["float32"])
    for name, parts in table.items():
        yield f"{name:14}" + "".join(f"{count / size:13.1f}" for count in parts.values())
    only = [name for name, policy in POLICIES.items() if policy.cpu_only]
    yield f"{' and '.join(sorted(only))} run on CPUs only."
    if costs["constants"]:
        names = costs["constants"]
        yield ""
        yield f"Run in float32, because float16 cannot represent a constant{in_names(names)}."
