"""The GPUs that CUDA would show to this process, without initializing CUDA.

A process that has initialized CUDA cannot use it after `fork`, so these are NVML's answers. NVML
does not read CUDA_VISIBLE_DEVICES.
"""
import ctypes
import os
import re
from typing import Any, List, NamedTuple, Optional

_LIBRARY = "libnvidia-ml.so.1"


class GPU(NamedTuple):
    """A GPU; `capability` is 90 for 9.0. NVML's have a `uuid`, which starts with "GPU-"; the CUDA
    driver's have the `bytes` of their memory."""
    name: str
    capability: int
    uuid: str = ""
    bytes: int = 0

    @property
    def version(self) -> str:
        """The capability as in NVIDIA's tables, such as 9.0."""
        return f"{self.capability // 10}.{self.capability % 10}"

    @property
    def tensor_cores(self) -> bool:
        """Whether it has Tensor Cores: from 7.0 on, except small GPUs of 7.5, listed by name."""
        small = r"GTX 16|MX[45]50|\bT([456]|10|12|20)\d0\b"
        return self.capability >= 70 and not (self.capability == 75
                                              and re.search(small, self.name))

    @property
    def formats(self) -> List[str]:
        """The formats of a `Policy` that its Tensor Cores multiply."""
        since = (("float16", 70), ("TF32", 80), ("bfloat16", 80))
        return [name for name, first in since if self.tensor_cores and self.capability >= first]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.version})"


class Devices(NamedTuple):
    """What this process can use.

    Attributes:
        gpus: the visible `GPU`s. If an index in CUDA_VISIBLE_DEVICES may mean one of several
            models, because CUDA numbers GPUs by speed and NVML by their places, all of them.
        driver: the driver's version, such as "580.65.06".
        cuda: the newest CUDA version that the driver supports: 13000 for 13.0.
    """
    gpus: List[GPU]
    driver: str
    cuda: int


class _NVML:
    def __init__(self) -> None:
        self.library = ctypes.CDLL(_LIBRARY)
        self.call("nvmlInit_v2")

    def call(self, function: str, *arguments: Any) -> None:
        status = getattr(self.library, function)(*arguments)
        if status:
            raise OSError(f"the NVIDIA driver's {function} fails with error {status}")

    def text(self, function: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(256)
        self.call(function, *arguments, buffer, 256)
        return buffer.value.decode(errors="replace")

    def number(self, function: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self.call(function, *arguments, ctypes.byref(value))
        return value.value

    def gpu(self, handle: ctypes.c_void_p) -> GPU:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major),
                  ctypes.byref(minor))
        return GPU(self.text("nvmlDeviceGetName", handle), 10 * major.value + minor.value,
                   self.text("nvmlDeviceGetUUID", handle))

    def all(self) -> List[GPU]:
        gpus = []
        for i in range(self.number("nvmlDeviceGetCount_v2")):
            handle = ctypes.c_void_p()
            self.call("nvmlDeviceGetHandleByIndex_v2", i, ctypes.byref(handle))
            gpus.append(self.gpu(handle))
        return gpus

    def of_instance(self, uuid: str) -> Optional[GPU]:
        """Returns the GPU of a MIG instance, or None if there is no such instance."""
        instance, handle = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(instance))
            self.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", instance,
                      ctypes.byref(handle))
            return self.gpu(handle)
        except OSError:
            return None


def visible() -> Devices:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, and their driver.

    Raises:
        OSError: NVML is missing or fails.
    """
    nvml = _NVML()
    try:
        gpus = nvml.all()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if chosen is not None:
            gpus = _chosen(nvml, gpus, chosen)
        return Devices(gpus, nvml.text("nvmlSystemGetDriverVersion"),
                       nvml.number("nvmlSystemGetCudaDriverVersion_v2"))
    finally:
        nvml.library.nvmlShutdown()


def _chosen(nvml: _NVML, gpus: List[GPU], names: str) -> List[GPU]:
    """Returns the named GPUs up to the first invalid name, as CUDA does."""
    selected: List[GPU] = []
    for name in (part.strip() for part in names.split(",")):
        if name.startswith("MIG-GPU-"):  # MIG-GPU-<uuid>/<instance>/<instance>
            name = name[len("MIG-"):].partition("/")[0]
        if name.startswith("MIG-"):
            of_instance = nvml.of_instance(name)
            matches = [of_instance] if of_instance else []
        elif name.startswith("GPU-"):
            matches = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
        elif name.isdecimal() and int(name) < len(gpus):
            if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" \
                    and len({gpu.name for gpu in gpus}) > 1:
                return gpus
            matches = [gpus[int(name)]]
        else:
            matches = []
        if len(matches) != 1:
            break
        selected += [gpu for gpu in matches if gpu not in selected]
    return selected
