"""Reads ELF files of CUDA: the kernels of a cubin, and the fat binaries of a library."""
import mmap
import struct
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Tuple, Union, cast

from ..checks import pip_install
from .fatbin import Entry, entries

Buffer = Union[bytes, mmap.mmap]
# Attributes of a kernel in .nv.info sections, and their format with a size and a value.
_PARAMETER, _REGISTERS, _SIZED = 0x17, 0x2f, 4


class Section(NamedTuple):
    name: str
    type: int
    address: int
    offset: int
    size: int
    link: int


class Parameter(NamedTuple):
    ordinal: int
    offset: int
    size: int


class Kernel(NamedTuple):
    """A kernel's parameters in order, and the number of registers that a thread takes."""
    parameters: Tuple[Parameter, ...]
    registers: int

    @property
    def most_registers(self) -> int:
        """The most registers that a thread may take in blocks as large as this kernel permits.

        Each of the four schedulers of a multiprocessor has 16,384 registers, and allocates them to
        warps of 32 threads, 8 for each thread at a time.
        """
        each = max(-(-self.registers // 8) * 8, 1)
        warps = min(16384 // (32 * each), 8)  # a block has at most 1,024 threads
        return min(16384 // (32 * warps) // 8 * 8, 255)


def sections(data: Buffer, what: str = "file") -> List[Section]:
    """Returns the sections of a 64-bit ELF file; `what` names it in errors."""
    try:
        if data[:5] != b"\x7fELF\x02":
            raise ValueError(f"{what} is not a 64-bit ELF file")
        start, = struct.unpack_from("<Q", data, 0x28)
        size, count, names = struct.unpack_from("<HHH", data, 0x3a)
        if start + size * count > len(data):
            raise ValueError(f"{what} is truncated: its {count} section headers start at {start}, "
                             f"and it has {len(data)} bytes")
        headers = [struct.unpack_from("<IIQQQQI", data, start + size * i) for i in range(count)]
        strings = headers[names][4]
        return [Section(text(data, strings + name), kind, address, offset, length, link)
                for name, kind, _, address, offset, length, link in headers]
    except (struct.error, IndexError) as error:
        raise ValueError(f"{what} is truncated or damaged: {error}") from None


def text(data: Buffer, start: int) -> str:
    """Returns the string that ends with a zero byte."""
    return data[start:data.find(b"\0", start)].decode()


def symbols(data: Buffer, all_sections: List[Section]) -> List[str]:
    """Returns the name of each symbol, in order."""
    table = next(section for section in all_sections if section.type == 2)
    strings = all_sections[table.link].offset
    return [text(data, strings + struct.unpack_from("<I", data, at)[0])
            for at in range(table.offset, table.offset + table.size, 24)]


def _attributes(data: Buffer, section: Section) -> Iterator[Tuple[int, int]]:
    """Yields each sized attribute of an .nv.info section, and where its value starts."""
    at, end = section.offset, section.offset + section.size
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        if form == _SIZED:
            yield attribute, at + 4
        at += 4 + (size if form == _SIZED else 0)


def kernels(data: Buffer, what: str = "cubin") -> Dict[str, Kernel]:
    """Returns the kernels of a cubin by their mangled names."""
    all_sections = sections(data, what)
    names = symbols(data, all_sections)
    parameters: Dict[str, List[Parameter]] = {}
    registers: Dict[str, int] = {}
    for section in all_sections:
        if section.name == ".nv.info":
            for attribute, at in _attributes(data, section):
                if attribute == _REGISTERS:
                    symbol, count = struct.unpack_from("<II", data, at)
                    registers[names[symbol]] = count
        elif section.name.startswith(".nv.info."):
            parameters[section.name[9:]] = of_kernel = []
            for attribute, at in _attributes(data, section):
                if attribute == _PARAMETER:
                    _, ordinal, offset, bits = struct.unpack_from("<IHHI", data, at)
                    of_kernel.append(Parameter(ordinal, offset, bits >> 18))
    entries = {section.name[6:] for section in all_sections if section.name.startswith(".text.")}
    return {name: Kernel(tuple(sorted(parameters[name])), registers.get(name, 0))
            for name in parameters if name in entries}


def unpack(entry: Entry) -> bytes:
    """Returns the code of an entry of a fat binary, decompressed."""
    if not entry.is_compressed:
        return entry.code
    try:
        import lz4.block
    except ImportError:
        raise ImportError("reading the code in MXNet's wheel needs the package lz4: "
                          f"{pip_install('cuda-build')}") from None
    return lz4.block.decompress(entry.code, uncompressed_size=entry.size)


def fat_binaries(library: Path) -> Iterator[List[Entry]]:
    """Yields the entries of each fat binary of a library, in the order of registration."""
    with _mapped(library) as data:
        by_name = _code_sections(data, library)
        code, registered = by_name[".nv_fatbin"], by_name[".nvFatBinSegment"]
        targets = _relocations(data, by_name[".rela.dyn"], registered)
        for address in range(registered.address, registered.address + registered.size, 24):
            yield entries(cast(bytes, data), targets[address + 8] - code.address + code.offset)


def host_part(library: Path) -> Tuple[bytes, bytes]:
    """Returns what precedes and what follows the machine code for GPUs in a library."""
    with _mapped(library) as data:
        code = _code_sections(data, library)[".nv_fatbin"]
        return data[:code.offset], data[code.offset + code.size:]


def _mapped(library: Path) -> mmap.mmap:
    with open(library, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _code_sections(data: mmap.mmap, library: Path) -> Dict[str, Section]:
    by_name = {section.name: section for section in sections(data, str(library))}
    missing = {".nv_fatbin", ".nvFatBinSegment", ".rela.dyn"} - set(by_name)
    if missing:
        raise ValueError(f"{library} must be libmxnet.so of mxnet-cu112 1.9.1, with code for GPUs. "
                         f"Received: a library without {', '.join(sorted(missing))}")
    return by_name


def _relocations(data: Buffer, table: Section, of: Section) -> Dict[int, int]:
    """Returns the pointers of a section: their addresses, and the addresses that they hold."""
    rows = struct.iter_unpack("<QQq", data[table.offset:table.offset + table.size])
    return {at: to for at, _, to in rows if of.address <= at < of.address + of.size}
