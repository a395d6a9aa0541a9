"""Chooses and loads the CUDA libraries of libmxnet.so: CUDA 11 with cuDNN 8, or newer ones.

libmxnet.so of mxnet-cu112 loads libraries of CUDA 11 and cuDNN 8 by their names. If newer ones are
chosen, small libraries of these names (forward/) are loaded, whose functions call the newer ones.
"""
import ctypes
import glob
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..checks import pip_install
from .devices import GPU, Devices

FUNCTIONS = Path(__file__).with_name("functions.txt")
# The folders of NVIDIA's wheels, in order of their dependencies.
_WHEELS = ("cuda_runtime", "cublas", "cuda_nvrtc", "curand", "cufft", "cusparse", "cusolver",
           "cudnn", "nccl", "nvtx")
NEEDED = ("libcudart.so.11.0", "libcublas.so.11", "libcusolver.so.11", "libcufft.so.10",
          "libcurand.so.10", "libnvrtc.so.11.2", "libcudnn.so.8", "libnccl.so.2")
# For each version of CUDA, what replaces those; others keep their names.
REPLACED: Dict[int, Dict[str, str]] = {
    11: {},
    12: {"libcublas.so.11": "libcublas.so.12", "libcufft.so.10": "libcufft.so.11",
         "libnvrtc.so.11.2": "libnvrtc.so.12", "libcudnn.so.8": "libcudnn.so.9"},
    13: {"libcublas.so.11": "libcublas.so.13", "libcusolver.so.11": "libcusolver.so.12",
         "libcufft.so.10": "libcufft.so.12", "libnvrtc.so.11.2": "libnvrtc.so.13",
         "libcudnn.so.8": "libcudnn.so.9"}}
_NVTX = "libnvToolsExt.so.1"  # CUDA 13 has none, and libmxnet.so needs none
# The first version with code for a capability. Older ones have code for 5.0 to 8.6, which also runs
# on 8.9.
_SINCE = {90: (11, 8), 100: (12, 8), 103: (12, 9), 120: (12, 8), 121: (12, 9)}
_CUDA_13_FROM = 75  # it has no code for older GPUs
_CUDNN_FOR_9 = 8600  # the first cuDNN 8 for capability 9.0
FOLDERS = "GLUON_AMP_CUDA_LIBRARIES"  # the variable for the only folders to search
INSTALL = {11: pip_install("cu112"), 13: pip_install("cu13")}
_RUNTIME = "libcudart.so.11.0"  # the one library that newer ones do not replace


class Function(NamedTuple):
    """A function that libmxnet.so imports, or only the engine (`engine`) or only the libraries of
    forward/ (`forward`) call; `removed` if cuDNN 9 lacks it."""
    library: str
    name: str
    removed: bool
    engine: bool
    forward: bool

    @property
    def symbol(self) -> str:
        """Its name with the version that libmxnet.so requires."""
        versioned = self.library not in ("libcuda.so.1", "libnccl.so.2")
        return f"{self.name}@{self.library}" if versioned else self.name


def functions() -> List[Function]:
    """Returns the functions of CUDA that libmxnet.so, the engine and forward/ call."""
    rows = [line.split() for line in FUNCTIONS.read_text(encoding="utf-8").splitlines()
            if not line.startswith("#")]
    return [Function(row[0], row[1], "removed" in row[2:], "engine" in row[2:],
                     "forward" in row[2:]) for row in rows]


class Choice(NamedTuple):
    """The chosen libraries.

    Attributes:
        cuda: the version of CUDA: 11, 12 or 13.
        paths: the file that serves each library that libmxnet.so needs; the name alone where the
            system finds it.
        why: why these, for a user.
        problem: what is wrong with them for the visible GPUs, with the remedy; or empty.
    """
    cuda: int
    paths: Mapping[str, Union[str, Path]]
    why: str
    problem: str = ""


def folders() -> List[Path]:
    """Returns the folders that may have CUDA libraries, in order of search: those of NVIDIA's
    wheels, of the environment, and of the system; or those of the variable FOLDERS.

    Raises:
        ImportError: the variable names something else than folders.
    """
    chosen = _chosen_folders()
    if chosen:
        return chosen
    paths = [Path(lib) for root in _wheels() for lib in sorted(glob.glob(f"{root}/*/lib"))]
    listed = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    paths += [Path(part) for part in listed if part]
    paths += [Path(os.environ[name], "lib64") for name in ("CUDA_HOME", "CUDA_PATH")
              if os.environ.get(name)]
    paths.append(Path(sys.prefix, "lib"))
    for listing in sorted(glob.glob("/etc/ld.so.conf.d/*.conf")):
        with suppress(OSError, UnicodeDecodeError):
            paths += [Path(line.strip()) for line in Path(listing).read_text().splitlines()
                      if line.startswith("/")]
    paths += [Path(name) for name in (*sorted(glob.glob("/usr/local/cuda*/lib64"), reverse=True),
                                      "/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu",
                                      "/usr/lib64", "/lib64", "/usr/local/lib", "/usr/lib", "/lib")]
    return list(dict.fromkeys(paths))


def _chosen_folders() -> List[Path]:
    """Returns the folders of the variable FOLDERS; none without it."""
    chosen = [Path(part) for part in os.environ.get(FOLDERS, "").split(os.pathsep) if part]
    for folder in chosen:
        if not folder.is_dir():
            raise ImportError(f"{FOLDERS} must be a folder with CUDA's libraries, or several "
                              f"separated by '{os.pathsep}'. Received: {folder}, which is no "
                              "folder")
    return chosen


def _wheels() -> List[str]:
    try:
        import nvidia  # the namespace package of NVIDIA's wheels
    except ImportError:
        return []
    return list(nvidia.__path__)


def choose(devices: Optional[Devices]) -> Choice:
    """Returns the libraries for the visible GPUs; None if these are unknown.

    CUDA 11 comes first, up to capability 9.0, because MXNet was built for it.
    """
    gpus = devices.gpus if devices else []
    places = folders()
    reasons: List[str] = []
    newest = max(gpus, key=lambda gpu: _SINCE.get(gpu.capability, (0, 0)), default=None)
    order = (13, 12, 11) if newest and newest.capability >= 100 else (11, 13, 12)
    remedy = INSTALL[11 if order[0] == 11 else 13]
    for cuda in order:
        paths, missing = _locate(cuda, places)
        if cuda > 11 and missing == [_RUNTIME] and not _unsuitable(cuda, paths, gpus, devices):
            remedy = "pip install nvidia-cuda-runtime-cu11==11.8.89"
        why_not = f"{', '.join(missing)} not found" if missing \
            else _unsuitable(cuda, paths, gpus, devices)
        if not why_not:
            why = "; ".join([*reasons, f"CUDA {cuda} serves"])
            return Choice(cuda, paths, f"{why} {_names(gpus)}" if gpus else why)
        reasons.append(f"not CUDA {cuda}: {why_not}")
    return Choice(11, _locate(11, places)[0], "; ".join(reasons),
                  f"no CUDA libraries serve {_names(gpus)} ({'; '.join(reasons)}): {remedy}"
                  if gpus else "")


def cuda_11() -> Choice:
    """Returns CUDA 11 for another MXNet than mxnet-cu112 1.9.1."""
    return Choice(11, _locate(11, folders())[0], "this MXNet is not mxnet-cu112 1.9.1")


def _names(gpus: Sequence[GPU]) -> str:
    return ", ".join(dict.fromkeys(map(str, gpus)))


def _locate(cuda: int, places: Sequence[Path]) -> Tuple[Dict[str, Union[str, Path]], List[str]]:
    """Returns the file for each library, and the names of those that are missing."""
    paths: Dict[str, Union[str, Path]] = {}
    missing = []
    for needed in NEEDED:
        name = REPLACED[cuda].get(needed, needed)
        path = next((place / name for place in places if os.path.exists(place / name)), None)
        if path is None:
            missing.append(name)
        paths[needed] = path or name
    return paths, missing


def _unsuitable(cuda: int, paths: Mapping[str, Union[str, Path]], gpus: Sequence[GPU],
                devices: Optional[Devices]) -> str:
    """Returns why complete libraries do not serve these GPUs; empty if they do."""
    if devices and devices.cuda < 1000 * cuda:
        return f"the driver {devices.driver} supports CUDA {devices.cuda // 1000}"
    for gpu in gpus:
        since = _SINCE.get(gpu.capability, (0, 0))
        if since > (0, 0) and _nvrtc_version(paths["libnvrtc.so.11.2"]) < since:
            return "{} needs CUDA {}.{} or newer".format(gpu.name, *since)
        if cuda == 13 and gpu.capability < _CUDA_13_FROM:
            return f"it has no code for {gpu}"
        if cuda == 11 and gpu.capability >= 90 \
                and _cudnn_version(paths["libcudnn.so.8"]) < _CUDNN_FOR_9:
            return f"{gpu.name} needs cuDNN 8.6 or newer, such as {INSTALL[11]}"
    return ""


def _nvrtc_version(path: Union[str, Path]) -> Tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL(str(path)).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _cudnn_version(path: Union[str, Path]) -> int:
    try:
        version = ctypes.CDLL(str(path)).cudnnGetVersion
    except OSError:
        return 0
    version.restype = ctypes.c_size_t
    return int(version())


def load(choice: Choice) -> None:
    """Loads the chosen libraries for libmxnet.so, which is loaded next.

    Raises:
        ImportError: a newer library does not load, or lacks a function.
    """
    if choice.cuda == 11:
        for library in choice.paths.values() if _chosen_folders() else _libraries_of_wheels():
            with suppress(OSError):  # the import of MXNet reports a missing library
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        return
    for needed, path in choice.paths.items():
        if REPLACED[choice.cuda].get(needed, needed) == needed:
            _open(str(path))
        else:
            _forward(needed, path)
    _open(str(_forwarder(_NVTX)))


def _libraries_of_wheels() -> Iterator[Path]:
    for folder in _WHEELS:
        for root in _wheels():
            yield from sorted(Path(root, folder, "lib").glob("lib*.so*"))


def _forwarder(name: str) -> Path:
    return Path(__file__).with_name(f"_{name.partition('.')[0]}.so")


def _open(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ImportError(f"a CUDA library does not load: {error}") from error


def _forward(needed: str, path: Union[str, Path]) -> None:
    library = _open(str(_forwarder(needed)))
    library.gluon_amp_forward_open.restype = ctypes.c_char_p
    library.gluon_amp_forward_missing.restype = ctypes.c_char_p
    error = library.gluon_amp_forward_open(str(path).encode())
    if error:
        raise ImportError(f"a CUDA library does not load: {error.decode()}")
    removed = {function.name for function in functions() if function.removed}
    missing = set(library.gluon_amp_forward_missing().decode().split()) - removed
    if missing:
        raise ImportError(f"{path} lacks functions that MXNet calls: {', '.join(sorted(missing))}")
