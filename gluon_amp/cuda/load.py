"""Prepares the import of MXNet's CUDA build for the visible GPUs.

It loads CUDA libraries, and kernels from packs for GPUs that the wheel has no code for.
`prepare` runs before the import, `check` after it. GPUs that the wheel serves need no pack.
"""
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from . import fatbin, libraries, pack, wheel
from .devices import GPU, Devices, visible
from .kernels import Kernels

_FIRST_OF_PACKS = 90  # the wheel serves 5.0 to 8.9, and nothing serves older GPUs
_CUDA_OF_ABI = {8: 13000}  # the driver that machine code of an ELF ABI version needs


@dataclass(frozen=True)
class Prepared:
    """What `prepare` found.

    Attributes:
        devices: the visible GPUs and the driver; None if they are unknown.
        why_unknown: the reason.
        choice: the CUDA libraries.
        packs: the packs in use.
        kernels: the registered kernels, if a GPU is not served by the wheel.
        problems: what the user was warned of.
    """
    devices: Optional[Devices]
    why_unknown: str
    choice: libraries.Choice
    packs: Sequence[pack.Pack]
    kernels: Optional[Kernels]
    problems: Sequence[str]


prepared: Optional[Prepared] = None  # of this process; None without MXNet's CUDA build


def prepare(builds: Sequence[str]) -> None:
    """Loads what libmxnet.so of MXNet's CUDA build needs for the visible GPUs.

    Args:
        builds: the installed MXNet distributions.

    Raises:
        ImportError: a pack is damaged or for another wheel, a library does not load, or
            GLUON_AMP_CUDA_LIBRARIES names something else than folders.
    """
    global prepared
    if not any("cu" in build for build in builds):
        return
    devices, why_unknown = None, ""
    try:
        devices = visible()
    except OSError as error:
        why_unknown = str(error)
    library = wheel.library()
    supported = library is not None and wheel.build_id(library) == wheel.BUILD_ID
    choice = libraries.choose(devices) if supported else libraries.cuda_11()
    packs, kernels, problems = _kernels(
        devices, "" if supported else f"{', '.join(builds)}, {library}")
    problems += [choice.problem] if choice.problem else []
    libraries.load(choice)
    prepared = Prepared(devices, why_unknown, choice, packs, kernels, problems)
    if problems:
        warnings.warn("; ".join(problems), RuntimeWarning, stacklevel=2)


def _kernels(devices: Optional[Devices], other_build: str) \
        -> Tuple[List[pack.Pack], Optional[Kernels], List[str]]:
    """Prepares kernels for the GPUs that the wheel does not serve. Returns the packs, what
    registers them, and what is wrong."""
    gpus = devices.gpus if devices else []
    new = [gpu for gpu in gpus if gpu.capability >= _FIRST_OF_PACKS]
    if not new:
        return [], None, []
    if other_build:
        return [], None, [f"this MXNet has no kernels for {new[0]}, and packs of kernels are for "
                          f"{wheel.DISTRIBUTION} 1.9.1 from PyPI only. Installed: {other_build}"]
    if "mxnet" in sys.modules:
        return [], None, [f"mxnet was imported before gluon_amp and has no kernels for {new[0]}: "
                          "import gluon_amp first"]
    packs = _packs(new, devices)
    kept = {wheel.code_for(gpu.capability) for gpu in gpus}
    if packs:  # the driver loads a source file's code when a kernel of it first runs
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    bare = [gpu for gpu in new if not any(one.serves(gpu.capability) for one in packs)]
    return packs, Kernels(packs, sorted(arch for arch in kept if arch), _advice(bare, packs)), \
        _without_pack(bare)


def check() -> None:
    """Checks, after the import of MXNet, that it has registered the kernels of the packs.

    Raises:
        ImportError: it has not, because another library precedes.
    """
    if prepared and prepared.packs and prepared.kernels \
            and not prepared.kernels.registered(replaced=True):
        raise ImportError(f"MXNet does not use the kernels of {prepared.packs[0].path}, because "
                          "libcudart.so.11.0 was loaded before: import gluon_amp first")


def commands(arch: int) -> str:
    """Returns the commands that install a pack."""
    return f"gluon-amp cuda install FILE, or gluon-amp cuda build --arch {arch}"


def arch_for(capability: int) -> int:
    """Returns the architecture to build for GPUs of a capability: that of its major version."""
    return capability // 10 * 10


def _packs(gpus: Sequence[GPU], devices: Optional[Devices]) -> List[pack.Pack]:
    packs: Dict[int, pack.Pack] = {}
    for capability in sorted({gpu.capability for gpu in gpus}):
        try:
            selected = pack.find(capability)
        except (pack.PackError, OSError) as error:
            raise ImportError(f"{error}. Replace it: {commands(arch_for(capability))}") from error
        if selected is not None:
            packs[selected.arch] = selected
            _check(selected, devices)
    return list(packs.values())


def _check(selected: pack.Pack, devices: Optional[Devices]) -> None:
    if selected.manifest["libmxnet"] != pack.LIBMXNET:
        raise ImportError(f"{selected.path} has kernels for another libmxnet.so than that of "
                          f"{wheel.DISTRIBUTION} 1.9.1. Replace it: {commands(selected.arch)}")
    abis = {entry.abi for part in selected.parts[:1] for entry in fatbin.entries(part.fat_binary)
            if selected.kind == "cubin"}
    needed = max((_CUDA_OF_ABI.get(abi, 0) for abi in abis), default=0)
    if devices and devices.cuda < needed:
        raise ImportError(f"{selected.path} needs a driver of CUDA {needed // 1000} or newer. "
                          f"Installed: {devices.driver}. Replace it: {commands(selected.arch)}")


def _without_pack(gpus: Sequence[GPU]) -> List[str]:
    if not gpus:
        return []
    names = ", ".join(dict.fromkeys(map(str, gpus)))
    return [f"MXNet 1.9.1 has no kernels for {names}: every operator fails there with \"no kernel "
            f"image is available\". Install them by {commands(arch_for(gpus[0].capability))}"]


def _advice(without_pack: Sequence[GPU], packs: Sequence[pack.Pack]) -> str:
    """Returns what a user can do about a kernel without code."""
    if without_pack:
        return f"Install MXNet's kernels by {commands(arch_for(without_pack[0].capability))}"
    return f"{', '.join(str(one.path) for one in packs)} lacks it: make a pack of all kernels by " \
           f"gluon-amp cuda build --arch {packs[0].arch}"
