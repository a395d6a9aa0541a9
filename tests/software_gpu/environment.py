"""The environment of a process with MXNet's CUDA build on a software GPU."""
import os
from pathlib import Path

from gluon_amp.cuda import libraries, wheel

from .stubs import build

CUDNN = {8: 8906, 9: 91900}  # versions; that of 8 is a machine with CUDA 11, the other with CUDA 12


def environment(log=None, devices=1, capability=70, gigabytes=16, compute=False, cudnn=8):
    """The environment variables of a new process.

    Args:
        log: the file of recorded calls.
        devices: the number of GPUs.
        capability: their compute capability: 70 for 7.0; or one for each, the last for the rest.
        gigabytes: the memory of each.
        compute: whether to execute the calls on the host.
        cudnn: the major version of cuDNN: 8, or 9, which gluon_amp/cuda/forward adapts.
    """
    capabilities = [capability] if isinstance(capability, int) else capability
    folder = build(wheel.cache(), cudnn)
    variables = {
        **os.environ, libraries.FOLDERS: str(folder), "RECORDING_GPU_COUNT": str(devices),
        "RECORDING_GPU_SM": ",".join(map(str, capabilities)),
        "RECORDING_GPU_GB": str(gigabytes), "RECORDING_GPU_LOG": str(log or ""),
        "RECORDING_GPU_COMPUTES": str(int(compute)), "RECORDING_GPU_CACHE": str(wheel.cache()),
        "RECORDING_GPU_CUDNN": str(CUDNN[cudnn])}
    for name, places in (("PYTHONPATH", [wheel.cuda_mxnet(), Path(__file__).parents[1]]),
                         ("LD_LIBRARY_PATH", [folder])):
        variables[name] = os.pathsep.join(
            [*map(str, places), *filter(None, [os.environ.get(name)])])
    return variables
