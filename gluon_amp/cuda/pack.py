"""A pack: kernels of MXNet's CUDA build for an architecture that its wheel has no code for.

A file has a magic number, the format's version and the length of a manifest (a JSON object), the
manifest, and then for each part, which is one source file of MXNet, a fat binary and the names of
its kernels. Fat binaries begin at multiples of 16 bytes, so that a mapped file serves in place.
"""
import hashlib
import json
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Union

from .. import files
from ..checks import counted
from ..version import __version__
from . import fatbin
from .wheel import cache

MAGIC, FORMAT = b"AMPCUDA\n", 1
MXNET = "mxnet-cu112 1.9.1"
LIBMXNET = "0698ea1e5a9c871c174b1106ce8415c92acc75b651ebf0fe1853948e3984aaed"  # its SHA-256
_HEAD = struct.Struct("<8sII")
_ALIGN = 16
# What the manifest of this format has, and of each part.
_MANIFEST = {"format": int, "arch": str, "kind": str, "versions": dict, "libmxnet": str,
             "licences": list, "parts": list}
_PART = {"source": str, "index": int, "offset": int, "size": int, "sha256": str, "names": dict}
_NAMES = ("offset", "size", "count")


class PackError(ValueError):
    """A file is no pack, or not one for this use. The message names the file."""


@dataclass(frozen=True)
class Code:
    """The code of a part, to write.

    Attributes:
        source: MXNet's source file, such as "src/operator/tensor/dot.cu".
        index: its fat binary's position in the wheel's link order.
        fat_binary: `fatbin.fat_binary(...)`, or a file with it.
        kernels: the mangled names of its kernels.
    """
    source: str
    index: int
    fat_binary: Union[bytes, Path]
    kernels: Sequence[str]


@dataclass(frozen=True)
class Part:
    """A part of an open pack."""
    source: str
    index: int
    sha256: str
    fat_binary: memoryview
    names: memoryview  # each ends with a 0 byte

    def kernels(self) -> List[str]:
        """Returns the mangled names of its kernels."""
        return bytes(self.names).decode().split("\0")[:-1]


class Pack:
    """An open pack, whose file is mapped.

    Attributes:
        path: the file.
        manifest: a dict, as in the file.
        arch: the architecture, such as 90.
        kind: "cubin", machine code, or "ptx", which the driver compiles.
        parts: the `Part`s.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any], parts: List[Part]) -> None:
        self.path, self.manifest, self.parts = path, manifest, parts
        self.arch, self.kind = int(manifest["arch"]), str(manifest["kind"])

    def serves(self, capability: int) -> bool:
        """Whether its code runs on GPUs of a capability, such as 90."""
        return runs_on(self.arch, self.kind, capability)

    def __str__(self) -> str:
        kernels = len({name for part in self.parts for name in part.kernels()})
        code = "PTX" if self.kind == "ptx" else "machine code"
        return f"{self.path}: {counted(kernels, 'kernel')}, {code} for compute capability " \
               f"{self.arch // 10}.{self.arch % 10}"

    def verify(self) -> None:
        """Compares the content of all parts with their check sums.

        Raises:
            PackError: one differs.
        """
        for part in self.parts:
            if _digest(part.fat_binary, part.names) != part.sha256:
                raise PackError(f"{self.path} is damaged: the check sum of {part.source} differs")


def runs_on(arch: int, kind: str, capability: int) -> bool:
    """Whether code for an architecture runs on GPUs of a capability: machine code within the major
    version, PTX on all later ones."""
    return arch <= capability and (kind == "ptx" or arch // 10 == capability // 10)


def write(path: Union[str, Path], arch: int, parts: Iterable[Code], *, libmxnet: str,
          compiler: str, licences: Sequence[str], kind: str = "cubin") -> None:
    """Writes a pack atomically; its folder must exist.

    Args:
        path: the file.
        arch: the architecture: 90 for capability 9.0.
        parts: what it holds; each is needed only while it is written.
        libmxnet: the SHA-256 of the wheel's libmxnet.so.
        compiler: its name and version.
        licences: those of the code that is compiled in.
        kind: "cubin" or "ptx".
    """
    manifest = {"format": FORMAT, "arch": str(arch), "kind": kind,
                "versions": {"compiler": compiler, "mxnet": MXNET, "gluon_amp": __version__},
                "libmxnet": libmxnet, "licences": list(licences)}
    files.replace_file(str(path), lambda beside: _write(beside, manifest, list(parts)))


def _write(path: str, manifest: Mapping[str, Any], parts: Sequence[Code]) -> None:
    listed: List[Dict[str, Any]] = []
    at = 0
    for part in parts:  # offsets are relative to the end of the manifest
        code, names = _content(part)
        start, size = at, len(code)
        at += size + len(names)
        listed.append({"source": part.source, "index": part.index, "offset": start, "size": size,
                       "sha256": _digest(code, names),
                       "names": {"offset": start + size, "size": len(names),
                                 "count": len(part.kernels)}})
        at += -at % _ALIGN
    text = json.dumps({**manifest, "parts": listed}, indent=1).encode()
    with open(path, "wb") as file:
        file.write(_HEAD.pack(MAGIC, FORMAT, len(text)) + text)
        for part in parts:
            file.write(bytes(-file.tell() % _ALIGN))
            for content in _content(part):
                file.write(content)


def _content(part: Code) -> List[bytes]:
    code = part.fat_binary if isinstance(part.fat_binary, bytes) else part.fat_binary.read_bytes()
    return [code, "".join(f"{name}\0" for name in sorted(part.kernels)).encode()]


def _digest(*contents: Any) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def read(path: Union[str, Path]) -> Pack:
    """Maps a pack and checks its structure; `Pack.verify` reads all of it.

    Raises:
        PackError: it is no pack, incomplete, or of another format.
        OSError: it cannot be read.
    """
    path = Path(path)
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < _HEAD.size:
            raise PackError(f"{path} is not a pack of MXNet's kernels, or empty")
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    magic, version, length = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise PackError(f"{path} is not a pack of MXNet's kernels")
    if version != FORMAT:
        raise PackError(f"{path} has format {version}; this gluon_amp reads format {FORMAT}")
    body = _HEAD.size + length
    if body > len(data):
        raise PackError(f"{path} is incomplete: it ends within its manifest")
    try:
        manifest = json.loads(bytes(data[_HEAD.size:body]))
        _check_fields(manifest)
    except (ValueError, TypeError, KeyError) as error:
        raise PackError(f"{path} is damaged: its manifest is invalid ({error})") from error
    content = data[body + -body % _ALIGN:]
    needed = max((each["names"]["offset"] + each["names"]["size"] for each in manifest["parts"]),
                 default=0)
    if needed != len(content):
        raise PackError(f"{path} is {'incomplete' if needed > len(content) else 'damaged'}: its "
                        f"parts have {needed} bytes. Received: {len(content)}")
    return Pack(path, manifest, [_part(path, manifest, each, content)
                                 for each in manifest["parts"]])


def _check_fields(manifest: Any) -> None:
    for of, fields in [(manifest, _MANIFEST), *((part, _PART) for part in manifest["parts"])]:
        for name, kind in fields.items():
            if not isinstance(of[name], kind):
                raise TypeError(f"{name} is {of[name]!r}")
    int(manifest["arch"])
    if manifest["kind"] not in fatbin.KINDS:
        raise ValueError(f"kind is {manifest['kind']!r}")
    for part in manifest["parts"]:
        numbers = [part["index"], part["offset"], part["size"],
                   *(part["names"][name] for name in _NAMES)]
        if any(not isinstance(number, int) or number < 0 for number in numbers):
            raise ValueError(f"the numbers of {part['source']} are {numbers}")


def _part(path: Path, manifest: Mapping[str, Any], listed: Mapping[str, Any],
          content: memoryview) -> Part:
    code = content[listed["offset"]:listed["offset"] + listed["size"]]
    at, size, count = (listed["names"][name] for name in _NAMES)
    names = content[at:at + size]
    kernels = bytes(names)
    if listed["offset"] % _ALIGN or kernels.count(b"\0") != count \
            or (kernels and not kernels.endswith(b"\0")):
        raise PackError(f"{path} is damaged: {listed['source']} is invalid")
    try:
        codes = {(entry.kind, str(entry.arch)) for entry in fatbin.entries(code)}
    except ValueError as error:
        raise PackError(f"{path} is damaged: {listed['source']}: {error}") from error
    if codes != {(manifest["kind"], manifest["arch"])}:
        raise PackError(f"{path} is damaged: {listed['source']} has code for {sorted(codes)}")
    return Part(listed["source"], listed["index"], listed["sha256"], code, names)


def place(arch: int, kind: str = "cubin") -> Path:
    """Returns the file of the installed pack for an architecture."""
    return cache() / "kernels" / f"{arch}{'' if kind == 'cubin' else f'-{kind}'}.pack"


def installed(arch: int, kind: str = "cubin") -> Optional[Pack]:
    """Returns the installed pack for an architecture; None if there is none.

    Raises:
        PackError: the file is no pack for it.
        OSError: it cannot be read.
    """
    try:
        kept = read(place(arch, kind))
    except FileNotFoundError:
        return None
    if (kept.arch, kept.kind) != (arch, kind):
        raise PackError(f"{kept.path} has code for architecture {kept.arch} ({kept.kind}), not "
                        f"{arch} ({kind})")
    return kept


def find(capability: int) -> Optional[Pack]:
    """Returns the installed pack that serves GPUs of a capability best; None if there is none.

    Machine code precedes PTX, which the driver compiles at the first use.
    """
    for kind in ("cubin", "ptx"):
        suffix = place(0, kind).name[1:]
        names = (path.name[:-len(suffix)] for path in place(0).parent.glob(f"*{suffix}"))
        for arch in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
            if runs_on(arch, kind, capability):
                kept = installed(arch, kind)
                if kept is not None:
                    return kept
    return None
