"""The kernels of the wheel mxnet-cu112, and the comparison with them."""
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Set, Tuple

from ..files import sha256
from . import elf, pack, wheel


def libmxnet() -> Path:
    """Returns libmxnet.so of mxnet-cu112 1.9.1: of the installed package, else of the wheel."""
    library = wheel.library()
    if library is None or wheel.build_id(library) != wheel.BUILD_ID:
        library = wheel.cuda_mxnet() / "mxnet" / "libmxnet.so"
    digest = sha256(library)
    if digest != pack.LIBMXNET:
        raise ValueError(f"{library} must be of {pack.MXNET}, SHA-256 {pack.LIBMXNET}. Received: "
                         f"{digest}")
    return library


@dataclass(frozen=True)
class Source:
    """A CUDA file of MXNet.

    Attributes:
        name: its path in the tree.
        index: its position in the order of linking.
        kernels: the kernels that the wheel has of it, by name.
        first: the names of those that no earlier file has.
    """
    name: str
    index: int
    kernels: Dict[str, elf.Kernel]
    first: List[str]

    @property
    def limits(self) -> Dict[str, int]:
        """The most registers of kernels that another compiler could exceed.

        MXNet chose the size of their blocks. With one more register, such a block may not start.
        """
        return {name: kernel.most_registers for name, kernel in self.kernels.items()
                if kernel.registers > kernel.most_registers - 16 and kernel.most_registers < 255}

    @property
    def megabytes(self) -> int:
        """An upper bound of the memory that its compilation takes, from measurements."""
        return 800 + len(self.kernels) * 6 // 10


def read(library: Path, names: Sequence[str]) -> List[Source]:
    """Returns MXNet's CUDA files with the kernels that a wheel has of them.

    Args:
        library: the wheel's libmxnet.so. It has a fat binary for each file, and one without code.
        names: the files, in the order of linking.
    """
    sources: List[Source] = []
    seen: Set[str] = set()
    for index, entries in enumerate(elf.fat_binaries(library)):
        newest = max((entry for entry in entries if entry.kind == "cubin"),
                     key=lambda entry: entry.arch, default=None)
        kernels = elf.kernels(elf.unpack(newest), f"code {index} of {library}") if newest else {}
        if not kernels:
            continue
        if index >= len(names):
            raise ValueError(f"{library} has code of more files than the sources: {len(names)}")
        first = [name for name in kernels if name not in seen]
        seen.update(first)
        sources.append(Source(names[index], index, kernels, first))
    return sources


class Differs(ValueError):
    """A kernel that differs from the wheel's. Its host code could not launch it."""


def compare(source: Source, ours: Mapping[str, Tuple[elf.Parameter, ...]], wanted: Sequence[str],
            what: str) -> None:
    """Compares kernels with the wheel's: their names, and their parameters' offsets and sizes."""
    of_wheel = {name: source.kernels[name].parameters for name in wanted}
    for names, problem in (
            (sorted(of_wheel.keys() - ours.keys()), "lacks kernels of the wheel"),
            (sorted(ours.keys() - of_wheel.keys()), "has kernels that the wheel lacks"),
            (sorted(name for name in of_wheel.keys() & ours.keys()
                    if of_wheel[name] != ours[name]), "has kernels with other parameters")):
        if names:
            each = names[0]
            detail = "" if each not in ours or each not in of_wheel else \
                f" (wheel: {_layout(of_wheel[each])}; here: {_layout(ours[each])})"
            raise Differs(f"{what} of {source.name} {problem}: {len(names)}, such as {each}"
                          f"{detail}")


def _layout(parameters: Sequence[elf.Parameter]) -> str:
    return ", ".join(f"{each.size} bytes at {each.offset}" for each in parameters) or "none"
