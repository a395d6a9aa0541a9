"""CUDA's fat binaries: code for several architectures behind one header.

The header has 16 bytes: a magic number, the version, its size, and the size of all entries. Each
entry has a header of its own and an ELF file (machine code, a *cubin*) or PTX.
"""
import re
import struct
from typing import Iterable, List, NamedTuple, Optional

_HEADER = struct.Struct("<IHHQ")
_MAGIC, _VERSION = 0xBA55ED50, 1
# kind, version, size of this header, size of the data; compressed size; unknown; minor and major
# version of the code; architecture; two unknown; flags; unknown; uncompressed size
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
KINDS = {"ptx": 1, "cubin": 2}
_PLAIN = 0x11  # 64 bits, Linux
_LZ4 = 0x2000


class Entry(NamedTuple):
    """Code for one architecture. `data` includes the header of the entry."""
    kind: str
    arch: int
    data: bytes

    @property
    def is_compressed(self) -> bool:
        return bool(_ENTRY.unpack_from(self.data)[11] & _LZ4)

    @property
    def code(self) -> bytes:
        """The ELF file or the PTX; as LZ4 block if `is_compressed`."""
        size, data, packed = (_ENTRY.unpack_from(self.data)[i] for i in (2, 3, 4))
        return self.data[size:size + (packed or data)]

    @property
    def size(self) -> int:
        """The number of bytes of the code, decompressed."""
        _, _, _, data, packed, *_, size = _ENTRY.unpack_from(self.data)
        return size if packed else data

    @property
    def abi(self) -> int:
        """The ABI version of the ELF file; of PTX, the minor version."""
        return int(_ENTRY.unpack_from(self.data)[6])

    def relabelled(self, arch: int) -> "Entry":
        """Returns the same code under another architecture."""
        fields = list(_ENTRY.unpack_from(self.data))
        fields[8] = arch
        return Entry(self.kind, arch, _ENTRY.pack(*fields) + self.data[_ENTRY.size:])


def entry(code: bytes, arch: int, kind: str = "cubin", packed: Optional[bytes] = None) -> Entry:
    """Returns an entry.

    Args:
        code: an ELF file, or PTX with a final 0 byte.
        arch: its architecture: 90 for capability 9.0.
        kind: "cubin" or "ptx".
        packed: the same as LZ4 block, to store instead.
    """
    if kind == "cubin":
        major, minor = 1, code[8]  # the ELF file's ABI version
    else:
        match = re.search(rb"\.version (\d+)\.(\d+)", code)
        if match is None:
            raise ValueError("the PTX has no .version")
        major, minor = map(int, match.groups())
    stored = code if packed is None else packed
    padded = stored + bytes(-len(stored) % 8)
    header = _ENTRY.pack(
        KINDS[kind], 0x101, _ENTRY.size, len(padded), 0 if packed is None else len(packed), 0,
        minor, major, arch, 0, 0, _PLAIN if packed is None else _PLAIN | _LZ4, 0,
        0 if packed is None else len(code))
    return Entry(kind, arch, header + padded)


def fat_binary(entries: Iterable[Entry]) -> bytes:
    """Returns a fat binary of these entries."""
    body = b"".join(each.data for each in entries)
    return _HEADER.pack(_MAGIC, _VERSION, _HEADER.size, len(body)) + body


def entries(data: bytes, offset: int = 0) -> List[Entry]:
    """Returns the entries of a fat binary at an offset of `data`, which may be an mmap.

    Raises:
        ValueError: it is no fat binary, or it is incomplete.
    """
    try:
        magic, version, start, size = _HEADER.unpack_from(data, offset)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError("it is no fat binary")
        at, end = offset + start, offset + start + size
        names = {number: name for name, number in KINDS.items()}
        parsed = []
        while at < end:
            kind, _, header, length, *_, arch = _ENTRY.unpack_from(data, at)[:9]
            stop = at + header + length
            if kind not in names or header != _ENTRY.size or stop > end or stop > len(data):
                raise ValueError("an entry of the fat binary is invalid")
            parsed.append(Entry(names[kind], arch, data[at:stop]))
            at = stop
        return parsed
    except struct.error as error:
        raise ValueError("the fat binary is incomplete") from error
